"""The device on which a rank computes: made once, when it starts, and passed to all that makes or moves tensors.

Tensors are in one of two memories. Token ids, positions, tables, frames and what gloo sends are in *host*
memory; weights, activations and the KV pool are in the device's. On a CPU both are the same.

A device runs what it is given in order, possibly after the call has returned. Everything that depends on that is
behind `Runtime`: a second stream, points to wait for, captured work, and copies that nobody waits for. Only the
modules that choose a device or kernels, `cuda_device`, and the kernels themselves name a kind of device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from medha_worker.host_memory import HostMemory, MemoryFigures
from medha_worker.timed_mark import TimedMark

HOST = torch.device("cpu")
"""The device of tensors in host memory."""


def is_in_host_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is in host memory, which is also the device's if that is the CPU."""
    return tensor.device.type == HOST.type


class DeviceMemory(Protocol):
    """Figures of the memory that tensors take on a device, in bytes."""

    def free_bytes(self, ranks: int) -> int:
        """Return what one of `ranks` that share the memory may still take."""
        ...

    def figures(self) -> MemoryFigures:
        """Return the memory as it is now. Any thread may call this; unlike `free_bytes`, it changes nothing."""
        ...

    def used_bytes(self) -> int:
        """Return what this process has taken."""
        ...

    def peak_bytes(self) -> int:
        """Return the most that this process has taken since `forget_peak`."""
        ...

    def forget_peak(self) -> None: ...


class Mark(Protocol):
    """A point in the work that a thread has given to a device."""

    def wait(self) -> None:
        """Let the work that the calling thread gives from here on begin after this point; the thread goes on."""
        ...

    def is_done(self) -> bool:
        """True if the device has passed this point."""
        ...


class Runtime(Protocol):
    """The way in which a device runs the work that it is given."""

    captures: bool
    """True if `capture` makes work cheaper to repeat."""

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the device: itself if it is there already, else a copy that nobody waits for."""
        ...

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor in host memory that is fast to copy to and from the device."""
        ...

    def lasting_host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor as `host_empty` does, but of no more memory than it needs. It is slow to make."""
        ...

    def ahead(self) -> AbstractContextManager[None]:
        """Run what the calling thread gives in this context beside the work of other threads, not behind it."""
        ...

    def copying(self) -> AbstractContextManager[None]:
        """Run what the calling thread gives in this context beside all other work: copies, each after those before it."""
        ...

    def beside(self, copies: Callable[[], None]) -> Mark:
        """Let `copies` be made beside what the calling thread gives next; return the point after them.

        They begin after all that this thread has given, and after all copies of earlier calls. `copies` may be called by
        another thread. The mark raises what they raised.
        """
        ...

    def mark(self) -> Mark:
        """Return the point after all work that the calling thread has given so far."""
        ...

    def timed_mark(self) -> TimedMark | None:
        """Return a mark that is timed; None from a device that has done all work when a call returns."""
        ...

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Return a function that repeats the device's work of `run`, on the same memory and with the same shapes.

        `run` is called at least once. It must not synchronise, nor read anything in host memory that changes.
        """
        ...

    def synchronise(self) -> None:
        """Wait until the device has done all work that the calling thread has given, and not for that of others."""
        ...


@dataclass(frozen=True, slots=True)
class Device:
    """A device, and the element type of weights, activations and KV on it."""

    torch_device: torch.device
    dtype: torch.dtype
    memory: DeviceMemory
    runtime: Runtime
    name: str = "cpu"
    """The model of the device, as its driver names it."""
    uuid: str = ""
    """The device's own identity, as NVML writes it (`GPU-...`, a slice's `MIG-...`); empty if it has none."""

    def __str__(self) -> str:
        return str(self.torch_device)

    @property
    def is_host(self) -> bool:
        """True if the device computes in host memory: it is the CPU."""
        return self.torch_device.type == HOST.type

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor, of any dtype, on this device: itself if it is there already."""
        return self.runtime.place(tensor)

    def synchronise(self) -> None:
        """Wait until the device has done all work that the calling thread has given."""
        self.runtime.synchronise()


class InFlight:
    """Keeps objects until the device has passed the point at which it no longer reads their memory.

    A tensor that was made `ahead` would otherwise be reused, for the next one, while it is still read.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._kept: deque[tuple[Mark, object]] = deque()

    def keep(self, used: object) -> None:
        """Keep `used` until the work given so far is done, and let go of what is done."""
        self._kept.append((self._runtime.mark(), used))
        while self._kept and self._kept[0][0].is_done():
            self._kept.popleft()


class InOrder:
    """`Runtime` of a device that has done each piece of work when the call returns, as a CPU does.

    Copies beside it are made by a thread.
    """

    captures = False

    def __init__(self, torch_device: torch.device) -> None:
        self._torch_device = torch_device
        self._copier: ThreadPoolExecutor | None = None

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._torch_device)

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=HOST)

    lasting_host_empty = host_empty

    @contextmanager
    def ahead(self) -> Iterator[None]:
        yield

    @contextmanager
    def copying(self) -> Iterator[None]:
        yield

    def beside(self, copies: Callable[[], None]) -> Mark:
        if self._copier is None:
            self._copier = ThreadPoolExecutor(1, "medha-copy")
        return _Beside(self._copier.submit(copies))

    def mark(self) -> Mark:
        return _PASSED

    def timed_mark(self) -> None:
        return None

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        return run

    def synchronise(self) -> None: ...


class _Passed:
    def wait(self) -> None: ...

    def is_done(self) -> bool:
        return True


_PASSED = _Passed()


class _Beside:
    """The end of copies that a thread makes."""

    def __init__(self, made: Future[None]) -> None:
        self._made = made

    def wait(self) -> None:
        self._made.result()

    def is_done(self) -> bool:
        return self._made.done()


def host_device(dtype: torch.dtype) -> Device:
    """Return the CPU as a device."""
    return Device(HOST, dtype, HostMemory(), InOrder(HOST))
