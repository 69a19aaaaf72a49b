"""The queue: a key is reconciled once at a time, none is forgotten, failures back off, and keys rest."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from medha_operator.kube.kinds import Key
from medha_operator.kube.workqueue import FIRST_SECONDS, WorkQueue, rest_seconds

A, B = (Key("MedhaReplica", "default", name) for name in "ab")


class Clock:
    """A time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def at_a_clock(test: Callable[[WorkQueue, Clock], Awaitable[None]]) -> None:
    async def run() -> None:
        clock = Clock()
        queue = WorkQueue(clock)
        await test(queue, clock)
        queue.close()

    asyncio.run(run())


def in_a_loop(test: Callable[[WorkQueue], Awaitable[None]]) -> None:
    """No reconcile takes time."""
    at_a_clock(lambda queue, _: test(queue))


def test_a_key_that_is_asked_for_often_is_taken_once_and_in_order() -> None:
    async def test(queue: WorkQueue) -> None:
        for key in (A, B, A, A):
            queue.add(key)
        assert [(await queue.take())[0] for _ in range(2)] == [A, B]
        assert len(queue) == 0

    in_a_loop(test)


def test_what_changes_during_a_reconcile_is_reconciled_after_it() -> None:
    async def test(queue: WorkQueue) -> None:
        queue.add(A)
        key, _ = await queue.take()
        queue.add(A)
        assert len(queue) == 0  # nobody else may work on it now
        queue.done(key)
        assert (await queue.take())[0] == A

    in_a_loop(test)


def test_a_key_rests_in_proportion_to_the_time_of_its_reconcile_and_never_long() -> None:
    assert [rest_seconds(elapsed) for elapsed in (0.0, 0.01, 0.1, 100.0)] == [0.0, 0.1, 1.0, 2.0]


def test_a_key_that_waited_for_its_reconcile_rests_though_the_reconcile_took_no_time() -> None:
    """If many keys compete, each is reconciled less often."""

    async def test(queue: WorkQueue, clock: Clock) -> None:
        queue.add(A)
        clock.now += 0.5
        key, waited = await queue.take()
        assert waited == 0.5
        queue.done(key)
        queue.add(key)
        assert len(queue) == 0

    at_a_clock(test)


def test_events_while_a_key_rests_make_one_reconcile_after_it_and_hold_up_no_other() -> None:
    async def test(queue: WorkQueue, clock: Clock) -> None:
        queue.add(A)
        key, _ = await queue.take()
        clock.now += 0.001
        queue.done(key)
        for heard in (A, A, B):
            queue.add(heard)
        assert len(queue) == 1
        assert [(await queue.take())[0] for _ in range(2)] == [B, A]
        assert len(queue) == 0

    at_a_clock(test)


def test_after_a_step_of_more_to_come_a_key_does_not_rest() -> None:
    async def test(queue: WorkQueue, clock: Clock) -> None:
        queue.add(A)
        key, _ = await queue.take()
        clock.now += 1.0
        queue.done(key, makes_progress=True)
        queue.add(key)
        assert len(queue) == 1

    at_a_clock(test)


def test_a_change_during_a_reconcile_that_fails_is_not_lost() -> None:
    async def test(queue: WorkQueue) -> None:
        queue.add(A)
        key, _ = await queue.take()
        queue.add(A)
        queue.failed(key)
        assert (await queue.take())[0] == A

    in_a_loop(test)


def test_failures_wait_twice_as_long_each_and_success_forgets_them() -> None:
    async def test(queue: WorkQueue) -> None:
        pauses = []
        for _ in range(3):
            queue.add(A)
            pauses.append(queue.failed((await queue.take())[0]))
        assert pauses == [FIRST_SECONDS, 2 * FIRST_SECONDS, 4 * FIRST_SECONDS]
        queue.add(A)
        queue.done((await queue.take())[0])
        queue.add(A)
        assert queue.failed((await queue.take())[0], at_least_seconds=9.0) == 9.0

    in_a_loop(test)


def test_of_two_later_reconciles_the_earlier_counts_and_wakes_a_worker_that_waits() -> None:
    async def test(queue: WorkQueue) -> None:
        waiting = asyncio.create_task(queue.take())
        queue.add_later(A, 3600.0)
        queue.add_later(A, 0.0)
        assert (await waiting)[0] == A

    in_a_loop(test)


def test_an_event_during_a_reconcile_that_is_refused_waits_as_long_as_the_refusal() -> None:
    """The change may be the reconcile's own status, which the watch reported before the answer came."""

    async def test(queue: WorkQueue) -> None:
        for _ in range(12):
            queue.add(A)
            key, _ = await queue.take()
            queue.add(A)
            assert queue.failed(key, at_least_seconds=5.0) == 5.0  # and no longer: it may be a user's change
            assert len(queue) == 0

    in_a_loop(test)
