"""Simulation of a single run of a campaign: its key, and its figures.

An outcome is a pure function of the `Run`, of the measured capacity that gives its arrival rate, and of the
sources that this module loads (`medha_papers.source_digest` computes their digest). It is therefore computed once
and kept in a file.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np

from medha.cost.hardware import H100, LLAMA3_70B
from medha.topology import Topology
from medha_papers.lone_prompt import TOPOLOGIES, adaptive, static
from medha_sim.baselines.systems import simulation
from medha_sim.run_log import RunLog
from medha_sim.run_summary import group
from medha_sim.scenario import Deployment
from medha_sim.simulation import Progress
from medha_sim.study import WorkloadSpec, measured_capacity
from medha_sim.workloads import Targets

Outcome = dict[str, Any]

DEPLOYMENTS: dict[str, Callable[[], Deployment]] = {
    "8B": Deployment,  # Llama-3 8B, TP8 SPP2 on 16 A100 (B §6.2)
    "70B-2D": lambda: _seventy_b(Topology(tensor=8, stream=8)),
    "70B-3D": lambda: _seventy_b(Topology(tensor=8, stream=4, kv=2)),
}


def _seventy_b(topology: Topology) -> Deployment:
    """Return a deployment of Llama-3 70B on 64 H100 (B §6.3)."""
    return Deployment(model=LLAMA3_70B, hardware=H100, topology=topology, max_model_len=2_200_000)


@dataclass(frozen=True, slots=True)
class Run:
    """The parameters of a simulation.

    `rate` is in requests per second; with `load`, it follows from the capacity.
    """

    system: str
    long_share: float
    seed: int
    window_seconds: float
    rate: float = 0.0
    load: float | None = None  # share of the deployment's measured capacity
    capacity: float = 1.0
    deployment: str = "8B"
    loongserve_speed: float = 1.0
    prompt_tokens: int = 0
    """Tokens of a lone prompt (`medha_papers.lone_prompt`) in place of a mix, else 0. The system `static-N`
    cuts it into chunks of N tokens; `adaptive-N` has the P95 of `static-N` as its target."""

    @property
    def key(self) -> str:
        """Name of the run in a file of outcomes."""
        at = f"rate {self.rate:g}" if self.load is None else f"load {self.load:g}"
        parts = [self.deployment, self.system, at, f"long {self.long_share:g}", f"seed {self.seed}"]
        if self.prompt_tokens:
            parts[2:] = ["alone", f"{self.prompt_tokens} tokens"]
        if self.capacity != 1:
            parts.append(f"capacity {self.capacity:g}")
        if self.loongserve_speed != 1:
            parts.append(f"speed {self.loongserve_speed:g}")
        return ", ".join([*parts, f"{self.window_seconds:g} s"])


def simulate(run: Run, progress: Progress | None = None) -> Outcome | None:
    """Return the figures of a run, by kind of request and for all; None if `progress` stopped it."""
    started = time.process_time()
    if run.prompt_tokens:
        alone = _alone(run, progress)
        return alone and alone | {"core_seconds": round(time.process_time() - started, 2)}
    deployment = _deployment(run.deployment)
    targets = _targets(run.deployment)
    workload = _spec(run).make(targets, run.window_seconds, run.seed)
    chosen = simulation(
        run.system,
        deployment,
        workload,
        capacity=run.capacity,
        loongserve_speed=run.loongserve_speed,
    )
    log = chosen.run(run.window_seconds, progress)
    if log.interrupted:
        return None
    found = figures(log) | {"rate": run.rate}
    if run.load is not None and run.system.startswith("medha-"):
        found["work"] = _work(log, targets)
    return found | {"core_seconds": round(time.process_time() - started, 2)}


def _alone(run: Run, progress: Progress | None) -> Outcome | None:
    """Return the figures of a lone prompt with chunks of one size and, for `adaptive-N`, also with adaptive."""
    cut, _, size = run.system.partition("-")
    topology = TOPOLOGIES[run.deployment]
    found = {"static": static(topology, run.prompt_tokens, int(size), run.capacity, progress)}
    if cut == "adaptive" and found["static"] is not None:
        target_seconds = found["static"].p95_gap_seconds
        found[cut] = adaptive(topology, run.prompt_tokens, target_seconds, run.capacity, progress)
    return {name: asdict(one) for name, one in found.items() if one} if all(found.values()) else None


def figures(log: RunLog) -> Outcome:
    """Return the figures of a run that the report needs."""
    records = list(log.requests.values())
    kinds = {"all": records}
    for record in records:
        kinds.setdefault(record.kind, []).append(record)
    return {kind: _of_kind(group(members, log.window_seconds)) for kind, members in kinds.items()}


def _of_kind(summary: dict[str, Any]) -> Outcome:
    kept: Outcome = {
        name: summary[name]
        for name in ("arrived", "finished", "refused", "failed", "censored", "ttft_undecided", "good")
    }
    for name in ("ttft_attainment", "tpot_attainment", "prompt_tokens"):
        kept[name] = _rounded(summary[name])
    for name in ("ttft_seconds", "ttft_over_target", "tpot_seconds"):
        kept[name] = {
            quantile: _rounded(summary[name].get(quantile)) for quantile in ("p50", "p90", "p99", "max")
        }
    return kept


def _work(log: RunLog, targets: Targets) -> dict[str, float | None]:
    """Return the offered and the completed isolated prefill seconds, per second of the window."""
    prompts = np.array([record.prompt_tokens for record in log.requests.values()], np.int64)
    contexts = np.frombuffer(log.chunks.context, np.int64)
    ends = contexts + np.frombuffer(log.chunks.tokens, np.int64)
    seconds = targets.prefill_seconds
    offered, done = np.sum(seconds(prompts)), np.sum(seconds(ends) - seconds(contexts))
    return {
        "offered": _rounded(float(offered) / log.window_seconds),
        "done": _rounded(float(done) / log.window_seconds),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def _spec(run: Run) -> WorkloadSpec:
    scale = 2.0 if run.deployment.startswith("70B") else 1.0  # B §6.3 scales the trace to 2M tokens
    return WorkloadSpec(long_share=run.long_share, long_scale=scale, rate=run.rate)


@cache
def _deployment(name: str) -> Deployment:
    return DEPLOYMENTS[name]()


@cache
def _targets(name: str) -> Targets:
    return _deployment(name).targets()


def capacity(long_share: float) -> dict[str, float]:
    """Measure the 8B deployment while a backlog waits.

    Return the rate, in requests per second of the mix, and the mean work of a request in isolated prefill
    seconds.
    """
    spec = WorkloadSpec(long_share=long_share, rate=1.0)
    return {
        "rate": measured_capacity(_deployment("8B"), spec),
        "mean_work_seconds": spec.mix().mean_work_seconds(_targets("8B").prefill_seconds),
    }
