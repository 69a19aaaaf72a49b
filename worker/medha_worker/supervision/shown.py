"""What is shown, on a thread of its own: parts are mended whether anybody reads of it or not.

A terminal halted by Ctrl-S, a pager and a stalled log shipper take nothing for as long as they like, and a log on a full disk
takes nothing ever again. Lines wait then, up to a bound; those beyond it are left out, and counted.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import Protocol

MOST_LINES_WAITING = 10_000


class Display(Protocol):
    """What the supervisor shows."""

    def starting(self, parts: list[str]) -> None: ...

    def line(self, part: str, text: str) -> None: ...

    def say(self, text: str) -> None: ...

    def ready(self, process_ids: dict[str, int]) -> None: ...

    def close(self) -> None: ...


class Shown:
    """A display that never keeps its caller waiting, but for `close`; called from one thread."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._waiting: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._left_out = 0
        self._thread = Thread(target=self._show_all, daemon=True, name="shown")
        self._thread.start()

    def starting(self, parts: list[str]) -> None:
        self._waiting.put(lambda: self._display.starting(parts))

    def line(self, part: str, text: str) -> None:
        if self._waiting.qsize() >= MOST_LINES_WAITING:
            self._left_out += 1
            return
        if self._left_out:
            self.say(f"{self._left_out} lines of the parts are left out here: nobody has read those before")
            self._left_out = 0
        self._waiting.put(lambda: self._display.line(part, text))

    def say(self, text: str) -> None:
        self._waiting.put(lambda: self._display.say(text))

    def ready(self, process_ids: dict[str, int]) -> None:
        self._waiting.put(lambda: self._display.ready(process_ids))

    def close(self) -> None:
        """Wait until all of it is shown."""
        self._waiting.put(self._display.close)
        self._waiting.put(None)
        self._thread.join()

    def _show_all(self) -> None:
        while (show := self._waiting.get()) is not None:
            with suppress(
                OSError, ValueError
            ):  # nobody reads it, the disk is full, or the encoding has no such sign
                show()
