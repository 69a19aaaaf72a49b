"""Fetches from a host tier that go with several steps: how much with which, who goes first, and that KV is there in time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from medha.kv.prefix_cache import PrefixHasher
from medha.scheduler.fetches import FETCH_SHARE
from medha.wire.messages import HostTierFigures, Step

SIZE = 4
HASHER = PrefixHasher(SIZE, b"secret")
PRICE = 1e-4
"""Seconds to fetch a block: a tenth of a step with one decode."""


TEXTS = ("long", "short", "other", "decoding", "new")


class Chats:
    """A replica of 100 blocks, whose host tier holds two texts that its device has evicted."""

    def __init__(self, replica: Any, submit_of: Any) -> None:
        self.replica, self.submit_of = replica, submit_of
        self.text = {"long": 60, "short": 2}
        for name in (*self.text, "other"):
            self.ask(name, 4 * self.text.get(name, 99) + 2, name, max_tokens=1)
            replica.run()

    def ask(self, name: str, tokens: int, text: str, **fields: Any) -> None:
        first = 1000 * TEXTS.index(text)
        ids = tuple(range(first, first + tokens))
        self.replica.prompt_ids[name] = ids
        hashes = HASHER.hashes(np.array(ids, dtype=np.int32))
        self.replica.submit(self.submit_of(name, tokens, prompt=name, block_hashes=hashes, **fields))

    def again(self, text: str, **fields: Any) -> str:
        """Ask for a text that the tier holds; return the name of the request."""
        name = f"{text} again"
        self.ask(name, 4 * self.text[text] + 2, text, max_tokens=1, **fields)
        return name

    def fetched(self, name: str) -> list[int]:
        """Blocks that each step fetched for a request, from the first one that fetched some to the last one."""
        steps = [
            sum(part.count for one in step.fetches if one.id == name for part in one.blocks)
            for step in self.replica.steps
        ]
        there = [at for at, count in enumerate(steps) if count]
        return steps[there[0] : there[-1] + 1] if there else []

    def step_of(self, name: str) -> int:
        """Number of the first step that computes a request."""
        return next(
            at
            for at, step in enumerate(self.replica.steps)
            if any(entry.id == name for entry in step.entries)
        )

    def left_nothing(self) -> None:
        """Assert that no request holds KV, and that no fetch keeps any in the tier."""
        (tier,) = self.replica.controller.pools.tiers
        assert not tier._pinned
        assert not tier._kept
        assert self.replica.controller.pools.held_blocks == 0
        tier.check()


@pytest.fixture
def chats(replica_of: Any, submit_of: Any) -> Chats:
    tier = HostTierFigures(400, 1, PRICE, 1e-7)
    replica = replica_of(kv_blocks=100, block_size_tokens=SIZE, host_tier=tier, hasher=HASHER)
    return Chats(replica, submit_of)


def decode(chats: Chats) -> None:
    """Let a request decode all the while."""
    chats.ask("decoding", 8, "decoding", max_tokens=100)
    while not chats.replica.emitted.get("decoding"):
        assert chats.replica.advance()


def test_a_long_prefix_comes_beside_several_steps_if_others_decode_and_computes_once_it_is_there(
    chats: Chats,
) -> None:
    decode(chats)
    name = chats.again("long")
    chats.replica.run()
    pieces = chats.fetched(name)
    assert sum(pieces) == 60
    assert len(pieces) > 10
    with_fetches = [step for step in chats.replica.steps if step.fetches]
    for step in with_fetches:
        assert any(entry.id == "decoding" for entry in step.entries)
        assert copied_seconds(step) <= FETCH_SHARE * step.predicted_seconds * (1 + 1e-9)
    assert all(0 < count < 60 for count in pieces)
    last = chats.replica.steps.index(with_fetches[-1])
    assert chats.step_of(name) > last
    assert chats.replica.endings[name] == ["length"]


def copied_seconds(step: Step) -> float:
    return PRICE * sum(part.count for one in step.fetches for part in one.blocks)


def test_decodes_run_ahead_while_a_prefix_comes(chats: Chats) -> None:
    decode(chats)
    chats.again("long")
    chats.replica.run()
    launched = [[one for one in commands if isinstance(one, Step)] for commands in chats.replica.commands]
    ahead = [steps for steps in launched if len(steps) > 1]
    assert any(step.fetches for steps in ahead for step in steps)


def test_a_prefix_comes_at_once_if_nothing_decodes(chats: Chats) -> None:
    name = chats.again("long")
    chats.replica.run()
    assert chats.fetched(name) == [60]
    (step,) = [step for step in chats.replica.steps if step.fetches]
    assert [entry.id for entry in step.entries] == [name]
    assert step.predicted_seconds == pytest.approx(60 * PRICE, rel=0.1), (
        "the copies take longer than the chunk"
    )


def test_a_short_prefix_comes_with_the_step_that_computes_its_request(chats: Chats) -> None:
    decode(chats)
    name = chats.again("short")
    chats.replica.run()
    assert chats.fetched(name) == [2]
    (step,) = [step for step in chats.replica.steps if step.fetches]
    assert {entry.id for entry in step.entries} == {"decoding", name}


def test_a_short_prefix_does_not_wait_for_a_long_one_that_has_more_time(chats: Chats) -> None:
    decode(chats)
    long = chats.again("long", deadline_after_seconds=50.0)
    for _ in range(3):
        chats.replica.advance()
    short = chats.again("short", deadline_after_seconds=1.0)
    chats.replica.run()
    assert chats.step_of(short) < chats.step_of(long)
    assert len(chats.fetched(short)) == 1


def test_what_a_step_fetches_is_not_dropped_for_another_request_of_that_step(
    replica_of: Any, submit_of: Any
) -> None:
    """The tier is full, and the second request evicts KV from the device that costs more to compute."""
    tier = HostTierFigures(70, 1, 1e-7, 1e-7)
    chats = Chats(replica_of(kv_blocks=100, block_size_tokens=SIZE, host_tier=tier, hasher=HASHER), submit_of)
    replica = chats.replica
    (host,) = replica.controller.pools.tiers
    chats.ask("decoding", 8, "decoding", max_tokens=3)
    short = chats.again("short")
    chats.ask("new", 70 * SIZE, "new", max_tokens=1)
    replica.run()
    assert chats.fetched(short) == [2]
    host.check()
    assert not host._pinned
    assert not host._kept


def test_two_requests_that_want_the_same_prefix_each_get_it(chats: Chats) -> None:
    """The second one cannot use what the first one fetches until that has computed a step."""
    decode(chats)
    names = [chats.again("long")]
    chats.replica.advance()
    names.append("same text")
    chats.ask("same text", 4 * 60 + 2, "long", max_tokens=1)
    chats.replica.run()
    for name in names:
        assert chats.replica.endings[name] == ["length"]
        fetching = [
            at for at, step in enumerate(chats.replica.steps) if any(one.id == name for one in step.fetches)
        ]
        assert chats.step_of(name) > max(fetching, default=-1)
    chats.left_nothing()


def test_samples_of_a_prompt_fork_it_only_once_its_prefix_is_there(chats: Chats) -> None:
    decode(chats)
    first, tokens = "first", 4 * 60 + 2
    chats.ask(first, tokens, "long", max_tokens=5)
    hashes = HASHER.hashes(np.array(chats.replica.prompt_ids[first], dtype=np.int32))
    chats.replica.submit(chats.submit_of("second", tokens, prompt=first, block_hashes=hashes, max_tokens=1))
    chats.replica.run()
    assert sum(chats.fetched(first)) == 60
    assert chats.fetched("second") == []
    forks = [
        at for at, step in enumerate(chats.replica.steps) if any(one.fork_of == first for one in step.admits)
    ]
    assert forks
    assert forks[0] > chats.step_of(first)
    assert chats.replica.endings["second"] == ["length"]
    chats.left_nothing()


@pytest.mark.parametrize("moves", [0, 1, 4])
def test_a_request_that_leaves_while_its_prefix_comes_keeps_nothing(chats: Chats, moves: int) -> None:
    decode(chats)
    name = chats.again("long")
    for _ in range(moves):
        chats.replica.advance()
    chats.replica.cancel(name)
    chats.replica.run()
    assert sum(chats.fetched(name)) < 60
    chats.left_nothing()
