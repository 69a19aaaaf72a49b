"""Sequences leave the router when a replica can begin them: by lanes, free KV and urgency; and what refusals say."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from medha.kv.prefix_cache import PrefixHasher
from medha.routing.known_replicas import Forwarded, KnownReplica
from medha.routing.ledgers import pool_terms
from medha.routing.prefix_memory import MARK_BLOCK_TOKENS, Prefix, marks
from medha.routing.replica_choice import LOAD_FACTOR, LOAD_SECONDS
from medha.routing.router_core import MOST_MISSES, RouterCore
from medha.routing.router_events import (
    Abandon,
    Arrive,
    BundleKnown,
    Fail,
    NewSequence,
    Received,
    RouterCommand,
    Send,
    ServedElsewhere,
)
from medha.routing.routing_limits import RoutingLimits
from medha.scheduler.attained_service import HALF_LIFE_SECONDS
from medha.scheduler.policy import POLICIES
from medha.wire.messages import (
    Announce,
    Emit,
    Failed,
    LaneLoad,
    PolicyTerms,
    Refused,
    Sampling,
    ServiceClassTerms,
    Submit,
    Tick,
)

TERMS = ServiceClassTerms("default", 2.0, 3.0, 0.05, 0.01, 4096)
CARD = Announce(
    replica="r0",
    model="m",
    digest="d",
    epoch=1,
    ready=True,
    draining=False,
    max_model_len=100_000,
    vocab_size=100,
    kv_tokens_total=100_000,
    kv_tokens_free=50_000,
    running=1,
    waiting=0,
    pending_prefill_seconds=0.0,
    longest_request_tokens=100_000,
    waiting_limit=1000,
    service_classes=(TERMS,),
    prefill_points=((100, 1.0), (100_000, 1000.0)),  # 10 ms a token
    lanes=(LaneLoad(50_000, 0.0),),
    order=PolicyTerms("edf"),
)


def announce(core: RouterCore, now: float = 0.0, **fields: Any) -> list[str]:
    """Announce a busy replica; return what it is sent."""
    card = replace(CARD, **fields)
    return sent(core.handle(Received(card.replica, card), now))


def serving(*replicas: str, limits: RoutingLimits | None = None, **fields: Any) -> RouterCore:
    core = RouterCore(limits or RoutingLimits(max_waiting=100_000))
    core.handle(Tick(), 0.0)
    core.handle(BundleKnown("d"), 0.0)
    for replica in replicas or ("r0",):
        announce(core, replica=replica, **fields)
    return core


def ask(
    core: RouterCore,
    name: str,
    length: int = 100,
    now: float = 0.0,
    *,
    output: int = 5,
    prefix: Prefix = (),
    samples: int = 1,
    **fields: Any,
) -> list[RouterCommand]:
    sequences = tuple(
        NewSequence(
            name if samples == 1 else f"{name}-{i}", name, length, 7, Sampling(max_tokens=output), i, prefix
        )
        for i in range(samples)
    )
    return core.handle(replace(Arrive("m", "d", sequences), **fields), now)


def sent(commands: list[RouterCommand]) -> list[str]:
    return [c.message.id for c in commands if isinstance(c, Send) and isinstance(c.message, Submit)]


def places(commands: list[RouterCommand]) -> list[str]:
    return [c.replica for c in commands if isinstance(c, Send) and isinstance(c.message, Submit)]


def waiting(core: RouterCore, now: float) -> list[str]:
    return [one.new.id for one, _ in core._waiting.of(("m", "d")).urgent_first(now)]


# --- when a sequence leaves ------------------------------------------------------------------------------


def test_a_replicas_queue_stays_short_and_the_rest_waits_here_in_order() -> None:
    core = serving()
    for index in range(10):
        ask(core, f"{index}", 40, deadline_after_seconds=50.0 + index)
    assert waiting(core, 0.0) == [f"{index}" for index in range(3, 10)], "three take more than a second"
    busy = {"pending_prefill_seconds": 1.2, "work_ahead": ((52.0, 1.2),)}
    assert announce(core, 0.1, **busy) == []
    almost = {"pending_prefill_seconds": 0.7, "work_ahead": ((52.0, 0.7),)}
    assert announce(core, 0.2, **almost) == ["3"]
    assert announce(core, 0.3, work_ahead=()) == ["4", "5", "6"]


def test_who_needs_the_largest_replica_keeps_nobody_from_a_smaller_one() -> None:
    core = serving("large", waiting=1000)
    announce(core, replica="small", longest_request_tokens=5000, waiting=1000)
    for index in range(3 * MOST_MISSES):
        ask(core, f"large {index}", output=50_000)
    for index in range(3):
        ask(
            core, f"beyond {index}", output=200_000, deadline_after_seconds=50.0
        )  # no replica holds all of it
    ask(core, "chat", deadline_after_seconds=60.0)
    for expected in ("beyond 0", "beyond 1", "beyond 2", "chat"):
        assert announce(core, replica="small", longest_request_tokens=5000, running=0) == [expected]


def test_suspects_that_wait_for_one_another_keep_nobody_else_waiting() -> None:
    core = serving()
    suspects = [f"suspect {index}" for index in range(3 * MOST_MISSES)]
    for name in suspects:
        ask(core, name, deadline_after_seconds=50.0)
        announce(core)
    for name in suspects:
        core.handle(Received("r0", Failed(name, "rank_lost")), 1.0)
    ask(core, "chat", now=1.0, deadline_after_seconds=60.0)
    assert announce(core, 1.1) == ["suspect 0~1"], "one at a time; the next are as urgent"
    passes = [announce(core, 1.2) for _ in range(len(suspects) // MOST_MISSES)]
    assert [name for one in passes for name in one] == ["chat"]
    core.handle(Received("r0", Emit("suspect 0~1", (1,), "stop")), 1.3)
    passes = [announce(core, 1.4) for _ in range(len(suspects) // MOST_MISSES)]
    assert [name for one in passes for name in one] == ["suspect 1~1"], (
        "those that were passed over come back"
    )


def test_work_that_is_less_urgent_keeps_nobody_waiting() -> None:
    """A replica begins a short prompt between the chunks of a long one, so that the long one counts for nothing."""
    core = serving(
        pending_prefill_seconds=100.0, lanes=(LaneLoad(50_000, 100.0),), work_ahead=((300.0, 100.0),)
    )
    assert sent(ask(core, "chat")) == ["chat"]
    assert sent(ask(core, "later", deadline_after_seconds=400.0)) == []
    core = serving(
        pending_prefill_seconds=100.0, lanes=(LaneLoad(50_000, 100.0),), work_ahead=((0.5, 100.0),)
    )
    assert sent(ask(core, "chat")) == [], "here it would have to wait"
    core = serving()
    assert sent(ask(core, "long", 9000, deadline_after_seconds=400.0)) == ["long"]
    assert sent(ask(core, "chat")) == ["chat"], "nor does one that was just sent"
    assert sent(ask(core, "later", deadline_after_seconds=401.0)) == []


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_what_a_replica_announces_is_compared_by_the_keys_of_its_policy(policy: str) -> None:
    """Two prompts wait, and the announced work stands between them."""
    now, target = 1000.0, {"urgent": 50.0, "patient": 500.0}
    lengths = {"urgent": 100, "patient": 10_000}
    between = {"fcfs": -5.0, "edf": 200.0, "guarded": 200.0, "lrs": 100.0, "srpt": 10.0, "lars": 45.0}
    core = RouterCore()
    core.handle(Tick(), now - 10.0)
    core.handle(BundleKnown("d"), now - 10.0)
    full: dict[str, Any] = {"order": PolicyTerms(policy), "waiting": 1000}
    announce(core, now - 10.0, **full)
    for name in ("urgent", "patient"):
        at = now - 10.0 if name == "urgent" else now
        ask(core, name, lengths[name], at, deadline_after_seconds=target[name])
    card: dict[str, Any] = {**full, "waiting": 0, "work_ahead": ((between[policy], 30.0),)}
    first = "patient" if policy == "lars" else "urgent"  # relative to its work, it has less slack
    assert announce(core, now, **card) == [first]


@pytest.mark.parametrize("policy", ["lrs", "lars", "edf"])
def test_a_sequence_is_sent_once_it_has_become_more_urgent_than_the_work_there(policy: str) -> None:
    """The announced key stays, as that of a prefill under way does; the waiting one's was ordered with another's."""
    key = {"lrs": 50.0, "lars": 50.0, "edf": 51.0}[policy]  # its prefill takes 1 s
    card: dict[str, Any] = {"order": PolicyTerms(policy), "work_ahead": ((key, 10.0),)}
    core = serving(**card)
    assert sent(ask(core, "a", deadline_after_seconds=101.0)) == []
    assert sent(ask(core, "b", deadline_after_seconds=3.0)) == ["b"]
    assert announce(core, 49.0, **card) == []
    assert announce(core, 51.0, **card) == ["a"]


def test_the_work_before_a_key_is_that_of_the_point_below_it_on_the_routers_clock_and_per_lane() -> None:
    two = (LaneLoad(9, 0.0), LaneLoad(9, 0.0))
    card = replace(CARD, lanes=two, work_ahead=((1.0, 2.0), (5.0, 8.0)))
    replica = KnownReplica(card, 0.0, announced_at=100.0)
    assert [replica.seconds_before(100.0 + key) for key in (0.5, 1.0, 4.9, 5.0)] == [0.0, 1.0, 1.0, 4.0]
    replica = KnownReplica(replace(card, order=PolicyTerms("lars")), 0.0, announced_at=100.0)
    assert [replica.seconds_before(key) for key in (0.5, 1.0, 4.9, 5.0)] == [0.0, 1.0, 1.0, 4.0]


def test_a_sequence_without_kv_waits_here_until_it_is_late_and_smaller_ones_pass_it() -> None:
    core = serving(lanes=(LaneLoad(500, 0.0),), kv_tokens_free=500)
    assert sent(ask(core, "large", 600, deadline_after_seconds=10.0)) == []
    assert sent(ask(core, "small", 300, now=1.0, deadline_after_seconds=60.0)) == ["small"]
    assert announce(core, 3.0, lanes=(LaneLoad(599, 0.0),)) == []
    assert announce(core, 3.9, lanes=(LaneLoad(605, 0.0),)) == ["large"]
    ask(core, "other", 600, now=4.0, deadline_after_seconds=10.0)
    assert announce(core, 7.9, lanes=(LaneLoad(10, 0.0),)) == []
    assert announce(core, 8.1, lanes=(LaneLoad(10, 0.0),)) == ["other"], "it is due at 14 and takes 6 s"


def test_an_idle_replica_takes_whatever_it_can_ever_hold() -> None:
    core = serving(running=0, lanes=(LaneLoad(100, 0.0),))
    assert sent(ask(core, "a", 5000)) == ["a"]


def test_kv_is_counted_for_the_output_that_the_replica_expects() -> None:
    expecting: dict[str, Any] = {"lanes": (LaneLoad(300, 0.0),)}
    core = serving(**expecting)
    assert sent(ask(core, "a", output=900)) == []
    terms = (replace(TERMS, expected_output_tokens=150),)
    core = serving(service_classes=terms, **expecting)
    assert sent(ask(core, "a", output=900)) == ["a"]
    assert sent(ask(core, "b", 60, output=10, deadline_after_seconds=1.5)) == [], (
        "250 of 300 tokens are taken"
    )
    assert sent(ask(core, "c", 30, output=10, deadline_after_seconds=1.5)) == ["c"]


# --- lanes -----------------------------------------------------------------------------------------------


def card_of(*lanes: tuple[int, float], **fields: Any) -> Announce:
    loads = tuple(LaneLoad(*lane) for lane in lanes)
    card = replace(CARD, lanes=loads, kv_tokens_free=sum(free for free, _ in lanes), tokens_per_lane=10_000)
    return replace(card, pending_prefill_seconds=sum(pending for _, pending in lanes), **fields)


def known(card: Announce) -> KnownReplica:
    return KnownReplica(card, 0.0, 0.0)


def test_a_short_prompt_takes_the_lane_with_kv_that_is_free_first_and_a_long_one_all_of_them() -> None:
    replica = known(card_of((500, 0.0), (2000, 5.0), (2000, 3.0)))
    short = replica.berth(900, 1000)
    assert (short.lanes, short.has_kv, short.seconds_ahead) == ((2,), True, 3.0)
    tiny = replica.berth(90, 100)
    assert (tiny.lanes, tiny.seconds_ahead) == ((0,), 0.0)
    large = replica.berth(3000, 3001)
    assert (large.lanes, large.has_kv) == ((0,), False)
    long = replica.berth(20_000, 20_000)
    assert (long.lanes, long.has_kv) == ((1, 0, 2), False)
    roomy = known(card_of((9000, 0.0), (8000, 1.0), (10_000, 4.0)))
    spread = roomy.berth(20_000, 20_000)
    assert (spread.lanes, spread.has_kv, spread.seconds_ahead) == ((2, 0, 1), True, 4.0)


def test_what_was_forwarded_since_counts_on_its_lane() -> None:
    replica = known(card_of((2000, 0.0), (2000, 1.0)))
    replica.forwarded.append(Forwarded("w", 1.0, (0,), 1500, 3.0))
    assert replica.berth(900, 1000).lanes == (1,)
    assert replica.berth(300, 400).seconds_ahead == 1.0
    replica.announce(replica.card, 1.0)
    assert replica.berth(900, 1000).lanes == (0,)


def test_what_has_ended_holds_no_kv_until_the_next_announcement() -> None:
    """Else each of a row of long prompts would wait for one, though the replica is idle."""
    core = RouterCore()
    core.handle(Tick(), 0.0)
    core.handle(BundleKnown("d"), 0.0)
    core.handle(Received("r0", card_of((2000, 0.0), running=0)), 0.0)
    for turn, name in enumerate(("a", "b", "c")):
        sent = ask(core, name, 1500, 0.01 * turn)
        assert places(sent) == ["r0"]
        (wire_id,) = [
            one.message.id for one in sent if isinstance(one, Send) and isinstance(one.message, Submit)
        ]
        assert places(ask(core, f"behind {name}", 1500, 0.01 * turn)) == [], "it holds the KV while it runs"
        core.handle(Abandon(f"behind {name}"), 0.01 * turn)
        core.handle(Received("r0", Emit(wire_id, (1,), "length")), 0.01 * turn)


def test_the_replica_whose_lane_is_free_wins_over_one_with_less_work_in_all() -> None:
    """The first replica has a lane without work; the second has less work in all, but no idle lane."""
    core = RouterCore()
    core.handle(Tick(), 0.0)
    core.handle(BundleKnown("d"), 0.0)
    for name, lanes in (("r0", ((9000, 3.0), (9000, 3.0))), ("r1", ((9000, 8.0), (9000, 0.0)))):
        card = card_of(*lanes, replica=name)
        core.handle(Received(name, card), 0.0)
    assert places(ask(core, "a")) == ["r1"]


@given(
    st.lists(st.tuples(st.integers(0, 5000), st.floats(0, 50)), min_size=1, max_size=4),
    st.integers(1, 12_000),
    st.integers(1, 500),
)
def test_a_berth_has_kv_exactly_if_its_lanes_hold_it_and_no_lane_with_kv_is_less_busy(
    lanes: list[tuple[int, float]], tokens: int, output: int
) -> None:
    replica, needed = known(card_of(*lanes, kv_tokens_total=10_000 * len(lanes))), tokens + output
    berth = replica.berth(tokens, needed)
    if len(berth.lanes) > 1:
        assert berth.has_kv == (sum(free for free, _ in lanes) >= needed)
        return
    (lane,) = berth.lanes
    free = [index for index, one in enumerate(lanes) if one[0] >= needed]
    assert berth.has_kv == bool(free)
    assert all(lanes[lane][1] <= lanes[other][1] for other in free)


def with_answers_of_owners() -> RouterCore:
    """Return a router whose first replica answers the owners b and a, and whose second one answers a."""
    core = serving(limits=RoutingLimits(max_waiting=100_000, lookahead_seconds=inf))
    for name, owners in (("r0", "ba"), ("r1", "a")):
        both = {"r0": 0, "r1": 0} | {name: 1000}
        for replica, free in both.items():
            announce(
                core, replica=replica, kv_tokens_total=1000, kv_tokens_free=free, lanes=(LaneLoad(free, 0.0),)
            )
        for one in owners:
            assert places(ask(core, f"{one} at {name}", 300, owner=one)) == [name]
    return core


@pytest.mark.parametrize(("owner", "chosen"), [("b", ["r1"]), ("c", ["r0"])])
def test_without_kv_a_sequence_goes_where_its_owner_holds_little(owner: str, chosen: list[str]) -> None:
    """The first replica has less work; but answers of others make way for an owner only up to an equal share."""
    core = with_answers_of_owners()
    for replica, seconds in (("r0", 1.0), ("r1", 2.0)):
        lanes = (LaneLoad(0, seconds),)
        announce(core, replica=replica, kv_tokens_total=1000, kv_tokens_free=0, waiting=1, lanes=lanes)
    late = ask(core, "late", 300, owner=owner, deadline_after_seconds=0.5)
    assert places(late) == chosen


@pytest.mark.parametrize(("wanted", "chosen"), [(0, ["r0"]), (400, ["r1"])])
def test_requests_that_wait_for_something_else_than_kv_do_not_make_kv_short(
    wanted: int, chosen: list[str]
) -> None:
    """The owner has more than an equal share of the first replica, which has less work and one request that waits."""
    core = with_answers_of_owners()
    for replica, seconds, waiting in (("r0", 1.0, 1), ("r1", 2.0, 0)):
        announce(
            core, replica=replica, kv_tokens_total=1000, kv_tokens_free=600, waiting=waiting,
            kv_tokens_wanted=wanted * waiting, lanes=(LaneLoad(600, seconds),),
        )  # fmt: skip
    assert places(ask(core, "late", 300, owner="b", deadline_after_seconds=0.5)) == chosen


# --- prefixes --------------------------------------------------------------------------------------------

PREFIX = marks(PrefixHasher(MARK_BLOCK_TOKENS, b"k").hashes(np.arange(64_000, dtype=np.int32)))


def test_a_popular_prefix_overloads_no_replica() -> None:
    """A hit saves 640 s. Without a cap the first replica would have collected ten minutes of work."""
    fleet = [f"r{index}" for index in range(8)]
    limits = RoutingLimits(max_waiting=100_000, lookahead_seconds=inf)
    core = serving(*fleet, limits=limits, kv_tokens_free=10**8, lanes=(LaneLoad(10**8, 0.0),))
    chosen = Counter(places(ask(core, "first", 64_100, prefix=PREFIX)))
    for replica in fleet:
        announce(core, replica=replica, lanes=(LaneLoad(10**8, 0.0),), kv_tokens_free=10**8)
    for index in range(400):
        chosen.update(places(ask(core, f"{index}", 64_100, prefix=PREFIX)))
        loads = {name: replica.seconds_ahead for name, replica in core._replicas.items()}
        # One more may be sent just below the cap: with its hit it takes 1 s, without it 641.
        mean = sum(loads.values()) / len(loads)
        warm = max(loads, key=lambda name: core._replicas[name].prefixes.known_tokens(PREFIX))
        assert loads[warm] <= LOAD_FACTOR * mean + LOAD_SECONDS + 641.1
    assert len(chosen) > 1
    assert max(chosen.values()) < 400


# --- policies of a pool ----------------------------------------------------------------------------------


def test_a_pool_follows_the_policy_of_most_replicas_and_of_the_first_by_name_among_equals() -> None:
    def pool(**policies: str) -> str:
        cards = [replace(CARD, replica=name, order=PolicyTerms(policy)) for name, policy in policies.items()]
        return pool_terms([known(card) for card in cards]).policy

    assert pool(a="edf", b="lars", c="lars") == "lars"
    assert pool(b="lars", a="edf") == "edf"


def test_the_order_changes_with_the_policy_that_is_announced() -> None:
    core = serving(waiting=1000)
    ask(core, "short", 100, deadline_after_seconds=90.0)
    ask(core, "long", 5000, deadline_after_seconds=80.0)
    assert waiting(core, 0.0) == ["long", "short"]
    announce(core, waiting=1000, order=PolicyTerms("srpt"))
    assert waiting(core, 0.0) == ["short", "long"]
    announce(core, waiting=1000, order=PolicyTerms("of a later release"))
    assert waiting(core, 0.0) == ["long", "short"], "by slack, as when none is announced"


def test_lars_here_is_the_papers_whole_prompt_below_and_uncached_tokens_above() -> None:
    """rho = (deadline - now - uncached work) / work of the whole prompt."""
    core = serving(order=PolicyTerms("lars"), running=0)
    ask(core, "warm", 64_000, prefix=PREFIX)
    core.handle(Received("r0", Emit("warm", (1,), "stop")), 1.0)
    announce(core, 1.0, order=PolicyTerms("lars"), waiting=1000)
    ask(core, "cached", 64_100, 1.0, prefix=PREFIX, deadline_after_seconds=1923.0)
    ledger = core._waiting.of(("m", "d"))
    ((_, key),) = ledger.urgent_first(11.0)
    assert key == pytest.approx((1.0 + 1923.0 - 11.0 - 1.0) / 641.0)


# --- admission -------------------------------------------------------------------------------------------


def test_the_work_of_all_that_wait_is_computed_again_however_many_models_have_some() -> None:
    core = RouterCore()
    core.handle(Tick(), 0.0)
    for model in ("m", "n"):
        core.handle(BundleKnown(model), 0.0)
        announce(core, replica=model, model=model, digest=model, waiting=1000)
        for index in range(128):
            ask(core, f"{model}{index}", model=model, digest=model)
    ledgers = [core._waiting.of((model, model)) for model in ("m", "n")]
    for ledger in ledgers:
        for sequence in ledger:
            ledger.update(sequence, 77.0)
    for _ in range(2):
        core.handle(Tick(), 0.1)
    found = [ledger._seconds[3, : len(ledger)].tolist() for ledger in ledgers]
    assert found == [[1.0] * 128] * 2


def refusal(commands: list[RouterCommand]) -> Fail:
    (failure,) = (one for one in commands if isinstance(one, Fail))
    return failure


def test_who_finds_the_ledger_full_learns_when_it_could_have_started() -> None:
    """The work before it, in the replica and here, whatever its urgency among the rest."""
    core = serving(
        limits=RoutingLimits(max_waiting=2), work_ahead=((0.5, 20.0),), pending_prefill_seconds=20.0
    )
    ask(core, "urgent", 500, deadline_after_seconds=1.5)
    ask(core, "patient", 900, deadline_after_seconds=99.0)
    failure = refusal(ask(core, "a", 100, deadline_after_seconds=2.0))
    assert (failure.kind, failure.retry_after_seconds) == ("overloaded", 25)
    assert "2 requests are waiting already; the earliest start of this one is in 25.0 s" in failure.detail
    failure = refusal(ask(core, "b", 100, deadline_after_seconds=100.0))
    assert failure.retry_after_seconds == 34
    assert waiting(core, 0.0) == ["urgent", "patient"]


def test_a_class_that_bounds_the_wait_refuses_who_would_wait_longer_and_nobody_else() -> None:
    bounded = (TERMS, replace(TERMS, name="batch", max_wait_seconds=10.0))
    core = serving(service_classes=bounded, work_ahead=((0.5, 9.0),), pending_prefill_seconds=9.0)
    assert ask(core, "a", 200, service_class="batch") == []
    failure = refusal(ask(core, "b", 200, service_class="batch"))
    assert (failure.kind, failure.retry_after_seconds) == ("overloaded", 11)
    assert "wait for 10 s at most" in failure.detail
    assert ask(core, "c", 200) == []
    assert waiting(core, 0.0) == ["a", "c"]


def test_an_owner_that_is_not_alone_leaves_room_for_others() -> None:
    core = serving(limits=RoutingLimits(max_waiting=90), waiting=1000)
    for index in range(90):
        assert ask(core, f"alone {index}", owner="flood") == []
    assert refusal(ask(core, "other", owner="light")).kind == "overloaded"
    core = serving(limits=RoutingLimits(max_waiting=90), waiting=1000)
    assert ask(core, "light", owner="light") == []
    refused = [index for index in range(90) if ask(core, f"{index}", owner="flood")]
    assert refused == list(range(80, 90))
    assert ask(core, "light again", owner="light") == []


def test_a_request_of_many_samples_waits_whole_or_is_refused() -> None:
    core = serving(limits=RoutingLimits(max_waiting=10), waiting=1000)
    assert ask(core, "a", samples=8) == []
    failures = [one.id for one in ask(core, "b", samples=4) if isinstance(one, Fail)]
    assert failures == ["b-2", "b-3"]


def test_what_a_refused_or_abandoned_sequence_would_have_cost_is_not_held_against_its_owner() -> None:
    core = serving(limits=RoutingLimits(max_waiting=1), waiting=1000)
    ask(core, "a", 5000, owner="o")
    ask(core, "b", 3000, owner="o")
    assert core._attained.tokens("o", 0.0) == 5000
    core.handle(Abandon("a"), 0.0)
    assert core._attained.tokens("o", 0.0) == 0


def test_an_abandoned_sequence_takes_nothing_of_what_its_owner_attained_with_it() -> None:
    core = serving(waiting=1000)
    core._attained.charge("o", 4000, 0.0)
    ask(core, "a", 3000, owner="o")
    core.handle(Abandon("a"), HALF_LIFE_SECONDS)
    assert core._attained.tokens("o", HALF_LIFE_SECONDS) == pytest.approx(2000)


def test_output_tokens_count_for_each_sample() -> None:
    core = serving(running=0)
    ask(core, "a", 100, samples=3, owner="o")
    for index in range(3):
        core.handle(Received("r0", Emit(f"a-{index}", (1, 2))), 0.0)
    assert core._attained.tokens("o", 0.0) == 3 * 100 + 3 * 2


@dataclass
class Server:
    """A replica that prefills by due time, those last that can no longer be on time, and announces what it has."""

    name: str
    requests: list[list[Any]] = field(default_factory=list)  # [due, seconds left, name]
    done: dict[str, float] = field(default_factory=dict)

    def run(self, until: float, seconds: float) -> list[str]:
        """Compute for `seconds` seconds that end at `until`; return what was finished."""
        ended = []
        while self.requests and seconds > 1e-9:
            first = self.in_order(until)[0]
            part = min(first[1], seconds)
            first[1] -= part
            seconds -= part
            if first[1] <= 1e-9:
                self.requests.remove(first)
                self.done[first[2]] = until - seconds
                ended.append(first[2])
        return ended

    def in_order(self, now: float) -> list[list[Any]]:
        return sorted(self.requests, key=lambda one: (now + one[1] > one[0], *one))

    def card(self, now: float, **fields: Any) -> Announce:
        ahead, total = [], 0.0
        for due, left, _ in self.in_order(now):
            total += left
            ahead.append(((due if now + left <= due else due + 1000.0) - now, total))
        load = {
            "work_ahead": tuple(ahead),
            "pending_prefill_seconds": total,
            "lanes": (LaneLoad(50_000, total),),
        }
        return replace(CARD, replica=self.name, running=len(self.requests), **{**load, **fields})


def test_a_flood_of_one_key_leaves_anothers_requests_on_time() -> None:
    """A replica serves two requests a second; one owner sends 20 a second, the other one every two seconds."""
    terms: dict[str, Any] = {"order": PolicyTerms("guarded")}
    core, server = serving(**terms), Server("r0")
    asked: dict[str, float] = {}
    for tick in range(2400):
        now = tick * 0.05
        commands: list[RouterCommand] = []
        for name in server.run(now, 0.05):
            commands += core.handle(Received("r0", Emit(name, (1,), "stop")), now)
        commands += core.handle(Received("r0", server.card(now, **terms)), now)
        for name in [f"flood {tick}"] + ([f"light {tick}"] if tick % 40 == 0 else []):
            asked[name] = now
            commands += ask(core, name, 50, now, owner=name.split()[0])
        server.requests += [[asked[name] + 2.0, 0.5, name] for name in sent(commands)]
    seconds = {name: at - asked[name] for name, at in server.done.items()}
    light = [seconds.get(name, inf) for name, at in asked.items() if name.startswith("light") and at < 110.0]
    assert len(light) == 55
    assert sum(one > 2.0 for one in light) <= 1
    assert sum(name.startswith("flood") for name in seconds) > 170, "what is left is the flood's"


def test_an_owner_that_attained_little_does_not_wait_for_the_work_of_others_in_a_replica() -> None:
    """Its replica is told up to when not all can be on time, because it sees nothing of what waits here."""
    core = serving(lanes=(LaneLoad(50_000, 9.0),), pending_prefill_seconds=9.0, work_ahead=((-1.0, 9.0),))
    core.handle(ServedElsewhere("a", 100_000), 0.0)
    for index in range(12):
        assert sent(ask(core, f"large {index}", owner="a")) == [], "the replica has nine seconds of work"
    commands = ask(core, "small", now=0.5, owner="b")
    (submit,) = [one.message for one in commands if isinstance(one, Send) and isinstance(one.message, Submit)]
    assert (submit.id, submit.owner) == ("small", "b")
    assert submit.contested_seconds >= 2.0
    assert sent(ask(core, "another", now=0.6, owner="b")) == [], (
        "now it has a second of work that goes before"
    )


def test_an_owner_that_attained_little_does_not_wait_for_kv_that_others_wait_for_in_a_replica() -> None:
    """All could be on time if there were KV, so owners take no turns. The replica leaves some to the one that holds less."""
    core = serving(lanes=(LaneLoad(150, 0.0),), kv_tokens_free=150, waiting=2)
    for owner in "ac":
        core.handle(ServedElsewhere(owner, 100_000), 0.0)
    assert sent(ask(core, "large", owner="a")) == ["large"]
    for owner in "ac":
        assert sent(ask(core, owner, 10, output=40, owner=owner)) == [], "no KV, and as much attained"
    (submit,) = [
        one.message
        for one in ask(core, "small", 10, output=40, owner="b")
        if isinstance(one, Send) and isinstance(one.message, Submit)
    ]
    assert (submit.id, submit.contested_seconds) == ("small", 0.0)


def test_an_owner_keeps_its_earliest_turn_when_a_replica_sends_a_sequence_back() -> None:
    """The more urgent one takes it, although it came later. Else each refusal would cost the owner a turn."""
    core = serving(waiting=1000)
    for name, seconds in (("first", 50.0), ("second", 40.0), ("third", 1.0)):
        ask(core, name, 10, owner="a", deadline_after_seconds=seconds)
    ledger = core._waiting.of(("m", "d"))
    turns = sorted(ledger.turn(one) for one in ledger)
    for attempt in range(3):
        (name,) = announce(core, float(attempt), waiting=999)
        core.handle(Received("r0", Refused(name, "capacity")), float(attempt))
        assert sorted(ledger.turn(one) for one in ledger) == turns


def test_tokens_that_an_owner_was_served_at_another_router_count_here() -> None:
    core = serving(lanes=(LaneLoad(50_000, 9.0),), pending_prefill_seconds=9.0, work_ahead=((-1.0, 9.0),))
    core.handle(ServedElsewhere("b", 100_000), 0.0)
    for index in range(12):
        ask(core, f"a {index}", owner="a")
    ask(core, "b", now=0.5, owner="b")
    assert [one.new.id for one, _ in core._waiting.of(("m", "d")).urgent_first(0.5)][-1] == "b"
