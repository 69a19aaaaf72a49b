"""Measure how many deadlines each policy meets on one server without batches, pipeline or overhead.

    python benchmarks/one_server.py --quick
    python benchmarks/one_server.py --json benchmarks/results/one_server.json

The workload is paper B's mix: 5 % long prompts of 100K-1M tokens, ShareGPT-like short ones, Poisson arrivals, deadlines
of max(2 s, 3 w). The server takes one prefill at a time, in quanta. Every policy gets the same five random workloads,
so differences are paired; intervals are 95 % over the seeds (Student's t). Work is counted in operations of Llama-3 8B
at half the peak of 16 A100, so load 0.97 is 0.75 requests a second. Load 1 is what the server can do.
"""

import itertools
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from harness import LOOPS, Loop, Row, claim, exit_with, mean_and_interval, parser, progress, report, table

from medha.scheduler.guarded import Guarded, GuardedSettings, Plan
from medha.scheduler.policy import Columns
from medha_papers.single_server import Jobs, edf_meets_all, most_on_time, serve
from medha_sim.workloads import Targets, generate, sharegpt_with_long

LINEAR_FLOPS = 1.5e10  # per token: twice the weights of Llama-3 8B without embeddings and head
ATTENTION_FLOPS = 4 * 4096 * 32 / 2  # per pair of a token and one before it
SERVER_FLOPS = 16 * 312e12 * 0.5
POLICIES = ("fcfs", "edf", "lrs", "srpt", "lars", "guarded")
LOADS = (0.87, 0.97, 1.07)
MOST_ORDER_LOOPS = 0.15  # most time of one order with 10,000 queued
MIX = sharegpt_with_long(0.05)


def work_seconds(tokens: Any) -> Any:
    return (LINEAR_FLOPS * tokens + ATTENTION_FLOPS * tokens**2.0) / SERVER_FLOPS


@dataclass(frozen=True)
class Run:
    """The settings of one simulated window."""

    policy: str
    load: float
    seed: int
    hours: float
    quantum_seconds: float
    share: float = 0.1
    noise: float = 0.0  # standard deviation of log(true / predicted time), per request


@dataclass(frozen=True)
class Result:
    """The figures of a run: attainments in per cent, times in seconds; stretch is TTFT / work alone."""

    short: float
    long: float
    short_p99_seconds: float
    long_mean_stretch: float
    long_worst_stretch: float
    demoted: float


def simulate(run: Run) -> Result:
    rate = run.load / MIX.mean_work_seconds(work_seconds)
    targets = Targets(work_seconds)
    workload = generate(MIX, targets, rate=rate, duration_seconds=run.hours * 3600, seed=run.seed)
    arrivals = workload.arrivals
    arrival = np.array([request.at_seconds for request in arrivals])
    work = work_seconds(np.array([request.prompt_tokens for request in arrivals], dtype=np.float64))
    deadline = arrival + np.array([request.ttft_target_seconds for request in arrivals])
    long = np.array([request.kind == "long" for request in arrivals])
    noise = np.exp(np.random.default_rng(run.seed).normal(0, run.noise, len(arrival))) if run.noise else None
    schedule = serve(
        Jobs(arrival, deadline, work),
        run.policy,
        quantum_seconds=run.quantum_seconds,
        demoted_share=run.share,
        slowness=noise,
    )
    met = schedule.finish <= deadline + 1e-9
    ttft = schedule.finish - arrival
    stretch = (ttft / work)[long]
    return Result(
        short=100 * met[~long].mean(),
        long=100 * met[long].mean(),
        short_p99_seconds=float(np.quantile(ttft[~long], 0.99)),
        long_mean_stretch=float(stretch.mean()),
        long_worst_stretch=float(stretch.max()),
        demoted=100 * len(schedule.demoted) / len(arrival),
    )


def shown(name: str, results: list[Result]) -> tuple[Any, ...]:
    short, short_half = mean_and_interval([result.short for result in results])
    long, long_half = mean_and_interval([result.long for result in results])
    return (
        name,
        f"{short:.2f} ± {short_half:.2f}",
        f"{long:.2f} ± {long_half:.2f}",
        statistics.mean(result.short_p99_seconds for result in results),
        statistics.mean(result.long_mean_stretch for result in results),
        max(result.long_worst_stretch for result in results),
        statistics.mean(result.demoted for result in results),
    )


COLUMNS = ("shorts met %", "longs met %", "p99 s", "stretch", "worst", "demoted %")


def overloads(count: int, *, mixed: bool) -> list[Jobs]:
    """Return instances of eight jobs, on a grid of quarters of a second, whose deadlines cannot all be met.

    If `mixed`, they are a small form of paper B's mix; else works of all sizes, with deadlines of 1 to 3 times the work.
    """
    generator = np.random.default_rng(7)
    found: list[Jobs] = []
    while len(found) < count:
        if mixed:
            long = generator.random(8) < 0.3
            work = np.where(long, generator.integers(12, 48, 8), generator.integers(1, 5, 8)) / 4
            after = np.maximum(0.5, 3 * work)
        else:
            work = generator.integers(1, 24, 8) / 4
            after = np.ceil(4 * work * generator.choice([1.0, 1.5, 2.0, 3.0], 8)) / 4
        arrival = np.sort(generator.integers(0, 40, 8)) / 4
        jobs = Jobs(arrival, arrival + after, work)
        if not edf_meets_all(jobs, range(8)):
            found.append(jobs)
    return found


def against_optimum(instances: list[Jobs]) -> dict[str, tuple[float, float]]:
    """Return, by policy, the mean and the worst ratio of deadlines met to the most that can be met."""
    ratios: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    for jobs in instances:
        best = most_on_time(jobs)
        for policy in POLICIES:
            met = serve(jobs, policy, quantum_seconds=0.25).finish <= jobs.deadline + 1e-9
            ratios[policy].append(met.sum() / best)
    return {policy: (statistics.mean(values), min(values)) for policy, values in ratios.items()}


def decision_times(rows: int, rounds: int, loop: Loop) -> tuple[float, float]:
    """Return the median and 99th percentile (CPU seconds) of one order with `rows` requests queued.

    Between two orders, one request ends and another arrives.
    """
    generator = np.random.default_rng(0)
    work = np.where(generator.random(rows) < 0.05, generator.uniform(5, 60, rows), 0.02)
    arrival = np.sort(generator.uniform(-300, 0, rows))
    deadline = arrival + np.maximum(2.0, 3 * work)
    columns = Columns(arrival, deadline, work, work.copy(), np.arange(rows))
    plan = Plan(deadline.copy(), np.full(rows, np.inf), np.argsort(deadline, kind="stable"))
    guarded = Guarded(GuardedSettings())
    seconds = []
    loop.sample()
    for number in range(rounds):
        now = 0.02 * number
        start = time.thread_time()
        served = next(guarded.order(columns, plan, now))
        seconds.append(time.thread_time() - start)
        # The request that is served ends; a new one takes its row.
        columns.arrival[served] = now
        columns.work_seconds[served] = columns.remaining_seconds[served] = generator.choice(work)
        columns.deadline[served] = plan.due[served] = now + max(2.0, 3 * columns.work_seconds[served])
        plan.revised_deadline[served] = np.inf
        plan.by_due[:] = plan.by_due[np.argsort(plan.due[plan.by_due], kind="stable")]
    steady = np.array(seconds[1:])
    return float(np.median(steady)), float(np.quantile(steady, 0.99))


def main() -> int:
    found = parser(__doc__, quick="two seeds of half an hour")
    found.add_argument("--hours", type=float, help="length of each window (default 4)")
    found.add_argument("--quantum", type=float, default=0.25, help="seconds of a quantum (default 0.25)")
    found.add_argument(
        "--processes", type=int, default=2, metavar="N", help="simulations at a time (default 2)"
    )
    arguments = found.parse_args()
    hours = arguments.hours or (0.5 if arguments.quick else 4.0)
    seeds = range(2 if arguments.quick else 5)

    def runs(policy: str, load: float, **more: float) -> list[Run]:
        return [Run(policy, load, seed, hours, arguments.quantum, **more) for seed in seeds]

    campaign: dict[str, list[Run]] = {
        f"{policy} at {load}": runs(policy, load) for load, policy in itertools.product(LOADS, POLICIES)
    }
    variants = {f"share {share:g}": {"share": share} for share in (0.01, 0.05, 0.2)}
    variants |= {f"times wrong by {noise:.0%}": {"noise": noise} for noise in (0.05, 0.1)}
    campaign |= {name: runs("guarded", 0.97, **more) for name, more in variants.items()}
    flat = [run for group in campaign.values() for run in group]
    progress(
        f"{len(flat)} simulations: {len(seeds)} seeds of {hours:g} hours, quantum {arguments.quantum:g} s"
    )
    with ProcessPoolExecutor(arguments.processes) as pool:
        flat_results = iter(list(pool.map(simulate, flat)))
    results = {name: [next(flat_results) for _ in group] for name, group in campaign.items()}
    table(("share 0.1; variants: guarded at 0.97", *COLUMNS), [shown(*one) for one in results.items()])

    claims: list[Row] = []
    for load in LOADS:
        guarded, srpt = results[f"guarded at {load}"], results[f"srpt at {load}"]
        gains = [ours.long - theirs.long for ours, theirs in zip(guarded, srpt, strict=True)]
        gain, half = mean_and_interval(gains)
        claims.append(
            claim(
                f"shorts on time at load {load}, guarded",
                statistics.mean(result.short for result in guarded),
                "%",
                98.5 if load == 0.97 else 98.0,
                "more",
                f"one server, {len(seeds)} draws of paper B's mix",
            )
        )
        theirs = statistics.mean(result.long for result in srpt)
        claims.append(
            claim(
                f"longs on time at load {load}, guarded minus SRPT",
                gain,
                "points",
                3.0 if load == 0.97 else 0.0,
                "more",
                f"SRPT in the same run, {theirs:.1f} %; half interval {half:.2f}",
            )
        )

    count = 50 if arguments.quick else 1000
    kinds = {"long and short": True, "all sizes": False}
    ratios = {name: against_optimum(overloads(count, mixed=mixed)) for name, mixed in kinds.items()}
    print(f"\ndeadlines met, of the most that can be met: {count} overloads of eight requests")
    rows = [(name, policy, *one) for name, of_policy in ratios.items() for policy, one in of_policy.items()]
    table(("", "policy", "mean", "worst"), rows)
    for name, of_policy in ratios.items():
        mean, worst = of_policy["guarded"]
        text = f"deadlines met of the offline optimum, eight requests, {name}"
        peer = f"exhaustive search; worst of {count}: {worst:.2f}"
        claims.append(claim(text, mean, "ratio", 0.9, "more", peer))

    loop, orders = Loop(), []
    for queued in (1, 100, 1000, 10_000):
        median, tail = decision_times(queued, 50 if arguments.quick else 500, loop)
        orders.append({"queued": queued, "p50": median, "p99": tail})
    print("\norder, with an arrival and an end between any two")
    rows = [(str(one["queued"]), 1e6 * one["p50"], 1e6 * one["p99"]) for one in orders]
    table(("queued", "p50 us", "p99 us"), rows)
    name = "order of guarded with 10,000 queued, p50"
    claims.append(claim(name, loop.ratio(median), LOOPS, MOST_ORDER_LOOPS, peer=loop.peer()))
    figures = {
        "seeds": len(seeds),
        "hours": hours,
        "rows": {name: [asdict(result) for result in group] for name, group in results.items()},
        "of_optimum": {
            name: {policy: {"mean": mean, "worst": worst} for policy, (mean, worst) in of_policy.items()}
            for name, of_policy in ratios.items()
        },
        "order_seconds": orders,
    }
    return report(claims, arguments.json, figures)


if __name__ == "__main__":
    exit_with(main)
