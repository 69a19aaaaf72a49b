"""Measure the cost of a scheduling decision: the whole `handle(StageFree)` of a busy replica.

    python benchmarks/scheduler.py --quick
    python benchmarks/scheduler.py --policy guarded
    python benchmarks/scheduler.py --compiled --also PYTHON --vllm-python PYTHON --json benchmarks/results/scheduler.json

A decision orders the waiting prefills, tests which can be on time, packs a step, assigns KV and makes the commands.
Decisions are timed while requests arrive and complete between them, at a standing queue of 1 to 10,000 prefills (5 % of
them 100K to 1M tokens long) and with 0 or 256 sequences that decode in the same step.

* `--vllm-python` names an interpreter that has vLLM; `schedule()` of its scheduler is timed on the same queue.
* `--compiled` times the policies a second time with the core compiled, as in a wheel that was built so
  (docs/performance.md). It also measures how many seconds of a replica's life the simulator, compiled as for a campaign,
  simulates in one core-second.
* `--also` times the policies in another interpreter that has Medha's packages, such as a CPython built with other
  optimisations.

Times are those of the thread's CPU clock, because a shared machine takes the CPU away for milliseconds at a time, which
says nothing about the scheduler. A decision's time is claimed as a ratio to the calibrated loop (benchmarks/harness.py),
which is timed before and after each row.
"""

import json
import os
import platform
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import log
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, get_args

import numpy as np
from harness import LOOPS, ROOT, Loop, Row, claim, exit_with, parser, progress, report, table

from medha.api.replica import SchedulingSpec, ServiceClass
from medha.cost.hardware import A100, LLAMA3_8B, profile_for
from medha.cost.predictor import Predictor
from medha.scheduler import controller as engine
from medha.scheduler.controller import ReplicaController
from medha.scheduler.replica_config import ReplicaConfig
from medha.topology import Topology
from medha.wire.messages import Done, Sample, Sampling, StageFree, Step, Submit
from medha_papers.campaign_run import Run, capacity, simulate
from medha_process.part_process import collect_garbage_rarely
from medha_sim.compiled_core import compiled

POLICIES: tuple[str, ...] = get_args(SchedulingSpec.model_fields["policy"].annotation)
QUEUES = (1, 100, 1_000, 10_000)
DECODES = (0, 256)
GOAL_P50, GOAL_P99 = 0.5, 1.0  # loops
GOAL_GROWTH = 1.0  # of p50 with the queue, as an exponent: no more than linear
GOAL_SIMULATED = 300.0  # seconds a core-second
SIMULATED_LOAD, SIMULATED_WINDOW_SECONDS, QUICK_WINDOW_SECONDS = 0.97, 3600.0, 900.0
STAGES = 2  # so that a step is launched by StageFree and not by Done
BLOCK_TOKENS = 16
LONG_SHARE = 0.05
WARM_UP = 20
ARRIVAL_SECONDS = 1e-3  # between the requests of the first queue


def prompt_tokens(random: Random) -> int:
    """Return a prompt's length in paper B's mix: ShareGPT-like shorts, and longs of 100K to 1M tokens."""
    if random.random() < LONG_SHARE:
        return random.randrange(100_000, 1_000_000)
    return min(max(int(random.lognormvariate(5.2, 1.2)), 4), 4096)


def config_of(policy: str) -> ReplicaConfig:
    return ReplicaConfig(
        topology=Topology(tensor=8, stream=STAGES),
        scheduling=SchedulingSpec.model_validate(
            {"policy": policy, "max_waiting": 1_000_000, "max_running": 512}
        ),
        service_classes={"default": ServiceClass(name="default")},
        default_class="default",
        max_model_len=2_000_000,
        block_size_tokens=BLOCK_TOKENS,
        kv_blocks=500_000,
        long_threshold_tokens=32_000,
    )


@dataclass
class Replica:
    """A controller whose ranks answer at once, at a virtual time that follows the predictions."""

    policy: str
    random: Random
    now: float = 0.0
    submitted: int = 0
    steps: dict[int, Step] = field(default_factory=dict)
    launch_seconds: dict[int, list[float]] = field(default_factory=dict)  # by decodes in the step

    def __post_init__(self) -> None:
        config = config_of(self.policy)
        predictor = Predictor(profile_for(LLAMA3_8B, A100, config.topology), config.topology)
        self.controller = ReplicaController(config, predictor)
        self.newest = -1

    def handle(self, event: Any) -> float:
        start = time.thread_time()
        commands = self.controller.handle(event, self.now)
        seconds = time.thread_time() - start
        for command in commands:
            if isinstance(command, Step):
                self.steps[command.step_id] = command
                self.newest = command.step_id
        return seconds

    def submit(self, tokens: int, output_tokens: int) -> None:
        self.submitted += 1
        id_ = f"request-{self.submitted}"
        sampling = Sampling(max_tokens=output_tokens)
        self.handle(Submit(id_, id_, tokens, tokens, seed=1, sampling=sampling))

    def finish(self, step_id: int) -> None:
        step = self.steps.pop(step_id)
        samples = tuple(Sample(entry.id, 7) for entry in step.entries if entry.samples)
        self.handle(Done(step_id, samples, compute_seconds=step.predicted_seconds))

    def advance(self) -> None:
        """Let the newest step leave stage 0, and then the pipeline; the launch in between is timed."""
        step_id = self.newest
        self.now += self.steps[step_id].predicted_seconds
        seconds = self.handle(StageFree(step_id, 0))
        self.finish(step_id)
        if self.newest == step_id:
            return
        decodes = sum(
            entry.token_count == 1 and entry.extents[0].start > 0 for entry in self.steps[self.newest].entries
        )
        self.launch_seconds.setdefault(decodes, []).append(seconds)


def measure(policy: str, queue: int, decodes: int, launches: int) -> np.ndarray:
    """Return the seconds of each launch at a standing queue, with all of `decodes` in the step."""
    random = Random(7)
    replica = Replica(policy, random)
    for _ in range(decodes):
        replica.submit(int(random.lognormvariate(5.2, 1.2)) % 2000 + 4, 4000)
    load = replica.controller.load()
    while decodes and (load.waiting or load.pending_prefill_seconds > 0):
        replica.advance()
        load = replica.controller.load()
    if decodes:
        replica.finish(replica.newest)  # the pipeline is empty then, so that all decodes go into one step
    for _ in range(queue):
        replica.now += ARRIVAL_SECONDS
        replica.submit(prompt_tokens(random), 1)
    timed: list[float] = []
    while len(timed) < launches + WARM_UP:  # every launch, or with decodes every second one
        while replica.controller.load().waiting < queue:  # as many arrive as complete
            replica.submit(prompt_tokens(random), 1)
        replica.launch_seconds.clear()
        replica.advance()
        for found, seconds in replica.launch_seconds.items():
            if abs(found - decodes) <= decodes // 50:
                timed += seconds
    return np.array(timed[WARM_UP:])


def rows(policies: tuple[str, ...], launches: int) -> Iterator[tuple[str, int, int, np.ndarray]]:
    for decodes in DECODES:
        for queue in QUEUES:
            for policy in policies:
                yield policy, queue, decodes, measure(policy, queue, decodes, launches)


def simulated_seconds(seeds: int, window_seconds: float) -> float:
    """Return the simulated seconds per core-second of paper B's mix under `guarded` near capacity.

    All of a run counts.
    """
    rate = SIMULATED_LOAD * capacity(LONG_SHARE)["rate"]
    core_seconds = 0.0
    for seed in range(seeds):
        run = Run("medha-guarded", LONG_SHARE, seed, window_seconds, rate=rate, load=SIMULATED_LOAD)
        outcome = simulate(run)
        assert outcome is not None, "nothing stops it"
        core_seconds += outcome["core_seconds"]
    return seeds * window_seconds / core_seconds


def growth_claims(figures: list[Row]) -> Iterator[Row]:
    """Yield claims on how p50 grows with the queue, as an exponent: 0 if not at all, 1 if as the queue does."""
    before, longest = QUEUES[-2:]
    p50 = {(row["scheduler"], row["decodes"], row["queued"]): row["p50_ms"] for row in figures}
    for (scheduler, decodes, queued), milliseconds in p50.items():
        if queued == longest:
            growth = log(milliseconds / p50[scheduler, decodes, before]) / log(longest / before)
            name = f"growth of p50, {scheduler}, {before} to {longest} queued, {decodes} decodes"
            yield claim(name, growth, "exponent", GOAL_GROWTH)


def time_claims(figures: list[Row]) -> Iterator[Row]:
    """Yield claims on a decision's time at the longest queue, in loops of its own interpreter's run."""
    for row in figures:
        if row["queued"] == QUEUES[-1]:
            name = f"handle(StageFree), {row['scheduler']}, {QUEUES[-1]} queued, {row['decodes']} decodes"
            peer = f"calibrated loop before and after: {row['loop_ms']:.2f} ms"
            for quantile, goal in (("p50", GOAL_P50), ("p99", GOAL_P99)):
                value = row[f"{quantile}_ms"] / row["loop_ms"]
                yield claim(f"{name}, {quantile}", value, LOOPS, goal, peer=peer)


def compiled_figures(policies: tuple[str, ...], *, quick: bool) -> tuple[list[Row], float]:
    """Return the same figures with a compiled core, and `simulated_seconds`."""
    path = os.pathsep.join(
        [str(compiled(ROOT, ROOT / ".medha" / "compiled")), os.environ.get("PYTHONPATH", "")]
    )
    found = elsewhere(Path(sys.executable), {"PYTHONPATH": path}, policies, quick=quick)
    rows: list[Row] = found["figures"]
    assert all(row["compiled"] for row in rows)
    return [row | {"scheduler": f"{row['scheduler']}, compiled"} for row in rows], found["simulated_seconds"]


def also_figures(python: Path, policies: tuple[str, ...], *, quick: bool) -> tuple[list[Row], dict[str, str]]:
    """Return the same figures in another interpreter, and the facts about it."""
    found = elsewhere(python, {}, policies, quick=quick)
    name = f"CPython {found['interpreter']['version']}"
    rows = [row | {"scheduler": f"{row['scheduler']}, {name}"} for row in found["figures"]]
    return rows, found["interpreter"]


def elsewhere(python: Path, environment: dict[str, str], policies: tuple[str, ...], *, quick: bool) -> Row:
    """Return the figures that this script writes if another interpreter runs it."""
    chosen = [word for policy in policies for word in ("--policy", policy)]
    with TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        command = [str(python), __file__, "--json", str(file), *chosen, *(["--quick"] if quick else [])]
        subprocess.run(
            command, env=os.environ | environment, check=True, timeout=3600, stdout=subprocess.DEVNULL
        )
        found: Row = json.loads(file.read_text())
    return found


def interpreter() -> dict[str, str]:
    """Return the version of this interpreter, its compiler and its flags."""
    flags = sysconfig.get_config_var("OPT") or ""
    return {"version": platform.python_version(), "compiler": platform.python_compiler(), "flags": flags}


def vllm_rows(python: Path, launches: int) -> list[Row]:
    """Return the same figures of vLLM's scheduler, in its own interpreter."""
    script = Path(__file__).with_name("scheduler_vllm.py")
    done = subprocess.run(
        [str(python), str(script), str(launches)], capture_output=True, text=True, check=True, timeout=1800
    )
    found: list[Row] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    found = parser(__doc__, quick="three policies, fewer launches")
    found.add_argument("--vllm-python", type=Path, metavar="PYTHON", help="an interpreter that has vLLM")
    found.add_argument("--compiled", action="store_true", help="time the compiled core, too")
    text = "time them in this interpreter, too: it needs Medha's packages"
    found.add_argument("--also", type=Path, metavar="PYTHON", help=text)
    found.add_argument("--policy", action="append", choices=POLICIES, help="only this one; may be repeated")
    arguments = found.parse_args()
    collect_garbage_rarely()  # as the controller's process does
    launches = 200 if arguments.quick else 500
    window_seconds = QUICK_WINDOW_SECONDS if arguments.quick else SIMULATED_WINDOW_SECONDS
    policies = tuple(arguments.policy or (("fcfs", "lars", "guarded") if arguments.quick else POLICIES))

    is_compiled = not str(engine.__file__).endswith(".py")
    figures = own_figures(policies, launches, is_compiled=is_compiled)
    simulated = simulated_seconds(1 if arguments.quick else 3, window_seconds) if is_compiled else None
    if arguments.compiled:
        more, simulated = compiled_figures(policies, quick=arguments.quick)
        figures += more
    interpreters = [interpreter()]
    if arguments.also:
        more, other = also_figures(arguments.also, policies, quick=arguments.quick)
        interpreters.append(other)
        figures += more
    claims = [*time_claims(figures), *growth_claims(figures)]
    if simulated is not None:
        name = f"simulated seconds per core-second, guarded, load {SIMULATED_LOAD:g}, {window_seconds / 60:g} minutes"
        claims.append(claim(name, simulated, "s/s", GOAL_SIMULATED, "more"))
    if arguments.vllm_python:
        theirs = vllm_rows(arguments.vllm_python, launches)
        claims.append(vllm_claim([row for row in figures if row["scheduler"] in policies], theirs))
        figures += theirs
    columns = ("scheduler", "queued", "decodes", "p50_ms", "p99_ms", "max_ms")
    table(columns, [[row[column] for column in columns] for row in figures])
    shown = {
        "figures": figures,
        "simulated_seconds": simulated,
        "interpreter": interpreters[0],
        "also": interpreters[1:],
    }
    return report(claims, arguments.json, shown)


def own_figures(policies: tuple[str, ...], launches: int, *, is_compiled: bool) -> list[Row]:
    """Return quantiles of this interpreter's launches, and the loop's time around them (milliseconds)."""
    loop, figures = Loop(), list[Row]()
    before = loop.sample()
    for policy, queue, decodes, seconds in rows(policies, launches):
        after = loop.sample()
        p50, p99, most = (1e3 * float(value) for value in np.percentile(seconds, (50, 99, 100)))
        row = {"scheduler": policy, "queued": queue, "decodes": decodes, "compiled": is_compiled}
        row |= {"p50_ms": p50, "p99_ms": p99, "max_ms": most, "loop_ms": 500 * (before + after)}
        figures.append(row)
        progress(f"{policy}, {queue} queued, {decodes} decodes: p50 {p50:.3f} ms, p99 {p99:.3f} ms")
        before = after
    return figures


def vllm_claim(ours: list[Row], theirs: list[Row]) -> Row:
    """Return a claim that compares the slowest policy with vLLM, at the longest queue beside decodes."""

    def slowest(rows: list[Row]) -> Row:
        most = [row for row in rows if (row["queued"], row["decodes"]) == (QUEUES[-1], DECODES[-1])]
        return max(most, key=lambda row: float(row["p50_ms"]))

    peer = slowest(theirs)
    name = f"slowest policy's p50 over schedule() of {peer['scheduler']}, 256 decodes"
    return claim(name, slowest(ours)["p50_ms"] / peer["p50_ms"], "ratio", 1.0, peer=peer["scheduler"])


if __name__ == "__main__":
    exit_with(main)
