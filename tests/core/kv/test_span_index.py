"""The index of spans of blocks: it finds what a table of all blocks would find, and never another block."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medha.kv import span_index
from medha.kv.prefix_cache import HASH_CHARACTERS, PrefixHasher, hash_at, hash_count, hash_range
from medha.kv.span_index import SpanIndex

HASHER = PrefixHasher(1, b"secret")


@dataclass(eq=False)
class Span:
    hashes: str
    blocks: int


def text(seed: int, blocks: int, shared: int = 0) -> str:
    """Return the hashes of a text, of which the first `shared` blocks are those of text 0."""
    ids = np.random.default_rng(seed).integers(0, 1000, blocks).astype(np.int32)
    ids[:shared] = np.random.default_rng(0).integers(0, 1000, blocks).astype(np.int32)[:shared]
    return HASHER.hashes(ids)


def part(hashes: str, start: int, stop: int) -> Span:
    return Span(hash_range(hashes, start, stop), stop - start)


def has_common_mark(span: Span, hashes: str) -> bool:
    """Return whether a text has a marked block of a span."""
    of_text = {hash_at(hashes, block) for block in range(hash_count(hashes))}
    of_span = (hash_at(span.hashes, block) for block in range(span.blocks))
    return any(one in of_text and one.endswith("0") for one in of_span)


cuts = st.lists(st.integers(0, 200), min_size=2, max_size=12, unique=True).map(sorted)


@pytest.mark.parametrize("short_blocks", [0, 8, 1000])
def test_blocks_are_found_where_they_are(short_blocks: int) -> None:
    """Spans are parts of two texts with a common beginning; some are cut, and some are removed and added again."""

    @given(
        cuts, st.lists(st.tuples(st.integers(0, 20), st.integers(0, 40)), max_size=10), st.integers(0, 200)
    )
    @settings(max_examples=100)
    def run(places: list[int], changes: list[tuple[int, int]], shared: int) -> None:
        first, other = text(0, 200), text(1, 200, shared)
        spans = [part(first, *one) for one in list(pairwise(places))[::2]]
        spans += [part(other, *one) for one in list(pairwise(places))[1::2] if one[0] >= shared]
        index = SpanIndex[Span]()
        for span in spans:
            index.add(span)
        index.check(spans)
        for number, keep in changes:
            span = spans[number % len(spans)]
            if keep < span.blocks:
                index.cut(span, keep)
                span.blocks = keep
            elif not span.blocks:
                span.blocks = hash_count(span.hashes)
                index.add(span)
            index.check([one for one in spans if one.blocks])
        held = {hash_at(one.hashes, block): (one, block) for one in spans for block in range(one.blocks)}
        for hashes in (first, other):
            at = 0
            for found, block, count in index.runs(hashes, 0, 200):
                for step in range(count):
                    wanted = held.get(hash_at(hashes, at + step))
                    if found is None and wanted is not None:
                        assert not has_common_mark(wanted[0], hashes), (
                            "the text leaves the span before a mark"
                        )
                    else:
                        assert wanted == (None if found is None else (found, block + step))
                at += count
            assert at == 200
            for at in range(200):
                assert index.at(hashes, at) == held.get(hash_at(hashes, at))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(span_index, "SHORT_BLOCKS", short_blocks)
        run()


def test_a_long_span_is_found_by_a_prompt_that_is_cut_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another lane has the first blocks, so a prompt's part on this lane begins in the middle of the span."""
    monkeypatch.setattr(span_index, "SHORT_BLOCKS", 8)
    hashes = text(0, 3000)
    span = part(hashes, 0, 3000)
    index = SpanIndex[Span]()
    index.add(span)
    for start in range(0, 2900, 100):
        assert index.at(hash_range(hashes, start, 3000), 0) == (span, start)
    other = text(1, 50) + hash_range(hashes, 500, 3000)
    assert index.lacks(other, 0, 2550) == 50
    assert list(index.runs(other, 0, 2550)) == [(None, 0, 50), (span, 500, 2500)]


def test_a_block_that_two_spans_have_is_found_in_the_first_one_until_that_is_removed() -> None:
    hashes = text(0, 20)
    first, other = part(hashes, 0, 10), part(hashes, 5, 20)
    index = SpanIndex[Span]()
    index.add(first)
    index.add(other)
    assert [index.at(hashes, block) for block in (4, 7, 12)] == [(first, 4), (first, 7), (other, 7)]
    index.cut(first, 0)
    assert [index.at(hashes, block) for block in (4, 7, 12)] == [None, None, (other, 7)]


def test_a_long_span_takes_little_more_than_a_sixteenth_of_its_blocks_in_the_index() -> None:
    blocks = 100_000
    hashes = np.random.default_rng(0).bytes(blocks * HASH_CHARACTERS // 2).hex()
    index = SpanIndex[Span]()
    index.add(Span(hashes, blocks))
    assert blocks / 20 < len(index._places) < blocks / 13
