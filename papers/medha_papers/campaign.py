"""The runs behind docs/reproduction.md: which systems on which loads and seeds, and in which order.

`Scale` says how much is run; `FULL` is meant for two cores and 90 minutes, `QUICK` for two minutes. What a goal is set
for comes first, in all its seeds; then what the papers claim, and the grid, seed by seed. So a campaign that is stopped
is a report of fewer seeds, not of fewer questions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from medha_papers.campaign_run import Run
from medha_papers.lone_prompt import LIMIT_SECONDS
from medha_sim.baselines.systems import SINGLE


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is run."""

    name: str
    window_seconds: float
    short_window_seconds: float  # of workloads without long requests, which have many more steps a second
    deep_window_seconds: float  # of 70B on 64 H100, whose many stages take many short steps
    seeds: int  # of each point of the grid
    goal_seeds: int  # of `guarded` and SRPT where a goal is set
    paper_seeds: int
    rates: tuple[float, ...]  # of the papers
    loads: tuple[float, ...]
    shares: tuple[float, ...]  # of long requests
    policies: tuple[str, ...]
    systems: tuple[str, ...]  # other systems on the grid
    single: tuple[
        str, ...
    ]  # Medha's policies with one prefill a step, on the part of the grid where goals are set
    speeds: tuple[float, ...]  # of a stronger LoongServe
    band: tuple[float, ...]  # capacities, of what the controllers believe, beside the nominal one
    deep: tuple[str, ...]  # deployments of T9
    chunks: tuple[int, ...]  # of T12
    lane_points: tuple[tuple[int, int], ...]  # of T18: tokens of a prompt, and of its chunks


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
"""The goals compare these two."""

DEEP_RATES = (0.25, 0.75, 1.75)
"""Those of T9."""

CONVOY_RATE = 0.75
"""At which the papers state most figures."""


def runs(scale: Scale) -> list[Run]:
    """Every run of a scale, what matters most first."""
    return list(
        dict.fromkeys(
            [
                *_by_seed(_goal_runs(scale)),
                *_by_seed([*_paper_runs(scale), *_grid_runs(scale)]),
            ]
        )
    )


def _by_seed(chosen: list[Run]) -> list[Run]:
    """Seed by seed; in each the claims, their bands, a stronger LoongServe, then the grid from the goals outwards."""
    return sorted(chosen, key=lambda run: (run.seed, _turn(run)))


def _turn(run: Run) -> tuple[int, float]:
    if run.load is None:
        if run.loongserve_speed != 1:
            return 2, 0.0
        return int(run.capacity != 1), 0.0
    goal = run.long_share == GOAL_SHARE and run.load in GOAL_LOADS
    return 3 if goal else 4, abs(run.long_share - GOAL_SHARE)


def _goal_runs(scale: Scale) -> list[Run]:
    """`guarded` and SRPT where a goal is set."""
    return [
        Run(f"medha-{policy}", GOAL_SHARE, seed, scale.window_seconds, load=load)
        for load in GOAL_LOADS
        if load in scale.loads
        for seed in range(scale.goal_seeds)
        for policy in GOAL_POLICIES
    ]


def _grid_runs(scale: Scale) -> Iterator[Run]:
    """`guarded` against the other policies and systems, in pairs of equal seeds."""
    for share in scale.shares:
        names = [*(f"medha-{policy}" for policy in scale.policies), *scale.systems]
        if share == GOAL_SHARE:
            names += scale.single
        for load in scale.loads:
            for seed in range(scale.seeds):
                for name in names:
                    yield Run(name, share, seed, scale.window_seconds, load=load)


def _paper_runs(scale: Scale) -> Iterator[Run]:
    """T1 to T9: what `medha_papers.simulated_rows` looks up, no more."""
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
            if seed == 0 or run.deployment == "8B":  # the deep ones cost most: their band is of one seed
                yield from (replace(run, capacity=capacity) for capacity in scale.band)
        if seed == 0:
            yield from _lone_runs(scale)
            for rate in scale.rates:  # the curve to which LoongServe was calibrated
                yield from (replace(short, system=name, rate=rate) for name in ("medha-lars", "loongserve"))
            stronger = [
                run
                for run in claimed
                if run.system.startswith("loongserve") and (run.long_share or run.rate in (CONVOY_RATE, high))
            ]
            yield from (replace(run, loongserve_speed=speed) for speed in scale.speeds for run in stronger)


def lone_run(deployment: str, system: str, tokens: int, capacity: float = 1.0) -> Run:
    """A lone prompt: nothing is drawn, so that there is one seed."""
    return Run(system, 0.0, 0, LIMIT_SECONDS, capacity=capacity, deployment=deployment, prompt_tokens=tokens)


def _lone_runs(scale: Scale) -> Iterator[Run]:
    """T11, T12, T18 and T19: what `medha_papers.lone_rows` looks up, no more."""
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
