"""Compare KV tiers with computing everything again, and with a tier that knows recency only, on several mixes of requests.

    python benchmarks/tier_mixes.py --quick
    python benchmarks/tier_mixes.py --json benchmarks/results/tier_mixes.json

Llama-3-8B is simulated with the controller's own code, in these variants: evicted KV is forgotten (`recompute`); a host tier drops
what was used least recently, and all that it holds is fetched (`LRU`); the host tier as it is (`host`); with files behind it, which a
rank reads at 1 GiB/s (`host + disk`); or with a store, which it reads at 256 MiB/s (`host + store`). All variants get the same random
requests:

* documents: conversations of four turns on average, over documents of 20K to 100K tokens, with 30 s between turns. The KV
  of those under way is about four times as large as the device's pool, and three times as the host tier (eight H100, TP8);
* chats: the same with prompts as in ShareGPT, and pools as much smaller;
* the papers' mix: 95 % ShareGPT, 5 % of 100K to 1M tokens, on 16 A100 (TP8 x SPP2). No prompt returns, so that tiers can only cost.

A request is on time if its TTFT and its mean TPOT meet their targets. Intervals are 95 % over paired seeds (Student's t). The
simulation of all takes some 20 minutes of processor time. Ctrl-C ends it with the figures of the seeds that are complete by then.

The claims are that tiers bring more documents on time than recomputing, and no fewer than LRU, and that they cost the papers' mix
at most a point.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, replace
from unittest.mock import patch

import numpy as np
from harness import (
    Row,
    claim,
    exit_with,
    in_processes,
    mean_and_interval,
    parser,
    report,
    table,
)

import medha.scheduler.controller
from medha.api.replica import SchedulingSpec
from medha.cost.hardware import A100, H100, LLAMA3_8B
from medha.cost.tier_seconds import TierSeconds
from medha.topology import Topology
from medha_sim.run_log import RequestRecord
from medha_sim.scenario import MAX_CHUNK_TOKENS, Deployment
from medha_sim.simulation import Arrival, FollowUp, Workload
from medha_sim.workloads import conversations, generate, sharegpt_with_long

GIB = 2**30
SEEDS = 4
TENSOR = 8
TOKEN_BYTES = LLAMA3_8B.kv_bytes_per_token // TENSOR
DOCUMENT_TOKENS = 20_000, 100_000
MEAN_TURNS, MEAN_THINK_SECONDS = 4.0, 30.0


@dataclass(frozen=True)
class Variant:
    """The tiers of a replica."""

    has_host: bool = False
    has_disk: bool = False
    store_bytes_per_second: float = 0.0
    is_lru: bool = False


RECOMPUTE, LRU, HOST, DISK, STORE = "recompute", "LRU", "host", "host + disk", "host + store"
VARIANTS = {
    RECOMPUTE: Variant(),
    LRU: Variant(has_host=True, is_lru=True),
    HOST: Variant(has_host=True),
    DISK: Variant(has_host=True, has_disk=True),
    STORE: Variant(has_host=True, store_bytes_per_second=GIB / 4),
}


@dataclass(frozen=True)
class Mix:
    """Requests, and the replica that serves them. A rate is that of requests, or of conversations, a second."""

    rates: tuple[float, ...]
    seconds: float
    pool_tokens: int = 0  # 0: what the weights leave
    host_tokens: int = 0
    disk_tokens: int = 0


DOCUMENTS, CHATS, PAPERS = "documents", "chats", "the papers' mix"
MIXES = {
    DOCUMENTS: Mix((0.5, 1.0), 150.0, pool_tokens=1_500_000, host_tokens=2_000_000, disk_tokens=20_000_000),
    CHATS: Mix((20.0,), 60.0, pool_tokens=150_000, host_tokens=300_000, disk_tokens=5_000_000),
    PAPERS: Mix((0.45,), 300.0, host_tokens=4_000_000, disk_tokens=40_000_000),
}
Point = tuple[str, float]


@dataclass(frozen=True)
class Result:
    """The figures of one window."""

    on_time_percent: float
    p50_ttft_seconds: float
    p99_ttft_seconds: float
    computed_percent: float
    """Prompt tokens that were computed, of all."""


class LruSeconds(TierSeconds):
    """Prices by which all KV is worth the same, so that recency decides, and computing never seems faster than fetching."""

    def compute_seconds(self, context: int, tokens: int) -> float:
        return float(tokens - context)


def deployment(name: str, variant: Variant) -> Deployment:
    mix, is_papers = MIXES[name], name == PAPERS
    token_bytes = TOKEN_BYTES // 2 if is_papers else TOKEN_BYTES
    return Deployment(
        model=LLAMA3_8B,
        hardware=A100 if is_papers else H100,
        topology=Topology(tensor=TENSOR, stream=2 if is_papers else 1),
        scheduling=SchedulingSpec(max_chunk_tokens=MAX_CHUNK_TOKENS),
        kv_bytes=mix.pool_tokens * token_bytes or None,
        host_bytes=mix.host_tokens * token_bytes if variant.has_host else 0,
        disk_bytes=mix.disk_tokens * token_bytes if variant.has_disk else 0,
        store_bytes_per_second=variant.store_bytes_per_second,
    )


def over_documents(here: Deployment, rate: float, seconds: float, seed: int) -> Workload:
    """Return conversations whose first prompt is a document, and each later one the conversation so far and a question."""
    rng, targets = np.random.default_rng(seed), here.targets()
    first: list[Arrival] = []
    later: dict[str, FollowUp] = {}
    at = 0.0
    while (at := at + rng.exponential(1 / rate)) < seconds:
        tokens = int(np.exp(rng.uniform(*np.log(DOCUMENT_TOKENS))))
        name, before = f"d{len(first)}", ""
        for turn in range(int(rng.geometric(1 / MEAN_TURNS))):
            tokens, output = tokens + int(rng.integers(20, 200)), int(rng.integers(100, 300))
            one = Arrival(
                f"{name}.{turn}", at, tokens, output, float(targets.ttft_seconds(np.array([tokens]))[0]), targets.tpot_seconds,
                "later turn" if turn else "first turn", max_tokens=output, conversation=name,
            )  # fmt: skip
            if turn:
                later[before] = FollowUp(float(rng.exponential(MEAN_THINK_SECONDS)), one)
            else:
                first.append(one)
            before, tokens = one.id, tokens + output
    return Workload(first, later)


def workload(here: Deployment, point: Point, seed: int, share: float) -> Workload:
    """Return the requests of a share of a mix's window; each has block hashes, as real ones have."""
    name, rate = point
    seconds = share * MIXES[name].seconds
    if name == DOCUMENTS:
        return over_documents(here, rate, seconds, seed)
    if name == CHATS:
        return conversations(
            here.targets(),
            rate=rate,
            duration_seconds=seconds,
            seed=seed,
            mean_think_seconds=MEAN_THINK_SECONDS,
        )
    made = generate(sharegpt_with_long(0.05), here.targets(), rate=rate, duration_seconds=seconds, seed=seed)
    return replace(made, arrivals=[replace(one, conversation=one.id) for one in made.arrivals])


def is_on_time(one: RequestRecord) -> bool:
    ttft, tpot = one.ttft_seconds, one.tpot_seconds
    has_ttft = ttft is not None and ttft <= one.ttft_target_seconds
    return one.ending == "finished" and has_ttft and (tpot is None or tpot <= one.tpot_target_seconds)


def simulate(point: Point, name: str, seed: int, share: float) -> Result:
    """Simulate a share of a mix's window, until all requests have ended."""
    variant = VARIANTS[name]
    here = deployment(point[0], variant)
    requests = workload(here, point, seed, share)
    prices = LruSeconds if variant.is_lru else TierSeconds
    with patch.object(medha.scheduler.controller, "TierSeconds", prices):
        simulation = here.simulation(requests, seed=seed)
    log = simulation.run(20 * MIXES[point[0]].seconds)
    records = list(log.requests.values())
    waited = [one.ttft_seconds if one.ttft_seconds is not None else log.window_seconds for one in records]
    return Result(
        on_time_percent=100 * statistics.mean(map(is_on_time, records)),
        p50_ttft_seconds=float(np.quantile(waited, 0.5)),
        p99_ttft_seconds=float(np.quantile(waited, 0.99)),
        computed_percent=100 * sum(log.chunks.tokens) / sum(one.prompt_tokens for one in records),
    )


def rows_of(point: Point, found: dict[tuple[Point, str], list[Result]]) -> list[Row]:
    """Return a row for each variant at one point, with differences from `recompute` and from `LRU`, in points."""
    rows: list[Row] = []
    for name in VARIANTS:
        group = found[point, name]
        means = {key: statistics.mean(getattr(one, key) for one in group) for key in asdict(group[0])}
        row: Row = {"mix": point[0], "rate": point[1], "tiers": name, **means}
        for peer, key in ((RECOMPUTE, "recompute"), (LRU, "lru")):
            pairs = zip(group, found[point, peer], strict=True)
            more, half = mean_and_interval([a.on_time_percent - b.on_time_percent for a, b in pairs])
            row |= {f"more_than_{key}_points": more, f"{key}_half_interval_points": half}
        rows.append(row)
    return rows


def main() -> int:
    found = parser(__doc__, quick="two seeds, a twentieth of the time")
    found.add_argument(
        "--processes", type=int, default=2, metavar="N", help="simulations at a time (default 2)"
    )
    found.add_argument("--seeds", type=int, default=SEEDS, metavar="N", help=f"seeds (default {SEEDS})")
    arguments = found.parse_args()
    seeds, share = range(2 if arguments.quick else arguments.seeds), 0.05 if arguments.quick else 1.0
    points = [(name, rate) for name, mix in MIXES.items() for rate in mix.rates]
    runs = [(point, name, seed, share) for seed in seeds for point in points for name in VARIANTS]
    flat: list[Result] = in_processes(simulate, runs, arguments.processes)
    complete = len(flat) * len(seeds) // len(runs)
    if complete < 2:
        raise SystemExit("fewer than two seeds are complete: no figures")
    results: dict[tuple[Point, str], list[Result]] = {}
    for (point, name, seed, _), result in zip(runs, flat, strict=False):
        if seed < complete:
            results.setdefault((point, name), []).append(result)
    rows = [row for point in points for row in rows_of(point, results)]
    columns = (
        "on time %",
        "p50 TTFT s",
        "p99 TTFT s",
        "computed %",
        "more than recompute",
        "+-",
        "more than LRU",
        "+-",
    )
    table(("mix", "rate", "tiers", *columns), [tuple(row.values()) for row in rows])
    busiest = {
        row["tiers"]: row
        for row in rows
        if row["mix"] == DOCUMENTS and row["rate"] == MIXES[DOCUMENTS].rates[-1]
    }
    papers = [row for row in rows if row["mix"] == PAPERS and row["tiers"] != RECOMPUTE]

    def least(name: str, peer: str) -> tuple[float, str]:
        row = busiest[name]
        value = row[f"more_than_{peer}_points"] - row[f"{peer}_half_interval_points"]
        return value, f"{name}: {row['on_time_percent']:.0f} % on time"

    worst = min(papers, key=lambda row: row["more_than_recompute_points"])
    against_recompute, shown = least(HOST, "recompute")
    against_lru, shown_disk = least(DISK, "lru")
    claims = [
        claim("documents on time, host tier less recomputing: lower end of the interval", against_recompute, "points", 0.0, "more", shown),
        claim("documents on time, host and disk less LRU: lower end of the interval", against_lru, "points", 0.0, "more", shown_disk),
        claim("papers' mix on time, worst tiers less none", worst["more_than_recompute_points"], "points", -1.0, "more", worst["tiers"]),
    ]  # fmt: skip
    return report(claims, arguments.json, {"seeds": complete, "share": share, "rows": rows})


if __name__ == "__main__":
    exit_with(main)
