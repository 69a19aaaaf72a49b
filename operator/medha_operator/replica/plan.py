"""Plan the actions for one replica: `plan(observed, now, settings)`, pure and level-triggered.

A plan depends on the present state alone, never on past events, so that any event, or none, leads to the same
end state. Actions are ordered so that the operator may die after any of them: the next reconcile plans the
rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError

from medha.api.cluster import NO_ACCELERATOR, RestartSpec
from medha.api.replica import MedhaReplicaSpec
from medha_operator.gang import KINDS
from medha_operator.kube.kinds import Manifest
from medha_operator.manifest_overlay import holds
from medha_operator.operator_settings import OperatorSettings
from medha_operator.replica.conditions import (
    begins_to_fail,
    derive_conditions,
    derive_refused_conditions,
    problems_in,
    refuse,
    stamped,
)
from medha_operator.replica.drift import additions
from medha_operator.replica.manifests import (
    Owner,
    config_map,
    config_name,
    controller_revision,
    disruption_budget,
    enrolment_name,
    gang_object,
    is_enrolment_copied,
    keys_name,
    lane,
    lane_name,
    leader_address,
    network_policy,
    peer_ports,
    pod_templates,
    service,
)
from medha_operator.replica.nodes import (
    CAPACITY_SECONDS,
    EVICTION_BLOCKED,
    MOVING,
    has_left_node,
    on_cordoned_node,
    on_lost_nodes,
    open_since,
    waits_for_capacity,
)
from medha_operator.replica.observed import Observed, Pod, seconds
from medha_operator.replica.revision import Revision, begin, find, stages_of
from medha_operator.status_fields import Condition, DeploymentStatus, ReplicaStatus, RoleCount

REVISION_HISTORY = 5
EVICTION_SECONDS = 15.0
"""Seconds that evictors have to evict the pods of a cordoned node: `kubectl drain` retries every 5 s, the
cluster autoscaler every 10 s."""
CLOCK_SKEW_SECONDS = 60.0
"""Largest difference between the clocks of two machines that ran the operator. A time that lies further
ahead was not written by an operator."""
_GROUPS = tuple(kind for _, kind, _ in KINDS.values())


@dataclass(frozen=True)
class CreateKeys:
    """Create the Secret of wire keys unless it exists: it is created once and never rendered again."""

    name: str


@dataclass(frozen=True)
class CopyEnrolment:
    """Create, also once, the Secret with which a replica enrols at a router of another namespace."""

    name: str
    router: str
    router_namespace: str


@dataclass(frozen=True)
class Apply:
    """Server-side apply of a whole object."""

    manifest: Manifest


@dataclass(frozen=True)
class Prune:
    """Remove harmful additions by others from an object, if it is still the one observed."""

    kind: str
    name: str
    uid: str
    resource_version: str
    patch: Mapping[str, Any]
    """A merge patch."""
    paths: tuple[str, ...]
    """Paths that the patch removes."""


@dataclass(frozen=True)
class Delete:
    """Delete an object if it is still the one observed."""

    kind: str
    name: str
    uid: str
    resource_version: str
    reason: str
    is_forced: bool = False
    """True to delete it without a grace period: its node cannot confirm its end."""


@dataclass(frozen=True)
class SetStatus:
    """Write the status if the resource is still the one observed."""

    status: ReplicaStatus | DeploymentStatus


@dataclass(frozen=True)
class Confirm:
    """Read the resource again, and end the reconcile if it has changed since it was observed.

    The deletion of a resource may be reported late or never, unlike that of its children, which the garbage
    collector deletes: missing children must then not be created again for a resource that is gone.
    """


@dataclass(frozen=True)
class RecordEvent:
    """An event for `kubectl describe`."""

    reason: str
    message: str
    is_warning: bool = False


Action = CreateKeys | CopyEnrolment | Apply | Prune | Delete | SetStatus | Confirm | RecordEvent


@dataclass(frozen=True)
class Plan:
    actions: tuple[Action, ...]
    requeue_seconds: float | None = None
    """Seconds until the next reconcile, even if no event asks for one; None if none is needed."""


def plan(observed: Observed, now: float, settings: OperatorSettings) -> Plan:
    """Return the actions that bring `observed` nearer to its spec; none if it is there.

    `now` is Unix time in seconds.
    """
    lost, again = _from_lost_nodes(observed, now)
    # The garbage collector deletes everything that is owned, but waits for pods to end.
    if observed.is_deleting:
        return Plan(tuple(lost), again)
    owner = Owner(observed.name, observed.namespace, observed.uid)
    try:
        spec = MedhaReplicaSpec.model_validate(observed.spec)
    except ValidationError as error:
        return _refused(observed, lost, again, "Invalid", problems_in(error), now)
    if spec.placement.gang in KINDS and spec.placement.gang not in settings.gang_apis:
        notice = (
            f"placement.gang is {spec.placement.gang}, which the operator's setting gang_apis does not list"
        )
        return _refused(observed, lost, again, "GangUnavailable", notice, now)
    opened = open_since(observed, now)
    budget = _budget(owner, opened, observed)
    adopted = _adopted(owner, observed)
    revision, kept = _revision(owner, spec, observed, settings)
    gone = {action.name for action in lost if isinstance(action, Delete)}
    restart, expected = spec.lifecycle.restart, _expected_pods(spec)
    replaced, status, later = _gang(observed, restart, expected, revision.name, gone, opened, now)
    status = _described(_after(observed, status, (*lost, *replaced)), spec, revision, owner, now)
    waiting = _eviction_blocked(observed, status)
    again = soonest(again, later, _unsettled_seconds(status, restart, now), waiting.requeue_seconds)
    said, lanes = _status(observed, status), _lanes(owner, spec, revision, observed)
    made = [*adopted, *kept, *_objects(owner, spec, revision, observed, settings)]
    if _is_any_missing(budget, observed):
        made, budget = [*budget, *made], []
    confirmed: tuple[Action, ...] = ()
    if observed.status != ReplicaStatus():
        # The status is written after all other objects: otherwise it would change back and forth when one of
        # them is refused.
        confirmed = (Confirm(),) if _is_any_missing((*made, *lanes), observed) else ()
        # Confirm once more before pods are created: creating the other objects takes a while.
        if made and _is_any_missing(lanes, observed):
            lanes = [Confirm(), *lanes]
    elif _is_any_missing(lanes, observed):
        # The first status is written before there are pods. It is refused for a resource that is gone, so no
        # `Confirm` is needed.
        lanes, said = [*said, *lanes], ()
    # Actions that let pods leave their nodes come first, so that they wait for nothing that the API server
    # may refuse.
    ending = (*replaced, *_history(observed, revision), *_failing(observed, status))
    return Plan((*lost, *budget, *confirmed, *made, *lanes, *said, *ending, *waiting.actions), again)


# --- objects --------------------------------------------------------------------------------------------


def _revision(
    owner: Owner, spec: MedhaReplicaSpec, observed: Observed, settings: OperatorSettings
) -> tuple[Revision, list[Action]]:
    """Return the revision that `spec` asks for, and the actions that keep it if it is new.

    A revision is kept before anything is made from it. The first one gets no event: with one, a new replica
    would cost more than two calls beside one for each object.
    """
    known = find(spec, observed.revisions)
    if known is not None:
        return known, []
    fresh = begin(spec, observed.revisions)
    fresh = replace(fresh, templates=pod_templates(owner, spec, fresh.name, settings))
    notice = [RecordEvent("RevisionStarted", f"revision {fresh.name} begins")] if observed.revisions else []
    return fresh, [Apply(controller_revision(owner, fresh)), *notice]


def _adopted(owner: Owner, observed: Observed) -> list[Action]:
    """Return the actions that adopt revisions left behind by an earlier replica of this name.

    `kubectl delete --cascade=orphan` leaves them behind; adopted, they are deleted with this replica.
    """
    return [
        Apply(controller_revision(owner, one))
        for one in observed.revisions
        if (found := observed.objects.get(("ControllerRevision", config_name(owner, one.name)))) is not None
        and not holds(found["metadata"].get("ownerReferences", []), [owner.reference])
    ]


def _objects(
    owner: Owner, spec: MedhaReplicaSpec, revision: Revision, observed: Observed, settings: OperatorSettings
) -> list[Action]:
    """Return the actions for objects that pods need and that are missing or differ, in the order needed."""
    wanted = [
        service(owner),
        network_policy(owner, settings.metrics_from, peer_ports(spec)),
        config_map(owner, spec, revision.name),
        *([group] if (group := gang_object(owner, spec, revision.name)) is not None else []),
    ]
    actions: list[Action] = []
    if ("Secret", keys_name(owner)) not in observed.objects:
        actions.append(CreateKeys(keys_name(owner)))
    router, enrolment = spec.router_ref, enrolment_name(owner, spec)
    if router is not None and enrolment is not None and is_enrolment_copied(owner, spec):
        assert router.namespace is not None
        if ("Secret", enrolment) not in observed.objects:
            actions.append(CopyEnrolment(enrolment, router.name, router.namespace))
    for manifest in wanted:
        actions += _missing(observed, manifest)
    return actions


def _lanes(owner: Owner, spec: MedhaReplicaSpec, revision: Revision, observed: Observed) -> list[Action]:
    """Return the actions for StatefulSets that are missing or differ, then the deletions of surplus ones."""
    stages = spec.parallelism.stream
    actions: list[Action] = []
    for index, template in enumerate(revision.templates):
        manifest = lane(owner, index, stages, 0 if spec.suspend else stages, template)
        actions += _missing(observed, manifest)
    lanes = {lane_name(owner.name, index) for index in range(len(revision.templates))}
    for (kind, name), found in observed.objects.items():
        if kind == "StatefulSet" and name not in lanes:
            actions += _delete(kind, found, f"the grid has {len(lanes)} lanes")
    return actions


def _budget(owner: Owner, opened: float | None, observed: Observed) -> list[Action]:
    """Return the actions for the disruption budget: open since `opened`, or closed if that is None."""
    return _missing(observed, disruption_budget(owner, None if opened is None else timestamp(opened)))


def _is_any_missing(actions: Iterable[Action], observed: Observed) -> bool:
    """Return whether any action creates an object.

    Updates do not count: their resourceVersion makes the API server refuse them if the object is gone.
    """
    return any(
        isinstance(action, Apply)
        and (action.manifest["kind"], action.manifest["metadata"]["name"]) not in observed.objects
        for action in actions
    )


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


def _missing(observed: Observed, manifest: Manifest) -> list[Action]:
    """Return the actions that make the object as `manifest` describes it, without harmful additions."""
    found = observed.objects.get((manifest["kind"], manifest["metadata"]["name"]))
    if found is None or not holds(found, manifest):
        return [Apply(manifest)]
    patch, paths = additions(found, manifest)
    if not paths:
        return []
    metadata = found["metadata"]
    return [
        Prune(manifest["kind"], metadata["name"], metadata["uid"], metadata["resourceVersion"], patch, paths)
    ]


def _history(observed: Observed, current: Revision) -> list[Action]:
    """Return the deletions of what belongs to old revisions.

    These are revisions that are too old to go back to, and the ConfigMaps and gang objects of revisions that
    no pod runs any more.
    """
    in_use = {current.name} | {pod.revision for pod in observed.pods}
    others = sorted(
        (one for one in observed.revisions if one.name not in in_use), key=lambda one: -one.number
    )
    owner = Owner(observed.name, observed.namespace, observed.uid)
    actions: list[Action] = []
    for index, old in enumerate(others):
        name = config_name(owner, old.name)
        for kind in ("ConfigMap", *_GROUPS, *(("ControllerRevision",) if index >= REVISION_HISTORY else ())):
            found = observed.objects.get((kind, name))
            if found is not None:
                actions += _delete(kind, found, f"revision {old.name} is not in use")
    return actions


def _delete(kind: str, found: Any, reason: str) -> list[Action]:
    """Return the deletion of an object; nothing if it is being deleted already and a finalizer holds it."""
    metadata = found["metadata"]
    if "deletionTimestamp" in metadata:
        return []
    return [Delete(kind, metadata["name"], metadata["uid"], metadata["resourceVersion"], reason)]


# --- pods -----------------------------------------------------------------------------------------------


def _eviction_blocked(observed: Observed, status: ReplicaStatus) -> Plan:
    """Return the event of a replica that begins to wait for room, and when to check for room again.

    `status` says whether it waits.
    """
    if not waits_for_capacity(observed):
        return Plan(())
    if observed.capacity is not None and observed.capacity.requeue_seconds is not None:
        return Plan((), observed.capacity.requeue_seconds)
    before, now = (
        [one for one in said.conditions if one.type == "Draining" and one.reason == EVICTION_BLOCKED]
        for said in (observed.status, status)
    )
    notice = tuple(RecordEvent(EVICTION_BLOCKED, one.message, is_warning=True) for one in now if not before)
    return Plan(notice, CAPACITY_SECONDS)


def _expected_pods(spec: MedhaReplicaSpec) -> int:
    return 0 if spec.suspend else spec.parallelism.stream * spec.parallelism.kv


def _gang(
    observed: Observed,
    restart: RestartSpec,
    expected: int,
    revision: str,
    gone: Set[str],
    opened: float | None,
    now: float,
) -> tuple[list[Action], ReplicaStatus, float | None]:
    """Return the deletions of pods, the gang's new record, and seconds until the next reconcile.

    Pods that are `gone` with their nodes are not among the deletions.

    A gang is recorded once all of its members have started. It is broken when a member's object is gone, a
    younger pod has replaced a member, or a member has ended for good or asks for a restart. Then the other
    members are deleted, too, once for each gang: at once the first time, later after a back-off. Members that
    have never all started are left alone.

    A gang stays recorded until all of its members are being deleted, so that a deletion that fails is planned
    again. `restarted_member` and `moved_member` record that this has begun: its reason may pass before the
    last deletion, e.g. when no pod is left on the cordoned node.

    Pods of an older revision are deleted once pods of the newer one would replace them.

    Evictors have `EVICTION_SECONDS` to evict the pods of a cordoned node before the operator deletes them.
    They retry by a pod's name: if the operator deleted a pod first, they would ask for the eviction of its
    successor for ever.
    """
    status = observed.status
    alive = [pod for pod in observed.pods if not pod.is_deleting and pod.name not in gone]
    if expected == 0:  # it is suspended
        return [], status.model_copy(update=_NO_GANG), None
    outdated = [pod for pod in alive if pod.revision != revision]
    if outdated and not _makes_only(revision, observed):
        return [], status, None
    if outdated:
        notice = RecordEvent("RevisionChanging", f"{len(outdated)} pods of an older revision end")
        ending = _end(outdated, "an older revision")
        return [notice, *ending], status.model_copy(update=_NO_GANG), None
    if len(alive) == expected and _is_later(status.newest_member, max(pod.created for pod in alive)):
        # The record was tampered with: a complete gang has a pod as young as its record.
        status = status.model_copy(update=_NO_GANG)
    broken, members = _broken(alive, expected, status), _members(alive, status)
    has_begun = status.newest_member in (status.restarted_member, status.moved_member)
    if broken is not None and members and has_begun:
        return _end(members, broken), status, None
    cordoned = on_cordoned_node(observed)
    if cordoned is not None and opened is not None:
        left = opened + EVICTION_SECONDS - now
        if left > 0:
            return [], status, left
        notice = RecordEvent(MOVING, f"node {cordoned.node} is being emptied: the replica moves")
        return [notice, *_end(alive, "its node is cordoned")], _moved(status), None
    if status.newest_member is None:
        ended = [pod for pod in alive if pod.is_failed]
        if ended:  # only its object is left, and keeps its successor from being created
            return _end(ended, "it has ended"), status, None
        if len(alive) == expected and all(pod.is_started for pod in alive):
            newest = max(pod.created for pod in alive)
            return [], status.model_copy(update={"newest_member": timestamp(newest)}), None
        return [], status, None
    if broken is None:
        if status.moved_member == status.newest_member:  # no pod has left, and none has to any more
            status = status.model_copy(update={"moved_member": None})
        return [], _settled(status, restart, now), None
    if not members:  # all members are gone: pods that come are the next gang
        return [], status.model_copy(update=_NO_GANG), None
    if has_left_node(observed):
        notice = RecordEvent(MOVING, f"{broken} as a node is being emptied: the replica moves")
        return [notice, *_end(members, broken)], _moved(status), None
    wait = _backoff_seconds(status, restart) - _since_restart(status, now)
    if wait > 0:
        return [], status, wait
    restarted = {
        "restarted_member": status.newest_member,
        "restarts": status.restarts + 1,
        "last_restart_time": timestamp(now),
    }
    notice = RecordEvent("GangRestarted", f"{broken}; all pods restart", is_warning=True)
    return [notice, *_end(members, broken)], status.model_copy(update=restarted), None


_NO_GANG = {"newest_member": None}


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


def _from_lost_nodes(observed: Observed, now: float) -> tuple[list[Action], float | None]:
    """Return the deletions of pods on lost nodes, and seconds until the next reconcile."""
    limit = _restart_spec(observed.spec).node_lost_seconds
    lost, again = on_lost_nodes(observed, limit, now)
    actions: list[Action] = []
    for pod in lost:
        reason = f"node {pod.node} has not reported for {limit:g} s"
        actions.append(Delete("Pod", pod.name, pod.uid, pod.resource_version, reason, is_forced=True))
        actions.append(RecordEvent("NodeLost", f"{reason}: pod {pod.name} is replaced", is_warning=True))
    return actions, again


def _restart_spec(spec: Mapping[str, Any]) -> RestartSpec:
    """Return `lifecycle.restart` of a spec that may be invalid elsewhere; the defaults if it is invalid
    itself."""
    try:
        return RestartSpec.model_validate(spec.get("lifecycle", {}).get("restart", {}))
    except (ValidationError, AttributeError):
        return RestartSpec()


def _end(pods: Iterable[Pod], reason: str) -> list[Action]:
    return [Delete("Pod", pod.name, pod.uid, pod.resource_version, reason) for pod in pods]


def _settled(status: ReplicaStatus, restart: RestartSpec, now: float) -> ReplicaStatus:
    """Reset the restarts of a gang that has served long enough, so that its next restart has no back-off.

    They are also reset if no time of a restart is recorded.
    """
    is_forgotten = status.last_restart_time is None or _served_seconds(status, now) >= restart.stable_seconds
    if status.restarts and is_forgotten:
        return status.model_copy(update={"restarts": 0})
    return status


def _unsettled_seconds(status: ReplicaStatus, restart: RestartSpec, now: float) -> float | None:
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


def soonest(*waits: float | None) -> float | None:
    """Return the shortest of some waits in seconds; None if there is none."""
    return min((wait for wait in waits if wait is not None), default=None)


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


# --- status ---------------------------------------------------------------------------------------------


def _after(observed: Observed, status: ReplicaStatus, actions: Iterable[Action]) -> Observed:
    """Return `observed` as the status should describe it.

    Pods that the plan deletes count as ending, or others would rely on the replica.
    """
    ended = {action.name for action in actions if isinstance(action, Delete) and action.kind == "Pod"}
    pods = (replace(pod, is_deleting=pod.is_deleting or pod.name in ended) for pod in observed.pods)
    return replace(observed, status=status, pods=tuple(pods))


def _described(
    observed: Observed, spec: MedhaReplicaSpec, revision: Revision, owner: Owner, now: float
) -> ReplicaStatus:
    shape = spec.parallelism
    derived = derive_conditions(observed, revision.name, _expected_pods(spec))
    return observed.status.model_copy(
        update={
            "observed_generation": observed.generation,
            "conditions": stamped(derived, observed.status.conditions, observed.generation, now),
            "shape": f"TP{shape.tensor} x SPP{shape.stream} x KVP{shape.kv}",
            "accelerators": 0
            if spec.resources.accelerator == NO_ACCELERATOR
            else shape.stream * shape.kv * shape.tensor,
            "endpoint": leader_address(owner),
            **_counts(observed, revision.name, shape.stream, shape.kv),
        }
    )


def _counts(observed: Observed, revision: str, stages: int, lanes: int) -> dict[str, Any]:
    """Return the status fields that count the pods of a revision: wanted ones and ready ones."""
    current = [pod for pod in observed.pods if pod.revision == revision and not pod.is_deleting]
    ready = sum(pod.is_ready for pod in current)
    lead = sum(pod.is_ready for pod in current if pod.lane == 0)
    desired = {"lead": stages, "kv": stages * (lanes - 1)}
    return {
        "pods": stages * lanes,
        "ready_pods": ready,
        "ready_text": f"{ready}/{stages * lanes}",
        "roles": tuple(
            RoleCount(role=role, desired=count, ready=lead if role == "lead" else ready - lead)
            for role, count in desired.items()
            if count
        ),
        "revision": revision,
    }


def _refused(
    observed: Observed, lost: list[Action], again: float | None, reason: str, message: str, now: float
) -> Plan:
    """Return the plan for a spec that the schema accepts but that cannot be served.

    What runs goes on as it is. The replica may leave cordoned nodes without permission of its deployment,
    which could make no other replica from such a spec. It restarts when a member is lost. The status keeps
    reporting on its pods.
    """
    alone = replace(observed, deployment=None)
    owner, opened = Owner(observed.name, observed.namespace, observed.uid), open_since(alone, now)
    budget = _budget(owner, opened, observed)
    running, restart = _running(observed), _restart_spec(observed.spec)
    status, replaced, derived = observed.status, list[Action](), refuse(reason, message)
    if running is not None:
        revision, expected = running
        gone = {action.name for action in lost if isinstance(action, Delete)}
        replaced, status, later = _gang(alone, restart, expected, revision.name, gone, opened, now)
        left = _after(observed, status, (*lost, *replaced))
        derived = derive_refused_conditions(left, revision.name, expected, reason, message)
        counts = _counts(left, revision.name, stages_of(revision), len(revision.templates))
        status = status.model_copy(update=counts)
        again = soonest(again, later)
    conditions = stamped(derived, observed.status.conditions, observed.generation, now)
    status = status.model_copy(update={"observed_generation": observed.generation, "conditions": conditions})
    waiting = _eviction_blocked(alone, status)
    again = soonest(again, _unsettled_seconds(status, restart, now), waiting.requeue_seconds)
    runs = ("PodDisruptionBudget", observed.name) in observed.objects
    is_reported = _refusal_in(observed.status.conditions) == _refusal_in(conditions)
    notice = () if is_reported else (RecordEvent(reason, message, is_warning=True),)
    # The event comes last: otherwise each retry of an action that the API server refuses would repeat it.
    return Plan(
        (*lost, *(budget if runs else ()), *_status(observed, status), *replaced, *notice, *waiting.actions),
        again,
    )


def _running(observed: Observed) -> tuple[Revision, int] | None:
    """Return the revision that the StatefulSets create, and the number of its pods.

    None if they form no complete revision. The pods themselves may have another revision: an accepted change
    may be under way, and goes on.
    """
    sets = [
        found["spec"]
        for (kind, _), found in observed.objects.items()
        if kind == "StatefulSet" and "deletionTimestamp" not in found["metadata"]
    ]
    names = {one["template"]["metadata"]["labels"].get("medha.dev/revision") for one in sets}
    made = next((one for one in observed.revisions if names == {one.name}), None)
    if made is None or len(sets) != len(made.templates):
        return None
    return made, sum(one["replicas"] for one in sets)


def _refusal_in(conditions: Iterable[Condition]) -> tuple[str, str] | None:
    """Return reason and message with which the spec was refused; None if it is not."""
    for one in conditions:
        if one.type == "Accepted" and one.status == "False":
            return one.reason, one.message
    return None


def _failing(observed: Observed, status: ReplicaStatus) -> tuple[Action, ...]:
    """Return an event each time that pods begin to fail; the kubelet's back-off bounds how often.

    The text is always the same, so that there is a single event with a count.
    """
    reason = begins_to_fail(observed.status.conditions, status.conditions)
    if reason is None:
        return ()
    text = f"pods of revision {status.revision} fail repeatedly; the message of the condition Ready names them and the error"
    return (RecordEvent(reason, text, is_warning=True),)


def _status(observed: Observed, status: ReplicaStatus) -> tuple[Action, ...]:
    return () if status == observed.status else (SetStatus(status),)


def timestamp(unix_seconds: float) -> str:
    """Return Unix time as Kubernetes writes it, in whole seconds."""
    return datetime.fromtimestamp(unix_seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
