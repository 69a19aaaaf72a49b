"""The settings of an installation of the operator, in a file that the Helm chart writes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

import medha


class RouterSite(BaseModel):
    """A router of this installation, for which the operator makes keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """Name of its Deployment and its Service."""
    namespace: str


class OperatorSettings(BaseModel):
    """Settings of one installation, in a JSON file that the chart mounts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    worker_image: str = f"medha-worker:{medha.__version__}"
    """Image of pods without an accelerator, if their replica names none."""
    gpu_worker_image: str = f"medha-worker-gpu:{medha.__version__}"
    """Image of pods with an accelerator, if their replica names none."""
    image_pull_policy: str = "IfNotPresent"
    namespaces: tuple[str, ...] = ()
    """Namespaces that are watched; if empty, all are."""
    concurrent_replicas: int = Field(default=16, ge=1)
    """Number of replicas that are reconciled at the same time, which bounds the calls to the API server."""
    resync_seconds: float = Field(default=300.0, gt=0)
    """Seconds between reconciles of every resource without an event."""
    surge_wait_seconds: float = Field(default=300.0, gt=0)
    """Seconds for which an extra replica of a rollout may find no room before the rollout goes on without
    it, or reports that it cannot: a cluster autoscaler needs minutes for a node."""
    gang_apis: tuple[Literal["core", "volcano"], ...] = ()
    """Gang schedulers that this cluster has and whose objects the operator may make. Kueue needs no extra
    objects."""
    lease_name: str = "medha-operator"
    lease_namespace: str = "medha-system"
    lease_seconds: float = Field(default=15.0, gt=1)
    metrics_port: int = Field(default=9402, ge=0, le=65535)
    """Port at which Prometheus scrapes the operator."""
    traces_endpoint: str | None = None
    """Base URL of the OpenTelemetry collector for replicas that name none; None: they make no traces. A change
    reaches pods with their next revision."""
    metrics_from: tuple[dict[str, Any], ...] = ()
    """Peers that may read the metrics of replicas, in the form of a NetworkPolicy's rule; if empty,
    everybody may."""
    routers: tuple[RouterSite, ...] = ()
