"""What to do for one replica: `plan(observed, now)`, pure and level-triggered.

It looks at what is there, never at what has happened, so that any event, or none, leads to the same end. Actions are
given in an order in which the operator may die after any of them: whoever comes next plans the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError

from medha.api.cluster import RestartSpec
from medha.api.replica import MedhaReplicaSpec
from medha_operator.gang import KINDS
from medha_operator.kube.kinds import Manifest
from medha_operator.overlay import holds
from medha_operator.replica.conditions import (
    begins_to_fail,
    judge,
    judge_refused,
    problems_in,
    refuse,
    stamped,
)
from medha_operator.replica.drift import additions
from medha_operator.replica.nodes import (
    LET_GO,
    ROOM_SECONDS,
    STAYS,
    has_left_node,
    on_cordoned_node,
    on_lost_nodes,
    open_since,
    waits_for_room,
)
from medha_operator.replica.observed import Observed, Pod, seconds
from medha_operator.replica.render import (
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
    pod_templates,
    service,
)
from medha_operator.replica.revision import Revision, begin, find, stages_of
from medha_operator.settings import OperatorSettings
from medha_operator.status import Condition, DeploymentStatus, ReplicaStatus, RoleCount

REVISION_HISTORY = 5
EVICTION_SECONDS = 15.0
"""How long evictors may take for a cordoned node: `kubectl drain` asks every 5 s, the cluster autoscaler every 10 s."""
CLOCK_SKEW_SECONDS = 60.0
"""How far the clocks of two machines that ran the operator may differ. A time that is later yet was written by others."""
_GROUPS = tuple(kind for _, kind, _ in KINDS.values())


@dataclass(frozen=True)
class CreateKeys:
    """Make the Secret of wire keys, unless it is there: made once, never rendered again."""

    name: str


@dataclass(frozen=True)
class CopyEnrolment:
    """Make, once too, the Secret by which a replica enrols at a router of another namespace."""

    name: str
    router: str
    router_namespace: str


@dataclass(frozen=True)
class Apply:
    """Server-side apply of a whole object."""

    manifest: Manifest


@dataclass(frozen=True)
class Prune:
    """Take away what others have added to an object where it does harm, if it is still the one that was looked at."""

    kind: str
    name: str
    uid: str
    resource_version: str
    patch: Mapping[str, Any]
    """A merge patch."""
    paths: tuple[str, ...]
    """What it takes away."""


@dataclass(frozen=True)
class Delete:
    """Delete one object, if it is still the one that was looked at."""

    kind: str
    name: str
    uid: str
    resource_version: str
    reason: str
    is_forced: bool = False
    """With no grace: its node cannot confirm its end."""


@dataclass(frozen=True)
class SetStatus:
    """Write the status, if the resource is still the one that was looked at."""

    status: ReplicaStatus | DeploymentStatus


@dataclass(frozen=True)
class Confirm:
    """Ask whether the resource is still as it was looked at, and end the look if it is not.

    The end of a resource may be told late or never, unlike that of its children, whom the garbage collector takes: what
    is missing then must not be made anew for nobody.
    """


@dataclass(frozen=True)
class Tell:
    """An event for `kubectl describe`."""

    reason: str
    message: str
    is_warning: bool = False


Action = CreateKeys | CopyEnrolment | Apply | Prune | Delete | SetStatus | Confirm | Tell


@dataclass(frozen=True)
class Plan:
    actions: tuple[Action, ...]
    again_seconds: float | None = None
    """When to look again though nothing may have happened."""


def plan(observed: Observed, now: float, settings: OperatorSettings) -> Plan:
    """What brings `observed` nearer to its spec; nothing, when it is there. `now` is Unix time, seconds."""
    lost, again = _from_lost_nodes(observed, now)
    # The garbage collector takes everything that is owned, but waits for pods to end.
    if observed.is_deleting:
        return Plan(tuple(lost), again)
    owner = Owner(observed.name, observed.namespace, observed.uid)
    try:
        spec = MedhaReplicaSpec.model_validate(observed.spec)
    except ValidationError as error:
        return _refused(observed, lost, again, "Invalid", problems_in(error), now)
    if spec.placement.gang in KINDS and spec.placement.gang not in settings.gang_apis:
        told = f"placement.gang {spec.placement.gang} needs that name in the operator's setting gang_apis"
        return _refused(observed, lost, again, "GangUnavailable", told, now)
    opened = open_since(observed, now)
    budget = _budget(owner, opened, observed)
    adopted = _adopted(owner, observed)
    revision, kept = _revision(owner, spec, observed, settings)
    gone = {action.name for action in lost if isinstance(action, Delete)}
    restart, expected = spec.lifecycle.restart, _expected_pods(spec)
    replaced, status, later = _gang(observed, restart, expected, revision.name, gone, opened, now)
    status = _described(_after(observed, status, (*lost, *replaced)), spec, revision, owner, now)
    waiting = _stays(observed, status)
    again = soonest(again, later, _unsettled_seconds(status, restart, now), waiting.again_seconds)
    said, lanes = _status(observed, status), _lanes(owner, spec, revision, observed)
    made = [*adopted, *kept, *_objects(owner, spec, revision, observed, settings)]
    if _is_any_missing(budget, observed):
        made, budget = [*budget, *made], []
    confirmed: tuple[Action, ...] = ()
    if observed.status != ReplicaStatus():
        # The status says nothing new before all is done: a refusal would have it change to and fro.
        confirmed = (Confirm(),) if _is_any_missing((*made, *lanes), observed) else ()
        # Once more before there are pods: making the others takes a while.
        if made and _is_any_missing(lanes, observed):
            lanes = [Confirm(), *lanes]
    elif _is_any_missing(lanes, observed):
        # A first status, written before there are pods, is refused for a resource that is gone: no further call.
        lanes, said = [*said, *lanes], ()
    # What lets pods leave their nodes comes first: it waits for nothing that the API server may refuse.
    ending = (*replaced, *_history(observed, revision), *_failing(observed, status))
    return Plan((*lost, *budget, *confirmed, *made, *lanes, *said, *ending, *waiting.actions), again)


# --- objects --------------------------------------------------------------------------------------------


def _revision(
    owner: Owner, spec: MedhaReplicaSpec, observed: Observed, settings: OperatorSettings
) -> tuple[Revision, list[Action]]:
    """The revision that `spec` asks for; a new one is kept before anything is made of it.

    The first one is no event: with it, a new replica would cost more than two calls beside one for each object.
    """
    known = find(spec, observed.revisions)
    if known is not None:
        return known, []
    fresh = begin(spec, observed.revisions)
    fresh = replace(fresh, templates=pod_templates(owner, spec, fresh.name, settings))
    told = [Tell("RevisionStarted", f"revision {fresh.name} begins")] if observed.revisions else []
    return fresh, [Apply(controller_revision(owner, fresh)), *told]


def _adopted(owner: Owner, observed: Observed) -> list[Action]:
    """Kept revisions that a replica of this name has left behind (`kubectl delete --cascade=orphan`): they go with this one."""
    return [
        Apply(controller_revision(owner, one))
        for one in observed.revisions
        if (found := observed.objects.get(("ControllerRevision", config_name(owner, one.name)))) is not None
        and not holds(found["metadata"].get("ownerReferences", []), [owner.reference])
    ]


def _objects(
    owner: Owner, spec: MedhaReplicaSpec, revision: Revision, observed: Observed, settings: OperatorSettings
) -> list[Action]:
    """Whatever pods need and is missing or differs, in the order in which it is needed."""
    wanted = [
        service(owner),
        network_policy(owner, settings.metrics_from),
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
    """The StatefulSets that are missing or differ; then those that are too much."""
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
    """The disruption budget, open since then, or closed."""
    return _missing(observed, disruption_budget(owner, None if opened is None else timestamp(opened)))


def _is_any_missing(actions: Iterable[Action], observed: Observed) -> bool:
    """Whether something is made anew. What is only changed is refused by its resourceVersion if it is gone."""
    return any(
        isinstance(action, Apply)
        and (action.manifest["kind"], action.manifest["metadata"]["name"]) not in observed.objects
        for action in actions
    )


def _makes_only(revision: str, observed: Observed) -> bool:
    """Whether the controller of StatefulSets has seen every one at `revision`: until then it makes pods of another.

    Of one that was never changed it has seen no other; its status is not kept.
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
    """What brings it about that the object is there as `manifest` says, with nothing added that does harm."""
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
    """Revisions too old to go back to, and the settings of those that no pod runs any more."""
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
    """The end of an object; nothing more, where it is told already and a finalizer holds it."""
    metadata = found["metadata"]
    if "deletionTimestamp" in metadata:
        return []
    return [Delete(kind, metadata["name"], metadata["uid"], metadata["resourceVersion"], reason)]


# --- pods -----------------------------------------------------------------------------------------------


def _stays(observed: Observed, status: ReplicaStatus) -> Plan:
    """The event of a replica that begins to wait for room on other nodes, as `status` says, and when it asks again."""
    if not waits_for_room(observed):
        return Plan(())
    if observed.room is not None and observed.room.again_seconds is not None:
        return Plan((), observed.room.again_seconds)
    before, now = (
        [one for one in said.conditions if one.type == "Draining" and one.reason == STAYS]
        for said in (observed.status, status)
    )
    told = tuple(Tell(STAYS, one.message, is_warning=True) for one in now if not before)
    return Plan(told, ROOM_SECONDS)


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
    """Pods that must go beside those that are `gone` with their nodes, the gang's record after it, when to look again.

    A gang is recorded once all of its members have started. It is broken when a member's object is gone, a younger pod
    has taken a member's place, a member has ended for good or asks for a restart. Then the others go too, once: at once
    the first time, later after a back-off. Members that have never all started are left alone.

    Pods of an older revision end once pods of the newer one would come in their place.

    From a cordoned node, evictors may take the pods for `EVICTION_SECONDS`, and only then we do: they ask again by a
    pod's name, so that one that we had ended before they could would have them ask for its successor for ever.
    """
    status = observed.status
    alive = [pod for pod in observed.pods if not pod.is_deleting and pod.name not in gone]
    if expected == 0:  # it is suspended
        return [], status.model_copy(update=_NO_GANG), None
    outdated = [pod for pod in alive if pod.revision != revision]
    if outdated and not _makes_only(revision, observed):
        return [], status, None
    if outdated:
        told = Tell("RevisionChanging", f"{len(outdated)} pods of an older revision end")
        ending = _end(outdated, "an older revision")
        return [told, *ending], status.model_copy(update=_NO_GANG), None
    cordoned = on_cordoned_node(observed)
    if cordoned is not None and opened is not None:
        left = opened + EVICTION_SECONDS - now
        if left > 0:
            return [], status, left
        told = Tell(LET_GO, f"node {cordoned.node} is being emptied: the replica moves")
        ending = _end(alive, "its node is being emptied")
        return [told, *ending], status.model_copy(update=_NO_GANG), None
    if len(alive) == expected and _is_later(status.newest_member, max(pod.created for pod in alive)):
        status = status.model_copy(
            update=_NO_GANG
        )  # somebody has spoilt it: no whole gang is older than its record
    if status.newest_member is None:
        ended = [pod for pod in alive if pod.is_failed]
        if ended:  # only its object is left, which keeps its successor away
            return _end(ended, "it has ended"), status, None
        if len(alive) == expected and all(pod.is_started for pod in alive):
            newest = max(pod.created for pod in alive)
            return [], status.model_copy(update={"newest_member": timestamp(newest)}), None
        return [], status, None
    broken = _broken(alive, expected, seconds(status.newest_member))
    if broken is None:
        return [], _settled(status, restart, now), None
    members = [pod for pod in alive if pod.created <= seconds(status.newest_member) or pod.is_failed]
    if not members:  # all are gone: those that come are the next gang
        return [], status.model_copy(update=_NO_GANG), None
    if has_left_node(observed):
        told = Tell(LET_GO, f"{broken} as a node is being emptied: the replica moves")
        return [told, *_end(members, broken)], status.model_copy(update=_NO_GANG), None
    actions: list[Action] = []
    if status.restarted_member != status.newest_member:
        wait = _backoff_seconds(status, restart) - _since_restart(status, now)
        if wait > 0:
            return [], status, wait
        status = status.model_copy(
            update={
                "restarted_member": status.newest_member,
                "restarts": status.restarts + 1,
                "last_restart_time": timestamp(now),
            }
        )
        actions.append(Tell("GangRestarted", f"{broken}; all pods start anew", is_warning=True))
    return [*actions, *_end(members, broken)], status, None


_NO_GANG = {"newest_member": None}


def _broken(alive: list[Pod], expected: int, newest: float) -> str | None:
    """Why the recorded gang is not whole any more."""
    for pod in alive:
        if pod.created > newest:
            return f"pod {pod.name} was replaced"
        if pod.is_failed:
            return f"pod {pod.name} has ended"
        if pod.asks_restart:
            return f"the ranks of pod {pod.name} cannot meet the others"
    return None if len(alive) >= expected else f"{expected - len(alive)} pods are gone"


def _from_lost_nodes(observed: Observed, now: float) -> tuple[list[Action], float | None]:
    """The end of pods whose nodes are lost, and when to look again."""
    limit = _restart_spec(observed.spec).node_lost_seconds
    lost, again = on_lost_nodes(observed, limit, now)
    actions: list[Action] = []
    for pod in lost:
        reason = f"node {pod.node} is not heard of for {limit:g} s"
        actions.append(Delete("Pod", pod.name, pod.uid, pod.resource_version, reason, is_forced=True))
        actions.append(Tell("NodeLost", f"{reason}: pod {pod.name} is replaced", is_warning=True))
    return actions, again


def _restart_spec(spec: Mapping[str, Any]) -> RestartSpec:
    """`lifecycle.restart` of a spec that may be wrong elsewhere; the defaults, where it is wrong itself."""
    try:
        return RestartSpec.model_validate(spec.get("lifecycle", {}).get("restart", {}))
    except (ValidationError, AttributeError):
        return RestartSpec()


def _end(pods: Iterable[Pod], reason: str) -> list[Action]:
    return [Delete("Pod", pod.name, pod.uid, pod.resource_version, reason) for pod in pods]


def _settled(status: ReplicaStatus, restart: RestartSpec, now: float) -> ReplicaStatus:
    """A gang that has served long enough begins with no wait again; and where no restart is on record, there was none."""
    is_forgotten = status.last_restart_time is None or _served_seconds(status, now) >= restart.stable_seconds
    if status.restarts and is_forgotten:
        return status.model_copy(update={"restarts": 0})
    return status


def _unsettled_seconds(status: ReplicaStatus, restart: RestartSpec, now: float) -> float | None:
    """How long a gang has yet to serve until its restarts are forgotten."""
    left = restart.stable_seconds - _served_seconds(status, now)
    return left if status.restarts and 0 < left < float("inf") else None


def _served_seconds(status: ReplicaStatus, now: float) -> float:
    """How long the replica has served without a break, and with this gang; minus infinity if it does not."""
    for entry in status.conditions:
        if entry.type == "Serving" and entry.status == "True":
            return min(now - seconds(entry.last_transition_time), _since_restart(status, now))
    return float("-inf")


def soonest(*waits: float | None) -> float | None:
    """The shortest of some waits, seconds; None: there is none."""
    return min((wait for wait in waits if wait is not None), default=None)


def _backoff_seconds(status: ReplicaStatus, restart: RestartSpec) -> float:
    if status.restarts == 0:
        return 0.0
    doubled = restart.backoff_seconds * 2.0 ** min(status.restarts - 1, 32)
    return float(min(doubled, restart.backoff_limit_seconds))


def _since_restart(status: ReplicaStatus, now: float) -> float:
    """How long ago the last restart was; for ever, where there was none, or its time is spoilt."""
    if status.last_restart_time is None or _is_later(status.last_restart_time, now + CLOCK_SKEW_SECONDS):
        return float("inf")
    return now - seconds(status.last_restart_time)


def _is_later(time: str | None, than: float) -> bool:
    return time is not None and seconds(time) > than


# --- status ---------------------------------------------------------------------------------------------


def _after(observed: Observed, status: ReplicaStatus, actions: Iterable[Action]) -> Observed:
    """What the status speaks of: pods that the plan ends are as good as gone, or others would count on the replica."""
    ended = {action.name for action in actions if isinstance(action, Delete) and action.kind == "Pod"}
    pods = (replace(pod, is_deleting=pod.is_deleting or pod.name in ended) for pod in observed.pods)
    return replace(observed, status=status, pods=tuple(pods))


def _described(
    observed: Observed, spec: MedhaReplicaSpec, revision: Revision, owner: Owner, now: float
) -> ReplicaStatus:
    shape = spec.parallelism
    judged = judge(observed, revision.name, _expected_pods(spec))
    return observed.status.model_copy(
        update={
            "observed_generation": observed.generation,
            "conditions": stamped(judged, observed.status.conditions, observed.generation, now),
            "shape": f"TP{shape.tensor} x SPP{shape.stream} x KVP{shape.kv}",
            "accelerators": 0
            if spec.resources.accelerator == "none"
            else shape.stream * shape.kv * shape.tensor,
            "endpoint": leader_address(owner),
            **_counts(observed, revision.name, shape.stream, shape.kv),
        }
    )


def _counts(observed: Observed, revision: str, stages: int, lanes: int) -> dict[str, Any]:
    """What the status says of how many pods of a revision there are to be, and are ready."""
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
    """For a spec that the schema let through and that cannot be served: what runs goes on as it is.

    It may leave nodes, and for no leave of a deployment is waited, since no other replica could be made of such a spec. It
    starts anew when a member is lost. The status goes on telling of it.
    """
    alone = replace(observed, deployment=None)
    owner, opened = Owner(observed.name, observed.namespace, observed.uid), open_since(alone, now)
    budget = _budget(owner, opened, observed)
    running, restart = _running(observed), _restart_spec(observed.spec)
    status, replaced, judged = observed.status, list[Action](), refuse(reason, message)
    if running is not None:
        revision, expected = running
        gone = {action.name for action in lost if isinstance(action, Delete)}
        replaced, status, later = _gang(alone, restart, expected, revision.name, gone, opened, now)
        left = _after(observed, status, (*lost, *replaced))
        judged = judge_refused(left, revision.name, expected, reason, message)
        counts = _counts(left, revision.name, stages_of(revision), len(revision.templates))
        status = status.model_copy(update=counts)
        again = soonest(again, later)
    conditions = stamped(judged, observed.status.conditions, observed.generation, now)
    status = status.model_copy(update={"observed_generation": observed.generation, "conditions": conditions})
    waiting = _stays(alone, status)
    again = soonest(again, _unsettled_seconds(status, restart, now), waiting.again_seconds)
    runs = ("PodDisruptionBudget", observed.name) in observed.objects
    is_told = _refusal_in(observed.status.conditions) == _refusal_in(conditions)
    told = () if is_told else (Tell(reason, message, is_warning=True),)
    # The event comes last, or each new try of what the API server refuses would tell it again.
    return Plan(
        (*lost, *(budget if runs else ()), *_status(observed, status), *replaced, *told, *waiting.actions),
        again,
    )


def _running(observed: Observed) -> tuple[Revision, int] | None:
    """The revision that the StatefulSets make, and of how many pods; None where they make no whole one.

    Not that of the pods: an accepted change may be under way, and goes on.
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
    """Why the spec is refused, in the words that were told."""
    for one in conditions:
        if one.type == "Accepted" and one.status == "False":
            return one.reason, one.message
    return None


def _failing(observed: Observed, status: ReplicaStatus) -> tuple[Action, ...]:
    """An event each time that pods begin to fail: the kubelet's back-off bounds how often. The words are always the same,
    so that there is one event, which counts."""
    reason = begins_to_fail(observed.status.conditions, status.conditions)
    if reason is None:
        return ()
    text = f"pods of revision {status.revision} fail again and again; the message of the condition Ready says which, and how"
    return (Tell(reason, text, is_warning=True),)


def _status(observed: Observed, status: ReplicaStatus) -> tuple[Action, ...]:
    return () if status == observed.status else (SetStatus(status),)


def timestamp(unix_seconds: float) -> str:
    """Unix time as Kubernetes writes it, in whole seconds."""
    return datetime.fromtimestamp(unix_seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
