"""The host tier of one rank: KV blocks in host memory, and the copies between them and the KV pool.

The ledger in the core decides which block goes where (`medha.kv.host_tier`); this module has only the tensors. Each rank
keeps its own layers and heads of a block, in the pool's data type, so FP8 and latents are copied as they are.

Copies to host memory run in order, on the stream that computes steps. So do the fetches that come before such a copy. The
other fetches of a step run beside it. If the step reads the fetched blocks, they are fetched layer by layer, and the
attention of a layer waits for the copies of its own tensors alone (`KVCache.await_layer`). The step ends when all copies
are made. So a block is read before it is written again, a fetched block is complete before attention reads it, and a host
block is written before it is read back.
Host memory is pinned where that makes copies fast. `make gpu-check` copies to and from a GPU (docs/gpu.md).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from medha.kv.host_tier import TierCopy
from medha_worker.device import Mark, Runtime
from medha_worker.model.kv_cache import KVCache
from medha_worker.timed_mark import TimedMark

_HostAndPool = tuple[torch.Tensor, torch.Tensor]
"""A tensor of host blocks, and the tensor of the pool as blocks, both [blocks, kv_heads, block tokens, head_dim]."""

_MEASURED_BLOCKS = 64
_REPEATS = 3
_PIECE_BYTES = 16 * 2**20
"""Most bytes that are copied at once: a GPU needs memory for as many beside its pool, however long a prefix is."""


class Arrivals:
    """Fetches that are made beside a step, and the time that they take; made by `HostBlocks.fetch_beside`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._timed: list[tuple[TimedMark, TimedMark]] = []
        self._host_seconds = 0.0
        self.waited_seconds = 0.0
        """Seconds for which the calling thread has waited for them."""

    def add(self, runtime: Runtime, copy: Callable[[], None]) -> Mark:
        """Let `copy` be made beside the step; return the point behind it."""

        def run() -> None:
            began, started = runtime.timed_mark(), self._clock()
            copy()
            if began is None:
                self._host_seconds += self._clock() - started
            elif (ended := runtime.timed_mark()) is not None:
                self._timed.append((began, ended))

        return _Arrival(runtime.beside(run), self)

    def wait(self, mark: Mark) -> None:
        started = self._clock()
        mark.wait()
        self.waited_seconds += self._clock() - started

    def seconds(self) -> float:
        """Return how long the copies took, once the device has made all of them."""
        return self._host_seconds + sum(began.seconds_until(ended) for began, ended in self._timed)


class _Arrival:
    """A mark whose waits are timed."""

    def __init__(self, mark: Mark, arrivals: Arrivals) -> None:
        self._mark, self._arrivals = mark, arrivals

    def wait(self) -> None:
        self._arrivals.wait(self._mark)

    def is_done(self) -> bool:
        return self._mark.is_done()


class HostBlocks:
    """`blocks` host blocks of a KV pool: for each of its tensors one of [blocks, kv_heads, block tokens, head_dim].

    A run of host blocks is contiguous, so that a device copies it at once.
    """

    def __init__(self, kv_cache: KVCache, blocks: int) -> None:
        """Allocate the tensors; on a CPU, their pages are taken on first touch."""
        self.kv_cache = kv_cache
        self.blocks = blocks
        self._device = kv_cache.device
        size = kv_cache.block_tokens
        self._tensors = [
            (
                self._device.runtime.lasting_host_empty(
                    (blocks, pool.shape[0], size, pool.shape[2]), pool.dtype
                ),
                # A view, in the order of host blocks.
                pool.view(pool.shape[0], -1, size, pool.shape[2]).transpose(0, 1),
            )
            for pool in kv_cache.pools()
        ]
        values = iter(self._tensors[len(kv_cache.keys) :])
        self._layers = [
            [tensors] if values_of is keys else [tensors, next(values)]
            for tensors, keys, values_of in zip(self._tensors, kv_cache.keys, kv_cache.values, strict=False)
        ]

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all tensors."""
        return sum(host[0].numel() * host.element_size() for host, _ in self._tensors)

    def rows(self, slot: int, count: int) -> npt.NDArray[np.uint8]:
        """Return a copy of host blocks, uint8 [count, block_bytes]. A row has all tensors of a block, one after the other.

        This does not wait for copies that a device is still making.
        """
        found = np.empty((count, self.block_bytes), dtype=np.uint8)
        for part, rows in self._parts(slot, count, found):
            part[:] = rows
        return found

    def put_rows(self, slot: int, rows: npt.NDArray[np.uint8]) -> None:
        """Fill host blocks with rows as `rows` returns them."""
        for part, there in self._parts(slot, len(rows), rows):
            there[:] = part

    def _parts(
        self, slot: int, count: int, rows: npt.NDArray[np.uint8]
    ) -> Iterator[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]]:
        """Yield the part of `rows` of each tensor, and a view of the tensor's blocks as bytes; both [count, bytes]."""
        at = 0
        for host, _ in self._tensors:
            there = host[slot : slot + count].view(torch.uint8).reshape(count, -1).numpy()
            yield rows[:, at : at + there.shape[1]], there
            at += there.shape[1]

    def copy(self, copies: Sequence[TierCopy]) -> None:
        """Make the copies, in order; the call may return before a device has made them."""
        self._copy_tensors(copies, self._tensors)

    def fetch_beside(self, copies: Sequence[TierCopy], arrivals: Arrivals, *, reads: bool = True) -> None:
        """Begin fetches that run beside the work which the calling thread gives the device next.

        If the step `reads` the fetched blocks, each layer of the pool waits for its own part. If not, the fetches only
        have to be complete at the end of the step.
        """
        runtime = self._device.runtime
        if reads:
            marks = [
                arrivals.add(runtime, partial(self._copy_tensors, copies, tensors))
                for tensors in self._layers
            ]
            self.kv_cache.expect(dict(enumerate(marks)))
        else:
            mark = arrivals.add(runtime, partial(self._copy_tensors, copies, self._tensors))
            self.kv_cache.expect({len(self._layers): mark})

    def _copy_tensors(self, copies: Sequence[TierCopy], tensors: Sequence[_HostAndPool]) -> None:
        for one in copies:
            for host, pool in tensors:
                there = host[one.slot : one.slot + one.count]
                here = pool[one.block : one.block + one.count]
                blocks = max(1, _PIECE_BYTES // (host[0].numel() * host.element_size()))
                for start in range(0, one.count, blocks):
                    stop = start + blocks
                    self._copy(there[start:stop], here[start:stop], is_fetch=one.is_fetch)

    def _copy(self, there: torch.Tensor, here: torch.Tensor, *, is_fetch: bool) -> None:
        if self._device.is_host:
            source, target = (there, here) if is_fetch else (here, there)
            if is_fetch:  # by one thread, perhaps beside a step: those of torch are busy with it
                np.copyto(_as_bytes(target), _as_bytes(source))
            else:
                target.copy_(source)
        elif is_fetch:
            here.copy_(there.to(self._device.torch_device, non_blocking=True))
        else:
            there.copy_(here.contiguous(), non_blocking=True)

    def seconds_per_block(self, clock: Callable[[], float]) -> tuple[float, float]:
        """Measure how long a fetch and an offload of a block take, in seconds; nobody may use the pool meanwhile."""
        count = min(_MEASURED_BLOCKS, self.blocks, self.kv_cache.num_blocks)
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(1 + _REPEATS):  # the first one takes the pages
            for is_fetch in (False, True):  # what is fetched is then what the pool held
                self._device.synchronise()
                started = clock()
                self.copy([TierCopy(is_fetch, 0, 0, count)])
                self._device.synchronise()
                seconds[is_fetch].append(clock() - started)
        return statistics.median(seconds[True][1:]) / count, statistics.median(seconds[False][1:]) / count


def _as_bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Return a tensor's memory as bytes; its last dimension is contiguous."""
    return tensor.view(torch.uint8).numpy()
