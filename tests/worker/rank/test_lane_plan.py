"""The plan of a lane holds everything that a rank does in a step, and planning changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

import numpy as np
import pytest

from medha.errors import PartFailed
from medha.kv.blocks import BlockLedger
from medha.kv.context_parallel import OWNER
from medha.shards import Segment
from medha.wire.messages import Admit, Extent, Sampling, Step, StepEntry, Tokens
from medha_worker.rank.lane_plan import LanePlan, plan_lane, spread_blocks
from medha_worker.rank.lane_state import LaneState
from medha_worker.rank.sampled_tokens import new_samplers

BLOCK_TOKENS = 4
SPREAD = (Segment(0, 0, 8), Segment(1, 8, 24))


def state_of(lane: int, prompts: dict[str, Sequence[Segment]], tokens: int = 10) -> LaneState:
    """Return the state of a lane whose sequences have `tokens` prompt tokens each; without segments, on lane 0."""
    state = LaneState(BlockLedger(32, BLOCK_TOKENS), lane, 0, new_samplers(512, (), lambda _: None))
    admits = []
    for name, segments in prompts.items():
        state.add_tokens(Tokens(name, 0, tokens), np.arange(tokens, dtype=np.int32))
        admits.append(Admit(name, name, tokens, tokens, 1, Sampling(), 24, segments=tuple(segments)))
    state.release(Step(0, 0, ()))
    state.reserve(Step(0, 0, (), admits=tuple(admits)))
    return state


def chunk(name: str, start: int, count: int, lane: int = 0, **more: object) -> StepEntry:
    return StepEntry(name, lane, (Extent(start, count),), start + count == 10, **more)  # type: ignore[arg-type]


def plan(state: LaneState, *entries: StepEntry, lanes: tuple[int, ...] = (0,)) -> LanePlan:
    step = Step(1, 0, entries, lanes=lanes)
    before = deepcopy(state.sequences)
    found = plan_lane(step, state, state.reserve(step))
    for name, sequence in state.sequences.items():
        assert (sequence.computed, sequence.length) == (before[name].computed, before[name].length)
    return found


def test_rows_positions_tables_and_tokens_follow_the_entries() -> None:
    state = state_of(0, {"a": (), "b": ()})
    state.sequences["a"].advance(6, samples=False)
    found = plan(state, chunk("a", 6, 4), chunk("b", 0, 3))
    assert found.batch is not None
    assert found.batch.positions.tolist() == [6, 7, 8, 9, 0, 1, 2]
    assert [(span.row_start, span.row_count, span.context_length) for span in found.batch.spans] == [
        (0, 4, 6),
        (4, 3, 0),
    ]
    for span, name in zip(found.batch.spans, "ab", strict=True):
        assert list(span.blocks) == list(state.ledger.table(name))
    assert [[ids.tolist() for ids in one.fed_tokens()] for one in found.entries] == [
        [[6, 7, 8, 9]],
        [[0, 1, 2]],
    ]
    assert [(one.stop, one.entry.samples) for one in found.entries] == [(10, True), (3, False)]
    assert (found.takes_part, found.failures, found.batch.spread) == (True, (), None)


def test_a_lane_that_is_not_named_computes_nothing() -> None:
    found = plan(state_of(1, {"a": ()}), chunk("a", 0, 4))
    assert (found.takes_part, found.entries, found.batch) == (False, (), None)


def test_the_lanes_of_a_spread_request_plan_the_two_ends_of_each_exchange() -> None:
    entry = chunk("a", 0, 10, strategy=OWNER)
    own, helping = (plan(state_of(lane, {"a": SPREAD}), entry, lanes=(0, 1)) for lane in (0, 1))
    assert own.batch is not None
    assert helping.batch is not None
    asks, serves = own.batch.spread, helping.batch.spread
    assert asks is not None
    assert serves is not None
    assert [(part.rows, part.helpers) for part in asks.own] == [(slice(0, 10), (1,))]
    assert [(lane, rows.count) for lane, rows in serves.foreign] == [(0, 10)]
    assert asks.landing.to[1].tolist() == [8, 9]
    assert len(serves.landing.of[0]) == 2
    assert (len(own.batch.positions), len(helping.batch.positions)) == (10, 0)
    assert helping.entries == ()


def test_each_lane_knows_its_blocks_into_which_spread_requests_are_written() -> None:
    """Those of requests on one lane are not among them, nor those whose KV was there before."""
    entries = chunk("a", 4, 6, strategy=OWNER), chunk("b", 0, 3)
    for lane, written in ((0, slice(1, 2)), (1, slice(0, 1))):
        state = state_of(lane, {"a": SPREAD, "b": ()})
        if lane == 0:
            state.sequences["a"].advance(4, samples=False)
        planned = plan(state, *entries, lanes=(0, 1))
        assert planned.has_spread
        found = spread_blocks(lane, planned, BLOCK_TOKENS)
        assert found.tolist() == state.ledger.table("a")[written].tolist()
    alone = plan(state_of(0, {"b": ()}), chunk("b", 0, 3))
    assert not alone.has_spread
    assert spread_blocks(0, alone, BLOCK_TOKENS).tolist() == []


def test_the_first_tokens_of_a_spread_request_are_written_without_an_exchange() -> None:
    state = state_of(0, {"a": SPREAD})
    found = plan(state, chunk("a", 0, 2, strategy=OWNER))
    assert found.batch is not None
    assert found.batch.spread is None
    assert found.has_spread
    assert spread_blocks(0, found, BLOCK_TOKENS).tolist() == state.ledger.table("a")[:1].tolist()


def test_an_entry_that_cannot_be_run_fails_alone_unless_other_lanes_run_a_share_of_it() -> None:
    state = state_of(0, {"a": SPREAD, "b": ()})
    found = plan(state, chunk("a", 0, 4, strategy="unheard of"), chunk("b", 0, 3))
    assert [(failure.id, failure.reason) for failure in found.failures] == [("a", "internal")]
    assert [one.entry.id for one in found.entries] == ["b"]
    shared = (chunk("a", 0, 4, strategy="unheard of"), chunk("a", 4, 4, lane=1, strategy="unheard of"))
    with pytest.raises(PartFailed, match="strategy 'unheard of' is not known"):
        plan(state, *shared, lanes=(0, 1))


def test_positions_that_are_not_the_next_ones_show_that_the_rank_has_diverged() -> None:
    with pytest.raises(PartFailed, match="positions 4 to 6: 0 are computed, 10 tokens known, 24 reserved"):
        plan(state_of(0, {"a": ()}), chunk("a", 4, 2))
