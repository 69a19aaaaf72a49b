"""One event out of what each lane of a coupled step reports."""

from __future__ import annotations

from dataclasses import replace

from medha.messages import Done, StageFree, Step


class LockStep:
    """Joins the reports of the lanes that run a step together; a step of one lane passes as it is."""

    def __init__(self) -> None:
        self._lanes: dict[int, tuple[int, ...]] = {}  # of each step in flight
        self._free: dict[int, set[int]] = {}  # lanes whose stage 0 is done with a step
        self._done: dict[int, list[Done]] = {}

    def expect(self, step: Step) -> None:
        """A step is sent to the ranks."""
        self._lanes[step.step_id] = step.lanes

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
        del self._done[part.step_id], self._lanes[part.step_id]
        self._free.pop(part.step_id, None)
        return Done(
            step_id=part.step_id,
            samples=tuple(sample for one in parts for sample in one.samples),
            failures=tuple(failure for one in parts for failure in one.failures),
            compute_seconds=max(one.compute_seconds for one in parts),
            lanes=lanes,
        )
