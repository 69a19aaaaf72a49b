"""`MedhaReplica`, the description of a replica that users write (`medha.dev/v1alpha1`).

`medha up`, the simulator, the planner and the operator all read these models, and the CRDs are generated from
them. Unknown fields are refused: a typing error must not become a silent default.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from medha.api.cluster import (
    ImagePullSecret,
    PlacementSpec,
    PodTemplate,
    ResourcesSpec,
    RestartSpec,
    RouterReference,
    SecretKey,
)
from medha.api.determinism import Determinism
from medha.api.fields import (
    ENDPOINT_PATTERN,
    SIZE_RULES,
    HostName,
    Model,
    Origin,
    QuantityAboveZero,
    epoch,
    live,
    restart,
    rules,
    written_as,
)
from medha.api.kv_cache_spec import KvCacheSpec
from medha.api.model_spec import ModelSpec
from medha.api.replica_role import ReplicaRole
from medha.api.speculation_spec import SpeculationSpec
from medha.errors import ConfigInvalid

API_VERSION = "medha.dev/v1alpha1"
KIND = "MedhaReplica"


MOST_PODS = 256
"""Largest number of pods of one replica, `stream` x `kv`: a typing error must not flood a cluster with
pods."""
MOST_RANKS = 2048
"""Largest number of ranks of one replica: 256 pods of 8 accelerators, sixteen times the largest published
grids (128)."""
_TOO_MANY_PODS = f"parallelism.stream x kv is more than {MOST_PODS} pods; make one of them smaller, or serve several replicas"
_TOO_MANY_RANKS = f"parallelism.tensor x stream x kv is more than {MOST_RANKS} ranks; make one of them smaller, or serve several replicas"


class ParallelismSpec(Model):
    """Shape of the grid: tensor x stream x kv ranks, in stream x kv pods. At most 2,048 ranks in 256 pods:
    larger grids are taken for typing errors."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (f"self.stream * self.kv <= {MOST_PODS}", _TOO_MANY_PODS),
            (f"self.tensor * self.stream * self.kv <= {MOST_RANKS}", _TOO_MANY_RANKS),
        )
    )

    tensor: int = Field(default=1, ge=1, le=64, json_schema_extra=restart())
    """Number of ranks that split each layer (TP)."""
    stream: int = Field(default=1, ge=1, le=256, json_schema_extra=restart())
    """Number of pipeline stages that the chunks of a prompt stream through (SPP)."""
    kv: int = Field(default=1, ge=1, le=256, json_schema_extra=restart())
    """Number of lanes that long contexts are spread over (KVP). Each lane holds all weights."""

    @model_validator(mode="after")
    def _is_bounded(self) -> ParallelismSpec:
        if self.stream * self.kv > MOST_PODS:
            raise ValueError(_TOO_MANY_PODS)
        if self.tensor * self.stream * self.kv > MOST_RANKS:
            raise ValueError(_TOO_MANY_RANKS)
        return self


class SchedulingSpec(Model):
    """Rules by which steps are formed."""

    policy: Literal["fcfs", "edf", "lrs", "srpt", "lars", "guarded"] = Field(
        default="guarded", json_schema_extra=epoch()
    )
    """Order of prefills. `guarded` keeps the largest set of requests that can still all be on time; `lars`
    is length-aware relative slack (paper B §4). docs/scheduling.md compares all policies."""
    lars_denominator: Literal["work", "deadline"] = Field(default="work", json_schema_extra=epoch())
    """Divisor of the slack in LARS: the total prefill work (`work`, paper B) or the deadline (`deadline`,
    paper A eq. 7)."""
    demoted_share: float = Field(default=0.1, ge=0.01, le=0.5, json_schema_extra=epoch())
    """Share of prefill time that `guarded` guarantees to demoted requests, those that can no longer all be
    on time. A demoted request's prefill ends within (the demoted work before it + its own) / share. A
    larger share ends them sooner, and demotes more requests."""
    profile: str | None = Field(default=None, min_length=1, json_schema_extra=restart())
    """File that `medha profile` wrote; a relative path starts at the manifest's folder. Default: each rank
    measures a few steps when it starts."""
    max_step_seconds: float = Field(default=0.5, ge=0.001, le=60, json_schema_extra=epoch())
    """Bound of a step when nothing decodes, in seconds; an arriving request is considered within it."""
    min_chunk_tokens: int = Field(default=32, ge=1, le=8192, json_schema_extra=epoch())
    """Smallest efficient prefill chunk, in tokens; attention loses efficiency below it (paper B: 11 % at
    32)."""
    max_chunk_tokens: int = Field(default=2048, ge=1, le=1_048_576, json_schema_extra=restart())
    """Largest number of prefill tokens of a step on one lane, all requests together; activations are sized
    by it."""
    prefill_strategy: Literal["ownerCompute", "passKv", "passQ", "auto", "striped"] = Field(
        default="ownerCompute", json_schema_extra=restart()
    )
    """Strategy by which lanes share the prefill of a prompt longer than `tokensPerLane`. `ownerCompute`:
    one lane runs the linear layers, and lanes join as the KV reaches them; it leaves the others free for
    short requests, so it is the default. The others are context parallelism: every lane computes a part of
    each chunk, and keys and values (`passKv`) or queries (`passQ`) go around the ring of lanes. `auto`
    chooses for each chunk the one whose messages are better hidden. `striped` is `passKv` with positions
    assigned round-robin instead of in balanced runs (docs/parallelism.md)."""
    min_prefill_share: float = Field(default=0.1, ge=0, le=0.9, json_schema_extra=epoch())
    """Share of step time that the most urgent prefill gets even if decodes alone exceed their target."""
    space_sharing_cap: float = Field(default=0.4, ge=0, le=0.9, json_schema_extra=epoch())
    """Largest share of a step that a long prefill yields to others (paper B)."""
    long_threshold_tokens: int | None = Field(default=None, ge=1, le=2**31 - 1, json_schema_extra=epoch())
    """Number of tokens from which a request is long: those of its prompt that are not cached, and later
    those of its KV. Default: the context length at which attention FLOPs exceed linear FLOPs."""
    max_running: int = Field(default=256, ge=1, le=65536, json_schema_extra=restart())
    """Largest number of sequences that hold KV at the same time."""
    max_waiting: int = Field(default=1024, ge=0, le=1_000_000, json_schema_extra=epoch())
    """Largest number of sequences that wait for KV in the replica; more are refused with `capacity`."""
    max_running_long: int = Field(default=32, ge=1, le=65536, json_schema_extra=epoch())
    """Largest number of long prompts in prefill at the same time. A waiting long prompt gets KV only at
    its turn, and `shortHeadroom` bounds the share of the pool that long prompts hold, so few are half
    done; this limit holds in any case."""
    short_headroom: float = Field(default=0.05, ge=0, le=0.5, json_schema_extra=epoch())
    """Share of the KV pool that long prompts leave to short ones at admission."""
    max_swaps: int = Field(default=1, ge=0, le=3, json_schema_extra=epoch())
    """Number of times that a long request may step aside so that requests which wait for KV are on time. It
    does so only if it is predicted to be on time itself. With a host tier its KV is kept there, else it is
    computed again. 0: never."""
    speculation: SpeculationSpec = SpeculationSpec()


class ServiceClass(Model):
    """Latency targets of a class of requests. TTFT deadline = max(ttftFloorSeconds, ttftFactor * predicted
    prefill)."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "self.tpotTargetSeconds >= self.tpotFloorSeconds",
                "tpotTargetSeconds is below tpotFloorSeconds and would be clamped to it; raise the one or lower the other",
            )
        )
    )

    name: Annotated[
        str,
        Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$"),
        written_as("must be lower-case letters, digits and `-`, with a letter or digit at each end"),
    ] = Field(json_schema_extra=epoch())
    """Name that requests give in `service_tier`."""
    ttft_floor_seconds: float = Field(default=2.0, gt=0, le=86400, json_schema_extra=epoch())
    """Time to first token that even the shortest prompt is given, in seconds."""
    ttft_factor: float = Field(default=3.0, ge=1, le=1000, json_schema_extra=epoch())
    """Time to first token of longer prompts, as a multiple of the time that their prefill would take
    alone."""
    tpot_target_seconds: float = Field(default=0.05, gt=0, le=60, json_schema_extra=epoch())
    """Target of the time per output token (TPOT), in seconds; the step budget is derived from it."""
    tpot_floor_seconds: float = Field(default=0.01, gt=0, le=60, json_schema_extra=epoch())
    """Tightest TPOT target that a request of this class may ask for, in seconds; tighter ones are clamped
    to it."""
    default_output_tokens: int = Field(default=4096, ge=1, le=2**31 - 1, json_schema_extra=epoch())
    """Output tokens that are expected of a request before a replica has learned how long outputs are. KV is
    reserved for the expected output, or for `max_tokens` if that is less."""
    max_wait_seconds: float | None = Field(default=None, gt=0, le=86400, json_schema_extra=epoch())
    """Longest predicted wait of a request in the router until its prefill begins, in seconds. A request that
    would wait longer gets status 429, with the predicted start in `Retry-After`. Default: it waits, however
    long that takes."""

    @model_validator(mode="after")
    def _target_not_below_floor(self) -> ServiceClass:
        if self.tpot_target_seconds < self.tpot_floor_seconds:
            raise ValueError(
                f"tpotTargetSeconds {self.tpot_target_seconds} is below tpotFloorSeconds "
                f"{self.tpot_floor_seconds} and would be clamped to it; raise the one or lower the other"
            )
        return self


class RouterSpec(Model):
    """The HTTP router that `medha up` starts."""

    host: str = "127.0.0.1"
    """Address that the router listens on; `0.0.0.0` stands for all addresses of the machine."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port that the router listens on. 0 takes any free port; the table that `medha up` prints names it."""
    metrics_host: str = "127.0.0.1"
    """Address that serves the router's Prometheus metrics; `0.0.0.0` stands for all addresses of the
    machine."""
    metrics_port: int = Field(default=0, ge=0, le=65535)
    """Port that serves the router's metrics. 0 takes any free port; the table that `medha up` prints names
    it."""
    max_body_bytes: QuantityAboveZero = Field(default="64Mi", json_schema_extra=rules(*SIZE_RULES))
    """Largest request body in bytes, e.g. `64Mi`; larger ones get status 413."""
    max_waiting: int = Field(default=4096, ge=1, le=1_000_000)
    """Largest number of sequences that wait for a replica; more get status 429 with Retry-After."""
    allowed_hosts: tuple[HostName, ...] = Field(default=(), max_length=64)
    """Names in `Host` headers by which the router may be called, in addition to `localhost` and loopback
    addresses. If empty, all names are allowed, unless the router listens on a loopback address."""
    allowed_origins: tuple[Origin, ...] = Field(default=(), max_length=64)
    """Origins whose web pages may call the router, such as `https://chat.example`; `*` allows all. Pages
    of other origins get status 403."""
    trace_ratio: float | None = Field(default=None, ge=0, le=1)
    """Share of requests that are traced, of those whose client has not decided it, if traces are on. Default:
    `OTEL_TRACES_SAMPLER` decides, and without it all are."""


class MetricsSpec(Model):
    """Address of the replica controller's Prometheus metrics. `router.metricsPort` is that of the router's
    own."""

    host: str = Field(default="127.0.0.1", json_schema_extra=restart())
    """Address that serves the metrics; `0.0.0.0` stands for all addresses of the machine. Pods always
    serve them on all of theirs."""
    port: int = Field(default=0, ge=0, le=65535, json_schema_extra=restart())
    """Port that serves the metrics. 0 takes any free port; the table that `medha up` prints names it."""


class TracesSpec(Model):
    """Traces of requests by OpenTelemetry (docs/traces.md). Without an endpoint there are none, unless OpenTelemetry's own
    variables (`OTEL_EXPORTER_OTLP_ENDPOINT`) name one."""

    endpoint: (
        Annotated[
            str,
            Field(max_length=1024, pattern=ENDPOINT_PATTERN),
            written_as(
                "must be a URL without credentials, query and fragment, such as http://collector.monitoring:4318"
            ),
        ]
        | None
    ) = Field(default=None, json_schema_extra=restart())
    """Base URL of a collector, which gets spans by OTLP over HTTP, such as `http://collector.monitoring:4318`. Default
    in a cluster: that of the operator's installation."""
    headers_secret: SecretKey | None = Field(default=None, json_schema_extra=restart())
    """Secret with headers for the collector, such as `authorization=Bearer%20...`, separated by commas; its
    namespace is the replica's. `medha up` ignores it and takes `OTEL_EXPORTER_OTLP_HEADERS` from its environment."""


class LifecycleSpec(Model):
    """Time limits of a replica's start and stop, and its restart policy."""

    drain_seconds: float = Field(default=30.0, ge=0, le=86400, json_schema_extra=restart())
    """Seconds that running requests get to finish after a stop is requested."""
    ready_seconds: float = Field(default=600.0, gt=0, le=86400, json_schema_extra=restart())
    """Seconds that loading weights, forming process groups and warming up may take before the start counts
    as failed."""
    restart: RestartSpec = Field(default=RestartSpec(), json_schema_extra=live())


_SLICE = "nvidia.com/mig-"
"""Beginning of the names of resources that are slices of a GPU (MIG)."""
_JOINS_SLICES = (
    "resources.accelerator is a MIG slice, and NCCL cannot join the slices of a GPU; "
    "set parallelism.tensor, stream and kv to 1, or request whole GPUs"
)
_MERGES_LANES = (
    "determinism batchInvariant needs parallelism.kv 1, because lanes merge their parts of a context in an order that "
    "depends on the load; set parallelism.kv to 1, or determinism to bestEffort"
)
_ROLES_NEED_PEERS = (
    "role prefill or decode needs kvCache.tiers.peers, because a request moves to where another replica can read its KV; add "
    "kvCache.tiers.host and peers, or set role to both"
)
_STREAMS_BEST_EFFORT = (
    "kvCache.streaming merges the parts of a context, which rounds other than one part does; set determinism to bestEffort, "
    "or leave streaming out"
)
_STREAMS_WITHOUT_DRAFTS = (
    "kvCache.streaming does not stream the KV of a draft model or prediction head; set speculation.method to promptLookup or "
    "none, or leave streaming out"
)
_STREAMS_TO_ITS_OWNER = "kvCache.streaming on several lanes needs scheduling.prefillStrategy ownerCompute; set that, or leave streaming out"


class MedhaReplicaSpec(Model):
    """Specification of a replica: its model, its grid and its latency targets."""

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
                "serviceClasses has `default` after the first, which is the default; move it up",
            ),
            (
                "self.scheduling.maxChunkTokens >= self.scheduling.minChunkTokens",
                "scheduling.maxChunkTokens is below minChunkTokens; raise the one or lower the other",
            ),
            (
                f"!self.resources.accelerator.startsWith('{_SLICE}') || "
                "self.parallelism.tensor * self.parallelism.stream * self.parallelism.kv == 1",
                _JOINS_SLICES,
            ),
            ("self.determinism != 'batchInvariant' || self.parallelism.kv == 1", _MERGES_LANES),
            (
                "!has(self.kvCache.streaming) || self.determinism != 'batchInvariant'",
                _STREAMS_BEST_EFFORT,
            ),
            (
                "!has(self.kvCache.streaming) || !(self.scheduling.speculation.method in ['draftModel', 'predictionHead'])",
                _STREAMS_WITHOUT_DRAFTS,
            ),
            (
                "!has(self.kvCache.streaming) || self.parallelism.kv == 1 || "
                "self.scheduling.prefillStrategy == 'ownerCompute'",
                _STREAMS_TO_ITS_OWNER,
            ),
            (
                "self.role == 'both' || (has(self.kvCache.tiers) && has(self.kvCache.tiers.peers))",
                _ROLES_NEED_PEERS,
            ),
        )
    )

    model: ModelSpec
    role: ReplicaRole = Field(default="both", json_schema_extra=restart())
    """Phases of requests that the replica serves. `prefill` computes prompts and samples the first token; then the router
    moves the request to a replica that decodes, which reads its KV. `decode` takes such requests, and prompts that are
    too short for a move. `both` does either. If no replica of a role is ready, the others do its work (docs/roles.md)."""
    parallelism: ParallelismSpec = ParallelismSpec()
    kv_cache: KvCacheSpec = KvCacheSpec()
    scheduling: SchedulingSpec = SchedulingSpec()
    service_classes: tuple[ServiceClass, ...] = Field(
        default=(ServiceClass(name="default"),),
        min_length=1,
        max_length=32,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    """Service classes that requests may name. The first is the default."""
    router: RouterSpec = Field(default=RouterSpec(), json_schema_extra=restart())
    """The HTTP router that `medha up` starts. Ignored in a cluster, where routers are installed
    separately."""
    metrics: MetricsSpec = MetricsSpec()
    traces: TracesSpec = TracesSpec()
    lifecycle: LifecycleSpec = LifecycleSpec()
    threads: int | None = Field(default=None, ge=1, le=1024, json_schema_extra=restart())
    """CPU threads of each rank. Default: the machine's cores, divided by the ranks on it."""
    determinism: Determinism = Field(default="bestEffort", json_schema_extra=restart())
    """Guarantee about the numbers of a request. `bestEffort`: sampling is keyed by seed and position, and matrix products and
    attention round as is fastest for the step, so that in 16-bit types a text may differ with what shares its steps, and
    from where it is resumed after a failure. `batchInvariant`: logits are the same to the bit whatever shares
    a step, however a prompt is cut into chunks, and when a request is resumed. It is slower (docs/gpu.md), needs
    `parallelism.kv` 1, and on CPUs `float32`."""
    image: str | None = Field(default=None, min_length=1, max_length=1024, json_schema_extra=restart())
    """Image of the pods. Default: a worker image of the operator's own release, the one for CPUs if
    `resources.accelerator` is `none`, else the one for GPUs. `medha up` ignores it, and also
    `imagePullSecrets`, `resources` (but not `resources.accelerator`), `placement`, `routerRef`, `suspend`
    and `template`."""
    image_pull_secrets: tuple[ImagePullSecret, ...] = Field(
        default=(), max_length=16, json_schema_extra=restart()
    )
    """Secrets with credentials of the registries that `image` and the images of init containers come from."""
    resources: ResourcesSpec = ResourcesSpec()
    placement: PlacementSpec = PlacementSpec()
    router_ref: RouterReference | None = Field(default=None, json_schema_extra=restart())
    """The router that the replica announces itself to. Default: none, so that the replica receives no
    requests."""
    suspend: bool = Field(default=False, json_schema_extra=live())
    """Drain and remove the pods, but keep everything else; `false` brings the pods back."""
    template: PodTemplate = PodTemplate()

    @model_validator(mode="after")
    def _class_names_differ(self) -> MedhaReplicaSpec:
        names = [service_class.name for service_class in self.service_classes]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ValueError(f"serviceClasses names {sorted(twice)} twice; give each class its own name")
        if "default" in names[1:]:
            raise ValueError("serviceClasses has `default` after the first, which is the default; move it up")
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
    def _slices_are_not_joined(self) -> MedhaReplicaSpec:
        accelerator, shape = self.resources.accelerator, self.parallelism
        if accelerator.startswith(_SLICE) and shape.tensor * shape.stream * shape.kv > 1:
            raise ValueError(
                f"{_JOINS_SLICES} (found {accelerator} with {shape.tensor} x {shape.stream} x {shape.kv} ranks)"
            )
        return self

    @model_validator(mode="after")
    def _lanes_are_not_merged(self) -> MedhaReplicaSpec:
        if self.determinism == "batchInvariant" and self.parallelism.kv > 1:
            raise ValueError(f"{_MERGES_LANES} (found {self.parallelism.kv})")
        return self

    @model_validator(mode="after")
    def _role_has_peers(self) -> MedhaReplicaSpec:
        if self.role != "both" and self.kv_cache.peers is None:
            raise ValueError(f"{_ROLES_NEED_PEERS} (found {self.role} without peers)")
        return self

    @model_validator(mode="after")
    def _streams_what_it_can(self) -> MedhaReplicaSpec:
        if self.kv_cache.streaming is None:
            return self
        if self.determinism == "batchInvariant":
            raise ValueError(_STREAMS_BEST_EFFORT)
        if self.scheduling.speculation.proposes:
            raise ValueError(f"{_STREAMS_WITHOUT_DRAFTS} (found {self.scheduling.speculation.method})")
        if self.parallelism.kv > 1 and self.scheduling.prefill_strategy != "ownerCompute":
            raise ValueError(f"{_STREAMS_TO_ITS_OWNER} (found {self.scheduling.prefill_strategy})")
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
    name: Annotated[
        str,
        Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"),
        written_as("must be lower-case letters, digits, `-` and `.`, with a letter or digit at each end"),
    ]
    namespace: str = "default"


class MedhaReplica(Model):
    """Serves one model on one grid of ranks, under one controller."""

    api_version: Literal["medha.dev/v1alpha1"]
    kind: Literal["MedhaReplica"]
    metadata: ObjectMeta
    spec: MedhaReplicaSpec


Parsed = TypeVar("Parsed", bound=Model)


def parse_replica(document: object) -> MedhaReplica:
    """Return a `MedhaReplica` from a parsed YAML or JSON document.

    Raises:
        ConfigInvalid: names every wrong field, its value and what was expected.
    """
    return parsed(MedhaReplica, document)


def parsed(model: type[Parsed], document: object) -> Parsed:
    """Return a resource from a parsed YAML or JSON document.

    Raises:
        ConfigInvalid: names every wrong field, its value and what was expected.
    """
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
            elif problem["type"] == "value_error" and isinstance(problem["input"], dict):
                lines.append(f"{where}: {problem['ctx']['error']}")  # it names the fields and what it found
            elif problem["type"] == "string_type" and isinstance(problem["input"], int | float):
                lines.append(f"{where}: must be a text; write it in quotes (found {problem['input']!r:.80})")
            else:
                lines.append(
                    f"{where}: {problem['msg'].removeprefix('Value error, ')} (found {problem['input']!r:.80})"
                )
        raise ConfigInvalid("\n".join(lines)) from error
