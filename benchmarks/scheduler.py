"""What a scheduling decision costs: the whole `handle(StageFree)` of a busy replica.

    python benchmarks/scheduler.py [--quick] [--json FILE] [--compiled] [--also PYTHON] [--vllm-python PYTHON]

A decision orders the prefills that wait, tests what can be on time, packs a step, gives out KV and makes the
commands. Each one is timed while requests arrive and complete between them, at a standing queue of 1 to 10,000
prefills (5 % of them 100K to 1M tokens long) and with 0 or 256 sequences that decode in the same step. With
`--vllm-python` (an interpreter that has vLLM) its scheduler's `schedule()` is timed on the same queue. `--compiled` times
the policies a second time with the core compiled, as in a wheel that was built so (docs/performance.md), and says how many
seconds of a replica's life the simulator, compiled as a campaign has it, gets through in one core-second. `--also` times them
in another interpreter that has Medha's packages, such as a CPython that was built with other optimisations.

Times are those of the thread's CPU clock: a shared machine takes the CPU away for milliseconds at a time, which says
nothing about the scheduler.
"""

import argparse
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

from medha.api.replica import SchedulingSpec, ServiceClass
from medha.cost.predictor import Predictor
from medha.hardware import A100, LLAMA3_8B, profile_for
from medha.scheduler import controller as engine
from medha.scheduler.config import ReplicaConfig
from medha.scheduler.controller import ReplicaController
from medha.topology import Topology
from medha.wire.messages import Done, Sample, Sampling, StageFree, Step, Submit
from medha_papers.campaign_run import Run, capacity, simulate
from medha_process.part_process import collect_garbage_rarely
from medha_sim.compiled import compiled

ROOT = Path(__file__).resolve().parents[1]

POLICIES: tuple[str, ...] = get_args(SchedulingSpec.model_fields["policy"].annotation)
QUEUES = (1, 100, 1_000, 10_000)
DECODES = (0, 256)
GOAL_P50_MS, GOAL_P99_MS = 0.5, 1.0
GOAL_GROWTH = 1.0  # of p50 with the queue, as an exponent: no more than linear
GOAL_SIMULATED = 300.0  # seconds a core-second
SIMULATED_LOAD, SIMULATED_WINDOW_SECONDS, QUICK_WINDOW_SECONDS = 0.97, 3600.0, 900.0
STAGES = 2  # so that a step is launched by StageFree and not by Done
BLOCK_TOKENS = 16
LONG_SHARE = 0.05
WARM_UP = 20
ARRIVAL_SECONDS = 1e-3  # between the requests of the first queue


def prompt_tokens(random: Random) -> int:
    """Paper B's mix: ShareGPT-like shorts, and longs of 100K to 1M tokens."""
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
    """Seconds of each launch at a standing queue, with all of `decodes` in the step."""
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
    """Simulated seconds per core-second of paper B's mix under `guarded` near capacity, all of a run counted."""
    rate = SIMULATED_LOAD * capacity(LONG_SHARE)["rate"]
    core_seconds = 0.0
    for seed in range(seeds):
        run = Run("medha-guarded", LONG_SHARE, seed, window_seconds, rate=rate, load=SIMULATED_LOAD)
        outcome = simulate(run)
        assert outcome is not None, "nothing stops it"
        core_seconds += outcome["core_seconds"]
    return seeds * window_seconds / core_seconds


def growth_claims(figures: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """How p50 grows with the queue, for ten times as many: 0 not at all, 1 as the queue does."""
    before, longest = QUEUES[-2:]
    p50 = {(row["scheduler"], row["decodes"], row["queued"]): row["p50_ms"] for row in figures}
    for (scheduler, decodes, queued), milliseconds in p50.items():
        if queued == longest:
            growth = log(milliseconds / p50[scheduler, decodes, before]) / log(longest / before)
            name = f"growth of p50, {scheduler}, {before} to {longest} queued, {decodes} decodes"
            yield claim(name, growth, "exponent", GOAL_GROWTH)


def compiled_figures(policies: tuple[str, ...], *, quick: bool) -> tuple[list[dict[str, Any]], float]:
    """The same of a compiled core, and `simulated_seconds`."""
    path = os.pathsep.join(
        [str(compiled(ROOT, ROOT / ".medha" / "compiled")), os.environ.get("PYTHONPATH", "")]
    )
    found = elsewhere(Path(sys.executable), {"PYTHONPATH": path}, policies, quick=quick)
    rows: list[dict[str, Any]] = found["figures"]
    assert all(row["compiled"] for row in rows)
    return [row | {"scheduler": f"{row['scheduler']}, compiled"} for row in rows], found["simulated_seconds"]


def also_figures(
    python: Path, policies: tuple[str, ...], *, quick: bool
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The same in another interpreter, and what it is."""
    found = elsewhere(python, {}, policies, quick=quick)
    name = f"CPython {found['interpreter']['version']}"
    rows = [row | {"scheduler": f"{row['scheduler']}, {name}"} for row in found["figures"]]
    return rows, found["interpreter"]


def elsewhere(
    python: Path, environment: dict[str, str], policies: tuple[str, ...], *, quick: bool
) -> dict[str, Any]:
    """What this script writes where another interpreter runs it."""
    chosen = [word for policy in policies for word in ("--policy", policy)]
    with TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        command = [str(python), __file__, "--json", str(file), *chosen, *(["--quick"] if quick else [])]
        subprocess.run(
            command, env=os.environ | environment, check=True, timeout=3600, stdout=subprocess.DEVNULL
        )
        found: dict[str, Any] = json.loads(file.read_text())
    return found


def interpreter() -> dict[str, str]:
    """The version of this interpreter, and with what it was built."""
    flags = sysconfig.get_config_var("OPT") or ""
    return {"version": platform.python_version(), "compiler": platform.python_compiler(), "flags": flags}


def vllm_rows(python: Path, launches: int) -> list[dict[str, Any]]:
    """The same of vLLM's scheduler, in its own interpreter."""
    script = Path(__file__).with_name("scheduler_vllm.py")
    done = subprocess.run(
        [str(python), str(script), str(launches)], capture_output=True, text=True, check=True, timeout=1800
    )
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="three policies, fewer launches: under a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--vllm-python", type=Path, metavar="PYTHON", help="an interpreter that has vLLM")
    parser.add_argument("--compiled", action="store_true", help="time the compiled core, too")
    parser.add_argument(
        "--also",
        type=Path,
        metavar="PYTHON",
        help="time them in this interpreter, too: it needs Medha's packages",
    )
    parser.add_argument("--policy", action="append", choices=POLICIES, help="only this one; may be repeated")
    arguments = parser.parse_args()
    collect_garbage_rarely()  # as the controller's process does
    launches = 200 if arguments.quick else 500
    window_seconds = QUICK_WINDOW_SECONDS if arguments.quick else SIMULATED_WINDOW_SECONDS
    policies = tuple(arguments.policy or (("fcfs", "lars", "guarded") if arguments.quick else POLICIES))

    claims: list[dict[str, Any]] = []
    figures: list[dict[str, Any]] = []
    print(HEADER)
    for policy, queue, decodes, seconds in rows(policies, launches):
        p50, p99 = (float(np.percentile(seconds, q)) * 1e3 for q in (50, 99))
        figure: dict[str, Any] = {
            "scheduler": policy,
            "queued": queue,
            "decodes": decodes,
            "p50_ms": p50,
            "p99_ms": p99,
        }
        figure["max_ms"] = float(seconds.max()) * 1e3
        figure["compiled"] = not str(engine.__file__).endswith(".py")
        print_row(figure)
        figures.append(figure)
    simulated = None
    if not str(engine.__file__).endswith(".py"):
        simulated = simulated_seconds(1 if arguments.quick else 3, window_seconds)
    if arguments.compiled:
        found, simulated = compiled_figures(policies, quick=arguments.quick)
        for figure in found:
            print_row(figure)
            figures.append(figure)
    interpreters = [interpreter()]
    if arguments.also:
        found, other = also_figures(arguments.also, policies, quick=arguments.quick)
        interpreters.append(other)
        for figure in found:
            print_row(figure)
            figures.append(figure)
    for figure in figures:
        if figure["queued"] == QUEUES[-1]:
            name = (
                f"handle(StageFree), {figure['scheduler']}, {QUEUES[-1]} queued, {figure['decodes']} decodes"
            )
            claims.append(claim(f"{name}, p50", figure["p50_ms"], "ms", GOAL_P50_MS))
            claims.append(claim(f"{name}, p99", figure["p99_ms"], "ms", GOAL_P99_MS))
    claims += growth_claims(figures)
    if simulated is not None:
        name = f"simulated seconds per core-second, guarded, load {SIMULATED_LOAD:g}, {window_seconds / 60:g} minutes"
        claims.append(claim(name, simulated, "s/s", GOAL_SIMULATED) | {"better": "more"})
        print(f"{name}: {simulated:.0f}")
    if arguments.vllm_python:
        for figure in vllm_rows(arguments.vllm_python, launches):
            print_row(figure)
            figures.append(figure)
            if (figure["queued"], figure["decodes"]) == (QUEUES[-1], DECODES[-1]):
                ours = max(
                    row["p50_ms"]
                    for row in figures
                    if (row["queued"], row["decodes"]) == (QUEUES[-1], DECODES[-1])
                    and row["scheduler"] in policies
                )
                name = f"slowest policy's p50 over schedule() of {figure['scheduler']}, 256 decodes"
                claims.append(claim(name, ours / figure["p50_ms"], "ratio", 1.0))
    if arguments.json:
        shown = {
            "claims": claims,
            "figures": figures,
            "simulated_seconds": simulated,
            "interpreter": interpreters[0],
            "also": interpreters[1:],
        }
        arguments.json.write_text(json.dumps(shown, indent=2) + "\n")


def claim(name: str, value: float, unit: str, goal: float) -> dict[str, Any]:
    return {"name": name, "value": round(value, 3), "unit": unit, "goal": goal, "better": "less"}


HEADER = f"{'scheduler':<23} {'queued':>7} {'decodes':>8} {'p50 ms':>8} {'p99 ms':>8} {'max ms':>8}"


def print_row(row: dict[str, Any]) -> None:
    times = " ".join(f"{row[name]:>8.3f}" for name in ("p50_ms", "p99_ms", "max_ms"))
    print(f"{row['scheduler']:<23} {row['queued']:>7} {row['decodes']:>8} {times}", flush=True)


if __name__ == "__main__":
    main()
