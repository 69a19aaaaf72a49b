"""Tensor parallelism as the model sees it: the ranks that hold slices of the same layers."""

from typing import Protocol

import torch


class TensorGroup(Protocol):
    """Ranks in lock-step: every call is made by all of them, in the same order, with the same shapes."""

    def all_reduce(self, x: torch.Tensor) -> None:
        """x becomes, on every rank, the sum of all ranks' x."""
        ...

    def gather_last_dim(self, x: torch.Tensor, widths: list[int]) -> torch.Tensor | None:
        """On rank 0 all ranks' [rows, widths[rank]] side by side; None on the others."""
        ...


class Alone:
    """A rank that holds whole layers."""

    def all_reduce(self, x: torch.Tensor) -> None:
        pass

    def gather_last_dim(self, x: torch.Tensor, widths: list[int]) -> torch.Tensor | None:  # noqa: ARG002 - there is one
        return x
