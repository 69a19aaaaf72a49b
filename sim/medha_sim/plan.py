"""Find the TP x SPP x KVP grid that serves a model and context length within TTFT and TPOT targets.

Every grid up to a number of GPUs is rated with the same predictor that schedules: the TTFT of a lone prompt
in adaptive chunks whose steps stay within the TPOT target (so that decodes in the same steps meet theirs),
the TPOT of a decode batch at full context, and the memory of KV and weights. The plan is the grid with the
fewest GPUs that meets everything; among equals, the one that is cheaper per token.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil, inf
from pathlib import Path
from typing import Any

import numpy as np

from medha.api.kv_cache_spec import KvCacheSpec
from medha.api.replica import SchedulingSpec
from medha.cost.hardware import ExpertShape, Hardware, ModelShape, profile_for
from medha.cost.predictor import TOKENS_PER_LANE, Predictor, Work
from medha.cost.tier_seconds import TierSeconds
from medha.errors import CheckpointInvalid, ConfigInvalid, ModelUnsupported
from medha.kv.disk_tier import FILE_BLOCKS
from medha.kv.store_tier import object_blocks
from medha.kv.window_tables import CACHED_WINDOW_PART, frees_windows, window_need
from medha.model.config_fields import TEXT_CONFIGS, same_model_type, text_fields
from medha.model.latent_shape import LatentShape
from medha.model.linear_sizes import ExpertNames, LinearSizes, SparseBlock
from medha.model.quantisation import LINEAR_METHODS, Quantisation, decode
from medha.topology import Topology
from medha.wire.messages import DiskTierFigures, HostTierFigures
from medha_sim.head_shape import HeadShape

_LARGEST_CHUNK = 8192
_CHUNKS = tuple(
    size
    for step in (32, 64, 128, 256, 512, 1024)  # 32 to 8,192 tokens, four steps to each doubling
    for size in range(step, 8 * step + 1, step)
    if size >= 5 * step or step == 32
)
_EXPERT_FIELDS = {
    "mixtral": (("num_local_experts",), "intermediate_size"),
    "qwen3_moe": (("num_experts", "num_local_experts"), "moe_intermediate_size"),
    "deepseek_v2": (("n_routed_experts", "num_experts"), "moe_intermediate_size"),
    "deepseek_v3": (("n_routed_experts", "num_local_experts"), "moe_intermediate_size"),
    "gpt_oss": (("num_local_experts", "num_experts"), "intermediate_size"),
}
"""Fields with the number of experts, and with the width of one, of the model types that have experts."""
_EXPERT_METHODS = {"gpt_oss": ("mxfp4",)}
"""The methods in which a model type may be quantised, if they are not those of dense models."""
_EXPERT_NAMES = {"mixtral": ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2"), "gpt_oss": None}
"""Names of the linears of experts where they are not the usual ones (`ExpertNames()`); None: one tensor holds the
linears of all experts."""
_LATENT = ("deepseek_v2", "deepseek_v3")
"""Model types with latent attention. Their first layers are dense, and their experts have a shared one beside them."""
_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", *TEXT_CONFIGS, *_EXPERT_FIELDS)


@dataclass(frozen=True, slots=True)
class _Windows:
    """The fields of a model type that say which layers have a window, with the defaults of `transformers`."""

    tokens: int | None  # if `sliding_window` is missing
    has_switch: bool = False  # `use_sliding_window` must be true
    first_layer: int | None = None  # if `max_window_layers` is missing; None: the field is not read
    full_layer_interval: int | None = None  # one layer of so many has none; None: layers do not alternate
    reads_interval: bool = False  # `sliding_window_pattern` gives another interval


_WINDOWS = {
    "mistral": _Windows(4096),
    "mixtral": _Windows(None),
    "qwen2": _Windows(4096, has_switch=True, first_layer=28),
    "qwen3": _Windows(4096, has_switch=True, first_layer=28),
    "qwen3_moe": _Windows(4096, has_switch=True),
    "gemma3_text": _Windows(4096, full_layer_interval=6, reads_interval=True),
    "gpt_oss": _Windows(128, full_layer_interval=2),
}
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_BLOCK_TOKENS = KvCacheSpec().block_size_tokens
_GRID_POINTS = 33  # contexts at which the speed of a prefill is evaluated
_LONGEST_BATCH = 1 << 16
DISK_BYTES_PER_SECOND = float(2**30)
"""Bytes that a rank reads from its disk by default: an assumption. An NVMe disk reads some seven times as much, and the eight
ranks of a node share it."""
DISK_ACCESS_SECONDS = 0.0005
"""Time of each read of a file, however small: an assumption."""
MOST_GPUS = 1 << 16  # size of the largest grid that is considered
_TIMES_MORE = 8  # if no grid fits, grids of up to this many times the GPUs are searched for a suggestion


@dataclass(frozen=True, slots=True)
class Wish:
    """The requests to serve, their targets, and the hardware budget."""

    context_tokens: int  # length of the prompt
    output_tokens: int = 512
    ttft_seconds: float = 30.0
    tpot_seconds: float = 0.05
    concurrent: int = 1  # requests of this length at the same time
    gpu_hour_price: float = 2.5
    memory_fraction: float = 0.9  # of a GPU's memory, for weights, activations and KV
    max_gpus: int = 128
    # The draft model or head; on each lane, one GPU of the last stage holds its weights and KV.
    draft: ModelShape | HeadShape | None = None
    prefix_caching: bool = True  # False: layers with a window need no room for windows of cached prefixes
    host_bytes: int = 0  # of the host tier of each rank; 0: there is none
    disk_bytes: int = 0  # of the disk tier of each rank; 0: there is none
    disk_bytes_per_second: float = DISK_BYTES_PER_SECOND  # that a rank reads
    store_bytes_per_second: float = 0.0  # that a rank reads of a store that replicas share; 0: there is none
    streaming_bytes: int = 0  # host memory of each rank for a request larger than the pools; 0: there is none

    def __post_init__(self) -> None:
        for name in ("context_tokens", "output_tokens", "concurrent", "max_gpus"):
            if getattr(self, name) < 1:
                raise ConfigInvalid(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("ttft_seconds", "tpot_seconds", "gpu_hour_price"):
            if not 0 < getattr(self, name) < inf:
                raise ConfigInvalid(f"{name} is {getattr(self, name)}; it must be above 0")
        if not 0 < self.memory_fraction <= 1:
            raise ConfigInvalid(f"memory_fraction is {self.memory_fraction}; it must lie in (0, 1]")
        if self.host_bytes and not self.prefix_caching:
            raise ConfigInvalid(
                f"host_bytes is {self.host_bytes} and prefix_caching is false; a host tier keeps cached prefixes, so leave out "
                "the one or the other"
            )
        for name in ("disk_bytes", "store_bytes_per_second"):
            if getattr(self, name) and not self.host_bytes:
                raise ConfigInvalid(
                    f"{name} is {getattr(self, name):g} and host_bytes is 0; all KV of disks and stores passes through a host "
                    "tier, so give its size, too (--host-tier)"
                )

    @property
    def request_tokens(self) -> int:
        return self.context_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Rating:
    """The rating of a grid for a wish. Bytes are per GPU unless noted otherwise."""

    topology: Topology
    ttft_seconds: float  # of a lone prompt
    tpot_seconds: float  # in a batch of `batch` or `concurrent` requests, whichever is larger
    batch: int  # most such requests that memory and the TPOT target allow; 0 if not even one
    weights_bytes: float
    kv_bytes: float  # of `concurrent` requests
    kv_room_bytes: float
    kv_tokens: int  # capacity of the whole replica
    host_tokens: int  # capacity of the host tiers of all lanes, for KV that is evicted
    disk_tokens: int  # capacity of the disk tiers of all lanes
    # Until the KV of the whole prompt has come from the host tier; None: it is not there as a whole.
    host_seconds: float | None
    disk_seconds: float | None  # from the disk tier, through the host tier
    store_seconds: float | None  # from a store that replicas share, through the host tier
    longest_tokens: int  # of one request, with what can be streamed
    streamed_tokens: int  # of the wish's request; 0: the pools hold it
    longest_step_seconds: (
        float  # least time of each step of the longest request: all that can be streamed, on the host's link
    )
    offload_bytes: float  # on all GPUs together, what does not fit and would have to move to host memory
    cost_per_million_input: float
    cost_per_million_output: float
    misses: tuple[str, ...]  # what the grid fails on: memory, TTFT, TPOT

    @property
    def gpus(self) -> int:
        return self.topology.ranks

    @property
    def fits(self) -> bool:
        return not self.misses


@dataclass(frozen=True, slots=True)
class Bounds:
    """Lower bounds on the number of GPUs, one for each resource alone (paper A Fig. 2)."""

    context_tokens: int
    compute: int  # to execute the prompt's causal FLOPs at peak within the TTFT
    memory: int  # to hold the weights once, and KV
    bandwidth: int  # to read weights, and the KV that a token sees, once within the TPOT
    planned: int | None  # size of the smallest grid that serves the wish; None if none does

    @property
    def binding(self) -> str:
        """Name of the resource that needs the most GPUs."""
        amounts = {"compute": self.compute, "memory": self.memory, "bandwidth": self.bandwidth}
        return max(amounts, key=lambda name: amounts[name])


def grids(model: ModelShape, hardware: Hardware, max_gpus: int) -> Iterator[Topology]:
    """Yield all grids of at most `max_gpus` GPUs.

    Tensor parallelism stays within a node; stages and lanes are powers of two.
    """
    tensors = [
        size
        for size in (1, 2, 4, 8, 16)
        if size <= hardware.devices_per_node
        and model.query_heads % size == 0
        and (model.kv_heads % size == 0 or size % model.kv_heads == 0)
        and all(width % size == 0 for width in model.mlp_widths)
    ]
    for tensor in tensors:
        for stream in _powers(min(model.layers, max_gpus // tensor)):
            for kv in _powers(max_gpus // (tensor * stream)):
                yield Topology(tensor, stream, kv)


def rate(model: ModelShape, hardware: Hardware, topology: Topology, wish: Wish) -> Rating:
    """Rate how `topology` serves `wish`. Bytes are those of the GPU that samples, which also holds a draft model or head."""
    pace = _Pace(model, hardware, Topology(topology.tensor, topology.stream, topology.kv))
    ranks_of_lane = topology.tensor * topology.stream
    token_bytes = _token_bytes(model, topology)
    in_windows_bytes = model.window_share * token_bytes  # a draft model or head keeps all of its KV
    copied = model.copied_bytes * (topology.tensor - 1)
    weights = (model.weights_bytes + copied) / ranks_of_lane
    if wish.draft is not None:
        weights += wish.draft.weights_bytes
        token_bytes += wish.draft.kv_bytes_per_token / topology.kv
    sent_token_bytes = token_bytes  # in files and in the store
    if isinstance(wish.draft, ModelShape):  # which ranks keep in memory alone
        sent_token_bytes -= wish.draft.kv_bytes_per_token / topology.kv
    beside_weights = (
        wish.memory_fraction * hardware.memory_bytes - weights - _activation_bytes(model, topology)
    )
    room = max(0.0, beside_weights)
    kv_tokens, kv = _kv_pool(model, topology, wish, room, token_bytes, in_windows_bytes)
    offload = max(0.0, kv - beside_weights) * topology.ranks
    kept_tokens = int((1 - SchedulingSpec().short_headroom) * kv_tokens)
    streaming_tokens = _in_whole_blocks(wish.streaming_bytes, token_bytes, topology)
    longest_tokens = max(kv_tokens, kept_tokens + streaming_tokens if kept_tokens else 0)

    ttft = pace.prefill_seconds(wish.context_tokens, wish.tpot_seconds)
    batch = pace.largest_batch(wish.request_tokens, wish.tpot_seconds, kv_tokens // wish.request_tokens)
    tpot = pace.decode_seconds(wish.request_tokens, max(batch, wish.concurrent))
    streamed_tokens = 0
    if wish.concurrent == 1 and kv_tokens < wish.request_tokens <= longest_tokens:
        streamed_tokens = wish.request_tokens - kept_tokens
        stream_seconds = streamed_tokens * token_bytes / hardware.host_link_bytes_per_second
        chunks = -(-wish.context_tokens // SchedulingSpec().max_chunk_tokens)
        # The first chunks find less to stream than the last ones.
        share = 1 - min(streamed_tokens, wish.context_tokens) / (2 * wish.context_tokens)
        tpot, ttft, offload = max(tpot, stream_seconds), max(ttft, chunks * share * stream_seconds), 0.0
        batch = int(tpot <= wish.tpot_seconds)
    # Streamed KV is in no tier.
    fetched = (
        _Fetched()
        if streamed_tokens
        else _fetched(pace, hardware, topology, wish, token_bytes, sent_token_bytes)
    )
    price = wish.gpu_hour_price * topology.ranks / 3600
    misses = []
    if offload > 0:
        misses.append("memory")
    if ttft > wish.ttft_seconds:
        misses.append("TTFT")
    if (streamed_tokens and tpot > wish.tpot_seconds) or (
        batch < wish.concurrent
        and pace.decode_seconds(wish.request_tokens, wish.concurrent) > wish.tpot_seconds
    ):
        misses.append("TPOT")
    return Rating(
        topology=topology,
        ttft_seconds=ttft,
        tpot_seconds=tpot,
        batch=batch,
        weights_bytes=weights,
        kv_bytes=kv,
        kv_room_bytes=room,
        kv_tokens=kv_tokens,
        host_tokens=_in_whole_blocks(wish.host_bytes, token_bytes, topology),
        disk_tokens=_in_whole_blocks(wish.disk_bytes, sent_token_bytes, topology),
        host_seconds=fetched.host_seconds,
        disk_seconds=fetched.disk_seconds,
        store_seconds=fetched.store_seconds,
        longest_tokens=longest_tokens,
        streamed_tokens=streamed_tokens,
        longest_step_seconds=streaming_tokens * token_bytes / hardware.host_link_bytes_per_second,
        offload_bytes=offload,
        cost_per_million_input=price * ttft / wish.context_tokens * 1e6,
        cost_per_million_output=price
        * pace.decode_seconds(wish.request_tokens, max(batch, 1))
        / max(batch, 1)
        * 1e6,
        misses=tuple(misses),
    )


def _token_bytes(model: ModelShape, topology: Topology) -> float:
    """Return the bytes of a token's KV on each GPU, averaged over the lanes."""
    copies = max(1, topology.tensor // model.kv_heads)  # KV heads are replicated if there are more ranks
    return model.kv_bytes_per_token * copies / topology.ranks


def _in_whole_blocks(size_bytes: int, token_bytes: float, topology: Topology) -> int:
    """Return the tokens of the whole blocks that memory of this size on each GPU holds, of all lanes."""
    lane_block_tokens = _BLOCK_TOKENS * topology.kv
    return int(size_bytes / (token_bytes * lane_block_tokens)) * lane_block_tokens


def _require_blocks(model: ModelShape, topologies: Sequence[Topology], wish: Wish) -> None:
    """Check that what is kept beside the pools holds a block of KV on some grid.

    Raises:
        ConfigInvalid: names the option that is too small.
    """
    least = min(ceil(_token_bytes(model, grid) * _BLOCK_TOKENS * grid.kv) for grid in topologies)
    for option, size_bytes in (
        ("--host-tier", wish.host_bytes),
        ("--disk-tier", wish.disk_bytes),
        ("--streaming", wish.streaming_bytes),
    ):
        if 0 < size_bytes < least:
            raise ConfigInvalid(
                f"{option} is {size_bytes:,} bytes, and a block of {_BLOCK_TOKENS} tokens takes {least:,} bytes or more of a GPU "
                f"on grids of up to {wish.max_gpus} GPUs; raise it"
            )


@dataclass(frozen=True, slots=True)
class _Fetched:
    """Seconds until the KV of a prompt has come from each tier; None: it is not there as a whole."""

    host_seconds: float | None = None
    disk_seconds: float | None = None
    store_seconds: float | None = None


def _fetched(
    pace: _Pace,
    hardware: Hardware,
    topology: Topology,
    wish: Wish,
    token_bytes: float,
    sent_token_bytes: float,
) -> _Fetched:
    """Predict how long the KV of the wish's prompt takes to come from each tier, as the controller predicts it at first.

    A token takes `token_bytes` on a rank, and `sent_token_bytes` in files or in the store, averaged over the lanes, each of which
    has its part of the prompt.
    """
    block_bytes, sent_block_bytes = (
        each * _BLOCK_TOKENS * topology.kv for each in (token_bytes, sent_token_bytes)
    )
    blocks = -(-wish.context_tokens // (_BLOCK_TOKENS * topology.kv))
    host_blocks, disk_blocks = int(wish.host_bytes / block_bytes), int(wish.disk_bytes / sent_block_bytes)
    if host_blocks < blocks:  # it does not hold the prompt, and what comes from the others passes through it
        return _Fetched()
    copy_seconds = block_bytes / hardware.host_link_bytes_per_second
    host = HostTierFigures(host_blocks, int(block_bytes), copy_seconds, copy_seconds)
    disk = DiskTierFigures(disk_blocks, DISK_ACCESS_SECONDS, sent_block_bytes / wish.disk_bytes_per_second)
    store_rate = wish.store_bytes_per_second
    times = TierSeconds(
        host, pace.predictor, disk, store_block_seconds=sent_block_bytes / store_rate if store_rate else 0.0
    )
    fetch_seconds = times.fetch_seconds(blocks)
    objects = -(-blocks // object_blocks(int(sent_block_bytes)))
    return _Fetched(
        fetch_seconds,
        times.load_seconds(blocks, -(-blocks // FILE_BLOCKS)) + fetch_seconds
        if disk_blocks >= blocks
        else None,
        times.store_seconds(blocks, objects) + fetch_seconds if store_rate else None,
    )


def _kv_pool(
    model: ModelShape,
    topology: Topology,
    wish: Wish,
    room_bytes: float,
    token_bytes: float,
    in_windows_bytes: float,
) -> tuple[int, float]:
    """Return the tokens that KV of `room_bytes` on each GPU holds, and the bytes that the wish's requests take of it.

    A token whose KV is kept in all layers takes `token_bytes`, of which `in_windows_bytes` are in layers with a window.
    As in a rank, these layers free the KV that is older than their window, if more tokens fit then. They keep windows
    of `maxRunning` sequences (of fewer, if all requests of the wish still run at a time), and of cached prefixes.
    """
    kept = int(room_bytes / token_bytes), wish.request_tokens * wish.concurrent * token_bytes
    windows = [model.window_tokens] if model.window_share else []
    if not frees_windows(windows, has_tiers=wish.host_bytes + wish.streaming_bytes > 0):
        return kept
    scheduling = SchedulingSpec()
    running = max(scheduling.max_running, wish.concurrent)
    need = window_need(
        model.window_tokens,
        block_size_tokens=_BLOCK_TOKENS,
        max_running=running,
        max_chunk_tokens=scheduling.max_chunk_tokens,
        max_model_len=wish.request_tokens,
        stages=topology.stream,
        lanes=topology.kv,
    )
    whole_bytes = token_bytes - in_windows_bytes  # of a token, in layers without a window
    cached_bytes = in_windows_bytes / CACHED_WINDOW_PART if wish.prefix_caching else 0.0
    whole_blocks = kept[0] // (_BLOCK_TOKENS * topology.kv)  # of one lane
    for blocks in need.pools(running, whole_blocks, in_all_layers=not whole_bytes):
        window_bytes = (
            blocks * _BLOCK_TOKENS * in_windows_bytes * topology.kv
        )  # a window may lie on one lane alone
        left_bytes = room_bytes - window_bytes
        if left_bytes < 0 or need.places(blocks) < wish.concurrent:
            continue
        tokens = (
            int(left_bytes / (whole_bytes + cached_bytes)) if whole_bytes else running * wish.request_tokens
        )
        if tokens > kept[0]:
            return tokens, wish.request_tokens * wish.concurrent * whole_bytes + window_bytes
    return kept


def plan(model: ModelShape, hardware: Hardware, wish: Wish) -> list[Rating]:
    """Rate every grid and sort them, best first.

    Grids that serve the wish come first, by GPUs and cost; then the others, those that come closest first.

    Raises:
        ConfigInvalid: what is to be kept beside the pools does not hold a block of KV on any grid.
    """

    def place(rating: Rating) -> tuple[int, float, float]:
        if rating.fits:
            return 0, rating.gpus, rating.cost_per_million_input
        if rating.offload_bytes:
            return 2, rating.offload_bytes, rating.gpus
        times = rating.ttft_seconds / wish.ttft_seconds, rating.tpot_seconds / wish.tpot_seconds
        return 1, max(times), rating.gpus

    allowed = list(grids(model, hardware, wish.max_gpus))
    _require_blocks(model, allowed, wish)
    ratings = (rate(model, hardware, topology, wish) for topology in allowed)
    return sorted(ratings, key=place)


def bounds(
    model: ModelShape, hardware: Hardware, wish: Wish, contexts: Sequence[int], *, search: bool = True
) -> list[Bounds]:
    """Return the GPUs that each resource and the smallest grid need, over `contexts` (paper A Fig. 2)."""
    usable = wish.memory_fraction * hardware.memory_bytes
    rows = []
    for context in contexts:
        tokens = context + wish.output_tokens
        kept_tokens = tokens if wish.host_bytes or wish.streaming_bytes else model.seen_tokens(tokens)
        kv_bytes = model.kv_bytes_per_token * kept_tokens * wish.concurrent
        read_bytes = model.kv_bytes_per_token * model.seen_tokens(tokens) * wish.concurrent
        beside_bytes = wish.streaming_bytes if wish.concurrent == 1 else 0
        memory = ceil((model.weights_bytes + kv_bytes) / (usable + beside_bytes))
        planned = None
        if search and memory <= wish.max_gpus:
            planned = _fewest(model, hardware, replace(wish, context_tokens=context))
        rows.append(
            Bounds(
                context_tokens=context,
                compute=ceil(model.prefill_flops(context) / (wish.ttft_seconds * hardware.peak_flops)),
                memory=memory,
                bandwidth=ceil(
                    (model.weights_bytes + read_bytes)
                    / (wish.tpot_seconds * hardware.memory_bytes_per_second)
                ),
                planned=planned,
            )
        )
    return rows


def _fewest(model: ModelShape, hardware: Hardware, wish: Wish) -> int | None:
    """Return the GPUs of the smallest grid that serves the wish, or None."""
    ratings = (rate(model, hardware, grid, wish) for grid in _by_size(model, hardware, wish.max_gpus))
    return next((rating.gpus for rating in ratings if rating.fits), None)


def read_shape(config: Path) -> ModelShape:
    """Read the model's shape from a Hugging Face `config.json`, or from the folder that holds it.

    Raises:
        ConfigInvalid: the file cannot be read, a field is missing or invalid, or no replica serves such a
            model.
    """
    path = config / "config.json" if config.is_dir() else config
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigInvalid(
            f"model {config}: {error}; name a preset, a config.json or the folder that holds one"
        ) from error

    if not isinstance(values, dict):
        raise ConfigInvalid(
            f"{path}: is a JSON {type(values).__name__}, expected an object with the model's sizes"
        )

    values["model_type"] = same_model_type(values.get("model_type"))
    _refuse_unserved(path, values)
    values = text_fields(values)

    def field(name: str, default: int | None = None) -> int:
        value = default if values.get(name) is None else values[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigInvalid(f"{path}: {name} is {value!r}; it must be a positive whole number")
        return value

    heads = field("num_attention_heads")
    hidden = field("hidden_size")
    if heads % field("num_key_value_heads", heads):
        raise ConfigInvalid(
            f"{path}: num_key_value_heads is {values['num_key_value_heads']}; it must divide num_attention_heads ({heads})"
        )
    width = _DTYPE_BYTES[values.get("dtype") or values.get("torch_dtype") or "bfloat16"]
    layers, kv_heads = field("num_hidden_layers"), field("num_key_value_heads", heads)
    quantisation, sparse = _quantisation(path, values), _read_experts(path, values, field)
    intermediate, latent = field("intermediate_size"), None
    if values.get("model_type") in _LATENT:
        latent = _read_latent(values, field)
        kv_heads, head_dim = 1, latent.row_dim
    else:
        head_dim = field("head_dim", hidden // heads)
    linears = LinearSizes(
        layers, hidden, heads, heads * head_dim, kv_heads * head_dim, intermediate, latent, sparse
    )
    return ModelShape(
        name=path.parent.name or "model",
        layers=layers,
        hidden=hidden,
        query_heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=intermediate,
        vocab=field("vocab_size"),
        dtype_bytes=width,
        kv_dtype_bytes=width,
        tied_embeddings=bool(values.get("tie_word_embeddings", False)),
        layer_weight_bytes=linears.mean_bytes(quantisation, width),
        experts=None
        if sparse is None
        else ExpertShape(
            layers=len(sparse.layers),
            count=sparse.count,
            per_token=field("num_experts_per_tok"),
            intermediate=sparse.intermediate,
            shared_intermediate=sparse.shared_intermediate,
        ),
        expert_weight_bytes=linears.mean_expert_bytes(quantisation, width),
        **_read_windows(path, values, layers, field),
        latent=latent,
    )


def _read_latent(values: dict[str, Any], field: Callable[..., int]) -> LatentShape:
    return LatentShape(
        query_rank=0 if values.get("q_lora_rank") is None else field("q_lora_rank"),
        kv_rank=field("kv_lora_rank"),
        plain_dim=field("qk_nope_head_dim"),
        rope_dim=field("qk_rope_head_dim"),
        value_dim=field("v_head_dim"),
    )


def _read_windows(
    path: Path, values: dict[str, Any], layers: int, field: Callable[..., int]
) -> dict[str, Any]:
    """Return the tokens of the window, and the share of the layers that have it, as fields of `ModelShape`."""
    known = _WINDOWS.get(values.get("model_type") or "")
    if known is None or (known.has_switch and values.get("use_sliding_window") is not True):
        return {}
    if values.get("sliding_window", known.tokens) is None:
        return {}
    types = values.get("layer_types")
    if types is not None and (not isinstance(types, list) or len(types) != layers):
        raise ConfigInvalid(
            f"{path}: layer_types is {types!r}; it must be a list of {layers} names, one for each layer"
        )
    if types is not None:
        count = types.count("sliding_attention")
    elif known.first_layer is not None:
        is_zero = values.get("max_window_layers") == 0
        count = max(0, layers - (0 if is_zero else field("max_window_layers", known.first_layer)))
    elif known.full_layer_interval is not None:
        interval = known.full_layer_interval
        count = layers - layers // (
            field("sliding_window_pattern", interval) if known.reads_interval else interval
        )
    else:
        count = layers
    if count == 0:
        return {}
    return {"window_tokens": field("sliding_window", known.tokens), "window_share": count / layers}


def _read_experts(path: Path, values: dict[str, Any], field: Callable[..., int]) -> SparseBlock | None:
    kind = values.get("model_type")
    if kind not in _EXPERT_FIELDS:
        return None
    counts, width = _EXPERT_FIELDS[kind]
    given = [name for name in counts if values.get(name) is not None]
    count_name = given[0] if given else counts[0]
    count, per_token = field(count_name), field("num_experts_per_tok")
    for other in given[1:]:
        if values[other] != count:
            raise ConfigInvalid(
                f"{path}: {other} is {values[other]!r}; it must be equal to {count_name} ({count}), or absent"
            )
    if per_token > count:
        raise ConfigInvalid(
            f"{path}: num_experts_per_tok is {per_token}; it must be at most {count_name} ({count})"
        )
    layers = range(field("num_hidden_layers"))
    if kind == "qwen3_moe":
        step, dense = field("decoder_sparse_step", 1), values.get("mlp_only_layers") or []
        if not isinstance(dense, list):
            raise ConfigInvalid(f"{path}: mlp_only_layers is {dense!r}; it must be a list of layer indexes")
        layers = layers[step - 1 :: step]
    elif kind in _LATENT:
        first = values.get("first_k_dense_replace")
        if not isinstance(first, int) or isinstance(first, bool) or first < 0:
            raise ConfigInvalid(
                f"{path}: first_k_dense_replace is {first!r}; it must be a whole number of at least 0"
            )
        layers, dense = layers[first:], []
    else:
        dense = []
    return SparseBlock(
        layers=frozenset(layers).difference(dense),
        count=count,
        intermediate=field(width),
        shared_intermediate=field("n_shared_experts") * field(width) if kind in _LATENT else 0,
        names=_EXPERT_NAMES.get(kind, ExpertNames()),
    )


def _quantisation(path: Path, values: dict[str, Any]) -> Quantisation | None:
    """Return the formats of quantised linears; old files have them under `compression_config`.

    Raises:
        ConfigInvalid: no replica serves them.
    """
    name = "compression_config" if values.get("quantization_config") is None else "quantization_config"
    if values.get(name) is None:
        return None
    kind = values.get("model_type")
    expert_methods = _EXPERT_METHODS.get(kind, LINEAR_METHODS) if kind in _EXPERT_FIELDS else None
    try:
        return decode(values[name], f"{path}: {name}", expert_methods=expert_methods)
    except (CheckpointInvalid, ModelUnsupported) as error:
        raise ConfigInvalid(str(error)) from error


def _refuse_unserved(path: Path, values: dict[str, Any]) -> None:
    """Reject features that no replica serves and that change memory or work: the figures would be wrong."""
    kind = values.get("model_type")
    if kind is not None and kind not in _MODEL_TYPES:
        raise ConfigInvalid(f"{path}: model_type is {kind!r}; choose a model of {', '.join(_MODEL_TYPES)}")
    text = text_fields(values)
    if isinstance(kind, str) and kind in TEXT_CONFIGS:
        name = TEXT_CONFIGS[kind][0]
        if not isinstance(values.get(name), dict):
            raise ConfigInvalid(
                f"{path}: {name} is {values.get(name)!r}; it must be an object with the text model's sizes"
            )
        for name in ("quantization_config", "compression_config"):
            if text.get(name) is not None:
                raise ConfigInvalid(f"{path}: {name} is {text[name]!r:.80}; choose an unquantised {kind}")
    dtype = text.get("dtype") or text.get("torch_dtype")
    if dtype is not None and str(dtype) not in _DTYPE_BYTES:
        raise ConfigInvalid(f"{path}: dtype is {dtype!r}; it must be one of {', '.join(_DTYPE_BYTES)}")
    own = _EXPERT_FIELDS[kind][0] if kind in _EXPERT_FIELDS else ()
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if values.get(name) and name not in own:
            raise ConfigInvalid(f"{path}: {name} is {values[name]!r}; choose a dense model")


class _Pace:
    """Prefill and decode times of a grid."""

    def __init__(self, model: ModelShape, hardware: Hardware, topology: Topology) -> None:
        self.predictor = Predictor(profile_for(model, hardware, topology), topology)
        self._topology = topology

    def prefill_seconds(self, tokens: int, target_seconds: float) -> float:
        """Return the TTFT of a lone prompt in the largest chunks whose steps meet the target over all stages.

        Seconds per token are evaluated at points that are denser where the context is short, and integrated
        by the trapezoidal rule.
        """
        points = tokens * np.linspace(0.0, 1.0, _GRID_POINTS) ** 2
        seconds_per_token = np.array(
            [self._seconds_per_token(int(point), target_seconds, tokens) for point in points]
        )
        stage = float(np.trapezoid(seconds_per_token, points))
        drain = (self._topology.stream - 1) * self._step(tokens, self._chunk(tokens, target_seconds, tokens))
        hops = self.predictor.latency_seconds([Work(0, 1)]) - self._topology.stream * self._step(0, 1)
        return stage + drain + max(0.0, hops)

    def decode_seconds(self, context: int, batch: int) -> float:
        """Return the TPOT of `batch` requests at `context`, in a group for each stage (or request, if fewer).

        A group starts its next token once the last one has passed all stages, and not before every group has
        passed the slowest stage: the last, which has the output head.
        """
        stages, lanes = self._topology.stream, self._topology.kv
        groups = min(batch, stages)
        size = -(-batch // groups)
        own = self.predictor.tally()
        own.add_decodes(size * -(-context // lanes), size)
        slowest = self.predictor.coupled_tally_seconds([own], size if lanes > 1 else 0)
        rows = np.array([size])
        profile = self.predictor.profile
        head, hop = float(profile.head.seconds(rows)[0]), float(profile.hop.seconds(rows)[0])
        through = stages * slowest - (stages - 1) * head + (stages - 1) * hop
        return max(through, groups * slowest)

    def largest_batch(self, context: int, target_seconds: float, most: int) -> int:
        """Return the largest number of requests, up to `most`, that decode together within the target."""
        most = min(most, _LONGEST_BATCH)
        if most < 1 or self.decode_seconds(context, 1) > target_seconds:
            return 0
        low, high = 1, most + 1  # invariant: low fits; high does not fit or is not allowed
        while high - low > 1:
            middle = (low + high) // 2
            if self.decode_seconds(context, middle) <= target_seconds:
                low = middle
            else:
                high = middle
        return low

    def _seconds_per_token(self, context: int, target_seconds: float, most: int) -> float:
        chunk = self._chunk(context, target_seconds, most)
        return self._step(context, chunk) / chunk

    def _chunk(self, context: int, target_seconds: float, most: int) -> int:
        """Return the largest chunk up to `most` whose step meets the target over all stages, or 32 tokens."""
        budget = target_seconds / self._topology.stream
        fitting = bisect_right(_CHUNKS, budget, key=lambda chunk: self._step(context, chunk))
        return min(_CHUNKS[max(fitting - 1, 0)], most)

    def _step(self, context: int, chunk: int) -> float:
        """Return a stage's time for a chunk; from `TOKENS_PER_LANE` on, lanes that hold KV share the work."""
        lanes = min(self._topology.kv, context // TOKENS_PER_LANE + 1)
        shard = min(context, max(TOKENS_PER_LANE, -(-context // lanes)))
        own = self.predictor.tally()
        own.add(Work(shard, chunk))
        return self.predictor.coupled_tally_seconds([own], chunk if lanes > 1 else 0)


def _activation_bytes(model: ModelShape, topology: Topology) -> float:
    """Return the activation bytes of the largest chunk.

    They consist of hidden rows, which tensor parallelism does not split, and of wide rows, which it splits.
    """
    whole, wide = 5 * model.hidden, 2 * model.intermediate
    if (
        model.experts is not None
    ):  # a row for each of its experts: as it enters, as it leaves, and in its place again
        whole += 3 * model.experts.per_token * model.hidden
        wide = max(wide, 3 * model.experts.per_token * model.experts.intermediate)
    split = (model.query_heads + 2 * model.kv_heads) * model.head_dim + wide
    if model.latent is not None:  # queries that have absorbed key matrices, and sums of latents
        split = 2 * model.query_heads * model.head_dim + wide
    return _LARGEST_CHUNK * (whole + split / topology.tensor) * model.dtype_bytes


def _powers(most: int) -> list[int]:
    return [1 << power for power in range(max(0, most).bit_length())]


@cache
def _by_size(model: ModelShape, hardware: Hardware, max_gpus: int) -> tuple[Topology, ...]:
    return tuple(
        sorted(grids(model, hardware, max_gpus), key=lambda grid: (grid.ranks, grid.kv, grid.stream))
    )


def shortfall(model: ModelShape, hardware: Hardware, wish: Wish, closest: Rating) -> str:
    """Describe what the closest grid of a plan lacks if none fits, and which changes would each be enough."""
    asked = (
        f"no grid of up to {wish.max_gpus} {hardware.name} serves {wish.context_tokens:,} tokens of {model.name} "
        f"within a TTFT of {wish.ttft_seconds:g} s and a TPOT of {1e3 * wish.tpot_seconds:g} ms"
    )
    fixes = []
    enough = _fewest(model, hardware, replace(wish, max_gpus=min(_TIMES_MORE * wish.max_gpus, MOST_GPUS)))
    if enough is not None:
        fixes.append(f"--max-gpus {enough}")
    if closest.kv_room_bytes == 0:
        lacks = f"not even the weights fit: on {closest.topology} they take {_gigabytes(closest.weights_bytes)} GB of each GPU"
        fixes.append("a smaller model")
    elif closest.offload_bytes:
        lacks = (
            f"{wish.concurrent} x {wish.request_tokens:,} tokens of KV do not fit; {closest.topology} holds "
            f"{closest.kv_tokens:,} and would have to offload {_gigabytes(closest.offload_bytes)} GB to host memory"
        )
        fixes.append("less of --context, --output or --concurrent")
        if wish.concurrent == 1:
            fixes.append("--streaming" if not wish.streaming_bytes else "more of --streaming")
    else:
        lacks = (
            f"the closest, {closest.topology}, misses {' and '.join(closest.misses)} with a TTFT of "
            f"{closest.ttft_seconds:.3g} s and a TPOT of {1e3 * closest.tpot_seconds:.3g} ms"
        )
        looser = {
            "TTFT": f"--ttft {closest.ttft_seconds * 1.05:.3g}",
            "TPOT": f"--tpot {closest.tpot_seconds * 1.05:.3g}",
        }
        fixes.append(" with ".join(looser[name] for name in closest.misses))
    return f"{asked}: {lacks}; try {' or '.join(fixes)}"


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.3g}" if size < 1e11 else f"{size / 1e9:,.0f}"
