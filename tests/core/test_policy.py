"""Orders of prefills, worked by hand."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medha.api import SchedulingSpec
from medha.policy import PrefillState, policy_key

# Paper B's example as DESIGN §5 tells it, at t=5: half of the long is done.
LONG = PrefillState(arrival=0, deadline_after=16, work_seconds=10, remaining_seconds=5)
SHORT = PrefillState(arrival=5, deadline_after=1, work_seconds=0.5, remaining_seconds=0.5)
FRESH = PrefillState(arrival=5, deadline_after=20, work_seconds=0.1, remaining_seconds=0.1)


def order(policy: str, denominator: str = "work", now: float = 5.0) -> list[str]:
    states = {"long": LONG, "short": SHORT, "fresh": FRESH}
    key = policy_key(policy, denominator)
    return sorted(states, key=lambda name: key(states[name], now))


def test_slack_and_relative_slack_are_those_of_the_paper() -> None:
    assert LONG.slack(5) == 0 + 16 - 5 - 5
    assert LONG.relative_slack(5) == pytest.approx(0.6)
    assert SHORT.slack(5) == 0.5
    assert SHORT.relative_slack(5) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("policy", "denominator", "expected"),
    [
        ("fcfs", "work", ["long", "short", "fresh"]),  # 0, 5, 5
        ("edf", "work", ["short", "long", "fresh"]),  # 6, 16, 25
        ("lrs", "work", ["short", "long", "fresh"]),  # 0.5, 6, 19.9
        ("srpt", "work", ["fresh", "short", "long"]),  # 0.1, 0.5, 5
        ("lars", "work", ["long", "short", "fresh"]),  # 0.6, 1.0, 199
        ("lars", "deadline", ["long", "short", "fresh"]),  # 0.375, 0.5, 0.995
    ],
)
def test_each_policy_orders_as_its_definition_says(
    policy: str, denominator: str, expected: list[str]
) -> None:
    assert order(policy, denominator) == expected


def test_lars_lets_the_shorts_pass_a_little_later_because_their_relative_slack_falls_faster() -> None:
    assert order("lars", now=5.0)[0] == "long"
    assert order("lars", now=5.3)[0] == "short", "0.57 of the long against 0.4"


def test_the_denominator_changes_no_other_policy() -> None:
    for policy in ("fcfs", "edf", "lrs", "srpt"):
        assert policy_key(policy, "deadline") is policy_key(policy, "work")
    assert policy_key("lars", "deadline") is not policy_key("lars", "work")


def test_every_policy_that_a_manifest_may_name_exists() -> None:
    for policy in get_args(SchedulingSpec.model_fields["policy"].annotation):
        assert callable(policy_key(policy))


@pytest.mark.parametrize("denominator", ["work", "deadline"])
def test_a_request_without_work_or_deadline_has_a_finite_key(denominator: str) -> None:
    nothing = PrefillState(arrival=0, deadline_after=0, work_seconds=0, remaining_seconds=0)
    assert policy_key("lars", denominator)(nothing, 1.0) == pytest.approx(-1e6)


SECONDS = st.floats(0, 1e5)


@given(SECONDS, SECONDS, SECONDS, SECONDS, SECONDS)
def test_urgency_never_falls_while_a_request_waits(
    arrival: float, deadline: float, work: float, remaining: float, wait: float
) -> None:
    state = PrefillState(arrival, deadline, work, min(work, remaining))
    for policy in ("fcfs", "edf", "lrs", "srpt", "lars"):
        key = policy_key(policy)
        assert key(state, arrival + wait) <= key(state, arrival)
