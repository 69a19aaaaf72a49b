"""Timings of one rank's steps for a trace; nothing is kept unless somebody has asked for one.

A rank reports when a step begins and ends, and when its forward pass is over. Time spent on other ranks
(hidden states, sampled tokens, all-reduces, partial attention) is measured between the engine and its groups:
`watch` returns a proxy of an object that times the methods named. Exchanges happen several times per layer,
so only their sum per step is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar, cast

from medha.wire.messages import StepTimes, TracePart

MOST_STEPS = 2048
"""Most steps kept until a part is sent; later ones are left out, and counted."""
SEND_SECONDS = 0.25
_SEND_STEPS = 256
PREPARED = "prepare"
"""Name of the span that a step spent on another thread before it began."""

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
        self._step_id = None
        if self._until == float("-inf"):  # the usual case
            return
        now = self._clock()
        if now < self._until:
            self._step_id, self._started = step_id, now
            self._spans, self._waits = [], {}

    def prepared(self, since: float, until: float) -> None:
        """Record when the step that has just begun was planned, while the step before it ran."""
        if self.runs:
            self._spans.append((PREPARED, since, until))

    def forward_done(self) -> None:
        """Record that the layers of this stage have run."""
        if self.runs:
            self._spans.append(("forward", self._started, self._clock()))

    def end(self, *, ran: bool) -> None:
        """End the step; `ran` is false if it was for other lanes."""
        if self._step_id is None:
            return
        if ran and len(self._steps) < MOST_STEPS:
            times = StepTimes(
                self._step_id, self._started, self._clock(), tuple(self._spans), tuple(self._waits.items())
            )
            self._steps.append(times)
        else:
            self._left_out += ran
        self._step_id = None

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
        if summed:
            self._waits[what] = self._waits.get(what, 0.0) + now - since
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
        if not recorder.runs:
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
