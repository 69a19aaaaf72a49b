"""Tensor parallelism as the model sees it: the ranks that hold slices of the same layers."""

from typing import Protocol

import torch


class TensorGroup(Protocol):
    """Ranks in lock-step: all of them make every call, in the same order and with the same shapes.

    Tensors may be in the memory of any device.
    """

    captures: bool
    """True if its calls can be captured (`Runtime.capture`): they do not pass through host memory."""

    def all_reduce(self, x: torch.Tensor) -> None:
        """Replace x on every rank by the sum of all ranks' x."""
        ...

    def gather_last_dim(self, x: torch.Tensor, widths: list[int]) -> torch.Tensor | None:
        """Return all ranks' [rows, widths[rank]] side by side on rank 0, and None on the others."""
        ...


class Alone:
    """The group of a rank that holds whole layers."""

    captures = True

    def all_reduce(self, x: torch.Tensor) -> None:
        pass

    def gather_last_dim(self, x: torch.Tensor, widths: list[int]) -> torch.Tensor | None:  # noqa: ARG002 - there is one
        return x
