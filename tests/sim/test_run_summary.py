"""Figures follow from the log by stated rules: what is decided, what is censored, what is good."""

from __future__ import annotations

from dataclasses import replace
from math import isinf

import pytest

from medha.wire.messages import Extent, Step, StepEntry
from medha_sim.run_log import Ending, RequestRecord, RunLog
from medha_sim.run_summary import (
    convoy,
    distribution,
    group,
    interval_95,
    length_bucket,
    steps,
    summarise,
    ttft_met,
    unserved,
)


def record(
    id_: str = "r",
    *,
    arrived_at: float = 0.0,
    first: float | None = None,
    last: float | None = None,
    tokens: int = 0,
    ending: Ending = "censored",
    prompt_tokens: int = 100,
    kind: str = "short",
) -> RequestRecord:
    return RequestRecord(
        id=id_,
        kind=kind,
        service_class="default",
        prompt_tokens=prompt_tokens,
        output_tokens=10,
        arrived_at=arrived_at,
        ttft_target_seconds=2.0,
        tpot_target_seconds=0.05,
        first_token_at=first,
        last_token_at=first if last is None else last,
        tokens=tokens,
        ending=ending,
    )


@pytest.mark.parametrize(
    ("one", "met"),
    [
        (record(first=2.0, tokens=1), True),
        (record(first=2.1, tokens=1), False),
        (record(arrived_at=97.0), False),  # no token, and the deadline passed at 99
        (record(arrived_at=99.0), None),  # still inside its deadline when the clock stopped at 100
        (record(arrived_at=99.0, ending="refused"), False),
        (record(arrived_at=99.0, ending="failed"), False),
    ],
)
def test_a_target_is_decided_by_a_first_token_or_by_its_deadline(
    one: RequestRecord, met: bool | None
) -> None:
    assert ttft_met(one, 100.0) is met


def test_what_was_not_served_is_counted_by_its_reason_with_what_was_said_of_the_first() -> None:
    records = [record("a", first=1.0, ending="finished")]
    rows: tuple[tuple[str, Ending, str], ...] = (
        ("b", "refused", "too_long: 9000 tokens; maxModelLen is 8192"),
        ("c", "refused", "overloaded: 4 wait"),
        ("d", "refused", "too_long: 9001 tokens; maxModelLen is 8192"),
        ("e", "failed", "out_of_memory: activations: too many"),
    )
    records += [replace(record(name, ending=ending), detail=detail) for name, ending, detail in rows]
    assert [tuple(why.values()) for why in unserved(records)] == [
        ("refused", "too_long", 2, "9000 tokens; maxModelLen is 8192"),
        ("refused", "overloaded", 1, "4 wait"),
        ("failed", "out_of_memory", 1, "activations: too many"),
    ]


def test_a_group_counts_every_request_and_leaves_the_undecided_out_of_its_attainment() -> None:
    records = [
        record("a", first=1.0, last=1.4, tokens=11, ending="finished"),  # 40 ms a token: good
        record("b", first=1.0, last=2.0, tokens=11, ending="finished"),  # 100 ms a token: not good
        record("c", first=9.0, last=9.4, tokens=11, ending="finished"),  # late
        record("d", arrived_at=99.5),  # undecided
        record("e", arrived_at=50.0),  # missed, and censored
        record("f", ending="refused"),
    ]
    figures = group(records, 100.0)
    assert {key: figures[key] for key in ("arrived", "finished", "refused", "failed", "censored")} == {
        "arrived": 6,
        "finished": 3,
        "refused": 1,
        "failed": 0,
        "censored": 2,
    }
    assert figures["ttft_undecided"] == 1
    assert figures["ttft_attainment"] == 2 / 5
    assert figures["tpot_attainment"] == 2 / 3
    assert figures["good"] == 1
    assert figures["goodput_per_second"] == 0.01
    assert figures["output_tokens_per_second"] == 0.33
    assert figures["ttft_seconds"]["p50"] == 1.0
    assert figures["ttft_over_target"]["max"] == 4.5


def test_an_empty_group_has_no_shares() -> None:
    figures = group([], 10.0)
    assert figures["ttft_attainment"] is None
    assert figures["ttft_seconds"] == {"count": 0}


def test_gaps_between_tokens_are_counted_as_they_come() -> None:
    log = RunLog()
    log.arrived(record("a"))
    for now in (1.0, 1.04, 1.2, 1.24):
        log.emitted("a", 1, now)
    log.ended("a", "finished", 1.24)
    one = log.requests["a"]
    assert (one.tokens, one.late_gaps) == (4, 1)
    assert one.worst_gap_seconds == pytest.approx(0.16)
    assert one.tpot_seconds == pytest.approx(0.24 / 3)
    log.window_seconds = 10.0
    assert group([one], 10.0)["late_token_share"] == pytest.approx(1 / 3)


def test_a_convoy_shows_as_shorts_that_arrive_while_a_long_prompt_is_not_yet_answered() -> None:
    records = [
        record("long", arrived_at=10.0, first=20.0, prompt_tokens=500_000, kind="long"),
        record("other long", arrived_at=15.0, first=30.0, prompt_tokens=200_000, kind="long"),
        record("before", arrived_at=5.0, first=5.1),
        record("inside", arrived_at=12.0, first=15.0),
        record("inside the other", arrived_at=25.0, first=26.0),
        record("after", arrived_at=30.0, first=30.3),
        record("never", arrived_at=11.0),
    ]
    found = convoy(records)
    assert (found["while_long_prefills"]["count"], found["otherwise"]["count"]) == (2, 2)
    assert found["while_long_prefills"]["p50"] == pytest.approx(2.0)
    assert found["otherwise"]["p50"] == pytest.approx(0.2)
    assert found["median_ratio"] == pytest.approx(10.0)


def test_a_long_prompt_that_is_never_answered_holds_up_all_behind_it() -> None:
    found = convoy([record("long", prompt_tokens=500_000), record("a", arrived_at=90.0, first=95.0)])
    assert found["while_long_prefills"]["count"] == 1


def test_steps_show_chunks_by_context_decodes_and_how_well_they_were_predicted() -> None:
    log = RunLog(window_seconds=10.0)
    entries = (
        StepEntry("a", 0, (Extent(0, 512),), False),
        StepEntry("b", 0, (Extent(200_000, 64),), False),
        StepEntry("c", 0, (Extent(70, 1),), True),
    )
    prompts = {"a": 512, "b": 300_000, "c": 70}
    log.stepped(Step(0, 0, entries, predicted_seconds=0.5), prompts.__getitem__, 0.6, 1.0)
    found = steps(log)
    assert found["count"] == 1
    assert found["busy_share"] == pytest.approx(0.06)
    assert found["observed_over_predicted"]["p50"] == pytest.approx(1.2)
    assert found["decodes"]["p50"] == 1
    assert {key: one["p50"] for key, one in found["chunk_tokens_by_context"].items()} == {
        "0-1K": 512,
        "128K-512K": 64,
    }


def test_the_last_chunk_of_a_prompt_is_no_decode_although_it_has_one_token_and_samples() -> None:
    log = RunLog(window_seconds=10.0)
    log.stepped(Step(0, 0, (StepEntry("a", 0, (Extent(512, 1),), True),)), {"a": 513}.__getitem__, 0.6, 1.0)
    assert (list(log.steps.decodes), list(log.steps.prefill_tokens)) == ([0], [1])
    assert list(log.chunks.tokens) == [1]


def test_lengths_fall_into_named_buckets() -> None:
    names = [length_bucket(tokens) for tokens in (1, 999, 1000, 31_999, 128_000, 512_000, 9_000_000)]
    assert names == ["0-1K", "0-1K", "1K-8K", "8K-32K", "128K-512K", "512K and more", "512K and more"]


def test_distributions_hold_quantiles_and_a_curve() -> None:
    found = distribution([float(value) for value in range(1, 101)])
    assert found["count"] == 100
    assert found["p50"] == pytest.approx(50.5)
    assert found["curve"][0] == 1
    assert found["curve"][-1] == 100
    assert found["curve"] == sorted(found["curve"])


def test_intervals_are_students() -> None:
    mean, half = interval_95([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert half == pytest.approx(4.30 / 3**0.5)
    assert isinf(interval_95([1.0])[1])


def test_an_empty_run_can_be_summarised() -> None:
    found = summarise(RunLog(window_seconds=1.0))
    assert found["all"]["arrived"] == 0
    assert found["series"]["at"] == []
