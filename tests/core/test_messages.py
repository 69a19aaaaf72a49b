"""What a step message weighs does not depend on how long the contexts are that it speaks of."""

from __future__ import annotations

import pytest

from medha.messages import Admit, Sampling, Step
from medha.pools import KvPools, Placed
from medha.wire import encode

K = 1024
DIGITS = 40
"""Bytes by which larger numbers may be longer."""


def step_bytes(placed: Placed, tokens: int) -> int:
    """Of a step that admits a prompt, as it goes to the ranks."""
    admit = Admit(
        "a", "p", tokens, tokens, 1, Sampling(), placed.shards.tokens,
        segments=placed.segments, deals=placed.deals, cached_tokens=placed.cached_tokens,
        cached=placed.cached, evicts=placed.evicts,
    )  # fmt: skip
    return len(encode(Step(0, 0, (), admits=(admit,)))[0])


@pytest.mark.parametrize("deals_prompts", [False, True], ids=["one lane after the other", "dealt out"])
def test_the_admit_of_a_prompt_on_all_lanes_is_as_small_at_a_million_tokens(deals_prompts: bool) -> None:
    sizes = []
    for tokens in (32 * K, K * K):
        pools = KvPools(
            lanes=4, kv_blocks=20_000, block_size_tokens=16, tokens_per_lane=8 * K, deals_prompts=deals_prompts
        )  # fmt: skip
        placed = pools.admit("a", tokens, tokens + 4 * K)
        assert placed is not None
        assert len(placed.shards.lanes) == 4
        sizes.append(step_bytes(placed, tokens))
    assert sizes[1] <= sizes[0] + DIGITS
    assert sizes[1] < 2 * K
