"""Keys that must be looked at: each once at a time, in the order of asking, failed ones later and later.

After a look that has changed nothing but a status, a key rests for a multiple of the time from the asking to the look's
end, and what changes meanwhile is looked at together. So a replica whose pods come up one by one costs as many looks as
there is time for: all where little goes on, few where many compete. What changes after a rest is looked at without delay.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from medha_operator.kube.kinds import Key

FIRST_SECONDS = 0.05
LONGEST_SECONDS = 60.0
REST_PER_SECOND = 10.0
"""Seconds of rest for each second from the asking to the end of the look before it."""
LONGEST_REST_SECONDS = 2.0


def rest_seconds(elapsed_seconds: float) -> float:
    """How long a key is left alone after a look that ended so long after it was asked for."""
    return min(REST_PER_SECOND * elapsed_seconds, LONGEST_REST_SECONDS)


class WorkQueue:
    """A key that is asked for while it is worked on comes again afterwards: no change goes unseen."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: deque[tuple[Key, float]] = deque()  # with the time of asking
        self._queued: set[Key] = set()
        self._working: dict[Key, float] = {}  # with the time of asking
        self._resting: dict[Key, asyncio.TimerHandle] = {}
        self._again: set[Key] = set()  # asked for while worked on or resting
        self._later: dict[Key, tuple[float, asyncio.TimerHandle]] = {}
        self._failures: dict[Key, int] = {}
        self._filled = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, key: Key) -> None:
        """Ask for a look as soon as the key has rested."""
        if key in self._working or key in self._resting:
            self._again.add(key)
        elif key not in self._queued:
            self._enqueue(key)

    def add_later(self, key: Key, seconds: float) -> None:
        """Ask for a look in a while; the earliest of several counts."""
        due = self._clock() + seconds
        known = self._later.get(key)
        if known is not None:
            if known[0] <= due:
                return
            known[1].cancel()
        handle = asyncio.get_running_loop().call_later(seconds, self._come_due, key)
        self._later[key] = (due, handle)

    async def take(self) -> tuple[Key, float]:
        """The next key, and how long it has waited, seconds. `done` or `failed` must follow."""
        while not self._waiting:
            self._filled.clear()
            await self._filled.wait()
        key, asked = self._waiting.popleft()
        self._queued.discard(key)
        self._working[key] = asked
        return key, self._clock() - asked

    def done(self, key: Key, *, goes_on: bool = False) -> None:
        """The key may rest, unless its look was a step of more to come."""
        self._failures.pop(key, None)
        elapsed_seconds = self._clock() - self._working.pop(key)
        rest = 0.0 if goes_on else rest_seconds(elapsed_seconds)
        if rest > 0:
            self._resting[key] = asyncio.get_running_loop().call_later(rest, self._has_rested, key)
        else:
            self._ask_again(key)

    def failed(self, key: Key, at_least_seconds: float = 0.0) -> float:
        """Look again after a back-off, which is returned, or when the key is asked for before.

        With `at_least_seconds`, what was heard during the look waits for as long, too: it may be the look's own doing.
        """
        count = self._failures.get(key, 0)
        pause = max(at_least_seconds, min(FIRST_SECONDS * 2.0 ** min(count, 32), LONGEST_SECONDS))
        if at_least_seconds > 0 and key in self._again:
            self._again.discard(key)
            pause = at_least_seconds
        self._failures[key] = count + 1
        del self._working[key]
        self._ask_again(key)
        self.add_later(key, pause)
        return pause

    def close(self) -> None:
        for handle in (*self._resting.values(), *(handle for _, handle in self._later.values())):
            handle.cancel()
        self._resting.clear()
        self._later.clear()

    def _come_due(self, key: Key) -> None:
        del self._later[key]
        self.add(key)

    def _has_rested(self, key: Key) -> None:
        del self._resting[key]
        self._ask_again(key)

    def _ask_again(self, key: Key) -> None:
        if key in self._again:
            self._again.discard(key)
            self._enqueue(key)

    def _enqueue(self, key: Key) -> None:
        self._queued.add(key)
        self._waiting.append((key, self._clock()))
        self._filled.set()
