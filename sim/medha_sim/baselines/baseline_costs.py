"""Ground-truth costs for baselines without a pipeline of chunks: elastic instances, and disaggregated pools.

Both use the same `Profile` as Medha's predictor, so that no system computes faster than another by
assumption.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from medha.cost.cost_profile import Profile
from medha.cost.predictor import Predictor, Work
from medha.wire.messages import Step
from medha_sim.executor import StepTiming

_TABLE_TOKENS = 16384


@dataclass(frozen=True, slots=True)
class RingLink:
    """The link over which instances exchange K and V of a part of the prompt, in each layer and round."""

    kv_bytes_per_token_layer: float  # per rank
    node_bytes_per_second: float
    fabric_bytes_per_second: float
    latency_seconds: float = 20e-6
    instances_per_node: int = 4


class ElasticCost:
    """Cost of elastic sequence parallelism: a batch of whole prompts, or of decodes, over several instances.

    Linear layers and the causal triangle are split evenly (striped attention). In each layer every rank
    computes `degree` partial attentions; transfers between them cost the time that attention does not hide.
    `iteration_seconds` is the engine's overhead in every step. `speed` divides all times, to find how fast a
    baseline would have to be.
    """

    def __init__(
        self, profile: Profile, link: RingLink, *, iteration_seconds: float = 0.0, speed: float = 1.0
    ) -> None:
        """`profile` describes one instance."""
        self._profile = profile
        self._link = link
        self._iteration_seconds = iteration_seconds
        self._speed = speed
        counts = np.arange(_TABLE_TOKENS + 1)
        in_layer = profile.linear_seconds(counts) + profile.all_reduce.seconds(counts)
        self._in_layer: list[float] = in_layer.tolist()
        half = self._in_layer[_TABLE_TOKENS // 2]
        self._slope: float = (self._in_layer[-1] - half) / (_TABLE_TOKENS / 2)
        self._head = float(profile.head.seconds(np.array([1]))[0])

    def __call__(self, step: Step, _now: float) -> StepTiming:
        degree = len(step.lanes)
        tokens = 0
        contexts = 0
        pairs = 0.0
        for entry in step.entries:
            start, count = entry.extents[0].start, entry.token_count
            tokens += count
            contexts += start
            pairs += count * (start + (count + 1) / 2)
        if tokens == len(step.entries):
            return StepTiming((self.decode_seconds(contexts, tokens, degree),))
        nodes = {lane // self._link.instances_per_node for lane in step.lanes}
        return StepTiming(
            (self.prefill_seconds(tokens, pairs, len(step.entries), degree, one_node=len(nodes) == 1),)
        )

    def prefill_seconds(
        self, tokens: int, pairs: float, prompts: int, degree: int, *, one_node: bool = True
    ) -> float:
        """Return the time of `prompts` whole prompts, `tokens` tokens in total, over `degree` instances.

        `pairs` counts the (query, key) pairs of attention.
        """
        attention = self._profile.attention
        share = pairs * attention.seconds_per_pair / degree
        layer = self._in_layer_seconds(-(-tokens // degree)) + attention.launch_seconds * degree
        layer += share + prompts * attention.sequence_seconds
        if degree > 1:
            link = self._link
            rate = link.node_bytes_per_second if one_node else link.fabric_bytes_per_second
            send = link.latency_seconds + tokens / degree * link.kv_bytes_per_token_layer / rate
            layer += (degree - 1) * max(0.0, send - share / degree)
        return (self._iteration_seconds + self._profile.layers * layer + self._head) / self._speed

    def decode_seconds(self, contexts: int, sequences: int, degree: int) -> float:
        """Return the time of a token per sequence, with KV of `contexts` tokens on `degree` instances."""
        attention = self._profile.attention
        layer: float = self._in_layer_seconds(sequences) + attention.launch_seconds
        layer += sequences * attention.sequence_seconds
        layer += (contexts / degree + sequences) * attention.decode_seconds_per_token
        if degree > 1:
            layer += 2 * self._link.latency_seconds
        return (self._iteration_seconds + self._profile.layers * layer + self._head) / self._speed

    def _in_layer_seconds(self, tokens: int) -> float:
        if tokens <= _TABLE_TOKENS:
            return self._in_layer[tokens]
        return self._in_layer[-1] + (tokens - _TABLE_TOKENS) * self._slope


class DisaggregatedCost:
    """Cost of a prefill pool on lane 0, a decode pool on lane 1, and the link between them as lane 2."""

    def __init__(self, pool: Predictor, kv_bytes_per_token: float, link_bytes_per_second: float) -> None:
        """`pool` predicts either pool's times; `link_bytes_per_second` is the total over a pool's ranks."""
        self._pool = pool
        self._seconds_per_token = kv_bytes_per_token / link_bytes_per_second

    def __call__(self, step: Step, _now: float) -> StepTiming:
        if step.entries[0].strategy == "transfer":
            return StepTiming((self._seconds_per_token * sum(entry.token_count for entry in step.entries),))
        works = [Work(entry.extents[0].start, entry.token_count) for entry in step.entries]
        return StepTiming((self._pool.stage_seconds(works),))
