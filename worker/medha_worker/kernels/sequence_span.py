"""The mapping of a step's flat rows to sequences, and of a sequence's tokens to the KV pool."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from medha.cost.attention_pairs import attention_pairs


@dataclass(frozen=True, eq=False)
class SequenceSpan:
    """The part of one sequence that a step computes.

    Attributes:
        row_start: First row of the step's flat batch.
        row_count: New tokens, at positions `context_length ..`; at least one.
        context_length: Tokens whose K and V are already in the pool.
        blocks: Block table, covering context and new tokens; an int64 array if it is long.
        is_causal: Whether the rows' own K and V are in this pool, behind the context. If not (they are on
            another lane), every row sees the whole context, which is then not empty, and nothing else.
        stride: If rows are causal, the number of keys by which each row sees more than the row before it;
            above one if other lanes compute the positions between them.
        first_key: First token in this pool that the first row sees; below zero, the row sees all from the start.
        first_stride: The number of tokens by which the first token that a row sees comes after that of the row before
            it. Every row sees at least one token.
    """

    row_start: int
    row_count: int
    context_length: int
    blocks: Sequence[int] | npt.NDArray[np.int64]
    is_causal: bool = True
    stride: int = 1
    first_key: int = 0
    first_stride: int = 0

    @property
    def total_length(self) -> int:
        """Tokens in this pool that the last row sees."""
        if not self.is_causal:
            return self.context_length
        return self.context_length + 1 + (self.row_count - 1) * self.stride

    @property
    def pairs_without_window(self) -> int:
        """(Query, key) pairs of the rows, if each sees all tokens before it."""
        if not self.is_causal:
            return self.row_count * self.context_length
        return attention_pairs(self.row_count, self.context_length, self.stride)

    @property
    def rows(self) -> slice:
        return slice(self.row_start, self.row_start + self.row_count)

    @property
    def first_seen(self) -> int:
        """First token in this pool that any row sees."""
        return max(0, self.first_key)

    @property
    def has_window(self) -> bool:
        """True if some row does not see the first token in this pool."""
        return self.first_key + (self.row_count - 1) * self.first_stride > 0

    def within(self, window_tokens: int | None) -> "SequenceSpan":
        """Return the span whose rows see so many of their last tokens, their own among them; with None, itself.

        Raises:
            ValueError: there is a window, and the span is of a context alone.
        """
        if window_tokens is None:
            return self
        if not self.is_causal:
            raise ValueError(
                f"rows {self.row_start} to {self.rows.stop - 1} see a context alone, which does not say where they "
                f"stand: a window of {window_tokens} tokens needs spans with is_causal=True"
            )
        first = self.context_length + 1 - window_tokens
        return replace(self, first_key=first, first_stride=self.stride)

    def cut(self, block_tokens: int) -> "SequenceSpan":
        """Return the span without the blocks before the first token that any row sees."""
        unseen = self.first_seen // block_tokens
        if unseen == 0:
            return self
        return replace(
            self,
            context_length=self.context_length - unseen * block_tokens,
            first_key=self.first_key - unseen * block_tokens,
            blocks=self.blocks[unseen:],
        )


@dataclass(frozen=True)
class SlotRun:
    """Tokens of one sequence that lie side by side in the pool: slots `start .. stop`, exclusive."""

    start: int
    stop: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start


def slot_runs(span: SequenceSpan, first: int, last: int, block_tokens: int) -> list[SlotRun]:
    """Return the slots of tokens `first .. last` (exclusive), as few contiguous runs, in token order."""
    if first >= last:
        return []
    first_block, last_block = first // block_tokens, -(-last // block_tokens)
    blocks = np.asarray(span.blocks[first_block:last_block], dtype=np.int64)
    assert blocks.size == last_block - first_block, "the block table is shorter than the sequence"
    cuts = np.flatnonzero(np.diff(blocks) != 1) + 1
    starts = blocks[np.concatenate(([0], cuts))] * block_tokens
    stops = (blocks[np.concatenate((cuts - 1, [-1]))] + 1) * block_tokens
    starts[0] += first - first_block * block_tokens
    stops[-1] -= last_block * block_tokens - last
    return [SlotRun(start, stop) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
