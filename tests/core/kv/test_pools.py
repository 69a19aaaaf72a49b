"""The KV of a replica under any order of events: nothing lost, nothing shared wrongly, ranks agree.

The machine plays the ranks too: they hold the content of every block, write what a sequence computes, and find in
every block of every table what belongs there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from medha.kv.blocks import BlockLedger
from medha.kv.lane_replay import LaneReplay
from medha.kv.pools import KvPools, Placed
from medha.kv.prefix_cache import HASH_CHARACTERS, PrefixHasher, hash_at
from medha.shards import Segment
from medha.wire.messages import Admit, Grow, Sampling

from ..replayed import assert_replayed

Content = tuple[int, ...]


@dataclass
class Sequence:
    """What the machine knows of a running sequence."""

    ids: list[int]  # prompt, then outputs, as far as they are known
    prompt_tokens: int
    computed: int
    in_flight: int = 0  # tokens of the one step that has it
    failed: bool = False


@dataclass
class Ranks:
    """The ranks of one lane: their ledger, and which tokens' KV each (block, offset) holds."""

    replica: LaneReplay
    content: dict[tuple[int, int], Content] = field(default_factory=dict)
    host: dict[tuple[int, int], Content] = field(default_factory=dict)  # the same of the host tier

    def copy_tier(self) -> None:
        """Make the copies between pool and tier that the replica has decided, in order."""
        for copy in self.replica.take_tier_copies():
            for index in range(copy.count):
                for offset in range(self.replica.ledger.block_size_tokens):
                    here, there = (copy.block + index, offset), (copy.slot + index, offset)
                    if copy.is_fetch:
                        self.content[here] = self.host[there]
                    else:
                        self.host[there] = self.content[here]

    def table(self, name: str) -> list[int]:
        return [int(block) for block in self.replica.ledger.table(name)]


@dataclass
class Prices:
    """Each token costs more to compute than the one before it, and each block as much to fetch."""

    fetch_seconds_per_block: float

    def fetch_seconds(self, blocks: int) -> float:
        return blocks * self.fetch_seconds_per_block

    def compute_seconds(self, context: int, tokens: int) -> float:
        return sum(1 + position / 100 for position in range(context, tokens))


class PoolsMachine(RuleBasedStateMachine):
    @initialize(
        lanes=st.integers(1, 3),
        blocks=st.integers(4, 30),
        size=st.integers(1, 4),
        cap_blocks=st.integers(1, 12),
        caching=st.sampled_from([True, True, True, False]),
        striped=st.booleans(),
        host_blocks=st.sampled_from([0, 2, 8, 40]),
        fetch_price=st.sampled_from([0.0, 0.0, 1.1, 1.5]),
    )
    def start(
        self,
        lanes: int,
        blocks: int,
        size: int,
        cap_blocks: int,
        caching: bool,
        striped: bool,
        host_blocks: int,
        fetch_price: float,
    ) -> None:
        host_blocks = host_blocks if caching else 0
        self.lanes, self.blocks, self.size = lanes, blocks, size
        self.pools = KvPools(
            lanes=lanes,
            kv_blocks=blocks,
            block_size_tokens=size,
            tokens_per_lane=cap_blocks * size,
            prefix_caching=caching,
            stripes_prompts=striped,
            host_blocks=host_blocks,
            prices=Prices(fetch_price * size) if host_blocks else None,
        )
        self.ranks = [
            Ranks(LaneReplay(BlockLedger(blocks, size), lane, host_blocks)) for lane in range(lanes)
        ]
        self.hasher = PrefixHasher(size, b"secret")
        self.sequences: dict[str, Sequence] = {}
        self.names = 0

    # --- operations -----------------------------------------------------------------------------------

    @rule(
        branches=st.lists(st.integers(0, 1), max_size=4),
        length=st.integers(1, 60),
        output=st.integers(0, 20),
        pending=st.lists(st.floats(0, 9), min_size=3, max_size=3),
        owners=st.none() | st.sets(st.integers(0, 2), min_size=1),
    )
    def admit(
        self, branches: list[int], length: int, output: int, pending: list[float], owners: set[int] | None
    ) -> None:
        self._admit(branches, length, output, pending, owners)

    @rule(
        branches=st.lists(st.integers(0, 1), max_size=4), length=st.integers(1, 60), times=st.integers(1, 3)
    )
    def serve(self, branches: list[int], length: int, times: int) -> None:
        """Compute prompts from their admission to their end, so that the pool fills with what is cached."""
        for turn in range(times):
            name = self._admit([*branches, turn % 2], length, 1, [0.0, 1.0, 2.0], None)
            if name is None:
                return
            one = self.sequences[name]
            for position in range(one.computed, length):
                self._write(name, one, position)
            one.computed = length
            self.pools.computed(name, length)
            self._end(name)
            self._flush()

    def _admit(
        self,
        branches: list[int],
        length: int,
        output: int,
        pending: list[float],
        owners: set[int] | None,
    ) -> str | None:
        """Prompts differ where they take another branch, every eight tokens: many begin alike."""
        ids = [branches[index // 8] if index // 8 < len(branches) else 0 for index in range(length)]
        name = self._new_name()
        before = self.pools.free_tokens
        allowed = None if owners is None else [lane for lane in range(self.lanes) if lane in owners] or [0]
        placed = self.pools.admit(
            name,
            length,
            length + output,
            block_hashes=self.hasher.hashes(np.array(ids, dtype=np.int32)),
            pending_seconds=pending[: self.lanes],
            remaining_seconds=lambda cached: float(length - cached),
            owners=allowed,
        )
        if placed is None:
            assert self.pools.free_tokens == before, "all or nothing"
            if self.lanes == 1:
                assert -(-(length + output) // self.size) * self.size > before
            return None
        assert allowed is None or placed.shards.owner in allowed
        assert placed.cached_tokens < length, "the last token is computed again"
        assert placed.cached_tokens % self.size == 0
        self._flush()
        self._replay_admit(name, placed, length)
        self.sequences[name] = Sequence(ids, length, placed.cached_tokens)
        return name

    @precondition(lambda self: any(one.in_flight == 0 for one in self.sequences.values()))
    @rule(data=st.data(), more=st.integers(0, 20))
    def fork(self, data: st.DataObject, more: int) -> None:
        """Fork a sequence that has computed its prompt; the controller shares all of that but its last token."""
        parents = [name for name, one in self.sequences.items() if one.computed >= one.prompt_tokens]
        if not parents:
            return
        parent = data.draw(st.sampled_from(sorted(parents)))
        one, name = self.sequences[parent], self._new_name()
        shared = one.prompt_tokens - 1 - data.draw(st.sampled_from([0, 0, 0, 1, 5, 17]))
        shared = max(shared, 0)
        placed = self.pools.fork(parent, name, shared, one.prompt_tokens + more)
        if placed is None:
            return
        self._flush()
        self._replay_admit(name, placed, one.prompt_tokens, parent, shared)
        self.sequences[name] = Sequence(one.ids[: one.prompt_tokens], one.prompt_tokens, shared)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), more=st.integers(0, 25))
    def grow(self, data: st.DataObject, more: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.sequences)))
        version = self.pools.shards(name).version
        tokens = self.pools.shards(name).tokens + more
        grow = self.pools.grow(name, tokens)
        if grow is None:
            assert more > 0
            assert self.pools.shards(name).version == version
            return
        self._flush()
        assert isinstance(grow, Grow)
        for ranks in self.ranks:
            assert ranks.replica.grow(grow)
            ranks.copy_tier()

    @precondition(lambda self: any(one.in_flight == 0 for one in self.sequences.values()))
    @rule(data=st.data(), count=st.integers(1, 40))
    def launch(self, data: st.DataObject, count: int) -> None:
        name = data.draw(st.sampled_from(sorted(n for n, one in self.sequences.items() if not one.in_flight)))
        one = self.sequences[name]
        reserved = self.pools.shards(name).tokens
        count = min(count, one.prompt_tokens - one.computed) if one.computed < one.prompt_tokens else 1
        if one.computed + count > reserved:
            return
        one.in_flight = count
        while len(one.ids) < one.computed + count:
            one.ids.append(1000 + self.names)  # an output of its own
        for position in range(one.computed, one.computed + count):
            self._write(name, one, position)

    @precondition(lambda self: any(one.in_flight for one in self.sequences.values()))
    @rule(data=st.data(), fails=st.sampled_from([False, False, False, True]))
    def done(self, data: st.DataObject, fails: bool) -> None:
        name = data.draw(st.sampled_from(sorted(n for n, one in self.sequences.items() if one.in_flight)))
        one = self.sequences[name]
        if fails:
            self._end(name)  # what a failed entry has written is garbage
            return
        one.computed += one.in_flight
        one.in_flight = 0
        self.pools.computed(name, one.computed)

    @precondition(lambda self: any(one.in_flight == 0 for one in self.sequences.values()))
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """Only what no step has: the controller keeps the others in quarantine until their step is done."""
        self._end(
            data.draw(st.sampled_from(sorted(n for n, one in self.sequences.items() if not one.in_flight)))
        )

    @rule()
    def bookkeeping_step(self) -> None:
        self._flush()

    # --- what always holds ----------------------------------------------------------------------------

    @invariant()
    def no_block_is_lost_and_all_counts_are_right(self) -> None:
        for lane in self.pools._lanes:
            lane.ledger.check()
            lane.cache.check()
            assert lane.cache.evictable_blocks <= lane.ledger.remembered_blocks
            if not self.sequences:
                assert lane.available_blocks == self.blocks
                assert lane.ledger.held_blocks == 0
        for tier in self.pools.tiers:
            tier.check()
        for ranks in self.ranks:
            ranks.replica.ledger.check()

    @invariant()
    def ranks_have_the_host_ledger_of_the_controller(self) -> None:
        for tier, ranks in zip(self.pools.tiers, self.ranks, strict=False):
            assert ranks.replica.host is not None
            assert ranks.replica.host.digest() == tier.ledger.digest()
            ranks.replica.host.check()
            assert tier.ledger.held_blocks <= tier.ledger.blocks

    @invariant()
    def ranks_that_were_told_everything_have_what_the_controller_has(self) -> None:
        if not self.pools.has_changes:
            assert_replayed(self.pools, [ranks.replica for ranks in self.ranks])

    @invariant()
    def every_table_holds_the_kv_of_its_sequence(self) -> None:
        for name, one in self.sequences.items():
            for position in range(one.computed):
                lane, local = self.pools.shards(name).locate(position)
                ranks = self.ranks[lane]
                place = (ranks.table(name)[local // self.size], local % self.size)
                assert ranks.content[place] == tuple(one.ids[: position + 1]), f"{name} at {position}"

    def teardown(self) -> None:
        if not hasattr(self, "pools"):
            return
        for name in list(self.sequences):
            self._end(name)
        self._flush()
        for lane, ranks in zip(self.pools._lanes, self.ranks, strict=True):
            evicted = lane.cache.evict(lane.cache.evictable_blocks)
            for ledger in (lane.ledger, ranks.replica.ledger):
                ledger.evict(evicted.runs)
                ledger.check()
                assert ledger.free_blocks == self.blocks

    # --- the ranks --------------------------------------------------------------------------------------

    def _flush(self) -> None:
        """A step: what was inserted and released since the last one reaches the ranks."""
        inserts = self.pools.take_inserts()
        releases = self.pools.take_releases()
        for ranks in self.ranks:
            ranks.replica.insert(inserts)
            for name in releases:
                ranks.replica.release(name)

    def _replay_admit(
        self,
        name: str,
        placed: Placed,
        tokens: int,
        parent: str | None = None,
        shared: int = 0,
    ) -> None:
        admit = Admit(
            id=name,
            prompt=name,
            tokens=tokens,
            prompt_length=tokens,
            seed=0,
            sampling=Sampling(),
            reserved_tokens=placed.shards.tokens,
            fork_of=parent,
            shared_tokens=shared,
            segments=placed.segments,
            stripings=placed.stripings,
            cached_tokens=placed.cached_tokens,
            prefixes=placed.prefixes,
            evictions=placed.evictions,
        )
        for lane, ranks in enumerate(self.ranks):
            copies = ranks.replica.admit(admit)
            assert copies is not None
            ranks.copy_tier()
            for copy in copies:
                for offset in range(self.size):
                    if (copy.source, offset) in ranks.content:
                        ranks.content[copy.target, offset] = ranks.content[copy.source, offset]
            assert ranks.replica.state_hash() == self.pools.state_hashes()[lane]
            assert ranks.replica.shards(name) == placed.shards
        while self.pools.unfetched_blocks(name):
            fetch = self.pools.fetch(name, 2)
            for ranks in self.ranks:
                ranks.replica.fetch([fetch])
                ranks.copy_tier()
        self.pools.end_fetches()

    def _write(self, name: str, one: Sequence, position: int) -> None:
        lane, local = self.ranks[0].replica.shards(name).locate(position)
        assert (lane, local) == self.pools.shards(name).locate(position)
        ranks = self.ranks[lane]
        block = ranks.table(name)[local // self.size]
        assert ranks.replica.ledger._holders[block] == 1, "nobody writes into a shared block"
        assert not self.pools.ledger(lane)._remembered[block], "nor into a cached one"
        ranks.content[block, local % self.size] = tuple(one.ids[: position + 1])

    def _end(self, name: str) -> None:
        del self.sequences[name]
        self.pools.release(name)

    def _new_name(self) -> str:
        self.names += 1
        return f"s{self.names}"


PoolsMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPools = PoolsMachine.TestCase


@pytest.mark.parametrize(("computed", "kept"), [(8, 2), (7, 1), (6, 1)])
def test_an_output_block_is_kept_only_where_its_hash_belongs_and_its_kv_is_computed(
    computed: int, kept: int
) -> None:
    pools = KvPools(lanes=1, kv_blocks=10, block_size_tokens=4, tokens_per_lane=100)
    hashes = PrefixHasher(4, b"secret").hashes(np.arange(16, dtype=np.int32))
    assert pools.admit("a", 6, 20, block_hashes=hashes[:HASH_CHARACTERS]) is not None
    pools.computed("a", 6)
    for known_tokens, block in ((7, 1), (8, 1), (8, 2), (13, 2)):
        pools.extend("a", hash_at(hashes, block), known_tokens)
    pools.release("a", computed)
    assert pools.cached_blocks == kept
    assert pools.expected(16, hashes)[0] == 4 * kept


@pytest.mark.parametrize(
    "other",
    [
        pytest.param((Segment(0, 0, 16), Segment(1, 16, 64), Segment(0, 64, 96)), id="other borders"),
        pytest.param((Segment(1, 0, 48), Segment(0, 48, 96)), id="another owner"),
        pytest.param((Segment(0, 0, 48), Segment(1, 48, 95)), id="a shorter one"),
    ],
)
def test_ranks_with_another_shard_map_have_another_hash(other: tuple[Segment, ...]) -> None:
    """Even where they hold the very same blocks."""
    hashes = []
    for segments in ((Segment(0, 0, 48), Segment(1, 48, 96)), other):
        replica = LaneReplay(BlockLedger(64, 16))
        tokens = segments[-1].stop
        assert replica.admit(Admit("a", "p", 64, 64, 1, Sampling(), tokens, segments=segments)) == []
        assert replica.ledger.runs("a") == [(0, 3)]
        hashes.append(replica.state_hash())
    assert hashes[0] != hashes[1]


def test_ranks_know_what_was_used_of_a_prefix_that_another_sequence_had_inserted() -> None:
    """Two compute the same prompt, and the second one, whose blocks are not kept, is the last that uses it."""
    pools = KvPools(lanes=1, kv_blocks=6, block_size_tokens=4, tokens_per_lane=100)
    replica = LaneReplay(BlockLedger(6, 4))
    hasher = PrefixHasher(4, b"secret")

    def admit(name: str, first_id: int) -> Placed:
        hashes = hasher.hashes(np.arange(first_id, first_id + 8, dtype=np.int32))
        placed = pools.admit(name, 8, 8, block_hashes=hashes)
        assert placed is not None
        step(name, placed)
        return placed

    def step(name: str, placed: Placed) -> None:
        replica.insert(pools.take_inserts())
        for ended in pools.take_releases():
            replica.release(ended)
        message = Admit(
            name, name, 8, 8, 0, Sampling(), 8, prefixes=placed.prefixes, evictions=placed.evictions
        )
        assert replica.admit(message) == []
        assert (replica.state_hash(),) == pools.state_hashes()

    for name, first_id in (("first", 0), ("like it", 0), ("other", 100)):
        admit(name, first_id)
    for name in ("first", "like it", "other"):
        pools.computed(name, 8)
    for name in ("first", "other", "like it"):
        pools.release(name)
    assert admit("new", 200).evictions == (), "what `like it` held is free"
    pools.computed("new", 8)  # never used by one that has ended, and yet not evicted while it runs
    assert len(admit("newer", 300).evictions) == 1
    assert pools.expected(8, hasher.hashes(np.arange(8, dtype=np.int32)))[0] == 4, "the older one has gone"


def test_releases_are_sent_in_the_order_in_which_they_happened_whatever_lanes_they_concern() -> None:
    """A sequence of lane 1 ends before one of lanes 0 and 1, and one step tells of both: lane 1 forgets the former first."""
    pools = KvPools(lanes=2, kv_blocks=20, block_size_tokens=4, tokens_per_lane=16)
    replicas = [LaneReplay(BlockLedger(20, 4), lane) for lane in range(2)]
    hasher = PrefixHasher(4, b"secret")

    def admit(name: str, first_id: int, tokens: int, reserved: int) -> Placed:
        hashes = hasher.hashes(np.arange(first_id, first_id + tokens, dtype=np.int32))
        placed = pools.admit(name, tokens, reserved, block_hashes=hashes, pending_seconds=[1.0, 0.0])
        assert placed is not None
        message = Admit(
            name, name, tokens, tokens, 0, Sampling(), placed.shards.tokens, segments=placed.segments,
            prefixes=placed.prefixes, evictions=placed.evictions,
        )  # fmt: skip
        assert [replica.admit(message) for replica in replicas] == [[], []]
        return placed

    def tell() -> tuple[str, ...]:
        inserts, releases = pools.take_inserts(), pools.take_releases()
        for replica in replicas:
            replica.insert(inserts)
            for name in releases:
                replica.release(name)
        assert_replayed(pools, replicas)
        return releases

    assert admit("short", 0, 16, 16).shards.lanes == (1,)
    assert admit("long", 100, 32, 32).shards.lanes == (0, 1)
    pools.computed("short", 16)
    pools.computed("long", 32)
    assert tell() == ()
    pools.release("short")
    pools.release("long")
    assert tell() == ("short", "long")
    (eviction,) = admit("large", 200, 15, 68).evictions
    assert (eviction.lane, eviction.count) == (1, 4)
    assert_replayed(pools, replicas)


@pytest.mark.parametrize("striped", [False, True])
@pytest.mark.parametrize("tokens", [10, 20])
def test_what_a_fork_computes_on_another_lane_than_its_parent_is_not_shared(
    tokens: int, striped: bool
) -> None:
    """With blocks of one token, the last one of the prompt is a block, for which the parent's lane has no room."""
    pools = KvPools(
        lanes=2, kv_blocks=tokens + 1, block_size_tokens=1, tokens_per_lane=tokens - 1 if tokens > 10 else 99,
        stripes_prompts=striped,
    )  # fmt: skip
    hashes = PrefixHasher(1, b"secret").hashes(np.arange(tokens, dtype=np.int32))
    parent = pools.admit("parent", tokens, tokens + 1, block_hashes=hashes)
    assert parent is not None
    last = parent.shards.locate(tokens - 1)[0]
    if room := pools.free_tokens_on(last):
        assert pools.admit("other", room, room, owners=[last]) is not None
    child = pools.fork("parent", "child", tokens - 1, tokens + 1)
    assert child is not None
    assert child.shards.locate(tokens - 1)[0] != last
    pools.computed("child", tokens)  # the last block of the parent has been evicted, say
    for name in ("parent", "child"):
        pools.release(name)
    assert pools.expected(tokens, hashes)[0] == tokens - 1


def test_what_a_fork_computes_where_its_parent_has_another_part_of_the_prompt_is_not_shared() -> None:
    """The parent's prompt is dealt out, eight tokens a turn; the child has all of it on the first lane."""
    pools = KvPools(lanes=2, kv_blocks=40, block_size_tokens=4, tokens_per_lane=8, stripes_prompts=True)
    hashes = PrefixHasher(4, b"secret").hashes(np.arange(32, dtype=np.int32))
    parent = pools.admit("parent", 32, 32, block_hashes=hashes)
    assert parent is not None
    child = pools.fork("parent", "child", 8, 32)
    assert child is not None
    assert [shards.locate(16) for shards in (parent.shards, child.shards)] == [(0, 8), (0, 16)]
    pools.computed("child", 32)
    assert [(one.id, one.lane, one.start, one.count) for one in pools.take_inserts()] == [("child", 0, 0, 2)]


def test_the_expected_hit_of_a_prompt_with_more_than_tokens_per_lane_on_each_lane_is_what_it_gets() -> None:
    """Two lanes must hold 16 blocks, 8 on each, although 4 blocks would be the share of a lane."""
    hasher, size = PrefixHasher(4, b"k"), 4
    ids = np.arange(16 * size + 1, dtype=np.int32)
    pools = KvPools(lanes=2, kv_blocks=20, block_size_tokens=size, tokens_per_lane=4 * size)
    for name in "ab":
        expected, _ = pools.expected(len(ids), hasher.hashes(ids), is_long=True)
        placed = pools.admit(name, len(ids), len(ids), block_hashes=hasher.hashes(ids))
        assert placed is not None
        assert placed.cached_tokens == expected == (64 if name == "b" else 0)
        pools.computed(name, len(ids))
        pools.release(name)
        pools.take_inserts()
        pools.take_releases()
    shorter = ids[: 12 * size + 1]
    expected, _ = pools.expected(len(shorter), hasher.hashes(shorter), is_long=True)
    placed = pools.admit("c", len(shorter), len(shorter), block_hashes=hasher.hashes(shorter))
    assert placed is not None
    assert placed.cached_tokens == expected
