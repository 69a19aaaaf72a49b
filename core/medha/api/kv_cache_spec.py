"""`spec.kvCache` of a replica: the KV on devices, and the tiers for KV that is evicted."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from medha.api.fields import (
    SIZE_RULES,
    AbsolutePath,
    Model,
    Name,
    QuantityAboveZero,
    quantity_bytes,
    restart,
    rules,
    written_as,
)
from medha.model.kv_dtype import KvDtype


class HostTierSpec(Model):
    """Host memory for KV that is evicted from the device."""

    size: QuantityAboveZero = Field(json_schema_extra=restart() | rules(*SIZE_RULES))
    """Bytes per rank, e.g. `16Gi`: the `kvCache.size` of each rank several times over."""


_ONE_DISK = "kvCache.tiers.disk takes at most one of claimName and hostPath"
_DISK_NEEDS_HOST = "kvCache.tiers.disk is filled from the host tier, and read into it; add kvCache.tiers.host, or leave disk out"


class DiskTierSpec(Model):
    """Files for KV of the host tier, which outlive it. Default: on an ephemeral volume of each pod's own, so they outlive
    restarts of its containers."""

    model_config = ConfigDict(
        json_schema_extra=rules(("!(has(self.claimName) && has(self.hostPath))", _ONE_DISK))
    )

    size: QuantityAboveZero = Field(json_schema_extra=restart() | rules(*SIZE_RULES))
    """Bytes per rank, e.g. `200Gi`: several times the size of the host tier."""
    claim_name: Name | None = Field(default=None, json_schema_extra=restart())
    """Name of a PersistentVolumeClaim in the replica's namespace, whose files outlive pods. Its volume must be writable
    from every node that pods run on (`ReadWriteMany`, if they are several). `medha up` ignores it."""
    host_path: AbsolutePath | None = Field(default=None, json_schema_extra=restart())
    """Absolute path of a directory, whose files outlive pods that come back to their node. It must exist on every node, and
    belong to the pods' user (65532). The chart's `admission.writableHostPaths` lists the paths that are allowed. `medha
    up` keeps the files there, too."""

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

    bandwidth: QuantityAboveZero = Field(default="256Mi", json_schema_extra=restart() | rules(*SIZE_RULES))
    """Bytes per second that a rank reads of a rank of another replica, encrypted, e.g. `256Mi`: by this the first reads are
    predicted. Measured reads correct it."""

    plane: PeerPlane = Field(default="sockets", json_schema_extra=restart())
    """Transport of KV between ranks. `sockets`: encrypted sockets. `nixl`: NIXL with UCX, for networks that nobody else uses: it
    encrypts no KV. It needs the package `nixl` in the image, and ports that this operator does not open. Ranks that lack it use
    sockets."""


_STORE_NEEDS_HOST = "kvCache.tiers.store is filled from the host tier, and read into it; add kvCache.tiers.host, or leave store out"
_ONLY_S3 = "kvCache.tiers.store: endpoint, region and secretName are of an s3:// url; remove them, or give such a url"
_ONLY_FILES = (
    "kvCache.tiers.store: claimName is of a file:// url; remove it, or give a url such as file:///mnt/kv"
)
_STORE_URL = r"^(s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9._=-]+)*/?|file://(/[A-Za-z0-9._=-]+)+/?)$"
_A_STORE = (
    "must be the address of a store; write s3://BUCKET/PREFIX, or file:// with an absolute path, such as file:///mnt/kv, of "
    "letters, digits and . _ = - alone"
)


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

    url: Annotated[str, Field(min_length=8, max_length=1024, pattern=_STORE_URL), written_as(_A_STORE)] = (
        Field(json_schema_extra=restart() | rules((f"self.matches(r'{_STORE_URL}')", _A_STORE)))
    )
    """Place of the objects: `s3://bucket/prefix`, or `file:///path`. In pods, a path is a directory of each node, which must
    exist there and belong to the pods' user (65532), unless `claimName` is given. The chart's `admission.writableHostPaths`
    lists the paths that are allowed."""
    endpoint: (
        Annotated[
            str,
            Field(max_length=1024, pattern=r"^https?://[^/@?#\s]+/?$"),
            written_as("must be http:// or https:// and a host, such as https://minio.example:9000"),
        ]
        | None
    ) = Field(default=None, json_schema_extra=restart())
    """Address of an S3-compatible service, e.g. `https://minio.example:9000`. Default: that of AWS."""
    region: (
        Annotated[
            str,
            Field(min_length=1, max_length=64, pattern=r"^[a-z0-9-]+$"),
            written_as("must be the name of a region, such as eu-central-1"),
        ]
        | None
    ) = Field(default=None, json_schema_extra=restart())
    """Region of the bucket. Default: that of the variable `AWS_REGION`, else `us-east-1`."""
    secret_name: Name | None = Field(default=None, json_schema_extra=restart())
    """Secret in the replica's namespace with the keys `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY` and, if needed,
    `AWS_SESSION_TOKEN`. Default: the credentials that the pod has otherwise. `medha up` ignores it, and takes these variables
    from its environment."""
    claim_name: Name | None = Field(default=None, json_schema_extra=restart())
    """PersistentVolumeClaim in the replica's namespace that holds the files of a `file://` url. All pods of all replicas that
    share the store must be able to write to its volume (`ReadWriteMany`). `medha up` ignores it."""
    bandwidth: QuantityAboveZero = Field(default="256Mi", json_schema_extra=restart() | rules(*SIZE_RULES))
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

    @model_validator(mode="after")
    def _fields_of_the_url(self) -> StoreSpec:
        if self.is_files and (self.endpoint or self.region or self.secret_name):
            raise ValueError(f"{_ONLY_S3} (found url {self.url})")
        if self.claim_name is not None and not self.is_files:
            raise ValueError(f"{_ONLY_FILES} (found url {self.url})")
        if ".." in self.url.split("/"):
            raise ValueError(f"url must not contain '..' (found {self.url}); give the path itself")
        return self


_NO_TIER = "kvCache.tiers names no tier, so it would do nothing; add kvCache.tiers.host, or leave tiers out"


class KvTiersSpec(Model):
    """Places for KV that is evicted from the device, and fetched from there instead of being computed again
    (docs/kv-tiers.md)."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            ("has(self.host) || has(self.disk) || has(self.peers) || has(self.store)", _NO_TIER),
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
        if all(tier is None for tier in (self.host, self.disk, self.peers, self.store)):
            raise ValueError(_NO_TIER)
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

    size: QuantityAboveZero = Field(json_schema_extra=restart() | rules(*SIZE_RULES))
    """Bytes per rank, e.g. `64Gi`, beside those of `tiers.host`: the KV of the largest request on this rank, without the part
    that the pool keeps."""


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

    size: QuantityAboveZero | None = Field(default=None, json_schema_extra=restart() | rules(*SIZE_RULES))
    """Bytes per rank, e.g. `2Gi`. Default: `memoryFraction` of the free memory."""
    memory_fraction: float = Field(default=0.8, gt=0, le=0.98, json_schema_extra=restart())
    """Share of the memory that is free after weights and a warm-up step. 0.8 leaves room for the overhead
    of the allocator."""
    dtype: KvDtype = Field(default="auto", json_schema_extra=restart())
    """Data type of keys and values in memory. `auto` keeps them in the model's data type. `fp8` rounds them to
    float8 (E4M3), a byte each, with one scale for each KV head and layer: those of the checkpoint, or measured
    by `medha model kv-scales`, or derived from the weights (docs/quantisation.md)."""
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
