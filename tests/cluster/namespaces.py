"""Namespaces in which a cluster runs without changing the host; everything in them ends with one process.

A `Sandbox` has its own network, and cgroups whose processes can be frozen; a node's sandbox is nested in the
cluster's. No interface, route or rule is ever created in the host's network: `forward` makes single ports
reachable from the host.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).parent
_PACKAGES = {  # program -> Debian package
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "ip": "iproute2",
    "nsenter": "util-linux",
}
_FREEZE_SECONDS = 10.0


class CannotRun(Exception):
    """This machine cannot run a real node; the message names what is missing and how to fix it."""


def check_machine() -> None:
    """Check that a real node can run here.

    Raises:
        CannotRun: not root, packages are missing, or the kernel's cgroups are of version 2.
    """
    if os.geteuid() != 0:
        raise CannotRun("a real node needs root: namespaces, mounts and cgroups are made")
    missing = sorted({package for program, package in _PACKAGES.items() if shutil.which(program) is None})
    if missing:
        raise CannotRun(
            f"a real node needs {', '.join(missing)}: apt-get install -y --no-install-recommends {' '.join(missing)}"
        )
    if not any("freezer" in hierarchy.controllers for hierarchy in hierarchies()):
        raise CannotRun(
            "a real node needs cgroup v1 with the freezer (v2 alone is not supported by these tests yet)"
        )


@dataclass(frozen=True)
class Hierarchy:
    """A mounted cgroup hierarchy (version 1)."""

    mount: Path
    controllers: tuple[str, ...]
    """Controllers, as in mount options: `memory`, or `name=systemd`."""
    own: str
    """Path of this process's cgroup in the hierarchy."""


def hierarchies() -> list[Hierarchy]:
    """Return every mounted hierarchy of cgroup version 1."""
    own = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own[frozenset(controllers.split(","))] = path
    found = []
    for line in Path("/proc/self/mounts").read_text().splitlines():
        mount, kind, options = line.split()[1:4]
        if kind != "cgroup":
            continue
        for names, path in own.items():
            if names <= set(options.split(",")):
                found.append(Hierarchy(Path(mount), tuple(sorted(names)), path))
    return found


class Cgroup:
    """A group of processes, with a cgroup in every hierarchy."""

    def __init__(self, name: str, parent: Cgroup | None = None) -> None:
        self.folders: dict[tuple[str, ...], Path] = {}
        for hierarchy in hierarchies():
            root = (
                parent.folders[hierarchy.controllers]
                if parent is not None
                else hierarchy.mount / hierarchy.own.lstrip("/")
            )
            folder = root / name
            folder.mkdir()
            if "cpuset" in hierarchy.controllers:  # initially empty, which would admit no process
                for file in ("cpuset.cpus", "cpuset.mems"):
                    (folder / file).write_text((root / file).read_text())
            self.folders[hierarchy.controllers] = folder

    @property
    def joining(self) -> list[str]:
        """Command prefix that runs a program as a member of the group."""
        files = [str(folder / "cgroup.procs") for folder in self.folders.values()]
        script = f'for f in {" ".join(files)}; do echo $$ >"$f"; done; exec "$@"'
        return ["sh", "-c", script, "sh"]

    def set_frozen(self, frozen: bool) -> None:
        """Freeze or thaw every process of the group and its descendants; return once that is done."""
        (folder,) = (path for names, path in self.folders.items() if "freezer" in names)
        state = folder / "freezer.state"
        wanted = "FROZEN" if frozen else "THAWED"
        deadline = time.monotonic() + _FREEZE_SECONDS
        state.write_text(wanted)
        while state.read_text().strip() != wanted:
            assert time.monotonic() < deadline, f"{folder} is still {state.read_text().strip()}"
            time.sleep(0.01)


class Sandbox:
    """A process that holds namespaces and reaps dead processes in them; everything in them ends with it."""

    def __init__(
        self,
        cgroup: Cgroup,
        init: Sequence[str],
        *,
        within: Sandbox | None = None,
        unshare: Sequence[str] = (),
    ) -> None:
        self.cgroup = cgroup
        self.pid: int
        """Host PID of the process that holds the namespaces."""
        nested = ["nsenter", f"--target={within.pid}", "--pid", "--net"] if within is not None else []
        self._holder = subprocess.Popen(
            [
                *["setpriv", "--pdeathsig", "KILL", "--"],
                *cgroup.joining,
                *nested,
                *["unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--cgroup"],
                *[*unshare, "--fork", "--kill-child", "--"],
                *["bash", str(_HERE / "sandbox.sh"), *init],
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._holder.stdout is not None
        with self._holder.stdout as answer:
            said = answer.readline().split()
        if not said:
            raise CannotRun(f"no namespaces could be made (see above): ended with {self._holder.wait()}")
        self.pid = int(said[0])

    def inside(self, *namespaces: str) -> list[str]:
        """Return a command prefix that runs a program in all namespaces, or in those named."""
        every = ("mount", "uts", "ipc", "net", "pid", "cgroup")
        entering = [f"--{name}" for name in namespaces or every]
        dies_with_us = ["setpriv", "--pdeathsig", "KILL", "--"]
        return [*self.cgroup.joining, "nsenter", f"--target={self.pid}", *entering, "--", *dies_with_us]

    def ip(self, *arguments: str) -> None:
        """Run `ip` in this network; it sees the host's PIDs."""
        subprocess.run(["nsenter", f"--target={self.pid}", "--net", "ip", *arguments], check=True)

    def stop(self) -> None:
        self._holder.kill()
        self._holder.wait()


@contextmanager
def cluster_cgroup(leftovers: Sequence[Path]) -> Iterator[Cgroup]:
    """Yield a cgroup for a cluster; afterwards it, its processes and the folders `leftovers` are removed.

    They are removed even if this process is killed.
    """
    cgroup = Cgroup(f"medha-{os.getpid()}-{secrets.token_hex(3)}")
    janitor = subprocess.Popen(
        [
            *[sys.executable, "-I", str(_HERE / "janitor.py")],
            *(str(folder) for folder in cgroup.folders.values()),
            "--",
            *(str(folder) for folder in leftovers),
        ],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    assert janitor.stdin is not None
    try:
        yield cgroup
    finally:
        janitor.stdin.close()
        left = janitor.wait()
        assert left == 0, f"processes or cgroups of {cgroup.folders} are left"


@contextmanager
def forwarded(sandbox: Sandbox, host: str, port: int) -> Iterator[int]:
    """Yield a port of this machine's loopback that is forwarded to `host:port` in the sandbox's network."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        local_port = int(listening.getsockname()[1])
        carrier = subprocess.Popen(
            [
                *[
                    "setpriv",
                    "--pdeathsig",
                    "KILL",
                    "--",
                    "nsenter",
                    f"--target={sandbox.pid}",
                    "--net",
                    "--",
                ],
                *[sys.executable, "-I", str(_HERE / "forward.py"), str(listening.fileno()), host, str(port)],
            ],
            stdin=subprocess.DEVNULL,
            pass_fds=[listening.fileno()],
            start_new_session=True,
        )
    try:
        yield local_port
    finally:
        carrier.kill()
        carrier.wait()
