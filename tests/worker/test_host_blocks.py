"""Copies between a KV pool and host memory: every block arrives, and none takes much memory on the way."""

from __future__ import annotations

import pytest
import torch

from medha.kv.host_tier import TierCopy
from medha_worker.device import host_device
from medha_worker.model import host_blocks
from medha_worker.model.host_blocks import HostBlocks
from medha_worker.model.kv_cache import KVCache

HEADS, TOKENS, WIDTH, BLOCKS = 2, 4, 8, 20


@pytest.mark.parametrize("tensors", [1, 2])
def test_a_long_copy_is_made_in_pieces(tensors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = KVCache(
        num_layers=3, kv_heads=HEADS, head_dim=WIDTH, num_blocks=BLOCKS, block_tokens=TOKENS, tensors=tensors,
        device=host_device(torch.float32),
    )  # fmt: skip
    for each in pool.pools():
        each.copy_(torch.randn(each.shape))
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
