"""Paged attention in which a row sees the same tiles of keys in the same order, in a chunk of any size and as a decode.

The keys of a sequence lie in tiles of one size from position 0, and these in splits of `SPLIT_KEYS`. One kernel computes
each split of each tile of rows alone, so that a single decode over a long context keeps many processors busy. A second one
merges the splits of a row in their order. Keys that a row does not see add exact zeros, so it does not matter which other
rows share its tile, nor how many splits those have.

Tests run it by Triton's interpreter and compile it for sm_80, sm_90 and sm_100; `make gpu-check` runs it on a GPU (docs/gpu.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from medha_worker.device import Device
from medha_worker.kernels.partial_results import add_sinks
from medha_worker.kernels.protocol import KernelSizes, StepAttention
from medha_worker.kernels.sequence_span import SequenceSpan

TILE_ROWS = 64
"""Rows times query heads of a KV head in one program."""
TILE_KEY_BYTES = 128
"""Keys of a tile times the bytes of a value: 64 keys in 16-bit types, 32 in float32, by the shared memory of an A100."""
SPLIT_KEYS = 8192
"""Keys of one program: a decode behind 1,000,000 tokens has 123 of them for each KV head."""
_PARTIAL_BYTES = 128 * 2**20
"""Memory for results of splits; a step that needs more is computed in several launches."""
_TASK_FIELDS, _ROW_FIELDS = tl.constexpr(9), tl.constexpr(4)


@triton.jit  # type: ignore[untyped-decorator]
def split_kernel(  # type: ignore[no-untyped-def]
    q, keys, values, blocks, tasks, outputs, sums, scale,
    row_stride, head_stride, query_heads, group, block_tokens,
    head_dim: tl.constexpr, dim_tile: tl.constexpr,
    tile_rows: tl.constexpr, tile_keys: tl.constexpr, split_keys: tl.constexpr,
):  # fmt: skip
    """Write attention of a tile of rows to the keys of one split, and its log-sum-exps.

    q: [rows, query_heads, head_dim] with `row_stride`; keys, values: [kv_heads, slots, head_dim] with `head_stride`;
    blocks: int32, block tables; outputs: float32 [slots of partial results, query_heads, head_dim]; sums likewise.
    tasks: int64 [tasks, 9]: first row, rows, last key of the first row, keys by which each row sees more, start
    of the block table, first key of the first row, keys by which each row's first lies behind, split, first slot.
    """
    task, kv_head = tasks + tl.program_id(0) * _TASK_FIELDS, tl.program_id(1)
    first_row, rows = tl.load(task), tl.load(task + 1)
    first_last, step = tl.load(task + 2), tl.load(task + 3)
    table, first_first, first_step = tl.load(task + 4), tl.load(task + 5), tl.load(task + 6)
    split, slot = tl.load(task + 7), tl.load(task + 8)
    packed = tl.arange(0, tile_rows)
    row, head = packed // group, kv_head * group + packed % group
    is_row, first, last = row < rows, first_first + row * first_step, first_last + row * step
    dim = tl.arange(0, dim_tile)
    is_dim = dim < head_dim
    at = (first_row + row)[:, None] * row_stride + head[:, None] * head_dim + dim[None, :]
    queries = tl.load(q + at, mask=is_row[:, None] & is_dim[None, :], other=0.0)
    largest = tl.full((tile_rows,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((tile_rows,), dtype=tl.float32)
    result = tl.zeros((tile_rows, dim_tile), dtype=tl.float32)
    stop = tl.minimum((split + 1) * split_keys, first_last + (rows - 1) * step + 1)
    # Tiles before every row's window would add nothing.
    first_seen = tl.maximum(first_first, 0) // tile_keys * tile_keys
    for start in range(tl.maximum(split * split_keys, first_seen), stop, tile_keys):
        position = start + tl.arange(0, tile_keys)
        # Blocks before every row's window may be others by then.
        is_key = (position < stop) & (position >= first_first)
        block = tl.load(blocks + table + position // block_tokens, mask=is_key, other=0).to(tl.int64)
        place = (
            kv_head.to(tl.int64) * head_stride + (block * block_tokens + position % block_tokens) * head_dim
        )
        in_pool, is_there = place[:, None] + dim[None, :], is_key[:, None] & is_dim[None, :]
        key = tl.load(keys + in_pool, mask=is_there, other=0.0)
        value = tl.load(values + in_pool, mask=is_there, other=0.0)
        scores = tl.dot(queries, tl.trans(key), input_precision="ieee") * scale
        sees = (position[None, :] <= last[:, None]) & (position[None, :] >= first[:, None])
        scores = tl.where(sees, scores, -float("inf"))
        larger = tl.maximum(largest, tl.max(scores, axis=1))
        base = tl.where(
            larger == -float("inf"), 0.0, larger
        )  # a row that has seen nothing: -inf - -inf is NaN
        weights, fade = tl.exp(scores - base[:, None]), tl.exp(largest - base)
        total = total * fade + tl.sum(weights, axis=1)
        result = tl.dot(weights.to(value.dtype), value, result * fade[:, None], input_precision="ieee")
        largest = larger
    some = tl.where(total == 0.0, 1.0, total)
    target = (slot + row) * query_heads + head
    tl.store(sums + target, tl.where(total == 0.0, -float("inf"), largest + tl.log(some)), mask=is_row)
    tl.store(
        outputs + target[:, None] * head_dim + dim[None, :],
        result / some[:, None],
        mask=is_row[:, None] & is_dim[None, :],
    )


@triton.jit  # type: ignore[untyped-decorator]
def merge_kernel(  # type: ignore[no-untyped-def]
    outputs, sums, places, output, log_sums, query_heads, head_dim: tl.constexpr, dim_tile: tl.constexpr
):
    """Write the merged result of a row and query head, split after split.

    outputs, sums: as `split_kernel` writes them; output: [rows, query_heads, head_dim]; log_sums: float32 [rows, query_heads].
    places: int64 [rows, 4]: the row, its first slot, slots from one split to the next, splits.
    """
    place, head = places + tl.program_id(0) * _ROW_FIELDS, tl.program_id(1)
    row, slot, step, splits = tl.load(place), tl.load(place + 1), tl.load(place + 2), tl.load(place + 3)
    dim = tl.arange(0, dim_tile)
    is_dim = dim < head_dim
    merged = tl.zeros((dim_tile,), dtype=tl.float32)
    union = tl.full((), -float("inf"), dtype=tl.float32)
    for split in range(splits):
        at = (slot + split * step) * query_heads + head
        part, part_sum = tl.load(outputs + at * head_dim + dim, mask=is_dim, other=0.0), tl.load(sums + at)
        larger = tl.maximum(union, part_sum)
        base = tl.where(larger == -float("inf"), 0.0, larger)
        kept, added = tl.exp(union - base), tl.exp(part_sum - base)
        both = tl.where(kept + added == 0.0, 1.0, kept + added)
        merged = (merged * kept + part * added) / both
        union = tl.where(larger == -float("inf"), larger, base + tl.log(both))
    target = row * query_heads + head
    tl.store(output + target * head_dim + dim, merged.to(output.dtype.element_ty), mask=is_dim)
    tl.store(log_sums + target, union)


class TritonAttention:
    """`AttentionBackend` on a GPU."""

    def __init__(self, device: Device, sizes: KernelSizes, *, split_keys: int = SPLIT_KEYS) -> None:
        """`split_keys` is a multiple of the keys of a tile."""
        self.tile_keys = TILE_KEY_BYTES // device.dtype.itemsize
        assert split_keys % self.tile_keys == 0
        self.device, self.sizes, self.split_keys = device, sizes, split_keys

    def plan(
        self, spans: Sequence[SequenceSpan], block_tokens: int, window_tokens: int | None = None
    ) -> StepAttention:
        return _TritonStep(self, spans, block_tokens, window_tokens)

    def for_graph(self, rows: int, most_blocks: int) -> None:
        """Return None: the grid depends on the lengths, so that a capture would not fit the next step."""


@dataclass(frozen=True, slots=True)
class _Launch:
    """Tiles of rows whose partial results are in memory together."""

    tasks: torch.Tensor
    places: torch.Tensor
    slots: int


class _TritonStep:
    def __init__(
        self,
        attention: TritonAttention,
        spans: Sequence[SequenceSpan],
        block_tokens: int,
        window_tokens: int | None,
    ) -> None:
        self._attention, self._block_tokens = attention, block_tokens
        sizes, device = attention.sizes, attention.device
        spans = [span.within(window_tokens) for span in spans]
        tables = [np.asarray(span.blocks, dtype=np.int32) for span in spans]
        self._blocks = device.place(torch.from_numpy(np.concatenate(tables)))
        starts = np.cumsum([0, *(len(table) for table in tables)]).tolist()
        tiles = [
            tile
            for span, start in zip(spans, starts[:-1], strict=True)
            for tile in _tiles(span, start, TILE_ROWS // (sizes.query_heads // sizes.kv_heads))
        ]
        slot_bytes = 4 * sizes.query_heads * (sizes.head_dim + 1)
        grouped = _launches(tiles, attention.split_keys, max(1, _PARTIAL_BYTES // slot_bytes))
        self._launches = [
            _Launch(device.place(torch.from_numpy(tasks)), device.place(torch.from_numpy(places)), slots)
            for tasks, places, slots in grouped
        ]

    def attend(
        self,
        q: torch.Tensor,
        pool_keys: torch.Tensor,
        pool_values: torch.Tensor,
        sinks: torch.Tensor | None = None,
        *,
        needs_sums: bool = True,  # noqa: ARG002 - they cost nothing here
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, query_heads, head_dim = q.shape
        kv_heads = pool_keys.shape[0]
        assert q.stride()[1:] == (head_dim, 1)
        assert pool_keys.stride() == pool_values.stride()
        assert pool_keys.stride()[1:] == (head_dim, 1)
        output = q.new_empty(rows, query_heads, head_dim)
        log_sums = q.new_empty(rows, query_heads, dtype=torch.float32)
        dim_tile = max(16, triton.next_power_of_2(head_dim))
        for launch in self._launches:
            partial = q.new_empty(launch.slots, query_heads, head_dim, dtype=torch.float32)
            sums = q.new_empty(launch.slots, query_heads, dtype=torch.float32)
            split_kernel[len(launch.tasks), kv_heads](
                q, pool_keys, pool_values, self._blocks, launch.tasks, partial, sums, 1.0 / math.sqrt(head_dim),
                q.stride(0), pool_keys.stride(0), query_heads, query_heads // kv_heads, self._block_tokens,
                head_dim, dim_tile, TILE_ROWS, self._attention.tile_keys, self._attention.split_keys,
            )  # fmt: skip
            merge_kernel[len(launch.places), query_heads](
                partial, sums, launch.places, output, log_sums, query_heads, head_dim, dim_tile
            )
        return (output, log_sums) if sinks is None else add_sinks(output, log_sums, sinks)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Rows of one sequence that a program computes together."""

    first_row: int
    rows: int
    first_last: int
    """Last key that the first row sees."""
    step: int
    """Keys by which each row sees more than the row before it."""
    table: int
    """Start of the sequence's block table."""
    first_first: int
    """First key that the first row sees."""
    first_step: int
    """Keys by which the first key that a row sees comes after that of the row before it."""


def _tiles(span: SequenceSpan, table: int, rows_per_tile: int) -> Iterator[_Tile]:
    last, step = (span.context_length, span.stride) if span.is_causal else (span.context_length - 1, 0)
    for first in range(0, span.row_count, rows_per_tile):
        rows = min(rows_per_tile, span.row_count - first)
        first_first = span.first_key + first * span.first_stride
        yield _Tile(
            span.row_start + first, rows, last + first * step, step, table, first_first, span.first_stride
        )


_Table = npt.NDArray[np.int64]


def _launches(
    tiles: Sequence[_Tile], split_keys: int, most_slots: int
) -> Iterator[tuple[_Table, _Table, int]]:
    """Yield the tasks, the places of the rows and the number of slots of each launch, with at most so many slots.

    A launch has one tile at least.
    """
    tasks: list[_Table] = []
    places: list[_Table] = []
    slots = 0
    for tile in tiles:
        first = max(0, tile.first_first) // split_keys
        splits = (tile.first_last + (tile.rows - 1) * tile.step) // split_keys + 1 - first
        if tasks and slots + splits * tile.rows > most_slots:
            yield np.concatenate(tasks), np.concatenate(places), slots
            tasks, places, slots = [], [], 0
        index, row = np.arange(splits), np.arange(tile.rows)
        fixed = (
            tile.first_row, tile.rows, tile.first_last, tile.step, tile.table, tile.first_first, tile.first_step,
        )  # fmt: skip
        tasks.append(_columns(splits, *fixed, first + index, slots + index * tile.rows))
        places.append(_columns(tile.rows, tile.first_row + row, slots + row, tile.rows, splits))
        slots += splits * tile.rows
    yield np.concatenate(tasks), np.concatenate(places), slots


def _columns(rows: int, *columns: int | npt.NDArray[np.int64]) -> _Table:
    """Return int64 [rows, columns]."""
    return np.stack([np.broadcast_to(column, rows) for column in columns], axis=1).astype(np.int64)
