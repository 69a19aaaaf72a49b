"""Predicted times."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from medha.cost.correction import Correction
from medha.cost.cost_profile import Attention, Link, Operation, Profile
from medha.cost.hardware import A100, H100, LLAMA3_8B, LLAMA3_70B, profile_for
from medha.cost.predictor import Chunking, Predictor, Work
from medha.errors import ConfigInvalid
from medha.topology import Topology
from medha.wire.messages import StepProfile

WARM_UP = StepProfile(
    step_seconds=1.0, linear_seconds_per_token=0.1, attention_seconds_per_pair=0.001, sequence_seconds=0.01
)
MEASURED = Profile(
    name="measured",
    source="test",
    layers=4,
    linear=(Operation("linear", compute_seconds_per_row=1e-5),),
    linear_points=((1, 1e-3), (64, 2e-3), (512, 7e-3)),
    attention=Attention(sequence_seconds=1e-5, points=((1, 1e-8), (16, 5e-8), (512, 9e-7))),
    head=Operation("head", launch_seconds=1e-4, compute_seconds_per_row=1e-5),
)
WINDOWED = replace(MEASURED, attention=replace(MEASURED.attention, window_tokens=1000, window_share=0.75))
THREE_STAGES = Topology(stream=3)


def predictors() -> dict[str, Predictor]:
    eight, pipeline = Topology(tensor=8), Topology(tensor=8, stream=4, kv=2)
    return {
        "warm-up": Predictor(WARM_UP),
        "measured": Predictor(MEASURED),
        "windowed": Predictor(WINDOWED),
        "8B on A100": Predictor(profile_for(LLAMA3_8B, A100, eight), eight),
        "70B on H100, pipelined": Predictor(profile_for(LLAMA3_70B, H100, pipeline), pipeline),
    }


UNCORRECTED = predictors()
EACH = pytest.mark.parametrize("name", UNCORRECTED)
WORKS = st.builds(Work, st.integers(0, 10**6), st.integers(1, 5000), st.booleans())
BATCHES = st.lists(WORKS, max_size=6)


@given(context=st.integers(0, 300), count=st.integers(0, 100))
def test_pairs_are_what_a_causal_mask_leaves(context: int, count: int) -> None:
    assert Work(context, count).pairs == sum(context + 1 + index for index in range(count))


def test_a_helper_lane_computes_every_pair_of_queries_and_its_shard() -> None:
    assert Work(100, 7, attention_only=True).pairs == 700


# --- one step ---------------------------------------------------------------------------------------


def test_a_step_is_the_sum_of_its_terms() -> None:
    terms = Predictor(WARM_UP).explain([Work(10, 1), Work(0, 4)])
    assert terms.launch == 1.0
    assert terms.linear == pytest.approx(0.5)
    assert terms.attention == pytest.approx((11 + 10) * 0.001 + 0.02)
    assert Predictor(WARM_UP).stage_seconds([Work(10, 1), Work(0, 4)]) == pytest.approx(terms.total)


def test_each_term_has_its_closed_form() -> None:
    profile = Profile(
        name="by hand",
        source="test",
        layers=7,
        launch_seconds=5.0,
        linear=(Operation("linear", compute_seconds_per_row=2.0),),
        attention=Attention(launch_seconds=0.5, seconds_per_pair=1.0),
        head=Operation("head", compute_seconds_per_row=100.0),
        all_reduce=Link(((3.0, 0.25),)),
        hop=Link(((11.0, 0.5),)),
    )
    predictor = Predictor(profile, THREE_STAGES)
    works = [Work(10, 1), Work(0, 3)]  # 4 tokens, 11 + 6 pairs, 2 sequences; 7 layers are 3 + 2 + 2
    layer = 4 * 2.0 + (3.0 + 4 * 0.25) + 17.0 + 0.5
    assert predictor.stage_seconds(works) == pytest.approx(5 + max(3 * layer, 2 * layer + 200))
    assert predictor.latency_seconds(works) == pytest.approx(15 + 7 * layer + 200 + 2 * (11 + 4 * 0.5))
    terms = predictor.explain(works, whole=True)
    assert (terms.launch, terms.linear, terms.attention) == pytest.approx((15 + 3.5, 56.0, 119.0))
    assert (terms.collectives, terms.head, terms.hops) == pytest.approx((28.0, 200.0, 26.0))


@EACH
@given(batch=BATCHES, decode=st.floats(0.25, 4), prefill=st.floats(0.25, 4))
def test_tally_and_explanation_agree_with_the_prediction(
    name: str, batch: list[Work], decode: float, prefill: float
) -> None:
    predictor = predictors()[name]
    predictor.correction = Correction(decode, prefill)
    tally = predictor.tally()
    for work in batch:
        (tally.add_decode if work.count == 1 else tally.add)(work)
    expected = predictor.stage_seconds(batch)
    assert tally.seconds() == pytest.approx(expected)
    assert predictor.explain(batch).total == pytest.approx(expected)
    assert predictor.latency_seconds(batch) >= expected * (1 - 1e-9)


@EACH
@given(
    contexts=st.lists(st.integers(0, 10**6), min_size=1, max_size=20),
    context=st.integers(0, 10**6),
    count=st.integers(1, 5000),
    decode=st.floats(0.25, 4),
    prefill=st.floats(0.25, 4),
)
def test_decodes_and_what_a_chunk_adds_to_them_have_factors_of_their_own(
    name: str, contexts: list[int], context: int, count: int, decode: float, prefill: float
) -> None:
    plain, corrected = UNCORRECTED[name], predictors()[name]
    corrected.correction = Correction(decode, prefill)
    seconds = []
    for predictor in (plain, corrected):
        tally = predictor.tally()
        tally.add_decodes(sum(contexts), len(contexts))
        alone = tally.seconds()
        supposed = tally.seconds_with(context, count)
        tally.add_chunk(context, count)
        assert tally.seconds() == pytest.approx(supposed)
        tally.remove(Work(context, count))
        assert tally.seconds() == pytest.approx(alone, rel=1e-6)
        seconds.append((alone, supposed))
        single = predictor.tally()
        single.add_chunk(context, count)
        seconds.append((single.seconds(), 0.0))
    (alone, whole), (chunk, _), (alone_now, whole_now), (chunk_now, _) = seconds
    assert alone_now == pytest.approx(decode * alone)
    assert chunk_now == pytest.approx(prefill * chunk)
    assert whole_now == pytest.approx(decode * alone + prefill * (whole - alone))


def test_coupled_decodes_have_their_factor_too() -> None:
    predictor = predictors()["70B on H100, pipelined"]
    predictor.correction = Correction(decode=2.0, prefill=3.0)
    plain = Predictor(predictor.profile, predictor.topology)
    seconds = []
    for one in (plain, predictor):
        lanes = [one.tally(), one.tally()]
        lanes[0].add_decode(Work(1000, 1))
        lanes[1].add_decode(Work(5000, 1, attention_only=True))
        decodes = one.correction.seconds(one.coupled_parted_seconds(lanes, 1, 1))
        lanes[0].add(Work(100, 300))
        seconds.append((decodes, one.correction.seconds(one.coupled_parted_seconds(lanes, 301, 1))))
    (decodes, whole), (decodes_now, whole_now) = seconds
    assert decodes_now == pytest.approx(2 * decodes)
    assert whole_now == pytest.approx(2 * decodes + 3 * (whole - decodes))


@EACH
@given(batch=BATCHES, context=st.integers(0, 10**6), count=st.integers(1, 5000))
def test_what_if_is_what_adding_would_give(name: str, batch: list[Work], context: int, count: int) -> None:
    predictor = UNCORRECTED[name]
    tally = predictor.tally()
    for work in batch:
        tally.add(work)
    before = tally.seconds()
    supposed = tally.seconds_with(context, count)
    tally.add(Work(context, count))
    assert tally.seconds() == pytest.approx(supposed)
    tally.remove(Work(context, count))
    assert tally.seconds() == pytest.approx(before, rel=1e-6, abs=1e-9)
    for work in batch:  # in another order than that of adding, so that sums keep rounding errors
        tally.remove(work)
    assert tally.seconds() == 0


CHUNKS = st.tuples(st.integers(0, 10**6), st.integers(1, 5000))


@EACH
@given(batch=BATCHES, chunk=CHUNKS, asked=st.lists(CHUNKS, max_size=2))
def test_a_chunk_counts_the_same_whatever_was_asked_before(
    name: str, batch: list[Work], chunk: tuple[int, int], asked: list[tuple[int, int]]
) -> None:
    one, other = UNCORRECTED[name].tally(), UNCORRECTED[name].tally()
    for work in batch:
        one.add(work)
        other.add(work)
    one.add(Work(*chunk))
    for question in (*asked, chunk, *asked):
        other.seconds_with(*question)
    other.add_chunk(*chunk)
    assert other.seconds() == one.seconds()


@EACH
@given(contexts=st.lists(st.integers(0, 10**6), max_size=30))
def test_many_decodes_are_added_at_once(name: str, contexts: list[int]) -> None:
    predictor = UNCORRECTED[name]
    tally = predictor.tally()
    tally.add_decodes(sum(contexts), len(contexts))
    one_by_one = predictor.stage_seconds([Work(c, 1) for c in contexts])
    if predictor.profile.attention.window_share:  # the shorter ones count as long as the mean
        assert tally.seconds() >= one_by_one * (1 - 1e-9)
    else:
        assert tally.seconds() == pytest.approx(one_by_one)


def test_many_decodes_of_one_length_are_exact_with_a_window_too() -> None:
    tally = UNCORRECTED["windowed"].tally()
    tally.add_decodes(8 * 5000, 8)
    assert tally.seconds() == pytest.approx(UNCORRECTED["windowed"].stage_seconds([Work(5000, 1)] * 8))


@given(context=st.integers(0, 10**6), count=st.integers(1, 5000))
def test_layers_with_a_window_count_no_more_keys_than_that(context: int, count: int) -> None:
    """The model has three layers that see 1,000 keys at most, and one that sees all."""
    rows = Work(context, count)
    keys = rows.pairs / count
    seen = 0.25 * keys + 0.75 * min(keys, 1000)
    full, windowed = (
        Predictor(one).explain([rows]).attention
        for one in (WARM_UP, replace(WARM_UP, window_tokens=1000, window_share=0.75))
    )
    own = Predictor(WARM_UP).profile.attention.sequence_seconds
    assert windowed - own == pytest.approx((full - own) * seen / keys)
    for layer in (WARM_UP, MEASURED):
        alone = (np.array([context]), np.array([count]))
        profile = Profile.of_warm_up(layer) if isinstance(layer, StepProfile) else layer
        attention = replace(profile.attention, window_tokens=1000, window_share=0.75)
        assert attention.seconds_many(*alone)[0] == pytest.approx(attention.seconds(context, count))


@EACH
@given(batch=BATCHES, work=WORKS, more_context=st.integers(0, 10**5), more_count=st.integers(0, 500))
def test_more_work_never_takes_less(
    name: str, batch: list[Work], work: Work, more_context: int, more_count: int
) -> None:
    predictor = UNCORRECTED[name]
    larger = Work(work.context + more_context, work.count + more_count, work.attention_only)
    seconds = [predictor.stage_seconds(works) for works in (batch, [*batch, work], [*batch, larger])]
    assert seconds == sorted(seconds)


@EACH
@given(batch=BATCHES, context=st.integers(0, 10**5), most=st.integers(0, 3000), budget=st.floats(0.001, 1.0))
def test_the_largest_chunk_is_the_last_that_fits(
    name: str, batch: list[Work], context: int, most: int, budget: float
) -> None:
    tally = UNCORRECTED[name].tally()
    for work in batch:
        tally.add(work)
    largest = tally.largest(context, most, budget)
    assert 0 <= largest <= most
    assert largest == 0 or tally.seconds_with(context, largest) <= budget
    assert largest == most or tally.seconds_with(context, largest + 1) > budget


def test_nothing_takes_no_time() -> None:
    for predictor in UNCORRECTED.values():
        assert predictor.stage_seconds([]) == predictor.latency_seconds([]) == 0


def test_a_second_prefill_shares_the_weights() -> None:
    predictor = UNCORRECTED["8B on A100"]
    long, short = Work(500_000, 32), Work(0, 32)
    alone = predictor.stage_seconds([short])
    added = predictor.stage_seconds([long, short]) - predictor.stage_seconds([long])
    assert added < 0.2 * alone


# --- lanes ------------------------------------------------------------------------------------------


def test_coupled_lanes_wait_for_the_slowest_linear_part_and_the_slowest_attention() -> None:
    profile = Profile(
        name="by hand",
        source="test",
        layers=2,
        linear=(Operation("linear", compute_seconds_per_row=1.0),),
        attention=Attention(seconds_per_pair=1.0),
        exchange=Link(((4.0, 0.5),)),
    )
    predictor = Predictor(profile, Topology(kv=2))
    owner, helper = [Work(0, 10)], [Work(100, 10, attention_only=True), Work(5, 1)]
    # linear: 10 tokens against 1; attention: 55 pairs against 1000 + 6; exchanged: 10 queries
    assert predictor.coupled_seconds([owner, helper], 10) == pytest.approx(2 * (10 + 1006 + 4 + 5))
    assert predictor.coupled_seconds([owner, helper], 0) == pytest.approx(2 * (10 + 1006))
    terms = predictor.explain_coupled([owner, helper], 10)
    assert (terms.linear, terms.attention, terms.exchange) == pytest.approx((20, 2012, 18))
    assert predictor.explain_coupled([owner, helper], 0).exchange == 0
    # two stages of one layer each; between them the slowest lane's 10 tokens hop once
    staged = Predictor(replace(profile, hop=Link(((7.0, 0.25),))), Topology(stream=2, kv=2))
    stage, whole = (staged.explain_coupled([owner, helper], 10, whole=whole) for whole in (False, True))
    assert (stage.linear, stage.attention, stage.exchange, stage.hops) == pytest.approx((10, 1006, 9, 0))
    assert (whole.linear, whole.attention, whole.exchange, whole.hops) == pytest.approx((20, 2012, 18, 9.5))
    assert whole.total == pytest.approx(20 + 2012 + 18 + 9.5)


@EACH
@given(lanes=st.lists(BATCHES, min_size=1, max_size=3), queries=st.integers(0, 5000))
def test_a_coupled_step_is_never_faster_than_its_slowest_lane(
    name: str, lanes: list[list[Work]], queries: int
) -> None:
    predictor = UNCORRECTED[name]
    slowest = max(predictor.stage_seconds(works) for works in lanes)
    coupled = predictor.coupled_seconds(lanes, queries)
    assert coupled >= slowest * (1 - 1e-9)
    assert predictor.explain_coupled(lanes, queries).total == pytest.approx(coupled)


def test_a_profile_of_another_tensor_parallelism_is_refused() -> None:
    with pytest.raises(ConfigInvalid, match=r"tensor parallelism 1, but parallelism\.tensor is 2"):
        Predictor(MEASURED, Topology(tensor=2))


# --- whole prefills ---------------------------------------------------------------------------------


def walk(predictor: Predictor, chunking: Chunking, tokens: int) -> list[tuple[int, int]]:
    """(start, size) of the chunks of a lone prompt, by trial of every size, the way a reader of Alg. 3 would."""
    sizes = [*range(chunking.min_tokens, chunking.max_tokens, chunking.min_tokens), chunking.max_tokens]
    chunks, position = [], 0
    while position < tokens:
        fitting = [
            s for s in sizes if predictor.stage_seconds([Work(position, s)]) <= chunking.budget_seconds
        ]
        size = max(fitting, default=sizes[0])
        chunks.append((position, min(size, tokens - position)))
        position += size
    return chunks


@given(chunks=st.integers(0, 5), rest=st.integers(1, 50), correction=st.floats(0.25, 4))
def test_a_prefill_takes_as_long_as_its_chunks_one_by_one(chunks: int, rest: int, correction: float) -> None:
    predictor = Predictor(WARM_UP, chunking=Chunking(max_tokens=50))
    predictor.correction = Correction(correction, correction)  # a last chunk of one token is like a decode
    total, position = 0.0, 0
    for size in [50] * chunks + [rest]:
        total += predictor.stage_seconds([Work(position, size)])
        position += size
    assert predictor.prefill_seconds(0, position) == pytest.approx(total)


@pytest.mark.parametrize("name", ["measured", "8B on A100"])
@given(tokens=st.integers(1, 60_000), stretch=st.floats(0.5, 3))
def test_chunks_shrink_with_the_context_as_the_budget_asks(name: str, tokens: int, stretch: float) -> None:
    profile, topology = UNCORRECTED[name].profile, UNCORRECTED[name].topology
    plain = Predictor(profile, topology)
    chunking = Chunking(512, 64, stretch * plain.stage_seconds([Work(20_000, 256)]))
    predictor = Predictor(profile, topology, chunking)
    direct = sum(plain.stage_seconds([Work(*chunk)]) for chunk in walk(plain, chunking, tokens))
    assert predictor.prefill_seconds(0, tokens) == pytest.approx(direct)


@given(data=st.data(), tokens=st.integers(1, 40_000))
def test_from_a_chunk_end_on_a_prefill_takes_what_is_left_of_it(data: st.DataObject, tokens: int) -> None:
    chunking = Chunking(512, 64, 0.04)
    predictor = Predictor(MEASURED, chunking=chunking)
    starts = [start for start, _ in walk(predictor, chunking, tokens)]
    context = data.draw(st.sampled_from(starts))
    left = predictor.prefill_seconds(0, tokens) - predictor.prefill_seconds(0, context)
    assert predictor.prefill_seconds(context, tokens) == pytest.approx(left)


@given(context=st.integers(0, 20_000), tokens=st.integers(0, 20_000), more=st.integers(0, 5000))
def test_longer_prompts_take_longer(context: int, tokens: int, more: int) -> None:
    for predictor in UNCORRECTED.values():
        assert predictor.prefill_seconds(context, tokens) <= predictor.prefill_seconds(context, tokens + more)


@given(rows=st.lists(st.tuples(st.integers(0, 50_000), st.integers(0, 50_000)), max_size=20))
def test_columns_give_the_numbers_of_single_questions(rows: list[tuple[int, int]]) -> None:
    chunking = Chunking(512, 64, 0.04)
    together = Predictor(MEASURED, chunking=chunking)
    together.correction = Correction(decode=4.0, prefill=1.5)
    contexts, tokens = (np.array([row[i] for row in rows], dtype=np.int64) for i in (0, 1))
    columns = together.prefill_seconds_many(contexts, tokens)
    for (context, end), seconds in zip(rows, columns, strict=True):
        alone = Predictor(MEASURED, chunking=chunking)  # whose table grows only to this length
        assert seconds == pytest.approx(1.5 * alone.prefill_seconds(context, end))
    uncorrected = together.uncorrected_prefill_seconds_many(contexts, tokens)
    assert columns == pytest.approx(1.5 * uncorrected)


@pytest.mark.parametrize("context", [10, 11])
def test_a_prefill_with_nothing_left_takes_no_time(context: int) -> None:
    assert Predictor(WARM_UP).prefill_seconds(context, 10) == 0


def test_a_pipelined_prefill_drains_once() -> None:
    topology = Topology(tensor=8, stream=4)
    profile = profile_for(LLAMA3_8B, A100, topology)
    predictor = Predictor(profile, topology, Chunking(1024))
    busy = sum(predictor.stage_seconds([Work(start, 1024)]) for start in range(0, 8192, 1024))
    last = [Work(7168, 1024)]
    drain = predictor.latency_seconds(last) - predictor.stage_seconds(last)
    assert predictor.prefill_seconds(0, 8192) == pytest.approx(busy + drain)
    # a small chunk behind it cannot overtake
    assert predictor.prefill_seconds(0, 8292) == pytest.approx(
        busy + predictor.stage_seconds([Work(8192, 100)]) + drain
    )


@given(chunks=st.integers(0, 5), rest=st.integers(1, 100))
def test_chunks_pass_the_stages_in_order(chunks: int, rest: int) -> None:
    """Against the recurrence: a chunk enters a stage when it has left the one before, and its predecessor this one."""
    profile = Profile(
        name="by hand", source="test", layers=3, linear=(Operation("linear", compute_seconds_per_row=1.0),)
    )
    sizes = [100] * chunks + [rest]
    left = [0.0] * 3
    for size in sizes:
        arrives = 0.0
        for stage in range(3):
            arrives = left[stage] = max(arrives, left[stage]) + size
    predictor = Predictor(profile, THREE_STAGES, Chunking(100, 100))
    assert predictor.prefill_seconds(0, sum(sizes)) == pytest.approx(left[-1])


def test_lanes_join_a_long_prefill_as_its_kv_grows() -> None:
    profile = Profile(
        name="by hand",
        source="test",
        layers=1,
        attention=Attention(seconds_per_pair=1.0),
        exchange=Link(((7.0, 0.0),)),
    )
    chunking = Chunking(100, 100)
    one = Predictor(profile, Topology(kv=1), chunking, tokens_per_lane=1000)
    two = Predictor(profile, Topology(kv=2), chunking, tokens_per_lane=1000)
    assert two.prefill_seconds(0, 1000) == pytest.approx(one.prefill_seconds(0, 1000))
    # behind 1000 tokens, each lane has at most 1000; behind 3000, each has half of them
    assert two.prefill_seconds(1000, 1100) == pytest.approx(100 * (1000 + 50.5) + 7)
    assert two.prefill_seconds(1900, 2000) == pytest.approx(100 * (1000 + 50.5) + 7)
    assert two.prefill_seconds(3000, 3100) == pytest.approx(100 * (1500 + 50.5) + 7)
    assert one.prefill_seconds(3000, 3100) == pytest.approx(100 * (3000 + 50.5))


# --- correction -------------------------------------------------------------------------------------


def test_a_predictor_follows_what_steps_of_each_kind_really_take() -> None:
    predictor, plain = Predictor(WARM_UP), Predictor(WARM_UP)
    decodes, chunk = [Work(500, 1)] * 8, [Work(0, 100)]
    for _ in range(60):
        for works, factor in ((decodes, 1.14), (chunk, 0.64)):
            tally = predictor.tally()
            for work in works:
                (tally.add_decode if work.count == 1 else tally.add)(work)
            predictor.observe(tally.parted_seconds(), factor * plain.stage_seconds(works))
    assert predictor.stage_seconds(decodes) == pytest.approx(1.14 * plain.stage_seconds(decodes), rel=0.01)
    assert predictor.stage_seconds(chunk) == pytest.approx(0.64 * plain.stage_seconds(chunk), rel=0.01)
    assert predictor.prefill_seconds(0, 50) == pytest.approx(0.64 * plain.prefill_seconds(0, 50), rel=0.01)


@pytest.mark.parametrize("topology", [Topology(), Topology(stream=3), Topology(tensor=8, stream=2, kv=4)])
@given(context=st.integers(0, 300_000), tokens=st.integers(1, 300_000), chunk_end=st.booleans())
def test_one_prefill_takes_what_it_takes_among_many(
    topology: Topology, context: int, tokens: int, chunk_end: bool
) -> None:
    predictor = Predictor(profile_for(LLAMA3_8B, A100, topology), topology, tokens_per_lane=50_000)
    if chunk_end:
        context -= context % 2048
    many = predictor.prefill_seconds_many(np.array([context]), np.array([tokens]))
    assert predictor.prefill_seconds(context, tokens) == pytest.approx(float(many[0]), rel=1e-9)
