"""Blocks of one lane's host tier that wait to be written to files, and which of them come next.

A disk takes longer than an offload, so most blocks that come to a host tier have to wait. They wait in the tier, where prompts
can use them meanwhile, and are dropped like all other blocks. So if the disk is too slow, some blocks are never written, but no
step waits for the disk, and no memory is held for it.

Extents that are worth most come first (`medha.kv.host_tier`): what takes long to compute again, and a prefix before what
continues it. If a prefix cannot be written whole, its beginning is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush


@dataclass(frozen=True, slots=True)
class Part:
    """Blocks `first .. first + count` of an extent."""

    extent: int
    first: int
    count: int


@dataclass(slots=True)
class _Waiting:
    worth: float
    start: int
    blocks: int
    taken: int = 0  # from its beginning


class UnwrittenBlocks:
    """Extents of a host tier of which a disk tier has not taken all blocks yet."""

    def __init__(self, written_blocks: Callable[[str, int, int], int] = lambda *_: 0) -> None:
        """`written_blocks` returns how many of the blocks `start .. stop` of a prompt files hold, from the first one on."""
        self._written_blocks = written_blocks
        self.lost_blocks = 0
        """Blocks that the host tier has dropped before the disk tier took them, or had no place for at all."""
        self.blocks = 0
        """Blocks that wait."""
        self._extents: dict[int, _Waiting] = {}
        # Heap of (-worth, start, extent); stale entries are skipped.
        self._turns: list[tuple[float, int, int]] = []

    def __bool__(self) -> bool:
        return bool(self._extents)

    def add(self, extent: int, worth: float, start: int, blocks: int, first: int = 0) -> None:
        """Let the blocks of an extent from number `first` on wait; its blocks are the `start`-th of a prompt and those behind it."""
        one = self._extents.get(extent)
        if one is not None:
            self.blocks += max(one.taken - first, 0)
            one.taken = min(one.taken, first)
            return
        self._extents[extent] = one = _Waiting(worth, start, blocks, first)
        self.blocks += blocks - first
        self._offer(extent, one)

    def raised(self, extent: int, worth: float) -> None:
        """Note that an extent is worth more than before; does nothing if it does not wait."""
        one = self._extents.get(extent)
        if one is not None and one.worth < worth:
            one.worth = worth
            self._offer(extent, one)

    def cut(self, extent: int, blocks: int) -> None:
        """Note that the host tier has so many blocks of an extent left; does nothing if it does not wait."""
        one = self._extents.get(extent)
        if one is None:
            return
        lost_blocks = one.blocks - max(blocks, one.taken)
        self.lost_blocks += lost_blocks
        self.blocks -= lost_blocks
        one.blocks = blocks
        if one.taken >= blocks:
            del self._extents[extent]

    def turned_away(self, hashes: str, start: int, stop: int) -> None:
        """Note that the host tier has no place for the blocks `start .. stop` of a prompt, so that no file gets them either."""
        self.lost_blocks += stop - start - self._written_blocks(hashes, start, stop)

    def take(self, most_blocks: int) -> Part | None:
        """Take up to `most_blocks` blocks of the extent that comes next; None if none waits."""
        while self._turns:
            worth, _, extent = self._turns[0]
            one = self._extents.get(extent)
            if one is None or one.worth != -worth:
                heappop(self._turns)
                continue
            part = Part(extent, one.taken, min(most_blocks, one.blocks - one.taken))
            one.taken += part.count
            self.blocks -= part.count
            if one.taken == one.blocks:
                heappop(self._turns)
                del self._extents[extent]
            return part
        return None

    def _offer(self, extent: int, one: _Waiting) -> None:
        heappush(self._turns, (-one.worth, one.start, extent))
        if len(self._turns) > 4 * len(self._extents) + 64:  # drop stale entries
            self._turns = [(-each.worth, each.start, number) for number, each in self._extents.items()]
            heapify(self._turns)

    def check(self, extents: Mapping[int, tuple[float, int]]) -> None:
        """Assert that each extent which waits has a turn, and the worth and the blocks of `extents`, for tests."""
        assert self.blocks == sum(one.blocks - one.taken for one in self._extents.values())
        valid = set(self._turns)
        for extent, one in self._extents.items():
            assert extents[extent] == (one.worth, one.blocks)
            assert 0 <= one.taken < one.blocks
            assert (-one.worth, one.start, extent) in valid
