"""An index of spans of KV blocks by the hashes of their blocks, whose cost does not grow with each block of a long span.

A hash covers everything before its block in the prompt. So two prompts that share a block also share all blocks before it. Of a
long span, only a few blocks are indexed: the first one, and the *marked* ones, whose hash ends with a 0 (one of sixteen on
average). Any other block is found through an indexed block near it in the prompt.

Of a short span, all blocks are in the index. A few blocks of a long one may not be found: where a lane also has other blocks
of the prompt next to them, where a prompt leaves the span before its first marked block, or once a span that has some of the
same blocks is removed. Such a block counts as missing; it is never taken for another one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Generic, Protocol, TypeVar

from medha.kv.prefix_cache import HASH_CHARACTERS, hash_at, hash_count

SHORT_BLOCKS = 1024
"""Most blocks of a span that are all in the index."""
_MARK = "0"
"""Last character of the hash of a marked block."""
_WINDOW_BLOCKS = 4096
"""Blocks among which marked ones are looked for at a time."""


class BlockRun(Protocol):
    """Blocks that follow each other in a prompt, with their hashes, and perhaps those of blocks that were behind them."""

    @property
    def hashes(self) -> str: ...

    @property
    def blocks(self) -> int: ...


Span = TypeVar("Span", bound=BlockRun)


class SpanIndex(Generic[Span]):
    """Finds the span that holds a block. If several do, it finds the one that was added first."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[Span, int]] = {}  # hash -> span, and block of it
        self._long_spans = 0  # without any, each block is in the index
        self._unmarked_spans = 0  # without any, a span can be found by its marked blocks alone

    def add(self, span: Span) -> None:
        """Add the blocks of a span. Its `hashes` must be theirs, without any other."""
        self._long_spans += _is_long(span)
        self._unmarked_spans += not _has_mark(span, span.blocks)
        for block in _indexed(span, 0, span.blocks):
            self._places.setdefault(hash_at(span.hashes, block), (span, block))

    def cut(self, span: Span, keep: int) -> None:
        """Remove the blocks of a span from the `keep`-th on; its `blocks` still count them."""
        self._long_spans -= _is_long(span) and not keep
        self._unmarked_spans -= not _has_mark(span, span.blocks)
        self._unmarked_spans += keep > 0 and not _has_mark(span, keep)
        for block in _indexed(span, keep, span.blocks):
            key = hash_at(span.hashes, block)
            place = self._places.get(key)
            if place is not None and place[0] is span:
                del self._places[key]

    def at(self, hashes: str, block: int) -> tuple[Span, int] | None:
        """Return the span that holds a block of a prompt, and which block of the span it is; None if none does."""
        place = self._places.get(hash_at(hashes, block))
        if place is not None or not self._long_spans:
            return place
        return self._near(hashes, block, -1) or self._near(hashes, block, 1)

    def _near(self, hashes: str, block: int, step: int) -> tuple[Span, int] | None:
        """Find a block by the nearest one in the index that comes before it in the prompt (`step` -1), or behind it (1)."""
        wanted = hash_at(hashes, block)
        near = block + step
        while 0 <= near < hash_count(hashes):
            key = hash_at(hashes, near)
            place = self._places.get(key)
            if place is not None:
                span, found = place[0], place[1] + block - near
                is_there = 0 <= found < span.blocks and hash_at(span.hashes, found) == wanted
                return (span, found) if is_there else None
            if key.endswith(_MARK):
                return None
            near += step
        return None

    def runs(self, hashes: str, start: int, stop: int) -> Iterator[tuple[Span | None, int, int]]:
        """Yield runs of the blocks `start .. stop` of a prompt, in order: each with its span, the first block there, and its length.

        The span of blocks that are in none is None.
        """
        while start < stop:
            place = self.at(hashes, start)
            if place is None:
                count = self.lacks(hashes, start, stop)
                yield None, 0, count
            else:
                count = common_blocks(hashes, start, stop, *place)
                yield *place, count
            start += count

    def lacks(self, hashes: str, start: int, stop: int) -> int:
        """Return how many of the blocks `start .. stop` (exclusive) of a prompt come before the first that a span holds."""
        if not self._places:
            return stop - start
        if start < stop and self.at(hashes, start) is not None:
            return 0
        looks_at_all = self._unmarked_spans or stop - start <= SHORT_BLOCKS
        blocks = range(start, stop) if looks_at_all else _marked(hashes, start, stop)
        for block in blocks:
            place = self._places.get(hash_at(hashes, block))
            if place is not None:
                return block - _blocks_before(hashes, start + 1, block, *place) - start
        return stop - start

    def check(self, spans: Collection[Span]) -> None:
        """Assert that it has these spans, of which no two have a block in common, and nothing else, for tests."""
        there = {
            hash_at(span.hashes, block): (span, block)
            for span in spans
            for block in _indexed(span, 0, span.blocks)
        }
        assert self._places == there
        assert self._long_spans == sum(map(_is_long, spans))
        assert self._unmarked_spans == sum(not _has_mark(span, span.blocks) for span in spans)
        assert sum(len(list(_indexed(span, 0, span.blocks))) for span in spans) == len(there)
        for span in spans:
            for block in range(span.blocks):
                assert self.at(span.hashes, block) == (span, block)


def _blocks_before(hashes: str, start: int, block: int, span: BlockRun, found: int) -> int:
    """Return how many blocks a prompt, from `start` on, and a span have in common right before their equal blocks.

    Those are `block` of the prompt and `found` of the span.
    """
    low, high = 0, min(block - start, found) + 1  # equal down to low
    while high - low > 1:
        middle = (low + high) // 2
        if hash_at(hashes, block - middle) == hash_at(span.hashes, found - middle):
            low = middle
        else:
            high = middle
    return low


def _is_long(span: BlockRun) -> bool:
    return hash_count(span.hashes) > SHORT_BLOCKS


def _indexed(span: BlockRun, start: int, stop: int) -> Iterator[int]:
    """Yield those of the blocks `start .. stop` of a span that are in the index."""
    if not _is_long(span):
        yield from range(start, stop)
        return
    if start == 0 and not hash_at(span.hashes, 0).endswith(_MARK):
        yield 0
    yield from _marked(span.hashes, start, stop)


def _has_mark(span: BlockRun, blocks: int) -> bool:
    """Return whether one of the first blocks of a span is marked."""
    return next(_marked(span.hashes, 0, blocks), None) is not None


def _marked(hashes: str, start: int, stop: int) -> Iterator[int]:
    """Yield those of the blocks `start .. stop` of a prompt that are marked."""
    for first in range(start, stop, _WINDOW_BLOCKS):  # the caller may need the first few only
        last = min(first + _WINDOW_BLOCKS, stop)
        ends = hashes[(first + 1) * HASH_CHARACTERS - 1 : last * HASH_CHARACTERS : HASH_CHARACTERS]
        at = ends.find(_MARK)
        while at >= 0:
            yield first + at
            at = ends.find(_MARK, at + 1)


def common_blocks(hashes: str, start: int, stop: int, span: BlockRun, block: int) -> int:
    """Return how many blocks from `start` on are those of a span from `block` on; the first one must be.

    A hash covers everything before it, so equality at a block means equality up to it.
    """
    most = min(stop - start, span.blocks - block)
    if hash_at(hashes, start + most - 1) == hash_at(span.hashes, block + most - 1):
        return most
    low, high = 1, most  # equal up to low
    while high - low > 1:
        middle = (low + high) // 2
        if hash_at(hashes, start + middle - 1) == hash_at(span.hashes, block + middle - 1):
            low = middle
        else:
            high = middle
    return low
