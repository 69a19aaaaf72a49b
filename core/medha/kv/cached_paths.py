"""What a rank knows of its lane's prefix cache: which remembered block follows which, and when each was last used.

The controller's `medha.kv.prefix_cache` knows prefixes by their hashes, and decides; a rank knows blocks alone. Of each remembered
block it keeps the one that precedes it in its prefix, so that the last block of a prefix and a count name all of it. It
counts locks and notes uses as the cache does, so that two numbers name everything that is least recently used. So what
an `Admit` says of cached and evicted blocks is as small for a million tokens in a pool in crumbs as for a thousand.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from medha.kv.blocks import Run
from medha.wire.messages import Eviction

NO_BLOCK = -1
"""What the first block of a prefix follows."""


class CachedPaths:
    """Of each remembered block of one lane: what leads to it, who locks it, and when it was last used.

    What is said of blocks that are not remembered is stale, and never read. Cost per call: O(runs of consecutive blocks)
    steps, and numpy passes over the blocks touched; an eviction passes over the pool.
    """

    def __init__(self, blocks: int) -> None:
        self._first = np.zeros(blocks, dtype=np.int32)  # of the consecutive blocks that lead to each
        self._before = np.full(blocks, NO_BLOCK, dtype=np.int32)  # what the first one of those follows
        self._locks = np.zeros(blocks, dtype=np.int32)
        self._used_at = np.zeros(blocks, dtype=np.int64)
        self._locked: dict[str, tuple[int, int]] = {}  # sequence -> last block, and how many lead to it
        self._clock = 0  # releases of sequences on this lane

    def runs(self, last: int, count: int) -> list[Run]:
        """The `count` blocks that lead to block `last`, in their order."""
        found: list[Run] = []
        while count > 0:
            first = max(int(self._first[last]), last - count + 1)
            found.append((first, last - first + 1))
            count -= last - first + 1
            last = int(self._before[first])
        return found[::-1]

    def lock(self, sequence: str, last: int, count: int) -> None:
        """A sequence begins to use this prefix; none: it uses none yet."""
        self._locked[sequence] = (last, count)
        self._locks[_blocks(self.runs(last, count))] += 1

    def publish(self, sequence: str, runs: Sequence[Run], start: int, after: int) -> None:
        """A sequence uses what leads to `after`, and behind that `runs`, which are the blocks from the `start`-th on."""
        depth, last = start, after
        for first, length in runs:
            stop = first + length
            if last != NO_BLOCK and last + 1 == first:
                self._first[first:stop] = self._first[last]
            else:
                self._first[first:stop] = first
                self._before[first] = last
            last = stop - 1
            depth += length
        _, known = self._locked[sequence]
        self._locks[_blocks(self.runs(last, depth - known))] += 1
        self._locked[sequence] = (last, depth)

    def release(self, sequence: str) -> None:
        """A sequence has ended: what it used alone may be evicted from now on."""
        self._clock += 1
        blocks = _blocks(self.runs(*self._locked.pop(sequence)))
        self._locks[blocks] -= 1
        self._used_at[blocks] = self._clock

    def evicted(self, eviction: Eviction, remembered: npt.NDArray[np.bool_]) -> list[Run]:
        """The blocks that the controller has given up; `remembered` says of each block of the pool whether it is."""
        old = remembered & (self._locks == 0) & (self._used_at < eviction.used_before)
        inside = np.concatenate(([False], old, [False]))
        borders = np.flatnonzero(inside[1:] != inside[:-1]).tolist()
        runs = [(start, stop - start) for start, stop in zip(borders[::2], borders[1::2], strict=True)]
        return runs + self.runs(eviction.last, eviction.count)


def _blocks(runs: Sequence[Run]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.arange(0), *(np.arange(first, first + length) for first, length in runs)])
