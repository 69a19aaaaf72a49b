"""Compare prefill and decode replicas with as many replicas that do both, at several loads of several mixes of requests.

    python benchmarks/roles.py --quick
    python benchmarks/roles.py --json benchmarks/results/roles.json

Llama-3-70B is simulated with the controller's and the router's own code; each replica is eight H100 (TP8). A load of 1 is what the
replicas together can prefill if they do nothing else. All variants get the same random requests. Ranks read KV of other
replicas at 25 GiB a second, as they could with RDMA, which Medha does not have, or at 0.4 GiB a second, which one core encrypts.
A request is on time if its TTFT and its mean TPOT meet their targets. Intervals are 95 % over the seeds (Student's t) of the difference
from the replicas that do both.

The claim is that at some mix and load roles bring more requests on time with RDMA.
"""

import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass

import numpy as np
from harness import Row, claim, exit_with, mean_and_interval, parser, progress, report, table

from medha.api.replica import SchedulingSpec, ServiceClass
from medha.hardware import H100, LLAMA3_70B
from medha.replica_role import ReplicaRole
from medha.routing.router_core import RouterCore
from medha.topology import Topology
from medha_sim.run_log import RequestRecord
from medha_sim.scenario import Deployment
from medha_sim.simulation import Arrival, Simulation, Workload

GIB = 2**30
FAST, SLOW = 25.0 * GIB, 0.4 * GIB
P: ReplicaRole = "prefill"
D: ReplicaRole = "decode"


@dataclass(frozen=True)
class Variant:
    """Replicas behind one router."""

    roles: tuple[ReplicaRole, ...]
    bytes_per_second: float


VARIANTS = {
    2: {"2 both": Variant(("both",) * 2, FAST), "1+1": Variant((P, D), FAST), "1+1 slow": Variant((P, D), SLOW)},
    4: {
        "4 both": Variant(("both",) * 4, FAST),
        "2+2": Variant((P, P, D, D), FAST),
        "3+1": Variant((P, P, P, D), FAST),
    },
}  # fmt: skip
"""The variants for each number of replicas; the first one is compared with the others. `3+1`: three prefill, one decode."""


@dataclass(frozen=True)
class Mix:
    """Requests of one kind: ranges of the tokens of prompts, the TPOT target, and for how long requests arrive."""

    prompts: tuple[int, int]
    tpot_seconds: float
    window_seconds: float


MIXES = {
    "chats": Mix((1_000, 4_000), 0.05, 12.0),
    "chats, 20 ms": Mix((1_000, 4_000), 0.02, 12.0),
    "documents": Mix((16_000, 64_000), 0.05, 30.0),
    "documents, 20 ms": Mix((16_000, 64_000), 0.02, 30.0),
}
OUTPUTS = (100, 300)
LOADS = {2: (0.4, 0.7), 4: (0.7,)}
"""The loads for each number of replicas; 1 is what all of them can prefill if they do nothing else."""


@dataclass(frozen=True)
class Result:
    """The figures of one window."""

    on_time_percent: float
    ttft_on_time_percent: float
    tpot_on_time_percent: float
    p99_ttft_seconds: float
    p99_pause_seconds: float
    """The 99th percentile of the longest wait between two tokens of a request."""


def deployment(variant: Variant, mix: Mix) -> Deployment:
    return Deployment(
        model=LLAMA3_70B,
        hardware=H100,
        topology=Topology(tensor=8),
        scheduling=SchedulingSpec(max_chunk_tokens=2048),
        service_classes=(
            ServiceClass(name="default", tpot_target_seconds=mix.tpot_seconds, tpot_floor_seconds=0.005),
        ),
        host_bytes=64 * GIB,
        peer_bytes_per_second=variant.bytes_per_second,
        replicas=len(variant.roles),
        roles=variant.roles,
    )


def arrivals(here: Deployment, mix: Mix, load: float, seed: int, seconds: float) -> Workload:
    """Return requests that arrive at random, whose prompts take `load` of the time of all replicas."""
    rng, targets, predictor = np.random.default_rng(seed), here.targets(), here.predictor()
    lengths = np.exp(rng.uniform(*np.log(mix.prompts), 10_000)).astype(np.int64)
    mean_seconds = float(predictor.prefill_seconds_many(np.zeros_like(lengths), lengths).mean())
    found: list[Arrival] = []
    at = 0.0
    while (at := at + rng.exponential(mean_seconds / (load * here.replicas))) < seconds:
        tokens = int(np.exp(rng.uniform(*np.log(mix.prompts))))
        output = int(rng.integers(*OUTPUTS))
        ttft = float(targets.ttft_seconds(np.array([tokens]))[0])
        name = f"r{len(found)}"
        found.append(
            Arrival(
                name, at, tokens, output, ttft, mix.tpot_seconds, max_tokens=output, conversation=name
            )
        )  # fmt: skip
    return Workload(found)


def has_ttft(one: RequestRecord) -> bool:
    return one.ttft_seconds is not None and one.ttft_seconds <= one.ttft_target_seconds


def has_tpot(one: RequestRecord) -> bool:
    tpot = one.tpot_seconds
    return one.ending == "finished" and (tpot is None or tpot <= one.tpot_target_seconds)


def percent(shares: list[bool]) -> float:
    return 100 * statistics.mean(shares)


def simulate(count: int, name: str, mix_name: str, load: float, seed: int, share: float) -> Result:
    """Simulate a share of the window of a mix, until all requests have ended."""
    mix = MIXES[mix_name]
    seconds = share * mix.window_seconds
    here = deployment(VARIANTS[count][name], mix)
    workload = arrivals(here, mix, load, seed, seconds)
    make = here.maker(workload)
    replicas = [make(index) for index in range(count)]
    simulation = Simulation(replicas, workload, router=RouterCore(), latencies=here.latencies)
    records = list(simulation.run(20 * seconds).requests.values())
    return Result(
        on_time_percent=percent([has_ttft(one) and has_tpot(one) for one in records]),
        ttft_on_time_percent=percent([has_ttft(one) for one in records]),
        tpot_on_time_percent=percent([has_tpot(one) for one in records]),
        p99_ttft_seconds=float(np.quantile([one.ttft_seconds or seconds for one in records], 0.99)),
        p99_pause_seconds=float(np.quantile([one.worst_gap_seconds for one in records], 0.99)),
    )


def main() -> int:
    found = parser(__doc__, quick="two replicas, two seeds, a quarter of the time")
    found.add_argument(
        "--processes", type=int, default=2, metavar="N", help="simulations at a time (default 2)"
    )
    found.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="NAME",
        help="variants to simulate, such as '2 both' and '1+1'",
    )
    arguments = found.parse_args()
    variants = {
        count: [name for name in names if not arguments.only or name in arguments.only]
        for count, names in VARIANTS.items()
        if count == 2 or not arguments.quick
    }
    counts = [count for count, names in variants.items() if len(names) > 1]
    seeds, share = range(2 if arguments.quick else 3), 0.25 if arguments.quick else 1.0
    runs = [
        (count, name, mix, load, seed, share)
        for count in counts
        for name in variants[count]
        for mix in MIXES
        for load in LOADS[count]
        for seed in seeds
    ]
    progress(f"{len(runs)} simulations: {len(seeds)} seeds")
    with ProcessPoolExecutor(arguments.processes) as pool:
        flat = dict(zip(runs, pool.map(simulate, *zip(*runs, strict=True)), strict=True))
    rows: list[Row] = []
    for count in counts:
        base, *others = variants[count]
        for mix in MIXES:
            for load in LOADS[count]:
                alike = [flat[count, base, mix, load, seed, share] for seed in seeds]
                for name in (base, *others):
                    group = [flat[count, name, mix, load, seed, share] for seed in seeds]
                    pairs = zip(group, alike, strict=True)
                    more, half = mean_and_interval([a.on_time_percent - b.on_time_percent for a, b in pairs])
                    means = {
                        key: statistics.mean(getattr(one, key) for one in group) for key in asdict(group[0])
                    }
                    rows.append({
                        "replicas": name, "mix": mix, "load": load, **means, "more_on_time_points": more,
                        "half_interval_points": half,
                    })  # fmt: skip
    columns = ("on time %", "TTFT %", "TPOT %", "p99 TTFT s", "p99 pause s", "more on time", "+-")
    table(("replicas", "mix", "load", *columns), [tuple(row.values()) for row in rows])
    roles = [row for row in rows if "both" not in row["replicas"] and "slow" not in row["replicas"]]
    best = max(roles, key=lambda row: row["more_on_time_points"] - row["half_interval_points"])
    least = best["more_on_time_points"] - best["half_interval_points"]
    where = f"{best['replicas']}, {best['mix']}, load {best['load']}"
    won = sum(row["more_on_time_points"] > row["half_interval_points"] for row in roles)
    lost = sum(-row["more_on_time_points"] > row["half_interval_points"] for row in roles)
    claims = [
        claim(
            "requests on time, with roles less without, at the best point: lower end of the interval",
            least, "points", 0.0, "more", f"{where}; of {len(roles)} points, roles win {won} and lose {lost}",
        )
    ]  # fmt: skip
    return report(claims, arguments.json, {"seeds": len(seeds), "share": share, "rows": rows})


if __name__ == "__main__":
    exit_with(main)
