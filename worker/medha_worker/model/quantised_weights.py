"""The weights of a quantised linear layer, and their products with activations.

Weights stay quantised in memory. Where the kernels have a product for the form of some rows, it is used. Otherwise, a few
rows at a time are turned into numbers of the type that the model computes in, and these are multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from medha.model.quantisation import ActivationFormat
from medha_worker.device import is_in_host_memory
from medha_worker.kernels.activation_rounding import rounded
from medha_worker.kernels.packed_weight import MatrixWeight, PackedWeight
from medha_worker.kernels.protocol import MatrixProducts, PackRows
from medha_worker.kernels.quantised_rows import FastRows, PlainRows, QuantisedRows, WeightRows
from medha_worker.model.tensor_group import TensorGroup

# Numbers that are made at a time: few enough to stay in a CPU's cache, and enough to fill a GPU.
_HOST_TILE, DEVICE_TILE = 1 << 18, 1 << 24


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

    def packed(self, pack: PackRows) -> QuantisedWeight:
        """Return the same weight in the forms in which its products are fastest."""
        return QuantisedWeight(pack(self.parts))


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
        if largest is None:
            largest = self.largest_in_rows(x, weight, is_partial=is_partial)
        if out is None:
            if len(weight.parts) == 1 and (alone := _fast_product(weight.parts[0], x, largest)) is not None:
                return alone if bias is None else alone.add_(bias)
            out = x.new_empty(x.shape[0], weight.shape[1])
        for columns, found in _fast(x, weight, largest):
            if bias is None:
                out[:, columns] = found
            else:
                torch.add(found, bias[columns], out=out[:, columns])
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
        for columns, found in _fast(x, weight, largest):
            target[:, columns].add_(found)
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


def _fast_product(part: WeightRows, x: torch.Tensor, largest: torch.Tensor | None) -> torch.Tensor | None:
    """Return the product with a part of the output's columns, if its form has one that takes so many rows."""
    return part.product(x, largest) if isinstance(part, FastRows) and part.takes(x.shape[0]) else None


def _fast(
    x: torch.Tensor, weight: QuantisedWeight, largest: torch.Tensor | None
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Return, for each part whose form has a product, the output's columns and the result."""
    first = 0
    for part in weight.parts:
        found = _fast_product(part, x, largest)
        if found is not None:
            yield slice(first, first + part.rows), found
        first += part.rows


def _tiles(
    x: torch.Tensor, weight: QuantisedWeight, largest: torch.Tensor | None
) -> Iterator[tuple[torch.Tensor, slice, torch.Tensor]]:
    """Return, for each tile of other columns of the output, the rounded input, the columns and the numbers of their weights."""
    most = _HOST_TILE if is_in_host_memory(x) else DEVICE_TILE
    first, rounded_by, entering = 0, None, x
    for part in weight.parts:
        if isinstance(part, FastRows) and part.takes(x.shape[0]):
            first += part.rows
            continue
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
