"""The operator's report on a resource: `status` of MedhaReplica and MedhaDeployment."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from medha.api.fields import Model


class Condition(Model):
    """State of one aspect of a resource, in the form of every Kubernetes condition."""

    type: str = Field(min_length=1, max_length=316)
    """Name of the aspect."""
    status: Literal["True", "False", "Unknown"]
    """State of the aspect: `True`, `False` or `Unknown`."""
    reason: str = Field(min_length=1, max_length=1024, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")
    """Reason for the state in one word, for programs."""
    message: str = Field(default="", max_length=32768)
    """Explanation in a sentence, for people."""
    last_transition_time: str = Field(json_schema_extra={"format": "date-time"})
    """Time when `status` last changed."""
    observed_generation: int = Field(default=0, ge=0)
    """Generation of the resource that the condition describes."""


def _by(key: str) -> dict[str, Any]:
    """Return the mark of a list whose entries are identified by `key`."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


class RoleCount(Model):
    """Number of pods of one role of the grid."""

    role: str = Field(max_length=63)
    """Name of the role: `lead` (lane 0, whose first stage runs the controller) or `kv` (the other lanes)."""
    desired: int = 0
    """Number of pods that the grid has of this role."""
    ready: int = 0
    """Number of ready pods of this role."""


class ReplicaStatus(Model):
    """Observed state of a replica and its pods."""

    observed_generation: int = Field(default=0, ge=0)
    """Generation of the spec that this status describes."""
    conditions: tuple[Condition, ...] = Field(default=(), max_length=16, json_schema_extra=_by("type"))
    """`Ready`, and the conditions that it is derived from: `Accepted`, `Scheduled`, `WeightsLoaded`,
    `Serving`, `Degraded`; `Draining`; and `Reconciling` and `Stalled`, which kstatus reads."""
    shape: str = Field(default="", max_length=64)
    """Shape of the grid as text, e.g. `TP8 x SPP4 x KVP2`."""
    accelerators: int = Field(default=0, ge=0)
    """Number of devices that the replica requests."""
    pods: int = Field(default=0, ge=0)
    """Number of pods of the grid, one for each stage of each lane."""
    ready_pods: int = Field(default=0, ge=0)
    """Number of ready pods at `revision`."""
    ready_text: str = Field(default="", max_length=32)
    """`readyPods/pods`, for `kubectl get`."""
    roles: tuple[RoleCount, ...] = Field(
        default=(),
        max_length=8,
        json_schema_extra=_by("role"),
    )
    """Desired and ready pods by role."""
    revision: str = Field(default="", max_length=63)
    """Hash of the fields whose change replaces the pods."""
    endpoint: str = Field(default="", max_length=512)
    """Address of the replica's controller inside the cluster."""
    newest_member: str | None = Field(default=None, json_schema_extra={"format": "date-time"})
    """Creation time of the youngest pod of the gang that started last. A younger pod has replaced one of
    that gang."""
    restarted_member: str | None = Field(default=None, json_schema_extra={"format": "date-time"})
    """`newestMember` of the gang that the operator last replaced because a member was lost."""
    moved_member: str | None = Field(default=None, json_schema_extra={"format": "date-time"})
    """`newestMember` of the gang that the operator last replaced because a node was being emptied."""
    restarts: int = Field(default=0, ge=0)
    """Number of gangs replaced since the replica last served for `lifecycle.restart.stableSeconds`."""
    last_restart_time: str | None = Field(default=None, json_schema_extra={"format": "date-time"})
    """Time when the operator last replaced a gang."""


class DeploymentStatus(Model):
    """Observed state of a deployment and its replicas."""

    observed_generation: int = Field(default=0, ge=0)
    """Generation of the spec that this status describes."""
    conditions: tuple[Condition, ...] = Field(default=(), max_length=16, json_schema_extra=_by("type"))
    """`Ready`, `Progressing`, `Available`, `Scheduled`, and `Reconciling` and `Stalled`, which kstatus reads."""
    replicas: int = Field(default=0, ge=0)
    """Number of replicas that exist."""
    updated_replicas: int = Field(default=0, ge=0)
    """Number of replicas at the newest revision."""
    ready_replicas: int = Field(default=0, ge=0)
    """Number of replicas whose pods are all ready."""
    available_replicas: int = Field(default=0, ge=0)
    """Number of replicas that have been ready for `minReadySeconds`."""
    selector: str = Field(default="", max_length=512)
    """Label selector of the replicas' leaders, one pod per replica, for HPA and KEDA."""
    current_revision: str = Field(default="", max_length=63)
    """Template that replicas below `rollout.partition` are made of: the last one that all replicas had."""
    update_revision: str = Field(default="", max_length=63)
    """Name of the template that the spec asks for."""
    last_progress_time: str | None = Field(default=None, json_schema_extra={"format": "date-time"})
    """Time when a count or a revision in this status last changed, or the deployment last began to move
    after a rest; `progressDeadlineSeconds` is counted from it."""
