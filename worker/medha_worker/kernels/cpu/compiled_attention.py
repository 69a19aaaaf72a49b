"""The compiled kernel as an attention backend: a step's work is split into tasks.

Threads take the tasks from a shared counter, the longest first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from medha_worker.kernels.cpu.attention_code import CALL_FIELDS, TASK_FIELDS, CompiledAttention
from medha_worker.kernels.cpu.helper_team import HelperTeam, float_bits
from medha_worker.kernels.cpu.host_compiler import Target
from medha_worker.kernels.partial_results import add_sinks, merge_partials
from medha_worker.kernels.protocol import StepAttention
from medha_worker.kernels.sequence_span import SequenceSpan

# Rows of a task: its queries and sums, 0.4 MiB at head dimension 64, stay in second-level cache.
_TASK_ROWS = 768
# Rows with windows that are computed together.
_WINDOW_ROWS = 64
# A decode, or a chunk of few rows, over more keys than this is split, so that one long context keeps all threads busy.
_SPLIT_KEYS = 4096

_TOKENS, _HEAD, _START, _STOP = (
    TASK_FIELDS.index(name) for name in ("tokens", "head", "key_start", "key_stop")
)


@lru_cache
def compiled_kernel(
    head_dim: int, group: int, *, invariant: bool = False, has_fp8_kv: bool = False
) -> CompiledAttention:
    """Return the kernel for a shape, compiled once, which takes half a second."""
    return CompiledAttention(
        head_dim, group, _TASK_ROWS, Target.of_host(), invariant=invariant, has_fp8_kv=has_fp8_kv
    )


class CpuAttention:
    """Exact float32 attention by the compiled kernel.

    One instance serves one thread at a time: its steps share the kernel's scratch memory.
    """

    def __init__(
        self,
        head_dim: int,
        group: int,
        team: HelperTeam,
        *,
        invariant: bool = False,
        has_fp8_kv: bool = False,
    ) -> None:
        """Set up attention with `group` query heads per KV head, of `head_dim` values each; the pool may hold FP8.

        If `invariant`, a row gets the same bits as a decode and in a chunk of any size. Then no decode is split, so that
        a single long one keeps fewer threads busy, and keys are read twice.
        """
        self.group, self.invariant = group, invariant
        self.pool_dtype = torch.float8_e4m3fn if has_fp8_kv else torch.float32
        self._team = team
        self._kernel = compiled_kernel(head_dim, group, invariant=invariant, has_fp8_kv=has_fp8_kv)
        self._attend = team.function(self._kernel.compiled, "attend")
        self._scratch = torch.empty(0)

    def plan(
        self, spans: Sequence[SequenceSpan], block_tokens: int, window_tokens: int | None = None
    ) -> StepAttention:
        return _CpuStep(self, spans, block_tokens, window_tokens)

    def for_graph(self, rows: int, most_blocks: int) -> None:
        """Return None: a CPU has nothing to gain from a captured step."""

    def scratch(self) -> torch.Tensor:
        """Return each thread's memory, float32 [threads, floats], a page apart."""
        threads = self._team.grow(torch.get_num_threads())
        floats = self._kernel.scratch.offsets()["end"] + 1024
        if self._scratch.shape[0] < threads:
            self._scratch = torch.empty(threads, floats)
        return self._scratch

    def run(self, fields: Sequence[int], tasks: int) -> None:
        self._attend(fields, min(self._team.grow(torch.get_num_threads()), tasks))


class _CpuStep:
    """The tasks of one step.

    The parts of rows that are split by keys write to rows behind the others, and are merged from there.
    """

    def __init__(
        self,
        backend: CpuAttention,
        spans: Sequence[SequenceSpan],
        block_tokens: int,
        window_tokens: int | None,
    ) -> None:
        self._backend = backend
        cut = [span.within(window_tokens).cut(block_tokens) for span in spans]
        self._slots = [_slots(span, block_tokens) for span in cut]
        self._rows = max(span.rows.stop for span in spans)
        self._output_rows = self._rows
        self._split: list[tuple[slice, slice]] = []  # rows that are split, and the rows of all their parts
        self._parts: list[tuple[int, ...]] = []
        threads = torch.get_num_threads()
        # A single thread would gain nothing from parts, but would have to merge them in every layer.
        most_parts = 2 * threads if threads > 1 and not backend.invariant else 1
        for span, slots in zip(cut, self._slots, strict=True):
            first = span.first_seen
            if span.row_count == 1:
                parts = min(most_parts, -(-(span.total_length - first) // _SPLIT_KEYS))
                last = span.total_length - 1
                self._add_rows(span.rows, last, 1, slots.ctypes.data, (first, span.total_length), parts)
            elif span.has_window:
                self._add_windows(span, slots.ctypes.data)
            else:
                self._add_chunk(span, slots.ctypes.data, most_parts)
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
        assert pool_keys.dtype == pool_values.dtype == self._backend.pool_dtype
        assert pool_keys.stride() == pool_values.stride()
        if self._tasks is None:
            self._tasks = _for_each_head(self._parts, pool_keys.shape[0])
        output = torch.empty(self._output_rows, query_heads, head_dim)
        log_sum_exp = torch.empty(self._output_rows, query_heads)
        scratch = self._backend.scratch()
        fields = {
            "next_task": 0, "tasks": self._tasks.ctypes.data, "task_rows": len(self._tasks),
            "q": q.data_ptr(), "q_stride": q.stride(0),
            "output": output.data_ptr(), "output_stride": output.stride(0), "log_sum_exp": log_sum_exp.data_ptr(),
            "keys": pool_keys.data_ptr(), "values": pool_values.data_ptr(), "head_stride": pool_keys.stride(0),
            "group": self._backend.group, "scratch": scratch.data_ptr(), "scratch_stride": scratch.stride(0),
            "scale": float_bits(math.log2(math.e) / math.sqrt(head_dim)),
        }  # fmt: skip
        self._backend.run([fields[name] for name in CALL_FIELDS], len(self._tasks))
        for split, parts in self._split:
            count = split.stop - split.start
            merged = merge_partials(torch.split(output[parts], count), torch.split(log_sum_exp[parts], count))
            output[split], log_sum_exp[split] = merged
        result = output[:rows], log_sum_exp[:rows]
        return result if sinks is None else add_sinks(*result, sinks)

    def _add_rows(
        self, rows: slice, position: int, stride: int, slots: int, keys: tuple[int, int], parts: int
    ) -> None:
        """Add rows, the first of which stands at `position`, against a run of keys that is split into `parts`."""
        count = rows.stop - rows.start
        first, stop = keys
        if parts == 1:
            self._parts.append((rows.start, count, position, stride, 0, slots, first, stop, rows.start))
            return
        output = self._output_rows
        self._output_rows += parts * count
        self._split.append((rows, slice(output, self._output_rows)))
        edges = [first + (stop - first) * edge // parts for edge in range(parts + 1)]
        for part, (start, end) in enumerate(pairwise(edges)):
            task = (rows.start, count, position, stride, 0, slots, start, end, output + part * count)
            self._parts.append(task)

    def _add_windows(self, span: SequenceSpan, slots: int) -> None:
        """Add rows, a few at a time, against the keys that all of them see or will see.

        Keys before those, which the earlier rows alone see, are added row by row, and merged.
        """
        step = max(1, min(_WINDOW_ROWS, _TASK_ROWS // self._backend.group))
        for start in range(0, span.row_count, step):
            row, index = span.row_start + start, np.arange(start, min(start + step, span.row_count))
            first = np.maximum(span.first_key + span.first_stride * index, 0).tolist()
            causal_stride = span.stride if span.is_causal else 0
            stop = (span.context_length + span.is_causal + causal_stride * index).tolist()
            rows, seen_by_all = slice(row, row + len(index)), first[-1] + (first[0] < first[-1])
            if self._backend.invariant or seen_by_all >= stop[0]:
                self._add_each(row, slots, first, stop, row)
                continue
            position = stop[0] - 1 if span.is_causal else stop[-1]  # as if the rows stood behind all keys
            task = (row, len(index), position, span.stride, 0, slots, seen_by_all, stop[-1])
            if first[0] == first[-1]:
                self._parts.append((*task, row))
                continue
            output = self._output_rows
            self._output_rows += 2 * len(index)
            self._split.append((rows, slice(output, self._output_rows)))
            self._parts.append((*task, output))
            self._add_each(row, slots, first, [seen_by_all] * len(index), output + len(index))

    def _add_each(
        self, row: int, slots: int, first: Sequence[int], stop: Sequence[int], output_row: int
    ) -> None:
        """Add rows from `row` on one by one, each against the keys from its first one to its stop."""
        for index, (start, end) in enumerate(zip(first, stop, strict=True)):
            self._parts.append((row + index, 1, end - 1, 1, 0, slots, start, end, output_row + index))

    def _add_chunk(self, span: SequenceSpan, slots: int, most_parts: int) -> None:
        """Add many rows in tasks of limited size, each against all keys that its last row sees.

        If they make fewer tasks than `most_parts`, their keys are split, too.
        """
        step = max(1, _TASK_ROWS // self._backend.group)
        parts = max(1, most_parts // -(-span.row_count // step))
        for first in range(0, span.row_count, step):
            tokens = min(step, span.row_count - first)
            row = span.row_start + first
            if span.is_causal:
                position = span.context_length + first * span.stride
                seen = position + 1 + (tokens - 1) * span.stride
            else:  # as if the rows stood behind all keys
                position = seen = span.total_length
            # Every row sees a key of every part: the last part is no shorter than the way from the first row to the last.
            most = min(seen // _SPLIT_KEYS, seen // max(seen - position, 1), parts)
            self._add_rows(slice(row, row + tokens), position, span.stride, slots, (0, seen), max(most, 1))


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
