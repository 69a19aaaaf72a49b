"""The host tier of a lane: what it takes, what it drops for that, and what it refuses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from medha.cost.predictor import Predictor
from medha.cost.tier_seconds import TierSeconds, fetch_seconds, offload_seconds
from medha.errors import LedgerMismatch
from medha.kv.blocks import BlockLedger
from medha.kv.host_tier import HostLedger, HostTier, KvTier, TierCopy, tier_copies
from medha.kv.lane_replay import LaneReplay
from medha.kv.pools import KvPools, Placed
from medha.kv.prefix_cache import Branch, PrefixHasher, hash_range
from medha.kv.unwritten_blocks import UnwrittenBlocks
from medha.wire.messages import (
    Admit,
    Eviction,
    Fetch,
    Grow,
    HostDrop,
    HostLoad,
    HostTierFigures,
    KvFetch,
    Offload,
    Sampling,
    Step,
    StepProfile,
)

SIZE = 4
HASHER = PrefixHasher(SIZE, b"secret")


@dataclass
class Prices:
    """Each token costs more to compute than the one before it, up to twice as much at 10,000."""

    fetch_seconds_per_block: float = 0.0

    def fetch_seconds(self, blocks: int) -> float:
        return blocks * self.fetch_seconds_per_block

    def compute_seconds(self, context: int, tokens: int) -> float:
        return (tokens - context) * (1 + (tokens + context) / 20_000)


def hashes(seed: int, blocks: int, salt: str = "") -> str:
    return HASHER.hashes(np.random.default_rng(seed).integers(0, 1000, blocks * SIZE).astype(np.int32), salt)


def branch(seed: int, start: int, stop: int, first_block: int = 0) -> Branch:
    """Blocks `start .. stop` of a text, in consecutive blocks of the pool."""
    return Branch(hashes(seed, stop), start, stop - start, [(first_block, stop - start)])


def held(tier: HostTier, seed: int, blocks: int, start: int = 0) -> int:
    return sum(one.count for one in tier.match(hashes(seed, blocks), start, blocks))


def test_a_text_that_was_offloaded_from_its_end_is_found_from_its_beginning() -> None:
    tier = HostTier(20, SIZE, Prices())
    drops, offloads = tier.offload([branch(1, 6, 10, first_block=30), branch(1, 0, 6, first_block=8)])
    assert drops == ()
    assert sorted(offloads, key=lambda one: one.last) == [Offload(13, 6), Offload(33, 4)]
    assert held(tier, 1, 10) == 10
    assert held(tier, 1, 10, start=3) == 7
    assert held(tier, 2, 10) == 0
    assert tier.match(hashes(1, 10, salt="another key"), 0, 10) == []
    tier.check()


def test_what_the_tier_holds_already_is_not_copied_again() -> None:
    tier = HostTier(20, SIZE, Prices())
    tier.offload([branch(1, 0, 6)])
    assert tier.offload([branch(1, 2, 9, first_block=50)]) == ((), (Offload(56, 3),))
    assert tier.offload([branch(1, 2, 9, first_block=50)]) == ((), ())
    tier.check()


def test_a_block_that_a_lane_has_cached_twice_is_copied_once() -> None:
    """Once behind what precedes it, and once as the beginning of a lane's part of another map."""
    tier = HostTier(20, SIZE, Prices())
    text = hashes(1, 4)
    alone = Branch(hash_range(text, 3, 4), 0, 1, [(9, 1)])
    assert tier.offload([alone, branch(1, 0, 4, first_block=20)]) == ((), (Offload(22, 3), Offload(9, 1)))
    tier.check()


def test_blocks_that_two_branches_have_are_taken_once() -> None:
    """A lane's cache has the same blocks behind two beginnings if maps cut a prompt at several places."""
    tier = HostTier(20, SIZE, Prices())
    _, offloads = tier.offload([branch(1, 2, 10, first_block=0), branch(1, 4, 12, first_block=50)])
    assert sorted(offloads, key=lambda one: one.last) == [Offload(7, 8), Offload(57, 2)]
    assert held(tier, 1, 12, start=2) == 10
    tier.check()
    for seed in range(3, 9):
        tier.offload([branch(seed, 5000, 5012)])
        tier.check()
    assert tier.counts.dropped_blocks > 10


def test_prompts_that_lanes_share_at_several_places_leave_one_copy_on_each_lane() -> None:
    pools = KvPools(
        lanes=2, kv_blocks=60, block_size_tokens=SIZE, tokens_per_lane=40, host_blocks=100, prices=Prices()
    )
    for blocks in (26, 30):
        assert pools.admit(str(blocks), blocks * SIZE, blocks * SIZE, block_hashes=hashes(1, blocks))
    for blocks in (26, 30):  # the second lane has the blocks from the 13th, and those from the 15th
        pools.computed(str(blocks), blocks * SIZE)
        pools.release(str(blocks))
    for seed in range(2, 12):
        assert pools.admit(str(seed), 118 * SIZE, 118 * SIZE, block_hashes=hashes(seed, 118))
        pools.computed(str(seed), 118 * SIZE)
        pools.release(str(seed))
        for tier in pools.tiers:
            tier.check()


def test_a_long_prompt_is_fetched_on_whichever_lanes_have_it() -> None:
    pools = KvPools(
        lanes=2, kv_blocks=60, block_size_tokens=SIZE, tokens_per_lane=48, host_blocks=400, prices=Prices()
    )

    def serve(name: str, blocks: int) -> Placed:
        text = hashes(int(name), blocks)
        placed = pools.admit(name, blocks * SIZE, blocks * SIZE, block_hashes=text)
        assert placed is not None
        pools.computed(name, blocks * SIZE)
        pools.release(name)
        pools.take_inserts()
        pools.take_releases()
        return placed

    assert pools.admit("0", 32, 32, block_hashes=hashes(0, 8), owners=[0])
    assert serve("1", 24).shards.lanes == (1, 0)
    pools.release("0")
    pools.take_releases()
    for name in ("2", "3"):
        serve(name, 118)
    expected, _ = pools.expected(24 * SIZE, hashes(1, 24), is_long=True)
    placed = serve("1", 24)
    assert placed.shards.lanes == (1, 0)
    assert placed.cached_tokens == expected == 23 * SIZE
    assert pools.tier_counts.fetched_blocks == 23


def test_a_full_tier_gives_way_to_what_costs_more_and_keeps_the_beginnings() -> None:
    tier = HostTier(10, SIZE, Prices())
    tier.offload([branch(1, 4, 8), branch(1, 0, 4)])
    drops, offloads = tier.offload([branch(2, 5000, 5005)])
    assert [one.count for one in offloads] == [5]
    assert drops == (HostDrop(1, 1),), (
        "the end of the text, which became the second extent, not its beginning"
    )
    assert held(tier, 1, 8) == 5
    tier.check()


def test_what_is_worth_less_is_turned_away_until_the_rest_has_aged() -> None:
    tier = HostTier(8, SIZE, Prices())
    tier.offload([branch(1, 2000, 2008)])
    turned_away = 0
    while tier.offload([branch(100 + turned_away, 0, 8)]) == ((), ()):
        turned_away += 1
        assert turned_away < 20
    assert turned_away > 0
    tier.check()


@dataclass
class Below:
    """A tier below the host tier that has the extents of some numbers, and wants what `wants` says."""

    extents: set[int]
    wants: bool = True

    def have(self, extent: int, hashes: str, start: int, stop: int) -> bool:
        return extent in self.extents

    def want(self, hashes: str, start: int, stop: int) -> bool:
        return self.wants


@pytest.mark.parametrize(
    ("extents", "wants", "drops", "taken"),
    [
        pytest.param({0, 1}, True, (HostDrop(0, 2),), 6, id="from what is worth least"),
        pytest.param({1}, True, (HostDrop(1, 2),), 6, id="from what the lower tier has"),
        pytest.param(set(), True, (), 0, id="the lower tier has nothing"),
        pytest.param({0, 1}, False, (), 0, id="the lower tier does not want it"),
    ],
)
def test_what_passes_through_to_a_lower_tier_gets_room_from_what_that_tier_has(
    extents: set[int], wants: bool, drops: tuple[HostDrop, ...], taken: int
) -> None:
    tier = HostTier(16, SIZE, Prices())
    tier.below = Below(extents, wants)
    tier.offload([branch(1, 2000, 2008)])
    tier.offload([branch(2, 3000, 3008)])
    found, offloads = tier.offload([branch(3, 0, 6)])
    assert (found, sum(one.count for one in offloads)) == (drops, taken)
    tier.check()


def test_what_passes_through_takes_the_end_of_its_own_beginning_last() -> None:
    tier = HostTier(16, SIZE, Prices())
    tier.below = Below({0, 1})
    tier.offload([branch(1, 0, 8)])
    tier.offload([branch(2, 3000, 3008)])
    assert tier.take_in(hashes(1, 11), 8, 3, is_awaited=False) == (2, 3, (HostDrop(1, 5),))
    assert tier.take_in(hashes(1, 20), 11, 9, is_awaited=False) == (3, 5, (HostDrop(1, 0),))
    tier.below = Below({3})
    assert tier.take_in(hashes(1, 18), 16, 2, is_awaited=False) == (4, 2, (HostDrop(3, 3),))
    tier.check()


def test_what_was_read_from_the_store_gives_its_room_to_what_passes_through() -> None:
    tier = HostTier(8, SIZE, Prices())
    tier.below = Below(set())
    made = tier.begin_load(hashes(1, 2008), 2000, 8, "store", due=0.0)
    assert made is not None
    tier.end_load(made[0], is_there=True)
    assert tier.take_in(hashes(2, 4), 0, 4, is_awaited=False) is None, "no request has fetched it yet"
    tier.fetch("a", tier.match(hashes(1, 2008), 2000, 2008), 0)
    tier.fetched("a")
    assert tier.take_in(hashes(2, 4), 0, 4, is_awaited=False) == (1, 4, (HostDrop(0, 4),))
    tier.check()


def test_a_slow_disk_does_not_empty_the_tier() -> None:
    """Once more than a quarter of the tier waits for the disk, what passes through takes the room of what waits."""
    tier = HostTier(16, SIZE, Prices())
    tier.below, tier.unwritten = Below({0}), UnwrittenBlocks()
    tier.offload([branch(1, 2000, 2016)])
    assert tier.take_unwritten(16) is not None
    for number in range(2, 6):
        tier.offload([branch(number, 0, 3)])
        tier.unwritten.check({one.number: (one.worth, one.blocks) for one in tier._extents.values()})
    assert (held(tier, 1, 2016, start=2000), tier.unwritten.blocks) == (10, 6)


def test_what_passes_through_takes_the_room_of_what_passed_through_before() -> None:
    """So two of them together take no more room from what is worth more than one does."""
    tier = HostTier(16, SIZE, Prices())
    tier.below = Below(set(range(100)))
    tier.offload([branch(1, 2000, 2016)])
    for number in range(2):
        assert tier.take_in(hashes(10 + number, 4), 0, 4, is_awaited=False) is not None
        tier.check()
    assert held(tier, 1, 2016, start=2000) == 12


def test_what_is_used_stays() -> None:
    tier = HostTier(8, SIZE, Prices())
    tier.offload([branch(1, 0, 4)])
    tier.offload([branch(2, 0, 4)])
    for seed in range(3, 40):
        found = tier.match(hashes(1, 4), 0, 4)
        assert sum(one.count for one in found) == 4, f"before text {seed}"
        assert tier.fetch("a", found, 0) == (Fetch(0, 0, 4),)
        tier.fetched("a")
        tier.offload([branch(seed, 0, 4)])
        tier.check()
    assert held(tier, 2, 4) == 0
    assert tier.counts.dropped_blocks > 4


def load(tier: HostTier, seed: int, blocks: int, piece: int = 4) -> int:
    """Load a text piece by piece, as from files, and fetch it; return how many of its blocks the tier takes."""
    loading: list[int] = []
    taken = 0
    for at in range(0, blocks, piece):
        began = tier.begin_load(hashes(seed, blocks), at, piece, "disk", due=0.0)
        if began is None:
            break
        loading.append(began[0])
        taken += began[1]
        tier.check()
    for extent in loading:
        assert tier.end_load(extent, is_there=True) is None
    tier.fetch("a", tier.match(hashes(seed, blocks), 0, taken), 0)
    tier.fetched("a")
    tier.check()
    return taken


def test_a_text_that_a_request_waits_for_gets_a_place_in_a_tier_full_of_texts_as_costly() -> None:
    """Five texts of which a tier holds two come in turn: each is loaded whole, and most of the one before it stays."""
    tier = HostTier(40, SIZE, Prices())
    tier.offload([branch(100, 0, 40)])
    for turn in range(25):
        assert load(tier, turn % 5, 20) == 20
        assert held(tier, turn % 5, 20) == 20
        assert turn == 0 or held(tier, (turn - 1) % 5, 20) >= 16


def test_cheap_loads_get_a_place_again_and_again_and_costly_texts_lose_little_for_it() -> None:
    """The first load drops the end of a costly text; those that follow take that place, until as much cost has been loaded."""
    tier = HostTier(400, SIZE, Prices())
    tier.offload([branch(1, 9600, 10000)])
    cost = Prices().compute_seconds
    loads = round(cost(9600 * SIZE, 10000 * SIZE) / cost(0, 8 * SIZE))
    for name in range(loads // 2):
        assert load(tier, 100 + name, 8) == 8
        assert sum(one.count for one in tier.match(hashes(1, 10000), 9600, 10000)) == 392
    for name in range(loads):
        assert load(tier, 1000 + name, 8) == 8
    assert not tier.match(hashes(1, 10000), 9700, 10000), "nobody has used it for a long time"


def test_a_load_drops_nothing_that_was_loaded_for_a_request_that_still_waits_for_a_place() -> None:
    """Once the rest has aged by what was turned away, nothing keeps it: its request may have been cancelled."""
    tier = HostTier(30, SIZE, Prices())
    tier.offload([branch(1, 0, 30)])
    began = tier.begin_load(hashes(2, 25), 0, 25, "disk", due=0.0)
    assert began is not None
    assert began[1] == 25
    tier.end_load(began[0], is_there=True)
    other = tier.begin_load(hashes(3, 25), 0, 25, "disk", due=0.0)
    assert other is not None
    assert (other[1], held(tier, 2, 25)) == (5, 25)
    tier.end_load(other[0], is_there=True)
    assert tier.begin_load(hashes(4, 25), 0, 25, "disk", due=0.0) is None
    tier.check()
    for seed in range(100, 110):
        tier.offload([branch(seed, 0, 25)])
        tier.check()
    assert held(tier, 2, 25) == 0


def test_blocks_come_from_the_tier_that_they_were_read_from_until_some_are_fetched() -> None:
    tier = HostTier(40, SIZE, Prices())
    tier.offload([branch(1, 0, 3)])
    sources: tuple[KvTier, ...] = ("disk", "store", "peers")
    for at, source in zip((3, 7, 9), sources, strict=True):
        began = tier.begin_load(
            hashes(1, 13), at, {"disk": 4, "store": 2, "peers": 4}[source], source, due=0.0
        )
        assert began is not None
        tier.end_load(began[0], is_there=True)
    found = tier.match(hashes(1, 13), 0, 10)
    assert tier.blocks_by_tier(found) == {"host": 3, "disk": 4, "store": 2, "peers": 1}
    tier.fetch("a", found, 0)
    assert tier.blocks_by_tier(tier.match(hashes(1, 13), 0, 13)) == {"host": 13}


def test_avoided_prefill_is_divided_by_the_blocks_of_each_tier() -> None:
    prices = Prices()
    pools = KvPools(
        lanes=1, kv_blocks=20, block_size_tokens=SIZE, tokens_per_lane=100, host_blocks=50, prices=prices
    )
    for seed, blocks in ((1, 3), (2, 20)):  # the second one drives the first one out
        assert pools.admit(str(seed), blocks * SIZE, blocks * SIZE, block_hashes=hashes(seed, blocks))
        pools.computed(str(seed), blocks * SIZE)
        pools.release(str(seed))
        pools.take_releases()
    began = pools.tiers[0].begin_load(hashes(1, 12), 3, 9, "store", due=0.0)
    assert began is not None
    pools.tiers[0].end_load(began[0], is_there=True)
    assert pools.admit("again", 49, 52, block_hashes=hashes(1, 12))
    whole_seconds = prices.compute_seconds(0, 49) - prices.compute_seconds(48, 49)
    assert pools.avoided_prefill_seconds == pytest.approx(
        {"host": whole_seconds / 4, "disk": 0.0, "store": whole_seconds * 3 / 4, "peers": 0.0}
    )


def test_a_load_drops_nothing_that_is_kept() -> None:
    tier = HostTier(8, SIZE, Prices())
    tier.begin_swap(hashes(1, 6))
    tier.offload([branch(1, 0, 6)])
    assert load(tier, 2, 4) == 2
    tier.pin(tier.match(hashes(2, 4), 0, 4))
    assert tier.begin_load(hashes(3, 4), 0, 4, "disk", due=0.0) is None
    tier.unpin()
    assert load(tier, 3, 4) == 2
    assert (held(tier, 1, 6), held(tier, 2, 4)) == (6, 0)


def test_cached_blocks_for_another_replica_get_a_place_in_a_full_tier() -> None:
    tier = HostTier(8, SIZE, Prices())
    tier.offload([branch(1, 9000, 9008)])
    assert tier.take_in(hashes(3, 4), 0, 4, is_awaited=False) is None, "a store takes it later"
    assert tier.take_in(hashes(2, 4), 0, 4, is_awaited=True) == (1, 4, (HostDrop(0, 4),))
    tier.check()


def test_what_is_about_to_be_fetched_is_not_dropped_for_what_is_evicted() -> None:
    tier = HostTier(4, SIZE, Prices())
    tier.offload([branch(1, 0, 4)])
    tier.pin(tier.match(hashes(1, 4), 0, 4))
    assert tier.offload([branch(2, 9000, 9004)]) == ((), ())
    tier.unpin()
    assert tier.offload([branch(2, 9000, 9004)]) == ((HostDrop(0, 0),), (Offload(3, 4),))
    tier.check()


def test_what_is_kept_for_a_request_drops_the_most_costly_and_is_dropped_for_nothing() -> None:
    tier = HostTier(8, SIZE, Prices())
    tier.offload([branch(1, 9000, 9008)])
    assert tier.offload([branch(2, 0, 4)]) == ((), ()), "without being kept, it is worth less"
    tier.begin_swap(hashes(2, 6))
    drops, offloads = tier.offload([branch(2, 0, 4, first_block=20)])
    assert ([one.keep for one in drops], offloads) == ([4], (Offload(23, 4),))
    assert (tier.swapped_blocks, held(tier, 2, 6)) == (4, 4)
    tier.offload([branch(3, 9000, 9008)])
    assert held(tier, 2, 6) == 4
    tier.check()
    tier.end_swap(hashes(2, 6))
    tier.offload([branch(4, 9000, 9008)])
    tier.offload([branch(5, 9000, 9008)])
    assert (tier.swapped_blocks, held(tier, 2, 6)) == (0, 0)
    tier.check()


def test_of_requests_that_do_not_all_fit_each_keeps_what_it_has() -> None:
    tier = HostTier(6, SIZE, Prices())
    tier.begin_swap(hashes(1, 4))
    tier.begin_swap(hashes(2, 4))
    tier.offload([branch(1, 0, 4)])
    _, offloads = tier.offload([branch(2, 0, 4, first_block=10)])
    assert [one.count for one in offloads] == [2], "its beginning; the rest is computed again"
    assert (held(tier, 1, 4), held(tier, 2, 4), tier.counts.swapped_out_blocks) == (4, 2, 6)
    tier.check()


def test_the_beginning_of_what_is_kept_drops_its_end() -> None:
    """A branch is evicted from its end, and without its beginning the end is of no use."""
    tier = HostTier(6, SIZE, Prices())
    tier.begin_swap(hashes(1, 10))
    tier.offload([branch(1, 5, 10)])
    drops, offloads = tier.offload([branch(1, 0, 5, first_block=20)])
    assert (drops, offloads) == ((HostDrop(0, 1),), (Offload(24, 5),))
    assert (tier.swapped_blocks, held(tier, 1, 10)) == (6, 6)
    tier.check()
    tier.end_swap(hashes(1, 10))
    tier.check()


def test_the_beginning_of_what_is_kept_drops_no_end_that_another_replica_reads() -> None:
    tier = HostTier(6, SIZE, Prices())
    tier.begin_swap(hashes(1, 10))
    tier.offload([branch(1, 5, 10)])
    tier.serve("ticket", tier.match(hashes(1, 10), 5, 10))
    drops, offloads = tier.offload([branch(1, 0, 5, first_block=20)])
    assert (drops, offloads) == ((), (Offload(20, 1),)), "one block is free"
    assert held(tier, 1, 10, start=5) == 5
    tier.unserve("ticket")
    drops, offloads = tier.offload([branch(1, 1, 5, first_block=21)])
    assert (drops, offloads) == ((HostDrop(0, 1),), (Offload(24, 4),))
    tier.check()


def test_each_piece_of_a_long_text_is_kept_for_a_request_that_stepped_aside() -> None:
    """Pieces of three blocks come from the end; most have no block that is in the index of a long text."""
    tier = HostTier(3000, SIZE, Prices())
    tier.begin_swap(hashes(1, 3000))
    for start in range(2997, -1, -3):
        tier.offload([branch(1, start, start + 3)])
    assert (tier.swapped_blocks, tier.wanted_blocks, held(tier, 1, 3000)) == (3000, 3000, 3000)
    assert tier.offload([branch(2, 5000, 5010)]) == ((), ())
    tier.begin_swap(hashes(1, 1000))
    tier.end_swap(hashes(1, 3000))
    assert (tier.swapped_blocks, tier.wanted_blocks) == (1000, 1000)
    tier.end_swap(hashes(1, 1000))
    assert (tier.swapped_blocks, tier.wanted_blocks) == (0, 0)
    tier.check()


@pytest.mark.parametrize("seed", range(10))
def test_the_end_of_a_long_text_that_another_one_begins_is_kept_as_long_as_it_is_needed(seed: int) -> None:
    """The end that one of two has alone is short, and has no block that is in the index of a long text."""
    text = hashes(seed, 2012)
    first, both = hash_range(text, 0, 2000), text
    for order in ((first, both), (both, first)):
        tier = HostTier(100, SIZE, Prices())
        tier.begin_swap(order[0])
        tier.begin_swap(order[1])
        tier.offload([branch(seed, 2003, 2012), branch(seed, 1997, 2003)])
        assert (tier.swapped_blocks, tier.wanted_blocks) == (15, 2012)
        tier.end_swap(first)
        assert (tier.swapped_blocks, tier.wanted_blocks) == (15, 2012)
        tier.begin_swap(first)
        tier.end_swap(both)
        assert (tier.swapped_blocks, tier.wanted_blocks) == (3, 2000)
        tier.end_swap(first)
        assert (tier.swapped_blocks, tier.wanted_blocks) == (0, 0)
        tier.check()


@pytest.mark.parametrize(("first", "second"), [((6, 12), (8, 16)), ((8, 16), (6, 12))])
def test_parts_of_prompts_on_a_lane_that_begin_at_different_blocks_are_kept_until_both_have_gone(
    first: tuple[int, int], second: tuple[int, int]
) -> None:
    tier, text = HostTier(100, SIZE, Prices()), hashes(1, 16)
    for part in (first, second):
        tier.begin_swap(hash_range(text, *part))
    tier.offload([branch(1, 0, 16)])
    assert tier.wanted_blocks == 10
    tier.end_swap(hash_range(text, *first))
    tier.check()
    assert tier.wanted_blocks == second[1] - second[0]
    tier.end_swap(hash_range(text, *second))
    tier.check()
    assert (tier.wanted_blocks, tier.swapped_blocks) == (0, 0)


def test_what_the_tier_holds_of_a_long_text_is_found_from_each_block_on_and_not_copied_again() -> None:
    tier = HostTier(5000, SIZE, Prices())
    tier.offload([branch(1, 0, 4000)])
    assert [held(tier, 1, 4000, start) for start in range(0, 4000, 7)] == list(range(4000, 0, -7))
    assert tier.offload([branch(1, 1003, 4000), branch(1, 17, 1003)]) == ((), ())
    assert tier.offload([branch(1, 2000, 4200)])[1] == (Offload(2199, 200),)
    tier.check()


def test_only_the_blocks_that_a_request_computed_are_kept_of_a_longer_branch() -> None:
    tier = HostTier(6, SIZE, Prices())
    tier.offload([branch(9, 9000, 9006)])
    tier.begin_swap(hashes(1, 2))
    drops, offloads = tier.offload([branch(1, 0, 5)])
    assert ([one.keep for one in drops], offloads) == ([4], (Offload(1, 2),))
    tier.check()


def test_the_kv_of_a_sequence_that_stepped_aside_is_kept_until_it_is_admitted_again_or_gone() -> None:
    for comes_back in (True, False):
        pools = KvPools(
            lanes=1, kv_blocks=8, block_size_tokens=SIZE, tokens_per_lane=100, host_blocks=8, prices=Prices()
        )

        def serve(name: str, seed: int, *, swaps: bool, pools: KvPools = pools) -> Placed:
            placed = pools.admit(name, 32, 32, block_hashes=hashes(seed, 8))
            assert placed is not None
            pools.computed(name, 32)
            pools.release(name, 32, swaps=swaps)
            pools.take_inserts()
            pools.take_releases()
            return placed

        serve("long", 1, swaps=True)
        for seed in range(2, 9):
            serve(str(seed), seed, swaps=False)
            pools.tiers[0].check()
        assert (pools.swapped, pools.tier_room([0])) == (1, 0)
        if comes_back:
            assert serve("long", 1, swaps=False).cached_tokens == 7 * SIZE
            assert pools.tier_counts.swapped_in_blocks == 7
        else:
            pools.end_swap("long")
        assert (pools.swapped, pools.tier_room([0])) == (0, 8)


def test_the_room_for_one_that_steps_aside_is_without_what_is_kept_for_others_and_still_on_the_device() -> (
    None
):
    pools = KvPools(
        lanes=1, kv_blocks=8, block_size_tokens=SIZE, tokens_per_lane=100, host_blocks=8, prices=Prices()
    )
    assert pools.admit("long", 24, 24, block_hashes=hashes(1, 6))
    pools.computed("long", 24)
    pools.release("long", 24, swaps=True)
    assert (pools.tiers[0].swapped_blocks, pools.tier_room([0])) == (0, 2)


def test_a_sequence_of_which_nothing_can_be_found_again_is_not_counted_as_swapped() -> None:
    pools = KvPools(
        lanes=1, kv_blocks=8, block_size_tokens=SIZE, tokens_per_lane=100, host_blocks=8, prices=Prices()
    )
    assert pools.admit("without hashes", 24, 24)
    pools.release("without hashes", 24, swaps=True)
    assert (pools.swapped, pools.swaps_out) == (0, 0)


def test_what_would_be_computed_faster_than_fetched_is_not_offloaded() -> None:
    assert HostTier(4, SIZE, Prices(100.0)).offload([branch(1, 0, 4)]) == ((), ())


@pytest.mark.parametrize(("price", "fetched"), [(1.0, 3), (100.0, 0)])
def test_a_prefix_is_fetched_only_if_that_is_faster(price: float, fetched: int) -> None:
    prices = Prices(0.0)
    pools = KvPools(
        lanes=1, kv_blocks=4, block_size_tokens=SIZE, tokens_per_lane=100, host_blocks=50, prices=prices
    )
    for name, seed in (("first", 1), ("second", 2)):
        placed = pools.admit(name, 16, 16, block_hashes=hashes(seed, 4))
        assert placed is not None
        pools.computed(name, 16)
        pools.release(name)
        pools.take_inserts()
        pools.take_releases()
    prices.fetch_seconds_per_block = price
    assert pools.expected(16, hashes(1, 4))[0] == fetched * SIZE
    placed = pools.admit("again", 16, 16, block_hashes=hashes(1, 4))
    assert placed is not None
    assert pools.unfetched_blocks("again") == fetched
    assert placed.cached_tokens == fetched * SIZE
    assert pools.tier_counts.hits == (fetched > 0)
    avoided_seconds = prices.compute_seconds(0, 16) - prices.compute_seconds(12, 16) if fetched else 0.0
    assert pools.avoided_prefill_seconds == {"host": avoided_seconds, "disk": 0.0, "store": 0.0, "peers": 0.0}


def test_a_long_text_that_comes_in_small_extents_costs_a_time_that_grows_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each extent is worth a little more than the one before it, and none may be worth less than those behind it."""
    offers = 0
    offer = HostTier._offer

    def counted(self: HostTier, extent: Any) -> None:
        nonlocal offers
        offers += 1
        offer(self, extent)

    monkeypatch.setattr(HostTier, "_offer", counted)

    def cost(extents: int) -> int:
        nonlocal offers
        tier, text = HostTier(4 * extents, SIZE, Prices()), hashes(1, 4 * extents)
        offers = 0
        for first in range(0, 4 * extents, 4):
            assert tier.take_in(text, first, 4, is_awaited=False) is not None
        tier.check()
        return offers

    few, many = cost(200), cost(2000)
    assert many < 40 * few
    assert many < 20 * 2000


def test_what_an_old_tier_keeps_for_what_is_behind_it_is_worth_little_more_than_that() -> None:
    """Worth grows with the age of a tier, and the part that keeps extents in order must not grow along."""
    tier = HostTier(16, SIZE, Prices())
    dearest = tier._block_seconds(4, 8)
    for seed in range(400):
        for start in (0, 4):
            tier.offload([branch(seed, start, start + 4)])
            assert all(one.worth <= tier._aged + 1.2 * dearest for one in tier._extents.values())
    tier.check()
    assert tier._aged > 20 * dearest


def test_ledgers_refuse_what_they_cannot_do() -> None:
    ledger = HostLedger(6)
    assert ledger.store(4) == (0, [(0, 4)])
    for wrong in (
        lambda: ledger.store(3),
        lambda: ledger.store(0),
        lambda: ledger.drop(0, 4),
        lambda: ledger.drop(7, 0),
        lambda: ledger.runs(0, 2, 3),
        lambda: ledger.runs(1, 0, 1),
    ):
        with pytest.raises(LedgerMismatch):
            wrong()
    before = ledger.digest()
    ledger.drop(0, 1)
    assert ledger.digest() != before
    assert (ledger.free_blocks, ledger.store(5)) == (5, (1, [(1, 5)]))
    ledger.check()


def test_a_rank_without_a_tier_does_not_follow_a_controller_that_has_one() -> None:
    replica = LaneReplay(BlockLedger(8, SIZE))
    assert replica.admit(Admit("a", "p", 8, 8, 0, Sampling(), 8)) == []
    with pytest.raises(LedgerMismatch, match="this rank has none"):
        replica.fetch([KvFetch("a", (Fetch(0, 0, 1),))])


def test_what_is_due_later_delays_a_read_by_one_read_at_most() -> None:
    tier = HostTier(100, SIZE, Prices())
    for seed, blocks, source, due in (
        (1, 5, "disk", 4.0),
        (2, 7, "disk", 9.0),
        (3, 6, "disk", 9.0),
        (4, 30, "store", 0.0),
    ):
        assert tier.begin_load(hashes(seed, blocks), 0, blocks, source, due) is not None  # type: ignore[arg-type]
    assert [tier.blocks_before("disk", due) for due in (3.0, 4.0, 9.0)] == [7, 12, 18]


def test_a_rank_reads_when_the_controller_says_that_it_is_due() -> None:
    replica = LaneReplay(BlockLedger(8, SIZE), host_blocks=8)
    loads = [HostLoad("file", 0, 2, due=7.5), HostLoad("object", 1, 3, is_stored=True, due=2.0)]
    replica.load(loads)
    reads = replica.take_host_tier_work().reads
    assert [(one.file, one.start, one.is_stored, one.due) for one in reads] == [
        (one.file, one.start, one.is_stored, one.due) for one in loads
    ]


def test_copies_pair_the_blocks_of_both_sides_in_order() -> None:
    assert tier_copies([(5, 3), (20, 2)], [(0, 1), (9, 4)], is_fetch=True) == [
        TierCopy(True, 5, 0, 1),
        TierCopy(True, 6, 9, 2),
        TierCopy(True, 20, 11, 2),
    ]


def test_a_steps_copies_are_predicted_by_lane_and_corrected_by_what_they_took() -> None:
    figures = HostTierFigures(100, 1, fetch_seconds_per_block=0.5, offload_seconds_per_block=0.25)
    evictions = tuple(Eviction(0, 0, 0, lane, (), (Offload(3, 2), Offload(9, 2))) for lane in (0, 1))
    admit = Admit("a", "p", 8, 8, 0, Sampling(), 8, evictions=evictions)
    fetch = KvFetch("a", (Fetch(0, 0, 6, lane=1),))
    grow = Grow("b", 8, evictions=evictions[:1])
    assert offload_seconds(figures, [admit], [grow]) == {0: 2.0, 1: 1.0}
    assert fetch_seconds(figures, [fetch]) == {1: 3.0}
    seconds = TierSeconds(figures, Predictor(StepProfile(1e-3, 1e-5, 1e-8, 1e-5)))
    step = Step(0, 0, (), admits=(admit,), grows=(grow,), lanes=(0, 1), fetches=(fetch,))
    for _ in range(40):
        seconds.observe(step, 8.0)
    assert seconds.factor == pytest.approx(2.0, rel=0.01)
    assert seconds.fetch_seconds(10) == pytest.approx(10.0, rel=0.01)
    assert seconds.by_lane([admit])[1] == pytest.approx(2.0, rel=0.01)
    assert seconds.fetch_by_lane([fetch])[1] == pytest.approx(6.0, rel=0.01)
