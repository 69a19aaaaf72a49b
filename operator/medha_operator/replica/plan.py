"""Plan the actions for one replica: `plan(observed, now, settings)`, pure and level-triggered.

A plan depends on the present state alone, never on past events, so that any event, or none, leads to the same
end state. Actions are ordered so that the operator may die after any of them: the next reconcile plans the
rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from medha.api.cluster import NO_ACCELERATOR, RestartSpec
from medha.api.replica import MedhaReplicaSpec
from medha_operator.gang import KINDS
from medha_operator.kube.kinds import Manifest
from medha_operator.kube.manifest_overlay import holds
from medha_operator.operator_settings import OperatorSettings
from medha_operator.replica.actions import (
    Action,
    Apply,
    Confirm,
    CopyEnrolment,
    CreateKeys,
    Delete,
    Plan,
    Prune,
    RecordEvent,
    soonest,
    status_change,
)
from medha_operator.replica.conditions import (
    begins_to_fail,
    deleting,
    derive_conditions,
    derive_refused_conditions,
    problems_in,
    refuse,
    stamped,
)
from medha_operator.replica.drift import additions
from medha_operator.replica.gang_restarts import plan_gang, unsettled_seconds
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
    on_lost_nodes,
    open_since,
    waits_for_capacity,
)
from medha_operator.replica.observed import Observed, timestamp
from medha_operator.replica.revision import Revision, begin, find, stages_of
from medha_operator.status_fields import Condition, ReplicaStatus, RoleCount

REVISION_HISTORY = 5
_GROUPS = tuple(kind for _, kind, _ in KINDS.values())


def plan(observed: Observed, now: float, settings: OperatorSettings) -> Plan:
    """Return the actions that bring `observed` nearer to its spec; none if nothing is left to do.

    `now` is Unix time in seconds.
    """
    lost, again = _from_lost_nodes(observed, now)
    # The garbage collector deletes everything that is owned, but waits for pods to end.
    if observed.is_deleting:
        status = deleting(
            observed.status,
            observed.generation,
            now,
            "it was deleted; its pods finish open requests for at most lifecycle.drainSeconds",
        )
        return Plan((*lost, *status_change(observed.status, status)), again)
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
    gang = plan_gang(observed, restart, expected, revision.name, gone, opened, now)
    left = _after(observed, gang.status, (*lost, *gang.actions))
    status = _described(left, spec, revision, owner, now)
    waiting = _eviction_blocked(observed, status)
    again = soonest(
        again, gang.requeue_seconds, unsettled_seconds(status, restart, now), waiting.requeue_seconds
    )
    written, lanes = status_change(observed.status, status), _lanes(owner, spec, revision, observed)
    made = [*adopted, *kept, *_objects(owner, spec, revision, observed, settings)]
    if _is_any_missing(budget, observed):
        made, budget = [*budget, *made], []
    confirmed: tuple[Action, ...] = ()
    if observed.status != ReplicaStatus():
        # The status is written after all other objects; otherwise it would alternate while one of them is refused.
        confirmed = (Confirm(),) if _is_any_missing((*made, *lanes), observed) else ()
        # Confirm once more before pods are created: creating the other objects takes a while.
        if made and _is_any_missing(lanes, observed):
            lanes = [Confirm(), *lanes]
    elif _is_any_missing(lanes, observed):
        # The first status is written before there are pods. It is refused for a resource that is gone, so no
        # `Confirm` is needed.
        lanes, written = [*written, *lanes], ()
    # Actions that let pods leave their nodes come first, so that no refused action keeps them waiting.
    ending = (*gang.actions, *_history(observed, revision), *_failing(observed, status))
    return Plan((*lost, *budget, *confirmed, *made, *lanes, *written, *ending, *waiting.actions), again)


# --- objects --------------------------------------------------------------------------------------------


def _revision(
    owner: Owner, spec: MedhaReplicaSpec, observed: Observed, settings: OperatorSettings
) -> tuple[Revision, list[Action]]:
    """Return the revision that `spec` asks for, and the actions that keep it if it is new.

    A revision is stored before anything is made from it. The first one gets no event, to save an API call for
    each new replica.
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

    `kubectl delete --cascade=orphan` leaves them; adopted, they are deleted with this replica.
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
    """Return the deletions of old revisions beyond `REVISION_HISTORY`, and of ConfigMaps and gang objects of unused ones."""
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
    """Return the event of a replica that begins to wait for capacity, and when to check capacity again.

    `status` shows whether it waits.
    """
    if not waits_for_capacity(observed):
        return Plan(())
    if observed.capacity is not None and observed.capacity.requeue_seconds is not None:
        return Plan((), observed.capacity.requeue_seconds)
    before, now = (
        [one for one in each.conditions if one.type == "Draining" and one.reason == EVICTION_BLOCKED]
        for each in (observed.status, status)
    )
    notice = tuple(RecordEvent(EVICTION_BLOCKED, one.message, is_warning=True) for one in now if not before)
    return Plan(notice, CAPACITY_SECONDS)


def _expected_pods(spec: MedhaReplicaSpec) -> int:
    return 0 if spec.suspend else spec.parallelism.stream * spec.parallelism.kv


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


# --- status ---------------------------------------------------------------------------------------------


def _after(observed: Observed, status: ReplicaStatus, actions: Iterable[Action]) -> Observed:
    """Return `observed` as the status should describe it.

    Pods that the plan deletes count as ending, so that nobody relies on the replica.
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

    Running pods continue, the replica restarts when it loses a member, and the status still reports on its pods. The
    replica may leave cordoned nodes without its deployment's permission, because the deployment could not make another
    replica from such a spec.
    """
    alone = replace(observed, deployment=None)
    owner, opened = Owner(observed.name, observed.namespace, observed.uid), open_since(alone, now)
    budget = _budget(owner, opened, observed)
    running, restart = _running(observed), _restart_spec(observed.spec)
    status, replaced, derived = observed.status, tuple[Action, ...](), refuse(reason, message)
    if running is not None:
        revision, expected = running
        gone = {action.name for action in lost if isinstance(action, Delete)}
        gang = plan_gang(alone, restart, expected, revision.name, gone, opened, now)
        replaced = tuple(gang.actions)
        left = _after(observed, gang.status, (*lost, *replaced))
        derived = derive_refused_conditions(left, revision.name, expected, reason, message)
        counts = _counts(left, revision.name, stages_of(revision), len(revision.templates))
        status = gang.status.model_copy(update=counts)
        again = soonest(again, gang.requeue_seconds)
    conditions = stamped(derived, observed.status.conditions, observed.generation, now)
    status = status.model_copy(update={"observed_generation": observed.generation, "conditions": conditions})
    waiting = _eviction_blocked(alone, status)
    again = soonest(again, unsettled_seconds(status, restart, now), waiting.requeue_seconds)
    runs = ("PodDisruptionBudget", observed.name) in observed.objects
    is_reported = _refusal_in(observed.status.conditions) == _refusal_in(conditions)
    notice = () if is_reported else (RecordEvent(reason, message, is_warning=True),)
    # The event comes last; otherwise each retry of an action that the API server refuses would repeat it.
    return Plan(
        (
            *lost,
            *(budget if runs else ()),
            *status_change(observed.status, status),
            *replaced,
            *notice,
            *waiting.actions,
        ),
        again,
    )


def _running(observed: Observed) -> tuple[Revision, int] | None:
    """Return the revision that the StatefulSets create, and the number of its pods.

    None if they form no complete revision. The pods themselves may have another revision, if an accepted change
    is under way, which continues.
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
