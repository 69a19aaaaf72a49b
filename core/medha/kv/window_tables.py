"""The block tables of layers with a sliding window: a rank keeps no more of a sequence there than later rows can see.

A row at position p of such a layer sees the positions p - W + 1 to p, so KV before the window of the next row is
never read again. These layers share a pool of their own, beside that of the layers that see the whole context. Before a
step runs, its sequences get blocks for the positions that it computes, and blocks that lie before the windows of
all later rows become free.

Each rank decides this alone, from the positions that steps name: no message has a block of this pool, and the
controller needs no copy of the tables. That works because the pool is large enough for every step that a controller may
send (`window_blocks`): lack of these blocks never delays or ends a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from medha.kv.blocks import BlockCopy, FreeRuns


def frees_windows(windows: Sequence[int | None], *, lanes: int, prefix_caching: bool) -> bool:
    """Return whether KV before the windows of layers can be freed, given these windows of all layers of the model.

    Two things need it whole. A cached prefix is shared by block, and whoever shares it needs the window before its end,
    wherever that is. And lanes that share a request find its positions by their order in its whole table.
    """
    return any(window is not None for window in windows) and lanes == 1 and not prefix_caching


def window_blocks(
    window_tokens: int,
    *,
    block_size_tokens: int,
    max_running: int,
    max_chunk_tokens: int,
    max_model_len: int,
    stages: int = 1,
) -> int:
    """Return the blocks of a pool that never runs out, however the controller fills its steps.

    Each of `max_running` sequences keeps a window. A step computes `max_chunk_tokens` positions of prompts at most,
    and `max_running` positions and drafts of decodes. As many drafts of the step before it may have been accepted, and of
    those that are in the pipeline's other `stages`. Each sequence begins and ends somewhere in a block.
    """
    longest_blocks = -(-max_model_len // block_size_tokens)
    tokens = max_running * window_tokens + max_chunk_tokens + (1 + stages) * max_running
    return min(-(-tokens // block_size_tokens) + 2 * max_running, max_running * longest_blocks)


class WindowTable(NamedTuple):
    """The blocks that hold the positions `first_token ..` of one sequence; they are int64, in the order of positions."""

    first_token: int
    blocks: npt.NDArray[np.int64]


class WindowTables:
    """Assigns the blocks of layers whose rows see `window_tokens` tokens at most."""

    def __init__(self, blocks: int, block_size_tokens: int, window_tokens: int) -> None:
        self.blocks = blocks
        self.block_size_tokens = block_size_tokens
        self.window_tokens = window_tokens
        self._free = FreeRuns(blocks)
        self._tables: dict[str, _Table] = {}
        self._unsettled: dict[str, int] = {}  # sequences of the last step, and their least next position

    @property
    def held_blocks(self) -> int:
        return self.blocks - self._free.blocks

    def begin_step(self) -> None:
        """Free what no row behind the last step sees, and the first row of a fork of such a sequence neither."""
        for sequence, position in self._unsettled.items():
            self._tables[sequence].drop((position - self.window_tokens) // self.block_size_tokens, self._free)
        self._unsettled.clear()

    def place(self, sequence: str, start: int, stop: int, drafted: int = 0) -> WindowTable | None:
        """Give a sequence blocks for positions `start .. stop` (exclusive), which the next step computes.

        The last `drafted` of them may be computed again. Return None if the window of the first one is not here, or if
        no block is free: then this rank and the controller have diverged.
        """
        table = self._tables.setdefault(sequence, _Table())
        size = self.block_size_tokens
        if not table.covers(start - self.window_tokens + 1, start, size):
            return None
        if not table.extend(-(-stop // size), self._free):
            return None
        self._unsettled[sequence] = stop - drafted
        return WindowTable(table.first * size, np.array(table.blocks, dtype=np.int64))

    def fork(self, parent: str, child: str, shared_tokens: int) -> list[BlockCopy] | None:
        """Give `child` blocks for the window before position `shared_tokens`; return the copies of `parent`'s to make.

        Return None if the parent keeps only a part of that window, or if no block is free.
        """
        assert child not in self._tables, f"{child} already holds KV"
        if shared_tokens == 0:
            return []
        size, first_token = self.block_size_tokens, max(0, shared_tokens - self.window_tokens + 1)
        source = self._tables.get(parent, _Table())
        if not source.covers(first_token, shared_tokens, size):
            return None
        table = _Table(first_token // size)
        if not table.extend(-(-shared_tokens // size), self._free):
            return None
        self._tables[child] = table
        shared = source.blocks[table.first - source.first :]
        return [
            BlockCopy(one, other, in_windows=True) for one, other in zip(shared, table.blocks, strict=False)
        ]

    def release(self, sequence: str) -> None:
        """Free the blocks of a sequence; one that holds none here is ignored."""
        self._unsettled.pop(sequence, None)
        table = self._tables.pop(sequence, None)
        if table is not None:
            table.drop(table.stop, self._free)

    def check(self) -> None:
        """Assert that no block is lost or held twice; O(blocks), for tests."""
        held = [block for table in self._tables.values() for block in table.blocks]
        free = [first + offset for first, length in self._free for offset in range(length)]
        assert sorted(held + free) == list(range(self.blocks)), "a block is lost"


class _Table:
    """Consecutive blocks of one sequence, from its block number `first` on."""

    __slots__ = ("blocks", "first")

    def __init__(self, first: int = 0) -> None:
        self.first = first
        self.blocks: list[int] = []

    @property
    def stop(self) -> int:
        return self.first + len(self.blocks)

    def covers(self, start: int, stop: int, block_size_tokens: int) -> bool:
        """Return whether the positions `start .. stop` (exclusive) have blocks here, as far as they exist."""
        return max(start, 0) // block_size_tokens >= self.first and stop <= self.stop * block_size_tokens

    def extend(self, stop: int, free: FreeRuns) -> bool:
        """Take blocks up to the number `stop` (exclusive); return False, and change nothing, if too few are free."""
        needed = stop - self.stop
        if needed > free.blocks:
            return False
        if needed > 0:
            for first, length in free.take(needed, self.blocks[-1] + 1 if self.blocks else None):
                self.blocks += range(first, first + length)
        return True

    def drop(self, first: int, free: FreeRuns) -> None:
        """Free the blocks before the number `first`."""
        unseen = first - self.first
        if unseen <= 0:
            return
        for block in self.blocks[:unseen]:
            free.give(block, 1)
        del self.blocks[:unseen]
        self.first = first
