"""`MedhaReplica` and `MedhaDeployment`, the descriptions that users write (`medha.dev/v1alpha1`).

`medha up`, the simulator, the planner and the operator all read these models, and the CRDs are generated from
them. Unknown fields are refused: a typing error must not become a silent default.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from medha.api.cluster import (
    HostPathSource,
    HuggingFaceSource,
    ImagePullSecret,
    ImageSource,
    PersistentVolumeSource,
    PlacementSpec,
    PodMetadata,
    PodTemplate,
    ResourcesSpec,
    RestartSpec,
    RouterReference,
)
from medha.api.fields import HostName, Model, Origin, Quantity, epoch, live, restart, rules
from medha.errors import ConfigInvalid

API_VERSION = "medha.dev/v1alpha1"
KIND = "MedhaReplica"


_SOURCES = ("path", "huggingFace", "pvc", "hostPath", "image")


class ModelSource(Model):
    """Where the checkpoint comes from; exactly one field."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                f"[{', '.join(f'has(self.{name})' for name in _SOURCES)}].filter(given, given).size() == 1",
                f"model.source needs exactly one of {', '.join(_SOURCES)}",
            )
        )
    )

    path: str | None = Field(default=None, min_length=1, max_length=1024)
    """Directory of a Hugging Face checkpoint: for `medha up` relative to the manifest's folder, in a pod a directory of
    its image."""
    hugging_face: HuggingFaceSource | None = None
    pvc: PersistentVolumeSource | None = None
    host_path: HostPathSource | None = None
    image: ImageSource | None = None

    @model_validator(mode="after")
    def _one_source(self) -> ModelSource:
        given = [
            name
            for name, value in zip(
                _SOURCES, (self.path, self.hugging_face, self.pvc, self.host_path, self.image), strict=True
            )
            if value is not None
        ]
        if not given:
            raise ValueError("names no source; set `path` to a checkpoint directory")
        if len(given) > 1:
            raise ValueError(f"names {' and '.join(given)}; keep one of them")
        return self


class Architecture(Model):
    """What the checkpoint's `config.json` says, for those who want a shape that cannot work refused when it is applied."""

    layers: int = Field(ge=1, le=100_000)
    """Transformer layers, `num_hidden_layers`."""
    query_heads: int = Field(ge=1, le=100_000)
    """Heads of each layer, `num_attention_heads`."""


class ModelSpec(Model):
    """Which model is served, and how."""

    name: str = Field(min_length=1, max_length=253, json_schema_extra=restart())
    """The name that clients ask for in `model`, and `/v1/models` lists."""
    source: ModelSource = Field(json_schema_extra=restart())
    max_model_len: int | None = Field(default=None, ge=16, le=2**31 - 1, json_schema_extra=restart())
    """Longest prompt plus output, tokens. Default: the checkpoint's `max_position_embeddings`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", json_schema_extra=restart()
    )
    """Of weights, activations and KV. `auto` is the checkpoint's own."""
    rope_scaling: dict[str, Any] | None = Field(default=None, json_schema_extra=restart())
    """Replaces the checkpoint's RoPE scaling, in Hugging Face's spelling (`rope_type`, `factor`, ...)."""
    architecture: Architecture | None = Field(default=None, json_schema_extra=restart())
    """Default: read from the checkpoint when the ranks start."""


MOST_PODS = 256
"""Pods of one replica, `stream` x `kv`: a typing error must not flood a cluster with them."""
MOST_RANKS = 2048
"""Ranks of one replica: 256 pods of 8 accelerators, sixteen times the largest grids that were published (128)."""
_TOO_MANY_PODS = f"parallelism.stream x kv is more than {MOST_PODS} pods; make one of them smaller, or serve several replicas"
_TOO_MANY_RANKS = f"parallelism.tensor x stream x kv is more than {MOST_RANKS} ranks; make one of them smaller, or serve several replicas"


class ParallelismSpec(Model):
    """The shape of the grid: tensor x stream x kv ranks, in stream x kv pods. At most 2,048 ranks in 256 pods: larger ones are
    taken for typing errors."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (f"self.stream * self.kv <= {MOST_PODS}", _TOO_MANY_PODS),
            (f"self.tensor * self.stream * self.kv <= {MOST_RANKS}", _TOO_MANY_RANKS),
        )
    )

    tensor: int = Field(default=1, ge=1, le=64, json_schema_extra=restart())
    """Ranks that split each layer (TP)."""
    stream: int = Field(default=1, ge=1, le=256, json_schema_extra=restart())
    """Pipeline stages that the chunks of a prompt stream through (SPP)."""
    kv: int = Field(default=1, ge=1, le=256, json_schema_extra=restart())
    """Lanes that long contexts are spread over (KVP); each holds all weights."""

    @model_validator(mode="after")
    def _is_bounded(self) -> ParallelismSpec:
        if self.stream * self.kv > MOST_PODS:
            raise ValueError(_TOO_MANY_PODS)
        if self.tensor * self.stream * self.kv > MOST_RANKS:
            raise ValueError(_TOO_MANY_RANKS)
        return self


class KvCacheSpec(Model):
    """The memory that holds keys and values."""

    size: Quantity | None = Field(default=None, json_schema_extra=restart())
    """Bytes per rank, e.g. `2Gi`. Default: `memoryFraction` of what is free."""
    memory_fraction: float = Field(default=0.8, gt=0, le=0.98, json_schema_extra=restart())
    """Share of the memory left after weights and a warm-up step. 0.8 leaves room for the allocator's slack."""
    block_size_tokens: int = Field(default=16, ge=1, le=1024, json_schema_extra=restart())
    """Tokens per block: the unit of allocation and of sharing."""
    tokens_per_lane: int = Field(default=524_288, ge=1, le=2**31 - 1, json_schema_extra=restart())
    """Prompt tokens of one request that a lane holds before the next lane joins (KVP). Shorter prompts stay on one."""
    prefix_caching: bool = Field(default=True, json_schema_extra=restart())
    """Keep the KV of finished prompts until its blocks are needed, and share it with prompts that begin alike."""


class SchedulingSpec(Model):
    """How steps are formed (DESIGN §5)."""

    policy: Literal["fcfs", "edf", "lrs", "srpt", "lars", "guarded"] = Field(
        default="guarded", json_schema_extra=epoch()
    )
    """Order of prefills. `guarded` keeps the largest set of requests that can still all be on time; `lars` is
    length-aware relative slack (paper B §4); all are compared in docs/scheduling.md."""
    lars_denominator: Literal["work", "deadline"] = Field(default="work", json_schema_extra=epoch())
    """What LARS divides slack by: total prefill work (paper B) or the deadline (paper A eq. 7)."""
    given_up_share: float = Field(default=0.1, ge=0.01, le=0.5, json_schema_extra=epoch())
    """What `guarded` guarantees to requests that can no longer all be on time, as a part of the time of prefills: one that
    is given up ends within (the work given up before it + its own) / share. More means sooner, and more such requests."""
    profile: str | None = Field(default=None, min_length=1, json_schema_extra=restart())
    """File that `medha profile` wrote; relative paths start at the manifest's folder. Default: a few steps that each
    rank measures when it starts."""
    max_step_seconds: float = Field(default=0.5, ge=0.001, le=60, json_schema_extra=epoch())
    """Bound of a step when nothing decodes, so that an arriving request is seen within it. Seconds."""
    min_chunk_tokens: int = Field(default=32, ge=1, le=8192, json_schema_extra=epoch())
    """Smallest efficient prefill chunk: below it attention loses efficiency (paper B: 11 % at 32)."""
    max_chunk_tokens: int = Field(default=2048, ge=1, le=1_048_576, json_schema_extra=restart())
    """Largest prefill chunk of a step, all requests together; activations are sized by it."""
    prefill_strategy: Literal["ownerCompute", "passKv", "passQ", "auto", "striped"] = Field(
        default="ownerCompute", json_schema_extra=restart()
    )
    """How lanes share the prefill of a prompt that is longer than `tokensPerLane`. `ownerCompute`: one lane runs the
    linear layers, lanes join as the KV reaches them; it leaves the others free for short requests, so it is the default.
    The others are context parallelism: all lanes compute a part of each chunk, and keys and values (`passKv`), or
    queries (`passQ`), go around the ring of lanes; `auto` takes per chunk the one whose messages are better hidden, and
    `striped` is `passKv` with positions dealt out one by one instead of in balanced runs (docs/parallelism.md)."""
    min_prefill_share: float = Field(default=0.1, ge=0, le=0.9, json_schema_extra=epoch())
    """Share of step time that the most urgent prefill gets even when decodes alone exceed their target."""
    space_sharing_cap: float = Field(default=0.4, ge=0, le=0.9, json_schema_extra=epoch())
    """Largest share of a step that a long prefill yields to others (paper B)."""
    long_threshold_tokens: int | None = Field(default=None, ge=1, le=2**31 - 1, json_schema_extra=epoch())
    """KV length from which a request is long. Default: where attention FLOPs pass linear FLOPs."""
    max_running: int = Field(default=256, ge=1, le=65536, json_schema_extra=restart())
    """Sequences that hold KV at a time."""
    max_waiting: int = Field(default=1024, ge=0, le=1_000_000, json_schema_extra=epoch())
    """Sequences that wait for KV in the replica before it refuses more with `capacity`."""
    max_running_long: int = Field(default=32, ge=1, le=65536, json_schema_extra=epoch())
    """Long prompts in prefill at a time. One that waits gets KV only at its turn, and their share of the pool is bounded
    by `shortHeadroom`, so that few are half done; this bounds them whatever happens."""
    short_headroom: float = Field(default=0.05, ge=0, le=0.5, json_schema_extra=epoch())
    """Share of the KV pool that long prompts leave to short ones at admission."""


class ServiceClass(Model):
    """What a class of requests is promised. TTFT deadline = max(ttftFloorSeconds, ttftFactor * predicted prefill)."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "self.tpotTargetSeconds >= self.tpotFloorSeconds",
                "tpotTargetSeconds is below tpotFloorSeconds and would be clamped to it; raise the one or lower the other",
            )
        )
    )

    name: str = Field(
        min_length=1, max_length=63, pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", json_schema_extra=epoch()
    )
    """What a request names in `service_tier`."""
    ttft_floor_seconds: float = Field(default=2.0, gt=0, le=86400, json_schema_extra=epoch())
    """Time to first token that even the shortest prompt is given. Seconds."""
    ttft_factor: float = Field(default=3.0, ge=1, le=1000, json_schema_extra=epoch())
    """Time to first token of longer ones, as a multiple of what their prefill would take alone."""
    tpot_target_seconds: float = Field(default=0.05, gt=0, le=60, json_schema_extra=epoch())
    """Time per output token, from which the step budget is taken."""
    tpot_floor_seconds: float = Field(default=0.01, gt=0, le=60, json_schema_extra=epoch())
    """Tightest TPOT target that a request of this class may ask for; tighter ones are clamped to it."""
    default_output_tokens: int = Field(default=4096, ge=1, le=2**31 - 1, json_schema_extra=epoch())
    """Output tokens that KV is reserved for when a request names no `max_tokens`."""

    @model_validator(mode="after")
    def _target_not_below_floor(self) -> ServiceClass:
        if self.tpot_target_seconds < self.tpot_floor_seconds:
            raise ValueError(
                f"tpotTargetSeconds {self.tpot_target_seconds} is below tpotFloorSeconds "
                f"{self.tpot_floor_seconds} and would be clamped to it; raise the one or lower the other"
            )
        return self


class RouterSpec(Model):
    """The HTTP door that `medha up` starts."""

    host: str = "127.0.0.1"
    """Address that it listens on; `0.0.0.0` is all of the machine's."""
    port: int = Field(default=8000, ge=0, le=65535)
    """0 takes any free port; the table that `medha up` prints names it."""
    max_body_bytes: Quantity = "64Mi"
    """Larger bodies get status 413."""
    max_waiting: int = Field(default=4096, ge=1, le=1_000_000)
    """Requests that wait for a replica; more get status 429 with Retry-After."""
    allowed_hosts: tuple[HostName, ...] = Field(default=(), max_length=64)
    """Names in `Host` headers by which it may be called, beside `localhost` and loopback addresses. Without any, all names
    do, unless it listens on a loopback address."""
    allowed_origins: tuple[Origin, ...] = Field(default=(), max_length=64)
    """Origins whose web pages may call it, such as `https://chat.example`; `*` for all. Pages of others get status 403."""


class MetricsSpec(Model):
    """Where the replica controller serves its Prometheus metrics; the router serves its own on its HTTP port."""

    host: str = Field(default="127.0.0.1", json_schema_extra=restart())
    """Address that they are served on; `0.0.0.0` is all of the machine's. Pods always serve them on all."""
    port: int = Field(default=0, ge=0, le=65535, json_schema_extra=restart())
    """0 takes any free port; the table that `medha up` prints names it."""


class LifecycleSpec(Model):
    """How long a replica's start and end may take, and when it is started again."""

    drain_seconds: float = Field(default=30.0, ge=0, le=86400, json_schema_extra=restart())
    """How long running requests may take to finish after a stop was asked for."""
    ready_seconds: float = Field(default=600.0, gt=0, le=86400, json_schema_extra=restart())
    """How long weights, groups and warm-up may take before the start counts as failed."""
    restart: RestartSpec = Field(default=RestartSpec(), json_schema_extra=live())


class MedhaReplicaSpec(Model):
    """What one replica serves, on which grid, and what it promises."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!has(self.model.architecture) || self.model.architecture.queryHeads % self.parallelism.tensor == 0",
                "parallelism.tensor must divide model.architecture.queryHeads",
            ),
            (
                "!has(self.model.architecture) || self.model.architecture.layers >= self.parallelism.stream",
                "parallelism.stream is more stages than model.architecture.layers",
            ),
            (
                "self.serviceClasses.filter(c, c.name == 'default').size() == 0 || self.serviceClasses[0].name == 'default'",
                "serviceClasses has `default` behind the first, which is the default; move it up",
            ),
            (
                "self.scheduling.maxChunkTokens >= self.scheduling.minChunkTokens",
                "scheduling.maxChunkTokens is below minChunkTokens; raise the one or lower the other",
            ),
        )
    )

    model: ModelSpec
    parallelism: ParallelismSpec = ParallelismSpec()
    kv_cache: KvCacheSpec = KvCacheSpec()
    scheduling: SchedulingSpec = SchedulingSpec()
    service_classes: tuple[ServiceClass, ...] = Field(
        default=(ServiceClass(name="default"),),
        min_length=1,
        max_length=32,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    """The first is the default one."""
    router: RouterSpec = Field(default=RouterSpec(), json_schema_extra=restart())
    """Read by `medha up` alone: in a cluster, routers are installed by themselves."""
    metrics: MetricsSpec = MetricsSpec()
    lifecycle: LifecycleSpec = LifecycleSpec()
    threads: int | None = Field(default=None, ge=1, le=1024, json_schema_extra=restart())
    """CPU threads of each rank. Default: the machine's cores, divided by the ranks on it."""
    image: str | None = Field(default=None, min_length=1, max_length=1024, json_schema_extra=restart())
    """Of the pods. Default: the worker image of the operator's own release. Not read by `medha up`, nor are those below."""
    image_pull_secrets: tuple[ImagePullSecret, ...] = Field(
        default=(), max_length=16, json_schema_extra=restart()
    )
    """Credentials of the registries that `image` and init containers come from."""
    resources: ResourcesSpec = ResourcesSpec()
    placement: PlacementSpec = PlacementSpec()
    router_ref: RouterReference | None = Field(default=None, json_schema_extra=restart())
    """Default: the replica answers whoever finds its Service, and announces itself to nobody."""
    suspend: bool = Field(default=False, json_schema_extra=live())
    """Drain and remove the pods, keep everything else; `false` brings them back."""
    template: PodTemplate = PodTemplate()

    @model_validator(mode="after")
    def _class_names_differ(self) -> MedhaReplicaSpec:
        names = [service_class.name for service_class in self.service_classes]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ValueError(f"serviceClasses names {sorted(twice)} twice; give each class its own name")
        if "default" in names[1:]:
            raise ValueError(
                "serviceClasses has `default` behind the first, which is the default; move it up"
            )
        return self

    @model_validator(mode="after")
    def _chunks_have_room(self) -> MedhaReplicaSpec:
        largest, smallest = self.scheduling.max_chunk_tokens, self.scheduling.min_chunk_tokens
        if largest < smallest:
            raise ValueError(
                f"scheduling.maxChunkTokens {largest} is below minChunkTokens {smallest}; raise the one or lower the other"
            )
        return self

    @model_validator(mode="after")
    def _shape_fits_architecture(self) -> MedhaReplicaSpec:
        architecture, shape = self.model.architecture, self.parallelism
        if architecture is None:
            return self
        if architecture.query_heads % shape.tensor != 0:
            raise ValueError(
                f"parallelism.tensor {shape.tensor} must divide model.architecture.queryHeads {architecture.query_heads}"
            )
        if architecture.layers < shape.stream:
            raise ValueError(
                f"parallelism.stream {shape.stream} is more stages than model.architecture.layers {architecture.layers}"
            )
        return self


class ObjectMeta(BaseModel):
    """The part of Kubernetes' metadata that matters outside a cluster; the rest is ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    name: str = Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")
    namespace: str = "default"


class MedhaReplica(Model):
    """One model, served by one grid of ranks under one controller."""

    api_version: Literal["medha.dev/v1alpha1"]
    kind: Literal["MedhaReplica"]
    metadata: ObjectMeta
    spec: MedhaReplicaSpec


Surge = Annotated[int, Field(ge=0, le=10_000)] | Annotated[str, Field(pattern=r"^[0-9]{1,3}%$")]
"""A number of replicas, or a share of them such as `25%`."""


class RolloutSpec(Model):
    """How a change reaches the replicas of a deployment: whole replicas at a time, never two revisions in one."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "[self.maxSurge, self.maxUnavailable].exists(n, type(n) == int ? n != 0 : n != '0%')",
                "rollout.maxSurge and maxUnavailable are both 0, so that no replica could ever be replaced; raise one",
            )
        )
    )

    max_surge: Surge = Field(default=1, json_schema_extra={"x-kubernetes-int-or-string": True})
    """Replicas beyond `replicas` during a rollout, where the cluster has room for them. Shares are rounded up."""
    max_unavailable: Surge = Field(default=0, json_schema_extra={"x-kubernetes-int-or-string": True})
    """Replicas that may be missing during a rollout. Shares are rounded down."""
    partition: int = Field(default=0, ge=0, le=10_000)
    """Replicas with a lower index stay at the old revision: a canary."""

    @model_validator(mode="after")
    def _can_move(self) -> RolloutSpec:
        if str(self.max_surge).rstrip("%") == "0" and str(self.max_unavailable).rstrip("%") == "0":
            raise ValueError(
                "rollout.maxSurge and maxUnavailable are both 0, so that no replica could ever be replaced; raise one"
            )
        return self


class ReplicaTemplate(Model):
    """What every replica of a deployment is made of."""

    metadata: PodMetadata = PodMetadata()
    """Labels and annotations of every MedhaReplica."""
    spec: MedhaReplicaSpec


class MedhaDeploymentSpec(Model):
    """A number of identical replicas."""

    replicas: int = Field(default=1, ge=0, le=10_000)
    """How many MedhaReplicas there should be; `kubectl scale`, HPA and KEDA set it."""
    template: ReplicaTemplate
    rollout: RolloutSpec = RolloutSpec()
    paused: bool = False
    """Changes of `template` wait; `replicas` is still followed."""
    min_ready_seconds: float = Field(default=0.0, ge=0, le=86400)
    """How long a new replica must have been ready before the next one is replaced."""
    progress_deadline_seconds: float = Field(default=1800.0, gt=0, le=864000)
    """A rollout without progress for as long is reported as stalled."""
    revision_history_limit: int = Field(default=10, ge=0, le=1000)
    """Old revisions that are kept to go back to."""


class MedhaDeployment(Model):
    """Identical replicas behind one router, changed by whole replicas."""

    api_version: Literal["medha.dev/v1alpha1"]
    kind: Literal["MedhaDeployment"]
    metadata: ObjectMeta
    spec: MedhaDeploymentSpec


Parsed = TypeVar("Parsed", MedhaReplica, MedhaDeployment)


def parse_replica(document: object) -> MedhaReplica:
    """A `MedhaReplica` from a parsed YAML or JSON document.

    Raises:
        ConfigInvalid: names every wrong field, its value and what was expected.
    """
    return _parsed(MedhaReplica, document)


def parse_deployment(document: object) -> MedhaDeployment:
    """A `MedhaDeployment` from a parsed YAML or JSON document.

    Raises:
        ConfigInvalid: as `parse_replica`.
    """
    return _parsed(MedhaDeployment, document)


def _parsed(model: type[Parsed], document: object) -> Parsed:
    kind = model.__name__
    if not isinstance(document, dict):
        raise ConfigInvalid(f"expected one {kind} mapping, found {type(document).__name__}")
    try:
        return model.model_validate(document)
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            where = ".".join(str(part) for part in problem["loc"]) or "manifest"
            if problem["type"] == "missing":
                lines.append(f"{where}: is missing; add it")
            elif problem["type"] == "extra_forbidden":
                lines.append(f"{where}: is no field of {kind}; remove it or correct its spelling")
            else:
                lines.append(
                    f"{where}: {problem['msg'].removeprefix('Value error, ')} (found {problem['input']!r:.80})"
                )
        raise ConfigInvalid("\n".join(lines)) from error
