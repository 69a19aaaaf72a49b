"""FlashInfer's paged attention as an attention backend, reading the engine's pool in place.

The pool's [kv_heads, slots, head_dim] is a view of FlashInfer's HND layout, [pages, kv_heads, page, head_dim]: it reads
strides. A step is planned once, as up to four kinds of batches (`page_tables`), and each layer runs them into one result.

FlashInfer's log-sum-exps have base 2, here and in its merge. They become natural in one place, at the end of `attend`,
and only if something needs them. The implementations that are used here ignore FlashInfer's own argument for sinks, so
sinks are added to the result.

`make gpu-check` runs it on a GPU; docs/gpu.md has the results.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from medha_worker.device import Device, Mark
from medha_worker.kernels.flashinfer.call_checks import check_batch, check_planned, check_tensors
from medha_worker.kernels.flashinfer.page_tables import PagedBatch, decode_batch, step_batches
from medha_worker.kernels.flashinfer.wrapper_pool import GRAPH_PLAN_BYTES, Kind, WrapperPool, zeros
from medha_worker.kernels.partial_results import add_sinks
from medha_worker.kernels.protocol import KernelSizes
from medha_worker.kernels.sequence_span import SequenceSpan

_NO_WINDOW = -1
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True, slots=True)
class ScaledPool:
    """A pool whose K and V are FP8 numbers times one factor each."""

    dtype: torch.dtype  # torch.float8_e4m3fn or torch.float8_e5m2
    key_scale: float
    value_scale: float


class FlashInferAttention:
    """Attention over the paged pool by FlashInfer. Threads may plan while another one runs steps."""

    def __init__(
        self,
        library: Any,
        device: Device,
        sizes: KernelSizes,
        *,
        wide_rows: int | None = None,
        scaled_pool: ScaledPool | None = None,
    ) -> None:
        """Set up attention.

        Args:
            library: The package `flashinfer`.
            device: The pool's; its dtype is that of queries and, without `scaled_pool`, of the pool.
            sizes: Heads and their size.
            wide_rows: Rows from which a batch of chunks without a window runs on FlashInfer's "fa3" instead of "fa2"; None: none
                does.
            scaled_pool: The pool's numbers if they are FP8. Only "fa2" reads them with queries of 16 bits.

        Raises:
            ValueError: `scaled_pool` is given with `wide_rows`, or with another type than FP8.
        """
        if scaled_pool is not None and wide_rows is not None:
            raise ValueError(
                f"wide_rows is {wide_rows}, and has to be None with scaled_pool: fa3 reads no FP8 pool with queries of 16 bits"
            )
        if scaled_pool is not None and scaled_pool.dtype not in _FP8:
            raise ValueError(f"scaled_pool has {scaled_pool.dtype}, and has to be one of {_FP8}")
        self._pool_dtype = device.dtype if scaled_pool is None else scaled_pool.dtype
        self.scales = (
            {}
            if scaled_pool is None
            else {"k_scale": scaled_pool.key_scale, "v_scale": scaled_pool.value_scale}
        )
        self.library, self.device = library, device
        self._sizes = sizes.query_heads, sizes.kv_heads, sizes.head_dim
        self._wide_rows = math.inf if wide_rows is None else wide_rows
        self.pool = WrapperPool(library, device, sizes)

    def plan(
        self, spans: Sequence[SequenceSpan], block_tokens: int, window_tokens: int | None = None
    ) -> FlashInferStep:
        """Plan a step. The caller keeps the result until it has given the step's work to the device."""
        batches = step_batches(spans, block_tokens, window_tokens)
        window = (
            _NO_WINDOW if window_tokens is None else window_tokens - 1
        )  # FlashInfer leaves out the row's own key
        runs = []
        if batches.decodes is not None:
            runs.append(self._run("decode", batches.decodes, block_tokens, window))
        if batches.causal is not None:
            kind = self._chunk_kind(batches.causal, window)
            runs.append(self._run(kind, batches.causal, block_tokens, window, causal=True))
        if batches.contexts is not None:
            kind = self._chunk_kind(batches.contexts, window)
            runs.append(self._run(kind, batches.contexts, block_tokens, window))
        for own, before in batches.strided:
            runs.append(self._run("masked", own, block_tokens, _NO_WINDOW))
            if before is not None:
                kind = self._chunk_kind(before, _NO_WINDOW)
                runs.append(self._run(kind, before, block_tokens, _NO_WINDOW, merged=True))
        step = FlashInferStep(self, runs, block_tokens)
        planned = self.device.runtime.mark()
        for run in runs:
            back = weakref.finalize(step, self.pool.give_back, run.kind, run.wrapper, planned)
            back.atexit = False
        return step

    def _chunk_kind(self, batch: PagedBatch, window: int) -> Kind:
        return "wide" if window == _NO_WINDOW and len(batch.rows) >= self._wide_rows else "prefill"

    def for_graph(self, rows: int, most_blocks: int) -> FlashInferGraph:
        """Return attention of `rows` decodes of together at most `most_blocks` blocks that can be captured."""
        return FlashInferGraph(self, rows, most_blocks)

    def plan_decodes(self, wrapper: Any, batch: PagedBatch, block_tokens: int, window: int) -> None:
        """Plan a decode wrapper; `window` is the number of keys that a row sees before its own, or -1 for all."""
        wrapper.plan(
            *self._tables(batch, block_tokens),
            *self._sizes,
            block_tokens,
            **self._options(window),
        )

    def _plan_chunks(
        self, wrapper: Any, batch: PagedBatch, block_tokens: int, window: int, causal: bool
    ) -> None:
        # Bits of several sequences would be addressed as if each bit were a byte, so a masked batch has one sequence.
        assert batch.mask is None or len(batch.last_page_tokens) == 1
        wrapper.plan(
            torch.from_numpy(batch.row_starts),
            *self._tables(batch, block_tokens),
            *self._sizes,
            block_tokens,
            packed_custom_mask=None
            if batch.mask is None
            else self.device.place(torch.from_numpy(batch.mask)),
            causal=causal,
            **self._options(window),
        )

    def _tables(
        self, batch: PagedBatch, block_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return where pages start, the pages, and the keys in the last ones. A plan reads all but pages on the host."""
        check_batch(batch, block_tokens)
        starts, last = torch.from_numpy(batch.page_starts), torch.from_numpy(batch.last_page_tokens)
        pages = self.device.place(torch.from_numpy(batch.pages))
        check_planned(starts, pages, self.device.torch_device)
        return starts, pages, last

    def _options(self, window: int) -> dict[str, Any]:
        """Return what both kinds of plans take; the default type of q is float16, whatever the model's is."""
        return {
            "window_left": window,
            "sm_scale": 1.0 / math.sqrt(self._sizes[2]),
            "q_data_type": self.device.dtype,
            "kv_data_type": self._pool_dtype,
        }

    def _run(
        self,
        kind: Kind,
        batch: PagedBatch,
        block_tokens: int,
        window: int,
        *,
        causal: bool = False,
        merged: bool = False,
    ) -> _Run:
        wrapper = self.pool.take(kind)
        if kind == "decode":
            self.plan_decodes(wrapper, batch, block_tokens, window)
        else:
            self._plan_chunks(wrapper, batch, block_tokens, window, causal)
        rows = batch.as_slice
        if merged:
            assert rows is not None, "only chunks are merged, whose rows lie side by side"
        placed = self.device.place(torch.from_numpy(batch.rows)) if rows is None else rows
        return _Run(kind, wrapper, placed, merged, int(batch.pages.max()))

    def paged(
        self,
        q: torch.Tensor,
        pool_keys: torch.Tensor,
        pool_values: torch.Tensor,
        block_tokens: int,
        last_page: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of the pool as FlashInfer takes it, [pages, kv_heads, page, head_dim]."""
        query_heads, kv_heads, head_dim = self._sizes
        check_tensors(
            q,
            pool_keys,
            pool_values,
            query_heads=query_heads,
            dtype=self.device.dtype,
            pool_dtype=self._pool_dtype,
            block_tokens=block_tokens,
            last_page=last_page,
        )
        shape = kv_heads, pool_keys.shape[1] // block_tokens, block_tokens, head_dim
        return pool_keys.view(shape).transpose(0, 1), pool_values.view(shape).transpose(0, 1)


class _Run:
    """A planned wrapper, and where its rows are."""

    def __init__(
        self, kind: Kind, wrapper: Any, rows: slice | torch.Tensor, merged: bool, last_page: int
    ) -> None:
        """`rows` is a slice, or int64 on the device; `merged` results join those that are there."""
        self.kind: Kind = kind
        self.wrapper = wrapper
        self.last_page = last_page
        self._rows, self._merged = rows, merged

    def __call__(
        self,
        attention: FlashInferAttention,
        q: torch.Tensor,
        pages: tuple[torch.Tensor, torch.Tensor],
        output: torch.Tensor,
        sums: torch.Tensor,
    ) -> None:
        """Write output and log-sum-exps, of base 2, of these rows."""
        rows, scales = self._rows, attention.scales
        if not isinstance(rows, slice):
            part, part_sums = self.wrapper.run(q.index_select(0, rows), pages, return_lse=True, **scales)
            output.index_copy_(0, rows, part)
            sums.index_copy_(0, rows, part_sums)
        elif self._merged:
            part, part_sums = self.wrapper.run(q[rows], pages, return_lse=True, **scales)
            attention.library.merge_state_in_place(output[rows], sums[rows], part, part_sums)
        else:
            self.wrapper.run(q[rows], pages, out=output[rows], lse=sums[rows], return_lse=True, **scales)


class FlashInferStep:
    """The planned attention of one step. When it is dropped, its wrappers can be planned again."""

    def __init__(self, attention: FlashInferAttention, runs: Sequence[_Run], block_tokens: int) -> None:
        self._attention, self._runs, self._block_tokens = attention, runs, block_tokens
        self._last_page = max(run.last_page for run in runs)

    def attend(
        self,
        q: torch.Tensor,
        pool_keys: torch.Tensor,
        pool_values: torch.Tensor,
        sinks: torch.Tensor | None = None,
        *,
        needs_sums: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        pages = self._attention.paged(q, pool_keys, pool_values, self._block_tokens, self._last_page)
        output = q.new_empty(q.shape)
        sums = q.new_empty(q.shape[:2], dtype=torch.float32)
        for run in self._runs:
            run(self._attention, q, pages, output, sums)
        return _finished(output, sums, sinks, needs_sums)


class FlashInferGraph:
    """Decodes whose tables keep their place in memory: `attend` can be captured, and replayed after each `replan`."""

    def __init__(self, attention: FlashInferAttention, rows: int, most_blocks: int) -> None:
        """Allocate tables for `rows` decodes, which have together at most `most_blocks` blocks."""
        device, partials = attention.device, attention.pool.partials_of_decodes(rows)
        self._attention, self._rows, self._most_blocks = attention, rows, most_blocks
        self._wrapper = attention.library.BatchDecodeWithPagedKVCacheWrapper(
            partials,
            kv_layout="HND",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=zeros(device, rows + 1, torch.int32),
            paged_kv_indices_buffer=zeros(device, most_blocks, torch.int32),
            paged_kv_last_page_len_buffer=zeros(device, rows, torch.int32),
            backend="fa2",
        )
        self._wrapper.reset_workspace_buffer(partials, zeros(device, GRAPH_PLAN_BYTES, torch.uint8))
        self._staged: Mark | None = None
        self._block_tokens = self._last_page = 0

    def replan(self, spans: Sequence[SequenceSpan], block_tokens: int) -> None:
        """Fill the tables; see `GraphAttention.replan`."""
        batch = decode_batch(spans, block_tokens)
        assert np.array_equal(batch.rows, np.arange(self._rows)), (
            f"other rows than {self._rows} decodes in order"
        )
        assert len(batch.pages) <= self._most_blocks, (
            f"{len(batch.pages)} blocks, and space for {self._most_blocks}"
        )
        if self._staged is not None and not self._staged.is_done():
            self._attention.device.synchronise()  # the plan before this one is still in its pinned memory
        self._attention.plan_decodes(self._wrapper, batch, block_tokens, _NO_WINDOW)
        self._staged = self._attention.device.runtime.mark()
        self._block_tokens, self._last_page = block_tokens, int(batch.pages.max())

    def attend(
        self,
        q: torch.Tensor,
        pool_keys: torch.Tensor,
        pool_values: torch.Tensor,
        sinks: torch.Tensor | None = None,
        *,
        needs_sums: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        pages = self._attention.paged(q, pool_keys, pool_values, self._block_tokens, self._last_page)
        output, sums = self._wrapper.run(q, pages, return_lse=True, **self._attention.scales)
        return _finished(output, sums, sinks, needs_sums)


def _finished(
    output: torch.Tensor, sums: torch.Tensor, sinks: torch.Tensor | None, needs_sums: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a result whose log-sum-exps have base 2 as the protocol has it."""
    if needs_sums or sinks is not None:
        sums.mul_(math.log(2))
    return (output, sums) if sinks is None else add_sinks(output, sums, sinks)
