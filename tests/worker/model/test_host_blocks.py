"""Copies between a KV pool and host memory: every block arrives, and none takes much memory on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from mmap import PAGESIZE

import pytest
import torch

from medha.errors import OutOfMemory
from medha.kv.host_tier import TierCopy
from medha_worker.cuda_device import pinned
from medha_worker.device import HOST, Device, InOrder, Mark, host_device
from medha_worker.model import host_blocks
from medha_worker.model.host_blocks import Arrivals, HostBlocks
from medha_worker.model.kv_cache import KVCache
from medha_worker.model.streamed_blocks import StreamedBlocks

HEADS, TOKENS, WIDTH, BLOCKS = 2, 4, 8, 20


@pytest.mark.parametrize("tensors", [1, 2])
def test_a_long_copy_is_made_in_pieces(tensors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of(host_device(torch.float32), tensors)
    before = [each.clone() for each in pool.pools()]
    block_bytes = HEADS * TOKENS * WIDTH * 4
    monkeypatch.setattr(host_blocks, "_PIECE_BYTES", 3 * block_bytes)
    sizes: list[int] = []
    tier = HostBlocks(pool, BLOCKS)
    copy = tier._copy

    def noted(there: torch.Tensor, here: torch.Tensor, *, is_fetch: bool) -> None:
        sizes.append(there.numel() * there.element_size())
        copy(there, here, is_fetch=is_fetch)

    monkeypatch.setattr(tier, "_copy", noted)
    tier.copy([TierCopy(False, 2, 5, 11)])
    for each in pool.pools():
        each[:, 2 * TOKENS : 13 * TOKENS] = torch.nan
    tier.copy([TierCopy(True, 2, 5, 11)])
    for each, wanted in zip(pool.pools(), before, strict=True):
        assert torch.equal(each, wanted)
    assert max(sizes) == 3 * block_bytes
    assert sum(sizes) == 2 * 3 * tensors * 11 * block_bytes


class Later(InOrder):
    """A device that makes copies beside it only once somebody waits for them, in order."""

    def __init__(self) -> None:
        super().__init__(HOST)
        self.waiting: list[Callable[[], None]] = []
        self.made = 0

    def beside(self, copies: Callable[[], None]) -> Mark:
        self.waiting.append(copies)
        return MadeUpTo(self, len(self.waiting))


class MadeUpTo:
    def __init__(self, device: Later, count: int) -> None:
        self._device, self._count = device, count

    def wait(self) -> None:
        for copies in self._device.waiting[self._device.made : self._count]:
            copies()
        self._device.made = max(self._device.made, self._count)

    def is_done(self) -> bool:
        return self._device.made >= self._count


def pool_of(device: Device, tensors: int = 2, dtype: torch.dtype = torch.float32) -> KVCache:
    pool = KVCache(
        num_layers=3, kv_heads=HEADS, head_dim=WIDTH, num_blocks=BLOCKS, block_tokens=TOKENS, tensors=tensors,
        device=replace(device, dtype=dtype),
    )  # fmt: skip
    for each in pool.pools():
        each.copy_(torch.randn(each.shape))
    return pool


@pytest.mark.parametrize("tensors", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_layer_waits_for_its_own_part_of_a_fetch(tensors: int, dtype: torch.dtype) -> None:
    later = Later()
    pool = pool_of(replace(host_device(dtype), runtime=later), tensors, dtype)
    wanted = [each.clone() for each in pool.pools()]
    tier = HostBlocks(pool, BLOCKS)
    tier.copy([TierCopy(False, 2, 5, 11)])
    for each in pool.pools():
        each[:, 2 * TOKENS : 13 * TOKENS] = 0
    ticks = iter(range(100))
    arrivals = Arrivals(lambda: float(next(ticks)))
    tier.fetch_beside([TierCopy(True, 2, 5, 4), TierCopy(True, 6, 9, 7)], arrivals)

    def there() -> list[bool]:
        return [torch.equal(each, one) for each, one in zip(pool.pools(), wanted, strict=True)]

    assert there() == [False] * 3 * tensors
    pool.await_layer(0)
    assert there() == [True, False, False] * tensors
    pool.await_layer(2)  # copies are in order
    assert there() == [True] * 3 * tensors
    assert arrivals.seconds() > 0
    assert arrivals.waited_seconds > arrivals.seconds()
    pool.await_all()
    pool.await_layer(0)
    assert later.made == 3


def test_no_layer_waits_for_a_fetch_that_a_later_step_reads() -> None:
    later = Later()
    pool = pool_of(replace(host_device(torch.float32), runtime=later))
    tier = HostBlocks(pool, BLOCKS)
    tier.fetch_beside([TierCopy(True, 2, 5, 4)], Arrivals(lambda: 0.0), reads=False)
    pool.await_layers()
    assert later.made == 0
    pool.await_all()
    assert later.made == len(later.waiting) == 1


def test_a_fetch_that_fails_is_no_fetch_that_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of(host_device(torch.float32))
    tier = HostBlocks(pool, BLOCKS)

    def fail(*_: object, **__: object) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr(tier, "_copy", fail)
    tier.fetch_beside([TierCopy(True, 2, 5, 4)], Arrivals(lambda: 0.0))
    for layer in (0, 0, 1):
        with pytest.raises(MemoryError, match="no memory"):
            pool.await_layer(layer)


class Registers:
    """A double of CUDA's runtime that pins pages."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.sizes: dict[int, int] = {}  # by address

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
        assert flags == 0
        self.sizes[address] = size_bytes
        return self.status

    def cudaHostUnregister(self, address: int) -> None:
        del self.sizes[address]


def double_of_cuda(monkeypatch: pytest.MonkeyPatch, status: int = 0) -> Registers:
    registers = Registers(status)

    def check(status: int) -> None:
        if status:
            raise torch.cuda.CudaError(status)

    monkeypatch.setattr(torch.cuda, "cudart", lambda: registers)
    monkeypatch.setattr(torch.cuda, "check_error", check)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return registers


class Pins(InOrder):
    def lasting_host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return pinned(shape, dtype)


@pytest.mark.parametrize("kind", [HostBlocks, StreamedBlocks])
def test_pinned_memory_is_no_larger_than_a_tier(
    kind: Callable[[KVCache, int], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    registers = double_of_cuda(monkeypatch)
    meta = torch.device("meta")
    cache = pool_of(replace(host_device(torch.bfloat16), torch_device=meta, runtime=Pins(meta)))
    blocks = 1100  # torch's allocator would take nearly twice as much
    tier = kind(cache, blocks)
    size_bytes = blocks * TOKENS * HEADS * WIDTH * 4
    assert list(registers.sizes.values()) == [-(-size_bytes // PAGESIZE) * PAGESIZE] * 6
    assert all(address % PAGESIZE == 0 for address in registers.sizes)
    del tier
    assert registers.sizes == {}


def test_memory_that_cannot_be_pinned_names_the_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    double_of_cuda(monkeypatch, status=2)
    with pytest.raises(OutOfMemory, match=r"kvCache\.tiers\.host\.size or kvCache\.streaming\.size"):
        pinned((3, 5), torch.float32)
