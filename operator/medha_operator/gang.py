"""All pods of a replica or none: what each gang scheduler requires, behind one function.

A replica is one gang over all of its lanes, never one per StatefulSet: half a replica serves nobody and holds
devices. The group is named after the revision, which determines the number of its pods; providers do not let
a group's size be changed.

`core` follows `scheduling.k8s.io/v1alpha1` of Kubernetes 1.35 (feature gates GenericWorkload and
GangScheduling), an alpha API that later releases change. `kueue` and `volcano` follow their documentation and
have been tested with neither.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from medha.api.replica import MedhaReplicaSpec

Fields = dict[str, Any]
Api = Literal["core", "volcano"]

_GROUP_IN_WORKLOAD = "replica"


@dataclass(frozen=True)
class Gang:
    """The additions that make the pods of a replica a gang."""

    pod: Fields = field(default_factory=dict)
    """Overlay for the template of every pod."""
    api_version: str = ""
    kind: str = ""
    """Kind of the object that the provider reads; empty if it needs none."""
    spec: Fields = field(default_factory=dict)


KINDS = {
    "core": ("scheduling.k8s.io/v1alpha1", "Workload", "workloads"),
    "volcano": ("scheduling.volcano.sh/v1beta1", "PodGroup", "podgroups"),
}
"""API version, kind and plural of each provider's object."""


def gang_of(spec: MedhaReplicaSpec, replica: str, group: str) -> Gang:
    """Return the gang of a replica, whose group is named `group`."""
    size = spec.parallelism.stream * spec.parallelism.kv
    queue = spec.placement.queue
    provider = spec.placement.gang
    if provider == "kueue":
        assert queue is not None  # a rule of the spec ensures it
        labels = {"kueue.x-k8s.io/queue-name": queue, "kueue.x-k8s.io/pod-group-name": group}
        annotations = {
            "kueue.x-k8s.io/pod-group-total-count": str(size),
            "kueue.x-k8s.io/pod-group-serving": "true",  # pods that end are replaced, the group never finishes
        }
        return Gang({"metadata": {"labels": labels, "annotations": annotations}})
    if provider == "volcano":
        named = {"scheduling.k8s.io/group-name": group, "scheduling.volcano.sh/group-name": group}
        pod = {"metadata": {"annotations": named}, "spec": {"schedulerName": "volcano"}}
        return _with_object("volcano", pod, {"minMember": size} | ({"queue": queue} if queue else {}))
    if provider == "core":
        reference = {"name": group, "podGroup": _GROUP_IN_WORKLOAD}
        policy = {"gang": {"minCount": size}}
        workload = {
            "controllerRef": {"apiGroup": "medha.dev", "kind": "MedhaReplica", "name": replica},
            "podGroups": [{"name": _GROUP_IN_WORKLOAD, "policy": policy}],
        }
        return _with_object("core", {"spec": {"workloadRef": reference}}, workload)
    return Gang()


def _with_object(provider: Api, pod: Fields, spec: Fields) -> Gang:
    api_version, kind, _ = KINDS[provider]
    return Gang(pod, api_version, kind, spec)
