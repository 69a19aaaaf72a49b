"""How fast prefills go in company, and what passes between steps, learned from when steps are launched."""

from __future__ import annotations

import pytest

from medha.scheduler.pace import Pace

LANE = (0,)


def launch(
    pace: Pace,
    count: int,
    *,
    every: float,
    predicted: float,
    alone: float,
    with_decodes: bool = True,
    start: float = 0.0,
) -> float:
    """So many steps, each launched `every` seconds behind the last; returns when the last one was."""
    for index in range(count):
        pace.launched(
            LANE, start + index * every, predicted, alone, with_decodes=with_decodes, continues=True
        )
    return start + (count - 1) * every


def test_at_first_prefills_are_taken_to_go_as_if_alone() -> None:
    assert Pace().of_prefills == 1.0
    assert Pace(0.001).between_seconds == 0.001


def test_the_pace_is_the_lone_work_done_in_the_time_that_it_took() -> None:
    pace = Pace()
    launch(pace, 20_000, every=0.025, predicted=0.025, alone=0.02)
    assert pace.of_prefills == pytest.approx(0.8, rel=1e-2)


def test_company_of_a_second_hardly_changes_the_pace() -> None:
    pace = Pace()
    launch(pace, 40, every=0.025, predicted=0.025, alone=0.0125)
    assert 0.98 < pace.of_prefills < 1.0


def test_prefills_that_share_a_step_are_not_reckoned_to_be_faster_than_alone() -> None:
    pace = Pace()
    launch(pace, 1000, every=0.1, predicted=0.1, alone=0.3)
    assert pace.of_prefills == 1.0


def test_the_time_between_steps_is_what_passes_beyond_their_predictions() -> None:
    pace = Pace()
    launch(pace, 500, every=0.0254, predicted=0.025, alone=0.02)
    assert pace.between_seconds == pytest.approx(0.0004, rel=1e-3)


def test_without_decodes_nothing_is_said_of_the_time_between_steps() -> None:
    pace = Pace(0.001)
    launch(pace, 500, every=0.6, predicted=0.5, alone=0.5, with_decodes=False)
    assert pace.between_seconds == 0.001


def test_one_accident_is_not_taken_for_a_habit() -> None:
    pace = Pace()
    last = launch(pace, 500, every=0.0254, predicted=0.025, alone=0.02)
    launch(pace, 1, every=0, predicted=0.025, alone=0.02, start=last + 3.0)
    assert pace.between_seconds < 0.001


def test_idle_time_is_neither_slow_work_nor_time_between_steps() -> None:
    pace = Pace()
    for index in range(100):
        at = index * 10.0
        pace.launched(LANE, at, 0.025, 0.025, with_decodes=True, continues=False)
    assert pace.of_prefills == 1.0
    assert pace.between_seconds == 0.0


def test_steps_faster_than_predicted_leave_no_negative_time_between_them() -> None:
    pace = Pace()
    launch(pace, 500, every=0.02, predicted=0.025, alone=0.02)
    assert pace.between_seconds == 0.0


def test_lanes_are_timed_each_by_itself() -> None:
    pace = Pace()
    for index in range(2000):
        at = index * 0.05
        pace.launched((0,), at, 0.05, 0.04, with_decodes=True, continues=True)
        pace.launched((1,), at + 0.025, 0.05, 0.04, with_decodes=True, continues=True)
    assert pace.between_seconds == pytest.approx(0.0, abs=1e-9)
    assert pace.of_prefills == pytest.approx(0.8, rel=0.1)


def test_the_time_that_lanes_moved_together_is_no_step_of_one_of_them() -> None:
    pace = Pace()
    pace.launched((0,), 0.0, 0.5, 0.5, with_decodes=True, continues=True)
    for index in range(1, 601):
        pace.launched((0, 1), index * 0.5, 0.5, 0.5, with_decodes=True, continues=index < 600)
    for index in range(601, 603):
        pace.launched((0,), index * 0.5, 0.5, 0.5, with_decodes=True, continues=True)
    assert pace.of_prefills == 1.0
    assert pace.between_seconds == 0.0


def test_the_time_that_lanes_moved_apart_is_no_step_of_them_together() -> None:
    pace = Pace()
    pace.launched((0, 1), 0.0, 0.5, 0.5, with_decodes=True, continues=True)
    pace.launched((1,), 0.5, 0.5, 0.5, with_decodes=True, continues=False)
    pace.launched((0, 1), 300.0, 0.5, 0.5, with_decodes=True, continues=False)
    assert pace.of_prefills == 1.0


def test_the_lanes_of_others_are_timed_on_beside_a_step() -> None:
    pace = Pace()
    pace.launched((0,), 0.0, 0.1, 0.1, with_decodes=True, continues=True)
    pace.launched((1,), 0.1, 0.1, 0.1, with_decodes=True, continues=True)
    pace.launched((0,), 60.0, 0.1, 0.1, with_decodes=True, continues=False)
    assert pace.of_prefills < 0.5
