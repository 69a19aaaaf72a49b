"""Conditions of a replica's status, each with one reason and a message that names the fix."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from pydantic import ValidationError

from medha_operator.replica.nodes import MOVING, eviction_blocker, may_drain, on_cordoned_node
from medha_operator.replica.observed import Observed, Pod, seconds, timestamp
from medha_operator.status_fields import Condition, DeploymentStatus, ReplicaStatus

Status = ReplicaStatus | DeploymentStatus

TERMINAL = frozenset(
    {
        "Invalid",
        "GangUnavailable",
        "Refused",
        "PodSecurityRefused",
        "AdmissionRefused",
        "NameConflict",
        "ImagePullFailed",
        "ContainerNotCreated",
        "ModelFetchFailed",
        "NoAccelerator",
        "CrashLooping",
    }
)
"""Reasons that do not recover by themselves: kstatus' `Stalled`."""


_FAILING = frozenset(
    {
        "ImagePullFailed",
        "ContainerNotCreated",
        "ModelFetchFailed",
        "NoAccelerator",
        "CrashLooping",
        "RendezvousFailed",
    }
)
"""Reasons of pods that fail repeatedly. Between two failures, while they retry, `Ready` may have another reason."""


@dataclass(frozen=True)
class DerivedCondition:
    """A condition before its times are known."""

    type: str
    holds: bool
    reason: str
    message: str = ""


def derive_conditions(observed: Observed, revision: str, expected: int) -> tuple[DerivedCondition, ...]:
    """Return all conditions of an accepted replica that should have `expected` pods of `revision`.

    `expected` is 0 while the replica is suspended.
    """
    current = [pod for pod in observed.pods if pod.revision == revision and not pod.is_deleting]
    scheduled = _scheduled(observed, current, expected)
    loaded = _weights_loaded(current, expected, scheduled)
    serving = _serving(current, expected, loaded)
    degraded = _degraded(observed, current, expected)
    old = sum(pod.revision != revision for pod in observed.pods)
    if not expected:
        ready = DerivedCondition(
            "Ready", False, "Suspended", "spec.suspend is set; `false` brings the pods back"
        )
    elif degraded.holds and not serving.holds:
        ready = DerivedCondition("Ready", False, degraded.reason, degraded.message)
    elif old:
        ready = DerivedCondition(
            "Ready", False, "RevisionChanging", f"{old} pods of an older revision are ending"
        )
    elif not serving.holds:
        ready = DerivedCondition("Ready", False, serving.reason, serving.message)
    else:
        ready = DerivedCondition("Ready", True, "Serving", "every rank of the grid is ready")
    accepted = DerivedCondition("Accepted", True, "Valid", "the spec can be served")
    draining = _draining(observed)
    return (
        ready,
        accepted,
        scheduled,
        loaded,
        serving,
        degraded,
        draining,
        *_kstatus(ready, is_suspended=not expected),
    )


def derive_refused_conditions(
    observed: Observed, revision: str, expected: int, reason: str, message: str
) -> tuple[DerivedCondition, ...]:
    """Return all conditions of a replica whose spec is refused while pods run.

    `expected` pods of `revision` run, which may be an earlier revision. Their conditions are those of pods that
    run. `Draining` is reported only for a replica without a deployment: others do not wait for their deployment's
    permission, and the deployment must not mistake the condition for such a wait.
    """
    every = derive_conditions(observed, revision, expected)
    derived = {one.type: one for one in every if one.type != "Draining" or observed.deployment is None}
    over = {one.type: one for one in refuse(reason, message)}
    if derived["Ready"].holds:
        text = "every rank of the grid is ready, as the last spec that could be served has asked for"
        over["Ready"] = replace(derived["Ready"], message=text)
    return tuple((derived | over).values())


def refuse(reason: str, message: str) -> tuple[DerivedCondition, ...]:
    """Return the conditions of a resource that cannot be served, at all or until something else exists."""
    is_stalled = reason in TERMINAL
    return (
        DerivedCondition("Ready", False, reason, message),
        DerivedCondition("Accepted", False, reason, message),
        DerivedCondition("Reconciling", not is_stalled, reason, "" if is_stalled else message),
        DerivedCondition("Stalled", is_stalled, reason, message if is_stalled else ""),
    )


def derive_waiting(reason: str, message: str) -> tuple[DerivedCondition, ...]:
    """Return the conditions of a resource that waits for objects to be deleted."""
    return (
        DerivedCondition("Ready", False, reason, message),
        DerivedCondition("Reconciling", True, reason, message),
        DerivedCondition("Stalled", False, reason),
    )


def problems_in(error: ValidationError) -> str:
    """Return the problems of a spec, field by field."""
    return "; ".join(
        f"{'.'.join(str(part) for part in problem['loc']) or 'spec'}: {problem['msg']}"
        for problem in error.errors()
    )


def begins_to_fail(before: Iterable[Condition], after: Iterable[Condition]) -> str | None:
    """Return the reason why pods fail, according to `Ready`.

    None if they do not fail, or if `before` already has that reason.
    """
    reasons = [
        next((one.reason for one in conditions if one.type == "Ready"), "") for conditions in (before, after)
    ]
    return reasons[1] if reasons[1] in _FAILING and reasons[0] != reasons[1] else None


def with_conditions(status: Status, over: Iterable[Condition]) -> Status:
    """Return `status` with some conditions replaced or added."""
    conditions = {condition.type: condition for condition in (*status.conditions, *over)}
    return status.model_copy(update={"conditions": tuple(conditions.values())})


def deleting(status: Status, generation: int, now: float, message: str) -> Status:
    """Return the status of a resource that has been deleted and waits, as `message` says."""
    conditions = stamped(derive_waiting("Deleting", message), status.conditions, generation, now)
    return with_conditions(status.model_copy(update={"observed_generation": generation}), conditions)


def stamped(
    derived_conditions: Iterable[DerivedCondition], before: Iterable[Condition], generation: int, now: float
) -> tuple[Condition, ...]:
    """Return `derived_conditions` as conditions.

    A condition whose status is unchanged keeps the time of its last transition, unless that lies in the
    future.
    """
    known = {condition.type: condition for condition in before}
    return tuple(_stamp(derived, known.get(derived.type), generation, now) for derived in derived_conditions)


def _stamp(derived: DerivedCondition, before: Condition | None, generation: int, now: float) -> Condition:
    status = "True" if derived.holds else "False"
    is_kept = before is not None and before.status == status and seconds(before.last_transition_time) <= now
    since = before.last_transition_time if before is not None and is_kept else timestamp(now)
    return Condition.model_validate(
        {
            "type": derived.type,
            "status": status,
            "reason": derived.reason,
            "message": derived.message[:1024],
            "last_transition_time": since,
            "observed_generation": generation,
        }
    )


def _scheduled(observed: Observed, pods: list[Pod], expected: int) -> DerivedCondition:
    placed = sum(pod.is_scheduled for pod in pods)
    if not expected:
        return DerivedCondition("Scheduled", False, "Suspended", "spec.suspend is set")
    if placed >= expected:
        return DerivedCondition("Scheduled", True, "Placed", f"{placed} pods have a node")
    counted = f"{placed} of {expected} pods have a node"
    notice = _first_problem(pods, "VolumeUnavailable", "InsufficientCapacity", "WaitingForGang")
    if notice is not None:
        return DerivedCondition("Scheduled", False, notice[0], f"{counted}; {notice[1]}")
    if len(pods) < expected:
        reason, text = _hindrance(observed)
        return DerivedCondition("Scheduled", False, reason, f"{len(pods)} of {expected} pods exist; {text}")
    return DerivedCondition("Scheduled", False, "Placing", counted)


def _hindrance(observed: Observed) -> tuple[str, str]:
    """Return reason and message why pods are not created: an earlier pod still has the name, or pods are refused."""
    ending = sorted(
        (pod for pod in (*observed.pods, *observed.earlier_pods) if pod.is_deleting),
        key=lambda pod: (not pod.has_finalizer, pod.name),
    )
    if not ending:
        return observed.unmade or ("CreatingPods", "if this persists, check the events of the StatefulSets")
    if ending[0].has_finalizer:
        text = f"a finalizer holds an earlier pod {ending[0].name}; whoever has set it must remove it"
        return "EndingPods", text
    return "EndingPods", f"an earlier pod {ending[0].name} has not ended yet"


def _weights_loaded(pods: list[Pod], expected: int, scheduled: DerivedCondition) -> DerivedCondition:
    started = sum(pod.is_started for pod in pods)
    if scheduled.holds and started >= expected:
        return DerivedCondition(
            "WeightsLoaded",
            True,
            "Loaded",
            f"{started} pods have loaded their weights, and their ranks are connected",
        )
    if not scheduled.holds:
        return DerivedCondition("WeightsLoaded", False, scheduled.reason, scheduled.message)
    # Ranks whose rendezvous fails may wait for a pod that has not started yet, so that its reason comes
    # first.
    notice = _first_problem(
        pods,
        "ImagePullFailed",
        "ContainerNotCreated",
        "ModelFetchFailed",
        "NoAccelerator",
        "CrashLooping",
        "RouterNotFound",
        "SecretNotFound",
        "VolumeUnavailable",
        "StartingContainers",
        "RendezvousFailed",
    )
    counted = f"{started} of {expected} pods have loaded their weights"
    if notice is not None:
        return DerivedCondition("WeightsLoaded", False, notice[0], f"{counted}; {notice[1]}")
    if any(pod.is_fetching for pod in pods):
        return DerivedCondition(
            "WeightsLoaded", False, "FetchingModel", f"{counted}; others download the model"
        )
    return DerivedCondition("WeightsLoaded", False, "Loading", counted)


def _serving(pods: list[Pod], expected: int, loaded: DerivedCondition) -> DerivedCondition:
    ready = sum(pod.is_ready for pod in pods)
    if loaded.holds and ready >= expected:
        return DerivedCondition("Serving", True, "Serving", f"{ready} pods are ready")
    if not loaded.holds:
        return DerivedCondition("Serving", False, loaded.reason, loaded.message)
    return DerivedCondition(
        "Serving",
        False,
        "RendezvousPending",
        f"{ready} of {expected} pods are ready; the rendezvous of the ranks is under way",
    )


def _degraded(observed: Observed, pods: list[Pod], expected: int) -> DerivedCondition:
    """Return the condition `Degraded`: a complete gang has broken, or a lost node keeps the gang incomplete."""
    for pod in (*observed.pods, *(observed.earlier_pods if len(pods) < expected else ())):
        node = observed.nodes.get(pod.node or "")
        if node is not None and node.unreachable_since is not None:
            text = f"node {pod.node} of pod {pod.name} does not report"
            if observed.any_report_since is None:
                text += ", nor does any other: the control plane may be cut off. No pod is replaced until a node reports"
                return DerivedCondition("Degraded", True, "NoNodeReports", text)
            return DerivedCondition("Degraded", True, "NodeUnreachable", text)
    if observed.status.newest_member not in (None, observed.status.moved_member) and expected:
        crashed = _first_problem(pods, "NoAccelerator", "CrashLooping", "RendezvousFailed")
        if crashed is not None:
            return DerivedCondition("Degraded", True, *crashed)
        # Pods of an older revision count until they are deleted: a change is no loss.
        left = sum(not pod.is_deleting for pod in observed.pods)
        if left < expected or any(pod.is_failed for pod in pods):
            return DerivedCondition("Degraded", True, "MemberLost", f"{left} of {expected} pods are left")
    return DerivedCondition("Degraded", False, "Healthy")


def _draining(observed: Observed) -> DerivedCondition:
    """Return the condition `Draining`: whether a node of the replica is being emptied, and what the replica waits for."""
    pod = on_cordoned_node(observed)
    if pod is None:
        return DerivedCondition("Draining", False, "NotDraining")
    text = f"node {pod.node} of pod {pod.name} is being emptied"
    if may_drain(observed):
        return DerivedCondition("Draining", True, MOVING, text)
    if observed.deployment is None:
        reason, why = eviction_blocker(observed)
        return DerivedCondition("Draining", True, reason, f"{text}; {why}")
    notice = f"{text}; the replica serves until its deployment has another one"
    return DerivedCondition("Draining", True, "AwaitingReplacement", notice)


def _first_problem(pods: Iterable[Pod], *reasons: str) -> tuple[str, str] | None:
    """Return the problem of the first pod that has one of `reasons`, earlier reasons first; None if none has."""
    notice = [
        (pod.problem[0], f"pod {pod.name}: {pod.problem[1]}") for pod in pods if pod.problem is not None
    ]
    return next((entry for reason in reasons for entry in notice if entry[0] == reason), None)


def _kstatus(ready: DerivedCondition, *, is_suspended: bool) -> tuple[DerivedCondition, ...]:
    is_stalled = ready.reason in TERMINAL
    is_at_rest = ready.holds or is_suspended or is_stalled
    return (
        DerivedCondition("Reconciling", not is_at_rest, ready.reason, "" if is_at_rest else ready.message),
        DerivedCondition("Stalled", is_stalled, ready.reason, ready.message if is_stalled else ""),
    )
