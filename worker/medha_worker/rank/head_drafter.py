"""Guesses of a prediction head, which continues from the hidden states that the served model has computed.

Only the rank that samples the tokens of a lane has one. The head computes each position right after the step that computes
it, once the token after it is known; for the last position of a prompt, that is the token that the step samples. So the
head's KV is always complete. It is one more layer in the same blocks of the rank's KV pool, so it is shared, copied, kept
in tiers and freed with them. At the last position that sequences share, their next tokens differ, but a shared block has
the head's KV for that of the first sequence only. That changes no text, and hardly a guess.

Sequences on several lanes are left out: the head's layer exchanges nothing with other lanes. If sequences that lie on this
lane alone share a prefix with such a sequence, the head's KV of that prefix is missing, and their guesses may be worse.

After the last known token, the head computes its own guesses, from its own hidden states. KV of wrong ones is overwritten
once the tokens in their place are known.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from medha.kv.blocks import BlockCopy, Run
from medha.kv.host_tier import TierCopy
from medha.wire.frames import TokenIds
from medha_worker.kernels.sequence_span import SequenceSpan
from medha_worker.model.kv_cache import KVCache
from medha_worker.model.prediction_head import PredictionHead
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
from medha_worker.rank.kv_parallel_plan import LOCAL
from medha_worker.rank.sampled_tokens import Computed, Result

_log = logging.getLogger("medha.executor")


@dataclass(frozen=True, slots=True)
class _Part:
    """The rows of an entry that the head computes, whose first one is row `row` of the step's hidden states."""

    computed: Computed
    row: int
    count: int

    @property
    def start(self) -> int:
        """Position of the first row."""
        return self.computed.entry.extents[0].start

    @property
    def ids(self) -> TokenIds:
        """The tokens after the positions, int32 [count]."""
        return self.computed.planned.sequence.tokens(self.start + 1, self.start + 1 + self.count)


class HeadDrafter:
    """Computes a prediction head along with the steps of a lane, and proposes guesses where steps ask for them."""

    def __init__(self, head: PredictionHead, kv_cache: KVCache, model: Transformer) -> None:
        """`kv_cache` is the head's layer of the pool of the served model, which is `model`."""
        self._head = head
        self._kv_cache = kv_cache
        self._model = model
        self._sampler = TokenSampler(head.kernels.race, head.device)
        self._standing_in: WeakKeyDictionary[SequenceSampler, SequenceSampler] = WeakKeyDictionary()
        self._last: dict[str, int] = {}  # rows of `_hidden`, by sequence
        self._hidden: Tensor | None = None  # the head's, of the last rows that were computed of each entry

    def copied(self, copies: Sequence[TierCopy]) -> None:
        """Do nothing: the pool's copies include the head's layer."""

    def loaded(self, slots: Iterable[Run]) -> None:
        """Do nothing: files of KV include the head's layer."""

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Do nothing: the pool's copies include the head's layer."""

    def overwritten(self, blocks: npt.NDArray[np.int64]) -> None:
        """Do nothing: what the head computes does not depend on what it has computed in a block."""

    def note(self, computed: Sequence[Computed], results: Sequence[Result]) -> Followed:
        """Compute the head at all positions of a step after which the token is known, of sequences on this lane alone.

        If this fails, the step remains valid, and there are no guesses.
        """
        self._last, self._hidden = {}, None
        sampled = {id(one.planned): one for one in results}
        parts = [part for one in computed if (part := _part(one, sampled.get(id(one.planned)))) is not None]
        if not parts:
            return ()
        try:
            rows = [one.computed.hidden[one.row : one.row + one.count] for one in parts]
            before = self._head.taken(self._model, torch.cat(rows))
            spans, row = [], 0
            for one in parts:
                spans.append(SequenceSpan(row, one.count, one.start, one.computed.planned.table))
                row += one.count
                self._last[one.computed.entry.id] = len(spans) - 1
            hidden = self._forward(np.concatenate([one.ids for one in parts]), before, spans)
            ends = self._head.device.place(
                torch.tensor([span.row_start + span.row_count - 1 for span in spans])
            )
            self._hidden = hidden.index_select(0, ends)
        except Exception as error:  # noqa: BLE001 - whatever a kernel raises, the engine lives on
            _log.warning("the prediction head has failed for %d sequences: %s", len(parts), error)
            self._last, self._hidden = {}, None
        return ()

    def follow(self, computed: Sequence[Computed], results: Sequence[Result]) -> Guesses:
        """Propose the guesses that entries ask for, after the positions that `note` has computed.

        If this fails, the step remains valid, and there are no guesses.
        """
        sampled = {id(one.planned): one for one in results}
        proposing = [
            one
            for each in computed
            if (one := self._proposing(each, sampled.get(id(each.planned)))) is not None
        ]
        if not proposing or self._hidden is None:
            return ()
        try:
            rows = self._head.device.place(torch.tensor([one.row for one in proposing]))
            self._hidden = self._hidden.index_select(0, rows)
            for row, one in enumerate(proposing):
                one.row = row
            propose_rounds(self._sampler, proposing, self._logits(self._hidden), self._behind)
        except Exception as error:  # noqa: BLE001 - whatever a kernel raises, the engine lives on
            _log.warning("the prediction head has failed for %d guesses: %s", len(proposing), error)
            return ()
        return proposed(proposing)

    def _proposing(self, computed: Computed, result: Result | None) -> Proposing | None:
        """Return the guesses that are proposed for an entry; None for none."""
        planned, sampler = computed.planned, computed.planned.sequence.sampler
        row = self._last.get(computed.entry.id)
        if row is None or sampler is None or sampler.mask is not None or not goes_on(result):
            return None
        known = known_tokens(planned, result)
        # Each guess but the first needs the KV of the guess before it, for which the sequence's blocks must have room.
        room = len(planned.table) * self._kv_cache.block_tokens - known + 2
        proposes = min(computed.entry.proposes, room)
        if proposes < 1:
            return None
        standing_in = self._standing_in.get(sampler)
        if standing_in is None:
            standing_in = self._standing_in[sampler] = sampler.ahead()
        return Proposing(planned, standing_in, known, proposes, row)

    def _behind(self, going: Sequence[Proposing]) -> Tensor:
        """Compute the last guess of each sequence, and return the logits of the next ones."""
        assert self._hidden is not None
        before = self._hidden
        if len(going) < len(before):
            before = before.index_select(0, self._head.device.place(torch.tensor([one.row for one in going])))
        ids = np.array([one.guesses[-1] for one in going], dtype=np.int32)
        spans = []
        for row, one in enumerate(going):
            one.row = row
            spans.append(SequenceSpan(row, 1, one.known + len(one.guesses) - 2, one.planned.table))
        self._hidden = self._forward(ids, self._head.onward(before), spans)
        return self._logits(self._hidden)

    def _forward(self, ids: TokenIds, before: Tensor, spans: Sequence[SequenceSpan]) -> Tensor:
        """Return the head's hidden states of rows, [rows, hidden]; writes their KV."""
        positions = np.concatenate(
            [np.arange(one.context_length, one.context_length + one.row_count) for one in spans]
        )
        step = self._head.prepare(torch.from_numpy(positions), spans, self._kv_cache)
        return self._head.forward(torch.from_numpy(ids.astype(np.int64)), step, before)

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self._head.logits(hidden)
        assert logits is not None, "a prediction head runs alone"
        return logits


def _part(computed: Computed, result: Result | None) -> _Part | None:
    """Return the positions of an entry that the head computes: right ones, after which the token is known.

    None: there are none, or the sequence lies on several lanes.
    """
    entry, planned = computed.entry, computed.planned
    if entry.strategy != LOCAL:
        return None
    known = known_tokens(planned, result) if entry.samples else len(planned.sequence.prompt)
    start = entry.extents[0].start
    count = min(planned.stop, known - 1) - start
    if count < 1 or planned.sequence.sampler is None:
        return None
    return _Part(computed, computed.row + 1 + len(entry.drafts) - entry.token_count, count)
