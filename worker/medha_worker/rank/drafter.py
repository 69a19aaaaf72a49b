"""Guesses of a draft model: a smaller model that writes a few tokens ahead of the sequences that a step names.

Only the rank that samples the tokens of a lane has a draft model. That rank knows the ids of all tokens, so the draft model
can compute the tokens of a sequence later than the served model does. It follows a sequence only if an entry asks for it;
other sequences cost nothing. It keeps all KV that it has computed, including that of guesses that turned out right.

The draft model's KV lies in a pool of its own, in blocks of the same numbers as the served model's. So if the ledger
shares, copies or frees a block, that holds for both. For each block it is noted how many of its tokens the draft model
has computed, so sequences that share a prompt share the draft model's KV, too.

It follows sequences whose KV lies on this lane alone. Blocks of others have no KV of the draft model.

Guesses are proposed by `medha_worker.rank.guess_rounds`. They never change what is sampled: KV of wrong guesses is
overwritten once the tokens in their place are known.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows it by
from torch import Tensor

from medha.kv.blocks import BlockCopy, Run
from medha.kv.host_tier import TierCopy
from medha.wire.frames import TokenIds
from medha_worker.kernels.sequence_span import SequenceSpan
from medha_worker.model.kv_cache import KVCache
from medha_worker.model.sampler import SequenceSampler
from medha_worker.model.token_sampler import TokenSampler
from medha_worker.model.transformer import Transformer
from medha_worker.rank.guess_rounds import (
    Followed,
    Guesses,
    Proposing,
    goes_on,
    known_tokens,
    propose_rounds,
    proposed,
)
from medha_worker.rank.kv_parallel_plan import LOCAL, Ids
from medha_worker.rank.lane_plan import PlannedEntry
from medha_worker.rank.lane_state import SequenceState
from medha_worker.rank.sampled_tokens import Computed, Result

_log = logging.getLogger("medha.executor")

_NEGATIVE_INFINITY = float("-inf")

Table = Sequence[int] | np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(slots=True)
class _Following:
    """The progress of the draft model in a sequence: the tokens that it has computed, and its guesses after them."""

    blocks: int  # of its table that are known here
    computed: int  # tokens whose KV of the draft model is right
    noted: int = 0  # computed tokens that are noted with their blocks
    guesses: tuple[int, ...] = ()  # of the tokens from `computed` on; the KV of all but the last is there
    standing_in: SequenceSampler | None = None  # sampler of guesses

    def settle(self, sequence: SequenceState, stop: int) -> None:
        """Keep the KV of the guesses that are the sequence's tokens before `stop`."""
        kept = min(len(self.guesses) - 1, stop - self.computed)
        if kept > 0:
            known = sequence.tokens(self.computed, self.computed + kept).tolist()
            pairs = zip(known, self.guesses, strict=False)
            self.computed += len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        self.guesses = ()


@dataclass(slots=True)
class _Run:
    """The tokens of a sequence that are computed now, up to `stop`, and how many guesses are proposed after them."""

    planned: PlannedEntry
    following: _Following
    stop: int
    proposes: int = 0


class Drafter:
    """Follows the sequences of a lane with a draft model if a step asks for it, and proposes guesses."""

    def __init__(
        self, model: Transformer, kv_cache: KVCache, vocab_size: int, *, host_blocks: int = 0
    ) -> None:
        """`kv_cache` has the blocks of the served model's pool; `vocab_size` is that of the served model.

        `host_blocks` is the number of blocks of the pool's host tier.
        """
        self._model = model
        self._kv_cache = kv_cache
        self._vocab_size = vocab_size
        self._sampler = TokenSampler(model.kernels.race, model.device)
        self._following: WeakKeyDictionary[SequenceSampler, _Following] = WeakKeyDictionary()
        self._filled = np.zeros(kv_cache.num_blocks, dtype=np.int64)  # tokens computed of each block
        self._filled_in_host = np.zeros(host_blocks, dtype=np.int64)  # the same of blocks of the host tier

    def copied(self, copies: Sequence[TierCopy]) -> None:
        """Record copies between the pool and its host tier."""
        for one in copies:
            there = self._filled_in_host[one.slot : one.slot + one.count]
            here = self._filled[one.block : one.block + one.count]
            source, target = (there, here) if one.is_fetch else (here, there)
            target[:] = source

    def loaded(self, slots: Iterable[Run]) -> None:
        """Record host blocks that come from files, which have no KV of the draft model."""
        for first, length in slots:
            self._filled_in_host[first : first + length] = 0

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy the KV of blocks, as the served model's is copied; the draft model frees none before its windows.

        If that fails, the draft model computes it again.
        """
        copies = [one for one in copies if not one.in_windows]
        filled = [one for one in copies if self._filled[one.source]]
        self._filled[[one.target for one in copies]] = 0  # what was noted is of the content before
        if not filled:
            return
        try:
            self._kv_cache.copy_blocks(filled)
            self._filled[[one.target for one in filled]] = self._filled[[one.source for one in filled]]
        except Exception as error:  # noqa: BLE001 - whatever a kernel raises, the engine lives on
            _log.warning("the draft model could not copy the KV of %d blocks: %s", len(filled), error)

    def overwritten(self, blocks: Ids) -> None:
        """Record blocks that have other KV since this step, of sequences that the draft model does not follow."""
        self._filled[blocks] = 0

    def note(self, computed: Sequence[Computed], results: Sequence[Result]) -> Followed:  # noqa: ARG002
        """Record the blocks of a step's entries; return the new sequences that have computed tokens already.

        Call it for each step, because a block that a sequence begins to use had other content before.
        """
        found = []
        for one in (each.planned for each in computed):
            sampler = one.sequence.sampler
            if one.entry.strategy != LOCAL or sampler is None:
                continue  # its KV lies on several lanes
            following = self._following.get(sampler)
            if following is None:
                following = self._following[sampler] = self._begin(one)
                if following.computed:
                    found.append((one.entry.id, following.computed))
            elif len(one.table) > following.blocks:
                self._filled[one.table[following.blocks :]] = 0
                following.blocks = len(one.table)
        return tuple(found)

    def _begin(self, one: PlannedEntry) -> _Following:
        """Record the blocks of a sequence whose first entry begins after what was cached, shared or copied."""
        size, start = self._kv_cache.block_tokens, one.entry.extents[0].start
        first = start // size
        own = np.asarray(one.table[first:], dtype=np.int64)
        self._filled[own[1:]] = 0
        self._filled[own[:1]] = np.minimum(self._filled[own[:1]], start % size)
        filled = self._filled[np.asarray(one.table[: first + 1], dtype=np.int64)]
        partial = np.flatnonzero(filled < size)
        computed = len(filled) * size if len(partial) == 0 else partial[0] * size + filled[partial[0]]
        return _Following(len(one.table), int(min(computed, start)), int(min(computed, start)))

    def follow(self, computed: Sequence[Computed], results: Sequence[Result]) -> Guesses:
        """Compute the tokens that entries ask for, after the step that has sampled `results`, and propose their guesses.

        If this fails, the step remains valid, and there are no guesses.
        """
        asked = [one.planned for one in computed if one.entry.proposes or one.entry.follows]
        if not asked:
            return ()
        try:
            return self._follow(asked, {id(one.planned): one for one in results})
        except Exception as error:  # noqa: BLE001 - whatever a kernel raises, the engine lives on
            _log.warning("the draft model has failed for %d sequences: %s", len(asked), error)
            return ()

    def _follow(self, entries: Sequence[PlannedEntry], results: dict[int, Result]) -> Guesses:
        runs = [run for one in entries if (run := self._run(one, results.get(id(one)))) is not None]
        if not runs:
            return ()
        fed: list[tuple[TokenIds, SequenceSpan]] = []
        proposing: list[Proposing] = []
        row = 0
        for run in runs:
            ids = run.planned.sequence.tokens(run.following.computed, run.stop)
            fed.append((ids, SequenceSpan(row, len(ids), run.following.computed, run.planned.table)))
            row += len(ids)
            if run.proposes:
                assert run.following.standing_in is not None
                proposing.append(
                    Proposing(run.planned, run.following.standing_in, run.stop, run.proposes, row - 1)
                )
        hidden = self._forward(fed)
        for run in runs:
            self._computed(run)
        if proposing:
            rows = self._model.device.place(torch.tensor([one.row for one in proposing]))
            propose_rounds(self._sampler, proposing, self._logits(hidden.index_select(0, rows)), self._behind)
        guesses = {id(one.planned): tuple(one.guesses) for one in proposing}
        for run in runs:
            run.following.guesses = guesses.get(id(run.planned), ())
        return proposed(proposing)

    def _run(self, one: PlannedEntry, result: Result | None) -> _Run | None:
        """Return what the draft model computes of an entry's sequence; None for nothing."""
        sampler = one.sequence.sampler
        following = None if sampler is None else self._following.get(sampler)
        if sampler is None or following is None:
            return None
        start = one.entry.extents[0].start
        may_propose = goes_on(result)
        known = known_tokens(one, result) if may_propose else start
        following.settle(one.sequence, known - 1)  # a guess needs the hidden state of the token before it
        proposes = 0
        if may_propose and sampler.mask is None and following.computed + one.entry.follows >= start:
            # Each guess needs the KV of the token before it, for which the sequence's blocks must have room.
            room = len(one.table) * self._kv_cache.block_tokens - known + 1
            proposes = max(min(one.entry.proposes, room), 0)
        stop = known if proposes else min(following.computed + one.entry.follows, start)
        if stop <= following.computed:
            return None
        if proposes and following.standing_in is None:
            following.standing_in = sampler.ahead()
        return _Run(one, following, stop, proposes)

    def _computed(self, run: _Run) -> None:
        """Note the tokens of a run as computed, with their blocks."""
        size, following = self._kv_cache.block_tokens, run.following
        blocks = np.arange(following.noted // size, -(-run.stop // size))
        self._filled[np.asarray(run.planned.table)[blocks]] = np.minimum(run.stop - blocks * size, size)
        following.computed = following.noted = run.stop

    def _forward(self, runs: Sequence[tuple[TokenIds, SequenceSpan]]) -> Tensor:
        """Return the hidden states of runs of tokens, [rows, hidden]; writes their KV."""
        spans = [span for _, span in runs]
        positions = np.concatenate(
            [np.arange(one.context_length, one.context_length + one.row_count) for one in spans]
        )
        # A checkpoint may pad its vocabulary otherwise than the other's; no token is in the padding.
        ids = np.concatenate([ids for ids, _ in runs]).clip(max=self._model.config.vocab_size - 1)
        step = self._model.prepare(torch.from_numpy(positions), spans, self._kv_cache)
        return self._model.forward(torch.from_numpy(ids.astype(np.int64)), step)

    def _behind(self, going: Sequence[Proposing]) -> Tensor:
        """Compute the last guess of each sequence, and return the logits of the next ones."""
        runs = []
        for row, one in enumerate(going):
            last = np.array(one.guesses[-1:], dtype=np.int32)
            span = SequenceSpan(row, 1, one.known + len(one.guesses) - 1, one.planned.table)
            runs.append((last, span))
        return self._logits(self._forward(runs))

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return logits over the served model's vocabulary, float32 [rows, vocab]."""
        logits = self._model.logits(hidden)
        assert logits is not None, "a draft model runs alone"
        missing = self._vocab_size - logits.shape[1]
        if missing > 0:
            return F.pad(logits, (0, missing), value=_NEGATIVE_INFINITY)
        return logits[:, : self._vocab_size]
