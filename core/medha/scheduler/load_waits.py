"""Requests that wait until blocks of their prompt are loaded: from files, from another replica, or from the store.

They get no KV meanwhile, and others pass them. If a load takes much longer than predicted, the request computes its prompt
instead. Where loading saves much time, it waits longer: for a part of the time saved. The first reads after a start, and reads
beside other work, may take several times as long as those that were measured before.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from medha.kv.pools import Awaited
from medha.scheduler.request import Request

_PATIENCE = 2.0
"""Longest wait, as a multiple of the predicted one."""
_SAVED_PART = 0.25
"""Longest wait, as a part of the time that loads save, if that is longer. If the disk hangs, a request loses this time."""
_LEAST_SECONDS = 0.25
"""Time that each wait may take beyond that, because ranks report between their steps."""


@dataclass(slots=True)
class _Wait:
    request: Request
    extents: set[tuple[int, int]]  # with their lanes
    due: float


class LoadWaits:
    """The requests that wait for loads."""

    def __init__(self) -> None:
        self._waits: dict[str, _Wait] = {}  # by id

    @property
    def next_due(self) -> float | None:
        """Time at which the next request waits no longer; None if none waits."""
        return min((wait.due for wait in self._waits.values()), default=None)

    @property
    def waiting(self) -> set[str]:
        """Ids of the requests that no step can take up now."""
        return {name for name, wait in self._waits.items() if wait.request.waits}

    def begin(self, request: Request, awaited: Awaited, now: float) -> None:
        """Let a request wait for loads."""
        most_seconds = max(_PATIENCE * awaited.seconds, _SAVED_PART * awaited.saved_seconds)
        due = now + _LEAST_SECONDS + most_seconds
        self._waits[request.id] = _Wait(request, set(awaited.extents), due)
        request.awaits_load = True

    def follow(self, request: Request, extents: Iterable[tuple[int, int]]) -> None:
        """Let a waiting request wait for these loads instead, until the same time."""
        self._waits[request.id].extents = set(extents)

    def loaded(self, lane: int, extents: Iterable[int]) -> list[Request]:
        """Note that loads of a lane have ended; return the requests that no longer wait."""
        ended = {(lane, extent) for extent in extents}
        for wait in self._waits.values():
            wait.extents -= ended
        return self._end([wait for wait in self._waits.values() if not wait.extents])

    def late(self, now: float) -> list[Request]:
        """Return the requests that no longer wait, because their loads take too long."""
        if not self._waits:
            return []
        return self._end([wait for wait in self._waits.values() if wait.due <= now])

    def leave(self, request: Request) -> None:
        """Forget a request that has left."""
        self._waits.pop(request.id, None)

    def _end(self, waits: Iterable[_Wait]) -> list[Request]:
        ended = []
        for wait in waits:
            del self._waits[wait.request.id]
            wait.request.awaits_load = False
            ended.append(wait.request)
        return ended
