"""Measure by how much `guarded` is worse than a simpler policy, on three workloads that are made to hurt it.

    python benchmarks/guarded_limits.py --quick
    python benchmarks/guarded_limits.py --json benchmarks/results/guarded_limits.json

The server is that of `benchmarks/one_server.py`: one prefill at a time, in quanta. All policies get the same random
requests, so differences are paired; intervals are 95 % over the seeds (Student's t). Each claim bounds how much worse
`guarded` may be: a change that makes it worse than that misses a goal.
"""

import math
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from harness import Row, claim, exit_with, mean_and_interval, parser, progress, report, table

from medha_papers.single_server import Jobs, serve

POLICIES = ("fcfs", "edf", "srpt", "lars", "guarded")
QUANTUM_SECONDS = 0.25


@dataclass(frozen=True)
class Result:
    """The figures of one window under one policy; times in seconds."""

    on_time_percent: float
    mean_ttft: float
    p99_ttft: float
    longest_ttft: float


def four_longs_in_a_flood(seed: int, seconds: float) -> Jobs:
    """Return four prompts of 40 to 120 s of work at once, beside a flood of prompts of 0.05 to 2.9 s.

    The flood has load 0.99, and the floor of deadlines is 30 s.
    """
    generator = np.random.default_rng((seed, 0))
    arrival, work = _poisson(generator, seconds, 0.99, lambda count: _log_uniform(generator, count))
    longs = generator.uniform(40, 120, 4)
    return _jobs(np.concatenate([np.zeros(4), arrival]), np.concatenate([longs, work]), floor_seconds=30.0)


def two_sizes(seed: int, seconds: float) -> Jobs:
    """Return prompts of 1 s and of 4 s, about as many of each, at load 0.9; the floor of deadlines is 2 s."""
    generator = np.random.default_rng((seed, 1))
    arrival, work = _poisson(generator, seconds, 0.9, lambda count: generator.choice([1.0, 4.0], count))
    return _jobs(arrival, work, floor_seconds=2.0)


def loose_floor(seed: int, seconds: float) -> Jobs:
    """Return the flood alone at load 0.95. No deadline is nearer than 600 s, so all requests can be on time."""
    generator = np.random.default_rng((seed, 2))
    arrival, work = _poisson(generator, seconds, 0.95, lambda count: _log_uniform(generator, count))
    return _jobs(arrival, work, floor_seconds=600.0)


WORKLOADS: dict[str, Callable[[int, float], Jobs]] = {
    "four longs in a flood": four_longs_in_a_flood,
    "two sizes": two_sizes,
    "loose floor": loose_floor,
}


def _log_uniform(generator: np.random.Generator, count: int) -> Any:
    return np.exp(generator.uniform(math.log(0.05), math.log(2.9), count))


def _poisson(
    generator: np.random.Generator, seconds: float, load: float, draw: Callable[[int], Any]
) -> tuple[Any, Any]:
    """Return arrival times and work of a Poisson stream whose mean work per second is `load`."""
    mean_work = float(np.mean(draw(100_000)))
    count = generator.poisson(seconds * load / mean_work)
    return np.sort(generator.uniform(0, seconds, count)), draw(count)


def _jobs(arrival: Any, work: Any, *, floor_seconds: float) -> Jobs:
    return Jobs(arrival, arrival + np.maximum(floor_seconds, 3 * work), work)


def simulate(workload: str, policy: str, seed: int, seconds: float) -> Result:
    """Simulate one window of `seconds`, until all requests have ended."""
    jobs = WORKLOADS[workload](seed, seconds)
    finish = serve(jobs, policy, quantum_seconds=QUANTUM_SECONDS).finish
    ttft = finish - jobs.arrival
    return Result(
        on_time_percent=100 * float(np.mean(finish <= jobs.deadline + QUANTUM_SECONDS)),
        mean_ttft=float(ttft.mean()),
        p99_ttft=float(np.quantile(ttft, 0.99)),
        longest_ttft=float(ttft.max()),
    )


def main() -> int:
    found = parser(__doc__, quick="two seeds of half an hour")
    found.add_argument(
        "--processes", type=int, default=2, metavar="N", help="simulations at a time (default 2)"
    )
    arguments = found.parse_args()
    seeds = range(2 if arguments.quick else 10)
    seconds = 1800.0 if arguments.quick else 3600.0

    runs = [
        (workload, policy, seed, seconds) for workload in WORKLOADS for policy in POLICIES for seed in seeds
    ]
    progress(f"{len(runs)} simulations: {len(seeds)} seeds of {seconds / 3600:g} hours")
    with ProcessPoolExecutor(arguments.processes) as pool:
        flat = dict(zip(runs, pool.map(simulate, *zip(*runs, strict=True)), strict=True))
    results = {
        (workload, policy): [flat[workload, policy, seed, seconds] for seed in seeds]
        for workload in WORKLOADS
        for policy in POLICIES
    }

    columns = ("on time %", "mean TTFT s", "p99 s", "longest s")
    rows = [
        (
            f"{workload}, {policy}",
            *map(statistics.mean, zip(*(asdict(one).values() for one in group), strict=True)),
        )
        for (workload, policy), group in results.items()
    ]
    table(("means over the seeds", *columns), rows)

    claims: list[Row] = []

    def compare(name: str, workload: str, figure: str, goal: float, better: str, *, is_ratio: bool) -> None:
        """Compare a figure of `guarded` with SRPT's, paired by seed: by their ratio, or else by their difference."""
        ours = [getattr(result, figure) for result in results[workload, "guarded"]]
        theirs = [getattr(result, figure) for result in results[workload, "srpt"]]
        paired = [a / b if is_ratio else a - b for a, b in zip(ours, theirs, strict=True)]
        value, half = mean_and_interval(paired)
        peer = f"SRPT in the same run: {statistics.mean(theirs):.1f}; half interval {half:.2f}"
        claims.append(claim(name, value, "ratio" if is_ratio else "points", goal, better, peer))

    flood, near, loose = WORKLOADS
    compare("on time, four longs in a flood", flood, "on_time_percent", -6.0, "more", is_ratio=False)
    compare("p99 TTFT, four longs in a flood", flood, "p99_ttft", 20.0, "less", is_ratio=True)
    compare("longest TTFT, four longs in a flood", flood, "longest_ttft", 1.0, "less", is_ratio=True)
    compare("on time, two sizes", near, "on_time_percent", 10.0, "more", is_ratio=False)
    compare("longest TTFT, two sizes", near, "longest_ttft", 5.0, "less", is_ratio=True)
    compare("mean TTFT, loose floor", loose, "mean_ttft", 4.0, "less", is_ratio=True)
    figures = {
        "seeds": len(seeds),
        "hours": seconds / 3600,
        "rows": {
            f"{policy}, {workload}": [asdict(result) for result in group]
            for (workload, policy), group in results.items()
        },
    }
    return report(claims, arguments.json, figures)


if __name__ == "__main__":
    exit_with(main)
