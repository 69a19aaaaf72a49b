"""A lone prompt beside streams that decode: cut by Medha's own packer, timed by the virtual clock."""

from __future__ import annotations

import pytest

from medha.cost.hardware import H100
from medha.cost.predictor import TOKENS_PER_LANE
from medha.topology import Topology
from medha.wire.messages import Step
from medha_papers import lone_prompt
from medha_papers.campaign_run import Run, simulate
from medha_papers.lone_prompt import Alone, adaptive, static
from medha_sim.executor import StepTiming
from medha_sim.scenario import Deployment

EIGHT = Topology(8)


def done(alone: Alone | None) -> Alone:
    assert alone is not None
    return alone


def test_a_prefill_takes_what_the_predictor_says_and_the_streams_besides() -> None:
    tokens = 200_000
    found = done(static(EIGHT, tokens, lone_prompt.LARGEST_CHUNK_TOKENS))
    predicted = Deployment(hardware=H100, topology=EIGHT).predictor().prefill_seconds(0, tokens)
    assert predicted < found.prefill_seconds < 1.1 * predicted
    assert found.lanes == (1, 1)


def test_a_stream_waits_for_each_chunk_to_pass_all_stages() -> None:
    found = done(static(Topology(8, 4), 200_000, 512))
    first, last = found.busy_seconds
    assert first == last  # of one lane, the last step within its share is the last one
    assert 4 * last < 1.05 * found.p95_gap_seconds < 1.2 * 4 * last


@pytest.mark.long
def test_lanes_join_as_the_kv_grows_and_keep_steps_as_short() -> None:
    tokens = 2 * TOKENS_PER_LANE + 4096
    three, one = (done(static(Topology(8, 1, lanes), tokens, 4096)) for lanes in (4, 1))
    assert (three.lanes, one.lanes) == ((1, 3), (1, 1))
    assert three.busy_seconds[1] < 1.1 * three.busy_seconds[0]
    assert one.busy_seconds[1] > 1.5 * one.busy_seconds[0]
    assert three.prefill_seconds < one.prefill_seconds


def test_adaptive_chunks_keep_the_target_and_are_done_sooner() -> None:
    cut = done(static(EIGHT, 400_000, 256))
    found = done(adaptive(EIGHT, 400_000, cut.p95_gap_seconds))
    assert found.p95_gap_seconds == pytest.approx(cut.p95_gap_seconds, rel=0.01)
    assert found.prefill_seconds < cut.prefill_seconds


def test_slower_ranks_take_longer() -> None:
    slow, usual = (done(static(EIGHT, 100_000, 2048, capacity)) for capacity in (0.5, 1.0))
    assert slow.prefill_seconds / usual.prefill_seconds == pytest.approx(2.0, rel=0.01)


def test_all_chunks_but_the_last_are_of_the_size_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []

    class Cost(lone_prompt.PredictorCost):
        def __call__(self, step: Step, now: float) -> StepTiming:
            counts.extend(entry.token_count for entry in step.entries if not entry.id.startswith("stream"))
            return super().__call__(step, now)

    monkeypatch.setattr(lone_prompt, "PredictorCost", Cost)
    done(static(Topology(8, 2), 100_000, 768))
    assert counts[:-1] == [768] * 130
    assert sum(counts) == 100_000


def test_a_campaign_runs_both_cuts_and_can_be_stopped() -> None:
    run = Run("adaptive-512", 0.0, 0, 3600.0, deployment="8B-TP8", prompt_tokens=100_000)
    found = simulate(run)
    assert found is not None
    assert found["static"]["prefill_seconds"] > found["adaptive"]["prefill_seconds"] > 1
    assert simulate(run, lambda now: now > 2) is None
