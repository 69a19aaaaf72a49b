"""Deadlines and TPOT targets."""

from __future__ import annotations

import pytest

from medha.api.replica import ServiceClass
from medha.slo import FALLBACK_TERMS, Targets, class_terms, targets, ttft_target_seconds
from medha.wire.messages import ServiceClassTerms

CHAT = ServiceClass(
    name="chat", ttft_floor_seconds=2, ttft_factor=3, tpot_target_seconds=0.05, tpot_floor_seconds=0.01
)


@pytest.mark.parametrize(
    ("work_seconds", "deadline"), [(0.0, 2), (0.5, 2), (2 / 3, 2), (1.0, 3), (100.0, 300)]
)
def test_the_deadline_is_the_floor_or_a_multiple_of_the_work(work_seconds: float, deadline: float) -> None:
    found = targets(CHAT, work_seconds)
    assert found.ttft_seconds == pytest.approx(deadline)
    assert found == Targets(found.ttft_seconds, 0.05, 0.05)


@pytest.mark.parametrize("asked", [0.7, 0.0])
def test_a_request_may_name_its_own_deadline(asked: float) -> None:
    assert targets(CHAT, 100.0, requested_ttft_seconds=asked).ttft_seconds == asked


@pytest.mark.parametrize("work_seconds", [0.0, 0.5, 1.0, 100.0])
@pytest.mark.parametrize("asked", [None, 0.0, 0.7])
def test_what_a_replica_announces_of_a_class_gives_the_same_deadline(
    work_seconds: float, asked: float | None
) -> None:
    announced = ServiceClassTerms("chat", 2.0, 3.0, 0.05, 0.01, 4096)
    expected = targets(CHAT, work_seconds, asked).ttft_seconds
    assert ttft_target_seconds(announced, work_seconds, asked) == expected


def test_default_and_unknown_names_get_the_first_class_that_is_announced() -> None:
    chat, batch = (ServiceClassTerms(name, 2.0, 3.0, 0.05, 0.01, 4096) for name in ("chat", "batch"))
    assert [class_terms((chat, batch), name) for name in ("batch", "default", "gone")] == [batch, chat, chat]
    assert class_terms((), "default") is FALLBACK_TERMS


@pytest.mark.parametrize(
    ("asked", "applied"), [(None, 0.05), (0.2, 0.2), (0.01, 0.01), (0.001, 0.01), (-1.0, 0.01)]
)
def test_a_tpot_tighter_than_the_floor_is_clamped_to_it(asked: float | None, applied: float) -> None:
    assert targets(CHAT, 1.0, requested_tpot_seconds=asked).tpot_seconds == applied


@pytest.mark.parametrize(("asked", "fair"), [(None, 0.05), (0.2, 0.2), (0.01, 0.05), (0.001, 0.05)])
def test_a_tighter_wish_than_the_class_is_told_apart_from_what_the_class_gives(
    asked: float | None, fair: float
) -> None:
    assert targets(CHAT, 1.0, requested_tpot_seconds=asked).fair_tpot_seconds == fair
