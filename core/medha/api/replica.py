"""`MedhaReplica` and `MedhaDeployment`, the descriptions that users write (`medha.dev/v1alpha1`).

`medha up`, the simulator, the planner and the operator all read these models, and the CRDs are generated from
them. Unknown fields are refused: a typing error must not become a silent default.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

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
    SecretKey,
)
from medha.api.fields import (
    ENDPOINT_PATTERN,
    HostName,
    Model,
    Name,
    Origin,
    Quantity,
    epoch,
    live,
    quantity_bytes,
    restart,
    rules,
)
from medha.determinism import Determinism
from medha.errors import ConfigInvalid
from medha.kv_dtype import KvDtype
from medha.replica_role import ReplicaRole

API_VERSION = "medha.dev/v1alpha1"
KIND = "MedhaReplica"


_SOURCES = ("path", "huggingFace", "pvc", "hostPath", "image")


class ModelSource(Model):
    """Source of the checkpoint; exactly one field must be set."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                f"[{', '.join(f'has(self.{name})' for name in _SOURCES)}].filter(given, given).size() == 1",
                f"model.source needs exactly one of {', '.join(_SOURCES)}",
            )
        )
    )

    path: str | None = Field(default=None, min_length=1, max_length=1024)
    """Directory of a Hugging Face checkpoint: relative to the manifest's folder for `medha up`, a
    directory of the pod's image in a cluster."""
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


_DRAFT_SOURCES = ("path", "pvc", "image")
_ONE_DRAFT_SOURCE = (
    f"the checkpoint that drafts needs exactly one of {', '.join(_DRAFT_SOURCES)}; name where it lies"
)


class DraftSource(Model):
    """Source of the checkpoint of a draft model or of a prediction head; exactly one field must be set."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                f"[{', '.join(f'has(self.{name})' for name in _DRAFT_SOURCES)}].filter(given, given).size() == 1",
                _ONE_DRAFT_SOURCE,
            )
        )
    )

    path: str | None = Field(default=None, min_length=1, max_length=1024)
    """Directory of a Hugging Face checkpoint: relative to the manifest's folder for `medha up`, a
    directory of the pod's image in a cluster."""
    pvc: PersistentVolumeSource | None = None
    image: ImageSource | None = None

    @model_validator(mode="after")
    def _one_source(self) -> DraftSource:
        given = [name for name in _DRAFT_SOURCES if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"{_ONE_DRAFT_SOURCE} (found {' and '.join(given) or 'none'})")
        return self


class Architecture(Model):
    """Sizes from the checkpoint's `config.json`. If they are given, a grid that cannot work is refused
    when the resource is applied."""

    layers: int = Field(ge=1, le=100_000)
    """Number of transformer layers, `num_hidden_layers`."""
    query_heads: int = Field(ge=1, le=100_000)
    """Number of query heads in each layer, `num_attention_heads`."""


MOST_ALIASES = 32
ToolCallFormat = Literal["auto", "hermes", "llama3_json", "mistral", "mistral_args", "qwen3_coder", "harmony"]

ReasoningFormat = Literal["auto", "none", "think", "mistral", "harmony"]


class ModelSpec(Model):
    """The model that is served."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            ("!has(self.aliases) || !(self.name in self.aliases)", "model.aliases has the model's own name"),
        )
    )

    name: str = Field(min_length=1, max_length=253, json_schema_extra=restart())
    """Name that clients request in `model` and that `/v1/models` lists."""
    aliases: tuple[Annotated[str, Field(min_length=1, max_length=253)], ...] = Field(
        default=(), max_length=MOST_ALIASES, json_schema_extra=live() | {"x-kubernetes-list-type": "set"}
    )
    """Further names that clients may request. Answers have the model's own name. No alias may be the name of
    another model, or an alias of one, behind the same router."""
    tool_call_format: ToolCallFormat = Field(default="auto", json_schema_extra=live())
    """Form in which the model writes calls of functions. `auto` finds it from the checkpoint's chat template;
    docs/tool-calls.md lists the others."""
    reasoning_format: ReasoningFormat = Field(default="auto", json_schema_extra=live())
    """Form in which the model writes its thoughts, which clients get apart from the answer. `auto` finds it from the
    checkpoint's chat template, `none` separates no thoughts; docs/reasoning.md lists the others."""
    source: ModelSource = Field(json_schema_extra=restart())
    max_model_len: int | None = Field(default=None, ge=16, le=2**31 - 1, json_schema_extra=restart())
    """Largest number of tokens of a prompt plus its output. Default: the checkpoint's
    `max_position_embeddings`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", json_schema_extra=restart()
    )
    """Data type of weights, activations and KV. `auto` uses the checkpoint's own."""
    rope_scaling: dict[str, Any] | None = Field(default=None, json_schema_extra=restart())
    """RoPE scaling that replaces the checkpoint's, in Hugging Face's spelling (`rope_type`, `factor`,
    ...)."""
    architecture: Architecture | None = Field(default=None, json_schema_extra=restart())
    """Sizes from the checkpoint's `config.json`, for checks when the resource is applied. Default: read
    from the checkpoint when the ranks start."""

    @model_validator(mode="after")
    def _names_differ(self) -> ModelSpec:
        twice = sorted({name for name in self.aliases if self.aliases.count(name) > 1})
        if twice:
            raise ValueError(f"aliases names {twice} twice; keep one of each")
        if self.name in self.aliases:
            raise ValueError(f"aliases has {self.name!r}, which is the model's own name; remove it")
        return self


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


class HostTierSpec(Model):
    """Host memory for KV that is evicted from the device."""

    size: Quantity = Field(json_schema_extra=restart())
    """Bytes per rank, e.g. `16Gi`: the `kvCache.size` of each rank several times over."""

    @field_validator("size")
    @classmethod
    def _size_is_above_zero(cls, size: str) -> str:
        if quantity_bytes(size) == 0:
            raise ValueError(f"must be above 0 (found {size}); give bytes such as 16Gi, or leave tiers out")
        return size


_ONE_DISK = "kvCache.tiers.disk takes at most one of claimName and hostPath"
_DISK_NEEDS_HOST = "kvCache.tiers.disk is filled from the host tier, and read into it; add kvCache.tiers.host, or leave disk out"


class DiskTierSpec(Model):
    """Files for KV of the host tier, which outlive it. Default: on an ephemeral volume of each pod's own, so they outlive
    restarts of its containers."""

    model_config = ConfigDict(
        json_schema_extra=rules(("!(has(self.claimName) && has(self.hostPath))", _ONE_DISK))
    )

    size: Quantity = Field(json_schema_extra=restart())
    """Bytes per rank, e.g. `200Gi`: several times the size of the host tier."""
    claim_name: Name | None = Field(default=None, json_schema_extra=restart())
    """Name of a PersistentVolumeClaim in the replica's namespace, whose files outlive pods. Its volume must be writable
    from every node that pods run on (`ReadWriteMany`, if they are several). `medha up` ignores it."""
    host_path: str | None = Field(
        default=None, min_length=1, max_length=1024, pattern=r"^/", json_schema_extra=restart()
    )
    """Absolute path of a directory, whose files outlive pods that come back to their node. It must exist on every node, and
    belong to the pods' user (65532). The chart's `admission.writableHostPaths` lists the paths that are allowed. `medha
    up` keeps the files there, too."""

    @field_validator("size")
    @classmethod
    def _size_is_above_zero(cls, size: str) -> str:
        if quantity_bytes(size) == 0:
            raise ValueError(f"must be above 0 (found {size}); give bytes such as 200Gi, or leave disk out")
        return size

    @model_validator(mode="after")
    def _one_volume(self) -> DiskTierSpec:
        if self.claim_name is not None and self.host_path is not None:
            raise ValueError(f"{_ONE_DISK} (found both)")
        return self


_PEERS_NEED_HOST = "kvCache.tiers.peers reads KV of other replicas into the host tier; add kvCache.tiers.host, or leave peers out"


PeerPlane = Literal["sockets", "nixl"]


class PeersSpec(Model):
    """KV of other replicas of the model, which is read over the network instead of being computed again, if that is faster.
    Both replicas must have this. `medha up` runs one replica, and ignores it."""

    bandwidth: Quantity = Field(default="256Mi", json_schema_extra=restart())
    """Bytes per second that a rank reads of a rank of another replica, encrypted, e.g. `256Mi`: by this the first reads are
    predicted. Measured reads correct it."""

    plane: PeerPlane = Field(default="sockets", json_schema_extra=restart())
    """Transport of KV between ranks. `sockets`: encrypted sockets. `nixl`: NIXL with UCX, for networks that nobody else uses: it
    encrypts no KV. It needs the package `nixl` in the image, and ports that this operator does not open. Ranks that lack it use
    sockets."""

    @field_validator("bandwidth")
    @classmethod
    def _bandwidth_is_above_zero(cls, bandwidth: str) -> str:
        return _above_zero(bandwidth, "peers")


_STORE_NEEDS_HOST = "kvCache.tiers.store is filled from the host tier, and read into it; add kvCache.tiers.host, or leave store out"
_ONLY_S3 = "kvCache.tiers.store: endpoint, region and secretName are of an s3:// url; remove them, or give such a url"
_ONLY_FILES = (
    "kvCache.tiers.store: claimName is of a file:// url; remove it, or give a url such as file:///mnt/kv"
)
_STORE_URL = r"^(s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9._=-]+)*/?|file://(/[A-Za-z0-9._=-]+)+/?)$"


class StoreSpec(Model):
    """A store of KV that replicas share: objects of an S3-compatible service, or files on a volume that all of them mount.
    Nothing deletes what is in it, so give the bucket a rule that deletes old objects."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "self.url.startsWith('s3://') || !(has(self.endpoint) || has(self.region) || has(self.secretName))",
                _ONLY_S3,
            ),
            ("self.url.startsWith('file://') || !has(self.claimName)", _ONLY_FILES),
        )
    )

    url: str = Field(min_length=8, max_length=1024, pattern=_STORE_URL, json_schema_extra=restart())
    """Place of the objects: `s3://bucket/prefix`, or `file:///path`. In pods, a path is a directory of each node, which must
    exist there and belong to the pods' user (65532), unless `claimName` is given. The chart's `admission.writableHostPaths`
    lists the paths that are allowed."""
    endpoint: str | None = Field(
        default=None, max_length=1024, pattern=r"^https?://[^/@?#\s]+/?$", json_schema_extra=restart()
    )
    """Address of an S3-compatible service, e.g. `https://minio.example:9000`. Default: that of AWS."""
    region: str | None = Field(
        default=None, min_length=1, max_length=64, pattern=r"^[a-z0-9-]+$", json_schema_extra=restart()
    )
    """Region of the bucket. Default: that of the variable `AWS_REGION`, else `us-east-1`."""
    secret_name: Name | None = Field(default=None, json_schema_extra=restart())
    """Secret in the replica's namespace with the keys `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY` and, if needed,
    `AWS_SESSION_TOKEN`. Default: the credentials that the pod has otherwise. `medha up` ignores it, and takes these variables
    from its environment."""
    claim_name: Name | None = Field(default=None, json_schema_extra=restart())
    """PersistentVolumeClaim in the replica's namespace that holds the files of a `file://` url. All pods of all replicas that
    share the store must be able to write to its volume (`ReadWriteMany`). `medha up` ignores it."""
    bandwidth: Quantity = Field(default="256Mi", json_schema_extra=restart())
    """Bytes per second that a rank reads from the store, e.g. `256Mi`: by this the first reads are predicted. Measured reads
    correct it."""

    @property
    def is_files(self) -> bool:
        """True if the store is a directory."""
        return self.url.startswith("file://")

    @property
    def directory(self) -> str:
        """Path of a store of files."""
        return self.url.removeprefix("file://").rstrip("/")

    @field_validator("bandwidth")
    @classmethod
    def _bandwidth_is_above_zero(cls, bandwidth: str) -> str:
        return _above_zero(bandwidth, "store")

    @model_validator(mode="after")
    def _fields_of_the_url(self) -> StoreSpec:
        if self.is_files and (self.endpoint or self.region or self.secret_name):
            raise ValueError(f"{_ONLY_S3} (found url {self.url})")
        if self.claim_name is not None and not self.is_files:
            raise ValueError(f"{_ONLY_FILES} (found url {self.url})")
        if ".." in self.url.split("/"):
            raise ValueError(f"url must not contain '..' (found {self.url}); give the path itself")
        return self


def _above_zero(bandwidth: str, field: str) -> str:
    """Return a bandwidth, if it is one.

    Raises:
        ValueError: it is 0.
    """
    if quantity_bytes(bandwidth) == 0:
        raise ValueError(
            f"must be above 0 (found {bandwidth}); give bytes per second such as 256Mi, or leave {field} out"
        )
    return bandwidth


class KvTiersSpec(Model):
    """Places for KV that is evicted from the device, and fetched from there instead of being computed again
    (docs/kv-tiers.md)."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            ("!has(self.disk) || has(self.host)", _DISK_NEEDS_HOST),
            ("!has(self.peers) || has(self.host)", _PEERS_NEED_HOST),
            ("!has(self.store) || has(self.host)", _STORE_NEEDS_HOST),
        )
    )

    host: HostTierSpec | None = None
    """Memory of the host, beside the device's. Default: none, so evicted KV is forgotten."""
    disk: DiskTierSpec | None = None
    """Files behind the memory of the host. Default: none, so KV of the host tier is lost with it."""
    peers: PeersSpec | None = None
    """Other replicas that have the KV. Default: none, so each replica computes what it lacks."""
    store: StoreSpec | None = None
    """Objects or files that replicas share. Default: none."""

    @model_validator(mode="after")
    def _others_have_a_host_tier(self) -> KvTiersSpec:
        if self.disk is not None and self.host is None:
            raise ValueError(_DISK_NEEDS_HOST)
        if self.peers is not None and self.host is None:
            raise ValueError(_PEERS_NEED_HOST)
        if self.store is not None and self.host is None:
            raise ValueError(_STORE_NEEDS_HOST)
        return self


class StreamingSpec(Model):
    """Host memory for requests that are larger than the KV pools: attention reads the first part of their KV from there in
    every step (docs/kv-tiers.md)."""

    size: Quantity = Field(json_schema_extra=restart())
    """Bytes per rank, e.g. `64Gi`, beside those of `tiers.host`: the KV of the largest request on this rank, without the part
    that the pool keeps."""

    @field_validator("size")
    @classmethod
    def _size_is_above_zero(cls, size: str) -> str:
        if quantity_bytes(size) == 0:
            raise ValueError(
                f"must be above 0 (found {size}); give bytes such as 64Gi, or leave streaming out"
            )
        return size


_TIERS_NEED_CACHING = (
    "kvCache.tiers keep cached prefixes, and prefixCaching is false; set it to true, or leave tiers out"
)


class KvCacheSpec(Model):
    """Memory for keys and values."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!has(self.tiers) || !has(self.tiers.host) || !has(self.prefixCaching) || self.prefixCaching",
                _TIERS_NEED_CACHING,
            )
        )
    )

    size: Quantity | None = Field(default=None, json_schema_extra=restart())
    """Bytes per rank, e.g. `2Gi`. Default: `memoryFraction` of the free memory."""
    memory_fraction: float = Field(default=0.8, gt=0, le=0.98, json_schema_extra=restart())
    """Share of the memory that is free after weights and a warm-up step. 0.8 leaves room for the overhead
    of the allocator."""
    dtype: KvDtype = Field(default="auto", json_schema_extra=restart())
    """Data type of keys and values in memory. `auto` keeps them in the model's data type. `fp8` rounds them to
    float8 (E4M3), a byte each, with one scale for each KV head and layer (docs/quantisation.md)."""
    block_size_tokens: int = Field(default=16, ge=1, le=1024, json_schema_extra=restart())
    """Tokens per block, the unit of allocation and of sharing."""
    tokens_per_lane: int = Field(default=524_288, ge=1, le=2**31 - 1, json_schema_extra=restart())
    """Prompt tokens of one request that a lane holds before the next lane joins (KVP). Shorter prompts
    stay on one lane."""
    prefix_caching: bool = Field(default=True, json_schema_extra=restart())
    """Keep the KV of finished prompts until its blocks are needed, and share it with prompts that begin
    with the same tokens."""
    tiers: KvTiersSpec | None = Field(default=None, json_schema_extra=restart())
    """Places for KV whose blocks are needed. Default: none, so it is forgotten."""
    streaming: StreamingSpec | None = Field(default=None, json_schema_extra=restart())
    """Host memory for requests that are larger than the KV pools. Default: none, so they are refused. Every step of such a
    request takes at least as long as it takes to read its KV from there."""

    @property
    def host_bytes(self) -> int:
        """Bytes of the host tier of each rank; 0: there is none."""
        return 0 if self.tiers is None or self.tiers.host is None else quantity_bytes(self.tiers.host.size)

    @property
    def streaming_bytes(self) -> int:
        """Bytes from which each rank streams KV; 0: it streams none."""
        return 0 if self.streaming is None else quantity_bytes(self.streaming.size)

    @property
    def disk(self) -> DiskTierSpec | None:
        """The disk tier; None: there is none."""
        return None if self.tiers is None else self.tiers.disk

    @property
    def disk_bytes(self) -> int:
        """Bytes of the disk tier of each rank; 0: there is none."""
        return 0 if self.disk is None else quantity_bytes(self.disk.size)

    @property
    def peers(self) -> PeersSpec | None:
        """Settings of the exchange of KV with other replicas; None: this replica neither reads KV from others nor offers its own."""
        return None if self.tiers is None else self.tiers.peers

    @property
    def store(self) -> StoreSpec | None:
        """The store that replicas share; None: there is none."""
        return None if self.tiers is None else self.tiers.store

    @model_validator(mode="after")
    def _tiers_keep_prefixes(self) -> KvCacheSpec:
        if self.host_bytes and not self.prefix_caching:
            raise ValueError(_TIERS_NEED_CACHING)
        return self


_DRAFT_MODEL_BY_METHOD = (
    "speculation.draftModel is given if, and only if, method is draftModel; name the checkpoint of a smaller model, or "
    "choose another method"
)


_HEAD_BY_METHOD = (
    "speculation.predictionHead is given if, and only if, method is predictionHead; set predictionHead.kind, or choose "
    "another method"
)


_HEAD_SOURCE_BY_KIND = (
    "predictionHead.source is given if, and only if, kind is eagle3; name the head's checkpoint, or set kind to mtp for "
    "the layer that the model's own checkpoint has"
)


class PredictionHeadSpec(Model):
    """Layers behind the model's last one that predict further tokens of its hidden states."""

    model_config = ConfigDict(
        json_schema_extra=rules(("has(self.source) == (self.kind == 'eagle3')", _HEAD_SOURCE_BY_KIND))
    )

    kind: Literal["mtp", "eagle3"] = Field(json_schema_extra=restart())
    """Kind of the head. `mtp` is the first MTP layer that the checkpoint itself has, as DeepSeek-V3's does
    (`num_nextn_predict_layers`). `eagle3` is an EAGLE-3 head, which has a checkpoint of its own and was trained for this
    model."""
    source: DraftSource | None = Field(default=None, json_schema_extra=restart())
    """Checkpoint of the head. `kind` must be `eagle3`."""

    @model_validator(mode="after")
    def _kind_has_its_source(self) -> PredictionHeadSpec:
        if (self.source is not None) != (self.kind == "eagle3"):
            found = "without" if self.source is None else "with"
            raise ValueError(f"{_HEAD_SOURCE_BY_KIND} (found kind {self.kind} {found} source)")
        return self


class SpeculationSpec(Model):
    """Speculative decoding: tokens that are guessed, and verified several in a step. It changes no text
    (docs/speculation.md)."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            ("has(self.draftModel) == (self.method == 'draftModel')", _DRAFT_MODEL_BY_METHOD),
            ("has(self.predictionHead) == (self.method == 'predictionHead')", _HEAD_BY_METHOD),
        )
    )

    method: Literal["none", "promptLookup", "draftModel", "predictionHead"] = Field(
        default="none", json_schema_extra=epoch()
    )
    """Method by which tokens are guessed. `promptLookup` takes what follows the last tokens where they occur in
    the prompt, the output, or outputs of earlier requests already, so it pays for texts that quote or repeat; it loads nothing. `draftModel` takes
    what a smaller model would write. `predictionHead` goes on from the model's own hidden states, with layers that were
    trained for it. `none` guesses nothing."""
    draft_model: DraftSource | None = Field(default=None, json_schema_extra=restart())
    """Checkpoint of the smaller model, with the served model's tokenizer. The rank that samples loads it, too; its
    memory and that of its KV count there. `method` must be `draftModel`, and `parallelism.kv` 1."""
    prediction_head: PredictionHeadSpec | None = Field(default=None, json_schema_extra=restart())
    """The prediction head, which the rank that samples loads, too; its memory and that of its KV count there. `method` must
    be `predictionHead`, and `parallelism.kv` 1."""
    max_draft_tokens: int = Field(default=4, ge=1, le=16, json_schema_extra=epoch())
    """Largest number of guessed tokens of a sequence that a step verifies. How many it does verify follows
    from how often they are right, the load, and the deadlines."""

    @property
    def draws(self) -> bool:
        """True if the rank that samples draws guesses, as many as steps ask for."""
        return self.method in ("draftModel", "predictionHead")

    @property
    def source(self) -> DraftSource | None:
        """The source of the checkpoint of the draft model or head; None without one."""
        head = self.prediction_head
        return self.draft_model if head is None else head.source

    @property
    def eagle3(self) -> bool:
        """True if guesses are drawn by an EAGLE-3 head."""
        return self.prediction_head is not None and self.prediction_head.kind == "eagle3"

    @model_validator(mode="after")
    def _method_has_its_model(self) -> SpeculationSpec:
        if (self.draft_model is not None) != (self.method == "draftModel"):
            found = "without" if self.draft_model is None else "with"
            raise ValueError(f"{_DRAFT_MODEL_BY_METHOD} (found method {self.method} {found} draftModel)")
        if (self.prediction_head is not None) != (self.method == "predictionHead"):
            found = "without" if self.prediction_head is None else "with"
            raise ValueError(f"{_HEAD_BY_METHOD} (found method {self.method} {found} predictionHead)")
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

    name: str = Field(
        min_length=1, max_length=63, pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", json_schema_extra=epoch()
    )
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
    max_body_bytes: Quantity = "64Mi"
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

    endpoint: str | None = Field(
        default=None, max_length=1024, pattern=ENDPOINT_PATTERN, json_schema_extra=restart()
    )
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
_DRAFTS_ON_ONE_LANE = (
    "scheduling.speculation.method draftModel or predictionHead needs parallelism.kv 1, because a draft model or head "
    "computes on one lane; set parallelism.kv to 1, or method to promptLookup"
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
                "serviceClasses has `default` behind the first, which is the default; move it up",
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
                "!(self.scheduling.speculation.method in ['draftModel', 'predictionHead']) || self.parallelism.kv == 1",
                _DRAFTS_ON_ONE_LANE,
            ),
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
    """Phases of requests that the replica serves. `prefill` computes prompts and draws the first token; then the router
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
    """Promise about the numbers of a request. `bestEffort`: sampling is keyed by seed and position, and matrix products and
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
    def _draft_model_has_one_lane(self) -> MedhaReplicaSpec:
        if self.scheduling.speculation.draws and self.parallelism.kv > 1:
            raise ValueError(f"{_DRAFTS_ON_ONE_LANE} (found {self.parallelism.kv})")
        return self

    @model_validator(mode="after")
    def _streams_what_it_can(self) -> MedhaReplicaSpec:
        if self.kv_cache.streaming is None:
            return self
        if self.determinism == "batchInvariant":
            raise ValueError(_STREAMS_BEST_EFFORT)
        if self.scheduling.speculation.draws:
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
    name: str = Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")
    namespace: str = "default"


class MedhaReplica(Model):
    """Serves one model on one grid of ranks, under one controller."""

    api_version: Literal["medha.dev/v1alpha1"]
    kind: Literal["MedhaReplica"]
    metadata: ObjectMeta
    spec: MedhaReplicaSpec


Surge = Annotated[int, Field(ge=0, le=10_000)] | Annotated[str, Field(pattern=r"^[0-9]{1,3}%$")]
"""A number of replicas, or a share of them such as `25%`."""


class RolloutSpec(Model):
    """Rollout of a change to the replicas of a deployment: whole replicas at a time, never two revisions
    in one."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "[self.maxSurge, self.maxUnavailable].exists(n, type(n) == int ? n != 0 : n != '0%')",
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
        if str(self.max_surge).rstrip("%") == "0" and str(self.max_unavailable).rstrip("%") == "0":
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


Parsed = TypeVar("Parsed", MedhaReplica, MedhaDeployment)


def parse_replica(document: object) -> MedhaReplica:
    """Return a `MedhaReplica` from a parsed YAML or JSON document.

    Raises:
        ConfigInvalid: names every wrong field, its value and what was expected.
    """
    return _parsed(MedhaReplica, document)


def parse_deployment(document: object) -> MedhaDeployment:
    """Return a `MedhaDeployment` from a parsed YAML or JSON document.

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
