"""Frozen settings of one running replica, derived from its manifest and from what its ranks report."""

from __future__ import annotations

from dataclasses import dataclass

from medha.api.fields import quantity_bytes
from medha.api.replica import MedhaReplicaSpec, SchedulingSpec, ServiceClass
from medha.cost.crossover import crossover_tokens
from medha.cost.predictor import TOKENS_PER_LANE
from medha.errors import ConfigInvalid
from medha.kv.context_parallel import ContextParallel, RingCosts
from medha.kv.pools import WindowPool
from medha.kv.store_tier import object_blocks
from medha.kv.window_tables import WindowNeed, window_need
from medha.topology import Topology
from medha.wire.messages import DiskTierFigures, DraftCosts, HostTierFigures, RankReady, StreamingFigures


@dataclass(frozen=True, slots=True)
class ReplicaConfig:
    """The settings that the controller needs for its decisions; they do not change during an epoch."""

    topology: Topology
    scheduling: SchedulingSpec
    service_classes: dict[str, ServiceClass]
    default_class: str
    max_model_len: int  # tokens
    block_size_tokens: int
    kv_blocks: int  # of one lane
    # From so many tokens on, a request is long: those of its prompt that are not cached, later those of its KV.
    long_threshold_tokens: int
    tokens_per_lane: int = TOKENS_PER_LANE  # prompt tokens of one request, before the next lane joins
    prefix_caching: bool = True
    window_pool: WindowPool | None = None  # of each lane; None: no layer frees KV before its window
    context_parallel: ContextParallel | None = None  # None: owner-compute
    draft_costs: DraftCosts | None = None  # of the guesses of a draft model; None: none proposes any
    host_tier: HostTierFigures | None = None  # of each lane; None: evicted KV is forgotten
    disk_tier: DiskTierFigures | None = None  # of each lane; None: KV of the host tier ends with the epoch
    peer_block_seconds: float | None = None
    """Initial estimate of the time in which a rank reads a block from another replica; None: it reads none."""
    store_block_seconds: float | None = None
    """Initial estimate of the time in which a rank reads a block from the store; None: there is no store."""
    object_blocks: int = 1  # of each object of the store
    streaming: StreamingFigures | None = None
    """Host memory of each lane for KV of requests that are larger than the pools; None: such requests are refused."""

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV pool of one lane holds."""
        return self.kv_blocks * self.block_size_tokens

    @property
    def pool_tokens(self) -> int:
        """Tokens that the KV pools of all lanes hold together."""
        return self.topology.kv * self.kv_tokens

    def window_need(self, window_tokens: int) -> WindowNeed:
        """Return the blocks that sequences and steps need in layers that see `window_tokens` tokens at most."""
        return window_need(
            window_tokens,
            block_size_tokens=self.block_size_tokens,
            max_running=self.scheduling.max_running,
            max_chunk_tokens=self.scheduling.max_chunk_tokens,
            max_model_len=self.max_model_len,
            stages=self.topology.stream,
            lanes=self.topology.kv,
        )

    @property
    def streamed_device_blocks(self) -> int:
        """Most blocks of a lane's pool for a request that is larger than the pools; the headroom for short ones stays free."""
        return max(int((1 - self.scheduling.short_headroom) * self.kv_blocks), 1)

    @property
    def longest_tokens(self) -> int:
        """KV tokens of the largest request: all pools, or its part of them and all that can be streamed beside it."""
        if self.streaming is None:
            return self.pool_tokens
        blocks = self.topology.kv * (self.streamed_device_blocks + self.streaming.blocks)
        return max(self.pool_tokens, blocks * self.block_size_tokens)


def derive(spec: MedhaReplicaSpec, ready: RankReady) -> ReplicaConfig:
    """Derive the settings of a replica from `ready`: the report of its slowest rank, with figures for all ranks.

    Unless the manifest sets a threshold, a request is long from the KV length at which attention FLOPs exceed
    linear FLOPs: from there on, the context and not the chunk determines the time of a chunk. A layer with a window
    counts at most the keys in its window.

    Raises:
        ConfigInvalid: `maxChunkTokens` is below `minChunkTokens`.
    """
    topology = Topology(spec.parallelism.tensor, spec.parallelism.stream, spec.parallelism.kv)
    crossover = crossover_tokens(
        ready.linear_flops_per_token,
        ready.attention_flops_per_pair,
        ready.profile.window_tokens,
        ready.profile.window_share,
    )
    if spec.scheduling.max_chunk_tokens < spec.scheduling.min_chunk_tokens:
        raise ConfigInvalid(
            f"scheduling.maxChunkTokens is {spec.scheduling.max_chunk_tokens}, below minChunkTokens "
            f"({spec.scheduling.min_chunk_tokens}); raise the one or lower the other"
        )
    return ReplicaConfig(
        topology=topology,
        scheduling=spec.scheduling,
        service_classes={service_class.name: service_class for service_class in spec.service_classes},
        default_class=spec.service_classes[0].name,
        max_model_len=ready.max_model_len,
        block_size_tokens=ready.block_size_tokens,
        kv_blocks=ready.kv_blocks,
        long_threshold_tokens=spec.scheduling.long_threshold_tokens or max(crossover, 1),
        tokens_per_lane=spec.kv_cache.tokens_per_lane,
        prefix_caching=spec.kv_cache.prefix_caching,
        window_pool=WindowPool(ready.window_blocks, ready.widest_window_tokens)
        if ready.window_blocks
        else None,
        context_parallel=_context_parallel(spec, topology, ready),
        draft_costs=ready.draft_costs if spec.scheduling.speculation.proposes else None,
        host_tier=ready.host_tier,
        disk_tier=ready.disk_tier,
        peer_block_seconds=_peer_block_seconds(spec, ready),
        store_block_seconds=_store_block_seconds(spec, ready),
        object_blocks=1 if ready.host_tier is None else object_blocks(ready.host_tier.block_bytes),
        streaming=ready.streaming,
    )


def _peer_block_seconds(spec: MedhaReplicaSpec, ready: RankReady) -> float | None:
    """Return the time for a block at the manifest's bandwidth between replicas; None if no KV is handed over."""
    peers = spec.kv_cache.peers
    if peers is None or ready.peer is None or ready.host_tier is None:
        return None
    return ready.host_tier.block_bytes / quantity_bytes(peers.bandwidth)


def _store_block_seconds(spec: MedhaReplicaSpec, ready: RankReady) -> float | None:
    """Return the time for a block at the manifest's bandwidth of the store; None if this epoch does not use it."""
    store = spec.kv_cache.store
    if store is None or ready.store is None or ready.store.fault or ready.host_tier is None:
        return None
    return ready.host_tier.block_bytes / quantity_bytes(store.bandwidth)


def _context_parallel(spec: MedhaReplicaSpec, topology: Topology, ready: RankReady) -> ContextParallel | None:
    """Return how lanes prefill together, from a rank's measurements; None for owner-compute or one lane."""
    strategy = spec.scheduling.prefill_strategy
    if strategy == "ownerCompute" or topology.kv == 1:
        return None
    rate = 0.0
    if ready.profile.attention_seconds_per_pair > 0:  # of a rank's share of the layers and heads
        share = ready.attention_flops_per_pair / (topology.stream * topology.tensor)
        rate = share / ready.profile.attention_seconds_per_pair
    costs = RingCosts(
        query_heads=max(ready.query_heads, 1),
        kv_heads=max(ready.kv_heads, 1),
        kv_tensors=ready.kv_tensors,
        element_bytes=ready.element_bytes,
        kv_element_bytes=ready.kv_element_bytes or ready.element_bytes,
        attention_flops_per_second=rate,
        link_bytes_per_second=ready.link_bytes_per_second,
    )
    return ContextParallel(strategy, costs)
