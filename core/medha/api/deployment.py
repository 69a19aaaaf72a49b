"""`MedhaDeployment`: a number of identical replicas, and how changes reach them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from medha.api.cluster import PodMetadata
from medha.api.fields import Model, rules
from medha.api.replica import MedhaReplicaSpec, ObjectMeta, parsed

Surge = Annotated[int, Field(ge=0, le=10_000)] | Annotated[str, Field(pattern=r"^[0-9]{1,3}%$")]
"""A number of replicas, or a share of them such as `25%`."""


class RolloutSpec(Model):
    """Rollout of a change to the replicas of a deployment: whole replicas at a time, never two revisions
    in one."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "[self.maxSurge, self.maxUnavailable].exists(n, type(n) == int ? n != 0 : !(n in ['0%', '00%', '000%']))",
                "rollout.maxSurge and maxUnavailable are both 0, so that no replica could ever be replaced; raise one",
            )
        )
    )

    max_surge: Surge = Field(default=1, json_schema_extra={"x-kubernetes-int-or-string": True})
    """Largest number of replicas beyond `replicas` during a rollout, if the cluster has room for them.
    Percentages are rounded up."""
    max_unavailable: Surge = Field(default=0, json_schema_extra={"x-kubernetes-int-or-string": True})
    """Largest number of replicas that may be unavailable during a rollout. Percentages are rounded down."""
    partition: int = Field(default=0, ge=0, le=10_000)
    """Index below which replicas stay at the old revision, for a canary."""

    @model_validator(mode="after")
    def _can_move(self) -> RolloutSpec:
        if not any(int(str(bound).rstrip("%")) for bound in (self.max_surge, self.max_unavailable)):
            raise ValueError(
                "rollout.maxSurge and maxUnavailable are both 0, so that no replica could ever be replaced; raise one"
            )
        return self


class ReplicaTemplate(Model):
    """Template of every replica of a deployment."""

    metadata: PodMetadata = PodMetadata()
    """Labels and annotations of every MedhaReplica."""
    spec: MedhaReplicaSpec


class MedhaDeploymentSpec(Model):
    """Specification of a deployment: a number of identical replicas."""

    replicas: int = Field(default=1, ge=0, le=10_000)
    """Desired number of MedhaReplicas; `kubectl scale`, HPA and KEDA set it."""
    template: ReplicaTemplate
    rollout: RolloutSpec = RolloutSpec()
    paused: bool = False
    """Hold back changes of `template`; changes of `replicas` still take effect."""
    min_ready_seconds: float = Field(default=0.0, ge=0, le=86400)
    """Seconds for which a new replica must have been ready before the next one is replaced."""
    progress_deadline_seconds: float = Field(default=1800.0, gt=0, le=864000)
    """Seconds without progress after which a rollout is reported as stalled."""
    revision_history_limit: int = Field(default=10, ge=0, le=1000)
    """Number of old revisions that are kept for rolling back."""


class MedhaDeployment(Model):
    """Identical replicas behind one router, changed by whole replicas."""

    api_version: Literal["medha.dev/v1alpha1"]
    kind: Literal["MedhaDeployment"]
    metadata: ObjectMeta
    spec: MedhaDeploymentSpec


def parse_deployment(document: object) -> MedhaDeployment:
    """Return a `MedhaDeployment` from a parsed YAML or JSON document.

    Raises:
        ConfigInvalid: as `parse_replica`.
    """
    return parsed(MedhaDeployment, document)
