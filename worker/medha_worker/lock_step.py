"""One event out of what each lane of a coupled step reports, and a bound on the time that it takes."""

from __future__ import annotations

from dataclasses import replace

from medha.messages import Done, StageFree, Step

STALLED_SECONDS = 20.0
"""A rank that waits for another in vain knows it after 10 s, and says so; whoever is silent for longer hangs."""
PATIENCE = 20.0
"""Steps may take so many times as long as was predicted: ranks may share their cores with anything."""


def bound_seconds(predicted_seconds: float) -> float:
    """How long a step may take before the epoch counts as lost."""
    return STALLED_SECONDS + PATIENCE * predicted_seconds


class LockStep:
    """Joins the reports of the lanes that run a step together; a step of one lane passes as it is."""

    def __init__(self) -> None:
        self._lanes: dict[int, tuple[int, ...]] = {}  # of each step in flight
        self._free: dict[int, set[int]] = {}  # lanes whose stage 0 is done with a step
        self._done: dict[int, list[Done]] = {}
        self._predicted_seconds: dict[int, float] = {}
        self._due: dict[int, float] = {}  # until when each has to have ended

    def expect(self, step: Step, now: float) -> None:
        """A step is sent to the ranks, behind those that are in flight."""
        self._lanes[step.step_id] = step.lanes
        self._predicted_seconds[step.step_id] = step.predicted_seconds
        self._due[step.step_id] = now + bound_seconds(sum(self._predicted_seconds.values()))

    @property
    def is_idle(self) -> bool:
        return not self._lanes

    def overdue(self, now: float) -> int | None:
        """A step that has not ended within its bound."""
        return next((step_id for step_id, due in self._due.items() if now > due), None)

    def join(self, part: StageFree | Done) -> StageFree | Done | None:
        """The event of all lanes once the last one has reported; a late duplicate is nothing."""
        lanes = self._lanes.get(part.step_id)
        if lanes is None:
            return None
        if isinstance(part, StageFree):
            free = self._free.setdefault(part.step_id, set())
            free.update(part.lanes)
            if free != set(lanes):
                return None
            del self._free[part.step_id]
            return replace(part, lanes=lanes)
        parts = self._done.setdefault(part.step_id, [])
        parts.append(part)
        if {lane for one in parts for lane in one.lanes} != set(lanes):
            return None
        for of_step in (self._done, self._lanes, self._predicted_seconds, self._due):
            del of_step[part.step_id]
        self._free.pop(part.step_id, None)
        return Done(
            step_id=part.step_id,
            samples=tuple(sample for one in parts for sample in one.samples),
            failures=tuple(failure for one in parts for failure in one.failures),
            compute_seconds=max(one.compute_seconds for one in parts),
            lanes=lanes,
        )
