"""The virtual clock: every request ends or is counted, every token comes once, and a run repeats itself exactly."""

from __future__ import annotations

from typing import Any

from medha.api import SchedulingSpec, ServiceClass
from medha.config import ReplicaConfig
from medha.messages import StepProfile
from medha.profile import Profile
from medha.routing import RouterCore
from medha.topology import Topology
from medha_sim.driver import Arrival, FollowUp, Latencies, SimulatedReplica, Simulation, Workload
from medha_sim.records import RunLog
from medha_sim.scenario import medha_replica

PROFILE = Profile.of_warm_up(
    StepProfile(
        step_seconds=0.001,
        linear_seconds_per_token=1e-5,
        attention_seconds_per_pair=1e-9,
        sequence_seconds=1e-5,
    ),
    stages=2,
)


def config(*, stages: int = 2, kv_blocks: int = 400, **scheduling: Any) -> ReplicaConfig:
    return ReplicaConfig(
        topology=Topology(stream=stages),
        scheduling=SchedulingSpec.model_validate(scheduling),
        service_classes={"default": ServiceClass(name="default")},
        default_class="default",
        max_model_len=100_000,
        block_size_tokens=16,
        kv_blocks=kv_blocks,
        long_threshold_tokens=2000,
    )


def arrival(index: int, at: float, prompt_tokens: int = 100, output_tokens: int = 5) -> Arrival:
    return Arrival(
        id=f"r{index}",
        at_seconds=at,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        ttft_target_seconds=2.0,
        tpot_target_seconds=0.05,
        max_tokens=output_tokens,
    )


def replicas(workload: Workload, count: int = 1, **settings: Any) -> list[SimulatedReplica]:
    ends_at = workload.ends_at()
    return [medha_replica(f"replica-{i}", config(**settings), PROFILE, ends_at) for i in range(count)]


def mixed(requests: int = 40) -> Workload:
    sizes = (30, 700, 4000, 120)
    return Workload(
        [arrival(i, 0.03 * i, prompt_tokens=sizes[i % 4], output_tokens=1 + i % 7) for i in range(requests)]
    )


def finished_with_all_tokens(log: RunLog) -> bool:
    return all(
        record.ending == "finished" and record.tokens == record.output_tokens
        for record in log.requests.values()
    )


def test_every_request_gets_each_of_its_tokens_once() -> None:
    workload = mixed()
    log = Simulation(replicas(workload), workload).run(1000)
    assert len(log.requests) == 40
    assert finished_with_all_tokens(log)


def test_a_router_and_several_replicas_lose_and_repeat_nothing() -> None:
    workload = mixed()
    parts = replicas(workload, 3)
    latencies = Latencies(client_seconds=0.001, replica_seconds=0.0002)
    log = Simulation(parts, workload, router=RouterCore(), latencies=latencies).run(1000)
    assert len(log.requests) == 40
    assert finished_with_all_tokens(log)


def test_requests_that_are_open_when_the_clock_stops_are_censored() -> None:
    workload = Workload([arrival(0, 0.0), arrival(1, 0.1, prompt_tokens=5000), arrival(2, 5.0)])
    log = Simulation(replicas(workload), workload).run(0.11)
    assert {id_: record.ending for id_, record in log.requests.items()} == {
        "r0": "finished",
        "r1": "censored",
    }
    assert log.window_seconds == 0.11


def test_the_same_arrivals_give_the_same_log() -> None:
    workload = mixed()
    first = Simulation(replicas(workload, 2), workload, router=RouterCore()).run(1000)
    second = Simulation(replicas(workload, 2), workload, router=RouterCore()).run(1000)
    assert first == second


def test_a_turn_of_a_conversation_follows_its_thinking_time_behind_the_answer() -> None:
    follow_up = FollowUp(3.0, arrival(1, 0.0))
    workload = Workload([arrival(0, 1.0)], {"r0": follow_up})
    log = Simulation(replicas(workload), workload).run(100)
    answered = log.requests["r0"].ended_at
    assert answered is not None
    assert log.requests["r1"].arrived_at == answered + 3.0
    assert finished_with_all_tokens(log)
