"""FlashInfer's wrappers, which hold one plan each: a plan takes those that the device has done with, or new ones.

A wrapper stages its plan in pinned memory and copies it to its workspace on the device. The next plan would overwrite
both, whether or not the copy or the kernels that read it have run. Therefore a wrapper is planned again only when the
device has passed two marks: one behind its last plan, and one behind the step that used it. So two sets of wrappers
take turns while steps are planned ahead.

All wrappers share the memory for partial results of split keys, because only a running kernel uses it: all attention has
to run on one stream.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Literal

import torch

from medha_worker.device import Device, Mark
from medha_worker.kernels.protocol import KernelSizes

# FlashInfer recommends at least as much. A plan that needs more raises.
_LEAST_PARTIALS_BYTES = 128 << 20
# FlashInfer splits keys until there are two parts for each processor of a GPU. The GPUs that images have modules for
# (`compiled_modules.ARCHITECTURES`) have no more processors than this.
# A part holds one tile: `_CHUNK_TILE` (row, head) pairs of a chunk, or `_DECODE_TILE` of decodes.
_MOST_PROCESSORS, _CHUNK_TILE, _DECODE_TILE = 160, 128, 16
# The plan of captured decodes takes some bytes for each row and part. FlashInfer's own buffer is eight times as large, and
# there are dozens of captures.
GRAPH_PLAN_BYTES = 1 << 20

Kind = Literal["decode", "prefill", "wide", "masked"]
"""Batches by the kernel that runs them: `prefill` are chunks, and `wide` are those of many rows, on GPUs that have "fa3"."""


def zeros(device: Device, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros that were made on the device, [count]."""
    return device.place(torch.zeros(1, dtype=dtype)).new_zeros(count)


class WrapperPool:
    """Makes wrappers, and keeps those that are not in use. Threads may take and give back at the same time."""

    def __init__(self, library: Any, device: Device, sizes: KernelSizes) -> None:
        """Allocate the shared memory.

        Args:
            library: The package `flashinfer`.
            device: Where the kernels run.
            sizes: Heads and their size.
        """
        self._library = library
        self._mark = device.runtime.mark
        self._device, self._sizes = device, sizes
        parts = 2 * _MOST_PROCESSORS // sizes.kv_heads
        self._partials = zeros(device, self._bytes(parts * _CHUNK_TILE), torch.uint8)
        self._free: dict[Kind, deque[tuple[Any, Mark, Mark]]] = {
            "decode": deque(), "prefill": deque(), "wide": deque(), "masked": deque(),
        }  # fmt: skip

    def partials_of_decodes(self, rows: int) -> torch.Tensor:
        """Return memory for the partial results of captured decodes, which are always split."""
        group = self._sizes.query_heads // self._sizes.kv_heads
        needed = self._bytes(rows * (group + _DECODE_TILE))
        if needed > len(self._partials):
            self._partials = zeros(self._device, needed, torch.uint8)
        return self._partials

    def _bytes(self, partial_rows: int) -> int:
        """Return the memory of float32 outputs and log-sum-exps; FlashInfer 0.6 reserves as much, 0.7 less."""
        return max(
            _LEAST_PARTIALS_BYTES, 4 * partial_rows * self._sizes.query_heads * (self._sizes.head_dim + 1)
        )

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
                self._partials, kv_layout="HND", use_tensor_cores=True, backend="fa2"
            )
        # Only fa2 applies an explicit mask; fa3 ignores it.
        backend = "fa3" if kind == "wide" else "fa2"
        return self._library.BatchPrefillWithPagedKVCacheWrapper(
            self._partials, kv_layout="HND", backend=backend
        )
