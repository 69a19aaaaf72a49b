"""The operators that a model needs, as protocols.

A step is run in two phases. Once per step, `plan` takes what all layers share, as integers in host memory:
spans, block tables, slots. Then each layer runs what was planned on its tensors, which are on the device.
Whatever has to be sorted, split, or copied to the device therefore happens once, and before the first layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from medha_worker.kernels.packed_weight import MatrixWeight
from medha_worker.kernels.quantised_rows import WeightRows
from medha_worker.kernels.sequence_span import SequenceSpan

PackRows: TypeAlias = Callable[[Sequence[WeightRows]], Sequence[WeightRows]]
"""Returns the parts of a weight in the forms in which their products are fastest: some joined, some as they are."""


class KernelsUnavailable(Exception):
    """Kernels cannot run this model on this device; the text says why, and completes "..., because"."""


@dataclass(frozen=True, slots=True)
class KernelSizes:
    """The sizes of one rank's part of a model, for which kernels are made."""

    query_heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    expert_intermediate_size: int = 0
    """Width of one expert; 0 if there are none. If all layers have experts, `intermediate_size` is the same."""
    made_head_dim: int = 0
    """Width of a head's keys and values that are made of latents, which a layer keeps in their place; 0: it keeps K and V."""
    further_widths: tuple[int, ...] = ()
    """Further sizes of rows that are normed, and of halves that are rotated."""
    has_fp8_kv: bool = False
    """True if the pool holds FP8 (E4M3): attention reads its numbers as they are, and the model knows their scales."""


class StepAttention(Protocol):
    """The attention of one step, the same for each of its layers."""

    def attend(
        self,
        q: torch.Tensor,
        pool_keys: torch.Tensor,
        pool_values: torch.Tensor,
        sinks: torch.Tensor | None = None,
        *,
        needs_sums: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the attention of every row to its own sequence, with scores scaled by 1 / sqrt(head_dim).

        Args:
            q: [rows, query_heads, head_dim]; rows of no span are left undefined in the result.
            pool_keys: One layer's [kv_heads, slots, head_dim]; the new tokens are already written there. It may hold
                FP8 (E4M3), whose numbers are read as they are, a few keys at a time.
            pool_values: Likewise, with the same strides; the same tensor if rows are keys and values at once.
            sinks: One layer's attention sinks, [query_heads]: each row also sees a key whose score is its head's
                sink and whose value is zero. If parts of a row's keys are attended to elsewhere, the sinks are
                left out here and added once to what was merged (`partial_results.add_sinks`).
            needs_sums: False if nothing is merged, so that log-sum-exps need not be computed.

        Returns:
            [rows, query_heads, head_dim], and the log-sum-exp (natural) of each row's scores, float32 [rows,
            query_heads], by which partial results over disjoint keys are merged. It is undefined without `needs_sums`.
        """
        ...


class GraphAttention(StepAttention, Protocol):
    """Attention whose tables keep their place in memory, so that `attend` can be captured and replayed."""

    def replan(self, spans: Sequence[SequenceSpan], block_tokens: int) -> None:
        """Fill the tables for the next replay: as many decodes as there are rows, in row order."""
        ...


class AttentionBackend(Protocol):
    """An implementation of attention over a paged pool."""

    def plan(
        self, spans: Sequence[SequenceSpan], block_tokens: int, window_tokens: int | None = None
    ) -> StepAttention:
        """Return the attention of a step's spans, of which there is at least one.

        Args:
            spans: The rows and their sequences.
            block_tokens: Tokens of a block.
            window_tokens: If given, a row sees only so many of its last keys, its own among them. All spans are
                causal then, because the keys of a context alone do not say where a row stands.
        """
        ...

    def for_graph(self, rows: int, most_blocks: int) -> GraphAttention | None:
        """Return attention of `rows` decodes that can be captured; None if this implementation has none.

        Their block tables together have at most `most_blocks` entries, up to each one's own token.
        """
        ...


class StepWrite(Protocol):
    """The write of one step's new K and V, the same for each of its layers."""

    def write(
        self,
        pool_keys: torch.Tensor,
        pool_values: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """Store K and V, [rows, kv_heads, head_dim], in one layer's pool, [kv_heads, slots, head_dim], of their type.

        If `pool_values` is the same tensor as `pool_keys`, so are `values` and `keys`, and one of them is stored.
        """
        ...


class GraphWrite(StepWrite, Protocol):
    """A write whose slots keep their place in memory, so that `write` can be captured and replayed."""

    def replan(self, slots: npt.NDArray[np.int64]) -> None:
        """Set the slots for the next replay, [rows]; only slots of the scratch block may occur twice."""
        ...


class KVWriter(Protocol):
    """An implementation of the writes to a paged pool."""

    def plan(self, slots: npt.NDArray[np.int64]) -> StepWrite:
        """Return the write of rows to `slots`, [rows], none of which occurs twice."""
        ...

    def for_graph(self, rows: int) -> GraphWrite | None:
        """Return a write of `rows` rows that can be captured; None if this implementation has none."""
        ...


class MatrixProducts(Protocol):
    """Products of activations, [rows, inner], with weights, [inner, columns], whose rows or columns are contiguous, or packed."""

    def product(
        self,
        x: torch.Tensor,
        weight: MatrixWeight,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return x @ weight + bias, [rows, columns], in `out` if that is given."""
        ...

    def add_product(self, target: torch.Tensor, x: torch.Tensor, weight: MatrixWeight) -> None:
        """Add x @ weight to `target`, [rows, columns]."""
        ...


class ExpertProducts(Protocol):
    """Products of activations with the weights of experts, for rows that are sorted by expert.

    On a GPU they can be captured: the host never learns which experts have rows.
    """

    def product(self, x: torch.Tensor, weights: torch.Tensor, row_ends: torch.Tensor) -> torch.Tensor:
        """Return the product of each row with the weights of its expert, [rows, columns].

        Args:
            x: [rows, inner], those of the first expert first.
            weights: [experts, inner, columns], contiguous, or with the last two dimensions exchanged.
            row_ends: int32 [experts]: the row behind the last one of each expert. An expert without rows has the same
                end as the one before.
        """
        ...


class RowOperators(Protocol):
    """Operators on rows of activations. Last dimensions are contiguous; others may have any stride."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return the RMSNorm of [..., size] over the last dimension, times `weight`, [size]."""
        ...

    def add_rms_norm(
        self, hidden: torch.Tensor, part: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor | None:
        """Add `part` to `hidden`, both [rows, size], and return the RMSNorm of the sum, in the memory of `part`.

        None, and nothing is changed, if this implementation has no kernel that does both.
        """
        ...

    def rotate(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Apply RoPE to [rows, heads, head_dim] in place, by cos and sin, each [rows, head_dim / 2].

        The first half of a head is paired with the second (Hugging Face's order).
        """
        ...

    def silu_multiply(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up, [rows, size].

        `gate_up` is their concatenation, [rows, 2 * size], and may be overwritten.
        """
        ...

    def gelu_multiply(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return gelu(gate) * up likewise, GELU by its tanh formula."""
        ...


class TokenRace(Protocol):
    """The Gumbel-max race, by which the next token of a row is sampled."""

    def winners(self, scores: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return the token of each row whose score plus noise is the largest, int64 [rows]; of equal ones the first.

        Args:
            scores: float64 [rows, vocab], at most 0, and 0 for the best token of a row; overwritten. A row
                that holds NaN gets any token.
            keys: int64 [rows]: the noise of a token is that of `random_stream` under its row's key.
        """
        ...


@dataclass(frozen=True, slots=True)
class Kernels:
    """Holds an implementation of each operator, and the name under which the table lists them."""

    name: str
    attention: AttentionBackend
    writer: KVWriter
    products: MatrixProducts
    rows: RowOperators
    race: TokenRace
    experts: ExpertProducts
    made_heads: AttentionBackend | None = None
    """Attention to keys and values that were made of latents for each head, [heads, tokens, `made_head_dim`].

    None: keys and values are never made of latents, because a row would not get the same bits as by attention to
    latents.
    """
    pack: Callable[[torch.Tensor], MatrixWeight] | None = None
    """Returns a weight in the form in which its products are fastest; that may be its own. None: weights stay as read."""
    pack_rows: PackRows | None = None
    """The same for quantised weights. None: their numbers are made for each product."""
