"""State of a pod, from the states of its parts: started, ready, live, and able to continue. No I/O, no clock.

A pod ends with EX_TEMPFAIL to ask the operator to restart all pods of the replica, when that can help: the rendezvous
of the ranks has failed three times within ten minutes, there was none within `lifecycle.readySeconds` although all
parts of the pod had loaded, or the controller refuses the pod's ranks as those of an earlier set of pods. A pod that
still loads after that time ends with status 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from medha_process.part_state import PartState
from medha_process.pod_contract import RESTART_REQUESTED
from medha_process.supervision.lifecycle import Abort, Interrupt

MOST_FAILED_RENDEZVOUS = 3
FAILED_RENDEZVOUS_SECONDS = 600.0
LIVE_SECONDS = 15.0
"""Longest time between two iterations of a supervisor's loop that does not hang; it iterates every second."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a probe."""

    ok: bool
    reasons: tuple[str, ...] = ()

    def document(self, parts: dict[str, PartState]) -> dict[str, Any]:
        reported = {name: state.model_dump(exclude_defaults=True) for name, state in parts.items()}
        return {"ok": self.ok, "reasons": list(self.reasons), "parts": reported}


@dataclass
class PodWatch:
    """Follows the states of one pod's parts; times are seconds of any one clock."""

    parts: Sequence[str]
    started_at: float
    ready_seconds: float
    drain_seconds: float
    leader: str
    """Name, in reasons, of the pod that runs the controller."""
    states: dict[str, PartState] = field(default_factory=dict)
    """Last states of the parts that run and have reported one."""
    has_started: bool = False
    _apart_since: float | None = field(init=False)
    # By epoch: when the failure was reported, and why.
    _failed_rendezvous: dict[int, tuple[float, str]] = field(default_factory=dict)
    _stopping: str = ""
    _turned_at: float = field(init=False)

    def __post_init__(self) -> None:
        self._apart_since = self._turned_at = self.started_at

    # --- what happens (`supervision.supervisor.Watch`) ------------------------------------------------------

    def reported(self, part: str, state: PartState, now: float) -> None:
        self.states[part] = state
        if state.failed_epoch is not None:
            self._failed_rendezvous.setdefault(state.failed_epoch, (now, state.failed_reason))
        self._notice(now)

    def ended(self, part: str, now: float) -> None:
        self.states.pop(part, None)
        self._notice(now)

    def interrupted(self) -> Interrupt:
        self._stopping = self._stopping or "asked to stop"
        busy = any(state.phase == "serving" for state in self.states.values())
        return Interrupt(busy, self.drain_seconds)

    def stopping_for(self, reason: str) -> None:
        self._stopping = self._stopping or reason

    def poll(self, now: float) -> Abort | None:
        self._turned_at = now
        for part, state in self.states.items():
            if state.refused:
                return Abort(f"RendezvousFailed: {part} is not admitted: {state.refused}", RESTART_REQUESTED)
        lately = [
            (at, why) for at, why in self._failed_rendezvous.values() if now - at < FAILED_RENDEZVOUS_SECONDS
        ]
        if len(lately) >= MOST_FAILED_RENDEZVOUS:
            why = max(lately)[1]
            return Abort(
                f"RendezvousFailed: the rendezvous of the ranks failed {len(lately)} times in {FAILED_RENDEZVOUS_SECONDS:g} s; "
                f"the last time: {why}",
                RESTART_REQUESTED,
            )
        if self._apart_since is not None and now - self._apart_since > self.ready_seconds:
            return self._too_late()
        return None

    def _too_late(self) -> Abort:
        awaited = "; ".join(self._awaited())
        limit = f"{self.ready_seconds:g} s (spec.lifecycle.readySeconds)"
        if all(self._phase(part) not in (None, "loading") for part in self.parts):
            return Abort(
                f"RendezvousFailed: there was no rendezvous of the ranks within {limit}: {awaited}",
                RESTART_REQUESTED,
            )
        return Abort(f"StartTooSlow: not ready within {limit}: {awaited}", 1)

    def _notice(self, now: float) -> None:
        if not all(self._phase(part) == "serving" for part in self.parts):
            if self._apart_since is None:
                self._apart_since = now
            return
        self._apart_since, self.has_started = None, True

    # --- what probes ask ------------------------------------------------------------------------------------

    def started(self) -> Answer:
        """Answer whether weights are loaded, groups formed and the warm-up has run.

        Once true, it stays so.
        """
        return Answer(True) if self.has_started else Answer(False, self._awaited())

    def ready(self) -> Answer:
        """Answer whether every part serves in an epoch, and the pod was not asked to stop."""
        awaited = self._awaited()
        if self._stopping:
            return Answer(False, (f"stopping: {self._stopping}", *awaited))
        return Answer(not awaited, awaited)

    def live(self, now: float) -> Answer:
        """Answer whether the supervisor's loop runs; the supervisor itself handles parts that do not."""
        silent = now - self._turned_at
        if silent <= LIVE_SECONDS:
            return Answer(True)
        return Answer(False, (f"the supervisor's loop has not run for {silent:.0f} s",))

    def is_calling(self) -> bool:
        """Return whether a part has not reached the controller yet."""
        return any(state.phase == "calling" for state in self.states.values())

    def _awaited(self) -> tuple[str, ...]:
        found = []
        for part in self.parts:
            state = self.states.get(part)
            if state is None:
                found.append(f"{part} starts")
            elif state.phase != "serving":
                found.append(f"{part} {_ACTIVITY[state.phase].format(leader=self.leader)}{_more(state)}")
        return tuple(found)

    def _phase(self, part: str) -> str | None:
        state = self.states.get(part)
        return None if state is None else state.phase


_ACTIVITY = {
    "loading": "loads its weights",
    "calling": "calls the leader, {leader}",
    "gathering": "waits for the other ranks",
    "rendezvous": "is in the rendezvous",
}


def _more(state: PartState) -> str:
    epoch = "" if state.epoch is None else f" in epoch {state.epoch}"
    return epoch + (f" ({state.detail})" if state.detail else "")
