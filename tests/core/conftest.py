"""A deterministic replica without a model: it replays what the controller commands, and checks every guarantee.

Test modules cannot import each other under pytest's importlib mode, so these helpers come as fixtures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings

from medha.api.replica import SchedulingSpec, ServiceClass
from medha.kv.blocks import BlockLedger
from medha.kv.lane_replay import LaneReplay
from medha.kv.prefix_cache import HASH_CHARACTERS, PrefixHasher
from medha.scheduler.controller import ReplicaController
from medha.scheduler.replica_config import ReplicaConfig
from medha.topology import Topology
from medha.wire.messages import (
    Admit,
    Cancel,
    CompileGrammar,
    ControllerCommand,
    ControllerEvent,
    Done,
    DraftCosts,
    DropGrammar,
    Emit,
    EntryFailed,
    Extent,
    Failed,
    GrammarReady,
    HostTierFigures,
    PromptLogprobs,
    Refused,
    Sampling,
    StageFree,
    Step,
    StepEntry,
    SteppedAside,
    StepProfile,
    Submit,
)

from .drafted import guessed, sampled

settings.register_profile("core", max_examples=60, deadline=None, derandomize=True, database=None)
settings.load_profile("core")

PROFILE = StepProfile(
    step_seconds=0.001,
    linear_seconds_per_token=0.0001,
    attention_seconds_per_pair=1e-8,
    sequence_seconds=0.0001,
)


def make_config(
    *,
    stages: int = 1,
    kv_blocks: int = 64,
    block_size_tokens: int = 4,
    max_model_len: int = 1_000_000,
    long_threshold_tokens: int = 1_000_000,
    default_output_tokens: int = 4096,
    ttft_floor_seconds: float = 2.0,
    draft_costs: DraftCosts | None = None,
    host_tier: HostTierFigures | None = None,
    tpot_target_seconds: float = 0.05,
    **scheduling: object,
) -> ReplicaConfig:
    service_class = ServiceClass(
        name="default",
        default_output_tokens=default_output_tokens,
        ttft_floor_seconds=ttft_floor_seconds,
        tpot_target_seconds=tpot_target_seconds,
    )
    return ReplicaConfig(
        topology=Topology(stream=stages),
        scheduling=SchedulingSpec.model_validate(scheduling),
        service_classes={"default": service_class},
        default_class="default",
        max_model_len=max_model_len,
        block_size_tokens=block_size_tokens,
        kv_blocks=kv_blocks,
        long_threshold_tokens=long_threshold_tokens,
        draft_costs=draft_costs,
        host_tier=host_tier,
    )


def make_submit(id_: str, tokens: int, max_tokens: int | None = None, **fields: object) -> Submit:
    submit = Submit(id=id_, prompt=f"prompt of {id_}", tokens=tokens, prompt_length=tokens, seed=1)
    return replace(submit, sampling=Sampling(max_tokens=max_tokens), **fields)  # type: ignore[arg-type]


@dataclass
class _Sequence:
    """What a rank knows of a sequence."""

    admit: Admit
    next_position: int
    length: int
    outputs: tuple[int, ...] = ()
    keys: list[int] = field(default_factory=list)  # of its ids, where prompts begin alike
    followed: int = 0  # tokens that a draft model has computed


@dataclass
class _Running:
    """A step in the pipeline: it has left `stages_left` stages."""

    step: Step
    stages_left: int = 0
    waited: bool = False  # nothing was in flight when it was launched


@dataclass
class FakeReplica:
    """Feeds a controller and plays its ranks. `decide` says how each sample and each entry turns out."""

    config: ReplicaConfig
    random: Random = field(default_factory=lambda: Random(0))
    stop_chance: float = 0.0
    failure_chance: float = 0.0
    step_seconds: float = 0.01
    profile: StepProfile = PROFILE
    prompt_ids: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Of prompts that begin alike: their KV is told apart by its ids. Others share nothing with any other."""
    hasher: PrefixHasher | None = None
    """Hashes the outputs of those prompts, too, as a controller's process does."""
    guesses: int = 0
    """Largest number of guesses that come with each `Done` for each sequence; with a draft model, steps say how many."""
    guess_chance: float = 0.8
    """Chance that one of them is right."""
    takes: Callable[[Step], tuple[float, float]] | None = None
    """Returns the seconds that a step takes, and those of them in which a draft model computes; without it, a step takes
    `step_seconds`, and reports that it has taken what was predicted."""
    idle_seconds: float = 0.0
    """Time before a step that was launched when nothing was in flight, with `takes`."""

    def __post_init__(self) -> None:
        self.controller = ReplicaController(self.config, self.profile)
        self.now = 0.0
        self.log: list[tuple[float, ControllerEvent]] = []
        self.commands: list[list[ControllerCommand]] = []
        self.steps: list[Step] = []
        self.asides: list[str] = []  # requests that stepped aside, in order
        self.compiling: list[str] = []  # names of grammars that ranks compile, in order
        self.compiled: set[str] = set()
        self.emitted: dict[str, list[int]] = {}
        self.endings: dict[str, list[str]] = {}  # every one should have one
        self.ledger = BlockLedger(self.config.kv_blocks, self.config.block_size_tokens)
        tier = self.config.host_tier
        host_blocks = 0 if tier is None else tier.blocks
        self._lane = LaneReplay(self.ledger, host_blocks=host_blocks)
        self._late_free: list[StageFree] = []
        self._pipeline: list[_Running] = []
        self._sequences: dict[str, _Sequence] = {}
        self._submits: dict[str, Submit] = {}
        self._prompts: set[str] = set()
        self._cancelled: set[str] = set()
        self._content = np.full((self.config.kv_blocks, self.config.block_size_tokens), -1)
        """The KV in each place of each block, as a number of `_keys`, [blocks, block_size_tokens]; -1: none."""
        self._on_host = np.full((host_blocks, self.config.block_size_tokens), -1)
        """The same of the host tier."""
        self._numbers: dict[object, int] = {}

    # --- events -------------------------------------------------------------------------------------

    def submit(self, submit: Submit) -> None:
        self._submits[submit.id] = submit
        self._prompts.add(submit.prompt)
        self.handle(submit)

    def cancel(self, id_: str) -> None:
        if id_ in self.endings:
            self.handle(Cancel(id_))  # crossed with the end on its way
        else:
            self._cancelled.add(id_)
            self.endings[id_] = ["cancelled"]
            self.handle(Cancel(id_))

    def handle(self, event: ControllerEvent) -> list[ControllerCommand]:
        self.log.append((self.now, event))
        commands = self.controller.handle(event, self.now)
        self.commands.append(commands)
        for command in commands:
            match command:
                case Step():
                    self._apply(command)
                case Emit():
                    self._take_emit(command)
                case Refused():
                    self._end(command.id, "refused " + command.reason)
                    if not self.controller.knows_prompt(self._submits[command.id].prompt):
                        self._prompts.discard(self._submits[command.id].prompt)
                case Failed():
                    self._end(command.id, "failed " + command.reason)
                case SteppedAside():
                    self._step_aside(command)
                case CompileGrammar():
                    assert command.name not in {*self.compiling, *self.compiled}
                    self.compiling.append(command.name)
                case DropGrammar():
                    self.compiled.discard(command.name)
                    if command.name in self.compiling:
                        self.compiling.remove(command.name)
        return commands

    def compile_next(self, fault: str = "") -> None:
        """Report the grammar that was asked for first as compiled, or why it cannot be."""
        name = self.compiling.pop(0)
        if not fault:
            self.compiled.add(name)
        self.handle(GrammarReady(name, fault=fault))

    # --- the pipeline -------------------------------------------------------------------------------

    def advance(self, *, late_stage_free: bool = False) -> bool:
        """Let the oldest step that can move leave its stage; False if the pipeline is empty.

        With `late_stage_free` the StageFree of stage 0 is held back, and arrives behind the step's Done.
        """
        occupied = {running.stages_left for running in self._pipeline}
        for running in self._pipeline:
            stage = running.stages_left
            if stage + 1 == self.config.topology.stream:
                if self.takes is not None:
                    self.now += self.takes(running.step)[0] + self.idle_seconds * running.waited
                else:
                    self.now += self.step_seconds
                if stage == 0 and not late_stage_free:  # then its tokens are sampled
                    self.handle(StageFree(running.step.step_id, 0))
                self._pipeline.remove(running)
                self.handle(self._done(running.step))
                for event in self._late_free:
                    self.handle(event)
                self._late_free.clear()
                return True
            if stage + 1 not in occupied:
                running.stages_left += 1
                self.now += self.step_seconds
                event = StageFree(running.step.step_id, stage)
                if late_stage_free:
                    self._late_free.append(event)
                else:
                    self.handle(event)
                return True
        return False

    def run(self, steps: int = 100_000) -> FakeReplica:
        """Until nothing moves any more."""
        for _ in range(steps):
            if not self.advance():
                return self
        raise AssertionError(f"still busy after {steps} moves")

    def check_empty(self) -> None:
        """Everything has ended exactly once, and nothing is left of it."""
        assert self.controller.idle
        assert self.controller.ledger.held_blocks == 0
        assert self.ledger.held_blocks == 0
        assert list(self.controller.requests()) == []
        assert not self._sequences
        assert not self._prompts
        assert not self.controller._sharing.prompts
        for id_ in self._submits:
            assert len(self.endings.get(id_, [])) == 1, f"{id_} ended as {self.endings.get(id_)}"

    # --- what a rank does ---------------------------------------------------------------------------

    def _apply(self, step: Step) -> None:
        assert step.step_id == len(self.steps)
        news = (step.inserts, step.releases, step.forgets, step.grows, step.admits)
        assert step.entries or any(news)
        self.steps.append(step)
        busy = {entry.id for running in self._pipeline for entry in running.step.entries}
        self._lane.insert(step.inserts)
        for id_ in step.releases:
            assert id_ not in busy, f"{id_} is released while a step has it"
            self._lane.release(id_)
            del self._sequences[id_]
        for prompt in step.forgets:
            assert prompt in self._prompts, f"{prompt} is forgotten twice"
            self._prompts.remove(prompt)
        for sequence in self._sequences.values():
            assert sequence.admit.prompt in self._prompts, f"the prompt of {sequence.admit.id} is forgotten"
        for grow in step.grows:
            assert self._lane.grow(grow)
        self._copy_tier()
        for admit in step.admits:
            self._admit(admit)
        self._lane.fetch(step.fetches)
        self._copy_tier()
        if step.state_hash is not None:
            assert step.state_hash == self._lane.state_hash()
        if len(self._pipeline) == self.config.topology.stream:
            self._check_ahead(step)
        self._pipeline.append(_Running(step, waited=not self._pipeline))
        assert len({entry.id for entry in step.entries}) == len(step.entries)
        longs = 0
        for entry in step.entries:
            longs += self._compute(
                entry.id, entry.extents[0].start, entry.token_count, entry.samples, busy, len(entry.drafts)
            )
        assert longs <= 1, "two long prefills in one step"
        for entry in step.entries:
            self._draft(entry)
        rows = sum(entry.samples + len(entry.drafts) for entry in step.entries)
        assert rows <= self.config.scheduling.max_running, (
            "ranks have not measured the memory of so many rows"
        )
        prefills = [entry for entry in step.entries if not entry.drafts]
        prefilled = sum(entry.token_count for entry in prefills if entry.token_count > 1)
        assert prefilled <= self.config.scheduling.max_chunk_tokens

    def _check_ahead(self, step: Step) -> None:
        """Of a step that goes out while the pipeline is full."""
        assert len(self._pipeline) == 1, "only the one stage of a lane is given a step ahead"
        assert step.entries, "nothing goes ahead but what is to be computed"
        both = (*step.entries, *self._pipeline[0].step.entries)
        assert not any(entry.drafts for entry in both), "nobody knows how far a step with drafts comes"
        for entry in step.entries:
            assert self._sequences[entry.id].next_position >= self._sequences[entry.id].admit.tokens
        for request in self.controller.requests():
            has_place = not request.waits or self.controller._admission.has_place(request)
            comes = any(
                one.id == request.id for one in step.fetches
            )  # all of its KV is there behind this step
            has_place = has_place and not request.stalls and not comes
            may_prefill = request.dispatched < request.submit.tokens and has_place
            assert request.ended or not may_prefill, f"{request.id} might have taken part"
            assert not request.waits or len(step.entries) == len(self._pipeline[0].step.entries), (
                "a place is free then"
            )

    def _admit(self, admit: Admit) -> None:
        assert admit.prompt in self._prompts
        copies = self._lane.admit(admit)
        assert copies is not None
        self._copy_tier()
        for copy in copies:
            held = self._content[copy.source] >= 0
            self._content[copy.target, held] = self._content[copy.source, held]
        there = admit.shared_tokens or admit.cached_tokens
        assert there < admit.tokens, "the last token is computed again"
        self._sequences[admit.id] = _Sequence(admit, there, admit.tokens)

    def _copy_tier(self) -> None:
        """Make the copies between the pool and the host tier that the last grows or admit asked for."""
        for one in self._lane.take_tier_copies():
            here, there = slice(one.block, one.block + one.count), slice(one.slot, one.slot + one.count)
            if one.is_fetch:
                self._content[here] = self._on_host[there]
            else:
                self._on_host[there] = self._content[here]

    def _compute(
        self, id_: str, start: int, count: int, samples: bool, busy: set[str], drafted: int = 0
    ) -> bool:
        """Write KV of the positions, and check what is there for those before. True: a long prefill.

        The last `drafted` ones hold guesses, whose KV counts only once they are found right.
        """
        sequence = self._sequences[id_]
        assert start == sequence.next_position, f"{id_}: position {start}, expected {sequence.next_position}"
        assert count > 0
        assert start + count <= self._lane.shards(id_).tokens, f"{id_}: its last position is not reserved"
        end = start + count - drafted
        assert end <= sequence.length, f"{id_}: position {end} is not known yet"
        assert samples == (end == sequence.length)
        if samples and sequence.length == sequence.admit.tokens and sequence.admit.sampling.grammar:
            assert sequence.admit.sampling.grammar in self.compiled, f"the grammar of {id_} is not compiled"
        if start >= sequence.admit.tokens and self.config.topology.stream > 1:
            assert id_ not in busy, f"{id_}: two decode tokens in flight"
        keys, guesses = self._keys(sequence, end), np.full(drafted, self._number(("guess", id_)))
        self._write(id_, start, np.concatenate((keys[start:], guesses)))
        if self.takes is None:  # with `takes`, many tokens are decoded
            blocks = self.ledger.table(id_)[: -(-end // self.config.block_size_tokens)]
            wrong = np.flatnonzero(self._content[blocks].reshape(-1)[:end] != keys)
            assert wrong.size == 0, f"{id_}: positions {wrong} hold KV of others"
        sequence.next_position = end
        if samples:
            sequence.length += 1
            sequence.outputs += (sequence.length,)
        return start < sequence.admit.tokens and start >= self.config.long_threshold_tokens

    def _draft(self, entry: StepEntry) -> None:
        """Let a draft model compute what an entry asks for; it proposes guesses behind tokens that it has computed."""
        sequence, start = self._sequences[entry.id], entry.extents[0].start
        if self.config.scheduling.speculation.method == "predictionHead":
            assert entry.follows == 0, "a head computes tokens with the steps that compute them"
            return
        sequence.followed += entry.follows
        assert sequence.followed <= start, f"{entry.id}: {sequence.followed} tokens are followed of {start}"
        if entry.proposes:
            assert sequence.followed == start, (
                f"{entry.id}: {sequence.followed} of {start} tokens are followed"
            )
            assert entry.samples
            sequence.followed += 1

    def _accept(self, sequence: _Sequence, count: int) -> None:
        """Know that the next `count` guesses were right."""
        if sequence.followed == sequence.next_position:
            sequence.followed += count
        start = sequence.next_position
        sequence.outputs += tuple(range(sequence.length + 1, sequence.length + count + 1))
        sequence.next_position += count
        sequence.length += count
        self._write(sequence.admit.id, start, self._keys(sequence, sequence.next_position)[start:])

    def _write(self, id_: str, start: int, keys: npt.NDArray[np.int64]) -> None:
        """Let the positions of a sequence from `start` on hold these."""
        positions, size = np.arange(start, start + len(keys)), self.config.block_size_tokens
        self._content[self.ledger.table(id_)[positions // size], positions % size] = keys

    def _keys(self, sequence: _Sequence, end: int) -> npt.NDArray[np.int64]:
        """Return a number for the KV of each position before `end`: [end]. Equal KV alone has equal numbers."""
        prompt, keys = sequence.admit.prompt, sequence.keys
        if prompt not in self.prompt_ids:
            positions, of_prompt = np.arange(end), self._number(prompt)
            whose = np.where(positions < sequence.admit.tokens, of_prompt, self._number(sequence.admit.id))
            return whose << 32 | positions
        for token in (*self.prompt_ids[prompt], *sequence.outputs)[len(keys) : end]:
            keys.append(self._number((keys[-1] if keys else None, token)))  # all ids up to here
        return np.array(keys[:end], dtype=np.int64)

    def _number(self, key: object) -> int:
        """Return the number of a key, from 1 on, which no other key has."""
        return self._numbers.setdefault(key, len(self._numbers) + 1)

    def _done(self, step: Step) -> Done:
        samples, failures, hashes, drafts = [], [], [], []
        for entry in step.entries:
            if self.random.random() < self.failure_chance:
                failures.append(EntryFailed(entry.id, "out_of_memory", "by chance"))
            elif entry.samples:
                sequence = self._sequences[entry.id]
                found = sampled(entry, lambda: self.random.random() < self.stop_chance)
                samples += found
                self._accept(sequence, len(found) - 1)
                prompt_ids = self.prompt_ids.get(sequence.admit.prompt)
                if self.hasher is not None and prompt_ids is not None:
                    for token in [one.token for one in found]:
                        ids = np.array((*prompt_ids, *sequence.outputs)[:token], dtype=np.int32)
                        if len(ids) % self.config.block_size_tokens == 0:
                            hashes.append((entry.id, self.hasher.hashes(ids)[-HASH_CHARACTERS:]))
                least, most = (0, self.guesses) if self.config.draft_costs is None else [entry.proposes] * 2
                if most:
                    position = found[-1].token
                    drafts.append((entry.id, guessed(self.random, position, least, most, self.guess_chance)))
        seconds, draft_seconds = (step.predicted_seconds, 0.0) if self.takes is None else self.takes(step)
        return Done(
            step.step_id,
            tuple(samples),
            tuple(failures),
            compute_seconds=seconds,
            block_hashes=tuple(hashes),
            prompt_logprobs=tuple(self._scored(step)),
            drafts=tuple(drafts),
            draft_seconds=draft_seconds,
        )

    def _scored(self, step: Step) -> Iterator[tuple[str, PromptLogprobs]]:
        """Log-probabilities of prompt tokens, for requests that ask for them: minus the position of each."""
        for entry in step.entries:
            admit = self._sequences[entry.id].admit
            start = entry.extents[0].start + 1
            stop = min(start + entry.token_count, admit.tokens)
            if admit.sampling.prompt_logprobs is not None and start < stop:
                places = range(start, stop)
                numbers = tuple(-float(place) for place in places)
                yield entry.id, PromptLogprobs((Extent(start, len(places)),), numbers, tuple(places))

    def _step_aside(self, aside: SteppedAside) -> None:
        """Know its new prompt, as a controller's process does: the one before, and what it was told of the output."""
        assert aside.tokens == self._submits[aside.id].tokens + len(self.emitted.get(aside.id, ()))
        self.asides.append(aside.id)
        self._prompts.add(aside.prompt)
        if aside.source in self.prompt_ids:
            ids = (*self.prompt_ids[aside.source], *self._sequences[aside.id].outputs)
            self.prompt_ids[aside.prompt] = ids[: aside.tokens]

    # --- what a router sees -------------------------------------------------------------------------

    def _take_emit(self, emit: Emit) -> None:
        assert emit.id not in self._cancelled, f"{emit.id} was cancelled"
        assert emit.id not in self.endings, f"{emit.id} had ended"
        assert emit.tokens or emit.finish_reason
        output = self.emitted.setdefault(emit.id, [])
        for token in emit.tokens:
            assert not output or token == output[-1] + 1, f"{emit.id}: {token} follows {output[-1]}"
            output.append(token)
        if emit.finish_reason is not None:
            self._end(emit.id, emit.finish_reason)
            submit = self._submits[emit.id]
            if not self.controller.knows_prompt(submit.prompt) and emit.id not in self._sequences:
                self._prompts.discard(submit.prompt)  # resumed with nothing left to draw: ranks never had it

    def _end(self, id_: str, reason: str) -> None:
        self.endings.setdefault(id_, []).append(reason)


ConfigFactory = Callable[..., ReplicaConfig]


@pytest.fixture(scope="session")
def config_of() -> ConfigFactory:
    """Makes the settings of a small replica."""
    return make_config


@pytest.fixture(scope="session")
def submit_of() -> Callable[..., Submit]:
    """Makes a request: id, tokens, max_tokens, and any field of Submit."""
    return make_submit


@pytest.fixture(scope="session")
def replica_of() -> Callable[..., FakeReplica]:
    """Makes a fake replica: keywords of its own, the rest are settings."""

    def make(**keywords: object) -> FakeReplica:
        own = {name: keywords.pop(name) for name in list(keywords) if name in FakeReplica.__annotations__}
        return FakeReplica(make_config(**keywords), **own)  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="session")
def random_run(replica_of: Callable[..., FakeReplica]) -> Callable[[int], FakeReplica]:
    """Runs random requests on a small replica, of which some are cancelled and some steps fail; the seed decides all."""

    def run(seed: int) -> FakeReplica:
        random = Random(seed)
        replica = replica_of(
            random=random, stop_chance=0.05, failure_chance=0.01, stages=1 + seed % 2, kv_blocks=40,
            max_chunk_tokens=16, min_chunk_tokens=4,
        )  # fmt: skip
        for number in range(60):
            replica.submit(
                make_submit(f"r{number}", random.choice([1, 2, 16, 17, 50]), random.choice([1, 2, 9]))
            )
            for _ in range(random.randrange(6)):
                replica.advance()
        return replica.run()

    return run


@pytest.fixture(scope="session")
def profile() -> StepProfile:
    """Constants of the predictor: 1 ms a step, 0.1 ms a token, 0.1 ms a sequence, 10 ns a pair."""
    return PROFILE
