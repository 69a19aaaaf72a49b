"""Times one rank's steps: always sums by part, for metrics; and each step while a trace is taken.

A rank reports when a step begins and ends, when it is planned, and when its forward pass is over. Time spent on other
ranks (hidden states, sampled tokens, all-reduces, partial attention) is measured between the engine and its groups:
`watch` returns a proxy of an object that times the methods named. Exchanges happen several times per layer,
so only their sum per step is kept.

The parts of a step are disjoint, and add up to its duration. A device may still compute when the host has launched the
forward pass; `measure_on` corrects that with two marks of the device in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar, cast

from medha.wire.messages import StepTimes, TracePart
from medha_worker.timed_mark import TimedMark

MOST_STEPS = 2048
"""Most steps kept until a part is sent; later ones are left out, and counted."""
SEND_SECONDS = 0.25
_SEND_STEPS = 256
PREPARED = "prepare"
"""Name of a step's planning: a part of the step, or a span if another thread planned it before the step began."""
FORWARD, SAMPLE = "forward", "sample"
_PART_OF = {"receive tokens": "receive", "send tokens": "send"}
"""Part of a step for names in a trace; the others are parts themselves (`medha.observing.metric_catalogue.STEP_PARTS`)."""

_Watched = TypeVar("_Watched")


class StepRecorder:
    """Records the times of one rank's steps, in seconds since the machine was started."""

    def __init__(self, rank: int, clock: Callable[[], float] = monotonic) -> None:
        self._rank = rank
        self._clock = clock
        self._until = float("-inf")
        self._sent_at = float("-inf")
        self._steps: list[StepTimes] = []
        self._left_out = 0
        self._step_id: int | None = None  # id of the running step, if it is recorded
        self._started = 0.0
        self._spans: list[tuple[str, float, float]] = []
        self._waits: dict[str, float] = {}
        self.steps = 0
        """Steps that ended, of all that this rank ran."""
        self.part_seconds: dict[str, float] = {}
        """Seconds of those steps by part."""
        self.ahead_seconds = 0.0
        """Seconds in which steps were prepared while others ran; they are in no part."""
        self._running = False
        self._parts: dict[str, float] = {}  # of the running step
        self._phase_began = 0.0
        self._phase_waited = 0.0  # seconds of the phase that went into watched calls
        self._forward_host_seconds = 0.0
        self._mark: Callable[[], TimedMark | None] = lambda: None
        self._forward_marks: tuple[TimedMark | None, TimedMark | None] = (None, None)

    def measure_on(self, mark: Callable[[], TimedMark | None]) -> None:
        """Time the forward pass by a device's own marks; `mark` returns None if calls return only when the device is done."""
        self._mark = mark

    @property
    def in_step(self) -> bool:
        """True while a step runs."""
        return self._running

    @property
    def runs(self) -> bool:
        """True while a step is being recorded."""
        return self._step_id is not None

    def record(self, seconds: float) -> None:
        """Record the steps of the next `seconds` seconds; 0 stops recording."""
        self._until = self._clock() + seconds
        self._sent_at = self._clock()

    def begin(self, step_id: int) -> None:
        """Begin a step. A step that was begun but never ended is forgotten."""
        now = self._clock()
        self._step_id, self._running = None, True
        self._parts, self._phase_began, self._phase_waited = {}, now, 0.0
        self._forward_marks = None, None
        if now < self._until:
            self._step_id, self._started = step_id, now
            self._spans, self._waits = [], {}

    def prepared(self, since: float, until: float) -> None:
        """Record when the step that has just begun was planned, while the step before it ran."""
        self.ahead_seconds += until - since
        if self.runs:
            self._spans.append((PREPARED, since, until))

    def planned(self) -> None:
        """Record that the step is planned, and its layers come next."""
        self._end_phase(PREPARED)
        self._forward_marks = self._mark(), None

    def forward_done(self) -> None:
        """Record that the layers of this stage have run, or are launched on a device that runs them meanwhile."""
        self._forward_marks = self._forward_marks[0], self._mark()
        before = self._phase_began
        now = self._end_phase(FORWARD)
        self._forward_host_seconds = now - before
        if self.runs:
            self._spans.append((FORWARD, self._started, now))

    def _end_phase(self, part: str) -> float:
        """Charge the phase, less the calls that were timed in it, to `part`; return the time."""
        now = self._clock()
        self._parts[part] = now - self._phase_began - self._phase_waited
        self._phase_began, self._phase_waited = now, 0.0
        return now

    def end(self, *, ran: bool) -> None:
        """End the step, all of whose work is done; `ran` is false if it was for other lanes."""
        now = self._end_phase(SAMPLE)
        self._running = False
        if ran:
            self._shift_to_forward()
            self.steps += 1
            for part, seconds in self._parts.items():
                self.part_seconds[part] = self.part_seconds.get(part, 0.0) + seconds
        if self._step_id is None:
            return
        if ran and len(self._steps) < MOST_STEPS:
            times = StepTimes(
                self._step_id, self._started, now, tuple(self._spans), tuple(self._waits.items())
            )
            self._steps.append(times)
        else:
            self._left_out += ran
        self._step_id = None

    def _shift_to_forward(self) -> None:
        """Charge time that counted as sampling, while the host waited for the device's forward pass, to the forward pass."""
        launched, ended = self._forward_marks
        if launched is None or ended is None:
            return
        late_seconds = launched.seconds_until(ended) - self._forward_host_seconds
        shifted = min(max(late_seconds, 0.0), self._parts[SAMPLE])
        self._parts[FORWARD] += shifted
        self._parts[SAMPLE] -= shifted

    def watch(
        self,
        target: _Watched,
        *,
        spans: Mapping[str, str] | None = None,
        waits: Mapping[str, str] | None = None,
    ) -> _Watched:
        """Return a proxy of `target` that times its calls.

        Calls of methods in `spans` are recorded one by one; those of methods in `waits` are summed up. Both
        map a method to the name of its time in the trace.
        """
        return cast("_Watched", _Watch(self, target, spans or {}, waits or {}))

    def spent(self, what: str, since: float, *, summed: bool) -> None:
        """Charge the time since `since` to `what` in the running step."""
        now = self._clock()
        seconds, part = now - since, _PART_OF.get(what, what)
        self._phase_waited += seconds
        self._parts[part] = self._parts.get(part, 0.0) + seconds
        if not self.runs:
            return
        if summed:
            self._waits[what] = self._waits.get(what, 0.0) + seconds
        else:
            self._spans.append((what, since, now))

    def now(self) -> float:
        return self._clock()

    def take(self, epoch: int) -> TracePart | None:
        """Return the part of the trace that is due to be sent now, or None."""
        if not self._steps or self.runs:
            return None
        now = self._clock()
        if len(self._steps) < _SEND_STEPS and now - self._sent_at < SEND_SECONDS and now < self._until:
            return None
        part = TracePart(self._rank, epoch, machine(), now, tuple(self._steps), self._left_out)
        self._steps, self._left_out, self._sent_at = [], 0, now
        return part


class _Watch:
    """Proxy of an object; see `StepRecorder.watch`.

    Models call it hundreds of times a step, so it must be fast.
    """

    def __init__(
        self, recorder: StepRecorder, target: Any, spans: Mapping[str, str], waits: Mapping[str, str]
    ) -> None:
        self._target = target
        for names, summed in ((spans, False), (waits, True)):
            for name, what in names.items():
                setattr(self, name, _timed(recorder, getattr(target, name), what, summed=summed))

    def __getattr__(self, name: str) -> Any:
        """Pass on everything that is not timed."""
        return getattr(self._target, name)


def _timed(
    recorder: StepRecorder, call: Callable[..., Any], what: str, *, summed: bool
) -> Callable[..., Any]:
    def timed(*args: Any, **named: Any) -> Any:
        if not recorder.in_step:
            return call(*args, **named)
        since = recorder.now()
        try:
            return call(*args, **named)
        finally:
            recorder.spent(what, since, summed=summed)

    return timed


def machine() -> str:
    """Identify this boot of this machine: processes with the same boot id share a monotonic clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""  # then no two processes count as on the same machine, and clock differences are estimated
