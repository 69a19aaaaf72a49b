"""The duties of every part as a process: begin, end with its parent, log why it fails, collect garbage rarely."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import click

from medha.errors import ConfigInvalid, MedhaError
from medha_process.host_resources import raise_file_limit
from medha_process.part_settings import PartSettings

PARENT = "MEDHA_PARENT_PID"
"""Environment variable that the supervisor sets for its parts: its process id."""
_PR_SET_PDEATHSIG = 1  # prctl(2)

_Settings = TypeVar("_Settings", bound=PartSettings)

settings_option = click.option(
    "--settings", "settings_file", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True
)
"""The option of a part's program that names the file of its settings."""


def begin_part(kind: type[_Settings], settings_file: Path) -> _Settings:
    """Read this part's settings, log as they say, and raise the limit on open files. Ctrl-C is ignored from here on.

    A terminal sends Ctrl-C to all its processes; the supervisor handles it, and stops its parts by SIGTERM.

    Raises:
        ClickException: the settings are invalid.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        settings = kind.read(settings_file)
    except ConfigInvalid as error:
        raise click.ClickException(str(error)) from error
    configure_logging(settings.log_level)
    raise_file_limit()
    return settings


def configure_logging(level: str) -> None:
    """Log to stderr, one line per event.

    A part logs no time, because its supervisor adds the time and the part's name.
    """
    is_part = PARENT in os.environ
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format=f"{'' if is_part else '%(asctime)s '}%(levelname)s %(name)s: %(message)s",
    )


def end_with_parent(parent: int | None = None, end_signal: signal.Signals = signal.SIGKILL) -> None:
    """Have this process sent `end_signal` when its parent dies in any way, so that no orphan keeps a GPU or a port.

    If the parent died while this process was importing, it now has another parent. The id `parent` reveals
    that (default: `MEDHA_PARENT_PID`, if a supervisor has set it); a parent with id 1 alone does not, because
    in a container the real parent may have that id.
    """
    if parent is None:
        parent = int(os.environ.get(PARENT, os.getppid()))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, end_signal, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before prctl took effect
        os.kill(os.getpid(), end_signal)


@contextmanager
def log_failure(log: logging.Logger) -> Iterator[None]:
    """Log an error that is not a bug as the last line, which a supervisor quotes, and exit with its status."""
    try:
        yield
    except MedhaError as error:
        log.critical("%s", error)
        sys.exit(error.exit_status)


def collect_garbage_rarely() -> None:
    """Collect cyclic garbage once in a million allocated objects instead of every few hundred.

    With 10,000 requests queued, a collection takes 30 ms and would run every few dozen steps in vain: the
    objects of a step are freed by reference counts.
    """
    gc.freeze()
    gc.set_threshold(1_000_000, 10, 10)
