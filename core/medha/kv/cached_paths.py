"""A rank's view of its lane's prefix cache: for each remembered block, its predecessor and its last use.

The controller's `medha.kv.prefix_cache` knows prefixes by their hashes and makes the decisions; a rank knows
only blocks. For each remembered block it stores the block that precedes it in its prefix, so that the last
block of a prefix and a count identify the whole prefix. It counts locks and records uses as the cache does,
so that a few numbers identify the least recently used blocks. The part of an `Admit` about cached and evicted
blocks is therefore as small for a million tokens in a fragmented pool as for a thousand.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from medha.kv.blocks import Run, as_blocks, runs_in
from medha.wire.messages import Eviction

NO_BLOCK = -1
"""Predecessor of the first block of a prefix."""


class CachedPaths:
    """Records for each remembered block of one lane its predecessors, its locks, and when it was last used.

    Entries of blocks that are not remembered are stale and never read. Cost per call: O(runs of consecutive
    blocks) steps, and numpy passes over the blocks touched; an eviction passes over the whole pool.
    """

    def __init__(self, blocks: int) -> None:
        self._first = np.zeros(blocks, dtype=np.int32)  # first of the consecutive blocks up to each
        self._before = np.full(blocks, NO_BLOCK, dtype=np.int32)  # of a run's first block: its predecessor
        self._locks = np.zeros(blocks, dtype=np.int32)
        self._used_at = np.zeros(blocks, dtype=np.int64)
        self._locked: dict[str, tuple[int, int]] = {}  # sequence -> last block of its prefix, and its length
        self._clock = 0  # releases of sequences on this lane

    def runs(self, last: int, count: int) -> list[Run]:
        """Return the last `count` blocks of the prefix that ends with block `last`, in order."""
        found: list[Run] = []
        while count > 0:
            first = max(int(self._first[last]), last - count + 1)
            found.append((first, last - first + 1))
            count -= last - first + 1
            last = int(self._before[first])
        return found[::-1]

    def lock(self, sequence: str, last: int, count: int) -> None:
        """Lock the prefix that a new sequence uses; a `count` of 0 if it uses none yet."""
        self._locked[sequence] = (last, count)
        self._locks[as_blocks(self.runs(last, count))] += 1

    def depth(self, sequence: str) -> int:
        """Return the number of blocks of the prefix that a sequence locks."""
        return self._locked[sequence][1]

    def insert(self, sequence: str, runs: Sequence[Run], start: int, after: int) -> None:
        """Insert the blocks `runs` of a sequence after block `after`, and lock the whole prefix for it.

        `runs` are the blocks of the sequence's table from the `start`-th on.
        """
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
        self._locks[as_blocks(self.runs(last, depth - known))] += 1
        self._locked[sequence] = (last, depth)

    def release(self, sequence: str) -> None:
        """Unlock the prefix of a sequence that has ended: blocks that only it used become evictable."""
        self._clock += 1
        blocks = as_blocks(self.runs(*self._locked.pop(sequence)))
        self._locks[blocks] -= 1
        self._used_at[blocks] = self._clock

    def evicted(self, eviction: Eviction, remembered: npt.NDArray[np.bool_]) -> list[Run]:
        """Return the blocks that the controller has evicted; `remembered` flags the remembered blocks."""
        old = remembered & (self._locks == 0) & (self._used_at < eviction.used_before)
        return runs_in(old) + self.runs(eviction.last, eviction.count)
