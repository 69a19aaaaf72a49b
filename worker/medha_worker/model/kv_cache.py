"""The KV pool of one rank: K and V of every block, or latents, for every layer that the rank runs.

The ledger in the core decides which sequence holds which block; this module has only the tensors. A layer's
keys are one tensor [kv_heads, slots, head_dim], in which block b is slots `b * block_tokens ..`. A contiguous
run of blocks is therefore a strided view that attention reads in place, without gathering. Latents are keys and
values at once: a layer's values are then the same tensor as its keys.

A pool may hold FP8 with scales. Keys and values are rounded once, before they are written or sent to another lane, and
attention reads no others, those of its own chunk included.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from mmap import MADV_HUGEPAGE, MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import TYPE_CHECKING

import torch

from medha.kv.blocks import BlockCopy
from medha_worker.device import Device, Mark
from medha_worker.model.kv_scales import FP8, LayerScales, ScaledHeads

if TYPE_CHECKING:
    from medha_worker.model.streamed_blocks import StreamedBlocks


@dataclass(frozen=True, slots=True)
class HeadLayer:
    """The shape of a layer whose KV is that of a prediction head: its heads, their width, and 2 tensors or 1."""

    kv_heads: int
    head_dim: int
    tensors: int


class KVCache:
    """The tensors of `num_layers` layers, with a scratch block after the others; a slot holds one token.

    A layer has two tensors, K and V, or only one, whose rows are both. With `window_blocks`, the layers
    `window_layers` have so many blocks instead, with numbers of their own: their KV before the window is freed. With
    `head`, the layer of a prediction head follows after the others.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        kv_heads: int,
        head_dim: int,
        num_blocks: int,
        block_tokens: int,
        device: Device,
        tensors: int = 2,
        scales: Sequence[LayerScales] | None = None,
        window_layers: Collection[int] = (),
        window_blocks: int = 0,
        head: HeadLayer | None = None,
    ) -> None:
        """Allocate the tensors, of the device's data type, or of FP8 if there are `scales` of the layers."""
        self.device = device
        self.dtype = device.dtype if scales is None else FP8
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.tensors = tensors
        self.window_blocks = window_blocks
        """Blocks of layers whose KV before the window is freed; 0 if no layer frees any."""
        self.scratch_block = num_blocks
        """A block that no sequence holds: the rows that pad a captured step write there."""
        self.streamed: StreamedBlocks | None = None
        """Blocks in host memory, whose numbers in tables are those from `num_blocks` on; None: there are none."""
        self._in_windows = [window_blocks > 0 and layer in window_layers for layer in range(num_layers)]
        shapes = [
            (kv_heads, ((window_blocks if windowed else num_blocks) + 1) * block_tokens, head_dim)
            for windowed in self._in_windows
        ]
        counts = [tensors] * num_layers
        if head is not None:
            self._in_windows.append(False)
            shapes.append((head.kv_heads, (num_blocks + 1) * block_tokens, head.head_dim))
            counts.append(head.tensors)
        # Zeros, not `empty`: stale bits could be NaN, and a padded row would carry them (0 * NaN is NaN).
        self.keys = [zeros(shape, self.dtype, device) for shape in shapes]
        self.values = [
            keys if count == 1 else zeros(shape, self.dtype, device)
            for keys, count, shape in zip(self.keys, counts, shapes, strict=True)
        ]
        self._scaled = None if scales is None else [ScaledHeads(one) for one in scales]
        self._arriving: dict[int, Mark] = {}  # by layer: points after copies that its attention must see

    def last_layer(self) -> KVCache:
        """Return the pool of the last layer alone, in the same memory."""
        one = copy(self)
        one.keys, one.values = self.keys[-1:], self.values[-1:]
        one._in_windows = self._in_windows[-1:]
        one._arriving = {}
        one._scaled = None if self._scaled is None else self._scaled[-1:]
        return one

    @property
    def bytes(self) -> int:
        """Memory of all blocks that sequences can hold, K and V together."""
        scratch_bytes = [pool[:, : self.block_tokens].numel() * self.dtype.itemsize for pool in self.pools()]
        return sum([pool.nbytes for pool in self.pools()]) - sum(scratch_bytes)

    def expect(self, arriving: Mapping[int, Mark]) -> None:
        """Let each layer wait for copies into the pool that are made beside the layers before it.

        The number after the last layer stands for copies that only have to be complete before the next step
        (`await_all`).
        """
        self._arriving.update(arriving)

    def await_layer(self, layer: int) -> None:
        """Wait for the copies into a layer's tensors that are expected, before its attention reads them."""
        if self._arriving and (mark := self._arriving.get(layer)) is not None:
            mark.wait()  # if the copies have failed, whoever tries again must fail, too
            del self._arriving[layer]

    def await_layers(self) -> None:
        """Wait for the copies that layers expect."""
        for layer in range(len(self.keys)):
            self.await_layer(layer)

    def await_all(self) -> None:
        """Wait for all copies that are expected, also for those that no layer expects."""
        for layer in sorted(self._arriving):
            self.await_layer(layer)

    def abandon(self) -> None:
        """Wait until copies that are expected are over, even if they fail: nobody needs what they bring."""
        for mark in self._arriving.values():
            with suppress(Exception):
                mark.wait()
        self._arriving.clear()

    def rounded(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V, [rows, kv_heads, head_dim], as a layer's pool holds them: the same tensor twice if they are one."""
        return (k, v) if self._scaled is None else self._scaled[layer].rounded(k, v)

    def queries(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Return queries, [rows, query_heads, head_dim], that attend to the pool's numbers; they may replace `q`."""
        return q if self._scaled is None else self._scaled[layer].queries(q)

    def results(self, layer: int, attended: torch.Tensor) -> torch.Tensor:
        """Return sums of values, of sums of the pool's numbers, [rows, query_heads, head_dim]; they may replace these."""
        return attended if self._scaled is None else self._scaled[layer].results(attended)

    def scaled(self, layer: int) -> ScaledHeads | None:
        """Return what applies the scales of a layer's pool; None if it has none."""
        return None if self._scaled is None else self._scaled[layer]

    @staticmethod
    def bytes_per_block(
        *,
        num_layers: int,
        kv_heads: int,
        head_dim: int,
        block_tokens: int,
        element_bytes: int,
        tensors: int = 2,
    ) -> int:
        """Return the memory that one block takes over all layers, K and V together."""
        return tensors * num_layers * kv_heads * head_dim * block_tokens * element_bytes

    def pools(self) -> list[torch.Tensor]:
        """Return the tensors of all layers, [kv_heads, slots, head_dim] each: keys and values, or what is both."""
        return [
            *self.keys,
            *(values for keys, values in zip(self.keys, self.values, strict=True) if values is not keys),
        ]

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks' K and V in each layer that has them: copy-on-write, before a shared block is written.

        No block is both copied and written.
        """
        for windowed in (False, True):
            moved = [(one.source, one.target) for one in copies if one.in_windows == windowed]
            layers = [layer for layer, is_windowed in enumerate(self._in_windows) if is_windowed == windowed]
            if not moved or not layers:
                continue
            slots = torch.tensor(moved).T[..., None] * self.block_tokens + torch.arange(self.block_tokens)
            sources, targets = self.device.place(slots.flatten(1))
            for layer in layers:
                keys, values = self.keys[layer], self.values[layer]
                for pool in (keys,) if values is keys else (keys, values):
                    pool[:, targets] = pool[:, sources]


def zeros(shape: tuple[int, int, int], dtype: torch.dtype, device: Device) -> torch.Tensor:
    """Return zeros whose pages a CPU takes on first touch: `torch.zeros` writes them, a second per gigabyte.

    They use large pages if Linux has them. With pages of 4 KiB, whose addresses take time to look up, a
    decode over scattered blocks reads K and V at three quarters of the rate.
    """
    size = math.prod(shape) * dtype.itemsize
    if not device.is_host or size == 0:
        return torch.zeros(shape, dtype=dtype, device=device.torch_device)
    pages = mmap(-1, size, flags=MAP_PRIVATE | MAP_ANONYMOUS)
    with suppress(OSError):  # the kernel has no large pages
        pages.madvise(MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
