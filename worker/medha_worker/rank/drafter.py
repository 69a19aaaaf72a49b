"""Guesses of a draft model: a smaller model that computes the tokens of all steps, too, and writes a few tokens ahead.

Only the rank that samples has one. It knows the ids of all tokens, so it can compute a step's rows once more with the
draft model. The KV of that model lies in a pool of its own, at the same blocks as that of the served model. Whatever the
ledger decides of a block, to share, copy or free it, is then decided for both.

A guess is sampled as the next token is: with the same parameters, and the same random numbers for its position. So two
models that agree on the likely tokens mostly agree on the sampled one. Grammars and log-probabilities play no part, and
penalties count the tokens that are known, but no guesses. Nothing here changes what is sampled: KV of wrong guesses is
overwritten once the tokens in their place are known.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows it by
from torch import Tensor

from medha.kv.blocks import BlockCopy
from medha.wire.frames import TokenIds
from medha_worker.kernels.sequence_span import SequenceSpan
from medha_worker.model.kv_cache import KVCache
from medha_worker.model.sampler import SampledToken, SequenceSampler
from medha_worker.model.token_sampler import TokenSampler
from medha_worker.model.transformer import Transformer
from medha_worker.rank.kv_parallel_plan import LOCAL
from medha_worker.rank.lane_plan import PlannedEntry
from medha_worker.rank.sampled_tokens import Result

_log = logging.getLogger("medha.executor")

_NEGATIVE_INFINITY = float("-inf")

Guesses = tuple[tuple[str, tuple[int, ...]], ...]
"""Guesses at the next tokens of sequences, with their names."""


@dataclass(slots=True)
class _Drawing:
    """A sequence that guesses are drawn for; `position` is that of the first one."""

    name: str
    row: int  # of the hidden states that the next guess is drawn from
    most: int
    position: int
    table: Sequence[int] | np.ndarray[tuple[int], np.dtype[np.int64]]
    sampler: SequenceSampler  # of the guesses
    guesses: list[int] = field(default_factory=list)

    @property
    def goes_on(self) -> bool:
        """True if another guess is wanted behind the last one."""
        return len(self.guesses) < self.most and self.guesses[-1] not in self.sampler.stop_ids


class Drafter:
    """Follows the sequences of a lane with a draft model, and draws guesses from it."""

    def __init__(self, model: Transformer, kv_cache: KVCache, vocab_size: int) -> None:
        """`kv_cache` has the blocks of the served model's pool; `vocab_size` is that of the served model."""
        self._model = model
        self._kv_cache = kv_cache
        self._vocab_size = vocab_size
        self._sampler = TokenSampler(model.kernels.race, model.device)
        self._samplers: WeakKeyDictionary[SequenceSampler, SequenceSampler] = WeakKeyDictionary()

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy the KV of blocks, as the served model's is copied; the draft model frees none before its windows.

        If that fails, guesses are wrong, and the step goes on.
        """
        try:
            self._kv_cache.copy_blocks(copies)
        except Exception as error:  # noqa: BLE001 - whatever a kernel raises, the engine lives on
            _log.warning("the draft model could not copy the KV of %d blocks: %s", len(copies), error)

    def follow(self, entries: Sequence[PlannedEntry], results: Sequence[Result]) -> Guesses:
        """Compute the rows of entries that a step has computed and sampled, and draw the guesses that they ask for.

        Whatever fails here, the step stands, and there are no guesses.
        """
        try:
            return self._follow(entries, {id(one.planned): one for one in results})
        except Exception as error:  # noqa: BLE001 - whatever a kernel raises, the engine lives on
            _log.warning("the draft model has failed for %d sequences: %s", len(entries), error)
            return ()

    def _follow(self, entries: Sequence[PlannedEntry], results: dict[int, Result]) -> Guesses:
        runs: list[tuple[TokenIds, SequenceSpan]] = []
        drawing: list[_Drawing] = []
        row = 0
        for one in entries:
            if one.entry.strategy != LOCAL:
                continue  # its KV lies on several lanes
            start, result = one.entry.extents[0].start, results.get(id(one))
            accepted = max(len(result.sampled) - 1, 0) if result is not None else 0
            stop = one.known + accepted
            found = self._drawing(one, stop, result)
            ids = one.sequence.tokens(start, stop + (found is not None))
            runs.append((ids, SequenceSpan(row, len(ids), start, one.table)))
            row += len(ids)
            if found is not None:
                found.row = row - 1
                drawing.append(found)
        if not runs:
            return ()
        hidden = self._forward(runs)
        self._draw(hidden, drawing)
        return tuple((one.name, tuple(one.guesses)) for one in drawing if one.guesses)

    def _drawing(self, one: PlannedEntry, position: int, result: Result | None) -> _Drawing | None:
        """Return what is drawn behind an entry's last token, at `position`; None for nothing."""
        sampler = one.sequence.sampler
        if result is None or not result.sampled or sampler is None or sampler.mask is not None:
            return None
        if result.sampled[-1][1] is not None:  # it has ended
            return None
        # Each guess needs the KV of the token before it, and the last block of the sequence ends somewhere.
        most = min(one.entry.draws, len(one.table) * self._kv_cache.block_tokens - position)
        if most <= 0:
            return None
        standing_in = self._samplers.get(sampler)
        if standing_in is None:
            standing_in = self._samplers[sampler] = sampler.ahead()
        return _Drawing(one.entry.id, 0, most, position + 1, one.table, standing_in)

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

    def _draw(self, hidden: Tensor, drawing: Sequence[_Drawing]) -> None:
        """Draw the guesses of all sequences, one of each at a time."""
        going = list(drawing)
        while going:
            rows = self._model.device.place(torch.tensor([one.row for one in going]))
            for one in going:
                one.sampler.position = one.position + len(one.guesses)
            logits = self._logits(hidden.index_select(0, rows))
            sampled = self._sampler.sample(logits, [one.sampler for one in going])
            for one, token in zip(going, sampled, strict=True):
                if isinstance(token, SampledToken):
                    one.guesses.append(token.token)
                else:
                    one.most = 0
            going = [one for one in going if one.guesses and one.goes_on]
            if not going:
                return
            runs = []
            for row, one in enumerate(going):
                last = np.array(one.guesses[-1:], dtype=np.int32)
                one.row = row
                runs.append((last, SequenceSpan(row, 1, one.position + len(one.guesses) - 1, one.table)))
            hidden = self._forward(runs)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return logits over the served model's vocabulary, float32 [rows, vocab]."""
        logits = self._model.logits(hidden)
        assert logits is not None, "a draft model runs alone"
        missing = self._vocab_size - logits.shape[1]
        if missing > 0:
            return F.pad(logits, (0, missing), value=_NEGATIVE_INFINITY)
        return logits[:, : self._vocab_size]
