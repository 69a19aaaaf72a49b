"""A cluster changes nothing of the machine that it runs on, and leaves nothing, however it ends."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from cluster.binaries import build
from cluster.conftest import hello_image, skipping_what_cannot_run
from cluster.namespaces import Hierarchy, check_machine, hierarchies
from cluster.test_nodes import deployed

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]
TESTS = Path(__file__).resolve().parents[1]
RESTLESS = re.compile(
    "/proc/sys/(fs/(dentry-state|file-nr|inode-.*)|kernel/(ns_last_pid|random/.*|pty/nr|perf_.*)|fs/quota/.*)"
)
"""They count what happens, and change by themselves."""
_GONE_SECONDS = 30.0


@dataclass(frozen=True)
class Host:
    """What a cluster could have changed; no process outlives its cgroup."""

    mounts: list[str]
    links: list[str]
    routes: str
    rules: str
    cgroups: list[str]
    sysctls: dict[str, str]

    def differences(self, other: Host) -> list[str]:
        found = []
        for name, mine in vars(self).items():
            theirs = getattr(other, name)
            if isinstance(mine, dict):
                found += [
                    f"{key}: {mine[key]} -> {theirs.get(key)}" for key in mine if mine[key] != theirs.get(key)
                ]
            elif mine != theirs:
                found.append(f"{name}: {mine} -> {theirs}")
        return found


def host(starter: int) -> Host:
    """The machine as it is now, without the cgroups of clusters that others than `starter` have started."""

    def said(*command: str) -> str:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return Host(
        mounts=sorted(line.split(" ", 2)[2] for line in mounts),
        links=sorted(re.findall(r"^\d+: ([^:]+):", said("ip", "link"), re.MULTILINE)),
        routes=said("ip", "route", "show", "table", "all"),
        rules=re.sub(r"^#.*\n|\[\d+:\d+\]", "", said("iptables-save"), flags=re.MULTILINE),
        cgroups=sorted(str(folder) for hierarchy in hierarchies() for folder in cgroups(hierarchy, starter)),
        sysctls=dict(sysctls()),
    )


def cgroups(hierarchy: Hierarchy, starter: int) -> Iterator[Path]:
    for folder, below, _ in os.walk(hierarchy.mount / hierarchy.own.lstrip("/")):
        below[:] = [name for name in below if not name.startswith("medha-") or f"-{starter}-" in name]
        yield Path(folder)


def sysctls() -> Iterator[tuple[str, str]]:
    for folder, _, files in os.walk("/proc/sys"):
        for path in (Path(folder) / name for name in files):
            if not RESTLESS.fullmatch(str(path)):
                with contextlib.suppress(OSError):  # some can only be written
                    yield str(path), path.read_text(errors="replace")


@contextlib.contextmanager
def a_cluster(shape: str, folder: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """`make cluster` as its own process, ready; yields it and its kubeconfig."""
    with (folder / "log").open("w") as log:
        starter = subprocess.Popen(
            [sys.executable, "-m", "cluster", "--shape", shape, "--image", str(hello_image(folder))],
            env=os.environ | {"PYTHONPATH": str(TESTS), "TMPDIR": str(folder)},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    assert starter.stdout is not None
    try:
        line = starter.stdout.readline().strip()
        assert line.startswith("export KUBECONFIG="), (folder / "log").read_text()
        yield starter, Path(line.removeprefix("export KUBECONFIG="))
    finally:
        starter.kill()
        starter.wait()
        starter.stdout.close()


def inhabit(kubeconfig: Path) -> None:
    """Let two pods run, so that there is everything that a node makes for pods."""
    kubectl = [str(build(["kubectl"])["kubectl"]), "--kubeconfig", str(kubeconfig)]
    subprocess.run([*kubectl, "apply", "-f", "-"], input=deployed("hello", 2), text=True, check=True)
    subprocess.run([*kubectl, "rollout", "status", "deployment/hello", "--timeout=60s"], check=True)


def assert_soon_as(before: Host, starter: int) -> None:
    """Who was killed could not wait for what clears away after it: so we do."""
    deadline = time.monotonic() + _GONE_SECONDS
    while left := before.differences(host(starter)):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("shape", "ended"),
    [
        ("one-node", signal.SIGKILL),
        ("one-node", signal.SIGINT),
        ("two-nodes", signal.SIGKILL),
        ("two-nodes", signal.SIGINT),
    ],
)
def test_the_host_is_as_before_and_only_cgroups_are_there_meanwhile(
    shape: str, ended: signal.Signals, tmp_path: Path
) -> None:
    with skipping_what_cannot_run():
        check_machine()
    before = host(0)
    with a_cluster(shape, tmp_path) as (starter, kubeconfig):
        inhabit(kubeconfig)
        during = host(starter.pid)
        assert any("kubepods" in name for name in during.cgroups)
        assert before.differences(replace(during, cgroups=before.cgroups)) == []
        starter.send_signal(ended)
        code = starter.wait(60)
    assert code == (0 if ended is signal.SIGINT else -ended)
    assert_soon_as(before, starter.pid)
