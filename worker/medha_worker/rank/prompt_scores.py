"""Log-probabilities of prompt tokens, from the hidden states of the chunks that compute the prompt.

Logits are computed for blocks of rows, so that memory is bounded however large chunk and vocabulary are. All ranks of
a tensor group compute the same blocks in the same order, because they gather logits together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from medha.wire.messages import EntryFailed, Extent, PromptLogprobs
from medha_worker.device import HOST, Device
from medha_worker.model.out_of_memory import ran_out
from medha_worker.rank.kv_parallel_plan import positions
from medha_worker.rank.sampled_tokens import Computed

LOGITS_OF_A_BLOCK = 2**24
"""Largest number of logits that are computed at once; 64 MiB, and as much again for their exponentials."""

MOST_ROWS_OF_A_BLOCK = 1024

Scored = tuple[str, PromptLogprobs]


def rows_of_a_block(vocab_size: int) -> int:
    """Return the largest number of rows whose logits are computed at once."""
    return min(max(1, LOGITS_OF_A_BLOCK // vocab_size), MOST_ROWS_OF_A_BLOCK)


class PromptScorer:
    """Computes the log-probabilities that entries of a step ask for."""

    def __init__(self, logits: Callable[[Tensor], Tensor | None], device: Device, vocab_size: int) -> None:
        """`logits` takes hidden states [rows, hidden]; it returns None on a rank that only contributes to the logits of another
        rank."""
        self._logits = logits
        self._device = device
        self._block_rows = rows_of_a_block(vocab_size)

    def score(self, computed: Sequence[Computed], failures: list[EntryFailed]) -> list[Scored]:
        """Return the log-probabilities of the prompt tokens after the rows of entries, for entries that ask for them.

        Entries whose numbers are NaN, or for which memory runs out, are added to `failures`. On a rank that only
        contributes, the result is empty.
        """
        scored = []
        for one in [one for one in computed if one.planned.sequence.alternatives is not None]:
            rows = one.planned.scored_rows
            if rows and (found := self._score(one, rows, failures)) is not None:
                scored.append((one.entry.id, found))
        return scored

    def _score(self, one: Computed, rows: int, failures: list[EntryFailed]) -> PromptLogprobs | None:
        sequence, first = one.planned.sequence, one.row - one.entry.token_count + 1
        following = positions(one.entry.extents)[:rows] + 1
        ids = torch.from_numpy(sequence.prompt[following].astype(np.int64))
        blocks: list[list[Tensor]] = []
        failure: EntryFailed | None = None
        for start in range(0, rows, self._block_rows):
            stop = min(start + self._block_rows, rows)
            logits = self._logits(one.hidden[first + start : first + stop])
            if logits is None or failure is not None:
                continue  # the other ranks of the group compute all blocks
            try:
                blocks.append(
                    columns_of(logits, self._device.place(ids[start:stop]), sequence.alternatives or 0)
                )
            except (MemoryError, RuntimeError) as error:
                if not ran_out(error):
                    raise
                failure = EntryFailed(one.entry.id, "out_of_memory", f"too little memory for logits: {error}")
        if not blocks and failure is None:
            return None
        logprobs, ranks, top_logprobs, top_ids = (
            (
                list(chain.from_iterable(column.tolist() for column in columns))
                for columns in zip(*blocks, strict=True)
            )
            if blocks
            else ([], [], [], [])
        )
        if failure is None and np.isnan(logprobs).any():
            failure = EntryFailed(one.entry.id, "not_finite", "logits of the prompt are not finite")
        if failure is not None:
            failures.append(failure)
            return None
        extents = tuple(_following(one.entry.extents, rows))
        return PromptLogprobs(extents, tuple(logprobs), tuple(ranks), tuple(top_ids), tuple(top_logprobs))


def columns_of(logits: Tensor, ids: Tensor, alternatives: int) -> list[Tensor]:
    """Return log-probabilities [rows] and ranks [rows] of tokens, and both flat columns of the most probable ones.

    `logits` is float32 [rows, vocab] and `ids` int64 [rows]; the results are in host memory.
    """
    total = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, ids[:, None])
    ranks = (logits > chosen).sum(dim=-1) + 1
    top, top_ids = logits.topk(min(alternatives, logits.shape[1]), dim=-1)
    columns = [(chosen - total).flatten(), ranks, (top - total).flatten(), top_ids.flatten()]
    return [column.to(HOST) for column in columns]


def _following(extents: Sequence[Extent], rows: int) -> list[Extent]:
    """Return the positions one after the first `rows` positions of extents."""
    found = []
    for extent in extents:
        count = min(extent.count, rows)
        if count:
            found.append(Extent(extent.start + 1, count, extent.stride))
        rows -= count
    return found
