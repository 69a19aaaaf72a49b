"""Marks of prompts, by which a router finds the replica that has a prefix cached: computed while streams go on."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from medha.kv.prefix_cache import PrefixHasher
from medha.routing.prefix_memory import MARK_BLOCK_TOKENS, marks
from medha_router.replica_link import HASHED_AT_ONCE_TOKENS, prefix_of

HASHER = PrefixHasher(MARK_BLOCK_TOKENS, b"secret")


def ids_of(tokens: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.random.default_rng(tokens).integers(0, 1000, tokens, dtype=np.int32)


@pytest.mark.parametrize("tokens", [0, 1, 63, 64, HASHED_AT_ONCE_TOKENS, 3 * HASHED_AT_ONCE_TOKENS + 100])
@pytest.mark.parametrize("salt", ["", "tenant"])
def test_the_marks_are_those_of_the_whole_prompt(tokens: int, salt: str) -> None:
    ids = ids_of(tokens)
    assert asyncio.run(prefix_of(HASHER, ids, salt)) == marks(HASHER.hashes(ids, salt))


def test_other_tasks_run_between_the_pieces_of_a_long_prompt() -> None:
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async def run() -> None:
        counting = asyncio.create_task(count_turns())
        await prefix_of(HASHER, ids_of(10 * HASHED_AT_ONCE_TOKENS), "")
        counting.cancel()

    asyncio.run(run())
    assert turns >= 8
