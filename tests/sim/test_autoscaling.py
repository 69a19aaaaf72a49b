"""The simulated autoscaler decides as Kubernetes' does, and its fleets lose no request, at zero replicas neither."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from medha.topology import Topology
from medha_sim.autoscaling import AutoscalerTerms, HorizontalAutoscaler, Signal
from medha_sim.scenario import Deployment
from medha_sim.simulation import Arrival, Workload
from medha_sim.workloads import varied

TERMS = AutoscalerTerms(min_replicas=0, max_replicas=100, stabilisation_seconds=300.0)


def test_a_difference_of_a_tenth_changes_nothing_and_a_larger_one_rounds_up() -> None:
    assert HorizontalAutoscaler(TERMS).decide(10, 10.9, 1.0, 0.0) == 10
    assert HorizontalAutoscaler(TERMS).decide(10, 11.1, 1.0, 0.0) == 12
    assert HorizontalAutoscaler(TERMS).decide(0, 0.01, 1.0, 0.0) == 1


def test_in_one_step_the_number_doubles_at_most_or_grows_by_four() -> None:
    assert HorizontalAutoscaler(TERMS).decide(1, 50.0, 1.0, 0.0) == 5
    assert HorizontalAutoscaler(TERMS).decide(10, 50.0, 1.0, 0.0) == 20


def test_replicas_are_removed_once_no_more_were_needed_for_the_time_of_stabilisation() -> None:
    autoscaler = HorizontalAutoscaler(TERMS)
    assert autoscaler.decide(5, 5.0, 1.0, 0.0) == 5
    assert autoscaler.decide(5, 0.0, 1.0, 100.0) == 5
    assert autoscaler.decide(5, 2.0, 1.0, 299.0) == 5
    assert autoscaler.decide(5, 0.0, 1.0, 300.0) == 2
    assert autoscaler.decide(2, 0.0, 1.0, 599.0) == 0


@given(st.floats(0, 50), st.integers(0, 50))
def test_under_a_constant_load_the_number_settles_and_stays(load: float, first: int) -> None:
    autoscaler, current, seen = HorizontalAutoscaler(TERMS), first, []
    for now in range(0, 1200, 15):
        current = autoscaler.decide(current, load, 1.0, float(now))
        seen.append(current)
    assert len(set(seen[40:])) == 1
    assert abs(seen[-1] - load) <= max(1.0, 0.1 * seen[-1])
    ups = [b > a for a, b in zip([first, *seen], seen, strict=False) if a != b]
    assert ups == sorted(ups, reverse=True), "it went up after it had gone down"


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0, 10)), max_size=40), st.integers(0, 20))
def test_more_load_never_leads_to_fewer_replicas(loads: list[tuple[float, float]], first: int) -> None:
    terms = replace(TERMS, tolerance=0.0)
    less, more = HorizontalAutoscaler(terms), HorizontalAutoscaler(terms)
    few = many = first
    for number, (load, further) in enumerate(loads):
        few = less.decide(few, load, 1.0, 15.0 * number)
        many = more.decide(many, load + further, 1.0, 15.0 * number)
        assert few <= many


@given(st.integers(1, 300), st.floats(0.1, 5), st.floats(0.1, 5))
def test_requests_that_are_moved_keep_their_order_and_follow_the_rates(
    count: int, first: float, last: float
) -> None:
    arrivals = [arrival(number, float(number)) for number in range(count)]
    moved = varied(Workload(arrivals), ((0.0, first), (100.0, first), (100.001, last), (200.0, last)))
    times = [one.at_seconds for one in moved.arrivals]
    assert times == sorted(times)
    assert [one.id for one in moved.arrivals] == [one.id for one in arrivals]
    assert sum(at <= 100 for at in times) == pytest.approx(count * first / (first + last), abs=2)


def arrival(number: int, at: float, prompt: int = 20_000) -> Arrival:
    return Arrival(
        f"r{number}", at, prompt, 4, ttft_target_seconds=30.0, tpot_target_seconds=0.2, max_tokens=4
    )


@pytest.mark.parametrize(
    "signal", [Signal("demand"), Signal("queue", 2), Signal("kv", 0.05), Signal("busy", 0.7)]
)
def test_a_fleet_grows_with_a_burst_goes_back_to_its_least_and_answers_every_request(signal: Signal) -> None:
    workload = Workload([arrival(number, 60 + number * 0.25) for number in range(200)])
    terms = AutoscalerTerms(min_replicas=1, max_replicas=4, stabilisation_seconds=60.0)
    deployment = Deployment(topology=Topology(tensor=2))
    simulation, fleet = deployment.autoscaled(workload, signal, terms, start_seconds=30.0)
    log = simulation.run(900.0)
    scaling = fleet.finish(900.0)
    assert {one.ending for one in log.requests.values()} == {"finished"}
    assert max(scaling.replicas) > 1
    assert scaling.replicas[-1] == 1
    paid = float(np.trapezoid(scaling.replicas, scaling.at))
    assert scaling.replica_seconds >= paid * 0.9, "starts and drains cost, too"
    assert scaling.replica_seconds < 4 * 900


def test_from_zero_replicas_requests_wait_for_the_first_and_the_fleet_ends_at_zero_again() -> None:
    burst = [arrival(number, 700 + number * 0.5) for number in range(20)]
    workload = Workload([arrival(99, 0.0), *burst])
    terms = AutoscalerTerms(min_replicas=0, max_replicas=3, stabilisation_seconds=60.0)
    simulation, fleet = Deployment(topology=Topology(tensor=2)).autoscaled(
        workload, Signal("demand"), terms, start_seconds=30.0
    )
    log = simulation.run(1500.0)
    scaling = fleet.finish(1500.0)
    assert {one.ending for one in log.requests.values()} == {"finished"}
    at_zero = [at for at, replicas in zip(scaling.at, scaling.replicas, strict=True) if replicas == 0]
    assert any(at < 700 for at in at_zero), "it was at zero before the burst"
    assert ceil(max(at_zero)) > 1400, "and after it"
    first = min(one.first_token_at or 0.0 for one in log.requests.values() if one.arrived_at >= 700)
    assert first >= 730, "the first replica of the burst takes its start time"


def test_urgent_requests_are_on_time_when_their_load_doubles_faster_than_a_replica_starts() -> None:
    deployment = Deployment(topology=Topology(tensor=2))
    prefill_seconds = float(deployment.targets().prefill_seconds(np.array([20_000]))[0])
    # Half a replica's load, then one and a half for as long as a replica takes to start.
    gaps = [prefill_seconds / 0.5] * int(150 / prefill_seconds) + [prefill_seconds / 1.5] * int(
        180 / prefill_seconds
    )
    arrivals = [
        replace(arrival(number, float(at)), ttft_target_seconds=8 * prefill_seconds)
        for number, at in enumerate(np.cumsum(gaps))
    ]
    terms = AutoscalerTerms(min_replicas=1, max_replicas=8)
    simulation, fleet = deployment.autoscaled(
        Workload(arrivals), Signal("demand"), terms, start_seconds=120.0
    )
    log = simulation.run(900.0)
    late = [
        one.arrived_at
        for one in log.requests.values()
        if one.first_token_at is None or one.first_token_at - one.arrived_at > one.ttft_target_seconds
    ]
    assert late == []
    scaling = fleet.finish(900.0)
    replicas = dict(zip(scaling.at, scaling.replicas, strict=True))
    assert max(replicas.values()) <= 6, "a step looks like the beginning of a slope"
    assert max(number for at, number in replicas.items() if at >= 645) <= 3, (
        "until it has been steady for a while"
    )
