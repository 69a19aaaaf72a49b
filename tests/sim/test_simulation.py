"""The virtual clock: every request ends or is counted, every token comes once, and a run repeats itself exactly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medha.api.replica import SchedulingSpec, ServiceClass
from medha.cost.cost_profile import Profile
from medha.cost.hardware import H100, LLAMA3_8B
from medha.cost.predictor import Predictor
from medha.errors import ConfigInvalid
from medha.routing.router_core import RouterCore
from medha.scheduler.replica_config import ReplicaConfig
from medha.topology import Topology
from medha.wire.messages import ControllerCommand, ControllerEvent, Step, StepProfile
from medha_sim.executor import Perturbed, PredictorCost
from medha_sim.run_log import RunLog
from medha_sim.scenario import Deployment, medha_replica
from medha_sim.simulation import Arrival, FollowUp, Latencies, SimulatedReplica, Simulation, Workload
from medha_sim.workloads import conversations

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


def test_a_request_at_the_very_start_finds_the_replicas() -> None:
    workload = Workload([arrival(0, 0.0)])
    latencies = Latencies(replica_seconds=0.001)
    log = Simulation(replicas(workload, 2), workload, router=RouterCore(), latencies=latencies).run(100)
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


def test_a_long_prompt_on_two_lanes_couples_them_and_shorts_between_keep_their_tokens() -> None:
    deployment = Deployment(
        model=LLAMA3_8B, hardware=H100, topology=Topology(tensor=8, kv=2), tokens_per_lane=65_536
    )
    long = replace(arrival(0, 0.0, prompt_tokens=120_000), ttft_target_seconds=60.0)
    shorts = [arrival(index, 0.1 * index, prompt_tokens=500, output_tokens=8) for index in range(1, 20)]
    workload = Workload([long, *shorts])
    simulation = deployment.simulation(workload)
    lanes: list[tuple[int, ...]] = []
    replica = simulation._replicas["replica-0"]
    controller = replica._controller

    class Noted:
        load = controller.load

        def handle(self, event: ControllerEvent, now: float) -> list[ControllerCommand]:
            commands = controller.handle(event, now)
            lanes.extend(command.lanes for command in commands if isinstance(command, Step))
            return commands

    replica._controller = Noted()
    log = simulation.run(1000)
    assert finished_with_all_tokens(log)
    assert (0, 1) in lanes
    assert {(0,), (1,)} & set(lanes)  # before the long one has come to its second lane, or after it
    predicted, busy = np.array(log.steps.predicted_seconds), np.array(log.steps.busy_seconds)
    assert busy == pytest.approx(predicted, rel=0.03)


def test_a_later_turn_computes_only_what_is_new_where_prefixes_are_cached() -> None:
    second = replace(arrival(1, 0.0, prompt_tokens=5000), conversation="c")
    first = replace(arrival(0, 0.0, prompt_tokens=4000, output_tokens=500), conversation="c")
    workload = Workload([first], {"r0": FollowUp(1.0, second)})
    computed = {}
    for caching in (True, False):
        deployment = Deployment(
            model=LLAMA3_8B, hardware=H100, topology=Topology(tensor=8), prefix_caching=caching
        )
        log = deployment.simulation(workload).run(1000)
        assert finished_with_all_tokens(log)
        computed[caching] = sum(log.chunks.tokens)
    assert computed[False] == 9000
    assert (
        5000 <= computed[True] < 5600
    )  # 1,000 new tokens, less than a block more, and what was sampled last


def test_replicas_share_the_work_and_turns_go_where_their_prefix_is() -> None:
    deployment = Deployment(model=LLAMA3_8B, hardware=H100, topology=Topology(tensor=8), replicas=2)
    made = conversations(
        deployment.targets(), rate=1.0, duration_seconds=10.0, seed=1, mean_think_seconds=2.0
    )
    simulation = deployment.simulation(made)
    log = simulation.run(2000)
    assert finished_with_all_tokens(log)
    computed = sum(log.chunks.tokens)
    asked = sum(record.prompt_tokens for record in log.requests.values())
    assert computed < 0.6 * asked


def test_a_request_that_no_replica_can_hold_is_refused_and_counted() -> None:
    for router in (None, RouterCore()):
        workload = Workload([arrival(0, 0.0), arrival(1, 0.1, prompt_tokens=50_000)])
        log = Simulation(replicas(workload), workload, router=router).run(100)
        assert {id_: record.ending for id_, record in log.requests.items()} == {
            "r0": "finished",
            "r1": "refused",
        }
        assert "too_long" in log.requests["r1"].detail


def test_several_replicas_need_a_router() -> None:
    workload = mixed(1)
    with pytest.raises(ConfigInvalid, match="2 replicas need a router"):
        Simulation(replicas(workload, 2), workload)


def test_a_run_that_is_asked_to_stop_says_how_far_it_came() -> None:
    workload = mixed()
    log = Simulation(replicas(workload), workload, sample_seconds=0.1).run(1000, lambda now: now >= 0.5)
    assert log.interrupted
    assert log.window_seconds == pytest.approx(0.5)


def test_the_state_is_sampled_over_time() -> None:
    workload = mixed()
    log = Simulation(replicas(workload), workload, sample_seconds=0.1).run(1000)
    series = log.series
    assert len(series.at) == len(series.running) == len(series.waiting) == len(series.kv_share) > 10
    assert max(series.running) > 0
    assert 0 < max(series.kv_share) <= 1
    assert series.running[-1] == series.kv_share[-1] == 0


@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(
    requests=st.lists(
        st.tuples(st.floats(0, 2), st.integers(1, 3000), st.integers(1, 12)), min_size=1, max_size=12
    ),
    stages=st.integers(1, 3),
    count=st.integers(1, 3),
    policy=st.sampled_from(("fcfs", "lars", "srpt", "guarded")),
    noise=st.sampled_from((0.0, 0.5)),
    seed=st.integers(0, 1000),
)
def test_whatever_comes_every_token_comes_once_and_again_the_same(
    requests: list[tuple[float, int, int]], stages: int, count: int, policy: str, noise: float, seed: int
) -> None:
    workload = Workload(
        [
            arrival(index, at, prompt_tokens, output_tokens)
            for index, (at, prompt_tokens, output_tokens) in enumerate(sorted(requests))
        ]
    )

    def run() -> RunLog:
        parts = []
        for index in range(count):
            settings_ = config(stages=stages, policy=policy, max_chunk_tokens=512)
            generator = np.random.default_rng((seed, index))
            truth = PredictorCost(Predictor(PROFILE, settings_.topology))
            cost = Perturbed(truth, bias=1.1, noise=noise, generator=generator)
            ends_at = workload.ends_at()
            parts.append(medha_replica(f"replica-{index}", settings_, PROFILE, ends_at, cost=cost))
        return Simulation(parts, workload, router=RouterCore()).run(10_000)

    log = run()
    assert finished_with_all_tokens(log)
    # A chunk of one token that ends its prompt looks like a decode, so the sums are bounds.
    asked = sum(record.prompt_tokens for record in log.requests.values())
    assert asked - len(requests) <= sum(log.chunks.tokens) <= asked
    assert log == run()
