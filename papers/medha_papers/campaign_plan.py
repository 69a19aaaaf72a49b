"""The runs behind docs/reproduction.md: systems, loads and seeds, and their order.

`Scale` defines how much is run; `FULL` is meant for two cores and 90 minutes, `QUICK` for two minutes. The
runs for the project's goals come first, with all their seeds; then those for the papers' claims and the grid,
seed by seed. A campaign that is stopped early therefore answers the same questions with fewer seeds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from medha_papers.campaign_run import Run
from medha_papers.lone_prompt import LIMIT_SECONDS
from medha_sim.baselines.systems import SINGLE


@dataclass(frozen=True, slots=True)
class Scale:
    """The size of a campaign: its systems, loads, seeds and windows."""

    name: str
    window_seconds: float
    short_window_seconds: float  # for workloads without long requests, which have many more steps per second
    deep_window_seconds: float  # for 70B on 64 H100, whose many stages take many short steps
    seeds: int  # at each point of the grid
    goal_seeds: int  # for `guarded` and SRPT where a goal is set
    paper_seeds: int
    rates: tuple[float, ...]  # requests per second, as in the papers
    loads: tuple[float, ...]
    shares: tuple[float, ...]  # shares of long requests
    policies: tuple[str, ...]
    systems: tuple[str, ...]  # other systems on the grid
    single: tuple[
        str, ...
    ]  # Medha's policies with one prefill per step, at the long share for which goals are set
    speeds: tuple[float, ...]  # factors of a faster LoongServe
    band: tuple[float, ...]  # speeds of the ranks over what the controllers assume, beside 1
    deep: tuple[str, ...]  # deployments of T9
    chunks: tuple[int, ...]  # chunk sizes of T12
    lane_points: tuple[tuple[int, int], ...]  # points of T18: tokens of the prompt, and of its chunks


FULL = Scale(
    name="full",
    window_seconds=3600.0,
    short_window_seconds=900.0,
    deep_window_seconds=1200.0,
    seeds=5,
    goal_seeds=10,
    paper_seeds=2,
    rates=(0.25, 0.75, 1.25, 1.75),
    loads=(0.5, 0.87, 0.97, 1.07),
    shares=(0.01, 0.05, 0.2),
    policies=("guarded", "srpt", "lars", "edf", "lrs", "fcfs"),
    systems=(
        "vllm-2048",
        "sarathi-512",
        "sarathi-2048",
        "hrrn",
        "distserve",
        "loongserve",
        "loongserve-reserved",
    ),
    single=SINGLE,
    speeds=(2.0, 4.0, 8.0, 16.0),
    band=(0.9, 1.1),
    deep=("70B-2D", "70B-3D"),
    chunks=(64, 128, 256, 512, 1024, 2048, 4096),
    lane_points=tuple((tokens, chunk) for tokens in (4_000_000, 2_000_000) for chunk in (128, 256, 64, 32)),
)
QUICK = Scale(
    name="quick",
    window_seconds=240.0,
    short_window_seconds=60.0,
    deep_window_seconds=30.0,
    seeds=2,
    goal_seeds=2,
    paper_seeds=1,
    rates=(0.75, 1.75),
    loads=(0.97,),
    shares=(0.05,),
    policies=("guarded", "srpt", "lars"),
    systems=("vllm-2048", "loongserve"),
    single=(),
    speeds=(),
    band=(),
    deep=("70B-2D", "70B-3D"),
    chunks=(512, 1024, 2048, 4096),
    lane_points=((4_000_000, 128),),
)
SCALES = {scale.name: scale for scale in (FULL, QUICK)}

GOAL_SHARE = 0.05
GOAL_LOADS = (0.87, 0.97, 1.07)
GOAL_POLICIES = ("guarded", "srpt")
"""Policies that the goals compare."""

DEEP_RATES = (0.25, 0.75, 1.75)
"""Rates of T9."""

CONVOY_RATE = 0.75
"""Rate at which the papers state most figures."""


def runs(scale: Scale) -> list[Run]:
    """Return every run of a scale, the most important first."""
    return list(
        dict.fromkeys(
            [
                *_by_seed(_goal_runs(scale)),
                *_by_seed([*_paper_runs(scale), *_grid_runs(scale)]),
            ]
        )
    )


def _by_seed(chosen: list[Run]) -> list[Run]:
    """Sort runs by seed; within a seed: claims, their bands, a faster LoongServe, then the grid.

    In the grid, the points of the goals come first, then the others by the distance of their share.
    """
    return sorted(chosen, key=lambda run: (run.seed, _turn(run)))


def _turn(run: Run) -> tuple[int, float]:
    if run.load is None:
        if run.loongserve_speed != 1:
            return 2, 0.0
        return int(run.capacity != 1), 0.0
    goal = run.long_share == GOAL_SHARE and run.load in GOAL_LOADS
    return 3 if goal else 4, abs(run.long_share - GOAL_SHARE)


def _goal_runs(scale: Scale) -> list[Run]:
    """Return the runs of `guarded` and SRPT at the points for which a goal is set."""
    return [
        Run(f"medha-{policy}", GOAL_SHARE, seed, scale.window_seconds, load=load)
        for load in GOAL_LOADS
        if load in scale.loads
        for seed in range(scale.goal_seeds)
        for policy in GOAL_POLICIES
    ]


def _grid_runs(scale: Scale) -> Iterator[Run]:
    """Yield the runs of `guarded` and of the other policies and systems, with equal seeds."""
    for share in scale.shares:
        names = [*(f"medha-{policy}" for policy in scale.policies), *scale.systems]
        if share == GOAL_SHARE:
            names += scale.single
        for load in scale.loads:
            for seed in range(scale.seeds):
                for name in names:
                    yield Run(name, share, seed, scale.window_seconds, load=load)


def _paper_runs(scale: Scale) -> Iterator[Run]:
    """Yield exactly the runs that `medha_papers.simulated_rows` looks up for T1 to T9, and those of `_lone_runs`."""
    low, high = min(scale.rates), max(scale.rates)
    for seed in range(scale.paper_seeds):
        mixed = Run("", 0.05, seed, scale.window_seconds)
        short = Run("", 0.0, seed, scale.short_window_seconds)
        claimed = [
            *(
                replace(mixed, system=system, rate=rate)
                for rate in scale.rates
                for system in ("medha-lars", "loongserve")
            ),
            *(replace(mixed, system="single-lars", rate=rate) for rate in (low, high)),
            *(replace(mixed, system="single-edf", rate=rate) for rate in (low, high)),
            replace(mixed, system="single-fcfs", rate=high),
            *(replace(mixed, system="sarathi-2048", rate=rate) for rate in (CONVOY_RATE, high)),
            replace(mixed, system="loongserve-reserved", rate=CONVOY_RATE),
            replace(mixed, system="loongserve", rate=CONVOY_RATE, long_share=0.01),
            replace(short, system="loongserve", rate=CONVOY_RATE),
            *(replace(short, system=system, rate=low) for system in ("medha-lars", "loongserve")),
            *(replace(short, system=name, rate=high) for name in ("medha-lars", "loongserve", "sarathi-512")),
        ]
        deep = [
            replace(
                mixed,
                system="medha-lars",
                rate=rate,
                deployment=deployment,
                window_seconds=scale.deep_window_seconds,
            )
            for rate in DEEP_RATES
            for deployment in scale.deep
        ]
        for run in (*claimed, *deep):
            yield run
            if seed == 0 or run.deployment == "8B":  # deep runs cost most, so their band has one seed
                yield from (replace(run, capacity=capacity) for capacity in scale.band)
        if seed == 0:
            yield from _lone_runs(scale)
            for rate in scale.rates:  # for the curve to which LoongServe was calibrated
                yield from (replace(short, system=name, rate=rate) for name in ("medha-lars", "loongserve"))
            stronger = [
                run
                for run in claimed
                if run.system.startswith("loongserve") and (run.long_share or run.rate in (CONVOY_RATE, high))
            ]
            yield from (replace(run, loongserve_speed=speed) for speed in scale.speeds for run in stronger)


def lone_run(deployment: str, system: str, tokens: int, capacity: float = 1.0) -> Run:
    """Return the run of a lone prompt; it has one seed, because nothing in it is random."""
    return Run(system, 0.0, 0, LIMIT_SECONDS, capacity=capacity, deployment=deployment, prompt_tokens=tokens)


def _lone_runs(scale: Scale) -> Iterator[Run]:
    """Yield the runs of T11, T12, T18 and T19, exactly those that `medha_papers.lone_rows` looks up."""
    for capacity in (1.0, *scale.band):
        for chunk in (32, 4096):
            yield lone_run("8B-TP8", f"static-{chunk}", 1_000_000, capacity)
        for chunk in scale.chunks:
            yield lone_run("8B-TP8", f"adaptive-{chunk}", 1_000_000, capacity)
        for tokens, chunk in scale.lane_points:
            for deployment in ("8B-TP4-SPP4", "8B-TP4-SPP4-KVP4"):
                yield lone_run(deployment, f"static-{chunk}", tokens, capacity)
        for deployment in ("8B-TP8-SPP4", "8B-TP8-SPP4-KVP4"):
            yield lone_run(deployment, "static-512", 2_000_000, capacity)
