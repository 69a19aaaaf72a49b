"""The observed state of one deployment: the resource, its replicas and its kept templates, as plain facts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from medha.api.deployment import ReplicaTemplate
from medha.api.replica import MedhaReplicaSpec
from medha_operator.replica.event_reasons import QUOTA
from medha_operator.replica.observed import Object, seconds
from medha_operator.replica.revision import Revision, digest, find
from medha_operator.status_fields import DeploymentStatus

DEPLOYMENT_LABEL = "medha.dev/deployment"
TEMPLATE_LABEL = "medha.dev/deployment-revision"
MAY_DRAIN = "medha.dev/may-drain"
"""Annotation of a replica that its deployment permits to leave a cordoned node. Its value names the
permitted gang by `status.newestMember`, so that the same permission does not drain the next gang."""
NO_PODS = "CreatingPods"
"""Reason of a replica some of whose pods are not created although no earlier pod has their names. Either
they soon will be, or a quota forbids them, which is a lack of room like any other. Once an event names the
quota, the reason is `QuotaExceeded`."""
_NOT_MADE = (NO_PODS, QUOTA)
_NO_CAPACITY = ("InsufficientCapacity", "WaitingForGang", *_NOT_MADE)


@dataclass(frozen=True)
class StoredTemplate:
    """A template that replicas were made from, kept in a ControllerRevision for rollbacks."""

    name: str
    """Ten hexadecimal digits."""
    number: int
    """Number that counts upwards; a template that is asked for again gets a new one."""
    template: Mapping[str, Any]
    """`spec.template` as the API server had it."""
    uid: str = ""
    resource_version: str = ""
    is_deleting: bool = False


@dataclass(frozen=True)
class Child:
    """A MedhaReplica whose name belongs to the deployment."""

    index: int
    document: Object
    name: str
    uid: str
    resource_version: str
    revision: str
    """Name of the kept template that its spec was written from."""
    running: Revision | None = None
    """Revision of its pods according to its status; None if that revision is not kept."""
    is_ours: bool = True
    """True if the deployment is its controller, or made it and was deleted without it. Otherwise somebody
    else's replica has the name."""
    is_left_over: bool = False
    """True if its controller is an earlier deployment of the same name; the replica will be deleted after
    that one."""
    is_deleting: bool = False
    serving_since: float | None = None
    """Unix time in seconds since which it serves; None while it does not, or if its status may describe pods
    that its spec has replaced.

    Other trouble, such as a refused write or even a refused spec, does not matter while its pods are those
    that the spec asks for.
    """
    may_serve: bool = False
    """True if it may serve although it does not count as serving: its spec is refused while pods of an earlier spec
    serve, or all of its pods have started once and no condition reports on them."""
    unplaced_since: float | None = None
    """Unix time since which some of its pods find no node, or are not created; else None."""
    has_no_pods: bool = False
    """True if the pods do not exist, instead of being without a node. As long as no event gives the reason, a wait of
    more than `surge_wait_seconds` counts as a lack of room."""
    is_suspended: bool = False
    """True if its spec asks for no pods."""
    waits_to_drain: bool = False
    """True if it is on a cordoned node and serves on until it is permitted to leave."""
    may_drain: bool = False
    """True if it has been permitted to leave and has not left yet."""
    problem: tuple[str, str] = ("Starting", "")
    """Reason and message of its condition `Ready` if that is False, else of `Stalled` if that is True."""
    is_stalled: bool = False
    """True if what keeps it from being ready does not recover by itself."""


@dataclass(frozen=True)
class ObservedDeployment:
    """A deployment and everything that belongs to it."""

    name: str
    namespace: str
    uid: str
    generation: int
    resource_version: str
    spec: Mapping[str, Any]
    status: DeploymentStatus
    is_deleting: bool = False
    children: tuple[Child, ...] = ()
    """Every MedhaReplica of the namespace that is named `<name>-<number>`, whoever owns it."""
    templates: tuple[StoredTemplate, ...] = ()


def child_name(deployment: str, index: int) -> str:
    """Return the name of the replica with this index."""
    return f"{deployment}-{index}"


def child_index(deployment: str, replica: str) -> int | None:
    """Return the index in a replica's name; None if a deployment of that name would never give it."""
    stem, _, number = replica.rpartition("-")
    is_number = number.isascii() and number.isdecimal() and str(int(number)) == number
    return int(number) if stem == deployment and is_number else None


def child_of(document: Object, index: int, deployment_uid: str, revisions: Iterable[Revision] = ()) -> Child:
    """Return the facts of a MedhaReplica, from its document and its kept revisions."""
    metadata, status = document["metadata"], document.get("status", {})
    labels = metadata.get("labels", {})
    controller = next((one for one in metadata.get("ownerReferences", ()) if one.get("controller")), None)
    conditions = {entry["type"]: entry for entry in status.get("conditions", ())}
    ready, serving, placed, stalled = (
        conditions.get(one) for one in ("Ready", "Serving", "Scheduled", "Stalled")
    )
    running = next((one for one in revisions if one.name == status.get("revision")), None)
    gang, granted = status.get("newestMember"), metadata.get("annotations", {}).get(MAY_DRAIN)
    drains = _is(conditions.get("Draining"), "True")
    is_leaving = drains and gang is None  # its pods are being deleted, or have never all started
    is_reported = not is_leaving and _speaks_of_present_pods(
        document, running, status.get("observedGeneration", 0)
    )
    problem = next((one for one in (_if(ready, "False"), _if(stalled, "True")) if is_reported and one), None)
    # Use the condition's own generation: a reconcile that fails before it has judged the pods leaves the
    # condition as it was.
    serves = (
        serving is not None
        and _is(serving, "True")
        and _speaks_of_present_pods(document, running, serving.get("observedGeneration", 0))
    )
    # Pods of an earlier spec serve on while the present one is refused: the rollout must not go on past such
    # a replica.
    is_accepted = not _is(conditions.get("Accepted"), "False")
    is_desired = is_accepted or has_pods_for(document["spec"], running)
    # If the spec is refused, missing pods are due to the refusal, not to a lack of room.
    lacks_capacity = (
        placed is not None and _lacks_capacity(placed) and (placed["reason"] not in _NOT_MADE or is_accepted)
    )
    is_unreported = serving is None and gang is not None and has_pods_for(document["spec"], running)
    return Child(
        index=index,
        document=document,
        name=metadata["name"],
        uid=metadata["uid"],
        resource_version=metadata["resourceVersion"],
        revision=labels.get(TEMPLATE_LABEL, ""),
        running=running,
        is_ours=controller["uid"] == deployment_uid
        if controller
        else labels.get(DEPLOYMENT_LABEL) == metadata["name"].rpartition("-")[0],
        is_left_over=controller is not None
        and controller["uid"] != deployment_uid
        and controller.get("kind") == "MedhaDeployment"
        and controller.get("name") == metadata["name"].rpartition("-")[0],
        is_deleting="deletionTimestamp" in metadata,
        serving_since=_since(serving) if serves and is_desired and not is_leaving else None,
        may_serve=(serves and not is_desired) or is_unreported,
        unplaced_since=_since(placed) if placed and lacks_capacity else None,
        has_no_pods=placed is not None and placed["reason"] in _NOT_MADE,
        is_suspended=document["spec"].get("suspend") is True,
        waits_to_drain=drains and gang is not None and granted != gang,
        may_drain=drains and granted is not None and granted == gang,
        problem=(problem["reason"], problem.get("message", "")) if problem else ("Starting", ""),
        is_stalled=is_reported and _is(stalled, "True"),
    )


def find_template(template: Mapping[str, Any], kept: Iterable[StoredTemplate]) -> StoredTemplate | None:
    """Return the newest kept template that asks for the same as `template`; None if there is none.

    Defaults that were added since make no difference.
    """
    canonical = _canonical(template)
    for one in sorted(kept, key=lambda entry: entry.number, reverse=True):
        if one.template == template or _canonical(one.template) == canonical:
            return one
    return None


def begin_template(template: Mapping[str, Any], kept: Iterable[StoredTemplate]) -> StoredTemplate:
    """Return a new entry for a template that is none of `kept`."""
    return StoredTemplate(digest(_canonical(template)), next_number(kept), template)


def next_number(kept: Iterable[StoredTemplate]) -> int:
    return 1 + max((one.number for one in kept), default=0)


def _canonical(template: Mapping[str, Any]) -> Any:
    """Return a form that is the same for templates that mean the same.

    If this release cannot read the template, return it as it is.
    """
    try:
        return ReplicaTemplate.model_validate(template).model_dump(
            mode="json", by_alias=True, exclude_none=True
        )
    except ValueError:
        return template


def has_pods_for(spec: Mapping[str, Any], running: Revision | None) -> bool:
    """Return whether pods of `running` are those that `spec` asks for, whichever releases wrote the two."""
    try:
        asked = MedhaReplicaSpec.model_validate(spec)
    except ValueError:
        return False
    return running is not None and not asked.suspend and find(asked, [running]) is not None


def _speaks_of_present_pods(document: Object, running: Revision | None, observed_generation: int) -> bool:
    """Return whether a report on this generation describes the present pods.

    A report on an earlier generation does, too, unless the change since then restarts pods.
    """
    is_newest = observed_generation >= document["metadata"].get("generation", 0)
    return is_newest or has_pods_for(document["spec"], running)


def _lacks_capacity(placed: Object) -> bool:
    return placed["status"] == "False" and placed["reason"] in _NO_CAPACITY


def _if(condition: Any, status: str) -> Any:
    """Return the condition if it has that status, else None."""
    return condition if _is(condition, status) else None


def _is(condition: Any, status: str) -> bool:
    return condition is not None and condition["status"] == status


def _since(condition: Any) -> float:
    return seconds(condition["lastTransitionTime"])
