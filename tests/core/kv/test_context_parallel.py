"""How chunks are cut over lanes, and when queries travel instead of keys and values: paper C's equations."""

from __future__ import annotations

from dataclasses import replace
from math import isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medha.kv.context_parallel import (
    ContextParallel,
    RingCosts,
    balanced,
    pass_kv_is_hidden,
    prefers_pass_kv,
    share_tokens,
    shared_tokens,
    striped,
)
from medha.wire.messages import Extent

LLAMA_405B = RingCosts(
    query_heads=128,
    kv_heads=8,
    element_bytes=2,
    attention_flops_per_second=8 * 515e12,  # of a host of 8 GPUs (C Table 5: 414 and 1608 us)
    link_bytes_per_second=8 * 26e9,  # likewise: 627 and 631 us
)


def positions(extents: tuple[Extent, ...]) -> list[int]:
    return [extent.start + index * extent.stride for extent in extents for index in range(extent.count)]


@given(start=st.integers(0, 50), count=st.integers(1, 80), lanes=st.integers(2, 6))
def test_each_position_is_computed_once_and_the_first_lane_has_the_last_one(
    start: int, count: int, lanes: int
) -> None:
    for cut in (balanced, striped):
        shares = [positions(extents) for extents in cut(start, start + count, lanes)]
        assert sorted(position for part in shares for position in part) == list(range(start, start + count))
        assert all(part == sorted(part) for part in shares)
        assert shares[0][-1] == start + count - 1
        if count >= 2 * lanes:
            assert max(map(len, shares)) <= share_tokens(count, lanes)


@given(count=st.integers(12, 400), lanes=st.integers(2, 6))
def test_lanes_see_equally_many_pairs(count: int, lanes: int) -> None:
    """Causal work of the lanes differs by at most a few rows of the chunk (§3.5.1), where plain runs differ 3-fold."""
    for cut in (balanced, striped):
        pairs = [sum(p + 1 for p in positions(extents)) for extents in cut(0, count, lanes)]
        assert max(pairs) - min(pairs) <= 2 * count


def test_runs_of_a_balanced_cut_are_those_of_the_paper() -> None:
    """Figure 1: four chunks of two lanes; the first lane takes the first and the last one."""
    assert balanced(0, 8, 2) == [(Extent(0, 2), Extent(6, 2)), (Extent(2, 4),)]
    assert striped(0, 7, 2) == [(Extent(0, 4, 2),), (Extent(1, 3, 2),)]
    assert balanced(5, 6, 3) == [(Extent(5, 1),), (), ()]


@given(share=st.integers(0, 500), lanes=st.integers(2, 6), smaller=st.integers(0, 400))
def test_a_chunk_that_fits_the_lanes_shares_fits_with_any_smaller_one(
    share: int, lanes: int, smaller: int
) -> None:
    most = shared_tokens(share, lanes)
    assert share_tokens(max(most - smaller, 0), lanes) <= share


@given(
    new=st.integers(1, 10**6),
    cached=st.integers(0, 10**7),
    lanes=st.integers(2, 16),
    kv_heads=st.sampled_from([1, 2, 8]),
    group=st.sampled_from([1, 4, 16]),
    tensors=st.sampled_from([1, 2]),
    rate=st.floats(1e9, 1e16),
    link=st.floats(1e6, 1e12),
)
def test_the_rules_compare_the_latencies_that_the_paper_derives_them_from(
    new: int, cached: int, lanes: int, kv_heads: int, group: int, tensors: int, rate: float, link: float
) -> None:
    """Bytes and FLOPs of Table 3, the All2All of appendix C, before they are rearranged to equations 2 and 5."""
    width, size = 64 * kv_heads * group, 2
    costs = RingCosts(kv_heads * group, kv_heads, size, rate, link, tensors)
    total = new + cached
    send_kv = tensors * total * width / group * size / link
    attention = 4 * new * width * total / (lanes * rate)
    all2all = new * width * size / link

    def clearly(left: float, right: float, verdict: bool) -> None:
        assert isclose(left, right, rel_tol=1e-9) or (left >= right) == verdict

    clearly(attention, send_kv, pass_kv_is_hidden(new, lanes, costs))
    exposed = send_kv - attention
    if exposed > 0:  # else pass-KV is hidden, and nothing is compared
        clearly(all2all, exposed, prefers_pass_kv(new, cached, lanes, costs))
    else:
        assert prefers_pass_kv(new, cached, lanes, costs)


@pytest.mark.parametrize(
    ("new", "is_kv"),
    [(1280, False), (3200, False), (12800, True), (25600, True), (64000, True), (128000, True)],
)
def test_the_rule_names_the_winners_of_table_4(new: int, is_kv: bool) -> None:
    """128,000 tokens on four hosts; the rows of 4,160 and 6,400, which differ by 1.5 % and 0.3 %, may go either way."""
    assert prefers_pass_kv(new, 128_000 - new, 4, LLAMA_405B) == is_kv


def test_where_the_link_is_unknown_the_smaller_message_travels() -> None:
    costs = RingCosts(query_heads=8, kv_heads=2)
    assert [prefers_pass_kv(new, 1000 - new, 2, costs) for new in (1, 499, 500, 1000)] == [
        False,
        False,
        True,
        True,
    ]


def test_entries_of_a_chunk_say_which_lane_computes_what_and_which_one_samples() -> None:
    auto = ContextParallel("auto", RingCosts(8, 2))
    entries = auto.entries("a", (1, 0), 0, 8, samples=True, shard_map_version=3)
    assert [(entry.lane, entry.extents, entry.samples) for entry in entries] == [
        (1, (Extent(0, 2), Extent(6, 2)), True),
        (0, (Extent(2, 4),), False),
    ]
    assert {(entry.strategy, entry.shard_map_version) for entry in entries} == {("passKv", 3)}
    cached = auto.entries("a", (1, 0), 100, 108, samples=True, shard_map_version=3)
    assert {entry.strategy for entry in cached} == {"passQ"}
    (alone,) = auto.entries("a", (1, 0), 100, 103, samples=True, shard_map_version=3)
    assert (alone.lane, alone.strategy, alone.samples) == (1, "owner", True)


def test_keys_and_values_of_a_byte_take_a_quarter_of_the_message_of_float32() -> None:
    whole = RingCosts(8, 8, 4, attention_flops_per_second=1e12, link_bytes_per_second=1e9)
    rounded = replace(whole, kv_element_bytes=1)
    assert rounded.sent_heads == whole.sent_heads / 4
    least = 2 * 1000 * whole.sent_heads * 4 / (4 * 8)
    assert pass_kv_is_hidden(int(least), 2, whole)
    assert not pass_kv_is_hidden(int(least) - 1, 2, whole)
    assert pass_kv_is_hidden(int(least / 4), 2, rounded)
    assert not pass_kv_is_hidden(int(least / 4) - 1, 2, rounded)
