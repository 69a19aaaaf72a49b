"""Exact attention of a step's rows to their sequences' K and V in plain torch, on any device.

Per sequence, K and V come as *segments*: contiguous runs of the pool, read in place, or gathered pieces if runs
are short. The query heads that share a KV head are folded into rows of one product: the same arithmetic with
larger matrices. A decode (one row) attends to each segment through torch's flash kernel. A chunk attends to each
segment of its context without a mask, and causally to its own tokens, which are one segment. Partial results
over disjoint keys are merged exactly by their log-sum-exp. A segment of a pool in FP8 is converted to the type of the
queries before it is used. With a window, a chunk attends to all that it sees, its context too, as one masked segment.
Blocks before every row's window are not read.

The causal mask counts keys, so that segment holds them in the order of their positions. Keys that every row
sees may come in any order.
"""

import math
from collections.abc import Iterator, Sequence

import torch

from medha_worker.device import Device
from medha_worker.kernels.partial_results import add_sinks, merge_partials
from medha_worker.kernels.protocol import StepAttention
from medha_worker.kernels.sequence_span import SequenceSpan, SlotRun, slot_runs
from medha_worker.kernels.torch_flash import flash_attention

# Shortest run, in tokens, that is read in place; shorter ones are gathered together.
_IN_PLACE_TOKENS = 128
# Most tokens gathered at a time: bounds the copy's memory when a long sequence is scattered.
_GATHERED_TOKENS = 16_384

# Location of tokens in the pool: one run, or the slots of several short ones, int64 [tokens].
Segment = SlotRun | torch.Tensor


class TorchAttention:
    """Exact attention with torch alone."""

    def __init__(self, device: Device) -> None:
        """`device` is the pool's."""
        self._device = device

    def plan(
        self, spans: Sequence[SequenceSpan], block_tokens: int, window_tokens: int | None = None
    ) -> StepAttention:
        return _TorchStep(spans, block_tokens, window_tokens, self._device)

    def for_graph(self, rows: int, most_blocks: int) -> None:
        """Return None: the segments of a step decide which kernels run."""


class _TorchStep:
    def __init__(
        self,
        spans: Sequence[SequenceSpan],
        block_tokens: int,
        window_tokens: int | None,
        device: Device,
    ) -> None:
        self._parts: list[tuple[SequenceSpan, list[Segment], Segment | None]] = []
        for whole in spans:
            # A decode sees everything stored; a chunk sees its context, and of its own tokens the earlier
            # ones.
            span = whole.within(window_tokens).cut(block_tokens)
            first = span.first_seen
            is_masked = span.row_count > 1 and (span.is_causal or span.has_window)
            context = span.context_length if is_masked and span.is_causal else span.total_length
            if is_masked and span.has_window:
                context = first
            seen_by_all = list(_in_any_order(slot_runs(span, first, context, block_tokens), device))
            own = slot_runs(span, context, span.total_length, block_tokens)
            self._parts.append((span, seen_by_all, _in_token_order(own, device) if own else None))

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
        scale = 1.0 / math.sqrt(head_dim)
        grouped = q.view(rows, kv_heads, query_heads // kv_heads, head_dim)
        output = torch.empty_like(grouped, memory_format=torch.contiguous_format)
        log_sum_exp = torch.empty(grouped.shape[:-1], dtype=torch.float32, device=q.device)
        pool = (pool_keys, pool_values)
        for span, context, own in self._parts:
            outputs, sums = _over_segments(grouped[span.rows], context, pool, scale)
            if own is not None:
                causal, causal_sum = _over_own(grouped[span.rows], own, pool, scale, span)
                outputs.append(causal)
                sums.append(causal_sum)
            merged = (outputs[0], sums[0]) if len(outputs) == 1 else merge_partials(outputs, sums)
            output[span.rows], log_sum_exp[span.rows] = merged
        result = output.view(rows, query_heads, head_dim), log_sum_exp.view(rows, query_heads)
        return result if sinks is None else add_sinks(*result, sinks)


def _in_any_order(runs: Sequence[SlotRun], device: Device) -> Iterator[Segment]:
    """Yield segments for attention without a mask: long runs in place, short ones gathered together."""
    short: list[SlotRun] = []
    gathered_tokens = 0
    for run in runs:
        if run.tokens >= _IN_PLACE_TOKENS or len(runs) == 1:
            yield run
            continue
        short.append(run)
        gathered_tokens += run.tokens
        if gathered_tokens >= _GATHERED_TOKENS:
            yield _in_token_order(short, device)
            short, gathered_tokens = [], 0
    if short:
        yield _in_token_order(short, device)


def _in_token_order(runs: Sequence[SlotRun], device: Device) -> Segment:
    """Return the runs as one segment in token order: a single run in place, several gathered at once.

    For a chunk's own tokens, this copies K and V of one layer, so the largest chunk bounds the copy.
    """
    if len(runs) == 1:
        return runs[0]
    return device.place(torch.cat([torch.arange(run.start, run.stop) for run in runs]))


Pool = tuple[torch.Tensor, torch.Tensor]


def _load(segment: Segment, pool: Pool, dtype: torch.dtype) -> Pool:
    """Return K and V of a segment, [kv_heads, tokens, head_dim], in the type of queries.

    They are a view of a run, or a copy if gathered, or if the pool has another type.
    """
    keys, values = pool
    if isinstance(segment, SlotRun):
        loaded = keys[:, segment.start : segment.stop], values[:, segment.start : segment.stop]
    else:
        loaded = keys.index_select(1, segment), values.index_select(1, segment)
    converted = loaded[0].to(dtype)
    return converted, converted if values is keys else loaded[1].to(dtype)


def _pieces(segments: Sequence[Segment], pool: Pool, dtype: torch.dtype) -> Iterator[Segment]:
    """Yield segments of which none is too long to be copied, if the pool has another type than queries."""
    for segment in segments:
        if isinstance(segment, SlotRun) and pool[0].dtype != dtype:
            for start in range(segment.start, segment.stop, _GATHERED_TOKENS):
                yield SlotRun(start, min(start + _GATHERED_TOKENS, segment.stop))
        else:
            yield segment


def _over_segments(
    q: torch.Tensor, segments: Sequence[Segment], pool: Pool, scale: float
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Compute unmasked attention of a sequence's rows to each segment alone.

    `q` is [rows, kv_heads, group, head_dim].
    """
    rows, kv_heads, group, head_dim = q.shape
    folded = q.transpose(0, 1).reshape(kv_heads, rows * group, head_dim)
    outputs, sums = [], []
    for segment in _pieces(segments, pool, q.dtype):
        keys, values = _load(segment, pool, q.dtype)
        output, log_sum_exp = flash_attention(folded[None], keys[None], values[None], scale=scale)
        outputs.append(output.view(kv_heads, rows, group, head_dim).transpose(0, 1))
        sums.append(log_sum_exp.view(kv_heads, rows, group).transpose(0, 1))
    return outputs, sums


def _over_own(
    q: torch.Tensor, segment: Segment, pool: Pool, scale: float, span: SequenceSpan
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute causal attention of a chunk to its own tokens; with a window, that to all tokens that it sees.

    `q` is [rows, kv_heads, group, head_dim]. The segment holds the tokens in the order of their positions.
    """
    rows, kv_heads, group, head_dim = q.shape
    keys, values = _load(segment, pool, q.dtype)
    # Folding would break the causal order: the kernel lets row i of *its* rows see keys 0 to i.
    by_head = q.reshape(1, rows, kv_heads * group, head_dim).transpose(1, 2)
    output, log_sum_exp = flash_attention(
        by_head,
        keys[None],
        values[None],
        scale=scale,
        causal=span.stride if span.is_causal else 0,
        window=(span.first_key - span.first_seen, span.first_stride) if span.has_window else None,
    )
    shape = kv_heads, group, rows
    return output.view(*shape, head_dim).permute(2, 0, 1, 3), log_sum_exp.view(shape).permute(2, 0, 1)
