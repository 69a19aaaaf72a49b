"""What the lanes of a coupled step report becomes one event."""

from medha.messages import Done, EntryFailed, Sample, StageFree, Step
from medha_worker.lock_step import LockStep


def test_a_step_of_one_lane_passes_at_once() -> None:
    joined = LockStep()
    joined.expect(Step(step_id=1, epoch=0, entries=(), lanes=(2,)))
    free, done = StageFree(1, 0, lanes=(2,)), Done(1, lanes=(2,))
    assert joined.join(free) == free
    assert joined.join(done) == done


def test_the_last_lane_completes_the_event_with_what_all_have_drawn() -> None:
    joined = LockStep()
    joined.expect(Step(step_id=1, epoch=0, entries=(), lanes=(0, 3)))
    assert joined.join(StageFree(1, 0, lanes=(3,))) is None
    assert joined.join(StageFree(1, 0, lanes=(0,))) == StageFree(1, 0, lanes=(0, 3))
    first = Done(1, (Sample("a", 5),), (), 0.5, lanes=(0,))
    second = Done(1, (Sample("b", 7),), (EntryFailed("c", "internal"),), 0.2, lanes=(3,))
    assert joined.join(first) is None
    assert joined.join(second) == Done(
        1, (Sample("a", 5), Sample("b", 7)), (EntryFailed("c", "internal"),), 0.5, lanes=(0, 3)
    )


def test_steps_in_flight_are_kept_apart_and_a_late_report_is_nothing() -> None:
    joined = LockStep()
    for step_id in (1, 2):
        joined.expect(Step(step_id=step_id, epoch=0, entries=(), lanes=(0, 1)))
    assert joined.join(StageFree(2, 0, lanes=(0,))) is None
    assert joined.join(Done(1, lanes=(0,))) is None
    assert joined.join(StageFree(2, 0, lanes=(1,))) == StageFree(2, 0, lanes=(0, 1))
    assert joined.join(Done(1, lanes=(1,))) == Done(1, lanes=(0, 1))
    assert joined.join(StageFree(1, 0, lanes=(1,))) is None
