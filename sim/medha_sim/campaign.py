"""The runs behind docs/reproduction.md: which systems on which loads and seeds, in parallel, resumable.

`Scale` says how much is run; `FULL` is meant for two cores and 90 minutes, `QUICK` for two minutes. A run is a pure
function of its `Run`, so its outcome can be kept in a file and never needs to be computed again. Runs come in the
order of seeds, so whatever is done when time is up compares all systems on the first seeds.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from medha.hardware import H100, LLAMA3_70B
from medha.topology import Topology
from medha_sim.baselines.systems import simulation
from medha_sim.metrics import group
from medha_sim.records import RunLog
from medha_sim.scenario import Deployment
from medha_sim.study import WorkloadSpec, measured_capacity

Outcome = dict[str, Any]

DEPLOYMENTS: dict[str, Callable[[], Deployment]] = {
    "8B": Deployment,  # Llama-3 8B, TP8 SPP2 on 16 A100 (B §6.2)
    "70B-2D": lambda: _seventy_b(Topology(tensor=8, stream=8)),
    "70B-3D": lambda: _seventy_b(Topology(tensor=8, stream=4, kv=2)),
}


def _seventy_b(topology: Topology) -> Deployment:
    """Llama-3 70B on 64 H100 (B §6.3)."""
    return Deployment(model=LLAMA3_70B, hardware=H100, topology=topology, max_model_len=2_200_000)


@dataclass(frozen=True, slots=True)
class Run:
    """One simulation. `rate` is in requests a second; where `load` is given, it follows from the capacity."""

    system: str
    long_share: float
    seed: int
    window_seconds: float
    rate: float = 0.0
    load: float | None = None  # of the deployment's own measured capacity
    capacity: float = 1.0
    deployment: str = "8B"
    loongserve_speed: float = 1.0

    @property
    def key(self) -> str:
        """Its name in a file of outcomes."""
        at = f"rate {self.rate:g}" if self.load is None else f"load {self.load:g}"
        parts = [self.deployment, self.system, at, f"long {self.long_share:g}", f"seed {self.seed}"]
        if self.capacity != 1:
            parts.append(f"capacity {self.capacity:g}")
        if self.loongserve_speed != 1:
            parts.append(f"speed {self.loongserve_speed:g}")
        return ", ".join([*parts, f"{self.window_seconds:g} s"])


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is run."""

    name: str
    window_seconds: float
    short_window_seconds: float  # of workloads without long requests, which have many more steps a second
    seeds: int  # of each point of the grid
    goal_seeds: int  # of the points for which a goal is set
    paper_seeds: int
    rates: tuple[float, ...]  # of the papers
    loads: tuple[float, ...]
    shares: tuple[float, ...]  # of long requests
    policies: tuple[str, ...]
    systems: tuple[str, ...]  # other systems on the grid, where a share has a goal; `paper_seeds` of them
    speeds: tuple[float, ...]  # of a stronger LoongServe
    band: bool  # capacity 10 % lower and higher at the rates that the claims are about


FULL = Scale(
    name="full",
    window_seconds=3600.0,
    short_window_seconds=900.0,
    seeds=5,
    goal_seeds=10,
    paper_seeds=2,
    rates=(0.25, 0.75, 1.25, 1.75),
    loads=(0.5, 0.87, 0.97, 1.07),
    shares=(0.01, 0.05, 0.2),
    policies=("guarded", "srpt", "lars", "edf", "lrs", "fcfs"),
    systems=("vllm-2048", "sarathi-512", "hrrn", "distserve", "loongserve", "loongserve-reserved"),
    speeds=(2.0, 4.0, 8.0, 16.0),
    band=True,
)
QUICK = Scale(
    name="quick",
    window_seconds=240.0,
    short_window_seconds=60.0,
    seeds=2,
    goal_seeds=2,
    paper_seeds=1,
    rates=(0.75, 1.75),
    loads=(0.97,),
    shares=(0.05,),
    policies=("guarded", "srpt", "lars"),
    systems=("vllm-2048", "loongserve"),
    speeds=(),
    band=False,
)
SCALES = {scale.name: scale for scale in (FULL, QUICK)}

GOAL_SHARE = 0.05
GOAL_LOADS = (0.87, 0.97, 1.07)
BAND = (0.9, 1.1)
MIXED_SYSTEMS = (
    "medha-lars",
    "loongserve",
    "single-lars",
    "single-fcfs",
    "single-edf",
    "sarathi-512",
    "sarathi-2048",
    "loongserve-reserved",
)
SHORT_SYSTEMS = ("medha-lars", "loongserve", "sarathi-512", "sarathi-2048")
CLAIMED_RATES = (0.75, 1.75)
"""The rates at which the papers state figures for the mix; only there the band is simulated."""


def runs(scale: Scale) -> list[Run]:
    """Every run of a scale, the most telling ones first."""
    chosen = [*_paper_runs(scale), *_grid_runs(scale)]
    return list(dict.fromkeys(sorted(chosen, key=_order)))


def _order(run: Run) -> tuple[int, int]:
    """Seed by seed; in each the claims, a stronger LoongServe, the grid where it has a goal, bands, the rest."""
    if run.load is not None:
        goal = run.long_share == GOAL_SHARE and run.load in GOAL_LOADS
        return run.seed, 2 if goal else 4
    if run.loongserve_speed != 1:
        return run.seed, 1
    return run.seed, 0 if run.capacity == 1 else 3


def _paper_runs(scale: Scale) -> Iterator[Run]:
    """T1 to T9."""
    for seed in range(scale.paper_seeds):
        mixed = Run("", 0.05, seed, scale.window_seconds)
        short = Run("", 0.0, seed, scale.short_window_seconds)
        for rate in scale.rates:
            for system in MIXED_SYSTEMS:
                yield from _with_band(replace(mixed, system=system, rate=rate), scale)
            for system in SHORT_SYSTEMS:
                if rate in (min(scale.rates), max(scale.rates)) or (system == "loongserve" and rate != 0.75):
                    yield replace(short, system=system, rate=rate)
        for share in (0.0, 0.01):
            for system in ("medha-lars", "loongserve"):
                window = scale.short_window_seconds if share == 0 else scale.window_seconds
                yield replace(mixed, system=system, rate=0.75, long_share=share, window_seconds=window)
        for speed in scale.speeds:
            strong = replace(mixed, system="loongserve", loongserve_speed=speed, rate=0.75)
            if seed == 0:
                yield strong
                yield replace(strong, long_share=0.0, rate=1.75, window_seconds=scale.short_window_seconds)
        if scale.band:
            for deployment in ("70B-2D", "70B-3D"):
                for rate in (0.25, 0.75, 1.75):
                    yield replace(mixed, system="medha-lars", rate=rate, deployment=deployment)


def _with_band(run: Run, scale: Scale) -> Iterator[Run]:
    yield run
    if scale.band and run.rate in CLAIMED_RATES:
        for capacity in BAND:
            yield replace(run, capacity=capacity)


def _grid_runs(scale: Scale) -> Iterator[Run]:
    """`guarded` against the other policies and systems, in pairs of equal seeds."""
    for share in scale.shares:
        for load in scale.loads:
            goal = share == GOAL_SHARE and load in GOAL_LOADS
            for seed in range(scale.goal_seeds if goal else scale.seeds):
                names = [f"medha-{policy}" for policy in scale.policies]
                if share == GOAL_SHARE and seed < scale.paper_seeds:
                    names += scale.systems
                for name in names:
                    yield Run(name, share, seed, scale.window_seconds, load=load)


# --- one run ---------------------------------------------------------------------------------------------


def simulate(run: Run) -> Outcome:
    """Figures of one run: by kind of request, and of all."""
    started = time.process_time()
    deployment = _deployment(run.deployment)
    scale = 2.0 if run.deployment.startswith("70B") else 1.0  # B §6.3 scales the trace to 2M tokens
    spec = WorkloadSpec(long_share=run.long_share, long_scale=scale, rate=run.rate)
    workload = spec.make(_targets(run.deployment), run.window_seconds, run.seed)
    chosen = simulation(
        run.system,
        deployment,
        workload,
        capacity=run.capacity,
        loongserve_speed=run.loongserve_speed,
    )
    log = chosen.run(run.window_seconds)
    return figures(log) | {"rate": run.rate, "core_seconds": round(time.process_time() - started, 2)}


def figures(log: RunLog) -> Outcome:
    """What the report needs of a run, and no more."""
    records = list(log.requests.values())
    kinds = {"all": records}
    for record in records:
        kinds.setdefault(record.kind, []).append(record)
    return {kind: _of_kind(group(members, log.window_seconds)) for kind, members in kinds.items()}


def _of_kind(summary: dict[str, Any]) -> Outcome:
    kept: Outcome = {
        name: summary[name]
        for name in ("arrived", "finished", "refused", "failed", "censored", "ttft_undecided", "good")
    }
    for name in ("ttft_attainment", "tpot_attainment", "prompt_tokens"):
        kept[name] = _rounded(summary[name])
    for name in ("ttft_seconds", "ttft_over_target", "tpot_seconds"):
        kept[name] = {
            quantile: _rounded(summary[name].get(quantile)) for quantile in ("p50", "p90", "p99", "max")
        }
    return kept


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


@cache
def _deployment(name: str) -> Deployment:
    return DEPLOYMENTS[name]()


@cache
def _targets(name: str) -> Any:
    return _deployment(name).targets()


def capacity_rate(long_share: float) -> float:
    """Requests a second of the mix that the 8B deployment works off while a backlog waits."""
    return measured_capacity(_deployment("8B"), WorkloadSpec(long_share=long_share, rate=1.0))


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle


# --- all of them -----------------------------------------------------------------------------------------


def run_all(
    planned: Sequence[Run],
    done: dict[str, Outcome],
    capacities: dict[str, float],
    *,
    jobs: int,
    deadline_seconds: float,
    keep: Callable[[Run, Outcome], None],
) -> None:
    """Simulate what is not in `done` on `jobs` processes; start none behind `deadline_seconds` from now.

    `capacities`, requests a second by share of long requests, are measured first where they are missing. `keep` is
    called for each run as it ends. A run that fails is kept with its `error`, so that one broken system does not take
    the others' figures with it.
    """
    ends = time.monotonic() + deadline_seconds
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, _ignore_interrupts) as pool:
        shares = sorted({run.long_share for run in planned if run.load is not None})
        measured = {
            share: pool.submit(capacity_rate, share) for share in shares if f"{share:g}" not in capacities
        }
        capacities.update({f"{share:g}": future.result() for share, future in measured.items()})
        queue = iter(
            run if run.load is None else replace(run, rate=run.load * capacities[f"{run.long_share:g}"])
            for run in planned
            if run.key not in done
        )
        under_way: dict[Future[Outcome], Run] = {}
        while True:
            while len(under_way) < jobs and time.monotonic() < ends:
                run = next(queue, None)
                if run is None:
                    break
                under_way[pool.submit(simulate, run)] = run
            if not under_way:
                return
            ended, _ = wait(under_way, return_when=FIRST_COMPLETED)
            for future in ended:
                run = under_way.pop(future)
                error = future.exception()
                outcome = future.result() if error is None else {"error": f"{type(error).__name__}: {error}"}
                keep(run, outcome)
