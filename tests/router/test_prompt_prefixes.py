"""A router computes the marks of prompts, by which it finds a replica with a cached prefix, while its streams go on."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from medha.kv.prefix_cache import PrefixHasher
from medha.routing.prefix_memory import MARK_BLOCK_TOKENS, marks
from medha.wire.frames import TokenIds
from medha_router.replica_link import HASHED_AT_ONCE_TOKENS, prefixes_of

HASHER = PrefixHasher(MARK_BLOCK_TOKENS, b"secret")


def ids_of(tokens: int) -> TokenIds:
    return np.random.default_rng(tokens).integers(0, 1000, tokens, dtype=np.int32)


@pytest.mark.parametrize("salt", ["", "tenant"])
def test_the_marks_are_those_of_whole_prompts(salt: str) -> None:
    lengths = [0, 1, 63, 64, HASHED_AT_ONCE_TOKENS, 3 * HASHED_AT_ONCE_TOKENS + 100]
    prompts = [ids_of(tokens) for tokens in lengths]
    found = asyncio.run(prefixes_of(HASHER, prompts, salt))
    assert found == [marks(HASHER.hashes(ids, salt)) for ids in prompts]


@pytest.mark.parametrize(
    ("lengths", "turns"), [([100], 0), ([10 * HASHED_AT_ONCE_TOKENS], 9), ([100] * 10, 9)]
)
def test_other_tasks_run_between_prompts_and_pieces_of_long_ones(lengths: list[int], turns: int) -> None:
    had = 0

    async def count_turns() -> None:
        nonlocal had
        while True:
            had += 1
            await asyncio.sleep(0)

    async def run() -> None:
        counting = asyncio.create_task(count_turns())
        await prefixes_of(HASHER, [ids_of(tokens) for tokens in lengths], "")
        counting.cancel()

    asyncio.run(run())
    assert had == turns
