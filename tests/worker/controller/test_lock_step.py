"""The reports of the lanes of a coupled step become one event."""

from medha.wire.messages import Done, EntryFailed, Extent, Sample, StageFree, Step, StepEntry
from medha_worker.controller.lock_step import LockStep
from medha_worker.timeouts import bound_seconds


def test_a_step_of_one_lane_passes_at_once() -> None:
    joined = LockStep()
    joined.expect(Step(step_id=1, epoch=0, entries=(), lanes=(2,)), now=0.0)
    free, done = StageFree(1, 0, lanes=(2,)), Done(1, lanes=(2,))
    assert joined.join(free) == free
    assert joined.join(done) == done


def test_the_last_lane_completes_the_event_with_the_samples_of_all() -> None:
    joined = LockStep()
    joined.expect(Step(step_id=1, epoch=0, entries=(), lanes=(0, 3)), now=0.0)
    assert joined.join(StageFree(1, 0, lanes=(3,))) is None
    assert joined.join(StageFree(1, 0, lanes=(0,))) == StageFree(1, 0, lanes=(0, 3))
    first = Done(1, (Sample("a", 5),), (), 0.5, lanes=(0,))
    second = Done(1, (Sample("b", 7),), (EntryFailed("c", "internal"),), 0.2, lanes=(3,))
    assert joined.join(first) is None
    assert joined.join(second) == Done(
        1, (Sample("a", 5), Sample("b", 7)), (EntryFailed("c", "internal"),), 0.5, lanes=(0, 3)
    )


def test_the_time_without_draft_models_is_that_of_the_longest_layers() -> None:
    """One lane computes a prompt for long, and the other one proposes guesses for long."""
    joined = LockStep()
    joined.expect(Step(step_id=1, epoch=0, entries=(), lanes=(0, 1)), now=0.0)
    joined.join(Done(1, compute_seconds=1.0, lanes=(0,)))
    done = joined.join(Done(1, compute_seconds=0.75, draft_seconds=0.5, lanes=(1,)))
    assert isinstance(done, Done)
    assert (done.compute_seconds - done.draft_seconds, done.draft_seconds) == (1.0, 0.5)


def test_steps_in_flight_are_kept_apart_and_a_late_report_is_nothing() -> None:
    joined = LockStep()
    for step_id in (1, 2):
        joined.expect(Step(step_id=step_id, epoch=0, entries=(), lanes=(0, 1)), now=0.0)
    assert joined.join(StageFree(2, 0, lanes=(0,))) is None
    assert joined.join(Done(1, lanes=(0,))) is None
    assert joined.join(StageFree(2, 0, lanes=(1,))) == StageFree(2, 0, lanes=(0, 1))
    assert joined.join(Done(1, lanes=(1,))) == Done(1, lanes=(0, 1))
    assert joined.join(StageFree(1, 0, lanes=(1,))) is None


def test_memory_that_ran_out_on_a_rank_is_why_numbers_of_that_step_are_none() -> None:
    joined = LockStep()
    for step_id in (1, 2):
        joined.expect(Step(step_id=step_id, epoch=0, entries=(), lanes=(0, 1)), now=0.0)
    joined.ran_out(1, rank=5)
    joined.ran_out(9, rank=5)  # of a step that ended long ago
    reasons = []
    for step_id in (1, 2):
        failures = EntryFailed("a", "not_finite", "NaN"), EntryFailed("b", "internal", "masked")
        joined.join(Done(step_id, (), failures, lanes=(0,)))
        done = joined.join(Done(step_id, (), (EntryFailed("a", "not_finite", "NaN"),), lanes=(1,)))
        assert isinstance(done, Done)
        reasons.append([failure.reason for failure in done.failures])
        assert ("rank 5" in done.failures[0].detail) == (step_id == 1)
    assert reasons == [
        ["out_of_memory", "internal", "out_of_memory"],
        ["not_finite", "internal", "not_finite"],
    ]


def test_a_step_is_overdue_when_it_and_those_ahead_of_it_could_have_ended_many_times() -> None:
    joined = LockStep()
    assert joined.is_idle
    joined.expect(Step(step_id=1, epoch=0, entries=(), lanes=(0,), predicted_seconds=2.0), now=100.0)
    joined.expect(Step(step_id=2, epoch=0, entries=(), lanes=(1,), predicted_seconds=3.0), now=101.0)
    assert joined.overdue(100.0 + bound_seconds(2.0)) is None
    assert joined.overdue(100.1 + bound_seconds(2.0)) == 1
    joined.join(Done(1, lanes=(0,)))
    assert joined.overdue(101.0 + bound_seconds(5.0)) is None, "it ran behind the first"
    assert joined.overdue(101.1 + bound_seconds(5.0)) == 2
    joined.join(Done(2, lanes=(1,)))
    assert joined.is_idle
    assert joined.overdue(1e9) is None


def coupled() -> LockStep:
    """Return a step in flight: lane 0 samples for `a` and lane 1 for `b`; nothing is sampled for `c` yet."""
    joined = LockStep()
    entries = (
        StepEntry("a", 0, (Extent(0, 4),), samples=True),
        StepEntry("b", 1, (Extent(0, 4),), samples=True),
        StepEntry("c", 1, (Extent(0, 4),), samples=False),
    )
    joined.expect(Step(step_id=1, epoch=0, entries=entries, lanes=(0, 1)), now=0.0)
    return joined


def test_a_token_comes_from_the_lane_that_runs_its_request_and_once() -> None:
    joined = coupled()
    for impossible in (
        Done(1, (Sample("b", 5),), lanes=(0,)),
        Done(1, (Sample("a", 5), Sample("a", 5)), lanes=(0,)),
        Done(1, (Sample("c", 5),), lanes=(1,)),
    ):
        assert joined.contradiction(impossible, epoch=0, vocab_size=100) is not None, impossible
    first = Done(1, (Sample("a", 5),), lanes=(0,))
    assert joined.contradiction(first, epoch=0, vocab_size=100) is None
    joined.join(first)
    again = Done(1, (Sample("a", 5), Sample("b", 6)), lanes=(1,))
    assert joined.contradiction(again, epoch=0, vocab_size=100) is not None
    assert joined.contradiction(Done(1, (Sample("b", 6),), lanes=(1,)), epoch=0, vocab_size=100) is None


def test_guesses_come_only_for_entries_that_ask_for_them() -> None:
    joined = LockStep()
    entries = (
        StepEntry("a", 0, (Extent(0, 4),), samples=True, proposes=2),
        StepEntry("b", 0, (Extent(0, 4),), samples=True),
    )
    joined.expect(Step(step_id=1, epoch=0, entries=entries), now=0.0)
    samples = (Sample("a", 5), Sample("b", 6))
    for drafts, problem in (
        ((("a", (1, 2, 3)),), "3 guesses for a, of which 2"),
        ((("b", (1,)),), "1 guesses for b, of which 0"),
        ((("c", (1,)),), "1 guesses for c"),
        ((("a", (1, 100)),), "no token of 100"),
        ((("a", (-1,)),), "no token of 100"),
    ):
        found = joined.contradiction(Done(1, samples, drafts=drafts), epoch=0, vocab_size=100)
        assert found is not None
        assert problem in found
    for wrong, problem in (
        (Done(1, samples, followed=(("c", 0),)), "0 tokens of c"),
        (Done(1, samples, followed=(("a", 1),)), "1 tokens of a, which begins at 0"),
        (Done(1, samples, compute_seconds=1.0, draft_seconds=1.5), "drafted for 1.5 of 1.0 seconds"),
    ):
        assert problem in (joined.contradiction(wrong, epoch=0, vocab_size=100) or "")
    done = Done(
        1, samples, compute_seconds=1.0, drafts=(("a", (7, 8)),), draft_seconds=0.5, followed=(("b", 0),)
    )
    assert joined.contradiction(done, epoch=0, vocab_size=100) is None
    assert joined.join(done) == done


def test_a_request_that_gets_neither_its_token_nor_a_reason_is_named_when_the_last_lane_is_done() -> None:
    joined = coupled()
    first = Done(1, lanes=(0,))
    assert joined.unsampled(first) == [], "lane 1 may yet say why there is no token for `a`"
    joined.join(first)
    second = Done(1, (Sample("b", 6),), lanes=(1,))
    assert joined.unsampled(second) == ["a"]
    failed = Done(1, (Sample("b", 6),), (EntryFailed("a", "internal", "masked"),), lanes=(1,))
    assert joined.unsampled(failed) == []
    joined.join(failed)
    assert joined.unsampled(second) == [], "a late duplicate"
