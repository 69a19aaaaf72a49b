"""The store of a replica: objects with blocks of prompts and outputs, which replicas of the same model share.

While a long prompt is computed, its blocks are copied to the host tier and written to the store (write-through). So are those
of its output while it decodes: a replica that takes over a running request reads them. A store is slow, so objects wait on the
device until earlier ones are written (`Offers`). If a prompt continues in the store behind what its replica has, its blocks
are *loaded* into the host tier, as those of files are. Other replicas write, too, and anything may vanish, so nobody knows
what is there without asking: `medha.scheduler.store_kv` asks.

An object has `object_blocks` blocks of one rank's part of the KV, at a multiple of that number in what a lane holds of a
prompt. So all replicas of one grid cut equal prompts at the same places, and the hashes of the blocks name the object.

`StoreTier` decides, at the controller, what is written, and counts. Nothing here deletes objects: the store does, by age.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from medha.kv.disk_tier import DiskTier, file_name
from medha.kv.host_tier import HostTier
from medha.kv.prefix_cache import hash_at, hash_count, hash_range
from medha.kv.rank_loads import Loaded, RankLoads
from medha.wire.messages import DiskFile, DiskReport, Fetch, StoreWrite

_OBJECT_BYTES = 8 * 2**20
_MOST_OBJECT_BLOCKS = 32
_MOST_KNOWN = 2**16
_MOST_OBJECTS = 4096


def object_blocks(block_bytes: int) -> int:
    """Return how many blocks an object has: as many as fit into 8 MiB, from 1 to 32. Latency is then a small part of a read."""
    return max(1, min(_OBJECT_BYTES // block_bytes, _MOST_OBJECT_BLOCKS))


@dataclass(slots=True)
class StoreCounts:
    """Requests, blocks and failures since the epoch began; of all lanes."""

    hits: int = 0  # requests that waited for loads
    lookups: int = 0  # questions which objects are there
    loaded_blocks: int = 0
    written_blocks: int = 0
    found_blocks: int = 0
    """Blocks that were to be written, and that the store had already."""
    failed_loads: int = 0
    failed_writes: int = 0
    skipped_blocks: int = 0
    """Blocks that were not written: they were gone before, the host tier had no place, or the store rests."""


@dataclass(slots=True, eq=False)
class Offer:
    """Objects `first .. stop` of what a lane has of a prompt, whose blocks are `chain`, may be written to the store."""

    lane: int
    chain: str
    first: int
    stop: int

    @property
    def objects(self) -> int:
        return self.stop - self.first


class Offers:
    """Objects that wait to be written to the store, those of the oldest prompt first.

    No block is kept for them: once it is neither on the device nor in a host tier, it is not written. So their number is
    limited to what the pools have blocks for.
    """

    def __init__(self, most_objects: int) -> None:
        self.objects = 0
        """Objects that wait."""
        self._most = most_objects
        self._added = 0  # offers since the epoch began
        # Each offer with its number, the oldest first; a lane without offers is not there.
        self._by_lane: dict[int, deque[tuple[int, Offer]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_lane.values()))

    def add(self, offer: Offer) -> int:
        """Let objects wait; return how many objects of the oldest offers wait no longer because of that.

        An offer that continues the last one of its lane is merged into it; an output makes the chain of a prompt longer.
        """
        of_lane = self._by_lane.setdefault(offer.lane, deque())
        last = of_lane[-1][1] if of_lane else None
        self.objects += offer.objects
        if last is not None and last.stop == offer.first and offer.chain.startswith(last.chain):
            last.chain, last.stop = offer.chain, offer.stop
        else:
            of_lane.append((self._added, offer))
            self._added += 1
        before = self.objects
        while self.objects > self._most and len(self) > 1:
            self._drop_first(min(self._by_lane.values(), key=_number_of_first)[0][1])
        return before - self.objects

    def next(self, has_place: Callable[[int], bool]) -> Offer | None:
        """Return the oldest offer of the lanes that have a place; None if there is none."""
        with_place = (offers for lane, offers in self._by_lane.items() if has_place(lane))
        oldest = min(with_place, key=_number_of_first, default=None)
        return None if oldest is None else oldest[0][1]

    def take_first(self, offer: Offer) -> None:
        """Take the first object of an offer, which is the oldest of its lane: the object waits no longer."""
        offer.first += 1
        self.objects -= 1
        if not offer.objects:
            self._drop_first(offer)

    def _drop_first(self, offer: Offer) -> None:
        """Drop an offer, which is the oldest of its lane."""
        of_lane = self._by_lane[offer.lane]
        _, first = of_lane.popleft()
        assert first is offer, "another offer of its lane came before it"
        self.objects -= first.objects
        if not of_lane:
            del self._by_lane[offer.lane]


def _number_of_first(offers: deque[tuple[int, Offer]]) -> int:
    return offers[0][0]


@dataclass(slots=True)
class _Write:
    lane: int
    blocks: int
    ranks: set[int]  # that have not reported it
    failed: bool = False
    is_new: bool = False  # a rank has sent it, because the store did not have it
    extents: tuple[int, ...] = ()  # of the host tier, from which it is written


class StoreTier:
    """Chooses what a replica writes to its store, and follows what its ranks do there; the controller's part."""

    def __init__(self, lane_ranks: Sequence[Iterable[int]], blocks: int, most_writing: int) -> None:
        """`blocks` are those of an object. No more than `most_writing`, or one object, are written at a time on a lane."""
        self.object_blocks = blocks
        self.counts = StoreCounts()
        self.rests = False
        """True while the store is left alone, because it has failed."""
        self._lane_ranks = [frozenset(ranks) for ranks in lane_ranks]
        self._most_writing = max(most_writing, blocks)
        self._loads = [RankLoads(ranks) for ranks in self._lane_ranks]
        self._objects: dict[tuple[int, int], str] = {}  # (lane, extent) -> object that is read into it
        self._writes: dict[str, _Write] = {}  # by object
        self._writing_blocks = [0] * len(self._lane_ranks)
        # By lane: whether its host tier has no room for another object until a write ends.
        self._waits_for_writes = [False] * len(self._lane_ranks)
        self._sources = Counter[tuple[int, int]]()  # (lane, extent) -> writes that take blocks of it
        self._pending: dict[str, DiskFile] = {}  # those of the writes that ranks have not been sent
        self._known: OrderedDict[str, None] = OrderedDict()  # objects that are there; the latest last

    def objects(self, chain: str, first: int = 0) -> list[DiskFile]:
        """Return the whole objects of a lane's blocks, from the `first`-th on: as many as one question has at most."""
        stop = min(hash_count(chain) // self.object_blocks, first + _MOST_OBJECTS)
        return [self.object(chain, at) for at in range(first, stop)]

    def object(self, chain: str, number: int) -> DiskFile:
        """Return the `number`-th object of a lane's blocks."""
        start = number * self.object_blocks
        hashes = hash_range(chain, start, start + self.object_blocks)
        before = hash_at(chain, start - 1) if start else ""
        return DiskFile(file_name(before, hashes), start, hashes, before)

    def know(self, name: str) -> None:
        """Note that an object is there."""
        self._known[name] = None
        self._known.move_to_end(name)
        if len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)

    def lacks(self, objects: Iterable[DiskFile]) -> None:
        """Note that objects may not be there, or no longer, so that they are written again."""
        for one in objects:
            self._known.pop(one.name, None)

    # --- loads ----------------------------------------------------------------------------------------

    def loading_blocks(self, lane: int) -> int:
        """Return how many blocks are being read on a lane."""
        return self._loads[lane].blocks

    @property
    def busy_blocks(self) -> int:
        """Blocks that are being read or written, on all lanes."""
        return sum(self._writing_blocks) + sum(loads.blocks for loads in self._loads)

    def begin_load(self, name: str, lane: int, extent: int, blocks: int) -> None:
        """Note that ranks read so many blocks of an object into an extent of a lane's host tier."""
        self._loads[lane].begin(extent, blocks)
        self._objects[lane, extent] = name

    # --- writes ---------------------------------------------------------------------------------------

    def has_place(self, lane: int) -> bool:
        """Return whether another object of a lane may be considered now; while the store rests, each may, and is skipped."""
        writing = self._writing_blocks[lane]
        has_room = writing + self.object_blocks <= self._most_writing and not self._waits_for_writes[lane]
        return self.rests or not writing or has_room

    def takes(self, one: DiskFile, lane: int) -> bool:
        """Return whether an object of a lane that has a place is to be written, and note it if so."""
        if one.name in self._known or one.name in self._writes:
            return False
        if self.rests:
            self.counts.skipped_blocks += self.object_blocks
            return False
        self._writes[one.name] = _Write(lane, self.object_blocks, set(self._lane_ranks[lane]))
        self._writing_blocks[lane] += self.object_blocks
        self._pending[one.name] = one
        return True

    def write_from(self, one: DiskFile, extents: Iterable[int]) -> None:
        """Note from which extents of its lane's host tier an object is written."""
        write = self._writes[one.name]
        write.extents = tuple(extents)
        self._sources.update((write.lane, extent) for extent in write.extents)

    def is_written_from(self, lane: int, extent: int) -> bool:
        """Return whether blocks of an extent are being written."""
        return (lane, extent) in self._sources

    def put_off(self, one: DiskFile) -> bool:
        """Forget a write for which the host tier has no room until another write of its lane ends; return False if there is none."""
        lane = self._writes[one.name].lane
        if self._writing_blocks[lane] == self._writes[one.name].blocks:
            return False
        del self._pending[one.name]
        self._forget(one.name)
        self._waits_for_writes[lane] = True
        return True

    def call_off(self, one: DiskFile) -> None:
        """Forget a write, because its blocks are not all in the host tier."""
        self._pending.pop(one.name, None)
        if one.name in self._writes:
            self._forget(one.name)
            self.counts.skipped_blocks += self.object_blocks

    def take_writes(self, tier: Callable[[int], HostTier]) -> tuple[StoreWrite, ...]:
        """Take the writes whose blocks are still in the host tiers, which `tier` returns by lane."""
        pending, self._pending = self._pending, {}
        writes: list[StoreWrite] = []
        for one in pending.values():
            lane = self._writes[one.name].lane
            held = tier(lane).match(one.hashes, 0, self.object_blocks)
            if sum(part.count for part in held) < self.object_blocks:
                self.call_off(one)
                continue
            parts = tuple(Fetch(part.extent, part.start, part.count, lane) for part in held)
            writes.append(StoreWrite(one, parts, lane))
        return tuple(writes)

    @property
    def has_changes(self) -> bool:
        return bool(self._pending)

    # --- reports --------------------------------------------------------------------------------------

    def report(self, report: DiskReport) -> tuple[list[Loaded], list[str]]:
        """Take a rank's report; return the loads that have ended with it, and the objects that the store turned out to lack."""
        for name in report.stored:
            self._end_write(name, report.rank, is_there=True, is_new=name not in report.found_stored)
        for name in report.not_stored:
            self._end_write(name, report.rank, is_there=False)
        ended = self._loads[report.lane].report(report)
        lacks: list[str] = []
        for one in ended:
            name = self._objects.pop((report.lane, one.extent))
            if one.is_there:
                self.counts.loaded_blocks += one.blocks
            else:
                self.counts.failed_loads += 1
                self._known.pop(name, None)
                lacks.append(name)
        return ended, lacks

    def _end_write(self, name: str, rank: int, *, is_there: bool, is_new: bool = False) -> None:
        """Note what a rank reports of a write; the object is there once all ranks of the lane have written it."""
        write = self._writes.get(name)
        if write is None or rank not in self._lane_ranks[write.lane]:
            return
        write.ranks.discard(rank)
        write.failed = write.failed or not is_there
        write.is_new = write.is_new or is_new
        if write.ranks:
            return
        self._forget(name)
        if write.failed:
            self.counts.failed_writes += 1
            return
        if write.is_new:
            self.counts.written_blocks += write.blocks
        else:
            self.counts.found_blocks += write.blocks
        self.know(name)

    def _forget(self, name: str) -> None:
        """Forget a write that has ended."""
        write = self._writes.pop(name)
        self._writing_blocks[write.lane] -= write.blocks
        self._waits_for_writes[write.lane] = False
        for source in ((write.lane, extent) for extent in write.extents):
            self._sources[source] -= 1
            if not self._sources[source]:
                del self._sources[source]

    def check(self) -> None:
        """Assert that loads, writes and objects agree, for tests."""
        for lane, extent in self._objects:
            assert extent in self._loads[lane]
        assert self._pending.keys() <= self._writes.keys()
        for lane, blocks in enumerate(self._writing_blocks):
            assert blocks == sum(write.blocks for write in self._writes.values() if write.lane == lane)
        assert self._sources.total() == sum(len(write.extents) for write in self._writes.values())


@dataclass(frozen=True, slots=True)
class TiersBelow:
    """The tiers below the host tier of a lane (`medha.kv.host_tier.LowerTiers`)."""

    lane: int
    disk: DiskTier | None
    store: StoreTier | None

    def have(self, extent: int, hashes: str, start: int, stop: int) -> bool:
        if self.store is not None and self.store.is_written_from(self.lane, extent):
            return False
        if self.disk is not None and self.disk.is_used:
            return self.disk.held_from(hashes, start, stop) == stop - start
        # The store alone is below: what is worth reading from it was offered to it when it was computed, and no longer needs
        # this copy. Whether the store got it is not known for each block.
        return True

    def want(self, hashes: str, start: int, stop: int) -> bool:
        return self.disk is not None and self.disk.wants(hashes, start, stop)
