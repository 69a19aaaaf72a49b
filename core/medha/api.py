"""`MedhaReplica`, the one description of a replica (`medha.dev/v1alpha1`).

`medha up`, the simulator, the planner and the operator all read these models, and the CRD is generated from
them. A field's description gives its unit, its default's reason and, in `x-apply`, whether a change is applied
`live` or by a `restart`. Unknown fields are refused: a typing error must not become a silent default.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_camel

from medha.errors import ConfigInvalid

API_VERSION = "medha.dev/v1alpha1"
KIND = "MedhaReplica"

_UNITS_BYTES = {
    "": 1,
    "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40,
}  # fmt: skip

Quantity = Annotated[
    str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(k|M|G|T|Ki|Mi|Gi|Ti)?$", max_length=24, examples=["2Gi"])
]
"""Bytes as Kubernetes writes them."""


def quantity_bytes(quantity: str) -> int:
    """Bytes of a Kubernetes quantity such as `512Mi`."""
    number = quantity.rstrip("kKMGTi")
    return int(float(number) * _UNITS_BYTES[quantity[len(number) :]])


def _live() -> dict[str, Any]:
    return {"x-apply": "live"}


def _restart() -> dict[str, Any]:
    return {"x-apply": "restart"}


class Model(BaseModel):
    """Common settings of every model here: camelCase outside, frozen, no unknown fields."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
    )


class ModelSource(Model):
    """Where the checkpoint comes from; exactly one field."""

    path: str | None = Field(default=None, min_length=1)
    """Directory of a Hugging Face checkpoint (`medha up`); relative paths start at the manifest's folder."""

    @model_validator(mode="after")
    def _one_source(self) -> ModelSource:
        if self.path is None:
            raise ValueError("names no source; set `path` to a checkpoint directory")
        return self


class ModelSpec(Model):
    """Which model is served, and how."""

    name: str = Field(min_length=1, max_length=253, json_schema_extra=_restart())
    """The name that clients ask for in `model`, and `/v1/models` lists."""
    source: ModelSource = Field(json_schema_extra=_restart())
    max_model_len: int | None = Field(default=None, ge=16, le=2**31 - 1, json_schema_extra=_restart())
    """Longest prompt plus output, tokens. Default: the checkpoint's `max_position_embeddings`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", json_schema_extra=_restart()
    )
    """Of weights, activations and KV. `auto` is the checkpoint's own."""
    rope_scaling: dict[str, Any] | None = Field(default=None, json_schema_extra=_restart())
    """Replaces the checkpoint's RoPE scaling, in Hugging Face's spelling (`rope_type`, `factor`, ...)."""


class ParallelismSpec(Model):
    """The shape of the grid: tensor x stream x kv ranks."""

    tensor: int = Field(default=1, ge=1, le=64, json_schema_extra=_restart())
    """Ranks that split each layer (TP)."""
    stream: int = Field(default=1, ge=1, le=256, json_schema_extra=_restart())
    """Pipeline stages that the chunks of a prompt stream through (SPP)."""
    kv: int = Field(default=1, ge=1, le=256, json_schema_extra=_restart())
    """Lanes that long contexts are spread over (KVP); each holds all weights."""


class KvCacheSpec(Model):
    """The memory that holds keys and values."""

    size: Quantity | None = Field(default=None, json_schema_extra=_restart())
    """Bytes per rank, e.g. `2Gi`. Default: `memoryFraction` of what is free."""
    memory_fraction: float = Field(default=0.8, gt=0, le=0.98, json_schema_extra=_restart())
    """Share of the memory left after weights and a warm-up step. 0.8 leaves room for the allocator's slack."""
    block_size_tokens: int = Field(default=16, ge=1, le=1024, json_schema_extra=_restart())
    """Tokens per block: the unit of allocation and of sharing."""
    tokens_per_lane: int = Field(default=524_288, ge=1, le=2**31 - 1, json_schema_extra=_restart())
    """Prompt tokens of one request that a lane holds before the next lane joins (KVP). Shorter prompts stay on one."""
    prefix_caching: bool = Field(default=True, json_schema_extra=_restart())
    """Keep the KV of finished prompts until its blocks are needed, and share it with prompts that begin alike."""


class SchedulingSpec(Model):
    """How steps are formed (DESIGN §5)."""

    policy: Literal["fcfs", "edf", "lrs", "srpt", "lars", "guarded"] = Field(
        default="lars", json_schema_extra=_live()
    )
    """Order of prefills. `lars` is length-aware relative slack (paper B §4); `guarded` keeps the largest set of
    requests that can still all be on time (docs/scheduling.md)."""
    lars_denominator: Literal["work", "deadline"] = Field(default="work", json_schema_extra=_live())
    """What LARS divides slack by: total prefill work (paper B) or the deadline (paper A eq. 7)."""
    given_up_share: float = Field(default=0.1, ge=0.01, le=0.5, json_schema_extra=_live())
    """What `guarded` guarantees to requests that can no longer all be on time, as a part of the time of prefills: one that
    is given up ends within (the work given up before it + its own) / share. More means sooner, and more such requests."""
    profile: str | None = Field(default=None, min_length=1, json_schema_extra=_restart())
    """File that `medha profile` wrote; relative paths start at the manifest's folder. Default: a few steps that each
    rank measures when it starts."""
    max_step_seconds: float = Field(default=0.5, ge=0.001, le=60, json_schema_extra=_live())
    """Bound of a step when nothing decodes, so that an arriving request is seen within it. Seconds."""
    min_chunk_tokens: int = Field(default=32, ge=1, le=8192, json_schema_extra=_live())
    """Smallest efficient prefill chunk: below it attention loses efficiency (paper B: 11 % at 32)."""
    max_chunk_tokens: int = Field(default=2048, ge=1, le=1_048_576, json_schema_extra=_restart())
    """Largest prefill chunk of a step, all requests together; activations are sized by it."""
    min_prefill_share: float = Field(default=0.1, ge=0, le=0.9, json_schema_extra=_live())
    """Share of step time that the most urgent prefill gets even when decodes alone exceed their target."""
    space_sharing_cap: float = Field(default=0.4, ge=0, le=0.9, json_schema_extra=_live())
    """Largest share of a step that a long prefill yields to others (paper B)."""
    long_threshold_tokens: int | None = Field(default=None, ge=1, json_schema_extra=_live())
    """KV length from which a request is long. Default: where attention FLOPs pass linear FLOPs."""
    max_running: int = Field(default=256, ge=1, le=65536, json_schema_extra=_restart())
    """Sequences that hold KV at a time."""
    max_waiting: int = Field(default=1024, ge=0, le=1_000_000, json_schema_extra=_live())
    """Sequences that wait for KV in the replica before it refuses more with `capacity`."""
    max_running_long: int = Field(default=8, ge=1, le=65536, json_schema_extra=_live())
    """Long prompts admitted at a time; more would pile up half-done KV and block short ones."""
    short_headroom: float = Field(default=0.05, ge=0, le=0.5, json_schema_extra=_live())
    """Share of the KV pool that long prompts leave to short ones at admission."""


class ServiceClass(Model):
    """What a class of requests is promised. TTFT deadline = max(ttftFloorSeconds, ttftFactor * predicted prefill)."""

    name: str = Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")
    ttft_floor_seconds: float = Field(default=2.0, gt=0, le=86400, json_schema_extra=_live())
    ttft_factor: float = Field(default=3.0, ge=1, le=1000, json_schema_extra=_live())
    tpot_target_seconds: float = Field(default=0.05, gt=0, le=60, json_schema_extra=_live())
    """Time per output token, from which the step budget is taken."""
    tpot_floor_seconds: float = Field(default=0.01, gt=0, le=60, json_schema_extra=_live())
    """Tightest TPOT target that a request of this class may ask for; tighter ones are clamped to it."""
    default_output_tokens: int = Field(default=4096, ge=1, json_schema_extra=_live())
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
    port: int = Field(default=8000, ge=0, le=65535)
    """0 takes any free port; the table that `medha up` prints names it."""
    max_body_bytes: Quantity = "64Mi"
    """Larger bodies get status 413."""
    max_waiting: int = Field(default=4096, ge=1)
    """Requests that wait for a replica; more get status 429 with Retry-After."""


class MetricsSpec(Model):
    """Where the replica controller serves its Prometheus metrics; the router serves its own on its HTTP port."""

    host: str = Field(default="127.0.0.1", json_schema_extra=_restart())
    port: int = Field(default=0, ge=0, le=65535, json_schema_extra=_restart())
    """0 takes any free port; the table that `medha up` prints names it."""


class LifecycleSpec(Model):
    drain_seconds: float = Field(default=30.0, ge=0, le=86400, json_schema_extra=_live())
    """How long running requests may take to finish after a stop was asked for."""
    ready_seconds: float = Field(default=600.0, gt=0, le=86400, json_schema_extra=_live())
    """How long weights, groups and warm-up may take before the start counts as failed."""


class MedhaReplicaSpec(Model):
    model: ModelSpec
    parallelism: ParallelismSpec = ParallelismSpec()
    kv_cache: KvCacheSpec = KvCacheSpec()
    scheduling: SchedulingSpec = SchedulingSpec()
    service_classes: tuple[ServiceClass, ...] = (ServiceClass(name="default"),)
    """The first is the default one."""
    router: RouterSpec = RouterSpec()
    metrics: MetricsSpec = MetricsSpec()
    lifecycle: LifecycleSpec = LifecycleSpec()
    threads: int | None = Field(default=None, ge=1, le=1024, json_schema_extra=_restart())
    """CPU threads of each rank. Default: the machine's cores, divided by the ranks on it."""

    @model_validator(mode="after")
    def _class_names_differ(self) -> MedhaReplicaSpec:
        if not self.service_classes:
            raise ValueError("serviceClasses is empty; name at least one class or leave the field out")
        names = [service_class.name for service_class in self.service_classes]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ValueError(f"serviceClasses names {sorted(twice)} twice; give each class its own name")
        if "default" in names[1:]:
            raise ValueError(
                "serviceClasses has `default` behind the first, which is the default; move it up"
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


def parse_replica(document: object) -> MedhaReplica:
    """A `MedhaReplica` from a parsed YAML or JSON document.

    Raises:
        ConfigInvalid: names every wrong field, its value and what was expected.
    """
    if not isinstance(document, dict):
        raise ConfigInvalid(f"expected one {KIND} mapping, found {type(document).__name__}")
    try:
        return MedhaReplica.model_validate(document)
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            where = ".".join(str(part) for part in problem["loc"]) or "manifest"
            if problem["type"] == "missing":
                lines.append(f"{where}: is missing; add it")
            elif problem["type"] == "extra_forbidden":
                lines.append(f"{where}: is no field of {KIND}; remove it or correct its spelling")
            else:
                lines.append(f"{where}: {problem['msg']} (found {problem['input']!r:.80})")
        raise ConfigInvalid("\n".join(lines)) from error
