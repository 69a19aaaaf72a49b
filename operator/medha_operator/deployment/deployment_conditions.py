"""What a deployment's status says: conditions from its replicas, each with one reason that tells what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from medha_operator.deployment.observed_deployment import NO_PODS, Child
from medha_operator.replica.conditions import Judgement, refuse
from medha_operator.status import Condition

_RESTS = frozenset({"Complete", "Suspended", "SurgeUnschedulable", "InsufficientCapacity"})
"""Reasons of a deployment that rests, for as long as it takes, until something around it changes."""


@dataclass(frozen=True)
class Rollout:
    """Where a deployment stands."""

    replicas: int
    """Wanted."""
    least_available: int
    """Less would be more than `maxUnavailable` away."""
    available: int
    children: tuple[Child, ...]
    """Those there are, by index, without those that are being deleted."""
    differing: frozenset[int]
    """Indices of those that are not what they are to be."""
    moving: frozenset[int]
    """Indices of those that leave a cordoned node."""
    taken: tuple[str, ...]
    """Names that are wanted and that somebody else's replica has."""
    template: str
    has_change_waiting: bool
    """It is paused, and some have an older template."""
    is_blocked: bool
    """A replica finds no room, and none that serves may go to make some."""
    is_late: bool
    """`progressDeadlineSeconds` are over."""
    min_ready_seconds: float
    now: float

    @property
    def is_complete(self) -> bool:
        """Every replica is what the spec asks for and available, none is too much."""
        return self._is_as_asked and self.available == self.replicas

    @property
    def is_suspended(self) -> bool:
        """Every replica is what the spec asks for, and those that are not available are to have no pods."""
        suspended = sum(child.is_suspended for child in self.children)
        return self._is_as_asked and suspended > 0 and self.available + suspended == self.replicas

    @property
    def _is_as_asked(self) -> bool:
        is_moving = self.taken or self.differing or self.moving
        return not is_moving and len(self.children) == self.replicas

    @property
    def is_at_rest(self) -> bool:
        """Nothing moves before somebody does something."""
        rests = self.is_complete or self.is_suspended or self.has_change_waiting
        return rests or _stalled(self) is not None


def judge_rollout(rollout: Rollout) -> tuple[Judgement, ...]:
    """Every condition of a deployment whose spec is valid."""
    ready = _ready(rollout)
    enough = rollout.available >= rollout.least_available
    counted = f"{rollout.available} of {rollout.replicas} replicas are available"
    available = Judgement(
        "Available", enough, "EnoughReplicas" if enough else "TooFewReplicas",
        counted if enough else f"{counted}; at least {rollout.least_available} should be",
    )  # fmt: skip
    unplaced = [child.name for child in rollout.children if child.unplaced_since is not None]
    are_missing = all(child.has_no_pods for child in rollout.children if child.name in unplaced)
    lacks, told = (
        (NO_PODS, "pods are missing") if are_missing else ("InsufficientCapacity", "no room for all pods")
    )
    scheduled = Judgement(
        "Scheduled", not unplaced, lacks if unplaced else "Placed",
        f"{', '.join(unplaced)}: {told}" if unplaced else "",
    )  # fmt: skip
    stalled = _stalled(rollout)
    is_at_rest = rollout.is_at_rest
    moves = not is_at_rest or ready.holds
    progressing = Judgement("Progressing", moves, ready.reason, ready.message)
    return (
        ready,
        available,
        scheduled,
        progressing,
        Judgement("Reconciling", not is_at_rest, ready.reason, "" if is_at_rest else ready.message),
        Judgement("Stalled", stalled is not None, ready.reason, ready.message if stalled else ""),
    )


def judge_refused_rollout(rollout: Rollout, problems: str) -> tuple[Judgement, ...]:
    """Every condition of a deployment whose spec is refused for its `problems`.

    What is said of replicas is as it is. Nobody says how many of them may be missing: so none.
    """
    strict = replace(rollout, least_available=rollout.replicas)
    judged = {one.type: one for one in judge_rollout(strict)}
    over = (*refuse("Invalid", problems), Judgement("Progressing", False, "Invalid", problems))
    return tuple((judged | {one.type: one for one in over}).values())


def begins_to_move(rollout: Rollout, before: Iterable[Condition]) -> bool:
    """Whether it moves after a rest, however long that was: its conditions were `before`."""
    rested = any(
        one.type == "Reconciling" and one.status == "False" and one.reason in _RESTS for one in before
    )
    return rested and not replace(rollout, is_late=False).is_at_rest


def _ready(rollout: Rollout) -> Judgement:
    counted = f"{rollout.available} of {rollout.replicas} replicas are available"
    stalled = _stalled(rollout)
    if stalled is not None:
        return Judgement("Ready", False, stalled[0], f"{counted}; {stalled[1]}")
    if rollout.has_change_waiting:
        return Judgement("Ready", False, "Paused", f"{counted}; template {rollout.template} waits")
    if rollout.is_complete:
        return Judgement("Ready", True, "Complete", counted)
    if rollout.is_suspended:
        names = ", ".join(child.name for child in rollout.children if child.is_suspended)
        return Judgement(
            "Ready", False, "Suspended", f"{counted}; spec.suspend of their template is set: {names}"
        )
    if rollout.differing:
        changed = rollout.replicas - len(rollout.differing)
        text = f"{counted}; {changed} have template {rollout.template} or need none"
        return Judgement("Ready", False, "RollingOut", text)
    if rollout.moving:
        return Judgement("Ready", False, "Moving", f"{counted}; {len(rollout.moving)} leave a cordoned node")
    absent = rollout.replicas - sum(child.index < rollout.replicas for child in rollout.children)
    if absent > 0:
        return Judgement("Ready", False, "Creating", f"{counted}; {absent} are missing")
    waiting = _not_available(rollout)
    if waiting is None:
        over = len(rollout.children) - rollout.replicas
        return Judgement("Ready", False, "Removing", f"{counted}; {over} too many are going")
    if waiting.serving_since is not None:
        text = f"{counted}; replica {waiting.name} is ready, and waits for minReadySeconds"
        return Judgement("Ready", False, "WaitingForMinReady", text)
    reason, message = waiting.trouble
    return Judgement("Ready", False, reason, f"{counted}; replica {waiting.name}: {message}")


def _stalled(rollout: Rollout) -> tuple[str, str] | None:
    """Reason and message of what does not mend itself."""
    if rollout.taken:
        names = ", ".join(rollout.taken)
        return "NameTaken", f"{names} is not of this deployment; rename or delete it"
    unplaced = next((child for child in rollout.children if child.unplaced_since is not None), None)
    if rollout.is_blocked and unplaced is not None:
        text = f"replica {unplaced.name} finds no room: {unplaced.trouble[1]}; make room"
        if rollout.differing or rollout.moving:
            return "SurgeUnschedulable", f"{text}, or raise rollout.maxUnavailable to go on with fewer"
        return "InsufficientCapacity", text
    # What serves as it was asked to is as good as it gets, whatever else is refused of it: its own status tells.
    broken = next(
        (child for child in rollout.children if child.is_stalled and child.serving_since is None), None
    )
    if broken is not None:
        return broken.trouble[0], f"replica {broken.name}: {broken.trouble[1]}"
    if rollout.is_late and not (rollout.is_complete or rollout.is_suspended or rollout.has_change_waiting):
        waiting = _not_available(rollout)
        text = f"; replica {waiting.name}: {waiting.trouble[0]}" if waiting else ""
        return "ProgressDeadlineExceeded", f"nothing has moved for progressDeadlineSeconds{text}"
    return None


def _not_available(rollout: Rollout) -> Child | None:
    """The first replica that keeps the others waiting."""
    for child in rollout.children:
        since = child.serving_since
        is_counted_on = since is not None and rollout.now - since >= rollout.min_ready_seconds
        if not is_counted_on and not child.is_suspended:
            return child
    return None
