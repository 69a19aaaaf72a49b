"""The decisions of `benchmarks/fairness.py`: paired arrivals, 100 times the load, and the points that a key loses."""

from __future__ import annotations

from types import ModuleType

import pytest

from benchmark import benchmark
from medha.topology import Topology
from medha_sim.scenario import Deployment


@pytest.fixture(scope="module")
def fairness() -> ModuleType:
    return benchmark("fairness")


def test_the_small_key_sends_the_same_beside_a_key_with_100_times_its_load(fairness: ModuleType) -> None:
    scenario = fairness.Scenario("a", 2.0, 60.0, 1)
    deployment = Deployment(topology=Topology(tensor=1))
    alone, both = fairness.workloads(scenario, deployment, seed=3)
    assert {one.owner for one in alone.arrivals} == {"key:small"}
    assert [one for one in both.arrivals if one.owner == "key:small"] == list(alone.arrivals)
    large = [one for one in both.arrivals if one.owner == "key:large"]
    assert len(large) / len(alone.arrivals) == pytest.approx(100, rel=0.2)
    assert [one.at_seconds for one in both.arrivals] == sorted(one.at_seconds for one in both.arrivals)
    assert len({one.id for one in both.arrivals}) == len(both.arrivals)
    assert fairness.workloads(scenario, deployment, seed=4)[0] != alone


def test_the_load_over_http_is_100_times_in_tokens(fairness: ModuleType) -> None:
    small = fairness.SMALL_PER_SECOND * fairness.SMALL_PROMPT_TOKENS
    large = fairness.LARGE_PER_SECOND * fairness.LARGE_PROMPT_TOKENS
    assert large == fairness.TIMES * small


@pytest.mark.parametrize(("beside", "holds"), [((98, 100), True), ((97, 100), False), ((0, 100), False)])
def test_more_than_two_points_miss_the_goal(
    fairness: ModuleType, beside: tuple[int, int], holds: bool
) -> None:
    (found,) = fairness.claims([fairness.OnTime("a", (100, 100), beside, (1, 2))])
    assert found["value"] == 100 - beside[0]
    assert benchmark("harness").holds(found) is holds
    assert found["peer"] == "alone: 100.0 % of 100; the large key: 50.0 % of 2"


def test_the_requests_of_all_seeds_count_together(fairness: ModuleType) -> None:
    seeds = [fairness.OnTime("a", (9, 9), (9, 9), (5, 9)), fairness.OnTime("a", (1, 1), (0, 1), (0, 1))]
    whole = fairness.together(seeds)
    assert (whole.alone, whole.beside, whole.large) == ((10, 10), (9, 10), (5, 10))
    assert whole.lost_points == 10.0
