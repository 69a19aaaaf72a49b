"""Counts what a step asks of a device: kernel launches, bytes and FLOPs, without running it.

Fake tensors have shapes, types and devices, but no contents. So the engine's own code is counted, for models and devices
that this machine does not have.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from medha_worker.device import is_in_host_memory

_aten = torch.ops.aten
# Operators that read only some rows of their first argument: as many as they return, or as they write.
_READ_SOME = {_aten.embedding, _aten.index_select, _aten.index, _aten.gather}
_WRITE_SOME = {_aten.index_copy_, _aten.index_put_}
_COMPOSITE = "CompositeImplicitAutograd"
_KEPT = {_aten.to.dtype, _aten.to.device, _aten.to.dtype_layout}  # a copy or nothing: the result says which
# Operators that launch nothing: they only reserve memory.
_LAUNCH_NOTHING = {
    _aten.empty,
    _aten.new_empty,
    _aten.empty_like,
    _aten.empty_strided,
    _aten.new_empty_strided,
}


@dataclass(slots=True)
class StepCounts:
    """The launches, bytes and FLOPs of a step. Copies from the host count as launches; views count as nothing."""

    launches: Counter[str] = field(default_factory=Counter)
    """Launches by operator."""
    bytes: float = 0.0
    """Bytes that kernels read and write, each tensor once per kernel."""
    flops: float = 0.0

    def add(self, name: str, launches: int, count_bytes: float, flops: float = 0.0) -> None:
        """Add kernels that torch does not see."""
        self.launches[name] += launches
        self.bytes += count_bytes
        self.flops += flops

    @property
    def total_launches(self) -> int:
        return self.launches.total()


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that are called in this context, which must be entered inside `FakeTensorMode`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = StepCounts()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace != "aten":  # a question about a tensor
            return func(*args, **kwargs)
        if func not in _KEPT and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE):
            with self:  # in inference mode, torch shows operators that it makes of others
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        for tensor in _tensors((args, kwargs)):
            if isinstance(tensor, FakeTensor):
                tensor.constant = None  # else torch would really copy the numbers that it remembers
        result = func(*args, **kwargs)
        packet = func.overloadpacket
        read = _tensors((args, kwargs))
        made = _tensors(result)
        if packet in _LAUNCH_NOTHING or _is_view(func, read, made) or not _on_device([*read, *made]):
            return result
        if packet in _READ_SOME:
            moved = 2 * _size(made)
        elif packet in _WRITE_SOME:
            moved = 2 * _size(read[-1:])
        else:
            moved = _size(read) + _size(made)
        # torch counts this operator only in the form that makes a new result.
        counted = _aten.addmm if packet is _aten.addmm_ else packet
        flops = flop_registry[counted](*args, **kwargs, out_val=result) if counted in flop_registry else 0
        self.counts.add(str(packet).removeprefix("aten."), 1, moved, flops)
        return result


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _on_device(tensors: list[torch.Tensor]) -> bool:
    return not all(is_in_host_memory(tensor) for tensor in tensors)


def _is_view(func: Any, read: list[torch.Tensor], made: list[torch.Tensor]) -> bool:
    if func._schema.is_mutable:
        return False
    storages = {tensor.untyped_storage()._cdata for tensor in read}
    return bool(made) and all(tensor.untyped_storage()._cdata in storages for tensor in made)


def _size(tensors: list[torch.Tensor]) -> float:
    """Return the bytes of tensors; each counts once, and values that are repeated by a stride of 0 once, too."""
    sizes: dict[tuple[int, int, tuple[int, ...]], int] = {}
    for tensor in tensors:
        values = 1
        for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
            values *= length if stride else 1
        key = tensor.untyped_storage()._cdata, int(tensor.storage_offset()), tuple(tensor.shape)
        sizes[key] = values * tensor.element_size()
    return float(sum(sizes.values()))
