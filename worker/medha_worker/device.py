"""Where a rank computes: made once, when the rank starts, and passed to all that makes or moves tensors.

Tensors are in one of two memories. Token ids, positions, tables, frames and what gloo sends are in *host*
memory; weights, activations and the KV pool are in the device's. On a CPU both are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from medha_worker.host_memory import HostMemory

HOST = torch.device("cpu")
"""The device of tensors in host memory."""


class DeviceMemory(Protocol):
    """Figures of the memory that tensors take on a device, in bytes."""

    def free_bytes(self, ranks: int) -> int:
        """Return what one of `ranks` that share the memory may still take."""
        ...

    def used_bytes(self) -> int:
        """Return what this process has taken."""
        ...

    def peak_bytes(self) -> int:
        """Return the most that this process has taken since `forget_peak`."""
        ...

    def forget_peak(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Device:
    """A device, and the element type of weights, activations and KV on it."""

    torch_device: torch.device
    dtype: torch.dtype
    memory: DeviceMemory

    def __str__(self) -> str:
        return str(self.torch_device)

    @property
    def is_host(self) -> bool:
        """True if the device computes in host memory: it is the CPU."""
        return self.torch_device.type == HOST.type

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor, of any dtype, on this device: itself if it is there already."""
        return tensor.to(self.torch_device)

    def synchronise(self) -> None:
        """Wait until the device has done all work that was given to it."""
        if self.torch_device.type == "cuda":
            torch.cuda.synchronize(self.torch_device)


def host_device(dtype: torch.dtype) -> Device:
    """Return the CPU as a device."""
    return Device(HOST, dtype, HostMemory())
