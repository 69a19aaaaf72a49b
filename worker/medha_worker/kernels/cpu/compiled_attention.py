"""The compiled kernel as an attention backend: a step's work is split into tasks.

Threads take the tasks from a shared counter, the longest first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from medha_worker.kernels.cpu.attention_code import CALL_FIELDS, TASK_FIELDS, CompiledAttention
from medha_worker.kernels.cpu.host_compiler import Target
from medha_worker.kernels.cpu.openmp import OpenMP
from medha_worker.kernels.partial_results import add_sinks, merge_partials
from medha_worker.kernels.protocol import StepAttention
from medha_worker.kernels.sequence_span import SequenceSpan

# Rows of a task: its queries and sums, 0.4 MiB at head dimension 64, stay in second-level cache.
_TASK_ROWS = 768
# A decode over more keys than this is split, so that one long context keeps all threads busy.
_SPLIT_KEYS = 4096

_FIELD = {name: index for index, name in enumerate(CALL_FIELDS)}
_TOKENS, _HEAD, _START, _STOP = (
    TASK_FIELDS.index(name) for name in ("tokens", "head", "key_start", "key_stop")
)


@lru_cache
def compiled_kernel(head_dim: int, group: int, *, invariant: bool = False) -> CompiledAttention:
    """Return the kernel for a shape, compiled once, which takes half a second."""
    return CompiledAttention(head_dim, group, _TASK_ROWS, Target.of_host(), invariant=invariant)


class CpuAttention:
    """Exact float32 attention by the compiled kernel.

    One instance serves one thread at a time: its steps share the kernel's scratch memory.
    """

    def __init__(self, head_dim: int, group: int, openmp: OpenMP, *, invariant: bool = False) -> None:
        """Set up attention with `group` query heads per KV head, of `head_dim` values each.

        If `invariant`, a row gets the same bits as a decode and in a chunk of any size. Then no decode is split, so that
        a single long one keeps fewer threads busy, and keys are read twice.
        """
        self.group, self.invariant = group, invariant
        self._openmp = openmp
        self._kernel = compiled_kernel(head_dim, group, invariant=invariant)
        self._scratch = torch.empty(0)

    def plan(
        self, spans: Sequence[SequenceSpan], block_tokens: int, window_tokens: int | None = None
    ) -> StepAttention:
        return _CpuStep(self, spans, block_tokens, window_tokens)

    def for_graph(self, rows: int, most_blocks: int) -> None:
        """Return None: a CPU has nothing to gain from a captured step."""

    def scratch(self, threads: int) -> torch.Tensor:
        """Return each thread's memory, float32 [threads, floats], a page apart."""
        floats = self._kernel.scratch.offsets()["end"] + 1024
        if self._scratch.shape[0] < threads:
            self._scratch = torch.empty(threads, floats)
        return self._scratch

    def run(self, call: npt.NDArray[np.int64], tasks: int) -> None:
        self._openmp.run(self._kernel.address, call, min(torch.get_num_threads(), tasks))


class _CpuStep:
    """The tasks of one step.

    Parts of a split decode write to rows behind the others, and are merged from there.
    """

    def __init__(
        self,
        backend: CpuAttention,
        spans: Sequence[SequenceSpan],
        block_tokens: int,
        window_tokens: int | None,
    ) -> None:
        self._backend = backend
        self._slots = [_slots(span, block_tokens) for span in spans]
        self._rows = max(span.rows.stop for span in spans)
        self._output_rows = self._rows
        self._split: list[tuple[int, slice]] = []  # for each split decode: its row, and the rows of its parts
        self._parts: list[tuple[int, ...]] = []
        threads = torch.get_num_threads()
        # A single thread would gain nothing from parts, but would have to merge them in every layer.
        most_parts = 2 * threads if threads > 1 and not backend.invariant else 1
        for span, slots in zip(spans, self._slots, strict=True):
            first = span.first_seen(window_tokens)
            if span.row_count == 1:
                parts = min(most_parts, -(-(span.total_length - first) // _SPLIT_KEYS))
                self._add_decode(span, slots.ctypes.data, first, parts)
            elif window_tokens is not None:
                self._add_windows(span, slots.ctypes.data, window_tokens)
            else:
                self._add_chunk(span, slots.ctypes.data)
        self._tasks: npt.NDArray[np.int64] | None = None

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
        assert rows == self._rows
        assert query_heads == pool_keys.shape[0] * self._backend.group
        assert q.stride()[1:] == (head_dim, 1)
        assert pool_keys.stride() == pool_values.stride()
        if self._tasks is None:
            self._tasks = _for_each_head(self._parts, pool_keys.shape[0])
        output = torch.empty(self._output_rows, query_heads, head_dim)
        log_sum_exp = torch.empty(self._output_rows, query_heads)
        scratch = self._backend.scratch(torch.get_num_threads())
        call = np.zeros(len(CALL_FIELDS), dtype=np.int64)
        fields = {
            "tasks": self._tasks.ctypes.data, "task_rows": len(self._tasks),
            "q": q.data_ptr(), "q_stride": q.stride(0),
            "output": output.data_ptr(), "output_stride": output.stride(0), "log_sum_exp": log_sum_exp.data_ptr(),
            "keys": pool_keys.data_ptr(), "values": pool_values.data_ptr(), "head_stride": pool_keys.stride(0),
            "group": self._backend.group, "scratch": scratch.data_ptr(), "scratch_stride": scratch.stride(0),
        }  # fmt: skip
        for name, value in fields.items():
            call[_FIELD[name]] = value
        call[_FIELD["scale"] :].view(np.float32)[0] = math.log2(math.e) / math.sqrt(head_dim)
        self._backend.run(call, len(self._tasks))
        for row, parts in self._split:
            merged = merge_partials(output[parts].unbind(), log_sum_exp[parts].unbind())
            output[row], log_sum_exp[row] = merged
        result = output[:rows], log_sum_exp[:rows]
        return result if sinks is None else add_sinks(*result, sinks)

    def _add_decode(self, span: SequenceSpan, slots: int, first_key: int, parts: int) -> None:
        """Add a row against all keys from `first_key` on, split into `parts` runs of keys."""
        total, last = span.total_length, span.context_length
        if parts == 1:
            self._parts.append((span.row_start, 1, last, 1, 0, slots, first_key, total, span.row_start))
            return
        first = self._output_rows
        self._output_rows += parts
        self._split.append((span.row_start, slice(first, first + parts)))
        keys = total - first_key
        for part in range(parts):
            start, stop = (first_key + keys * edge // parts for edge in (part, part + 1))
            self._parts.append((span.row_start, 1, last, 1, 0, slots, start, stop, first + part))

    def _add_windows(self, span: SequenceSpan, slots: int, window_tokens: int) -> None:
        """Add each row by itself against the keys in its window."""
        for index in range(span.row_count):
            row, last = span.row_start + index, span.context_length + index * span.stride
            start = max(0, last + 1 - window_tokens)
            self._parts.append((row, 1, last, 1, 0, slots, start, last + 1, row))

    def _add_chunk(self, span: SequenceSpan, slots: int) -> None:
        """Add many rows in tasks of limited size, each against all keys that its last row sees."""
        step = max(1, _TASK_ROWS // self._backend.group)
        for first in range(0, span.row_count, step):
            tokens = min(step, span.row_count - first)
            row = span.row_start + first
            if span.is_causal:
                position = span.context_length + first * span.stride
                seen = position + 1 + (tokens - 1) * span.stride
            else:  # as if the rows stood behind all keys
                position = seen = span.total_length
            self._parts.append((row, tokens, position, span.stride, 0, slots, 0, seen, row))


def _slots(span: SequenceSpan, block_tokens: int) -> npt.NDArray[np.int32]:
    """Return the pool slot of each position of the sequence."""
    count = -(-span.total_length // block_tokens)
    blocks = np.asarray(span.blocks[:count], dtype=np.int32)
    assert blocks.size == count, "the block table is shorter than the sequence"
    slots = blocks[:, None] * np.int32(block_tokens) + np.arange(block_tokens, dtype=np.int32)
    return np.ascontiguousarray(slots.reshape(-1)[: span.total_length])


def _for_each_head(parts: Sequence[tuple[int, ...]], kv_heads: int) -> npt.NDArray[np.int64]:
    """Return the tasks, the longest first: every part of the step for every KV head."""
    tasks = np.repeat(np.array(parts, dtype=np.int64), kv_heads, axis=0)
    tasks[:, _HEAD] = np.tile(np.arange(kv_heads), len(parts))
    work = tasks[:, _TOKENS] * (tasks[:, _STOP] - tasks[:, _START])
    return np.ascontiguousarray(tasks[np.argsort(-work, kind="stable")])
