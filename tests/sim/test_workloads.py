"""Workloads have the statistics that they are named for, and seeds pair them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from medha.errors import ConfigInvalid
from medha_sim.lengths import MEDHA_SWE, SHAREGPT, Fixed, Independent, LogNormal, Stretched
from medha_sim.simulation import Arrival, Workload
from medha_sim.workloads import (
    Mix,
    Part,
    Targets,
    TraceColumns,
    conversations,
    gaps,
    generate,
    read_trace,
    sharegpt_with_long,
)

Seconds = npt.NDArray[np.float64]


def prefill_seconds(prompts: npt.NDArray[np.int64]) -> Seconds:
    """A made-up machine: 10,000 tokens a second."""
    return prompts / 10_000


TARGETS = Targets(prefill_seconds)


def workload(**settings: object) -> Workload:
    defaults: dict[str, object] = {"rate": 2.0, "duration_seconds": 2000.0, "seed": 1}
    mix = settings.pop("mix", sharegpt_with_long(0.05))
    return generate(mix, TARGETS, **(defaults | settings))  # type: ignore[arg-type]


def test_short_prompts_and_outputs_have_the_quantiles_of_sharegpt() -> None:
    prompts, outputs = SHAREGPT.sample(40_000, np.random.default_rng(1))
    assert np.median(prompts) == pytest.approx(1730, rel=0.03)
    assert np.quantile(prompts, 0.9) == pytest.approx(5696, rel=0.02)
    assert np.median(outputs) == pytest.approx(415, rel=0.02)
    assert np.quantile(outputs, 0.9) == pytest.approx(834, rel=0.02)
    assert int(np.max(prompts + outputs)) <= 8192
    assert int(np.min(outputs)) >= 1


def test_long_prompts_and_outputs_have_the_quantiles_that_the_paper_states() -> None:
    prompts, outputs = MEDHA_SWE.sample(40_000, np.random.default_rng(1))
    assert np.median(prompts) == pytest.approx(393_000, rel=0.02)
    assert np.quantile(prompts, 0.9) == pytest.approx(839_000, rel=0.01)
    assert np.median(outputs) == pytest.approx(518, rel=0.02)
    assert np.quantile(outputs, 0.9) == pytest.approx(808, rel=0.02)
    assert 100_000 <= int(prompts.min()) <= int(prompts.max()) <= 1_000_000


def test_a_cut_log_normal_stays_inside_its_cut_and_keeps_its_shape_where_it_hardly_cuts() -> None:
    quantity = LogNormal(mu=5.0, sigma=0.5, low=1, high=100_000)
    at = quantity.at(np.array([0.0, 0.5, 1.0]))
    assert at[1] == round(np.exp(5.0))
    assert at[0] >= 1
    assert at[2] <= 100_000


def test_stretched_prompts_are_longer_and_their_outputs_are_the_same() -> None:
    prompts, outputs = MEDHA_SWE.sample(100, np.random.default_rng(1))
    longer, same = Stretched(MEDHA_SWE, 2).sample(100, np.random.default_rng(1))
    assert (longer == 2 * prompts).all()
    assert (same == outputs).all()


@pytest.mark.parametrize("variation", [1.0, 3.0, 0.0])
def test_arrivals_have_the_rate_and_the_burstiness_asked_for(variation: float) -> None:
    drawn = np.array(gaps(60_000, variation, np.random.default_rng(1)))
    assert drawn.mean() == pytest.approx(1.0, rel=0.05)
    assert drawn.std() == pytest.approx(variation, rel=0.05, abs=1e-9)


def test_a_mix_has_its_shares_and_its_rate() -> None:
    arrivals = workload().arrivals
    kinds = Counter(arrival.kind for arrival in arrivals)
    assert kinds["long"] / len(arrivals) == pytest.approx(0.05, abs=0.01)
    assert len(arrivals) == pytest.approx(4000, rel=0.05)
    times = [arrival.at_seconds for arrival in arrivals]
    assert times == sorted(times)
    assert len({arrival.id for arrival in arrivals}) == len(arrivals)


def test_deadlines_are_a_multiple_of_the_isolated_prefill_and_at_least_the_floor() -> None:
    for arrival in workload(duration_seconds=50.0).arrivals:
        assert arrival.ttft_target_seconds == pytest.approx(max(2.0, 3 * arrival.prompt_tokens / 10_000))
        assert arrival.tpot_target_seconds == 0.05


def test_a_seed_repeats_its_workload_and_another_does_not() -> None:
    assert workload() == workload()
    assert workload() != workload(seed=2)


def test_at_another_rate_the_same_requests_come_in_the_same_order() -> None:
    slow, fast = workload(rate=1.0).arrivals, workload(rate=2.0).arrivals
    assert len(fast) > len(slow)
    for one, other in zip(slow, fast, strict=False):
        assert (one.id, one.prompt_tokens, one.output_tokens) == (
            other.id,
            other.prompt_tokens,
            other.output_tokens,
        )
        assert one.at_seconds == pytest.approx(2 * other.at_seconds)


def test_with_more_long_requests_those_that_stay_short_are_the_same() -> None:
    few, many = workload().arrivals, workload(mix=sharegpt_with_long(0.2)).arrivals
    longs = 0
    for one, other in zip(few, many, strict=True):
        longs += other.kind == "long"
        if one.kind == other.kind:
            assert (one.prompt_tokens, one.output_tokens) == (other.prompt_tokens, other.output_tokens)
        else:
            assert (one.kind, other.kind) == ("short", "long")
    assert longs / len(many) == pytest.approx(0.2, abs=0.02)


def test_the_mean_work_of_a_mix_is_that_of_its_parts() -> None:
    parts = (
        Part("a", Independent(Fixed(1000), Fixed(1)), 0.75),
        Part("b", Independent(Fixed(9000), Fixed(1)), 0.25),
    )
    assert Mix(parts).mean_work_seconds(prefill_seconds) == pytest.approx(0.3)


def test_turns_of_a_conversation_continue_what_was_said() -> None:
    made = conversations(TARGETS, rate=0.5, duration_seconds=400.0, seed=3)
    assert len(made.follow_ups) > len(made.arrivals) > 100
    by_id = {arrival.id: arrival for arrival in made.every()}
    thinking = []
    for id_, follow_up in made.follow_ups.items():
        before, after = by_id[id_], follow_up.arrival
        assert after.conversation == before.conversation
        assert after.prompt_tokens > before.prompt_tokens + before.output_tokens
        thinking.append(follow_up.think_seconds)
    assert np.mean(thinking) == pytest.approx(20.0, rel=0.15)
    turns = Counter(arrival.conversation for arrival in made.every())
    assert np.mean(list(turns.values())) == pytest.approx(4.0, rel=0.15)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rate": 0.0}, "rate is 0"),
        ({"duration_seconds": float("nan")}, "duration is nan"),
    ],
)
def test_settings_that_make_no_workload_are_refused_with_their_names(
    settings: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigInvalid, match=words):
        workload(**settings)


def test_shares_that_make_no_whole_are_refused() -> None:
    with pytest.raises(ConfigInvalid, match=r"short -0\.5, long 1\.5; they must be positive and add up to 1"):
        sharegpt_with_long(1.5)


def trace(folder: Path, text: str) -> Path:
    path = folder / "trace.csv"
    path.write_text(text)
    return path


def test_a_trace_gives_its_requests_in_the_order_of_time(tmp_path: Path) -> None:
    path = trace(
        tmp_path, "arrived_at,num_prefill_tokens,num_decode_tokens\n12,200000,5\n10,30,4\n14.5,50,6\n"
    )
    arrivals = read_trace(path, TARGETS).arrivals
    assert [(one.at_seconds, one.prompt_tokens, one.output_tokens, one.kind) for one in arrivals] == [
        (0.0, 30, 4, "short"),
        (2.0, 200_000, 5, "long"),
        (4.5, 50, 6, "short"),
    ]


def test_a_trace_can_be_scaled_to_a_rate_cut_and_have_other_columns(tmp_path: Path) -> None:
    path = trace(tmp_path, "when,in,out\n0,30,4\n10,40,5\n20,50,6\n")
    columns = TraceColumns("when", "in", "out")
    arrivals = read_trace(path, TARGETS, columns=columns, rate=1.0, duration_seconds=1.5).arrivals
    assert [one.at_seconds for one in arrivals] == [0.0, 1.0]


CLASSES = replace(
    TARGETS,
    of_class={
        "chat": TARGETS,
        "batch": replace(TARGETS, ttft_floor_seconds=60.0, ttft_factor=10.0, tpot_seconds=0.5),
    },
)


def test_a_column_of_a_trace_names_service_classes_and_each_has_its_own_targets(tmp_path: Path) -> None:
    path = trace(
        tmp_path,
        "at,in,out,tier\n3,100000,5,batch\n2,30,4,batch\n1,30,4, chat \n4,30,4,\n5,30,4,default\n6,30,4\n",
    )
    arrivals = read_trace(path, CLASSES, columns=TraceColumns("at", "in", "out", "tier")).arrivals
    found = [(one.service_class, one.ttft_target_seconds, one.tpot_target_seconds) for one in arrivals]
    assert found == [
        ("chat", 2.0, 0.05),
        ("batch", 60.0, 0.5),
        ("batch", 100.0, 0.5),
        *[("chat", 2.0, 0.05)] * 3,
    ]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("3,30", r"csv:3: the row ends before out; complete it, or leave it out"),
        ("3,30,abc", r"csv:3: out is 'abc', which is no number; correct the cell, or leave the row out"),
        ("nan,30,5", r"csv:3: at is 'nan', which is no number"),
        ("3,1,024,5", r"csv:3: the row has 4 cells for 3 columns; quote a cell that holds a comma, or leave"),
    ],
)
def test_a_row_that_is_short_or_holds_no_number_is_refused_with_its_line(
    tmp_path: Path, row: str, words: str
) -> None:
    path = trace(tmp_path, f"at,in,out\n1,30,5\n{row}\n")
    with pytest.raises(ConfigInvalid, match=words):
        read_trace(path, TARGETS, columns=TraceColumns("at", "in", "out"))


def test_a_comma_at_the_end_of_a_row_is_no_cell(tmp_path: Path) -> None:
    path = trace(tmp_path, "at,in,out\n1,30,5,\n")
    (arrival,) = read_trace(path, TARGETS, columns=TraceColumns("at", "in", "out")).arrivals
    assert (arrival.prompt_tokens, arrival.output_tokens) == (30, 5)


def test_a_trace_that_names_an_unknown_class_is_refused_with_its_line(tmp_path: Path) -> None:
    path = trace(tmp_path, "at,in,out,tier\n3,30,5,batch\n2,30,4,gold\n")
    columns = TraceColumns("at", "in", "out", "tier")
    with pytest.raises(
        ConfigInvalid, match=r"csv:3: tier is 'gold'; the service classes are chat, batch\. Correct"
    ):
        read_trace(path, CLASSES, columns=columns)
    with pytest.raises(ConfigInvalid, match="has no column 'class'"):
        read_trace(path, CLASSES, columns=replace(columns, service_class="class"))


def test_a_trace_may_begin_with_a_mark_of_byte_order(tmp_path: Path) -> None:
    text = "\ufeffarrived_at,num_prefill_tokens,num_decode_tokens\n0,10,4\n"
    assert len(read_trace(trace(tmp_path, text), TARGETS).arrivals) == 1


def test_arrivals_that_are_generated_for_a_trace_follow_seed_and_burstiness(tmp_path: Path) -> None:
    path = trace(tmp_path, "in,out\n" + "30,4\n" * 4000)

    def gaps_of(**settings: Any) -> Seconds:
        made = read_trace(path, TARGETS, columns=TraceColumns(None, "in", "out"), rate=1.0, **settings)
        return np.diff([one.at_seconds for one in made.arrivals])

    assert gaps_of(seed=1)[0] != gaps_of(seed=2)[0]
    assert gaps_of(coefficient_of_variation=3.0).std() == pytest.approx(3.0, rel=0.1)


def test_clients_of_a_trace_may_name_no_output_length(tmp_path: Path) -> None:
    path = trace(tmp_path, "arrived_at,num_prefill_tokens,num_decode_tokens\n0,10,4\n")
    (named,) = read_trace(path, TARGETS).arrivals
    (open_ended,) = read_trace(path, TARGETS, names_max_tokens=False).arrivals
    assert (named.max_tokens, open_ended.max_tokens) == (4, None)
    assert open_ended.output_tokens == 4


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
@pytest.mark.parametrize("arrived_at", ["when", None])
def test_a_trace_is_refused_a_rate_that_is_none(tmp_path: Path, rate: float, arrived_at: str | None) -> None:
    path = trace(tmp_path, "when,in,out\n0,30,4\n10,40,5\n")
    with pytest.raises(ConfigInvalid, match=r"rate is .*; it must be a positive number"):
        read_trace(path, TARGETS, columns=TraceColumns(arrived_at, "in", "out"), rate=rate)


def test_the_longest_prompt_of_a_trace_leaves_one_token_of_the_models_length(tmp_path: Path) -> None:
    header = "arrived_at,num_prefill_tokens,num_decode_tokens\n"
    assert read_trace(trace(tmp_path, header + "0,999,1000\n"), TARGETS, max_model_len=1000).arrivals
    for row, words in (
        ("0,1000,1", ":2: num_prefill_tokens is 1000; the replicas' maxModelLen is 1000, .* room for 999"),
        ("0,1,1001", ":2: num_decode_tokens is 1001; the replicas' maxModelLen is 1000, .* room for 1000"),
        ("0,1e300,1", ":2: num_prefill_tokens is 1e300; .*leave the row out, or simulate a manifest"),
    ):
        with pytest.raises(ConfigInvalid, match=words):
            read_trace(trace(tmp_path, header + row), TARGETS, max_model_len=1000)


def test_a_trace_without_times_gets_poisson_arrivals(tmp_path: Path) -> None:
    path = trace(tmp_path, "in,out\n" + "30,4\n" * 4000)
    arrivals = read_trace(path, TARGETS, columns=TraceColumns(None, "in", "out"), rate=4.0).arrivals
    assert arrivals[-1].at_seconds == pytest.approx(1000, rel=0.05)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b\n1,2\n", "no column 'arrived_at'; it has 'a', 'b'"),
        ("arrived_at,num_prefill_tokens,num_decode_tokens\n", "no rows"),
        ("arrived_at,num_prefill_tokens,num_decode_tokens\n0,ten,4\n", ":2: num_prefill_tokens is 'ten'"),
        ("arrived_at,num_prefill_tokens,num_decode_tokens\n0,10,4\n1,0,4\n", ":3: num_prefill_tokens is 0"),
        (
            "arrived_at,num_prefill_tokens,num_decode_tokens\n0,10\n",
            ":2: the row ends before num_decode_tokens",
        ),
        ("", "it has none"),
    ],
)
def test_a_wrong_trace_is_refused_with_its_line_and_column(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        read_trace(trace(tmp_path, text), TARGETS)
    assert words in str(caught.value)


def test_a_missing_trace_and_a_missing_rate_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="cannot be read"):
        read_trace(tmp_path / "none.csv", TARGETS)
    with pytest.raises(ConfigInvalid, match="give a rate"):
        read_trace(trace(tmp_path, "in,out\n1,2\n"), TARGETS, columns=TraceColumns(None, "in", "out"))


def test_a_workload_knows_where_each_request_ends() -> None:
    arrival = Arrival("a", 0.0, 10, 5, 1.0, 1.0)
    assert Workload([arrival]).ends_at() == {"a": 15}
