"""What ranks keep of their lanes, next to what their controller keeps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from medha.kv.blocks import cut_runs
from medha.kv.lane_replay import LaneReplay
from medha.kv.pools import KvPools


def assert_replayed(pools: KvPools, replicas: Sequence[LaneReplay]) -> None:
    """Ranks that were told everything have the controller's ledgers, shard maps and prefix caches, one rank a lane.

    Also what the hashes on steps leave out, and what a later eviction is named by: who locks which cached block, when it
    was last used, and what leads to it.
    """
    assert not pools.has_changes
    for replica in replicas:
        replica.note_windows()
    assert tuple(replica.state_hash() for replica in replicas) == pools.state_hashes()
    for lane, replica in zip(pools._lanes, replicas, strict=True):
        assert (replica.ledger.free_blocks, replica.ledger.remembered_blocks) == (
            lane.ledger.free_blocks,
            lane.ledger.remembered_blocks,
        )
        paths = replica._paths
        assert paths._clock == lane.cache._clock, f"releases on lane {replica.lane}"
        assert list(paths._locked) == list(lane.cache._locked), (
            f"sequences of lane {replica.lane}, as they came"
        )
        assert all(paths._locked[name] == lane.cache.end(name) for name in paths._locked)
        found = 0
        above = [(node, 0) for node in lane.cache._root.children.values()]
        while above:
            node, before = above.pop()
            blocks = np.concatenate([np.arange(first, first + length) for first, length in node.runs])
            where = f"blocks {blocks.tolist()} of lane {replica.lane}"
            assert (paths._locks[blocks] == node.locks).all(), (
                f"{where}: {paths._locks[blocks]} locks, not {node.locks}"
            )
            if not node.locks:
                used_at = paths._used_at[blocks]
                assert (used_at == node.used_at).all(), f"{where}: used at {used_at}, not {node.used_at}"
            depth = before + node.blocks
            assert cut_runs(paths.runs(node.last_block, depth), before, depth) == node.runs, where
            above += [(child, depth) for child in node.children.values()]
            found += node.blocks
        assert found == np.count_nonzero(replica.ledger.remembered)
