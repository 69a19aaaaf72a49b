"""An S3-compatible service on a directory, for tests: a process that holds every request to its signature."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cluster.binaries import build

ACCESS_KEY, SECRET_KEY = "tests", "a-secret-of-the-tests"
BUCKET = "shared"
_LISTENS = "0A"
"""State of a socket in the kernel's table."""


@dataclass(frozen=True)
class ObjectStore:
    """A service that runs, and the directory with its buckets."""

    endpoint: str
    directory: Path

    @property
    def objects(self) -> list[Path]:
        """The files of the objects with KV."""
        return sorted(self.directory.rglob("*.kv"))


@contextmanager
def object_store(
    directory: Path, log: Path, host: str = "127.0.0.1", inside: Sequence[str] = ()
) -> Iterator[ObjectStore]:
    """Run the service at an address of this machine until the context ends.

    `inside` is a command prefix that runs it in another network, which has this address.

    Raises:
        CannotBuild: it cannot be built.
    """
    program = build(["versitygw"])["versitygw"]
    (directory / BUCKET).mkdir(parents=True)
    sidecar = directory.with_name(f"metadata-of-{directory.name}")
    sidecar.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"ROOT_ACCESS_KEY": ACCESS_KEY, "ROOT_SECRET_KEY": SECRET_KEY}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                *inside,
                program,
                "--port",
                f"{host}:{port}",
                "posix",
                "--sidecar",
                str(sidecar),
                str(directory),
            ],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        _wait_until_it_listens(process, port, log)
        yield ObjectStore(f"http://{host}:{port}", directory)
    finally:
        process.kill()
        process.wait()


def _wait_until_it_listens(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    until = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < until:
        # The sockets of its own network, which may not be this process's.
        sockets = Path(f"/proc/{process.pid}/net/tcp").read_text(encoding="ascii").splitlines()[1:]
        if any(line.split()[1].endswith(f":{port:04X}") and line.split()[3] == _LISTENS for line in sockets):
            return
        time.sleep(0.05)
    raise AssertionError(f"the object store does not start: {log.read_text(errors='replace')[-2000:]}")
