"""Memory for weights in huge pages, where the kernel gives them: a product reads thousands of pages of 4 KiB otherwise.

Each page that a product reads takes an entry of the processor's TLB, which has too few for so many pages. And the
processor's prefetch stops at the end of each page.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch

_CHUNK_BYTES = 64 << 20  # mapped at a time; what is not used takes no physical memory
_ALIGNED_BYTES = 4096


class HugePages:
    """Hands out float32 tensors from chunks of memory; a chunk is freed when no tensor is left in it."""

    def __init__(self) -> None:
        self._chunk: mmap.mmap | None = None
        self._used_bytes = 0

    def take(self, *shape: int) -> torch.Tensor:
        """Return a contiguous tensor of this shape, whose numbers are zero.

        Raises:
            MemoryError: there is not enough.
        """
        size = torch.Size(shape).numel()
        needed = -(-4 * size // _ALIGNED_BYTES) * _ALIGNED_BYTES
        if self._chunk is None or self._used_bytes + needed > len(self._chunk):
            self._chunk, self._used_bytes = _mapped(max(needed, _CHUNK_BYTES)), 0
        found = torch.frombuffer(self._chunk, dtype=torch.float32, count=size, offset=self._used_bytes)
        self._used_bytes += needed
        return found.view(shape)


def _mapped(size: int) -> mmap.mmap:
    try:
        chunk = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size} bytes for weights cannot be mapped: {error}") from error
    with suppress(AttributeError, OSError):  # a system without huge pages
        chunk.madvise(mmap.MADV_HUGEPAGE)
    return chunk
