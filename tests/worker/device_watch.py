"""Watches every operator of a step on fake `cuda` tensors for what a GPU would not forgive.

Fake tensors raise where a value is needed (`.item()`, `bool()`, `nonzero`) and where two devices meet, but with holes:
an index in host memory passes in `x[i]`, copies to the host pass, and so do operators that only CPUs have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from medha_worker.device import Device, InOrder
from medha_worker.host_memory import HostMemory

GPU = torch.device("cuda", 0)
_KERNELS = (
    "CUDA", "CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "BackendSelect",
)  # fmt: skip


class Watch(TorchDispatchMode):
    """Records operators that read from both memories, copies to the host, and operators that no GPU has."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed: list[str] = []
        self.to_host: list[str] = []
        self.missing: list[str] = []
        self.to_device = 0
        self.operators: Counter[str] = Counter()

    @property
    def found(self) -> list[str]:
        """All that a step must not do."""
        return [*self.mixed, *self.to_host, *self.missing]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        for tensor in tensors:
            if isinstance(tensor, FakeTensor):
                tensor.constant = (
                    None  # otherwise numbers that torch remembers would really be copied to the device
                )
        result = func(*args, **(kwargs or {}))
        read = {tensor.device.type for tensor in tensors if tensor.dim()}  # numbers may be anywhere
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, FakeTensor)]
        made = {tensor.device.type for tensor in results}
        name = str(func)
        self.operators[name] += 1
        if len(read) > 1:
            self.mixed.append(name)
        elif "cuda" in read and "cpu" in made:
            self.to_host.append(name)
        elif "cpu" in read and "cuda" in made:
            self.to_device += 1
        if "cuda" in read | made and func.namespace == "aten" and not _has_kernel(func):
            self.missing.append(name)
        return result


def _has_kernel(func: Any) -> bool:
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key) for key in _KERNELS)


def fake_gpu(dtype: torch.dtype) -> Device:
    """Return a GPU that is not there."""
    return Device(GPU, dtype, HostMemory(), InOrder(GPU))


@contextmanager
def watched() -> Iterator[Watch]:
    """Compute only shapes, types and devices in this context."""
    with FakeTensorMode(), Watch() as watch:
        yield watch
