"""Plan the deletion of a replica's pods, which start and serve together: when one is lost, all of them restart.

A gang is recorded once all of its members have started. It is broken when a member's object is gone, a younger pod
has replaced a member, or a member has ended for good or asks for a restart. Then the other members are deleted,
too, once for each gang: at once the first time, later after a back-off. Pods that have not all started yet are
not restarted together.

A gang stays recorded until all of its members are being deleted, so that a failed deletion is planned again.
`restarted_member` and `moved_member` record that the deletion has begun, because its reason may pass before the last
one, for example when no pod is left on the cordoned node.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from medha.api.cluster import RestartSpec
from medha_operator.replica.actions import Action, Delete, RecordEvent
from medha_operator.replica.nodes import MOVING, has_left_node, on_cordoned_node
from medha_operator.replica.observed import Observed, Pod, seconds, timestamp
from medha_operator.status_fields import ReplicaStatus

EVICTION_SECONDS = 15.0
"""Seconds that evictors have to evict the pods of a cordoned node: `kubectl drain` retries every 5 s, the
cluster autoscaler every 10 s."""
CLOCK_SKEW_SECONDS = 60.0
"""Largest assumed difference between the clocks of two machines that run the operator. A recorded time that lies
further ahead was written by somebody else, and is ignored."""


@dataclass(frozen=True)
class GangPlan:
    """The plan for the pods of a replica."""

    status: ReplicaStatus
    """Status with the new record of the gang."""
    actions: Sequence[Action] = ()
    """Deletions of pods, and events that report them."""
    requeue_seconds: float | None = None


def plan_gang(
    observed: Observed,
    restart: RestartSpec,
    expected: int,
    revision: str,
    gone: Set[str],
    opened: float | None,
    now: float,
) -> GangPlan:
    """Return the plan for the pods of `revision`, of which there should be `expected`.

    Pods that are `gone` with their nodes are not among the deletions. Pods of an older revision are deleted once pods
    of the newer one would replace them.

    Evictors have `EVICTION_SECONDS` to evict the pods of a cordoned node, from `opened` on, before the operator deletes
    them. They retry by a pod's name: if the operator deleted a pod first, they would evict its successors for ever.
    """
    status = observed.status
    alive = [pod for pod in observed.pods if not pod.is_deleting and pod.name not in gone]
    if expected == 0:  # it is suspended
        return GangPlan(_without_gang(status))
    outdated = [pod for pod in alive if pod.revision != revision]
    if outdated:
        if not _makes_only(revision, observed):
            return GangPlan(status)
        notice = RecordEvent("RevisionChanging", f"{len(outdated)} pods of an older revision end")
        return GangPlan(_without_gang(status), [notice, *end_pods(outdated, "an older revision")])
    if len(alive) == expected and _is_later(status.newest_member, max(pod.created for pod in alive)):
        # The record names a time at which none of the pods was created, so somebody else has changed it.
        status = _without_gang(status)
    broken, members = _broken(alive, expected, status), _members(alive, status)
    has_begun = status.newest_member in (status.restarted_member, status.moved_member)
    if broken is not None and members and has_begun:
        return GangPlan(status, end_pods(members, broken))
    cordoned = on_cordoned_node(observed)
    if cordoned is not None and opened is not None:
        left = opened + EVICTION_SECONDS - now
        if left > 0:
            return GangPlan(status, requeue_seconds=left)
        notice = RecordEvent(MOVING, f"node {cordoned.node} is being emptied: the replica moves")
        return GangPlan(_moved(status), [notice, *end_pods(alive, "its node is cordoned")])
    if status.newest_member is None:
        return _plan_first_start(alive, expected, status)
    if broken is None:
        if status.moved_member == status.newest_member:  # no pod has left, and none has to leave
            status = status.model_copy(update={"moved_member": None})
        return GangPlan(_settled(status, restart, now))
    if not members:  # all members are gone: pods that come are the next gang
        return GangPlan(_without_gang(status))
    if has_left_node(observed):
        notice = RecordEvent(MOVING, f"{broken} as a node is being emptied: the replica moves")
        return GangPlan(_moved(status), [notice, *end_pods(members, broken)])
    return _plan_restart(members, broken, status, restart, now)


def _plan_first_start(alive: list[Pod], expected: int, status: ReplicaStatus) -> GangPlan:
    """Return the plan for pods that have not all started yet: they are recorded as a gang once they have."""
    ended = [pod for pod in alive if pod.is_failed]
    if ended:  # the objects that are left keep their successors from being created
        return GangPlan(status, end_pods(ended, "it has ended"))
    if len(alive) == expected and all(pod.is_started for pod in alive):
        newest = timestamp(max(pod.created for pod in alive))
        return GangPlan(status.model_copy(update={"newest_member": newest}))
    return GangPlan(status)


def _plan_restart(
    members: list[Pod], broken: str, status: ReplicaStatus, restart: RestartSpec, now: float
) -> GangPlan:
    """Return the plan for a gang that is `broken`: its members end, after a back-off if it was restarted lately."""
    wait = _backoff_seconds(status, restart) - _since_restart(status, now)
    if wait > 0:
        return GangPlan(status, requeue_seconds=wait)
    restarted = {
        "restarted_member": status.newest_member,
        "restarts": status.restarts + 1,
        "last_restart_time": timestamp(now),
    }
    notice = RecordEvent("GangRestarted", f"{broken}; all pods restart", is_warning=True)
    return GangPlan(status.model_copy(update=restarted), [notice, *end_pods(members, broken)])


def end_pods(pods: Iterable[Pod], reason: str) -> list[Action]:
    """Return the deletions of pods."""
    return [Delete("Pod", pod.name, pod.uid, pod.resource_version, reason) for pod in pods]


def _makes_only(revision: str, observed: Observed) -> bool:
    """Return whether the StatefulSet controller has observed every StatefulSet at `revision`.

    Until then it creates pods of another one. A StatefulSet that was never changed has no other revision to
    observe, and its status is not kept.
    """
    return all(
        found["spec"]["template"]["metadata"]["labels"].get("medha.dev/revision") == revision
        and (
            "status" not in found or found["status"]["observedGeneration"] >= found["metadata"]["generation"]
        )
        for (kind, _), found in observed.objects.items()
        if kind == "StatefulSet" and "deletionTimestamp" not in found["metadata"]
    )


# --- the record of the gang -----------------------------------------------------------------------------


def _without_gang(status: ReplicaStatus) -> ReplicaStatus:
    return status.model_copy(update={"newest_member": None})


def _moved(status: ReplicaStatus) -> ReplicaStatus:
    """Record that the gang leaves its nodes, which is no restart."""
    return status.model_copy(update={"moved_member": status.newest_member})


def _members(alive: list[Pod], status: ReplicaStatus) -> list[Pod]:
    """Return the members of the recorded gang, and pods that have ended; none if no gang is recorded."""
    if status.newest_member is None:
        return []
    return [pod for pod in alive if pod.created <= seconds(status.newest_member) or pod.is_failed]


def _broken(alive: list[Pod], expected: int, status: ReplicaStatus) -> str | None:
    """Return why the recorded gang is no longer complete; None if it is, or if none is recorded."""
    if status.newest_member is None:
        return None
    for pod in alive:
        if pod.created > seconds(status.newest_member):
            return f"pod {pod.name} was replaced"
        if pod.is_failed:
            return f"pod {pod.name} has ended"
        if pod.requests_restart:
            return f"the ranks of pod {pod.name} cannot reach the others"
    return None if len(alive) >= expected else f"{expected - len(alive)} pods are gone"


def _settled(status: ReplicaStatus, restart: RestartSpec, now: float) -> ReplicaStatus:
    """Reset the restarts of a gang that has served long enough, so that its next restart has no back-off.

    They are also reset if no time of a restart is recorded.
    """
    is_forgotten = status.last_restart_time is None or _served_seconds(status, now) >= restart.stable_seconds
    if status.restarts and is_forgotten:
        return status.model_copy(update={"restarts": 0})
    return status


def unsettled_seconds(status: ReplicaStatus, restart: RestartSpec, now: float) -> float | None:
    """Return the seconds that a gang has yet to serve until its restarts are forgotten; None if no wait."""
    left = restart.stable_seconds - _served_seconds(status, now)
    return left if status.restarts and 0 < left < float("inf") else None


def _served_seconds(status: ReplicaStatus, now: float) -> float:
    """Return the seconds for which the replica has served without a break, and with this gang.

    Minus infinity if it does not serve.
    """
    for entry in status.conditions:
        if entry.type == "Serving" and entry.status == "True":
            return min(now - seconds(entry.last_transition_time), _since_restart(status, now))
    return float("-inf")


def _backoff_seconds(status: ReplicaStatus, restart: RestartSpec) -> float:
    if status.restarts == 0:
        return 0.0
    doubled = restart.backoff_seconds * 2.0 ** min(status.restarts - 1, 32)
    return float(min(doubled, restart.backoff_limit_seconds))


def _since_restart(status: ReplicaStatus, now: float) -> float:
    """Return the seconds since the last restart; infinity if there was none, or its time is invalid."""
    if status.last_restart_time is None or _is_later(status.last_restart_time, now + CLOCK_SKEW_SECONDS):
        return float("inf")
    return now - seconds(status.last_restart_time)


def _is_later(time: str | None, than: float) -> bool:
    return time is not None and seconds(time) > than
