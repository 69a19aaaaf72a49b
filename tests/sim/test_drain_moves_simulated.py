"""Simulated replicas that drain let requests move with their KV, and a prefix is read from a neighbour."""

from __future__ import annotations

from dataclasses import replace

import pytest

from medha.cost.hardware import H100, LLAMA3_8B
from medha.routing.router_core import RouterCore
from medha.scheduler.controller import ReplicaController
from medha.topology import Topology
from medha_sim.autoscaling import AutoscaledFleet, AutoscalerTerms, Signal
from medha_sim.run_log import RunLog
from medha_sim.scenario import Deployment
from medha_sim.simulation import Arrival, SimulatedReplica, Simulation, Workload

GIB = 2.0**30
PROMPT_TOKENS, DRAINS_AT, LIMIT_SECONDS = 60_000, 5.0, 10.0
TWO = Deployment(
    model=LLAMA3_8B,
    hardware=H100,
    topology=Topology(tensor=2),
    host_bytes=64 * int(GIB),
    peer_bytes_per_second=5 * GIB,
    replicas=2,
    drain_seconds=LIMIT_SECONDS,
)


def arrival(name: str, at_seconds: float, prompt_tokens: int, output_tokens: int, **fields: str) -> Arrival:
    return Arrival(
        name, at_seconds, prompt_tokens, output_tokens, 60.0, 0.05, max_tokens=output_tokens,
        **{"conversation": name, **fields},
    )  # fmt: skip


def core(replica: SimulatedReplica) -> ReplicaController:
    assert isinstance(replica.controller, ReplicaController)
    return replica.controller


def drained(deployment: Deployment, output_tokens: int) -> tuple[RunLog, list[ReplicaController], float]:
    """Let the replica drain that serves a request; return the log, the controllers, and how long the drain took."""
    workload = Workload([arrival("a", 0.0, PROMPT_TOKENS, output_tokens)])
    make = deployment.maker(workload)
    replicas = [make(index) for index in range(2)]
    simulation = Simulation(replicas, workload, router=RouterCore(), latencies=deployment.latencies)
    drained_at: list[float] = []

    def drain(name: str, now: float) -> None:
        assert core(replicas[0]).find("a") is not None, "it is here"
        simulation.drain_replica(name, now)
        look(name, now)

    def look(name: str, now: float) -> None:
        if simulation.is_drained(name):
            drained_at.append(now)
        else:
            simulation.at(now + 0.01, look, name)

    simulation.at(DRAINS_AT, drain, "replica-0")
    log = simulation.run(400.0)
    return log, [core(one) for one in replicas], drained_at[0] - DRAINS_AT


def test_a_request_that_would_not_end_in_time_moves_with_its_kv_and_the_old_replica_waits_for_its_tickets() -> (
    None
):
    log, (old, new), drained_after = drained(TWO, 8000)
    record = log.requests["a"]
    assert (record.ending, record.tokens) == ("finished", 8000)
    read_tokens = 16 * new.pools.peer_counts.loaded_blocks
    assert read_tokens >= PROMPT_TOKENS
    assert sum(log.chunks.tokens) < PROMPT_TOKENS + 100, "the prompt is computed once"
    read_seconds = read_tokens * LLAMA3_8B.kv_bytes_per_token / 2 / (5 * GIB)
    assert read_seconds < drained_after < LIMIT_SECONDS / 2, (
        "it holds the KV until that is read, and no longer"
    )
    assert record.worst_gap_seconds == pytest.approx(read_seconds, abs=0.4)
    assert old.idle
    assert not old._peer_kv.gives


def test_a_request_that_ends_in_time_stays() -> None:
    log, (_, new), _ = drained(TWO, 1200)
    assert log.requests["a"].ending == "finished"
    assert (log.requests["a"].ended_at or 0.0) > DRAINS_AT
    assert new.pools.queried_tokens == 0


@pytest.mark.parametrize("limit_seconds", [LIMIT_SECONDS, None])
def test_without_peers_a_replica_returns_at_its_limit_what_has_not_ended(limit_seconds: float | None) -> None:
    """Without a limit, it serves until nothing is left."""
    here = replace(TWO, peer_bytes_per_second=0.0, drain_seconds=limit_seconds)
    log, (_, new), drained_after = drained(here, 8000)
    record = log.requests["a"]
    assert (record.ending, record.tokens) == ("finished", 8000)
    assert new.pools.peer_counts.loaded_blocks == 0
    if limit_seconds is None:
        assert drained_after > LIMIT_SECONDS
        assert sum(log.chunks.tokens) == PROMPT_TOKENS
    else:
        assert drained_after == pytest.approx(LIMIT_SECONDS, abs=0.02)
        assert sum(log.chunks.tokens) > 2 * PROMPT_TOKENS, "the other replica computes all of it again"


def test_an_autoscaled_fleet_removes_a_replica_only_once_what_has_moved_is_read() -> None:
    """The read takes 0.7 s, and the autoscaler decides every quarter of a second."""
    workload = Workload([arrival("a", 0.0, PROMPT_TOKENS, 4000)])
    make = TWO.maker(workload)
    simulation = Simulation([make(0)], workload, router=RouterCore(), latencies=TWO.latencies)
    terms = AutoscalerTerms(max_replicas=2, sync_seconds=0.25)
    fleet = AutoscaledFleet(simulation, make, Signal("fixed"), terms, start_seconds=1.0)
    serve: dict[float, bool] = {}
    simulation.at(DRAINS_AT, fleet._end, "replica-0")
    for after_seconds in (0.6, 3.0):
        simulation.at(
            DRAINS_AT + after_seconds,
            lambda at, now: serve.update({at: "replica-0" in fleet._lives}),
            after_seconds,
        )
    log = simulation.run(DRAINS_AT + 10)
    assert serve == {0.6: True, 3.0: False}
    assert sum(log.chunks.tokens) < PROMPT_TOKENS + 100


def neighbours(bytes_per_second: float) -> tuple[RunLog, list[ReplicaController]]:
    """Ask twice about one document, the second time while the replica that has its KV is busy with a long prompt."""
    deployment = replace(TWO, peer_bytes_per_second=bytes_per_second)
    workload = Workload(
        [
            arrival("first", 0.0, PROMPT_TOKENS, 2, conversation="document"),
            *(arrival(f"long-{number}", 30.0, 400_000, 2) for number in range(2)),
            arrival("other", 30.1, 200_000, 2),
            arrival("second", 31.0, PROMPT_TOKENS + 1000, 2, conversation="document"),
        ]
    )
    make = deployment.maker(workload)
    replicas = [make(index) for index in range(2)]
    log = Simulation(replicas, workload, router=RouterCore(), latencies=deployment.latencies).run(400.0)
    assert {record.ending for record in log.requests.values()} == {"finished"}
    return log, [core(one) for one in replicas]


def test_a_prefix_that_a_busy_neighbour_has_is_read_from_it() -> None:
    log, cores = neighbours(5 * GIB)
    assert max(one.pools.peer_counts.loaded_blocks for one in cores) == PROMPT_TOKENS // 16
    without, cores = neighbours(0.0)
    assert max(one.pools.peer_counts.loaded_blocks for one in cores) == 0
    saved = sum(without.chunks.tokens) - sum(log.chunks.tokens)
    assert saved == pytest.approx(PROMPT_TOKENS, abs=16)
