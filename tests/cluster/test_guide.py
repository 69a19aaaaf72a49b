"""The README's way into a cluster, walked to the letter: nothing is done beside what the pages show."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster import images
from cluster.api import eventually
from cluster.binaries import build
from cluster.conftest import skipping_what_cannot_run
from cluster.demo import HEADING, SETTINGS
from cluster.guide import INSTALL, README, shown
from cluster.namespaces import check_machine
from cluster.nodes import PROGRAMS

# A worker with torch is built, images are imported, four pods load torch, all on the cores of one machine.
pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
ANSWER_SECONDS = 600.0
END_SECONDS = 60.0


@dataclass(frozen=True)
class Demo:
    """A running `make demo`, whose network is its own: the pages' port 8000 may be in use on this machine."""

    process: subprocess.Popen[bytes]
    log: Path
    models: Path

    def said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def run(self, *lines: str) -> str:
        """Output of a shell in another terminal of the same machine, which begins as the README's second one."""
        script = "\n".join(["set -euo pipefail", f". {SETTINGS}", *lines])
        done = subprocess.run(
            ["nsenter", f"--target={self.process.pid}", "--net", "--", "bash", "-c", script],
            cwd=images.ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    """`make demo` as it waits for Ctrl-C; what it takes minutes to build is built before."""
    folder = tmp_path_factory.mktemp("demo")
    with skipping_what_cannot_run():
        check_machine()
        build(PROGRAMS)
        images.build(torch="cpu")
    models = folder / "models"
    log = folder / "log"
    network = ["unshare", "--net", "--", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*network, "make", "demo"],
            cwd=images.ROOT,
            env=os.environ | {"MODELS": str(models)},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    running = Demo(process, log, models)
    try:
        eventually(
            running.said,
            lambda said: "goes on until Ctrl-C" in said or process.poll() is not None,
            ANSWER_SECONDS,
        )
        yield running
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()


def test_make_demo_runs_what_the_readme_shows_and_a_replica_answers_through_the_service(demo: Demo) -> None:
    said = demo.said()
    start, (serve,), steps = shown(README, HEADING)
    assert start == ["make demo"]
    place = -1
    for command in (serve, *steps):
        assert f"$ {command}\n" in said, said
        place = said.index(f"$ {command}\n", place + 1)
    (answer,) = [json.loads(line) for line in said.splitlines() if line.startswith('{"id"')]
    assert answer["model"] == "tiny"
    assert answer["choices"][0]["message"]["content"]
    assert 1 <= answer["usage"]["completion_tokens"] <= 32  # a random model may sample its stop token


def test_its_pods_would_be_let_into_a_namespace_of_the_standard_restricted(demo: Demo) -> None:
    label = "pod-security.kubernetes.io/enforce=restricted"
    said = demo.run(f"kubectl label namespace default {label} --dry-run=server")
    assert "namespace/default labeled" in said
    assert "Warning" not in said, "a pod there that would be refused"


def test_a_model_in_a_folder_of_the_node_is_served_as_the_page_shows(demo: Demo) -> None:
    ((init, *steps),) = shown(INSTALL, "A folder of the node")
    assert "medha model init models/tiny" in init
    demo.run("PATH=$PWD/.venv/bin:$PATH", f"(cd {demo.models.parent}; {init})", *steps)
    said = demo.run(
        "kubectl label namespace default pod-security.kubernetes.io/enforce=baseline --dry-run=server"
    )
    assert "hostPath volumes" in said  # as the page warns


def test_ctrl_c_ends_everything(demo: Demo) -> None:
    demo.run("kubectl get nodes")
    os.killpg(demo.process.pid, signal.SIGINT)  # as a terminal does
    assert demo.process.wait(END_SECONDS) == -signal.SIGINT  # so make ends once its command has
    assert not SETTINGS.exists()
