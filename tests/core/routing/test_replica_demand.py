"""The replicas that a router's clients need: by work, not by counts; additive over routers; nothing when nothing is asked."""

from __future__ import annotations

from dataclasses import fields, replace
from math import ceil, inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medha.routing.replica_demand import (
    OPEN_SHARE,
    ArrivedWork,
    DemandTerms,
    GrowingWork,
    ModelWork,
    ReplicaSize,
    replica_demand,
)

TERMS = DemandTerms(spread_seconds=60.0, busy_share=0.5, kv_share=0.9)
SIZE = ReplicaSize(lanes=1.0, kv_tokens=1000.0)

_seconds = st.floats(0, 1e6)
works = st.builds(
    ModelWork,
    arrival_rate=_seconds,
    urgent_rate=_seconds,
    urgent_growth=_seconds,
    pending_seconds=_seconds,
    waiting_lanes=_seconds,
    missed_seconds=_seconds,
    kv_tokens=st.integers(0, 10**7),
    open_requests=st.integers(0, 1000),
)
sizes = st.builds(ReplicaSize, st.floats(1, 16), st.floats(1000, 1e8))


def total(work: ModelWork, size: ReplicaSize | None = SIZE, terms: DemandTerms = TERMS) -> float:
    return sum(replica_demand(work, size, terms).values())


def test_nothing_asked_needs_nothing() -> None:
    assert total(ModelWork()) == 0.0
    assert total(ModelWork(), None) == 0.0


def test_work_that_arrives_keeps_its_share_of_replicas_busy() -> None:
    # Half a second of prefill in each second; a replica should be busy for half of its time.
    assert replica_demand(ModelWork(arrival_rate=0.5), SIZE, TERMS)["arrivals"] == pytest.approx(1.0)


def test_a_replica_of_several_lanes_does_the_work_of_as_many() -> None:
    work = ModelWork(arrival_rate=5.0, waiting_lanes=4.0)
    assert total(work, replace(SIZE, lanes=4.0)) == pytest.approx(total(work) / 4)


def test_replicas_without_a_kv_pool_need_no_more_of_them_for_kv() -> None:
    work = ModelWork(arrival_rate=0.5, kv_tokens=500, open_requests=1)
    assert replica_demand(work, replace(SIZE, kv_tokens=0.0), TERMS) == pytest.approx(
        {"arrivals": 1.0, "waiting": 0.0, "kv": 0.0, "spare": 0.0, "growth": 0.0, "open": 0.0}
    )


def test_kv_counts_as_far_as_it_needs_more_replicas_than_prefill_does() -> None:
    parts = replica_demand(ModelWork(arrival_rate=0.5, kv_tokens=2700), SIZE, TERMS)
    assert parts == pytest.approx(
        {"arrivals": 1.0, "waiting": 0.0, "kv": 2.0, "spare": 0.0, "growth": 0.0, "open": 0.0}
    )
    assert replica_demand(ModelWork(arrival_rate=5.0, kv_tokens=2700), SIZE, TERMS)["kv"] == 0.0
    assert replica_demand(ModelWork(waiting_lanes=1.0, kv_tokens=2700), SIZE, TERMS)["kv"] == pytest.approx(
        2.0
    )


def test_a_request_for_a_model_that_no_replica_ever_served_needs_one() -> None:
    assert ceil(total(ModelWork(open_requests=1), None)) == 1


def test_a_hundred_routers_with_one_idle_request_each_need_one_replica() -> None:
    assert ceil(100 * total(ModelWork(open_requests=1))) == 1


@pytest.mark.parametrize(("urgent_rate", "spare"), [(0.0, 0.0), (0.04, 0.2), (0.49, 0.7), (4.0, 1.0)])
def test_urgent_work_keeps_a_spare_that_is_large_beside_a_small_load_and_at_most_one_replica(
    urgent_rate: float, spare: float
) -> None:
    work = ModelWork(arrival_rate=5.0, urgent_rate=urgent_rate)
    assert replica_demand(work, SIZE, TERMS)["spare"] == pytest.approx(spare)
    assert replica_demand(work, None, TERMS)["spare"] == 0.0


def test_a_replica_that_is_half_busy_with_urgent_work_has_a_second_one_beside_it() -> None:
    terms = DemandTerms()
    assert ceil(total(ModelWork(arrival_rate=0.5, urgent_rate=0.5), SIZE, terms)) == 2
    assert ceil(total(ModelWork(arrival_rate=0.5), SIZE, terms)) == 1, "work that can wait needs none"


@given(st.integers(1, 20), st.floats(0, 20))
def test_routers_that_divide_the_clients_ask_for_the_spare_of_one_router_that_has_them_all(
    routers: int, urgent_rate: float
) -> None:
    part = ModelWork(urgent_rate=urgent_rate / routers)
    found = replica_demand(part, replace(SIZE, routers=routers), TERMS)["spare"]
    whole = replica_demand(ModelWork(urgent_rate=urgent_rate), SIZE, TERMS)["spare"]
    assert routers * found == pytest.approx(whole)


@given(works, works, sizes)
def test_more_of_anything_never_needs_fewer_replicas(
    one: ModelWork, other: ModelWork, size: ReplicaSize
) -> None:
    more = ModelWork(
        **{each.name: max(getattr(one, each.name), getattr(other, each.name)) for each in fields(ModelWork)}
    )
    assert total(more, size) >= total(one, size) * (1 - 1e-9)


@given(works, works, sizes)
def test_two_routers_together_need_at_most_what_each_alone_adds_up_to(
    one: ModelWork, other: ModelWork, size: ReplicaSize
) -> None:
    both = ModelWork(
        **{each.name: getattr(one, each.name) + getattr(other, each.name) for each in fields(ModelWork)}
    )
    apart = total(one, size) + total(other, size)
    assert total(both, size) <= apart * (1 + 1e-9) + 1e-9
    if not (one.kv_tokens or other.kv_tokens):  # else one may be short of KV, and the other of time
        assert total(both, size) >= apart * (1 - 1e-9) - 1.0 - 2 * OPEN_SHARE, "they share at most one spare"
    if not (one.kv_tokens or other.kv_tokens or one.urgent_rate or other.urgent_rate):
        assert total(both, size) == pytest.approx(apart, abs=2 * OPEN_SHARE)


@given(works, sizes)
def test_the_parts_are_never_negative_and_an_open_request_keeps_the_sum_above_zero(
    work: ModelWork, size: ReplicaSize
) -> None:
    assert min(replica_demand(work, size, TERMS).values()) >= 0
    if work.open_requests:
        assert total(work, size) >= OPEN_SHARE * (1 - 1e-9)


# --- the growth of urgent work ---------------------------------------------------------------------------


def growing(rates: list[float], terms: DemandTerms = TERMS) -> GrowingWork:
    """Return work that arrives at these rates, one for each second from 0 on, in requests of 0.1 s."""
    found, left = GrowingWork(terms), 0.0
    for second, rate in enumerate(rates):
        left += rate
        while left >= 0.1:
            left -= 0.1
            found.add(0.1, float(second))
    return found


def test_a_slope_is_predicted_to_go_on_until_a_further_replica_serves() -> None:
    slope = growing([1.0 + 0.02 * second for second in range(120)], replace(TERMS, growth_errors=0.0))
    # The later half minute is centred 15 s ago, so that the rate in 120 s is 135 times 0.02 more.
    assert slope.growth(3.0, 1, 119.9) == pytest.approx(2.7, rel=0.05)


def test_a_constant_or_falling_load_grows_by_nothing() -> None:
    assert growing([2.0] * 120).growth(2.0, 1, 119.9) == 0.0
    assert growing([2.0 - 0.01 * second for second in range(120)]).growth(2.0, 1, 119.9) == 0.0
    assert growing([]).growth(0.0, 1, 10.0) == 0.0


def test_a_few_large_requests_more_are_chance_and_as_much_work_in_many_small_ones_is_growth() -> None:
    few, many = GrowingWork(TERMS), GrowingWork(TERMS)
    few.add(6.0, 100.0)
    for number in range(600):
        many.add(0.01, 100.0 + number / 30)
    assert few.growth(1.0, 1, 120.0) == 0.0
    assert many.growth(1.0, 1, 120.0) > 0.5


def test_a_step_is_predicted_to_grow_by_three_times_the_rate_at_most_and_for_a_minute() -> None:
    step = growing([0.0] * 60 + [1.0] * 90)
    assert step.growth(0.5, 1, 89.9) == 1.5
    assert step.growth(1.0, 1, 149.9) == 0.0


@given(st.integers(2, 20), st.lists(st.floats(0, 1), min_size=60, max_size=60))
def test_routers_that_divide_the_clients_predict_the_growth_that_one_router_of_all_would(
    routers: int, works: list[float]
) -> None:
    """Each of n routers has a request for each of the n that one router has in the same second."""
    part, whole = GrowingWork(TERMS), GrowingWork(TERMS)
    for second, work in enumerate(works):
        part.add(work, float(second))
        for _ in range(routers):
            whole.add(work, float(second))
    found = routers * part.growth(1.0, routers, 59.9)
    assert found == pytest.approx(whole.growth(routers, 1, 59.9), rel=1e-6, abs=1e-6)


# --- the rate of arrivals ---------------------------------------------------------------------------------


def test_the_work_of_a_long_prompt_is_spread_over_the_time_until_it_is_due() -> None:
    arrived = ArrivedWork(TERMS)
    arrived.add(100.0, 300.0, 1000.0)
    arrived.add(6.0, 2.0, 1000.0)
    assert arrived.rates(1059.0, idle=False)[0] == pytest.approx(100 / 300 + 6 / 60)
    assert arrived.rates(1066.0, idle=False)[0] == pytest.approx(100 / 300)
    assert arrived.rates(1306.0, idle=False)[0] == 0.0


def test_work_is_urgent_if_it_is_due_soon_after_its_arrival() -> None:
    arrived = ArrivedWork(TERMS)
    arrived.add(6.0, 30.0, 1000.0)
    arrived.add(12.0, 31.0, 1000.0)
    assert arrived.rates(1059.0, idle=False) == pytest.approx((0.3, 0.1))
    arrived.end(1000.0)
    assert arrived.rates(1060.0, idle=True) == (0.0, 0.0)


def test_work_that_is_never_due_is_forgotten_all_the_same() -> None:
    arrived = ArrivedWork(TERMS)
    arrived.add(36.0, inf, 0.0)
    assert arrived.rates(3600.0, idle=False)[0] == pytest.approx(0.01)
    assert arrived.rates(3606.0, idle=False)[0] == 0.0


def test_work_that_is_due_tomorrow_counts_no_more_once_all_has_ended_for_a_minute() -> None:
    arrived = ArrivedWork(TERMS)
    arrived.add(36.0, 86_400.0, 0.0)
    arrived.end(100.0)
    assert arrived.rates(159.0, idle=True)[0] == pytest.approx(0.01)
    assert arrived.rates(160.0, idle=False)[0] == pytest.approx(0.01), "another is open"
    assert arrived.rates(160.0, idle=True)[0] == 0.0
    assert arrived.rates(160.0, idle=False)[0] == 0.0


@given(
    st.lists(st.tuples(st.floats(0, 400), st.floats(0, 100), st.floats(0, 300)), max_size=60),
    st.floats(0, 600),
)
def test_each_arrival_counts_until_it_is_due_give_or_take_a_bucket(
    arrivals: list[tuple[float, float, float]], after: float
) -> None:
    arrived = ArrivedWork(TERMS)
    for at, work, due in sorted(arrivals):
        arrived.add(work, due, at)
    now = max((at for at, _, _ in arrivals), default=0.0) + after
    spread = [(at + max(due, 60), work / max(due, 60)) for at, work, due in arrivals]
    rate = arrived.rates(now, idle=False)[0]
    assert rate >= sum(one for end, one in spread if end >= now) - 1e-6
    assert rate <= sum(one for end, one in spread if end > now - 5.1) + 1e-6


@given(st.floats(0.01, 20), st.floats(0.1, 5))
def test_a_constant_load_needs_a_constant_number_of_replicas(rate: float, work: float) -> None:
    """Whenever it is asked: the demand of equal arrivals at equal distances varies by one arrival or one bucket."""
    arrived, gap = ArrivedWork(TERMS), 1 / rate
    seen = []
    for number in range(int(600 * rate)):
        now = number * gap
        arrived.add(work, 2.0, now)
        if now > 240:
            seen.append(arrived.rates(now, idle=False)[0])
    if seen:
        assert max(seen) - min(seen) <= work * (rate * 5 + 2) / 60
        assert sum(seen) / len(seen) == pytest.approx(rate * work, rel=0.1, abs=2 * work / 60)
