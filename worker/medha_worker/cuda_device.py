"""NVIDIA GPUs as devices: streams, events, graphs and memory figures of torch's CUDA runtime.

`make gpu-check` runs it on a GPU; docs/gpu.md has the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from mmap import PAGESIZE
from weakref import WeakSet, finalize

import numpy as np
import torch

from medha.errors import OutOfMemory
from medha_worker.device import HOST, Device
from medha_worker.host_memory import MemoryFigures
from medha_worker.nvml import nvml_uuid

_WARM_RUNS = 2
"""Runs before a capture: libraries allocate and choose kernels in their first run, which a capture must not see."""


class CudaRuntime:
    """`Runtime` of one GPU.

    Work given `ahead`, work given in `copying`, and copies `beside` have a stream each. All else is on the default
    stream.
    """

    captures = True

    def __init__(self, torch_device: torch.device) -> None:
        self._device = torch_device
        self._ahead = torch.cuda.Stream(torch_device)  # type: ignore[no-untyped-call]
        self._copying = torch.cuda.Stream(torch_device)  # type: ignore[no-untyped-call]
        self._beside = torch.cuda.Stream(torch_device)  # type: ignore[no-untyped-call]
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        self._graphs_memory = torch.cuda.graph_pool_handle()

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == self._device.type:
            return tensor
        # From pinned memory the copy is asynchronous. Torch keeps that memory until the copy is done.
        return tensor.pin_memory().to(self._device, non_blocking=True)

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=HOST, pin_memory=True)

    def lasting_host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return pinned(shape, dtype)

    @contextmanager
    def ahead(self) -> Iterator[None]:
        with torch.cuda.stream(self._ahead):
            yield

    @contextmanager
    def copying(self) -> Iterator[None]:
        with torch.cuda.stream(self._copying):
            yield

    def beside(self, copies: Callable[[], None]) -> CudaMark:
        self._beside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._beside):
            copies()
            return CudaMark(self._device)

    def mark(self) -> CudaMark:
        return CudaMark(self._device)

    def timed_mark(self) -> CudaTimedMark:
        return CudaTimedMark(self._device)

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        beside = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(beside):
            for _ in range(_WARM_RUNS):
                run()
        torch.cuda.current_stream(self._device).wait_stream(beside)
        if (
            not self._graphs
        ):  # torch frees their memory with the last of them, and then captures nothing into it
            self._graphs_memory = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # No other thread may allocate meanwhile: captures are made before the first step, while none runs. Graphs run one
        # at a time, so they share their memory.
        with torch.cuda.graph(graph, pool=self._graphs_memory):
            run()
        self._graphs.add(graph)
        return graph.replay

    def synchronise(self) -> None:
        # Not the whole device: receives of the next step may be waiting on streams of their own.
        torch.cuda.current_stream(self._device).synchronize()


def pinned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised tensor in pinned host memory of its own pages.

    Torch's allocator rounds the size of pinned memory up to a power of two. An option turns that off
    (`pinned_max_round_threshold_mb`), but then it may reuse freed memory for a tensor that is larger than it (torch 2.13).

    Raises:
        OutOfMemory: so much memory cannot be pinned.
    """
    used_bytes = prod(shape) * dtype.itemsize
    size_bytes = -(-used_bytes // PAGESIZE) * PAGESIZE
    memory = np.empty(size_bytes + PAGESIZE, dtype=np.uint8)
    begin = -memory.ctypes.data % PAGESIZE
    address = memory.ctypes.data + begin
    try:
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(cudart.cudaHostRegister(address, size_bytes, 0))
    except torch.cuda.CudaError as error:
        raise OutOfMemory(
            f"{size_bytes} bytes of host memory cannot be pinned ({error}); lower kvCache.tiers.host.size or "
            "kvCache.streaming.size, or give the pods more memory"
        ) from error
    finalize(memory, _unpin, address).atexit = False  # called before numpy frees it
    return torch.from_numpy(memory[begin : begin + used_bytes]).view(dtype).view(*shape)


def _unpin(address: int) -> None:
    torch.cuda.synchronize()  # copies may still be under way
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


class CudaMark:
    """`Mark` of a GPU: an event after what the calling thread's stream holds now."""

    def __init__(self, torch_device: torch.device) -> None:
        self._device = torch_device
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(torch_device))

    def wait(self) -> None:
        self._event.wait(torch.cuda.current_stream(self._device))

    def is_done(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]


class CudaTimedMark:
    """`TimedMark` of a GPU: a timed event after what the calling thread's stream holds now."""

    def __init__(self, torch_device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(torch_device))

    def seconds_until(self, later: CudaTimedMark) -> float:
        return 1e-3 * float(self._event.elapsed_time(later._event))


class CudaMemory:
    """`DeviceMemory` of one GPU, which one rank has to itself.

    Free memory is the driver's figure, so that memory of libraries and of other processes counts. `free_bytes` first
    returns the blocks that torch caches.
    """

    def __init__(self, torch_device: torch.device) -> None:
        self._device = torch_device

    def free_bytes(self, ranks: int) -> int:  # noqa: ARG002 - ranks share a host, not a GPU
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self._device)
        return free

    def figures(self) -> MemoryFigures:
        free, total = torch.cuda.mem_get_info(self._device)
        return MemoryFigures(total, self.used_bytes(), free)

    def used_bytes(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_reserved(self._device)

    def forget_peak(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)


def cuda_device(index: int, dtype: torch.dtype) -> Device:
    """Return a GPU of this process as a device, and make it the one that torch uses."""
    torch_device = torch.device("cuda", index)
    torch.cuda.set_device(torch_device)
    memory, runtime = CudaMemory(torch_device), CudaRuntime(torch_device)
    about = torch.cuda.get_device_properties(torch_device)
    return Device(torch_device, dtype, memory, runtime, about.name, nvml_uuid(about.name, str(about.uuid)))
