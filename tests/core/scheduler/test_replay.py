"""A recorded list of (time, event) gives the same commands in a fresh controller."""

from __future__ import annotations

import dataclasses
import json
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medha.scheduler.controller import ReplicaController
from medha.wire.frames import decode, encode
from medha.wire.messages import ControllerCommand, ControllerEvent, Drain, StepProfile


def busy_replica(replica_of: Any, submit_of: Any, seed: int) -> Any:
    """A replica that has been through 40 random events, and has then ended."""
    random = Random(seed)
    replica = replica_of(
        random=Random(seed),
        stages=random.randint(1, 3),
        kv_blocks=40,
        long_threshold_tokens=50,
        max_chunk_tokens=32,
        default_output_tokens=random.choice([2, 16]),
        stop_chance=0.05,
        failure_chance=0.02,
    )
    for index in range(40):
        choice = random.random()
        if choice < 0.4:
            tokens, max_tokens = random.randint(1, 90), random.choice([None, 3, 20])
            age = random.choice([0.0, 1.0 / 3.0])
            replica.submit(submit_of(f"r{index}", tokens, max_tokens, age_seconds=age))
        elif choice < 0.5:
            known = [request.id for request in replica.controller.requests()]
            if known:
                replica.cancel(random.choice(known))
        else:
            replica.advance()
    replica.handle(Drain())
    replica.run().check_empty()
    return replica


def replay(
    config: Any, profile: StepProfile, log: list[tuple[float, ControllerEvent]]
) -> list[list[ControllerCommand]]:
    controller = ReplicaController(config, profile)
    return [controller.handle(event, now) for now, event in log]


@pytest.mark.long
@given(seed=st.integers(0, 10_000))
def test_a_fresh_controller_decides_the_same_from_the_same_events(
    replica_of: Any, submit_of: Any, profile: StepProfile, seed: int
) -> None:
    replica = busy_replica(replica_of, submit_of, seed)
    assert len(replica.steps) > 1
    assert replay(replica.config, profile, replica.log) == replica.commands


@given(seed=st.integers(0, 10_000))
def test_events_that_were_written_to_a_file_and_read_again_lead_to_the_same_commands(
    replica_of: Any, submit_of: Any, profile: StepProfile, seed: int
) -> None:
    replica = busy_replica(replica_of, submit_of, seed)
    text = "\n".join(to_line(now, event) for now, event in replica.log)
    log = [from_line(line) for line in text.splitlines()]
    assert log == replica.log
    assert replay(replica.config, profile, log) == replica.commands


def test_commands_survive_the_wire(replica_of: Any, submit_of: Any) -> None:
    for commands in busy_replica(replica_of, submit_of, 1).commands:
        for command in commands:
            assert decode(encode(command))[0] == command


def to_line(now: float, event: ControllerEvent) -> str:
    """One line of a log; `Drain` crosses no border and so has no frame."""
    frame = None if isinstance(event, Drain) else bytes(encode(event)[0]).decode()
    return json.dumps({"now": now, "frame": frame})


def from_line(line: str) -> tuple[float, ControllerEvent]:
    entry = json.loads(line)
    event: Any = Drain() if entry["frame"] is None else decode([entry["frame"].encode()])[0]
    return entry["now"], event


@pytest.mark.parametrize("change", [{"policy": "srpt"}, {"max_chunk_tokens": 16}])
def test_another_setting_leads_to_other_commands(
    replica_of: Any, submit_of: Any, profile: StepProfile, change: dict[str, Any]
) -> None:
    """So the comparisons above can fail."""
    replica = replica_of(max_chunk_tokens=32)
    for index, tokens in enumerate((40, 20, 10)):
        replica.submit(submit_of(f"r{index}", tokens, 2))
    replica.run()
    scheduling = replica.config.scheduling.model_copy(update=change)
    other = dataclasses.replace(replica.config, scheduling=scheduling)
    assert replay(other, profile, replica.log[:5]) != replica.commands[:5]
