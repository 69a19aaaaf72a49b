"""A device that computes on the CPU, and yet has memory of its own and runs its work when the test lets it.

Its tensors are of the class `OnDevice`. Operators on them give such tensors again, and raise if another operand is a tensor
in host memory. `FakeTensorMode` finds the same mistakes, but computes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from medha_worker.device import HOST, Device, InOrder
from medha_worker.host_memory import HostMemory


class OnDevice(torch.Tensor):
    """A tensor in the device's memory."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors((args, kwargs or {})):
            if not isinstance(tensor, OnDevice) and tensor.dim():
                raise RuntimeError(f"{func.__name__} is given tensors of two devices")
        result = super().__torch_function__(func, types, args, kwargs or {})
        if func.__name__ == "new_empty" and result.is_floating_point():
            result.fill_(math.nan)  # memory that was freed often holds the very result that is missing
        return result


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(OnDevice)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as a tensor that nothing is checked for."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


class Work:
    """The work that was given to the device, as a count, and how much of it is done."""

    def __init__(self) -> None:
        self.given = 0
        self.done = 0

    def give(self) -> int:
        """Give one more piece, and return its number."""
        self.given += 1
        return self.given

    def finish(self) -> None:
        self.done = self.given

    def mark(self) -> Mark:
        return Mark(self)


class Mark:
    """The point behind all work that was given so far."""

    def wait(self) -> None: ...

    def __init__(self, work: Work) -> None:
        self._work, self._point = work, work.given

    def is_done(self) -> bool:
        return self._work.done >= self._point


class Computing(InOrder):
    """`Runtime` of such tensors."""

    captures = True

    def __init__(self, work: Work) -> None:
        super().__init__(HOST)
        self._work = work

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, OnDevice) else on_device(tensor.clone())

    def mark(self) -> Mark:
        return Mark(self._work)

    def synchronise(self) -> None:
        self._work.finish()


def computing_device(dtype: torch.dtype, work: Work) -> Device:
    return Device(HOST, dtype, HostMemory(), Computing(work))
