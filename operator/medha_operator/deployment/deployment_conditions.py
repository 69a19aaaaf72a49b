"""Conditions of a deployment's status, each with one reason that says what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from medha_operator.deployment.observed_deployment import NO_PODS, Child
from medha_operator.replica.conditions import DerivedCondition, refuse
from medha_operator.status_fields import Condition

_RESTS = frozenset({"Complete", "Suspended", "SurgeUnschedulable", "InsufficientCapacity"})
"""Reasons of a deployment at rest: nothing happens until somebody changes it or the cluster."""


@dataclass(frozen=True)
class Rollout:
    """The state of a deployment's rollout."""

    replicas: int
    """Replicas that are wanted."""
    least_available: int
    """Least number of available replicas that `maxUnavailable` allows."""
    available: int
    children: tuple[Child, ...]
    """Existing replicas by index, without those that are being deleted."""
    differing: frozenset[int]
    """Indices of replicas that are not as they should be."""
    moving: frozenset[int]
    """Indices of replicas that leave, or must leave, a cordoned node."""
    taken: tuple[str, ...]
    """Wanted names that somebody else's replica has."""
    template: str
    has_change_waiting: bool
    """True if the deployment is paused and some replicas have an older template."""
    is_blocked: bool
    """True if a replica finds no room, and no serving replica may be taken down to make some."""
    is_late: bool
    """True if `progressDeadlineSeconds` have passed."""
    min_ready_seconds: float
    now: float

    @property
    def is_complete(self) -> bool:
        """True if every replica is as the spec asks and available, and none is surplus."""
        return self._is_as_desired and self.available == self.replicas

    @property
    def is_suspended(self) -> bool:
        """True if every replica is as the spec asks, and those that are not available should have no pods."""
        suspended = sum(child.is_suspended for child in self.children)
        return self._is_as_desired and suspended > 0 and self.available + suspended == self.replicas

    @property
    def _is_as_desired(self) -> bool:
        is_moving = self.taken or self.differing or self.moving
        return not is_moving and len(self.children) == self.replicas

    @property
    def is_at_rest(self) -> bool:
        """True if nothing changes before somebody changes the deployment or the cluster."""
        rests = self.is_complete or self.is_suspended or self.has_change_waiting
        return rests or _stalled(self) is not None


def derive_rollout_conditions(rollout: Rollout) -> tuple[DerivedCondition, ...]:
    """Return all conditions of a deployment whose spec is valid."""
    ready = _ready(rollout)
    enough = rollout.available >= rollout.least_available
    counted = f"{rollout.available} of {rollout.replicas} replicas are available"
    available = DerivedCondition(
        "Available", enough, "EnoughReplicas" if enough else "TooFewReplicas",
        counted if enough else f"{counted}; at least {rollout.least_available} should be",
    )  # fmt: skip
    unplaced = [child.name for child in rollout.children if child.unplaced_since is not None]
    are_missing = all(child.has_no_pods for child in rollout.children if child.name in unplaced)
    lacks, notice = (
        (NO_PODS, "pods are missing") if are_missing else ("InsufficientCapacity", "no room for all pods")
    )
    scheduled = DerivedCondition(
        "Scheduled", not unplaced, lacks if unplaced else "Placed",
        f"{', '.join(unplaced)}: {notice}" if unplaced else "",
    )  # fmt: skip
    stalled = _stalled(rollout)
    is_at_rest = rollout.is_at_rest
    moves = not is_at_rest or ready.holds
    progressing = DerivedCondition("Progressing", moves, ready.reason, ready.message)
    return (
        ready,
        available,
        scheduled,
        progressing,
        DerivedCondition("Reconciling", not is_at_rest, ready.reason, "" if is_at_rest else ready.message),
        DerivedCondition("Stalled", stalled is not None, ready.reason, ready.message if stalled else ""),
    )


def derive_refused_rollout_conditions(rollout: Rollout, problems: str) -> tuple[DerivedCondition, ...]:
    """Return all conditions of a deployment whose spec is refused for its `problems`.

    Replicas are reported as they are. The spec does not say how many of them may be missing, so that
    `Available` requires all of them.
    """
    strict = replace(rollout, least_available=rollout.replicas)
    derived = {one.type: one for one in derive_rollout_conditions(strict)}
    over = (*refuse("Invalid", problems), DerivedCondition("Progressing", False, "Invalid", problems))
    return tuple((derived | {one.type: one for one in over}).values())


def begins_to_move(rollout: Rollout, before: Iterable[Condition]) -> bool:
    """Return whether the deployment begins to move after a rest of any length.

    `before` are its previous conditions.
    """
    rested = any(
        one.type == "Reconciling" and one.status == "False" and one.reason in _RESTS for one in before
    )
    return rested and not replace(rollout, is_late=False).is_at_rest


def _ready(rollout: Rollout) -> DerivedCondition:
    counted = f"{rollout.available} of {rollout.replicas} replicas are available"
    stalled = _stalled(rollout)
    if stalled is not None:
        return DerivedCondition("Ready", False, stalled[0], f"{counted}; {stalled[1]}")
    if rollout.has_change_waiting:
        return DerivedCondition("Ready", False, "Paused", f"{counted}; template {rollout.template} waits")
    if rollout.is_complete:
        return DerivedCondition("Ready", True, "Complete", counted)
    if rollout.is_suspended:
        names = ", ".join(child.name for child in rollout.children if child.is_suspended)
        return DerivedCondition(
            "Ready", False, "Suspended", f"{counted}; spec.suspend of their template is set: {names}"
        )
    if rollout.differing:
        changed = rollout.replicas - len(rollout.differing)
        text = f"{counted}; {changed} have template {rollout.template} or need none"
        return DerivedCondition("Ready", False, "RollingOut", text)
    if rollout.moving:
        return DerivedCondition(
            "Ready", False, "Moving", f"{counted}; {len(rollout.moving)} leave a cordoned node"
        )
    absent = rollout.replicas - sum(child.index < rollout.replicas for child in rollout.children)
    if absent > 0:
        return DerivedCondition("Ready", False, "Creating", f"{counted}; {absent} are missing")
    waiting = _not_available(rollout)
    if waiting is None:
        over = len(rollout.children) - rollout.replicas
        return DerivedCondition(
            "Ready", False, "Removing", f"{counted}; {over} surplus replicas are being removed"
        )
    if waiting.serving_since is not None:
        text = f"{counted}; replica {waiting.name} is ready, but not yet for minReadySeconds"
        return DerivedCondition("Ready", False, "WaitingForMinReady", text)
    reason, message = waiting.problem
    return DerivedCondition("Ready", False, reason, f"{counted}; replica {waiting.name}: {message}")


def _stalled(rollout: Rollout) -> tuple[str, str] | None:
    """Return reason and message of what does not recover by itself; None if nothing is stalled."""
    if rollout.taken:
        names = ", ".join(rollout.taken)
        return "NameConflict", f"{names} is not of this deployment; rename or delete it"
    unplaced = next((child for child in rollout.children if child.unplaced_since is not None), None)
    if rollout.is_blocked and unplaced is not None:
        text = f"replica {unplaced.name} finds no room: {unplaced.problem[1]}; make room"
        if rollout.differing or rollout.moving:
            return "SurgeUnschedulable", f"{text}, or raise rollout.maxUnavailable to continue with fewer"
        return "InsufficientCapacity", text
    # A replica that serves as its spec asks is not stalled, whatever else is refused of it: its own status
    # reports that.
    broken = next(
        (child for child in rollout.children if child.is_stalled and child.serving_since is None), None
    )
    if broken is not None:
        return broken.problem[0], f"replica {broken.name}: {broken.problem[1]}"
    if rollout.is_late and not (rollout.is_complete or rollout.is_suspended or rollout.has_change_waiting):
        waiting = _not_available(rollout)
        text = f"; replica {waiting.name}: {waiting.problem[0]}" if waiting else ""
        return "ProgressDeadlineExceeded", f"no progress for progressDeadlineSeconds{text}"
    return None


def _not_available(rollout: Rollout) -> Child | None:
    """Return the first replica that is not available but should be; None if there is none."""
    for child in rollout.children:
        since = child.serving_since
        is_counted_on = since is not None and rollout.now - since >= rollout.min_ready_seconds
        if not is_counted_on and not child.is_suspended:
            return child
    return None
