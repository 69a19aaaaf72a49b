"""KV blocks in host memory that attention reads from there: a part of a request's KV that its pool has no place for.

Streamed blocks have the layout of the pool, [kv_heads, slots, head_dim] for each tensor of a layer. On a CPU, attention
reads them in place. For any other device, they are read in *segments*, each copied into one of two buffers on the device:
the next one is copied while attention reads the one before, and the first one of a layer while the layer before it
computes. A segment into which the step itself writes is copied only after that write.

Copies to a device other than the CPU are unproven until a GPU has run them (docs/gpu.md).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from medha.kv.blocks import Run
from medha_worker.device import Mark
from medha_worker.model.kv_cache import KVCache, zeros

SEGMENT_TOKENS = 8192
"""Most tokens of a segment: 16 MiB of keys of eight heads of 128 numbers in bfloat16."""
_REPEATS = 3

Pools = tuple[torch.Tensor, torch.Tensor]
"""Keys and values, [kv_heads, slots, head_dim] each; the same tensor twice if rows are both."""


@dataclass(frozen=True, eq=False, slots=True)
class Segment:
    """Streamed blocks that are read together. The first of them begins at slot 0 of what is read."""

    runs: tuple[Run, ...]
    is_written: bool = False
    """True if the step that reads it also writes to it."""


class _Buffer:
    """Memory of the device for one segment."""

    def __init__(self, pools: Pools) -> None:
        self.pools = pools
        self.holds: tuple[object, int] | None = None
        self.copied: Mark | None = None
        self.used: Mark | None = None


class StreamedBlocks:
    """`blocks` blocks in host memory beside those of a KV pool, for each of its layers."""

    def __init__(
        self,
        cache: KVCache,
        blocks: int,
        *,
        in_place: bool | None = None,
        segment_tokens: int = SEGMENT_TOKENS,
    ) -> None:
        """Allocate the tensors. With `in_place`, attention reads them where they are, which is the default on the CPU."""
        self._device, self.blocks, self.block_tokens = cache.device, blocks, cache.block_tokens
        self.in_place = cache.device.is_host if in_place is None else in_place
        self.segment_blocks = max(segment_tokens // cache.block_tokens, 1)
        heads = [(keys.shape[0], keys.shape[2]) for keys in cache.keys]
        self._tensors = [
            1 if keys is values else 2 for keys, values in zip(cache.keys, cache.values, strict=True)
        ]
        slots = blocks * cache.block_tokens
        self.pools = [
            self._pair([self._host((kv_heads, slots, width), cache.dtype) for _ in range(count)])
            for (kv_heads, width), count in zip(heads, self._tensors, strict=True)
        ]
        self._buffers: list[list[_Buffer]] = []  # of each layer; layers of one shape share them
        self._turn = 0
        if self.in_place:
            return
        shared: dict[tuple[int, int, int], list[_Buffer]] = {}
        slots = min(self.segment_blocks, blocks) * cache.block_tokens
        for (kv_heads, width), count in zip(heads, self._tensors, strict=True):
            if (kv_heads, width, count) not in shared:
                shared[kv_heads, width, count] = [
                    _Buffer(
                        self._pair(
                            [zeros((kv_heads, slots, width), cache.dtype, self._device) for _ in range(count)]
                        )
                    )
                    for _ in range(2)
                ]
            self._buffers.append(shared[kv_heads, width, count])

    def _host(self, shape: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
        if self._device.is_host:
            return zeros(shape, dtype, self._device)
        return self._device.runtime.lasting_host_empty(shape, dtype).zero_()

    @staticmethod
    def _pair(tensors: Sequence[torch.Tensor]) -> Pools:
        return tensors[0], tensors[-1]

    def write(self, layer: int, rows: Pools, runs: Sequence[tuple[slice, slice]]) -> None:
        """Store K and V, [rows, kv_heads, head_dim], of these rows in these slots, on a device other than the CPU."""
        for pool, numbers, _ in zip(self.pools[layer], rows, range(self._tensors[layer]), strict=False):
            by_head = numbers.transpose(0, 1).contiguous()
            for of_rows, slots in runs:
                for there, here in zip(pool[:, slots], by_head[:, of_rows], strict=True):
                    there.copy_(here, non_blocking=True)  # contiguous on both sides, so nobody waits for it

    def begin(self, owner: object, index: int, layer: int, segment: Segment) -> None:
        """Begin to copy a segment of a layer to a buffer. `copied` and `used` find it as number `index` of `owner`."""
        buffer = self._buffers[layer][self._turn]
        self._turn = 1 - self._turn
        runtime = self._device.runtime
        written = runtime.mark() if segment.is_written or index == 0 else None
        with runtime.copying():
            for mark in (buffer.used, written):
                if mark is not None:
                    mark.wait()
            at = 0
            for first, length in segment.runs:
                start, stop = first * self.block_tokens, (first + length) * self.block_tokens
                for target, source, _ in zip(
                    buffer.pools, self.pools[layer], range(self._tensors[layer]), strict=False
                ):
                    for there, here in zip(
                        target[:, at : at + stop - start], source[:, start:stop], strict=True
                    ):
                        there.copy_(here, non_blocking=True)
                at += stop - start
            buffer.copied = runtime.mark()
        buffer.holds = owner, index

    def copied(self, owner: object, index: int, layer: int) -> Pools | None:
        """Return the buffer to which `begin` copies a segment; None if no buffer has it.

        What the calling thread gives the device from here on begins after the copy.
        """
        for buffer in self._buffers[layer]:
            if buffer.holds == (owner, index):
                if buffer.copied is not None:
                    buffer.copied.wait()
                return buffer.pools
        return None

    def used(self, owner: object, index: int, layer: int) -> None:
        """Note that the calling thread has given the device all work that reads this segment, so its buffer may be reused."""
        for buffer in self._buffers[layer]:
            if buffer.holds == (owner, index):
                buffer.used, buffer.holds = self._device.runtime.mark(), None

    def read_seconds_per_block(self, clock: Callable[[], float]) -> float:
        """Measure how long a copy of one block of all layers to the device takes, in seconds; 0 if blocks are read in place."""
        if self.in_place:
            return 0.0
        count = min(self.segment_blocks, self.blocks)
        seconds: list[float] = []
        for _ in range(1 + _REPEATS):
            self._device.synchronise()
            started = clock()
            for layer in range(len(self.pools)):
                self.begin(self, layer, layer, Segment(((0, count),)))
                self.copied(self, layer, layer)
                self.used(self, layer, layer)
            self._device.synchronise()
            seconds.append(clock() - started)
        return statistics.median(seconds[1:]) / count


class SegmentReads:
    """The segments that a step reads, in order. While attention reads one, the next one is copied."""

    def __init__(self, streamed: StreamedBlocks, reads: Iterable[tuple[int, Segment]]) -> None:
        """`reads` are pairs of a layer and a segment that it reads."""
        self._streamed, self._reads = streamed, list(reads)
        self._places = {(layer, id(segment)): place for place, (layer, segment) in enumerate(self._reads)}
        self._at = 0

    def read(self, layer: int, segment: Segment) -> Pools:
        """Return keys and values of a segment, from slot 0 on. If blocks are read in place, return those of all of them."""
        streamed = self._streamed
        if streamed.in_place:
            return streamed.pools[layer]
        self._at = self._places[layer, id(segment)]
        pools = streamed.copied(self, self._at, layer)
        if pools is None:
            streamed.begin(self, self._at, layer, segment)
            pools = streamed.copied(self, self._at, layer)
        assert pools is not None
        if self._at + 1 < len(self._reads):
            following, there = self._reads[self._at + 1]
            if (
                not there.is_written or following == layer
            ):  # what the step writes there in this layer, it has written
                streamed.begin(self, self._at + 1, following, there)
        return pools

    def used(self) -> None:
        """Note that the device was given all work that reads the segment which `read` returned last."""
        if not self._streamed.in_place:
            self._streamed.used(self, self._at, self._reads[self._at][0])
