"""Compare prefill and decode replicas with as many replicas that do both, at several loads of several mixes of requests.

    python benchmarks/roles.py --quick
    python benchmarks/roles.py --json benchmarks/results/roles.json

Llama-3-70B is simulated with the controller's and the router's own code; each replica is eight H100 (TP8). A load of 1 is what the
replicas together can prefill if they do nothing else. All variants get the same random requests. Ranks read KV of other
replicas at 25 GiB a second, as they could with RDMA, which is unproven (docs/kv-tiers.md, NIXL), or at 0.4 GiB a second, which one
core encrypts.
A request is on time if its TTFT and its mean TPOT meet their targets. Intervals are 95 % over the seeds (Student's t) of the difference
from the replicas that do both. The whole grid takes some 17 minutes of processor time. Ctrl-C ends it with the figures of the
seeds that are complete by then.

The claim is that at some mix and load roles bring more requests on time with RDMA.
"""

import statistics
from dataclasses import asdict, dataclass

import numpy as np
from harness import (
    STOPPED,
    Row,
    claim,
    exit_with,
    in_processes,
    mean_and_interval,
    parser,
    progress,
    report,
    table,
)

from medha.api.replica import SchedulingSpec, ServiceClass
from medha.api.replica_role import ReplicaRole
from medha.cost.hardware import H100, LLAMA3_70B
from medha.routing.router_core import RouterCore
from medha.topology import Topology
from medha_sim.run_log import RequestRecord
from medha_sim.scenario import Deployment
from medha_sim.simulation import Arrival, Simulation, Workload

GIB = 2**30
FAST, SLOW = 25.0 * GIB, 0.4 * GIB
P: ReplicaRole = "prefill"
D: ReplicaRole = "decode"
SEEDS = 4


@dataclass(frozen=True)
class Variant:
    """Replicas behind one router."""

    roles: tuple[ReplicaRole, ...]
    bytes_per_second: float


VARIANTS = {
    2: {"2 both": Variant(("both",) * 2, FAST), "1+1": Variant((P, D), FAST), "1+1 slow": Variant((P, D), SLOW)},
    4: {
        "4 both": Variant(("both",) * 4, FAST),
        "1+3": Variant((P, D, D, D), FAST),
        "2+2": Variant((P, P, D, D), FAST),
        "3+1": Variant((P, P, P, D), FAST),
    },
}  # fmt: skip
"""The variants for each number of replicas; the first one is compared with the others. `3+1`: three prefill, one decode."""

Range = tuple[int, int]
Point = tuple[int, str, float, float]
"""Number of replicas, mix, TPOT target in seconds, load."""


@dataclass(frozen=True)
class Mix:
    """Requests of one or two kinds. The prompts' lengths are log-uniform in their range."""

    prompts: Range
    outputs: Range = (100, 300)
    window_seconds: float = 12.0
    """Time for which requests arrive."""
    others: Range = (0, 0)
    """Prompt tokens of the second kind."""
    others_share: float = 0.0
    """Share of the requests that are of the second kind."""

    def prompt_tokens(self, rng: np.random.Generator) -> int:
        prompts = self.others if self.others_share and rng.random() < self.others_share else self.prompts
        return int(np.exp(rng.uniform(*np.log(prompts))))


CHATS, DOCUMENTS = (1_000, 4_000), (16_000, 64_000)
MIXES = {
    "chats": Mix(CHATS),
    "documents": Mix(DOCUMENTS, window_seconds=30.0),
    "chats, 10 % documents": Mix(CHATS, others=DOCUMENTS, others_share=0.1, window_seconds=20.0),
    "short prompts, long outputs": Mix((500, 2_000), outputs=(500, 1_500)),
}
FEW, MANY = 0.4, 0.7
GRID = {
    "chats": {2: (FEW, MANY), 4: (FEW, MANY)},
    "documents": {2: (FEW, MANY), 4: (FEW, MANY)},
    "chats, 10 % documents": {4: (MANY,)},
    "short prompts, long outputs": {4: (0.2,)},
}
"""The loads of each mix, by number of replicas. Long outputs keep replicas busy at a lower load, since it counts prefill only."""
TPOT_SECONDS = (0.05, 0.02)


def points(count: int) -> list[Point]:
    return [
        (count, mix, tpot_seconds, load)
        for mix, loads in GRID.items()
        for tpot_seconds in TPOT_SECONDS
        for load in loads.get(count, ())
    ]


@dataclass(frozen=True)
class Result:
    """The figures of one window."""

    on_time_percent: float
    ttft_on_time_percent: float
    tpot_on_time_percent: float
    p99_ttft_seconds: float
    p99_pause_seconds: float
    """The 99th percentile of the longest wait between two tokens of a request."""


def deployment(variant: Variant, tpot_seconds: float) -> Deployment:
    return Deployment(
        model=LLAMA3_70B,
        hardware=H100,
        topology=Topology(tensor=8),
        scheduling=SchedulingSpec(max_chunk_tokens=2048),
        service_classes=(
            ServiceClass(name="default", tpot_target_seconds=tpot_seconds, tpot_floor_seconds=0.005),
        ),
        host_bytes=64 * GIB,
        peer_bytes_per_second=variant.bytes_per_second,
        replicas=len(variant.roles),
        roles=variant.roles,
    )


def arrivals(here: Deployment, point: Point, seed: int, seconds: float) -> Workload:
    """Return requests that arrive at random, whose prompts take the point's load of the time of all replicas."""
    _, name, tpot_seconds, load = point
    mix = MIXES[name]
    rng, targets, predictor = np.random.default_rng(seed), here.targets(), here.predictor()
    lengths = np.array([mix.prompt_tokens(rng) for _ in range(10_000)])
    mean_seconds = float(predictor.prefill_seconds_many(np.zeros_like(lengths), lengths).mean())
    found: list[Arrival] = []
    at = 0.0
    while (at := at + rng.exponential(mean_seconds / (load * here.replicas))) < seconds:
        tokens, output = mix.prompt_tokens(rng), int(rng.integers(*mix.outputs))
        ttft = float(targets.ttft_seconds(np.array([tokens]))[0])
        name = f"r{len(found)}"
        found.append(
            Arrival(name, at, tokens, output, ttft, tpot_seconds, max_tokens=output, conversation=name)
        )
    return Workload(found)


def has_ttft(one: RequestRecord) -> bool:
    return one.ttft_seconds is not None and one.ttft_seconds <= one.ttft_target_seconds


def has_tpot(one: RequestRecord) -> bool:
    tpot = one.tpot_seconds
    return one.ending == "finished" and (tpot is None or tpot <= one.tpot_target_seconds)


def percent(shares: list[bool]) -> float:
    return 100 * statistics.mean(shares)


def simulate(point: Point, name: str, seed: int, share: float) -> Result:
    """Simulate a share of the window of a mix, until all requests have ended."""
    count, mix, tpot_seconds, _ = point
    seconds = share * MIXES[mix].window_seconds
    here = deployment(VARIANTS[count][name], tpot_seconds)
    workload = arrivals(here, point, seed, seconds)
    make = here.maker(workload)
    replicas = [make(index) for index in range(count)]
    simulation = Simulation(replicas, workload, router=RouterCore(), latencies=here.latencies)
    records = list(simulation.run(20 * seconds + 60).requests.values())
    return Result(
        on_time_percent=percent([has_ttft(one) and has_tpot(one) for one in records]),
        ttft_on_time_percent=percent([has_ttft(one) for one in records]),
        tpot_on_time_percent=percent([has_tpot(one) for one in records]),
        p99_ttft_seconds=float(np.quantile([one.ttft_seconds or seconds for one in records], 0.99)),
        p99_pause_seconds=float(np.quantile([one.worst_gap_seconds for one in records], 0.99)),
    )


def rows_of(point: Point, names: list[str], found: dict[tuple[Point, str], list[Result]]) -> list[Row]:
    """Return a row for each variant at one point; the first variant is the one that others are compared with."""
    count, mix, tpot_seconds, load = point
    rows: list[Row] = []
    for name in names:
        group, alike = found[point, name], found[point, names[0]]
        pairs = zip(group, alike, strict=True)
        more, half = mean_and_interval([a.on_time_percent - b.on_time_percent for a, b in pairs])
        means = {key: statistics.mean(getattr(one, key) for one in group) for key in asdict(group[0])}
        rows.append({
            "count": count, "replicas": name, "mix": mix, "tpot_seconds": tpot_seconds, "load": load, **means,
            "more_on_time_points": more, "half_interval_points": half,
        })  # fmt: skip
    return rows


def main() -> int:
    found = parser(__doc__, quick="two replicas, two seeds, a quarter of the time")
    found.add_argument(
        "--processes", type=int, default=2, metavar="N", help="simulations at a time (default 2)"
    )
    found.add_argument("--seeds", type=int, default=SEEDS, metavar="N", help=f"seeds (default {SEEDS})")
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
    grid = [point for count, names in variants.items() if len(names) > 1 for point in points(count)]
    seeds, share = range(2 if arguments.quick else arguments.seeds), 0.25 if arguments.quick else 1.0
    runs = [(point, name, seed, share) for seed in seeds for point in grid for name in variants[point[0]]]
    progress(f"{len(runs)} simulations: {len(seeds)} seeds")
    flat: list[Result] = in_processes(simulate, runs, arguments.processes)
    complete = len(flat) * len(seeds) // len(runs)
    if complete < 2:
        progress("fewer than two seeds are complete: no figures")
        return STOPPED
    results: dict[tuple[Point, str], list[Result]] = {}
    for (point, name, seed, _), result in zip(runs, flat, strict=False):
        if seed < complete:
            results.setdefault((point, name), []).append(result)
    rows = [row for point in grid for row in rows_of(point, variants[point[0]], results)]
    columns = ("on time %", "TTFT %", "TPOT %", "p99 TTFT s", "p99 pause s", "more on time", "+-")
    table(("count", "replicas", "mix", "TPOT s", "load", *columns), [tuple(row.values()) for row in rows])
    roles = [row for row in rows if "both" not in row["replicas"] and "slow" not in row["replicas"]]
    best = max(roles, key=lambda row: row["more_on_time_points"] - row["half_interval_points"])
    least = best["more_on_time_points"] - best["half_interval_points"]
    where = f"{best['replicas']}, {best['mix']}, TPOT {best['tpot_seconds']} s, load {best['load']}"
    won = sum(row["more_on_time_points"] > row["half_interval_points"] for row in roles)
    lost = sum(-row["more_on_time_points"] > row["half_interval_points"] for row in roles)
    claims = [
        claim(
            "requests on time, with roles less without, at the best point: lower end of the interval",
            least, "points", 0.0, "more", f"{where}; of {len(roles)} rows, roles win {won} and lose {lost}",
        )
    ]  # fmt: skip
    return report(claims, arguments.json, {"seeds": complete, "share": share, "rows": rows})


if __name__ == "__main__":
    exit_with(main)
