"""A layer's quantised experts, adjacent in memory: an index on the device names the experts whose numbers are made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from medha_worker.kernels.activation_rounding import rounded
from medha_worker.kernels.quantised_rows import PlainRows, QuantisedRows, WeightRows
from medha_worker.model.mxfp4_rows import Mxfp4Rows
from medha_worker.model.quantised_weights import QuantisedWeight

Rows = PlainRows | QuantisedRows | Mxfp4Rows


@dataclass(frozen=True)
class StackedPart:
    """The same part of the output columns of all experts, in one form.

    Attributes:
        form: The part of the first expert.
        tensors: The tensors of all experts under the names of the form's fields, each [experts, ...].
    """

    form: Rows
    tensors: Mapping[str, torch.Tensor]

    def of_expert(self, expert: int) -> Rows:
        """Return the part of one expert, in the memory of all."""
        changes: dict[str, Any] = {name: tensor[expert] for name, tensor in self.tensors.items()}
        return replace(self.form, **changes)

    def rounded(self, x: torch.Tensor, of_rows: torch.Tensor, largest: torch.Tensor | None) -> torch.Tensor:
        """Return activations as `rounded` does, each row by the scale of its expert, `of_rows`, int64 [rows]."""
        if self.form.activations is None:
            return x
        scale = self.tensors.get("input_scale")
        return rounded(x, self.form.activations, largest, None if scale is None else scale[of_rows])

    def numbers(self, chosen: torch.Tensor | None, rows: slice, dtype: torch.dtype) -> torch.Tensor:
        """Return the numbers of some rows of chosen experts, [experts, rows, columns].

        Args:
            chosen: The experts, int64; None for all.
            rows: The rows of each expert's part.
            dtype: The type of the numbers.
        """
        found = self._one_behind_the_other(chosen, rows)
        return found.numbers(slice(0, found.rows), dtype).view(-1, rows.stop - rows.start, found.columns)

    def _one_behind_the_other(self, chosen: torch.Tensor | None, rows: slice) -> Rows:
        """Return the same rows of each chosen expert, one expert after the other."""

        def picked(name: str, index: torch.Tensor | None = None) -> torch.Tensor:
            """Return a tensor's part for the chosen rows, or for those of `index`, one expert after the other."""
            tensor = self.tensors[name]
            if tensor.itemsize == 1:  # torch cannot select among all types of 8 bits
                tensor = tensor.view(torch.uint8)
            tensor = tensor[:, rows] if index is None else tensor.index_select(1, index)
            tensor = tensor if chosen is None else tensor.index_select(0, chosen)
            return tensor.flatten(0, 1).view(self.tensors[name].dtype)

        form = self.form
        if isinstance(form, PlainRows):
            return replace(form, values=picked("values"))
        if isinstance(form, Mxfp4Rows):
            return replace(form, values=picked("values"), scales=picked("scales"))
        index = None if form.block_rows == 1 else form.blocks(rows)
        changes: dict[str, Any] = {"values": picked("values"), "scale": picked("scale", index)}
        if form.zero is not None:
            changes["zero"] = picked("zero", index)
        if form.group_of is not None:
            groups = self.tensors["group_of"] if chosen is None else self.tensors["group_of"][chosen]
            changes["group_of"] = groups.repeat_interleave(rows.stop - rows.start, dim=0)
        return replace(form, block_rows=1, block_start=0, block_of=None, **changes)


@dataclass(frozen=True)
class StackedExperts:
    """All experts of a layer, whose parts have the same forms."""

    parts: tuple[StackedPart, ...]
    each: tuple[QuantisedWeight, ...]

    @classmethod
    def of(cls, each: Sequence[QuantisedWeight]) -> StackedExperts | None:
        """Copy the weights of experts to adjacent memory; None if their forms differ."""
        if len({tuple(map(_form, weight.parts)) for weight in each}) > 1:
            return None
        parts = tuple(_stacked(of_all) for of_all in zip(*(weight.parts for weight in each), strict=True))
        views = (QuantisedWeight([part.of_expert(expert) for part in parts]) for expert in range(len(each)))
        return cls(parts, tuple(views))


def _form(rows: WeightRows) -> tuple[Any, ...]:
    """Return what rows of the same form have in common: all but what is in their tensors."""
    values = ((name, value) for name, value in _fields_of(rows))
    return type(rows), *(
        (name, (value.shape, value.dtype)) if isinstance(value, torch.Tensor) else (name, value)
        for name, value in values
    )


def _fields_of(rows: Any) -> Iterator[tuple[str, Any]]:
    return ((field.name, getattr(rows, field.name)) for field in fields(rows))


def _stacked(of_all: Sequence[Any]) -> StackedPart:
    tensors = {
        name: torch.stack([getattr(rows, name) for rows in of_all])
        for name, value in _fields_of(of_all[0])
        if isinstance(value, torch.Tensor)
    }
    # The form refers to the copies, so that the first expert's own tensors are let go of, too.
    return StackedPart(replace(of_all[0], **{name: tensor[0] for name, tensor in tensors.items()}), tensors)
