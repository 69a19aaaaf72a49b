"""What a step message weighs does not depend on how long the contexts are that it speaks of."""

from __future__ import annotations

import numpy as np
import pytest

from medha.kv.pools import KvPools, Placed
from medha.kv.prefix_cache import PrefixHasher
from medha.wire.frames import encode
from medha.wire.messages import Admit, Sampling, Step

K = 1024
SIZE = 16
DIGITS = 40
"""Bytes by which larger numbers may be longer."""


def step_bytes(placed: Placed, tokens: int) -> int:
    """Of a step that admits a prompt, as it goes to the ranks."""
    admit = Admit(
        "a", "p", tokens, tokens, 1, Sampling(), placed.shards.tokens,
        segments=placed.segments, stripings=placed.stripings, cached_tokens=placed.cached_tokens,
        prefixes=placed.prefixes, evictions=placed.evictions,
    )  # fmt: skip
    return len(encode(Step(0, 0, (), admits=(admit,)))[0])


@pytest.mark.parametrize("stripes_prompts", [False, True], ids=["one lane after the other", "dealt out"])
def test_the_admit_of_a_prompt_on_all_lanes_is_as_small_at_a_million_tokens(stripes_prompts: bool) -> None:
    sizes = []
    for tokens in (32 * K, K * K):
        pools = KvPools(
            lanes=4, kv_blocks=20_000, block_size_tokens=16, tokens_per_lane=8 * K, stripes_prompts=stripes_prompts
        )  # fmt: skip
        placed = pools.admit("a", tokens, tokens + 4 * K)
        assert placed is not None
        assert len(placed.shards.lanes) == 4
        sizes.append(step_bytes(placed, tokens))
    assert sizes[1] <= sizes[0] + DIGITS
    assert sizes[1] < 2 * K


def crumbled(blocks: int) -> tuple[KvPools, PrefixHasher]:
    """A pool whose every block was the cached prompt of a request of its own, ended in no order of place."""
    pools = KvPools(lanes=1, kv_blocks=blocks, block_size_tokens=SIZE, tokens_per_lane=blocks * SIZE)
    hasher = PrefixHasher(SIZE, b"secret")
    random = np.random.default_rng(1)
    names = [f"s{index}" for index in range(blocks)]
    for name in names:
        ids = random.integers(0, 10**6, SIZE).astype(np.int32)
        assert pools.admit(name, SIZE, SIZE, block_hashes=hasher.hashes(ids)) is not None
        pools.computed(name, SIZE)
    for index in random.permutation(blocks).tolist():
        pools.release(names[index])
    pools.take_releases()
    return pools, hasher


@pytest.mark.parametrize("tokens", [K, 16 * K])
def test_an_admit_that_evicts_and_one_that_finds_its_prompt_are_as_small_in_a_pool_in_crumbs(
    tokens: int,
) -> None:
    blocks = tokens // SIZE
    pools, hasher = crumbled(2 * blocks)
    hashes = hasher.hashes(np.random.default_rng(2).integers(0, 10**6, tokens).astype(np.int32))
    evicting = pools.admit("first", tokens, tokens, block_hashes=hashes)
    assert evicting is not None
    assert len(pools.ledger().runs("first")) > blocks // 4, "in crumbs"
    pools.computed("first", tokens)
    pools.release("first")
    pools.take_releases()
    finding = pools.admit("second", tokens, tokens, block_hashes=hashes)
    assert finding is not None
    assert finding.cached_tokens == tokens - SIZE
    assert max(step_bytes(evicting, tokens), step_bytes(finding, tokens)) < K
