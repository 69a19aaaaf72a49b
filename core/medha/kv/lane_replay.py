"""A rank's copy of its lane's ledger, which replays the decisions of `medha.kv.pools`.

A rank applies the numbers that `Admit`, `Grow`, `Publish` and a release carry to the ledger of its own lane.
It needs no token ids, no hashes and no eviction policy, so it cannot decide differently from the controller;
`state_hash` verifies that it has not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from medha.errors import LedgerMismatch
from medha.kv.blocks import BlockCopy, BlockLedger, Run, append_run
from medha.kv.cached_paths import NO_BLOCK, CachedPaths
from medha.kv.host_tier import HostLedger, TierCopy, tier_copies
from medha.kv.prefix_cache import hash_count
from medha.shards import Segment, ShardMap, digest_of, segments_of
from medha.wire.messages import (
    Admit,
    Demotion,
    DiskDelete,
    DiskFile,
    DiskWrite,
    Eviction,
    Fetch,
    Grow,
    HostDrop,
    HostLoad,
    KvServe,
    Publish,
    StoreWrite,
)


@dataclass(frozen=True, slots=True)
class ReadBlocks:
    """Blocks `start ..` of a file, or of what another replica offers with a ticket, are read into host blocks `slots`.

    These are those of an extent.
    """

    file: str
    start: int
    extent: int
    slots: tuple[Run, ...]
    ticket: str = ""
    is_stored: bool = False  # `file` is an object of the store


@dataclass(frozen=True, slots=True)
class WriteBlocks:
    """Host blocks `slots`, which are those from block `first` of an extent on, are written to a file."""

    file: DiskFile
    extent: int
    first: int
    slots: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class StoreBlocks:
    """Host blocks `slots` are written to an object of the store; `extents` says up to which block of which extents they are."""

    object: DiskFile
    extents: tuple[tuple[int, int], ...]
    slots: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class ServeBlocks:
    """Host blocks `slots` may be read by ranks of another replica that show the ticket."""

    ticket: str
    slots: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class HostTierWork:
    """Work for what reads and writes a rank's host blocks beside the steps, in this order.

    Blocks of `drops` may be written again by the step's copies, so nothing of them may reach a file from then on, and
    nothing that `unserves` names may reach another replica. The rest comes behind the copies.
    """

    drops: tuple[HostDrop, ...] = ()
    unserves: tuple[str, ...] = ()
    reads: tuple[ReadBlocks, ...] = ()
    deletes: tuple[str, ...] = ()
    writes: tuple[WriteBlocks, ...] = ()
    serves: tuple[ServeBlocks, ...] = ()
    stores: tuple[StoreBlocks, ...] = ()


class LaneReplay:
    """A rank's ledger of its lane, which replays the decisions of `KvPools`.

    Each call applies one part of a `Step`, in this order: publishes, releases, loads, serves, grows, admits, writes.
    """

    def __init__(self, ledger: BlockLedger, lane: int = 0, host_blocks: int = 0) -> None:
        """`host_blocks` is the size of the lane's host tier; 0: it has none."""
        self.ledger = ledger
        self.lane = lane
        self.host = HostLedger(host_blocks) if host_blocks else None
        self._tier_copies: list[TierCopy] = []
        self._drops: list[HostDrop] = []
        self._reads: list[ReadBlocks] = []
        self._deletes: list[str] = []
        self._writes: list[WriteBlocks] = []
        self._serves: list[ServeBlocks] = []
        self._unserves: tuple[str, ...] = ()
        self._stores: list[StoreBlocks] = []
        self._paths = CachedPaths(ledger.blocks)
        self._shards: dict[str, ShardMap] = {}

    def shards(self, sequence: str) -> ShardMap:
        return self._shards[sequence]

    def state_hash(self) -> int:
        """Return a 53-bit digest of the ledger and all shard maps, to compare with `KvPools.state_hashes`."""
        maps = digest_of(self._shards)
        return self.ledger.state_hash(maps if self.host is None else maps + self.host.digest())

    def take_tier_copies(self) -> tuple[TierCopy, ...]:
        """Take the copies between KV pool and host tier that grows and admits have decided, in order.

        They must be made in this order, and before all other copies of their step.
        """
        copies, self._tier_copies = self._tier_copies, []
        return tuple(copies)

    def take_host_tier_work(self) -> HostTierWork:
        """Take what is to be done beside the steps."""
        work = HostTierWork(
            tuple(self._drops),
            self._unserves,
            tuple(self._reads),
            tuple(self._deletes),
            tuple(self._writes),
            tuple(self._serves),
            tuple(self._stores),
        )
        self._drops, self._reads, self._deletes, self._writes = [], [], [], []
        self._serves, self._unserves, self._stores = [], (), []
        return work

    def load(self, loads: Iterable[HostLoad]) -> None:
        """Give host blocks to what is read from files or from another replica, and to copies of cached blocks.

        Raises:
            LedgerMismatch: the host tier has diverged.
        """
        for load in loads:
            if load.lane != self.lane:
                continue
            self._drop(load.drops)
            if load.last != NO_BLOCK:
                self._copy_in(Demotion(load.last, load.count))
            elif load.count:
                extent, slots = self._tier().store(load.count)
                self._reads.append(
                    ReadBlocks(load.file, load.start, extent, tuple(slots), load.ticket, load.is_stored)
                )

    def serve(self, serves: Iterable[KvServe], unserves: tuple[str, ...]) -> None:
        """Find the host blocks that another replica may read, and note which ones it may read no longer.

        Raises:
            LedgerMismatch: the host tier has diverged.
        """
        self._unserves += unserves
        for one in serves:
            if one.lane == self.lane:
                self._serves.append(ServeBlocks(one.ticket, self._slots(one.blocks)))

    def _slots(self, parts: Iterable[Fetch]) -> tuple[Run, ...]:
        """Return the host blocks of parts of extents, in order."""
        slots: list[Run] = []
        for part in parts:
            for run in self._tier().runs(part.extent, part.start, part.count):
                append_run(slots, run)
        return tuple(slots)

    def write(self, deletes: Iterable[DiskDelete], writes: Iterable[DiskWrite]) -> None:
        """Find the host blocks that are written to files.

        Raises:
            LedgerMismatch: the host tier has diverged.
        """
        self._deletes += [one.file for one in deletes if one.lane == self.lane]
        for write in writes:
            if write.lane == self.lane:
                slots = self._tier().runs(write.extent, write.first, hash_count(write.file.hashes))
                self._writes.append(WriteBlocks(write.file, write.extent, write.first, tuple(slots)))

    def store(self, stores: Iterable[StoreWrite]) -> None:
        """Find the host blocks that are written to the store.

        Raises:
            LedgerMismatch: the host tier has diverged.
        """
        for one in stores:
            if one.lane == self.lane:
                ends = tuple((part.extent, part.start + part.count) for part in one.blocks)
                self._stores.append(StoreBlocks(one.object, ends, self._slots(one.blocks)))

    def publish(self, publishes: Iterable[Publish]) -> None:
        for publish in publishes:
            if publish.lane == self.lane:
                runs = self.ledger.remember(publish.id, publish.start, publish.count)
                self._paths.publish(publish.id, runs, publish.start, publish.after)

    def release(self, sequence: str) -> None:
        """Release a sequence; it is ignored if it has nothing on this lane.

        Releases must come in the controller's order, because that determines which blocks are least recently
        used.
        """
        if self._shards.pop(sequence, None) is not None and sequence in self.ledger:
            self.ledger.release(sequence)
            self._paths.release(sequence)

    def grow(self, grow: Grow) -> bool:
        """Apply a grow; return False if no KV is left, which means that the ledgers have diverged.

        Raises:
            LedgerMismatch: the host tier has diverged.
        """
        self._evict(grow.evictions)
        shards = self._shards[grow.id] = grown_map(self._shards[grow.id], grow)
        tokens = shards.tokens_on(self.lane)
        if grow.id in self.ledger:
            return self.ledger.grow(grow.id, tokens)
        if tokens == 0:
            return True
        self._paths.lock(grow.id, NO_BLOCK, 0)
        return self.ledger.reserve(grow.id, tokens)

    def admit(self, admit: Admit) -> list[BlockCopy] | None:
        """Apply an admit; return the copies to make before the step runs.

        Return None if no KV is left, which means that the ledgers have diverged.

        Raises:
            LedgerMismatch: the host tier has diverged.
        """
        shards = self._shards[admit.id] = admitted_map(admit)
        tokens = shards.tokens_on(self.lane)
        cached: list[Run] = []
        last, count = NO_BLOCK, 0
        if tokens:
            for prefix in admit.prefixes:
                if prefix.lane == self.lane:
                    last, count = prefix.last, prefix.count
            self._paths.lock(admit.id, last, count)  # before anything is evicted
            cached = self._paths.runs(last, count)
        self._evict(admit.evictions)
        if tokens == 0:
            return []
        if admit.fork_of is not None:
            shared = shards.local_lengths(admit.shared_tokens).get(self.lane, 0)
            return fork_on(self.ledger, admit.fork_of, admit.id, shared, tokens)
        if not self.ledger.reserve(admit.id, tokens, cached):
            return None
        self._fetch(admit, count)
        return []

    def _evict(self, evictions: Iterable[Eviction]) -> None:
        for eviction in evictions:
            if eviction.lane == self.lane:
                evicted = self._paths.evicted(eviction, self.ledger.remembered)
                self._demote(eviction)
                self.ledger.evict(evicted)

    def _demote(self, eviction: Eviction) -> None:
        self._drop(eviction.drops)
        for demotion in eviction.demotions:
            self._copy_in(demotion)

    def _copy_in(self, demotion: Demotion) -> None:
        """Copy cached blocks to host blocks, which become the next extent."""
        _, slots = self._tier().store(demotion.count)
        blocks = self._paths.runs(demotion.last, demotion.count)
        self._tier_copies += tier_copies(blocks, slots, is_fetch=False)

    def _drop(self, drops: Iterable[HostDrop]) -> None:
        for drop in drops:
            self._tier().drop(drop.extent, drop.keep)
            self._drops.append(drop)

    def _fetch(self, admit: Admit, start: int) -> None:
        """Fetch blocks of the tier into a sequence's table, from its `start`-th block on."""
        for fetch in admit.fetches:
            if fetch.lane == self.lane:
                blocks = self.ledger.runs(admit.id, start, start + fetch.count)
                slots = self._tier().runs(fetch.extent, fetch.start, fetch.count)
                if sum(length for _, length in blocks) != fetch.count:
                    raise LedgerMismatch(f"{admit.id} has no room for {fetch.count} blocks that it fetches")
                self._tier_copies += tier_copies(blocks, slots, is_fetch=True)
                start += fetch.count

    def _tier(self) -> HostLedger:
        if self.host is None:
            raise LedgerMismatch("the controller has a host tier, and this rank has none")
        return self.host


def admitted_map(admit: Admit) -> ShardMap:
    """Return the shard map of an admitted sequence."""
    return ShardMap(admit.segments or segments_of(admit.stripings) or (Segment(0, 0, admit.reserved_tokens),))


def grown_map(shards: ShardMap, grow: Grow) -> ShardMap:
    """Return the shard map of a sequence after a grow."""
    changed = grow.segments or segments_of(grow.stripings)
    if changed:
        kept = [segment for segment in shards.segments if segment.start < changed[0].start]
        return ShardMap((*kept, *changed), shards.version + 1)
    if grow.reserved_tokens > shards.tokens:
        return ShardMap((Segment(shards.owner, 0, grow.reserved_tokens),), shards.version + 1)
    return shards


def fork_on(
    ledger: BlockLedger, parent: str, child: str, shared_tokens: int, tokens: int
) -> list[BlockCopy] | None:
    """Fork a sequence on one lane, where the parent may hold nothing that is shared."""
    if shared_tokens == 0:
        return [] if ledger.reserve(child, tokens) else None
    return ledger.fork(parent, child, shared_tokens, tokens)
