"""Where a sequence's first token is expected soonest, and what a router remembers of prefixes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from medha.kv.prefix_cache import PrefixHasher
from medha.routing.prefix_memory import MARK_BLOCK_TOKENS, PrefixMemory, marks, prefill_seconds

HASHER = PrefixHasher(MARK_BLOCK_TOKENS, b"secret")


def marks_of(tokens: int, first: int = 0) -> tuple[tuple[int, str], ...]:
    """Marks of a prompt that counts up from `first`."""
    return marks(HASHER.hashes(np.arange(first, first + tokens, dtype=np.int32)))


@given(tokens=st.integers(0, 20_000))
def test_marks_rise_by_a_third_to_a_double_and_end_at_the_last_whole_block(tokens: int) -> None:
    ends = [end for end, _ in marks_of(tokens)]
    assert (ends[-1] if ends else 0) == tokens // MARK_BLOCK_TOKENS * MARK_BLOCK_TOKENS
    assert all(low < high <= 2 * low for low, high in pairwise(ends))
    assert all(end % MARK_BLOCK_TOKENS == 0 for end in ends)


def test_a_million_tokens_have_a_few_dozen_marks() -> None:
    assert len(marks_of(1_000_000)) < 40


def test_a_longer_prompt_finds_what_was_sent_of_its_beginning() -> None:
    memory = PrefixMemory()
    memory.add(marks_of(6400))
    assert memory.known_tokens(marks_of(12_800)) == 6144
    assert memory.known_tokens(marks_of(3200)) == 3072
    assert memory.known_tokens(marks_of(6400, first=1)) == 0


def test_what_was_sent_least_recently_is_forgotten_first() -> None:
    memory = PrefixMemory(limit=20)
    for first in range(4):
        memory.add(marks_of(6 * MARK_BLOCK_TOKENS, first))  # 5 marks each
    memory.add(marks_of(6 * MARK_BLOCK_TOKENS, 0))
    memory.add(marks_of(6 * MARK_BLOCK_TOKENS, 9))
    known = [memory.known_tokens(marks_of(6 * MARK_BLOCK_TOKENS, first)) for first in (0, 1, 2, 3, 9)]
    assert known == [384, 0, 384, 384, 384]
    assert len(memory) == 20


def test_of_one_prompt_the_long_marks_are_forgotten_before_the_short_ones() -> None:
    memory = PrefixMemory(limit=5)
    memory.add(marks_of(6 * MARK_BLOCK_TOKENS))
    memory.add(marks_of(2 * MARK_BLOCK_TOKENS, 7))
    assert memory.known_tokens(marks_of(6 * MARK_BLOCK_TOKENS)) == 3 * MARK_BLOCK_TOKENS


POINTS = ((1000, 1.0), (10_000, 20.0), (100_000, 1000.0))


@pytest.mark.parametrize(
    ("tokens", "seconds"), [(0, 0.0), (500, 0.5), (1000, 1.0), (10_000, 20.0), (200_000, 4000.0)]
)
def test_prefill_time_at_and_outside_of_the_announced_points(tokens: int, seconds: float) -> None:
    assert prefill_seconds(POINTS, tokens) == pytest.approx(seconds)


@given(linear=st.floats(1e-5, 1e-2), quadratic=st.floats(0, 1e-7), tokens=st.integers(512, 2**20))
def test_between_points_four_times_apart_the_error_is_below_six_and_a_tenth_percent(
    linear: float, quadratic: float, tokens: int
) -> None:
    """By a factor of the root of 9/8 at worst: half way between two points, where both parts are equally large."""

    def truth(count: int) -> float:
        return linear * count + quadratic * count**2

    points = tuple((512 * 4**power, truth(512 * 4**power)) for power in range(7))
    assert prefill_seconds(points, tokens) == pytest.approx(truth(tokens), rel=0.061)


def test_without_points_every_prefill_counts_as_nothing() -> None:
    assert prefill_seconds((), 1000) == 0.0
