"""A queue of keys to reconcile.

Each key is reconciled once at a time, in the order of requests, failed keys with a growing back-off. After a
reconcile that changed nothing but a status, its key rests. The rest is a multiple of the time from the request
to the end of the reconcile. All changes during it are reconciled together, and one after it at once. So if the
pods of a replica come up one by one, an idle operator reconciles after each of them, and a busy one after
several.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from medha_operator.kube.kinds import Key

FIRST_SECONDS = 0.05
LONGEST_SECONDS = 60.0
REST_PER_SECOND = 10.0
"""Seconds of rest for each second from the request to the end of the previous reconcile."""
LONGEST_REST_SECONDS = 2.0


def rest_seconds(elapsed_seconds: float) -> float:
    """Return the seconds for which a key rests after a reconcile that ended so long after its request."""
    return min(REST_PER_SECOND * elapsed_seconds, LONGEST_REST_SECONDS)


class WorkQueue:
    """A work queue.

    A key that is added while it is reconciled is queued again afterwards, so that no change is missed.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: deque[tuple[Key, float]] = deque()  # with the time of the request
        self._queued: set[Key] = set()
        self._working: dict[Key, float] = {}  # with the time of the request
        self._resting: dict[Key, asyncio.TimerHandle] = {}
        self._again: set[Key] = set()  # added while reconciled or resting
        self._later: dict[Key, tuple[float, asyncio.TimerHandle]] = {}
        self._failures: dict[Key, int] = {}
        self._filled = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, key: Key) -> None:
        """Queue the key as soon as it has rested."""
        if key in self._working or key in self._resting:
            self._again.add(key)
        elif key not in self._queued:
            self._enqueue(key)

    def add_later(self, key: Key, seconds: float) -> None:
        """Queue the key after `seconds`; the earliest of several requests counts."""
        due = self._clock() + seconds
        known = self._later.get(key)
        if known is not None:
            if known[0] <= due:
                return
            known[1].cancel()
        handle = asyncio.get_running_loop().call_later(seconds, self._enqueue_due, key)
        self._later[key] = (due, handle)

    async def take(self) -> tuple[Key, float]:
        """Return the next key, and the seconds for which it has waited. `done` or `failed` must follow."""
        while not self._waiting:
            self._filled.clear()
            await self._filled.wait()
        key, asked = self._waiting.popleft()
        self._queued.discard(key)
        self._working[key] = asked
        return key, self._clock() - asked

    def done(self, key: Key, *, makes_progress: bool = False) -> None:
        """Finish a key. It may rest, unless `makes_progress` says that its reconcile was one step of several."""
        self._failures.pop(key, None)
        elapsed_seconds = self._clock() - self._working.pop(key)
        rest = 0.0 if makes_progress else rest_seconds(elapsed_seconds)
        if rest > 0:
            self._resting[key] = asyncio.get_running_loop().call_later(rest, self._has_rested, key)
        else:
            self._requeue(key)

    def failed(self, key: Key, at_least_seconds: float = 0.0) -> float:
        """Queue the key again after a back-off, which is returned, or once it is added before that.

        With `at_least_seconds`, changes that were reported during the reconcile wait for that time, too, because the
        reconcile may have caused them itself.
        """
        count = self._failures.get(key, 0)
        pause = max(at_least_seconds, min(FIRST_SECONDS * 2.0 ** min(count, 32), LONGEST_SECONDS))
        if at_least_seconds > 0 and key in self._again:
            self._again.discard(key)
            pause = at_least_seconds
        self._failures[key] = count + 1
        del self._working[key]
        self._requeue(key)
        self.add_later(key, pause)
        return pause

    def close(self) -> None:
        for handle in (*self._resting.values(), *(handle for _, handle in self._later.values())):
            handle.cancel()
        self._resting.clear()
        self._later.clear()

    def _enqueue_due(self, key: Key) -> None:
        del self._later[key]
        self.add(key)

    def _has_rested(self, key: Key) -> None:
        del self._resting[key]
        self._requeue(key)

    def _requeue(self, key: Key) -> None:
        if key in self._again:
            self._again.discard(key)
            self._enqueue(key)

    def _enqueue(self, key: Key) -> None:
        self._queued.add(key)
        self._waiting.append((key, self._clock()))
        self._filled.set()
