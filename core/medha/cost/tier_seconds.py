"""Predicted times of copies between the KV pool and its tiers, next to the times of computing the same tokens.

The warm-up measures both directions of the host tier (`HostTierFigures`). One factor corrects them by the copies of the
steps, as `medha.cost.correction` corrects the rest of a step. Reads of the disk tier take a time for each access and one
for each block. Both follow the reads that ranks report, by least squares in which old reads count less and less. So do
reads of other replicas' KV, and of the store, whose first predictions follow from the manifest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf

from medha.cost.correction import Correction, PartedSeconds
from medha.cost.predictor import Predictor
from medha.wire.messages import (
    Admit,
    DiskTierFigures,
    Eviction,
    Grow,
    HostLoad,
    HostTierFigures,
    KvFetch,
    Step,
)

_KEPT = 0.9
"""Weight of earlier reads beside a new one: a change of the disk shows within some ten reads."""
_FIRST_BLOCKS = (1, 64)
"""Sizes of the reads by which the measurement of the warm-up counts at first."""
_MOST_SLOWDOWN = 4.0
"""A read counts as at most so many times as long as predicted."""
_LEAST_SLOW_SECONDS = 0.01
"""A read of this time counts as it is, however short the predicted one."""
_PEER_ACCESS_SECONDS = 0.02
"""Time of a read of another replica, however small, until some were measured: its step begins, then a connection."""

PARALLEL_READS = 4
"""Objects of the store that a rank reads at a time."""
STORE_ACCESS_SECONDS = 0.03
"""Time of a read of an object, however small, until some were measured."""


class TierSeconds:
    """The times that decide about the host tier of a replica's lanes (`medha.kv.host_tier.Prices`)."""

    def __init__(
        self,
        figures: HostTierFigures,
        predictor: Predictor,
        disk: DiskTierFigures | None = None,
        peer_block_seconds: float = 0.0,
        store_block_seconds: float = 0.0,
    ) -> None:
        """`disk` has the figures of the disk tier, if there is one.

        A block of another replica takes `peer_block_seconds`, and one of the store `store_block_seconds`.
        """
        self.figures = figures
        self._reads = None if disk is None else ReadSeconds(disk.access_seconds, disk.read_seconds_per_block)
        self._peer_reads = ReadSeconds(_PEER_ACCESS_SECONDS, peer_block_seconds)
        # Ranks read several objects at a time: each takes as many times as long as it would alone.
        self._store_reads = ReadSeconds(STORE_ACCESS_SECONDS, PARALLEL_READS * store_block_seconds)
        self._predictor = predictor
        self._correction = Correction()

    @property
    def factor(self) -> float:
        """Measured times of copies over those of the warm-up."""
        return self._correction.prefill

    def fetch_seconds(self, blocks: int) -> float:
        """Return the predicted time to fetch so many blocks."""
        return blocks * self.figures.fetch_seconds_per_block * self.factor

    def offload_seconds(self, blocks: int) -> float:
        """Return the predicted time to copy so many blocks to the host tier."""
        return blocks * self.figures.offload_seconds_per_block * self.factor

    def load_seconds(self, blocks: int, files: int) -> float:
        """Return the predicted time to read so many blocks of so many files into the host tier; 0 without a disk tier."""
        return 0.0 if self._reads is None else self._reads.seconds(blocks, files)

    def observe_load(self, blocks: int, seconds: float) -> None:
        """Learn from a read of a file that took so long."""
        if self._reads is not None:
            self._reads.observe(blocks, seconds)

    def peer_seconds(self, blocks: int) -> float:
        """Return the predicted time to read so many blocks of another replica into the host tier."""
        return self._peer_reads.seconds(blocks, 1)

    def peer_line(self) -> tuple[float, float]:
        """Return the predicted time of a read of another replica, and that of each block until the device has it."""
        block_seconds = self._peer_reads.seconds_per_block + self.fetch_seconds(1)
        return self._peer_reads.access_seconds, block_seconds

    def observe_peer_load(self, blocks: int, seconds: float) -> None:
        """Learn from a read of another replica's blocks that took so long."""
        self._peer_reads.observe(blocks, seconds)

    def store_seconds(self, blocks: int, objects: int) -> float:
        """Return the predicted time to look for so many objects of the store, and to read so many blocks of them."""
        reads_seconds = self._store_reads.seconds(blocks, objects) / PARALLEL_READS
        return self._store_reads.access_seconds + reads_seconds

    def observe_store_load(self, blocks: int, seconds: float) -> None:
        """Learn from a read of one object that took so long."""
        self._store_reads.observe(blocks, seconds)

    def read_lines(self) -> dict[str, tuple[float, float]]:
        """Return for each tier the predicted time of a read, however small, and what each block adds to it; by `KvTier`.

        Blocks of the host tier are those that the device gets, and all others those that the host tier gets. There are also
        lines of a store and of peers where the replica has none.
        """
        lines = {
            "host": (0.0, self.fetch_seconds(1)),
            "store": (self._store_reads.access_seconds, self._store_reads.seconds_per_block / PARALLEL_READS),
            "peers": (self._peer_reads.access_seconds, self._peer_reads.seconds_per_block),
        }
        if self._reads is not None:
            lines["disk"] = (self._reads.access_seconds, self._reads.seconds_per_block)
        return lines

    def compute_seconds(self, context: int, tokens: int) -> float:
        """Return the predicted time to bring a prompt from `context` to `tokens` tokens of KV, alone."""
        return self._predictor.prefill_seconds(context, tokens)

    def by_lane(
        self, admits: Iterable[Admit] = (), grows: Iterable[Grow] = (), loads: Iterable[HostLoad] = ()
    ) -> Mapping[int, float]:
        """Return how long each lane copies to its host tier for a step's admits, grows and loads; by lane."""
        return self._corrected(offload_seconds(self.figures, admits, grows, loads))

    def fetch_by_lane(self, fetches: Iterable[KvFetch]) -> Mapping[int, float]:
        """Return how long each lane copies what sequences fetch from its host tier; by lane."""
        return self._corrected(fetch_seconds(self.figures, fetches))

    def _corrected(self, seconds: Mapping[int, float]) -> Mapping[int, float]:
        return {lane: self.factor * one for lane, one in seconds.items()}

    def observe(self, step: Step, observed_seconds: float) -> None:
        """Update the correction by the measured time of a step's copies, on the lane where they take longest."""
        offloaded = offload_seconds(self.figures, step.admits, step.grows, step.loads)
        fetched = fetch_seconds(self.figures, step.fetches)
        longest_seconds = max(offloaded.get(lane, 0.0) + fetched.get(lane, 0.0) for lane in step.lanes)
        self._correction = self._correction.after(PartedSeconds(longest_seconds), observed_seconds)


class ReadSeconds:
    """The time of a read as a line over its blocks, fitted to reads that were measured."""

    def __init__(self, access_seconds: float, seconds_per_block: float) -> None:
        """Begin with times that were measured, or that follow from the manifest."""
        self._weight = self._blocks = self._squares = self._seconds = self._products = 0.0
        self.access_seconds, self.seconds_per_block = access_seconds, seconds_per_block
        for blocks in _FIRST_BLOCKS:
            self._fit(blocks, access_seconds + blocks * seconds_per_block)

    def seconds(self, blocks: int, files: int) -> float:
        """Return the predicted time of `files` reads of `blocks` blocks together."""
        return files * self.access_seconds + blocks * self.seconds_per_block

    def observe(self, blocks: int, seconds: float) -> None:
        """Fit the line to one more read.

        A read that hung counts as a slow one: else a single one would end all reads, and none would correct it.
        """
        if blocks >= 1 and 0 <= seconds < inf:
            most_seconds = max(_MOST_SLOWDOWN * self.seconds(blocks, 1), _LEAST_SLOW_SECONDS)
            self._fit(blocks, min(seconds, most_seconds))

    def _fit(self, blocks: int, seconds: float) -> None:
        self._weight = _KEPT * self._weight + 1
        self._blocks = _KEPT * self._blocks + blocks
        self._squares = _KEPT * self._squares + blocks * blocks
        self._seconds = _KEPT * self._seconds + seconds
        self._products = _KEPT * self._products + blocks * seconds
        spread = self._weight * self._squares - self._blocks * self._blocks
        slope = self._seconds / self._blocks  # what all reads took, if their sizes do not tell the two apart
        if spread > 1e-6 * self._weight * self._squares:
            slope = (self._weight * self._products - self._blocks * self._seconds) / spread
        # Neither can be below 0: then the other one alone explains the reads.
        self.seconds_per_block = min(max(slope, 0.0), self._seconds / self._blocks)
        self.access_seconds = (self._seconds - self.seconds_per_block * self._blocks) / self._weight


def fetch_seconds(figures: HostTierFigures, fetches: Iterable[KvFetch]) -> Mapping[int, float]:
    """Return how long each lane copies what sequences fetch, before correction; by lane."""
    by_lane: dict[int, float] = {}
    for one in fetches:
        for part in one.blocks:
            seconds = part.count * figures.fetch_seconds_per_block
            by_lane[part.lane] = by_lane.get(part.lane, 0.0) + seconds
    return by_lane


def offload_seconds(
    figures: HostTierFigures,
    admits: Iterable[Admit],
    grows: Iterable[Grow],
    loads: Iterable[HostLoad] = (),
) -> Mapping[int, float]:
    """Return how long each lane copies to its host tier for admits, grows and loads, before correction; by lane."""
    by_lane: dict[int, float] = {}

    def add(evictions: Iterable[Eviction]) -> None:
        for one in evictions:
            blocks = sum(offload.count for offload in one.offloads)
            if blocks:
                seconds = blocks * figures.offload_seconds_per_block
                by_lane[one.lane] = by_lane.get(one.lane, 0.0) + seconds

    for load in loads:
        if load.last >= 0:  # it comes from the device
            seconds = load.count * figures.offload_seconds_per_block
            by_lane[load.lane] = by_lane.get(load.lane, 0.0) + seconds
    for grow in grows:
        add(grow.evictions)
    for admit in admits:
        add(admit.evictions)
    return by_lane
