"""Times of a rank's steps: parts add up always; steps are recorded if a trace is requested, and their number is bounded."""

from __future__ import annotations

import pytest

from medha.wire.messages import StepTimes, TracePart
from medha_worker.rank.step_recorder import MOST_STEPS, SEND_SECONDS, StepRecorder, machine


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Links:
    """Links to other ranks; each call takes some time."""

    stages = 2

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def receive(self, rows: int, *, name: str = "") -> str:
        self.clock.now += 1.0
        return f"{rows} {name}"

    def reduce(self) -> None:
        self.clock.now += 0.25

    def breaks(self) -> None:
        self.clock.now += 0.5
        raise RuntimeError("a rank has gone")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def recorder(clock: Clock) -> StepRecorder:
    return StepRecorder(3, clock)


def run_step(recorder: StepRecorder, clock: Clock, step_id: int, *, ran: bool = True) -> None:
    recorder.begin(step_id)
    clock.now += 0.5
    recorder.forward_done()
    clock.now += 0.25
    recorder.end(ran=ran)


def parts(recorder: StepRecorder, clock: Clock, epoch: int = 0) -> list[TracePart]:
    clock.now += SEND_SECONDS
    part = recorder.take(epoch)
    return [] if part is None else [part]


def test_nothing_is_recorded_until_it_is_asked_for_nor_when_the_time_is_over(
    recorder: StepRecorder, clock: Clock
) -> None:
    run_step(recorder, clock, 1)
    assert parts(recorder, clock) == []
    recorder.record(1.0)
    run_step(recorder, clock, 2)
    clock.now += 1.0
    run_step(recorder, clock, 3)
    (part,) = parts(recorder, clock)
    assert [step.step_id for step in part.steps] == [2]
    recorder.record(10.0)
    recorder.record(0.0)
    run_step(recorder, clock, 4)
    assert parts(recorder, clock) == []


def test_a_step_has_its_forward_pass_and_who_recorded_it(recorder: StepRecorder, clock: Clock) -> None:
    recorder.record(60.0)
    run_step(recorder, clock, 7)
    (part,) = parts(recorder, clock, epoch=2)
    assert part.steps == (StepTimes(7, 100.0, 100.75, (("forward", 100.0, 100.5),)),)
    assert (part.rank, part.epoch, part.machine, part.clock_seconds) == (3, 2, machine(), clock.now)


def test_what_was_planned_ahead_keeps_its_time_before_the_step(recorder: StepRecorder, clock: Clock) -> None:
    recorder.begin(1)
    recorder.prepared(99.0, 99.5)  # not recorded yet
    recorder.record(60.0)
    recorder.begin(2)
    recorder.prepared(99.0, 99.5)
    recorder.end(ran=True)
    (part,) = parts(recorder, clock)
    assert part.steps[0].spans == (("prepare", 99.0, 99.5),)


def test_calls_are_timed_one_by_one_or_summed_up_and_pass_unchanged(
    recorder: StepRecorder, clock: Clock
) -> None:
    links = recorder.watch(Links(clock), spans={"receive": "hidden"}, waits={"reduce": "all_reduce"})
    assert (links.receive(1), links.stages) == ("1 ", 2)  # outside a step
    recorder.record(60.0)
    recorder.begin(1)
    assert links.receive(2, name="b") == "2 b"
    for _ in range(3):
        links.reduce()
    recorder.end(ran=True)
    (part,) = parts(recorder, clock)
    assert part.steps[0].spans == (("hidden", 101.0, 102.0),)
    assert part.steps[0].waits == (("all_reduce", 0.75),)


def test_a_call_that_raises_is_timed_and_the_next_step_begins_afresh(
    recorder: StepRecorder, clock: Clock
) -> None:
    links = recorder.watch(Links(clock), spans={"breaks": "receive"})
    recorder.record(60.0)
    recorder.begin(1)
    with pytest.raises(RuntimeError, match="a rank has gone"):
        links.breaks()
    assert recorder.take(0) is None
    run_step(recorder, clock, 2)
    (part,) = parts(recorder, clock)
    assert [(step.step_id, step.spans[0][0]) for step in part.steps] == [(2, "forward")]


def test_steps_for_other_lanes_are_left_out_without_being_missed(
    recorder: StepRecorder, clock: Clock
) -> None:
    recorder.record(60.0)
    run_step(recorder, clock, 1, ran=False)
    run_step(recorder, clock, 2)
    (part,) = parts(recorder, clock)
    assert ([step.step_id for step in part.steps], part.left_out) == ([2], 0)


def test_steps_are_sent_together_and_no_more_are_kept_than_fit(recorder: StepRecorder, clock: Clock) -> None:
    recorder.record(1e6)
    run_step(recorder, clock, 0)
    recorder.take(0)
    recorder.begin(1)
    recorder.end(ran=True)
    assert recorder.take(0) is None  # not yet: more may come
    for step in range(MOST_STEPS + 5):
        run_step(recorder, clock, step)
    (part,) = parts(recorder, clock)
    assert (len(part.steps), part.left_out) == (MOST_STEPS, 6)


def test_what_was_recorded_last_is_sent_when_the_time_is_over(recorder: StepRecorder, clock: Clock) -> None:
    recorder.record(0.8)
    run_step(recorder, clock, 1)
    clock.now += 0.06
    assert recorder.take(0) is not None


def run_whole_step(recorder: StepRecorder, clock: Clock, links: Links, *, ran: bool = True) -> None:
    """A step of 0.5 s of planning, 1 s of waiting, 2.5 s of layers with 3 sums of 0.25 s, and 0.125 s of the rest."""
    recorder.begin(1)
    clock.now += 0.5
    recorder.planned()
    links.receive(1)
    clock.now += 2.5
    for _ in range(3):
        links.reduce()
    recorder.forward_done()
    clock.now += 0.125
    recorder.end(ran=ran)


def test_the_parts_of_steps_are_summed_up_without_a_trace_and_add_up_to_the_steps(
    recorder: StepRecorder, clock: Clock
) -> None:
    links = recorder.watch(Links(clock), spans={"receive": "receive tokens"}, waits={"reduce": "all_reduce"})
    began = clock.now
    for _ in range(2):
        run_whole_step(recorder, clock, links)
        clock.now += 100.0
    assert recorder.part_seconds == {
        "prepare": 1.0, "receive": 2.0, "forward": 5.0, "all_reduce": 1.5, "sample": 0.25
    }  # fmt: skip
    assert sum(recorder.part_seconds.values()) == clock.now - began - 200.0
    assert recorder.steps == 2
    assert recorder.take(0) is None


def test_what_happens_between_steps_or_in_a_step_for_others_is_in_no_part(
    recorder: StepRecorder, clock: Clock
) -> None:
    links = recorder.watch(Links(clock), waits={"reduce": "all_reduce"}, spans={"breaks": "receive"})
    links.reduce()
    run_whole_step(recorder, clock, links, ran=False)
    recorder.begin(2)
    with pytest.raises(RuntimeError):
        links.breaks()
    recorder.begin(3)
    recorder.prepared(50.0, 52.0)
    recorder.planned()
    clock.now += 1.0
    recorder.forward_done()
    recorder.end(ran=True)
    assert (recorder.steps, recorder.ahead_seconds) == (1, 2.0)
    assert recorder.part_seconds == {"prepare": 0.0, "forward": 1.0, "sample": 0.0}


class DeviceMark:
    """A mark of a device that passes it some time after the host has made it."""

    def __init__(self, clock: Clock, late_seconds: float) -> None:
        self.passed_at = clock.now + late_seconds

    def seconds_until(self, later: DeviceMark) -> float:
        return later.passed_at - self.passed_at


@pytest.mark.parametrize(
    ("late_seconds", "forward", "sample"),
    [
        ((0.0, 2.0), 2.5 + 2.0, 0.5),  # the host waits for the layers while it seems to sample
        ((0.0, 9.0), 2.5 + 2.5, 0.0),  # no more than it waited
        ((0.5, 0.25), 2.5, 2.5),  # the layers were done when the host was
    ],
)
def test_layers_that_run_on_after_their_launch_count_as_forward(
    recorder: StepRecorder, clock: Clock, late_seconds: tuple[float, float], forward: float, sample: float
) -> None:
    marks = (DeviceMark(clock, late) for late in late_seconds)
    recorder.measure_on(lambda: next(marks))
    links = recorder.watch(Links(clock), waits={"reduce": "all_reduce"})
    recorder.begin(1)
    recorder.planned()
    clock.now += 2.5
    for _ in range(3):
        links.reduce()
    recorder.forward_done()
    clock.now += 2.5
    recorder.end(ran=True)
    assert recorder.part_seconds["forward"] == pytest.approx(forward)
    assert recorder.part_seconds["sample"] == pytest.approx(sample)
    assert recorder.part_seconds["all_reduce"] == 0.75
    assert sum(recorder.part_seconds.values()) == 2.5 + 0.75 + 2.5
