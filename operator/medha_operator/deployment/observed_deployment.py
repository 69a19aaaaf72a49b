"""What is known of one deployment: the resource itself, its replicas and the templates that it has kept, as facts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from medha.api.replica import MedhaReplicaSpec, ReplicaTemplate
from medha_operator.replica.observed import Object, seconds
from medha_operator.replica.revision import Revision, digest, find
from medha_operator.replica.words import QUOTA
from medha_operator.status import DeploymentStatus

DEPLOYMENT_LABEL = "medha.dev/deployment"
TEMPLATE_LABEL = "medha.dev/deployment-revision"
MAY_DRAIN = "medha.dev/may-drain"
"""Annotation of a replica whose deployment lets it leave a cordoned node; its value names the gang that may go, by
`status.newestMember`, so that the gang that comes after it is not drained by the same word."""
NO_PODS = "CreatingPods"
"""Reason of a replica some of whose pods are not made, and no earlier one is in their way: soon they are, or a quota
lets nobody make them, which is a lack of room as any. Once the quota is known by its words, the reason is its own."""
_NOT_MADE = (NO_PODS, QUOTA)
_NO_ROOM = ("InsufficientCapacity", "WaitingForGang", *_NOT_MADE)


@dataclass(frozen=True)
class KeptTemplate:
    """A template that replicas of the deployment were made of, kept in a ControllerRevision to go back to."""

    name: str
    """Ten hexadecimal digits."""
    number: int
    """Counts upwards; a template that is asked for again gets a new number."""
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
    created: float
    revision: str
    """Name of the kept template that its spec was written from."""
    running: Revision | None = None
    """What its status says that its pods are of, where that is kept."""
    is_ours: bool = True
    """The deployment is its controller, or made it and was deleted without it. Else somebody else's has the name."""
    is_left_over: bool = False
    """A deployment of the same name, which is gone, is its controller, and it will follow it."""
    is_deleting: bool = False
    serving_since: float | None = None
    """Unix time, seconds; None while it does not serve, or its status may speak of pods that its spec has ended.

    What is said beside it, as that a write or its very spec is refused, takes nothing from the pods that the spec asks for.
    """
    may_serve: bool = False
    """Its spec is refused, and pods of an earlier one are left alone and serve; or they have all started once, and
    nothing tells of them."""
    unplaced_since: float | None = None
    """Since when some of its pods find no node, or are not made, Unix time."""
    has_no_pods: bool = False
    """Of these the latter: as long as nobody tells why, `surge_wait_seconds` tell a quota from a moment's wait."""
    is_suspended: bool = False
    """Its spec asks for no pods."""
    waits_to_drain: bool = False
    """It stands on a cordoned node and goes on serving until it is told that it may leave."""
    may_drain: bool = False
    """It has been told so and has not gone yet."""
    trouble: tuple[str, str] = ("Starting", "")
    """Reason and message of its condition `Ready`; of `Stalled`, where that is all there is."""
    is_stalled: bool = False
    """What keeps it from being ready does not mend itself."""


@dataclass(frozen=True)
class ObservedDeployment:
    """One deployment and everything that belongs to it."""

    name: str
    namespace: str
    uid: str
    generation: int
    resource_version: str
    spec: Mapping[str, Any]
    status: DeploymentStatus
    is_deleting: bool = False
    children: tuple[Child, ...] = ()
    """Every MedhaReplica of the namespace that is called `<name>-<number>`, whoever owns it."""
    templates: tuple[KeptTemplate, ...] = ()


def child_name(deployment: str, index: int) -> str:
    """Name of the replica with this index."""
    return f"{deployment}-{index}"


def child_index(deployment: str, replica: str) -> int | None:
    """The index in a replica's name; None if a deployment of that name would never call it so."""
    stem, _, number = replica.rpartition("-")
    is_number = number.isascii() and number.isdecimal() and str(int(number)) == number
    return int(number) if stem == deployment and is_number else None


def child_of(document: Object, index: int, deployment_uid: str, revisions: Iterable[Revision] = ()) -> Child:
    """The facts of a MedhaReplica's document, and of the revisions that are kept of it."""
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
    is_going = drains and gang is None  # its pods are told to end, or have never all started
    is_told = not is_going and _speaks_of_present_pods(document, running, status.get("observedGeneration", 0))
    trouble = next((one for one in (_if(ready, "False"), _if(stalled, "True")) if is_told and one), None)
    # By the condition's own generation: a look that fails before it has judged the pods leaves it as it was.
    serves = (
        serving is not None
        and _is(serving, "True")
        and _speaks_of_present_pods(document, running, serving.get("observedGeneration", 0))
    )
    # Pods of an earlier spec serve on while the present one is refused: the rollout is not to go on past such a replica.
    is_accepted = not _is(conditions.get("Accepted"), "False")
    is_asked_for = is_accepted or has_pods_for(document["spec"], running)
    # Nobody makes pods of what is refused before they are asked for: that is told by the refusal.
    lacks_room = (
        placed is not None and _lacks_room(placed) and (placed["reason"] not in _NOT_MADE or is_accepted)
    )
    is_untold = serving is None and gang is not None and has_pods_for(document["spec"], running)
    return Child(
        index=index,
        document=document,
        name=metadata["name"],
        uid=metadata["uid"],
        resource_version=metadata["resourceVersion"],
        created=seconds(metadata["creationTimestamp"]),
        revision=labels.get(TEMPLATE_LABEL, ""),
        running=running,
        is_ours=controller["uid"] == deployment_uid if controller else DEPLOYMENT_LABEL in labels,
        is_left_over=controller is not None
        and controller["uid"] != deployment_uid
        and controller.get("kind") == "MedhaDeployment"
        and controller.get("name") == metadata["name"].rpartition("-")[0],
        is_deleting="deletionTimestamp" in metadata,
        serving_since=_since(serving) if serves and is_asked_for and not is_going else None,
        may_serve=(serves and not is_asked_for) or is_untold,
        unplaced_since=_since(placed) if placed and lacks_room else None,
        has_no_pods=placed is not None and placed["reason"] in _NOT_MADE,
        is_suspended=document["spec"].get("suspend") is True,
        waits_to_drain=drains and gang is not None and granted != gang,
        may_drain=drains and granted is not None and granted == gang,
        trouble=(trouble["reason"], trouble.get("message", "")) if trouble else ("Starting", ""),
        is_stalled=is_told and _is(stalled, "True"),
    )


def find_template(template: Mapping[str, Any], kept: Iterable[KeptTemplate]) -> KeptTemplate | None:
    """The newest kept template that asks for the same as `template`, whatever defaults were added since."""
    canonical = _canonical(template)
    for one in sorted(kept, key=lambda entry: entry.number, reverse=True):
        if one.template == template or _canonical(one.template) == canonical:
            return one
    return None


def begin_template(template: Mapping[str, Any], kept: Iterable[KeptTemplate]) -> KeptTemplate:
    """A template that is none of `kept`."""
    return KeptTemplate(digest(_canonical(template)), next_number(kept), template)


def next_number(kept: Iterable[KeptTemplate]) -> int:
    return 1 + max((one.number for one in kept), default=0)


def _canonical(template: Mapping[str, Any]) -> Any:
    """Of two templates that mean the same, the same; of one that this release cannot read, the template itself."""
    try:
        return ReplicaTemplate.model_validate(template).model_dump(
            mode="json", by_alias=True, exclude_none=True
        )
    except ValueError:
        return template


def has_pods_for(spec: Mapping[str, Any], running: Revision | None) -> bool:
    """Whether pods of `running` are those that `spec` asks for, by whatever release the one was kept and the other written."""
    try:
        asked = MedhaReplicaSpec.model_validate(spec)
    except ValueError:
        return False
    return running is not None and not asked.suspend and find(asked, [running]) is not None


def _speaks_of_present_pods(document: Object, running: Revision | None, observed_generation: int) -> bool:
    """Whether what was said of this generation may be believed, though the replica's own turn may be still to come.

    A change that restarts makes every earlier word void. After one that does not, the pods are what they were.
    """
    is_newest = observed_generation >= document["metadata"].get("generation", 0)
    return is_newest or has_pods_for(document["spec"], running)


def _lacks_room(placed: Object) -> bool:
    return placed["status"] == "False" and placed["reason"] in _NO_ROOM


def _if(condition: Any, status: str) -> Any:
    """The condition, if it has that status."""
    return condition if _is(condition, status) else None


def _is(condition: Any, status: str) -> bool:
    return condition is not None and condition["status"] == status


def _since(condition: Any) -> float:
    return seconds(condition["lastTransitionTime"])
