"""The table of requests, where it answers from less than all of its rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from medha.api.replica import SchedulingSpec
from medha.cost.prefill_seconds import Alone
from medha.scheduler.prefill_order import PrefillOrder
from medha.scheduler.request import Prompt, Request
from medha.scheduler.request_table import Capacity, RequestTable
from medha.slo import Targets
from medha.wire.messages import Submit

NOW = 100.0
BLOCKS = st.integers(0, 12)


def late_request(number: int, *, is_long: bool) -> Request:
    id_ = f"request-{number}"
    return Request(
        submit=Submit(id_, id_, 1, 1, seed=1),
        id=id_,
        prompt=Prompt(id_, 1),
        tie=number,
        arrival=float(number),
        targets=Targets(1.0, 0.05, 0.05),
        is_long=is_long,
        length=1,
        limit_tokens=2,
        reservation_tokens=2,
    )


@given(
    rows=st.lists(st.tuples(BLOCKS, st.booleans(), st.booleans()), max_size=12),
    room=st.builds(Capacity, BLOCKS, BLOCKS, st.none() | st.integers(-3, 12), st.booleans()),
)
def test_whoever_finds_no_room_is_found_though_others_that_wanted_more_have_gone(
    rows: list[tuple[int, bool, bool]], room: Capacity
) -> None:
    table = RequestTable()
    stay: list[tuple[Request, int]] = []
    gone: list[Request] = []
    for number, (blocks, is_long, stays) in enumerate(rows):
        request = late_request(number, is_long=is_long)
        table.add(request, 1.0, Alone(1.0, 0.0), request.deadline, 0)
        table.needs(request, blocks, Alone(1.0, 0.0), request.deadline, held=False)
        if stays:
            stay.append((request, blocks))
        else:
            gone.append(request)
    table.prefilled(gone)
    for _ in range(2):  # the second time knows what the first has found
        of_longs = room.of_longs
        short_of_kv = {
            request.id
            for request, blocks in stay
            if blocks > room.of_one_lane or (request.is_long and of_longs is not None and blocks > of_longs)
        }
        shut_out = {request.id for request, _ in stay if request.is_long and not room.starts_long}
        refused = short_of_kv | shut_out
        admissible = table.admissible(room)
        assert {table.rows[row].id for row in np.flatnonzero(~admissible)} == refused
        claims = [request for request, _ in stay if request.id in short_of_kv - shut_out]
        first = min(claims, key=lambda request: request.deadline, default=None)
        assert table.late_without_capacity(room, NOW, 1.0) is first


def test_no_request_of_an_owner_over_its_places_is_chosen() -> None:
    table = RequestTable()
    for number, owner in enumerate("aab"):
        request = late_request(number, is_long=False)
        request.submit = replace(request.submit, owner=owner)
        table.add(request, 1.0, Alone(1.0, 0.0), request.deadline, 5)
    first, _, other = table.rows
    for room, chosen, admissible in (
        (Capacity(4, 4), first, []),
        (Capacity(4, 4, over=(1,)), other, []),
        (Capacity(9, 9, over=(1,)), None, [2]),
        (Capacity(9, 9, over=(1, 2)), None, []),
    ):
        assert table.late_without_capacity(room, NOW, 1.0) is chosen
        assert np.flatnonzero(table.admissible(room)).tolist() == admissible
    assert table.late(Capacity(9, 9), NOW, 1.0) is first
    assert table.late(Capacity(9, 9, over=(1,)), NOW, 1.0) is other


def test_no_request_that_could_not_claim_what_it_leaves_lets_a_long_one_step_aside() -> None:
    """Its owner may have more than an equal share of KV, or it is late before the copy to the host has ended."""
    table = RequestTable()
    for number, owner in enumerate("ab"):
        request = late_request(number, is_long=False)
        request.submit = replace(request.submit, owner=owner)
        table.add(request, 1.0, Alone(1.0, 0.0), request.deadline, 5)
    first, second = table.rows
    slack_seconds = first.deadline - 1.0
    for room, least_seconds, found in (
        (Capacity(4, 4), 0.0, first),
        (Capacity(4, 4, above_share=(1,)), 0.0, second),
        (Capacity(4, 4, over=(2,), above_share=(1,)), 0.0, None),
        (Capacity(4, 4), slack_seconds + 0.5, second),
    ):
        assert table.soon_late(room, 0.0, 1.0, least_seconds, 10.0) is found


@pytest.mark.parametrize("of_returning", [None, 5])
def test_other_long_requests_leave_their_share_to_one_that_comes_back(of_returning: int | None) -> None:
    table = RequestTable()
    for number in range(2):
        request = late_request(number, is_long=True)
        request.returns = number == 1
        table.add(request, 1.0, Alone(1.0, 0.0), request.deadline, 5)
    assert table.returning_blocks == 5
    room = Capacity(10, 10, of_longs=-3, of_returning=of_returning)
    assert np.flatnonzero(table.admissible(room)).tolist() == [1]
    assert table.late_without_capacity(room, NOW, 1.0) is table.rows[0]
    table.remove(table.rows[1])
    assert table.returning_blocks == 0


@pytest.mark.parametrize("drain_seconds", [0.0, 5.0, 200.0])
def test_a_demoted_long_one_claims_no_share_of_longs_before_its_revised_deadline_has_been_near(
    drain_seconds: float,
) -> None:
    """200 s of a prompt's time in the pipeline make its work due before the deadline even after a demotion."""
    table = RequestTable(by_due=True)
    request = late_request(1, is_long=True)
    table.add(request, 1.0, Alone(1.0, 0.0), request.deadline - drain_seconds, 5)
    assert not table.is_demoted(request)
    assert table.due(request) == table.prefill_due(request) == request.deadline
    crowded, full = Capacity(10, 10, of_longs=4), Capacity(4, 4)
    assert table.late_without_capacity(crowded, NOW, 1.0) is None, "whether it is demoted is not decided yet"
    table.plan.due[0] = NOW + 10.0 - drain_seconds
    assert table.is_demoted(request)
    assert table.due(request) == table.prefill_due(request) == NOW + 10.0
    assert table.late_without_capacity(crowded, NOW, 1.0) is None
    assert table.late_without_capacity(full, NOW, 1.0) is request, "KV that is free is another matter"
    assert table.late_without_capacity(crowded, NOW + 6.9, 1.0) is None
    table.plan.due[0] = NOW + 100.0 - drain_seconds  # renewed: there was never room to keep it
    assert table.late_without_capacity(crowded, NOW + 6.9, 1.0) is None
    assert table.late_without_capacity(crowded, NOW + 7.0, 1.0) is request


def test_one_that_found_no_place_where_there_was_room_lacks_kv_until_it_wants_another_amount() -> None:
    table = RequestTable()
    request = late_request(1, is_long=False)
    table.add(request, 1.0, Alone(1.0, 0.0), request.deadline, 5)
    room = Capacity(10, 10)
    assert table.late_without_capacity(room, NOW, 1.0) is None
    table.misfits(request)
    assert table.late_without_capacity(room, 0.0, 1.0) is None, "it is not late"
    assert table.late_without_capacity(room, NOW, 1.0) is request
    assert table.admissible(room).all(), "others may end, so it is asked again"
    table.needs(request, 4, Alone(1.0, 0.0), request.deadline, held=False)
    assert table.late_without_capacity(room, NOW, 1.0) is None


@pytest.mark.parametrize(
    ("correction", "pace", "demoted"),
    [(1.0, 1.0, 0), (1.2, 1.0, 0), (1.5, 1.0, 1), (1.0, 0.8, 0), (1.0, 0.6, 1), (1.2, 0.8, 1)],
)
def test_guarded_counts_work_by_what_steps_really_take_and_by_the_pace_in_company(
    correction: float, pace: float, demoted: int
) -> None:
    """Two of ten seconds each are due 25 s from now: they fit as long as a second of work takes at most 1.25 s."""
    table = RequestTable(by_due=True)
    for number in range(2):
        table.add(late_request(number, is_long=False), 1.0, Alone(10.0, 0.0), NOW + 25.0, 0)
    PrefillOrder(SchedulingSpec()).select(table, correction, pace, NOW)
    assert np.count_nonzero(table.plan.due > NOW + 25.0) == demoted
