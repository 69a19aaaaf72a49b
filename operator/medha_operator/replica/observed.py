"""The observed state of one replica, as plain facts without API types.

It consists of the resource itself, its objects, its pods and their nodes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from kubernetes.utils.quantity import parse_quantity

from medha.errors import AcceleratorMissing
from medha_operator.replica.revision import Revision
from medha_operator.status_fields import ReplicaStatus
from medha_process.pod_contract import RESTART_REQUESTED

Object = Mapping[str, Any]

_IN_GANG = re.compile(r"\bgang\b|\bworkload\b|\bpod ?group\b", re.IGNORECASE)
_PULL_PROBLEMS = frozenset({"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"})
_CORDON = "node.kubernetes.io/unschedulable"
_TO_BE_DELETED = "ToBeDeletedByClusterAutoscaler"
_EMPTIED_BY = frozenset({"karpenter.sh/disrupted", _TO_BE_DELETED})
_START_PROBLEMS = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
_WORKER = "worker"
"""Name of the container with the ranks."""
_QUOTED_CHARACTERS = 500
"""Largest part of a container's termination message that is quoted: its end."""
_NOT_YET_CREATED = frozenset({"ContainerCreating", "PodInitializing"})


@dataclass(frozen=True)
class Node:
    """The facts of a node that matter to our pods on it and to those that may come."""

    unreachable_since: float | None = None
    """Unix time in seconds at which its `Ready` became `Unknown`; None while its kubelet reports."""
    reporting_since: float | None = None
    """Unix time in seconds since which its kubelet has reported without a break, at least; else None."""
    cordoned: bool = False
    """True if it is to be emptied: by `kubectl cordon`, or by the mark that an autoscaler sets before it evicts."""
    cordoned_since: float | None = None
    """Unix time of the mark, seconds; None if it was not recorded."""
    is_ready: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Object, ...] = ()
    """Taints, without those that only repeat that it is cordoned."""
    allocatable: Mapping[str, Decimal] = field(default_factory=dict)
    """Name of a resource -> how much its pods may request together."""

    def is_emptied_of(self, pod: Pod) -> bool:
        """Return whether the pod has to leave.

        A pod that was placed here although the node was already marked stays: its successor would be placed here, too."""
        if self.cordoned_since is None:
            return self.cordoned and not pod.tolerates_emptying
        return self.cordoned and pod.created <= self.cordoned_since


@dataclass(frozen=True)
class Pod:
    """A member of a replica's gang."""

    name: str
    uid: str
    resource_version: str
    lane: int
    revision: str
    created: float
    """Unix time of its creation in seconds, by the API server's clock."""
    is_deleting: bool = False
    has_finalizer: bool = False
    """True if it was deleted without a grace period and still exists: a finalizer holds it, so deleting it by force
    has no effect."""
    is_failed: bool = False
    """True if it has ended for good, e.g. was evicted; only its object is left."""
    is_scheduled: bool = False
    is_started: bool = False
    """True if its startup probe has passed: weights are loaded and the rendezvous is complete."""
    is_ready: bool = False
    requests_restart: bool = False
    """True if its ranks have ended their attempts at a rendezvous, and it has not started again since."""
    problem: tuple[str, str] | None = None
    """Reason and message of what keeps it from starting."""
    is_fetching: bool = False
    """True if an init container runs, other than a sidecar, which keeps running beside the others."""
    node: str | None = None
    secrets: frozenset[str] = frozenset()
    """Names of the Secrets that it mounts."""
    tolerates_emptying: bool = False
    """True if the scheduler also places it on a node that is to be emptied."""


@dataclass(frozen=True)
class Capacity:
    """The capacity for all pods of a replica on nodes that are not being emptied."""

    is_enough: bool
    lacks: str = ""
    """Reason why it is not enough, or not known."""
    requeue_seconds: float | None = None
    """Seconds until it can be checked, as more nodes may be about to be cordoned; None if it was checked."""


@dataclass(frozen=True)
class Observed:
    """A replica and everything that belongs to it."""

    name: str
    namespace: str
    uid: str
    generation: int
    resource_version: str
    spec: Mapping[str, Any]
    status: ReplicaStatus
    is_deleting: bool = False
    deployment: str | None = None
    """Name of the MedhaDeployment that owns it."""
    may_drain: str | None = None
    """The `status.newestMember` of the gang that the deployment permits to leave a cordoned node."""
    objects: Mapping[tuple[str, str], Object] = field(default_factory=dict)
    """Objects of the kinds that we render, by (kind, name)."""
    revisions: tuple[Revision, ...] = ()
    pods: tuple[Pod, ...] = ()
    earlier_pods: tuple[Pod, ...] = ()
    """Pods of StatefulSets that are gone, e.g. of an earlier replica of this name: until they end, they
    keep the names of pods that are to come."""
    nodes: Mapping[str, Node] = field(default_factory=dict)
    any_report_since: float | None = None
    """Unix time since which some node of the cluster has reported; None if none does. Determined only while
    the node of one of its pods is silent."""
    unmade: tuple[str, str] | None = None
    """Reason why a StatefulSet creates no pods, and its message, from its events; None if these were not
    read, or do not show it."""
    capacity: Capacity | None = None
    """Capacity of other nodes; None if not checked. It is checked if a pod's node is being emptied and no
    deployment starts another replica first."""


def seconds(timestamp: str) -> float:
    """Return the Unix time of a timestamp as Kubernetes writes it."""
    return datetime.fromisoformat(timestamp).timestamp()


def timestamp(unix_seconds: float) -> str:
    """Return Unix time as Kubernetes writes it, in whole seconds."""
    return datetime.fromtimestamp(unix_seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def amount(quantity: str | int) -> Decimal:
    """Return a quantity of a resource in the resource's own unit (cores, bytes, devices)."""
    return Decimal(parse_quantity(quantity))  # type: ignore[no-untyped-call]


def pod_of(document: Object) -> Pod:
    """Return the facts of a pod's document."""
    metadata, status = document["metadata"], document.get("status", {})
    labels = metadata.get("labels", {})
    conditions = {entry["type"]: entry for entry in status.get("conditions", ())}
    containers = status.get("containerStatuses", ())
    first = status.get("initContainerStatuses", ())
    sidecars = {
        entry["name"]
        for entry in document.get("spec", {}).get("initContainers", ())
        if entry.get("restartPolicy") == "Always"
    }
    is_fetching = any("running" in entry.get("state", {}) for entry in first if entry["name"] not in sidecars)
    node = document.get("spec", {}).get("nodeName")
    # A pod with a node is scheduled, whatever the condition says: Kubernetes' scheduler may write a failure late,
    # or for an earlier pod of that name (kubernetes/kubernetes#139602).
    scheduled = conditions.get("PodScheduled") if node is None else None
    problem = _problem(scheduled, first, containers, sidecars)
    if problem is None and not is_fetching:
        problem = _starting(conditions.get("PodReadyToStartContainers"), first, containers)
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        resource_version=metadata["resourceVersion"],
        lane=_lane(labels.get("medha.dev/lane", "")),
        revision=labels.get("medha.dev/revision", ""),
        created=seconds(metadata["creationTimestamp"]),
        is_deleting="deletionTimestamp" in metadata,
        has_finalizer=metadata.get("deletionGracePeriodSeconds") == 0,
        is_failed=status.get("phase") in ("Failed", "Succeeded"),
        is_scheduled=node is not None or _is_true(scheduled),
        is_started=bool(containers) and all(_has_started(entry) for entry in containers),
        is_ready=_is_true(conditions.get("Ready")),
        requests_restart=any(
            _exit_code(entry) == RESTART_REQUESTED and not _has_started(entry) for entry in containers
        ),
        problem=problem,
        is_fetching=is_fetching,
        node=node,
        secrets=frozenset(
            volume["secret"]["secretName"]
            for volume in document.get("spec", {}).get("volumes", ())
            if "secret" in volume
        ),
        tolerates_emptying=any(
            toleration.get("key") in (None, "", _CORDON, *_EMPTIED_BY)
            for toleration in document.get("spec", {}).get("tolerations", ())
        ),
    )


def node_of(document: Object) -> Node:
    """Return the facts of a node's document."""
    ready = next(
        (entry for entry in document.get("status", {}).get("conditions", ()) if entry["type"] == "Ready"),
        None,
    )
    spec = document.get("spec", {})
    since_when = ready.get("lastTransitionTime") if ready is not None else None
    is_silent = ready is not None and ready["status"] == "Unknown"
    taints, is_cordoned = spec.get("taints", ()), bool(spec.get("unschedulable"))
    marks = [
        taint for taint in taints if taint["key"] in _EMPTIED_BY or (is_cordoned and taint["key"] == _CORDON)
    ]
    since = [time for time in map(_added, marks) if time is not None]
    allocatable = document.get("status", {}).get("allocatable", {})
    return Node(
        unreachable_since=seconds(since_when) if since_when and is_silent else None,
        reporting_since=seconds(since_when) if since_when and not is_silent else None,
        cordoned=is_cordoned or bool(marks),
        cordoned_since=max(since, default=None),
        is_ready=_is_true(ready),
        labels=document.get("metadata", {}).get("labels", {}),
        taints=tuple(taint for taint in taints if taint not in marks),
        allocatable={name: amount(value) for name, value in allocatable.items()},
    )


def any_report_since(nodes: Iterable[Node]) -> float | None:
    """Return the Unix time since which some node has reported without a break; None if none reports."""
    return min((node.reporting_since for node in nodes if node.reporting_since is not None), default=None)


def _added(taint: Object) -> float | None:
    """Return the Unix time since which a node has a taint; None if unknown.

    The cluster autoscaler writes it into the taint's value; Karpenter does not write it.
    """
    if taint.get("timeAdded"):
        return seconds(taint["timeAdded"])
    value = str(taint.get("value", ""))
    return float(value) if taint["key"] == _TO_BE_DELETED and value.isdecimal() else None


def _lane(label: str) -> int:
    """Return the lane that a label names; -1 if it names none, since anybody may write labels."""
    return int(label) if label.isascii() and label.isdecimal() else -1


def _has_started(container: Object) -> bool:
    return bool(container.get("started") or container.get("ready"))  # a container that is ready has started


def _is_true(condition: Object | None) -> bool:
    return condition is not None and condition["status"] == "True"


def _exit_code(container: Object) -> int | None:
    ended = _last_end(container)
    return None if ended is None else int(ended["exitCode"])


def _last_end(container: Object) -> Object | None:
    """Return how the container ended most recently; None if it never has."""
    states = (container.get("state", {}), container.get("lastState", {}))
    return next((state["terminated"] for state in states if "terminated" in state), None)


def _problem(
    scheduled: Object | None, first: Iterable[Object], containers: Iterable[Object], sidecars: Set[str]
) -> tuple[str, str] | None:
    if scheduled is not None and scheduled["status"] == "False":
        if scheduled.get("reason") == "SchedulingGated":
            return "WaitingForGang", scheduled.get("message", "a gang scheduler holds the pod back")
        message = scheduled.get("message", "no node fits")
        if "persistentvolumeclaim" in message.lower():
            return "VolumeUnavailable", message
        return ("WaitingForGang" if _IN_GANG.search(message) else "InsufficientCapacity"), message
    for container in [*first, *containers]:
        waiting = container.get("state", {}).get("waiting", {})
        reason, message = waiting.get("reason", ""), waiting.get("message", "")
        if reason in _PULL_PROBLEMS:
            return "ImagePullFailed", f"container {container['name']}: {message or reason}"
        if reason in _START_PROBLEMS:
            return "ContainerNotCreated", f"container {container['name']}: {message or reason}"
        is_fetch = container in first and container["name"] not in sidecars
        # Until its next attempt begins, a failed fetch is shown as ended first, then as waiting.
        if is_fetch and container.get("state", {}).get("terminated", {}).get("exitCode"):
            return "ModelFetchFailed", f"container {container['name']}: {_termination_message(container)}"
        if _lacks_accelerator(container):
            return "NoAccelerator", f"container {container['name']}: {_termination_message(container)}"
        if reason == "CrashLoopBackOff":
            notice = f"container {container['name']}: {_termination_message(container) or message}"
            if is_fetch:
                return "ModelFetchFailed", notice
            return (
                "RendezvousFailed" if _exit_code(container) == RESTART_REQUESTED else "CrashLooping"
            ), notice
    return None


def _lacks_accelerator(container: Object) -> bool:
    """Return whether a worker has found no accelerator when it last ended, and has not started since.

    The kubelet starts it again and again, and each time it ends after seconds; meanwhile the reason stays.
    """
    has_ended_so = _exit_code(container) == AcceleratorMissing.exit_status
    return container["name"] == _WORKER and has_ended_so and not _has_started(container)


def _starting(
    is_set_up: Object | None, first: Iterable[Object], containers: Iterable[Object]
) -> tuple[str, str] | None:
    """Return what a kubelet is doing before a container of the pod runs.

    Only the pod's events show why it makes no progress.
    """
    waiting = [
        entry["name"]
        for entry in (*first, *containers)
        if entry.get("state", {}).get("waiting", {}).get("reason") in _NOT_YET_CREATED
    ]
    if not waiting:
        return None
    if is_set_up is not None and is_set_up["status"] == "False":
        text = "its volumes or its network are not set up yet"
    else:
        text = f"container {waiting[0]} is not created yet; its image may still be downloading"
    return "StartingContainers", f"{text}; if this persists, check the pod's events"


def _termination_message(container: Object) -> str:
    ended = _last_end(container)
    if ended is None:
        return ""
    words = " ".join(ended.get("message", "").split())[-_QUOTED_CHARACTERS:]
    return f"ended with exit code {ended['exitCode']} ({ended.get('reason', 'Error')})" + (
        f": {words}" if words else ""
    )
