"""The fields of a replica that only a cluster reads: the source of weights, the resources of pods, and their
placement."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from medha.api.fields import (
    AbsolutePath,
    Label,
    Model,
    Name,
    ResourceQuantity,
    live,
    restart,
    rules,
    written_as,
)


class SecretKey(Model):
    """Reference to an entry of a Secret in the replica's namespace."""

    name: Name
    """Name of the Secret."""
    key: str = Field(default="token", min_length=1, max_length=253)
    """Key of the entry in the Secret's `data`."""


_ONE_VOLUME = "huggingFace.cache needs exactly one of claimName and hostPath"


class HubCache(Model):
    """A volume that keeps fetched models, so that pods share downloads, and a pod that is replaced downloads nothing."""

    model_config = ConfigDict(
        json_schema_extra=rules(("has(self.claimName) != has(self.hostPath)", _ONE_VOLUME))
    )

    claim_name: Name | None = None
    """Name of a PersistentVolumeClaim in the replica's namespace. Its volume must be writable from every node
    that pods run on (`ReadWriteMany`, if they are several)."""
    host_path: AbsolutePath | None = None
    """Absolute path of a directory, the same on every node; the pods of one node share it. It must exist, and
    belong to the pods' user (65532). The chart's `admission.writableHostPaths` lists the paths that are allowed;
    by default, none is."""

    @model_validator(mode="after")
    def _one_volume(self) -> HubCache:
        if (self.claim_name is None) is (self.host_path is None):
            found = "both" if self.claim_name else "neither"
            raise ValueError(f"{_ONE_VOLUME} (found {found})")
        return self


_COMMIT = "^[0-9a-f]{40}$"
_MOVING_CACHE = "huggingFace.cache keeps one version under one name; set huggingFace.revision to a commit (40 hexadecimal digits)"


# The Hub's names begin and end with a letter, a digit or `_`, so that none is `..` in the path of a cache.
_HUB_NAME = "[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?"


class HuggingFaceSource(Model):
    """A repository of the Hugging Face Hub. An init container of each pod fetches the files that the ranks of its
    stage read."""

    repository: Annotated[
        str,
        Field(max_length=200, pattern=f"^{_HUB_NAME}(/{_HUB_NAME})?$"),
        written_as("must be the id of a repository of the Hub, such as Qwen/Qwen3-8B"),
    ]
    """Id of the repository, `owner/name`."""
    revision: str = Field(default="main", min_length=1, max_length=200)
    """Branch, tag or commit. Name a commit to be sure that every restart loads the same weights."""
    token_secret: SecretKey | None = None
    """Secret that holds the access token of a gated or private repository."""
    cache: HubCache | None = None
    """Volume on which models stay. It needs a commit as `revision`: pods must not change files that others read.
    Default: a volume of each pod's own, which ends with the pod."""

    model_config = ConfigDict(
        json_schema_extra=rules((f"!has(self.cache) || self.revision.matches('{_COMMIT}')", _MOVING_CACHE))
    )

    @model_validator(mode="after")
    def _cache_has_a_commit(self) -> HuggingFaceSource:
        if self.cache is not None and re.match(_COMMIT, self.revision) is None:
            raise ValueError(f"{_MOVING_CACHE} (found {self.revision!r:.80})")
        return self


class PersistentVolumeSource(Model):
    """A checkpoint on a volume that every pod of the replica can read."""

    claim_name: Name
    """Name of a PersistentVolumeClaim in the replica's namespace. Its volume must be readable from every
    node that pods run on."""
    path: str = Field(default="", max_length=1024)
    """Directory of the checkpoint inside the volume."""


class HostPathSource(Model):
    """A checkpoint that is present on every node that pods may run on; mounted read-only."""

    path: AbsolutePath
    """Absolute path of the checkpoint's directory, the same on every node. The chart's
    `admission.hostPaths` limits which paths are allowed."""


class ImageSource(Model):
    """A checkpoint packed as an OCI image, mounted as a volume (Kubernetes 1.35 with containerd 2)."""

    reference: str = Field(min_length=1, max_length=1024)
    """Registry, repository and tag or digest, as in a container's `image`."""
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """Pull policy: the kubelet asks the registry at every start (`Always`), if the node has no copy
    (`IfNotPresent`), or never (`Never`)."""
    path: str = Field(default="", max_length=1024)
    """Directory of the checkpoint inside the image."""


class ImagePullSecret(Model):
    """Reference to a Secret with a registry's credentials."""

    name: Name
    """Name of a Secret of type `kubernetes.io/dockerconfigjson` in the replica's namespace."""


NO_ACCELERATOR = "none"
NVIDIA_GPU = "nvidia.com/gpu"
"""Values of `resources.accelerator`: the first asks for no device, the second is the default."""
_DEVICE = "[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"
_NOT_A_DEVICE = (
    "resources.devices has a name that is no device resource; write it as DOMAIN/NAME, e.g. rdma/hca"
)
_TWICE = "resources.devices names the accelerator; remove it there, because each pod requests it already"
_NCCL_NAME = "NCCL_[A-Z0-9_]{1,59}"
_NOT_NCCL = "resources.nccl takes names that begin with NCCL_ only; set other variables in template.spec"
_NCCL_UNREAD = "resources.nccl is read with an accelerator only; remove it, or set resources.accelerator"


class ResourcesSpec(Model):
    """Resources that each pod requests from its node, and how it uses the node's devices."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (f"self.devices.all(name, name.matches('^{_DEVICE}$'))", _NOT_A_DEVICE),
            ("!(self.accelerator in self.devices)", _TWICE),
            (f"self.nccl.all(name, name.matches('^{_NCCL_NAME}$'))", _NOT_NCCL),
            (f"self.nccl.size() == 0 || self.accelerator != '{NO_ACCELERATOR}'", _NCCL_UNREAD),
        )
    )

    accelerator: Annotated[
        str,
        Field(max_length=253, pattern=r"^(none|[a-z0-9.-]+/[A-Za-z0-9_.-]+)$"),
        written_as("must be `none`, or a device resource written as DOMAIN/NAME, such as nvidia.com/gpu"),
    ] = Field(default=NVIDIA_GPU, json_schema_extra=restart())
    """Name of the device resource. Each pod requests as many devices as it has ranks
    (`parallelism.tensor`), and does not start without them. A replica that finds no GPU, or one that it cannot
    use, does not become Ready. docs/gpu.md says which GPU has run what. `none` runs on the CPU. If a manifest
    does not name a device here, `medha up` uses this machine's NVIDIA GPU, or the CPU if there is none."""
    devices: dict[str, Annotated[int, Field(ge=1, le=1024)]] = Field(
        default={}, max_length=8, json_schema_extra=restart()
    )
    """Further devices of each pod: the number of each resource, e.g. `rdma/hca: 1` for a network card with
    RDMA. The container that downloads a model gets none."""
    runtime_class_name: Name | None = Field(default=None, json_schema_extra=restart())
    """Name of the RuntimeClass of the pods, e.g. `nvidia` where the nodes' default runtime does not pass
    GPUs on. Default: the nodes' default runtime."""
    shared_memory: Annotated[
        str,
        Field(max_length=8, pattern=r"^[1-9][0-9]{0,5}(M|G|T|Mi|Gi|Ti)$"),
        written_as(
            "must be a size; write a whole number of at most six digits with Mi, Gi or Ti, such as 8Gi"
        ),
    ] = Field(default="8Gi", json_schema_extra=restart())
    """Largest size of `/dev/shm` of each pod, in bytes, for libraries such as NCCL. Memory is taken only as it
    is written, and counts towards the pod's memory limit."""
    nccl: dict[str, Annotated[str, Field(min_length=1, max_length=1024)]] = Field(
        default={}, max_length=64, json_schema_extra=restart()
    )
    """Environment variables of NCCL for each pod, e.g. `NCCL_SOCKET_IFNAME: eth1`. With an accelerator,
    `NCCL_DEBUG` is `WARN` unless it is set here; NCCL's own defaults hold for all others."""
    requests: dict[str, ResourceQuantity] = Field(default={}, max_length=32, json_schema_extra=restart())
    """Resource requests of each pod, e.g. `cpu: "8"`, `memory: 64Gi`. The accelerator and `devices` are
    added automatically."""
    limits: dict[str, ResourceQuantity] = Field(default={}, max_length=32, json_schema_extra=restart())
    """Resource limits of each pod. The accelerator and `devices` are added automatically."""

    @model_validator(mode="after")
    def _devices_and_variables_have_their_names(self) -> ResourcesSpec:
        for name in self.devices:
            if re.fullmatch(_DEVICE, name) is None:
                raise ValueError(f"{_NOT_A_DEVICE} (found {name!r:.80})")
        if self.accelerator in self.devices:
            raise ValueError(f"{_TWICE} (found {self.accelerator!r:.80})")
        for name in self.nccl:
            if re.fullmatch(_NCCL_NAME, name) is None:
                raise ValueError(f"{_NOT_NCCL} (found {name!r:.80})")
        if self.nccl and self.accelerator == NO_ACCELERATOR:
            raise ValueError(f"{_NCCL_UNREAD} (found {next(iter(self.nccl))!r:.80})")
        return self


class LaneTopology(Model):
    """Topology domain within which the stages of one lane run."""

    key: str = Field(min_length=1, max_length=317)
    """Node label that names the domain, e.g. `topology.kubernetes.io/zone`, or the label of a rack or an
    NVLink domain."""
    mode: Literal["preferred", "required"] = "preferred"
    """`preferred` lets a lane run outside one domain if it must; `required` leaves the lane unplaced
    instead."""


class PlacementSpec(Model):
    """Scheduler of the pods, and constraints on their placement. Every `gang` can be combined with every
    `laneTopology`: the first decides when pods are placed, the second where."""

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
    """Scheduler that starts all pods or none: `kueue`, `volcano`, or gang scheduling of the Kubernetes
    scheduler (`core`, alpha in Kubernetes 1.35). `none` uses no gang scheduling."""
    queue: Label | None = Field(default=None, min_length=1, json_schema_extra=restart())
    """Name of Kueue's LocalQueue or of Volcano's queue. Required by `kueue`, optional for `volcano`."""
    lane_topology: LaneTopology | None = Field(default=None, json_schema_extra=restart())
    """Keeps the stages of a lane, which send activations to each other in every step, close together."""

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
    """The router that the replica announces itself to: all pods of it."""

    name: Name
    """Name of the router's Service. Replicas join its pods through the headless Service of this name and `-links`."""
    namespace: Name | None = None
    """Namespace of the router's Service. Default: the replica's own."""
    secret: Name | None = None
    """Name of the Secret in the replica's namespace with the router's public key and the enrolment token.
    Default: the router's name and `-enrolment`; if the router is in another namespace, a copy of that
    Secret, which the operator makes."""


class RestartSpec(Model):
    """Restart policy: when the operator replaces all pods of a replica. A rank that dies alone is
    recovered inside the pods."""

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
    """Longest wait before a restart, in seconds."""
    stable_seconds: float = Field(default=600.0, gt=0, le=86400, json_schema_extra=live())
    """Seconds of serving after which a replica's next restart is immediate again."""
    node_lost_seconds: float = Field(default=120.0, ge=1, le=86400, json_schema_extra=live())
    """Seconds for which a node may be unreachable before its pods are replaced. A shorter time restarts
    replicas needlessly when a kubelet is updated; a longer one leaves them down."""

    @model_validator(mode="after")
    def _limit_not_below_first(self) -> RestartSpec:
        if self.backoff_limit_seconds < self.backoff_seconds:
            raise ValueError(
                "restart.backoffLimitSeconds is below backoffSeconds; raise the one or lower the other"
            )
        return self


class PodMetadata(Model):
    """Labels and annotations in addition to those that the operator sets. Labels by which the operator
    finds its objects cannot be changed."""

    labels: dict[str, str] = Field(default={}, max_length=64)
    """Labels that are added to each object's own."""
    annotations: dict[str, str] = Field(default={}, max_length=64)
    """Annotations that are added to each object's own."""


class PodTemplate(Model):
    """Overlay for every pod that the operator makes: maps are merged, and lists are merged by their
    entries' `name`."""

    metadata: PodMetadata = Field(default=PodMetadata(), json_schema_extra=restart())
    """Labels and annotations of every pod."""
    spec: dict[str, Any] = Field(default={}, json_schema_extra=restart())
    """Any field of a pod's spec that the cluster admits: tolerations, nodeSelector, volumes, a container's
    environment, ... The chart's `admission` values define what is refused."""
