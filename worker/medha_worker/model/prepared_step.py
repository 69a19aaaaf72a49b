"""A prepared step holds what all layers share. It is made once per step, from integers in host memory, on the device.

`Transformer.prepare` makes it. It needs nothing that earlier steps compute, so another thread may make it while they
run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from medha_worker.device import Mark
from medha_worker.kernels.partial_results import add_sinks
from medha_worker.kernels.protocol import Kernels
from medha_worker.kernels.sequence_span import SequenceSpan, slot_runs
from medha_worker.model.kv_cache import KVCache
from medha_worker.model.latent_forms import HeadMatrices, LatentForms
from medha_worker.model.latent_tensors import LatentWeights
from medha_worker.model.partial_attention import Attending, Rows
from medha_worker.model.pool_attention import (
    PoolAttention,
    PoolWrite,
    read_segments,
    streamed_blocks_in,
)
from medha_worker.model.rope_config import RopeConfig

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of RoPE for each row of a step, each [rows, rope_dim / 2] (`ModelConfig.rope_dim`)."""
Rotations = Mapping[RopeConfig, Rotation]
"""The rotation by each RoPE that layers of the rank have."""


class LayerStep(Protocol):
    """The attention of a step's rows, the same for each layer but for the pool."""

    @property
    def sequences(self) -> Sequence[slice]:
        """Rows of each sequence, which can be computed alone if memory runs out."""
        ...

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        latent: LatentWeights | None,
    ) -> torch.Tensor:
        """Write K and V, [rows, kv_heads, head_dim], and attend with q, [rows, query_heads, head_dim].

        `sinks` are the layer's attention sinks, [query_heads], if it has any; each row sees them once. `latent` are its
        matrices if K and V are latents: then q is [rows, query_heads, query_dim], and the result [rows, query_heads, value_dim].
        """
        ...


class Captured(Protocol):
    """A step whose layers were captured: `DecodeGraphs` makes it."""

    def replay(self, entering: torch.Tensor) -> torch.Tensor:
        """Run the layers on token ids, int64 [rows], or hidden states; return hidden states, [rows, hidden_size]."""
        ...


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A step that the layers can run: either `layers` and `rotations`, or what was `captured`."""

    ready: Mark
    layers: LayerStep | None = None
    rotations: Rotations | None = None
    captured: Captured | None = None


class OwnStep:
    """A step whose rows attend to nothing but this pool: the plans of attention and of the write of new K and V."""

    def __init__(
        self,
        spans: Sequence[SequenceSpan],
        kv_cache: KVCache,
        kernels: Kernels,
        windows: Sequence[int | None] | None = None,
        window_spans: Sequence[SequenceSpan] | None = None,
        forms: LatentForms | None = None,
    ) -> None:
        """`windows` are the tokens that a row of each of the pool's layers sees; None: all of them.

        `window_spans` describe the same rows in layers that free KV before their window; None: no layer does. `forms` plan
        the attention of layers whose pool holds latents.
        """
        self.sequences = [span.rows for span in spans]
        self._spans, self._window_spans = spans, window_spans
        self._cache = kv_cache
        self._kernels = kernels
        self._windows = windows or [None] * len(kv_cache.keys)
        size = kv_cache.block_tokens
        self._forms = forms
        self._latent_attention = None if forms is None else forms.plan(spans, size)
        self._attention = {
            window: kernels.attention.plan(self._spans_within(window), size, window)
            for window in dict.fromkeys(self._windows)
            if forms is None
        }
        frees = [window is not None and window_spans is not None for window in self._windows]
        writes = {
            is_freed: kernels.writer.plan(new_slots((window_spans if is_freed else None) or spans, size))
            for is_freed in set(frees)
        }
        self._writes = [writes[is_freed] for is_freed in frees]

    def alone(self, index: int) -> OwnStep:
        """Return the same step for one of its sequences, whose rows are then the only ones."""
        window_spans = self._window_spans and [replace(self._window_spans[index], row_start=0)]
        spans = [replace(self._spans[index], row_start=0)]
        return OwnStep(spans, self._cache, self._kernels, self._windows, window_spans, self._forms)

    def _spans_within(self, window_tokens: int | None) -> Sequence[SequenceSpan]:
        if window_tokens is None or self._window_spans is None:
            return self._spans
        return self._window_spans

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None = None,
        latent: LatentWeights | None = None,
    ) -> torch.Tensor:
        self._cache.await_layer(layer)
        pools = self._cache.keys[layer], self._cache.values[layer]
        self._writes[layer].write(*pools, *self._cache.rounded(layer, k, v))
        if latent is not None:
            assert self._latent_attention is not None
            matrices = HeadMatrices.of(latent, self._cache.scaled(layer))
            return self._latent_attention.attend(q, pools[0], matrices)[0]
        q = self._cache.queries(layer, q)
        attended, _ = self._attention[self._windows[layer]].attend(q, *pools, sinks, needs_sums=False)
        return self._cache.results(layer, attended)


class StreamedStep:
    """A step whose rows attend to this pool alone, where some keys are streamed from host memory."""

    def __init__(
        self,
        spans: Sequence[SequenceSpan],
        kv_cache: KVCache,
        kernels: Kernels,
        windows: Sequence[int | None] | None = None,
        forms: LatentForms | None = None,
    ) -> None:
        """`windows` and `forms` are as in `OwnStep`."""
        self.sequences = [span.rows for span in spans]
        self._spans, self._cache, self._kernels, self._forms = spans, kv_cache, kernels, forms
        self._windows = windows or [None] * len(kv_cache.keys)
        self._write = PoolWrite(new_slots(spans, kv_cache.block_tokens), kv_cache, kernels.writer)
        attending = Attending(kernels.attention, kv_cache.block_tokens, kv_cache.device, forms=forms)
        rows = spans[-1].rows.stop
        attention = {
            window: PoolAttention(
                Rows(rows, [span.within(window) for span in spans]), kv_cache, attending, self._write.written
            )
            for window in dict.fromkeys(self._windows)
        }
        self._attention = [attention[window] for window in self._windows]
        read_segments(kv_cache, self._attention)

    def alone(self, index: int) -> StreamedStep:
        """Return the same step for one of its sequences, whose rows are then the only ones."""
        spans = [replace(self._spans[index], row_start=0)]
        return StreamedStep(spans, self._cache, self._kernels, self._windows, self._forms)

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None = None,
        latent: LatentWeights | None = None,
    ) -> torch.Tensor:
        self._cache.await_layer(layer)
        self._write.write(layer, *self._cache.rounded(layer, k, v))
        if latent is not None:
            matrices = HeadMatrices.of(latent, self._cache.scaled(layer))
            return self._attention[layer].attend(layer, q, matrices)[0]
        attended, sums = self._attention[layer].attend(layer, self._cache.queries(layer, q))
        if sinks is not None:
            attended = add_sinks(attended, sums, sinks)[0]
        return self._cache.results(layer, attended)


def streams(spans: Sequence[SequenceSpan], kv_cache: KVCache) -> bool:
    """Return whether some of these sequences have streamed blocks."""
    return kv_cache.streamed is not None and any(
        streamed_blocks_in(span, kv_cache.num_blocks) for span in spans
    )


def new_slots(spans: Sequence[SequenceSpan], block_tokens: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the slots of all rows of spans that are causal, int64 [rows]."""
    slots = np.empty(spans[-1].rows.stop - spans[0].row_start, dtype=np.int64)
    for span in spans:
        first = span.context_length
        start = span.row_start - spans[0].row_start
        if span.row_count == 1:  # hundreds of decodes, for which arrays would take milliseconds
            slots[start] = span.blocks[first // block_tokens] * block_tokens + first % block_tokens
        else:
            runs = slot_runs(span, first, span.total_length, block_tokens)
            own = np.concatenate([np.arange(run.start, run.stop) for run in runs])
            slots[start : start + span.row_count] = own
    return slots
