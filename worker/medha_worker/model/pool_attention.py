"""Attention to a KV pool of which some blocks may be streamed from host memory, and writes to such a pool.

The keys of a row are cut at the border of the pool and at those of segments. Each part gives a partial result, and these
are merged exactly by their log-sum-exp, as those of several lanes are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from medha.kv.blocks import runs_in_order
from medha_worker.device import Device
from medha_worker.kernels.partial_results import merge_partials
from medha_worker.kernels.protocol import KVWriter, StepWrite
from medha_worker.kernels.sequence_span import SequenceSpan
from medha_worker.model.kv_cache import KVCache
from medha_worker.model.latent_forms import HeadMatrices
from medha_worker.model.partial_attention import Attending, Partial, Rows
from medha_worker.model.streamed_blocks import Segment, SegmentReads

Ids = npt.NDArray[np.int64]


def streamed_blocks_in(span: SequenceSpan, pool_blocks: int) -> int:
    """Return how many of the first blocks of a span's table are streamed: those with numbers after the pool's."""
    if not len(span.blocks) or span.blocks[0] < pool_blocks:
        return 0
    return int(np.count_nonzero(np.asarray(span.blocks) >= pool_blocks))


def part_of(span: SequenceSpan, first: int, stop: int, blocks: Ids) -> list[SequenceSpan]:
    """Return the attention of a span's rows to its tokens `first .. stop`, which lie in `blocks`.

    `first` is the first token of the first of these. Rows that see none of these tokens have no span.
    """
    rows = np.arange(span.row_count)
    starts = np.maximum(span.first_key + rows * span.first_stride, 0)
    if span.is_causal:
        ends = span.context_length + 1 + rows * span.stride
    else:
        ends = np.full(span.row_count, span.context_length)
    seeing = np.flatnonzero((ends > first) & (starts < stop))
    if not len(seeing):
        return []
    begin, behind = int(seeing[0]), int(seeing[-1]) + 1
    whole = min(max(int(np.searchsorted(ends, stop)), begin), behind) if span.is_causal else begin
    found: list[SequenceSpan] = []
    if begin < whole:  # their own keys are among these
        context = int(ends[begin]) - 1 - first
        found.append(_moved(span, begin, whole - begin, context, first, blocks, is_causal=True))
    if whole < behind:
        context = min(int(ends[whole]), stop) - first
        found.append(_moved(span, whole, behind - whole, context, first, blocks, is_causal=False))
    return found


def _moved(
    span: SequenceSpan, row: int, count: int, context: int, first: int, blocks: Ids, *, is_causal: bool
) -> SequenceSpan:
    return replace(
        span,
        row_start=span.row_start + row,
        row_count=count,
        context_length=context,
        blocks=blocks,
        is_causal=is_causal,
        stride=span.stride if is_causal else 1,
        first_key=span.first_key + row * span.first_stride - first,
    )


@dataclass(frozen=True, slots=True)
class _Stream:
    """The streamed keys that some rows see: segments, and the attention to each."""

    rows: slice
    parts: Sequence[tuple[Segment, Partial]]


class PoolAttention:
    """The attention of a step's rows to a pool, of which blocks may be streamed, in all layers with the same window."""

    def __init__(
        self, rows: Rows, cache: KVCache, attending: Attending, written: frozenset[int] = frozenset()
    ) -> None:
        """`written` are the streamed blocks to which the step writes, counted from the first one."""
        self._cache = cache
        near: list[SequenceSpan] = []
        far: dict[int, list[tuple[SequenceSpan, int]]] = {}
        for span in rows.spans:
            count = 0 if cache.streamed is None else streamed_blocks_in(span, cache.num_blocks)
            if count == 0:
                near.append(span)
                continue
            border = count * cache.block_tokens
            near += part_of(span, border, span.total_length + 1, np.asarray(span.blocks)[count:])
            far.setdefault(id(span.blocks), []).append((span, count))
        self._near = Partial(Rows(rows.count, near), attending)
        self._streams = [_stream(spans, cache, attending, written) for spans in far.values()]
        self._reads: SegmentReads | None = None

    @property
    def segments(self) -> Iterator[Segment]:
        """The segments that `attend` reads, in this order."""
        return (segment for stream in self._streams for segment, _ in stream.parts)

    def read_by(self, reads: SegmentReads) -> None:
        """Set what reads segments; it is needed if there are some."""
        self._reads = reads

    def attend(
        self, layer: int, q: torch.Tensor, matrices: HeadMatrices | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return output and log-sum-exp as `Partial.attend` does: zeros and -inf for rows that see no keys."""
        output, sums = self._near.attend(q, self._cache.keys[layer], self._cache.values[layer], matrices)
        for stream in self._streams:
            assert self._reads is not None
            merged, union = output[stream.rows].float(), sums[stream.rows]
            for segment, partial in stream.parts:
                pools = self._reads.read(layer, segment)
                part, part_sums = partial.attend(q[stream.rows], *pools, matrices)
                self._reads.used()
                merged, union = merge_partials((merged, part), (union, part_sums))
            output[stream.rows], sums[stream.rows] = merged.to(output.dtype), union
        return output, sums


def _stream(
    spans: Sequence[tuple[SequenceSpan, int]], cache: KVCache, attending: Attending, written: frozenset[int]
) -> _Stream:
    streamed, size = cache.streamed, cache.block_tokens
    assert streamed is not None
    count = spans[0][1]
    first_row = min(span.row_start for span, _ in spans)
    last_row = max(span.rows.stop for span, _ in spans)
    table = np.asarray(spans[0][0].blocks[:count], dtype=np.int64) - cache.num_blocks
    step = count if streamed.in_place else streamed.segment_blocks
    parts: list[tuple[Segment, Partial]] = []
    seen_blocks = -(-max(span.total_length for span, _ in spans) // size)
    for start in range(0, min(count, seen_blocks), step):
        blocks = table[start : start + step]
        there = blocks if streamed.in_place else np.arange(len(blocks))
        found = [
            replace(part, row_start=part.row_start - first_row)
            for span, _ in spans
            for part in part_of(span, start * size, (start + len(blocks)) * size, there)
        ]
        if found:
            segment = Segment(tuple(runs_in_order(blocks)), not written.isdisjoint(blocks.tolist()))
            parts.append((segment, Partial(Rows(last_row - first_row, found), attending)))
    return _Stream(slice(first_row, last_row), parts)


class PoolWrite:
    """The write of new K and V to slots of a pool, some of which may be streamed."""

    def __init__(self, slots: Ids, cache: KVCache, writer: KVWriter) -> None:
        """`slots` are int64 [rows], none of which occurs twice."""
        self._cache, streamed = cache, cache.streamed
        border = cache.num_blocks * cache.block_tokens
        is_far = slots >= border if streamed is not None else np.zeros(len(slots), dtype=np.bool_)
        self.written: frozenset[int] = frozenset()
        """Streamed blocks that get new K and V."""
        self._near: StepWrite | None = None
        self._near_rows: torch.Tensor | None = None  # None: all rows
        self._far_rows: torch.Tensor | None = None  # None: no rows
        if not is_far.any():
            self._near = writer.plan(slots) if len(slots) else None
            return
        assert streamed is not None
        far_slots = slots[is_far] - border
        self.written = frozenset((far_slots // cache.block_tokens).tolist())
        if not is_far.all():
            self._near = writer.plan(slots[~is_far])
            self._near_rows = _placed(np.flatnonzero(~is_far), cache.device)
        self._far_rows = _placed(np.flatnonzero(is_far), cache.device)
        self._far = writer.plan(far_slots) if streamed.in_place else None
        self._far_runs = list(_runs(far_slots))

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store K and V, [rows, kv_heads, head_dim], in one layer's pool; the same tensor twice if they are one."""
        if self._near is not None:
            pools = self._cache.keys[layer], self._cache.values[layer]
            self._near.write(*pools, *_rows_of(keys, values, self._near_rows))
        if self._far_rows is None:
            return
        streamed, far = self._cache.streamed, _rows_of(keys, values, self._far_rows)
        assert streamed is not None
        if self._far is not None:
            self._far.write(*streamed.pools[layer], *far)
        else:
            streamed.write(layer, far, self._far_runs)


def read_segments(cache: KVCache, attention: Sequence[PoolAttention]) -> None:
    """Give attention the segments of streamed blocks that it reads; `attention` has one item for each layer, in order."""
    if cache.streamed is None:
        return
    order: Iterable[tuple[int, Segment]] = (
        (layer, segment) for layer, one in enumerate(attention) for segment in one.segments
    )
    reads = SegmentReads(cache.streamed, order)
    for one in attention:
        one.read_by(reads)


def _rows_of(
    keys: torch.Tensor, values: torch.Tensor, rows: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if rows is None:
        return keys, values
    some = keys[rows]
    return some, some if values is keys else values[rows]


def _placed(rows: npt.NDArray[np.intp], device: Device) -> torch.Tensor:
    return device.place(torch.from_numpy(rows))


def _runs(slots: Ids) -> Iterator[tuple[slice, slice]]:
    """Yield rows and slots of each run of consecutive slots."""
    breaks = np.flatnonzero(slots[1:] != slots[:-1] + 1) + 1
    for first, stop in pairwise((0, *breaks.tolist(), len(slots))):
        yield slice(first, stop), slice(int(slots[first]), int(slots[stop - 1]) + 1)
