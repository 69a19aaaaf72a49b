"""What an installation of the operator knows: its images and how it behaves. Helm writes it; the environment carries it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class RouterSite(BaseModel):
    """A router of this installation, for which the operator makes keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """Of its Deployment and its Service."""
    namespace: str


class OperatorSettings(BaseModel):
    """One installation; a JSON file that the chart mounts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    worker_image: str = "medha-worker:0.1.0"
    """Of pods whose replica names no image."""
    image_pull_policy: str = "IfNotPresent"
    namespaces: tuple[str, ...] = ()
    """Namespaces that are watched; none means all."""
    concurrent_replicas: int = Field(default=16, ge=1)
    """Replicas reconciled at a time, which bounds the calls to the API server."""
    resync_seconds: float = Field(default=300.0, gt=0)
    """How often every replica is looked at without an event."""
    surge_wait_seconds: float = Field(default=300.0, gt=0)
    """How long an extra replica of a rollout may find no room before the rollout goes on without it, or says that it
    cannot: a cluster's autoscaler needs minutes for a node."""
    gang_apis: tuple[Literal["core", "volcano"], ...] = ()
    """Gang schedulers that this cluster has and whose objects the operator may make. Kueue needs no object of ours."""
    lease_name: str = "medha-operator"
    lease_namespace: str = "medha-system"
    lease_seconds: float = Field(default=15.0, gt=1)
    metrics_port: int = Field(default=9402, ge=0, le=65535)
    """Where Prometheus scrapes the operator."""
    metrics_from: tuple[dict[str, Any], ...] = ()
    """Who may read the metrics of replicas, as peers of a NetworkPolicy's rule; none means everybody."""
    routers: tuple[RouterSite, ...] = ()
