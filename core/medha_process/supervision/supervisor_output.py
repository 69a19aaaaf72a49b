"""Output of the supervisor, written by a separate thread, so that supervision never waits for a reader.

A terminal halted by Ctrl-S, a pager or a stalled log shipper may read nothing for any time, and a log on a
full disk never takes a line again. Lines then wait, up to a limit; those beyond it are left out and counted.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from queue import SimpleQueue
from threading import Thread
from threading import enumerate as enumerate_threads
from typing import Protocol

from medha_process.part_state import PartState

MOST_LINES_WAITING = 10_000
STUCK_SECONDS = 5.0  # `close` returns after this time without progress, although lines wait
_THREAD_NAME = "shown"


class Display(Protocol):
    """Output of a supervisor: its own messages, and the lines of its parts."""

    def starting(self, parts: list[str]) -> None: ...

    def line(self, part: str, text: str, at: datetime) -> None:
        """Show a line that a part has printed."""

    def log(self, text: str, at: datetime) -> None:
        """Show a message of the supervisor."""

    def progress(self, part: str, state: PartState, at: datetime) -> None:
        """Show the progress of a part, before all parts are ready."""

    def ready(self, process_ids: dict[str, int]) -> None: ...

    def close(self) -> None: ...


def local_time() -> datetime:
    """Return the current time in this machine's time zone, for people who read logs."""
    return datetime.now().astimezone()


def iso_time(at: datetime) -> str:
    """Return the time in ISO 8601, to the millisecond, with the offset of the time zone."""
    return at.isoformat(timespec="milliseconds")


class Shown:
    """A display that never blocks its caller, except in `close`; call it from one thread only."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._waiting: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._left_out = 0
        self._shown = 0
        self._thread = Thread(target=self._show_all, daemon=True, name=_THREAD_NAME)
        self._thread.start()

    def starting(self, parts: list[str]) -> None:
        self._waiting.put(lambda: self._display.starting(parts))

    def line(self, part: str, text: str, at: datetime) -> None:
        if self._waiting.qsize() >= MOST_LINES_WAITING:
            self._left_out += 1
            return
        if self._left_out:
            self.log(
                f"{self._left_out} lines of the parts are omitted here, because earlier lines were not read"
            )
            self._left_out = 0
        self._waiting.put(lambda: self._display.line(part, text, at))

    def log(self, text: str) -> None:
        at = local_time()
        self._waiting.put(lambda: self._display.log(text, at))

    def progress(self, part: str, state: PartState) -> None:
        at = local_time()
        if self._waiting.qsize() < MOST_LINES_WAITING:
            self._waiting.put(lambda: self._display.progress(part, state, at))

    def ready(self, process_ids: dict[str, int]) -> None:
        self._waiting.put(lambda: self._display.ready(process_ids))

    def close(self) -> None:
        """Wait until everything is shown, or until nothing more has been shown for STUCK_SECONDS."""
        self._waiting.put(self._display.close)
        self._waiting.put(None)
        before = -1
        while self._thread.is_alive() and before != self._shown:
            before = self._shown
            self._thread.join(STUCK_SECONDS)

    def _show_all(self) -> None:
        while (show := self._waiting.get()) is not None:
            # The reader has gone, the disk is full, or the encoding lacks a character.
            with suppress(OSError, ValueError):
                show()
            self._shown += 1


def end_if_unread(exit_status: int) -> None:
    """End this process at once if a closed `Shown` still waits for a reader; call it last.

    Its thread holds the output, so that a normal exit of Python would wait for it, or abort.
    """
    if any(thread.name == _THREAD_NAME for thread in enumerate_threads()):
        os._exit(exit_status)
