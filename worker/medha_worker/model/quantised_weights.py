"""The weights of a quantised linear layer, and their products with activations.

Weights stay quantised in memory. A product makes the numbers of a few rows at a time, in the type that the model
computes in, and multiplies with those.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows it by

from medha.quantisation import ActivationFormat
from medha_worker.device import is_in_host_memory
from medha_worker.kernels.packed_weight import MatrixWeight, PackedWeight
from medha_worker.kernels.protocol import MatrixProducts
from medha_worker.model.tensor_group import TensorGroup

_FLOAT8_MAX = 448.0  # of E4M3

# Numbers that are made at a time: few enough to stay in a CPU's cache, and enough to fill a GPU.
_HOST_TILE, DEVICE_TILE = 1 << 18, 1 << 24


class WeightRows(Protocol):
    """Consecutive rows of a weight, [rows, columns], in any form."""

    @property
    def rows(self) -> int: ...

    @property
    def columns(self) -> int: ...

    @property
    def activations(self) -> ActivationFormat | None:
        """The rounding of activations; None leaves them as they are."""
        ...

    @property
    def input_scale(self) -> torch.Tensor | None:
        """The scale of activations if the checkpoint has one for all of them, [1]."""
        ...

    def tensors(self) -> Iterator[torch.Tensor]:
        """Return what is held in memory."""
        ...

    def numbers(self, rows: slice, dtype: torch.dtype) -> torch.Tensor:
        """Return the numbers of some rows, [rows, columns]."""
        ...


@dataclass(frozen=True)
class PlainRows:
    """Rows that are not quantised, beside others of the same product that are."""

    values: torch.Tensor
    activations: ActivationFormat | None = None
    input_scale: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        return self.values.shape[0]

    @property
    def columns(self) -> int:
        return self.values.shape[1]

    def tensors(self) -> Iterator[torch.Tensor]:
        yield self.values

    def reordered(self, index: torch.Tensor) -> PlainRows:
        """Return these rows in another order, int64 [rows]."""
        return replace(self, values=self.values[index.to(self.values.device)])

    def numbers(self, rows: slice, dtype: torch.dtype) -> torch.Tensor:
        return self.values[rows].to(dtype)


@dataclass(frozen=True)
class QuantisedRows:
    """Rows of integers or FP8 with scales: a number is (value - zero point) x scale.

    Attributes:
        values: One value in each element, [rows, columns]; or two of 4 bits in each byte, [rows, columns / 2] rounded up,
            of which the first is the low one.
        columns: Number of columns.
        scale: [row blocks, groups].
        zero: Zero points, of the shape of `scale`; None if all are `offset`.
        offset: The zero point of all groups if `zero` is None.
        has_pairs: True if a byte holds two values.
        group_size: Neighbouring columns that share a scale, from the first one; None if all do.
        group_of: The group of each column, int32 [columns], or that of each row and column, [rows, columns], if groups are not
            those of `group_size`.
        block_rows: Neighbouring rows that share a scale; None if all do.
        block_start: Rows of the first block that lie before the first row here.
        block_of: The block of each row, int32 [rows], if rows are not in the order of blocks.
    """

    values: torch.Tensor
    columns: int
    scale: torch.Tensor
    zero: torch.Tensor | None = None
    offset: int = 0
    has_pairs: bool = False
    group_size: int | None = None
    group_of: torch.Tensor | None = None
    block_rows: int | None = 1
    block_start: int = 0
    block_of: torch.Tensor | None = None
    activations: ActivationFormat | None = None
    input_scale: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        return self.values.shape[0]

    def reordered(self, index: torch.Tensor) -> QuantisedRows:
        """Return these rows in another order, int64 [rows]."""
        at = index.to(self.values.device)
        # torch cannot select rows of all 8-bit types.
        values = self.values.view(torch.uint8)[at].view(self.values.dtype)
        if self.block_rows is None:
            return replace(self, values=values)
        if self.block_rows == 1:
            zero = None if self.zero is None else self.zero[at]
            return replace(self, values=values, scale=self.scale[at], zero=zero)
        block_of = self._blocks(at) if self.block_of is None else self.block_of[at]
        return replace(self, values=values, block_of=block_of.int())

    def tensors(self) -> Iterator[torch.Tensor]:
        for tensor in (
            self.values,
            self.scale,
            self.zero,
            self.group_of,
            self.block_of,
            self.input_scale,
        ):
            if tensor is not None:
                yield tensor

    def numbers(self, rows: slice, dtype: torch.dtype) -> torch.Tensor:
        values = self._values(rows, dtype)
        scale = self._of_rows(self.scale, rows)
        zero = None if self.zero is None else self._of_rows(self.zero, rows).to(dtype)
        if self.group_of is not None:
            scale = self._of_columns(scale, rows)
            zero = None if zero is None else self._of_columns(zero, rows)
        elif self.group_size is not None and scale.shape[1] > 1:
            values = values.view(values.shape[0], scale.shape[1], self.group_size)
            scale, zero = scale[:, :, None], None if zero is None else zero[:, :, None]
        if zero is not None:
            values = values.sub_(zero)
        elif self.offset:
            values = values.sub_(self.offset)
        # A scale may be finer than the type of the product: rounding it first would shift a whole group.
        made = values.mul_(scale) if scale.dtype == dtype else (values * scale).to(dtype)
        return made.view(made.shape[0], self.columns)

    def _values(self, rows: slice, dtype: torch.dtype) -> torch.Tensor:
        """Return values as numbers, [rows, columns], in memory of their own."""
        some = self.values[rows]
        if some.dtype == torch.float8_e4m3fn and is_in_host_memory(some):
            return _of_float8(some, dtype)
        if not self.has_pairs:
            return some.to(dtype, copy=True)
        pairs = torch.empty(*some.shape, 2, dtype=dtype, device=some.device)
        pairs[..., 0] = some & 15
        pairs[..., 1] = some >> 4
        wide = pairs.view(some.shape[0], -1)
        return wide if wide.shape[1] == self.columns else wide[:, : self.columns].contiguous()

    def _of_rows(self, of_blocks: torch.Tensor, rows: slice) -> torch.Tensor:
        """Return the entries of some rows, [rows or 1, groups]."""
        if self.block_rows is None:
            return of_blocks
        if self.block_rows == 1:
            return of_blocks[rows]
        return of_blocks.index_select(0, self.blocks(rows))

    def blocks(self, rows: slice) -> torch.Tensor:
        """Return the block of each of some rows, by which an entry of `scale` is found."""
        if self.block_of is not None:
            return self.block_of[rows]
        index = torch.arange(rows.start, rows.stop, device=self.scale.device)
        return torch.zeros_like(index) if self.block_rows is None else self._blocks(index)

    def _of_columns(self, of_groups: torch.Tensor, rows: slice) -> torch.Tensor:
        """Return the entry of each column of some rows, [rows or 1, columns]."""
        assert self.group_of is not None
        if self.group_of.ndim == 1:
            return of_groups.index_select(1, self.group_of)
        return of_groups.gather(1, self.group_of[rows].long())

    def _blocks(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the blocks of rows by their indexes."""
        assert self.block_rows is not None
        return (rows + self.block_start).div_(self.block_rows, rounding_mode="floor")


def _of_float8(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers of FP8 (E4M3) that are not NaN; on a CPU, torch's own conversion takes several times as long.

    Moved down by one bit behind the sign, the bits are those of a float16 that is 2^8 times as small.
    """
    bits = values.view(torch.int8).to(torch.int16)
    bits = bits.bitwise_left_shift_(8).bitwise_right_shift_(1).bitwise_and_(~0x4000)
    return bits.view(torch.float16).to(dtype, copy=True).mul_(256.0)


class QuantisedWeight:
    """The weight of one product, [in, out]: parts of its output columns, each in a form of its own."""

    def __init__(self, parts: Sequence[WeightRows]) -> None:
        self.parts = tuple(parts)
        self.has_row_scales = any(_has_row_scale(part.activations) for part in self.parts)
        """True if a product rounds each row of activations by a scale of the whole row."""

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of inputs and outputs."""
        return self.parts[0].columns, sum(part.rows for part in self.parts)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Return what is held in memory."""
        for part in self.parts:
            yield from part.tensors()


class RowScaled(Protocol):
    """The weights of products that may round rows of activations by a scale of the whole row."""

    @property
    def has_row_scales(self) -> bool: ...


Linear = MatrixWeight | QuantisedWeight
"""The weight of a linear layer, [in, out]."""


def weight_of(parts: Sequence[PlainRows | QuantisedRows]) -> Linear:
    """Return the weight of parts of its output columns; a matrix, [in, out], if none of them is quantised."""
    plain = [part.values for part in parts if isinstance(part, PlainRows)]
    return torch.cat(plain).t().contiguous() if len(plain) == len(parts) else QuantisedWeight(parts)


def _has_row_scale(form: ActivationFormat | None) -> bool:
    return form is not None and not form.is_static and form.group_size is None


def tensors_of(weight: Linear) -> Iterator[torch.Tensor]:
    """Return what a weight holds in memory."""
    if isinstance(weight, torch.Tensor):
        yield weight
    elif isinstance(weight, PackedWeight):
        yield weight.panels
    else:
        yield from weight.tensors()


class LinearProducts:
    """Products with weights of any form; `products` computes those of numbers.

    `group` has the ranks that hold the other columns of a row-parallel linear's input: this one is `rank` of `size`.
    """

    def __init__(self, products: MatrixProducts, group: TensorGroup, rank: int, size: int) -> None:
        self._products, self._group, self._rank, self._size = products, group, rank, size

    def product(
        self,
        x: torch.Tensor,
        weight: Linear,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        *,
        is_partial: bool = False,
        largest: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return x @ weight + bias, [rows, columns], in `out` if that is given.

        Args:
            x: The input, [rows, in].
            weight: [in, columns].
            bias: [columns].
            out: [rows, columns].
            is_partial: True if x is this rank's part of the input's columns, so that all ranks of the group call this together.
            largest: What `largest_in_rows` returned for these rows, if the caller has asked already.
        """
        if not isinstance(weight, QuantisedWeight):
            return self._products.product(x, weight, bias, out)
        if out is None:
            out = x.new_empty(x.shape[0], weight.shape[1])
        if largest is None:
            largest = self.largest_in_rows(x, weight, is_partial=is_partial)
        for entering, columns, numbers in _tiles(x, weight, largest):
            own_bias = None if bias is None else bias[columns]
            self._products.product(entering, numbers.t(), own_bias, out[:, columns])
        return out

    def add_product(
        self, target: torch.Tensor, x: torch.Tensor, weight: Linear, *, is_partial: bool = False
    ) -> None:
        """Add x @ weight to `target`, [rows, columns]; `is_partial` as in `product`."""
        if not isinstance(weight, QuantisedWeight):
            self._products.add_product(target, x, weight)
            return
        largest = self.largest_in_rows(x, weight, is_partial=is_partial)
        for entering, columns, numbers in _tiles(x, weight, largest):
            self._products.add_product(target[:, columns], entering, numbers.t())

    def largest_in_rows(
        self, x: torch.Tensor, weight: RowScaled, *, is_partial: bool = False
    ) -> torch.Tensor | None:
        """Return the largest size in each whole row of x, [rows, 1]; None if no product with the weight asks for it.

        `is_partial`: x is this rank's part of the input's columns, so that all ranks of the group call this together.
        """
        if not weight.has_row_scales:
            return None
        largest = x.abs().amax(dim=-1, keepdim=True)
        if is_partial and self._size > 1:
            self._share_largest(largest)
        return largest

    def _share_largest(self, largest: torch.Tensor) -> None:
        """Replace the largest sizes in this rank's part of the rows by those in whole rows.

        Each rank puts its own into zeros for all ranks, whose sum is exact.
        """
        everyone = largest.new_zeros(self._size, largest.shape[0])
        everyone[self._rank] = largest[:, 0]
        self._group.all_reduce(everyone)
        largest[:, 0] = everyone.amax(dim=0)


def _tiles(
    x: torch.Tensor, weight: QuantisedWeight, largest: torch.Tensor | None
) -> Iterator[tuple[torch.Tensor, slice, torch.Tensor]]:
    """Return, for each tile of the output's columns, the rounded input, the columns and the numbers of their weights."""
    most = _HOST_TILE if is_in_host_memory(x) else DEVICE_TILE
    first, rounded_by, entering = 0, None, x
    for part in weight.parts:
        if part.activations is not None and (part.activations != rounded_by or part.activations.is_static):
            entering = rounded(x, part.activations, largest, part.input_scale)
            rounded_by = part.activations
        elif part.activations is None:
            entering, rounded_by = x, None
        tile = max(1, most // max(1, part.columns))
        for start in range(0, part.rows, tile):
            stop = min(start + tile, part.rows)
            numbers = part.numbers(slice(start, stop), x.dtype)
            yield entering, slice(first + start, first + stop), numbers
        first += part.rows


def rounded(
    x: torch.Tensor, form: ActivationFormat, largest: torch.Tensor | None, input_scale: torch.Tensor | None
) -> torch.Tensor:
    """Return activations, [rows, columns], rounded to a quantised format, as numbers of their own type.

    The arithmetic is that of compressed-tensors: a dynamic scale is the largest size divided by 127.5 for integers, and by
    448 for FP8; a scale of zero becomes the type's epsilon. Power scales are DeepSeek-V3.1's: the next power of two, in float32.

    Args:
        x: The activations.
        form: The format.
        largest: The largest size in each whole row, [rows, 1], for a format with one scale for each row.
        input_scale: The scale of a static format.
    """
    columns = x.shape[1]
    most = 127.5 if form.kind == "int8" else _FLOAT8_MAX
    if input_scale is not None:
        scale = input_scale  # it may be finer than activations, which are then rounded in its type
    elif form.group_size is not None:
        padding = -columns % form.group_size
        groups = (columns + padding) // form.group_size
        x = (F.pad(x, (0, padding)) if padding else x).reshape(x.shape[0], groups, form.group_size)
        sizes = x.abs().amax(dim=-1, keepdim=True)
        scale = _power_scale(sizes, most) if form.has_power_scales else _scale(sizes, most)
    else:
        assert largest is not None, "a row's scale is of the whole row"
        scale = _scale(largest, most)
    return _nearest(x / scale, form).mul_(scale).to(x.dtype).flatten(1)[:, :columns]


def _nearest(steps: torch.Tensor, form: ActivationFormat) -> torch.Tensor:
    """Return the numbers of a format that are nearest to these, which are changed."""
    if form.kind == "int8":
        return steps.round_().clamp_(-128, 127)
    return steps.clamp_(-_FLOAT8_MAX, _FLOAT8_MAX).to(torch.float8_e4m3fn).to(steps.dtype)


def _scale(largest: torch.Tensor, most: float) -> torch.Tensor:
    scale = largest / most
    return scale.masked_fill_(scale == 0, torch.finfo(scale.dtype).eps)


def _power_scale(largest: torch.Tensor, most: float) -> torch.Tensor:
    """Return the least powers of two, float32, by which no size exceeds `most`."""
    scale = _scale(largest.float(), most)
    mantissa, exponent = torch.frexp(scale)  # a mantissa is in [0.5, 1)
    return torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
