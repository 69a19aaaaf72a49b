"""The order of large bodies: short ones first, a bound on overtaking, owners apart, a place for short ones."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from medha_router.body_queue import LONG_BYTES, SECONDS_PER_BYTE, BodyQueue

MB = 10**6


def queue_of(sizes: Iterable[int], *, places: int = 1, owner: str = "") -> BodyQueue[int]:
    """Bodies 0, 1, ... that arrived at the same time; without an owner, each has its own."""
    queue: BodyQueue[int] = BodyQueue(places)
    for ticket, size in enumerate(sizes):
        queue.add(ticket, size, owner or f"owner {ticket}", 0.0)
    return queue


def order(queue: BodyQueue[int]) -> list[int]:
    """The order in which the bodies that wait are at work, one after the other."""
    found = []
    while (ticket := queue.start_next()) is not None:
        found.append(ticket)
        queue.remove(ticket)
    return found


def test_the_shortest_is_first() -> None:
    assert order(queue_of([3 * MB, MB, 2 * MB])) == [1, 2, 0]


def test_of_equal_bodies_the_first_that_came_is_first() -> None:
    assert order(queue_of([MB] * 5)) == [0, 1, 2, 3, 4]


def test_a_body_is_overtaken_only_by_those_that_arrive_before_it_is_due() -> None:
    queue: BodyQueue[str] = BodyQueue(1)
    queue.add("long", 10 * MB, "a", 0.0)
    queue.add("soon enough", MB, "b", 8.9)
    queue.add("too late", MB, "c", 9.1)
    assert [queue.start_next(), queue.remove("soon enough"), queue.start_next()] == [
        "soon enough",
        False,
        "long",
    ]


@given(st.lists(st.tuples(st.integers(1, 3 * MB), st.sampled_from("abc"), st.floats(0, 5)), max_size=12))
def test_however_many_bodies_arrive_none_overtakes_one_that_is_due(
    bodies: list[tuple[int, str, float]],
) -> None:
    """A body of its own owner, 2 MB long, is due after two seconds: what comes later than that comes after it."""
    queue: BodyQueue[int] = BodyQueue(1)
    queue.add(-1, 2 * MB, "victim", 0.0)
    for ticket, (size, owner, arrival) in enumerate(bodies):
        queue.add(ticket, size, owner, arrival)
    before = order(queue)
    overtook = before[: before.index(-1)]
    assert sorted(before) == list(range(-1, len(bodies)))
    assert all(bodies[ticket][2] <= 2 * MB * SECONDS_PER_BYTE for ticket in overtook)


def test_many_bodies_of_one_owner_delay_each_other_and_not_those_of_others() -> None:
    queue = queue_of([MB] * 20, owner="busy")
    queue.add(99, MB, "other", 0.5)
    assert order(queue).index(99) == 1


def test_a_body_at_work_counts_for_its_owner() -> None:
    queue = queue_of([MB], owner="busy")
    assert queue.start_next() == 0
    queue.add(1, MB, "busy", 0.1)
    queue.add(2, MB, "other", 0.2)
    queue.remove(0)
    assert order(queue) == [2, 1]


def test_long_bodies_of_an_owner_do_not_delay_its_short_ones() -> None:
    queue = queue_of([30 * MB] * 4, owner="one")
    queue.add(9, MB, "one", 0.0)
    assert order(queue)[0] == 9


def test_long_bodies_never_take_the_last_place() -> None:
    queue = queue_of([LONG_BYTES, LONG_BYTES, LONG_BYTES], places=3)
    assert [queue.start_next() for _ in range(3)] == [0, 1, None]
    queue.add(8, LONG_BYTES - 1, "short", 100.0)
    assert queue.start_next() == 8
    queue.remove(0)
    assert queue.start_next() == 2


def test_short_bodies_may_take_all_places_and_a_single_place_serves_all() -> None:
    queue = queue_of([MB] * 4, places=3)
    assert [queue.start_next() for _ in range(4)] == [0, 1, 2, None]
    assert queue_of([LONG_BYTES], places=1).start_next() == 0


def test_a_body_that_is_withdrawn_is_never_at_work() -> None:
    queue = queue_of([MB, 2 * MB])
    assert queue.is_waiting(0)
    assert queue.remove(0)
    assert (queue.waiting, order(queue), queue.remove(1)) == (1, [1], False)
