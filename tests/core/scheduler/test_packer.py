"""What goes into a step, and why it is as large as it is."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medha.cost.predictor import Predictor, Work
from medha.scheduler.packer import Batch, DecodeTargets, Limits, Packed, PrefillCandidate
from medha.scheduler.step_builder import MOST_MISSES, pack
from medha.topology import Topology
from medha.wire.messages import StepProfile

# One token takes 1 ms and nothing else takes time, so budgets are token counts.
TOKEN_IS_A_MILLISECOND = Predictor(StepProfile(0.0, 0.001, 0.0, 0.0))
LIMITS = Limits(
    stages=1,
    max_chunk_tokens=1000,
    min_chunk_tokens=10,
    max_step_seconds=0.1001,
    min_prefill_share=0.1,
    space_sharing_cap=0.4,
    idle_efficiency=1.0,
)


@dataclass(frozen=True)
class DecodeCandidate:
    name: str
    context: int
    tpot_seconds: float
    fair_tpot_seconds: float


def decode(name: str, tpot_seconds: float = 0.0501, fair: float | None = None) -> DecodeCandidate:
    return DecodeCandidate(name, 100, tpot_seconds, fair or tpot_seconds)


def prefill(
    name: str, remaining: int, *, is_long: bool = False, rho: float = 1.0, context: int = 0
) -> PrefillCandidate:
    return PrefillCandidate(name, context, remaining, is_long, rho)


def packed_step(
    decodes: list[DecodeCandidate],
    prefills: list[PrefillCandidate],
    limits: Limits = LIMITS,
    predictor: Predictor = TOKEN_IS_A_MILLISECOND,
) -> Packed:
    batch = Batch(predictor)
    batch.add_decodes(0, sum(decode.context for decode in decodes), len(decodes))
    targets = None
    if decodes:
        targets = DecodeTargets(
            min(decode.tpot_seconds for decode in decodes),
            min(decode.fair_tpot_seconds for decode in decodes),
        )
    return pack(batch, targets, iter(prefills), limits, lambda _: True)


def tokens(
    decodes: list[DecodeCandidate], prefills: list[PrefillCandidate], limits: Limits = LIMITS
) -> dict[str, int]:
    return packed_step(decodes, prefills, limits).chunks


def test_nothing_to_do_is_an_empty_step() -> None:
    packed = packed_step([], [])
    assert packed.chunks == {}
    assert packed.predicted_seconds == 0


def test_without_decodes_a_step_is_bounded_by_max_step_seconds() -> None:
    assert tokens([], [prefill("a", 500)]) == {"a": 100}


def test_no_stream_asks_for_so_loose_a_tpot_that_arrivals_wait_for_longer_than_max_step_seconds() -> None:
    loose = [decode("d", 30.0)]
    assert tokens(loose, [prefill("a", 500)]) == {"a": 99}
    assert tokens(loose, [prefill("a", 500)], replace(LIMITS, stages=2)) == {"a": 49}


def test_the_budget_is_the_tightest_tpot_target_of_the_decodes() -> None:
    decodes = [decode("d1", 0.0801), decode("d2", 0.0301)]
    assert tokens(decodes, [prefill("a", 500)]) == {"a": 28}


def test_each_of_several_stages_has_its_part_of_the_budget() -> None:
    limits = replace(LIMITS, stages=2)
    assert tokens([decode("d")], [prefill("a", 500)], limits) == {"a": 24}
    assert tokens([], [prefill("a", 500)], limits) == {"a": 50}


def test_decodes_run_whatever_their_target() -> None:
    decodes = [decode(f"d{index}", 0.01) for index in range(50)]
    packed = packed_step(decodes, [])
    assert packed.chunks == {}
    assert packed.predicted_seconds == pytest.approx(0.05)
    assert packed.misses_tpot


def test_when_decodes_alone_exceed_their_target_the_most_urgent_prefill_gets_its_share() -> None:
    decodes = [decode(f"d{index}", 0.01) for index in range(180)]
    packed = packed_step(decodes, [prefill("a", 500), prefill("b", 500)])
    assert packed.misses_tpot
    assert packed.chunks["a"] == pytest.approx(180 / 0.9 * 0.1, abs=1)
    assert "b" not in packed.chunks


def test_when_that_share_is_too_small_the_most_urgent_prefill_gets_the_smallest_chunk() -> None:
    decodes = [decode(f"d{index}", 0.01) for index in range(20)]
    packed = tokens(decodes, [prefill("a", 500), prefill("b", 500)])
    assert packed["a"] == 10
    assert "b" not in packed


def test_decodes_that_meet_their_target_are_no_overrun() -> None:
    assert not packed_step([decode("d")], []).misses_tpot


def test_prefills_fill_the_step_in_the_order_given() -> None:
    assert tokens([], [prefill("a", 30), prefill("b", 40), prefill("c", 50)]) == {"a": 30, "b": 40, "c": 30}


def test_a_prefill_that_does_not_fit_is_set_aside_and_a_tail_behind_it_still_runs() -> None:
    assert tokens([], [prefill("a", 95), prefill("b", 50), prefill("tail", 4)]) == {"a": 95, "tail": 4}


def test_no_chunk_is_smaller_than_the_smallest_efficient_one_except_a_tail() -> None:
    limits = replace(LIMITS, max_chunk_tokens=65)
    assert tokens([], [prefill("a", 60), prefill("b", 50)], limits) == {"a": 60}, "5 of 50 would be left"
    assert tokens([], [prefill("a", 60), prefill("b", 5)], limits) == {"a": 60, "b": 5}


def test_max_chunk_tokens_bounds_all_prefills_together() -> None:
    limits = replace(LIMITS, max_chunk_tokens=50)
    assert tokens([decode("d", 1.0)], [prefill("a", 30), prefill("b", 30)], limits) == {
        "a": 30,
        "b": 20,
    }


def test_the_whole_batch_is_predicted_so_a_constant_is_paid_once() -> None:
    """0.4 s a step and 0.1 s a token: of 1 s, a takes 3 tokens and b the other 3, not (1 - 0.7 - 0.4) / 0.1."""
    predictor = Predictor(StepProfile(0.4, 0.1, 0.0, 0.0))
    limits = replace(LIMITS, max_step_seconds=1.001, min_chunk_tokens=1)
    packed = packed_step([], [prefill("a", 3), prefill("b", 9)], limits, predictor)
    assert packed.chunks == {"a": 3, "b": 3}
    assert packed.predicted_seconds == pytest.approx(1.0)


def test_a_long_yields_space_only_while_another_prefill_is_runnable() -> None:
    assert tokens([], [prefill("long", 500, is_long=True)]) == {"long": 100}
    shared = tokens([], [prefill("long", 500, is_long=True), prefill("short", 500)])
    assert shared == {"long": 60, "short": 40}


def test_what_the_others_leave_is_given_back_to_the_long() -> None:
    assert tokens([], [prefill("long", 500, is_long=True), prefill("short", 15)]) == {"short": 15, "long": 85}


@pytest.mark.parametrize(("rho", "share"), [(-3.0, 100), (0.0, 100), (0.25, 75), (9.0, 60)])
def test_a_long_yields_by_its_relative_slack_up_to_the_cap(rho: float, share: int) -> None:
    packed = tokens([], [prefill("long", 500, is_long=True, rho=rho), prefill("short", 500)])
    assert packed == {"long": share} | ({"short": 100 - share} if share < 100 else {})


def test_a_lone_long_prefill_takes_the_same_chunks_as_a_short_one() -> None:
    predictor = Predictor(StepProfile(0.001, 1e-4, 1e-7, 1e-4))
    chunks: dict[bool, list[int]] = {}
    for is_long in (False, True):
        context, remaining, chunks[is_long] = 0, 5000, []
        while remaining:
            candidate = prefill("a", remaining, is_long=is_long, context=context)
            size = packed_step([decode("d")], [candidate], LIMITS, predictor).chunks["a"]
            chunks[is_long].append(size)
            context, remaining = context + size, remaining - size
    assert chunks[True] == chunks[False]
    assert len(chunks[True]) > 5


def test_at_most_one_long_runs_in_a_step_and_the_next_one_waits() -> None:
    longs = [prefill("l1", 500, is_long=True), prefill("l2", 500, is_long=True)]
    assert tokens([], longs) == {"l1": 100}
    assert tokens([], [*longs, prefill("short", 20)]) == {"short": 20, "l1": 80}


def test_a_long_that_found_no_room_at_first_gets_what_is_left() -> None:
    """It is not the most urgent, and its part of the budget is used up when its turn comes."""
    packed = tokens([], [prefill("short", 70), prefill("long", 500, is_long=True)])
    assert packed == {"short": 70, "long": 30}


CANDIDATES = st.lists(
    st.tuples(st.integers(0, 5000), st.integers(1, 3000), st.booleans(), st.floats(-5, 5)), max_size=6
)


@given(
    contexts=st.lists(st.integers(1, 5000), max_size=20),
    candidates=CANDIDATES,
    tpot_seconds=st.floats(0.001, 0.2),
    stages=st.integers(1, 4),
    max_chunk_tokens=st.integers(1, 600),
    min_chunk_tokens=st.integers(1, 600),
    min_prefill_share=st.floats(0, 0.9),
)
def test_every_step_is_within_its_bounds(
    contexts: list[int],
    candidates: list[tuple[int, int, bool, float]],
    tpot_seconds: float,
    stages: int,
    max_chunk_tokens: int,
    min_chunk_tokens: int,
    min_prefill_share: float,
) -> None:
    predictor = Predictor(StepProfile(0.001, 5e-5, 1e-8, 1e-4))
    limits = Limits(stages, max_chunk_tokens, min_chunk_tokens, 0.1, min_prefill_share, 0.4)
    decodes = [
        DecodeCandidate(f"d{index}", context, tpot_seconds, tpot_seconds)
        for index, context in enumerate(contexts)
    ]
    prefills = [
        PrefillCandidate(f"p{index}", context, remaining, is_long, rho)
        for index, (context, remaining, is_long, rho) in enumerate(candidates)
    ]
    packed = packed_step(decodes, prefills, limits, predictor)

    chosen = {candidate.id: candidate for candidate in prefills if candidate.id in packed.chunks}
    sizes = {name: packed.chunks[name] for name in chosen}
    assert sum(sizes.values()) <= max_chunk_tokens
    assert sum(candidate.is_long for candidate in chosen.values()) <= 1
    for name, size in sizes.items():
        remaining = chosen[name].remaining
        assert 1 <= size <= remaining
        by_minimum = name == "p0" and size == min(min_chunk_tokens, remaining, max_chunk_tokens)
        assert size >= min(min_chunk_tokens, remaining) or by_minimum
    if prefills:
        assert "p0" in sizes, "the most urgent one always moves"
        by_minimum = sizes["p0"] == min(min_chunk_tokens, prefills[0].remaining, max_chunk_tokens)
        within = packed.predicted_seconds <= packed.budget_seconds * (1 + 1e-9)
        assert within or (by_minimum and len(sizes) == 1)
    works = [Work(candidate.context, 1) for candidate in decodes]
    works += [Work(candidate.context, sizes[name]) for name, candidate in chosen.items()]
    assert packed.predicted_seconds == pytest.approx(predictor.stage_seconds(works) if works else 0.0)


def test_a_long_that_found_no_room_does_not_join_one_that_did() -> None:
    prefills = [
        prefill("short", 55),
        prefill("patient", 500, is_long=True, rho=9.0),  # of its 60 ms 5 are left
        prefill("urgent", 30, is_long=True, rho=0.0),
    ]
    assert tokens([], prefills) == {"short": 55, "urgent": 30}


# --- what others pay for one stream's wish, and arrivals for an idle replica's long --------------------

REALISTIC = Predictor(StepProfile(0.001, 1e-4, 1e-8, 1e-4))


def rate(step: Packed) -> float:
    """Prefill tokens per second."""
    return sum(step.chunks.values()) / step.predicted_seconds


@pytest.mark.parametrize("context", [0, 5000, 200_000])
def test_a_stream_that_asks_for_a_tight_tpot_costs_the_prefills_of_others_less_than_5_percent(
    context: int,
) -> None:
    document = prefill("document", 100_000, context=context)
    usual = packed_step([decode("d", 0.05)], [document], predictor=REALISTIC)
    tight = packed_step([decode("d", 0.01, fair=0.05)], [document], predictor=REALISTIC)
    assert rate(tight) > 0.95 * rate(usual)
    assert tight.predicted_seconds < usual.predicted_seconds, "it gets something for its wish"
    cheap = packed_step([decode("d", 0.01)], [document], predictor=REALISTIC)
    smallest = cheap.chunks == {"document": LIMITS.min_chunk_tokens}
    assert cheap.predicted_seconds <= 0.01 or smallest, "a class that gives as little is followed"


def test_a_looser_wish_than_the_class_gives_is_followed() -> None:
    step = packed_step([decode("d", 0.0801, fair=0.0801)], [prefill("a", 500)])
    assert step.chunks == {"a": 79}


@pytest.mark.parametrize("context", [0, 200_000])
def test_while_nothing_decodes_a_long_chunk_ends_early_for_next_to_none_of_its_rate(context: int) -> None:
    limits = replace(LIMITS, max_chunk_tokens=4000, max_step_seconds=0.5, idle_efficiency=0.98)
    long = prefill("long", 100_000, is_long=True, context=context)
    efficient = packed_step([], [long], limits, REALISTIC)
    largest = packed_step([], [long], replace(limits, idle_efficiency=1.0), REALISTIC)
    assert efficient.predicted_seconds < 0.75 * largest.predicted_seconds
    assert 0.98 * rate(largest) <= rate(efficient) * (1 + 1e-9)
    assert efficient.chunks["long"] >= limits.min_chunk_tokens
    short = packed_step([], [replace(long, is_long=False)], limits, REALISTIC)
    assert short.chunks == largest.chunks, "a short one is better over in one step"


# --- prefills that wait for KV --------------------------------------------------------------------------


def test_kv_is_asked_for_only_by_those_that_find_space_and_most_urgent_first() -> None:
    asked: list[str] = []

    def place(candidate: PrefillCandidate) -> bool:
        asked.append(candidate.id)
        return candidate.id != "none left"

    names = ["a", "none left", "large", "tail", "over"]
    sizes = [60, 10, 90, 35, 90]
    waiting = [replace(prefill(name, size), waits=True) for name, size in zip(names, sizes, strict=True)]
    packed = pack(Batch(TOKEN_IS_A_MILLISECOND), None, iter(waiting), LIMITS, place)
    assert asked == ["a", "none left", "large"]
    assert packed.chunks == {"a": 60, "large": 40}


@pytest.mark.parametrize("decodes", [0, 1])
def test_a_step_without_decodes_is_given_up_for_nobody_who_gets_no_kv(decodes: int) -> None:
    """Without a step no event may come, so that the one behind all who get no KV would wait for ever."""
    waiting = [replace(prefill(f"waits {index}", 20), waits=True) for index in range(2 * MOST_MISSES)]
    batch = Batch(TOKEN_IS_A_MILLISECOND)
    batch.add_decodes(0, 100 * decodes, decodes)
    packed = pack(batch, None, iter([*waiting, prefill("runs", 30)]), LIMITS, lambda _: False)
    assert packed.chunks == ({} if decodes else {"runs": 30})


def test_a_part_that_turns_out_to_be_cached_is_not_computed() -> None:
    def place(candidate: PrefillCandidate) -> bool:
        candidate.context, candidate.remaining, candidate.moved = 400, 20, True
        return True

    waiting = iter([replace(prefill("a", 420), waits=True)])
    packed = pack(Batch(TOKEN_IS_A_MILLISECOND), None, waiting, LIMITS, place)
    assert packed.chunks == {"a": 20}


# --- lanes that move together ---------------------------------------------------------------------------


def test_coupled_lanes_each_have_a_long_prefill_and_a_chunk_limit_of_their_own() -> None:
    limits = replace(LIMITS, max_chunk_tokens=50)
    longs = [
        prefill("a", 500, is_long=True, rho=0.0),
        replace(prefill("b", 500, is_long=True, rho=0.0), lane=1),
        prefill("c", 500, is_long=True, rho=0.0),
    ]
    packed = pack(Batch(TOKEN_IS_A_MILLISECOND, (0, 1)), None, iter(longs), limits, lambda _: True)
    assert packed.chunks == {"a": 50, "b": 50}
    assert packed.predicted_seconds == pytest.approx(0.05), "the lanes work at the same time"


def test_a_helper_lane_pays_for_the_attention_over_its_shard_but_not_for_linear_layers() -> None:
    predictor = Predictor(StepProfile(0.0, 1e-3, 1e-6, 0.0), Topology(kv=2))
    spread = replace(prefill("a", 10, context=3000), lane_tokens={0: 1000, 1: 2000})
    batch = Batch(predictor, (0, 1))
    batch.add(spread, 10)
    assert batch.seconds() == pytest.approx(10 * 1e-3 + 10 * 2000 * 1e-6)
    batch.remove(spread, 10)
    assert batch.seconds() == pytest.approx(0.0)
    batch.add_spread_decode(0, {0: 1000, 1: 2000})
    assert batch.seconds() == pytest.approx(1e-3 + 2000 * 1e-6)


def long_prompt(name: str, remaining: int, *, waits: bool = False, rest: int = 0) -> PrefillCandidate:
    """A long prompt that has no KV to speak of yet."""
    return PrefillCandidate(
        name, 0, remaining, is_long=False, relative_slack=1.0, rest=rest, of_long_prompt=True, waits=waits
    )


@pytest.mark.parametrize(
    ("ahead", "asked"),
    [
        pytest.param(long_prompt("ahead", 5000), [], id="goes on behind this step"),
        pytest.param(long_prompt("ahead", 20, rest=5000), [], id="goes on with another lane"),
        pytest.param(long_prompt("ahead", 20), ["behind"], id="ends in this step"),
        pytest.param(prefill("ahead", 20), ["behind"], id="is short"),
    ],
)
def test_a_long_prompt_asks_for_kv_only_at_its_turn(ahead: PrefillCandidate, asked: list[str]) -> None:
    """Else what steps have left would start every long prompt at once, and fill KV with halves of them."""
    behind, found = long_prompt("behind", 5000, waits=True), []

    def place(candidate: PrefillCandidate) -> bool:
        found.append(candidate.id)
        return True

    limits = replace(LIMITS, max_step_seconds=0.3)
    pack(Batch(TOKEN_IS_A_MILLISECOND), None, iter([ahead, behind]), limits, place)
    assert found == asked


def test_a_short_prompt_passes_the_long_ones_that_await_their_turn() -> None:
    prefills = [
        long_prompt("running", 5000),
        long_prompt("waits", 5000, waits=True),
        PrefillCandidate("short", 0, 10, is_long=False, relative_slack=1.0, waits=True),
    ]
    limits = replace(LIMITS, max_step_seconds=10.0, max_chunk_tokens=400)
    batch = Batch(TOKEN_IS_A_MILLISECOND)
    prefills[0].remaining, prefills[0].rest = 300, 4700
    assert pack(batch, None, iter(prefills), limits, lambda _: True).chunks == {"running": 300, "short": 10}


@pytest.mark.parametrize(
    ("targets", "misses"),
    [
        pytest.param(DecodeTargets(0.05, 0.05), False, id="the class's own target"),
        pytest.param(DecodeTargets(0.01, 0.5), True, id="a wish beside which prefills keep their rate"),
        pytest.param(DecodeTargets(0.0001, 0.0001), True, id="less than decodes alone take"),
    ],
)
def test_every_step_that_is_longer_than_its_tightest_target_is_a_miss(
    targets: DecodeTargets, misses: bool
) -> None:
    predictor = Predictor(StepProfile(0.002, 0.001, 0.0, 0.0))
    batch = Batch(predictor)
    batch.add_decodes(0, 100, 1)
    limits = replace(LIMITS, max_chunk_tokens=1000)
    packed = pack(batch, targets, iter([prefill("p", 5000)]), limits, lambda _: True)
    assert packed.misses_tpot == misses
    assert packed.misses_tpot == (packed.predicted_seconds > targets.tpot_seconds + 1e-12)
