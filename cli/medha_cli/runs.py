"""The replicas that `medha up` serves on this machine now, and their addresses.

A run is a directory (`medha up --run-dir`, or a temporary one). While it lasts, the supervisor holds a lock
on a file in it, which the kernel releases however the supervisor ends. So the remains of a killed run are
never taken for a running one.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from medha.errors import ConfigInvalid

RUN_FILE = "up.json"
KEYS = "keys"
"""Name of the folder in a run's directory with the keys of its parts."""
REMOVE_SECONDS = 10.0
REMOVE_PAUSE_SECONDS = 0.2
PREFIX = "medha-"
"""Prefix of temporary directories of runs, and of links to other run directories."""
_MOST_CHARACTERS = 4096
"""Most characters read of a run file; ours are shorter."""


@dataclass(frozen=True, slots=True)
class Run:
    """A `medha up` of this user."""

    directory: Path
    name: str
    pid: int

    def lasts(self) -> bool:
        """Return whether its supervisor still runs."""
        return _read(self.directory) is not None

    def telemetry_url(self) -> str | None:
        """Return its controller's address; None until all ranks were ready once. Changes with a new controller."""
        return _url(self.directory / "ranks-ready.json", "metrics_url", "/metrics")

    def router_metrics_url(self) -> str | None:
        """Return the address of its router's metrics; None until it listens."""
        return _url(self.directory / "router-ready.json", "metrics_url", "")


def _url(path: Path, field: str, suffix: str) -> str | None:
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))[field]).removesuffix(suffix)
    except (OSError, ValueError, KeyError):
        return None


@contextmanager
def announced(directory: Path, name: str, *, is_temporary: bool = False) -> Iterator[None]:
    """Announce the run in `directory` while the context lasts; if `is_temporary`, nothing in it is the user's.

    Raises:
        ConfigInvalid: another run uses the directory.
    """
    path = directory / RUN_FILE
    # A directory that the user chose is found through a link beside the temporary ones. The link's name
    # cannot be guessed, as others may write there too.
    link = Path(tempfile.gettempdir()) / f"{PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _used(directory) from error
        file.truncate(0)
        file.write(json.dumps({"name": name, "pid": os.getpid(), "is_temporary": is_temporary}))
        file.flush()
        is_linked = directory.parent.resolve() != link.parent.resolve()
        if is_linked:
            link.symlink_to(directory)
        try:
            yield
        finally:
            if is_linked:
                link.unlink(missing_ok=True)
            path.unlink(missing_ok=True)


def remove_ended() -> None:
    """Remove what killed runs of this user have left: their keys, and directories that were temporary."""
    for place in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{RUN_FILE}"):
        here = place.parent
        with suppress(OSError, ValueError), _run_file(here) as file:
            written = json.loads(file.read(_MOST_CHARACTERS))  # still empty if the run is about to begin
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while the run lasts
            if written.get("is_temporary") and not here.is_symlink():
                shutil.rmtree(here, ignore_errors=True)
                continue
            shutil.rmtree(here.resolve() / KEYS, ignore_errors=True)
            place.unlink()
            if here.is_symlink():
                here.unlink()


@contextmanager
def removed_if_killed(directory: Path) -> Iterator[None]:
    """Have the remains of the run in `directory` removed if this process is killed while the context lasts."""
    command = [sys.executable, "-m", "medha_cli.runs", str(directory)]
    # In its own session: what ends us, such as a closed terminal, does not end it. It reads until we are gone.
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            yield
        finally:
            process.kill()


def _remove_once_killed(directory: Path) -> None:
    """Wait until the process at the other end of stdin is gone, then remove what it has left."""
    sys.stdin.buffer.read()
    deadline = time.monotonic() + REMOVE_SECONDS
    is_temporary = json.loads((directory / RUN_FILE).read_bytes())["is_temporary"]
    left = directory if is_temporary else directory / KEYS
    while left.exists() and time.monotonic() < deadline:  # parts that are about to end may still write
        remove_ended()
        if is_temporary:
            shutil.rmtree(directory, ignore_errors=True)
        time.sleep(REMOVE_PAUSE_SECONDS)


def require_unused(directory: Path) -> None:
    """Check that no run uses a directory.

    Raises:
        ConfigInvalid: another run uses the directory.
    """
    if _read(directory) is not None:
        raise _used(directory)


def _used(directory: Path) -> ConfigInvalid:
    return ConfigInvalid(f"--run-dir {directory} belongs to a medha up that still runs; name another one")


def running() -> list[Run]:
    """Return all runs of this user, in the order of their names."""
    found: dict[Path, Run] = {}
    for place in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{RUN_FILE}"):
        directory = place.parent.resolve()
        run = _read(directory)
        if run is not None:
            found[directory] = run
    return sorted(found.values(), key=lambda run: (run.name, run.pid))


def find(name: str | None, run_directory: Path | None) -> Run:
    """Return the run of a name, of a directory, or else the only one there is.

    Raises:
        ConfigInvalid: there is none, or more than one.
    """
    if run_directory is not None:
        run = _read(run_directory.absolute())
        if run is None:
            raise ConfigInvalid(f"--run-dir {run_directory}: no medha up of yours runs there")
        return run
    everything = running()
    if not everything:
        raise ConfigInvalid(
            "no running medha up of yours was found on this machine; start one (medha up FILE), or name the "
            "controller of a replica elsewhere with --url"
        )
    runs = [run for run in everything if name in (None, run.name)]
    known = "; ".join(f"{run.name}: --run-dir {run.directory}" for run in runs or everything)
    if not runs:
        raise ConfigInvalid(f"no replica named {name!r} runs here; those that do ({known})")
    if len(runs) > 1:
        raise ConfigInvalid(f"{len(runs)} replicas run here; select one by name or by ({known})")
    return runs[0]


def _read(directory: Path) -> Run | None:
    """Return the run in a directory, if it is this user's and lasts."""
    try:
        with _run_file(directory) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                written = json.loads(file.read(_MOST_CHARACTERS))
                return Run(directory, str(written["name"]), int(written["pid"]))
    except (OSError, ValueError, KeyError):
        pass
    return None


@contextmanager
def _run_file(directory: Path) -> Iterator[TextIO]:
    """Open the file of a run of this user. Where others can write, a name may be anything: a pipe, a device, a link.

    Raises:
        OSError: it does not exist, it or its directory belongs to somebody else, or it is not a regular file.
    """
    path = directory / RUN_FILE
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # waits for no writer of a pipe
    with os.fdopen(os.open(path, flags), encoding="utf-8") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or {found.st_uid, directory.stat().st_uid} != {os.getuid()}:
            raise PermissionError(f"{path} is not a run file of this user")
        yield file


if __name__ == "__main__":
    _remove_once_killed(Path(sys.argv[1]))
