"""Measure what swaps do for chats that come in bursts while a long request holds most of the KV.

    python benchmarks/swaps.py --quick
    python benchmarks/swaps.py --json benchmarks/results/swaps.json

Llama-3-8B is simulated on eight H100 with the controller's own code. Long requests come one after the other; each has a
long prompt and a long answer. Chats come in bursts, and their KV exceeds what a long request leaves. All variants get the
same random requests: without swaps, with swaps to a host tier, and with swaps that compute KV again. Intervals are 95 %
over the seeds (Student's t).

A chat is on time if its TTFT and TPOT meet their targets, and a long request likewise. The claims are that swaps to host
memory bring more chats on time, and that no fewer long requests are.
"""

import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass

import numpy as np
from harness import claim, exit_with, mean_and_interval, parser, progress, report, table

from medha.api.replica import SchedulingSpec
from medha.cost.hardware import H100, LLAMA3_8B
from medha.scheduler.controller import ReplicaController
from medha.topology import Topology
from medha_sim.run_log import RequestRecord
from medha_sim.scenario import Deployment
from medha_sim.simulation import Arrival, Simulation, Workload
from medha_sim.workloads import Targets

TENSOR = 8
TOKEN_BYTES = LLAMA3_8B.kv_bytes_per_token // TENSOR
POOL_TOKENS, HOST_TOKENS = 600_000, 2_000_000
LONG_TOKENS, LONG_OUTPUT, LONG_EVERY_SECONDS = 500_000, 3_000, 150.0
CHATS, CHAT_TOKENS, CHAT_OUTPUT, BURST_EVERY_SECONDS = 60, (3_000, 8_000), (50, 200), 45.0
VARIANTS = {"no swaps": (0, True), "swaps": (1, True), "swaps, no tier": (1, False)}


@dataclass(frozen=True)
class Result:
    """The figures of one window."""

    chats_on_time_percent: float
    longs_on_time_percent: float
    chat_p99_ttft_seconds: float
    swaps: int
    swapped_out_gib: float
    swapped_in_gib: float


def deployment(variant: str) -> Deployment:
    max_swaps, has_tier = VARIANTS[variant]
    return Deployment(
        model=LLAMA3_8B,
        hardware=H100,
        topology=Topology(tensor=TENSOR),
        scheduling=SchedulingSpec(max_chunk_tokens=8192, max_swaps=max_swaps),
        kv_bytes=POOL_TOKENS * TOKEN_BYTES,
        host_bytes=HOST_TOKENS * TOKEN_BYTES if has_tier else 0,
    )


def arrivals(targets: Targets, seed: int, seconds: float) -> Workload:
    """Return long requests, and bursts of chats within two seconds each."""
    rng = np.random.default_rng(seed)
    found: list[Arrival] = []

    def add(kind: str, at: float, tokens: int, output: int) -> None:
        name, ttft = f"{kind} {len(found)}", float(targets.ttft_seconds(np.array([tokens]))[0])
        found.append(
            Arrival(
                name,
                at,
                tokens,
                output,
                ttft,
                targets.tpot_seconds,
                kind,
                max_tokens=output,
                conversation=name,
            )
        )

    for at in np.arange(0.0, seconds, LONG_EVERY_SECONDS):
        add("long", float(at), int(LONG_TOKENS * rng.uniform(0.9, 1.1)), LONG_OUTPUT)
    for began in np.arange(rng.uniform(5, 25), seconds, BURST_EVERY_SECONDS):
        for at in began + rng.uniform(0, 2, CHATS):
            add("chat", float(at), int(rng.integers(*CHAT_TOKENS)), int(rng.integers(*CHAT_OUTPUT)))
    return Workload(sorted(found, key=lambda one: one.at_seconds))


def is_on_time(one: RequestRecord) -> bool:
    ttft, tpot = one.ttft_seconds, one.tpot_seconds
    has_ttft = ttft is not None and ttft <= one.ttft_target_seconds
    return one.ending == "finished" and has_ttft and (tpot is None or tpot <= one.tpot_target_seconds)


def simulate(variant: str, seed: int, seconds: float) -> Result:
    """Simulate one window of `seconds`, until all requests have ended."""
    here = deployment(variant)
    workload = arrivals(here.targets(), seed, seconds)
    replica = here.maker(workload)(0)
    records = Simulation([replica], workload, latencies=here.latencies).run(20 * seconds).requests.values()
    chats = [one for one in records if one.kind == "chat"]
    longs = [one for one in records if one.kind == "long"]
    core = replica.controller
    assert isinstance(core, ReplicaController)
    counts = core.pools.tier_counts
    gib = TOKEN_BYTES * here.block_size_tokens / 2**30
    return Result(
        chats_on_time_percent=100 * statistics.mean(map(is_on_time, chats)),
        longs_on_time_percent=100 * statistics.mean(map(is_on_time, longs)),
        chat_p99_ttft_seconds=float(np.quantile([one.ttft_seconds or seconds for one in chats], 0.99)),
        swaps=core.long_swaps,
        swapped_out_gib=counts.swapped_out_blocks * gib,
        swapped_in_gib=counts.swapped_in_blocks * gib,
    )


def main() -> int:
    found = parser(__doc__, quick="two seeds of five minutes")
    found.add_argument(
        "--processes", type=int, default=2, metavar="N", help="simulations at a time (default 2)"
    )
    arguments = found.parse_args()
    seeds, seconds = range(2 if arguments.quick else 5), 300.0 if arguments.quick else 600.0
    runs = [(variant, seed, seconds) for variant in VARIANTS for seed in seeds]
    progress(f"{len(runs)} simulations: {len(seeds)} seeds of {seconds / 60:g} minutes")
    with ProcessPoolExecutor(arguments.processes) as pool:
        flat = dict(zip(runs, pool.map(simulate, *zip(*runs, strict=True)), strict=True))
    results = {variant: [flat[variant, seed, seconds] for seed in seeds] for variant in VARIANTS}
    columns = ("chats on time %", "longs on time %", "chats' p99 TTFT s", "swaps", "out GiB", "in GiB")
    rows = [
        (variant, *map(statistics.mean, zip(*(asdict(one).values() for one in group), strict=True)))
        for variant, group in results.items()
    ]
    table(("means over the seeds", *columns), rows)

    def gained(variant: str, figure: str) -> tuple[float, str]:
        pairs = zip(results[variant], results["no swaps"], strict=True)
        value, half = mean_and_interval([getattr(a, figure) - getattr(b, figure) for a, b in pairs])
        without = statistics.mean(getattr(one, figure) for one in results["no swaps"])
        return value, f"without swaps: {without:.1f} %; half interval {half:.2f}"

    chats, chats_peer = gained("swaps", "chats_on_time_percent")
    longs, longs_peer = gained("swaps", "longs_on_time_percent")
    claims = [
        claim("chats on time, with swaps less without", chats, "points", 10.0, "more", chats_peer),
        claim("long requests on time, with swaps less without", longs, "points", 0.0, "more", longs_peer),
    ]
    figures = {
        "seeds": len(seeds), "seconds": seconds,
        "rows": {variant: [asdict(one) for one in group] for variant, group in results.items()},
    }  # fmt: skip
    return report(claims, arguments.json, figures)


if __name__ == "__main__":
    exit_with(main)
