"""The engine of one rank: applies a `Step` to the replicated state, runs its layers and samples tokens.

The engine has no sockets, no asyncio and no clock of its own. For every step, the rank's process calls
`prepare`, then `missing_prompts` and `add_tokens` until nothing is missing, then `plan` and `run`. Everything
but `run` is bookkeeping that needs no result of earlier steps, so another thread may do it while they run.

Failures are contained as far as possible. An entry whose ids, positions or logits are invalid fails alone. A
forward pass that raises is repeated entry by entry, so that only the entries that fail alone end. Where other
ranks run in lock-step with this one, that is impossible, because they do not know of the failure: there it
ends the epoch. The exception is running out of memory, which the other ranks learn of through NaN
(`Transformer`) or through a token of -1. State that disagrees with the controller's cannot be recovered, and
raises.

Every rank replays every step, so all of them agree on lengths and block tables. Sampled token ids matter only
on the rank that samples them and on the first stage, which embeds them; elsewhere zeros stand for them. The
tokens of a step carry a digest of all tokens sampled before and the sequences they belong to, so that two of
those ranks never continue with different tokens.
"""

from __future__ import annotations

import logging
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from medha.errors import PartFailed, WireInvalid
from medha.kv.blocks import BlockCopy, BlockLedger
from medha.kv.context_parallel import OWNER
from medha.kv.lane_replay import LaneReplica, admitted_map
from medha.shards import ShardMap
from medha.wire.frames import TokenIds
from medha.wire.messages import (
    Admit,
    Done,
    EntryFailed,
    Extent,
    FailureReason,
    Sample,
    Step,
    StepEntry,
    Tokens,
)
from medha_worker.kernels.sequence_span import SequenceSpan
from medha_worker.model.kv_cache import KVCache
from medha_worker.model.out_of_memory import ran_out
from medha_worker.model.sampler import Drawn, LogitsMask, SequenceSampler, Undrawable, draw
from medha_worker.model.spread import SpreadPlan
from medha_worker.rank.kv_parallel_plan import LOCAL, STRATEGIES, SpreadEntry, plan_spread, positions

_log = logging.getLogger("medha.executor")

_FIRST_OUTPUT_CAPACITY = 64

_Result = TypeVar("_Result")


class Model(Protocol):
    """The interface that the executor needs of a model; `Transformer` implements it."""

    def forward(
        self,
        tokens_or_hidden: Tensor,
        positions: Tensor,
        spans: Sequence[SequenceSpan],
        kv_cache: KVCache,
        spread: SpreadPlan | None = None,
    ) -> Tensor:
        """Run the layers and return hidden states, [rows, hidden].

        The input is int64 [rows] tokens, or the previous stage's hidden states, in host memory; so are the
        positions. K and V of the rows are written to the pool. `spread` replaces `spans` where lanes share requests.
        """

    def logits(self, hidden: Tensor) -> Tensor | None:
        """Return logits, float32 [rows, vocab]; None on a rank that only contributes to another's logits."""


class Pipeline(Protocol):
    """The other stages and tensor ranks, as one rank sees them; `Grid` implements it."""

    is_first_stage: bool
    is_last_stage: bool
    stages: int

    def send_hidden(self, hidden: Tensor) -> None: ...

    def expect_hidden(self, rows: int) -> None: ...

    def receive_hidden(self) -> Tensor: ...

    def send_tokens(self, ids: Sequence[int]) -> None: ...

    def receive_tokens(self, count: int) -> list[int]: ...


@dataclass(slots=True)
class _Prompt:
    ids: TokenIds
    received: int = 0

    @property
    def complete(self) -> bool:
        return self.received == len(self.ids)


@dataclass(slots=True)
class _Sequence:
    """Token history and progress of one admitted sequence; its prompt's ids are shared with its siblings."""

    prompt: TokenIds  # int32 [tokens]; output that an earlier epoch produced is its tail
    sampler: SequenceSampler | None
    fault: str | None  # reason why there is no sampler; every entry then fails with it
    table: npt.NDArray[np.int64]  # block table
    computed: int  # tokens whose KV is in the pool once all planned steps have run
    planned_outputs: int = 0  # tokens that those steps will have sampled
    _outputs: TokenIds = field(default_factory=lambda: np.empty(_FIRST_OUTPUT_CAPACITY, dtype=np.int32))
    _output_count: int = 0
    unknown: int = 0  # number of the last outputs that were sampled elsewhere and have not arrived yet

    @property
    def length(self) -> int:
        """Number of tokens in the sequence once all planned steps have run."""
        return len(self.prompt) + self.planned_outputs

    def append(self, token: int) -> None:
        if self._output_count == len(self._outputs):
            self._outputs = np.concatenate([self._outputs, np.empty_like(self._outputs)])
        self._outputs[self._output_count] = token
        self._output_count += 1

    def expect(self) -> None:
        """Append a zero as a placeholder for a token that another rank samples."""
        self.append(0)
        self.unknown += 1

    def learn(self, token: int) -> None:
        """Record the first of the expected tokens; -1 if none could be sampled, and its zero then stays."""
        self._outputs[self._output_count - self.unknown] = max(token, 0)
        self.unknown -= 1

    def fill(self, length: int) -> None:
        """Append zeros for tokens before `length` that could not be sampled.

        A step that counts on them may already be on its way.
        """
        while len(self.prompt) + self._output_count < length:
            self.append(0)

    def tokens(self, start: int, stop: int) -> TokenIds:
        """Return the ids at positions `start .. stop` (exclusive), which must lie inside the history."""
        border = len(self.prompt)
        outputs = self._outputs[max(start - border, 0) : max(stop - border, 0)]
        if start >= border:
            return outputs
        return np.concatenate([self.prompt[start:stop], outputs])


@dataclass(frozen=True, slots=True)
class _Part:
    """An entry that can be run.

    The step brings its sequence to `stop`, perhaps with entries on other lanes too.
    """

    entry: StepEntry
    sequence: _Sequence
    stop: int
    hidden: Tensor | None = None  # [hidden] of the last position, once it is computed


@dataclass(frozen=True, slots=True)
class _Batch:
    """Parts as one flat batch."""

    positions: Tensor  # int64 [rows], in host memory
    spans: list[SequenceSpan]
    spread: SpreadPlan | None


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step whose bookkeeping is done."""

    step: Step
    copies: tuple[BlockCopy, ...] = ()  # KV copies, made before anything is computed
    parts: tuple[_Part, ...] = ()
    foreign: tuple[SpreadEntry, ...] = ()
    failures: tuple[EntryFailed, ...] = ()
    batch: _Batch | None = None  # batch of all parts, if this rank runs any


@dataclass(frozen=True, slots=True)
class _Chunk:
    """The positions of one sequence that a step computes on all lanes: `start .. stop` (exclusive)."""

    start: int
    stop: int
    lanes: int
    problem: str | None  # reason why the extents are not one run of positions


def _chunks(step: Step) -> dict[str, _Chunk]:
    """Return the step's chunks by sequence id; sequences without a position are left out."""
    chunks: dict[str, _Chunk] = {}
    entries: dict[str, list[StepEntry]] = {}
    for entry in step.entries:
        entries.setdefault(entry.id, []).append(entry)
    for name, parts in entries.items():
        if len(parts) == len(parts[0].extents) == 1:  # the common case: a decode, or a chunk of one lane
            (only,) = parts[0].extents
            if only.count >= 1 and only.stride == 1:
                chunks[name] = _Chunk(only.start, only.start + only.count, 1, None)
                continue
        extents = [extent for entry in parts for extent in entry.extents]
        if not all(entry.extents for entry in parts):
            continue
        start, stop = min(one.start for one in extents), max(_last(one) for one in extents) + 1
        is_run = sum(one.count for one in extents) == stop - start
        is_run &= all(one.count >= 1 and one.stride >= 1 for one in extents)
        for entry in parts:  # a single lane computes its positions one after the other
            gaps = [after.start - _last(one) for one, after in pairwise(entry.extents)]
            is_run &= all(gap > 0 for gap in gaps)
            is_run &= len(parts) > 1 or _last(entry.extents[-1]) - start + 1 == entry.token_count
        problem = None if is_run else f"{tuple(extents)} is not one run of positions"
        chunks[name] = _Chunk(start, stop, len(parts), problem)
    return chunks


def _last(extent: Extent) -> int:
    return extent.start + (extent.count - 1) * extent.stride


class Executor:
    """Runs steps on one rank: on the whole model, or on the rank's part of it if `pipeline` is given."""

    def __init__(
        self,
        model: Model,
        kv_cache: KVCache,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        clock: Callable[[], float],
        epoch: int = 0,
        lane: int = 0,
        pipeline: Pipeline | None = None,
        mask_for: Callable[[Admit], LogitsMask | None] = lambda _: None,
    ) -> None:
        """`clock` returns seconds. `mask_for` returns the logits mask of an admitted sequence, or None."""
        self.ledger = BlockLedger(kv_cache.num_blocks, kv_cache.block_tokens)
        self.epoch = epoch
        self._lane = LaneReplica(self.ledger, lane)
        self._model = model
        self._kv_cache = kv_cache
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._clock = clock
        self._pipeline = pipeline
        self._waited_seconds = 0.0  # seconds that the running step has waited for data of other ranks
        self._expected: deque[list[_Part]] = deque()  # parts of each step whose tokens have not arrived yet
        self._drawn_digest = 0  # digest of all tokens of this lane that are known here
        self._mask_for = mask_for
        self._prompts: dict[str, _Prompt] = {}
        self._sequences: dict[str, _Sequence] = {}

    @property
    def prompt_count(self) -> int:
        return len(self._prompts)

    @property
    def sequence_count(self) -> int:
        return len(self._sequences)

    # --- prompts ------------------------------------------------------------------------------------

    def add_tokens(self, tokens: Tokens, ids: TokenIds) -> None:
        """Add the next piece of a prompt; `ids` is int32 [n].

        Raises:
            WireInvalid: the piece does not continue the ids received so far.
        """
        if tokens.offset == 0:
            self._prompts[tokens.prompt] = _Prompt(np.empty(tokens.total, dtype=np.int32))
        prompt = self._prompts.get(tokens.prompt)
        received = prompt.received if prompt is not None else 0
        end = received + len(ids)
        if prompt is None or tokens.offset != received or end > len(prompt.ids):
            raise WireInvalid(
                f"Tokens of prompt {tokens.prompt!r}: offset {tokens.offset} with {len(ids)} ids, "
                f"but {received} ids are here of {tokens.total}"
            )
        prompt.ids[received:end] = ids
        prompt.received = end

    def missing_prompts(self, step: Step) -> list[str]:
        """Return the prompts of the step's admits whose ids have not all arrived yet."""
        names = dict.fromkeys(admit.prompt for admit in step.admits)
        return [name for name in names if name not in self._prompts or not self._prompts[name].complete]

    # --- steps --------------------------------------------------------------------------------------

    def prepare(self, step: Step) -> None:
        """Apply the step's publishes, releases and forgets.

        Ids that arrive after this call belong to sequences that the step admits.

        Raises:
            PartFailed: the step does not match the state of this rank.
        """
        if step.epoch != self.epoch:
            raise PartFailed(f"step {step.step_id} is of epoch {step.epoch}; this rank is in {self.epoch}")
        for publish in step.publishes:
            self._sequence(publish.id, step)
        self._lane.publish(step.publishes)
        for name in step.releases:
            self._sequence(name, step)
            self._lane.release(name)
            del self._sequences[name]
        for name in step.forgets:
            self._prompts.pop(name, None)  # absent if its requests were cancelled before admission

    def execute(self, step: Step, on_forward_done: Callable[[], None] = lambda: None) -> Done | None:
        """Run `plan` and then `run`."""
        return self.run(self.plan(step), on_forward_done)

    def plan(self, step: Step) -> PlannedStep:
        """Apply grows and admits, and determine what this rank computes in the step, and where.

        Raises:
            PartFailed: the state of this rank and the controller's have diverged.
        """
        copies = self._apply(step)
        lane = self._lane.lane
        if lane not in step.lanes:
            return PlannedStep(step, copies)
        failures: list[EntryFailed] = []
        entries = [entry for entry in step.entries if entry.lane == lane]
        chunks = _chunks(step)
        parts = [part for entry in entries if (part := self._part(entry, chunks, step, failures)) is not None]
        foreign = self._foreign(step, chunks)
        batch = self._batch(parts, foreign) if parts or foreign else None
        if batch is not None and self._pipeline is not None and not self._pipeline.is_first_stage:
            self._pipeline.expect_hidden(len(batch.positions))
        for part in parts:
            part.sequence.computed = max(part.sequence.computed, part.stop)
            part.sequence.planned_outputs += part.entry.samples
        return PlannedStep(step, copies, tuple(parts), tuple(foreign), tuple(failures), batch)

    def run(self, planned: PlannedStep, on_forward_done: Callable[[], None] = lambda: None) -> Done | None:
        """Run the entries and sample. Tokens that are sampled on another rank are not in the result.

        `on_forward_done` is called between the forward pass and sampling, when the stage is free again. If
        the step does not include this lane, the result is None and `on_forward_done` is not called.
        """
        started, self._waited_seconds = self._clock(), 0.0
        step, lane = planned.step, self._lane.lane
        for copy in planned.copies:
            self._kv_cache.copy_block(copy.source, copy.target)
        if lane not in step.lanes:
            return None
        failures = list(planned.failures)
        with torch.inference_mode():
            if self._pipeline is None:

                def forward(parts: Sequence[_Part]) -> list[_Part]:
                    whole = planned.batch if len(parts) == len(planned.parts) else None
                    return self._forward(parts, whole or self._batch(parts))

                computed = _run_guarded(forward, planned.parts, failures)
                on_forward_done()
                drawn = _run_guarded(self._draw, [part for part in computed if part.entry.samples], failures)
            else:  # others run in lock-step with this rank, so nothing can be retried
                computed = self._forward(planned.parts, planned.batch) if planned.batch is not None else []
                on_forward_done()
                if self._pipeline.is_last_stage:
                    failures += _lost(computed)
                sampling = [part for part in computed if part.entry.samples]
                drawn = self._draw(sampling) if sampling else []
        samples = [self._take(part, result, failures) for part, result in drawn]
        for part in planned.parts:
            if part.entry.samples:
                part.sequence.fill(part.stop + 1)
        return Done(
            step_id=step.step_id,
            samples=tuple(sample for sample in samples if sample is not None),
            failures=tuple(failures),
            compute_seconds=self._clock() - started - self._waited_seconds,
            lanes=(lane,),
            epoch=self.epoch,
        )

    def _apply(self, step: Step) -> tuple[BlockCopy, ...]:
        """Replay the controller's grows and admits, and return the KV blocks to copy."""
        copies: list[BlockCopy] = []
        for grow in step.grows:
            sequence = self._sequence(grow.id, step)
            if not self._lane.grow(grow):
                raise self._parted(step, f"no KV is left to grow {grow.id} to {grow.reserved_tokens} tokens")
            sequence.table = self._table(grow.id)
        for admit in step.admits:
            copies += self._admit(admit, step)
        state_hash = step.state_hashes[self._lane.lane] if step.state_hashes else step.state_hash
        if state_hash is not None and state_hash != self._lane.state_hash():
            raise self._parted(
                step,
                f"the ledgers differ, or the shard maps ({self.ledger.held_blocks} blocks are held here)",
            )
        return tuple(copies)

    def _admit(self, admit: Admit, step: Step) -> Sequence[BlockCopy]:
        if admit.id in self._sequences:
            raise self._parted(step, f"{admit.id} is admitted twice")
        prompt = self._prompts.get(admit.prompt)
        if prompt is None or not prompt.complete:
            raise self._parted(step, f"{admit.id} is admitted ahead of its prompt's ids")
        parent = self._sequence(admit.fork_of, step) if admit.fork_of is not None else None
        is_ours = admitted_map(admit).owner == self._lane.lane  # other lanes do not count its tokens
        if parent is not None and is_ours and parent.computed < admit.shared_tokens:
            raise self._parted(step, f"{admit.id} shares tokens that {admit.fork_of} has not computed")
        copies = self._lane.admit(admit)
        if copies is None:
            raise self._parted(step, f"no KV is left to admit {admit.id} with {admit.reserved_tokens} tokens")
        ids = prompt.ids[: admit.tokens]
        sampler = self._sampler(admit, ids)
        self._sequences[admit.id] = _Sequence(
            prompt=ids,
            sampler=sampler if isinstance(sampler, SequenceSampler) else None,
            fault=sampler if isinstance(sampler, str) else None,
            table=self._table(admit.id),
            computed=admit.shared_tokens if admit.fork_of is not None else admit.cached_tokens,
        )
        return copies

    def _sampler(self, admit: Admit, ids: TokenIds) -> SequenceSampler | str:
        """Return the sequence's sampler, or the reason why the sequence cannot be run."""
        if len(ids) != admit.tokens:
            return f"the prompt has {len(ids)} ids, but {admit.tokens} were announced"
        if len(ids) == 0 or ids.min() < 0 or ids.max() >= self._vocab_size:
            return f"a token id is outside the vocabulary of {self._vocab_size}, or there is none"
        try:
            return SequenceSampler(
                admit.sampling,
                seed=admit.seed,
                sample_index=admit.sample_index,
                tokens=ids,
                prompt_length=admit.prompt_length,
                vocab_size=self._vocab_size,
                eos_token_ids=self._eos_token_ids,
                mask=self._mask_for(admit),
            )
        except ValueError as error:
            return str(error)

    def _part(
        self, entry: StepEntry, chunks: Mapping[str, _Chunk], step: Step, failures: list[EntryFailed]
    ) -> _Part | None:
        """Return the entry as a part that can be run; otherwise record its failure and return None.

        Raises:
            PartFailed: the sequence's state here is not what the controller expects; or the entry cannot be
                run, but other lanes run their share of it and could not be told in time.
        """
        sequence = self._sequence(entry.id, step)
        if entry.id not in chunks:
            failures.append(EntryFailed(entry.id, "internal", "no position is named"))
            return None
        shards, chunk = self._shards(entry, step), chunks[entry.id]
        is_owner = shards.owner == self._lane.lane
        if sequence.fault is not None:  # known to all lanes; only one of them reports it
            if is_owner:
                failures.append(EntryFailed(entry.id, "internal", sequence.fault))
            return None
        problem = chunk.problem
        if problem is None and entry.strategy not in STRATEGIES:
            problem = f"strategy {entry.strategy!r} is not known"
        if problem is not None:
            if chunk.lanes > 1:
                raise self._parted(step, f"{entry.id}: {problem}")
            failures.append(EntryFailed(entry.id, "internal", problem))
            return None
        # Only the owner of a request tracks how far all of it is computed.
        computed = sequence.computed if is_owner else chunk.start
        if not (chunk.start <= computed and chunk.stop <= min(sequence.length, shards.tokens)):
            raise self._parted(
                step,
                f"{entry.id}: positions {chunk.start} to {chunk.stop}: {computed} are computed, {sequence.length} tokens "
                f"known, {shards.tokens} reserved",
            )
        last = _last(entry.extents[-1])
        if entry.samples and last + 1 != sequence.length:
            raise self._parted(
                step,
                f"{entry.id}: a token is drawn after position {last}, but {sequence.length} tokens are known",
            )
        return _Part(entry, sequence, chunk.stop)

    def _foreign(self, step: Step, chunks: Mapping[str, _Chunk]) -> list[SpreadEntry]:
        """Return the entries of other lanes that concern this lane."""
        entries = []
        for entry in step.entries:
            if entry.lane == self._lane.lane or entry.strategy == LOCAL:
                continue
            if entry.id not in chunks:  # it names no position, which the lane that is to compute it reports
                continue
            sequence = self._sequence(entry.id, step)
            self._shards(entry, step)
            asked = self._spread_entry(entry, sequence, chunks[entry.id].stop)
            # A ring needs all of its lanes, whatever they hold of one request.
            if sequence.fault is None and (entry.strategy != OWNER or self._lane.lane in asked.holders):
                entries.append(asked)
        return entries

    def _spread_entry(self, entry: StepEntry, sequence: _Sequence, stop: int) -> SpreadEntry:
        shards = self._lane.shards(entry.id)
        return SpreadEntry(shards, entry.lane, entry.extents, stop, sequence.table, entry.strategy, entry.id)

    def _batch(self, parts: Sequence[_Part], foreign: Sequence[SpreadEntry] = ()) -> _Batch:
        """Lay out the rows of the parts: their positions and what they attend to."""
        spans: list[SequenceSpan] = []
        spread = self._spread(parts, foreign)
        if spread is None:
            row = 0
            for part in parts:
                count = part.entry.token_count
                spans.append(SequenceSpan(row, count, part.entry.extents[0].start, part.sequence.table))
                row += count
        at = positions([extent for part in parts for extent in part.entry.extents])
        return _Batch(torch.from_numpy(at), spans, spread)

    def _forward(self, parts: Sequence[_Part], batch: _Batch) -> list[_Part]:
        """Run all parts as one flat batch; return them with the hidden state of their last position."""
        asked = self._clock()
        inputs = self._input(parts)
        self._waited_seconds = self._clock() - asked
        hidden = self._model.forward(inputs, batch.positions, batch.spans, self._kv_cache, batch.spread)
        if self._pipeline is not None and not self._pipeline.is_last_stage and len(hidden):
            self._pipeline.send_hidden(hidden)
        ends = accumulate(part.entry.token_count for part in parts)
        return [replace(part, hidden=hidden[end - 1]) for part, end in zip(parts, ends, strict=True)]

    def _spread(self, parts: Sequence[_Part], foreign: Sequence[SpreadEntry]) -> SpreadPlan | None:
        """Return how the batch is spread over lanes, or None if no other lane takes part."""
        if not foreign and all(part.entry.strategy == LOCAL for part in parts):
            return None
        own = [self._spread_entry(part.entry, part.sequence, part.stop) for part in parts]
        return plan_spread(self._lane.lane, own, foreign, self.ledger.block_size_tokens)

    def _input(self, parts: Sequence[_Part]) -> Tensor:
        """Return token ids, int64 [rows], on the first stage, else the previous stage's hidden states."""
        if self._pipeline is not None:
            if not self._pipeline.is_first_stage:
                return self._pipeline.receive_hidden()
            # Tokens of steps that have left the pipeline are here already; take them so that they do not pile
            # up.
            while len(self._expected) > self._pipeline.stages or any(part.sequence.unknown for part in parts):
                self._learn(self._pipeline)
        empty = np.empty(0, dtype=np.int32)
        runs = [
            part.sequence.tokens(extent.start, _last(extent) + 1)[:: extent.stride]
            for part in parts
            for extent in part.entry.extents
        ]
        ids = np.concatenate([empty, *runs])
        return torch.from_numpy(ids.astype(np.int64))

    def learn_all(self) -> None:
        """Wait for all outstanding tokens of steps that have run and that another rank samples.

        Raises:
            PartFailed: the tokens do not arrive, or are not those that were sampled.
        """
        while self._expected:
            assert self._pipeline is not None
            self._learn(self._pipeline)

    def _learn(self, pipeline: Pipeline) -> None:
        """Receive the tokens of the oldest step that still expects some."""
        parts = self._expected.popleft()
        *tokens, digest = pipeline.receive_tokens(len(parts) + 1)
        self._drawn_digest = _drawn_digest(self._drawn_digest, parts, tokens)
        if digest != self._drawn_digest:
            raise PartFailed(
                f"tokens came for {', '.join(part.entry.id for part in parts)} that are not those drawn for them: this rank "
                "and the one that draws have parted"
            )
        for part, token in zip(parts, tokens, strict=True):
            part.sequence.learn(token)

    def _draw(self, parts: Sequence[_Part]) -> list[tuple[_Part, Drawn | Undrawable]]:
        """Sample the next token of each part. If another rank samples, expect its tokens and return []."""
        rows = [part.hidden for part in parts if part.hidden is not None]
        samplers = [part.sequence.sampler for part in parts if part.sequence.sampler is not None]
        pipeline = self._pipeline
        logits = self._model.logits(torch.stack(rows)) if pipeline is None or pipeline.is_last_stage else None
        if logits is None:
            assert pipeline is not None
            for part in parts:
                part.sequence.expect()
            if pipeline.is_first_stage:
                # Drop the hidden states: each is a view that would keep those of the whole step alive.
                self._expected.append([replace(part, hidden=None) for part in parts])
            return []
        drawn = _drawn(logits, samplers)
        if pipeline is not None:
            tokens = [-1 if isinstance(result, Undrawable) else result.token for result in drawn]
            self._drawn_digest = _drawn_digest(self._drawn_digest, parts, tokens)
            pipeline.send_tokens([*tokens, self._drawn_digest])
        return list(zip(parts, drawn, strict=True))

    def _take(self, part: _Part, result: Drawn | Undrawable, failures: list[EntryFailed]) -> Sample | None:
        if isinstance(result, Undrawable):
            failures.append(EntryFailed(part.entry.id, result.reason, result.detail))
            return None
        assert part.sequence.sampler is not None
        part.sequence.append(result.token)
        finish_reason = part.sequence.sampler.append(result.token)
        return Sample(part.entry.id, result.token, finish_reason, result.logprob)

    def _shards(self, entry: StepEntry, step: Step) -> ShardMap:
        """Return where the KV of the entry's sequence lies, which must match the map in the step's plan."""
        shards = self._lane.shards(entry.id)
        if entry.strategy != LOCAL and entry.shard_map_version != shards.version:
            raise self._parted(
                step,
                f"shard map {entry.shard_map_version} of {entry.id} is meant, and {shards.version} is here",
            )
        return shards

    def _table(self, name: str) -> npt.NDArray[np.int64]:
        """Return the sequence's block table on this lane; empty if it holds nothing here."""
        return self.ledger.table(name) if name in self.ledger else np.empty(0, dtype=np.int64)

    def _sequence(self, name: str, step: Step) -> _Sequence:
        try:
            return self._sequences[name]
        except KeyError:
            raise self._parted(step, f"sequence {name} is not known here") from None

    def _parted(self, step: Step, detail: str) -> PartFailed:
        return PartFailed(f"step {step.step_id}: this rank and the controller disagree: {detail}")


def _run_guarded(
    run: Callable[[Sequence[_Part]], list[_Result]], parts: Sequence[_Part], failures: list[EntryFailed]
) -> list[_Result]:
    """Call `run` on all parts at once, or on each alone if that raises, so that only failing parts end."""
    if not parts:
        return []
    try:
        return run(parts)
    except Exception as error:  # noqa: BLE001 (whatever a kernel raises, the engine lives on)
        if len(parts) == 1:
            _log.warning("%s failed: %s", parts[0].entry.id, error)
            failures.append(
                EntryFailed(parts[0].entry.id, failure_reason(error), f"{type(error).__name__}: {error}")
            )
            return []
        _log.warning("a batch of %d sequences failed, so each runs alone: %s", len(parts), error)
    # Outside the handler: inside it, the traceback would keep the failed attempt's tensors alive.
    return [result for part in parts for result in _run_guarded(run, [part], failures)]


def _drawn(logits: Tensor, samplers: Sequence[SequenceSampler]) -> list[Drawn | Undrawable]:
    """Call `draw`, row by row if memory runs out.

    Other ranks wait for a token of each row, so no row may raise.
    """
    try:
        return draw(logits, samplers)
    except (MemoryError, RuntimeError) as error:
        if not ran_out(error):
            raise
        if len(samplers) == 1:
            return [Undrawable(f"too little memory to draw a token: {error}", "out_of_memory")]
        _log.warning("memory ran out to draw %d tokens, so each is drawn alone: %s", len(samplers), error)
    # Outside the handler: inside it, the traceback would keep the failed attempt's tensors alive.
    return [one for row in range(len(samplers)) for one in _drawn(logits[row : row + 1], [samplers[row]])]


def _drawn_digest(before: int, parts: Sequence[_Part], tokens: Sequence[int]) -> int:
    """Return the CRC-32 digest `before`, extended by the sequences that are sampled next and their tokens."""
    names = "\0".join([part.entry.id for part in parts])
    return zlib.crc32(np.array(tokens, dtype=np.int64).tobytes(), zlib.crc32(names.encode(), before))


def _lost(parts: Sequence[_Part]) -> list[EntryFailed]:
    """Return failures for entries that arrived as NaN because some rank could not compute them.

    Entries that sample are left out: sampling finds those.
    """
    unseen = [part for part in parts if not part.entry.samples and part.hidden is not None]
    if not unseen:
        return []
    lasts = torch.stack([part.hidden for part in unseen if part.hidden is not None])
    finite = lasts.isfinite().all(dim=1).tolist()
    detail = "hidden states hold NaN: the model's numbers have overflowed or its weights are damaged"
    return [
        EntryFailed(part.entry.id, "not_finite", detail)
        for part, is_finite in zip(unseen, finite, strict=True)
        if not is_finite
    ]


def failure_reason(error: Exception) -> FailureReason:
    """Return the failure reason: "out_of_memory" if memory ran out, else "internal"."""
    return "out_of_memory" if ran_out(error) else "internal"
