"""Frozen settings of one running replica, derived from its manifest and from what its ranks report."""

from __future__ import annotations

from dataclasses import dataclass

from medha.api.replica import MedhaReplicaSpec, SchedulingSpec, ServiceClass
from medha.cost.predictor import TOKENS_PER_LANE
from medha.errors import ConfigInvalid
from medha.kv.context_parallel import ContextParallel, RingCosts
from medha.topology import Topology
from medha.wire.messages import RankReady


@dataclass(frozen=True, slots=True)
class ReplicaConfig:
    """What the controller must know to decide; nothing in it changes while an epoch lasts."""

    topology: Topology
    scheduling: SchedulingSpec
    service_classes: dict[str, ServiceClass]
    default_class: str
    max_model_len: int  # tokens
    block_size_tokens: int
    kv_blocks: int  # of one lane
    long_threshold_tokens: int  # KV length from which a request is long
    tokens_per_lane: int = TOKENS_PER_LANE  # of one request's prompt, before the next lane joins
    prefix_caching: bool = True
    context_parallel: ContextParallel | None = None  # None: owner-compute

    @property
    def kv_tokens(self) -> int:
        """Of one lane."""
        return self.kv_blocks * self.block_size_tokens

    @property
    def pool_tokens(self) -> int:
        """Of all lanes together."""
        return self.topology.kv * self.kv_tokens


def derive(spec: MedhaReplicaSpec, ready: RankReady) -> ReplicaConfig:
    """Settings of a replica whose smallest rank reported `ready`.

    A request counts as long where attention FLOPs pass linear FLOPs, unless the manifest says otherwise:
    from there on the time of a chunk is governed by the context and not by the chunk (DESIGN §5).
    """
    topology = Topology(spec.parallelism.tensor, spec.parallelism.stream, spec.parallelism.kv)
    crossover = int(ready.linear_flops_per_token / max(ready.attention_flops_per_pair, 1e-9))
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
        context_parallel=_context_parallel(spec, topology, ready),
    )


def _context_parallel(spec: MedhaReplicaSpec, topology: Topology, ready: RankReady) -> ContextParallel | None:
    """How lanes prefill together, by what a rank has measured."""
    strategy = spec.scheduling.prefill_strategy
    if strategy == "ownerCompute" or topology.kv == 1:
        return None
    rate = 0.0
    if (
        ready.profile.attention_seconds_per_pair > 0
    ):  # that a rank takes for its share of the layers and heads
        share = ready.attention_flops_per_pair / (topology.stream * topology.tensor)
        rate = share / ready.profile.attention_seconds_per_pair
    costs = RingCosts(
        query_heads=max(ready.query_heads, 1),
        kv_heads=max(ready.kv_heads, 1),
        element_bytes=ready.element_bytes,
        attention_flops_per_second=rate,
        link_bytes_per_second=ready.link_bytes_per_second,
    )
    return ContextParallel(strategy, costs)
