"""Compare signals for scaling replicas by simulation: what they cost, and how late first tokens are.

    python benchmarks/autoscale.py --quick
    python benchmarks/autoscale.py --json benchmarks/results/autoscale.json   # goes on where it was stopped
    python benchmarks/autoscale.py --json FILE --renew demand   # simulates one signal again, and keeps the rows of the others
    python benchmarks/autoscale.py --docs     # writes that file's table and picture into docs/

Kubernetes' autoscaler sets the number of replicas every 15 s, by one signal after the other: the router's desired replicas
(`medha_deployment_desired_replicas`), requests that wait, reserved KV, and the share of time in which replicas compute. A
fixed number of replicas is shown beside them. The other signals have several targets, so that no peer is judged by a bad one. The load rises and falls within 19 minutes, and
a replica takes two minutes to start. Workloads differ in what waits: short prompts beside a few very long ones (`mix`),
prompts of some pages (`pages`), and the mix with every other request due in 15 minutes (`batch`).

All signals get the same requests, so differences are paired by seed; intervals are 95 % over the seeds (Student's t). To
compare cost and lateness, a minute by which a first token is late is priced as a minute of a replica. A signal is judged
by its worst workload, since its target cannot change with the requests.
"""

import json
import statistics
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

from autoscale_page import Result, means, write_page
from harness import ROOT, Row, claim, exit_with, parser, progress, report, revision, save, table

from medha.api.replica import ServiceClass
from medha.topology import Topology
from medha_sim.autoscaling import AutoscalerTerms, Signal
from medha_sim.lengths import SHAREGPT, Stretched
from medha_sim.scenario import Deployment
from medha_sim.simulation import Workload
from medha_sim.workloads import Mix, Part, generate, sharegpt_with_long, varied

SIGNALS = (
    Signal("demand"),
    *(Signal("queue", target) for target in (1, 4)),
    *(Signal("kv", target) for target in (0.05, 0.2)),
    *(Signal("busy", target) for target in (0.7, 0.9)),
    Signal("fixed", 4),
)
QUICK_SIGNALS = (Signal("demand"), Signal("queue", 1), Signal("busy", 0.7))
OURS = "demand 1"
RESULTS = ROOT / "benchmarks" / "results" / "autoscale.json"
Run = tuple[str, Signal, int]
"""A workload, a signal and a seed."""
MIX = sharegpt_with_long(0.05)
MIXES = {"mix": MIX, "pages": Mix((Part("short", Stretched(SHAREGPT, 16), 1.0),)), "batch": MIX}
BATCH_SECONDS = 900.0
START_SECONDS = 120.0
# (seconds, load in replicas, as prefill work that arrives): night, morning, peak, evening, a burst, night.
LOAD = ((0, 0.4), (180, 0.4), (360, 3.0), (540, 3.0), (660, 0.8), (780, 0.8), (786, 3.0), (870, 3.0), (876, 0.4), (1140, 0.2))  # fmt: skip
END_SECONDS = LOAD[-1][0] + 300.0
TERMS = AutoscalerTerms(min_replicas=1, max_replicas=8)
# Long steps, so that a fleet is simulated in seconds.
DEPLOYMENT = Deployment(
    topology=Topology(tensor=8),
    service_classes=(ServiceClass(name="default", tpot_target_seconds=0.25),),
)


def name_of(signal: Signal) -> str:
    return f"{signal.name} {signal.target:g}"


def row_name(workload: str, signal: Signal, seed: int) -> str:
    return f"{workload}, {name_of(signal)}, seed {seed}"


def requests(workload: str, seed: int) -> Workload:
    mix, targets = MIXES[workload], DEPLOYMENT.targets()
    seconds = LOAD[-1][0]
    work = sum((b - a) * (low + high) / 2 for (a, low), (b, high) in pairwise(LOAD))
    rate = work / seconds / mix.mean_work_seconds(targets.prefill_seconds)
    found = varied(generate(mix, targets, rate=rate, duration_seconds=seconds, seed=seed), LOAD)
    if workload != "batch":
        return found
    arrivals = [
        replace(one, ttft_target_seconds=max(BATCH_SECONDS, one.ttft_target_seconds)) if number % 2 else one
        for number, one in enumerate(found.arrivals)
    ]
    return replace(found, arrivals=arrivals)


def simulate(workload: str, signal: Signal, seed: int) -> Result:
    """Simulate one signal until five minutes after the last arrival."""
    started = time.process_time()
    terms = TERMS
    if signal.name == "fixed":
        terms = replace(terms, min_replicas=int(signal.target), max_replicas=int(signal.target))
    simulation, fleet = DEPLOYMENT.autoscaled(
        requests(workload, seed), signal, terms, start_seconds=START_SECONDS
    )
    log = simulation.run(END_SECONDS)
    scaling = fleet.finish(END_SECONDS)
    late = [
        (END_SECONDS if one.first_token_at is None else one.first_token_at)
        - one.arrived_at
        - one.ttft_target_seconds
        for one in log.requests.values()
    ]
    return Result(
        replica_hours=scaling.replica_seconds / 3600,
        on_time_percent=100 * statistics.mean(one <= 0 for one in late),
        late_minutes=sum(max(0.0, one) for one in late) / 60,
        requests=len(late),
        unserved=sum(one.first_token_at is None for one in log.requests.values()),
        changes=scaling.changes,
        most_replicas=max(scaling.replicas),
        cpu_seconds=round(time.process_time() - started, 1),
        revision=revision(),
    )


def earlier(target: Path | None, settings: Row, renewed: str = "") -> dict[str, Row]:
    """Return the rows of an earlier run of the same code with the same settings; exit if they are others.

    With `renewed`, the name of a signal, rows of other code are returned, too, except those of that signal.
    """
    if target is None or not target.exists():
        return {}
    kept: Row = json.loads(target.read_text(encoding="utf-8"))
    for name, value in settings.items():
        if kept.get(name) != json.loads(json.dumps(value)):
            raise SystemExit(
                f"{target} was measured with {name} {kept.get(name)}, not {value}; name another file, or remove it"
            )
    found: dict[str, Row] = kept["rows"]
    present = revision()
    others = {name for name, row in found.items() if row["revision"] != present}
    if others and not renewed:
        raise SystemExit(
            f"{len(others)} rows of {target} are not of revision {present}; name another file, remove it, or use --renew"
        )
    return {
        name: row
        for name, row in found.items()
        if name not in others or name.split(", ")[1].split(" ")[0] != renewed
    }


def simulate_all(
    runs: Iterable[Run], kept: dict[str, Row], target: Path | None, settings: Row, processes: int
) -> None:
    """Add the row of each run to `kept`, and save all rows whenever one was added."""
    left = [run for run in runs if row_name(*run) not in kept]
    progress(f"{len(left)} simulations")
    with ProcessPoolExecutor(processes) as pool:
        futures = {pool.submit(simulate, *run): row_name(*run) for run in left}
        try:
            for number, future in enumerate(as_completed(futures), start=1):
                kept[futures[future]] = asdict(future.result())
                save([], target, {**settings, "rows": kept})
                progress(f"  {number} of {len(left)}: {futures[future]}")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def claims_of(results: dict[tuple[str, str], list[Result]]) -> tuple[list[Row], dict[str, float]]:
    """Return the claims, and for each signal its price in its worst workload over the best signal's there."""
    prices = {key: statistics.mean(one.price for one in group) for key, group in results.items()}
    best: dict[str, float] = {}
    for (workload, _), price in prices.items():
        best[workload] = min(price, best.get(workload, price))
    worst: dict[str, float] = {}
    for (workload, name), price in prices.items():
        worst[name] = max(price / best[workload], worst.get(name, 0.0))
    peers = {name: ratio for name, ratio in worst.items() if name != OURS}
    nearest = min(peers, key=lambda name: peers[name])
    unserved = sum(one.unserved for (_, name), group in results.items() if name == OURS for one in group)
    return [
        claim(
            "price in the worst workload over the best signal's there, against the best peer",
            worst[OURS] / peers[nearest],
            "ratio",
            1.0,
            peer=f"{nearest}: {peers[nearest]:.2f}; ours: {worst[OURS]:.2f}",
        ),
        claim("requests without a first token under demand", unserved, "requests", 0),
    ], worst


def main() -> int:
    found = parser(__doc__, quick="one seed of one workload, three signals", rounds=3)
    found.add_argument(
        "--processes", type=int, default=2, metavar="N", help="simulations at a time (default 2)"
    )
    found.add_argument(
        "--docs",
        action="store_true",
        help=f"write docs/ from {RESULTS.relative_to(ROOT)}, and simulate nothing",
    )
    found.add_argument(
        "--renew",
        default="",
        choices=sorted({signal.name for signal in SIGNALS}),
        metavar="SIGNAL",
        help="simulate this signal again; rows of the others may be of another revision",
    )
    arguments = found.parse_args()
    if arguments.docs:
        if not RESULTS.exists():
            raise SystemExit(
                f"there is no {RESULTS.relative_to(ROOT)}: run with --json {RESULTS.relative_to(ROOT)} first"
            )
        write_page(json.loads(RESULTS.read_text(encoding="utf-8")))
        return 0
    signals, workloads = (QUICK_SIGNALS, ("mix",)) if arguments.quick else (SIGNALS, tuple(MIXES))
    seeds = range(1 if arguments.quick else arguments.rounds)

    runs = [(workload, signal, seed) for seed in seeds for workload in workloads for signal in signals]
    settings = {"start_seconds": START_SECONDS, "load": LOAD}
    rows = earlier(arguments.json, settings, arguments.renew)
    simulate_all(runs, rows, arguments.json, settings, arguments.processes)
    results: dict[tuple[str, str], list[Result]] = {}
    for workload, signal, seed in runs:
        group = results.setdefault((workload, name_of(signal)), [])
        group.append(Result(**rows[row_name(workload, signal, seed)]))
    head = ("workload, signal and target", "replica hours", "on time %", "late minutes", "price", "changes")
    table(head, [(f"{workload}, {name}", *means(group)) for (workload, name), group in results.items()])
    claims, worst = claims_of(results)
    figures = {**settings, "seeds": len(seeds), "worst": worst, "rows": rows}
    minutes = sum(one.cpu_seconds for group in results.values() for one in group) / 60
    progress(f"the simulations took {minutes:.1f} minutes of processor time")
    return report(claims, arguments.json, figures)


if __name__ == "__main__":
    exit_with(main)
