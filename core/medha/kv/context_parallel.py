"""Context parallelism (paper C): how a chunk is split over lanes, and what is passed around the ring.

Every lane runs the linear layers of its own positions of the chunk. For attention, either the keys and values
go around the ring of lanes (*pass-KV*), or the queries do and the partial results come back (*pass-Q*). The
shard map alone determines where K and V are stored: new ones go to the lane that holds their position. This
is the same for every strategy, so the steps of one request may use different strategies, and owner-compute as
well.

All functions are pure. Symbols of paper C: T new tokens, P cached ones, N lanes, N_H query and N_KV KV heads,
e bytes per element, C attention FLOP/s of a lane, BW bytes/s between two lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

from medha.wire.messages import Extent, StepEntry

OWNER, PASS_KV, PASS_Q = "owner", "passKv", "passQ"
"""Values of `StepEntry.strategy` for entries over several lanes."""

PrefillStrategy = Literal["ownerCompute", "passKv", "passQ", "auto", "striped"]


@dataclass(frozen=True, slots=True)
class RingCosts:
    """The quantities that decide between pass-KV and pass-Q.

    An unknown link counts as infinitely slow, so that the smaller message wins.
    """

    query_heads: int  # N_H, of the whole model
    kv_heads: int  # N_KV
    element_bytes: int = 2  # e
    attention_flops_per_second: float = 0.0  # C, of a lane
    link_bytes_per_second: float = 0.0  # BW, between two lanes
    kv_tensors: int = 2  # K and V; 1 if a latent stands for both
    kv_element_bytes: int = 0  # bytes per element of K and V, in the pool and in messages; 0: e

    @property
    def sent_heads(self) -> float:
        """Size of a token's K and V in a message, in heads of elements of e bytes."""
        share = (self.kv_element_bytes or self.element_bytes) / self.element_bytes
        return self.kv_heads * self.kv_tensors * share

    @property
    def flops_per_byte(self) -> float:
        """C / BW: FLOPs that a lane computes while one byte is sent; infinite if either rate is not known."""
        if self.link_bytes_per_second <= 0 or self.attention_flops_per_second <= 0:
            return inf
        return self.attention_flops_per_second / self.link_bytes_per_second


def pass_kv_is_hidden(new_tokens: int, lanes: int, costs: RingCosts) -> bool:
    """Return whether attention hides the sending of K and V: T >= N C N_KV e / (2 N_H BW) (eq. 2)."""
    least = lanes * costs.flops_per_byte * costs.sent_heads * costs.element_bytes / (4 * costs.query_heads)
    return new_tokens >= least


def prefers_pass_kv(new_tokens: int, cached_tokens: int, lanes: int, costs: RingCosts) -> bool:
    """Return whether pass-KV is the better choice, by algorithm 5.

    It includes the partial results that pass-Q sends back (eq. 5); without a known link it is eq. 1.
    """
    if pass_kv_is_hidden(new_tokens, lanes, costs):
        return True
    hidden = 4 * new_tokens / (lanes * costs.flops_per_byte * costs.element_bytes)
    miss_rate = new_tokens / (new_tokens + cached_tokens)
    return miss_rate >= costs.sent_heads / costs.query_heads - hidden


def balanced(start: int, stop: int, lanes: int) -> list[tuple[Extent, ...]]:
    """Split positions `start .. stop` (exclusive) into 2N runs; lane i gets the i-th and the i-th last (§3.5.1).

    The first lane has the last position. A lane may get nothing of a chunk shorter than 2N.
    """
    cuts = [start + (stop - start) * part // (2 * lanes) for part in range(2 * lanes + 1)]
    return [_runs(cuts, (lane, 2 * lanes - 1 - lane)) for lane in range(lanes)]


def striped(start: int, stop: int, lanes: int) -> list[tuple[Extent, ...]]:
    """Distribute positions `start .. stop` (exclusive) round-robin (striped attention, Brandon et al. 2023).

    The first lane has the last position.
    """
    shares: list[tuple[Extent, ...]] = []
    for lane in range(lanes):
        count = -(-(stop - lane - start) // lanes)
        first = stop - 1 - lane - (count - 1) * lanes
        shares.append((Extent(first, count, lanes if count > 1 else 1),) if count > 0 else ())
    return shares


def share_tokens(count: int, lanes: int) -> int:
    """Return the most positions that a lane computes of a chunk of `count` positions.

    The owner computes all of a chunk that is too short to share.
    """
    return count if count < 2 * lanes else 2 * -(-count // (2 * lanes))


def shared_tokens(share: int, lanes: int) -> int:
    """Return the largest chunk up to which no lane computes more than `share` positions."""
    return share if share < 2 * lanes else share // 2 * 2 * lanes


@dataclass(frozen=True, slots=True)
class ContextParallel:
    """The strategy by which the lanes of a replica prefill long prompts together."""

    strategy: PrefillStrategy
    costs: RingCosts

    def passes(self, new_tokens: int, cached_tokens: int, lanes: int) -> str:
        """Return what is passed around the ring for a chunk: `PASS_KV` or `PASS_Q`."""
        if self.strategy == "auto":
            return PASS_KV if prefers_pass_kv(new_tokens, cached_tokens, lanes, self.costs) else PASS_Q
        return PASS_Q if self.strategy == "passQ" else PASS_KV

    def entries(
        self, name: str, lanes: Sequence[int], start: int, stop: int, *, samples: bool, shard_map_version: int
    ) -> list[StepEntry]:
        """Return the entries of positions `start .. stop` (exclusive), one per lane that computes any.

        The first of `lanes` has the last position and therefore samples. It computes all of a chunk that is
        too short to share.
        """
        if stop - start < 2 * len(lanes):
            extents = (Extent(start, stop - start),)
            return [StepEntry(name, lanes[0], extents, samples, OWNER, shard_map_version)]
        strategy = self.passes(stop - start, start, len(lanes))
        cut = (striped if self.strategy == "striped" else balanced)(start, stop, len(lanes))
        return [
            StepEntry(name, lane, extents, samples and lane == lanes[0], strategy, shard_map_version)
            for lane, extents in zip(lanes, cut, strict=True)
            if extents
        ]


def _runs(cuts: Sequence[int], parts: Sequence[int]) -> tuple[Extent, ...]:
    """Return the runs between `cuts`, without empty ones, and with neighbours merged."""
    found: list[Extent] = []
    for part in parts:
        start, count = cuts[part], cuts[part + 1] - cuts[part]
        if count and found and found[-1].start + found[-1].count == start:
            found[-1] = Extent(found[-1].start, found[-1].count + count)
        elif count:
            found.append(Extent(start, count))
    return tuple(found)
