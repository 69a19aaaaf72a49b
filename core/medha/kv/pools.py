"""The controller's KV pools: reservations, shard maps and prefix caches of all lanes of a replica.

`KvPools` places requests on lanes, shares cached blocks, evicts unused ones, and describes each change by the
numbers that `Admit`, `Grow`, `Insert` and a release carry. Ranks replay these with `medha.kv.lane_replay`.

Three rules keep cached blocks correct:

* A block is inserted into the cache only once all of its KV is computed (`Done`), by a sequence whose entry
  did not fail.
* A block stays locked while a sequence runs that shares or inserted it, so it is never evicted under a
  reader.
* At least the last token of a prompt is always computed again, because the first output token is sampled from
  it.

A cached prefix may continue in further places. With a host tier, evicted blocks may be offloaded to it
(`medha.kv.host_tier`). The rest may be in files of a disk tier (`medha.kv.disk_tier`), on another replica that offers it,
or in a store that replicas share (`medha.kv.store_tier`). From these three it is loaded into the host tier before its
request is admitted. Lanes also offer what they have to other replicas.

If layers free KV before their windows, each lane also replays all steps that are sent, as its ranks do. So it knows
which windows they have (`medha.kv.window_tables`). A cached prefix then counts only up to a position whose window is there.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from math import inf
from typing import Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt

from medha.kv.blocks import BlockLedger, Run, cut_runs
from medha.kv.disk_tier import FILE_BLOCKS, MOST_CONSIDERED, DiskCounts, DiskPrices, DiskTier, OnDisk
from medha.kv.host_tier import Held, HostTier, KvTier, Prices, TierCounts
from medha.kv.lane_replay import LaneReplay, fork_on
from medha.kv.prefix_cache import Match, PrefixCache, hash_count, hash_range
from medha.kv.rank_loads import Loaded, RankLoads
from medha.kv.store_tier import Offer, Offers, StoreTier, TiersBelow
from medha.kv.unwritten_blocks import UnwrittenBlocks
from medha.kv.window_tables import WindowTables, usable_blocks
from medha.shards import (
    MAX_SEGMENTS_SENT,
    PROMPT_STRIPE_TOKENS,
    Segment,
    ShardMap,
    Striping,
    digest_of,
    is_striped,
    place,
    shard_tokens,
    spreads,
    striped_map,
    stripings_of,
)
from medha.wire.messages import (
    CachedPrefix,
    DiskDelete,
    DiskFile,
    DiskReport,
    DiskWrite,
    Eviction,
    Fetch,
    Grow,
    HostDrop,
    HostLoad,
    Insert,
    KvFetch,
    KvPart,
    KvServe,
    Step,
    StoreWrite,
)

Reach = Literal["device", "host", "disk"]
"""The farthest place where blocks of a prompt count. Those in files, and those being read, count only with `disk`."""

_SERVED_PART = 2
"""Other replicas may read the blocks of a host tier divided by this at a time; all of them for requests that have moved there."""
_WRITING_PART = 4
"""At most the blocks of a host tier divided by this are written to files at a time."""


class TierPrices(Prices, DiskPrices, Protocol):
    """Predicted times that decide about tiers; `medha.cost.tier_seconds` has them."""

    def peer_seconds(self, blocks: int) -> float:
        """Return the predicted time to read so many blocks of another replica into the host tier."""
        ...

    def store_seconds(self, blocks: int, objects: int) -> float:
        """Return the predicted time to read so many blocks of so many objects of the store."""
        ...


@dataclass(slots=True)  # not frozen, for speed: every admission makes one
class Placed:
    """The KV given to a request, as its `Admit` describes it."""

    shards: ShardMap
    cached_tokens: int = 0
    segments: tuple[Segment, ...] = ()
    stripings: tuple[Striping, ...] = ()
    prefixes: tuple[CachedPrefix, ...] = ()
    evictions: tuple[Eviction, ...] = ()


@dataclass(slots=True)
class _Found:
    """The blocks that a lane has of a prompt: `blocks` cached ones, then `fetched` ones in its host tier."""

    blocks: int
    runs: tuple[Run, ...]
    unlocked: int  # cached ones that no sequence locks
    held: tuple[Held, ...] = ()  # in the host tier
    fetched: int = 0  # `held` ones; with the reach `disk` also those in files
    chain: str = ""  # the hashes by which they were found
    awaited: int = 0  # fetched ones that are in files, or being read
    read_due: float = -inf  # latest due time of those that are being read, seconds

    @property
    def all_blocks(self) -> int:
        return self.blocks + self.fetched


@dataclass(frozen=True, slots=True)
class Awaited:
    """Extents, each with its lane, that a request waits for, and the predicted time until they are loaded, in seconds.

    `saved_seconds` is the predicted time of computing what they hold.
    """

    extents: frozenset[tuple[int, int]]
    seconds: float
    saved_seconds: float = 0.0


@dataclass(slots=True)
class PeerCounts:
    """Blocks that came from other replicas or went to them, since the epoch began."""

    hits: int = 0  # requests that waited for blocks of another replica
    loaded_blocks: int = 0
    failed_loads: int = 0
    served_blocks: int = 0


@dataclass(frozen=True, slots=True)
class WindowPool:
    """The pool of the layers of a lane that free KV before their windows."""

    blocks: int
    window_tokens: int  # the widest window of a layer


@dataclass(frozen=True, slots=True)
class EndedLoads:
    """Loads that have ended: from files, from other replicas and from the store; and objects that the store lacks."""

    from_files: Sequence[Loaded] = ()
    from_peers: Sequence[Loaded] = ()
    from_store: Sequence[Loaded] = ()
    lacks: Sequence[str] = ()

    @property
    def extents(self) -> list[int]:
        return [one.extent for one in (*self.from_files, *self.from_peers, *self.from_store)]


@dataclass(frozen=True, slots=True)
class Sought:
    """Objects of the store that would continue a prompt on a lane: those of the blocks `chain`, from number `first` on.

    There are at most as many as one question to the ranks may name (`StoreTier.objects`).
    """

    lane: int
    chain: str
    first: int
    objects: tuple[DiskFile, ...]


@dataclass(slots=True)
class _Lane:
    ledger: BlockLedger
    cache: PrefixCache = field(default_factory=PrefixCache)
    tier: HostTier | None = None
    disk: DiskTier | None = None
    peer_loads: RankLoads | None = None  # loads from other replicas
    replay: LaneReplay | None = None  # of the steps that were sent; None: no layer frees KV before its window

    @property
    def windows(self) -> WindowTables | None:
        return None if self.replay is None else self.replay.windows

    def match(self, hashes: str, stop: int) -> Match:
        """Return the longest cached prefix of the first `stop` of `hashes`, those of a whole prompt, that can be shared."""
        match, windows = self.cache.match(hashes, stop), self.windows
        if windows is None or not match.blocks:
            return match
        are_here = windows.are_here(match.runs)
        usable = usable_blocks(are_here, windows.window_tokens, windows.block_size_tokens)
        return match if usable == match.blocks else self.cache.match(hashes, usable)

    def find(self, hashes: str, stop: int, *, reach: Reach = "host", is_part: bool = False) -> _Found:
        """Return what this lane has of the first `stop` of `hashes`, without a gap.

        `is_part`: other lanes have other parts of the prompt, so the caller checks whether the window before its end is here.
        """
        match = self.cache.match(hashes, stop) if is_part else self.match(hashes, stop)
        if self.tier is None or reach == "device" or match.blocks == stop:
            return _Found(match.blocks, match.runs, match.unlocked, chain=hashes)
        if reach == "host":
            held = tuple(self.tier.match(hashes, match.blocks, stop))
            fetched, awaited = sum(one.count for one in held), 0
        else:
            parts = self._parts(hashes, match.blocks, stop)
            held, fetched = (), sum(one.count for _, one in parts)
            awaited = sum(one.count for _, one in parts if self._is_awaited(one))
            due = max(
                (self.tier.read_due(one.extent) for _, one in parts if isinstance(one, Held)), default=-inf
            )
            return _Found(match.blocks, match.runs, match.unlocked, held, fetched, hashes, awaited, due)
        return _Found(match.blocks, match.runs, match.unlocked, held, fetched, hashes, awaited)

    def _parts(self, hashes: str, start: int, stop: int) -> list[tuple[int, Held | OnDisk]]:
        """Return what the tiers have of the blocks `start .. stop` of a prompt, without a gap, each with its place."""
        assert self.tier is not None
        parts: list[tuple[int, Held | OnDisk]] = []
        while start < stop:
            found: Sequence[Held | OnDisk] = self.tier.match(hashes, start, stop, with_loading=True)
            if not found and self.disk is not None:  # file by file, so that only what they hold is examined
                found = self.disk.match(hashes, start, min(start + FILE_BLOCKS, stop))[:1]
                lacks = sum(self.tier.lacks(hashes, start, start + one.count) for one in found)
                found = self.disk.match(hashes, start, start + lacks)
            if not found:
                break
            for one in found:
                parts.append((start, one))
                start += one.count
        return parts

    def _is_awaited(self, part: Held | OnDisk) -> bool:
        return isinstance(part, OnDisk) or (self.tier is not None and self.tier.is_loading(part.extent))

    def load(self, found: _Found, lane: int, due: float) -> tuple[list[HostLoad], set[tuple[int, int]]]:
        """Begin to load what was found in files; return the loads, and all awaited extents, each with the lane."""
        assert self.tier is not None
        loads: list[HostLoad] = []
        awaited: set[tuple[int, int]] = set()
        from_files: list[OnDisk] = []
        parts = self._parts(found.chain, found.blocks, found.all_blocks)
        self.tier.pin(one for _, one in parts if isinstance(one, Held))
        for at, part in parts:
            if isinstance(part, Held):
                if self.tier.is_loading(part.extent):
                    awaited.add((lane, part.extent))
                continue
            began = self.tier.begin_load(found.chain, at, part.count, "disk", due)
            if began is None:
                break
            extent, count, drops = began
            assert self.disk is not None
            self.disk.begin_load(part, extent, count)
            from_files.append(part)
            loads.append(HostLoad(part.file, part.start, count, lane, drops, due=due))
            awaited.add((lane, extent))
            if count < part.count:
                break
        self.tier.unpin()
        if self.disk is not None:
            self.disk.use(from_files)
            self.disk.counts.hits += bool(awaited)
        return loads, awaited

    @property
    def has_files_to_change(self) -> bool:
        """True if files are to be deleted, or if blocks wait and another file may be written."""
        if self.disk is None or self.tier is None:
            return False
        return self.disk.has_changes or (self.disk.has_place and bool(self.tier.unwritten))

    def stop_writing(self) -> None:
        """Let no blocks wait for the disk tier if nothing will be written to it any more."""
        if self.disk is None or self.tier is None or self.tier.unwritten is None or self.disk.is_used:
            return
        self.disk.counts.skipped_blocks += self.tier.unwritten.lost_blocks
        self.tier.unwritten = None

    def share(
        self, found: _Found, ticket: str, lane: int, most_blocks: int
    ) -> tuple[list[HostLoad], list[Held]]:
        """Let another replica read what was found; return the copies that this needs, and the blocks, in order.

        Cached blocks that the host tier lacks are copied to it. All tickets together get at most `most_blocks` of its blocks.
        """
        assert self.tier is not None
        kept = self.tier.served_of(self.tier.match(found.chain, 0, found.all_blocks))
        stop = min(found.all_blocks, kept + max(most_blocks - self.tier.served_blocks, 0))
        self._pin_held(found.chain, found.blocks, stop)
        loads, held = self.take_in(found, 0, stop, lane, is_awaited=True)
        if held:
            self.tier.serve(ticket, held)
        else:
            self.tier.unpin()
        return loads, held

    def _pin_held(self, chain: str, start: int, stop: int) -> None:
        """Keep all that the host tier holds of the blocks `start .. stop` of a prompt until `unpin`, also behind gaps."""
        assert self.tier is not None
        while start < stop:
            there = self.tier.match(chain, start, stop, with_loading=True)
            self.tier.pin(there)
            start += sum(one.count for one in there)
            start += self.tier.lacks(chain, start, stop)

    def take_in(
        self, found: _Found, start: int, stop: int, lane: int, *, is_awaited: bool = False
    ) -> tuple[list[HostLoad], list[Held]]:
        """Copy the found blocks `start .. stop` that the host tier lacks to it; return the same as `share`.

        `is_awaited`: another replica waits for them. The blocks are pinned there. They end at the first one for which the
        tier has no place.
        """
        assert self.tier is not None
        loads: list[HostLoad] = []
        held: list[Held] = []
        at = start
        while at < stop:
            there = self.tier.match(found.chain, at, stop)
            if not there:
                count = min(self.tier.lacks(found.chain, at, stop), found.blocks - at)
                made = self.tier.take_in(found.chain, at, count, is_awaited=is_awaited) if count > 0 else None
                if made is None:
                    break
                extent, taken, drops = made
                first, length = cut_runs(found.runs, at, at + taken)[-1]
                loads.append(HostLoad("", 0, taken, lane, drops, last=first + length - 1))
                there = [Held(extent, 0, taken)]
            self.tier.pin(there)
            held += there
            at += sum(one.count for one in there)
        return loads, held

    def load_from_peer(
        self, chain: str, ticket: str, lane: int, before: int
    ) -> tuple[list[HostLoad], set[tuple[int, int]], set[tuple[int, int]]]:
        """Begin to load the blocks that another replica offers and this lane lacks; return the same as `_load_lacking`.

        `chain` are the blocks of the ticket from `before` on.
        """
        peer_loads = self.peer_loads
        assert peer_loads is not None

        def begin(extent: int, at: int, count: int, drops: tuple[HostDrop, ...]) -> HostLoad:
            peer_loads.begin(extent, count)
            return HostLoad("", before + at, count, lane, drops, ticket)

        # Peers are read in any order.
        return self._load_lacking("peers", chain, hash_count(chain), lane, begin, hash_count(chain), -inf)

    def load_from_store(
        self, chain: str, objects: int, lane: int, store: StoreTier, due: float
    ) -> tuple[list[HostLoad], set[tuple[int, int]], set[tuple[int, int]]]:
        """Begin to load the blocks of the first `objects` objects that this lane lacks; return the same as `_load_lacking`."""
        size = store.object_blocks

        def begin(extent: int, at: int, count: int, drops: tuple[HostDrop, ...]) -> HostLoad:
            name = store.object(chain, at // size).name
            store.begin_load(name, lane, extent, count)
            return HostLoad(name, at % size, count, lane, drops, is_stored=True, due=due)

        return self._load_lacking("store", chain, objects * size, lane, begin, size, due)

    def _load_lacking(
        self,
        source: KvTier,
        chain: str,
        stop: int,
        lane: int,
        begin: Callable[[int, int, int, tuple[HostDrop, ...]], HostLoad],
        piece: int,
        due: float,
    ) -> tuple[list[HostLoad], set[tuple[int, int]], set[tuple[int, int]]]:
        """Begin to load the blocks before `stop` that this lane lacks, each time up to the next multiple of `piece`.

        `begin` is called with an extent, its first block, their number, and what is dropped for them. Return the loads, the
        awaited extents, each with the lane, and those of them that these loads read; others were being read already.
        """
        assert self.tier is not None
        loads: list[HostLoad] = []
        awaited: set[tuple[int, int]] = set()
        read: set[tuple[int, int]] = set()
        at = self.cache.match(chain, stop).blocks
        self._pin_held(chain, at, stop)
        while at < stop:
            there = self.tier.match(chain, at, stop, with_loading=True)
            if there:
                awaited |= {(lane, one.extent) for one in there if self.tier.is_loading(one.extent)}
                at += sum(one.count for one in there)
                continue
            wanted = self.tier.lacks(chain, at, min(stop, (at // piece + 1) * piece))
            began = self.tier.begin_load(chain, at, wanted, source, due)
            if began is None:
                break
            extent, count, drops = began
            loads.append(begin(extent, at, count, drops))
            read.add((lane, extent))
            at += count
            if count < wanted:
                break
        self.tier.unpin()
        return loads, awaited | read, read

    @property
    def available_blocks(self) -> int:
        """Blocks that a request can get: free ones, and remembered ones that no sequence locks."""
        return self.ledger.free_blocks + self.cache.evictable_blocks

    def make_free(self, blocks: int, lane: int) -> tuple[Eviction, ...]:
        """Evict until `blocks` blocks are free, possibly a few more; `lane` is the number of this lane."""
        missing = blocks - self.ledger.free_blocks
        if missing <= 0:
            return ()
        evicted = self.cache.evict(missing)
        self.ledger.evict(evicted.runs)
        if self.tier is None:
            return (Eviction(evicted.used_before, evicted.last, evicted.count, lane),)
        drops, offloads = self.tier.offload(evicted.branches)
        return (Eviction(evicted.used_before, evicted.last, evicted.count, lane, drops, offloads),)

    def make_free_beside(
        self, sequence: str, found: _Found, blocks: int, lane: int
    ) -> tuple[tuple[Eviction, ...], tuple[Fetch, ...]]:
        """Do the same as `make_free` for a sequence that fetches what was found in the tier; return its fetches, too."""
        if self.tier is None or not found.held:
            return self.make_free(blocks, lane), ()
        self.tier.pin(found.held)
        evictions = self.make_free(blocks, lane)
        self.tier.unpin()
        return evictions, self.tier.fetch(sequence, found.held, lane)

    def locked(self, sequence: str, lane: int) -> tuple[CachedPrefix, ...]:
        """Return the cached prefix that a newly admitted sequence uses on this lane; empty if none."""
        last, count = self.cache.end(sequence)
        return (CachedPrefix(last, count, lane),) if count else ()


class _LaneFetches:
    """The blocks that a sequence still has to fetch from the host tier of a lane.

    A long prefix takes many steps, so each step examines only the parts that it takes.
    """

    def __init__(self, parts: Iterable[Fetch]) -> None:
        self._parts = deque(parts)
        self.blocks = sum(one.count for one in self._parts)

    def take(self, most_blocks: int) -> Iterator[Fetch]:
        """Take the next blocks, at most `most_blocks` of them."""
        while most_blocks > 0 and self._parts:
            one = self._parts.popleft()
            count = min(one.count, most_blocks)
            if count < one.count:
                self._parts.appendleft(Fetch(one.extent, one.start + count, one.count - count, one.lane))
            self.blocks -= count
            most_blocks -= count
            yield Fetch(one.extent, one.start, count, one.lane)


@dataclass(slots=True)
class _SequenceKv:
    """The KV that one sequence holds."""

    shards: ShardMap
    prompt_tokens: int
    chains: dict[int, str]  # lane -> hashes of the prompt's whole blocks there, in order
    not_inserted: int  # whole prompt blocks that are not computed, or not yet in the cache
    outputs: list[str] = field(default_factory=list)  # hashes of the blocks after those of the prompt
    # By lane: how many objects have been decided about. They were offered to the store if it takes this sequence.
    objects: dict[int, int] = field(default_factory=dict)
    # True if the store takes the prompt and the output so far; None: that is not decided yet.
    is_stored: bool | None = None


class KvPools:
    """Reservations, shard maps and prefix caches of `lanes` lanes with `kv_blocks` blocks each."""

    def __init__(
        self,
        *,
        lanes: int,
        kv_blocks: int,
        block_size_tokens: int,
        tokens_per_lane: int,
        prefix_caching: bool = True,
        stripes_prompts: bool = False,
        host_blocks: int = 0,
        prices: TierPrices | None = None,
        disk_blocks: int = 0,
        lane_ranks: Sequence[Iterable[int]] = (),
        has_peers: bool = False,
        window_pool: WindowPool | None = None,
        object_blocks: int = 0,
        streamed_blocks: int = 0,
    ) -> None:
        """`stripes_prompts`: stripe long prompts over all lanes instead of filling lane after lane.

        Each lane has a host tier of `host_blocks` blocks, if `prices` of its copies are given. If `disk_blocks` is above 0,
        each also has a disk tier of so many blocks, with files on all ranks that `lane_ranks` lists for it. `has_peers`: these
        ranks also read blocks of other replicas, and let them read theirs. If `object_blocks` is above 0, there is a store,
        whose objects have so many blocks. With a `window_pool`, ranks free KV before the windows of layers; then there are no
        tiers and no streaming. `streamed_blocks` is the number of blocks of each lane in host memory (`admit_streamed`).
        """
        self.block_size_tokens = block_size_tokens
        self._lane_tokens = kv_blocks * block_size_tokens
        self._tokens_per_lane = tokens_per_lane
        self._prefix_caching = prefix_caching
        self._stripes_prompts = stripes_prompts
        # All prompts use one stripe length, so that prompts of different lengths can share cached blocks.
        blocks = min(PROMPT_STRIPE_TOKENS, tokens_per_lane) // block_size_tokens
        self._stripe_tokens = max(blocks, 1) * block_size_tokens
        # The last answer of `_striped_chains`: a long request that waits for KV asks for it with each step.
        self._last_chains: tuple[str, Sequence[int], dict[int, str]] = "", (), {}
        self._prices = prices
        self._lanes = [
            _Lane(BlockLedger(kv_blocks, block_size_tokens, streamed_blocks)) for _ in range(lanes)
        ]
        self.has_peers = has_peers and prices is not None and prefix_caching
        self.store: StoreTier | None = None
        """The store that replicas share; None: there is none."""
        if prices is not None and prefix_caching:
            self._add_tiers(prices, host_blocks, disk_blocks, object_blocks, lane_ranks)
        self._window_pool = window_pool
        if window_pool is not None:
            assert prices is None, "a tier keeps blocks of all layers alike"
            assert not streamed_blocks, "streamed blocks are those of all layers alike"
            for number, lane in enumerate(self._lanes):
                copy = BlockLedger(kv_blocks, block_size_tokens)
                windows = WindowTables(copy, window_pool.blocks, window_pool.window_tokens)
                lane.replay = LaneReplay(copy, number, windows=windows)
        self._served_part = _SERVED_PART
        self.peer_counts = PeerCounts()
        self._offers = Offers(lanes * kv_blocks // max(object_blocks, 1))
        self._loads: list[HostLoad] = []
        self._serves: list[KvServe] = []
        self._unserves: list[str] = []
        self._fetches: dict[str, list[_LaneFetches]] = {}  # by sequence, for the lanes that had something
        self._fetched: list[str] = []  # sequences that fetch nothing more
        self._swapped: dict[str, dict[int, str]] = {}  # sequences that have stepped aside -> hashes by lane
        self._held: dict[str, _SequenceKv] = {}
        # Both cover all lanes, in the order in which they happened. A lane's clock counts its releases: if
        # ranks got them in another order, they would evict other blocks than `medha.kv.prefix_cache` did.
        self._inserts: list[Insert] = []
        self._releases: dict[str, None] = {}
        self.swaps_out = 0
        """Times that a sequence stepped aside whose KV host tiers keep."""
        self.swaps_in = 0
        """Times that such a sequence came back and fetched KV."""
        self.streamed_sequences = 0
        """Sequences that were admitted to be streamed."""
        self.queried_tokens = 0
        """Prompt tokens of admitted requests."""
        self.hit_tokens = 0
        """Prompt tokens of admitted requests whose KV was cached."""
        self.avoided_prefill_seconds: dict[KvTier, float] = dict.fromkeys(get_args(KvTier), 0.0)
        """Predicted time of computing what admitted requests fetch instead, by the tier from which it comes."""

    def _add_tiers(
        self,
        prices: TierPrices,
        host_blocks: int,
        disk_blocks: int,
        object_blocks: int,
        lane_ranks: Sequence[Iterable[int]],
    ) -> None:
        most_writing = max(host_blocks // _WRITING_PART, 1)
        for number, lane in enumerate(self._lanes):
            lane.tier = HostTier(host_blocks, self.block_size_tokens, prices)
            if disk_blocks:
                lane.disk = DiskTier(
                    disk_blocks, lane_ranks[number], self.block_size_tokens, prices, most_writing, lane.tier
                )
                lane.tier.unwritten = UnwrittenBlocks(lane.disk.held_from)
            if self.has_peers:
                lane.peer_loads = RankLoads(frozenset(lane_ranks[number]))
        if object_blocks:
            self.store = StoreTier(lane_ranks, object_blocks, most_writing)
        if disk_blocks or object_blocks:
            for number, lane in enumerate(self._lanes):
                assert lane.tier is not None
                lane.tier.below = TiersBelow(number, lane.disk, self.store)

    # --- queries --------------------------------------------------------------------------------------

    def __contains__(self, sequence: str) -> bool:
        return sequence in self._held

    @property
    def lanes(self) -> int:
        return len(self._lanes)

    @property
    def blocks(self) -> int:
        """Blocks of all lanes together."""
        return sum(lane.ledger.blocks for lane in self._lanes)

    @property
    def free_tokens(self) -> int:
        """Tokens that can be reserved on all lanes together; blocks that are only cached count as free."""
        return sum(self.free_tokens_on(lane) for lane in range(len(self._lanes)))

    @property
    def held_blocks(self) -> int:
        """Blocks that sequences hold, on all lanes together."""
        return sum(lane.ledger.held_blocks for lane in self._lanes)

    @property
    def cached_blocks(self) -> int:
        """Blocks that no sequence holds and the prefix cache keeps, on all lanes together."""
        return sum(lane.ledger.remembered_blocks for lane in self._lanes)

    @property
    def tiers(self) -> list[HostTier]:
        """The host tiers of all lanes; empty if there are none."""
        return [lane.tier for lane in self._lanes if lane.tier is not None]

    @property
    def tier_counts(self) -> TierCounts:
        """Copies between the KV pools and the host tiers of all lanes."""
        each = [tier.counts for tier in self.tiers]
        return TierCounts(
            sum(one.hits for one in each),
            sum(one.fetched_blocks for one in each),
            sum(one.offloaded_blocks for one in each),
            sum(one.dropped_blocks for one in each),
            sum(one.swapped_out_blocks for one in each),
            sum(one.swapped_in_blocks for one in each),
        )

    def tier_room(self, lanes: Iterable[int]) -> int:
        """Return the blocks that the fullest host tier of `lanes` can keep for a sequence that steps aside.

        Blocks that it is to keep for others and that are still on the device count as taken.
        """
        tiers = [tier for lane in lanes if (tier := self._lanes[lane].tier) is not None]
        return min((max(tier.ledger.blocks - tier.wanted_blocks, 0) for tier in tiers), default=0)

    @property
    def swapped(self) -> int:
        """Number of sequences that have stepped aside and whose KV the host tiers keep until they come back."""
        return len(self._swapped)

    @property
    def disks(self) -> list[DiskTier]:
        """The disk tiers of all lanes; empty if there are none."""
        return [lane.disk for lane in self._lanes if lane.disk is not None]

    @property
    def disk_counts(self) -> DiskCounts:
        """The counts of the disk tiers of all lanes together."""
        each = [disk.counts for disk in self.disks]
        counts = DiskCounts(*(sum(getattr(one, name.name) for one in each) for name in fields(DiskCounts)))
        counts.skipped_blocks = sum(self.skipped_blocks(lane) for lane in range(len(each)))
        return counts

    def skipped_blocks(self, lane: int) -> int:
        """Return how many blocks the disk tier of a lane has not written, because the host tier dropped them or there was no room."""
        unwritten = self.tiers[lane].unwritten
        lost_blocks = 0 if unwritten is None else unwritten.lost_blocks
        return self.disks[lane].counts.skipped_blocks + lost_blocks

    def ledger(self, lane: int = 0) -> BlockLedger:
        return self._lanes[lane].ledger

    def windows(self, lane: int = 0) -> WindowTables | None:
        """Return the blocks of a lane's layers with a window, as of the last step sent; None: these free nothing."""
        return self._lanes[lane].windows

    def free_blocks_on(self, lane: int) -> int:
        return self._lanes[lane].available_blocks

    def freed_in_turn(self, lanes: Iterable[int]) -> Callable[[str], int]:
        """Return a function that counts blocks of `lanes` as `BlockLedger.freed_in_turn` does; cached ones count as free."""
        each = [(self._lanes[lane].ledger, self._lanes[lane].ledger.freed_in_turn()) for lane in lanes]

        def freed(sequence: str) -> int:
            return sum(on_lane(sequence) for ledger, on_lane in each if sequence in ledger)

        return freed

    def free_tokens_on(self, lane: int) -> int:
        return self._lanes[lane].available_blocks * self.block_size_tokens

    def shards(self, sequence: str) -> ShardMap:
        return self._held[sequence].shards

    def reserved_tokens(self, sequence: str) -> int:
        """Return how many positions the sequence's KV can hold: whole blocks."""
        return self._held[sequence].shards.tokens

    def _in_blocks(self, tokens: int) -> int:
        """Round a reservation up to whole blocks. Everything here and all messages use the rounded number."""
        return -(-tokens // self.block_size_tokens) * self.block_size_tokens

    def expected(self, prompt_tokens: int, block_hashes: str, *, is_long: bool = False) -> tuple[int, int]:
        """Return how many tokens of a prompt are cached now, and how many of their blocks sequences hold.

        Blocks that sequences hold need no free KV. Both numbers are estimates for waiting requests: caches
        change, and a request may be placed on other lanes.
        """
        if not self._prefix_caching or not block_hashes:
            return 0, 0
        expected = self._expected(prompt_tokens, block_hashes, is_long=is_long)
        if self._prices is None:
            return expected
        without = self._expected(prompt_tokens, block_hashes, is_long=is_long, reach="device")
        fetched = (expected[0] - without[0]) // self.block_size_tokens
        return expected if self._avoided_seconds(prompt_tokens, without[0], expected[0], fetched) else without

    def _expected(
        self, prompt_tokens: int, block_hashes: str, *, is_long: bool, reach: Reach = "host"
    ) -> tuple[int, int]:
        tokens = held_blocks = 0
        if is_long and self._stripes_prompts:
            matches = self._striped_matches(prompt_tokens, block_hashes, reach=reach)[0][1]
            tokens = sum(match.all_blocks for match in matches.values()) * self.block_size_tokens
            return tokens, sum(match.blocks - match.unlocked for match in matches.values())
        parts: list[tuple[int, _Found]] = []
        shard_blocks = self._shard_blocks(prompt_tokens)
        for found in self._shards_found(prompt_tokens, block_hashes, is_long=is_long, reach=reach):
            best = _best(found)
            match = found[best]
            parts.append((best, match))
            tokens += match.all_blocks * self.block_size_tokens
            held_blocks += match.blocks - match.unlocked
            if match.all_blocks < shard_blocks:
                break  # anything cached of the next shard would lie behind a gap
        most = (prompt_tokens - 1) // self.block_size_tokens
        if is_long and self._window_pool is not None:
            most = min(most, self._usable(self._window_pool, self._in_order(parts)))
        return min(tokens, most * self.block_size_tokens), held_blocks

    # --- operations -----------------------------------------------------------------------------------

    def admit(
        self,
        sequence: str,
        prompt_tokens: int,
        reserved_tokens: int,
        *,
        block_hashes: str = "",
        pending_seconds: Sequence[float] | None = None,
        remaining_seconds: Callable[[int], float] | None = None,
        owners: Sequence[int] | None = None,
    ) -> Placed | None:
        """Reserve KV for `reserved_tokens` tokens of a request on all of its lanes at once.

        The reservation, and so the shard map, is rounded up to whole blocks. A short request goes to the lane
        where its first token is expected soonest: where the prefill ahead of it (`pending_seconds`) plus its
        own, `remaining_seconds(cached tokens)`, is least. If `owners` is given, one of these lanes must own
        the request. Return None, and change nothing, if KV is short.
        """
        assert sequence not in self._held, f"{sequence} already holds KV"
        if sequence in self._releases:
            return None  # ranks have yet to release an earlier sequence of this name
        reserved_tokens = self._in_blocks(reserved_tokens)
        whole_blocks = prompt_tokens // self.block_size_tokens
        usable = self._prefix_caching and hash_count(block_hashes) == whole_blocks
        hashes = block_hashes if usable else ""
        if len(self._lanes) == 1:
            return self._admit_on_only_lane(sequence, prompt_tokens, reserved_tokens, hashes)
        maps = self._maps(prompt_tokens, reserved_tokens, hashes, pending_seconds, remaining_seconds, owners)
        for shards in maps:
            if owners is not None and shards.owner not in owners:
                continue
            chains = self._chains(shards, prompt_tokens, hashes)
            matches, avoided_seconds = self._worth_using(prompt_tokens, chains)
            if all(self._fits(shards, lane, matches.get(lane)) for lane in shards.lanes):
                return self._take(sequence, shards, prompt_tokens, chains, matches, avoided_seconds)
        return None

    def admit_streamed(
        self, sequence: str, prompt_tokens: int, reserved_tokens: int, device_blocks: int
    ) -> Placed | None:
        """Reserve KV for all tokens of a request that is larger than the pools, on all lanes at once.

        On each lane, its last `device_blocks` blocks are in the pool, and all before are streamed. It shares no KV. Return
        None, and change nothing, if KV is short.
        """
        assert sequence not in self._held, f"{sequence} already holds KV"
        lanes, size = len(self._lanes), self.block_size_tokens
        if sequence in self._releases or any(lane.available_blocks < device_blocks for lane in self._lanes):
            return None
        reserved_tokens = self._in_blocks(reserved_tokens)
        capacity_by_lane = [(device_blocks + lane.ledger.free_streamed_blocks) * size for lane in self._lanes]
        shards: ShardMap | None
        if lanes == 1:
            fits = reserved_tokens <= capacity_by_lane[0]
            shards = ShardMap((Segment(0, 0, reserved_tokens),)) if fits else None
        else:  # in equal parts, so that each lane streams as little as it can
            shards = place(
                prompt_tokens,
                reserved_tokens,
                capacity_by_lane,
                block_size_tokens=size,
                tokens_per_lane=-(-prompt_tokens // lanes),
                lane_tokens=self._lane_tokens,
            )
        if shards is None:
            return None
        evictions: list[Eviction] = []
        for number in shards.lanes:
            here, tokens = self._lanes[number], shards.tokens_on(number)
            here.cache.lock(sequence, "", 0)
            evictions += here.make_free(min(here.ledger.blocks_for(tokens), device_blocks), number)
            reserved = here.ledger.reserve(sequence, tokens, device_blocks=device_blocks)
            assert reserved
        self._held[sequence] = _SequenceKv(shards, prompt_tokens, {}, 0)
        self.streamed_sequences += 1
        self.end_swap(sequence)
        segments, stripings = self._message_fields(shards.segments)
        return Placed(shards, 0, segments, stripings, (), tuple(evictions))

    def streamed_blocks_of(self, sequence: str) -> int:
        """Return how many blocks of a sequence are streamed, on the lane that streams most."""
        return max(lane.ledger.streamed_blocks_of(sequence) for lane in self._lanes)

    def unfetched_blocks(self, sequence: str) -> int:
        """Return how many blocks a sequence still has to fetch from a host tier, on the lane with most of them."""
        return max((one.blocks for one in self._fetches.get(sequence, ())), default=0)

    def fetch(self, sequence: str, most_blocks: int) -> KvFetch:
        """Take the next blocks that a sequence still has to fetch: at most `most_blocks` on each lane."""
        of_lanes = self._fetches.get(sequence, [])
        taken = [part for one in of_lanes for part in one.take(most_blocks)]
        if not any(one.blocks for one in of_lanes):
            self._fetches.pop(sequence, None)
            self._fetched.append(sequence)
        return KvFetch(sequence, tuple(taken))

    def end_fetches(self) -> None:
        """Let host tiers drop the blocks that sequences have fetched, now that the step with the last fetch is sent.

        The drops come with a later step, so ranks copy the blocks before.
        """
        for sequence in self._fetched:
            for tier in self.tiers:
                tier.fetched(sequence)
        self._fetched.clear()

    def begin_loads(
        self, prompt_tokens: int, block_hashes: str, *, due: float, is_long: bool = False
    ) -> Awaited | None:
        """Load the part of a prompt that only files hold; return the loads for which its request should wait.

        They are read before those that are due later. Return None if there are none, or if computing is predicted to be faster.
        """
        if self._prices is None or not block_hashes:
            return None
        if not (self.disks or any(tier.loads for tier in self.tiers)):
            return None
        found = self._found_best(prompt_tokens, block_hashes, is_long=is_long, reach="disk")
        awaited = max((one.awaited for _, one in found), default=0)
        if awaited == 0:
            return None
        size = self.block_size_tokens
        most_tokens = (prompt_tokens - 1) // size * size
        there_tokens = min(sum(one.all_blocks for _, one in found) * size, most_tokens)
        here_tokens, _ = self.expected(prompt_tokens, block_hashes, is_long=is_long)
        # Blocks that another request has asked for are read when that request is due.
        latest = max([due, *(one.read_due for _, one in found)])
        outstanding = max((tier.blocks_before("disk", latest) for tier in self.tiers), default=0)
        files = sum(-(-one.awaited // FILE_BLOCKS) for _, one in found)
        load_seconds = self._prices.load_seconds(awaited + outstanding, files)
        from_peers = max((lane.peer_loads.blocks for lane in self._lanes if lane.peer_loads), default=0)
        load_seconds += self._prices.peer_seconds(min(awaited, from_peers)) if from_peers else 0.0
        if self.store is not None:
            stored = max(self.store.loading_blocks(lane) for lane in range(len(self._lanes)))
            objects = -(-stored // self.store.object_blocks)
            load_seconds += self._prices.store_seconds(min(awaited, stored), objects) if stored else 0.0
        saved_seconds = self._saved_seconds(prompt_tokens, here_tokens, there_tokens)
        fetched = max(one.fetched for _, one in found)
        if there_tokens <= here_tokens or load_seconds + self._prices.fetch_seconds(fetched) >= saved_seconds:
            return None
        extents: set[tuple[int, int]] = set()
        for lane, one in found:
            loads, awaits = self._lanes[lane].load(one, lane, due)
            self._loads += loads
            extents |= awaits
        if not extents:
            return None
        # The host tier may have had no place for all of it.
        got = sum(self.tiers[lane].blocks_of(extent) for lane, extent in extents)
        part = min(1.0, got / sum(one.awaited for _, one in found))
        return Awaited(frozenset(extents), part * load_seconds, part * saved_seconds)

    def _found_best(
        self, prompt_tokens: int, hashes: str, *, is_long: bool, reach: Reach
    ) -> list[tuple[int, _Found]]:
        """Return the longest part of a prompt that lanes have, by lane; with the reach `disk`, files included."""
        if is_long and self._stripes_prompts:
            lanes, matches = self._striped_matches(prompt_tokens, hashes, reach=reach)[0]
            if matches:
                return list(matches.items())
            chains = self._striped_chains(hashes, lanes)
            return [(lane, _Found(0, (), 0, chain=chain)) for lane, chain in chains.items()]
        usable = (prompt_tokens - 1) // self.block_size_tokens
        if not is_long:
            each = [lane.find(hashes, min(usable, hash_count(hashes)), reach=reach) for lane in self._lanes]
            best = _best(each)
            return [(best, each[best])]
        found: list[tuple[int, _Found]] = []
        for on_lanes in self._shards_found(prompt_tokens, hashes, is_long=True, reach=reach):
            best = _best(on_lanes)
            found.append((best, on_lanes[best]))
            if on_lanes[best].all_blocks < hash_count(on_lanes[best].chain):
                break
        return found

    def disk_report(self, report: DiskReport) -> EndedLoads:
        """Process a rank's report; return the loads that have ended with it."""
        if not 0 <= report.lane < len(self._lanes):
            return EndedLoads()
        here = self._lanes[report.lane]
        if here.tier is None:
            return EndedLoads()
        from_files = [] if here.disk is None else here.disk.report(report)
        here.stop_writing()
        from_peers = [] if here.peer_loads is None else here.peer_loads.report(report)
        self.peer_counts.loaded_blocks += sum(one.blocks for one in from_peers if one.is_there)
        self.peer_counts.failed_loads += sum(not one.is_there for one in from_peers)
        from_store, lacks = ([], []) if self.store is None else self.store.report(report)
        for ended in (from_files, from_peers, from_store):
            for one in ended:
                dropped = here.tier.end_load(
                    one.extent, is_there=one.is_there, is_in_no_file=ended is from_peers
                )
                if dropped is not None:
                    self._loads.append(HostLoad("", 0, 0, report.lane, (dropped,)))
        return EndedLoads(from_files, from_peers, from_store, lacks)

    # --- other replicas -------------------------------------------------------------------------------

    def wait_for_peer_seconds(
        self, prompt_tokens: int, block_hashes: str, there_tokens: int, *, is_long: bool = False
    ) -> float | None:
        """Return half of the seconds that another replica's KV of a prompt saves; None if it is predicted to save none.

        A request waits twice that long at most, and a little more (`medha.scheduler.load_waits`).
        """
        if self._prices is None or not self.has_peers or not block_hashes:
            return None
        size = self.block_size_tokens
        there_tokens = min(there_tokens, prompt_tokens - 1) // size * size
        here_tokens, _ = self.expected(prompt_tokens, block_hashes, is_long=is_long)
        blocks = (there_tokens - here_tokens) // size
        return self._saved(
            prompt_tokens, here_tokens, there_tokens, blocks, self._prices.peer_seconds(max(blocks, 0))
        )

    def _saved(
        self, prompt_tokens: int, here_tokens: int, there_tokens: int, blocks: int, read_seconds: float
    ) -> float | None:
        """Return half of the seconds that KV up to `there_tokens` saves; None if reading and fetching it takes longer."""
        assert self._prices is not None
        if there_tokens <= here_tokens:
            return None
        saved_seconds = self._saved_seconds(prompt_tokens, here_tokens, there_tokens)
        if read_seconds + self._prices.fetch_seconds(blocks) >= saved_seconds:
            return None
        return saved_seconds / 2

    def share(
        self,
        ticket: str,
        prompt_tokens: int,
        block_hashes: str,
        *,
        is_long: bool = False,
        has_moved: bool = False,
    ) -> tuple[KvPart, ...]:
        """Let another replica read what lanes have of a prompt; return these parts.

        `has_moved`: the prompt is of a request that another replica serves from now on, so its KV may take all of a host tier.
        """
        if not self.has_peers or not block_hashes:
            return ()
        parts: list[KvPart] = []
        blocks: dict[int, list[Fetch]] = {}  # by lane: one may have several parts of a long prompt
        for lane, found in self._found_best(prompt_tokens, block_hashes, is_long=is_long, reach="host"):
            if not found.all_blocks:
                continue
            tier = self._lanes[lane].tier
            assert tier is not None
            most_blocks = tier.ledger.blocks // (1 if has_moved else self._served_part)
            loads, held = self._lanes[lane].share(found, ticket, lane, most_blocks)
            self._loads += loads
            if held:
                blocks.setdefault(lane, []).extend(
                    Fetch(one.extent, one.start, one.count, lane) for one in held
                )
                count = sum(one.count for one in held)
                parts.append(KvPart(lane, hash_range(found.chain, 0, count)))
                self.peer_counts.served_blocks += count
        self._serves += [KvServe(ticket, tuple(each), lane) for lane, each in blocks.items()]
        return tuple(parts)

    def share_all(self) -> None:
        """Let tickets use the whole host tiers from now on, because nothing else needs them."""
        self._served_part = 1

    def unshare(self, ticket: str) -> None:
        """End a ticket: other replicas may no longer read its blocks."""
        for tier in self.tiers:
            tier.unserve(ticket)
        pending = [one for one in self._serves if one.ticket != ticket]
        if len(pending) < len(self._serves):
            # Ranks have not received the ticket, and its blocks may have other content before they do.
            self._serves = pending
        else:
            self._unserves.append(ticket)

    def begin_peer_loads(
        self, ticket: str, parts: Iterable[KvPart]
    ) -> tuple[frozenset[tuple[int, int]], frozenset[tuple[int, int]]]:
        """Load what another replica offers; return the awaited extents, each with its lane, and those read with the ticket."""
        extents: set[tuple[int, int]] = set()
        read: set[tuple[int, int]] = set()
        before = [0] * len(self._lanes)  # blocks of the ticket on each lane that earlier parts have
        for part in parts:
            lane = part.lane
            loads, awaits, reads = self._lanes[lane].load_from_peer(part.hashes, ticket, lane, before[lane])
            self._loads += loads
            extents |= awaits
            read |= reads
            before[lane] += hash_count(part.hashes)
        self.peer_counts.hits += bool(extents)
        return frozenset(extents), frozenset(read)

    # --- the store ------------------------------------------------------------------------------------

    def sought(self, prompt_tokens: int, block_hashes: str, *, is_long: bool = False) -> list[Sought]:
        """Return the objects that would continue a prompt after the part that lanes have.

        Unless long prompts are striped, only the first lane that lacks something counts: the next one is not known yet.
        """
        if self.store is None or not block_hashes:
            return []
        found = self._found_best(prompt_tokens, block_hashes, is_long=is_long, reach="disk")
        if len(found) > 1 and not self._stripes_prompts:
            found = found[-1:]
        sought: list[Sought] = []
        for lane, one in found:
            first = one.all_blocks // self.store.object_blocks
            objects = tuple(self.store.objects(one.chain, first))
            if objects:
                sought.append(Sought(lane, one.chain, first, objects))
        return sought

    def wait_for_store_seconds(
        self,
        prompt_tokens: int,
        block_hashes: str,
        counts: Sequence[int],
        *,
        is_long: bool = False,
    ) -> float | None:
        """Return the same as `wait_for_peer_seconds` for the store.

        `counts` are the numbers of objects that would be read, by lane that lacks some.
        """
        if self._prices is None or self.store is None or not any(counts):
            return None
        here_tokens, _ = self.expected(prompt_tokens, block_hashes, is_long=is_long)
        blocks = max(counts) * self.store.object_blocks
        tokens = here_tokens + sum(counts) * self.store.object_blocks * self.block_size_tokens
        seconds = self._prices.store_seconds(blocks, max(counts))
        return self._saved(prompt_tokens, here_tokens, min(tokens, prompt_tokens - 1), blocks, seconds)

    def begin_store_loads(
        self, sought: Iterable[Sought], counts: Iterable[int], due: float
    ) -> frozenset[tuple[int, int]]:
        """Load the first `counts` of the objects that are sought; return the awaited extents, each with its lane.

        They are read before those that are due later.
        """
        assert self.store is not None
        extents: set[tuple[int, int]] = set()
        for one, count in zip(sought, counts, strict=True):
            if count:
                loads, awaits, _ = self._lanes[one.lane].load_from_store(
                    one.chain, one.first + count, one.lane, self.store, due
                )
                self._loads += loads
                extents |= awaits
                for there in one.objects[:count]:
                    self.store.know(there.name)
        self.store.counts.hits += bool(extents)
        return frozenset(extents)

    def _offer_to_store(self, held: _SequenceKv, lane: int, chain: str, stop: int) -> None:
        """Let the whole objects among the first `stop` blocks of `chain` be written to the store (`write_through`).

        `chain` has blocks of a prompt, perhaps with those of its output. All of it is written if reading prompt and chain is
        predicted to be faster than computing them.
        """
        store = self.store
        if store is None or self._prices is None:
            return
        size = store.object_blocks
        if held.is_stored is None:
            counts = {at: hash_count(own) for at, own in held.chains.items()}
            counts[lane] = hash_count(chain)  # of an output, too
            blocks, tokens = max(counts.values()), sum(counts.values()) * self.block_size_tokens
            seconds = self._prices.store_seconds(blocks, -(-blocks // size)) + self._prices.fetch_seconds(
                blocks
            )
            held.is_stored = seconds < self._prices.compute_seconds(0, max(tokens, 1))
        first = held.objects.get(lane, 0)
        held.objects[lane] = stop // size
        if held.is_stored and first < stop // size:
            dropped = self._offers.add(Offer(lane, chain, first, stop // size))
            store.counts.skipped_blocks += dropped * size

    @property
    def has_offers(self) -> bool:
        """True if objects wait for the store, and another one may be written."""
        return self.store is not None and self._offers.next(self.store.has_place) is not None

    @property
    def offered_blocks(self) -> int:
        """Blocks of objects that wait to be written to the store, or were not examined."""
        return 0 if self.store is None else self._offers.objects * self.store.object_blocks

    def write_through(self, most_blocks: int) -> None:
        """Copy offered objects to host tiers, from where they are written to the store: up to `most_blocks`, at least one object."""
        if self.store is None:
            return
        left = max(most_blocks // self.store.object_blocks, 1)
        considered = 0
        while left > 0 and considered < MOST_CONSIDERED:
            offer = self._offers.next(self.store.has_place)
            if offer is None:
                break
            before = self._offers.objects
            left -= self._write_through(self.store, offer, left, MOST_CONSIDERED - considered)
            considered += before - self._offers.objects

    def _write_through(self, store: StoreTier, offer: Offer, most: int, most_considered: int) -> int:
        """Consider the first `most_considered` objects of an offer, and write up to `most` of them; return how many."""
        here, size = self._lanes[offer.lane], store.object_blocks
        assert here.tier is not None
        found = here.find(offer.chain, offer.stop * size, reach="device")
        written = 0
        for number in range(offer.first, min(offer.stop, offer.first + most_considered)):
            if written == most or not store.has_place(offer.lane):
                break
            one = store.object(offer.chain, number)
            if store.takes(one, offer.lane):
                written += 1
                loads, parts = here.take_in(found, number * size, (number + 1) * size, offer.lane)
                self._loads += loads
                stop = number * size + sum(part.count for part in parts)
                if stop == (number + 1) * size:
                    store.write_from(one, (part.extent for part in parts))
                elif stop < found.blocks and store.put_off(one):
                    break
                else:
                    store.call_off(one)
            self._offers.take_first(offer)
        here.tier.unpin()
        return written

    def fork(self, parent: str, child: str, shared_tokens: int, reserved_tokens: int) -> Placed | None:
        """Let `child` share the first `shared_tokens` tokens of `parent`, which has the same prompt.

        Return None, and change nothing, if KV is short.
        """
        assert child not in self._held, f"{child} already holds KV"
        reserved_tokens = self._in_blocks(reserved_tokens)
        held = self._held[parent]
        free = [self.free_tokens_on(lane) for lane in range(len(self._lanes))]
        shared = held.shards.local_lengths(shared_tokens)
        size = self.block_size_tokens
        for lane, tokens in shared.items():  # shared whole blocks need no free KV
            free[lane] += tokens // size * size
        shards = held.shards.cut(shared_tokens, reserved_tokens, free, block_size_tokens=size)
        if shards is None:
            return None
        # The parent's hashes hold for the child only as far as both maps place the prompt alike.
        whole = self._whole_blocks(shards, _placed_alike(held.shards, shards, held.prompt_tokens))
        chains = {lane: hash_range(chain, 0, whole.get(lane, 0)) for lane, chain in held.chains.items()}
        prefixes: list[CachedPrefix] = []
        evictions: list[Eviction] = []
        for lane in shards.lanes:
            here, tokens = self._lanes[lane], shards.tokens_on(lane)
            blocks = here.ledger.blocks_for(tokens) - shared.get(lane, 0) // size
            evictions += here.make_free(blocks, lane)
            fork_on(here.ledger, parent, child, shared.get(lane, 0), tokens)
            chain = chains.get(lane, "")
            here.cache.lock(child, chain, min(shared.get(lane, 0) // size, hash_count(chain)))
            prefixes += here.locked(child, lane)
        not_inserted = sum(map(hash_count, chains.values()))
        self.end_swap(child)
        self._held[child] = _SequenceKv(shards, held.prompt_tokens, chains, not_inserted)
        return Placed(shards, 0, *self._message_fields(shards.segments), tuple(prefixes), tuple(evictions))

    def grow(self, sequence: str, tokens: int) -> Grow | None:
        """Extend a reservation to `tokens` tokens, in whole blocks, or change nothing and return None."""
        held = self._held[sequence]
        tokens = self._in_blocks(tokens)
        free = [self.free_tokens_on(lane) for lane in range(len(self._lanes))]
        shards = held.shards.grown(tokens, free, block_size_tokens=self.block_size_tokens)
        if shards is None:
            return None
        evictions: list[Eviction] = []
        for lane in shards.lanes:
            here, needed = self._lanes[lane], shards.tokens_on(lane)
            if sequence not in here.ledger:
                evictions += here.make_free(here.ledger.blocks_for(needed), lane)
                reserved = here.ledger.reserve(sequence, needed)
                here.cache.lock(sequence, "", 0)
            else:
                more = here.ledger.blocks_for(needed - here.ledger.reserved_tokens(sequence))
                evictions += here.make_free(more, lane)
                reserved = here.ledger.grow(sequence, needed)
            assert reserved
        segments, stripings = self._message_fields(_changed(held.shards.segments, shards.segments))
        held.shards = shards
        return Grow(sequence, tokens, segments, tuple(evictions), stripings)

    def computed(self, sequence: str, tokens: int) -> None:
        """Insert the whole prompt blocks among the first `tokens` tokens, now computed, into the caches."""
        held = self._held[sequence]
        if not held.not_inserted:
            return
        size, left = self.block_size_tokens, 0
        if self._stripes_prompts and len(held.chains) > 1:
            computed = self._whole_blocks(held.shards, min(tokens, held.prompt_tokens))
            for lane, chain in held.chains.items():
                stop = min(computed.get(lane, 0), hash_count(chain))
                left += hash_count(chain) - stop
                if stop:
                    self._insert_prompt(sequence, lane, chain, stop)
            held.not_inserted = left
            return
        if len(held.chains) == 1:
            ((lane, chain),) = held.chains.items()
            stop = min(min(tokens, held.prompt_tokens) // size, hash_count(chain))
            held.not_inserted = hash_count(chain) - stop
            if stop:
                self._insert_prompt(sequence, lane, chain, stop)
            return
        for piece in held.shards.pieces(0, held.prompt_tokens):
            chain = held.chains.get(piece.lane, "")
            stop = min(max(0, min(piece.stop, tokens) - piece.start) // size, hash_count(chain))
            left += hash_count(chain) - stop
            if stop:
                self._insert_prompt(sequence, piece.lane, chain, stop)
        held.not_inserted = left

    def extend(self, sequence: str, hashes: str, filled_tokens: int) -> None:
        """Record the hash of a block that output tokens have filled, the last of the first `filled_tokens` tokens.

        `release` and `offer_output` insert these blocks into the cache. The output of a request on several lanes lies in
        stripes and is not shared.
        """
        held = self._held[sequence]
        blocks = held.prompt_tokens // self.block_size_tokens + len(held.outputs) + 1
        if blocks * self.block_size_tokens == filled_tokens and hash_count(hashes) == 1:
            held.outputs.append(hashes)

    def output_hashes(self, sequence: str) -> str:
        """Return the hashes of the blocks that output tokens of a sequence have filled, in order."""
        return "".join(self._held[sequence].outputs)

    def forget_outputs(self, sequence: str) -> None:
        """Keep the output of a sequence out of the cache, because its KV may be wrong."""
        self._held[sequence].outputs.clear()

    def insert_output(self, sequence: str, computed_tokens: int) -> None:
        """Insert the whole output blocks among the first `computed_tokens` tokens of a sequence into the cache."""
        held = self._held[sequence]
        if held.outputs and len(held.chains) == len(held.shards.lanes) == 1:
            chain = held.chains[held.shards.owner] + "".join(held.outputs)
            stop = min(computed_tokens // self.block_size_tokens, hash_count(chain))
            if stop > held.prompt_tokens // self.block_size_tokens:
                self._insert(sequence, held.shards.owner, chain, stop)

    def offer_output(self, sequence: str, computed_tokens: int) -> None:
        """Let objects that output has filled be written to the store (`write_through`), and insert their blocks into the cache.

        Only objects whose KV is among the first `computed_tokens` tokens count. So a replica that takes over a running request
        reads its output, too. A short prompt that the store did not take is decided about again once an output has made it longer.
        """
        if self.store is None:
            return
        held, size = self._held[sequence], self.store.object_blocks
        if not held.outputs or not len(held.chains) == len(held.shards.lanes) == 1:
            return
        lane = held.shards.owner
        prompt_blocks = held.prompt_tokens // self.block_size_tokens
        blocks = min(computed_tokens // self.block_size_tokens, prompt_blocks + len(held.outputs))
        stop = blocks // size * size
        if stop <= prompt_blocks or stop // size <= held.objects.get(lane, 0):
            return
        chain = held.chains[lane] + "".join(held.outputs)
        self._insert(sequence, lane, chain, stop)
        if not held.is_stored:
            held.is_stored, held.objects[lane] = None, 0
        self._offer_to_store(held, lane, chain, stop)

    def release(self, sequence: str, computed_tokens: int = 0, *, swaps: bool = False) -> None:
        """Release the KV of a sequence that has ended and is in no step in flight.

        Blocks that only it held become free or stay cached. Whole output blocks among the first
        `computed_tokens` tokens are inserted into the cache first. If it `swaps`, host tiers keep its blocks when they are
        evicted, until it is admitted again or `end_swap` is called.
        """
        held = self._held[sequence]
        self.offer_output(sequence, computed_tokens)
        self.insert_output(sequence, computed_tokens)
        if swaps and self._prices is not None:
            self._begin_swap(sequence, held, computed_tokens)
        if self._fetches.pop(sequence, None) is not None:
            self._fetched.append(sequence)
        for lane in self._held.pop(sequence).shards.lanes:
            here = self._lanes[lane]
            here.ledger.release(sequence)
            here.cache.unlock(sequence)
        self._releases[sequence] = None

    def _begin_swap(self, sequence: str, held: _SequenceKv, computed_tokens: int) -> None:
        """Let host tiers keep the cached blocks of a sequence: all that it computed, except an output on several lanes."""
        chains = held.chains
        if held.outputs and len(chains) == len(held.shards.lanes) == 1:
            chains = {lane: chain + "".join(held.outputs) for lane, chain in chains.items()}
        computed = self._whole_blocks(held.shards, computed_tokens)
        found = {lane: hash_range(chain, 0, computed.get(lane, 0)) for lane, chain in chains.items()}
        if not any(found.values()):
            return  # no block of it is cached
        self._swapped[sequence] = found
        self.swaps_out += 1
        for lane, chain in found.items():
            tier = self._lanes[lane].tier
            if tier is not None:
                tier.begin_swap(chain)

    def end_swap(self, sequence: str) -> None:
        """Let host tiers no longer keep blocks for a sequence that had stepped aside; does nothing for others."""
        for lane, chain in self._swapped.pop(sequence, {}).items():
            tier = self._lanes[lane].tier
            if tier is not None:
                tier.end_swap(chain)

    # --- messages to the ranks ------------------------------------------------------------------------

    # Every step reaches every rank, whichever lanes it runs on: a change on several lanes is one event for
    # all.

    def take_inserts(self) -> tuple[Insert, ...]:
        """Take the pending cache insertions of all lanes, in order; ranks apply them first in a step."""
        inserts, self._inserts = self._inserts, []
        return tuple(inserts)

    def take_releases(self) -> tuple[str, ...]:
        """Take the sequences of all lanes that ranks must release, in the order in which they ended here."""
        releases, self._releases = self._releases, {}
        return tuple(releases)

    @property
    def pending_loads(self) -> Sequence[HostLoad]:
        """Loads of all lanes that go with the next step."""
        return self._loads

    def take_loads(self) -> tuple[HostLoad, ...]:
        """Take the pending loads of all lanes, in order; ranks apply them after a step's inserts and releases."""
        loads, self._loads = self._loads, []
        return tuple(loads)

    def take_serves(self) -> tuple[tuple[KvServe, ...], tuple[str, ...]]:
        """Take what other replicas may read from now on, and the tickets that have ended."""
        serves, unserves = self._serves, self._unserves
        self._serves, self._unserves = [], []
        return tuple(serves), tuple(unserves)

    def take_writes(self) -> tuple[tuple[DiskDelete, ...], tuple[DiskWrite, ...]]:
        """Take the files of all lanes that ranks delete, and those that they write after all else of a step."""
        deletes: list[DiskDelete] = []
        writes: list[DiskWrite] = []
        for number, lane in enumerate(self._lanes):
            if lane.disk is not None:
                writes += lane.disk.write(number)
                deletes += lane.disk.take_deletes(number)
        return tuple(deletes), tuple(writes)

    def take_stores(self) -> tuple[StoreWrite, ...]:
        """Take what ranks write to the store."""
        if self.store is None:
            return ()
        return self.store.take_writes(self._tier_of)

    def _tier_of(self, lane: int) -> HostTier:
        tier = self._lanes[lane].tier
        assert tier is not None
        return tier

    @property
    def has_changes(self) -> bool:
        """True if there are insertions, releases or changes of tiers that the ranks have not received."""
        return bool(
            self._inserts
            or self._releases
            or self._loads
            or self.has_offers
            or self._serves
            or self._unserves
            or (self.store is not None and self.store.has_changes)
        ) or any(lane.has_files_to_change for lane in self._lanes)

    def state_hashes(self) -> tuple[int, ...]:
        """Return a 53-bit digest for each lane, over its ledger and the shard maps of all sequences.

        These are the state that the lane's ranks replay.
        """
        maps = digest_of({name: held.shards for name, held in self._held.items()})
        digests: list[int] = []
        for lane in self._lanes:
            also = maps if lane.windows is None else maps + lane.windows.digest()
            digests.append(
                lane.ledger.state_hash(also if lane.tier is None else also + lane.tier.ledger.digest())
            )
        return tuple(digests)

    def sent(self, step: Step) -> None:
        """Record that a step was sent to all ranks, before any further change here; replay it if they free KV before windows."""
        self.end_fetches()
        for lane in self._lanes:
            if lane.replay is not None:
                lane.replay.replay(step)

    # --- placing --------------------------------------------------------------------------------------

    def _maps(
        self,
        prompt_tokens: int,
        reserved_tokens: int,
        hashes: str,
        pending_seconds: Sequence[float] | None,
        remaining_seconds: Callable[[int], float] | None,
        owners: Sequence[int] | None,
    ) -> Iterable[ShardMap]:
        """Yield the maps to try on several lanes: the one that uses the caches best, then one that ignores them."""
        lanes = range(len(self._lanes))
        free = [self.free_tokens_on(lane) for lane in lanes]
        seconds = list(pending_seconds or [0.0] * len(free))
        is_long = spreads(
            prompt_tokens,
            reserved_tokens,
            lanes=len(lanes),
            tokens_per_lane=self._tokens_per_lane,
            lane_tokens=self._lane_tokens,
        )
        if is_long and self._stripes_prompts:
            yield from self._striped_maps(prompt_tokens, reserved_tokens, hashes, free)
            return
        for capacity_by_lane, cached, preferred in self._views(prompt_tokens, hashes, free, is_long=is_long):
            if owners is not None and is_long and (not preferred or preferred[0] not in owners):
                preferred = [max(owners, key=lambda lane: (capacity_by_lane[lane], -lane))]
            elif owners is not None and not is_long:
                capacity_by_lane = [
                    capacity if lane in owners else 0 for lane, capacity in enumerate(capacity_by_lane)
                ]
            expected = seconds
            if remaining_seconds is not None and any(cached):
                expected = [seconds[lane] + remaining_seconds(cached[lane]) for lane in lanes]
            shards = place(
                prompt_tokens,
                reserved_tokens,
                capacity_by_lane,
                block_size_tokens=self.block_size_tokens,
                tokens_per_lane=self._tokens_per_lane,
                lane_tokens=self._lane_tokens,
                pending_seconds=expected,
                preferred=preferred,
            )
            if shards is not None:
                yield shards

    def _views(
        self, prompt_tokens: int, hashes: str, free: list[int], *, is_long: bool
    ) -> Iterable[tuple[list[int], list[int], list[int]]]:
        """Yield free tokens by lane, cached tokens by lane, and preferred lanes: with the caches, then without.

        Cached blocks of this prompt that other sequences hold count as free on their lane. For a long prompt,
        the lanes that hold its shards are preferred, in the order of the shards.
        """
        size = self.block_size_tokens
        capacity_by_lane, cached, preferred = list(free), [0] * len(free), list[int]()
        for found in self._shards_found(prompt_tokens, hashes, is_long=is_long):
            for lane, match in enumerate(found):
                if lane not in preferred:
                    capacity_by_lane[lane] = free[lane] + (match.blocks - match.unlocked) * size
                    cached[lane] = min(match.all_blocks * size, prompt_tokens - 1)
            best = _best(found)
            if not is_long or found[best].all_blocks == 0 or best in preferred:
                break
            preferred.append(best)
        yield capacity_by_lane, cached, preferred
        if any(cached):
            yield free, [0] * len(free), []

    def _shard_blocks(self, prompt_tokens: int) -> int:
        """Return how many blocks of a long prompt a lane takes before the next one joins, if it has enough KV."""
        size = self.block_size_tokens
        return shard_tokens(
            prompt_tokens,
            lanes=len(self._lanes),
            tokens_per_lane=self._tokens_per_lane,
            block_size_tokens=size,
        ) // size  # fmt: skip

    def _shards_found(
        self, prompt_tokens: int, hashes: str, *, is_long: bool, reach: Reach = "host"
    ) -> Iterator[list[_Found]]:
        """Yield what each lane has of the prompt: once, or for each shard of a long prompt."""
        blocks = hash_count(hashes)
        step = self._shard_blocks(prompt_tokens) if is_long else blocks
        for shard in range(0, blocks, max(step, 1)):
            chain = hash_range(hashes, shard, shard + step) if is_long else hashes
            yield [lane.find(chain, hash_count(chain), reach=reach, is_part=is_long) for lane in self._lanes]

    def _chains(self, shards: ShardMap, prompt_tokens: int, hashes: str) -> dict[int, str]:
        """Return the hashes of each lane's part of the prompt, in order; empty if there are none to use.

        A lane holds one run of the prompt, or every n-th stripe if prompts are striped.
        """
        if not hashes:
            return {}
        if len(shards.lanes) == 1:
            return {shards.owner: hashes}
        size = self.block_size_tokens
        if self._stripes_prompts:
            lanes, stripe = len(self._lanes), self._stripe_tokens
            if not is_striped(shards, prompt_tokens, lanes, stripe):
                return {}  # on a lane, blocks may follow others than in a regular map
            parts: dict[int, list[str]] = {}
            for piece in shards.pieces(0, prompt_tokens):
                part = hash_range(hashes, piece.start // size, piece.stop // size)
                parts.setdefault(piece.lane, []).append(part)
            return {lane: "".join(found) for lane, found in parts.items()}
        return {
            piece.lane: hash_range(hashes, piece.start // size, piece.stop // size)
            for piece in shards.pieces(0, prompt_tokens)
        }

    def _worth_using(self, prompt_tokens: int, chains: dict[int, str]) -> tuple[dict[int, _Found], float]:
        """Return `_matches`, and the predicted time of computing what host tiers have of them.

        Host tiers take part only if that is faster than computing.
        """
        matches = self._matches(prompt_tokens, chains)
        fetched = max((one.fetched for one in matches.values()), default=0)
        if fetched == 0:
            return matches, 0.0
        without = self._matches(prompt_tokens, chains, reach="device")
        here, there = (
            sum(one.all_blocks for one in each.values()) * self.block_size_tokens
            for each in (without, matches)
        )
        avoided_seconds = self._avoided_seconds(prompt_tokens, here, there, fetched)
        return (matches, avoided_seconds) if avoided_seconds else (without, 0.0)

    def _avoided_seconds(
        self, prompt_tokens: int, here_tokens: int, there_tokens: int, fetched: int
    ) -> float:
        """Return the predicted time of computing a prompt from `here` to `there`; 0 unless fetching so many blocks is faster."""
        if self._prices is None or there_tokens <= here_tokens:
            return 0.0
        saved_seconds = self._saved_seconds(prompt_tokens, here_tokens, there_tokens)
        return saved_seconds if self._prices.fetch_seconds(fetched) < saved_seconds else 0.0

    def _saved_seconds(self, prompt_tokens: int, here_tokens: int, there_tokens: int) -> float:
        """Return the predicted time of computing a prompt from `here` to `there`, as a part of the whole prompt."""
        assert self._prices is not None
        compute = self._prices.compute_seconds
        return compute(here_tokens, prompt_tokens) - compute(there_tokens, prompt_tokens)

    def _matches(
        self, prompt_tokens: int, chains: dict[int, str], *, reach: Reach = "host"
    ) -> dict[int, _Found]:
        """Return what each lane has of the prompt: a prefix without gaps, without the last token."""
        if self._stripes_prompts and len(chains) > 1:
            return self._without_gap(prompt_tokens, chains, reach=reach)
        usable = (prompt_tokens - 1) // self.block_size_tokens
        if len(chains) == 1:
            ((lane, chain),) = chains.items()
            return {lane: self._lanes[lane].find(chain, min(usable, hash_count(chain)), reach=reach)}
        matches = self._parts_found(chains, usable, reach)
        if self._window_pool is None:
            return matches
        kept = self._usable(self._window_pool, self._in_order(matches.items()))
        return self._parts_found(chains, min(usable, kept), reach)

    def _parts_found(self, chains: dict[int, str], usable: int, reach: Reach) -> dict[int, _Found]:
        """Return what lanes have of the first `usable` blocks of a prompt; its parts lie on the lanes of `chains`, in order."""
        matches: dict[int, _Found] = {}
        for lane, chain in chains.items():
            stop = min(usable, hash_count(chain))
            matches[lane] = self._lanes[lane].find(chain, stop, reach=reach, is_part=True)
            usable -= stop
            if matches[lane].all_blocks < hash_count(chain):
                break
        return matches

    def _usable(self, pool: WindowPool, are_here: npt.NDArray[np.bool_]) -> int:
        return usable_blocks(are_here, pool.window_tokens, self.block_size_tokens)

    def _in_order(self, parts: Iterable[tuple[int, _Found]]) -> npt.NDArray[np.bool_]:
        """Return for each block of a cached prefix whether its window is here; `parts` follow one another."""
        return np.concatenate([np.zeros(0, np.bool_), *(self._are_here(*part) for part in parts)])

    def _in_stripes(
        self, parts: Sequence[tuple[int, _Found]], blocks: int, step: int
    ) -> npt.NDArray[np.bool_]:
        """Do the same as `_in_order` for parts in stripes of `step` blocks: for at most `blocks` blocks, or until a part ends.

        The last stripe is longer than the others if all other lanes were full.
        """
        at, lanes = np.arange(blocks), len(parts)
        turns, places = at // step % lanes, at // (step * lanes) * step + at % step
        are_here = np.zeros(blocks, dtype=np.bool_)
        for turn, part in enumerate(parts):
            there = self._are_here(*part)
            mine = at[turns == turn]
            within = mine[places[mine] < len(there)]
            are_here[within] = there[places[within]]
            if len(within) < len(mine):
                blocks = min(blocks, int(mine[len(within)]))
        return are_here[:blocks]

    def _are_here(self, lane: int, found: _Found) -> npt.NDArray[np.bool_]:
        windows = self._lanes[lane].windows
        assert windows is not None
        return windows.are_here(found.runs)

    # A striped prompt may begin on any lane.

    def _striped_maps(
        self, prompt_tokens: int, reserved_tokens: int, hashes: str, free: list[int]
    ) -> Iterator[ShardMap]:
        """Yield the striped map that uses the caches best, then those with other first lanes."""
        size = self.block_size_tokens
        for lanes, matches in self._striped_matches(prompt_tokens, hashes):
            capacity_by_lane = list(free)
            for lane, match in matches.items():
                capacity_by_lane[lane] += (match.blocks - match.unlocked) * size
            shards = striped_map(
                prompt_tokens,
                reserved_tokens,
                capacity_by_lane,
                lanes,
                stripe_tokens=self._stripe_tokens,
                block_size_tokens=size,
            )
            if shards is not None:
                yield shards

    def _striped_matches(
        self, prompt_tokens: int, hashes: str, *, reach: Reach = "host"
    ) -> list[tuple[tuple[int, ...], dict[int, _Found]]]:
        """Return, for each possible first lane, the lanes in turn and what they have cached of the prompt.

        The longest cached prefix comes first; ties go to the first lane with the most free KV.
        """
        count = len(self._lanes)
        found = []
        for first in range(count):
            lanes = tuple((first + turn) % count for turn in range(count))
            matches: dict[int, _Found] = {}
            if self._begins_on(first, hashes, reach=reach):  # else these lanes have nothing of use
                matches = self._without_gap(prompt_tokens, self._striped_chains(hashes, lanes), reach=reach)
            blocks = sum(match.all_blocks for match in matches.values())
            found.append((-blocks, -self.free_tokens_on(first), lanes, matches))
        found.sort(key=lambda one: one[:3])
        return [(lanes, matches) for _, _, lanes, matches in found]

    def _begins_on(self, lane: int, hashes: str, *, reach: Reach) -> bool:
        """Return whether a lane has the first block of a prompt."""
        block = hash_range(hashes, 0, 1)
        return bool(self._lanes[lane].find(block, hash_count(block), reach=reach, is_part=True).all_blocks)

    def _striped_chains(self, hashes: str, lanes: Sequence[int]) -> dict[int, str]:
        """Return the hashes of each lane's part of a prompt that is striped over `lanes`, in order."""
        if self._last_chains[:2] == (hashes, lanes):
            return self._last_chains[2]
        count, step = len(lanes), self._stripe_tokens // self.block_size_tokens
        chains: dict[int, str] = {}
        for turn, lane in enumerate(lanes):
            starts = range(turn * step, hash_count(hashes), count * step)
            chains[lane] = "".join(hash_range(hashes, start, start + step) for start in starts)
        self._last_chains = hashes, lanes, chains
        return chains

    def _without_gap(self, prompt_tokens: int, chains: dict[int, str], *, reach: Reach) -> dict[int, _Found]:
        """Return the longest prefix that lanes have of a prompt striped over the lanes of `chains`, in order."""
        lanes, step = len(chains), self._stripe_tokens // self.block_size_tokens
        usable = (prompt_tokens - 1) // self.block_size_tokens
        parts: list[tuple[int, _Found]] = []
        for turn, (lane, chain) in enumerate(chains.items()):
            found = self._lanes[lane].find(chain, hash_count(chain), reach=reach, is_part=True)
            parts.append((lane, found))
            blocks = found.all_blocks
            if blocks < hash_count(chain):  # the first block that is missing on a lane ends the prefix
                usable = min(usable, (blocks // step * lanes + turn) * step + blocks % step)
        if self._window_pool is not None and parts:
            usable = self._usable(self._window_pool, self._in_stripes(parts, usable, step))
        matches = {}
        for turn, (lane, chain) in enumerate(chains.items()):
            whole, rest = divmod(usable, lanes * step)
            stop = whole * step + min(max(rest - turn * step, 0), step)
            there = parts[turn][1]
            if there.all_blocks > stop:
                there = self._lanes[lane].find(chain, stop, reach=reach, is_part=True)
            matches[lane] = there
        return matches

    def _whole_blocks(self, shards: ShardMap, tokens: int) -> dict[int, int]:
        """Return how many whole blocks of the first `tokens` tokens lie on each lane.

        Each step of a striped prefill calls it, so it examines no stripe: all begin at multiples of the block size.
        """
        return {
            lane: length // self.block_size_tokens for lane, length in shards.local_lengths(tokens).items()
        }

    def _fits(self, shards: ShardMap, lane: int, match: _Found | None) -> bool:
        here = self._lanes[lane]
        needed = here.ledger.blocks_for(shards.tokens_on(lane))
        if match is None:
            return needed <= here.available_blocks
        return needed - match.blocks <= here.available_blocks - match.unlocked

    def _take(
        self,
        sequence: str,
        shards: ShardMap,
        prompt_tokens: int,
        chains: dict[int, str],
        matches: dict[int, _Found],
        avoided_seconds: float,
    ) -> Placed:
        """Give a sequence its KV; `avoided_seconds` is the predicted time of computing what it fetches."""
        by_tier = Counter[KvTier]()
        prefixes: list[CachedPrefix] = []
        evictions: list[Eviction] = []
        fetches: list[_LaneFetches] = []
        cached_blocks = 0
        for lane in shards.lanes:
            here, tokens = self._lanes[lane], shards.tokens_on(lane)
            match = matches.get(lane, _Found(0, (), 0))
            here.cache.lock(sequence, chains.get(lane, ""), match.blocks)  # before anything is evicted
            needed = here.ledger.blocks_for(tokens) - match.blocks
            if here.tier is not None:
                by_tier += here.tier.blocks_by_tier(match.held)
            evicted, fetched = here.make_free_beside(sequence, match, needed, lane)
            evictions += evicted
            if fetched:
                fetches.append(_LaneFetches(fetched))
            if here.tier is not None and sequence in self._swapped:
                here.tier.counts.swapped_in_blocks += sum(one.count for one in fetched)
            reserved = here.ledger.reserve(sequence, tokens, match.runs)
            assert reserved
            prefixes += here.locked(sequence, lane)
            cached_blocks += match.all_blocks
        if fetches:
            self._fetches[sequence] = fetches
        cached_tokens = cached_blocks * self.block_size_tokens
        not_inserted = sum(map(hash_count, chains.values()))
        self._held[sequence] = _SequenceKv(shards, prompt_tokens, chains, not_inserted)
        self.queried_tokens += prompt_tokens if self._prefix_caching else 0
        self.hit_tokens += cached_tokens
        for source, blocks in by_tier.items():
            self.avoided_prefill_seconds[source] += avoided_seconds * blocks / by_tier.total()
        self.swaps_in += sequence in self._swapped and bool(fetches)
        self.end_swap(sequence)
        return Placed(
            shards,
            cached_tokens,
            *self._message_fields(shards.segments),
            tuple(prefixes),
            tuple(evictions),
        )

    def _admit_on_only_lane(self, sequence: str, prompt: int, reserved: int, hashes: str) -> Placed | None:
        """Do the same as `admit` on a replica of one lane, twice as fast, because there is nothing to choose."""
        here, size = self._lanes[0], self.block_size_tokens
        if here.tier is not None:
            shards, chains = ShardMap((Segment(0, 0, reserved),)), {0: hashes} if hashes else {}
            matches, avoided_seconds = self._worth_using(prompt, chains)
            if not self._fits(shards, 0, matches.get(0)):
                return None
            return self._take(sequence, shards, prompt, chains, matches, avoided_seconds)
        blocks, unlocked = 0, 0
        runs: tuple[Run, ...] = ()
        evictions: tuple[Eviction, ...] = ()
        if hashes:
            match = here.match(hashes, min((prompt - 1) // size, hash_count(hashes)))
            blocks, runs, unlocked = match.blocks, match.runs, match.unlocked
        missing = here.ledger.blocks_for(reserved) - blocks
        free = here.ledger.free_blocks
        if missing > free + here.cache.evictable_blocks - unlocked:
            return None
        here.cache.lock(sequence, hashes, blocks)  # before anything is evicted
        if missing > free:
            evictions = here.make_free(missing, 0)
        taken = here.ledger.reserve(sequence, reserved, runs)
        assert taken
        shards = ShardMap((Segment(0, 0, reserved),))
        self._held[sequence] = _SequenceKv(shards, prompt, {0: hashes} if hashes else {}, hash_count(hashes))
        if self._prefix_caching:
            self.queried_tokens += prompt
        if not (runs or evictions):
            return Placed(shards)
        self.hit_tokens += blocks * size
        return Placed(shards, blocks * size, (), (), here.locked(sequence, 0), evictions)

    def _insert(self, sequence: str, lane: int, chain: str, stop: int) -> None:
        here = self._lanes[lane]
        inserted = here.cache.insert(sequence, chain, stop, here.ledger.runs(sequence, 0, stop))
        if inserted is not None:
            new, after = inserted
            if new:
                here.ledger.remember(sequence, stop - new, new)
            self._inserts.append(Insert(sequence, stop - new, new, lane, after))

    def _insert_prompt(self, sequence: str, lane: int, chain: str, stop: int) -> None:
        """Insert blocks of a prompt into the cache of a lane, and offer them to the store."""
        self._insert(sequence, lane, chain, stop)
        self._offer_to_store(self._held[sequence], lane, chain, stop)

    def _message_fields(
        self, segments: tuple[Segment, ...]
    ) -> tuple[tuple[Segment, ...], tuple[Striping, ...]]:
        """Return segments as messages carry them: none for one lane, few as they are, many as stripings."""
        if len(self._lanes) == 1:
            return (), ()
        return (segments, ()) if len(segments) <= MAX_SEGMENTS_SENT else ((), stripings_of(segments))


def _best(found: Sequence[_Found]) -> int:
    """Return the lane that has most blocks; if several have, the one with most cached ones, then the first."""
    return max(range(len(found)), key=lambda lane: (found[lane].all_blocks, found[lane].blocks, -lane))


def _placed_alike(one: ShardMap, other: ShardMap, tokens: int) -> int:
    """Return up to which of the first `tokens` positions both maps place the tokens alike."""
    for here, there in zip(one.pieces(0, tokens), other.pieces(0, tokens), strict=False):
        if here.lane != there.lane:
            return here.start
        if here.stop != there.stop:
            return min(here.stop, there.stop)
    return tokens


def _changed(before: Sequence[Segment], after: Sequence[Segment]) -> tuple[Segment, ...]:
    """Return the segments of `after` from the first one that differs from `before`."""
    same = 0
    while same < len(before) and before[same] == after[same]:
        same += 1
    return tuple(after[same:])
