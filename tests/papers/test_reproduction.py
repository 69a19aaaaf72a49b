"""The campaign: which runs it has, that it resumes, and that every figure follows the fixed rule."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from medha_papers import lone_rows
from medha_papers.campaign_plan import FULL, QUICK, Scale, runs
from medha_papers.campaign_pool import Stopwatch, run_all
from medha_papers.campaign_run import Outcome, Run, simulate
from medha_papers.comparison import comparisons, goals, offered_loads
from medha_papers.reproduction_page import page, report
from medha_papers.roles_section import ROLES_FILE, section
from medha_papers.simulated_rows import Point, Rows, calibration, strength
from medha_papers.source_digest import digest, loaded_files

ROOT = Path(__file__).resolve().parents[2]
ROLES = json.loads((ROOT / ROLES_FILE).read_text(encoding="utf-8"))
TINY = Run("medha-lars", 0.05, 0, 6.0, rate=2.0)


def outcome(ttft: float = 1.0, tpot: float = 0.05, finished: int = 10, attained: float = 1.0) -> Outcome:
    """An outcome in which every quantile is the same."""
    kind = {
        "arrived": finished,
        "finished": finished,
        "ttft_attainment": attained,
        **{
            name: dict.fromkeys(("p50", "p90", "p99", "max"), value)
            for name, value in (("ttft_seconds", ttft), ("ttft_over_target", ttft), ("tpot_seconds", tpot))
        },
    }
    return {"all": kind, "short": kind, "long": kind, "core_seconds": 1.0}


def outcomes(scale: Scale, **by_system: Outcome) -> dict[str, Outcome]:
    """Every run of a scale, with the outcome given for its system (underscores for hyphens), or the usual one."""
    return {
        run.key: by_system.get(run.system.replace("-", "_"), alone() if run.prompt_tokens else outcome())
        for run in runs(scale)
    }


def alone(**figures: Any) -> Outcome:
    """An outcome of a lone prompt, in which adaptive chunks do as well as those of one size."""
    usual = {"prefill_seconds": 9.0, "p95_gap_seconds": 0.06, "lanes": [1, 4], "busy_seconds": [0.1, 0.1]}
    return {"static": usual | figures, "adaptive": usual | figures, "core_seconds": 1.0}


# --- which runs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [FULL, QUICK])
def test_every_run_has_a_name_of_its_own(scale: Scale) -> None:
    planned = runs(scale)
    assert len({run.key for run in planned}) == len(planned)


def test_the_goals_come_first_then_everything_seed_by_seed() -> None:
    planned = runs(FULL)
    assert {(run.system, run.long_share, run.load) for run in planned[:60]} == {
        (system, 0.05, load) for system in ("medha-guarded", "medha-srpt") for load in (0.87, 0.97, 1.07)
    }
    rest = [run.seed for run in planned[60:]]
    assert rest == sorted(rest)
    assert planned[60].load is None  # the papers' claims before the grid


class Polled(dict[str, Outcome]):
    """Outcomes that remember which were asked for."""

    def __init__(self, found: dict[str, Outcome]) -> None:
        super().__init__(found)
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)


def test_the_claims_are_run_in_full_and_nothing_is_run_for_them_that_no_figure_needs() -> None:
    found = Polled(outcomes(FULL))
    rows = Rows(found, FULL).all()
    lone_rows.rows(Rows(found, FULL))
    strength(found, FULL)
    calibration(found, FULL)
    planned = {run.key for run in runs(FULL) if run.load is None}
    second_band = {key for key in found.asked - planned if "70B" in key}
    assert found.asked - second_band == planned
    assert all("seed 1, capacity" in key for key in second_band)  # of T9's band, one seed is run
    for row in rows:
        assert all(figure.verdict != "not testable" for figure in row.figures), row.id
        assert not any("no band was run" in figure.note for figure in row.figures), row.id


def test_the_full_campaign_has_every_point_of_the_grid_in_paired_seeds() -> None:
    planned = runs(FULL)
    for share in (0.01, 0.05, 0.2):
        for load in (0.5, 0.87, 0.97, 1.07):
            for policy in FULL.policies:
                goal = share == 0.05 and load != 0.5 and policy in ("guarded", "srpt")
                expected = 10 if goal else 5
                at = [
                    run.seed
                    for run in planned
                    if (run.system, run.long_share, run.load) == (f"medha-{policy}", share, load)
                ]
                assert at == list(range(expected))
            for system in FULL.systems:
                seeds = [r.seed for r in planned if (r.system, r.long_share, r.load) == (system, share, load)]
                assert seeds == list(range(5))
    assert all(run.window_seconds == 3600 for run in planned if run.load is not None)


def test_figures_at_the_claimed_rates_have_a_band() -> None:
    planned = set(runs(FULL))
    for system in ("medha-lars", "loongserve"):
        nominal = Run(system, 0.05, 0, 3600.0, rate=0.75)
        assert {nominal, replace(nominal, capacity=0.9), replace(nominal, capacity=1.1)} <= planned


def simulated(run: Run) -> Outcome:
    found = simulate(run)
    assert found is not None
    return found


# --- running ---------------------------------------------------------------------------------------------


def test_a_run_depends_on_nothing_but_itself() -> None:
    first, second = (simulated(TINY) for _ in range(2))
    for found in (first, second):
        del found["core_seconds"]
    assert first == second
    assert first["all"]["arrived"] > 0
    assert first["all"]["ttft_seconds"]["p50"] is not None


def test_slower_ranks_answer_later() -> None:
    slow, fast = (
        simulated(replace(TINY, long_share=0.0, capacity=capacity))["all"]["ttft_seconds"]["p50"]
        for capacity in (0.5, 1.0)
    )
    assert slow > 1.5 * fast


def test_a_campaign_goes_on_where_it_was_and_keeps_a_failure_as_one() -> None:
    planned = [TINY, replace(TINY, seed=1), replace(TINY, system="nonesuch")]
    kept: dict[str, Outcome] = {}

    def keep(run: Run, found: Outcome) -> None:
        kept[run.key] = found

    run_all(planned, {TINY.key: outcome()}, {}, jobs=1, deadline_seconds=100.0, keep=keep)
    assert list(kept) == [run.key for run in planned[1:]]
    assert "arrived" in kept[planned[1].key]["all"]
    assert kept[planned[2].key]["error"].startswith("ConfigInvalid: system is 'nonesuch'")


def test_a_stopped_run_has_no_outcome() -> None:
    assert simulate(TINY, lambda now: now > 2.0) is None


def test_an_interrupt_ends_the_campaign_at_once_and_keeps_what_was_done() -> None:
    kept: list[str] = []
    endless = replace(TINY, window_seconds=1e6)

    def tick() -> None:
        if kept:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_all(
            [TINY, endless],
            {},
            {},
            jobs=2,
            deadline_seconds=100.0,
            keep=lambda run, found: kept.append(run.key),
            tick=tick,
        )
    assert kept == [TINY.key]


def test_the_arrival_rate_is_the_load_of_the_measured_capacity() -> None:
    kept: list[Run] = []
    run_all(
        [replace(TINY, rate=0.0, load=0.5)],
        {},
        {"0.05": {"rate": 3.0, "mean_work_seconds": 1.0}},
        jobs=1,
        deadline_seconds=100.0,
        keep=lambda run, found: kept.append(replace(run, rate=found["rate"])),
    )
    assert [run.rate for run in kept] == [1.5]


def test_the_time_that_is_left_is_learnt_from_the_most_alike_runs() -> None:
    hour = Run("medha-lars", 0.05, 0, 3600.0, rate=0.75)
    watch = Stopwatch([(hour.key, {"core_seconds": 36.0}), ("broken", {"error": "no"})])
    assert watch.seconds(replace(hour, seed=1, window_seconds=1800.0)) == pytest.approx(18.0)
    watch.learn(replace(hour, rate=1.75).key, {"core_seconds": 72.0})
    assert watch.seconds(replace(hour, seed=2)) == pytest.approx(36.0)
    assert watch.seconds(replace(hour, rate=1.25)) == pytest.approx(54.0)
    assert watch.left_seconds([hour, replace(hour, rate=1.75)], jobs=2) == pytest.approx(54.0)
    assert Stopwatch().left_seconds([hour], jobs=1) is None


def test_results_hold_until_the_code_that_a_simulation_loads_changes(tmp_path: Path) -> None:
    names = {file.name for file in loaded_files()}
    assert {
        "controller.py",
        "simulation.py",
        "loongserve.py",
        "fitted_hardware.py",
        "campaign_run.py",
    } <= names
    assert not {"study_report.py", "reproduction_page.py", "campaign_plan.py", "metrics_page.py"} & names
    source = tmp_path / "one.py"
    source.write_text('"""Says one thing."""\n\nX = 1  # one\n"""What X is."""\n')
    before = digest([source])
    source.write_text('"""Says another."""\nX = 1\n')
    assert digest([source]) == before
    source.write_text("X = 2\n")
    assert digest([source]) != before


def test_no_run_starts_once_time_is_up() -> None:
    run_all([TINY], {}, {}, jobs=1, deadline_seconds=0.0, keep=lambda run, found: pytest.fail(run.key))


# --- rows ------------------------------------------------------------------------------------------------


def test_a_ratio_is_taken_within_a_seed_and_averaged_over_seeds() -> None:
    found = outcomes(FULL, loongserve=outcome(30.0))
    for seed, ttft in ((0, 20.0), (1, 40.0)):
        found[Run("loongserve", 0.05, seed, 3600.0, rate=0.75).key] = outcome(ttft)
    figure = Rows(found, FULL).t1().figures[0]
    assert figure.ours == 30.0
    assert figure.band == (30.0, 30.0)
    assert figure.verdict == "reproduced"


def test_the_band_is_the_hull_over_slower_and_faster_ranks() -> None:
    found = outcomes(FULL, loongserve=outcome(20.0))
    for seed in range(2):
        found[Run("loongserve", 0.05, seed, 3600.0, rate=0.75, capacity=0.9).key] = outcome(50.0)
    figure = Rows(found, FULL).t1().figures[0]
    assert figure.band == (20.0, 50.0)
    assert figure.verdict == "reproduced"
    assert Rows(found, FULL).t1().figures[1].verdict == "direction only"  # 174 lies outside


def test_one_seed_against_the_order_refutes_it() -> None:
    found = outcomes(FULL, loongserve=outcome(20.0))
    found[Run("loongserve", 0.05, 1, 3600.0, rate=0.75).key] = outcome(0.5)
    assert Rows(found, FULL).t1().figures[1].verdict == "refuted"


def test_a_figure_whose_runs_are_missing_or_failed_is_not_testable() -> None:
    assert {row.verdict for row in Rows({}, QUICK).all()} == {"not testable"}
    failed = {run.key: {"error": "broken"} for run in runs(FULL)}
    assert {row.verdict for row in Rows(failed, FULL).all()} == {"not testable"}


def test_effective_capacity_is_the_highest_rate_before_the_first_that_is_too_slow() -> None:
    found = outcomes(FULL)
    point = Point(found, FULL, 0, 1.0)
    assert point.longest_rate("medha-lars") == 1.75
    found[Run("medha-lars", 0.05, 0, 3600.0, rate=0.75).key] = outcome(11.0)
    assert point.longest_rate("medha-lars") == 0.25
    found[Run("medha-lars", 0.05, 0, 3600.0, rate=0.25).key] = outcome(11.0)
    assert point.longest_rate("medha-lars") == 0.125


def test_fewer_completions_are_counted_in_percent() -> None:
    found = outcomes(
        FULL,
        loongserve_reserved=outcome(finished=72),
        loongserve=outcome(finished=80),
        medha_lars=outcome(finished=90),
    )
    than_medha, than_plain = Rows(found, FULL).t8().figures
    assert than_medha.ours == pytest.approx(20.0)
    assert than_plain.ours == pytest.approx(10.0)
    assert {than_medha.verdict, than_plain.verdict} == {"reproduced"}


def test_the_speed_that_undoes_a_claim_is_the_first_at_which_the_ratio_is_gone() -> None:
    found = outcomes(FULL, loongserve=outcome(30.0, tpot=0.2))
    for speed, ttft in ((2.0, 10.0), (4.0, 2.0), (8.0, 0.9), (16.0, 0.5)):
        run = Run("loongserve", 0.05, 0, 3600.0, rate=0.75, loongserve_speed=speed)
        found[run.key] = outcome(ttft, tpot=0.2)
    answers = dict(strength(found, FULL))
    assert answers["T1: median TTFT below LoongServe's (5 % long, 0.75 requests/s)"] == "between 4x and 8x"
    assert answers["T5: TPOT below LoongServe's (short only, 1.75 requests/s)"].startswith("more than 16x")
    assert set(dict(strength({}, QUICK)).values()) == {"not run"}


# --- guarded against the others ------------------------------------------------------------------------------


def test_differences_are_of_equal_seeds() -> None:
    found: dict[str, Outcome] = {}
    for seed, (guarded, srpt) in enumerate(((0.90, 0.85), (0.80, 0.77))):
        for policy, attained in (("guarded", guarded), ("srpt", srpt)):
            run = Run(f"medha-{policy}", 0.05, seed, 3600.0, load=0.97)
            found[run.key] = outcome(attained=attained)
    guarded_row, srpt_row = comparisons(found, FULL)
    assert guarded_row.long == pytest.approx((85.0, 12.71 * 5.0 * 2**0.5 / 2**0.5))
    assert srpt_row.long_difference[0] == pytest.approx(4.0)
    assert srpt_row.long_difference[1] == pytest.approx(12.71 * 1.0)
    assert srpt_row.seeds == 2
    loongserve = Run("loongserve", 0.05, 0, 3600.0, load=0.97)
    other = comparisons({**found, loongserve.key: outcome(attained=0.1)}, FULL)[-1]
    assert (other.policy, other.seeds) == ("loongserve", 1)
    assert other.short_difference[0] == pytest.approx(80.0)
    judged = goals([guarded_row, srpt_row], 3600.0)
    assert [goal.met for goal in judged] == [False, True]  # shorts at 85 %, longs 4 points ahead
    assert [goal.met for goal in goals([guarded_row, srpt_row], 240.0)] == [None, None]


def test_a_goal_that_the_mean_meets_says_how_far_the_worst_seed_is_from_it() -> None:
    found: dict[str, Outcome] = {}
    for seed, (guarded, srpt) in enumerate(((0.99, 0.90), (0.80, 0.81), (0.99, 0.98))):
        for policy, attained in (("guarded", guarded), ("srpt", srpt)):
            found[Run(f"medha-{policy}", 0.05, seed, 3600.0, load=0.97).key] = outcome(attained=attained)
    _, ahead = goals(comparisons(found, FULL), 3600.0)
    assert ahead.met, "3 points on average"
    assert ahead.worst == pytest.approx(-1.0)
    assert (ahead.below, ahead.seeds) == (2, 3)


def test_the_load_that_came_is_measured_in_work_against_the_capacity() -> None:
    found = {
        Run("medha-guarded", 0.05, seed, 3600.0, load=0.97).key: {"work": {"offered": work, "done": 0.5}}
        for seed, work in enumerate((0.9, 1.1))
    }
    capacities = {"0.05": {"rate": 0.5, "mean_work_seconds": 2.0}}
    (point,) = offered_loads(found, capacities, FULL)
    assert point.offered[0] == pytest.approx(100.0)
    assert point.done[0] == pytest.approx(50.0)
    assert point.rate == pytest.approx(0.485)


# --- a lone prompt -----------------------------------------------------------------------------------------


def verdicts(found: dict[str, Outcome]) -> dict[str, list[str]]:
    """Of each row of a lone prompt, figure by figure."""
    return {row.id: [figure.verdict for figure in row.figures] for row in lone_rows.rows(Rows(found, FULL))}


def test_rows_of_a_lone_prompt_follow_from_its_runs() -> None:
    found = outcomes(FULL)
    assert verdicts(found) == {
        "T11": ["refuted"],  # chunks of 32 take no longer here
        "T12": ["reproduced"],
        "T18": ["direction only", "reproduced", "refuted"],  # four lanes are no better here
        "T19": ["reproduced", "reproduced", "reproduced", "refuted"],
    }
    for key in found:
        if key.startswith("8B-TP8, static-32,"):
            found[key] = alone(prefill_seconds=9.0 * 1.75)
        elif key.startswith("8B-TP4-SPP4-KVP4,"):
            found[key] = alone(prefill_seconds=4.0, p95_gap_seconds=0.03)
        elif key.startswith("8B-TP8-SPP4, "):
            found[key] = alone(busy_seconds=[0.1, 0.3])
        elif ", adaptive-64, " in key:
            found[key] = alone() | {"adaptive": alone(p95_gap_seconds=0.06007)["static"]}
        elif ", adaptive-128, " in key:
            found[key] = alone() | {"adaptive": alone(p95_gap_seconds=0.06005)["static"]}
    assert verdicts(found) == {
        "T11": ["reproduced"],
        "T12": ["direction only"],
        "T18": ["direction only", "reproduced", "reproduced"],
        "T19": ["reproduced"] * 4,
    }
    (few,) = [row for row in lone_rows.rows(Rows(outcomes(QUICK), QUICK)) if row.id == "T18"]
    assert few.figures[-1].verdict == "refuted"  # with one point, too
    assert verdicts({}) == {
        "T11": ["not testable"],
        "T12": ["not testable"],
        "T18": ["not testable"] * 3,
        "T19": ["not testable"] * 4,
    }


# --- the page ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def campaign() -> dict[str, Any]:
    found = outcomes(QUICK, loongserve=outcome(30.0))
    found["broken"] = {"error": "no"}
    return {
        "mode": "quick",
        "commit": "0123456789ab",
        "sources": "fedcba987654",
        "file": "benchmarks/results/x.json",
        "report": report(
            found, {"0.05": {"rate": 0.7, "mean_work_seconds": 1.4}}, QUICK, [run.key for run in runs(QUICK)]
        ),
    }


def test_the_page_has_every_row_and_says_which_mode_made_it(campaign: dict[str, Any]) -> None:
    text = page(campaign, ROLES)
    ids = [f"T{number}" for number in (*range(1, 13), 15, 16, 17, 18, 19, 21, 22, 23, *range(27, 33))]
    for row in ids:
        assert f"\n## {row}\n" in text
    assert "**This is a quick run**" in text
    assert "`0123456789ab`" in text
    assert "window too short to tell" in text
    assert "| Goal (5 % long) | Mean | Worst seed | Seeds that miss it | Met by the mean |" in text
    assert "## Runs that failed\n\n- broken" in text


def test_the_page_follows_from_the_file_alone(campaign: dict[str, Any]) -> None:
    assert page(json.loads(json.dumps(campaign, allow_nan=False)), ROLES) == page(campaign, ROLES)


def test_the_answer_on_roles_names_the_points_at_which_a_split_is_certain_to_win_or_lose() -> None:
    def row(mix: str, name: str, more: float, half: float) -> dict[str, Any]:
        return {
            "count": 4, "replicas": name, "mix": mix, "tpot_seconds": 0.02, "load": 0.7, "on_time_percent": 50 + more,
            "more_on_time_points": more, "half_interval_points": half, "p99_pause_seconds": 0.2,
        }  # fmt: skip

    outcomes = {"won": (9.0, 3.0), "lost": (-9.0, 3.0), "open": (9.0, 12.0)}
    rows = [
        one
        for mix, (more, half) in outcomes.items()
        for one in (row(mix, "4 both", 0.0, 0.0), row(mix, "2+2", more, half))
    ]
    text = section({"rows": rows, "command": "c", "revision": "r", "seeds": 3})
    assert "A split wins at 1 of 3 points: won at 20 ms and load 0.7 (`2+2`: +9 points)." in text
    assert "Every split loses at 1: lost at 20 ms and load 0.7." in text
    assert "| open | 20 ms | 0.7 | 50 | 59 (+9 ± 12) |" in text
    assert "| lost | 20 ms | 0.7 | 50 | 41 (**-9 ± 3**) |" in text


def test_the_committed_page_is_that_of_the_committed_file() -> None:
    text = (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8")
    name = text.split("from `")[1].split("`")[0]
    assert page(json.loads((ROOT / name).read_text(encoding="utf-8")), ROLES) == text
