"""A rank's copy of its lane's ledger, which replays the decisions of `medha.kv.pools`.

A rank applies the numbers that `Admit`, `Grow`, `Insert` and a release carry to the ledger of its own lane.
It needs no token ids, no hashes and no eviction policy, so it cannot decide differently from the controller;
`state_hash` verifies that it has not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from medha.errors import LedgerMismatch
from medha.kv.blocks import BlockCopy, BlockLedger, Run, append_run, as_blocks
from medha.kv.cached_paths import NO_BLOCK, CachedPaths
from medha.kv.host_tier import HostLedger, TierCopy, tier_copies
from medha.kv.prefix_cache import hash_count
from medha.kv.window_tables import WindowTables
from medha.shards import Segment, ShardMap, digest_of, segments_of
from medha.wire.messages import (
    Admit,
    DiskDelete,
    DiskFile,
    DiskWrite,
    Eviction,
    Fetch,
    Grow,
    HostDrop,
    HostLoad,
    Insert,
    KvFetch,
    KvServe,
    Offload,
    Step,
    StepEntry,
    StoreWrite,
)


@dataclass(frozen=True, slots=True)
class ReadBlocks:
    """Blocks from `start` on, of a file or of a ticket's offer, are read into host blocks `slots`, those of an extent."""

    file: str
    start: int
    extent: int
    slots: tuple[Run, ...]
    ticket: str = ""
    is_stored: bool = False  # `file` is an object of the store
    due: float = 0.0  # earlier ones are read first


@dataclass(frozen=True, slots=True)
class WriteBlocks:
    """Host blocks `slots`, those of an extent from its block `first` on, are written to a file."""

    file: DiskFile
    extent: int
    first: int
    slots: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class StoreBlocks:
    """Host blocks `slots` are written to an object of the store; `extents` are the extents, each with the end of its part."""

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
    """Work on a rank's host blocks beside the steps: its threads read and write files, in the order of the fields.

    The step's copies may overwrite blocks of `drops`. From then on, these blocks must not reach a file, nor those of
    `unserves` another replica. The other work comes after the copies.
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

    Each call applies one part of a `Step`, in this order: inserts, releases, loads, serves, grows, admits, fetches,
    writes, stores. If layers free KV before their windows, `begin_step` comes after the releases, and `place_windows`
    comes last.
    """

    def __init__(
        self,
        ledger: BlockLedger,
        lane: int = 0,
        host_blocks: int = 0,
        windows: WindowTables | None = None,
    ) -> None:
        """`host_blocks` is the size of the lane's host tier; 0: it has none.

        `windows` has the blocks of the layers that free KV before their windows, if there are any.
        """
        self.ledger = ledger
        self.lane = lane
        self.windows = windows
        self._windows_digest = b""
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
        self._filled: dict[str, int] = {}  # blocks of a sequence that were cached or fetched

    def shards(self, sequence: str) -> ShardMap:
        return self._shards[sequence]

    def state_hash(self) -> int:
        """Return a 53-bit digest of the ledger and all shard maps, to compare with `KvPools.state_hashes`.

        It covers the blocks of layers with a window as they were before the step (`note_windows`).
        """
        maps = digest_of(self._shards) + self._windows_digest
        return self.ledger.state_hash(maps if self.host is None else maps + self.host.digest())

    def note_windows(self) -> None:
        """Keep a digest of the blocks of layers with a window, before a step whose state is compared with the controller's."""
        if self.windows is not None:
            self._windows_digest = self.windows.digest()

    def take_tier_copies(self) -> tuple[TierCopy, ...]:
        """Take the copies between KV pool and host tier that grows, admits and fetches have decided, in order.

        They must be made in this order, and before all other copies of their step.
        """
        copies, self._tier_copies = self._tier_copies, []
        return tuple(copies)

    def take_host_tier_work(self) -> HostTierWork:
        """Take the work to be done beside the steps."""
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
        """Assign host blocks to the blocks that are read from files or another replica, and to copies of cached blocks.

        Raises:
            LedgerMismatch: the host tier has diverged.
        """
        for load in loads:
            if load.lane != self.lane:
                continue
            self._drop(load.drops)
            if load.last != NO_BLOCK:
                self._copy_in(Offload(load.last, load.count))
            elif load.count:
                extent, slots = self._tier().store(load.count)
                self._reads.append(
                    ReadBlocks(
                        load.file, load.start, extent, tuple(slots), load.ticket, load.is_stored, load.due
                    )
                )

    def serve(self, serves: Iterable[KvServe], unserves: tuple[str, ...]) -> None:
        """Find the host blocks that another replica may read, and record the tickets with which it may read no longer.

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

    def insert(self, inserts: Iterable[Insert]) -> None:
        for insert in inserts:
            if insert.lane == self.lane:
                runs = self.ledger.remember(insert.id, insert.start, insert.count)
                known = self._paths.depth(insert.id)
                self._paths.insert(insert.id, runs, insert.start, insert.after)
                if self.windows is not None and insert.start > known:
                    self._insert_windows(self.windows, insert, known)

    def _insert_windows(self, windows: WindowTables, insert: Insert, known: int) -> None:
        """Keep the windows that a sequence has computed for blocks, from number `known` on, that another one had inserted."""
        own = as_blocks(self.ledger.runs(insert.id, known, insert.start))
        cached = as_blocks(self._paths.runs(insert.after, insert.start - known))
        windows.inserted(insert.id, own, cached, insert.start)

    def release(self, sequence: str) -> None:
        """Release a sequence; it is ignored if it has nothing on this lane.

        Releases must come in the controller's order, because that determines which blocks are least recently
        used.
        """
        self._filled.pop(sequence, None)
        if self._shards.pop(sequence, None) is not None and sequence in self.ledger:
            windows = self.windows
            if windows is not None:
                windows.release(sequence)
                held = self.ledger.runs(sequence)
                self.ledger.release(sequence)
                windows.forget(self.ledger.free_runs(held))
            else:
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
        copies: list[BlockCopy] | None = []
        if admit.fork_of is not None:
            shared = shards.local_lengths(admit.shared_tokens).get(self.lane, 0)
            copies = fork_on(self.ledger, admit.fork_of, admit.id, shared, tokens)
        elif self.ledger.reserve(admit.id, tokens, cached, device_blocks=admit.device_blocks):
            self._filled[admit.id] = count
        else:
            return None
        if self.windows is not None and copies is not None:
            self._admit_windows(self.windows, admit, shards, cached)
        return copies

    def fetch(self, fetches: Iterable[KvFetch]) -> None:
        """Copy blocks of the host tier to the next unfilled blocks of sequences.

        Raises:
            LedgerMismatch: the host tier or a sequence has no such blocks.
        """
        for one in fetches:
            for part in one.blocks:
                if part.lane != self.lane:
                    continue
                start = self._filled.get(one.id, 0)
                slots = self._tier().runs(part.extent, part.start, part.count)
                blocks = self.ledger.runs(one.id, start, start + part.count) if one.id in self.ledger else []
                if sum(length for _, length in blocks) != part.count:
                    raise LedgerMismatch(f"{one.id} has no room for {part.count} blocks that it fetches")
                self._tier_copies += tier_copies(blocks, slots, is_fetch=True)
                self._filled[one.id] = start + part.count

    # --- layers that free KV before their windows -----------------------------------------------------

    def begin_step(self) -> None:
        """Release the blocks that no row after the last step sees."""
        if self.windows is not None:
            self.windows.begin_step()

    def _admit_windows(
        self, windows: WindowTables, admit: Admit, shards: ShardMap, cached: Sequence[Run]
    ) -> None:
        size, before = self.ledger.block_size_tokens, windows.window_tokens - 1
        if admit.fork_of is not None:
            shared = self._local(shards, admit.shared_tokens)
            seen = self._local(shards, admit.shared_tokens - before)
            windows.fork(admit.fork_of, admit.id, seen, shared)
        elif cached:
            windows.share(admit.id, self._local(shards, admit.cached_tokens - before), cached)
        end = admit.tokens // size * size
        again = (admit.tokens - 1) // size * size  # sequences of one prompt compute its last token again
        windows.will_end(admit.id, self._local(shards, again - before), self._local(shards, end))

    def place_windows(self, entries: Iterable[StepEntry]) -> list[BlockCopy]:
        """Give the entries of a step their blocks of layers with a window; return the copies that forks need there.

        Raises:
            LedgerMismatch: a window is not here, or no block is free.
        """
        windows = self.windows
        if windows is None:
            return []
        copies, window_tokens = windows.copy_forks(), windows.window_tokens
        # For each sequence on several lanes: its first position, and the end of those that are not drafts.
        spread: dict[str, tuple[int, int]] = {}
        drafted: dict[str, int] = {}
        for entry in entries:
            shards = self._shards.get(entry.id)
            if shards is None or not entry.extents:
                continue  # the plan of the step reports it
            start, stop = entry.extents[0].start, entry.extents[-1].last + 1
            if len(shards.segments) > 1:  # other entries may compute other positions of it
                known = stop - len(entry.drafts)
                first, last = spread.get(entry.id, (start, known))
                spread[entry.id] = min(start, first), max(known, last)
                drafted[entry.id] = len(entry.drafts)
            elif shards.segments[0].lane == self.lane:
                first_kept = stop - len(entry.drafts) - window_tokens
                windows.place(entry.id, start - window_tokens + 1, start, stop, first_kept)
        for name, (start, stop) in spread.items():
            if name in self.ledger:
                places = start - window_tokens + 1, start, stop + drafted[name], stop - window_tokens
                shards = self._shards[name]
                windows.place(name, *(self._local(shards, position) for position in places))
        return copies

    def _local(self, shards: ShardMap, position: int) -> int:
        """Return how many of a sequence's first `position` tokens lie on this lane."""
        if len(shards.segments) == 1:
            return max(position, 0)
        return shards.local_lengths(position).get(self.lane, 0)

    def replay(self, step: Step) -> None:
        """Apply all of a step, as a rank does; for lanes without tiers.

        Raises:
            LedgerMismatch: the step does not fit this state.
        """
        self.insert(step.inserts)
        for name in step.releases:
            self.release(name)
        self.begin_step()
        for grow in step.grows:
            if not self.grow(grow):
                raise LedgerMismatch(f"no KV is left to grow {grow.id} to {grow.reserved_tokens} tokens")
        for admit in step.admits:
            if self.admit(admit) is None:
                raise LedgerMismatch(f"no KV is left to admit {admit.id} with {admit.reserved_tokens} tokens")
        self.place_windows(step.entries)

    # --- cached blocks ----------------------------------------------------------------------------------

    def _evict(self, evictions: Iterable[Eviction]) -> None:
        for eviction in evictions:
            if eviction.lane == self.lane:
                evicted = self._paths.evicted(eviction, self.ledger.remembered)
                self._offload(eviction)
                self.ledger.evict(evicted)
                if self.windows is not None:
                    self.windows.forget(evicted)

    def _offload(self, eviction: Eviction) -> None:
        self._drop(eviction.drops)
        for offload in eviction.offloads:
            self._copy_in(offload)

    def _copy_in(self, offload: Offload) -> None:
        """Copy cached blocks to host blocks, which become the next extent."""
        _, slots = self._tier().store(offload.count)
        blocks = self._paths.runs(offload.last, offload.count)
        self._tier_copies += tier_copies(blocks, slots, is_fetch=False)

    def _drop(self, drops: Iterable[HostDrop]) -> None:
        for drop in drops:
            self._tier().drop(drop.extent, drop.keep)
            self._drops.append(drop)

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
