"""Owners take turns for what waits for a thread, so that nobody's request waits for all of another's."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medha_process.router_settings import RouterSettings
from medha_router.api_error import ApiError
from medha_router.bodies import Bodies, BodyLimits
from medha_router.owner_queue import OwnerQueue
from medha_router.prepare import Catalog
from medha_router.tokenizing import Tokenizing


@given(st.lists(st.sampled_from(["a", "b", "c", "take"]), max_size=60))
def test_while_an_item_waits_each_other_owner_is_served_once_at_most(steps: list[str]) -> None:
    queue: OwnerQueue[tuple[str, int]] = OwnerQueue()
    served: dict[tuple[str, int], Counter[str]] = {}  # since each item is the first of its owner
    expected: dict[str, list[tuple[str, int]]] = {}
    for number, step in enumerate(steps):
        if step != "take":
            item = (step, number)
            queue.add(step, item)
            expected.setdefault(step, []).append(item)
            served.setdefault(expected[step][0], Counter())
            continue
        taken = queue.take()
        assert (taken is None) == (not any(expected.values()))
        if taken is None:
            continue
        owner = taken[0]
        assert expected[owner].pop(0) == taken
        del served[taken]
        for counts in served.values():
            counts[owner] += 1
            assert counts[owner] == 1
        if expected[owner]:
            served[expected[owner][0]] = Counter()
    assert len(queue) == sum(map(len, expected.values()))


def test_an_item_that_is_removed_is_not_served() -> None:
    queue: OwnerQueue[str] = OwnerQueue()
    for name in ("a0", "a1", "b0"):
        queue.add(name[0], name)
    assert [queue.remove("a", "a1"), queue.remove("a", "a1"), queue.remove("b", "b0")] == [True, False, True]
    assert (queue.of("a"), queue.of("b"), queue.take(), queue.take()) == (1, 0, "a0", None)


def test_an_item_is_removed_without_a_look_at_the_others() -> None:
    """The clients of thousands of items may go at once."""

    class Item:
        compared = 0

        def __eq__(self, other: object) -> bool:
            Item.compared += 1
            return self is other

        __hash__ = object.__hash__

    queue: OwnerQueue[Item] = OwnerQueue()
    items = [Item() for _ in range(1000)]
    for item in items:
        queue.add("a", item)
    assert all(queue.remove("a", item) for item in reversed(items))
    assert (len(queue), queue.take()) == (0, None)
    assert Item.compared <= len(items)


def test_a_body_of_one_key_is_tokenised_before_the_backlog_of_another(tmp_path: Path) -> None:
    """Nothing serves a model, so each gets an error; it gets it when a thread has read its body."""
    settings = RouterSettings(
        key_file=tmp_path, enrolment_file=tmp_path, scratch_directory=str(tmp_path), tokenize_threads=1
    )

    async def run() -> list[str]:
        tokenizing = Tokenizing(settings, lambda *_: None)
        bodies = Bodies(BodyLimits(1000, 1000, 30.0), 10**6)
        done: list[str] = []

        async def prepare(owner: str) -> None:
            body = bodies.open(owner)
            body.content += b'{"model": "m", "prompt": "x"}'
            with pytest.raises(ApiError):
                await tokenizing.prepare("completions", body, Catalog({}))
            done.append(owner)

        try:
            await asyncio.gather(*map(prepare, ["large"] * 30 + ["small"]))
        finally:
            tokenizing.close()
        return done

    done = asyncio.run(run())
    assert done.index("small") <= 2, "the first was at work, and another one had its turn"
    assert len(done) == 31


def test_a_body_that_waits_for_a_thread_is_released_when_its_client_goes(tmp_path: Path) -> None:
    settings = RouterSettings(
        key_file=tmp_path, enrolment_file=tmp_path, scratch_directory=str(tmp_path), tokenize_threads=1
    )

    async def run() -> None:
        tokenizing = Tokenizing(settings, lambda *_: None)
        bodies = Bodies(BodyLimits(1000, 1000, 30.0), 10**6)
        work = []
        for _ in range(20):
            body = bodies.open("key")
            body.content += b'{"model": "m", "prompt": "x"}'
            bodies.grow(body, len(body.content))
            work.append(tokenizing.prepare("completions", body, Catalog({})))
        await asyncio.sleep(0)
        for one in work[10:]:
            one.cancel()
        ended = await asyncio.gather(*work, return_exceptions=True)
        assert [type(one) for one in ended] == [ApiError] * 10 + [asyncio.CancelledError] * 10
        assert bodies.held_bytes == 0
        tokenizing.close()

    asyncio.run(run())
