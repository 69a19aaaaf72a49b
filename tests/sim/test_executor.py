"""The simulated ranks keep the pipeline's times as one works them out by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from medha.cost.hardware import H100, LLAMA3_8B, profile_for
from medha.cost.predictor import Predictor, Work
from medha.shards import Segment
from medha.topology import Topology
from medha.wire.messages import Admit, Done, Extent, Sampling, StageFree, Step, StepEntry
from medha_sim.executor import Executor, Perturbed, PredictorCost, StepTiming


def step(index: int, *entries: StepEntry, lanes: tuple[int, ...] = (0,)) -> Step:
    return Step(step_id=index, epoch=0, entries=entries, lanes=lanes)


def entry(id_: str, start: int, count: int, *, samples: bool = False, lane: int = 0) -> StepEntry:
    return StepEntry(id_, lane, (Extent(start, count),), samples)


class Scripted:
    """Each step costs what the script says: seconds of its stages."""

    def __init__(self, script: Mapping[int, Sequence[float]], transit_seconds: float = 0.0) -> None:
        self.script = script
        self.transit_seconds = transit_seconds

    def __call__(self, step: Step, now: float) -> StepTiming:
        return StepTiming(tuple(self.script[step.step_id]), self.transit_seconds)


def executor(
    script: Mapping[int, Sequence[float]], *, stages: int, lanes: int = 1, **more: float
) -> Executor:
    cost = Scripted(script, more.pop("transit_seconds", 0.0))
    return Executor(cost, stages=stages, lanes=lanes, ends_at={"a": 12, "b": 12}, **more)


def times(run: Executor, one: Step, now: float) -> tuple[float, float]:
    """When stage 0 is free, and when the step is done."""
    (free_at, free), (done_at, done) = run.launch(one, now).events
    assert isinstance(free, StageFree)
    assert isinstance(done, Done)
    assert (free.step_id, free.stage, done.step_id) == (one.step_id, 0, one.step_id)
    return free_at, done_at


def test_a_second_chunk_enters_stage_0_while_the_first_is_in_stage_1() -> None:
    run = executor({0: (3, 3, 3), 1: (2, 2, 2), 2: (4, 4, 4)}, stages=3)
    # stage 0: 0-3, 3-5, 5-9; stage 1: 3-6, 6-8, 9-13; stage 2: 6-9, 9-11, 13-17
    assert times(run, step(0, entry("a", 0, 4)), 0.0) == (3, 9)
    assert times(run, step(1, entry("a", 4, 4)), 3.0) == (5, 11)
    assert times(run, step(2, entry("a", 8, 4)), 5.0) == (9, 17)


def test_hops_and_messages_delay_a_step_and_do_not_keep_a_stage_busy() -> None:
    run = executor({0: (3, 3), 1: (3, 3)}, stages=2, transit_seconds=0.5, message_seconds=0.25)
    # in at 0.25, stage 0 until 3.25, hop until 3.75, stage 1 until 6.75, sampling until 7.25, message until 7.5
    assert times(run, step(0, entry("a", 0, 4)), 0.0) == (3.5, 7.5)
    # in at 3.75; stage 0 until 6.75, hop until 7.25, when stage 1 has been free since 6.75
    assert times(run, step(1, entry("a", 4, 4)), 3.5) == (7.0, 11.0)


def test_steps_end_in_order_however_long_one_is_in_transit() -> None:
    transit = {0: 9.0, 1: 0.0, 2: 0.0}
    run = Executor(
        lambda one, _now: StepTiming((1.0,), transit[one.step_id]),
        stages=1,
        lanes=2,
        ends_at={"a": 100, "b": 100},
    )
    assert times(run, step(0, entry("a", 0, 4)), 0.0) == (1, 10)
    assert times(run, step(1, entry("a", 4, 4)), 1.0) == (2, 10)
    assert times(run, step(2, entry("b", 0, 4, lane=1), lanes=(1,)), 1.0) == (2, 2)


def test_a_step_that_is_launched_before_stage_0_is_free_waits_there() -> None:
    run = executor({0: (5,), 1: (1,)}, stages=1)
    assert times(run, step(0, entry("a", 0, 4)), 0.0) == (5, 5)
    assert times(run, step(1, entry("b", 0, 4)), 1.0) == (6, 6)


def test_lanes_that_share_no_request_run_side_by_side() -> None:
    run = executor({0: (5, 5), 1: (1, 1)}, stages=2, lanes=2)
    assert times(run, step(0, entry("a", 0, 4)), 0.0) == (5, 10)
    assert times(run, step(1, entry("b", 0, 4, lane=1), lanes=(1,)), 0.0) == (1, 2)


def test_coupled_lanes_wait_for_each_other_at_every_stage() -> None:
    run = executor({0: (5, 1), 1: (1, 8), 2: (2, 2), 3: (1, 1)}, stages=2, lanes=2)
    assert times(run, step(0, entry("a", 0, 4)), 0.0) == (5, 6)  # lane 0: stage 0 until 5, stage 1 until 6
    assert times(run, step(1, entry("b", 0, 4, lane=1), lanes=(1,)), 0.0) == (
        1,
        9,
    )  # lane 1: until 1, until 9
    # both lanes: stage 0 is free at 5, so 5-7; stage 1 of lane 1 is busy until 9, so 9-11
    assert times(run, step(2, entry("a", 4, 4), lanes=(0, 1)), 1.0) == (7, 11)
    # and the lane that was free earlier is held, too
    assert times(run, step(3, entry("b", 4, 4, lane=1), lanes=(1,)), 7.0) == (8, 12)


def test_each_sampling_entry_samples_the_token_of_its_next_position_until_its_end() -> None:
    run = executor({0: (1,), 1: (1,)}, stages=1)
    (_, done) = run.launch(step(0, entry("a", 0, 10, samples=True), entry("b", 0, 5)), 0.0).events[1]
    assert isinstance(done, Done)
    assert [(one.id, one.token, one.finish_reason) for one in done.samples] == [("a", 10, None)]
    (_, done) = run.launch(step(1, entry("a", 10, 1, samples=True)), 0.0).events[1]
    assert isinstance(done, Done)
    assert [(one.id, one.token, one.finish_reason) for one in done.samples] == [("a", 11, "stop")]


def test_a_later_attempt_of_a_request_ends_where_the_first_would_have() -> None:
    run = executor({0: (1,)}, stages=1)
    (_, done) = run.launch(step(0, entry("a~2", 0, 11, samples=True)), 0.0).events[1]
    assert isinstance(done, Done)
    assert done.samples[0].finish_reason == "stop"


def test_the_ground_truth_of_a_step_is_the_prediction_of_the_whole_batch() -> None:
    topology = Topology(tensor=8, stream=2)
    predictor = Predictor(profile_for(LLAMA3_8B, H100, topology), topology)
    cost = PredictorCost(predictor)
    timing = cost(step(0, entry("a", 5000, 1, samples=True), entry("b", 100_000, 512)), 0.0)
    works = [Work(5000, 1), Work(100_000, 512)]
    assert timing.stage_seconds == pytest.approx((predictor.stage_seconds(works),) * 2)
    whole = sum(timing.stage_seconds) + timing.transit_seconds
    assert whole == pytest.approx(predictor.latency_seconds(works), rel=0.05)
    assert cost(step(1), 0.0).stage_seconds == (0.0, 0.0)


def test_a_coupled_step_is_charged_for_the_kv_that_each_lane_holds() -> None:
    topology = Topology(tensor=8, kv=2)
    predictor = Predictor(profile_for(LLAMA3_8B, H100, topology), topology)
    cost = PredictorCost(predictor)
    admit = Admit(
        id="a",
        prompt="a",
        tokens=300_000,
        prompt_length=300_000,
        seed=0,
        sampling=Sampling(),
        reserved_tokens=300_000,
        segments=(Segment(0, 0, 100_000), Segment(1, 100_000, 300_000)),
    )
    chunk = StepEntry("a", 0, (Extent(250_000, 512),), False, strategy="owner")
    timing = cost(Step(step_id=0, epoch=0, entries=(chunk,), admits=(admit,), lanes=(0, 1)), 0.0)
    lanes = [[Work(100_000, 512)], [Work(150_000, 512, attention_only=True)]]
    assert timing.stage_seconds == pytest.approx((predictor.coupled_seconds(lanes, 512),))
    alone = predictor.stage_seconds([Work(250_000, 512)])
    assert timing.stage_seconds[0] < alone  # two lanes share the attention

    cost(Step(step_id=1, epoch=0, entries=(), releases=("a",)), 0.0)
    assert not cost._shards


def test_noise_keeps_the_mean_and_bias_moves_it() -> None:
    cost = Scripted(dict.fromkeys(range(4000), (1.0, 2.0)), 0.5)
    noisy = Perturbed(cost, bias=1.25, noise=0.2, generator=np.random.default_rng(1))
    timings = [noisy(step(index), 0.0) for index in range(4000)]
    first = np.array([timing.stage_seconds[0] for timing in timings])
    assert first.mean() == pytest.approx(1.25, rel=0.01)
    assert first.std() / first.mean() == pytest.approx(0.2, rel=0.05)
    for timing, seconds in zip(timings, first, strict=True):
        assert timing.stage_seconds[1] == pytest.approx(2 * seconds)
        assert timing.transit_seconds == pytest.approx(seconds / 2)


def test_noise_repeats_with_its_seed() -> None:
    def draw(seed: int) -> list[StepTiming]:
        cost = Perturbed(Scripted({0: (1.0,)}), bias=1.0, noise=0.1, generator=np.random.default_rng(seed))
        return [cost(step(0), 0.0) for _ in range(3)]

    assert draw(1) == draw(1) != draw(2)
