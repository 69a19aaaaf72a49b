"""The block tables of layers with a sliding window: a rank keeps only the part of a sequence that later rows can see.

A row at position p of such a layer sees the positions p - W + 1 to p, so a sequence never again reads KV before the
window of its next row. These layers share a pool of their own, beside that of the layers that see the whole context.
Before a step runs, its sequences get blocks for the positions that it computes, and release the blocks that lie before
the windows of all later rows.

**Cached windows.** Every window block belongs to a block of the other layers, its *key*, which holds the same
positions. As long as a sequence holds the key or the prefix cache remembers it, the window block is kept, too, unless
its place is needed. A cached prefix can be used up to any position whose window is still here (`usable_blocks`). This
pool needs no hashes: the prefix cache knows the keys of a prefix, and the keys lead to their window blocks.

Blocks from inside a prompt are evicted first, in the order in which the windows passed them. Blocks where another prompt
may continue go last: the windows before the ends of prompts and sequences, and before a place where two prompts diverge.

**Agreement.** No message names a block of this pool. Every rank, and the controller for each lane, replay all steps on
tables of their own (`medha.kv.lane_replay`), so all of them agree. A step assigns blocks last. So a window that the
controller has found here is still here when a rank admits the request that shares it.

The pool is large enough for every step that a controller may send (`WindowNeed`). If it has too few windows for all
sequences that may run, admission counts those of running sequences (`medha.scheduler.window_places`), so that a step
never lacks a block.

Positions are those of one lane: the n-th token of a sequence that lies there has position n - 1.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from medha.errors import LedgerMismatch
from medha.kv.blocks import BlockCopy, BlockLedger, FreeRuns, Run, as_blocks

CACHED_WINDOW_PART = 8
"""Blocks of layers without a window for which the pool gets one additional block, to keep the windows of cached prefixes."""

LEAST_WINDOWS = 8
"""Least number of sequences for which a pool has windows, unless fewer may run."""

_NONE = -1


def frees_windows(windows: Sequence[int | None], *, has_tiers: bool) -> bool:
    """Return whether KV before the windows of layers can be freed, given these windows of all layers of the model.

    Tiers need it whole: they keep blocks of all layers alike.
    """
    return any(window is not None for window in windows) and not has_tiers


def widest_window(windows: Sequence[int | None]) -> int:
    """Return the widest window of the layers, in tokens; at least one layer must have a window."""
    return max(window for window in windows if window is not None)


@dataclass(frozen=True, slots=True)
class WindowNeed:
    """Blocks that sequences need in a lane's pool of windows, however the controller fills its steps.

    A sequence keeps its window, which may begin and end inside a block. A step needs more. Each lane computes at most
    `max_chunk_tokens` positions of prompts, and shard maps may place all of them on this lane. A step also computes
    `max_running` positions and drafts of decodes; and as many drafts of each step in flight may still be accepted.
    """

    sequence_blocks: int
    """Most blocks that one sequence keeps."""
    step_blocks: int
    """Blocks that a step needs in addition, for all sequences together."""
    longest_blocks: int
    """Blocks of the longest sequence in layers without a window; it never needs more here."""

    def of(self, sequences: int) -> int:
        """Return the blocks of a pool that never runs out while at most so many sequences run."""
        return min(sequences * self.sequence_blocks + self.step_blocks, sequences * self.longest_blocks)

    def places(self, blocks: int) -> int:
        """Return how many sequences may run on a pool of so many blocks, however long they are."""
        return max((blocks - self.step_blocks) // self.sequence_blocks, blocks // self.longest_blocks)

    def pools(self, max_running: int, whole_blocks: int, *, in_all_layers: bool) -> list[int]:
        """Return the sizes that a pool of windows may have, in blocks, the preferred one first.

        The preferred one has windows for `max_running` sequences. The other one is what a step needs, and half of the
        `whole_blocks` that the memory would hold if all layers kept their KV. So at least half as many short sequences
        run, and long ones get the rest. If all layers have windows, it may take all.
        """
        wished, least = self.of(max_running), self.of(min(max_running, LEAST_WINDOWS))
        most = whole_blocks if in_all_layers else max(whole_blocks // 2 + self.step_blocks, least)
        return [wished, most] if least <= most < wished else [wished]


def window_need(
    window_tokens: int,
    *,
    block_size_tokens: int,
    max_running: int,
    max_chunk_tokens: int,
    max_model_len: int,
    stages: int = 1,
    lanes: int = 1,
) -> WindowNeed:
    """Return the need of a replica whose layers see at most `window_tokens` tokens."""
    size = block_size_tokens
    longest_blocks = -(-max_model_len // size)
    step_tokens = max_running * (1 + stages) + lanes * max_chunk_tokens
    return WindowNeed(
        min(-(-window_tokens // size) + 2, longest_blocks), -(-step_tokens // size), longest_blocks
    )


def usable_blocks(are_here: npt.NDArray[np.bool_], window_tokens: int, block_size_tokens: int) -> int:
    """Return the length in blocks of the longest part of a cached prefix whose last window is here.

    `are_here` flags the blocks of the prefix whose windows are here. A request that shares this part next computes the row
    after it.
    """
    missing = np.flatnonzero(~are_here)
    if not len(missing):
        return len(are_here)
    # Between two missing blocks, and after the last one, lie blocks that are here. Enough of them hold a window.
    edges = np.concatenate(([-1], missing, [len(are_here)]))
    needed = -(-(window_tokens - 1) // block_size_tokens)
    is_enough = np.diff(edges) - 1 >= needed
    is_enough[0] = True  # a prefix that is here from its beginning on
    return int(edges[1 + int(np.flatnonzero(is_enough)[-1])])


class WindowTable(NamedTuple):
    """The blocks, int64, that hold the positions of one sequence from `first_token` on, in order."""

    first_token: int
    blocks: npt.NDArray[np.int64]

    def from_start(self, block_size_tokens: int) -> npt.NDArray[np.int64]:
        """Return a table of all positions from 0 on; those before the first one refer to block 0."""
        before = np.zeros(self.first_token // block_size_tokens, dtype=np.int64)
        return np.concatenate([before, self.blocks])


class WindowTables:
    """Assigns the blocks of layers whose rows see at most `window_tokens` tokens, beside the `ledger` of the other layers."""

    def __init__(self, ledger: BlockLedger, blocks: int, window_tokens: int) -> None:
        self.blocks = blocks
        self.block_size_tokens = ledger.block_size_tokens
        self.window_tokens = window_tokens
        self._ledger = ledger
        self._free = FreeRuns(blocks)
        self._holders = [0] * blocks  # sequences that hold each block
        self._keys = [_NONE] * blocks
        self._window_of = np.full(ledger.blocks, _NONE, dtype=np.int64)  # key -> block
        # Blocks that no sequence holds, kept for their content; the first one of each is evicted first. Plain dictionaries
        # would be slow: finding their first entry passes over all entries that were deleted before it.
        self._inner: OrderedDict[int, None] = OrderedDict()
        self._ends: OrderedDict[int, None] = OrderedDict()
        self._tables: dict[str, _Table] = {}
        self._unsettled: dict[str, int] = {}  # sequences of the last step -> first position that they keep
        self._forked: list[tuple[str, int]] = []  # sequences, each with the block of which it needs a copy

    @property
    def held_blocks(self) -> int:
        """Blocks that sequences hold."""
        return self.blocks - self.free_blocks - self.cached_blocks

    @property
    def free_blocks(self) -> int:
        """Blocks that are neither held nor cached."""
        return self._free.blocks

    @property
    def cached_blocks(self) -> int:
        """Blocks that no sequence holds, kept for their content alone."""
        return len(self._inner) + len(self._ends)

    def table(self, sequence: str) -> WindowTable:
        """Return the blocks of a sequence."""
        table = self._tables[sequence]
        return WindowTable(table.first * self.block_size_tokens, np.array(table.blocks, dtype=np.int64))

    # --- cached prefixes ------------------------------------------------------------------------------

    def are_here(self, keys: Sequence[Run]) -> npt.NDArray[np.bool_]:
        """Return for each of some blocks of the ledger whether a block of this pool is kept for it."""
        return np.asarray(self._window_of[as_blocks(keys)] != _NONE)

    def share(self, sequence: str, first_seen: int, cached: Sequence[Run]) -> None:
        """Let a new sequence hold the window at the end of the cached prefix `cached`, from position `first_seen` on.

        Raises:
            LedgerMismatch: a part of that window is not here.
        """
        keys = as_blocks(cached)
        first = first_seen // self.block_size_tokens
        blocks = self._window_of[keys[first:]].tolist()
        if _NONE in blocks:
            raise LedgerMismatch(
                f"{sequence} shares {len(keys)} cached blocks, and their last window is not here"
            )
        table = _Table(first, blocks)
        table.ends.append((first, len(keys)))
        for block in blocks:
            self._hold(block)
        self._tables[sequence] = table

    def will_end(self, sequence: str, first_seen: int, stop: int) -> None:
        """Record that a sequence's prompt ends at `stop`; a sequence that shares it sees positions from `first_seen` on."""
        size = self.block_size_tokens
        table = self._tables.setdefault(sequence, _Table())
        table.ends.append((first_seen // size, stop // size))

    def inserted(
        self, sequence: str, own: npt.NDArray[np.int64], cached: npt.NDArray[np.int64], stop: int
    ) -> None:
        """Keep the windows that a sequence computed in its blocks `own`, for the blocks `cached` of the same tokens.

        `cached` were remembered first. Both are the blocks before number `stop` of the sequence, where it diverges from
        the cached prefix.
        """
        mine = self._window_of[own]
        moves = (mine != _NONE) & (self._window_of[cached] == _NONE)
        self._window_of[own[moves]] = _NONE
        self._window_of[cached[moves]] = mine[moves]
        for block, key in zip(mine[moves].tolist(), cached[moves].tolist(), strict=True):
            self._keys[block] = key
        window = -(-self.window_tokens // self.block_size_tokens)
        for block in self._window_of[cached[-window:]].tolist():
            self._keep_longer(block)
        if sequence in self._tables:
            self._tables[sequence].ends.append((stop - window, stop))

    def forget(self, keys: Iterable[Run]) -> None:
        """Forget the windows of blocks of the ledger whose content is forgotten."""
        for first, length in keys:
            windows = self._window_of[first : first + length]
            for block in windows[windows != _NONE].tolist():
                self._keys[block] = _NONE
                if self._holders[block] == 0:
                    self._inner.pop(block, None)
                    self._ends.pop(block, None)
                    self._free.give(block, 1)
            windows[:] = _NONE

    # --- steps ----------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Release the blocks that no row after the last step sees, nor the first row of a fork."""
        size = self.block_size_tokens
        for sequence, first_kept in self._unsettled.items():
            table, first = self._tables[sequence], first_kept // size
            if first > table.first:
                self._drop(table, first)
        self._unsettled.clear()

    def fork(self, parent: str, child: str, first_seen: int, shared_tokens: int) -> None:
        """Let `child` share `parent`'s window before position `shared_tokens`, from position `first_seen` on.

        A block that is shared only in part is copied (`copy_forks`).

        Raises:
            LedgerMismatch: the parent keeps only a part of that window.
        """
        assert child not in self._tables, f"{child} already holds KV"
        if shared_tokens == 0:
            return
        size = self.block_size_tokens
        source = self._tables.get(parent, _Table())
        if not source.covers(first_seen, shared_tokens, size):
            raise LedgerMismatch(f"{parent} has freed the window that {child} is to share")
        whole, partial_tokens = divmod(shared_tokens, size)
        first = min(max(first_seen, 0) // size, whole)
        table = _Table(first, source.blocks[first - source.first : whole - source.first])
        for block in table.blocks:
            self._hold(block)
        self._tables[child] = table
        if partial_tokens:
            self._forked.append((child, source.blocks[whole - source.first]))

    def copy_forks(self) -> list[BlockCopy]:
        """Give forks their own blocks for those that they share in part; return the copies to make.

        Raises:
            LedgerMismatch: no block is free.
        """
        copies: list[BlockCopy] = []
        for child, source in self._forked:
            table = self._tables[child]
            self._extend(child, table, table.stop + 1)
            copies.append(BlockCopy(source, table.blocks[-1], in_windows=True))
        self._forked.clear()
        return copies

    def place(self, sequence: str, first_seen: int, start: int, stop: int, first_kept: int) -> None:
        """Give a sequence blocks for positions `start .. stop` (exclusive), which the next step computes.

        Its first row sees the positions from `first_seen` on. Those before `first_kept` are released when the next step begins.

        Raises:
            LedgerMismatch: the window of the first row is not here, or no block is free.
        """
        table = self._tables.get(sequence)
        if table is None:
            table = self._tables[sequence] = _Table()
        size, first = self.block_size_tokens, table.first
        held_stop = (first + len(table.blocks)) * size
        if max(first_seen, 0) // size < first or start > held_stop:
            raise LedgerMismatch(
                f"{sequence}: positions {start} to {stop} need the KV from {max(first_seen, 0)} on, and only that of "
                f"{first * size} to {held_stop} is here"
            )
        if stop > held_stop:
            self._extend(sequence, table, -(-stop // size))
        self._unsettled[sequence] = first_kept

    def release(self, sequence: str) -> None:
        """Release the blocks of a sequence, which then stay cached as long as their keys are remembered.

        A sequence that holds none here is ignored.
        """
        self._unsettled.pop(sequence, None)
        table = self._tables.pop(sequence, None)
        if table is not None:
            if table.first > 0:  # the window before its last whole block may begin there
                [(key, _)] = self._ledger.runs(sequence, table.first - 1, table.first)
                self._keep_longer(int(self._window_of[key]))
            table.ends.append((table.first, table.stop))
            self._drop(table, table.stop)

    # --- state ----------------------------------------------------------------------------------------

    def digest(self) -> bytes:
        """Return a digest of all tables and all that is cached; it is equal on all copies of these tables."""
        digest = blake2b(digest_size=8)
        for name, table in sorted(self._tables.items()):
            digest.update(f"{len(name)}:{name}:{table.first}:{len(table.blocks)}:".encode())
            digest.update(np.array(table.blocks, dtype=np.int64).tobytes())
        keys = np.flatnonzero(self._window_of != _NONE)
        cached = [np.fromiter(blocks, np.int64, len(blocks)) for blocks in (self._inner, self._ends)]
        for numbers in (*cached, keys, self._window_of[keys]):
            digest.update(f"{len(numbers)}:".encode())
            digest.update(numbers.tobytes())
        return digest.digest()

    def check(self) -> None:
        """Assert that no block is lost, held wrongly or cached without a key; O(blocks), for tests."""
        holders = [0] * self.blocks
        for table in self._tables.values():
            assert len(set(table.blocks)) == len(table.blocks)
            for block in table.blocks:
                holders[block] += 1
        assert holders == self._holders
        cached = [*self._inner, *self._ends]
        assert not any(holders[block] for block in cached)
        assert all(self._keys[block] != _NONE for block in cached)
        free = [first + offset for first, length in self._free for offset in range(length)]
        held = [block for block, count in enumerate(holders) if count]
        assert sorted(held + cached + free) == list(range(self.blocks)), "a block is lost"
        keyed = {key: block for block, key in enumerate(self._keys) if key != _NONE}
        assert keyed == {
            int(key): int(self._window_of[key]) for key in np.flatnonzero(self._window_of != _NONE)
        }
        assert not self._forked

    def _hold(self, block: int) -> None:
        if self._holders[block] == 0:
            self._inner.pop(block, None)
            self._ends.pop(block, None)
        self._holders[block] += 1

    def _keep_longer(self, block: int) -> None:
        """Evict a block from inside a prompt as late as those at its end."""
        if block in self._inner:
            del self._inner[block]
            self._ends[block] = None

    def _drop(self, table: _Table, first: int) -> None:
        """Release the blocks of a table before the number `first`."""
        unseen = min(first - table.first, len(table.blocks))
        if unseen <= 0:
            return
        for number, block in enumerate(islice(table.blocks, unseen), table.first):
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            if self._keys[block] == _NONE:
                self._free.give(block, 1)
            elif table.is_end(number):
                self._ends[block] = None
            else:
                self._inner[block] = None
        del table.blocks[:unseen]
        table.first += unseen

    def _extend(self, sequence: str, table: _Table, stop: int) -> None:
        """Give a sequence blocks up to the number `stop` (exclusive); evict cached ones if need be.

        Raises:
            LedgerMismatch: too few are free; nothing has changed then.
        """
        start, needed = table.stop, stop - table.stop
        lacking = needed - self._free.blocks
        if lacking > self.cached_blocks:
            raise LedgerMismatch(
                f"{sequence} needs {needed} blocks of layers with a window, and {self.held_blocks} of {self.blocks} are held"
            )
        for _ in range(lacking):
            block, _ = (self._inner or self._ends).popitem(last=False)
            self._window_of[self._keys[block]] = _NONE
            self._keys[block] = _NONE
            self._free.give(block, 1)
        for first, length in self._free.take(needed, table.blocks[-1] + 1 if table.blocks else None):
            table.blocks += range(first, first + length)
        taken = table.blocks[start - table.first :]
        for block in taken:
            self._holders[block] = 1
        keys = as_blocks(self._ledger.runs(sequence, start, stop))
        self._window_of[keys] = taken
        for block, key in zip(taken, keys.tolist(), strict=True):
            self._keys[block] = key


class _Table:
    """Consecutive blocks of one sequence, from its block number `first` on."""

    __slots__ = ("blocks", "ends", "first")

    def __init__(self, first: int = 0, blocks: Sequence[int] = ()) -> None:
        self.first = first
        self.blocks: list[int] = list(blocks)
        self.ends: list[tuple[int, int]] = []  # numbers of blocks with windows where prompts may continue

    @property
    def stop(self) -> int:
        return self.first + len(self.blocks)

    def covers(self, start: int, stop: int, block_size_tokens: int) -> bool:
        """Return whether the positions `start .. stop` (exclusive) have blocks here, as far as they exist."""
        return max(start, 0) // block_size_tokens >= self.first and stop <= self.stop * block_size_tokens

    def is_end(self, number: int) -> bool:
        return any(first <= number < stop for first, stop in self.ends)
