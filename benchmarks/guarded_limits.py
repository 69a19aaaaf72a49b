"""Workloads on which `guarded` is worse than a simpler policy, and by how much.

    python benchmarks/guarded_limits.py [--quick] [--json FILE] [--processes N]

Three workloads on the server of `benchmarks/one_server.py` (one prefill at a time, in quanta), each of them made to hurt
`guarded`. All policies see the same draws, so differences are paired; intervals are 95 % over the seeds (Student's t).
The claims say how much worse `guarded` is allowed to be there: a change that makes it worse misses a goal.
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from revision import revision

from medha_papers.one_server import Jobs, serve

POLICIES = ("fcfs", "edf", "srpt", "lars", "guarded")
QUANTUM_SECONDS = 0.25
STUDENT_T = {2: 12.71, 10: 2.262}
"""By the number of seeds."""


@dataclass(frozen=True)
class Result:
    """One window under one policy; times in seconds."""

    on_time_percent: float
    mean_ttft: float
    p99_ttft: float
    longest_ttft: float


def four_longs_in_a_flood(seed: int, seconds: float) -> Jobs:
    """Four prompts of 40 to 120 s of work at once, beside a flood of prompts of 0.05 to 2.9 s at load 0.99; floor 30 s."""
    generator = np.random.default_rng((seed, 0))
    arrival, work = _poisson(generator, seconds, 0.99, lambda count: _log_uniform(generator, count))
    longs = generator.uniform(40, 120, 4)
    return _jobs(np.concatenate([np.zeros(4), arrival]), np.concatenate([longs, work]), floor_seconds=30.0)


def two_sizes(seed: int, seconds: float) -> Jobs:
    """Prompts of 1 s and of 4 s, as many of each, at load 0.9; floor 2 s."""
    generator = np.random.default_rng((seed, 1))
    arrival, work = _poisson(generator, seconds, 0.9, lambda count: generator.choice([1.0, 4.0], count))
    return _jobs(arrival, work, floor_seconds=2.0)


def loose_floor(seed: int, seconds: float) -> Jobs:
    """The flood alone at load 0.95, and no deadline nearer than 600 s: everybody can be on time."""
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
    """Arrival times and work of a Poisson stream whose mean work per second is `load`."""
    mean_work = float(np.mean(draw(100_000)))
    count = generator.poisson(seconds * load / mean_work)
    return np.sort(generator.uniform(0, seconds, count)), draw(count)


def _jobs(arrival: Any, work: Any, *, floor_seconds: float) -> Jobs:
    return Jobs(arrival, arrival + np.maximum(floor_seconds, 3 * work), work)


def simulate(workload: str, policy: str, seed: int, seconds: float) -> Result:
    """One window of `seconds`, served until all have ended."""
    jobs = WORKLOADS[workload](seed, seconds)
    finish = serve(jobs, policy, quantum_seconds=QUANTUM_SECONDS).finish
    ttft = finish - jobs.arrival
    return Result(
        on_time_percent=100 * float(np.mean(finish <= jobs.deadline + QUANTUM_SECONDS)),
        mean_ttft=float(ttft.mean()),
        p99_ttft=float(np.quantile(ttft, 0.99)),
        longest_ttft=float(ttft.max()),
    )


def mean_and_interval(values: list[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95 % interval."""
    return statistics.mean(values), STUDENT_T[len(values)] * statistics.stdev(values) / math.sqrt(len(values))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two seeds of half an hour, under a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    seeds = range(2 if arguments.quick else 10)
    seconds = 1800.0 if arguments.quick else 3600.0

    runs = [
        (workload, policy, seed, seconds) for workload in WORKLOADS for policy in POLICIES for seed in seeds
    ]
    with ProcessPoolExecutor(arguments.processes) as pool:
        flat = dict(zip(runs, pool.map(simulate, *zip(*runs, strict=True)), strict=True))
    results = {
        (workload, policy): [flat[workload, policy, seed, seconds] for seed in seeds]
        for workload in WORKLOADS
        for policy in POLICIES
    }

    print(f"{len(seeds)} seeds of {seconds / 3600:g} hours; means over the seeds")
    for workload in WORKLOADS:
        print(f"\n{workload:<24}{'on time %':>10}{'mean TTFT s':>13}{'p99 s':>9}{'longest s':>11}")
        for policy in POLICIES:
            rows = [tuple(asdict(result).values()) for result in results[workload, policy]]
            on_time, mean, p99, longest = (statistics.mean(column) for column in zip(*rows, strict=True))
            print(f"  {policy:<22}{on_time:>10.2f}{mean:>13.1f}{p99:>9.1f}{longest:>11.1f}")

    claims = []

    def claim(name: str, workload: str, figure: str, goal: float, better: str, *, ratio: bool) -> None:
        """Compare a figure of `guarded` with SRPT's, paired by seed: by their ratio, or else by their difference."""
        ours = [getattr(result, figure) for result in results[workload, "guarded"]]
        theirs = [getattr(result, figure) for result in results[workload, "srpt"]]
        paired = [a / b if ratio else a - b for a, b in zip(ours, theirs, strict=True)]
        value, half = mean_and_interval(paired)
        unit = "ratio" if ratio else "points"
        print(f"{name}: {value:+.2f} ± {half:.2f} {unit}")
        peer = f"SRPT in the same run: {statistics.mean(theirs):.1f}; half interval {half:.2f}"
        claims.append(
            {
                "name": name,
                "value": round(value, 2),
                "unit": unit,
                "goal": goal,
                "better": better,
                "peer": peer,
            }
        )

    print("\nguarded against srpt, paired:")
    flood, near, loose = WORKLOADS
    claim("on time, four longs in a flood", flood, "on_time_percent", -6.0, "more", ratio=False)
    claim("p99 TTFT, four longs in a flood", flood, "p99_ttft", 20.0, "less", ratio=True)
    claim("longest TTFT, four longs in a flood", flood, "longest_ttft", 1.0, "less", ratio=True)
    claim("on time, two sizes", near, "on_time_percent", 10.0, "more", ratio=False)
    claim("longest TTFT, two sizes", near, "longest_ttft", 5.0, "less", ratio=True)
    claim("mean TTFT, loose floor", loose, "mean_ttft", 4.0, "less", ratio=True)
    if arguments.json:
        figures = {
            "claims": claims,
            "revision": revision(),
            "seeds": len(seeds),
            "hours": seconds / 3600,
            "rows": {
                f"{policy}, {workload}": [asdict(result) for result in group]
                for (workload, policy), group in results.items()
            },
        }
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
