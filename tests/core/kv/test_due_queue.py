"""Work with due times: what is due first comes first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from medha.kv.due_queue import DueQueue


@given(st.lists(st.tuples(st.sampled_from([-1.0, 0.0, 2.5]), st.booleans())))
def test_items_come_in_the_order_of_due_times_and_then_of_arrival(steps: list[tuple[float, bool]]) -> None:
    queue: DueQueue[int] = DueQueue()
    waiting: list[tuple[float, int]] = []
    for number, (due, pops) in enumerate(steps):
        queue.add(number, due)
        waiting.append((due, number))
        assert sorted(queue) == sorted(number for _, number in waiting)
        first = min(waiting)
        assert queue.first() == first[1]
        if pops:
            waiting.remove(first)
            assert queue.pop() == first[1]
    assert len(queue) == len(waiting)
    queue.clear()
    assert not queue
    assert queue.first() is None
