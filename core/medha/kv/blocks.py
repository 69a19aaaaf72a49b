"""The KV ledger of one lane: which sequence holds which blocks. It holds numbers only, no tensors.

The controller and every rank of a lane each own a ledger and apply the same operations in the same order
(`medha.kv.pools` decides them, `medha.kv.lane_replay` replays them). So all of them agree on every block
table although no table is ever sent. `state_hash` helps to detect a disagreement.

A block is in one of three states: *held* by one or more sequences, *remembered* only by the prefix cache, or
*free*. A held block may be remembered as well; it then stays cached when its last sequence releases it. The
controller's `medha.kv.prefix_cache` decides which blocks to remember and which to evict first; a ledger only
carries that out.

A sequence holds the blocks of its reservation from admission on, and more when it grows. So the ledger can hand
out *contiguous runs* of blocks: a CPU rank reads a contiguous run of KV in place, without gathering blocks. Tables
are stored as runs, so that a million tokens cost no more than a thousand unless the pool is fragmented.

If a lane streams KV, it also has *streamed* blocks, which lie in host memory. Their numbers follow those of the pool. The
table of a sequence begins with its streamed blocks, if it has any; they are never shared, remembered or evicted.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Run = tuple[int, int]
"""Consecutive blocks: the first one, and how many."""


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy-on-write: the KV of block `source` must be copied to block `target` before the next entry runs.

    `in_windows`: they are blocks of the layers that free KV before their windows; otherwise of all other layers.
    """

    source: int
    target: int
    in_windows: bool = False


class BlockLedger:
    """Assigns `blocks` KV blocks, of `block_size_tokens` tokens each, to sequences.

    A request gets the smallest run of free blocks that holds it whole (best fit), else the longest runs
    first, so that tables consist of few runs. Cost per operation: O(runs touched * log(free runs)), and a
    numpy pass over the blocks touched.
    """

    def __init__(self, blocks: int, block_size_tokens: int, streamed_blocks: int = 0) -> None:
        assert blocks >= 0
        assert block_size_tokens > 0
        self.blocks = blocks
        self.block_size_tokens = block_size_tokens
        self.streamed_blocks = streamed_blocks
        """Blocks in host memory. Only `streamed_blocks` and names that contain `streamed` count them."""
        self._free_runs = FreeRuns(blocks)
        self._free_streamed_runs = FreeRuns(streamed_blocks, blocks)
        self._idle_blocks = 0  # remembered, and held by no sequence
        self._tables: dict[str, list[Run]] = {}
        self._table_blocks: dict[str, int] = {}
        self._encoded: dict[
            str, bytes
        ] = {}  # for `state_hash`: tables that have not changed since its last call
        self._streamed: dict[str, int] = {}  # streamed blocks of each sequence that has some
        self._holders = np.zeros(blocks + streamed_blocks, dtype=np.int32)  # sequences that hold each block
        self._remembered = np.zeros(blocks, dtype=np.bool_)
        self._remembered_digest: bytes | None = None  # None after a change of `_remembered`

    @property
    def free_blocks(self) -> int:
        """Blocks that are neither held nor remembered."""
        return self._free_runs.blocks

    @property
    def free_streamed_blocks(self) -> int:
        """Streamed blocks that no sequence holds."""
        return self._free_streamed_runs.blocks

    def streamed_blocks_of(self, sequence: str) -> int:
        """Return how many of the first blocks of a sequence's table are streamed."""
        return self._streamed.get(sequence, 0)

    @property
    def remembered_blocks(self) -> int:
        """Blocks that no sequence holds, kept for their content alone."""
        return self._idle_blocks

    @property
    def remembered(self) -> npt.NDArray[np.bool_]:
        """Flags of the remembered blocks, held or not; read-only."""
        return self._remembered

    @property
    def held_blocks(self) -> int:
        return self.blocks - self._free_runs.blocks - self._idle_blocks

    @property
    def free_tokens(self) -> int:
        return self._free_runs.blocks * self.block_size_tokens

    def __contains__(self, sequence: str) -> bool:
        return sequence in self._tables

    def __len__(self) -> int:
        return len(self._tables)

    def table(self, sequence: str) -> npt.NDArray[np.int64]:
        """Return the block table of a sequence: position p lies in block `table[p // block_size_tokens]`."""
        runs = self._tables[sequence]
        if len(runs) == 1:
            return np.arange(runs[0][0], runs[0][0] + runs[0][1])
        return np.concatenate(
            [np.arange(first, first + length) for first, length in runs] or [np.empty(0, np.int64)]
        )

    def runs(self, sequence: str, start: int = 0, stop: int | None = None) -> list[Run]:
        """Return blocks `start .. stop` (exclusive) of a sequence's table, as runs in table order."""
        return cut_runs(self._tables[sequence], start, self._table_blocks[sequence] if stop is None else stop)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size_tokens)

    def reserved_tokens(self, sequence: str) -> int:
        """Return how many tokens the sequence's blocks can hold."""
        return self._table_blocks[sequence] * self.block_size_tokens

    def fits(self, tokens: int) -> bool:
        """Return whether a new sequence of `tokens` tokens that shares nothing can be reserved now."""
        return self.blocks_for(tokens) <= self.free_blocks

    def reserve(
        self, sequence: str, tokens: int, cached: Sequence[Run] = (), *, device_blocks: int = 0
    ) -> bool:
        """Give a new sequence the blocks for `tokens` tokens, or change nothing and return False.

        Its table begins with the remembered blocks `cached`, which it shares; the rest are free ones. With `device_blocks`,
        at most that many blocks come from the pool: the last ones of the table. All before them are streamed, and
        nothing is shared.
        """
        assert sequence not in self._tables, f"{sequence} already holds KV"
        runs: list[Run] = []
        if device_blocks:
            assert not cached
            return self._reserve_streamed(sequence, runs, self.blocks_for(tokens), device_blocks)
        if not cached:
            needed = self.blocks_for(tokens)
            if needed > self.free_blocks:
                return False
            self._extend(sequence, runs, 0, needed, after=None)
            return True
        shared = sum(length for _, length in cached)
        needed = self.blocks_for(tokens) - shared
        assert needed >= 0, f"{sequence} shares {shared} blocks but reserves {tokens} tokens"
        if needed > self.free_blocks:
            return False
        for first, length in cached:
            assert self._remembered[first : first + length].all(), f"blocks {first}+{length} are not cached"
        self._share(cached)
        for run in cached:
            append_run(runs, run)
        self._extend(sequence, runs, shared, needed, after=_end(runs))
        return True

    def _reserve_streamed(self, sequence: str, runs: list[Run], needed: int, device_blocks: int) -> bool:
        streamed = max(needed - device_blocks, 0)
        if streamed > self.free_streamed_blocks or needed - streamed > self.free_blocks:
            return False
        if streamed:
            self._streamed[sequence] = streamed
            for run in self._free_streamed_runs.take(streamed, None):
                self._holders[run[0] : run[0] + run[1]] = 1
                append_run(runs, run)
        self._extend(sequence, runs, streamed, needed - streamed, after=None)
        return True

    def grow(self, sequence: str, tokens: int) -> bool:
        """Extend the reservation of a sequence to `tokens` tokens, or change nothing and return False."""
        held = self._table_blocks[sequence]
        needed = self.blocks_for(tokens) - held
        if needed > self.free_blocks:
            return False
        if needed > 0:
            runs = self._tables[sequence]
            self._extend(sequence, runs, held, needed, after=_end(runs))
        return True

    def fork(self, parent: str, child: str, shared_tokens: int, tokens: int) -> list[BlockCopy] | None:
        """Let `child` share the first `shared_tokens` tokens of `parent`, and reserve `tokens` in all.

        Whole blocks are shared by reference. A block that is shared only in part would be written by both, so
        the child gets its own, and the copy to make is returned. Return None, and change nothing, if KV is
        short.
        """
        assert child not in self._tables, f"{child} already holds KV"
        assert shared_tokens <= min(tokens, self.reserved_tokens(parent))
        assert parent not in self._streamed, f"{parent} has streamed blocks, which are not shared"
        whole, partial_tokens = divmod(shared_tokens, self.block_size_tokens)
        needed = self.blocks_for(tokens) - whole
        if needed > self.free_blocks:
            return None
        shared = self.runs(parent, 0, whole)
        self._share(shared)
        self._extend(child, shared, whole, needed, after=None)
        if partial_tokens == 0:
            return []
        [(source, _)] = self.runs(parent, whole, whole + 1)
        [(target, _)] = self.runs(child, whole, whole + 1)
        return [BlockCopy(source, target)]

    def release(self, sequence: str) -> None:
        """Release the blocks of a sequence; shared ones stay held, and remembered ones stay cached."""
        runs = self._tables.pop(sequence)
        del self._table_blocks[sequence]
        self._encoded.pop(sequence, None)
        if self._streamed.pop(sequence, 0):
            for run in [one for one in runs if one[0] >= self.blocks]:
                runs.remove(run)
                self._holders[run[0] : run[0] + run[1]] = 0
                self._free_streamed_runs.give(*run)
        for first, length in sorted(runs):
            holders = self._holders[first : first + length]
            remembered = self._remembered[first : first + length]
            holders -= 1
            if not holders.any():
                idle = int(np.count_nonzero(remembered))
                self._idle_blocks += idle
                if idle == 0:
                    self._free_runs.give(first, length)
                elif idle < length:
                    self._free(first, ~remembered)
            else:
                unheld = holders == 0
                self._idle_blocks += int(np.count_nonzero(unheld & remembered))
                self._free(first, unheld & ~remembered)

    def freed_in_turn(self) -> Callable[[str], int]:
        """Return a function that counts the blocks which come free if a given sequence is released.

        Each call assumes that the sequences of all earlier calls have been released. The ledger does not change.
        """
        left = self._holders.copy()

        def freed(sequence: str) -> int:
            found = 0
            for first, length in self._tables[sequence]:
                if first >= self.blocks:
                    continue
                holders = left[first : first + length]
                holders -= 1
                found += length - int(np.count_nonzero(holders))
            return found

        return freed

    def remember(self, sequence: str, start: int, count: int) -> list[Run]:
        """Mark blocks `start .. start + count` of a sequence's table as remembered; return them as runs.

        They keep their content when the sequence releases them.
        """
        runs = self.runs(sequence, start, start + count)
        assert sum(length for _, length in runs) == count, f"{sequence} has no blocks {start}+{count}"
        for first, length in runs:
            assert not self._remembered[first : first + length].any(), (
                f"{first}+{length} is remembered already"
            )
            self._remembered[first : first + length] = True
        self._remembered_digest = None
        return runs

    def evict(self, runs: Iterable[Run]) -> None:
        """Forget the content of remembered blocks; those that no sequence holds become free."""
        self._remembered_digest = None
        for first, length in runs:
            remembered = self._remembered[first : first + length]
            assert remembered.all(), f"blocks {first}+{length} are not cached"
            remembered[:] = False
            holders = self._holders[first : first + length]
            if not holders.any():
                self._idle_blocks -= length
                self._free_runs.give(first, length)
            else:
                unheld = holders == 0
                self._idle_blocks -= int(np.count_nonzero(unheld))
                self._free(first, unheld)

    def free_runs(self, runs: Iterable[Run]) -> list[Run]:
        """Return those of these blocks that are free."""
        found: list[Run] = []
        for first, length in runs:
            busy = self._remembered[first : first + length] | (self._holders[first : first + length] > 0)
            found += runs_in(~busy, first)
        return found

    def state_hash(self, also: bytes = b"") -> int:
        """Return a 53-bit digest of all tables, the remembered blocks, and `also`, which is related state.

        It is equal on all copies of this ledger.
        """
        tables: list[bytes] = []
        for sequence in sorted(self._tables):
            encoded = self._encoded.get(sequence)
            if encoded is None:
                runs = "".join([f"{first}+{length};" for first, length in self._tables[sequence]])
                encoded = self._encoded[sequence] = f"{len(sequence)}:{sequence}{runs}".encode()
            tables.append(encoded)
        digest = blake2b(b"".join(tables), digest_size=8)
        if self._remembered_digest is None:
            bits = np.packbits(self._remembered).tobytes()
            self._remembered_digest = blake2b(bits, digest_size=8).digest()
        digest.update(self._remembered_digest)
        digest.update(also)
        return int.from_bytes(digest.digest(), "big") >> 11  # 53 bits fit a JSON number

    def check(self) -> None:
        """Assert that no block is lost, held wrongly or counted twice; O(blocks), for tests."""
        holders = np.zeros(self.blocks + self.streamed_blocks, dtype=np.int32)
        for sequence in self._tables:
            table = self.table(sequence)
            assert len(table) == self._table_blocks[sequence] == len(set(table.tolist()))
            streamed = self.streamed_blocks_of(sequence)
            assert (table[:streamed] >= self.blocks).all()
            assert (table[streamed:] < self.blocks).all()
            holders[table] += 1
        assert np.array_equal(holders, self._holders)
        assert holders[self.blocks :].max(initial=0) <= 1
        free = np.zeros(self.blocks + self.streamed_blocks, dtype=np.bool_)
        for first, length in (*self._free_runs, *self._free_streamed_runs):
            assert not free[first : first + length].any()
            free[first : first + length] = True
        unheld = holders == 0
        unheld[: self.blocks] &= ~self._remembered
        assert np.array_equal(free, unheld), "a block is lost"
        # Converted to a Python integer: compiled code rejects a numpy value as the result of `==`.
        idle = int(np.count_nonzero(self._remembered & (holders[: self.blocks] == 0)))
        assert self._idle_blocks == idle

    def _share(self, runs: Iterable[Run]) -> None:
        """Count one more sequence on blocks that are held or remembered."""
        for first, length in runs:
            holders = self._holders[first : first + length]
            self._idle_blocks -= int(length - np.count_nonzero(holders))
            holders += 1

    def _extend(self, sequence: str, runs: list[Run], held: int, needed: int, after: int | None) -> None:
        """Set a sequence's table to `runs` (`held` blocks) and `needed` free ones, if possible at `after`."""
        for run in self._free_runs.take(needed, after):
            self._holders[run[0] : run[0] + run[1]] = 1
            append_run(runs, run)
        self._tables[sequence] = runs
        self._table_blocks[sequence] = held + needed
        self._encoded.pop(sequence, None)

    def _free(self, first: int, freed: npt.NDArray[np.bool_]) -> None:
        """Free the blocks `first + i` for which `freed[i]` is set."""
        for run in runs_in(freed, first):
            self._free_runs.give(*run)


class FreeRuns:
    """Disjoint, maximal runs of free blocks, found by place and by length."""

    def __init__(self, blocks: int, first: int = 0) -> None:
        """Begin with the blocks from `first` on, all of them free."""
        self.blocks = 0
        self._lengths: dict[int, int] = {}  # first block -> length
        self._by_place: list[int] = []  # first blocks, ascending
        self._by_length: list[Run] = []  # (length, first block), ascending
        if blocks:
            self._insert(first, blocks)

    def __iter__(self) -> Iterator[Run]:
        return ((first, self._lengths[first]) for first in self._by_place)

    def take(self, needed: int, after: int | None) -> list[Run]:
        """Remove and return `needed` free blocks, of which there must be enough; first a run that begins at `after`."""
        taken: list[Run] = []
        while needed:
            if after is not None and after in self._lengths:
                first = after
            else:
                index = bisect_left(self._by_length, (needed, -1))
                if index == len(self._by_length):  # no run holds all: take the first of the longest ones
                    index = bisect_left(self._by_length, (self._by_length[-1][0], -1))
                first = self._by_length[index][1]
            if needed < self._lengths[first]:
                self._shorten(first, needed)
                return [*taken, (first, needed)]
            length = self._remove(first)
            taken.append((first, length))
            needed -= length
            after = None
        return taken

    def give(self, first: int, length: int) -> None:
        """Add a run and merge it with its neighbours."""
        behind = first + length
        if behind in self._lengths:
            length += self._remove(behind)
        index = bisect_left(self._by_place, first)
        if index > 0:
            before = self._by_place[index - 1]
            if before + self._lengths[before] == first:
                length += self._remove(before)
                first = before
        self._insert(first, length)

    def _shorten(self, first: int, count: int) -> None:
        """Remove the first `count` blocks of a longer run, which keeps its place among the others."""
        length, by_length = self._lengths.pop(first), self._by_length
        behind, left = first + count, length - count
        self._lengths[behind] = left
        self._by_place[bisect_left(self._by_place, first)] = behind
        del by_length[bisect_left(by_length, (length, first))]
        insort(by_length, (left, behind))
        self.blocks -= count

    def _insert(self, first: int, length: int) -> None:
        self._lengths[first] = length
        insort(self._by_place, first)
        insort(self._by_length, (length, first))
        self.blocks += length

    def _remove(self, first: int) -> int:
        length = self._lengths.pop(first)
        del self._by_place[bisect_left(self._by_place, first)]
        del self._by_length[bisect_left(self._by_length, (length, first))]
        self.blocks -= length
        return length


def append_run(runs: list[Run], run: Run) -> None:
    """Append a run, merged with the last one if it follows directly."""
    if runs and _end(runs) == run[0]:
        runs[-1] = (runs[-1][0], runs[-1][1] + run[1])
    else:
        runs.append(run)


def _end(runs: Sequence[Run]) -> int | None:
    """Return the block after the last one; None if there are no runs."""
    return runs[-1][0] + runs[-1][1] if runs else None


def cut_runs(runs: Sequence[Run], start: int, stop: int) -> list[Run]:
    """Return blocks `start .. stop` (exclusive) of the blocks listed by `runs`."""
    if len(runs) == 1:
        first, length = runs[0]
        stop = min(stop, length)
        return [(first + start, stop - start)] if start < stop else []
    found: list[Run] = []
    position = 0
    for first, length in runs:
        skipped, end = max(start - position, 0), min(stop - position, length)
        if skipped < end:
            found.append((first + skipped, end - skipped))
        position += length
        if position >= stop:
            break
    return found


def as_blocks(runs: Sequence[Run]) -> npt.NDArray[np.int64]:
    """Return all blocks of some runs, int64, in order."""
    return np.concatenate([np.arange(0), *(np.arange(first, first + length) for first, length in runs)])


def runs_in_order(blocks: npt.NDArray[np.int64]) -> list[Run]:
    """Return blocks, in their order, as runs."""
    ends = [0, *(np.flatnonzero(np.diff(blocks) != 1) + 1).tolist(), len(blocks)]
    return [(int(blocks[start]), stop - start) for start, stop in pairwise(ends) if stop > start]


def runs_in(flags: npt.NDArray[np.bool_], first: int = 0) -> list[Run]:
    """Return the blocks `first + i` for which `flags[i]` is set, as runs."""
    inside = np.concatenate(([False], flags, [False]))
    borders = np.flatnonzero(inside[1:] != inside[:-1]).tolist()
    return [(first + start, stop - start) for start, stop in zip(borders[::2], borders[1::2], strict=True)]
