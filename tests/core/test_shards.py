"""Where the KV of a request lies: every position once, all lanes at once or none, no shard full before the others."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from medha.shards import STRIPE_TOKENS, Segment, ShardMap, place, segments_of, striped_map, stripings_of

BLOCK = 4


@dataclass(frozen=True)
class Case:
    """A request and the lanes that it finds."""

    prompt: int
    reserved: int
    free: list[int]  # tokens
    tokens_per_lane: int
    lane_tokens: int

    def place(self, **more: object) -> ShardMap | None:
        return place(
            self.prompt,
            self.reserved,
            self.free,
            block_size_tokens=BLOCK,
            tokens_per_lane=self.tokens_per_lane,
            lane_tokens=self.lane_tokens,
            **more,  # type: ignore[arg-type]
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    lane_blocks = draw(st.integers(1, 800))
    free = draw(st.lists(st.integers(lane_blocks // 4, lane_blocks), min_size=1, max_size=5))
    prompt = draw(st.integers(1, 3000))
    return Case(
        prompt,
        prompt + draw(st.integers(0, 3000)),
        [blocks * BLOCK for blocks in free],
        draw(st.integers(1, 1500)),
        lane_blocks * BLOCK,
    )


def blocks(tokens: int) -> int:
    return -(-tokens // BLOCK)


@given(case=cases())
def test_a_map_is_a_partition_of_the_positions_that_fits_the_free_blocks_of_each_lane(case: Case) -> None:
    shards = case.place()
    if shards is None:
        return
    assert shards.segments[0].start == 0
    assert shards.tokens == shards.segments[-1].stop == case.reserved
    for before, after in zip(shards.segments, shards.segments[1:], strict=False):
        assert before.stop == after.start
        assert before.lane != after.lane, "neighbouring segments of a lane are one"
        assert after.start % BLOCK == 0, "a block never lies on two lanes"
    for lane, free in enumerate(case.free):
        assert blocks(shards.tokens_on(lane)) * BLOCK <= free
    assert sum(shards.tokens_on(lane) for lane in shards.lanes) == case.reserved


@given(case=cases())
def test_local_positions_of_a_lane_are_dense_and_in_order(case: Case) -> None:
    shards = case.place()
    if shards is None:
        return
    next_local = Counter[int]()
    for position in range(case.reserved):
        lane, local = shards.locate(position)
        assert local == next_local[lane]
        next_local[lane] += 1
    assert dict(next_local) == {lane: shards.tokens_on(lane) for lane in shards.lanes}


@given(case=cases(), data=st.data())
def test_the_pieces_of_a_range_cover_it_once_and_agree_with_the_place_of_each_position(
    case: Case, data: st.DataObject
) -> None:
    shards = case.place()
    if shards is None:
        return
    start = data.draw(st.integers(0, case.reserved))
    stop = data.draw(st.integers(start, case.reserved))
    found = [
        (piece.start + offset, piece.lane, piece.local_start + offset)
        for piece in shards.pieces(start, stop)
        for offset in range(piece.stop - piece.start)
    ]
    assert found == [(position, *shards.locate(position)) for position in range(start, stop)]


@given(case=cases(), data=st.data())
def test_the_lanes_that_take_part_are_those_with_kv_and_the_owner(case: Case, data: st.DataObject) -> None:
    shards = case.place()
    if shards is None:
        return
    computed = data.draw(st.integers(0, case.reserved))
    lengths = Counter(shards.locate(position)[0] for position in range(computed))
    assert shards.local_lengths(computed) == lengths
    participants = shards.participants(computed)
    assert participants[0] == shards.owner == shards.locate(0)[0]
    assert set(participants) == set(lengths) | {shards.owner}


@given(case=cases())
def test_no_lane_gets_a_stripe_while_another_with_room_holds_fewer_tokens(case: Case) -> None:
    """So no shard fills before the others, and a decode waits equally long for all of them."""
    shards = case.place()
    if shards is None:
        return
    stripe = max(STRIPE_TOKENS, case.reserved // 64) + BLOCK
    prompt = shards.local_lengths(case.prompt)
    final = {lane: shards.tokens_on(lane) for lane in shards.lanes}
    full = {lane for lane in final if blocks(final[lane]) * BLOCK == case.free[lane]}
    grew = {lane for lane in final if final[lane] > blocks(prompt.get(lane, 0)) * BLOCK}
    for lane in grew:
        for other in set(prompt) - full:  # a lane that only joined for the output found the others full
            assert final[lane] <= final[other] + stripe


@given(case=cases())
@example(
    case=Case(prompt=25, reserved=25, free=[4, 24], tokens_per_lane=25, lane_tokens=28)
)  # short, to the token
def test_nobody_waits_while_the_lanes_have_room_within_the_cap(case: Case) -> None:
    """All or nothing: a refusal means that room is short, not that a part could not be found."""
    shards = case.place()
    fair_share = -(-case.prompt // len(case.free))
    cap = max(case.tokens_per_lane // BLOCK, blocks(fair_share)) * BLOCK
    if case.prompt <= max(case.tokens_per_lane, fair_share) and case.reserved <= case.lane_tokens:
        fits = max(case.free) >= blocks(case.reserved) * BLOCK
    else:
        prompt_fits = sum(min(free, cap) for free in case.free) >= case.prompt
        fits = prompt_fits and sum(case.free) >= blocks(case.reserved) * BLOCK
    assert (shards is not None) == fits


@given(case=cases())
def test_an_idle_replica_takes_every_request_that_its_lanes_together_hold(case: Case) -> None:
    lanes = len(case.free)
    if blocks(case.reserved) > lanes * case.lane_tokens // BLOCK:
        return
    idle = Case(
        case.prompt, case.reserved, [case.lane_tokens] * lanes, case.tokens_per_lane, case.lane_tokens
    )
    assert idle.place() is not None


@given(data=st.data(), lanes=st.integers(1, 4))
def test_requests_in_any_order_and_of_any_size_all_get_their_turn(data: st.DataObject, lanes: int) -> None:
    """No deadlock: who waits holds nothing, so that whoever runs can end, and gives everything back."""
    lane_tokens = 40 * BLOCK
    waiting = data.draw(st.lists(st.integers(1, lanes * lane_tokens), min_size=1, max_size=12))
    free = [lane_tokens] * lanes
    running: list[ShardMap] = []
    while waiting or running:
        moved = False
        for reserved in list(waiting):
            case = Case(max(1, reserved * 3 // 4), reserved, free, 16 * BLOCK, lane_tokens)
            shards = case.place()
            if shards is not None:
                waiting.remove(reserved)
                running.append(shards)
                free = [tokens - blocks(shards.tokens_on(lane)) * BLOCK for lane, tokens in enumerate(free)]
                moved = True
        assert min(free) >= 0
        if running:
            shards = running.pop(data.draw(st.integers(0, len(running) - 1)))
            free = [tokens + blocks(shards.tokens_on(lane)) * BLOCK for lane, tokens in enumerate(free)]
            moved = True
        assert moved, f"{waiting} wait for ever"
    assert free == [lane_tokens] * lanes


@given(case=cases(), more=st.integers(0, 2000))
def test_a_map_grows_without_moving_what_is_placed(case: Case, more: int) -> None:
    shards = case.place()
    if shards is None:
        return
    left = [free - blocks(shards.tokens_on(lane)) * BLOCK for lane, free in enumerate(case.free)]
    spare = -case.reserved % BLOCK
    grown = shards.grown(case.reserved + more, left, block_size_tokens=BLOCK)
    assert (grown is not None) == (blocks(max(more - spare, 0)) * BLOCK <= sum(left))
    if grown is None:
        return
    assert grown.tokens == case.reserved + more
    assert grown.version == shards.version + (more > 0)
    for position in range(0, case.reserved, 7):
        assert grown.locate(position) == shards.locate(position)
    for lane, free in enumerate(left):
        assert blocks(grown.tokens_on(lane)) - blocks(shards.tokens_on(lane)) <= free // BLOCK


def test_a_short_request_goes_to_the_lane_with_the_least_prefill_ahead_that_has_room() -> None:
    case = Case(100, 120, [400, 100, 400, 800], 512, 800)
    assert case.place(pending_seconds=[3.0, 0.0, 2.0, 5.0]) == ShardMap((Segment(2, 0, 120),))
    assert case.place() == ShardMap((Segment(3, 0, 120),)), "else where most is free"


def test_a_long_request_takes_lanes_in_the_order_of_free_kv_shard_by_shard() -> None:
    case = Case(1000, 1000, [600, 1600, 800], 512, 1600)
    assert case.place() == ShardMap((Segment(1, 0, 512), Segment(2, 512, 1000)))
    assert case.place(preferred=(0,)) == ShardMap((Segment(0, 0, 512), Segment(1, 512, 1000)))


def test_the_output_levels_the_shards_first_and_is_then_dealt_out_in_turns() -> None:
    case = Case(1000, 1000 + 24 + 768, [2000, 2000], 700, 2000)
    shards = case.place()
    assert shards is not None
    assert shards.segments == (
        Segment(0, 0, 700),
        Segment(1, 700, 1512),  # the prompt's 300 and two stripes: 812 tokens
        Segment(0, 1512, 1768),
        Segment(1, 1768, 1792),
    )
    assert shards.participants(700) == (0,)
    assert shards.participants(701) == (0, 1)


def test_a_prompt_of_more_than_the_cap_on_every_lane_is_spread_evenly() -> None:
    case = Case(4000, 4000, [4000, 4000], 512, 4000)
    assert case.place() == ShardMap((Segment(0, 0, 2000), Segment(1, 2000, 4000)))


def test_a_map_of_a_million_tokens_with_a_long_output_stays_small() -> None:
    shards = place(
        1_000_000,
        1_131_072,
        [2**20] * 8,
        block_size_tokens=16,
        tokens_per_lane=2**19,
        lane_tokens=2**20,
    )
    assert shards is not None
    assert len(shards.segments) < 200


def test_segments_with_a_gap_are_our_own_bug() -> None:
    with pytest.raises(AssertionError):
        ShardMap((Segment(0, 0, 4), Segment(1, 8, 12)))


@given(case=cases(), striped=st.booleans(), stripe=st.integers(1, 8), more=st.integers(0, 2000))
def test_deals_stand_for_the_very_segments_of_any_map(
    case: Case, striped: bool, stripe: int, more: int
) -> None:
    """Whichever lanes are full and leave the round, and wherever the output begins."""
    lanes = range(len(case.free))
    shards = case.place()
    if striped:
        shards = striped_map(
            case.prompt,
            case.reserved,
            case.free,
            lanes,
            stripe_tokens=stripe * BLOCK,
            block_size_tokens=BLOCK,
        )
    if shards is None:
        return
    found = stripings_of(shards.segments)
    assert segments_of(found) == shards.segments
    assert all(len(set(one.lanes)) == len(one.lanes) for one in found)
    if striped:  # a round for each set of lanes that have room, what a full one still takes, and the output
        assert len(found) <= 6 * len(lanes) + 6
    grown = shards.grown(case.reserved + more, [10**6] * len(case.free), block_size_tokens=BLOCK)
    assert grown is not None
    assert segments_of(stripings_of(grown.segments)) == grown.segments


def test_a_dealt_prompt_of_a_million_tokens_takes_no_more_words_than_one_of_a_tenth() -> None:
    words = []
    for tokens in (2**20 // 10, 2**20):
        shards = striped_map(
            tokens, tokens + 256, [2**20] * 4, range(4), stripe_tokens=2048, block_size_tokens=16
        )  # fmt: skip
        assert shards is not None
        words.append(len(stripings_of(shards.segments)))
    assert words[1] <= words[0] <= 4
