"""The fields of a replica that only a cluster reads: where weights come from, what pods ask for, where they run."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field, model_validator

from medha.api.fields import Label, Model, Name, ResourceQuantity, live, restart, rules


class SecretKey(Model):
    """One entry of a Secret in the replica's namespace."""

    name: Name
    """Of the Secret."""
    key: str = Field(default="token", min_length=1, max_length=253)
    """Entry of its `data`."""


class HuggingFaceSource(Model):
    """A repository of the Hugging Face hub, fetched by an init container of each pod."""

    repository: str = Field(max_length=200, pattern=r"^[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)?$")
    """Its id, `owner/name`."""
    revision: str = Field(default="main", min_length=1, max_length=200)
    """Branch, tag or commit. Name a commit to be sure that every restart loads the same weights."""
    token_secret: SecretKey | None = None
    """Access token of a gated or private repository."""


class PersistentVolumeSource(Model):
    """A checkpoint on a volume that every pod of the replica can read."""

    claim_name: Name
    """Of a PersistentVolumeClaim in the replica's namespace, readable from every node that pods run on."""
    path: str = Field(default="", max_length=1024)
    """Directory of the checkpoint inside the volume."""


class HostPathSource(Model):
    """A checkpoint that lies on every node that pods may run on; mounted read-only."""

    path: str = Field(min_length=1, max_length=1024, pattern=r"^/")
    """Absolute path of the checkpoint's directory, the same on every node. The chart's `admission.hostPaths` bounds it."""


class ImageSource(Model):
    """A checkpoint packed as an OCI image, mounted as a volume (Kubernetes 1.35 with containerd 2)."""

    reference: str = Field(min_length=1, max_length=1024)
    """Registry, repository and tag or digest, as in a container's `image`."""
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """When kubelet asks the registry: at every start, if the node has no copy, or never."""
    path: str = Field(default="", max_length=1024)
    """Directory of the checkpoint inside the image."""


class ImagePullSecret(Model):
    """Names a Secret with a registry's credentials."""

    name: Name
    """Of a Secret of type `kubernetes.io/dockerconfigjson` in the replica's namespace."""


class ResourcesSpec(Model):
    """What each pod asks of its node."""

    accelerator: str = Field(
        default="nvidia.com/gpu",
        max_length=253,
        pattern=r"^(none|[a-z0-9.-]+/[A-Za-z0-9_.-]+)$",
        json_schema_extra=restart(),
    )
    """Name of the device resource; a pod asks for as many as it has ranks (`parallelism.tensor`). `none` runs on CPU."""
    requests: dict[str, ResourceQuantity] = Field(default={}, max_length=32, json_schema_extra=restart())
    """Of each pod, e.g. `cpu: "8"`, `memory: 64Gi`."""
    limits: dict[str, ResourceQuantity] = Field(default={}, max_length=32, json_schema_extra=restart())
    """Of each pod. The accelerator is added to both by itself."""


class LaneTopology(Model):
    """How close together the stages of one lane run."""

    key: str = Field(min_length=1, max_length=317)
    """Label of nodes, e.g. `topology.kubernetes.io/zone` or a rack's or an NVLink domain's."""
    mode: Literal["preferred", "required"] = "preferred"
    """`required` leaves a lane unplaced rather than apart."""


class PlacementSpec(Model):
    """Which scheduler places the pods, and how. Every gang goes with every topology: the one says when pods are placed, the
    other where."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "self.gang != 'kueue' || has(self.queue)",
                "gang kueue needs placement.queue, the name of a LocalQueue",
            ),
            (
                "!has(self.queue) || self.gang == 'kueue' || self.gang == 'volcano'",
                "placement.queue is read by gang kueue and volcano only; set one of them or remove it",
            ),
        )
    )

    gang: Literal["none", "kueue", "volcano", "core"] = Field(
        default="none",
        json_schema_extra=restart()
        | rules(("self == oldSelf", "placement.gang cannot be changed; create a new replica")),
    )
    """Who starts all pods or none: `kueue`, `volcano`, the scheduler's own gangs (`core`, alpha in 1.35), or nobody."""
    queue: Label | None = Field(default=None, min_length=1, json_schema_extra=restart())
    """Kueue's LocalQueue or Volcano's queue."""
    lane_topology: LaneTopology | None = Field(default=None, json_schema_extra=restart())
    """Keeps a lane's stages, which send activations to each other in every step, close together."""

    @model_validator(mode="after")
    def _queue_belongs_to_gang(self) -> PlacementSpec:
        if self.gang == "kueue" and self.queue is None:
            raise ValueError("gang kueue needs placement.queue, the name of a LocalQueue")
        if self.queue is not None and self.gang not in ("kueue", "volcano"):
            raise ValueError(
                "placement.queue is read by gang kueue and volcano only; set one of them or remove it"
            )
        return self


class RouterReference(Model):
    """The router that the replica announces itself to."""

    name: Name
    """Name of the router's Service."""
    namespace: Name | None = None
    """Default: the replica's own."""
    secret: Name | None = None
    """Secret in the replica's namespace with the router's public key and the enrolment token. Default: the router's name
    and `-enrolment`."""


class RestartSpec(Model):
    """When the operator replaces all pods of a replica; a rank that dies alone is mended inside the pods."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "self.backoffLimitSeconds >= self.backoffSeconds",
                "restart.backoffLimitSeconds is below backoffSeconds; raise the one or lower the other",
            )
        )
    )

    backoff_seconds: float = Field(default=30.0, gt=0, le=86400, json_schema_extra=live())
    """Wait before the second restart; the first is at once. Doubles each time."""
    backoff_limit_seconds: float = Field(default=600.0, gt=0, le=86400, json_schema_extra=live())
    """Longest wait."""
    stable_seconds: float = Field(default=600.0, gt=0, le=86400, json_schema_extra=live())
    """A replica that served as long as this begins with no wait again."""
    node_lost_seconds: float = Field(default=120.0, ge=1, le=86400, json_schema_extra=live())
    """How long a node may be unreachable before its pods are replaced. Shorter restarts replicas for nothing when a kubelet
    is updated; longer leaves them down."""

    @model_validator(mode="after")
    def _limit_not_below_first(self) -> RestartSpec:
        if self.backoff_limit_seconds < self.backoff_seconds:
            raise ValueError(
                "restart.backoffLimitSeconds is below backoffSeconds; raise the one or lower the other"
            )
        return self


class PodMetadata(Model):
    """Labels and annotations beside those that the operator sets; labels by which it finds its objects stay as they are."""

    labels: dict[str, str] = Field(default={}, max_length=64)
    """Added to each object's own."""
    annotations: dict[str, str] = Field(default={}, max_length=64)
    """Added to each object's own."""


class PodTemplate(Model):
    """Laid over every pod that the operator makes: maps are merged, lists by their entries' `name`."""

    metadata: PodMetadata = Field(default=PodMetadata(), json_schema_extra=restart())
    """Labels and annotations of every pod."""
    spec: dict[str, Any] = Field(default={}, json_schema_extra=restart())
    """Any field of a pod's spec that the cluster admits: tolerations, nodeSelector, volumes, a container's environment, ...
    The chart's `admission` says what it does not admit."""
