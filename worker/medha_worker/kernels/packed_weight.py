"""A weight in panels, each of which holds a few columns of all rows: compiled products read its memory in one run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import torch


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight whose columns are held a panel at a time.

    Attributes:
        panels: The columns of each panel, [panels, inner, columns of a panel], contiguous.
        shape: Numbers of inputs and outputs.
        address: Address of the first number. Asking a tensor for it takes longer.
    """

    panels: torch.Tensor
    shape: tuple[int, int] = field(init=False)
    address: int = field(init=False)

    def __post_init__(self) -> None:
        panels, inner, width = self.panels.shape
        object.__setattr__(self, "shape", (inner, panels * width))
        object.__setattr__(self, "address", self.panels.data_ptr())

    def numbers(self) -> torch.Tensor:
        """Return a copy of the weight as a matrix, [inner, columns]."""
        return self.panels.transpose(0, 1).reshape(self.shape)


MatrixWeight: TypeAlias = torch.Tensor | PackedWeight
"""A weight, [inner, columns], that products take."""


def matrix_of(weight: MatrixWeight) -> torch.Tensor:
    """Return the weight as a matrix: itself, or a copy of what is packed."""
    return weight.numbers() if isinstance(weight, PackedWeight) else weight
