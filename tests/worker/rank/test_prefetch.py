"""The next step is read and planned while one runs, over real sockets."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from medha.errors import PartFailed
from medha.wire.messages import CompileGrammar, DropGrammar, RankHello, Shutdown, StageFree, Step
from medha_links import sockets
from medha_links.drops import Drops
from medha_links.key_files import KeyPair
from medha_links.sockets import Authenticator, bind
from medha_worker.link import Context, Link, rank_identity
from medha_worker.rank.lane_plan import LanePlan
from medha_worker.rank.prefetch import StepPrefetcher

SECONDS = 10.0
PEER = rank_identity(0)


class Both:
    """A controller's end of a link, and the rank's end with a `StepPrefetcher`."""

    def __init__(self, folder: Path) -> None:
        drops, server, client = Drops(logging.getLogger("test")), KeyPair.new(), KeyPair.new()
        self._context = Context()
        self._authenticator = Authenticator(self._context, [client.public])
        endpoint = f"ipc://{folder}/link"
        self.controller = Link(
            bind(self._context, endpoint, server),
            "bound",
            drops,
            accepts=(RankHello, StageFree),
            peers=[PEER],
        )
        opened = sockets.connect(self._context, endpoint, PEER, client, server.public)
        self._link = Link(opened, "connected", drops, accepts=(Step, CompileGrammar, DropGrammar, Shutdown))
        self.handled: list[str] = []
        self.ahead = StepPrefetcher(self._link, at_once=self._handle)
        self.ahead.send(RankHello(0, "first"))
        assert self.controller.receive(SECONDS) is not None

    def _handle(self, message: CompileGrammar | DropGrammar) -> None:
        """Answer at once, as a rank does that has compiled a grammar before."""
        self.handled.append(f"{type(message).__name__} {message.name}")
        self.ahead.send(StageFree(-1, 0))

    def close(self) -> None:
        self.ahead.close()
        self._link.close(0)
        self.controller.close(0)
        self._authenticator.close()
        self._context.term()

    def received(self) -> Step | Shutdown:
        received = self.ahead.receive(SECONDS)
        assert received is not None
        assert isinstance(received.message, Step | Shutdown)
        return received.message

    def send(self, *numbers: int) -> None:
        for number in numbers:
            self.controller.send(Step(number, 0, ()), peer=PEER)


@pytest.fixture
def both(tmp_path: Path) -> Iterator[Both]:
    both = Both(tmp_path)
    yield both
    both.close()


class Planner:
    """Plans steps, and records when and on which thread."""

    def __init__(self, outcome: Callable[[Step], LanePlan | None] = LanePlan) -> None:
        self._outcome = outcome
        self.planned: list[int] = []
        self.threads: set[int] = set()

    def __call__(self, step: Step) -> LanePlan | None:
        self.planned.append(step.step_id)
        self.threads.add(threading.get_ident())
        return self._outcome(step)

    def wait_for(self, *numbers: int) -> None:
        end = time.monotonic() + SECONDS
        while self.planned != list(numbers):
            assert time.monotonic() < end, self.planned
            time.sleep(0.001)


def test_steps_that_come_while_one_runs_are_planned_on_another_thread_in_their_order(both: Both) -> None:
    plan = Planner()
    with both.ahead.busy(plan):
        began = time.monotonic()
        both.send(1, 2, 3)
        plan.wait_for(1, 2, 3)
        ended = time.monotonic()
    assert threading.get_ident() not in plan.threads
    for number in (1, 2, 3):
        step = both.received()
        assert isinstance(step, Step)
        assert step.step_id == number
        prepared = both.ahead.take(step)
        assert prepared is not None
        assert prepared.planned == LanePlan(step)
        assert began <= prepared.since <= prepared.until <= ended


def test_what_had_come_before_a_step_begins_is_planned_while_it_runs(both: Both) -> None:
    both.send(1, 2)
    first = both.received()
    assert isinstance(first, Step)
    assert both.ahead.take(first) is None, "nothing ran, so nothing was prepared"
    plan = Planner()
    with both.ahead.busy(plan):
        plan.wait_for(2)


def test_a_step_that_cannot_be_planned_fails_when_its_turn_comes_and_none_behind_it_is_planned(
    both: Both,
) -> None:
    def outcome(step: Step) -> LanePlan:
        if step.step_id == 2:
            raise PartFailed("parted")
        return LanePlan(step)

    plan = Planner(outcome)
    with both.ahead.busy(plan):
        both.send(1, 2, 3)
        plan.wait_for(1, 2)
    results = []
    for _ in range(3):
        step = both.received()
        assert isinstance(step, Step)
        results.append(both.ahead.take(step))
    assert results[1] is not None
    assert isinstance(results[1].planned, PartFailed)
    assert results[2] is None


def test_one_that_has_to_wait_is_left_to_the_main_thread(both: Both) -> None:
    plan = Planner(lambda _: None)
    with both.ahead.busy(plan):
        both.send(1)
        end = time.monotonic() + SECONDS
        while not plan.planned:
            assert time.monotonic() < end
    step = both.received()
    assert isinstance(step, Step)
    assert both.ahead.take(step) is None


def test_other_messages_keep_their_place_among_the_steps(both: Both) -> None:
    plan = Planner()
    with both.ahead.busy(plan):
        both.send(1)
        both.controller.send(Shutdown("done"), peer=PEER)
        both.send(2)
        plan.wait_for(1, 2)
    assert [type(both.received()) for _ in range(3)] == [Step, Shutdown, Step]


def test_only_a_step_that_was_read_ahead_and_is_next_is_taken_at_once(both: Both) -> None:
    assert both.ahead.take_step() is None
    plan = Planner()
    with both.ahead.busy(plan):
        both.send(1)
        both.controller.send(Shutdown("done"), peer=PEER)
        both.send(2)
        plan.wait_for(1, 2)
    step = both.ahead.take_step()
    assert step is not None
    assert step.step_id == 1
    assert both.ahead.take(step) is not None
    assert both.ahead.take_step() is None, "the message before step 2 is handled first"
    assert isinstance(both.received(), Shutdown)
    assert both.ahead.take_step() is not None


def test_nothing_is_lost_between_sending_and_reading_on_two_threads(both: Both) -> None:
    """Each step is answered while it runs, and after the answer the controller sends the step after the next."""
    plan = Planner()
    both.send(0, 1)
    for number in range(200):
        step = both.received()
        assert isinstance(step, Step)
        assert step.step_id == number
        both.ahead.take(step)
        with both.ahead.busy(plan):
            both.ahead.send(StageFree(number, 0))
            answer = both.controller.receive(SECONDS)
            assert answer is not None
            both.send(number + 2)
    assert plan.planned == sorted(set(plan.planned))


def test_grammars_are_handled_in_order_while_a_step_runs_and_while_none_does(both: Both) -> None:
    """Also those behind a step that is to wait: nothing of them is left to the main thread."""
    names = [f"g{number}" for number in range(20)]

    def send(name: str) -> None:
        both.controller.send(CompileGrammar(name, "a grammar"), peer=PEER)
        both.controller.send(DropGrammar(name), peer=PEER)

    expected = [f"{what} {name}" for name in names for what in ("CompileGrammar", "DropGrammar")]
    with both.ahead.busy(Planner()):
        both.send(1)
        for name in names[:10]:
            send(name)
        for _ in range(20):
            assert both.controller.receive(SECONDS) is not None, "each is answered while the step runs"
        assert both.handled == expected[:20]
    for name in names[10:]:
        send(name)
    both.send(2)
    steps = []
    end = time.monotonic() + SECONDS
    while len(steps) < 2:
        assert time.monotonic() < end
        received = both.ahead.receive(SECONDS)
        if received is not None:
            assert isinstance(received.message, Step)
            steps.append(received.message.step_id)
    assert steps == [1, 2]
    assert both.handled == expected


def test_another_thread_sends_at_once_while_the_main_thread_waits_for_a_message(both: Both) -> None:
    """A rank that does nothing reports a grammar that it has compiled."""
    received: list[object] = []
    waiting = threading.Thread(target=lambda: received.append(both.received()))
    waiting.start()
    for number in range(50):
        both.ahead.send(StageFree(number, 0))
        assert both.controller.receive(SECONDS / 5) is not None, (
            "it waits until the other thread has a message"
        )
    assert received == []
    both.send(1)
    waiting.join(SECONDS)
    assert [type(one) for one in received] == [Step]


def test_no_message_is_overlooked_because_another_thread_sends_while_the_main_thread_waits(
    both: Both,
) -> None:
    """A thread that sends also reads the socket, and may find the message for which the main thread waits."""

    def send_steps() -> None:
        for number in range(300):
            both.send(number)
            both.ahead.send(StageFree(number, 0))
            assert both.controller.receive(SECONDS) is not None

    sending = threading.Thread(target=send_steps)
    sending.start()
    for number in range(300):
        step = both.received()
        assert isinstance(step, Step)
        assert step.step_id == number
    sending.join(SECONDS)
