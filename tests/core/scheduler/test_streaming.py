"""Requests larger than the KV pools: what they reserve, who is refused, and that every block comes back."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medha.api.replica import MedhaReplicaSpec, SchedulingSpec, ServiceClass
from medha.cost.stream_seconds import StreamSeconds
from medha.kv.blocks import BlockLedger
from medha.kv.lane_replay import LaneReplay
from medha.scheduler import validation
from medha.scheduler.controller import ReplicaController
from medha.scheduler.history import History
from medha.scheduler.replica_config import ReplicaConfig
from medha.scheduler.status_report import CoreStatus, StreamingStatus, status
from medha.topology import Topology
from medha.wire.messages import (
    Cancel,
    ControllerEvent,
    Done,
    Emit,
    Failed,
    Refused,
    Sample,
    Sampling,
    StageFree,
    Step,
    StepProfile,
    StreamingFigures,
    Submit,
)

SIZE, BLOCKS, STREAMED = 4, 20, 30
PROFILE = StepProfile(0.001, 0.0001, 1e-7, 0.0001)


def config_of(lanes: int = 1, *, streams: bool = True, read_seconds: float = 1e-4) -> ReplicaConfig:
    return ReplicaConfig(
        topology=Topology(1, 1, lanes),
        scheduling=SchedulingSpec(
            max_chunk_tokens=16, min_chunk_tokens=4, max_running=6, short_headroom=0.25
        ),
        service_classes={"default": ServiceClass(name="default", default_output_tokens=8)},
        default_class="default",
        max_model_len=400,
        block_size_tokens=SIZE,
        kv_blocks=BLOCKS,
        long_threshold_tokens=40,
        tokens_per_lane=200,
        streaming=StreamingFigures(STREAMED, 1024, read_seconds) if streams else None,
    )


def submit(name: str, tokens: int, max_tokens: int | None = 4) -> Submit:
    return Submit(name, name, tokens, tokens, seed=1, sampling=Sampling(max_tokens=max_tokens))


class Served:
    """A controller of one stage, ranks that replay its steps, and how each request ended."""

    def __init__(self, config: ReplicaConfig) -> None:
        self.config, self.now, self.ends = config, 0.0, dict[str, str]()
        self.controller = ReplicaController(config, PROFILE)
        self.steps: list[Step] = []
        self.all_steps: list[Step] = []
        self.ranks = [
            LaneReplay(BlockLedger(BLOCKS, SIZE, STREAMED if config.streaming else 0), lane)
            for lane in range(config.topology.kv)
        ]

    def handle(self, event: ControllerEvent) -> None:
        self.now += 0.01
        for command in self.controller.handle(event, self.now):
            match command:
                case Step():
                    for rank in self.ranks:
                        rank.replay(command)
                        rank.ledger.check()
                    if command.state_hash is not None:
                        assert command.state_hash == self.ranks[0].state_hash()
                    self.steps.append(command)
                    self.all_steps.append(command)
                case Emit(finish_reason=str(reason)):
                    self.ends[command.id] = reason
                case Refused() | Failed():
                    self.ends[command.id] = command.reason

    def move(self, random: Random) -> None:
        """End a step, of those that no earlier one on their lanes is ahead of."""
        first = [
            index
            for index, step in enumerate(self.steps)
            if all(set(step.lanes).isdisjoint(before.lanes) for before in self.steps[:index])
        ]
        step = self.steps.pop(random.choice(first))
        samples = tuple(Sample(entry.id, 5) for entry in step.entries if entry.samples)
        self.handle(StageFree(step.step_id, 0, lanes=step.lanes))
        self.handle(Done(step.step_id, samples, (), step.predicted_seconds, lanes=step.lanes))

    def finish(self, random: Random) -> None:
        while self.steps:
            self.move(random)


def test_the_first_blocks_of_a_table_are_streamed_and_the_last_are_of_the_pool() -> None:
    ledger = BlockLedger(4, SIZE, 6)
    assert ledger.reserve("a", 7 * SIZE, device_blocks=3)
    assert ledger.table("a").tolist() == [4, 5, 6, 7, 0, 1, 2]
    assert (ledger.held_blocks, ledger.free_streamed_blocks, ledger.streamed_blocks_of("a")) == (3, 2, 4)
    assert not ledger.reserve("b", 4 * SIZE, device_blocks=1), "three streamed blocks are not free"
    assert ledger.reserve("c", SIZE)
    ledger.check()
    ledger.release("a")
    ledger.check()
    assert (ledger.held_blocks, ledger.free_streamed_blocks, ledger.streamed_blocks_of("a")) == (1, 6, 0)


@pytest.mark.parametrize("lanes", [1, 2])
def test_the_status_shows_the_tokens_that_each_step_streams(lanes: int) -> None:
    served, history = Served(config_of(lanes)), History()

    def shown() -> CoreStatus:
        return status(served.controller, history, served.now)

    assert all(lane.streaming == StreamingStatus(blocks=STREAMED, held=0) for lane in shown().lanes)
    served.handle(submit("long", 150 * lanes))
    served.handle(submit("short", 8))
    tokens, random = [0], Random(1)
    while served.steps:
        if found := [one for one in shown().requests if one.id == "long"]:
            tokens.append(found[0].streamed_tokens)
            held = sum(lane.streaming.held for lane in shown().lanes if lane.streaming is not None)
            assert tokens[-1] <= held * SIZE
            assert tokens[-1] <= found[0].computed_tokens
        assert [one.streamed_tokens for one in shown().requests if one.id == "short"] in ([], [0])
        served.move(random)
    assert max(tokens) > 80
    assert served.ends["long"] == "length"
    assert all(lane.streaming == StreamingStatus(blocks=STREAMED, held=0) for lane in shown().lanes)
    without = ReplicaController(config_of(streams=False), PROFILE)
    assert status(without, History(), 0.0).lanes[0].streaming is None


def test_the_status_counts_blocks_in_host_memory_as_no_used_blocks_of_the_pool() -> None:
    served, used, random = Served(config_of()), list[int](), Random(1)
    served.handle(submit("long", 150))
    while "long" not in served.ends:
        found = status(served.controller, History(), served.now)
        (lane,) = found.lanes
        assert lane.streaming is not None
        (computed,) = (one.computed_tokens for one in found.requests)
        used.append(lane.kv.used)
        assert used[-1] == max(0, -(-computed // SIZE) - lane.streaming.held)
        assert lane.kv.used + lane.kv.reserved == 15
        served.move(random)
    assert (min(used), max(used)) == (0, 14)


def test_a_request_larger_than_the_pool_is_served_whole_and_one_larger_than_both_is_refused() -> None:
    served = Served(config_of())
    assert served.config.longest_tokens == (15 + STREAMED) * SIZE
    served.handle(submit("long", 150))
    served.handle(submit("too long", served.config.longest_tokens - 2))
    assert served.ends == {"too long": "too_long"}
    served.finish(Random(1))
    assert served.ends == {"too long": "too_long", "long": "length"}
    (admit,) = (admit for step in served.all_steps for admit in step.admits)
    assert (admit.device_blocks, admit.reserved_tokens) == (15, 156)
    assert served.controller.streamed_blocks > 0


def test_without_streaming_the_refusal_names_the_pool_alone() -> None:
    refusal = validation.unservable(config_of(streams=False), submit("long", 150))
    fix = "shorten the prompt or lower max_tokens"
    assert refusal == ("too_long", f"153 tokens of prompt and output; the KV pool holds 80; {fix}")
    refusal = validation.unservable(config_of(), submit("long", 300))
    assert refusal is not None
    assert "180 of one request if a part is streamed" in refusal[1]


def test_without_max_tokens_a_prompt_streams_only_if_its_usual_output_has_no_place() -> None:
    config = config_of()
    assert not validation.streams(config, submit("fits", 72, None))
    assert validation.most_tokens(config, submit("fits", 72, None)) == config.pool_tokens
    assert validation.streams(config, submit("does not", 73, None))
    assert validation.most_tokens(config, submit("does not", 73, None)) == config.longest_tokens


def test_a_second_large_request_waits_and_short_ones_are_served_beside_the_first() -> None:
    served, random = Served(config_of()), Random(1)
    for name in ("first", "second"):
        served.handle(submit(name, 150))
    served.handle(submit("short", 8))
    while "first" not in served.ends:
        served.move(random)
        held = {request.id for request in served.controller.requests() if not request.waits}
        assert not {"first", "second"} <= held
    assert "short" in served.ends
    served.finish(random)
    assert set(served.ends) == {"first", "second", "short"}


def test_a_step_takes_as_long_as_it_streams_and_its_chunk_may_fill_that_time() -> None:
    """Streaming takes longer than any step should. Still, chunks are not the smallest: their tokens cost nothing more."""
    quick, slow = Served(config_of(read_seconds=1e-9)), Served(config_of(read_seconds=0.1))
    for served in (quick, slow):
        served.handle(submit("long", 150))
        served.finish(Random(1))
    decode = next(step for step in slow.all_steps if step.entries and step.entries[0].extents[0].start == 150)
    assert decode.predicted_seconds == pytest.approx(24 * 0.1)
    assert max(step.predicted_seconds for step in quick.all_steps) < 0.01
    chunks = [step.entries[0].extents[0].count for step in slow.all_steps if step.entries]
    assert chunks[:9] == [16] * 9


def test_steps_that_stream_correct_the_time_of_streaming_alone() -> None:
    seconds = StreamSeconds(StreamingFigures(10, 1, 0.001))
    for _ in range(30):
        seconds.observe(10, 0.02)
    assert seconds.seconds(10) == pytest.approx(0.02, rel=0.1)
    assert seconds.seconds(0) == 0.0
    in_place = StreamSeconds(StreamingFigures(10, 1, 0.0))
    in_place.observe(10, 0.02)
    assert in_place.seconds(10) == 0.0


@settings(max_examples=25, deadline=None)
@given(lanes=st.sampled_from([1, 2]), seed=st.integers(0, 2**16))
def test_every_block_is_free_again_after_random_cancels(lanes: int, seed: int) -> None:
    served, random, names = Served(config_of(lanes)), Random(seed), list[str]()
    cancelled = set[str]()
    for number in range(12):
        names.append(f"r{number}")
        tokens = random.choice([3, 20, 60, 100, 150, 170 * lanes])
        served.handle(submit(names[-1], tokens, random.choice([1, 4, 9])))
        for _ in range(random.randrange(6)):
            if served.steps:
                served.move(random)
        if random.random() < 0.5:
            cancelled.add(random.choice(names))
            for name in cancelled - served.ends.keys():
                served.handle(Cancel(name))
    served.finish(random)
    assert set(names) <= cancelled | served.ends.keys(), "nobody waits for ever"
    assert served.controller.idle
    for lane, rank in enumerate(served.ranks):
        for ledger in (served.controller.pools.ledger(lane), rank.ledger):
            ledger.check()
            assert ledger.held_blocks == 0
            assert ledger.free_streamed_blocks == STREAMED


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"determinism": "batchInvariant"}, "set determinism to bestEffort"),
        (
            {"parallelism": {"kv": 2}, "scheduling": {"prefillStrategy": "striped"}},
            r"needs scheduling.prefillStrategy ownerCompute.*found striped",
        ),
        (
            {"scheduling": {"speculation": {"method": "predictionHead", "predictionHead": {"kind": "mtp"}}}},
            r"set speculation.method to .*found predictionHead",
        ),
        ({"kvCache": {"streaming": {"size": "0"}}}, "leave out what it is for"),
    ],
)
def test_what_streaming_does_not_go_with_is_refused(fields: dict[str, object], reason: str) -> None:
    model = {"name": "m", "source": {"path": "/m"}}
    with pytest.raises(ValueError, match=reason):
        MedhaReplicaSpec.model_validate({"model": model, "kvCache": {"streaming": {"size": "1Gi"}}} | fields)
