"""Attention to latent rows, in the form that takes fewer FLOPs for the rows of a sequence.

**Absorbed form.** A key of head h is K_h c, for a token's latent c, and so the score of a query q is (K_h^T q) c. Likewise, a
sum of values V_h c is V_h times the sum of the latents. So a head's queries absorb its key matrix, and its value matrix is
applied after attention. Attention itself is that of a single KV head whose values are its keys, by any implementation.
A decode reads the least memory in this form.

**Plain form.** Keys and values of every head are made from the latents, and attention is as in other models. A pair then
takes a third of the FLOPs in DeepSeek-V3, which pays for a chunk of many rows (`LatentShape.makes_heads`). Keys and values
are made for a few of the sequence's tokens at a time, those of its context included, so that they need little memory. The
results over each part are merged by their log-sum-exp.

In both forms, the queries that come in have absorbed nothing yet, and each head has results of its own. So each lane that holds
a part of a context chooses the form by itself, and partial results of both forms can be merged.

Reference: DeepSeek-V2, "A Strong, Economical, and Efficient Mixture-of-Experts Language Model", section 2.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch

from medha.model.latent_shape import LatentShape
from medha_worker.device import Device
from medha_worker.kernels.partial_results import merge_partials
from medha_worker.kernels.protocol import Kernels, StepAttention
from medha_worker.kernels.sequence_span import SequenceSpan, SlotRun, slot_runs
from medha_worker.model.kv_scales import ScaledHeads
from medha_worker.model.latent_tensors import LatentWeights

MADE_BYTES = 1 << 26
"""Most memory of the keys and values that are made at a time."""
_LEAST_TILE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class HeadMatrices:
    """A layer's matrices of a rank's heads, and the scales of its pool.

    Attributes:
        key_up: [heads, plain_dim, kv_rank].
        value_up: [heads, kv_rank, value_dim].
        scaled: The scales of latent rows if the pool holds FP8; else None.
    """

    key_up: torch.Tensor
    value_up: torch.Tensor
    scaled: ScaledHeads | None = None

    @classmethod
    def of(cls, weights: LatentWeights, scaled: ScaledHeads | None) -> Self:
        """Return the matrices among a layer's weights."""
        return cls(weights.key_up, weights.value_up, scaled)


class LatentForms:
    """Plans attention to latents for a rank's heads."""

    def __init__(
        self, latent: LatentShape, heads: int, softmax_scale: float, kernels: Kernels, device: Device
    ) -> None:
        """`softmax_scale` is the factor on scores."""
        self.latent, self.heads, self.kernels, self.device = latent, heads, kernels, device
        # Attention divides scores by the root of the width that it is given, which is not that of queries.
        self.absorbed_factor = softmax_scale * math.sqrt(latent.row_dim)
        self.made_factor = softmax_scale * math.sqrt(latent.made_dim)

    @property
    def tile_tokens(self) -> int:
        """Most tokens whose keys and values are made at a time."""
        token_bytes = 2 * self.heads * self.latent.made_dim * self.device.dtype.itemsize
        return max(MADE_BYTES // token_bytes // _LEAST_TILE_TOKENS, 1) * _LEAST_TILE_TOKENS

    def made_bytes(self, context_tokens: int) -> int:
        """Return the memory of keys and values that are made at a time, and of the product that makes one of them."""
        if self.kernels.made_heads is None:
            return 0
        width = 3 * self.latent.made_dim
        tokens = min(self.tile_tokens, context_tokens)
        return self.heads * tokens * width * self.device.dtype.itemsize

    def plan(self, spans: Sequence[SequenceSpan], block_tokens: int) -> LatentStep:
        """Return the attention of a step's spans, of which there is at least one."""
        return LatentStep(self, spans, block_tokens)

    def makes_heads(self, span: SequenceSpan) -> bool:
        """Return True if the plain form is used for a span."""
        if self.kernels.made_heads is None:
            return False
        return self.latent.makes_heads(span.row_count, span.total_length, span.pairs_without_window)

    def each_head(self, x: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        """Multiply [rows, heads, inner] by the matrix of each head, [heads, inner, columns]: [rows, heads, columns].

        The kernel for products of experts computes them: each head is an expert, and all get equally many rows.
        """
        rows, heads, inner = x.shape
        by_head = x.transpose(0, 1).reshape(heads * rows, inner)
        row_ends = torch.arange(1, heads + 1, dtype=torch.int32, device=x.device) * rows
        found = self.kernels.experts.product(by_head, matrices, row_ends)
        return found.view(heads, rows, matrices.shape[2]).transpose(0, 1)


class LatentStep:
    """The attention of one step to latents, the same for each layer but for its pool and matrices."""

    def __init__(self, forms: LatentForms, spans: Sequence[SequenceSpan], block_tokens: int) -> None:
        self._forms = forms
        self._made: list[_MadeSpan] = []
        absorbed: list[SequenceSpan] = []
        for span in spans:
            if forms.makes_heads(span):
                self._made.append(_MadeSpan(forms, span, block_tokens))
            else:
                absorbed.append(span)
        self._rows: torch.Tensor | None = None  # those in absorbed form, if others are not
        if self._made and absorbed:
            self._rows = forms.device.place(
                torch.cat([torch.arange(span.rows.start, span.rows.stop) for span in absorbed])
            )
            absorbed = _side_by_side(absorbed)
        self._absorbed: StepAttention | None = None
        if absorbed:
            self._absorbed = forms.kernels.attention.plan(absorbed, block_tokens)

    def attend(
        self, q: torch.Tensor, pool: torch.Tensor, matrices: HeadMatrices
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend as `StepAttention.attend` does, without sinks.

        Args:
            q: [rows, heads, query_dim], of which `rope_dim` values, the last ones, are rotated.
            pool: One layer's rows, [1, slots, row_dim].
            matrices: Those of the layer.

        Returns:
            [rows, heads, value_dim], and the log-sum-exp of each row's scores, float32 [rows, heads].
        """
        if not self._made:
            return self._absorb(q, pool, matrices)
        output = q.new_empty(*q.shape[:2], self._forms.latent.value_dim)
        sums = q.new_empty(q.shape[:2], dtype=torch.float32)
        if self._rows is not None:
            output[self._rows], sums[self._rows] = self._absorb(q[self._rows], pool, matrices)
        for made in self._made:
            output[made.rows], sums[made.rows] = made.attend(q[made.rows], pool, matrices)
        return output, sums

    def _absorb(
        self, q: torch.Tensor, pool: torch.Tensor, matrices: HeadMatrices
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._absorbed is not None
        forms, latent = self._forms, self._forms.latent
        queries = q.new_empty(*q.shape[:2], latent.row_dim)
        queries[..., : latent.kv_rank] = forms.each_head(q[..., : latent.plain_dim], matrices.key_up)
        queries[..., latent.kv_rank :] = q[..., latent.plain_dim :]
        queries.mul_(forms.absorbed_factor)
        if matrices.scaled is not None:
            queries = matrices.scaled.queries(queries)
        attended, sums = self._absorbed.attend(queries, pool, pool)
        if matrices.scaled is not None:
            attended = matrices.scaled.results(attended)
        # Values after the latent are a sum of keys with position, which is not used.
        return forms.each_head(attended[..., : latent.kv_rank], matrices.value_up), sums


@dataclass(frozen=True, slots=True)
class _Tile:
    """Tokens of a sequence whose keys and values are made at once, and the rows that see any of them.

    Attributes:
        first_row: First of these rows, counted from the span's first one; all after it see some, too.
        slots: Slots of the tokens in the pool, side by side or int64 [tokens].
        tokens: Number of them.
        attention: Attention of the rows to what is made.
    """

    first_row: int
    slots: SlotRun | torch.Tensor
    tokens: int
    attention: StepAttention


class _MadeSpan:
    """Computes the attention of one span in plain form, for one tile of its tokens after another."""

    def __init__(self, forms: LatentForms, span: SequenceSpan, block_tokens: int) -> None:
        assert forms.kernels.made_heads is not None
        self.rows = span.rows
        self._forms = forms
        self._tiles: list[_Tile] = []
        plans: dict[tuple[int, int, int], StepAttention] = {}
        most_tokens = forms.tile_tokens
        for start in range(0, span.total_length, most_tokens):
            stop = min(start + most_tokens, span.total_length)
            parts = _rows_of_tile(span, start, stop)
            first_row = parts[0].row_start
            # Equally long tiles whose tokens all rows see share one plan.
            masked = parts[0].row_count if parts[0].is_causal else 0
            key = first_row, masked, stop - start
            if key not in plans:
                shifted = [replace(part, row_start=part.row_start - first_row) for part in parts]
                plans[key] = forms.kernels.made_heads.plan(shifted, most_tokens)
            runs = slot_runs(span, start, stop, block_tokens)
            slots = runs[0] if len(runs) == 1 else forms.device.place(_slots_of(runs))
            self._tiles.append(_Tile(first_row, slots, stop - start, plans[key]))

    def attend(
        self, q: torch.Tensor, pool: torch.Tensor, matrices: HeadMatrices
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend with the span's rows as `LatentStep.attend` does with all rows."""
        latent, tokens = self._forms.latent, max(tile.tokens for tile in self._tiles)
        queries = q.new_zeros(*q.shape[:2], latent.made_dim)
        torch.mul(q, self._forms.made_factor, out=queries[..., : latent.query_dim])
        keys = q.new_zeros(self._forms.heads, tokens, latent.made_dim)  # zeros, as the rest may be wider
        values = torch.zeros_like(keys)
        output = sums = None
        for tile in self._tiles:
            self._make(tile, pool, matrices, keys, values)
            made = keys[:, : tile.tokens], values[:, : tile.tokens]
            part, part_sums = tile.attention.attend(queries[tile.first_row :], *made)
            part = part[..., : latent.value_dim]
            if output is None or sums is None:  # every row sees some of the first tile
                output, sums = part.float(), part_sums
                continue
            seeing = slice(tile.first_row, None)
            output[seeing], sums[seeing] = merge_partials([output[seeing], part], [sums[seeing], part_sums])
        assert output is not None
        assert sums is not None
        return output.to(q.dtype), sums

    def _make(
        self,
        tile: _Tile,
        pool: torch.Tensor,
        matrices: HeadMatrices,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """Make keys and values of a tile's latents, in the first values of [heads, tokens, made_dim]."""
        latent, slots = self._forms.latent, tile.slots
        rows = (
            pool[0, slots.start : slots.stop]
            if isinstance(slots, SlotRun)
            else pool[0].index_select(0, slots)
        )
        rows = rows.to(keys.dtype)
        if matrices.scaled is not None:
            rows = matrices.scaled.numbers(rows)
        latents, made = rows[:, : latent.kv_rank], slice(0, tile.tokens)
        keys[:, made, : latent.plain_dim] = latents @ matrices.key_up.transpose(1, 2)
        keys[:, made, latent.plain_dim : latent.query_dim] = rows[:, latent.kv_rank :]
        values[:, made, : latent.value_dim] = latents @ matrices.value_up


def _side_by_side(spans: Sequence[SequenceSpan]) -> list[SequenceSpan]:
    """Return the spans with rows that follow one another from 0 on."""
    placed, row = [], 0
    for span in spans:
        placed.append(replace(span, row_start=row))
        row += span.row_count
    return placed


def _rows_of_tile(span: SequenceSpan, start: int, stop: int) -> list[SequenceSpan]:
    """Return the rows that see any of a sequence's tokens `start .. stop` (exclusive), which lie in one block.

    Rows count from the span's first one. Those that see some of the tokens come first, then those that see all.
    """
    tokens, block = stop - start, (0,)
    if not span.is_causal:
        return [SequenceSpan(0, span.row_count, tokens, block, is_causal=False)]
    # Row i sees the tokens before number context + 1 + i * stride.
    first = max(0, -(-(start - span.context_length) // span.stride))
    seeing_all = max(first, -(-(stop - span.context_length - 1) // span.stride))
    seeing_all = min(seeing_all, span.row_count)
    parts = []
    if seeing_all > first:
        context = span.context_length + first * span.stride - start
        parts.append(SequenceSpan(first, seeing_all - first, context, block, stride=span.stride))
    if seeing_all < span.row_count:
        rows = span.row_count - seeing_all
        parts.append(SequenceSpan(seeing_all, rows, tokens, block, is_causal=False))
    return parts


def _slots_of(runs: Sequence[SlotRun]) -> torch.Tensor:
    return torch.cat([torch.arange(run.start, run.stop) for run in runs])
