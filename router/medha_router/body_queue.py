"""The order in which large bodies are tokenised: short ones first, and none is overtaken for ever.

The body that is due first is next. It is due `SECONDS_PER_BYTE` after its arrival for each of its bytes, and for each
byte of its owner's unfinished bodies that are no larger. So

- a body can only be overtaken by bodies that arrive before it is due;
- many bodies of one owner delay each other, and not those of others.

A body at work is not interrupted. So, if there is more than one place, long bodies never take the last one, and a short
body waits only for other short ones.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

LONG_BYTES = 4 * 2**20
"""Size from which a body counts as long: its work takes seconds, and longer than starting a process."""
SECONDS_PER_BYTE = 1e-6
"""Seconds by which each byte of a body delays the time when it is due."""

_Ticket = TypeVar("_Ticket", bound=Hashable)


@dataclass(frozen=True)
class _Entry:
    owner: str
    size_bytes: int
    due: float
    """Seconds of the caller's clock."""

    @property
    def is_long(self) -> bool:
        return self.size_bytes >= LONG_BYTES


class BodyQueue(Generic[_Ticket]):
    """Bodies that wait for one of several places, or are at work in one. A ticket stands for a body."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._places_for_long = max(1, places - 1)
        self._waiting: dict[_Ticket, _Entry] = {}
        self._at_work: dict[_Ticket, _Entry] = {}

    @property
    def waiting(self) -> int:
        """Number of bodies that wait."""
        return len(self._waiting)

    def add(self, ticket: _Ticket, size_bytes: int, owner: str, now: float) -> None:
        """Let a body wait that arrives at the time `now` (seconds)."""
        ahead = sum(
            entry.size_bytes
            for entries in (self._waiting, self._at_work)
            for entry in entries.values()
            if entry.owner == owner and entry.size_bytes <= size_bytes
        )
        due = now + SECONDS_PER_BYTE * (ahead + size_bytes)
        self._waiting[ticket] = _Entry(owner, size_bytes, due)

    def start_next(self) -> _Ticket | None:
        """Give a free place to the body that is next, and return its ticket; None if none may start."""
        if len(self._at_work) >= self._places:
            return None
        long_may_start = sum(entry.is_long for entry in self._at_work.values()) < self._places_for_long
        startable = [ticket for ticket, entry in self._waiting.items() if long_may_start or not entry.is_long]
        if not startable:
            return None
        ticket = min(startable, key=lambda one: self._waiting[one].due)  # of equal ones, the first that came
        self._at_work[ticket] = self._waiting.pop(ticket)
        return ticket

    def remove(self, ticket: _Ticket) -> bool:
        """Forget a body, and return whether it was still waiting; one at work frees its place."""
        self._at_work.pop(ticket, None)
        return self._waiting.pop(ticket, None) is not None

    def is_waiting(self, ticket: _Ticket) -> bool:
        return ticket in self._waiting
