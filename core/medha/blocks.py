"""The KV ledger of one lane: who holds which blocks. Numbers only, no tensors.

The controller and every rank of a lane own one ledger each, and apply the same operations in the same
order (`Step.releases`, `admits`, `grows`), so all of them agree on every block table without one ever
crossing a wire. `state_hash` makes a disagreement visible.

A sequence holds the blocks of its whole reservation from admission on. That makes "no admitted sequence runs
out" a fact of the ledger rather than a hope, and lets the ledger hand out *contiguous runs* of blocks: a
CPU rank reads a contiguous run of KV in place, without gathering blocks.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy-on-write: the KV of block `source` must be copied to block `target` before the next entry runs."""

    source: int
    target: int


class BlockLedger:
    """Which of `blocks` KV blocks, of `block_size_tokens` tokens each, belong to which sequence.

    Free blocks are kept as disjoint runs in ascending order. A request is served from the smallest run that
    holds it whole (best fit), else from the longest runs first, so that tables stay in few runs.
    Cost: O(runs) per operation.
    """

    def __init__(self, blocks: int, block_size_tokens: int) -> None:
        assert blocks >= 0
        assert block_size_tokens > 0
        self.blocks = blocks
        self.block_size_tokens = block_size_tokens
        self._free_runs: list[tuple[int, int]] = [(0, blocks)] if blocks else []  # (first block, length)
        self._free = blocks
        self._tables: dict[str, list[int]] = {}
        self._holders = [0] * blocks  # sequences that hold each block; over one after a fork

    @property
    def free_blocks(self) -> int:
        return self._free

    @property
    def held_blocks(self) -> int:
        return self.blocks - self._free

    @property
    def free_tokens(self) -> int:
        return self._free * self.block_size_tokens

    def __contains__(self, sequence: str) -> bool:
        return sequence in self._tables

    def __len__(self) -> int:
        return len(self._tables)

    def table(self, sequence: str) -> Sequence[int]:
        """The block table of a sequence: token position p lies in block `table[p // block_size_tokens]`."""
        return self._tables[sequence]

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size_tokens)

    def reserved_tokens(self, sequence: str) -> int:
        """Tokens that the sequence's blocks can hold."""
        return len(self._tables[sequence]) * self.block_size_tokens

    def fits(self, tokens: int) -> bool:
        """Whether a new sequence of `tokens` tokens, sharing nothing, can be reserved now."""
        return self.blocks_for(tokens) <= self._free

    def reserve(self, sequence: str, tokens: int) -> bool:
        """Give a new sequence the blocks for `tokens` tokens, or change nothing and return False."""
        assert sequence not in self._tables, f"{sequence} already holds KV"
        wanted = self.blocks_for(tokens)
        if wanted > self._free:
            return False
        self._tables[sequence] = self._take(wanted, after=None)
        return True

    def grow(self, sequence: str, tokens: int) -> bool:
        """Let the reservation of a sequence reach `tokens` tokens, or change nothing and return False."""
        table = self._tables[sequence]
        wanted = self.blocks_for(tokens) - len(table)
        if wanted > self._free:
            return False
        if wanted > 0:
            table.extend(self._take(wanted, after=table[-1] if table else None))
        return True

    def fork_fits(self, shared_tokens: int, tokens: int) -> bool:
        """Whether `fork` with these arguments would succeed now."""
        return self.blocks_for(tokens) - shared_tokens // self.block_size_tokens <= self._free

    def fork(self, parent: str, child: str, shared_tokens: int, tokens: int) -> list[BlockCopy] | None:
        """Let `child` share the first `shared_tokens` tokens of `parent`, and reserve `tokens` in all.

        Whole blocks are shared by reference. A block that is shared only in part would be written by both,
        so the child gets its own, and the copy to make is returned. None: nothing fits, nothing changed.
        """
        assert child not in self._tables, f"{child} already holds KV"
        assert shared_tokens <= min(tokens, self.reserved_tokens(parent))
        whole, partial_tokens = divmod(shared_tokens, self.block_size_tokens)
        wanted = self.blocks_for(tokens) - whole
        if wanted > self._free:
            return None
        shared = self._tables[parent][:whole]
        for block in shared:
            self._holders[block] += 1
        own = self._take(wanted, after=None)
        self._tables[child] = shared + own
        if partial_tokens == 0:
            return []
        return [BlockCopy(source=self._tables[parent][whole], target=own[0])]

    def release(self, sequence: str) -> None:
        """Give back what a sequence holds; blocks that others share stay theirs."""
        freed = []
        for block in self._tables.pop(sequence):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                freed.append(block)
        for first, length in _runs(sorted(freed)):
            self._give(first, length)

    def state_hash(self) -> int:
        """A 53-bit digest of every table (fits a JSON number); equal on all replicas of this ledger."""
        digest = blake2b(digest_size=8)
        for sequence in sorted(self._tables):
            digest.update(b"%d:%s" % (len(sequence), sequence.encode()))
            for first, length in _runs(self._tables[sequence]):
                digest.update(b"%d+%d;" % (first, length))
        return int.from_bytes(digest.digest(), "big") >> 11

    def _take(self, wanted: int, after: int | None) -> list[int]:
        """Remove `wanted` free blocks from the free runs; first those that continue block `after`."""
        taken: list[int] = []
        while len(taken) < wanted:
            missing = wanted - len(taken)
            index = self._best_run(missing, after)
            first, length = self._free_runs[index]
            used = min(length, missing)
            taken.extend(range(first, first + used))
            if used == length:
                del self._free_runs[index]
            else:
                self._free_runs[index] = (first + used, length - used)
            after = None
        for block in taken:
            self._holders[block] = 1
        self._free -= wanted
        return taken

    def _best_run(self, missing: int, after: int | None) -> int:
        if after is not None:
            index = bisect_left(self._free_runs, (after + 1, 0))
            if index < len(self._free_runs) and self._free_runs[index][0] == after + 1:
                return index
        candidates = range(len(self._free_runs))
        large_enough = [index for index in candidates if self._free_runs[index][1] >= missing]
        if large_enough:
            return min(large_enough, key=lambda index: self._free_runs[index][1])
        return max(candidates, key=lambda index: self._free_runs[index][1])

    def _give(self, first: int, length: int) -> None:
        """Insert a free run and join it with its neighbours."""
        self._free += length
        index = bisect_left(self._free_runs, (first, 0))
        if index < len(self._free_runs) and self._free_runs[index][0] == first + length:
            length += self._free_runs.pop(index)[1]
        if index > 0:
            before, before_length = self._free_runs[index - 1]
            if before + before_length == first:
                self._free_runs[index - 1] = (before, before_length + length)
                return
        insort(self._free_runs, (first, length))


def _runs(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """Maximal runs (first, length) of consecutive numbers in `blocks`, in their order."""
    runs: list[tuple[int, int]] = []
    for block in blocks:
        if runs and block == runs[-1][0] + runs[-1][1]:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((block, 1))
    return runs
