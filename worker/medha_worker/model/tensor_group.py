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


class RankOrder:
    """A group whose sums are the same to the bit whatever the shape: each adds the ranks' values in rank order.

    A library's all-reduce splits a tensor among the ranks, and each part is added in an order of its own. So here every
    rank puts its values into a tensor of zeros for all ranks. The sum of these tensors is exact in any order, but each
    is `size` times as large as the values.
    """

    def __init__(self, group: TensorGroup, rank: int, size: int) -> None:
        self._group, self._rank, self._size = group, rank, size
        self.captures = group.captures

    def all_reduce(self, x: torch.Tensor) -> None:
        everyone = x.new_zeros(self._size, *x.shape)
        everyone[self._rank] = x
        self._group.all_reduce(everyone)
        x.copy_(everyone[0])
        for other in everyone[1:]:
            x.add_(other)

    def gather_last_dim(self, x: torch.Tensor, widths: list[int]) -> torch.Tensor | None:
        return self._group.gather_last_dim(x, widths)


def in_rank_order(group: TensorGroup, rank: int, size: int) -> TensorGroup:
    """Return a group whose sums do not depend on the shape: the same one for up to two ranks, as a + b is b + a."""
    return RankOrder(group, rank, size) if size > 2 else group
