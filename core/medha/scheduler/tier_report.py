"""The bytes that a replica's tiers have copied, and the predicted times of reading them.

Pure functions of a controller. Bytes are those of one rank of each lane, added up over the lanes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from medha.scheduler.controller import ReplicaController

Tier = Literal["host", "disk", "store", "peers", "streaming"]
"""Places outside the KV pools: the tiers of `medha.kv.host_tier.KvTier`, and the host memory of streamed KV."""
Direction = Literal["read", "written"]
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class ReadTime:
    """Predicted time of reads of a tier."""

    latency_seconds: float
    """Time of a read, however small."""
    seconds_per_gib: float
    """Time that each GiB of one rank adds to it."""


def tiers_of(core: ReplicaController) -> tuple[Tier, ...]:
    """Return the tiers that a replica has."""
    pools = core.pools
    there: dict[Tier, bool] = {
        "host": bool(pools.tiers),
        "disk": bool(pools.disks),
        "store": pools.store is not None,
        "peers": pools.has_peers,
        "streaming": core.config.streaming is not None,
    }
    return tuple(tier for tier, is_there in there.items() if is_there)


def block_bytes(core: ReplicaController, tier: Tier) -> int:
    """Return the bytes of a block of a tier on one rank; 0 if the replica does not have the tier."""
    figures = core.config.streaming if tier == "streaming" else core.config.host_tier
    return 0 if figures is None else figures.block_bytes


def avoided_seconds(core: ReplicaController, tier: Tier) -> float:
    """Return the predicted time of computing what came from a tier since the epoch began; streaming avoids nothing."""
    return 0.0 if tier == "streaming" else core.pools.avoided_prefill_seconds[tier]


def copied_bytes(core: ReplicaController) -> dict[tuple[Tier, Direction], int]:
    """Return what was read from each tier and written to it since the epoch began.

    What other replicas were let read counts as written to `peers`. A store gets only what it did not have.
    """
    pools, found = core.pools, dict[tuple[Tier, Direction], int]()

    def add(tier: Tier, read_blocks: int, written_blocks: int) -> None:
        found[tier, "read"] = read_blocks * block_bytes(core, tier)
        found[tier, "written"] = written_blocks * block_bytes(core, tier)

    for tier in tiers_of(core):
        match tier:
            case "host":
                counts = [one.counts for one in pools.tiers]
                add(
                    tier,
                    sum(one.fetched_blocks for one in counts),
                    sum(one.offloaded_blocks for one in counts),
                )
            case "disk":
                files = [one.counts for one in pools.disks]
                add(tier, sum(one.loaded_blocks for one in files), sum(one.written_blocks for one in files))
            case "store":
                assert pools.store is not None
                add(tier, pools.store.counts.loaded_blocks, pools.store.counts.written_blocks)
            case "peers":
                add(tier, pools.peer_counts.loaded_blocks, pools.peer_counts.served_blocks)
            case "streaming":
                add(tier, core.streamed_blocks, 0)
    return found


def read_times(core: ReplicaController) -> dict[Tier, ReadTime]:
    """Return the predicted time of reads of each tier, as measured reads have corrected it; there is none of `streaming`."""
    lines = core.tier_read_lines
    return {
        tier: ReadTime(lines[tier][0], lines[tier][1] * _GIB / block_bytes(core, tier))
        for tier in tiers_of(core)
        if tier in lines
    }
