"""Moves from a replica that drains: which sequences move and when, what is sent, and what the replica then waits for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from medha.kv.prefix_cache import PrefixHasher
from medha.routing.drain_moves import is_better_moved
from medha.routing.prefix_memory import MARK_BLOCK_TOKENS, marks
from medha.routing.router_core import MOST_LOOKS, RouterCore
from medha.routing.router_events import (
    Abandon,
    Arrive,
    BundleKnown,
    Deliver,
    LinkLost,
    NewSequence,
    Received,
    RouterCommand,
    Send,
    SendPrompt,
)
from medha.scheduler.request import NOWHERE
from medha.wire.messages import (
    Announce,
    Cancel,
    Emit,
    Heartbeat,
    Refused,
    Sampling,
    ServiceClassTerms,
    Submit,
    Tick,
)

CARD = Announce(
    replica="old",
    model="m",
    digest="d",
    epoch=1,
    ready=True,
    draining=False,
    max_model_len=10_000,
    vocab_size=100,
    kv_tokens_total=10_000,
    kv_tokens_free=10_000,
    running=0,
    waiting=0,
    pending_prefill_seconds=0.0,
    longest_request_tokens=9000,
    waiting_limit=20,
    service_classes=(ServiceClassTerms("default", 2.0, 3.0, 0.05, 0.01, 4096),),
    prefill_points=((100, 1.0), (10_000, 100.0)),  # 10 ms a token
    hands_kv_over=True,
    read_seconds=0.1,
    read_seconds_per_token=0.0001,
)
DRAINING = replace(CARD, draining=True, drain_seconds=30.0)
NEW = replace(CARD, replica="new")


class Router:
    """A router's core with the replica `old`, which has the sequence `a` of 1000 tokens."""

    def __init__(self, max_tokens: int | None = 1000, card: Announce = CARD) -> None:
        self.core = RouterCore()
        self.now = 0.0
        self.handle(Tick())
        self.handle(BundleKnown("d"))
        self.announce(card)
        sampling = Sampling(max_tokens=max_tokens)
        sent = self.handle(Arrive("m", "d", (NewSequence("a", "p", 1000, 7, sampling=sampling),)))
        assert [replica for replica, _ in submits(sent)] == ["old"]

    def handle(self, event: object) -> list[RouterCommand]:
        return self.core.handle(event, self.now)  # type: ignore[arg-type]

    def announce(self, card: Announce) -> list[RouterCommand]:
        return self.handle(Received(card.replica, card))

    def emit(self, replica: str, name: str, *tokens: int, reason: str | None = None) -> list[RouterCommand]:
        return self.handle(Received(replica, Emit(name, tokens, reason)))  # type: ignore[arg-type]

    def stream(self, tokens: int, seconds_per_token: float = 0.1) -> None:
        """Let `old` sample so many tokens, one after the other."""
        for token in range(tokens):
            self.emit("old", "a", token)
            self.now += seconds_per_token
            self.announce(CARD)
            self.announce(NEW)

    def moved(self, tokens: int = 20, card: Announce = DRAINING) -> list[RouterCommand]:
        """Sample so many tokens at `old`, which then drains; return the commands."""
        self.stream(tokens)
        return self.announce(card)


def submits(commands: list[RouterCommand]) -> list[tuple[str, Submit]]:
    return [
        (one.replica, one.message)
        for one in commands
        if isinstance(one, Send) and isinstance(one.message, Submit)
    ]


def cancels(commands: list[RouterCommand]) -> list[tuple[str, Cancel]]:
    return [
        (one.replica, one.message)
        for one in commands
        if isinstance(one, Send) and isinstance(one.message, Cancel)
    ]


# --- the decision -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stay", "limit", "read", "compute", "expected"),
    [
        (100.0, 30.0, 1.0, 5.0, True),
        (10.0, 30.0, 1.0, 5.0, False),
        (29.5, 30.0, 1.0, 5.0, True),
        (100.0, 30.0, 5.0, 5.0, False),
        (100.0, 0.5, 1.0, 5.0, False),
        (100.0, 0.0, 0.0, 5.0, False),
    ],
    ids=[
        "it misses the limit",
        "it ends in time",
        "too late to read if it did not end",
        "computing is as fast",
        "no time is left to read",
        "no time is left at all",
    ],
)
def test_a_sequence_moves_if_it_misses_the_limit_and_reading_pays(
    stay: float, limit: float, read: float, compute: float, expected: bool
) -> None:
    assert is_better_moved(stay, limit, read, compute) is expected


def test_a_sequence_that_misses_the_limit_moves_and_the_other_replica_is_told_who_has_its_kv() -> None:
    router = Router()
    commands = router.moved(20)
    assert commands[0] == Send("old", Cancel("a", moves=True))
    ((replica, submit),) = submits(commands)
    assert (replica, submit.peer, submit.peer_tokens) == ("new", "old", 1019)
    assert (submit.id, submit.tokens, submit.prompt_length, submit.seed) == ("a~1", 1020, 1000, 7)
    (prompt,) = [one for one in commands if isinstance(one, SendPrompt)]
    assert prompt.emitted == tuple(range(20))


def test_a_sequence_that_ends_in_time_stays_until_it_is_late() -> None:
    """It has 40 tokens left at 0.1 s each; then it turns out to be slower."""
    router = Router(max_tokens=60)
    assert cancels(router.moved(20)) == []
    router.now += 24.0
    router.emit("old", "a", 20)
    assert cancels(router.handle(Tick())) == [("old", Cancel("a", moves=True))]


def test_announcements_of_a_replica_that_drains_lead_to_no_decisions_between_ticks() -> None:
    """It may announce twenty times a second, and each decision looks at all of its sequences."""
    router = Router(max_tokens=60)
    router.moved(20)
    router.now += 24.0
    router.emit("old", "a", 20)
    assert router.announce(replace(DRAINING, drain_seconds=6.0)) == []
    assert cancels(router.handle(Tick())) == [("old", Cancel("a", moves=True))]


def test_a_sequence_whose_output_is_not_known_is_expected_to_double_it() -> None:
    card = replace(DRAINING, drain_seconds=5.0)
    for tokens, moves in ((20, False), (80, True)):
        terms = replace(CARD.service_classes[0], expected_output_tokens=10)
        router = Router(max_tokens=None)
        commands = router.moved(tokens, replace(card, service_classes=(terms,)))
        assert bool(cancels(commands)) is moves


@pytest.mark.parametrize(
    "card",
    [
        replace(DRAINING, drain_seconds=None),
        replace(DRAINING, hands_kv_over=False),
        replace(DRAINING, drain_seconds=0.0),
        CARD,
    ],
    ids=["an earlier release", "it gives no KV", "no time", "it does not drain"],
)
def test_nothing_moves_from_a_replica_whose_kv_cannot_be_read(card: Announce) -> None:
    assert cancels(Router().moved(20, card)) == []


@pytest.mark.parametrize(
    "card",
    [
        replace(NEW, hands_kv_over=False),
        replace(NEW, kv_identity="another"),
        replace(NEW, kv_tokens_free=1000),
        replace(NEW, waiting=20),
        replace(NEW, ready=False),
        replace(NEW, draining=True),
        replace(NEW, read_seconds_per_token=0.1),
        replace(NEW, lanes=(), pending_prefill_seconds=100.0),
    ],
    ids=[
        "takes no KV",
        "another model or version",
        "no KV",
        "no place",
        "not ready",
        "drains, too",
        "reads slowly",
        "busy for long",
    ],
)
def test_a_sequence_stays_if_no_other_replica_can_take_it_over(card: Announce) -> None:
    router = Router()
    router.stream(20)
    router.announce(card)
    assert cancels(router.announce(DRAINING)) == []
    router.now += 1.0
    router.announce(NEW)
    assert cancels(router.handle(Tick())) == [("old", Cancel("a", moves=True))]


def test_a_sequence_whose_prompt_is_to_be_scored_stays_until_its_first_token() -> None:
    core = RouterCore()
    core.handle(BundleKnown("d"), 0.0)
    core.handle(Received("old", CARD), 0.0)
    scored = NewSequence("a", "p", 1000, 7, sampling=Sampling(max_tokens=1000, prompt_logprobs=1))
    core.handle(Arrive("m", "d", (scored,)), 0.0)
    core.handle(Received("new", NEW), 0.0)
    assert cancels(core.handle(Received("old", DRAINING), 0.0)) == []
    core.handle(Received("old", Emit("a", (1,))), 1.0)
    assert cancels(core.handle(Tick(), 1.0)) == [("old", Cancel("a", moves=True))]


def test_a_sequence_without_a_token_moves_with_what_its_prefill_has_computed() -> None:
    router = Router()
    router.announce(NEW)
    ((_, submit),) = submits(router.announce(DRAINING))
    assert (submit.peer, submit.peer_tokens, submit.tokens) == ("old", 1000, 1000)


# --- what follows -----------------------------------------------------------------------------------------


def test_the_first_token_elsewhere_frees_the_old_replica_once() -> None:
    router = Router()
    router.moved(20)
    commands = router.emit("new", "a~1", 50)
    assert commands == [Deliver("a", (50,)), Send("old", Cancel("a"))]
    assert router.emit("new", "a~1", 51) == [Deliver("a", (51,))]
    assert len(router.core._sources) == 0


def test_tokens_that_cross_the_move_are_not_delivered_twice_and_do_not_free_the_kv() -> None:
    router = Router()
    router.moved(20)
    assert router.emit("old", "a", 20) == []
    assert router.emit("old", "a", 21, reason="length") == []
    assert router.emit("new", "a~1", 20)[0] == Deliver("a", (20,))
    assert router.emit("old", "a", 22) == [Send("old", Cancel("a"))], "it has gone on too long"


@pytest.mark.parametrize("end", ["abandoned", "ended elsewhere"])
def test_a_sequence_that_ends_frees_the_old_replica(end: str) -> None:
    router = Router()
    router.moved(20)
    commands = router.handle(Abandon("a")) if end == "abandoned" else router.emit("new", "a~1", reason="stop")
    assert ("old", Cancel("a")) in cancels(commands)
    assert len(router.core._sources) == 0
    assert router.core.open == 0


def test_a_new_replica_that_is_lost_is_followed_by_another_one_that_reads_the_same_kv() -> None:
    router = Router()
    router.moved(20)
    router.announce(replace(NEW, replica="newer"))
    ((replica, submit),) = submits(router.handle(LinkLost("new")))
    assert (replica, submit.id, submit.peer, submit.peer_tokens) == ("newer", "a~2", "old", 1019)


def test_an_old_replica_that_is_lost_is_not_named_any_more() -> None:
    for lost in (LinkLost("old"), Received("old", replace(DRAINING, ready=False))):
        router = Router()
        router.moved(20)
        router.handle(lost)
        assert len(router.core._sources) == 0
        router.announce(replace(NEW, replica="newer"))
        ((replica, submit),) = submits(router.handle(LinkLost("new")))
        assert (replica, submit.peer) == ("newer", "")
        assert cancels(router.emit("newer", "a~2", 1)) == []


def test_a_sequence_that_is_refused_goes_elsewhere_and_reads_the_same_kv() -> None:
    router = Router()
    router.moved(20)
    router.announce(replace(NEW, replica="newer"))
    ((replica, submit),) = submits(router.handle(Received("new", Refused("a~1", "capacity"))))
    assert (replica, submit.peer) == ("newer", "old")


def test_a_sequence_that_moves_twice_frees_the_first_replica() -> None:
    router = Router()
    router.moved(20)
    assert ("old", Cancel("a")) in cancels(router.emit("new", "a~1", 20))
    router.announce(replace(NEW, replica="newer"))
    commands = router.announce(replace(DRAINING, replica="new"))
    assert cancels(commands) == [("new", Cancel("a~1", moves=True))]
    ((replica, submit),) = submits(commands)
    assert (replica, submit.peer, submit.peer_tokens) == ("newer", "new", 1020)


def test_a_sequence_that_moves_twice_without_a_token_between_reads_from_the_first_replica() -> None:
    router = Router()
    router.moved(20)
    router.announce(replace(NEW, replica="newer"))
    commands = router.announce(replace(DRAINING, replica="new"))
    assert cancels(commands) == [("new", Cancel("a~1", moves=True)), ("new", Cancel("a~1"))]
    ((replica, submit),) = submits(commands)
    assert (replica, submit.peer, submit.peer_tokens) == ("newer", "old", 1019)
    assert cancels(router.emit("newer", "a~2", 20)) == [("old", Cancel("a"))]
    assert len(router.core._sources) == 0


def test_a_replica_that_was_silent_keeps_no_kv_for_those_that_have_left_it() -> None:
    router = Router()
    router.moved(20)
    cancelled: list[tuple[str, Cancel]] = []
    for _ in range(10):
        router.now += 0.5
        router.handle(Received("new", Heartbeat()))
        cancelled += cancels(router.handle(Tick()))
    assert cancelled == [("old", Cancel("a"))]


def test_moves_count_neither_as_losses_nor_as_lost_attempts() -> None:
    router = Router()
    router.moved(20)
    (sequence,) = router.core._sequences.values()
    assert (sequence.losses, sequence.lost_attempts, sequence.row) == (0, 0, NOWHERE)


def test_as_many_move_as_the_other_replica_has_kv_for() -> None:
    core = RouterCore()
    core.handle(BundleKnown("d"), 0.0)
    core.handle(Received("old", CARD), 0.0)
    for name in "abcd":
        sampling = Sampling(max_tokens=1000)
        core.handle(Arrive("m", "d", (NewSequence(name, name, 1000, 7, sampling=sampling),)), 0.0)
        core.handle(Received("old", Emit(name, (1,))), 0.0)
    core.handle(Received("new", replace(NEW, kv_tokens_free=4500)), 0.0)
    commands = core.handle(Received("old", DRAINING), 0.0)
    assert [submit.id for _, submit in submits(commands)] == ["a~1", "b~1"]
    assert len(cancels(commands)) == 2
    assert len(core._replicas["old"].open) == 2


def test_a_sequence_with_a_token_is_due_again_when_it_moves_and_one_without_keeps_its_deadline() -> None:
    """It arrived at 0 s with 1000 tokens, so its first one was due at 30 s. It moves at 100 s, and its KV takes 0.2 s to read."""
    router = Router(max_tokens=2000)
    ((_, submit),) = submits(router.moved(1000))
    assert (submit.age_seconds, submit.deadline_after_seconds) == (pytest.approx(100.0), pytest.approx(102.0))
    router = Router()
    router.announce(NEW)
    ((_, submit),) = submits(router.announce(DRAINING))
    assert submit.deadline_after_seconds is None, "by its class, from its arrival"


def test_a_router_looks_at_so_many_sequences_at_a_time_and_at_all_of_them_in_turn() -> None:
    core = RouterCore()
    core.handle(BundleKnown("d"), 0.0)
    roomy = replace(CARD, kv_tokens_total=10**8, kv_tokens_free=10**8, waiting_limit=10**4)
    core.handle(Received("old", roomy), 0.0)
    count = MOST_LOOKS + 10
    for number in range(count):
        new = NewSequence(f"{number}", f"{number}", 1000, 7, sampling=Sampling(max_tokens=1000))
        core.handle(Arrive("m", "d", (new,)), 0.0)
        core.handle(Received("old", Emit(f"{number}", (1,))), 0.0)
    fast = replace(NEW, read_seconds=0.0, read_seconds_per_token=1e-9)
    core.handle(
        Received("new", replace(fast, kv_tokens_total=10**8, kv_tokens_free=10**8, waiting_limit=10**4)), 0.0
    )
    draining = replace(roomy, draining=True, drain_seconds=30.0)
    assert len(cancels(core.handle(Received("old", draining), 0.0))) == MOST_LOOKS
    assert len(cancels(core.handle(Tick(), 0.1))) == 10
    assert core._replicas["old"].open == {}


@pytest.mark.parametrize(
    ("fields", "peer"),
    [
        ({}, ""),
        ({"drain_seconds": 30.0}, "old"),
        ({"drain_seconds": 0.05}, ""),
        ({"drain_seconds": 30.0, "ready": False}, ""),
    ],
    ids=["it gives no KV", "time to read it", "too little time", "lost"],
)
def test_a_replica_that_drains_is_a_peer_while_there_is_time_to_read(
    fields: dict[str, object], peer: str
) -> None:
    prefix = marks(PrefixHasher(MARK_BLOCK_TOKENS, b"k").hashes(np.arange(1000, dtype=np.int32)))
    core = RouterCore()
    core.handle(BundleKnown("d"), 0.0)
    core.handle(Received("old", CARD), 0.0)
    core.handle(Arrive("m", "d", (NewSequence("a", "a", 1000, 7, prefix=prefix),)), 0.0)
    core.handle(Received("new", NEW), 0.0)
    core.handle(Received("old", Emit("a", (1,), "stop")), 0.0)
    core.handle(Received("old", replace(CARD, draining=True, **fields)), 0.0)  # type: ignore[arg-type]
    ((_, submit),) = submits(
        core.handle(Arrive("m", "d", (NewSequence("b", "b", 1000, 7, prefix=prefix),)), 0.0)
    )
    assert submit.peer == peer
