"""A study runs everything once, repeats itself, keeps what was done when it is interrupted, and reports it."""

from __future__ import annotations

import json
import multiprocessing
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from medha.api.replica import MedhaReplicaSpec, ServiceClass
from medha.cost.hardware import H100, LLAMA3_8B, LLAMA3_70B, profile_for
from medha.errors import ConfigInvalid, PartFailed
from medha.topology import Topology
from medha_sim import study
from medha_sim.run_summary import Summary
from medha_sim.scenario import Deployment, Disturbance, deployment_of
from medha_sim.study import (
    RunKey,
    StudyResult,
    StudySpec,
    WorkloadSpec,
    keys,
    measured_capacity,
    read_study,
    run_study,
    simulate_one,
)
from medha_sim.study_report import comparable, difference_rows, figures, of_study, page, table_rows
from medha_sim.workloads import TraceColumns

DEPLOYMENT = Deployment(model=LLAMA3_8B, hardware=H100, topology=Topology(tensor=8, stream=2))
SPEC = StudySpec(
    deployment=DEPLOYMENT,
    workload=WorkloadSpec(rate=3.0, long_share=0.05),
    systems=("lars", "fcfs"),
    seeds=(1, 2),
    duration_seconds=6.0,
    band=0.0,
)


@pytest.fixture(scope="module")
def result() -> StudyResult:
    """Two systems, two seeds, a band, in this process."""
    spec = replace(SPEC, band=0.1)
    runs = tuple((key, simulate_one(spec, key, None)) for key in keys(spec))
    return StudyResult(spec, None, runs, planned=len(runs), interrupted=False)


def test_every_system_meets_every_seed_load_and_capacity_once() -> None:
    spec = replace(SPEC, loads=(0.5, 0.9), band=0.2)
    planned = keys(spec)
    assert len(planned) == len(set(planned)) == 2 * 2 * 2 * 3
    assert {key.capacity for key in planned} == {0.8, 1.0, 1.2}
    first = planned[: len(planned) // 6]
    assert {(key.seed, key.capacity) for key in first} == {
        (1, 1.0)
    }  # so that an early end can compare systems


def test_all_systems_of_a_seed_see_the_same_requests(result: StudyResult) -> None:
    arrived = {(key.seed, run["all"]["arrived"], run["all"]["prompt_tokens"]) for key, run in result.runs}
    assert len(arrived) == 2  # one for each seed


def test_slower_ranks_take_longer_for_the_same_requests(result: StudyResult) -> None:
    median = {
        key.capacity: run["all"]["ttft_seconds"]["p50"]
        for key, run in result.runs
        if (key.system, key.seed) == ("lars", 1)
    }
    assert median[0.9] > median[1.0] > median[1.1]


def test_noise_repeats_with_the_seed_and_changes_the_run() -> None:
    noisy = replace(SPEC, disturbance=Disturbance(bias=1.0, noise=0.3))
    key = RunKey("lars", None, 1, 1.0)
    assert simulate_one(noisy, key, None) == simulate_one(noisy, key, None)
    assert simulate_one(noisy, key, None) != simulate_one(SPEC, key, None)


def test_runs_in_other_processes_give_the_same_figures_as_here() -> None:
    spec = replace(SPEC, seeds=(1,), duration_seconds=6.0)
    found = run_study(spec, jobs=2)
    assert not found.interrupted
    assert [key for key, _ in found.runs] == keys(spec)
    for key, summary in found.runs:
        assert summary["core_seconds"] > 0
        assert {name: value for name, value in summary.items() if name != "core_seconds"} == simulate_one(
            spec, key, None
        )


def test_an_interrupted_study_keeps_what_was_done_and_where_the_others_were() -> None:
    spec = replace(SPEC, seeds=(1, 2, 3, 4), duration_seconds=10.0)

    def ctrl_c(_: Sequence[RunKey], fractions: Sequence[float]) -> None:
        if max(fractions) == 1.0:
            raise KeyboardInterrupt

    found = run_study(spec, jobs=1, observe=ctrl_c)
    assert found.interrupted
    assert 1 <= len(found.runs) < len(keys(spec))
    assert found.runs[0][1]["window_seconds"] == 10.0
    assert all(run["interrupted"] == (run["window_seconds"] < 10.0) for _, run in found.runs)
    assert "Interrupted" in page(of_study(found))


def test_ctrl_c_twice_keeps_what_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    real = study.wait

    def second(futures: Any, timeout: float | None = None, **options: Any) -> Any:
        if timeout is None:
            raise KeyboardInterrupt
        return real(futures, timeout, **options)

    def first(_: Sequence[RunKey], fractions: Sequence[float]) -> None:
        if fractions[0] == 1.0 and fractions[1] > 0:  # so the first result is sent
            raise KeyboardInterrupt

    monkeypatch.setattr(study, "wait", second)
    found = run_study(replace(SPEC, seeds=(1, 2, 3, 4), duration_seconds=10.0), jobs=1, observe=first)
    assert found.interrupted
    assert [run["window_seconds"] for _, run in found.runs][:1] == [10.0]


def test_a_study_that_breaks_off_keeps_what_was_done() -> None:
    spec = replace(SPEC, seeds=(1, 2, 3, 4), duration_seconds=10.0)
    others = {
        process.pid for process in multiprocessing.active_children()
    }  # those of other tests, such as a router

    def kill(_: Sequence[RunKey], fractions: Sequence[float]) -> None:
        if fractions[0] == 1.0 and fractions[1] > 0:  # so the first result is sent
            for process in multiprocessing.active_children():
                if process.pid not in others:
                    process.kill()

    found = run_study(spec, jobs=1, observe=kill)
    assert not found.interrupted
    assert found.failure is not None
    assert "BrokenProcessPool" in found.failure
    assert 1 <= len(found.runs) < len(keys(spec))
    assert found.runs[0] == (keys(spec)[0], found.runs[0][1])
    assert any("Broken off" in warning for warning in of_study(found).warnings)
    assert json.loads(figures(of_study(found)))["failure"] == found.failure


@pytest.mark.parametrize(
    ("change", "runs"),
    [
        ({"seeds": (1,)}, True),
        ({"disturbance": Disturbance(noise=0.1)}, True),
        ({"workload": WorkloadSpec(shape="trace", rate=1.0, columns=TraceColumns(None))}, True),
        ({}, False),
    ],
)
def test_several_seeds_that_would_give_one_run_are_refused(
    change: dict[str, Any], runs: bool, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,10,4\n")
    timed: dict[str, Any] = {"workload": WorkloadSpec(shape="trace")}
    spec = replace(SPEC, **(timed | change))
    spec = replace(spec, workload=replace(spec.workload, trace=trace))
    if runs:
        spec.check()
    else:
        with pytest.raises(ConfigInvalid, match="seeds are 1, 2, but a trace that has its own times"):
            spec.check()


def test_a_trace_is_held_to_the_length_of_the_deployments_model(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,6000,4\n")
    spec = replace(SPEC, workload=WorkloadSpec(shape="trace", trace=trace), seeds=(1,))
    spec.check()
    with pytest.raises(
        ConfigInvalid, match=":2: num_prefill_tokens is 6000; the replicas' maxModelLen is 5000"
    ):
        replace(spec, deployment=replace(DEPLOYMENT, max_model_len=5000)).check()


def test_an_error_in_a_process_is_reported_with_the_run_that_it_ended() -> None:
    broken = replace(SPEC, workload=WorkloadSpec(shape="trace", trace=Path("nowhere.csv")))
    with pytest.raises(ConfigInvalid, match=r"nowhere\.csv"):
        run_study(broken, jobs=1)
    impossible = replace(SPEC, systems=("hrrn",), disturbance=Disturbance(bias=0.0))
    with pytest.raises(PartFailed, match="run hrrn, seed 1: ZeroDivisionError"):
        run_study(impossible, jobs=1)


def test_other_systems_are_compared_on_the_same_requests() -> None:
    spec = replace(SPEC, systems=("guarded", "sarathi-512", "loongserve"), duration_seconds=3.0)
    spec.check()
    arrived = {
        simulate_one(spec, RunKey(system, None, 1, 1.0), None)["all"]["prompt_tokens"]
        for system in spec.systems
    }
    assert len(arrived) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"deployment": replace(DEPLOYMENT, replicas=2)}, "loongserve is simulated as one replica, not 2"),
        ({"disturbance": Disturbance(noise=0.1)}, "noise is 0.1, which loongserve is not simulated with"),
    ],
)
def test_what_a_baseline_cannot_do_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigInvalid, match=words):
        replace(SPEC, systems=("lars", "loongserve"), **change).check()


def test_the_measured_capacity_is_near_what_lone_prefills_would_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(study, "_CAPACITY_SECONDS", 12.0)
    monkeypatch.setattr(study, "_CAPACITY_WARM_UP_SECONDS", 2.0)
    shorts = WorkloadSpec(long_share=0.0)
    capacity = measured_capacity(DEPLOYMENT, shorts)
    lone = 1 / shorts.mix().mean_work_seconds(DEPLOYMENT.targets().prefill_seconds)
    assert 0.5 * lone < capacity < 3 * lone  # batched shorts share weights; decodes cost


def test_a_load_is_a_share_of_the_capacity() -> None:
    spec = replace(SPEC, loads=(0.5,), workload=WorkloadSpec())
    summary = simulate_one(spec, RunKey("lars", 0.5, 1, 1.0), capacity_rate=4.0)
    assert summary["rate"] == 2.0


def test_only_a_mix_has_a_measured_capacity() -> None:
    with pytest.raises(ConfigInvalid, match="give a rate"):
        measured_capacity(DEPLOYMENT, WorkloadSpec(shape="conversations"))


def test_weights_that_do_not_fit_are_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigInvalid, match="Use more tensor or stream ranks"):
        Deployment(model=LLAMA3_70B, hardware=H100, topology=Topology()).kv_tokens()


def test_a_manifest_gives_grid_memory_scheduling_and_profile(tmp_path: Path) -> None:
    measured = profile_for(LLAMA3_8B, H100, Topology(tensor=2))
    path = tmp_path / "profile.json"
    path.write_text(measured.to_json())
    spec = MedhaReplicaSpec.model_validate(
        {
            "model": {"name": "m", "source": {"path": "/m"}, "maxModelLen": 5000},
            "parallelism": {"tensor": 2, "stream": 2},
            "kvCache": {"size": "1Gi", "blockSizeTokens": 32},
            "scheduling": {"policy": "srpt", "profile": str(path)},
        }
    )
    deployment = deployment_of(spec, H100, LLAMA3_8B)
    config = deployment.config()
    assert deployment.profile() == measured
    assert config.topology == Topology(tensor=2, stream=2)
    assert config.max_model_len == 5000
    assert config.kv_tokens == 2**30 * 4 // LLAMA3_8B.kv_bytes_per_token // 32 * 32
    assert config.scheduling.policy == "srpt"
    path.unlink()
    with pytest.raises(ConfigInvalid, match=r"scheduling\.profile: .* cannot be read"):
        deployment_of(spec, H100, LLAMA3_8B)


def test_service_classes_of_the_deployment_give_the_deadlines() -> None:
    strict = ServiceClass(name="strict", ttft_floor_seconds=0.1, ttft_factor=1.5, tpot_target_seconds=0.02)
    targets = replace(DEPLOYMENT, service_classes=(strict,)).targets()
    made = WorkloadSpec(rate=1.0).make(targets, 60.0, 1)
    lone = targets.prefill_seconds
    for arrival in made.arrivals:
        work = float(lone([arrival.prompt_tokens])[0])  # type: ignore[arg-type]
        assert arrival.ttft_target_seconds == pytest.approx(max(0.1, 1.5 * work))
        assert arrival.tpot_target_seconds == 0.02


# --- the report --------------------------------------------------------------------------------------


def test_the_page_fetches_nothing_and_the_json_beside_it_has_every_run(result: StudyResult) -> None:
    text = page(of_study(result))
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=", text)
    assert text.count("Plotly.newPlot(") >= 10
    for words in (
        "Deadlines met",
        "Time to first token",
        "Convoys",
        "share of KV held",
        "requests that hold KV",
        "chunks by context",
    ):
        assert words in text
    found = json.loads(figures(of_study(result)))
    assert found["planned_runs"] == len(found["runs"]) == len(result.runs) == 12
    assert read_study(found) == list(result.runs)


def test_several_loads_have_a_section_each_and_lines_over_the_load(result: StudyResult) -> None:
    loads = tuple(
        (replace(key, load=load), run)
        for load in (0.5, 0.9)
        for key, run in result.runs
        if key.capacity == 1 and key.seed == 1
    )
    text = page(of_study(replace(result, runs=loads)))
    assert [words in text for words in ("Offered load 0.5", "Offered load 0.9", "Over the offered load")] == [
        True
    ] * 3
    assert "good requests a second, over the offered load" in text


def test_service_classes_are_told_apart_where_there_are_several(result: StudyResult) -> None:
    key, summary = result.runs[0]
    classes = {"strict": summary["all"], "batch": summary["all"]}
    assert "by service class" not in page(of_study(result))
    text = page(of_study(replace(result, runs=((key, summary | {"classes": classes}),))))
    assert "TTFT in time, by service class" in text
    assert "TPOT by service class" in text


def test_the_table_shows_mean_interval_and_band(result: StudyResult) -> None:
    head, rows = table_rows(result.runs)
    assert head[0] == "system"
    assert [row[0] for row in rows] == ["lars", "fcfs"]
    column = head.index("short: TTFT p50")
    assert re.fullmatch(r"\d+ ms \[\d+ ms to \d+ ms\]", rows[0][column])  # two seeds make no interval
    _, rows = table_rows(_with_third_seed(result), band=False)
    assert re.fullmatch(r"\d+ ms ±\d+ ms", rows[0][column])


def test_differences_are_paired_by_seed(result: StudyResult) -> None:
    assert difference_rows(result.runs)[1] == []
    head, rows = difference_rows(_with_third_seed(result))
    assert [row[0] for row in rows] == ["fcfs - lars"]
    assert re.fullmatch(r"[+-]\d\.\d{3} ±\d\.\d{3}", rows[0][head.index("good requests/s")])
    same = [(key, result.runs[0][1]) for key, _ in _with_third_seed(result)]
    assert difference_rows(same)[1][0][head.index("good requests/s")] == "+0.000 ±0.000"


def _with_third_seed(result: StudyResult) -> list[tuple[RunKey, Summary]]:
    """The runs, and those of the first seed once more as the third's."""
    again = [(replace(key, seed=3), run) for key, run in result.runs if key.seed == 1]
    return [*result.runs, *again]


def test_names_in_a_page_are_escaped(result: StudyResult) -> None:
    strange = WorkloadSpec(shape="trace", trace=Path("<script>alert(1)</script>.csv"))
    renamed = replace(result, spec=replace(result.spec, workload=strange))
    assert "<script>alert" not in page(of_study(renamed))


def test_stopped_runs_are_compared_only_if_there_are_no_others(result: StudyResult) -> None:
    whole = result.runs[0]
    stopped = (result.runs[1][0], result.runs[1][1] | {"interrupted": True})
    assert list(comparable([whole, stopped])) == [whole]
    assert list(comparable([stopped])) == [stopped]


def test_many_undecided_and_refused_requests_are_warned_of(result: StudyResult) -> None:
    key, summary = result.runs[0]
    figures = summary["all"] | {"ttft_undecided": 5}
    unserved = [
        {"ending": "refused", "reason": "too_long", "count": 3, "first": "9 tokens; the pool holds 8"}
    ]
    report = of_study(replace(result, runs=((key, summary | {"all": figures, "unserved": unserved}),)))
    assert any("5 of" in warning and "undecided" in warning for warning in report.warnings)
    assert f"{key}: 3 refused as too_long, the first: 9 tokens; the pool holds 8." in report.warnings
