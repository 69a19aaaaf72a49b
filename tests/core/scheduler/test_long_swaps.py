"""Long requests that step aside for the deadlines of others: who does, when, and that all come back exact."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medha.kv.prefix_cache import PrefixHasher
from medha.scheduler.long_swaps import PRICE_SHARE, LongHolder, Needed, Price, who_swaps
from medha.wire.messages import Emit, HostTierFigures

from .test_replica_controller_machine import ControllerMachine

CHAT = Needed(slack_seconds=0.5, holds_seconds=10.0)


def holder(tie: int, **changed: Any) -> LongHolder:
    one = LongHolder(tie, slack_seconds=60.0, price=Price(0.1, 0.2), swaps=0, is_enough=True)
    return replace(one, **changed)


def test_the_one_with_most_time_to_spare_steps_aside_and_before_it_those_that_did_so_less_often() -> None:
    holders = [holder(1), holder(2, slack_seconds=70.0), holder(3, slack_seconds=90.0, swaps=1)]
    assert who_swaps(CHAT, holders, 1.0) is holders[1]
    assert who_swaps(CHAT, holders[2:], 1.0) is holders[2]
    assert who_swaps(CHAT, [], 1.0) is None


@pytest.mark.parametrize(
    "changed",
    [
        {"slack_seconds": 11.29},  # 0.3 to copy, 10 until the chat has ended, 1 until anything shows
        {"slack_seconds": 60.0, "price": Price(0.0, 60.0)},  # without a tier: to compute it again
        {"is_enough": False},
        {"price": Price(0.6, 0.1)},  # the chat would be late all the same
    ],
)
def test_none_steps_aside_in_vain_or_to_be_late_itself(changed: dict[str, Any]) -> None:
    assert who_swaps(CHAT, [holder(1, slack_seconds=11.31)], 1.0) is not None
    assert who_swaps(CHAT, [holder(1, **changed)], 1.0) is None


def test_it_waits_until_the_last_moment() -> None:
    """Until then, KV may come free by itself."""
    assert who_swaps(replace(CHAT, slack_seconds=1.11), [holder(1)], 1.0) is None
    assert who_swaps(replace(CHAT, slack_seconds=1.09), [holder(1)], 1.0) is not None


# --- a controller ----------------------------------------------------------------------------------------

SIZE = 4
HASHER = PrefixHasher(SIZE, b"secret")
PRICE = 1e-5
"""Seconds to copy a block."""


@dataclass
class Traffic:
    """A long request that holds nearly all KV, and a chat that needs some of it."""

    replica: Any
    submit_of: Any
    long_output: int = 0

    def begin_long(self, phase: str, due_seconds: float = 20.0) -> dict[str, float]:
        """Send the long request, let it get to the middle of a phase, and return when it is due."""
        replica = self.replica
        tokens, self.long_output = (200, 150) if phase == "decode" else (340, 10)
        replica.prompt_ids["long"] = tuple(range(tokens))
        hashes = replica.hasher.hashes(np.arange(tokens, dtype=np.int32))
        due = {"deadline_after_seconds": due_seconds} if phase == "prefill" else {}
        submit = self.submit_of("long", tokens, self.long_output, prompt="long", block_hashes=hashes, **due)
        replica.submit(submit)
        if phase == "prefill":
            while replica.controller.find("long").computed < tokens // 3:
                assert replica.advance()
            return {"long": replica.controller.find("long").deadline}
        while len(replica.emitted.get("long", ())) < 50:
            assert replica.advance()
        tpot_seconds = replica.controller.find("long").targets.tpot_seconds
        return {"long": replica.now + tpot_seconds * (self.long_output - 50)}

    def chat(self, name: str, tokens: int = 80, output: int = 20) -> float:
        """Send a chat, and return when it is due."""
        self.replica.submit(self.submit_of(name, tokens, output))
        deadline: float = self.replica.controller.find(name).deadline
        return deadline

    def ended_at(self, name: str, phase: str) -> float:
        """Return when a request got its first token, or the long one its last if it was due for that."""
        wanted = -1 if name == "long" and phase == "decode" else 0
        times = [
            now
            for (now, _), commands in zip(self.replica.log, self.replica.commands, strict=True)
            for command in commands
            if isinstance(command, Emit) and command.id == name
        ]
        return times[wanted]


@pytest.fixture
def traffic(replica_of: Any, submit_of: Any) -> Any:
    """A replica of 100 blocks; a step takes 10 ms, and decodes may take 50 ms."""

    def make(**settings: Any) -> Traffic:
        replica = replica_of(
            **{
                "kv_blocks": 100, "block_size_tokens": SIZE, "long_threshold_tokens": 100, "short_headroom": 0.0,
                "max_step_seconds": 0.1, "ttft_floor_seconds": 0.6, "max_chunk_tokens": 4, "hasher": HASHER,
            }
            | settings
        )  # fmt: skip
        return Traffic(replica, submit_of)

    return make


@pytest.mark.parametrize("host_blocks", [0, 200])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_a_long_request_lets_a_chat_be_on_time_and_is_on_time_itself(
    traffic: Any, phase: str, host_blocks: int
) -> None:
    late = {}
    for max_swaps in (0, 1):
        here = traffic(max_swaps=max_swaps, host_tier=tier(host_blocks))
        deadlines = here.begin_long(phase)
        deadlines["chat"] = here.chat("chat")
        here.replica.run().check_empty()
        assert here.replica.asides == ["long"] * max_swaps
        assert here.replica.controller.long_swaps == max_swaps
        assert len(here.replica.emitted["long"]) == here.long_output
        late[max_swaps] = {name for name, due in deadlines.items() if here.ended_at(name, phase) > due}
    assert late == {0: {"chat"}, 1: set()}


def test_a_decode_that_is_not_ahead_of_its_target_keeps_its_kv(traffic: Any) -> None:
    """It has sampled 50 tokens in half a second, and may have taken 0.6 s for them."""
    here = traffic(tpot_target_seconds=0.012, host_tier=tier(200))
    here.begin_long("decode")
    here.chat("chat")
    here.replica.run().check_empty()
    assert here.replica.asides == []


@pytest.mark.parametrize(
    ("max_swaps", "share", "swaps"), [(1, PRICE_SHARE, 1), (2, PRICE_SHARE, 2), (2, 1e-6, 1)]
)
def test_a_request_that_came_back_is_not_swapped_too_often_or_too_soon(
    traffic: Any, monkeypatch: pytest.MonkeyPatch, max_swaps: int, share: float, swaps: int
) -> None:
    """Copies take about a millisecond: a second swap may come after ten, or if they may take less time, much later."""
    monkeypatch.setattr("medha.scheduler.long_swaps.PRICE_SHARE", share)
    here = traffic(max_swaps=max_swaps, host_tier=tier(200), tpot_target_seconds=0.2)
    here.begin_long("decode")
    here.chat("chat", output=4)
    while "chat" not in here.replica.endings or here.replica.controller.find("long").waits:
        assert here.replica.advance()
    for _ in range(4):
        here.replica.advance()
    here.chat("another", output=4)
    here.replica.run().check_empty()
    assert here.replica.asides == ["long"] * swaps


@pytest.mark.parametrize("policy", ["guarded", "fcfs"])
def test_reads_for_a_request_that_comes_back_have_its_place(traffic: Any, policy: str) -> None:
    """Its deadline counts from its first arrival, and with `fcfs` it keeps its place."""
    here = traffic(host_tier=tier(200), tpot_target_seconds=0.2, policy=policy)
    here.begin_long("decode")
    request = here.replica.controller.find("long")
    arrival = request.arrival
    here.chat("chat", output=4)
    while here.replica.controller.find("long") is request:
        assert here.replica.advance()
    back = here.replica.controller.find("long")
    assert here.replica.asides == ["long"]
    assert back.read_due == (arrival if policy == "fcfs" else back.deadline)


def test_another_long_request_does_not_take_its_kv_before_it_is_back(traffic: Any) -> None:
    """Its answer would keep the KV for 1.8 s, beyond the deadline of the one that stepped aside."""
    here = traffic(max_swaps=1, host_tier=tier(200), tpot_target_seconds=0.04)
    deadlines = here.begin_long("prefill", due_seconds=3.0)
    here.replica.submit(here.submit_of("other", 110, 180, deadline_after_seconds=60.0))
    deadlines["chat"] = here.chat("chat")
    here.replica.run().check_empty()
    assert here.replica.asides == ["long"]
    assert {name for name, due in deadlines.items() if here.ended_at(name, "prefill") > due} == set()


def test_none_steps_aside_while_another_long_request_claims_kv(traffic: Any) -> None:
    """A late long request that claims KV would get the KV that another one gives back, and keep it while it runs."""
    here = traffic(max_swaps=1, host_tier=tier(200), policy="fcfs")
    here.begin_long("decode")
    here.replica.submit(here.submit_of("late", 110, 90, deadline_after_seconds=0.01))
    for _ in range(5):
        here.replica.advance()
    here.chat("chat")
    here.replica.run().check_empty()
    assert here.replica.asides == []


def test_a_prefill_that_also_computes_the_beginning_of_a_waiting_prompt_goes_on(
    traffic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medha.scheduler.prefix_followers.WORTH_WAITING_TOKENS", 12)
    here = traffic(max_swaps=1, host_tier=tier(200))
    here.begin_long("prefill")
    ids = (*range(340), *range(1000, 1012))
    here.replica.prompt_ids["follower"] = ids
    hashes = here.replica.hasher.hashes(np.array(ids, dtype=np.int32))
    submit = here.submit_of("follower", 352, 4, prompt="follower", block_hashes=hashes)
    here.replica.submit(replace(submit, deadline_after_seconds=30.0))
    assert here.replica.controller.find("follower").leader.id == "long"
    here.chat("chat")
    here.replica.run().check_empty()
    assert here.replica.asides == []


def test_what_a_request_computed_before_it_stepped_aside_is_not_reported_as_cached(traffic: Any) -> None:
    here = traffic(max_swaps=1, host_tier=tier(200))
    here.begin_long("prefill")
    here.chat("chat")
    here.replica.run().check_empty()
    assert here.replica.asides == ["long"]
    emits = [one for commands in here.replica.commands for one in commands if isinstance(one, Emit)]
    assert [one.cached_tokens for one in emits if one.id == "long"] == [0] * here.long_output


def tier(blocks: int) -> HostTierFigures | None:
    return HostTierFigures(blocks, 1, PRICE, PRICE) if blocks else None


# --- any schedule ------------------------------------------------------------------------------------------


def test_long_requests_and_chats_in_any_schedule_all_end_once_and_nothing_is_left() -> None:
    """The machine checks each position's KV, all ledgers and, at the end, a replay of the events."""
    seen = Counter[str]()

    @settings(max_examples=80)
    @given(
        seed=st.integers(0, 10_000),
        lanes=st.sampled_from([1, 1, 2]),
        stages=st.sampled_from([1, 1, 2, 3]),
        policy=st.sampled_from(["guarded", "guarded", "lars", "fcfs"]),
        host_blocks=st.sampled_from([0, 8, 200, 200]),
        tokens_per_lane=st.sampled_from([24, 1000]),
        max_swaps=st.integers(1, 3),
        failure_chance=st.sampled_from([0.0, 0.0, 0.01]),
        guesses=st.sampled_from([0, 0, 2]),
        prefill=st.sampled_from([None, None, "striped"]),
    )
    def run(seed: int, lanes: int, **fixed: Any) -> None:
        random, machine = Random(seed), ControllerMachine()
        machine.start(
            lanes=lanes, kv_blocks=27 // lanes, block_size=4, max_chunk=16, max_running=100, headroom=0.0, long_threshold=30,
            seed=seed, stream_goes_on=False, floor_seconds=0.2, step_seconds=0.05, tpot_seconds=0.2, **fixed,
        )  # fmt: skip
        for turn in range(random.randint(1, 3)):
            for number in range(random.choice([1, 1, 2])):
                machine.submit(random.randint(50, 70), random.choice([None, 60]), 10 * turn + number)
            sampled, wanted = sum(machine.emitted.values()), random.randint(0, 50)
            while sum(machine.emitted.values()) < sampled + wanted and machine.move(random.randint(0, 3)):
                pass
            for number in range(random.randint(3, 8)):
                machine.submit(random.randint(18, 29), random.randint(1, 8), random.choice([20 + number, 50]))
                for _ in range(random.randint(0, 10)):
                    machine.move(random.randint(0, 3))
            if random.random() < 0.2 and machine.open:
                machine.cancel(random.randint(0, 5))
        machine.teardown()
        controller = machine.lanes.controller
        counts = controller.pools.tier_counts
        assert counts.swapped_in_blocks <= counts.fetched_blocks
        assert counts.swapped_out_blocks <= counts.offloaded_blocks
        seen.update(swaps=controller.long_swaps, out=counts.swapped_out_blocks, back=counts.swapped_in_blocks)

    run()
    assert min(seen["swaps"], seen["out"], seen["back"]) > 5, seen
