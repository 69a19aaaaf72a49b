"""What the operator says of a resource: `status` of MedhaReplica and MedhaDeployment."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from medha.api.fields import Model


class Condition(Model):
    """One aspect of a resource, in the form of every Kubernetes condition."""

    type: str = Field(min_length=1, max_length=316)
    """Which aspect."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    reason: str = Field(min_length=1, max_length=1024, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")
    """One word for programs."""
    message: str = Field(default="", max_length=32768)
    """A sentence for people."""
    last_transition_time: str = Field(json_schema_extra={"format": "date-time"})
    """When `status` changed last."""
    observed_generation: int = Field(default=0, ge=0)
    """Generation of the resource that the condition speaks of."""


def _by(key: str) -> dict[str, Any]:
    """Mark of a list whose entries are told apart by `key`."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


class RoleCount(Model):
    """Pods of one role of the grid."""

    role: str = Field(max_length=63)
    """`lead` (lane 0, whose first stage runs the controller) or `kv` (the other lanes)."""
    desired: int = 0
    """Pods that the grid has of it."""
    ready: int = 0
    """Those that serve."""


class ReplicaStatus(Model):
    """What is known of a replica's pods."""

    observed_generation: int = Field(default=0, ge=0)
    """Generation of the spec that this status speaks of."""
    conditions: tuple[Condition, ...] = Field(default=(), max_length=16, json_schema_extra=_by("type"))
    """`Ready`; what it is made of: `Accepted`, `Scheduled`, `WeightsLoaded`, `Serving`, `Degraded`; `Draining`; and
    `Reconciling` and `Stalled`, which kstatus reads."""
    shape: str = Field(default="", max_length=64)
    """The grid in words, e.g. `TP8 x SPP4 x KVP2`."""
    accelerators: int = Field(default=0, ge=0)
    """Devices that the replica asks for."""
    pods: int = Field(default=0, ge=0)
    """Pods of the grid, one for each stage of each lane."""
    ready_pods: int = Field(default=0, ge=0)
    """Those that serve."""
    ready_text: str = Field(default="", max_length=32)
    """`readyPods/pods`, for `kubectl get`."""
    roles: tuple[RoleCount, ...] = Field(
        default=(),
        max_length=8,
        json_schema_extra=_by("role"),
    )
    """The same by role."""
    revision: str = Field(default="", max_length=63)
    """Hash of the fields whose change replaces the pods."""
    endpoint: str = Field(default="", max_length=512)
    """Where the replica's controller is found inside the cluster."""
    newest_member: str | None = Field(default=None, json_schema_extra={"format": "date-time"})
    """Creation of the youngest pod of the gang that started last. A younger pod has replaced one of them."""
    restarted_member: str | None = Field(default=None, json_schema_extra={"format": "date-time"})
    """`newestMember` of the gang that the operator has replaced last."""
    restarts: int = Field(default=0, ge=0)
    """Gangs replaced since the replica last served for `lifecycle.restart.stableSeconds`."""
    last_restart_time: str | None = Field(default=None, json_schema_extra={"format": "date-time"})
    """When the operator replaced a gang last."""


class DeploymentStatus(Model):
    """What is known of a deployment's replicas."""

    observed_generation: int = Field(default=0, ge=0)
    """Generation of the spec that this status speaks of."""
    conditions: tuple[Condition, ...] = Field(default=(), max_length=16, json_schema_extra=_by("type"))
    """`Ready`, `Progressing`, `Available`, `Scheduled`, and `Reconciling` and `Stalled`, which kstatus reads."""
    replicas: int = Field(default=0, ge=0)
    """Replicas that exist."""
    updated_replicas: int = Field(default=0, ge=0)
    """Those at the newest revision."""
    ready_replicas: int = Field(default=0, ge=0)
    """Those whose every pod serves."""
    available_replicas: int = Field(default=0, ge=0)
    """Ready for `minReadySeconds`."""
    selector: str = Field(default="", max_length=512)
    """Labels of the replicas' leaders, one pod each, as HPA and KEDA read them."""
    current_revision: str = Field(default="", max_length=63)
    """Template that replicas below `rollout.partition` are made of: the last one that all replicas had."""
    update_revision: str = Field(default="", max_length=63)
    """Template that the spec asks for."""
    last_progress_time: str | None = Field(default=None, json_schema_extra={"format": "date-time"})
    """When the counts above changed last, or the deployment began to move after a rest; `progressDeadlineSeconds` run
    from it."""
