"""Parts that are forked from a process which has imported them: each import takes a second or more of one core."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread
from typing import IO, NoReturn

ROUTER = "medha_router.process"
CONTROLLER = "medha_worker.controller.process"
"""Modules whose `main` is a part."""
_NOT_COMPARED = {"PYTEST_CURRENT_TEST"}


class ForkedPart:
    """A part's process below the server of forks; it is used like a `subprocess.Popen`."""

    def __init__(self, module: str, settings: Path, log: Path | None = None) -> None:
        """Start the part; what it writes to stderr goes to `log`, or without one to the pipe `stderr`."""
        self.stderr: IO[str] | None = None
        self._left: list[str] = []  # what `communicate` has read
        reader, writer = multiprocessing.Pipe(duplex=False)
        with reader, writer:
            arguments = (module, settings, writer if log is None else log)
            self._process: BaseProcess = _server(module).Process(target=run, args=arguments, daemon=True)
            self._process.start()
            if log is None:
                self.stderr = os.fdopen(os.dup(reader.fileno()), encoding="utf-8")
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status, or None while the part runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return the exit status, or None while the part runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the part has ended, and return its exit status."""
        self._process.join(timeout)
        status = self.returncode
        if status is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return status

    def communicate(self, timeout: float | None = None) -> tuple[None, str]:
        """Wait until the part has ended, and return what was left in `stderr`, which is closed then.

        Called again, it returns the same.
        """
        if not self._left:
            assert self.stderr is not None
            read, left = self.stderr.read, self._left
            reading = Thread(target=lambda: left.append(read()), daemon=True)
            reading.start()
            reading.join(timeout)
            if not left:
                raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
            self.stderr.close()
        self.wait(timeout)
        return None, self._left[0]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start_part(module: str, settings: Path) -> ForkedPart | subprocess.Popen[str]:
    """Start a part whose stderr is a pipe, without a new interpreter where that makes no difference to it."""
    if has_environment_of_forks(module):
        return ForkedPart(module, settings)
    command = [sys.executable, "-m", module.removesuffix(".process"), "--settings", str(settings)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def has_environment_of_forks(module: str) -> bool:
    """Return whether a part that is forked gets this process's environment; it has the one in which the server began."""
    _server(module)
    return _environment() == _first_environment()


def run(module: str, settings: Path, log: Connection | Path) -> NoReturn:
    """Be the part, in the forked process."""
    if isinstance(log, Path):
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 2)
        os.close(descriptor)
    else:
        with log:
            os.dup2(log.fileno(), 2)
    importlib.import_module(module).main(["--settings", str(settings)])
    raise AssertionError("a command ends its process")


@cache
def _server(module: str) -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module])  # the first one counts: tests of routers start no controller
    _first_environment()
    return context


@cache
def _first_environment() -> dict[str, str]:
    return _environment()


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _NOT_COMPARED}
