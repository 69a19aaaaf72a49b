"""Turns a step's spans into the batches of FlashInfer that compute them: integers in host memory, as it takes them.

A page is a block of the pool. FlashInfer has one mask for a whole batch, so spans are sorted by what their rows see:

* **decodes**: single rows, which see all keys;
* **causal**: chunks, aligned to the bottom right: the last row sees all keys, each row before it one key less;
* **contexts**: chunks whose rows see the context alone, all of it;
* **strided**: chunks whose rows see several keys more than the row before. FlashInfer has no such mask, so that own
  tokens take an explicit one, and the context before them is a batch without a mask. Both results are merged.
  Rows whose spans say themselves where each row's window begins take an explicit mask over all that they see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from medha_worker.kernels.sequence_span import SequenceSpan

Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class PagedBatch:
    """Rows of some sequences, and the pages of the keys that they see.

    Attributes:
        rows: Rows of the step, in the order of the batch, int64 [rows].
        row_starts: Where each sequence's rows begin in the batch, and their number, int32 [sequences + 1].
        page_starts: Where each sequence's pages begin, and their number, int32 [sequences + 1].
        pages: Pages of all sequences, int32 [pages].
        last_page_tokens: Keys in each sequence's last page, 1 to the size of a page, int32 [sequences].
        mask: One bit for each row and key of the only sequence, row by row, the lowest bit of a byte first; 1: the
            row sees the key. uint8, or None if the batch has no explicit mask.
    """

    rows: npt.NDArray[np.int64]
    row_starts: Int32s
    page_starts: Int32s
    pages: Int32s
    last_page_tokens: Int32s
    mask: npt.NDArray[np.uint8] | None = None

    @property
    def as_slice(self) -> slice | None:
        """The rows as a slice of the step, if they lie side by side there."""
        first, last = int(self.rows[0]), int(self.rows[-1])
        return slice(first, last + 1) if last - first + 1 == len(self.rows) else None


@dataclass(frozen=True, eq=False)
class StepBatches:
    """The batches of a step; `strided` has own tokens and the context before them, if there is any."""

    decodes: PagedBatch | None
    causal: PagedBatch | None
    contexts: PagedBatch | None
    strided: list[tuple[PagedBatch, PagedBatch | None]]


def step_batches(
    spans: Sequence[SequenceSpan], block_tokens: int, window_tokens: int | None = None
) -> StepBatches:
    """Return the batches of a step.

    Raises:
        ValueError: there is a window, and a span is of a context alone.
    """
    decodes, causal, contexts = [], [], []
    strided = []
    for span in spans:
        seen = span.within(window_tokens)
        keys = _Keys(span, seen.first_seen, span.total_length)
        if span.has_window:
            strided.append(_masked(span, block_tokens, has_window=True))
        elif span.row_count == 1:
            decodes.append(keys)
        elif not span.is_causal:
            contexts.append(keys)
        elif span.stride == 1:
            causal.append(keys)
        else:
            strided.append(_masked(seen, block_tokens, has_window=window_tokens is not None))
    return StepBatches(
        decodes=_batch(decodes, block_tokens),
        causal=_batch(causal, block_tokens),
        contexts=_batch(contexts, block_tokens),
        strided=strided,
    )


def decode_batch(spans: Sequence[SequenceSpan], block_tokens: int) -> PagedBatch:
    """Return the batch of spans that are all decodes, of which there is at least one."""
    batch = step_batches(spans, block_tokens).decodes
    assert batch is not None
    assert len(batch.rows) == len(spans), "a span has more than one row"
    return batch


@dataclass(frozen=True, eq=False)
class _Keys:
    """The keys `first .. stop` (exclusive) of a span's sequence."""

    span: SequenceSpan
    first: int
    stop: int


def _batch(
    group: Sequence[_Keys], block_tokens: int, mask: npt.NDArray[np.uint8] | None = None
) -> PagedBatch | None:
    """Return the batch of some spans; the first page of each begins at or before its first key."""
    if not group:
        return None
    firsts = [keys.first // block_tokens for keys in group]
    stops = [-(-keys.stop // block_tokens) for keys in group]
    tables = [keys.span.blocks[first:stop] for keys, first, stop in zip(group, firsts, stops, strict=True)]
    pages = np.concatenate(tables).astype(np.int32)
    assert len(pages) == sum(stops) - sum(firsts), "a block table is shorter than its sequence"
    if all(keys.span.row_count == 1 for keys in group):
        rows = np.array([keys.span.row_start for keys in group], dtype=np.int64)
    else:
        rows = np.concatenate([np.arange(keys.span.rows.start, keys.span.rows.stop) for keys in group])
    return PagedBatch(
        rows=rows,
        row_starts=_starts([keys.span.row_count for keys in group]),
        page_starts=_starts([stop - first for first, stop in zip(firsts, stops, strict=True)]),
        pages=pages,
        last_page_tokens=np.array([(keys.stop - 1) % block_tokens + 1 for keys in group], dtype=np.int32),
        mask=mask,
    )


def _starts(counts: Sequence[int]) -> Int32s:
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)


def _masked(
    span: SequenceSpan, block_tokens: int, *, has_window: bool
) -> tuple[PagedBatch, PagedBatch | None]:
    """Return a span's masked batch, and that of the context before it.

    Without a window, the mask covers the span's own tokens; with one, everything that any row sees.
    """
    context = span.context_length
    lowest = span.first_seen if has_window else context
    page_start = lowest // block_tokens * block_tokens
    key, row = np.arange(page_start, span.total_length)[None, :], np.arange(span.row_count)[:, None]
    last_seen = context + span.stride * row if span.is_causal else context - 1 + 0 * row
    seen = (key >= lowest) & (key <= last_seen)
    if has_window:
        seen &= key >= span.first_key + span.first_stride * row
    mask = np.packbits(seen.reshape(-1), bitorder="little")
    own = _batch([_Keys(span, lowest, span.total_length)], block_tokens, mask)
    assert own is not None
    before = [] if has_window or not context else [_Keys(span, 0, context)]
    return own, _batch(before, block_tokens)
