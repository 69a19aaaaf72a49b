"""The work that a router reports for a model: that of its own sequences alone, wherever they are."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from medha.api.declared import DeclaredModel
from medha.routing.known_replicas import Forwarded, KnownReplica
from medha.routing.replica_demand import DemandTerms, ModelWork
from medha.routing.router_core import RouterCore
from medha.routing.router_events import (
    Abandon,
    Arrive,
    BundleKnown,
    Declared,
    LinkLost,
    NewSequence,
    Received,
)
from medha.wire.messages import Announce, Emit, LaneLoad, PolicyTerms, Sampling, ServiceClassTerms, Tick

CARD = Announce(
    replica="r0", model="m", digest="d", epoch=1, ready=True, draining=False, max_model_len=100_000,
    vocab_size=100, kv_tokens_total=100_000, kv_tokens_free=100_000, running=0, waiting=0,
    pending_prefill_seconds=0.0, longest_request_tokens=100_000, waiting_limit=1000,
    service_classes=(ServiceClassTerms("default", 2.0, 3.0, 0.05, 0.01, 4096),),
    prefill_points=((100, 1.0), (100_000, 1000.0)),  # 10 ms a token
    lanes=(LaneLoad(100_000, 0.0),), order=PolicyTerms("edf"),
)  # fmt: skip
BUSY = {
    "running": 1,
    "pending_prefill_seconds": 60.0,
    "work_ahead": ((-1e6, 60.0),),
    "lanes": (LaneLoad(0, 60.0),),
}


def serving(**fields: Any) -> RouterCore:
    core = RouterCore(demand=DemandTerms(start_seconds=100.0))
    core.handle(Tick(), 0.0)
    core.handle(BundleKnown("d"), 0.0)
    announce(core, **fields)
    return core


def announce(core: RouterCore, now: float = 0.0, **fields: Any) -> None:
    card = replace(CARD, **fields)
    core.handle(Received(card.replica, card), now)


def ask(core: RouterCore, name: str, length: int = 100, now: float = 0.0, samples: int = 1) -> None:
    sequences = tuple(
        NewSequence(f"{name}{number}", name, length, 7, Sampling(max_tokens=50), number)
        for number in range(samples)
    )
    core.handle(Arrive("m", "d", sequences), now)


def work(core: RouterCore, now: float = 0.0, **guests: int) -> ModelWork:
    return core.works(guests, now)["m"]


def desired(core: RouterCore, now: float = 0.0, **guests: int) -> int:
    return ceil(sum(core.demand("m", work(core, now, **guests)).values()))


def test_what_was_sent_counts_until_its_first_token_and_no_more_than_its_replica_says_it_has() -> None:
    core = serving()
    ask(core, "a", 1000)
    assert core.waiting == 0
    assert work(core).pending_seconds == pytest.approx(10.0)
    announce(core, running=1, pending_prefill_seconds=4.0)
    assert work(core).pending_seconds == pytest.approx(4.0)
    core.handle(Received("r0", Emit("a0", (1,))), 1.0)
    assert work(core).pending_seconds == 0.0
    assert work(core).open_requests == 1


def test_others_work_at_a_replica_is_not_counted_but_makes_what_waits_here_late() -> None:
    core = serving(**BUSY)
    assert work(core) == ModelWork()
    ask(core, "a", 100)  # 1 s of work, due in 3 s, behind 60 s
    assert core.waiting == 1
    found = work(core)
    assert (found.pending_seconds, found.waiting_lanes) == (pytest.approx(1.0), pytest.approx(1 / 3))
    assert found.missed_seconds == pytest.approx(60 + 1 - 3)
    ask(core, "b", 100)
    assert work(core).missed_seconds == pytest.approx(60 + 1 - 3 + 60 + 2 - 3), "it goes behind the first"


def test_what_waits_needs_the_more_of_a_lane_the_less_time_is_left_and_a_whole_one_once_it_is_late() -> None:
    core = serving(**BUSY)
    ask(core, "a", 10_000)  # 100 s of work, due in 300 s
    found = work(core)
    assert (found.pending_seconds, found.missed_seconds) == (pytest.approx(100.0), 0.0)
    assert [work(core, now).waiting_lanes for now in (0.0, 100.0, 250.0, 1000.0)] == pytest.approx(
        [1 / 3, 1 / 2, 1.0, 1.0]
    )


def test_a_router_asks_for_its_part_of_a_spare_as_soon_as_replicas_announce_more_routers() -> None:
    core = serving()
    for number in range(30):
        ask(
            core, f"a{number}", 300
        )  # 90 s of work in a minute: the reserve is a whole replica, for one router
    assert core.demand("m", work(core))["spare"] == pytest.approx(1.0)
    announce(core, routers=3)
    announce(core, replica="r1")  # it has just started, and knows one of them
    assert core.demand("m", work(core))["spare"] == pytest.approx(1 / 3)
    announce(core, replica="r1", routers=3)
    for name in ("r0", "r1"):
        core.handle(LinkLost(name), 0.0)
    assert core.demand("m", work(core))["spare"] == pytest.approx(1 / 3), "while none serves, it is as it was"


def test_urgent_requests_that_come_faster_and_faster_ask_for_replicas_before_they_are_needed() -> None:
    """Each of three routers that share the clients asks for a part, and none does once nothing has been asked for a minute."""
    core = serving(routers=3)
    arrivals = [
        *(float(second) for second in range(0, 30, 5)),
        *(float(second) for second in range(30, 60, 4)),
        *(60 + number / 2 for number in range(60)),
    ]
    before, after = arrivals[:14], arrivals[14:]
    for at in before:
        ask(core, f"{at}:", 100, at)  # 1 s of work
    assert core.demand("m", work(core, 59.9))["growth"] == 0.0, "two requests more may be chance"
    for at in after:
        ask(core, f"{at}:", 100, at)
    assert 0.5 < core.demand("m", work(core, 89.9))["growth"] < 5.0
    for at in arrivals:
        core.handle(Abandon(f"{at}:0"), 90.0)
    assert core.demand("m", work(core, 150.0))["growth"] == 0.0


def test_tiny_work_that_is_late_needs_no_whole_lane() -> None:
    core = serving(**BUSY)
    for name in "abcd":
        ask(core, name, 10)  # 0.1 s of work
    assert work(core, 100.0).waiting_lanes == pytest.approx(4 * 0.1 / 2)


def test_the_size_of_a_replica_is_known_once_it_serves_though_it_announces_itself_before() -> None:
    core = RouterCore()
    core.handle(Tick(), 0.0)
    announce(core)
    core.handle(BundleKnown("d"), 0.0)
    ask(core, "a", 1000)
    assert core.demand("m", work(core))["arrivals"] > 0


def test_samples_of_one_prompt_bring_its_work_once_and_their_own_kv() -> None:
    core = serving()
    ask(core, "a", 1000, samples=3)
    found = work(core)
    assert found.arrival_rate == pytest.approx(10 / 60)
    assert found.pending_seconds == pytest.approx(10.0)
    assert found.kv_tokens == 1000 + 3 * 50
    announce(core, running=3, pending_prefill_seconds=500.0)  # another router's
    assert work(core).pending_seconds == pytest.approx(10.0)


def test_a_sequence_that_its_replica_loses_arrives_only_once() -> None:
    core = serving()
    ask(core, "a", 1000)
    core.handle(LinkLost("r0"), 1.0)
    assert core.waiting == 1
    assert work(core, 1.0).arrival_rate == pytest.approx(10 / 60)


def test_without_a_replica_what_waits_is_late_by_the_time_that_one_takes_to_start() -> None:
    core = serving()
    ask(core, "a", 1000)  # 10 s, due at 30
    core.handle(LinkLost("r0"), 1.0)
    assert work(core, 1.0).missed_seconds == pytest.approx(1 + 100 + 10 - 30)


def test_a_model_at_zero_replicas_needs_one_as_soon_as_a_request_waits_for_it_and_none_before() -> None:
    core = RouterCore()
    core.handle(Declared((DeclaredModel(name="m", replicas=0),)), 0.0)
    assert desired(core) == 0
    assert desired(core, m=1) == 1


def test_the_need_falls_to_none_once_no_request_is_open_and_what_arrived_is_over() -> None:
    core = serving()
    ask(core, "a", 1000)
    assert desired(core) == 1
    core.handle(Abandon("a0"), 5.0)
    assert desired(core, 50.0) == 1  # it may come back
    assert desired(core, 66.0) == 0


def test_a_request_that_is_due_tomorrow_keeps_a_replica_for_a_minute_after_its_end_and_no_longer() -> None:
    core = serving(service_classes=(replace(CARD.service_classes[0], ttft_floor_seconds=86_400.0),))
    ask(core, "a", 1000)
    core.handle(Received("r0", Emit("a0", (1,))), 10.0)
    assert desired(core, 1000.0) == 1, "it is open"
    core.handle(Abandon("a0"), 1000.0)
    assert desired(core, 1059.0) == 1
    ask(core, "b", 1000, now=1059.0)
    assert desired(core, 1100.0) == 1, "another is open"
    core.handle(Abandon("b0"), 1100.0)
    assert desired(core, 1159.0) == 1
    assert desired(core, 1161.0) == 0


def test_a_model_that_nobody_names_any_more_is_forgotten() -> None:
    core = serving()
    core.handle(Declared((DeclaredModel(name="m", replicas=1),)), 0.0)
    ask(core, "a", 1000)
    core.handle(Declared(()), 1.0)
    core.handle(LinkLost("r0"), 1.0)
    core.handle(Abandon("a0"), 1.0)
    core.handle(Tick(), 2.0)
    assert core.works({}, 2.0) == {}
    core.handle(Declared((DeclaredModel(name="m", replicas=1),)), 3.0)
    assert work(core, 3.0) == ModelWork()


_KEYS = st.integers(-9, 9).map(float)  # few, so that some are equal


@given(
    st.lists(st.tuples(_KEYS, st.floats(0, 50)), max_size=8),
    st.lists(st.tuples(_KEYS, st.floats(0, 50)), max_size=4),
    st.lists(_KEYS, min_size=1, max_size=8),
    st.sampled_from(["edf", "srpt"]),
)
def test_the_work_before_many_keys_is_that_before_each(
    points: list[tuple[float, float]],
    forwarded: list[tuple[float, float]],
    keys: list[float],
    policy: str,
) -> None:
    ahead = [(key, float(number)) for number, (key, _) in enumerate(sorted(points))]
    card = replace(CARD, work_ahead=tuple(ahead), order=PolicyTerms(policy), lanes=(LaneLoad(0, 0.0),) * 2)
    replica = KnownReplica(card, 0.0, 7.0)
    replica.forwarded = [Forwarded(str(key), key, (0,), 1, seconds) for key, seconds in forwarded]
    found = replica.seconds_before_each(np.array(keys))
    assert found.tolist() == pytest.approx([replica.seconds_before(key) for key in keys])


def test_waiting_sequences_count_what_the_kind_of_replica_reserves_that_reserves_least() -> None:
    expecting = replace(CARD.service_classes[0], expected_output_tokens=20)
    core = serving(service_classes=(expecting,), **BUSY)
    announce(core, replica="r1", **BUSY)
    announce(core, replica="r2", **BUSY)
    announce(core, replica="r3", service_classes=(expecting,), longest_request_tokens=110, **BUSY)
    ask(core, "a", 100)
    assert core.waiting == 1
    assert work(core).kv_tokens == 120
