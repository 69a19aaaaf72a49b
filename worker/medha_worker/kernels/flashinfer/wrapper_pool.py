"""FlashInfer's wrappers, which hold one plan each: a plan takes those that the device has done with, or new ones.

A wrapper stages its plan in pinned memory and copies it to its workspace on the device. The next plan would overwrite
both, whether or not the copy or the kernels that read it have run. Therefore a wrapper is planned again only when the
device has passed two marks: one behind its last plan, and one behind the step that used it. While steps are planned ahead,
two sets of wrappers so take turns.

All wrappers share the memory for partial results of split keys, because only a running kernel uses it: all attention has
to run on one stream.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Literal

import torch

from medha_worker.device import Device, Mark

# FlashInfer recommends this size. A plan that needs more raises.
_PARTIALS_BYTES = 128 << 20

Kind = Literal["decode", "prefill", "masked"]


def zeros(device: Device, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros that were made on the device, [count]."""
    return device.place(torch.zeros(1, dtype=dtype)).new_zeros(count)


class WrapperPool:
    """Makes wrappers, and keeps those that are not in use. Threads may take and give back at the same time."""

    def __init__(self, library: Any, device: Device, prefill_backend: str) -> None:
        """Allocate the shared memory.

        Args:
            library: The package `flashinfer`.
            device: Where the kernels run.
            prefill_backend: FlashInfer's implementation for chunks, such as "fa2".
        """
        self._library = library
        self._prefill_backend = prefill_backend
        self._mark = device.runtime.mark
        self.partials = zeros(device, _PARTIALS_BYTES, torch.uint8)
        self._free: dict[Kind, deque[tuple[Any, Mark, Mark]]] = {
            "decode": deque(), "prefill": deque(), "masked": deque(),
        }  # fmt: skip

    def take(self, kind: Kind) -> Any:
        """Return a wrapper that nothing uses any more."""
        free = self._free[kind]
        for _ in range(len(free)):
            try:
                wrapper, planned, used = free.popleft()
            except IndexError:  # another thread has taken it
                break
            if planned.is_done() and used.is_done():
                return wrapper
            free.append((wrapper, planned, used))
        return self._made(kind)

    def give_back(self, kind: Kind, wrapper: Any, planned: Mark) -> None:
        """Keep a wrapper whose work has been given; `planned` is the point behind its plan."""
        self._free[kind].append((wrapper, planned, self._mark()))

    def _made(self, kind: Kind) -> Any:
        if kind == "decode":
            return self._library.BatchDecodeWithPagedKVCacheWrapper(
                self.partials, kv_layout="HND", use_tensor_cores=True, backend="fa2"
            )
        # Only fa2 applies an explicit mask; fa3 ignores it.
        backend = "fa2" if kind == "masked" else self._prefill_backend
        return self._library.BatchPrefillWithPagedKVCacheWrapper(
            self.partials, kv_layout="HND", backend=backend
        )
