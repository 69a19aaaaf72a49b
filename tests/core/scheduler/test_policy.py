"""Orders of prefills, worked by hand."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from medha.api.replica import SchedulingSpec
from medha.scheduler.policy import Columns, keys, urgent_first

PLAIN = ("fcfs", "edf", "lrs", "srpt", "lars")


def columns(*rows: tuple[float, float, float, float]) -> Columns:
    """Of (arrival, deadline after it, work, remaining) each."""
    arrival, deadline_after, work, remaining = np.array(rows, dtype=np.float64).T
    return Columns(arrival, arrival + deadline_after, work, remaining, np.arange(len(rows)))


NAMES = ("long", "short", "fresh")
# Paper B's example (docs/design.md#order) at t=5: half of the long prompt is done.
EXAMPLE = columns((0, 16, 10, 5), (5, 1, 0.5, 0.5), (5, 20, 0.1, 0.1))


def order(policy: str, denominator: str = "work", now: float = 5.0) -> list[str]:
    rows = urgent_first(keys(policy, EXAMPLE, now, denominator), EXAMPLE.tie)
    return [NAMES[row] for row in rows]


def test_slack_and_relative_slack_are_those_of_the_paper() -> None:
    assert EXAMPLE.slack(5).tolist() == pytest.approx([0 + 16 - 5 - 5, 0.5, 19.9])
    assert EXAMPLE.relative_slack(5).tolist() == pytest.approx([0.6, 1.0, 199])


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
        assert keys(policy, EXAMPLE, 5.0, "deadline").tolist() == keys(policy, EXAMPLE, 5.0).tolist()
    assert keys("lars", EXAMPLE, 5.0, "deadline").tolist() != keys("lars", EXAMPLE, 5.0).tolist()


def test_every_policy_that_a_manifest_may_name_exists() -> None:
    for policy in get_args(SchedulingSpec.model_fields["policy"].annotation):
        assert policy == "guarded" or len(keys(policy, EXAMPLE, 5.0)) == len(NAMES)


@pytest.mark.parametrize("denominator", ["work", "deadline"])
def test_a_request_without_work_or_deadline_has_a_finite_key(denominator: str) -> None:
    assert keys("lars", columns((0, 0, 0, 0)), 1.0, denominator).tolist() == pytest.approx([-1e6])


SECONDS = st.floats(0, 1e5)


@given(SECONDS, SECONDS, SECONDS, SECONDS, SECONDS)
def test_urgency_never_falls_while_a_request_waits(
    arrival: float, deadline: float, work: float, remaining: float, wait: float
) -> None:
    one = columns((arrival, deadline, work, min(work, remaining)))
    for policy in PLAIN:
        assert keys(policy, one, arrival + wait)[0] <= keys(policy, one, arrival)[0]


@given(st.lists(st.sampled_from([-np.inf, -1.0, 0.0, 0.5, 1.0, 2.0, 7.0, np.inf]), max_size=300), st.data())
def test_reading_lazily_gives_the_same_total_order_as_sorting(
    values: list[float], data: st.DataObject
) -> None:
    """Few distinct keys: the ties straddle every cut."""
    tie = np.array(data.draw(st.permutations(range(len(values)))), dtype=np.int64)
    column = np.array(values, dtype=np.float64)
    assert list(urgent_first(column, tie)) == np.lexsort((tie, column)).tolist()
