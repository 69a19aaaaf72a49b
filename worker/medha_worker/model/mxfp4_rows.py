"""Rows of weights in MXFP4, as gpt-oss stores those of its experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch

from medha.model.quantisation import MXFP4_BLOCK, ActivationFormat

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
