"""The weights of quantised experts, and the products of rows with them; and MXFP4, as gpt-oss stores it.

Weights stay as they are stored. A product makes the numbers of a few rows of one expert at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from medha.quantisation import MXFP4_BLOCK, ActivationFormat
from medha_worker.kernels.protocol import Kernels
from medha_worker.model.quantised_weights import LinearProducts, QuantisedWeight

MXFP4_BLOCK_BYTES = MXFP4_BLOCK // 2
MXFP4_NAN = 255
"""The scale that stands for no number."""

_SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The sizes of FP4 (E2M1) by their three lower bits; the fourth is the sign."""
_SCALE_BIAS = 127


@dataclass(frozen=True)
class Mxfp4Rows:
    """Rows of FP4 values whose blocks share a power of two: a number is value x 2^(scale - 127).

    Attributes:
        values: Two values in each byte, of which the first is the low one, uint8 [rows, blocks, 16].
        scales: uint8 [rows, blocks].
        columns: Number of columns.
        first: Columns of the first block that lie before the first column here.
    """

    values: torch.Tensor
    scales: torch.Tensor
    columns: int
    first: int = 0
    activations: ActivationFormat | None = None
    input_scale: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        return self.values.shape[0]

    def tensors(self) -> Iterator[torch.Tensor]:
        yield self.values
        yield self.scales

    def numbers(self, rows: slice, dtype: torch.dtype) -> torch.Tensor:
        # Every number is exact in float32 and bfloat16; float16 lacks the range of scales.
        exact = torch.float32 if dtype == torch.float16 else dtype
        pairs, powers = _mxfp4_tables(exact, self.values.device)
        values, scales = self.values[rows], self.scales[rows]
        made = pairs.index_select(0, values.flatten().int()).view(*scales.shape, MXFP4_BLOCK)
        made.mul_(powers.index_select(0, scales.flatten().int()).view(*scales.shape, 1))
        wide = made.flatten(1)
        if wide.shape[1] != self.columns:
            wide = wide[:, self.first : self.first + self.columns].contiguous()
        return wide.to(dtype)


@lru_cache
def _mxfp4_tables(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the two values of each byte, [256, 2], and the factor of each scale, [256]."""
    values = torch.tensor([*_SIZES, *(-size for size in _SIZES)])
    byte = torch.arange(256)
    pairs = torch.stack([values[byte & 15], values[byte >> 4]], dim=1)
    powers = torch.ldexp(torch.ones(256), byte - _SCALE_BIAS)
    return pairs.to(device, dtype), powers.to(device, dtype)


class QuantisedExperts:
    """The weights of all experts of a layer, each [in, out]."""

    def __init__(self, each: Sequence[QuantisedWeight]) -> None:
        self.each = tuple(each)
        self.has_row_scales = any(weight.has_row_scales for weight in self.each)
        """True if a product rounds each row of activations by a scale of the whole row."""

    def tensors(self) -> Iterator[torch.Tensor]:
        """Return what is held in memory."""
        for weight in self.each:
            yield from weight.tensors()


ExpertWeights = torch.Tensor | QuantisedExperts
"""The weights of all experts of a layer: [experts, in, out], quantised or not."""


def products_of_experts(
    kernels: Kernels,
    products: LinearProducts,
    x: torch.Tensor,
    weights: ExpertWeights,
    row_ends: torch.Tensor,
    *,
    is_partial: bool = False,
) -> torch.Tensor:
    """Return the products of rows that are sorted by expert, as `ExpertProducts.product` does.

    The host reads which of the quantised experts have rows. `is_partial`: x is this rank's part of the input's columns, so that
    all ranks of the group call this together, for the same rows of the same experts.
    """
    if isinstance(weights, torch.Tensor):
        return kernels.experts.product(x, weights, row_ends)
    largest = products.largest_in_rows(x, weights, is_partial=is_partial)
    out = x.new_empty(x.shape[0], weights.each[0].shape[1])
    first = 0
    for weight, end in zip(weights.each, row_ends.tolist(), strict=True):
        if end > first:
            own = None if largest is None else largest[first:end]
            products.product(x[first:end], weight, out=out[first:end], largest=own)
        first = end
    return out
