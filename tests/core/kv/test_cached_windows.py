"""Cached prefixes where KV before windows is freed: a controller's pools, and the tables of ranks that replay its steps.

Every slot of the ranks' window blocks remembers the tokens that led to what was written there. So a row that reads
another prompt's KV, or a block that has been given away, is noticed whatever the tables say.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medha.api.replica import SchedulingSpec, ServiceClass
from medha.errors import LedgerMismatch
from medha.kv.blocks import BlockLedger, as_blocks
from medha.kv.context_parallel import ContextParallel, PrefillStrategy, RingCosts
from medha.kv.lane_replay import LaneReplay
from medha.kv.pools import KvPools, Placed, WindowPool
from medha.kv.prefix_cache import PrefixHasher, hash_at
from medha.kv.window_tables import WindowTables, window_need
from medha.scheduler.controller import ReplicaController
from medha.scheduler.replica_config import ReplicaConfig
from medha.topology import Topology
from medha.wire.messages import (
    Admit,
    ControllerEvent,
    Done,
    Extent,
    Sample,
    Sampling,
    Step,
    StepEntry,
    StepProfile,
    Submit,
)

MOST_TOKENS = 160


@dataclass
class Running:
    ids: list[int]
    prompt_tokens: int
    outputs: int
    planned: int  # tokens that all steps sent bring it to, without drafts
    computed: int
    in_flight: int = 0
    drafted: int = 0  # of its last step, if that has not ended


@dataclass
class Replica:
    """A controller's pools and the tables of a rank of each lane, with steps of random requests."""

    random: Random
    size: int
    window: int
    kv_blocks: int
    stages: int = 1
    max_running: int = 5
    max_chunk: int = 40
    spare_blocks: int = 0  # blocks of windows beyond those that running sequences may need
    lanes: int = 1
    tokens_per_lane: int = MOST_TOKENS
    striped: bool = False
    running: dict[str, Running] = field(default_factory=dict)
    in_flight: deque[list[tuple[str, int]]] = field(default_factory=deque)
    content: dict[tuple[int, int, int], tuple[int, ...]] = field(
        default_factory=dict
    )  # by lane, block, offset
    admits: list[Admit] = field(default_factory=list)
    names: int = 0
    hits: int = 0
    cut_hits: int = 0  # of which a part of the cached prefix had no window
    forks: int = 0
    spread_hits: int = 0

    def __post_init__(self) -> None:
        blocks = self.spare_blocks + window_need(
            self.window, block_size_tokens=self.size, max_running=self.max_running,
            max_chunk_tokens=self.max_chunk, max_model_len=MOST_TOKENS, stages=self.stages,
            lanes=self.lanes,
        ).of(self.max_running)  # fmt: skip
        self.pools = KvPools(
            lanes=self.lanes, kv_blocks=self.kv_blocks, block_size_tokens=self.size,
            tokens_per_lane=self.tokens_per_lane, stripes_prompts=self.striped,
            window_pool=WindowPool(blocks, self.window),
        )  # fmt: skip
        self.hasher = PrefixHasher(self.size, b"secret")
        self.ranks = []
        for lane in range(self.lanes):
            ledger = BlockLedger(self.kv_blocks, self.size)
            windows = WindowTables(ledger, blocks, self.window)
            self.ranks.append(LaneReplay(ledger, lane, windows=windows))

    def windows(self, lane: int = 0) -> WindowTables:
        windows = self.ranks[lane].windows
        assert windows is not None
        return windows

    # --- the controller -------------------------------------------------------------------------------

    def step(self) -> None:
        """Let a step end if as many are in flight as there are stages, end some sequences, and send the next step."""
        if len(self.in_flight) == self.stages:
            self.finish_step()
        for name in [name for name, one in self.running.items() if not one.in_flight]:
            one = self.running[name]
            if one.computed >= one.prompt_tokens + one.outputs or self.random.random() < 0.05:
                self.end(name)
        while len(self.running) < self.max_running and self.random.random() < 0.6:
            if not self.admit():
                break
        self.send()

    def send(self) -> None:
        entries = self.entries()
        step = Step(
            step_id=0, epoch=0, entries=tuple(entries), admits=tuple(self.admits),
            inserts=self.pools.take_inserts(), releases=self.pools.take_releases(),
            state_hashes=self.pools.state_hashes(),
        )  # fmt: skip
        self.admits = []
        self.pools.sent(step)
        stops = {entry.id: entry.extents[-1].last + 1 for entry in entries}  # the last entry of each
        self.in_flight.append(list(stops.items()))
        self.replay(step)

    def finish_step(self) -> None:
        for name, stop in self.in_flight.popleft():
            one = self.running[name]
            one.in_flight -= 1
            accepted = self.random.randint(0, one.drafted)
            one.computed = max(one.computed, stop - one.drafted + accepted)
            one.planned = max(one.planned, one.computed)
            one.drafted = 0
            self.pools.computed(name, min(one.computed, one.prompt_tokens))
            filled = one.prompt_tokens // self.size + len(self.pools._held[name].outputs)
            hashes = self.hasher.hashes(np.array(one.ids[: one.computed], dtype=np.int32))
            for block in range(filled, one.computed // self.size):
                self.pools.extend(name, hash_at(hashes, block), (block + 1) * self.size)

    def end(self, name: str) -> None:
        one = self.running.pop(name)
        self.pools.release(name, one.computed)

    def admit(self) -> bool:
        name, random = f"s{self.names}", self.random
        self.names += 1
        parents = [
            name for name, one in self.running.items() if one.planned == one.computed == one.prompt_tokens
        ]
        outputs = random.randint(1, 30)
        if parents and random.random() < 0.5:
            parent = self.running[parents[0]]
            prompt = parent.ids[: parent.prompt_tokens]
            shared = len(prompt) - 1
            placed: Placed | None = self.pools.fork(parents[0], name, shared, len(prompt) + outputs)
            if placed is None:
                return False
            self.forks += shared > 0
        else:
            family = Random(random.randint(0, 2)).choices(range(9), k=100)
            prompt = family[: random.randint(0, 100)] + random.choices(range(9), k=random.randint(1, 20))
            hashes = self.hasher.hashes(np.array(prompt, dtype=np.int32))
            stop = min((len(prompt) - 1) // self.size, len(prompt) // self.size)
            match = self.pools._lanes[0].cache.match(hashes, stop)
            wanted = self.longest(prompt, as_blocks(match.runs).tolist())
            placed = self.pools.admit(name, len(prompt), len(prompt) + outputs, block_hashes=hashes)
            if placed is None:
                return False
            found = placed.cached_tokens // self.size
            assert found == wanted or self.lanes > 1
            self.hits += found > 0
            self.cut_hits += 0 < found < match.blocks
            self.spread_hits += len(placed.prefixes) > 1
            shared = 0
        self.enter(name, prompt, outputs, placed, parents[0] if shared else None)
        return True

    def enter(
        self, name: str, prompt: list[int], outputs: int, placed: Placed, parent: str | None = None
    ) -> None:
        shared = len(prompt) - 1 if parent else 0
        there = shared or placed.cached_tokens
        ids = prompt + self.random.choices(range(9), k=outputs + 8)
        self.running[name] = Running(ids, len(prompt), outputs, there, there)
        self.admits.append(
            Admit(
                id=name,
                prompt=name,
                tokens=len(prompt),
                prompt_length=len(prompt),
                seed=0,
                sampling=Sampling(),
                reserved_tokens=placed.shards.tokens,
                fork_of=parent,
                shared_tokens=shared,
                cached_tokens=placed.cached_tokens,
                prefixes=placed.prefixes,
                evictions=placed.evictions,
                segments=placed.segments,
                stripings=placed.stripings,
            )
        )

    def longest(self, prompt: list[int], keys: list[int]) -> int:
        """Return the longest prefix in blocks, of those in `keys`, whose window the rank really has."""

        def is_there(position: int) -> bool:
            block = int(self.windows()._window_of[keys[position // self.size]])
            found = self.content.get((0, block, position % self.size))
            return block >= 0 and found == tuple(prompt[: position + 1])

        for blocks in range(len(keys), 0, -1):
            stop = blocks * self.size
            if all(is_there(position) for position in range(max(stop - self.window + 1, 0), stop)):
                return blocks
        return 0

    def entries(self) -> list[StepEntry]:
        entries, left = [], self.max_chunk * self.lanes
        drafts_left = self.max_running - len(self.running)
        for name, one in self.running.items():
            if self.random.random() < 0.2 or one.drafted:
                continue
            drafts = 0
            if one.planned < one.prompt_tokens:
                count = min(self.random.randint(0, left), one.prompt_tokens - one.planned)
                left -= count
            elif one.planned < one.prompt_tokens + one.outputs:
                room = one.prompt_tokens + one.outputs - one.planned - 1
                if not one.in_flight:
                    drafts = self.random.randint(0, min(3, drafts_left, room))
                drafts_left -= drafts
                count = 1 + drafts
            else:
                continue
            if count:
                owner = self.pools.shards(name).owner
                parts = [Extent(one.planned, count)] if drafts else self.cut(Extent(one.planned, count))
                entries += [
                    StepEntry(name, owner, (part,), samples=False, drafts=(0,) * drafts) for part in parts
                ]
                one.planned += count - drafts
                one.drafted = drafts
                one.in_flight += 1
        return entries

    def cut(self, extent: Extent) -> list[Extent]:
        """Return an extent in one part, or in two that different lanes compute."""
        first = self.random.randint(0, extent.count - 1) if self.lanes > 1 else 0
        if first == 0 or self.random.random() < 0.5:
            return [extent]
        return [Extent(extent.start, first), Extent(extent.start + first, extent.count - first)]

    # --- the ranks -------------------------------------------------------------------------------------

    def replay(self, step: Step) -> None:
        for lane, rank in enumerate(self.ranks):
            windows = self.windows(lane)
            rank.note_windows()
            rank.insert(step.inserts)
            for name in step.releases:
                rank.release(name)
            rank.begin_step()
            for admit in step.admits:
                assert rank.admit(admit) is not None
            assert rank.state_hash() == step.state_hashes[lane]
            copies = rank.place_windows(step.entries)
            windows.check()
            controllers = self.pools.windows(lane)
            assert controllers is not None
            assert controllers.digest() == windows.digest()
            for copy in copies:
                assert copy.in_windows
                for offset in range(self.size):
                    self.content.pop((lane, copy.target, offset), None)
                    if (lane, copy.source, offset) in self.content:
                        self.content[lane, copy.target, offset] = self.content[lane, copy.source, offset]
        rows = [
            (entry.id, position)
            for entry in step.entries
            for position in range(entry.extents[0].start, entry.extents[0].last + 1)
        ]
        tables = {
            (lane, name): self.windows(lane).table(name)
            for name, _ in rows
            for lane in self.pools.shards(name).lanes
        }

        def slot(name: str, position: int) -> tuple[int, int, int]:
            lane, local = self.pools.shards(name).locate(position)
            first_token, blocks = tables[lane, name]
            assert local >= first_token
            block, offset = divmod(local - first_token, self.size)
            return lane, int(blocks[block]), offset

        for name, position in rows:  # every layer writes the rows of all sequences, then attends
            self.content[slot(name, position)] = tuple(self.running[name].ids[: position + 1])
        for name, position in rows:
            for seen in range(max(0, position - self.window + 1), position + 1):
                assert self.content[slot(name, seen)] == tuple(self.running[name].ids[: seen + 1])


@given(
    seed=st.integers(0, 10**6),
    size=st.sampled_from([1, 2, 4, 8]),
    window=st.sampled_from([1, 2, 3, 7, 8, 9, 20, 64, 150]),
    kv_blocks=st.sampled_from([30, 100, 600]),
    stages=st.integers(1, 3),
    spare_blocks=st.sampled_from([0, 5, 200]),
)
@settings(max_examples=50, deadline=None)
def test_every_row_finds_its_window_after_hits_forks_and_evictions(
    seed: int, size: int, window: int, kv_blocks: int, stages: int, spare_blocks: int
) -> None:
    replica = Replica(
        Random(seed), size, window, max(kv_blocks, -(-MOST_TOKENS // size)), stages, spare_blocks=spare_blocks
    )
    for _ in range(60):
        replica.step()
    while replica.in_flight:
        replica.finish_step()
    for name in list(replica.running):
        replica.end(name)
    replica.send()
    assert replica.windows().held_blocks == replica.pools.held_blocks == 0


def test_prefixes_are_hit_in_full_in_part_and_forked() -> None:
    """The random requests of the test above come to all of these cases."""
    replica = Replica(Random(1), 4, 9, 100)
    for _ in range(400):
        replica.step()
    assert replica.hits > 20
    assert replica.cut_hits > 5
    assert replica.forks > 5


@given(
    seed=st.integers(0, 10**6),
    size=st.sampled_from([1, 2, 4]),
    window=st.sampled_from([1, 3, 8, 9, 20, 64, 150]),
    kv_blocks=st.sampled_from([60, 200]),
    lanes=st.integers(2, 4),
    lane_blocks=st.sampled_from([4, 7, 15]),
    striped=st.booleans(),
    stages=st.integers(1, 2),
)
@settings(max_examples=40, deadline=None)
def test_every_row_finds_its_window_on_the_lanes_of_its_request(
    seed: int,
    size: int,
    window: int,
    kv_blocks: int,
    lanes: int,
    lane_blocks: int,
    striped: bool,
    stages: int,
) -> None:
    replica = Replica(
        Random(seed), size, window, kv_blocks, stages, lanes=lanes, tokens_per_lane=lane_blocks * size,
        striped=striped,
    )  # fmt: skip
    for _ in range(50):
        replica.step()
    while replica.in_flight:
        replica.finish_step()
    for name in list(replica.running):
        replica.end(name)
    replica.send()
    assert [replica.windows(lane).held_blocks for lane in range(lanes)] == [0] * lanes


@pytest.mark.parametrize("striped", [False, True])
def test_prefixes_on_several_lanes_are_hit(striped: bool) -> None:
    replica = Replica(Random(1), 4, 9, 100, lanes=2, tokens_per_lane=20, striped=striped)
    for _ in range(300):
        replica.step()
    assert replica.spread_hits > 5


@pytest.mark.parametrize(("strategy", "requests"), [("passKv", 1), (None, 4)])
def test_a_lane_keeps_the_chunks_that_all_lanes_compute(
    strategy: PrefillStrategy | None, requests: int
) -> None:
    """Lanes compute 64 positions each in a step, of one prompt or of several, and one of them may be to keep them all."""
    scheduling = SchedulingSpec(
        max_chunk_tokens=64, min_chunk_tokens=4, max_running=requests, max_running_long=requests
    )
    blocks = window_need(
        1, block_size_tokens=4, max_running=requests, max_chunk_tokens=64, max_model_len=1000, lanes=4
    ).of(requests)
    config = ReplicaConfig(
        topology=Topology(kv=4), scheduling=scheduling, service_classes={"default": ServiceClass(name="default")},
        default_class="default", max_model_len=1000, block_size_tokens=4, kv_blocks=1000,
        long_threshold_tokens=1000, tokens_per_lane=300, window_pool=WindowPool(blocks, 1),
        context_parallel=None if strategy is None else ContextParallel(strategy, RingCosts(8, 2)),
    )  # fmt: skip
    controller = ReplicaController(config, StepProfile(0.001, 0.0001, 1e-8, 0.0001))
    events: deque[ControllerEvent] = deque(
        Submit(f"r{number}", f"p{number}", 900, 900, seed=1, sampling=Sampling(max_tokens=1))
        for number in range(requests)
    )
    most_blocks, now = 0, 0.0
    while events:
        now += 0.01
        for command in controller.handle(events.popleft(), now):
            if isinstance(command, Step):
                windows = [controller.pools.windows(lane) for lane in range(4)]
                most_blocks = max(most_blocks, *(one.held_blocks for one in windows if one is not None))
                samples = tuple(Sample(entry.id, 7) for entry in command.entries if entry.samples)
                events.append(Done(command.step_id, samples, (), 0.001, command.lanes))
    assert controller.idle
    assert most_blocks > 64 // 4


def ask(replica: Replica, name: str, prompt: list[int]) -> Placed:
    """Return what a replica gives to a request."""
    hashes = replica.hasher.hashes(np.array(prompt, dtype=np.int32))
    placed = replica.pools.admit(name, len(prompt), len(prompt) + 4, block_hashes=hashes)
    assert placed is not None
    return placed


def converse(replica: Replica, turns: int, tokens: int) -> list[int]:
    """Have a conversation whose turns add `tokens` tokens each, with outputs of four; return each turn's cached tokens."""
    text: list[int] = []
    found = []
    for turn in range(turns):
        text += Random(turn).choices(range(9), k=tokens)
        placed, name = ask(replica, f"turn{turn}", text), f"turn{turn}"
        found.append(placed.cached_tokens)
        replica.enter(name, text, 4, placed)
        one = replica.running[name]
        while one.computed < one.prompt_tokens + one.outputs:
            replica.send()
            replica.finish_step()
        text = one.ids[: one.computed]
        replica.end(name)
    return found


def test_each_turn_of_a_conversation_finds_the_one_before_and_keeps_no_more_than_windows() -> None:
    """All whole blocks of the turn before are found, with its output."""
    replica = Replica(Random(0), 4, 9, 1000, max_running=1)
    assert converse(replica, 3, 40) == [0, 44, 88]
    assert replica.windows().held_blocks <= 9 // 4 + 2


def test_a_rank_that_lacks_a_window_disagrees_with_its_controller() -> None:
    replica = Replica(Random(0), 4, 9, 1000, max_running=1)
    converse(replica, 1, 40)
    replica.send()
    prompt = Random(0).choices(range(9), k=40)
    replica.enter("again", prompt, 4, ask(replica, "again", prompt))
    [admit] = replica.admits
    assert admit.cached_tokens == 36
    replica.windows().forget([(0, 8)])
    with pytest.raises(LedgerMismatch, match="again shares 9 cached blocks, and their last window is not"):
        replica.ranks[0].admit(admit)
