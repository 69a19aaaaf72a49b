"""The state machine of `medha up`, without processes and without a clock."""

from __future__ import annotations

import itertools
import math
import random
import signal

import pytest

from medha.errors import AcceleratorMissing
from medha_process.supervision.lifecycle import (
    FAILED_GRACE_SECONDS,
    GRACE_SECONDS,
    MOST_DEATHS_SLOW,
    Abort,
    Command,
    Event,
    Exited,
    Interrupt,
    Kill,
    Lifecycle,
    Log,
    Phase,
    Present,
    Ready,
    Silent,
    Start,
    Terminate,
    TimePassed,
    begin,
    handle,
)

GROUPS = (("router",), ("controller",), ("rank 0", "rank 1"))
ALL = ["router", "controller", "rank 0", "rank 1"]
DRAIN_SECONDS = 30.0


def run(*events: tuple[float, Event]) -> tuple[Lifecycle, list[Command]]:
    """The state after (now, event)s from the start at 0, and the last event's commands without their words."""
    state = begin(GROUPS, 0.0, ready_seconds=60.0, drain_seconds=DRAIN_SECONDS)
    commands: list[Command] = []
    for now, event in events:
        state, commands = handle(state, event, now)
    return state, [command for command in commands if not isinstance(command, Log)]


SERVING = [(1.0, Ready())]
DRAINING = [*SERVING, (2.0, Interrupt())]


def dead(part: str) -> list[tuple[float, Event]]:
    """A part that ends as often as it may not, the last time at 2.0."""
    return [(1.6 + 0.2 * turn, Exited(part, -9, "the last line")) for turn in range(3)]


def test_ready_is_presented_once_and_waits_without_a_deadline() -> None:
    state, commands = run(*SERVING)
    assert (state.phase, state.deadline, commands) == (Phase.SERVING, math.inf, [Present()])
    assert run(*SERVING, (2.0, Ready()))[1] == []


def test_draining_asks_router_then_controller_then_ranks_and_ends_with_status_0() -> None:
    state, commands = run(*DRAINING)
    assert commands == [Terminate("router")]
    assert state.deadline == 2.0 + DRAIN_SECONDS + GRACE_SECONDS
    state, commands = run(*DRAINING, (3.0, Exited("router", 0)))
    assert commands == [Terminate("controller")]
    assert state.deadline == 3.0 + GRACE_SECONDS
    state, commands = run(*DRAINING, (3.0, Exited("router", 0)), (4.0, Exited("controller", 0)))
    assert commands == [Terminate("rank 0"), Terminate("rank 1")]
    exits = [(3.0, Exited(part, 0)) for part in ALL]
    assert run(*DRAINING, *exits[:-1])[0].phase is Phase.DRAINING
    state, commands = run(*DRAINING, *exits)
    assert (state.phase, state.exit_status, state.failure, commands) == (Phase.ENDED, 0, "", [])


def test_ranks_that_the_controller_has_dismissed_need_not_be_asked() -> None:
    early = [(3.0, Exited("rank 1", 0)), (3.0, Exited("rank 0", 0)), (3.0, Exited("router", 0))]
    state, commands = run(*DRAINING, *early)
    assert commands == [Terminate("controller")]
    state, commands = run(*DRAINING, *early, (4.0, Exited("controller", 0)))
    assert (state.phase, state.exit_status, commands) == (Phase.ENDED, 0, [])


def test_dying_of_the_sigterm_that_it_was_sent_is_a_clean_end() -> None:
    exits = [(3.0, Exited(part, -signal.SIGTERM)) for part in ALL]
    assert run(*DRAINING, *exits)[0].exit_status == 0


@pytest.mark.parametrize("part", ALL)
@pytest.mark.parametrize("status", [0, 1, -9])
def test_a_part_that_ends_while_serving_is_started_again(part: str, status: int) -> None:
    state, commands = run(*SERVING, (2.0, Exited(part, status)))
    assert (state.phase, state.exit_status) == (Phase.SERVING, 0)
    assert state.running == frozenset(ALL)
    assert commands == [Start(part)]


@pytest.mark.parametrize("part", ALL)
def test_the_third_end_of_a_part_within_a_minute_is_a_failure_and_stops_the_others(part: str) -> None:
    state, commands = run(*SERVING, *dead(part))
    assert (state.phase, state.exit_status) == (Phase.STOPPING, 1)
    assert state.failure.startswith(f"{part} was killed by SIGKILL; its last line: the last line")
    assert "3 times in 60 s" in state.failure
    assert commands == [Terminate(other, drain=False) for other in ALL if other != part]


def test_ends_of_different_parts_or_long_ago_do_not_add_up() -> None:
    ends = [(2.0, Exited("rank 0", -9)), (3.0, Exited("rank 1", -9)), (4.0, Exited("rank 0", -9))]
    assert run(*SERVING, *ends)[0].phase is Phase.SERVING
    assert run(*SERVING, *ends, (61.9, Exited("rank 0", -9)))[0].phase is Phase.STOPPING
    assert run(*SERVING, *ends, (62.0, Exited("rank 0", -9)))[0].phase is Phase.SERVING


def test_a_part_that_ends_once_a_minute_is_not_started_again_for_ever() -> None:
    state, said = begin(GROUPS, 0.0, ready_seconds=60.0, drain_seconds=DRAIN_SECONDS), []
    state, _ = handle(state, Ready(), 1.0)
    now = 1.0
    while state.phase is Phase.SERVING:
        now += 61.0
        state, commands = handle(state, Exited("rank 0", -9), now)
        said += [command.text for command in commands if isinstance(command, Log)]
    assert len(said) == MOST_DEATHS_SLOW - 1
    assert said[0].endswith("restarting it")
    assert said[1].endswith("restarting it (it ended 2 times within an hour)")
    assert "it ended 20 times in 3600 s" in state.failure


def test_a_part_that_ends_now_and_then_is_started_again_for_ever() -> None:
    state = begin(GROUPS, 0.0, ready_seconds=60.0, drain_seconds=DRAIN_SECONDS)
    state, _ = handle(state, Ready(), 1.0)
    for turn in range(1000):
        state, _ = handle(state, Exited("rank 0", -9), 200.0 * turn)
    assert state.phase is Phase.SERVING
    assert len(state.deaths) < MOST_DEATHS_SLOW


def words_of(*exits: Exited) -> tuple[str, list[str]]:
    """The failure, and what else is said, when parts end in this order while the replica starts."""
    state, said = begin(GROUPS, 0.0, ready_seconds=60.0, drain_seconds=DRAIN_SECONDS), []
    for event in exits:
        state, commands = handle(state, event, 2.0)
        said += [command.text for command in commands if isinstance(command, Log)]
    return state.failure, said


def test_the_reason_of_a_failed_start_is_reported_once_whichever_part_ends_first() -> None:
    rank = Exited("rank 0", 1, "CRITICAL medha.rank: too little memory", "too little memory")
    controller = Exited("controller", 1, "", "rank 0: OutOfMemory: too little memory")
    other = Exited("rank 1", 1, "", "too little memory")
    failure, said = words_of(rank, controller, other)
    assert failure == "before the replica was ready, rank 0 exited with status 1 because: too little memory"
    assert said == []
    failure, said = words_of(controller, other, rank)
    assert failure.endswith("controller exited with status 1 because: rank 0: OutOfMemory: too little memory")
    assert said == []


def test_parts_that_end_for_other_reasons_than_the_first_are_reported_too() -> None:
    rank = Exited("rank 0", 1, "", "too little memory")
    _, said = words_of(rank, Exited("rank 1", 1, "", "no such file"), Exited("router", 0, "bye"))
    assert said == ["rank 1 exited with status 1 because: no such file"]


def test_the_first_failure_is_the_one_that_is_reported() -> None:
    state, _ = run(*SERVING, *dead("rank 0"), (2.1, Exited("router", 1)))
    assert state.failure.startswith("rank 0 was killed by SIGKILL")


def test_a_part_that_lacks_its_accelerator_hands_its_exit_status_on() -> None:
    missing = AcceleratorMissing.exit_status
    assert run((1.0, Exited("rank 0", missing)), (1.1, Exited("rank 1", 1)))[0].exit_status == missing
    lost = [(2.0 + turn, Exited("rank 0", missing)) for turn in range(3)]
    assert run(*SERVING, *lost)[0].exit_status == missing
    # 75 asks the operator for a restart of all pods, which only the supervisor may.
    assert run((1.0, Exited("rank 0", 75)))[0].exit_status == 1


def test_an_illegal_instruction_is_reported_with_its_fix() -> None:
    state, _ = run((2.0, Exited("rank 0", -signal.SIGILL)))
    assert "rank 0 was killed by SIGILL" in state.failure
    assert "ONEDNN_MAX_CPU_ISA" in state.failure


def test_parts_that_ignore_a_failure_are_killed_after_the_grace() -> None:
    failed = [*SERVING, *dead("rank 0")]
    assert run(*failed, (2.0 + FAILED_GRACE_SECONDS - 0.01, TimePassed()))[1] == []
    state, commands = run(*failed, (2.0 + FAILED_GRACE_SECONDS, TimePassed()))
    assert (state.phase, state.exit_status) == (Phase.KILLING, 1)
    assert commands == [Kill("router"), Kill("controller"), Kill("rank 1")]


def test_an_end_before_ready_and_a_start_that_takes_too_long_are_failures() -> None:
    assert "before the replica was ready" in run((1.0, Exited("rank 0", 1)))[0].failure
    assert run((59.9, TimePassed()))[0].phase is Phase.STARTING
    state, commands = run((60.0, TimePassed()))
    assert (state.phase, state.exit_status) == (Phase.STOPPING, 1)
    assert "readySeconds" in state.failure
    assert commands == [Terminate(part, drain=False) for part in ALL]


def test_an_interrupt_before_ready_stops_all_at_once_with_status_0() -> None:
    state, commands = run((1.0, Interrupt()))
    assert (state.phase, state.exit_status) == (Phase.STOPPING, 0)
    assert commands == [Terminate(part) for part in ALL]
    state, _ = run((1.0, Interrupt()), *[(2.0, Exited(part, 1)) for part in ALL])
    assert (state.phase, state.exit_status) == (Phase.ENDED, 0)


def test_a_second_interrupt_kills_what_is_left_with_status_130() -> None:
    state, commands = run(*DRAINING, (3.0, Exited("router", 0)), (4.0, Interrupt()))
    assert (state.phase, state.exit_status) == (Phase.KILLING, 130)
    assert commands == [Kill("controller"), Kill("rank 0"), Kill("rank 1")]
    assert run(*DRAINING, (4.0, Interrupt()), (5.0, Interrupt()))[1] == []


def test_a_failure_keeps_its_status_when_the_user_loses_patience() -> None:
    assert run(*SERVING, *dead("rank 0"), (2.1, Interrupt()))[0].exit_status == 1


@pytest.mark.parametrize("part", ["controller", "rank 0", "rank 1"])
def test_a_part_that_dies_while_requests_drain_is_started_again_until_it_keeps_dying(part: str) -> None:
    """The router has open requests until it ends, and they need every other part."""
    state, commands = run(*DRAINING, (3.0, Exited(part, -9)))
    assert (state.phase, state.failure, commands) == (Phase.DRAINING, "", [Start(part)])
    assert state.running == frozenset(ALL)
    assert state.deadline == 2.0 + DRAIN_SECONDS + GRACE_SECONDS, "a death gives nobody more time"
    exits = [(4.0, Exited(one, 0)) for one in ALL]
    state, _ = run(*DRAINING, (3.0, Exited(part, -9)), *exits)
    assert (state.phase, state.exit_status) == (Phase.ENDED, 0)
    state, _ = run(*DRAINING, *[(3.0 + turn, Exited(part, -9)) for turn in range(3)])
    assert (state.phase, state.exit_status) == (Phase.STOPPING, 1)
    assert "3 times in 60 s" in state.failure


def test_a_part_that_fails_while_draining_is_a_failure_if_no_request_needs_it() -> None:
    state, _ = run(*DRAINING, (3.0, Exited("router", -11)))
    assert state.failure == "while draining, router was killed by SIGSEGV"
    state, _ = run(*DRAINING, (3.0, Exited("router", 0)), (4.0, Exited("rank 0", -11)))
    assert state.failure == "while draining, rank 0 was killed by SIGSEGV"


def test_a_part_that_hangs_while_draining_is_a_failure() -> None:
    state, commands = run(*DRAINING, (2.0 + DRAIN_SECONDS + GRACE_SECONDS, TimePassed()))
    assert state.failure.startswith("router did not stop in time")
    assert commands == [Terminate(part, drain=False) for part in ALL]


def test_every_history_ends_when_the_parts_do_and_none_ends_before() -> None:
    """Random histories: ENDED exactly when nothing runs; no part is asked the same twice; a killed run stays killed."""
    for seed in range(300):
        dice = random.Random(seed)
        state, now, stop_requested = begin(GROUPS, 0.0, ready_seconds=60, drain_seconds=30), 0.0, []
        for _ in itertools.count():
            if state.phase is Phase.ENDED:
                break
            now += dice.choice([0.0, 0.5, 20.0])
            exits = [Exited(part, dice.choice([0, 0, 1, -9, -15])) for part in sorted(state.running)]
            event = dice.choice([Ready(), Interrupt(), TimePassed(), TimePassed(), *exits])
            before = state
            state, commands = handle(state, event, now)
            stop_requested += [command for command in commands if isinstance(command, Terminate)]
            assert (state.phase is Phase.ENDED) == (not state.running)
            assert state.running <= before.running
            if before.phase is Phase.KILLING:
                assert state.phase in (Phase.KILLING, Phase.ENDED)
            if state.phase in (Phase.STARTING, Phase.DRAINING, Phase.STOPPING):
                assert state.deadline < math.inf
            assert (state.exit_status == 1) == bool(state.failure)
        assert len(stop_requested) == len(set(stop_requested))


def test_a_silent_part_is_killed_while_serving_and_then_started_again_like_any_that_ends() -> None:
    _, commands = run(*SERVING, (2.0, Silent("rank 1", 5.0)))
    assert commands == [Kill("rank 1")]
    assert run(*SERVING, (2.0, Silent("rank 1", 5.0)), (2.1, Exited("rank 1", -9)))[1] == [Start("rank 1")]
    assert run((0.5, Silent("rank 1", 5.0)))[1] == [], "readySeconds bounds a start"


def test_a_silent_part_is_killed_while_draining_if_open_requests_need_it() -> None:
    assert run(*DRAINING, (3.0, Silent("rank 1", 5.0)))[1] == [Kill("rank 1")]
    assert run(*DRAINING, (3.0, Silent("router", 5.0)))[1] == [], "who was asked has the drain's deadline"
    assert run(*DRAINING, (3.0, Exited("router", 0)), (4.0, Silent("rank 1", 5.0)))[1] == []


def test_a_silent_part_is_named_once_while_the_replica_starts_and_left_alone() -> None:
    starting, _ = run()
    state, commands = handle(starting, Silent("rank 1", 2.1), 3.0)
    assert commands == [Log("rank 1 has sent no heartbeat for 2.1 s")]
    assert handle(state, Silent("rank 1", 3.1), 4.0) == (state, [])
    assert handle(state, Silent("rank 0", 5.1), 5.0)[1] == [Log("rank 0 has sent no heartbeat for 5.1 s")]


def test_parts_that_another_pod_drains_are_asked_only_when_it_is_silent_too_long() -> None:
    waiting = begin(GROUPS, 0.0, ready_seconds=60.0, drain_seconds=30.0, awaits_notice=True)
    serving, _ = handle(waiting, Ready(), 1.0)
    draining, commands = handle(serving, Interrupt(), 2.0)
    assert draining.phase is Phase.DRAINING
    assert not [command for command in commands if isinstance(command, Terminate)]
    reported, commands = handle(draining, Exited("router", 0), 3.0)
    assert reported.failure == "", "the leader has spoken"
    assert Start("rank 0") in handle(draining, Exited("rank 0", -9), 3.0)[1], "and until then they are needed"
    late, commands = handle(draining, TimePassed(), draining.deadline)
    assert late.exit_status == 0
    assert {command.part for command in commands if isinstance(command, Terminate)} == set(ALL)


def test_parts_without_requests_stop_at_once() -> None:
    serving, _ = run(*SERVING)
    state, commands = handle(serving, Interrupt(busy=False), 2.0)
    assert state.phase is Phase.STOPPING
    assert {command.part for command in commands if isinstance(command, Terminate)} == set(ALL)


def test_who_watches_the_parts_may_give_up_with_an_exit_status_of_its_own() -> None:
    state, _ = run(*SERVING, (2.0, Abort("they do not meet", 75)), *[(3.0, Exited(part, 0)) for part in ALL])
    assert (state.phase, state.exit_status, state.failure) == (Phase.ENDED, 75, "they do not meet")
    state, _ = run(*DRAINING, (3.0, Abort("they do not meet", 75)))
    assert state.phase is Phase.DRAINING, "open requests are finished first"
