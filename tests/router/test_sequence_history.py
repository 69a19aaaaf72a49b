"""SequenceHistory: what events and commands of a real RouterCore say of where sequences are and what happened to them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medha.observing.metric_catalogue import LONG_PROMPT_TOKENS
from medha.observing.timeline import Began, Timeline
from medha.routing.router_core import RouterCore
from medha.routing.router_events import (
    Abandon,
    Arrive,
    BundleKnown,
    Deliver,
    Fail,
    LinkLost,
    NewSequence,
    Received,
    RouterEvent,
    Send,
)
from medha.routing.routing_limits import RoutingLimits
from medha.wire.messages import (
    Announce,
    ChunkProgress,
    Emit,
    Failed,
    FailureReason,
    LaneLoad,
    PolicyTerms,
    ProgressReport,
    RefusalReason,
    Refused,
    ServiceClassTerms,
    Submit,
    Tick,
)
from medha_router.sequence_history import (
    Fact,
    ForwardedFirstToken,
    Moved,
    Resubmitted,
    Resumed,
    SequenceHistory,
)

CARD = Announce(
    replica="r0",
    model="m",
    digest="d",
    epoch=1,
    ready=True,
    draining=False,
    max_model_len=100_000,
    vocab_size=100,
    kv_tokens_total=1_000_000,
    kv_tokens_free=1_000_000,
    running=0,
    waiting=0,
    pending_prefill_seconds=0.0,
    longest_request_tokens=100_000,
    waiting_limit=50,
    service_classes=(ServiceClassTerms("default", 2.0, 3.0, 0.05, 0.01, 16),),
    prefill_points=((100, 1.0), (1000, 10.0)),
)


def asked(*names: str, tokens: int = 100, owner: str = "", service_class: str = "default") -> Arrive:
    sequences = tuple(
        NewSequence(name, f"prompt of {names[0]}", tokens, seed=1, sample_index=index)
        for index, name in enumerate(names)
    )
    return Arrive("m", "d", sequences, service_class, owner=owner)


@dataclass
class Followed:
    """A RouterCore whose history is folded."""

    core: RouterCore = field(default_factory=RouterCore)
    timeline: Timeline = field(default_factory=lambda: Timeline(0.0))
    history: SequenceHistory = field(init=False)
    at: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Replica and wire id of each sequence that has been sent to one."""
    open: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.history = SequenceHistory(self.timeline)

    def __call__(self, event: RouterEvent, now: float) -> list[Fact]:
        commands = self.core.handle(event, now)
        for command in commands:
            match command:
                case Send(replica=replica, message=Submit(id=wire_id)):
                    self.at[wire_id if wire_id in self.open else wire_id.rpartition("~")[0]] = (
                        replica,
                        wire_id,
                    )
                case Fail(id=name):
                    self.open.discard(name)
                case Deliver(id=name, finish_reason=reason) if reason is not None:
                    self.open.discard(name)
        return self.history.fold(event, commands, now)

    def announce(self, now: float, *replicas: str, **fields: object) -> list[Fact]:
        self(BundleKnown("d"), now)
        cards = [replace(CARD, replica=name, **fields) for name in replicas]  # type: ignore[arg-type]
        return [fact for card in cards for fact in self(Received(card.replica, card), now)]

    def ask(self, now: float, *names: str, **fields: object) -> None:
        self.open |= set(names)
        for name in names:
            self.timeline.take(Began(name, 100, "default"), now)
        self(asked(*names, **fields), now)  # type: ignore[arg-type]

    def token(self, name: str, now: float, *, end: bool = False, cached: int = 0) -> list[Fact]:
        replica, wire_id = self.at[name]
        return self(Received(replica, Emit(wire_id, (1,), "stop" if end else None, (), cached)), now)


def test_what_waits_is_known_by_model_class_and_owner_until_it_is_sent() -> None:
    router = Followed()
    router.announce(0.0, "r0", waiting=50)  # its queue is full
    router.ask(1.0, "a", "b", owner="key:ours", service_class="default")
    router.ask(1.0, "c", owner="key:theirs")
    assert router.history.waiting() == {("m", "default", "key:ours"): 2, ("m", "default", "key:theirs"): 1}
    router(Abandon("a"), 1.5)
    router.announce(2.0, "r0")
    assert router.history.waiting() == {}


def kinds(router: Followed, name: str) -> list[str]:
    return [segment.kind for bar in router.timeline if bar.began.id == name for segment in bar.segments]


def test_the_bar_of_a_sequence_has_its_replicas_reports_and_no_others() -> None:
    router = Followed()
    router.announce(0.0, "r0", "r1")
    router.ask(1.0, "a")
    replica, wire_id = router.at["a"]
    other = "r1" if replica == "r0" else "r0"
    first = ProgressReport((ChunkProgress(wire_id, 60, 0, is_first=True),), 0.5)
    router.history.progress(other, first, 1.9)
    assert kinds(router, "a") == ["sent"]
    router.history.progress(replica, first, 2.0)
    router.history.progress(replica, ProgressReport(stepped_aside=(wire_id, "another")), 2.5)
    router.token("a", 3.0)
    router(Abandon("a", "stop"), 3.1)
    assert kinds(router, "a") == ["sent", "chunk", "aside", "decode"]
    assert [(bar.outcome, bar.ended_at) for bar in router.timeline] == [("stop", 3.1)]


def test_the_bar_of_a_sequence_shows_that_it_moved() -> None:
    router = Followed()
    router.announce(0.0, "r0")
    router.ask(1.0, "a")
    router.token("a", 2.0)
    router(LinkLost("r0"), 3.0)
    router.announce(4.0, "r1")
    router.history.progress("r1", ProgressReport((ChunkProgress("a~1", 100, 0, is_first=True),), 0.2), 5.0)
    router.token("a", 5.0, end=True)
    assert kinds(router, "a") == ["unreported", "decode", "moved", "sent", "chunk", "decode"]
    assert [(bar.replica, bar.outcome) for bar in router.timeline] == [("r1", "stop")]


@pytest.mark.parametrize("reason", ["refused", "rank_lost", "epoch", "replica_lost", "silent", "moved"])
def test_a_stream_that_goes_on_elsewhere_has_paused_from_its_last_token_to_its_next(reason: str) -> None:
    router = Followed()
    router(Tick(), 0.0)
    router.announce(0.0, "r0")
    router.ask(1.0, "a")
    if reason != "refused":  # which comes before the first token
        router.token("a", 2.0)
        assert router.token("a", 3.0) == []
    replica, wire_id = router.at["a"]
    router.announce(3.0, "r1", hands_kv_over=True)
    draining = replace(CARD, hands_kv_over=True, draining=True, drain_seconds=1.0)
    events: dict[str, tuple[RouterEvent, ...]] = {
        "refused": (Received(replica, Refused(wire_id, "capacity")),),
        "rank_lost": (Received(replica, Failed(wire_id, "rank_lost")),),
        "epoch": (Received(replica, replace(CARD, epoch=2, ready=False)),),
        "replica_lost": (LinkLost(replica),),
        "moved": (Received(replica, draining),),
        "silent": (*(Received("r1", replace(CARD, replica="r1")), Tick()) * 30,),
    }
    facts: list[Fact] = []
    now = 3.5
    for event in events[reason]:
        now += 0.1
        facts += router(event, now)
    expected = {"epoch": "rank_lost", "silent": "replica_lost"}.get(reason, reason)
    assert facts == [Resubmitted("m", expected)]  # type: ignore[arg-type]
    assert router.at["a"][0] == "r1"
    resumed = [fact for fact in router.token("a", now + 2) if isinstance(fact, Resumed)]
    if reason == "refused":
        assert resumed == []
        return
    assert resumed == [Resumed("m", expected, is_elsewhere=True, pause_seconds=pytest.approx(now - 1.0))]  # type: ignore[arg-type]
    assert router.token("a", now + 3) == []  # it is counted once


def test_a_sequence_that_moves_to_a_decode_replica_is_counted_with_what_was_read() -> None:
    router = Followed()
    fields = {"hands_kv_over": True, "read_seconds": 0.01}
    router.announce(0.0, "d", role="decode", **fields)
    router.announce(0.0, "p", role="prefill", **fields)
    router.open.add("a")
    request = asked("a", tokens=640)
    marked = tuple(replace(one, prefix=((640, "all of it"),)) for one in request.sequences)
    router(replace(request, sequences=marked), 1.0)
    assert router.at["a"][0] == "p"
    facts = router.token("a", 2.0)
    assert [type(fact) for fact in facts] == [ForwardedFirstToken, Resubmitted]
    assert facts[1] == Resubmitted("m", "prefilled")
    assert router.at["a"] == ("d", "a~1")
    assert router.token("a", 2.5, cached=624) == [
        Moved("m", 641, 624),
        Resumed("m", "prefilled", is_elsewhere=True, pause_seconds=0.5),
    ]
    assert router.token("a", 3.0, end=True) == []


def test_a_stream_that_goes_on_at_the_same_replica_is_no_failover_to_another() -> None:
    router = Followed()
    router.announce(0.0, "r0")
    router.ask(1.0, "a")
    router.token("a", 2.0)
    router.announce(4.0, "r0", epoch=2)
    resumed = [fact for fact in router.token("a", 6.0) if isinstance(fact, Resumed)]
    assert resumed == [Resumed("m", "rank_lost", is_elsewhere=False, pause_seconds=4.0)]


def test_of_several_losses_in_a_row_the_first_is_the_reason_of_the_pause() -> None:
    router = Followed()
    router.announce(0.0, "r0")
    router.ask(1.0, "a")
    router.token("a", 2.0)
    router.announce(3.0, "r1")
    assert router(LinkLost("r0"), 4.0) == [Resubmitted("m", "replica_lost")]
    router.announce(4.0, "r2")
    refused = Received("r1", Refused(router.at["a"][1], "draining"))
    assert router(refused, 5.0) == [Resubmitted("m", "refused")]
    resumed = [fact for fact in router.token("a", 7.0) if isinstance(fact, Resumed)]
    assert resumed == [Resumed("m", "replica_lost", is_elsewhere=True, pause_seconds=5.0)]


def test_an_id_of_a_client_that_looks_like_a_second_attempt_is_none() -> None:
    router = Followed()
    router.announce(0.0, "r0")
    router.ask(1.0, "a~1")
    router.ask(1.0, "a")
    assert [type(fact) for fact in router.token("a~1", 2.0)] == [ForwardedFirstToken]
    assert router(LinkLost("r0"), 3.0) == []
    facts = router.announce(4.0, "r1")
    assert facts == [Resubmitted("m", "replica_lost")] * 2


@pytest.mark.parametrize(
    ("long_from", "long_token_at", "beside"),
    [(0.5, None, True), (0.5, 2.0, True), (0.5, 0.8, False), (1.5, None, True)],
    ids=["until after it", "until it waits", "until before it", "from while it waits"],
)
def test_a_short_prompt_is_beside_a_long_prefill_that_overlaps_its_wait(
    long_from: float, long_token_at: float | None, beside: bool
) -> None:
    router = Followed()
    router.announce(0.0, "r0")
    happens = [
        (long_from, lambda: router.ask(long_from, "long", tokens=LONG_PROMPT_TOKENS)),
        (1.0, lambda: router.ask(1.0, "short")),
        (2.5, lambda: router.token("short", 2.5)),
    ]
    if long_token_at is not None:
        happens.append((long_token_at, lambda: router.token("long", long_token_at)))
    for _, do in sorted(happens, key=lambda one: one[0]):
        do()
    assert router.history.is_beside_long("short") is beside


def test_a_long_prefill_on_another_replica_or_of_its_own_is_none_beside_it() -> None:
    router = Followed()
    router.announce(0.0, "r0")
    router.ask(1.0, "long", tokens=LONG_PROMPT_TOKENS)
    router.announce(1.0, "r0", pending_prefill_seconds=100.0)
    router.announce(1.0, "r1")
    router.ask(2.0, "short")
    assert router.at["short"][0] == "r1"
    router.token("short", 3.0)
    router.token("long", 4.0)
    assert not router.history.is_beside_long("short")
    assert not router.history.is_beside_long("long")


@pytest.mark.parametrize("end", ["abandon", "fail", "lost"])
def test_a_long_prompt_that_ends_in_its_prefill_is_beside_nothing_that_comes_later(end: str) -> None:
    router = Followed()
    router.announce(0.0, "r0")
    router.ask(1.0, "long", tokens=LONG_PROMPT_TOKENS)
    wire_id = router.at["long"][1]
    match end:
        case "abandon":
            router(Abandon("long"), 2.0)
        case "fail":
            router(Received("r0", Failed(wire_id, "internal")), 2.0)
        case "lost":
            router(LinkLost("r0"), 2.0)
            router(Abandon("long"), 2.0)
            router.announce(2.0, "r0")
    router.ask(3.0, "short")
    router.token("short", 4.0)
    assert not router.history.is_beside_long("short")


def test_the_first_token_is_expected_after_all_prefills_ahead_and_its_own_uncached_part() -> None:
    router = Followed()
    router.announce(0.0, "r0", pending_prefill_seconds=4.0)
    router.ask(1.0, "a", tokens=100)  # 1 s by the points
    router.ask(1.0, "b", tokens=1000)
    (first,) = router.token("a", 6.5)
    assert isinstance(first, ForwardedFirstToken)
    assert first.predicted_seconds == pytest.approx(5.0)
    assert first.observed_seconds == pytest.approx(5.5)
    (second,) = router.token("b", 12.0, cached=100)
    assert isinstance(second, ForwardedFirstToken)
    assert second.predicted_seconds == pytest.approx(4.0 + 1.0 + 10.0 - 1.0)
    router.announce(13.0, "r0", pending_prefill_seconds=0.0)  # what was sent before is part of it now
    router.ask(14.0, "c", tokens=100)
    (third,) = router.token("c", 15.0)
    assert isinstance(third, ForwardedFirstToken)
    assert third.predicted_seconds == pytest.approx(1.0)


def test_prefills_that_it_overtakes_do_not_count_as_ahead_of_it() -> None:
    router = Followed()
    fields = {
        "pending_prefill_seconds": 90.0,
        "lanes": (LaneLoad(500_000, 45.0),) * 2,
        "work_ahead": ((3.0, 1.6), (70.0, 90.0)),
        "order": PolicyTerms("edf"),
        "running": 1,
    }
    router.announce(1.0, "r0", **fields)
    router.ask(1.0, "chat", tokens=20)  # 0.2 s by the points; due after 2 s at the least
    (first,) = router.token("chat", 1.5)
    assert isinstance(first, ForwardedFirstToken)
    assert first.predicted_seconds == pytest.approx(0.2), "all that is announced is due later"
    router.ask(2.0, "later", tokens=100)  # due at 5.0
    (second,) = router.token("later", 6.0)
    assert isinstance(second, ForwardedFirstToken)
    assert second.predicted_seconds == pytest.approx((1.6 + 0.2) / 2 + 1.0), "per lane"


def test_only_one_of_the_samples_of_a_prompt_is_compared_with_its_prediction() -> None:
    router = Followed()
    router.announce(0.0, "r0")
    router.ask(1.0, "a", "b")
    assert len(router.token("a", 2.0)) == 1
    assert router.token("b", 2.0) == []


def test_what_is_forgotten_leaves_nothing() -> None:
    router = Followed()
    router.announce(0.0, "r0")
    router.ask(1.0, "a", "b")
    router.token("a", 2.0, end=True)
    router(Abandon("b"), 2.0)
    router.history.forget(("a", "b"), 3.0)
    assert router.history._entries == {}
    assert router.history._replicas["r0"].entries == {}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_under_any_order_of_events_as_many_wait_as_the_core_says(data: st.DataObject) -> None:
    limits = RoutingLimits(max_waiting=4, silence_seconds=5.0, late_seconds=3.0, unserved_seconds=20.0)
    router = Followed(RouterCore(limits))
    router(BundleKnown("d"), 0.0)
    epochs = {"r0": 1, "r1": 1}
    now = 0.0
    for step in range(data.draw(st.integers(1, 40))):
        now += data.draw(st.sampled_from([0.0, 0.3, 3.0]))
        name = data.draw(st.sampled_from(sorted(epochs)))
        sent = sorted(one for one in router.open if one in router.at)
        match data.draw(
            st.sampled_from(
                ["announce", "arrive", "token", "refuse", "fail", "restart", "abandon", "lost", "tick"]
            )
        ):
            case "announce":
                ready = data.draw(st.booleans())
                router.announce(now, name, epoch=epochs[name], ready=ready, waiting_limit=2)
            case "arrive":
                router.ask(now, f"s{step}")
            case "token" if sent:
                router.token(data.draw(st.sampled_from(sent)), now, end=data.draw(st.booleans()))
            case "refuse" if sent:
                replica, wire_id = router.at[data.draw(st.sampled_from(sent))]
                why: RefusalReason = data.draw(st.sampled_from(["capacity", "draining", "invalid"]))
                router(Received(replica, Refused(wire_id, why)), now)
            case "fail" if sent:
                replica, wire_id = router.at[data.draw(st.sampled_from(sent))]
                what: FailureReason = data.draw(st.sampled_from(["rank_lost", "internal"]))
                router(Received(replica, Failed(wire_id, what)), now)
            case "restart":
                epochs[name] += 1
                router.announce(now, name, epoch=epochs[name])
            case "abandon" if router.open:
                gone = data.draw(st.sampled_from(sorted(router.open)))
                router.open.discard(gone)
                router(Abandon(gone), now)
            case "lost":
                router(LinkLost(name), now)
            case _:
                router(Tick(), now)
        assert router.history.waiting().total() == router.core.waiting
        in_flight = sum(len(one.entries) for one in router.history._replicas.values())
        assert in_flight == router.core.open - router.core.waiting
