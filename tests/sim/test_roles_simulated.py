"""Simulated prefill and decode replicas: prompts move with their KV, and nothing is lost."""

from __future__ import annotations

import numpy as np
import pytest

from medha.api.replica import SchedulingSpec
from medha.cost.hardware import H100, LLAMA3_8B
from medha.routing.router_core import RouterCore
from medha.scheduler.controller import ReplicaController
from medha.topology import Topology
from medha_sim.run_log import RunLog
from medha_sim.scenario import Deployment
from medha_sim.simulation import Arrival, Simulation, Workload

GIB = 2.0**30


def run(bytes_per_second: float) -> tuple[RunLog, list[ReplicaController]]:
    """Return the log of a prefill and a decode replica that serve long and short prompts, and their controllers."""
    here = Deployment(
        model=LLAMA3_8B,
        hardware=H100,
        topology=Topology(tensor=2),
        scheduling=SchedulingSpec(),
        host_bytes=64 * int(GIB),
        peer_bytes_per_second=bytes_per_second,
        replicas=2,
        roles=("prefill", "decode"),
    )
    rng = np.random.default_rng(0)
    arrivals = [
        Arrival(f"{kind}{at}", 2.0 * at, tokens, int(rng.integers(5, 40)), 60.0, 0.05, kind, conversation=f"{kind}{at}")
        for at in range(10)
        for kind, tokens in (("long", 20_000), ("short", 100))
    ]  # fmt: skip
    workload = Workload(arrivals)
    make = here.maker(workload)
    replicas = [make(index) for index in range(2)]
    log = Simulation(replicas, workload, router=RouterCore(), latencies=here.latencies).run(500.0)
    cores = [one.controller for one in replicas]
    assert all(isinstance(core, ReplicaController) for core in cores)
    return log, cores  # type: ignore[return-value]


def test_long_prompts_move_and_are_read_and_short_ones_do_neither() -> None:
    log, (prefill, decode) = run(25 * GIB)
    assert all(one.ending == "finished" and one.tokens == one.output_tokens for one in log.requests.values())
    assert prefill.pools.queried_tokens == 10 * 20_000
    assert decode.pools.queried_tokens == 10 * (20_001 + 100)
    assert decode.pools.peer_counts.loaded_blocks == 10 * (20_000 // 16)
    assert decode.pools.hit_tokens == 10 * 20_000
    assert prefill.idle
    assert decode.idle


def test_over_a_slow_link_nothing_moves() -> None:
    log, (prefill, decode) = run(0.02 * GIB)
    assert all(one.ending == "finished" for one in log.requests.values())
    assert prefill.pools.queried_tokens == 0
    assert decode.pools.peer_counts.loaded_blocks == 0


def test_pauses_end_as_soon_as_the_kv_is_read() -> None:
    log, _ = run(25 * GIB)
    read_seconds = 20_000 * LLAMA3_8B.kv_bytes_per_token / 2 / (25 * GIB)
    worst = max(one.worst_gap_seconds for one in log.requests.values() if one.kind == "long")
    assert read_seconds < worst
    assert worst == pytest.approx(read_seconds, abs=0.4), "and its steps, and those beside which it is given"
