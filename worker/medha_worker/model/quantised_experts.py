"""The weights of quantised experts, and the products of rows with them.

Weights stay as they are stored. A product turns a few rows of one expert into numbers at a time; on a GPU, a few rows of
all experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from medha_worker.device import is_in_host_memory
from medha_worker.kernels.protocol import ExpertProducts, Kernels, PackRows
from medha_worker.kernels.row_blocks import experts_of_rows
from medha_worker.model.quantised_weights import DEVICE_TILE, LinearProducts, QuantisedWeight
from medha_worker.model.stacked_experts import StackedExperts

_LEAST_COLUMNS = 32
"""Columns of each expert whose numbers are made at least at a time, and a multiple that the grouped matmul takes."""


class QuantisedExperts:
    """The weights of all experts of a layer, each [in, out].

    On a GPU, parts of one form in all experts are adjacent in memory, so that an index on the device finds those of
    some experts.
    """

    def __init__(self, each: Sequence[QuantisedWeight]) -> None:
        stacked = None if is_in_host_memory(next(each[0].tensors())) else StackedExperts.of(each)
        self.each = tuple(each) if stacked is None else stacked.each
        self.stacked = stacked
        """All experts' parts together; None in host memory, and if experts are in several forms."""
        self.has_row_scales = any(weight.has_row_scales for weight in self.each)
        """True if a product rounds each row of activations by a scale of the whole row."""

    def tensors(self) -> Iterator[torch.Tensor]:
        """Return what is held in memory."""
        for weight in self.each:
            yield from weight.tensors()

    def packed(self, pack_rows: PackRows) -> QuantisedExperts:
        """Return the same experts; in host memory in the forms in which products are fastest, on a GPU as they are."""
        if not is_in_host_memory(next(self.each[0].tensors())):
            return self
        return QuantisedExperts([weight.packed(pack_rows) for weight in self.each])


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

    `is_partial`: x is this rank's part of the input's columns, so that all ranks of the group call this together, for the same
    rows of the same experts.
    """
    if isinstance(weights, torch.Tensor):
        return kernels.experts.product(x, weights, row_ends)
    largest = products.largest_in_rows(x, weights, is_partial=is_partial)
    if not is_in_host_memory(x):
        if weights.stacked is None:
            return products_of_each(products, x, weights, row_ends, largest)
        return products_of_stacked(kernels.experts, x, weights.stacked, row_ends, largest)
    out = x.new_empty(x.shape[0], weights.each[0].shape[1])
    first = 0
    for weight, end in zip(weights.each, row_ends.tolist(), strict=True):
        if end > first:
            own = None if largest is None else largest[first:end]
            products.product(x[first:end], weight, out=out[first:end], largest=own)
        first = end
    return out


def products_of_stacked(
    experts: ExpertProducts,
    x: torch.Tensor,
    weights: StackedExperts,
    row_ends: torch.Tensor,
    largest: torch.Tensor | None,
) -> torch.Tensor:
    """Return the products of rows without reading `row_ends` on the host: they stay on the device.

    The weights of all experts are turned into numbers or, if there are fewer rows than experts, those of each row's own
    expert: a few columns at a time. `largest` is what `LinearProducts.largest_in_rows` returned.
    """
    rows, count = x.shape[0], len(weights.each)
    inner, columns = weights.each[0].shape
    out = x.new_empty(rows, columns)
    if not rows:
        return out
    of_rows, chosen, ends = experts_of_rows(row_ends, rows), None, row_ends
    if rows < count:
        chosen, ends = of_rows, torch.arange(1, rows + 1, dtype=row_ends.dtype, device=x.device)
    fitting = DEVICE_TILE // (min(rows, count) * inner)
    tile = max(_LEAST_COLUMNS, fitting // _LEAST_COLUMNS * _LEAST_COLUMNS)
    first = 0
    for part in weights.parts:
        entering = part.rounded(x, of_rows, largest)
        for start in range(0, part.form.rows, tile):
            stop = min(start + tile, part.form.rows)
            numbers = part.numbers(chosen, slice(start, stop), x.dtype)
            found = experts.product(entering, numbers.transpose(1, 2), ends)
            out[:, first + start : first + stop] = found
        first += part.form.rows
    return out


def products_of_each(
    products: LinearProducts,
    x: torch.Tensor,
    weights: QuantisedExperts,
    row_ends: torch.Tensor,
    largest: torch.Tensor | None,
) -> torch.Tensor:
    """Return the products of rows with experts in several forms.

    Each expert multiplies every row, and the results of its own rows are kept.
    """
    of_rows = experts_of_rows(row_ends, x.shape[0])[:, None]
    out = x.new_zeros(x.shape[0], weights.each[0].shape[1])
    for expert, weight in enumerate(weights.each):
        out = torch.where(of_rows == expert, products.product(x, weight, largest=largest), out)
    return out
