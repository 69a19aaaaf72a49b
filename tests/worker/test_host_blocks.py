"""Copies between a KV pool and host memory: every block arrives, and none takes much memory on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from medha.kv.host_tier import TierCopy
from medha_worker.device import HOST, Device, InOrder, Mark, host_device
from medha_worker.model import host_blocks
from medha_worker.model.host_blocks import Arrivals, HostBlocks
from medha_worker.model.kv_cache import KVCache

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
