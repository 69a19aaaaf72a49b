"""T11, T12, T18, T19: one long prompt, chunk by chunk, on the predictor's costs (papers A and B).

No queue and no policy is involved, so a whole prefill is one array of chunks: how long each keeps a stage busy, and
how long a decode beside it takes over all stages. Under KVP the lanes work in lock-step: each attends its shard, and
lanes join as the KV passes `TOKENS_PER_LANE` (DESIGN §5). The band moves the hardware's figures by 10 %.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from medha.hardware import H100, LLAMA3_8B, Hardware, profile_for
from medha.predictor import TOKENS_PER_LANE
from medha.topology import Topology
from medha_sim.claims import NOMINAL, Capacity, Row, above, below, modelled, more_than

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
STATIC_CHUNKS = (64, 128, 256, 512, 1024, 2048, 4096)
_POINTS = 129  # contexts at which an adaptive chunk is chosen
_FINE_CHUNKS: Ints = np.unique(np.geomspace(32, 8192, 257).astype(np.int64))


def hardware_at(hardware: Hardware, capacity: Capacity) -> Hardware:
    """The hardware, so much slower or faster."""
    return replace(
        hardware,
        peak_flops=hardware.peak_flops * capacity.compute,
        memory_bytes_per_second=hardware.memory_bytes_per_second * capacity.bandwidth,
        node_link_bytes_per_second=hardware.node_link_bytes_per_second * capacity.link,
        fabric_link_bytes_per_second=hardware.fabric_link_bytes_per_second * capacity.link,
        memory_bytes=hardware.memory_bytes * capacity.memory,
    )


@dataclass(frozen=True, slots=True)
class Prefill:
    """A whole prefill, and the steps that decodes beside it see."""

    seconds: float
    steps: Floats  # over all stages, one for each chunk

    @property
    def p95_step_seconds(self) -> float:
        return float(np.quantile(self.steps, 0.95))


class Lone:
    """Llama-3 8B in one shape."""

    def __init__(self, topology: Topology, capacity: Capacity = NOMINAL) -> None:
        self._profile = profile_for(LLAMA3_8B, hardware_at(H100, capacity), topology)
        self._topology = topology

    def stage_seconds(self, contexts: Ints, counts: Ints) -> Floats:
        """How long each chunk keeps a stage busy. `counts` ascend: a profile never lets a larger one cost less."""
        profile = self._profile
        lanes = self.lanes(contexts)
        shards = np.where(lanes > 1, np.maximum(TOKENS_PER_LANE, contexts // lanes), contexts)
        layer = profile.linear_seconds(counts) + profile.all_reduce.seconds(counts)
        layer += profile.attention.launch_seconds + profile.attention.seconds_many(shards, counts)
        layer += np.where(lanes > 1, profile.exchange.seconds(counts), 0.0)
        busy: Floats = profile.launch_seconds + layer * (profile.layers / self._topology.stream)
        return busy

    def lanes(self, contexts: Ints) -> Ints:
        """Lanes that compute behind so much context."""
        lanes: Ints = np.minimum(self._topology.kv, contexts // TOKENS_PER_LANE + 1)
        return lanes

    def static(self, tokens: int, chunk: int) -> Prefill:
        """In chunks of one size."""
        contexts = np.arange(0, tokens, chunk)
        stage = self.stage_seconds(contexts, np.full(len(contexts), chunk))
        stages = self._topology.stream
        hops = (stages - 1) * float(self._profile.hop.seconds(np.array([chunk]))[0])
        return Prefill(float(stage.sum() + (stages - 1) * stage.max() + hops), stage * stages + hops)

    def adaptive(self, tokens: int, step_seconds: float) -> Prefill:
        """In the largest chunks that keep a step over all stages within `step_seconds`."""
        points = np.linspace(0, tokens, _POINTS)
        rates, steps = [], []
        for point in points.astype(np.int64):
            stage = self.stage_seconds(np.full(len(_FINE_CHUNKS), point), _FINE_CHUNKS)
            hops = (self._topology.stream - 1) * self._profile.hop.seconds(_FINE_CHUNKS)
            whole = stage * self._topology.stream + hops
            row = max(int(np.searchsorted(whole, step_seconds, side="right")) - 1, 0)
            rates.append(stage[row] / _FINE_CHUNKS[row])
            steps.append(whole[row])
        seconds = float(np.trapezoid(np.array(rates), points))
        return Prefill(seconds + steps[-1] * (1 - 1 / self._topology.stream), np.array(steps))


def t11() -> Row:
    """Chunks of 32 cost 1.75x those of 4,096, end to end (A §3.2)."""

    def ratio(capacity: Capacity) -> float:
        lone = Lone(Topology(tensor=8), capacity)
        return lone.static(1_000_000, 32).seconds / lone.static(1_000_000, 4096).seconds

    return Row(
        "T11",
        "A §3.2",
        "8B on 8 H100, 1M tokens: a prefill in chunks of 32 takes 1.75 times as long as in chunks of 4,096",
        (modelled("prefill time, chunk 32 over 4,096", "x", 1.75, ratio, order=more_than(1.0)),),
        _inputs("TP8"),
        "lone prompt, chunk by chunk",
    )


def t12() -> Row:
    """Adaptive chunks dominate every static size (B Fig. 4; A Fig. 6)."""

    def dominated(capacity: Capacity) -> float:
        lone = Lone(Topology(tensor=8), capacity)
        wins = 0
        for chunk in STATIC_CHUNKS:
            static = lone.static(1_000_000, chunk)
            adaptive = lone.adaptive(1_000_000, static.p95_step_seconds)
            wins += (
                adaptive.seconds <= static.seconds and adaptive.p95_step_seconds <= static.p95_step_seconds
            )
        return float(wins)

    total = len(STATIC_CHUNKS)
    return Row(
        "T12",
        "B §3.2, Fig. 4; A §3.2, Fig. 6",
        "8B, 1M tokens: adaptive chunks dominate the Pareto frontier of static sizes (prefill time, P95 step)",
        (
            modelled(
                "static sizes that adaptive chunks beat on both axes",
                f"of {total}",
                float(total),
                dominated,
                order=more_than(total / 2),
                note="the shape of a plot: sizes 64 to 4,096, each against adaptive chunks with its own P95 as the target",
            ),
        ),
        _inputs("TP8"),
        "lone prompt, chunk by chunk",
    )


def t18() -> Row:
    """At 4M a chunk of 128 makes decodes take 100 ms; KVP betters both axes above 1M (A Fig. 13; B Fig. 20)."""

    def decode(kv: int) -> Callable[[Capacity], float]:
        return lambda c: 1e3 * Lone(Topology(4, 4, kv), c).static(4_000_000, 128).p95_step_seconds

    def better(capacity: Capacity) -> float:
        wins = 0
        for tokens in (2_000_000, 4_000_000):
            for chunk in (32, 64, 128, 256):
                one, four = (Lone(Topology(4, 4, kv), capacity).static(tokens, chunk) for kv in (1, 4))
                wins += four.seconds < one.seconds and four.p95_step_seconds < one.p95_step_seconds
        return float(wins)

    return Row(
        "T18",
        "A §3.4, Fig. 13; B App. B.3, Fig. 20",
        "8B, TP4 SPP4: P95 decode almost 100 ms beside a 4M prompt in chunks of 128; KVP betters TTFT and TBT above 1M",
        (
            modelled(
                "P95 decode beside 4M, chunk 128, KVP1",
                "ms",
                (95.0, 100.0),
                decode(1),
                order=more_than(50.0),
                note="direction: above the usual 50 ms target",
            ),
            modelled("the same with KVP4", "ms", below(95.0), decode(4)),
            modelled(
                "points at 2M and 4M where KVP4 betters both axes",
                "of 8",
                (7.0, 8.0),
                better,
                order=more_than(4.0),
                note='"in most cases"; at 2M and the smallest chunk the paper sees no gain either',
            ),
        ),
        _inputs("TP4 SPP4"),
        "lone prompt, chunk by chunk",
    )


def t19() -> Row:
    """KVP grows from 4 to 16 servers over 2M tokens and keeps the iteration time (B Fig. 6)."""
    shape = Topology(tensor=8, stream=4, kv=4)

    def flatness(capacity: Capacity) -> float:
        contexts = np.array([TOKENS_PER_LANE - 512, 2_000_000])
        first, last = Lone(shape, capacity).stage_seconds(contexts, np.array([512, 512]))
        return float(last / first)

    def growth(capacity: Capacity) -> float:
        contexts = np.array([TOKENS_PER_LANE - 512, 2_000_000])
        first, last = Lone(replace(shape, kv=1), capacity).stage_seconds(contexts, np.array([512, 512]))
        return float(last / first)

    servers = 4.0 * Lone(shape).lanes(np.array([0, 1_999_999]))
    return Row(
        "T19",
        "B §3.3, Fig. 6",
        "8B, TP8 SPP4 KVP4, 2M tokens: 4 servers grow to 16, iteration time stays nearly the same",
        (
            modelled("servers at the start", "servers", 4.0, lambda _: float(servers[0])),
            modelled("servers at 2M", "servers", 16.0, lambda _: float(servers[1])),
            modelled(
                "iteration time at 2M over that at 512 Ki",
                "x",
                (0.9, 1.1),
                flatness,
                note='"near-consistent"',
            ),
            modelled("the same without KVP", "x", above(2.0), growth),
        ),
        _inputs("TP8 SPP4 KVP4") | {"tokens per lane": f"{TOKENS_PER_LANE:,} (inferred from the figure)"},
        "lone prompt, chunk by chunk",
    )


def _inputs(shape: str) -> dict[str, str]:
    profile = profile_for(LLAMA3_8B, H100, Topology(8))
    return {"costs": f"{profile.source}; 8B on H100", "shape": shape}


ROWS = (t11, t12, t18, t19)
