"""Products with quantised weights by a device's own units for FP8 and integers, through torch's operators.

A product of activations that are rounded multiplies the values of 8 bits of both, and its sums by their scales. It rounds less
often than one of numbers, which are in the model's type. So results differ by what that rounding costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows it by

from medha.model.quantisation import FP8_BLOCKS_ALIGNED, INT4_ROWS, INT8_ALIGNED, ActivationFormat
from medha_worker.device import is_in_host_memory
from medha_worker.kernels.activation_rounding import eight_bits
from medha_worker.kernels.quantised_rows import FastRows, QuantisedRows

_INT8_LEAST_ROWS, _BLOCK_ROWS = 24, 4
"""Rows of activations that the operators take: for INT8 on a GPU a multiple of eight above 16; for blocks of FP8 a multiple of
four. Rows of zeros fill up the rest."""
_SUMS = 1 << 25
"""Sums of INT8 that are held at a time, of 4 bytes."""
INT4_MOST_ROWS = 64
"""Rows of activations that the operator for INT4 takes. It reads all weights again for every 16 of them."""
_LANES, _TILE_COLUMNS = 32, 16
_ZERO = 8  # the value of 4 bits from which the operator counts


@dataclass(frozen=True)
class _ScaledRows(FastRows):
    """Rows that are held as they are stored, with scales in float32."""

    stored: QuantisedRows

    @property
    def rows(self) -> int:
        return self.stored.rows

    @property
    def columns(self) -> int:
        return self.stored.columns

    @property
    def activations(self) -> ActivationFormat:
        assert self.stored.activations is not None, "values of 8 bits are multiplied with such values"
        return self.stored.activations

    @property
    def input_scale(self) -> torch.Tensor | None:
        return self.stored.input_scale

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from self.stored.tensors()

    def numbers(self, rows: slice, dtype: torch.dtype) -> torch.Tensor:
        return self.stored.numbers(rows, dtype)


class Float8Rows(_ScaledRows):
    """Rows of FP8, each with a scale of its own."""

    @classmethod
    def of(cls, part: QuantisedRows) -> Float8Rows:
        """Return rows that have one scale each, or one for all."""
        return cls(_with_row_scales(part))

    def product(self, x: torch.Tensor, largest: torch.Tensor | None) -> torch.Tensor:
        values, scale = eight_bits(x, self.activations, largest, self.input_scale)
        by_row = F.ScalingType.RowWise
        return F.scaled_mm(
            values,
            self.stored.values.t(),
            scale.expand(x.shape[0], 1).contiguous(),
            by_row,
            self.stored.scale.t(),
            by_row,
            output_dtype=x.dtype,
        )


@dataclass(frozen=True)
class Float8Blocks(_ScaledRows):
    """Rows of FP8 in blocks of 128 x 128, for activations with a scale for each 128 values.

    Attributes:
        scale: Scales of blocks, float32 [row blocks, groups], with zeros behind them to a multiple of `FP8_BLOCKS_ALIGNED` groups.
    """

    scale: torch.Tensor

    @classmethod
    def of(cls, part: QuantisedRows) -> Float8Blocks:
        """Return rows whose blocks are whole."""
        blocks, groups = part.scale.shape
        # In memory of their own: the operator reads strides, and a slice of one row keeps those of the whole.
        scale = part.scale.new_zeros(blocks, groups + -groups % FP8_BLOCKS_ALIGNED, dtype=torch.float32)
        scale[:, :groups] = part.scale
        return cls(replace(part, scale=scale[:, :groups]), scale)

    def product(self, x: torch.Tensor, largest: torch.Tensor | None) -> torch.Tensor:  # noqa: ARG002 - groups have scales
        rows = x.shape[0]
        if rows % _BLOCK_ROWS:
            x = F.pad(x, (0, 0, 0, -rows % _BLOCK_ROWS))
        values, scale = eight_bits(x, self.activations, None, None)
        found = F.scaled_mm(
            values,
            self.stored.values.t(),
            scale.t().contiguous().t(),  # one group of all rows after the other
            F.ScalingType.BlockWise1x128,
            self.scale.t(),
            F.ScalingType.BlockWise128x128,
            output_dtype=x.dtype,
        )
        return found[:rows]


class Int8Rows(_ScaledRows):
    """Rows of INT8, each with a scale of its own. Sums of products are exact integers, and are scaled afterwards."""

    @classmethod
    def of(cls, part: QuantisedRows) -> Int8Rows:
        """Return rows that have one scale each, or one for all."""
        return cls(_with_row_scales(part))

    def product(self, x: torch.Tensor, largest: torch.Tensor | None) -> torch.Tensor:
        values, scale = eight_bits(x, self.activations, largest, self.input_scale)
        rows, stored = x.shape[0], self.stored
        if not is_in_host_memory(x):
            wanted = max(_INT8_LEAST_ROWS, rows + -rows % INT8_ALIGNED)
            values = F.pad(values, (0, 0, 0, wanted - rows)) if wanted > rows else values
        out = x.new_empty(rows, self.rows)
        tile = max(INT8_ALIGNED, _SUMS // values.shape[0] // INT8_ALIGNED * INT8_ALIGNED)
        for start in range(0, self.rows, tile):
            some = slice(start, min(start + tile, self.rows))
            sums = torch._int_mm(values, stored.values[some].t())[:rows]
            out[:, some] = torch.mul(sums, scale).mul_(stored.scale[some].t())
        return out


@dataclass(frozen=True)
class Int4Rows(FastRows):
    """Rows of INT4 in groups, in the order in which a GPU's units for matrices take them: torch's own form ("tinygemm").

    Attributes:
        words: Eight values in each, int32 [rows / 8, columns / (16 x tiles), 32, tiles / 2].
        scale_and_shift: A number is (value - 8) x scale + shift, bfloat16 [groups, rows, 2].
    """

    words: torch.Tensor
    scale_and_shift: torch.Tensor
    activations: ActivationFormat | None = None
    input_scale: torch.Tensor | None = None

    @classmethod
    def of(cls, part: QuantisedRows) -> Int4Rows:
        """Return rows whose groups are whole."""
        tiles = next(tiles for tiles in (8, 4, 2) if part.columns % (tiles * _TILE_COLUMNS) == 0)
        first_high = (part.values << 4) | (part.values >> 4)
        words = torch._convert_weight_to_int4pack(first_high, tiles)
        scale = part.scale.float()
        zero = part.offset if part.zero is None else part.zero.float()
        both = torch.stack([scale, scale * (_ZERO - zero)], dim=2)
        return cls(words, both.transpose(0, 1).contiguous().bfloat16())

    @property
    def rows(self) -> int:
        return self.words.shape[0] * INT4_ROWS

    @property
    def columns(self) -> int:
        return self.words.shape[1] * self.words.shape[3] * 2 * _TILE_COLUMNS

    @property
    def group_size(self) -> int:
        """Neighbouring columns that share a scale."""
        return self.columns // self.scale_and_shift.shape[0]

    def tensors(self) -> Iterator[torch.Tensor]:
        yield self.words
        yield self.scale_and_shift

    def takes(self, rows: int) -> bool:
        return 0 < rows <= INT4_MOST_ROWS

    def product(self, x: torch.Tensor, largest: torch.Tensor | None) -> torch.Tensor:  # noqa: ARG002 - nothing is rounded
        return torch._weight_int4pack_mm(x.contiguous(), self.words, self.group_size, self.scale_and_shift)

    def numbers(self, rows: slice, dtype: torch.dtype) -> torch.Tensor:
        first, stop = rows.start // INT4_ROWS, -(-rows.stop // INT4_ROWS)
        values = _less_eight(self.words[first:stop], dtype)
        of_rows = self.scale_and_shift[:, first * INT4_ROWS : stop * INT4_ROWS].transpose(0, 1)
        scale, shift = of_rows.to(dtype)[..., None].unbind(2)
        made = torch.addcmul(shift, values.view(*scale.shape[:2], self.group_size), scale).flatten(1)
        skipped = first * INT4_ROWS
        return made[rows.start - skipped : rows.stop - skipped]


def _less_eight(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of words, less 8, as numbers, [rows, columns].

    A word has values of one row. If its bytes are numbered by 2 c + a, its value in the low (b = 0) or high half of a byte is in
    column 16 a + 8 b + 2 (lane modulo 4) + c of a pair of tiles.
    """
    row_tiles, outer, _, pairs = words.shape
    by_byte = words.view(torch.uint8).view(row_tiles, outer, INT4_ROWS, _LANES // INT4_ROWS, pairs, 2, 2)
    made = torch.empty(row_tiles, INT4_ROWS, outer, pairs, 2, 2, 4, 2, dtype=dtype, device=words.device)
    places = made.permute(0, 2, 1, 6, 3, 7, 4, 5)
    places[..., 0] = by_byte & 15
    places[..., 1] = by_byte >> 4
    return made.view(row_tiles * INT4_ROWS, -1).sub_(_ZERO)


def _with_row_scales(part: QuantisedRows) -> QuantisedRows:
    """Return rows that have a scale each, float32 [rows, 1]."""
    return replace(part, scale=part.scale.float().expand(part.rows, 1).contiguous(), block_rows=1)
