"""The updates of the page `/ui`: one is made for all open pages together, however many there are.

An update holds what has changed since the update before. A page that opens first gets everything, and then the same updates
as the others. It may get a change twice, which does no harm, because a change replaces what it names. A page that has missed
an update, because its client reads slowly, gets one of its own, and then those of the others again.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import NamedTuple

UPDATE_SECONDS = 0.5


class Seen(NamedTuple):
    """The last update that a page has."""

    number: int
    change: int


class PageUpdates:
    """The last update. Times are in seconds of the caller's clock."""

    def __init__(self, make: Callable[[int | None], bytes], last_change: Callable[[], int]) -> None:
        """`make` returns what has changed since a change number, None: everything; `last_change` is the last one's number."""
        self._make, self._last_change = make, last_change
        self._last = Seen(0, 0)
        self._content = b""
        self._made_at = -inf

    def first(self, now: float) -> tuple[bytes, Seen]:
        """Return everything, for a page that opens."""
        change = self._last_change()
        content = self._make(None)
        # No other page is open, or none has asked yet: the next update begins here.
        if self.seconds_left(now) == 0.0:
            self._last, self._content, self._made_at = Seen(self._last.number + 2, change), b"", now
        return content, Seen(self._last.number, change)

    def next(self, seen: Seen, now: float) -> tuple[bytes, Seen]:
        """Return the update after the one that a page has; it is made when the first page asks for it."""
        change = self._last_change()
        if seen.number == self._last.number:
            self._content = self._make(self._last.change)
            self._last, self._made_at = Seen(seen.number + 1, change), now
        if seen.number == self._last.number - 1:
            return self._content, self._last
        return self._make(seen.change), Seen(self._last.number, change)

    def seconds_left(self, now: float) -> float:
        """Return the time until the next update is due."""
        return max(0.0, self._made_at + UPDATE_SECONDS - now)
