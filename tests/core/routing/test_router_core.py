"""RouterCore: late binding, failover, limits; and that no order of events loses or doubles a sequence."""

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from medha.api.declared import DeclaredModel
from medha.kv.prefix_cache import PrefixHasher
from medha.routing.known_models import KnownModel
from medha.routing.prefix_memory import MARK_BLOCK_TOKENS, Prefix, marks
from medha.routing.replica_choice import reservation_tokens
from medha.routing.router_core import RouterCore
from medha.routing.router_events import (
    Abandon,
    Arrive,
    BundleKnown,
    Declared,
    Deliver,
    DropBundle,
    Fail,
    LinkLost,
    NewSequence,
    Received,
    Reject,
    RouterCommand,
    RouterEvent,
    Send,
    SendPrompt,
)
from medha.routing.routing_limits import RoutingLimits
from medha.scheduler.policy import POLICIES
from medha.wire.messages import (
    Announce,
    Cancel,
    Emit,
    Failed,
    FetchBundle,
    Heartbeat,
    LaneLoad,
    PolicyTerms,
    Refused,
    Sampling,
    ServiceClassTerms,
    Submit,
    Tick,
)

CARD = Announce(
    replica="r0",
    model="m",
    digest="d",
    epoch=1,
    ready=True,
    draining=False,
    max_model_len=1000,
    vocab_size=100,
    kv_tokens_total=1000,
    kv_tokens_free=1000,
    running=0,
    waiting=0,
    pending_prefill_seconds=0.0,
    longest_request_tokens=900,
    waiting_limit=2,
    service_classes=(ServiceClassTerms("default", 2.0, 3.0, 0.05, 0.01, 4096),),
)

POINTS = ((100, 1.0), (10_000, 100.0))  # 10 ms a token; by the class above 800 tokens are due after 24 s
SLOW = tuple((tokens, 10 * seconds) for tokens, seconds in POINTS)


def arrive(
    *ids: str, prompt: str = "p", length: int = 10, grammar: str = "", most: int = 5, **fields: object
) -> Arrive:
    sampling = Sampling(max_tokens=most, grammar=grammar)
    sequences = tuple(
        NewSequence(name, prompt, length, seed=7, sampling=sampling, sample_index=index)
        for index, name in enumerate(ids)
    )
    return replace(Arrive("m", "d", sequences), **fields)  # type: ignore[arg-type]


def announce(core: RouterCore, now: float = 0.0, **fields: object) -> list[RouterCommand]:
    card = replace(CARD, **fields)  # type: ignore[arg-type]
    return core.handle(Received(card.replica, card), now)


def serving(limits: RoutingLimits | None = None, *replicas: str) -> RouterCore:
    core = RouterCore(limits)
    core.handle(Tick(), 0.0)
    core.handle(BundleKnown("d"), 0.0)
    for replica in replicas or ("r0",):
        announce(core, replica=replica)
    return core


def submits(commands: list[RouterCommand]) -> list[tuple[str, Submit]]:
    return [(c.replica, c.message) for c in commands if isinstance(c, Send) and isinstance(c.message, Submit)]


def test_a_request_goes_at_once_to_a_ready_replica_with_its_prompt_ahead() -> None:
    commands = serving().handle(arrive("a", tpot_target_seconds=0.02), 5.0)
    prompt, send = commands
    assert prompt == SendPrompt("r0", "a/prompt", "p", ())
    assert isinstance(send, Send)
    assert isinstance(send.message, Submit)
    submit = send.message
    assert (submit.id, submit.prompt, submit.tokens, submit.prompt_length) == ("a", "a/prompt", 10, 10)
    assert (submit.seed, submit.tpot_target_seconds, submit.age_seconds) == (7, 0.02, 0.0)


def test_samples_of_one_prompt_share_one_name_so_that_the_replica_can_fork_kv() -> None:
    core = serving(None, "r0", "r1")
    commands = core.handle(arrive("a-0", "a-1"), 0.0)
    assert [type(c) for c in commands] == [SendPrompt, Send, Send]
    assert {replica for replica, _ in submits(commands)} == {commands[0].replica}  # type: ignore[union-attr]
    assert {submit.prompt for _, submit in submits(commands)} == {"a-0/prompt"}


def test_a_full_replica_gets_nothing_until_its_next_announcement_shows_room() -> None:
    core = serving()
    core.handle(arrive("a", "b"), 0.0)
    assert core.handle(arrive("c", prompt="q"), 1.0) == []
    assert announce(core, 2.0, waiting=2) == []
    sent = submits(announce(core, 4.0, waiting=1))
    assert [(submit.id, submit.age_seconds) for _, submit in sent] == [("c", 3.0)]


def test_the_least_pending_prefill_wins_among_replicas_with_free_kv() -> None:
    core = serving(None, "r0", "r1", "r2")
    announce(core, replica="r0", pending_prefill_seconds=3.0)
    announce(core, replica="r1", pending_prefill_seconds=1.0)
    announce(core, replica="r2", pending_prefill_seconds=0.0, kv_tokens_free=5)
    assert [replica for replica, _ in submits(core.handle(arrive("a"), 0.0))] == ["r1"]


def test_a_burst_between_two_announcements_is_spread_over_idle_replicas() -> None:
    core = serving(None, "r0", "r1")
    chosen = [submits(core.handle(arrive(name, prompt=name), 0.0))[0][0] for name in "abcd"]
    assert sorted(chosen) == ["r0", "r0", "r1", "r1"]


def test_the_tighter_deadline_leaves_the_queue_first() -> None:
    core = serving()
    announce(core, waiting=2)
    core.handle(arrive("book", deadline_after_seconds=60.0), 0.0)
    core.handle(arrive("chat", prompt="q", deadline_after_seconds=1.0), 0.5)
    assert [submit.id for _, submit in submits(announce(core, 1.0, waiting=0))] == ["chat", "book"]


def test_of_two_with_one_deadline_the_longer_prompt_leaves_the_queue_first() -> None:
    """Slack is what is left beside a request's own work."""
    core = serving()
    announce(core, waiting=2, prefill_points=POINTS)
    core.handle(arrive("short", deadline_after_seconds=20.0), 0.0)
    core.handle(arrive("long", prompt="q", length=800, deadline_after_seconds=20.0), 0.1)
    assert waiting_ids(core) == ["long", "short"]


def waiting_ids(core: RouterCore, now: float = 0.0) -> list[str]:
    """The waiting sequences of the model `m`, most urgent first."""
    return [sequence.new.id for sequence, _ in core._waiting.of(("m", "d")).urgent_first(now)]


def test_a_long_prompt_whose_class_gives_it_longer_does_not_hold_up_a_short_one_behind_it() -> None:
    """Deadlines of a class are the larger of its floor and its factor times the announced prefill time."""
    core = serving()
    announce(core, waiting=2, prefill_points=POINTS)
    core.handle(arrive("long", length=800), 0.0)
    core.handle(arrive("short", prompt="q"), 0.1)
    core.handle(arrive("short, later", prompt="r"), 13.9)
    core.handle(arrive("short, much later", prompt="s"), 14.2)
    # The long one is due at 24 s and takes 8.
    expected = ["short", "short, later", "long", "short, much later"]
    assert [submit.id for _, submit in submits(announce(core, 30.0, waiting_limit=9))] == expected


def test_deadlines_by_class_order_as_those_that_name_the_same_seconds() -> None:
    core = serving()
    announce(core, waiting=2, prefill_points=POINTS)
    for index, length in enumerate((10, 800, 66, 67, 70, 300, 67)):
        core.handle(arrive(f"{index} by class", prompt=f"p{index}", length=length), 0.5 * index)
        named = max(2.0, 3 * length / 100)
        core.handle(
            arrive(f"{index} named", prompt=f"q{index}", length=length, deadline_after_seconds=named),
            0.5 * index + 0.01,
        )
    order = waiting_ids(core)
    assert [name.split()[0] for name in order[::2]] == [name.split()[0] for name in order[1::2]]
    assert all(name.endswith("by class") for name in order[::2])


def test_a_request_that_asks_for_no_time_at_all_goes_first() -> None:
    core = serving()
    announce(core, waiting=2)
    core.handle(arrive("by class"), 0.0)
    core.handle(arrive("at once", prompt="q", deadline_after_seconds=0.0), 0.1)
    assert waiting_ids(core) == ["at once", "by class"]


@pytest.mark.parametrize("names", [("fast", "slow"), ("slow", "fast")])
def test_of_replicas_that_differ_the_tightest_deadline_counts_and_only_of_those_that_hold_the_prompt(
    names: tuple[str, str],
) -> None:
    core = serving(None, *names)
    points = {"fast": POINTS, "slow": SLOW}
    for name in names:
        announce(core, replica=name, waiting=2, prefill_points=points[name])
    announce(core, replica="tiny", waiting=2, longest_request_tokens=90, prefill_points=((100, 0.001),))
    assert core.fleet.ttft_target_seconds(arrive("a"), 800) == pytest.approx(24.0)
    assert core.fleet.ttft_target_seconds(arrive("a"), 50) == 2.0
    announce(core, replica="fast", ready=False)
    assert core.fleet.ttft_target_seconds(arrive("a"), 800) == pytest.approx(240.0)


def test_a_class_that_goes_by_default_is_the_first_that_is_announced() -> None:
    core = serving()
    classes = tuple(
        ServiceClassTerms(name, floor, 3.0, 0.05, 0.01, 4096)
        for name, floor in (("chat", 5.0), ("bulk", 9.0))
    )
    announce(core, service_classes=classes)
    assert core.fleet.ttft_target_seconds(arrive("a"), 10) == 5.0
    assert core.fleet.ttft_target_seconds(arrive("a", service_class="bulk"), 10) == 9.0


@pytest.mark.parametrize("ending", ["refused", "lost"])
def test_a_sequence_that_comes_back_is_due_when_it_was_due_whatever_is_announced_since(ending: str) -> None:
    core = serving(None, "r0", "r1")
    card: dict[str, object] = {"waiting": 2, "prefill_points": POINTS, "order": PolicyTerms("edf")}
    for replica in ("r0", "r1"):
        announce(core, replica=replica, **card)
    core.handle(arrive("long", prompt="p", length=800), 0.0)
    sent = submits(announce(core, 1.0, **{**card, "replica": "r0", "waiting": 1}))
    assert [submit.id for _, submit in sent] == ["long"]
    core.handle(arrive("before", prompt="q"), 21.9)
    core.handle(arrive("after", prompt="r"), 22.2)
    announce(core, 22.3, **{**card, "replica": "r1", "prefill_points": SLOW})
    if ending == "refused":
        core.handle(Received("r0", Refused("long", "capacity")), 22.4)
    else:
        core.handle(LinkLost("r0"), 22.4)
    assert waiting_ids(core, 22.4) == ["before", "long", "after"]


@pytest.mark.parametrize("reason", ["capacity", "draining", "not_ready"])
def test_a_refusal_that_may_pass_elsewhere_is_requeued_with_the_original_age(reason: str) -> None:
    core = serving(None, "r0", "r1")
    ((first, _),) = submits(core.handle(arrive("a"), 10.0))
    ((second, submit),) = submits(core.handle(Received(first, Refused("a", reason)), 12.5))  # type: ignore[arg-type]
    assert {first, second} == {"r0", "r1"}
    assert (submit.id, submit.age_seconds) == ("a~1", 2.5)


@pytest.mark.parametrize(
    ("reason", "kind"), [("too_long", "too_long"), ("invalid", "invalid"), ("unknown_class", "invalid")]
)
def test_a_refusal_for_the_requests_own_fault_ends_it(reason: str, kind: str) -> None:
    core = serving()
    core.handle(arrive("a"), 0.0)
    assert core.handle(Received("r0", Refused("a", reason, "why")), 0.0) == [Fail("a", kind, "why")]  # type: ignore[arg-type]
    assert core.open == 0


def test_a_new_epoch_gets_open_sequences_again_with_what_they_emitted_and_the_same_seed() -> None:
    core = serving()
    core.handle(arrive("a"), 0.0)
    core.handle(Received("r0", Emit("a", (4, 5))), 1.0)
    commands = announce(core, 2.0, epoch=2)
    assert commands[0] == SendPrompt("r0", "a~1/prompt", "p", (4, 5))
    ((_, submit),) = submits(commands)
    assert (submit.tokens, submit.prompt_length, submit.seed, submit.age_seconds) == (12, 10, 7, 2.0)
    assert core.handle(Received("r0", Emit("a~1", (6,), "stop")), 3.0) == [Deliver("a", (6,), "stop")]


def test_a_prompts_salt_goes_with_it_to_every_replica_that_gets_it() -> None:
    core = serving()
    (prompt, _) = core.handle(arrive("a", cache_salt="mine"), 0.0)
    core.handle(Received("r0", Emit("a", (4, 5))), 1.0)
    again = announce(core, 2.0, epoch=2)[0]
    assert [command.cache_salt for command in (prompt, again)] == ["mine", "mine"]  # type: ignore[union-attr]


def test_samples_name_the_owner_of_their_request_to_every_replica_that_gets_them() -> None:
    core = serving()
    announce(core, waiting_limit=8)
    first = submits(core.handle(arrive("a", "b", owner="one"), 0.0))
    other = submits(core.handle(arrive("c", prompt="q", owner="two"), 0.5))
    again = submits(announce(core, 2.0, epoch=2, waiting_limit=8))
    assert [submit.owner for _, submit in first + other] == ["one", "one", "two"]
    assert [submit.owner for _, submit in again] == ["one", "one", "two"]


def test_a_late_token_of_an_abandoned_attempt_is_dropped_and_that_attempt_cancelled() -> None:
    core = serving()
    core.handle(arrive("a"), 0.0)
    announce(core, 2.0, epoch=2)
    assert core.handle(Received("r0", Emit("a", (9,))), 2.1) == [Send("r0", Cancel("a"))]


def test_a_silent_replica_counts_as_lost_and_its_sequences_go_to_another() -> None:
    """It learns, in case it comes back, that it need not compute them; what it still sends reaches nobody."""
    core = serving(None, "r0", "r1")
    ((first, _),) = submits(core.handle(arrive("a"), 0.0))
    other = "r1" if first == "r0" else "r0"
    assert core.handle(Received(first, Emit("a", (4,))), 0.0) == [Deliver("a", (4,))]
    (at, commands) = ticks(core, 0.0, beating=other)
    assert 2.0 < at <= 2.25
    assert isinstance(commands[0], Reject)
    assert commands[1] == Send(first, Cancel("a"))
    assert [(replica, submit.tokens) for replica, submit in submits(commands)] == [(other, 11)]
    announce(core, at, replica=first)
    assert core.handle(Received(first, Emit("a", (5,))), at) == [Send(first, Cancel("a"))]
    assert core.handle(Received(first, Emit("a", (6,), "stop")), at) == []
    assert core.handle(Received(other, Emit("a~1", (5,))), at) == [Deliver("a", (5,))]


def test_heartbeats_and_answers_keep_a_replica_that_announces_nothing() -> None:
    core = serving(None, "r0", "r1")
    core.handle(arrive("a"), 0.0)
    core.handle(arrive("b", prompt="q"), 0.0)
    assert ticks(core, 0.0, beating="r0 r1") == (20.0, [])
    now = 20.0
    while now < 40.0:
        now += 0.25
        core.handle(Received("r0", Emit("a" if now == 20.25 else "b", (1,))), now)
        core.handle(Received("r1", Heartbeat()), now)
        assert core.handle(Tick(), now) == []


@pytest.mark.parametrize("late_seconds", [1.0, 2.5, 60.0])
def test_a_router_that_was_late_itself_takes_no_replica_for_lost(late_seconds: float) -> None:
    """However long it has read nothing, the replicas have the rest of their two seconds from its next turn on."""
    core = serving(None, "r0")
    core.handle(arrive("a"), 0.0)
    assert ticks(core, 0.0, until=1.0) == (1.0, [])
    assert core.handle(Tick(), 1.0 + late_seconds) == []
    at, commands = ticks(core, 1.0 + late_seconds, until=100.0)
    assert isinstance(commands[0], Reject)
    assert 0.5 <= at - 1.0 - late_seconds <= 0.75


def test_each_turn_of_a_router_that_is_always_late_counts_half_a_second() -> None:
    core = serving(None, "r0")
    turns = 0
    while not (commands := core.handle(Tick(), 30.0 * turns)):
        turns += 1
    assert isinstance(commands[0], Reject)
    assert turns == 5


def ticks(
    core: RouterCore, now: float, *, until: float = 20.0, beating: str = ""
) -> tuple[float, list[RouterCommand]]:
    """Tick four times a second until something happens, while some replicas send heartbeats; return when, and what."""
    while now < until:
        now += 0.25
        for replica in beating.split():
            if now % 0.5 == 0:
                assert core.handle(Received(replica, Heartbeat()), now) == []
        commands = core.handle(Tick(), now)
        if commands:
            return now, commands
    return now, []


def test_a_lost_link_frees_its_sequences_for_another_replica() -> None:
    core = serving(None, "r0", "r1")
    ((first, _),) = submits(core.handle(arrive("a"), 0.0))
    ((second, _),) = submits(core.handle(LinkLost(first), 1.0))
    assert first != second


@pytest.mark.parametrize(("tokens", "lives_seconds"), [((), 40.0), ((4,), 1.0)], ids=["long", "with a token"])
def test_a_sequence_whose_replicas_all_go_ends_unavailable_in_the_end_whatever_they_died_of(
    tokens: tuple[int, ...], lives_seconds: float
) -> None:
    core = serving()
    core.handle(arrive("a"), 0.0)
    for attempt in range(1, 9):
        ticks(core, lives_seconds * (attempt - 1), until=lives_seconds * attempt, beating="r0")
        if tokens:
            wire_id = "a" if attempt == 1 else f"a~{attempt - 1}"
            core.handle(Received("r0", Emit(wire_id, tokens)), lives_seconds * attempt)
        commands = core.handle(LinkLost("r0"), lives_seconds * attempt)
        if attempt < 8:
            assert len(submits(announce(core, lives_seconds * attempt, epoch=attempt))) == 1
    (command,) = commands
    assert isinstance(command, Fail)
    assert command.kind == "unavailable"
    assert command.detail.startswith("8 attempts in a row")


def test_a_stream_that_lasts_outlives_any_number_of_replicas() -> None:
    core = serving()
    core.handle(arrive("a"), 0.0)
    for attempt in range(1, 100):
        wire_id = "a" if attempt == 1 else f"a~{attempt - 1}"
        core.handle(Received("r0", Emit(wire_id, (4,))), 30.0 * attempt)
        core.handle(LinkLost("r0"), 30.0 * attempt)
        assert len(submits(announce(core, 30.0 * attempt, epoch=attempt))) == 1


FLEET = [f"r{number}" for number in range(6)]


@pytest.mark.parametrize("loss", ["link", "silence"])
def test_a_request_that_whole_replicas_are_lost_of_is_refused_by_name_at_the_third(loss: str) -> None:
    core = serving(None, *FLEET)
    now, commands = 0.0, core.handle(arrive("poison"), 0.0)
    lost: list[str] = []
    while sent := submits(commands):
        ((replica, _),) = sent
        lost.append(replica)
        if loss == "silence":
            beating = " ".join(other for other in FLEET if other not in lost)
            now, commands = ticks(core, now, until=now + 5.0, beating=beating)
        else:
            now, _ = ticks(core, now, until=now + 2.5, beating=" ".join(FLEET))
            commands = core.handle(LinkLost(replica), now)
    (failure,) = (one for one in commands if isinstance(one, Fail))
    assert (failure.id, failure.kind, len(set(lost))) == ("poison", "internal", 3)
    assert "3 times in a row, a replica was lost that had request poison" in failure.detail
    assert core.open == 0


@pytest.mark.parametrize("ticks_first", [False, True])
def test_replicas_that_a_stopped_router_loses_count_against_no_request(ticks_first: bool) -> None:
    """It finds all of its connections ended; some of them end again before replicas have joined it again."""
    core = serving(None, *FLEET)
    commands = core.handle(arrive("a"), 0.0)
    now = 1.0 + RoutingLimits().stopped_seconds
    ticks(core, 0.0, until=1.0, beating=" ".join(FLEET))
    if ticks_first:
        assert core.handle(Tick(), now) == []
    lost = 0
    for _ in range(3):
        while sent := submits(commands):
            lost += 1
            commands = core.handle(LinkLost(sent[0][0]), now)
            assert not [one for one in commands if isinstance(one, Fail)]
        now += 0.5
        assert core.handle(Tick(), now) == []
        commands = [one for replica in FLEET for one in announce(core, now, replica=replica)]
    assert lost == 3 * len(FLEET) > RoutingLimits().max_attempts
    now, _ = ticks(core, now, until=now + 2.0, beating=" ".join(FLEET))
    lost = 0
    while sent := submits(commands):
        lost += 1
        commands = core.handle(LinkLost(sent[0][0]), now)
    assert lost == 3, "from then on, they count again"
    assert isinstance(commands[-1], Fail)


@pytest.mark.parametrize(
    ("samples", "kind", "most_lost"), [(0, "internal", 3), (1, "unavailable", 8)], ids=["at once", "late"]
)
def test_what_runs_beside_a_request_that_whole_replicas_are_lost_of_goes_on(
    samples: int, kind: str, most_lost: int
) -> None:
    """Replicas come back, and every sequence that is not on a lost one gets a token each second."""
    fleet = FLEET[:2]
    core = serving(None, *fleet)
    for replica in fleet:
        announce(core, replica=replica, waiting_limit=20)
    running: dict[str, tuple[str, str]] = {}  # sequence -> where, under which name
    ended: dict[str, str] = {}
    lost = 0

    def run(commands: list[RouterCommand]) -> None:
        for replica, submit in submits(commands):
            running[submit.id.partition("~")[0]] = replica, submit.id
        for one in commands:
            if isinstance(one, Fail) or (isinstance(one, Deliver) and one.finish_reason):
                ended[one.id] = one.kind if isinstance(one, Fail) else "stop"
                running.pop(one.id, None)

    for name in ("poison", "a", "b", "c", "d", "e"):
        run(core.handle(arrive(name, prompt=name), 0.0))
    now, tokens, epochs = 0.0, Counter[str](), Counter(fleet)
    while core.open:
        now += 1.0
        run(core.handle(Tick(), now))
        victim = running["poison"][0] if "poison" in running else ""
        for name, (replica, wire_id) in list(running.items()):
            if replica != victim or samples:
                tokens[name] += 1
                is_last = tokens[name] == 40 and name != "poison"
                run(core.handle(Received(replica, Emit(wire_id, (1,), "stop" if is_last else None)), now))
        if victim:
            lost += 1
            for name in [one for one, (replica, _) in running.items() if replica == victim]:
                del running[name]
            run(core.handle(LinkLost(victim), now))
        for replica in fleet:
            epochs[replica] += replica == victim
            run(announce(core, now, replica=replica, epoch=epochs[replica], waiting_limit=20))
        assert now < 1000.0
    assert ended == {"poison": kind, **dict.fromkeys("abcde", "stop")}
    assert lost <= most_lost


def lose(core: RouterCore, epoch: int, now: float, *computed: str) -> list[RouterCommand]:
    """The epoch ends while a step has `computed`, and the next one begins at once."""
    commands: list[RouterCommand] = []
    for name in computed:
        commands += core.handle(Received("r0", Failed(name, "rank_lost")), now)
    commands += announce(core, now, epoch=epoch, ready=False)
    return commands + announce(core, now, epoch=epoch + 1)


def test_a_prefill_that_takes_long_outlives_losses_that_are_far_apart() -> None:
    core = serving()
    commands = core.handle(arrive("book"), 0.0)
    for epoch in range(1, RoutingLimits().max_attempts):
        ((_, submit),) = submits(commands)
        commands = lose(core, epoch, 40.0 * epoch, submit.id)
    assert len(submits(commands)) == 1


def test_a_sequence_with_sampled_tokens_is_no_suspect_when_its_replica_is_lost() -> None:
    core = serving()
    commands = [*core.handle(arrive("a", prompt="p"), 0.0), *core.handle(arrive("b", prompt="q"), 0.0)]
    for epoch in range(1, 5):
        sent = [submit.id for _, submit in submits(commands)]
        assert len(sent) == 2, "both at once, for neither is held back"
        for name in sent:
            core.handle(Received("r0", Emit(name, (1,))), float(epoch))
        commands = lose(core, epoch, float(epoch), *sent)


def test_suspects_are_tried_one_after_the_other_and_none_keeps_the_next_waiting_for_long() -> None:
    core = serving()
    core.handle(arrive("a", prompt="p"), 0.0)
    core.handle(arrive("b", prompt="q"), 0.0)
    ((_, first),) = submits(lose(core, 1, 1.0, "a", "b"))
    assert first.id == "a~1"
    assert [submit.id for _, submit in submits(core.handle(arrive("c", prompt="s"), 2.0))] == ["c"]
    card = {"epoch": 2, "waiting": 0}
    assert submits(announce(core, 30.9, **card)) == []
    assert [submit.id for _, submit in submits(announce(core, 31.0, **card))] == ["b~1"]


def test_who_comes_beside_a_suspect_that_is_the_cause_goes_on() -> None:
    core = serving()
    core.handle(arrive("poison", prompt="p"), 0.0)
    lose(core, 1, 1.0, "poison")
    core.handle(arrive("newcomer", prompt="q"), 2.0)
    commands = lose(core, 2, 3.0, "newcomer", "poison~1")
    assert [command.id for command in commands if isinstance(command, Fail)] == ["poison"]
    assert [submit.id for _, submit in submits(commands)] == ["newcomer~1"]


def test_samples_of_a_prompt_that_replicas_die_of_are_not_tried_one_by_one() -> None:
    core = serving()
    core.handle(arrive("a-0", "a-1"), 0.0)
    ((_, first),) = submits(lose(core, 1, 1.0, "a-0", "a-1"))
    ended = lose(core, 2, 2.0, first.id)
    assert [(one.id, one.kind) for one in ended if isinstance(one, Fail)] == [
        ("a-0", "internal"),
        ("a-1", "internal"),
    ]
    assert core.open == 0


def test_more_waiting_than_the_limit_is_overloaded_and_names_when_to_come_back() -> None:
    core = serving(RoutingLimits(max_waiting=1))
    announce(core, waiting=2, pending_prefill_seconds=7.2)
    assert core.handle(arrive("a"), 0.0) == []
    (refusal,) = core.handle(arrive("b", prompt="q"), 0.0)
    assert isinstance(refusal, Fail)
    assert (refusal.id, refusal.kind, refusal.retry_after_seconds) == ("b", "overloaded", 8)


def test_unknown_models_and_outages_are_told_apart() -> None:
    core = RouterCore()
    assert [c.kind for c in core.handle(arrive("a"), 0.0) if isinstance(c, Fail)] == ["unavailable"]
    core = serving()
    (unknown,) = core.handle(arrive("a", model="other"), 0.0)
    assert isinstance(unknown, Fail)
    assert unknown.kind == "model_not_found"
    announce(core, ready=False)
    (outage,) = core.handle(arrive("a"), 0.0)
    assert isinstance(outage, Fail)
    assert outage.kind == "unavailable"


def declare(core: RouterCore, **replicas: int) -> None:
    models = (
        DeclaredModel(name=name, service_classes=("chat", "batch"), replicas=count)
        for name, count in replicas.items()
    )
    assert core.handle(Declared(tuple(models)), 0.0) == []


def refusal(core: RouterCore, model: str = "m") -> str:
    """Why a request for a model gets no answer."""
    (refused,) = core.handle(arrive("a", model=model), 0.0)
    assert isinstance(refused, Fail)
    return refused.kind


def test_a_model_that_a_manifest_names_is_known_before_a_replica_was_heard() -> None:
    core = RouterCore()
    declare(core, m=2)
    assert (refusal(core), refusal(core, "other")) == ("unavailable", "model_not_found")
    assert core.models.all() == {"m": KnownModel(("chat", "batch"), 2)}
    assert core.waiting == 0
    announce(core, model="other", ready=False)
    assert core.models.find("other") == KnownModel(("default",), None)
    assert refusal(core, "other") == "unavailable"
    announce(core, replica="r1", ready=False)
    assert core.models.find("m") == KnownModel(("default",), 2)  # what it has announced is what holds


def test_replicas_are_expected_of_models_that_a_manifest_names_or_may_be_about_to_name() -> None:
    core, seconds = serving(), RoutingLimits().name_seconds
    assert core.is_expected("m", seconds)
    assert not core.is_expected("m", seconds + 1)  # so long after its last announcement
    assert not core.is_expected("other", 0.0)
    declare(core, m=0)
    assert core.is_expected("m", 10 * seconds)
    declare(core)  # its manifest was deleted
    assert not core.is_expected("m", 0.0)


def test_a_model_that_no_manifest_names_any_more_is_forgotten_with_its_last_replica() -> None:
    core = serving()
    announce(core, replica="r1", model="alone", ready=False)
    declare(core, m=1)
    declare(core)
    assert core.models.find("m") is not None
    core.handle(LinkLost("r0"), 0.0)
    core.handle(Tick(), 0.0)
    assert core.models.find("m") is None
    assert refusal(core) == "model_not_found"
    core.handle(LinkLost("r1"), 0.0)
    core.handle(Tick(), 0.0)
    assert core.models.find("alone") is not None  # no manifest ever named it: its absence is an outage
    declare(core, m=1)
    assert refusal(core) == "unavailable"


def test_who_waits_for_a_model_that_is_withdrawn_is_still_counted() -> None:
    core = serving(RoutingLimits(unserved_seconds=60.0))
    declare(core, m=1)
    announce(core, waiting=2)  # it is full
    assert core.handle(arrive("a"), 0.0) == []
    declare(core)
    core.handle(LinkLost("r0"), 0.0)
    core.handle(Tick(), 0.0)
    assert core.waiting == 1


def test_what_is_open_at_a_replica_that_lost_its_epoch_goes_on_elsewhere_and_counts_one_loss() -> None:
    core = serving(None, "r1", "r2")
    ((first, _),) = submits(core.handle(arrive("a"), 0.0))
    other = "r2" if first == "r1" else "r1"
    commands = announce(core, 1.0, replica=first, ready=False)
    assert [replica for replica, _ in submits(commands)] == [other]
    assert submits(announce(core, 2.0, replica=first, ready=False)) == []
    assert submits(announce(core, 3.0, replica=first, epoch=1)) == []
    assert core.waiting == 0


def test_a_queued_sequence_whose_replicas_never_come_back_ends_unavailable() -> None:
    core = serving(RoutingLimits(unserved_seconds=60.0, silence_seconds=5.0, late_seconds=6.0))
    core.handle(arrive("a"), 0.0)
    core.handle(Tick(), 6.0)
    assert core.waiting == 1
    assert core.handle(Tick(), 65.9) == []
    (failure,) = core.handle(Tick(), 66.0)
    assert isinstance(failure, Fail)
    assert failure.kind == "unavailable"


def test_a_sequence_waits_as_long_as_its_replica_reports_that_it_recovers() -> None:
    """Weights may take minutes to read; behind the last announcement it is silent, and then gone."""
    limits = RoutingLimits(
        unserved_seconds=60.0, recovery_seconds=500.0, silence_seconds=5.0, late_seconds=20.0
    )
    core = serving(limits)
    core.handle(arrive("a"), 0.0)
    for second in range(1, 400):
        announce(core, float(second), ready=False)
        assert core.handle(Tick(), second + 0.5) == []
    assert [submit.id for _, submit in submits(announce(core, 400.0, epoch=1))] == ["a~1"]
    assert core.handle(Tick(), 400.5) == []
    announce(core, 401.0, epoch=1, ready=False)
    assert core.handle(Tick(), 410.0)[0] == Reject("r0", "silent for 9.0 s")
    (failure,) = core.handle(Tick(), 470.0)
    assert isinstance(failure, Fail)
    assert failure.kind == "unavailable"
    assert core.open == 0


def test_a_replica_that_recovers_for_ever_keeps_no_sequence_for_ever() -> None:
    core = serving(RoutingLimits(recovery_seconds=100.0))
    core.handle(arrive("a"), 0.0)
    failures: list[RouterCommand] = []
    for second in range(1, 110):
        announce(core, float(second), ready=False)
        failures += [one for one in core.handle(Tick(), second + 0.5) if isinstance(one, Fail)]
    (failure,) = failures
    assert isinstance(failure, Fail)
    assert "came back in 100 s" in failure.detail


def test_a_prompt_that_no_pool_can_hold_is_too_long_at_once() -> None:
    (failure,) = serving().handle(arrive("a", length=900), 0.0)
    assert isinstance(failure, Fail)
    assert failure.kind == "too_long"


def test_an_abandoned_sequence_is_cancelled_where_it_runs_and_leaves_the_queue_where_it_waits() -> None:
    core = serving()
    core.handle(arrive("a", "b"), 0.0)
    core.handle(arrive("c", prompt="q"), 0.0)
    assert core.handle(Abandon("a"), 1.0) == [Send("r0", Cancel("a"))]
    assert core.handle(Abandon("c"), 1.0) == []
    assert core.handle(Abandon("c"), 1.0) == []
    assert (core.waiting, core.open) == (0, 1)


def test_an_unknown_bundle_is_fetched_once_and_its_replica_serves_after_it_is_known() -> None:
    core = RouterCore(RoutingLimits(fetch_seconds=10.0))
    assert announce(core) == [Send("r0", FetchBundle("d"))]
    assert announce(core, 1.0) == []
    assert announce(core, 10.0) == [Send("r0", FetchBundle("d"))]
    assert not core.fleet.ready
    core.handle(BundleKnown("d"), 11.0)
    assert core.fleet.ready


def test_a_bundle_is_dropped_once_nothing_has_needed_it_for_long_and_fetched_again_when_it_is_announced() -> (
    None
):
    core = RouterCore(RoutingLimits(bundle_seconds=100.0, unserved_seconds=1000.0))
    core.handle(Tick(), 0.0)
    for digest in ("d", "e"):
        core.handle(BundleKnown(digest), 0.0)
    announce(core)
    announce(core, replica="r1", model="n", digest="e")
    core.handle(arrive("a"), 1.0)
    core.handle(LinkLost("r0"), 2.0)
    core.handle(LinkLost("r1"), 2.0)
    announce(core, 50.0, replica="r1", model="n", digest="e")
    core.handle(Tick(), 60.0)
    core.handle(LinkLost("r1"), 61.0)
    assert core.handle(Tick(), 62.0) == []
    assert core.handle(Tick(), 161.0) == []
    assert core.handle(Tick(), 162.0) == [DropBundle("e")], "that of `a` is kept while it waits"
    assert core.handle(Tick(), 400.0) == []
    core.handle(Abandon("a"), 400.0)
    assert core.handle(Tick(), 401.0) == []
    assert core.handle(Tick(), 501.0) == [DropBundle("d")]
    assert announce(core, 502.0) == [Send("r0", FetchBundle("d"))]
    assert not core.fleet.ready


def test_what_was_asked_of_replicas_that_have_gone_is_forgotten() -> None:
    core = serving()
    for index in range(5):
        announce(core, replica=f"other {index}", digest="e")
        announce(core, replica=f"new {index}", model=f"m{index}", digest=f"{index}")
        core.handle(LinkLost(f"other {index}"), 1.0)
        core.handle(LinkLost(f"new {index}"), 1.0)
    core.handle(Tick(), 2.0)
    assert (core._rejected, core._bundles._requested_at) == ({}, {})


def test_replicas_of_one_model_with_different_bundles_are_never_mixed() -> None:
    core = serving()
    core.handle(BundleKnown("e"), 0.0)
    (rejection,) = announce(core, replica="r1", digest="e")
    assert isinstance(rejection, Reject)
    assert "differs" in rejection.reason
    assert announce(core, replica="r1", digest="e") == []  # said once
    assert [card.replica for card in core.fleet.cards("m")] == ["r0"]


def test_a_lost_rank_resumes_and_other_failures_end_the_sequence() -> None:
    core = serving()
    core.handle(arrive("a", "b"), 0.0)
    ((_, again),) = submits(core.handle(Received("r0", Failed("a", "rank_lost")), 1.0) + announce(core, 1.1))
    assert again.id == "a~1"
    (end,) = core.handle(Received("r0", Failed("b", "out_of_memory", "too big a chunk")), 1.0)
    assert end == Fail("b", "out_of_memory", "too big a chunk", retry_after_seconds=1)


@pytest.mark.parametrize("emits", [True, False])
def test_a_text_goes_on_where_keys_and_values_are_rounded_alike_if_it_has_begun(emits: bool) -> None:
    core = serving()
    core.handle(arrive("a"), 0.0)
    announce(core, 0.1, kv_dtype="fp8")
    if emits:
        core.handle(Received("r0", Emit("a", (1,))), 0.2)
    announce(core, 0.3, replica="r1", running=0)
    announce(core, 0.3, replica="r2", kv_dtype="fp8", running=9, pending_prefill_seconds=2.0)
    ((replica, again),) = submits(core.handle(LinkLost("r0"), 1.0))
    assert (replica, again.id) == ("r2" if emits else "r1", "a~1")
    ((replica, _),) = submits(core.handle(LinkLost(replica), 2.0))
    assert replica == ("r1" if emits else "r2"), "there is no other"


def test_a_grammar_that_is_late_may_be_tried_again_and_one_that_costs_too_much_may_not() -> None:
    core = serving()
    core.handle(arrive("late", "costly"), 0.0)
    (end,) = core.handle(Received("r0", Failed("late", "grammar_late", "not compiled")), 1.0)
    assert end == Fail("late", "grammar_late", "not compiled", retry_after_seconds=1)
    (end,) = core.handle(Received("r0", Failed("costly", "grammar", "too costly")), 1.0)
    assert end == Fail("costly", "invalid", "too costly")


# --- replicas of an earlier version, which ignore grammars -----------------------------------------------

SINCE = {"follows_grammars": True}


def test_a_request_with_a_grammar_goes_to_a_replica_that_follows_it_however_busy_that_is() -> None:
    core = serving(None, "before", "now")
    announce(core, replica="now", pending_prefill_seconds=9.0, **SINCE)
    sent = submits(core.handle(arrive("a-0", "a-1", grammar="g"), 0.0) + core.handle(arrive("b"), 0.0))
    assert [(replica, submit.id) for replica, submit in sent] == [
        ("now", "a-0"), ("now", "a-1"), ("before", "b")
    ]  # fmt: skip


def test_a_grammar_that_no_ready_replica_follows_is_an_error_that_says_what_to_upgrade() -> None:
    core = serving(None, "before", "now")
    announce(core, replica="now", ready=False, **SINCE)
    (failure,) = core.handle(arrive("a", grammar="g"), 0.0)
    assert isinstance(failure, Fail)
    assert (failure.kind, failure.retry_after_seconds) == ("unavailable", 1)
    assert "ready replicas of the model `m` are of an earlier version of Medha" in failure.detail
    assert "upgrade them" in failure.detail
    assert [submit.id for _, submit in submits(core.handle(arrive("b"), 0.0))] == ["b"]
    announce(core, replica="before", ready=False)
    (failure,) = core.handle(arrive("c", grammar="g"), 0.0)
    assert isinstance(failure, Fail)
    assert "no ready replica serves" in failure.detail


@pytest.mark.parametrize("lanes", [(), (LaneLoad(1000, 0.0),)])
def test_sequences_that_wait_for_a_replica_that_follows_grammars_keep_no_others_from_the_rest(
    lanes: tuple[LaneLoad, ...],
) -> None:
    core = serving(RoutingLimits(max_waiting=1000))
    announce(core, replica="now", waiting=2, lanes=lanes, **SINCE)
    announce(core, waiting=2, lanes=lanes)
    for number in range(200):
        core.handle(arrive(f"g{number}", prompt=f"g{number}", grammar="g", deadline_after_seconds=1.0), 0.0)
    core.handle(arrive("plain", prompt="p"), 0.1)
    assert core.waiting == 201
    sent = submits(announce(core, 0.2, waiting=1, lanes=lanes))
    assert [(replica, submit.id) for replica, submit in sent] == [("r0", "plain")]
    sent = submits(announce(core, 0.3, replica="now", waiting=1, lanes=lanes, **SINCE))
    assert [(replica, submit.id) for replica, submit in sent] == [("now", "g0")]


def test_a_grammar_is_followed_to_the_end_also_when_the_replica_that_follows_it_is_lost() -> None:
    core = serving(RoutingLimits(unserved_seconds=60.0, silence_seconds=500.0), "before", "now")
    announce(core, replica="now", **SINCE)
    core.handle(arrive("comes back", prompt="p", grammar="g"), 0.0)
    assert submits(core.handle(LinkLost("now"), 1.0)) == []
    core.handle(Tick(), 1.5)
    sent = submits(announce(core, 2.0, replica="now", epoch=2, **SINCE))
    assert [(replica, submit.id) for replica, submit in sent] == [("now", "comes back~1")]
    core.handle(Tick(), 2.5)
    core.handle(arrive("plain", prompt="q"), 3.0)
    core.handle(LinkLost("now"), 3.0)
    assert core.handle(Tick(), 4.0) == []
    assert core.handle(Tick(), 63.0) == []
    (failure,) = core.handle(Tick(), 64.0)
    assert isinstance(failure, Fail)
    assert (failure.id, failure.kind) == ("comes back", "unavailable")
    assert "upgrade them" in failure.detail
    assert core.open == 1, "the plain one goes on"


def test_a_grammar_has_its_whole_time_to_wait_although_others_have_waited_for_long() -> None:
    """While the replica that follows it ends its work, only requests without a grammar wait, for another replica."""
    core = serving(RoutingLimits(unserved_seconds=60.0, silence_seconds=500.0), "before", "now")
    announce(core, replica="now", **SINCE)
    core.handle(arrive("long", grammar="g"), 0.0)
    announce(core, 1.0, replica="before", waiting=2)
    announce(core, 1.0, replica="now", draining=True, **SINCE)
    core.handle(arrive("plain", prompt="q"), 1.0)
    for second in range(2, 100):
        assert core.handle(Tick(), float(second)) == []
    core.handle(LinkLost("now"), 100.0)
    assert core.handle(Tick(), 101.0) == []
    sent = submits(announce(core, 102.0, replica="now", epoch=2, **SINCE))
    assert ("now", "long~1") in [(replica, submit.id) for replica, submit in sent]


def test_of_replicas_that_hold_more_only_those_count_that_follow_the_grammar() -> None:
    core = serving(None, "before")
    announce(core, replica="now", longest_request_tokens=100, **SINCE)
    sent = submits(core.handle(arrive("cut short", most=500, grammar="g"), 0.0))
    assert [(replica, submit.id) for replica, submit in sent] == [("now", "cut short")]
    (failure,) = core.handle(arrive("too long", length=200, grammar="g"), 0.0)
    assert isinstance(failure, Fail)
    assert failure.kind == "too_long"
    assert "holds 100 tokens" in failure.detail
    assert submits(core.handle(arrive("plain", prompt="q", most=500), 0.0))[0][0] == "before"


def test_a_sequence_with_a_grammar_that_no_replica_is_left_to_hold_is_too_long() -> None:
    core = serving(None, "before")
    announce(core, replica="large", **SINCE)
    announce(core, replica="small", longest_request_tokens=100, **SINCE)
    core.handle(arrive("a", length=200, grammar="g"), 0.0)
    core.handle(LinkLost("large"), 1.0)
    (failure,) = core.handle(Tick(), 2.0)
    assert isinstance(failure, Fail)
    assert (failure.id, failure.kind) == ("a", "too_long")
    assert "more than 100 tokens" in failure.detail


def test_a_sequence_of_a_lost_step_is_not_sent_to_the_same_replica_before_that_announces_itself() -> None:
    core = serving()
    core.handle(arrive("a"), 0.0)
    assert core.handle(Received("r0", Failed("a", "rank_lost")), 1.0) == []
    assert announce(core, 1.0, ready=False) == []
    assert [submit.id for _, submit in submits(announce(core, 2.0, epoch=2))] == ["a~1"]


def test_only_what_was_computed_when_ranks_were_lost_counts_the_losses() -> None:
    """A request that kills its ranks ends after two epochs; the ones that waited behind it are served by the third."""
    core = serving()
    announce(core, waiting_limit=10)
    core.handle(arrive("poison", "b", "c"), 0.0)
    ended: list[RouterCommand] = []
    for epoch in range(1, 3):
        suffix = f"~{epoch - 1}" if epoch > 1 else ""
        for message in (
            Refused("b" + suffix, "not_ready"),
            Refused("c" + suffix, "not_ready"),
            Failed("poison" + suffix, "rank_lost"),
        ):
            ended += core.handle(Received("r0", message), float(epoch))
        ended += announce(core, float(epoch), epoch=epoch, ready=False, waiting_limit=10)
        again = submits(announce(core, epoch + 0.5, epoch=epoch + 1, waiting_limit=10))
    assert [(command.id, command.kind) for command in ended if isinstance(command, Fail)] == [
        ("poison", "internal")
    ]
    assert [submit.id for _, submit in again] == ["b~2", "c~2"]


def test_who_shares_its_steps_with_a_request_that_kills_ranks_is_cleared_by_a_token_of_its_own() -> None:
    core = serving()
    announce(core, waiting_limit=10)
    commands = [
        one for name in ("a", "poison", "b", "c") for one in core.handle(arrive(name, prompt=name), 0.0)
    ]
    ended: dict[str, str] = {}
    epoch = 1
    while core.open:
        computed = [submit.id for _, submit in submits(commands)]  # together in one step
        assert computed, "nobody is forgotten"
        commands = []
        if any(id_.startswith("poison") for id_ in computed):
            for id_ in computed:
                commands += core.handle(Received("r0", Failed(id_, "rank_lost")), float(epoch))
            commands += announce(core, float(epoch), epoch=epoch, ready=False, waiting_limit=10)
            epoch += 1
        else:
            for id_ in computed:
                commands += core.handle(Received("r0", Emit(id_, (1,), "stop")), float(epoch))
        commands += announce(core, float(epoch), epoch=epoch, waiting_limit=10)
        ended |= {one.id: one.kind for one in commands if isinstance(one, Fail)}
        ended |= {one.id: "stop" for one in commands if isinstance(one, Deliver) and one.finish_reason}
    assert ended == {"a": "stop", "b": "stop", "c": "stop", "poison": "internal"}
    assert epoch == 3, "its third death within a minute would end the replica"


@dataclass
class FakeReplica:
    """Emits the token at position i as the number i, so that the client can tell order, loss and doubles."""

    name: str
    epoch: int = 1
    ready: bool = True
    policy: str = "lrs"
    lanes: tuple[LaneLoad, ...] = ()
    follows_grammars: bool = False
    role: str = "both"
    kv_identity: str = ""
    drains: bool = False
    running: dict[str, list[int]] = field(default_factory=dict)  # wire id -> [output so far, length]
    moved: set[str] = field(default_factory=set)  # whose KV it is to keep

    def card(self) -> Announce:
        card = replace(CARD, replica=self.name, epoch=self.epoch, ready=self.ready, waiting=len(self.running))
        work = ((-1.0, 0.4), (1.5, 0.4 + len(self.running))) if self.lanes and self.running else ()
        card = replace(card, follows_grammars=self.follows_grammars, prefill_points=POINTS)
        if self.drains:
            # Less than an output is predicted to take.
            card = replace(card, draining=True, drain_seconds=0.05)
        card = replace(card, hands_kv_over=True, kv_identity=self.kv_identity, role=self.role)
        return replace(card, order=PolicyTerms(self.policy), lanes=self.lanes, work_ahead=work)


@given(st.data())
def test_under_any_order_of_events_each_sequence_ends_once_with_its_tokens_once_and_in_order(
    data: st.DataObject,
) -> None:
    core = RouterCore(
        RoutingLimits(
            max_waiting=4, silence_seconds=5.0, late_seconds=3.0, unserved_seconds=20.0, max_attempts=3
        )
    )
    policy = data.draw(st.sampled_from(sorted(POLICIES)))
    lanes = data.draw(st.sampled_from([(), (LaneLoad(1000, 0.0),), (LaneLoad(5, 0.0), LaneLoad(12, 2.0))]))
    replicas = {name: FakeReplica(name, policy=policy, lanes=lanes) for name in ("r0", "r1")}
    replicas["r1"].follows_grammars = True
    replicas["r0"].role, replicas["r1"].role = data.draw(
        st.sampled_from([("both", "both"), ("prefill", "decode"), ("decode", "prefill"), ("prefill", "both")])
    )
    replicas["r1"].kv_identity = data.draw(st.sampled_from(["", "newer"]))
    log: list[tuple[RouterEvent, float, list[RouterCommand]]] = []
    received: dict[str, list[int]] = {}
    ended: dict[str, str] = {}
    gone: set[str] = set()
    stale: list[tuple[str, Emit | Failed | Refused]] = []
    now = 0.0

    def run(event: RouterEvent) -> None:
        prompts: dict[tuple[str, str], int] = {}
        commands = core.handle(event, now)
        log.append((event, now, commands))
        for command in commands:
            match command:
                case SendPrompt():
                    assert len(command.emitted) == len(received.get(command.source, []))
                    prompts[command.replica, command.prompt] = 10 + len(command.emitted)
                case Send(replica=name, message=Submit() as submit):
                    assert prompts[name, submit.prompt] == submit.tokens, (
                        "the prompt goes ahead of the sequence"
                    )
                    assert submit.id not in replicas[name].running
                    assert replicas[name].follows_grammars or not submit.sampling.grammar
                    replicas[name].running[submit.id] = [submit.tokens - submit.prompt_length, 3]
                case Send(replica=name, message=Cancel(id=wire_id, moves=moves)):
                    if replicas[name].running.pop(wire_id, None) is not None:  # what may cross it
                        stale.append((name, Emit(wire_id, (99,))))
                        ends = [
                            Emit(wire_id, (99,), "stop"),
                            Failed(wire_id, "internal"),
                            Refused(wire_id, "capacity"),
                        ]
                        stale.append((name, ends[len(stale) // 2 % 3]))
                    replicas[name].moved.discard(wire_id)
                    if moves:
                        replicas[name].moved.add(wire_id)
                case Deliver():
                    assert command.id not in ended
                    assert command.id not in gone
                    received[command.id].extend(command.tokens)
                    if command.finish_reason is not None:
                        ended[command.id] = "finished"
                case Fail():
                    assert command.id not in ended
                    assert command.id not in gone
                    ended[command.id] = "failed"

    def emit(replica: FakeReplica, wire_id: str, count: int) -> None:
        done, length = replica.running[wire_id]
        tokens = tuple(range(done, min(done + count, length)))
        finished = done + len(tokens) == length
        replica.running[wire_id][0] += len(tokens)
        if finished:
            del replica.running[wire_id]
        run(Received(replica.name, Emit(wire_id, tokens, "length" if finished else None)))

    run(BundleKnown("d"))
    for step in range(data.draw(st.integers(1, 40))):
        now += data.draw(st.sampled_from([0.0, 0.3, 3.0]))
        replica = replicas[data.draw(st.sampled_from(["r0", "r1"]))]
        action = data.draw(
            st.sampled_from(
                [
                    "announce",
                    "arrive",
                    "emit",
                    "refuse",
                    "fail",
                    "restart",
                    "abandon",
                    "stale",
                    "tick",
                    "lost",
                    "drain",
                ]
            )
        )
        running = sorted(replica.running)
        match action:
            case "announce":
                replica.ready = data.draw(st.booleans()) or step % 2 == 0
                run(Received(replica.name, replica.card()))
            case "arrive":
                name = f"s{step}"
                received[name] = []
                fields = {"owner": data.draw(st.sampled_from("ab"))}
                asked = arrive(name, prompt=name, grammar=data.draw(st.sampled_from(["", "g"])), **fields)
                marked = tuple(replace(one, prefix=((8, name),)) for one in asked.sequences)
                run(replace(asked, sequences=marked))
            case "emit" if running:
                emit(replica, data.draw(st.sampled_from(running)), data.draw(st.integers(1, 3)))
            case "refuse" if running:
                wire_id = data.draw(st.sampled_from(running))
                del replica.running[wire_id]
                run(Received(replica.name, Refused(wire_id, "capacity")))
            case "fail" if running:
                wire_id = data.draw(st.sampled_from(running))
                del replica.running[wire_id]
                run(
                    Received(
                        replica.name, Failed(wire_id, data.draw(st.sampled_from(["rank_lost", "internal"])))
                    )
                )
            case "restart":
                stale += [(replica.name, Emit(wire_id, (99,))) for wire_id in running]
                replica.running.clear()
                replica.moved.clear()
                replica.drains = False
                replica.epoch += 1
                run(Received(replica.name, replica.card()))
            case "stale" if stale:
                name, message = stale.pop()
                if message.id not in replicas[name].running:
                    run(Received(name, message))
            case "abandon" if received:
                name = data.draw(st.sampled_from(sorted(received)))
                if name not in ended:
                    gone.add(name)
                    run(Abandon(name))
            case "lost":
                replica.moved.clear()  # its side of the connection has ended, too
                run(LinkLost(replica.name))
            case "drain":
                replica.drains = True
                run(Received(replica.name, replica.card()))
            case _:
                run(Tick())

    for _ in range(200):  # the world calms down: replicas announce, and emit what they run
        now += 1.0
        run(Tick())
        for replica in replicas.values():
            replica.ready, replica.drains = True, False
            run(Received(replica.name, replica.card()))
            for wire_id in sorted(replica.running):
                if wire_id in replica.running:
                    emit(replica, wire_id, 3)
        if core.open == 0 and not any(replica.running for replica in replicas.values()):
            break
    assert set(ended) | gone == set(received), "each sequence ends, unless its client has gone"
    assert core.open == core.waiting == 0
    assert not core._sources
    assert not any(replica.moved for replica in replicas.values()), "no replica keeps KV for nobody"
    for name, tokens in received.items():
        assert tokens == list(range(len(tokens)))
        if ended.get(name) == "finished":
            assert tokens == [0, 1, 2]
    again = RouterCore(core._limits)
    assert [again.handle(event, at) for event, at, _ in log] == [commands for _, _, commands in log], (
        "the same events give the same commands"
    )


# --- load and prefixes --------------------------------------------------------------------------------

PREFIX = marks(PrefixHasher(MARK_BLOCK_TOKENS, b"k").hashes(np.arange(640, dtype=np.int32)))


def balanced(*replicas: str, **fields: object) -> RouterCore:
    """Replicas that announce what prefills take."""
    core = RouterCore(RoutingLimits(max_waiting=100_000))
    core.handle(BundleKnown("d"), 0.0)
    for replica in replicas:
        card = {"longest_request_tokens": 10_000, "kv_tokens_free": 100_000, "waiting_limit": 1000, **fields}
        announce(core, replica=replica, prefill_points=POINTS, **card)
    return core


def ask(core: RouterCore, name: str, length: int, now: float = 0.0, prefix: Prefix = ()) -> str:
    """The replica that a request goes to."""
    sequence = NewSequence(name, name, length, 7, Sampling(max_tokens=5), prefix=prefix)
    ((replica, _),) = submits(core.handle(Arrive("m", "d", (sequence,)), now))
    return replica


def test_work_forwarded_since_the_last_announcement_counts_by_its_length() -> None:
    core = balanced("r0", "r1")
    assert ask(core, "book", 1000) == "r0"
    assert [ask(core, f"chat {index}", 100) for index in range(5)] == ["r1"] * 5
    announce(core, replica="r0", prefill_points=POINTS, waiting_limit=1000)  # it has done its work
    assert ask(core, "late", 100) == "r0"


def test_a_prefix_attracts_a_request_to_where_it_was_sent_while_that_saves_more_than_the_load_costs() -> None:
    core = balanced("r0", "r1")
    assert ask(core, "first", 640, prefix=PREFIX) == "r0"
    card = {"prefill_points": POINTS, "longest_request_tokens": 10_000, "waiting_limit": 1000}
    announce(core, replica="r0", pending_prefill_seconds=6.0, **card)
    assert ask(core, "stranger", 640) == "r1"
    announce(core, replica="r1", **card)
    assert ask(core, "again", 700, prefix=PREFIX) == "r0", "6 s ahead, 6.4 s saved"
    announce(core, replica="r0", pending_prefill_seconds=6.8, **card)
    announce(core, replica="r1", **card)
    assert ask(core, "and again", 700, prefix=PREFIX) == "r1", "6.8 s ahead, 6.4 s saved"


def test_a_popular_prefix_spreads_over_all_replicas_under_load() -> None:
    core = balanced("r0", "r1", "r2")
    chosen = Counter(ask(core, f"s{index}", 700, prefix=PREFIX) for index in range(60))
    assert min(chosen.values()) >= 15


def test_a_replica_that_lacks_a_prefix_is_told_who_has_it_if_both_hand_kv_over() -> None:
    for both, identity, told in ((True, "a", ("r0", 640)), (False, "a", ("", 0)), (True, "b", ("", 0))):
        core = balanced("r0", "r1", hands_kv_over=both)
        assert ask(core, "first", 640, prefix=PREFIX) == "r0"
        card = {"prefill_points": POINTS, "longest_request_tokens": 10_000, "waiting_limit": 1000}
        announce(core, replica="r0", pending_prefill_seconds=9.0, hands_kv_over=True, kv_identity="a", **card)
        announce(core, replica="r1", hands_kv_over=both, kv_identity=identity, **card)
        sequence = NewSequence("again", "again", 700, 7, Sampling(max_tokens=5), prefix=PREFIX)
        ((replica, submit),) = submits(core.handle(Arrive("m", "d", (sequence,)), 0.0))
        assert (replica, submit.peer, submit.peer_tokens) == ("r1", *told)
        announce(core, replica="r1", hands_kv_over=both, kv_identity=identity, **card)
        sequence = NewSequence("and again", "and again", 700, 7, Sampling(max_tokens=5), prefix=PREFIX)
        ((replica, submit),) = submits(core.handle(Arrive("m", "d", (sequence,)), 0.0))
        assert (replica, submit.peer) == ("r1", ""), "it is thought to have it by then"


@pytest.mark.parametrize(
    ("ahead_seconds", "read_seconds", "chosen"),
    [(0.9, 0.8, "r1"), (0.7, 0.8, "r0"), (0.9, 8.0, "r0"), (6.8, 8.0, "r1")],
)
def test_a_prefix_attracts_only_as_long_as_another_replica_would_take_longer_to_read_it(
    ahead_seconds: float, read_seconds: float, chosen: str
) -> None:
    core = balanced("r0", "r1", hands_kv_over=True)
    assert ask(core, "first", 640, prefix=PREFIX) == "r0"
    card = {
        "prefill_points": POINTS, "longest_request_tokens": 10_000, "waiting_limit": 1000, "hands_kv_over": True,
        "read_seconds": read_seconds,
    }  # fmt: skip
    announce(core, replica="r0", pending_prefill_seconds=ahead_seconds, **card)
    announce(core, replica="r1", **card)
    assert ask(core, "again", 700, prefix=PREFIX) == chosen


def test_a_restarted_replica_is_not_thought_to_have_what_its_predecessor_had() -> None:
    core = balanced("r0", "r1")
    assert ask(core, "first", 640, prefix=PREFIX) == "r0"
    core.handle(Received("r0", Emit("first", (1,), "stop")), 1.0)
    card = {"prefill_points": POINTS, "waiting_limit": 1000, "longest_request_tokens": 10_000}
    announce(core, 2.0, replica="r0", epoch=2, pending_prefill_seconds=0.1, **card)
    assert ask(core, "again", 700, prefix=PREFIX) == "r1"


def test_the_kv_that_outputs_will_take_counts() -> None:
    core = balanced("r0", "r1", kv_tokens_free=1000)
    long_answer = NewSequence("a", "a", 100, 7, Sampling(max_tokens=850))
    assert submits(core.handle(Arrive("m", "d", (long_answer,)), 0.0))[0][0] == "r0"
    card = {"longest_request_tokens": 10_000, "waiting_limit": 1000, "prefill_points": POINTS}
    announce(core, replica="r1", pending_prefill_seconds=9.0, **card)
    assert ask(core, "b", 60) == "r1", "r0 would have to make it wait for KV"


def test_a_model_without_replicas_holds_up_no_other() -> None:
    core = serving()
    announce(core, replica="x", model="other", digest="e")
    core.handle(BundleKnown("e"), 0.0)
    core.handle(arrive("stuck", model="other", digest="e"), 0.0)
    announce(core, replica="x", model="other", digest="e", waiting=2)
    core.handle(arrive("stuck too", model="other", digest="e", prompt="q"), 0.0)
    assert [submit.id for _, submit in submits(core.handle(arrive("a"), 1.0))] == ["a"]
    assert core.waiting == 1


def test_a_long_sequence_waits_for_the_replica_that_holds_it_without_holding_up_short_ones() -> None:
    core = balanced("large")
    announce(core, replica="small", longest_request_tokens=100, waiting_limit=1000)
    announce(core, replica="large", longest_request_tokens=10_000, waiting_limit=2, waiting=2)
    assert submits(core.handle(Arrive("m", "d", (NewSequence("long", "p", 5000, 7),)), 0.0)) == []
    assert ask(core, "short", 50, now=1.0) == "small"
    sent = submits(announce(core, replica="large", longest_request_tokens=10_000, waiting_limit=2, waiting=1))
    assert [(replica, submit.id) for replica, submit in sent] == [("large", "long")]


def test_a_request_goes_only_to_a_replica_that_holds_all_of_its_output_as_long_as_there_is_one() -> None:
    """Replicas of one model may be made with different lengths: the shorter would end the text before its time."""
    core = balanced("long")
    announce(core, replica="short", longest_request_tokens=100, waiting_limit=1000)
    announce(core, replica="long", longest_request_tokens=10_000, waiting_limit=2, waiting=2)
    whole = NewSequence("whole", "p", 50, 7, sampling=Sampling(max_tokens=51))
    assert submits(core.handle(Arrive("m", "d", (whole,)), 0.0)) == []
    fits = NewSequence("fits", "q", 50, 7, sampling=Sampling(max_tokens=50))
    sent = submits(core.handle(Arrive("m", "d", (fits,)), 0.0))
    assert [(replica, submit.id) for replica, submit in sent] == [("short", "fits")]
    sent = submits(announce(core, replica="long", longest_request_tokens=10_000, waiting_limit=2, waiting=1))
    assert [(replica, submit.id) for replica, submit in sent] == [("long", "whole")]
    announce(core, replica="long", longest_request_tokens=10_000, ready=False)
    left = submits(core.handle(Arrive("m", "d", (replace(whole, id="left"),)), 0.0))
    assert ("short", "left") in [(replica, submit.id) for replica, submit in left]


def test_ten_thousand_queued_sequences_are_examined_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is announced in between: the cost of dispatching follows from what is forwarded."""
    examined = Counter[str]()
    choose = RouterCore._choose

    def counted(self: RouterCore, sequence: Any, *rest: Any) -> Any:
        examined[sequence.new.id] += 1
        return choose(self, sequence, *rest)

    monkeypatch.setattr(RouterCore, "_choose", counted)
    core = balanced("r0", "r1", waiting_limit=20, waiting=20)
    card = {"longest_request_tokens": 10_000, "kv_tokens_free": 100_000, "prefill_points": POINTS}
    for index in range(10_000):
        core.handle(Arrive("m", "d", (NewSequence(f"s{index}", f"p{index}", 10, 7),)), 0.0)
    order: list[str] = []
    while core.waiting:
        for replica in ("r0", "r1"):
            sent = announce(core, replica=replica, waiting_limit=20, waiting=0, **card)
            order += [submit.id for _, submit in submits(sent)]
    assert order == [f"s{index}" for index in range(10_000)], "first come, first served within a deadline"
    assert set(examined.values()) == {1}
    for replica in ("r0", "r1"):
        core.handle(LinkLost(replica), 0.0)
    assert core.waiting == 10_000, "all are queued again"


def test_a_patient_request_is_not_starved_by_a_stream_of_urgent_ones() -> None:
    """Deadlines do not move: those who come later are due later, and from some time on stand behind it."""
    core = serving()
    announce(core, waiting=2)
    core.handle(arrive("patient", deadline_after_seconds=60.0), 0.0)
    sent: list[str] = []
    now = 0.0
    while "patient" not in sent:
        now += 1.0
        for half in ("a", "b"):  # two come each second, and one finds room
            core.handle(arrive(f"{now}{half}", prompt=f"{now}{half}", deadline_after_seconds=2.0), now)
        sent += [submit.id for _, submit in submits(announce(core, now, waiting=1))]
        assert now < 130
    assert now > 30, "until then others were more urgent"


@pytest.mark.parametrize(
    ("expected", "max_tokens", "output"),
    [(0, 500, 500), (0, None, 60), (40, 500, 40), (40, 5, 5), (40, None, 40), (40, 5000, 40)],
)
def test_a_sequence_counts_with_the_kv_that_its_replica_reserves(
    expected: int, max_tokens: int | None, output: int
) -> None:
    """A router that counted all of `max_tokens` would take replicas for full that are not."""
    terms = ServiceClassTerms("default", 2.0, 3.0, 0.05, 0.01, 60, expected_output_tokens=expected)
    card = replace(CARD, service_classes=(terms,))
    request = arrive("a", length=100)
    new = replace(request.sequences[0], sampling=Sampling(max_tokens=max_tokens))
    core = RouterCore()
    core.handle(BundleKnown("d"), 0.0)
    core.handle(Received("r0", card), 0.0)
    core.handle(replace(request, sequences=(new,)), 0.0)
    (sequence,) = core._sequences.values()
    assert reservation_tokens(sequence, card) == 100 + output
