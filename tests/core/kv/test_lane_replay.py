"""Ranks of several lanes keep what their controller keeps, while prefixes are shared and evicted all the time.

Pools are so small, and prompts so alike, that hardly a request is admitted without an eviction: whatever ranks are told
out of turn shows in what they would evict next.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from medha.api.replica import SchedulingSpec, ServiceClass
from medha.kv.blocks import BlockLedger
from medha.kv.context_parallel import ContextParallel, PrefillStrategy, RingCosts
from medha.kv.lane_replay import LaneReplay
from medha.kv.prefix_cache import PrefixHasher
from medha.scheduler.controller import ReplicaController
from medha.scheduler.replica_config import ReplicaConfig
from medha.topology import Topology
from medha.wire.messages import (
    Cancel,
    ControllerEvent,
    Done,
    EntryFailed,
    Sample,
    Sampling,
    StageFree,
    Step,
    StepProfile,
    Submit,
)

from ..replayed import assert_replayed

PROFILE = StepProfile(0.001, 0.0001, 1e-8, 0.0001)
STEP_SECONDS = 0.01
EVENTS = 160


@dataclass
class Traffic:
    """A controller, one rank a lane that replays its steps, and random events between them."""

    config: ReplicaConfig
    random: Random
    failure_chance: float
    now: float = 0.0
    submitted: int = 0
    open: list[str] = field(default_factory=list)
    prompts: list[tuple[str, list[int]]] = field(default_factory=list)
    in_flight: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        blocks, self.size = self.config.kv_blocks, self.config.block_size_tokens
        self.controller = ReplicaController(self.config, PROFILE)
        self.replicas = [
            LaneReplay(BlockLedger(blocks, self.size), lane) for lane in range(self.config.topology.kv)
        ]
        self.stages: dict[int, int] = {}  # of steps in flight
        self.hasher = PrefixHasher(self.size, b"secret")

    def submit(self) -> None:
        """A prompt that begins as others do, or one that is known already, of which its prefill may be shared."""
        self.submitted += 1
        name = f"r{self.submitted}"
        if self.prompts and self.random.random() < 0.2:
            prompt, ids = self.random.choice(self.prompts)
        else:
            family, tokens = self.random.randrange(3), self.random.randint(1, self.config.pool_tokens // 2)
            alike = self.random.choice((0, 2 * self.size, 4 * self.size, tokens))
            prompt = name
            ids = [(family if index < alike else 3 + self.submitted) for index in range(tokens)]
            self.prompts = [*self.prompts[-3:], (prompt, ids)]
        self.open.append(name)
        self.handle(
            Submit(
                id=name,
                prompt=prompt,
                tokens=len(ids),
                prompt_length=len(ids),
                seed=1,
                sampling=Sampling(max_tokens=self.random.choice((None, 1, 1, 2, 9))),
                block_hashes=self.hasher.hashes(np.array(ids, dtype=np.int32)),
            )
        )

    def cancel(self) -> None:
        if self.open:
            self.handle(Cancel(self.open.pop(self.random.randrange(len(self.open)))))

    def move(self) -> bool:
        """A step goes on to its next stage, or ends; none passes another one of its lanes."""
        movable = []
        for index, step in enumerate(self.in_flight):
            ahead = [one for one in self.in_flight[:index] if set(one.lanes) & set(step.lanes)]
            if all(self.stages[one.step_id] > self.stages[step.step_id] + 1 for one in ahead):
                movable.append(step)
        if not movable:
            return False
        step = self.random.choice(movable)
        stage = self.stages[step.step_id]
        self.now += STEP_SECONDS
        if stage + 1 < max(self.config.topology.stream, 2):  # behind a single stage: tokens are drawn
            self.stages[step.step_id] += 1
            if stage == 0:
                self.handle(StageFree(step.step_id, 0, step.lanes))
            return True
        self.in_flight.remove(step)
        self.handle(self.outcome(step))
        return True

    def outcome(self, step: Step) -> Done:
        failed = {entry.id for entry in step.entries if self.random.random() < self.failure_chance}
        samples = [
            Sample(entry.id, 1, "stop" if self.random.random() < 0.1 else None)
            for entry in step.entries
            if entry.samples and entry.id not in failed
        ]
        failures = [EntryFailed(name, "bad_logits") for name in sorted(failed)]
        return Done(step.step_id, tuple(samples), tuple(failures), STEP_SECONDS, step.lanes)

    def handle(self, event: ControllerEvent) -> None:
        for command in self.controller.handle(event, self.now):
            if isinstance(command, Step):
                self.in_flight.append(command)
                self.stages[command.step_id] = 0
                for replica in self.replicas:
                    self.replay(replica, command)
        if not self.controller.pools.has_changes:
            assert_replayed(self.controller.pools, self.replicas)

    @staticmethod
    def replay(replica: LaneReplay, step: Step) -> None:
        replica.insert(step.inserts)
        for name in step.releases:
            replica.release(name)
        assert all(replica.grow(grow) for grow in step.grows)
        assert all(replica.admit(admit) is not None for admit in step.admits)
        replica.ledger.check()
        hashes = step.state_hashes
        assert not hashes or hashes[replica.lane] == replica.state_hash()


@settings(max_examples=15, deadline=None)
@given(
    lanes=st.integers(2, 3),
    stages=st.integers(1, 3),
    blocks=st.integers(6, 24),
    size=st.sampled_from([1, 4]),
    tokens_per_lane=st.sampled_from([4, 8, 24]),
    output=st.sampled_from([1, 6]),
    prefill=st.sampled_from([None, None, "passKv", "striped"]),
    failure_chance=st.sampled_from([0.0, 0.05]),
    seed=st.integers(0, 2**32 - 1),
)
def test_ranks_of_several_lanes_have_the_ledgers_and_the_caches_of_their_controller_after_every_step(
    lanes: int,
    stages: int,
    blocks: int,
    size: int,
    tokens_per_lane: int,
    output: int,
    prefill: PrefillStrategy | None,
    failure_chance: float,
    seed: int,
) -> None:
    config = ReplicaConfig(
        topology=Topology(stream=stages, kv=lanes),
        scheduling=SchedulingSpec(policy="fcfs", min_chunk_tokens=4, max_chunk_tokens=32),
        service_classes={"default": ServiceClass(name="default", default_output_tokens=output)},
        default_class="default",
        max_model_len=10**6,
        block_size_tokens=size,
        kv_blocks=blocks,
        long_threshold_tokens=30,
        tokens_per_lane=tokens_per_lane,
        context_parallel=ContextParallel(prefill, RingCosts(4, 1)) if prefill else None,
    )
    traffic = Traffic(config, Random(seed), failure_chance)
    for _ in range(EVENTS):
        match traffic.random.random():
            case chance if chance < 0.35:
                traffic.submit()
            case chance if chance < 0.4:
                traffic.cancel()
            case _:
                traffic.move()
    moves = 0
    while traffic.move():
        moves += 1
        assert moves < 20_000, "still busy"
    assert traffic.controller.idle
    assert traffic.controller.pools.held_blocks == 0
