"""The engine of one rank: applies a `Step` to the replicated state, runs its layers and samples tokens.

The engine has no sockets, no asyncio and no clock of its own. For every step, the rank's process calls
`prepare`, then `missing_prompts` and `add_tokens` until nothing is missing, then `plan` and `run`. Everything
but `run` is bookkeeping that needs no result of earlier steps, so another thread may do it while they run.

Failures are contained as far as possible. An entry whose ids, positions or logits are invalid fails alone. A
forward pass that raises is repeated entry by entry, so that only the entries that fail alone end. If other ranks
run in lock-step with this one, that is impossible, because they do not know of the failure, and it ends the
epoch. Running out of memory does not: the other ranks notice it by NaN (`Transformer`) or by a token of -1.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from medha.kv.blocks import BlockLedger
from medha.kv.host_tier import TierCopy
from medha.kv.lane_replay import HostTierWork
from medha.kv.window_tables import WindowTables, widest_window
from medha.wire.frames import TokenIds
from medha.wire.messages import Admit, Done, EntryFailed, FailureReason, Sample, Step, Tokens
from medha_worker.device import Device
from medha_worker.kernels.protocol import Kernels
from medha_worker.kernels.sequence_span import SequenceSpan
from medha_worker.model.disk_blocks import DiskBlocks
from medha_worker.model.host_blocks import Arrivals, HostBlocks
from medha_worker.model.kv_cache import KVCache
from medha_worker.model.out_of_memory import ran_out
from medha_worker.model.prepared_step import PreparedStep
from medha_worker.model.sampler import TokenMask
from medha_worker.model.spread import SpreadPlan
from medha_worker.model.token_sampler import TokenSampler
from medha_worker.rank.drafter import Drafter
from medha_worker.rank.guess_rounds import Followed, Guesses
from medha_worker.rank.head_drafter import HeadDrafter
from medha_worker.rank.lane_plan import (
    Batch,
    LanePlan,
    PlannedEntry,
    count_work,
    lay_out,
    plan_lane,
    spread_blocks,
)
from medha_worker.rank.lane_state import LaneState
from medha_worker.rank.peer_reader import PeerBlocks
from medha_worker.rank.prompt_scores import PromptScorer, Scored
from medha_worker.rank.sampled_tokens import (
    Computed,
    Result,
    SampledTokens,
    TokenLink,
    last_hidden,
    new_samplers,
)
from medha_worker.rank.store_threads import StoreThreads

_log = logging.getLogger("medha.executor")

_Item = TypeVar("_Item", PlannedEntry, Computed)
_Result = TypeVar("_Result")


class Model(Protocol):
    """The interface that the executor needs of a model; `Transformer` implements it."""

    device: Device
    kernels: Kernels

    @property
    def windows(self) -> Sequence[int | None]:
        """The windows of all layers of the model, in tokens: those of other stages, too, as lanes plan alike."""

    def prepare(
        self,
        positions: Tensor,
        spans: Sequence[SequenceSpan],
        kv_cache: KVCache,
        spread: SpreadPlan | None = None,
        window_spans: Sequence[SequenceSpan] | None = None,
    ) -> PreparedStep:
        """Return what all layers of a step share; any thread may call this while another step runs.

        Positions are int64 [rows] in host memory. `spread` replaces `spans` where lanes share requests, and
        `window_spans` do in layers whose KV before the window is freed.
        """

    def forward(self, tokens_or_hidden: Tensor, step: PreparedStep) -> Tensor:
        """Run the layers over a step and return hidden states, [rows, hidden]; the step can be run once.

        The input is int64 [rows] tokens, or the previous stage's hidden states. K and V of the rows are written to
        the pool.
        """

    def logits(self, hidden: Tensor) -> Tensor | None:
        """Return logits, float32 [rows, vocab]; None on a rank that only contributes to another's logits."""


class Pipeline(TokenLink, Protocol):
    """The other stages and tensor ranks, as one rank sees them; `Mesh` implements it."""

    def send_hidden(self, hidden: Tensor) -> None: ...

    def expect_hidden(self, rows: int) -> None: ...

    def receive_hidden(self) -> Tensor: ...


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
        drafter: Drafter | HeadDrafter | None = None,
        mask_for: Callable[[Admit], TokenMask | None] = lambda _: None,
        begin_masks: Callable[[], None] = lambda: None,
        host_blocks: Sequence[HostBlocks] = (),
        disk: DiskBlocks | None = None,
        peers: PeerBlocks | None = None,
        store: StoreThreads | None = None,
    ) -> None:
        """`clock` returns seconds. A rank that samples has a `drafter`, if the replica has a draft model or a head.

        `host_blocks` are the host tiers of `kv_cache` and of the drafter's pool, if there are any. With the first of them,
        `disk` exchanges blocks with files, `peers` with other replicas, and `store` with the store that replicas share.

        `mask_for` returns the mask of an admitted sequence that this rank samples, or None. `begin_masks` starts to compute
        the masks that sequences have asked for ahead.
        """
        self.epoch, self.lane = epoch, lane
        streamed = kv_cache.streamed
        self.ledger = BlockLedger(
            kv_cache.num_blocks, kv_cache.block_tokens, 0 if streamed is None else streamed.blocks
        )
        new_sampler = new_samplers(vocab_size, tuple(eos_token_ids), mask_for)
        self.window_tables: WindowTables | None = None
        if kv_cache.window_blocks:
            widest = widest_window(model.windows)
            self.window_tables = WindowTables(self.ledger, kv_cache.window_blocks, widest)
        self._host_blocks, self._disk, self._peers, self._store = tuple(host_blocks), disk, peers, store
        for one in self._host_blocks:
            one.kv_cache.abandon()  # a step of an earlier epoch may have failed while its fetches were being made
        self._state = LaneState(
            self.ledger,
            lane,
            epoch,
            new_sampler,
            self.window_tables,
            host_blocks=self._host_blocks[0].blocks if self._host_blocks else 0,
        )
        self._tokens = SampledTokens(
            model.logits, pipeline, model.device, TokenSampler(model.kernels.race, model.device), vocab_size
        )
        self._scorer = PromptScorer(model.logits, model.device, vocab_size)
        self._model = model
        self._kv_cache = kv_cache
        self._clock = clock
        self._begin_masks = begin_masks
        self._pipeline = pipeline
        self._drafter = drafter
        self._waited_seconds = 0.0  # seconds that the running step has waited for data of other ranks

    # --- bookkeeping, possibly while another step runs ------------------------------------------------

    def add_tokens(self, tokens: Tokens, ids: TokenIds) -> None:
        """Add the next piece of a prompt; `ids` is int32 [n].

        Raises:
            WireInvalid: the piece does not continue the ids received so far.
        """
        self._state.add_tokens(tokens, ids)

    def missing_prompts(self, step: Step) -> list[str]:
        """Return the prompts of the step's admits whose ids have not all arrived yet."""
        return self._state.missing_prompts(step)

    def prepare(self, step: Step) -> None:
        """Apply the step's inserts, releases and forgets.

        Ids that arrive after this call belong to sequences that the step admits.

        Raises:
            PartFailed: the step does not match the state of this rank.
        """
        self._state.release(step)

    def plan(self, step: Step) -> LanePlan:
        """Apply grows and admits, and resolve what this rank computes in the step.

        Raises:
            PartFailed: the state of this rank and the controller's have diverged.
        """
        copies = self._state.reserve(step)
        tier_copies = self._state.replica.take_tier_copies()
        host_tier_work = self._state.replica.take_host_tier_work()
        plan = plan_lane(step, self._state, copies, self._model.windows)
        self._begin_masks()
        if plan.batch is not None and self._pipeline is not None and not self._pipeline.is_first_stage:
            self._pipeline.expect_hidden(len(plan.batch.positions))
        for one in plan.entries:
            one.sequence.advance(one.stop, samples=one.entry.samples, drafted=len(one.entry.drafts))
        work = count_work(plan.entries, plan.batch, self._model.windows)
        prepared = self._prepared_ahead(plan.batch)
        overwritten = None
        if self._drafter is not None and plan.has_spread:
            overwritten = spread_blocks(self._state.lane, plan, self.ledger.block_size_tokens)
        return replace(
            plan,
            prepared=prepared,
            work=work,
            overwritten=overwritten,
            tier_copies=tier_copies,
            host_tier_work=host_tier_work,
        )

    def _prepared_ahead(self, batch: Batch | None) -> PreparedStep | None:
        """Prepare a batch; return None if that fails, because it then fails again when the failure can be contained."""
        if batch is None:
            return None
        try:
            return self._prepared(batch)
        except Exception as error:  # noqa: BLE001 - whatever a kernel raises, the engine lives on
            _log.warning("a step could not be prepared ahead: %s", error)
            return None

    def _prepared(self, batch: Batch) -> PreparedStep:
        return self._model.prepare(
            batch.positions, batch.spans, self._kv_cache, batch.spread, batch.window_spans
        )

    # --- steps --------------------------------------------------------------------------------------

    def execute(self, step: Step, on_forward_done: Callable[[], None] = lambda: None) -> Done | None:
        """Run `plan` and then `run`."""
        return self.run(self.plan(step), on_forward_done)

    def run(self, plan: LanePlan, on_forward_done: Callable[[], None] = lambda: None) -> Done | None:
        """Run the entries and sample. Tokens that are sampled on another rank are not in the result.

        `on_forward_done` is called between the forward pass and sampling, when the stage is free again. If
        the step does not include this lane, the result is None and `on_forward_done` is not called.
        """
        if self._disk is not None:
            self._disk.drop(plan.host_tier_work.drops)
        if self._store is not None:
            self._store.drop(plan.host_tier_work.drops)
        if self._peers is not None and plan.host_tier_work.unserves:
            self._peers.server.void(plan.host_tier_work.unserves)
        before, beside = _parted(plan.tier_copies)
        copy_seconds = self._copy_tier(before)
        computed_now = {entry.id for entry in plan.step.entries}
        reads = any(one.id in computed_now for one in plan.step.fetches)
        arrivals = self._fetch_beside(beside, reads=reads)
        self._use_disk(plan.host_tier_work)
        started, self._waited_seconds = self._clock(), 0.0
        self._kv_cache.copy_blocks(plan.copies)
        if self._drafter is not None:
            self._drafter.copy_blocks(plan.copies)
        if not plan.takes_part:
            if beside:
                self._end_fetches()
            return None
        failures = list(plan.failures)
        run = self._run_alone if self._pipeline is None else self._run_in_lock_step
        with torch.inference_mode():
            computed, results, scored = run(plan, failures, on_forward_done)
            if self._drafter is not None and plan.overwritten is not None:
                self._drafter.overwritten(plan.overwritten)
            drafts, followed, draft_seconds = self._draft(computed, results)
        samples = [sample for result in results for sample in _samples(result, failures)]
        self._begin_masks()
        for one in plan.entries:
            if one.entry.samples:
                one.sequence.fill(one.known + 1)
        self._end_fetches()
        waited_seconds = self._waited_seconds + arrivals.waited_seconds
        return Done(
            step_id=plan.step.step_id,
            samples=tuple(samples),
            failures=tuple(failures),
            compute_seconds=max(self._clock() - started - waited_seconds, 0.0),
            lanes=(self._state.lane,),
            epoch=self.epoch,
            prompt_logprobs=tuple(scored),
            drafts=drafts,
            copy_seconds=copy_seconds + arrivals.seconds(),
            draft_seconds=draft_seconds,
            followed=followed,
        )

    def _draft(
        self, computed: Sequence[Computed], results: Sequence[Result]
    ) -> tuple[Guesses, Followed, float]:
        """Let a draft model or head propose the guesses that entries ask for; return them, its progress, and its seconds."""
        if self._drafter is None:
            return (), (), 0.0
        self._kv_cache.await_layers()  # a head's layer comes after those of the model
        followed = self._drafter.note(computed, results)
        if not any(one.entry.proposes or one.entry.follows for one in computed):
            return (), followed, 0.0
        self._model.device.synchronise()  # a head's work along with the step is part of the step's time
        started = self._clock()
        drafts = self._drafter.follow(computed, results)
        self._model.device.synchronise()
        return drafts, followed, self._clock() - started

    def _copy_tier(self, copies: Sequence[TierCopy]) -> float:
        """Copy blocks between KV pool and host tier before the step; return how long that took, in seconds."""
        if not copies:
            return 0.0
        started = self._clock()
        for host_blocks in self._host_blocks:
            host_blocks.copy(copies)
        if self._drafter is not None:
            self._drafter.copied(copies)
        self._model.device.synchronise()
        return self._clock() - started

    def _fetch_beside(self, copies: Sequence[TierCopy], *, reads: bool) -> Arrivals:
        """Let fetches be made while the step computes; if it `reads` them, each layer waits for its part."""
        arrivals = Arrivals(self._clock)
        if copies:
            for host_blocks in self._host_blocks:
                host_blocks.fetch_beside(copies, arrivals, reads=reads)
            if self._drafter is not None:
                self._drafter.copied(copies)
        return arrivals

    def _end_fetches(self) -> None:
        """Wait until the device has made all fetches, and finished all other work.

        A later step may give their blocks to other sequences, and threads beside it may write to their host blocks.
        Also, the time of a step would otherwise be only that of launching it.
        """
        for host_blocks in self._host_blocks:
            host_blocks.kv_cache.await_all()
        self._model.device.synchronise()

    def _use_disk(self, work: HostTierWork) -> None:
        """Pass a step's work for files, peers and the store to their threads."""
        if self._drafter is not None:
            self._drafter.loaded(run for read in work.reads for run in read.slots)
        if self._disk is not None:
            self._disk.submit(work)
        if self._peers is not None and (work.reads or work.serves):
            self._peers.server.serve(work.serves)
            self._peers.reader.submit(work)
        if self._store is not None:
            self._store.submit(work)

    def learn_all(self) -> None:
        """Wait for all outstanding tokens of steps that have run and that another rank samples.

        Raises:
            PartFailed: the tokens do not arrive, or are not those that were sampled.
        """
        self._tokens.learn_all()

    def _run_alone(
        self, plan: LanePlan, failures: list[EntryFailed], on_forward_done: Callable[[], None]
    ) -> tuple[list[Computed], list[Result], list[Scored]]:
        """Run a plan that no other rank takes part in; entries that fail end alone.

        Return the entries that are computed, the tokens sampled for them, and the log-probabilities of prompts.
        """

        def forward(entries: Sequence[PlannedEntry]) -> list[Computed]:
            is_whole, block_tokens = len(entries) == len(plan.entries), self.ledger.block_size_tokens
            if is_whole and plan.prepared is not None:
                return self._forward(entries, plan.prepared)
            batch = plan.batch if is_whole else None
            batch = batch or lay_out(self._state.lane, entries, (), block_tokens, self._model.windows)
            return self._forward(entries, self._prepared(batch))

        computed = _run_guarded(forward, plan.entries, failures)
        on_forward_done()

        def score(entries: Sequence[Computed]) -> list[Scored]:
            return self._scorer.score(entries, failures)

        scored = _run_guarded(score, [one for one in computed if one.planned.scored_rows], failures)
        failed = {failure.id for failure in failures}
        sampling = [one for one in computed if one.entry.samples and one.entry.id not in failed]
        results = _run_guarded(self._tokens.sample, sampling, failures)
        return computed, results, scored

    def _run_in_lock_step(
        self, plan: LanePlan, failures: list[EntryFailed], on_forward_done: Callable[[], None]
    ) -> tuple[list[Computed], list[Result], list[Scored]]:
        """Do the same as `_run_alone` together with other ranks, so that no part can be repeated."""
        assert self._pipeline is not None
        computed: list[Computed] = []
        if plan.batch is not None:
            computed = self._forward(plan.entries, plan.prepared or self._prepared(plan.batch))
        on_forward_done()
        # Sampling first, because it is launched while the layers run; the rest waits for the device.
        sampling = [one for one in computed if one.entry.samples]
        results = self._tokens.sample(sampling) if sampling else []
        scored: list[Scored] = []
        if self._pipeline.is_last_stage:
            failures += _lost(computed, self._model.device)
            scored = self._scorer.score(computed, failures)
        return computed, results, scored

    def _forward(self, entries: Sequence[PlannedEntry], step: PreparedStep) -> list[Computed]:
        """Run the entries, which are the step's flat batch."""
        asked = self._clock()
        inputs = self._input(entries)
        self._waited_seconds = self._clock() - asked
        if step.captured is not None:  # captured layers do not wait for fetches
            self._kv_cache.await_layers()
        hidden = self._model.forward(inputs, step)
        if self._pipeline is not None and not self._pipeline.is_last_stage and len(hidden):
            self._pipeline.send_hidden(hidden)
        ends = accumulate(one.entry.token_count for one in entries)
        return [
            Computed(one, hidden, end - 1 - len(one.entry.drafts))
            for one, end in zip(entries, ends, strict=True)
        ]

    def _input(self, entries: Sequence[PlannedEntry]) -> Tensor:
        """Return token ids, int64 [rows], on the first stage, else the previous stage's hidden states."""
        if self._pipeline is not None and not self._pipeline.is_first_stage:
            return self._pipeline.receive_hidden()
        self._tokens.learn_for(entries)
        runs = [ids for one in entries for ids in one.fed_tokens()]
        return torch.from_numpy(np.concatenate([np.empty(0, dtype=np.int32), *runs]).astype(np.int64))


def _run_guarded(
    run: Callable[[Sequence[_Item]], list[_Result]], items: Sequence[_Item], failures: list[EntryFailed]
) -> list[_Result]:
    """Call `run` on all items at once, or on each alone if that raises, so that only failing items end."""
    if not items:
        return []
    try:
        return run(items)
    except Exception as error:  # noqa: BLE001 (whatever a kernel raises, the engine lives on)
        if len(items) == 1:
            _log.warning("%s failed: %s", items[0].entry.id, error)
            failures.append(
                EntryFailed(items[0].entry.id, _failure_reason(error), f"{type(error).__name__}: {error}")
            )
            return []
        _log.warning("a batch of %d sequences failed, so each runs alone: %s", len(items), error)
    # Outside the handler: inside it, the traceback would keep the failed attempt's tensors alive.
    return [result for item in items for result in _run_guarded(run, [item], failures)]


def _parted(copies: Sequence[TierCopy]) -> tuple[Sequence[TierCopy], Sequence[TierCopy]]:
    """Return the copies up to the last one to host memory, and the fetches after it, which may be made beside a step."""
    last = max((at for at, one in enumerate(copies) if not one.is_fetch), default=-1)
    return copies[: last + 1], copies[last + 1 :]


def _samples(result: Result, failures: list[EntryFailed]) -> list[Sample]:
    """Return the tokens that were sampled for an entry, or record its failure."""
    name = result.planned.entry.id
    if result.failure is not None:
        failures.append(EntryFailed(name, result.failure.reason, result.failure.detail))
    return [Sample(name, one.token, finish_reason, one.logprob) for one, finish_reason in result.sampled]


def _lost(computed: Sequence[Computed], device: Device) -> list[EntryFailed]:
    """Return failures for entries that arrived as NaN because some rank could not compute them.

    Entries that sample are left out, because sampling detects theirs.
    """
    unseen = [one for one in computed if not one.entry.samples]
    if not unseen:
        return []
    finite = last_hidden(unseen, device).isfinite().all(dim=1).tolist()
    detail = "hidden states hold NaN: the model's numbers have overflowed or its weights are damaged"
    return [
        EntryFailed(one.entry.id, "not_finite", detail)
        for one, is_finite in zip(unseen, finite, strict=True)
        if not is_finite
    ]


def _failure_reason(error: Exception) -> FailureReason:
    """Return the failure reason: "out_of_memory" if memory ran out, else "internal"."""
    return "out_of_memory" if ran_out(error) else "internal"
