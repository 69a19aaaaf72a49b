"""Routers that are forked from a process which has imported the router: each import takes a second or two of one core."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
from functools import cache
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

_NOT_COMPARED = {"PYTEST_CURRENT_TEST"}


class ForkedRouter:
    """A router process below the server of forks; it is used like a `subprocess.Popen`."""

    def __init__(self, settings: Path, log: Path) -> None:
        """Start the router; what it writes to stderr goes to `log`."""
        self._process: BaseProcess = _server().Process(target=run, args=(settings, log), daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Return the exit status, or None while the router runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the router has ended, and return its exit status."""
        self._process.join(timeout)
        status = self._process.exitcode
        if status is None:
            raise subprocess.TimeoutExpired("medha_router", timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def has_environment_of_forks() -> bool:
    """Return whether a forked router gets this process's environment; it has the one in which the server began."""
    _server()
    return _environment() == _first_environment()


def run(settings: Path, log: Path) -> NoReturn:
    """Be the router, in the forked process."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    from medha_router.process import main

    main(["--settings", str(settings)])
    raise AssertionError("a command ends its process")


@cache
def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["medha_router.process"])
    _first_environment()
    return context


@cache
def _first_environment() -> dict[str, str]:
    return _environment()


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _NOT_COMPARED}
