"""The controller of one to three lanes under any events, against ranks that replay and check all it commands.

Everything that a rank can see is checked when a step arrives: whose KV lies where, that each position is computed once,
that lanes which hold KV of an entry take part, that no decode is left behind, and that budgets hold. At the end every
request has ended once and nothing is left; a fresh controller decides the same from the recorded events.

Some lanes free KV before the windows of layers, in a pool that is just as large as ranks make it, or has windows of two sequences alone. Others have a host tier, in which the KV of requests that step aside is kept until they come back, and some requests step
aside for the deadlines of others.

Half of the examples do not end in peace: small requests, short and long ones that begin like those that wait, go on to
come whenever one of them ends, so that the pool never empties by itself, and all others have to end nevertheless.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from medha.api.replica import SchedulingSpec, ServiceClass
from medha.kv.blocks import BlockCopy, BlockLedger
from medha.kv.context_parallel import ContextParallel, PrefillStrategy, RingCosts
from medha.kv.lane_replay import LaneReplay
from medha.kv.pools import WindowPool
from medha.kv.window_tables import WindowTables, window_need
from medha.scheduler.controller import SHORT_STEP, ReplicaController
from medha.scheduler.growth import MOST_ASIDES
from medha.scheduler.replica_config import ReplicaConfig
from medha.topology import Topology
from medha.wire.messages import (
    Admit,
    Cancel,
    CompileGrammar,
    ControllerEvent,
    Done,
    DropGrammar,
    Emit,
    EntryFailed,
    Failed,
    GrammarReady,
    HostTierFigures,
    Refused,
    Sampling,
    StageFree,
    Step,
    StepEntry,
    SteppedAside,
    StepProfile,
    Submit,
    Tick,
)

from ..drafted import guessed, sampled
from ..replayed import assert_replayed

PROFILE = StepProfile(0.001, 0.0001, 1e-8, 0.0001)
STEP_SECONDS = 0.01
STREAM_STEP_SECONDS = 0.2
MOST_STREAM_MOVES = 20_000


@dataclass
class Sequence:
    """What ranks know of a sequence."""

    admit: Admit
    next_position: int
    length: int


@dataclass
class Moving:
    """A step in the pipeline, and the stage that it is in."""

    step: Step
    stage: int = 0


@dataclass
class Lanes:
    """The ranks of one epoch, all lanes together."""

    config: ReplicaConfig
    epoch: int
    random: Random
    failure_chance: float
    guesses: int = 0  # most that come with each Done for each sequence
    accepted: int = 0  # those of them that were verified and right
    steps: int = 0
    moving: list[Moving] = field(default_factory=list)
    sequences: dict[str, Sequence] = field(default_factory=dict)
    content: dict[tuple[int, int, int], tuple[str, int]] = field(default_factory=dict)
    on_host: dict[tuple[int, int, int], tuple[str, int]] = field(default_factory=dict)
    in_windows: dict[tuple[int, int, int], tuple[str, int]] = field(default_factory=dict)
    arriving: set[tuple[int, int]] = field(
        default_factory=set
    )  # lanes and blocks that are fetched beside the last step
    sources: dict[str, str] = field(default_factory=dict)  # of prompts that end in output: what they began as
    grammars: dict[str, set[int]] = field(
        default_factory=dict
    )  # those that ranks compile or keep: by which lanes they are not compiled yet

    def __post_init__(self) -> None:
        size = self.config.block_size_tokens
        self.size = size
        self.replicas = [self._replica(lane) for lane in range(self.config.topology.kv)]
        self.controller = ReplicaController(self.config, PROFILE, self.epoch)
        self.log: list[tuple[float, ControllerEvent]] = []
        self.commands: list[Any] = []

    def _replica(self, lane: int) -> LaneReplay:
        config = self.config
        ledger = BlockLedger(config.kv_blocks, self.size)
        windows: WindowTables | None = None
        if (pool := config.window_pool) is not None:
            windows = WindowTables(ledger, pool.blocks, pool.window_tokens)
        return LaneReplay(ledger, lane, config.host_tier.blocks if config.host_tier else 0, windows)

    def apply(self, step: Step, ended: set[str], *, is_last: bool) -> None:
        """Check a step and take it; `is_last`: no other step came behind it, of the same event."""
        assert step.step_id == self.steps
        assert step.epoch == self.epoch
        self.steps += 1
        busy = {entry.id for moving in self.moving for entry in moving.step.entries}
        for lane in step.lanes:
            here = [moving for moving in self.moving if lane in moving.step.lanes]
            if self.config.topology.stream == 1 and here:
                self._check_ahead(step, here, is_last=is_last)
                continue
            assert len(here) < self.config.topology.stream
            assert all(moving.stage > 0 for moving in here), f"stage 0 of lane {lane} is taken"
        for id_ in step.releases:
            assert id_ not in busy, f"{id_} is released while a step has it"
            del self.sequences[id_]
        for replica in self.replicas:
            replica.note_windows()
            replica.insert(step.inserts)
            for id_ in step.releases:
                replica.release(id_)
            replica.begin_step()
            for grow in step.grows:
                assert replica.grow(grow)
        copies = [(replica, copy) for admit in step.admits for replica, copy in self._admit(admit)]
        self.arriving.clear()
        for replica in self.replicas:
            replica.fetch(step.fetches)
        self._copy(copies)
        hashes = tuple(replica.state_hash() for replica in self.replicas)
        if len(hashes) == 1:
            assert step.state_hash in (None, hashes[0])
            assert step.state_hashes == ()
        else:
            assert step.state_hash is None
            assert step.state_hashes in ((), hashes)
        for replica in self.replicas:
            replica.ledger.check()
            self._copy([(replica, copy) for copy in replica.place_windows(step.entries)])
            if replica.windows is not None:
                replica.windows.check()
        self._check_decodes(step, busy, ended)
        self._check_budget(step)
        assert len({(entry.id, entry.lane) for entry in step.entries}) == len(step.entries)
        for id_ in dict.fromkeys(entry.id for entry in step.entries):
            self._compute(step, [entry for entry in step.entries if entry.id == id_], busy)
        self.moving.append(Moving(step))

    def _copy(self, copies: list[tuple[LaneReplay, BlockCopy]]) -> None:
        """Make the copies of a step: those between the pool and the host tier first."""
        for replica in self.replicas:
            lane = replica.lane
            for one in replica.take_tier_copies():
                for block in range(one.count):
                    if one.is_fetch:
                        self.arriving.add((lane, one.block + block))
                    for offset in range(self.size):
                        here, there = (lane, one.block + block, offset), (lane, one.slot + block, offset)
                        if one.is_fetch:
                            self.content[here] = self.on_host[there]
                        else:
                            self.on_host[there] = self.content[here]
        for replica, copy in copies:
            assert (replica.lane, copy.source) not in self.arriving, "it is not there yet"
            content = self.in_windows if copy.in_windows else self.content
            for offset in range(self.size):
                found = content.get((replica.lane, copy.source, offset))
                if found is not None:
                    content[replica.lane, copy.target, offset] = found

    def _admit(self, admit: Admit) -> list[tuple[LaneReplay, BlockCopy]]:
        assert admit.id not in self.sequences
        assert not admit.sampling.grammar or admit.sampling.grammar in self.grammars
        found: list[tuple[LaneReplay, BlockCopy]] = []
        for replica in self.replicas:
            copies = replica.admit(admit)
            assert copies is not None, f"no KV is left for {admit.id}"
            found += [(replica, copy) for copy in copies]
        there = admit.shared_tokens if admit.fork_of is not None else admit.cached_tokens
        assert there < admit.tokens, "the last token is computed anew, to draw from it"
        self.sequences[admit.id] = Sequence(admit, there, admit.tokens)
        return found

    def _check_ahead(self, step: Step, here: list[Moving], *, is_last: bool) -> None:
        """Of a step behind one whose tokens are still drawn: it has decodes alone, and nothing prefills."""
        (moving,) = here
        assert moving.step.lanes == step.lanes
        floor_seconds = self.config.service_classes["default"].ttft_floor_seconds
        assert moving.stage == 1 or moving.step.predicted_seconds <= SHORT_STEP * floor_seconds
        assert step.entries
        both = (*step.entries, *moving.step.entries)
        assert not any(entry.drafts for entry in both), "nobody knows how far a step with drafts comes"
        for entry in step.entries:
            sequence = self.sequences[entry.id]
            assert sequence.next_position >= sequence.admit.tokens
        if not is_last:
            return  # the controller has gone on since, so that it no longer shows what this step chose from
        for request in self.controller.requests():
            has_place = not request.waits or self.controller._admission.has_place(request)
            comes = any(one.id == request.id for one in step.fetches)  # its KV is there behind this step
            has_place = has_place and not request.stalls and not comes
            may_prefill = request.dispatched < request.submit.tokens and has_place
            assert request.ended or not may_prefill, f"{request.id} might have taken part"
            assert not request.waits or len(step.entries) == len(moving.step.entries), "a place is free then"

    def _check_decodes(self, step: Step, busy: set[str], ended: set[str]) -> None:
        named = {entry.id for entry in step.entries}
        for id_, sequence in self.sequences.items():
            shards = self.replicas[0].shards(id_)
            decodes = sequence.next_position >= sequence.admit.tokens
            if not decodes or id_ in busy or id_ in ended or shards.owner not in step.lanes:
                continue
            request = self.controller.find(id_)
            if request is not None and (request.steps_aside or request.waits):
                continue
            needed = shards.participants(sequence.next_position + 1)
            if self.config.context_parallel is not None:
                needed = shards.lanes  # those of a ring move together, whoever has a position of theirs
            if not set(needed) <= set(step.lanes):
                continue  # it has grown to another lane with this step, and goes on with the next one
            capacity = shards.tokens
            if len(shards.lanes) == 1:
                capacity = -(-capacity // self.size) * self.size
            assert id_ in named or sequence.length > capacity, f"the decode of {id_} is left behind"

    def _check_budget(self, step: Step) -> None:
        packed = self.controller.packed(step)
        for lane in step.lanes:
            prefills = [
                entry
                for entry in step.entries
                if entry.lane == lane
                and self.sequences[entry.id].next_position < self.sequences[entry.id].admit.tokens
            ]
            assert sum(entry.token_count for entry in prefills) <= self.config.scheduling.max_chunk_tokens
            longs = [
                entry
                for entry in prefills
                if self.sequences[entry.id].next_position >= self.config.long_threshold_tokens
            ]
            assert len(longs) <= 1, "two long prefills in one step of a lane"
        if len(packed.chunks) > 1:
            assert packed.predicted_seconds <= packed.budget_seconds * (1 + 1e-9)

    def _compute(self, step: Step, entries: list[StepEntry], busy: set[str]) -> None:
        """Write the KV of a request's positions, and look at that of all before."""
        entry = entries[0]
        sequence = self.sequences[entry.id]
        shards = self.replicas[0].shards(entry.id)
        positions = sorted(
            extent.start + index * extent.stride
            for one in entries
            for extent in one.extents
            for index in range(extent.count)
        )
        start, end = positions[0], positions[-1] + 1
        assert positions == list(range(start, end)), "each position once"
        assert start == sequence.next_position, f"{entry.id}: position {start} is not the next"
        known = end - len(entry.drafts)
        assert start < known <= sequence.length
        assert entry.samples == (known == sequence.length)
        if entry.samples and sequence.length == sequence.admit.tokens and sequence.admit.sampling.grammar:
            assert not self.grammars[sequence.admit.sampling.grammar], "its grammar is not compiled"
        assert entry.lane == shards.owner, "the owner has the last position, and draws"
        assert not any(one.samples for one in entries[1:])
        assert len({(one.strategy, one.shard_map_version) for one in entries}) == 1
        assert all(one.lane in shards.lanes for one in entries)
        if start >= sequence.admit.tokens and self.config.topology.stream > 1:
            assert entry.id not in busy, f"{entry.id}: two decode tokens in flight"
        for position in range(end):
            lane, local = self._locate(shards, position)
            assert lane in step.lanes, (
                f"{entry.id}: lane {lane} holds position {position}, but does not take part"
            )
            block = int(self.replicas[lane].ledger.table(entry.id)[local // self.size])
            place = (lane, block, local % self.size)
            key = self._key(sequence, position) if position < known else ("guess", position)
            if position >= start:
                self.content[place] = key
            assert self.content[place] == key, f"{entry.id}: position {position} holds {self.content[place]}"
            if (lane, block) in self.arriving:
                assert any(one.id == entry.id for one in step.fetches), "it waits for its own fetches alone"
        if self.config.window_pool is not None:
            self._compute_windows(sequence, start, end, known, self.config.window_pool.window_tokens)
        sequence.next_position = known
        sequence.length += entry.samples

    def _compute_windows(
        self, sequence: Sequence, start: int, end: int, known: int, window_tokens: int
    ) -> None:
        """Do the same in layers with a window, whose rows see no more than that."""
        for position in range(max(0, start - window_tokens + 1), end):
            place = self._window_place(sequence.admit.id, position)
            key = self._key(sequence, position) if position < known else ("guess", position)
            if position >= start:
                self.in_windows[place] = key
            found = self.in_windows.get(place)
            assert found == key, f"{sequence.admit.id}: the window holds {found} as position {position}"

    def _window_place(self, id_: str, position: int) -> tuple[int, int, int]:
        lane, local = self._locate(self.replicas[0].shards(id_), position)
        windows = self.replicas[lane].windows
        assert windows is not None
        table = windows.table(id_)
        assert local >= table.first_token, f"{id_}: the window of position {position} is freed"
        block, offset = divmod(local - table.first_token, self.size)
        return lane, int(table.blocks[block]), offset

    def _accept(self, id_: str, count: int) -> None:
        """Know that the next `count` guesses were right, so that their KV counts."""
        sequence, shards = self.sequences[id_], self.replicas[0].shards(id_)
        for position in range(sequence.next_position, sequence.next_position + count):
            lane, local = self._locate(shards, position)
            block = int(self.replicas[lane].ledger.table(id_)[local // self.size])
            self.content[lane, block, local % self.size] = self._key(sequence, position)
            if self.config.window_pool is not None:
                self.in_windows[self._window_place(id_, position)] = self._key(sequence, position)
        sequence.next_position += count
        sequence.length += count

    @staticmethod
    def _locate(shards: Any, position: int) -> tuple[int, int]:
        if len(shards.lanes) == 1:
            return shards.owner, position  # the rest of its last block counts
        located: tuple[int, int] = shards.locate(position)
        return located

    def _key(self, sequence: Sequence, position: int) -> tuple[str, int]:
        admit = sequence.admit
        prompt = self.sources.get(admit.prompt, admit.prompt)
        return (prompt.split("#")[0] if position < admit.prompt_length else admit.id, position)

    def movable(self) -> list[Moving]:
        """Steps that may leave their stage: the next one is free on all of their lanes."""
        found = []
        for index, moving in enumerate(self.moving):
            ahead = [other for other in self.moving[:index] if set(other.step.lanes) & set(moving.step.lanes)]
            if all(other.stage > moving.stage + 1 for other in ahead) or not ahead:
                found.append(moving)
        return found

    def outcome(self, step: Step) -> Done:
        samples, failures, drafts, hashes = [], [], [], []
        for entry in step.entries:
            if self.random.random() < self.failure_chance:
                if entry.lane == self.replicas[0].shards(entry.id).owner:
                    failures.append(EntryFailed(entry.id, "out_of_memory"))
            elif entry.samples:
                found = sampled(entry, lambda: self.random.random() < 0.05)
                samples += found
                last = entry.extents[-1]
                known = last.start + (last.count - 1) * last.stride + 1 - len(entry.drafts)
                for length in range(known + 1, known + 1 + len(found)):
                    if length % self.size == 0:
                        name = int.from_bytes(entry.id.encode())
                        hashes.append((entry.id, f"{name % 2**64:016x}{length // self.size - 1:016x}"))
                self._accept(entry.id, len(found) - 1)
                if self.guesses:
                    drafts.append((entry.id, guessed(self.random, found[-1].token, 0, self.guesses, 0.8)))
        self.accepted += len(samples) - len({sample.id for sample in samples})
        return Done(
            step.step_id,
            tuple(samples),
            tuple(failures),
            step.predicted_seconds,
            step.lanes,
            drafts=tuple(drafts),
            block_hashes=tuple(hashes) if self.config.host_tier or self.config.window_pool else (),
        )


class ControllerMachine(RuleBasedStateMachine):
    """Arrivals, cancels, forks, stages and steps that end, and lost ranks, in any order."""

    @initialize(
        lanes=st.integers(1, 3),
        stages=st.integers(1, 4),
        policy=st.sampled_from(["fcfs", "edf", "lrs", "srpt", "lars", "guarded"]),
        kv_blocks=st.integers(12, 40),
        block_size=st.sampled_from([1, 4]),
        tokens_per_lane=st.sampled_from([8, 32, 1000]),
        max_chunk=st.sampled_from([4, 16, 64]),
        max_running=st.sampled_from([3, 10, 100]),
        failure_chance=st.sampled_from([0.0, 0.02]),
        headroom=st.sampled_from([0.0, 0.2]),
        long_threshold=st.sampled_from([8, 30]),
        prefill=st.sampled_from([None, None, "passKv", "passQ", "auto", "striped"]),
        seed=st.integers(0, 1000),
        stream_goes_on=st.booleans(),
        floor_seconds=st.sampled_from([2.0, 2.0, 0.001]),
        guesses=st.sampled_from([0, 2, 6]),
        host_blocks=st.sampled_from([0, 0, 6, 100]),
        max_swaps=st.integers(0, 3),
        step_seconds=st.sampled_from([0.5, 0.05]),
        tpot_seconds=st.sampled_from([0.05, 0.5]),
        window=st.sampled_from([0, 1, 5, 30]),
        windows=st.sampled_from([2, 100]),
    )
    def start(
        self,
        lanes: int,
        stages: int,
        policy: str,
        kv_blocks: int,
        block_size: int,
        tokens_per_lane: int,
        max_chunk: int,
        max_running: int,
        failure_chance: float,
        headroom: float,
        long_threshold: int,
        prefill: PrefillStrategy | None,
        seed: int,
        stream_goes_on: bool,
        floor_seconds: float,
        guesses: int,
        host_blocks: int,
        max_swaps: int,
        step_seconds: float,
        tpot_seconds: float,
        window: int = 0,
        windows: int = 100,
    ) -> None:
        scheduling = {
            "policy": policy,
            "max_chunk_tokens": max_chunk,
            "min_chunk_tokens": min(4, max_chunk),
            "max_running": max_running,
            "short_headroom": headroom,
            "max_running_long": 2,
            "speculation": {"method": "promptLookup" if guesses else "none"},
            "max_swaps": max_swaps,
            "max_step_seconds": step_seconds,
        }
        fetch_seconds = 1e-6 if seed % 2 else 3e-4  # so that a prefix comes with one step, or with several
        self.config = ReplicaConfig(
            topology=Topology(stream=stages, kv=lanes),
            scheduling=SchedulingSpec.model_validate(scheduling),
            service_classes={
                "default": ServiceClass(
                    name="default",
                    default_output_tokens=6,
                    ttft_floor_seconds=floor_seconds,
                    tpot_target_seconds=tpot_seconds,
                )
            },
            default_class="default",
            max_model_len=200,
            block_size_tokens=block_size,
            kv_blocks=kv_blocks,
            long_threshold_tokens=long_threshold,
            tokens_per_lane=tokens_per_lane,
            context_parallel=ContextParallel(prefill, RingCosts(4, 1)) if prefill and lanes > 1 else None,
            host_tier=HostTierFigures(host_blocks, 1, fetch_seconds, 1e-6) if host_blocks else None,
        )
        if window and not host_blocks:
            need = window_need(
                window, block_size_tokens=block_size, max_running=max_running, max_chunk_tokens=max_chunk,
                max_model_len=200, stages=stages, lanes=lanes,
            )  # fmt: skip
            pool = WindowPool(need.of(min(windows, max_running)), window)
            self.config = replace(self.config, window_pool=pool)
        self.now = 0.0
        self.random = Random(seed)
        self.lanes = Lanes(self.config, 0, self.random, failure_chance, guesses)
        self.open: dict[str, Submit] = {}
        self.emitted: dict[str, int] = {}
        self.endings: dict[str, int] = {}
        self.asides: dict[str, int] = {}  # in this epoch
        self.submitted = 0
        self.stream_goes_on = stream_goes_on and policy != "srpt"  # which lets large ones starve by its order

    # --- events -----------------------------------------------------------------------------------------

    @rule(
        tokens=st.integers(1, 100),
        max_tokens=st.one_of(st.none(), st.integers(1, 12)),
        family=st.integers(0, 3),
        samples=st.sampled_from([1, 1, 1, 2, 4, 9]),
        age=st.sampled_from([0.0, 5.0]),
        grammar=st.sampled_from(["", "", "one", "two"]),
    )
    def arrive(
        self, tokens: int, max_tokens: int | None, family: int, samples: int, age: float, grammar: str
    ) -> None:
        """Prompts of one family begin alike."""
        self.submit(tokens, max_tokens, family, samples, age, grammar)

    def submit(
        self,
        tokens: int,
        max_tokens: int | None,
        family: int,
        samples: int = 1,
        age: float = 0.0,
        grammar: str = "",
    ) -> None:
        self.submitted += 1
        for index in range(samples):
            id_ = f"r{self.submitted}.{index}"
            hashes = "".join(
                f"{family:016x}{block:016x}" for block in range(tokens // self.config.block_size_tokens)
            )
            submit = Submit(
                id=id_,
                prompt=f"family {family}#{self.submitted}",
                tokens=tokens,
                prompt_length=tokens,
                seed=1,
                sample_index=index,
                age_seconds=age,
                sampling=Sampling(max_tokens=max_tokens, grammar=grammar),
                block_hashes=hashes,
                owner="abc"[family % 3],
            )
            self.open[id_] = submit
            self.emitted[id_] = 0
            self.handle(submit)

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 1000))
    def cancel(self, which: int) -> None:
        id_ = list(self.open)[which % len(self.open)]
        self.end(id_)
        self.handle(Cancel(id_))

    @precondition(lambda self: self.lanes.moving)
    @rule(which=st.integers(0, 1000), times=st.integers(1, 8), late=st.booleans())
    def advance(self, which: int, times: int, late: bool) -> None:
        for _ in range(times):
            self.move(which, late=late)

    @rule(seconds=st.sampled_from([0.1, 3.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        due = self.lanes.controller.next_due
        if due is not None and due <= self.now:
            self.handle(Tick())

    @precondition(lambda self: any(self.lanes.grammars.values()))
    @rule(which=st.integers(0, 1000), fault=st.sampled_from(["", "", "no token ends a text"]))
    def compiles(self, which: int, fault: str) -> None:
        """A lane's rank has compiled a grammar, or cannot."""
        left = [(name, lane) for name, lanes in self.lanes.grammars.items() for lane in sorted(lanes)]
        name, lane = left[which % len(left)]
        if not fault:
            self.lanes.grammars[name].remove(lane)
        self.handle(GrammarReady(name, lane, fault, self.lanes.epoch))

    @rule()
    def a_rank_is_lost(self) -> None:
        """All ranks meet again under a new epoch, and the router submits again what is open."""
        self.check_replay()
        lanes = self.lanes
        self.lanes = Lanes(self.config, lanes.epoch + 1, self.random, lanes.failure_chance, lanes.guesses)
        self.asides = {}
        for id_, submit in list(self.open.items()):
            drawn = self.emitted[id_]
            again = replace(submit, tokens=submit.prompt_length + drawn, age_seconds=1.0)
            if drawn:  # its output is part of the prompt now, which nobody else has
                again = replace(again, prompt=f"{id_} in {self.lanes.epoch}", block_hashes="")
            self.handle(again)

    @invariant()
    def host_tiers_agree_with_what_they_keep(self) -> None:
        if hasattr(self, "lanes"):
            for tier in self.lanes.controller.pools.tiers:
                tier.check()

    # --- what drives it ---------------------------------------------------------------------------------

    def move(self, which: int = 0, *, late: bool = False) -> bool:
        """One step leaves its stage; `late`: the news that stage 0 is free come behind the step's Done."""
        movable = self.lanes.movable()
        if not movable:
            return False
        moving = movable[which % len(movable)]
        self.now += STEP_SECONDS
        step = moving.step
        if moving.stage == 0 and not late:
            self.lanes_left(moving)
            self.handle(StageFree(step.step_id, 0, step.lanes))
            return True
        if moving.stage + 1 < self.config.topology.stream:
            self.lanes_left(moving)
            return True
        self.lanes.moving.remove(moving)
        self.handle(self.lanes.outcome(step))
        if late:
            self.handle(StageFree(step.step_id, 0, step.lanes))
        return True

    def lanes_left(self, moving: Moving) -> None:
        moving.stage += 1

    def handle(self, event: ControllerEvent) -> None:
        lanes = self.lanes
        lanes.log.append((self.now, event))
        commands = lanes.controller.handle(event, self.now)
        lanes.commands.append(commands)
        last_step = max(
            (index for index, each in enumerate(commands) if isinstance(each, Step)), default=None
        )
        for index, command in enumerate(commands):
            match command:
                case Step():
                    lanes.apply(command, ended=set(self.endings), is_last=index == last_step)
                case Emit():
                    assert command.id in self.open, f"{command.id} has ended"
                    self.emitted[command.id] += len(command.tokens)
                    if command.finish_reason is not None:
                        self.end(command.id)
                case Refused():
                    assert command.reason in ("too_long", "capacity")
                    self.end(command.id)
                case Failed():
                    self.end(command.id)
                case SteppedAside():
                    self.step_aside(command)
                case CompileGrammar():
                    assert command.name not in lanes.grammars
                    lanes.grammars[command.name] = set(range(self.config.topology.kv))
                case DropGrammar():
                    del lanes.grammars[command.name]
        if not lanes.controller.pools.has_changes:
            assert_replayed(lanes.controller.pools, lanes.replicas)

    def step_aside(self, aside: SteppedAside) -> None:
        assert aside.tokens == self.open[aside.id].prompt_length + self.emitted[aside.id]
        self.lanes.sources[aside.prompt] = self.lanes.sources.get(aside.source, aside.source)
        self.asides[aside.id] = self.asides.get(aside.id, 0) + 1
        assert self.asides[aside.id] <= MOST_ASIDES

    def end(self, id_: str) -> None:
        del self.open[id_]
        assert self.endings.setdefault(id_, 0) == 0
        self.endings[id_] += 1

    def check_replay(self) -> None:
        fresh = ReplicaController(self.config, PROFILE, self.lanes.epoch)
        assert [fresh.handle(event, now) for now, event in self.lanes.log] == self.lanes.commands

    def stream(self) -> None:
        """Let small requests come for ever, until those that are open now, and some large ones, have ended."""
        random, pool_tokens = Random(self.submitted), self.config.pool_tokens
        # What the small ones want of the pool: less than all of it, so that some is free at any time, or more.
        fullness, size = random.choice([0.7, 0.7, 1.5]), max(pool_tokens // random.randint(5, 12), 2)
        alike = random.random() < 0.5

        def arrive(tokens: int, max_tokens: int, family: int) -> None:
            self.submit(max(tokens, 1), max_tokens, family)

        def arrive_small() -> int:
            max_tokens = random.randint(1, min(12, size - 1))
            arrive(size - max_tokens, max_tokens, random.randint(3, 8) if alike else self.submitted + 100)
            return size

        held = int(pool_tokens * random.uniform(0.4, 0.8))  # by one on whom another counts
        arrive(held, 4, family=9)
        for _ in range(4 * self.config.topology.stream):
            self.move()
        queued = 0
        while queued < pool_tokens:
            queued += arrive_small()
        if random.random() < 0.5:  # not both: each would make room for the other when it ends
            arrive(held + random.randint(1, 8), 4, family=9)
        else:
            arrive(int(pool_tokens * random.uniform(0.4, 1.0)) - 6, random.randint(1, 6), family=10)
        others = set(self.open)
        for _ in range(MOST_STREAM_MOVES):
            if not others & set(self.open):
                return
            small = [submit for id_, submit in self.open.items() if id_ not in others]
            wanted = sum(submit.tokens + (submit.sampling.max_tokens or 0) for submit in small)
            if wanted < fullness * pool_tokens:
                arrive_small()
            self.now += STREAM_STEP_SECONDS
            self.move(random.randint(0, 10))
        raise AssertionError(f"{sorted(others & set(self.open))} starve")

    def teardown(self) -> None:
        if not hasattr(self, "lanes"):
            return
        while any(self.lanes.grammars.values()):
            self.compiles(0, "")
        if self.stream_goes_on:
            self.stream()
        for _ in range(50_000):
            if not self.move():
                break
        else:
            raise AssertionError("still busy")
        assert not self.open, f"{list(self.open)} have not ended"
        controller = self.lanes.controller
        assert controller.idle
        assert not self.lanes.sequences
        assert controller.pools.held_blocks == 0
        for lane in range(controller.pools.lanes):
            windows = controller.pools.windows(lane)
            assert windows is None or windows.held_blocks == 0
        assert controller.pools.swapped == 0
        for tier in controller.pools.tiers:
            tier.check()
            assert tier.swapped_blocks == tier.wanted_blocks == 0
        assert controller.load().pending_prefill_seconds == 0
        assert all(lane.decodes.targets is None and lane.quarantined == 0 for lane in controller._lanes)
        assert not controller._sharing.prompts
        assert controller.next_due is None
        self.check_replay()


ControllerMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)
TestController = ControllerMachine.TestCase
