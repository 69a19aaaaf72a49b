"""The host tier of one lane: KV blocks that were evicted from the device and are kept in host memory.

Blocks that the prefix cache evicts are *offloaded*: copied to host blocks. If a later prompt continues in the tier behind
what the device has cached, those blocks are *fetched*: copied into the blocks of the request, instead of being computed.
A fetched block also stays in the tier, so it is not copied again when the device evicts it.

`HostLedger` has numbers only. The controller and every rank of a lane each own one and apply the same drops, offloads
and fetches in the same order, as with `medha.kv.blocks`. The blocks that were offloaded together are an *extent*, and
extents are numbered in the order in which they come. So an offload is sent as the end of a cached prefix and a count, and
a fetch as an extent and a range: neither grows with the number of blocks.

`HostTier` decides, at the controller. What an extent is worth is what its blocks cost to compute again, plus the worth of
what was dropped last. This is GreedyDual-Size (Cao and Irani, "Cost-aware WWW proxy caching algorithms", 1997): what is
costly stays longer, and what nobody uses ages, without a clock. An extent is worth at least as much as any behind it,
because without its beginning a prefix is of no use.

A request may wait for KV that is being read from a file, the store or another replica. Such KV also replaces extents that
are worth more than it is. Extents that were read for other requests, and not fetched yet, are spared until the tier has
aged by what their blocks cost to compute.

KV that a disk or a store is to get *passes through* the tier. It replaces extents that a lower tier has (`LowerTiers`), whatever
they are worth: those must be read again at most, but KV that never gets there must be computed again.

The KV of a request that has stepped aside is *kept for it* until it comes back. The tier takes it before all else, and
drops whatever is not kept to make room for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from heapq import heapify, heappop, heappush
from itertools import groupby
from math import ceil, frexp, inf, ldexp
from typing import Literal, Protocol, TypeVar

from medha.errors import LedgerMismatch
from medha.kv.blocks import FreeRuns, Run, append_run, cut_runs
from medha.kv.prefix_cache import Branch, each_hash, hash_at, hash_count, hash_range
from medha.kv.span_index import SHORT_BLOCKS, SpanIndex, common_blocks
from medha.kv.unwritten_blocks import UnwrittenBlocks
from medha.wire.messages import Fetch, HostDrop, Offload

KvTier = Literal["host", "disk", "store", "peers"]
"""Tiers from which KV comes, as `spec.kvCache.tiers` names them."""

_MANY = 64
"""Parts from which an answer of `HostTier.match` is kept until the tier changes."""
_MOST_PASSED = 64
"""Extents that a candidate passes over because no lower tier has them yet."""
_PASSING_PART = 4
"""The tier drops what the disk has to make room for offloaded blocks only while at most one in so many of its blocks waits for the disk.
So a slow disk does not empty it."""
_PRICED_TOKENS = 1024
"""Tokens over which the cost of a block is averaged: a chunk of one block costs as much as one of many."""


@dataclass(frozen=True, slots=True)
class TierCopy:
    """`count` consecutive blocks to copy: from block `block` of the pool to host block `slot` on, or back (`is_fetch`)."""

    is_fetch: bool
    block: int
    slot: int
    count: int


def tier_copies(blocks: Iterable[Run], slots: Iterable[Run], *, is_fetch: bool) -> list[TierCopy]:
    """Return the copies between equally many blocks of the pool and of the tier, both given as runs in order."""
    found: list[TierCopy] = []
    left = [list(run) for run in slots][::-1]
    for first, length in blocks:
        while length > 0:
            slot = left[-1]
            count = min(length, slot[1])
            found.append(TierCopy(is_fetch, first, slot[0], count))
            first, length = first + count, length - count
            slot[0], slot[1] = slot[0] + count, slot[1] - count
            if slot[1] == 0:
                left.pop()
    return found


class HostLedger:
    """Assigns the host blocks of one lane to extents."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._free = FreeRuns(blocks)
        self._extents: dict[int, list[Run]] = {}  # in ascending order
        self._texts: dict[int, str] = {}  # for `digest`: each extent with its blocks, in the same order
        self._next = 0
        self._digest: bytes | None = None  # None after a change

    @property
    def free_blocks(self) -> int:
        return self._free.blocks

    @property
    def held_blocks(self) -> int:
        return self.blocks - self._free.blocks

    def store(self, count: int) -> tuple[int, list[Run]]:
        """Give host blocks to a new extent of `count` blocks; return its number and the blocks, in order.

        Raises:
            LedgerMismatch: too few are free.
        """
        if not 0 < count <= self._free.blocks:
            raise LedgerMismatch(f"{count} host blocks are to be stored, and {self._free.blocks} are free")
        extent, self._next = self._next, self._next + 1
        runs: list[Run] = []
        for run in self._free.take(count, None):
            append_run(runs, run)
        self._hold(extent, runs)
        return extent, runs

    def _hold(self, extent: int, runs: list[Run]) -> None:
        self._extents[extent] = runs
        self._texts[extent] = f"{extent}:{runs};"
        self._digest = None

    def drop(self, extent: int, keep: int) -> None:
        """Free the blocks of an extent from the `keep`-th on.

        Raises:
            LedgerMismatch: it has no such block.
        """
        runs = self._extents.get(extent, [])
        blocks = sum(length for _, length in runs)
        if not 0 <= keep < blocks:
            raise LedgerMismatch(f"block {keep} of extent {extent} is to be dropped, and it has {blocks}")
        for first, length in cut_runs(runs, keep, blocks):
            self._free.give(first, length)
        if keep:
            self._hold(extent, cut_runs(runs, 0, keep))
        else:
            del self._extents[extent], self._texts[extent]
            self._digest = None

    def runs(self, extent: int, start: int, count: int) -> list[Run]:
        """Return blocks `start .. start + count` of an extent, as runs in order.

        Raises:
            LedgerMismatch: it has no such blocks.
        """
        found = cut_runs(self._extents.get(extent, []), start, start + count)
        if start < 0 or count < 1 or sum(length for _, length in found) != count:
            raise LedgerMismatch(f"extent {extent} has no blocks {start}+{count}")
        return found

    def digest(self) -> bytes:
        """Return a digest of all extents and their blocks; equal on all copies of this ledger."""
        if self._digest is None:
            text = "".join(self._texts.values())
            self._digest = blake2b(f"{self._next};{text}".encode(), digest_size=8).digest()
        return self._digest

    def check(self) -> None:
        """Assert that no host block is lost or held twice; O(blocks), for tests."""
        held = [first + i for runs in self._extents.values() for first, length in runs for i in range(length)]
        free = [first + i for first, length in self._free for i in range(length)]
        assert sorted(held + free) == list(range(self.blocks)), "a host block is lost"


class Prices(Protocol):
    """Predicted times that the tier's decisions compare; `medha.cost.tier_seconds` has them."""

    def fetch_seconds(self, blocks: int) -> float:
        """Return the predicted time to fetch so many blocks."""
        ...

    def compute_seconds(self, context: int, tokens: int) -> float:
        """Return the predicted time to bring a prompt from `context` to `tokens` tokens of KV."""
        ...


class LowerTiers(Protocol):
    """The tiers of a lane that get KV from its host tier: a disk, a store, or both."""

    def have(self, extent: int, hashes: str, start: int, stop: int) -> bool:
        """Return whether blocks `start .. stop` of an extent may be dropped here, because they can be read from there.

        `hashes` are those of the extent's blocks, from its first one on.
        """
        ...

    def want(self, hashes: str, start: int, stop: int) -> bool:
        """Return whether some of the blocks `start .. stop` of a prompt would be written there from the host tier."""
        ...


@dataclass(frozen=True, slots=True)
class Held:
    """Blocks `start .. start + count` of an extent, which a prompt may fetch."""

    extent: int
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class Kept:
    """Blocks of an extent, from its `first` on.

    `hashes` are theirs, `before` is that of the block before them (empty: there is none), and `start` is the place
    of the first one in a prompt.
    """

    extent: int
    hashes: str
    before: str
    start: int
    first: int = 0


@dataclass(slots=True, eq=False)
class _Extent:
    """Blocks of the tier, the `start`-th of a prompt and those behind it.

    `hashes` are theirs, and perhaps of blocks dropped since; `before` is that of the block before them, which `parent` holds.
    """

    number: int
    hashes: str
    before: str
    start: int
    blocks: int
    worth: float
    is_unfetched: bool = False  # it was read for a request, and none has fetched it since
    read_from: KvTier = "host"  # `host`: it came from the device
    # Each entry with the number of this extent's blocks, from the first one to the last that the entry wants.
    wanted: dict[_Wanted, int] = field(default_factory=dict)
    parent: _Extent | None = None
    children: dict[int, _Extent] = field(default_factory=dict)

    @property
    def swapped(self) -> int:
        """Blocks from its first one on that are kept for requests that have stepped aside."""
        return min(max(self.wanted.values()), self.blocks) if self.wanted else 0


@dataclass(slots=True, eq=False)
class _Wanted:
    """Blocks that a request which has stepped aside will need, and the extents that hold some of them.

    No two of them have a block in common: blocks that several requests need belong to one of these requests.
    """

    hashes: str
    extents: list[_Extent] = field(default_factory=list)

    @property
    def blocks(self) -> int:
        return hash_count(self.hashes)


@dataclass(slots=True, eq=False)
class _Swapped:
    """The blocks that a request which has stepped aside will need, and those of them that belong to it."""

    hashes: str
    wanted: list[_Wanted] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Known:
    """Blocks of a branch that is offloaded together with others."""

    hashes: str

    @property
    def blocks(self) -> int:
        return hash_count(self.hashes)


@dataclass(slots=True)
class _Candidate:
    """Evicted blocks that the tier lacks: hashes `start .. start + blocks`, in blocks `runs` of the pool."""

    hashes: str
    start: int
    blocks: int
    runs: list[Run]
    block_seconds: float  # to compute one of them again
    worth: float
    is_swapped: bool = False  # kept for a request that has stepped aside
    is_awaited: bool = False  # a request waits for them, here or on another replica
    passes_on: bool = False  # a lower tier gets them from here, and has no other source

    @property
    def before(self) -> str:
        """Hash of the block before them; empty if they begin a prompt."""
        return hash_at(self.hashes, self.start - 1) if self.start else ""

    @property
    def last(self) -> int:
        first, length = self.runs[-1]
        return first + length - 1


@dataclass(slots=True)
class TierCounts:
    """Blocks copied, and requests that fetched some, since the epoch began."""

    hits: int = 0
    fetched_blocks: int = 0
    offloaded_blocks: int = 0
    dropped_blocks: int = 0
    swapped_out_blocks: int = 0
    """Offloaded blocks that were kept for requests that had stepped aside."""
    swapped_in_blocks: int = 0
    """Fetched blocks that requests fetched when they came back after they had stepped aside."""


class HostTier:
    """Decides what the host tier of a lane holds, and finds prefixes there; the controller's part."""

    def __init__(self, blocks: int, block_size_tokens: int, prices: Prices) -> None:
        self.ledger = HostLedger(blocks)
        self.counts = TierCounts()
        self._size = block_size_tokens
        self._prices = prices
        self._extents: dict[int, _Extent] = {}
        self._index = SpanIndex[_Extent]()
        self._orphans: dict[
            str, dict[int, _Extent]
        ] = {}  # hash of the block before -> extents without a parent
        # Heaps of (worth, number) of all that may be dropped: nothing continues it, and nothing keeps it. Stale ones are skipped.
        self._by_worth: list[tuple[float, int]] = []
        self._unfetched_by_worth: list[tuple[float, int]] = []  # those that were read, and not fetched since
        self._aged = 0.0  # worth of what was dropped last
        self._pinned: set[int] = set()  # until `unpin`
        self._kept = Counter[int]()  # extent -> parts of it that tickets and fetches keep
        # Extents that are being read from a file, the store or another replica, and when the reads are due (seconds).
        self._loading: dict[int, float] = {}
        self._served: dict[str, list[Held]] = {}  # ticket -> blocks that another replica may read
        self._served_parts: dict[
            int, Counter[Held]
        ] = {}  # extent -> parts of it, and how many tickets keep each
        self.served_blocks = 0
        """Blocks that tickets keep; those of several tickets count once."""
        self._fetching: dict[
            str, tuple[Held, ...]
        ] = {}  # sequence -> blocks of which some are still to be copied
        self._swapped: list[_Swapped] = []
        self._wanted = SpanIndex[_Wanted]()
        self.wanted_blocks = 0
        """Blocks that requests which have stepped aside will need: those that are kept, and those that may yet come."""
        # The last question of `match` with a long answer: a long request that waits for KV asks it with each step.
        self._asked: tuple[str, int, bool, int] | None = None
        self._answer: tuple[Held, ...] = ()
        self.unwritten: UnwrittenBlocks | None = None
        """Blocks that wait for a disk tier; None: no disk tier takes them."""
        self.below: LowerTiers | None = None
        """The tiers that get KV from this one; None: there are none."""

    # --- prefixes -------------------------------------------------------------------------------------

    def match(self, hashes: str, start: int, stop: int, *, with_loading: bool = False) -> list[Held]:
        """Return what the tier holds of the blocks `start .. stop` (exclusive) of a prompt, without a gap.

        Blocks that are being loaded count only `with_loading`.
        """
        asked = self._asked
        if asked is not None and asked[:3] == (hashes, start, with_loading) and stop <= asked[3]:
            return list(self._answer) if stop == asked[3] else _cut(self._answer, stop - start)
        first = start
        found: list[Held] = []
        while start < stop and (place := self._index.at(hashes, start)) is not None:
            extent, block = place
            if extent.number in self._loading and not with_loading:
                break
            count = common_blocks(hashes, start, stop, extent, block)
            found.append(Held(extent.number, block, count))
            start += count
        if len(found) >= _MANY:
            self._asked, self._answer = (hashes, first, with_loading, stop), tuple(found)
        return found

    def lacks(self, hashes: str, start: int, stop: int) -> int:
        """Return how many of the blocks `start .. stop` (exclusive) of a prompt come before the first that the tier holds."""
        return self._index.lacks(hashes, start, stop)

    def pin(self, held: Iterable[Held]) -> None:
        """Keep extents until `unpin`: a request is about to fetch them."""
        self._pinned.update(one.extent for one in held)

    def unpin(self) -> None:
        """End what `pin` began. Tickets and fetches keep what they need by themselves."""
        pinned, self._pinned = self._pinned, set()
        for number in pinned:
            self._offer_again(number)

    def _keep(self, held: Iterable[Held]) -> None:
        self._kept.update(one.extent for one in held)

    def _let_go(self, held: Iterable[Held]) -> None:
        """End what `_keep` began."""
        for one in held:
            self._kept[one.extent] -= 1
            if not self._kept[one.extent]:
                del self._kept[one.extent]
                self._offer_again(one.extent)

    # --- blocks that another replica reads ------------------------------------------------------------

    def served_of(self, held: Iterable[Held]) -> int:
        """Return how many of these blocks, from the first one on, tickets keep already."""
        count = 0
        for one in held:
            at, end = one.start, one.start + one.count
            for start, stop in _joined(self._served_parts.get(one.extent, ())):
                at = stop if start <= at < stop else at
            count += min(at, end) - one.start
            if at < end:
                break
        return count

    def _count_served(self, held: Iterable[Held], tickets: int) -> None:
        """Add `tickets` to the number of tickets that keep each of these parts; this examines no other extents."""
        for one in held:
            parts = self._served_parts.setdefault(one.extent, Counter())
            before = sum(stop - start for start, stop in _joined(parts))
            parts[one] += tickets
            if not parts[one]:
                del parts[one]
            self.served_blocks += sum(stop - start for start, stop in _joined(parts)) - before
            if not parts:
                del self._served_parts[one.extent]

    def serve(self, ticket: str, held: Sequence[Held]) -> None:
        """Keep blocks until `unserve`, beside others of the ticket: another replica may read them."""
        self._served.setdefault(ticket, []).extend(held)
        self._keep(held)
        self._count_served(held, 1)
        self.unpin()

    def unserve(self, ticket: str) -> None:
        """Keep the blocks of a ticket no longer."""
        held = self._served.pop(ticket, [])
        self._let_go(held)
        self._count_served(held, -1)

    def take_in(
        self, hashes: str, start: int, count: int, *, is_awaited: bool
    ) -> tuple[int, int, tuple[HostDrop, ...]] | None:
        """Give room to blocks `start .. start + count` of a prompt, which are copied from the device at once.

        `is_awaited`: another replica waits for them; else they pass through to the store. Return the number of the new extent,
        of how many of these blocks it is, and what it drops; None if there is no room, and nothing that makes some.
        """
        made = self._make_extent(hashes, start, count, is_awaited=is_awaited, passes_on=not is_awaited)
        if made is not None:
            self._await_write(made[0])
        return made

    def begin_swap(self, hashes: str) -> None:
        """Keep the blocks of these hashes for a request that stepped aside: those that are here, and those that come later."""
        one = _Swapped(hashes)
        self._swapped.append(one)
        self._want(one)

    def _want(self, one: _Swapped) -> None:
        """Assign to a request those of its blocks that belong to no other request, and keep those of them that are here."""
        at = 0
        for other, _, count in list(self._wanted.runs(one.hashes, 0, hash_count(one.hashes))):
            if other is None:
                wanted = _Wanted(hash_range(one.hashes, at, at + count))
                one.wanted.append(wanted)
                self._wanted.add(wanted)
                self.wanted_blocks += count
                for extent, first, blocks in self._index.runs(one.hashes, at, at + count):
                    if extent is not None:
                        self._keep_for(wanted, extent, first + blocks)
            at += count

    def _keep_for(self, wanted: _Wanted, extent: _Extent, end: int) -> None:
        extent.wanted[wanted] = end
        wanted.extents.append(extent)

    def end_swap(self, hashes: str) -> None:
        """End what `begin_swap` began with these blocks."""
        one = next(each for each in self._swapped if each.hashes == hashes)
        self._swapped.remove(one)
        for wanted in one.wanted:
            self._wanted.cut(wanted, 0)
            self.wanted_blocks -= wanted.blocks
            for extent in wanted.extents:
                extent.wanted.pop(wanted, None)
        # Others may need some of these blocks, too, whatever block of a prompt their part begins with.
        for other in self._swapped:
            self._want(other)
        for wanted in one.wanted:
            for extent in wanted.extents:
                self._offer_again(extent.number)

    @property
    def swapped_blocks(self) -> int:
        """Blocks that are kept for requests that have stepped aside."""
        return sum(extent.swapped for extent in self._extents.values())

    def fetch(self, sequence: str, held: Sequence[Held], lane: int) -> tuple[Fetch, ...]:
        """Count a sequence's fetch of `held`, which makes it worth as much as if it were new, and keep it until `fetched`."""
        self.fetched(sequence)
        self._fetching[sequence] = tuple(held)
        self._keep(held)
        self.unpin()
        for one in held:
            extent = self._extents[one.extent]
            extent.is_unfetched = False
            stop = extent.start + one.start + one.count
            self._raise(extent, self._aged + self._block_seconds(extent.start + one.start, stop))
            self.counts.fetched_blocks += one.count
        self.counts.hits += bool(held)
        return tuple(Fetch(one.extent, one.start, one.count, lane) for one in held)

    def blocks_by_tier(self, held: Iterable[Held]) -> Counter[KvTier]:
        """Return how many of these blocks come from each tier.

        Blocks that were read from another tier come from there only until a sequence has fetched some of their extent. Later on,
        they come from the host tier.
        """
        found = Counter[KvTier]()
        for one in held:
            extent = self._extents[one.extent]
            found[extent.read_from if extent.is_unfetched else "host"] += one.count
        return found

    def fetched(self, sequence: str) -> None:
        """Keep the blocks of a sequence's fetch no longer: all are copied, or none is needed any more."""
        self._let_go(self._fetching.pop(sequence, ()))

    # --- offload -------------------------------------------------------------------------------------

    def offload(self, branches: Sequence[Branch]) -> tuple[tuple[HostDrop, ...], tuple[Offload, ...]]:
        """Choose which evicted blocks the tier takes and what it drops for them.

        The most valuable ones come first. Each takes free blocks. Then it takes those of extents that a lower tier has, if
        such a tier wants it and has not too much to write, and those of extents that are worth less than it is. If all these
        do not suffice, only its beginning is kept.
        """
        candidates: list[_Candidate] = []
        behind: dict[str, _Candidate] = {}  # of those behind a block, by its hash, the one that is worth most
        known = SpanIndex[_Known]()  # one lane may hold a block behind several beginnings
        for branch in branches:
            for one in self._candidates(branch, behind, known):
                candidates.append(one)
                if one.before not in behind or behind[one.before].worth < one.worth:
                    behind[one.before] = one
            if len(branches) > 1:
                known.add(_Known(hash_range(branch.hashes, branch.start, branch.start + branch.blocks)))
        candidates.reverse()  # of those that are worth the same, the beginning of a prefix comes first
        candidates.sort(key=lambda one: (not one.is_swapped, -one.worth))
        drops: list[HostDrop] = []
        taken: list[_Candidate] = []
        room = self.ledger.free_blocks
        waiting_blocks = 0 if self.unwritten is None else self.unwritten.blocks
        for one in candidates:
            self._raise_before(one)
            if room < one.blocks:
                one.passes_on = (
                    waiting_blocks <= self.ledger.blocks // _PASSING_PART and self._is_wanted_below(one)
                )
                dropped, freed = self._make_room(one, one.blocks - room)
                drops += dropped
                room += freed
            if room < one.blocks:
                self._age(one, one.blocks - room)
                if self.unwritten is not None:
                    self.unwritten.turned_away(one.hashes, one.start + room, one.start + one.blocks)
                one.blocks, one.runs = room, cut_runs(one.runs, 0, room)
            if room == 0:
                continue
            room -= one.blocks
            waiting_blocks += one.blocks
            taken.append(one)
        stored = [self._store(one) for one in taken]
        for number in stored:
            self._await_write(number)
        self.counts.offloaded_blocks += sum(one.blocks for one in taken)
        self.counts.swapped_out_blocks += sum(one.blocks for one in taken if one.is_swapped)
        return tuple(drops), tuple(Offload(one.last, one.blocks) for one in taken)

    def _candidates(
        self, branch: Branch, behind: Mapping[str, _Candidate], known: SpanIndex[_Known]
    ) -> Iterable[_Candidate]:
        """Yield the parts of a branch that the tier lacks, and that would be fetched rather than computed.

        `behind` has what follows a block and is about to be offloaded. `known` has other branches, whose blocks are not taken twice.
        """
        hashes, at = branch.hashes, branch.start
        for start, count, is_swapped in self._lacking(branch, known):
            block_seconds = self._block_seconds(start, start + count)
            if self._prices.fetch_seconds(count) >= block_seconds * count:
                continue
            worth = self._aged + block_seconds
            for key in _within(behind, hashes, start, start + count, lambda one: one.start - 1):
                worth = max(worth, behind[key].worth)
            for key in _within(self._orphans, hashes, start, start + count, _block_before):
                worth = max(worth, *(orphan.worth for orphan in self._orphans[key].values()))
            runs = cut_runs(branch.runs, start - at, start + count - at)
            yield _Candidate(hashes, start, count, runs, block_seconds, worth, is_swapped)

    def _lacking(self, branch: Branch, known: SpanIndex[_Known]) -> Iterator[tuple[int, int, bool]]:
        """Yield the parts of a branch that neither the tier nor other branches have.

        Each comes with its first block, its length, and whether requests that have stepped aside need it. They need
        all of it, or none.
        """
        hashes, at, stop = branch.hashes, branch.start, branch.start + branch.blocks
        while at < stop:
            place = self._index.at(hashes, at) or known.at(hashes, at)
            if place is not None:
                at += common_blocks(hashes, at, stop, *place)
                continue
            end = at + self._index.lacks(hashes, at, stop)
            end = at + known.lacks(hashes, at, end)
            runs = self._wanted.runs(hashes, at, end)
            for is_swapped, alike in groupby(runs, key=lambda run: run[0] is not None):
                count = sum(run[2] for run in alike)
                yield at, count, is_swapped
                at += count

    def _block_seconds(self, start: int, stop: int) -> float:
        """Return the mean time to compute one of the blocks `start .. stop` of a prompt again."""
        first = max(0, min(start, stop - max(_PRICED_TOKENS // self._size, 1)))
        return self._prices.compute_seconds(first * self._size, stop * self._size) / (stop - first)

    def _raise_before(self, one: _Candidate) -> None:
        """Make what the tier holds of the prefix before a candidate worth at least as much."""
        place = self._before(one)
        if place is not None:
            self._raise(place, one.worth)

    def _before(self, one: _Candidate) -> _Extent | None:
        """Return the extent that holds the block before a candidate."""
        place = self._index.at(one.hashes, one.start - 1) if one.start else None
        return None if place is None else place[0]

    def _raise(self, extent: _Extent | None, worth: float) -> None:
        """Make an extent, and those that it continues, worth at least so much.

        What they are worth beyond the tier's age is rounded up to the next step of a coarse scale. Without that, each of
        many extents in a row that is worth a little more than the one before would raise all earlier ones again.
        """
        if extent is not None and extent.worth < worth:
            worth = max(worth, self._aged + _next_step(max(worth - self._aged, 0.0)))
        while extent is not None and extent.worth < worth:
            extent.worth = worth
            self._offer(extent)
            if self.unwritten is not None:
                self.unwritten.raised(extent.number, worth)
            extent = extent.parent

    def _may_drop(self, extent: _Extent) -> bool:
        """Return whether an extent may be dropped: it ends a prefix, and nothing needs it."""
        return not (extent.children or extent.swapped or self._is_in_use(extent.number))

    def _is_in_use(self, number: int) -> bool:
        """Return whether blocks of an extent are being read or copied, or are about to be."""
        return number in self._pinned or number in self._kept or number in self._loading

    def _offer(self, extent: _Extent) -> None:
        """Add an extent to its heap if it may be dropped. Whatever ends a reason why it may not calls this again."""
        if not self._may_drop(extent):
            return
        heap = self._heap_of(extent)
        heappush(heap, (extent.worth, extent.number))
        if len(heap) > 4 * len(self._extents) + 64:  # drop stale entries
            heap[:] = [
                (one.worth, one.number)
                for one in self._extents.values()
                if self._heap_of(one) is heap and self._may_drop(one)
            ]
            heapify(heap)

    def _heap_of(self, extent: _Extent) -> list[tuple[float, int]]:
        return self._unfetched_by_worth if extent.is_unfetched else self._by_worth

    def _next_heap(self, one: _Candidate) -> list[tuple[float, int]] | None:
        """Return the heap whose first extent makes room for a candidate; None if neither's does.

        What was read for a request makes room for another read only once the tier has aged by what it costs. By then, its
        request has usually been admitted, or has ended.
        """
        found: list[tuple[float, int]] | None = None
        most_worth = most_worth_unfetched = inf if one.is_swapped else one.worth
        if one.is_awaited:
            most_worth, most_worth_unfetched = inf, self._aged
        for heap, most in (self._by_worth, most_worth), (self._unfetched_by_worth, most_worth_unfetched):
            if heap and heap[0][0] < most and (found is None or heap[0] < found[0]):
                found = heap
        return found

    def _offer_again(self, number: int) -> None:
        """Do the same as `_offer` for an extent that may be gone."""
        extent = self._extents.get(number)
        if extent is not None:
            self._offer(extent)

    def _is_wanted_below(self, one: _Candidate) -> bool:
        below = None if one.is_swapped else self.below
        return below is not None and below.want(one.hashes, one.start, one.start + one.blocks)

    def _make_room(self, one: _Candidate, missing: int) -> tuple[list[HostDrop], int]:
        """Drop what makes room for a candidate, up to `missing` blocks; return the drops, and how many blocks they free."""
        dropped = self._drop_copied(one, missing) if one.passes_on else []
        freed = sum(blocks for _, blocks in dropped)
        while freed < missing and (drop := self._drop_worth_less(one, missing - freed)) is not None:
            dropped.append(drop)
            freed += drop[1]
        return [drop for drop, _ in dropped], freed

    def _drop_copied(self, one: _Candidate, missing: int) -> list[tuple[HostDrop, int]]:
        """Drop ends of extents that a lower tier has, up to `missing` blocks; return each drop, and how many blocks it frees.

        Without room here, the candidate never gets to a lower tier, and must be computed again. What is dropped for it can
        be read again. The extents of least worth come first, and the one that the candidate continues comes last. Those that
        a lower tier lacks are passed over, up to a limit.
        """
        dropped: list[tuple[HostDrop, int]] = []
        passed: list[tuple[float, int]] = []
        parent = self._before(one)

        def drop(extent: _Extent) -> None:
            nonlocal missing
            dropped.append(self._drop_end(extent, missing))
            missing -= dropped[-1][1]
            self._age(one, dropped[-1][1])

        while missing > 0 and self._by_worth and len(passed) < _MOST_PASSED:
            entry = heappop(self._by_worth)
            extent = self._droppable(entry, self._by_worth)
            if extent is None or (passed and passed[-1] == entry):
                continue
            if extent is parent or not self._is_copied(extent, missing):
                passed.append(entry)
            else:
                drop(extent)
        for entry in passed:
            heappush(self._by_worth, entry)
        if parent is not None and (parent.is_unfetched or not self._may_drop(parent)):
            parent = None
        if missing > 0 and parent is not None and self._is_copied(parent, missing):
            drop(parent)
        return dropped

    def _is_copied(self, extent: _Extent, missing: int) -> bool:
        """Return whether a lower tier has the last `missing` blocks of an extent, or all of a smaller one."""
        if extent.read_from == "store":
            return True
        keep = max(extent.blocks - missing, 0)
        return self.below is not None and self.below.have(extent.number, extent.hashes, keep, extent.blocks)

    def _drop_worth_less(self, one: _Candidate, missing: int) -> tuple[HostDrop, int] | None:
        """Drop up to `missing` blocks of the extent that is worth least; return how many, or None if all are worth more.

        Only ends of prefixes are dropped; of those that are worth the same, the oldest one. Anything that is not kept makes
        room for blocks that are kept for a request. Anything but what others wait for makes room for blocks that a
        request waits for.
        """
        while (heap := self._next_heap(one)) is not None:
            entry = heappop(heap)
            extent = self._droppable(entry, heap)
            if extent is None:
                continue
            found = self._drop_end(extent, missing)
            if one.is_awaited and entry[0] >= one.worth:
                # If the tier aged to this worth, one cheap load would make all that is costly old at once.
                self._age(one, found[1])
            else:
                self._aged = max(self._aged, entry[0])
            return found
        return self._drop_behind(one, missing) if one.is_swapped and self._orphans else None

    def _droppable(self, entry: tuple[float, int], heap: list[tuple[float, int]]) -> _Extent | None:
        """Return the extent of an entry of a heap; None if the entry is stale, or the extent may not be dropped."""
        worth, number = entry
        extent = self._extents.get(number)
        is_stale = extent is None or extent.worth != worth or self._heap_of(extent) is not heap
        return None if extent is None or is_stale or not self._may_drop(extent) else extent

    def _drop_end(self, extent: _Extent, missing: int) -> tuple[HostDrop, int]:
        """Drop up to `missing` blocks from the end of an extent; return how many."""
        keep = max(extent.blocks - missing, 0)
        found = HostDrop(extent.number, keep), extent.blocks - keep
        self._forget(extent, keep)
        return found

    def _age(self, one: _Candidate, blocks: int) -> None:
        """Age what the tier holds by the cost of some blocks of a candidate that is worth less.

        These blocks are turned away, or they replace what is worth more. Without ageing, a tier full of costly KV would
        never change.
        """
        self._aged += one.block_seconds * blocks / self.ledger.blocks

    def _drop_behind(self, one: _Candidate, missing: int) -> tuple[HostDrop, int] | None:
        """Drop up to `missing` blocks from the end of what the tier holds behind a candidate; return how many.

        Without the candidate they are of no use, even if they are kept for a request.
        """
        for key in _within(self._orphans, one.hashes, one.start, one.start + one.blocks, _block_before):
            for leaf in self._orphans[key].values():
                while leaf.children:
                    leaf = next(iter(leaf.children.values()))
                if not self._is_in_use(leaf.number):
                    return self._drop_end(leaf, missing)
        return None

    def _forget(self, extent: _Extent, keep: int) -> None:
        """Forget the blocks of an extent without children from the `keep`-th on."""
        self._asked = None
        self.ledger.drop(extent.number, keep)
        self.counts.dropped_blocks += extent.blocks - keep
        self._index.cut(extent, keep)
        extent.blocks = keep
        if self.unwritten is not None:
            self.unwritten.cut(extent.number, keep)
        if keep:
            self._offer(extent)
            return
        del self._extents[extent.number]
        if extent.parent is not None:
            del extent.parent.children[extent.number]
            self._offer(extent.parent)
        elif extent.before:
            del self._orphans[extent.before][extent.number]
            if not self._orphans[extent.before]:
                del self._orphans[extent.before]

    def _store(self, one: _Candidate) -> int:
        """Store a candidate as a new extent, and return its number."""
        self._asked = None
        number, _ = self.ledger.store(one.blocks)
        # A copy of these hashes alone: nothing else may need those of the whole prompt any more.
        hashes = hash_range(one.hashes, one.start, one.start + one.blocks)
        extent = _Extent(number, hashes, one.before, one.start, one.blocks, one.worth)
        self._extents[number] = extent
        parent = self._before(one)
        if parent is not None:
            extent.parent = parent
            parent.children[number] = extent
        elif extent.before:
            self._orphans.setdefault(extent.before, {})[number] = extent
        end = 0
        for wanted, _, count in self._wanted.runs(one.hashes, one.start, one.start + one.blocks):
            end += count
            if wanted is not None:
                self._keep_for(wanted, extent, end)
        self._index.add(extent)
        for key in _within(self._orphans, one.hashes, one.start, one.start + one.blocks, _block_before):
            for behind in self._orphans.pop(key).values():
                behind.parent = extent
                extent.children[behind.number] = behind
                extent.worth = max(extent.worth, behind.worth)
        self._offer(extent)
        self._raise(extent.parent, extent.worth)
        return number

    # --- blocks that come from files, and go to them ----------------------------------------------------

    def _await_write(self, number: int) -> None:
        """Let an extent wait for the disk tier, if there is one."""
        if self.unwritten is not None:
            extent = self._extents[number]
            self.unwritten.add(number, extent.worth, extent.start, extent.blocks)

    def take_unwritten(self, most_blocks: int) -> Kept | None:
        """Take up to `most_blocks` blocks that wait for the disk tier, those that come next; None if none waits."""
        part = None if self.unwritten is None else self.unwritten.take(most_blocks)
        if part is None:
            return None
        extent = self._extents[part.extent]
        hashes = hash_range(extent.hashes, part.first, part.first + part.count)
        before = hash_at(extent.hashes, part.first - 1) if part.first else extent.before
        return Kept(extent.number, hashes, before, extent.start + part.first, part.first)

    def wait_again(self, kept: Kept) -> int:
        """Let blocks that were taken wait for the disk tier again; return how many are not here any more."""
        blocks = hash_count(kept.hashes)
        extent = self._extents.get(kept.extent)
        if extent is not None and extent.blocks > kept.first:
            found = min(extent.blocks - kept.first, blocks)
            self._wait_from(extent, kept.first)
        else:  # they may have been dropped, and have come back in another extent
            found = 0
            for other, first, count in self._index.runs(kept.hashes, 0, blocks):
                if other is not None and other.number not in self._loading:
                    self._wait_from(other, first)
                    found += count
        return blocks - found

    def _wait_from(self, extent: _Extent, first: int) -> None:
        if self.unwritten is not None:
            self.unwritten.add(extent.number, extent.worth, extent.start, extent.blocks, first)

    def holds(self, extent: int, stop: int) -> bool:
        """Return whether the first `stop` blocks of an extent are here."""
        found = self._extents.get(extent)
        return found is not None and found.blocks >= stop

    def begin_load(
        self, hashes: str, start: int, count: int, source: KvTier, due: float
    ) -> tuple[int, int, tuple[HostDrop, ...]] | None:
        """Give room to blocks that are read from another tier, due at `due`, and are there after `end_load`.

        Return the same as `take_in`.
        """
        made = self._make_extent(hashes, start, count, is_awaited=True)
        if made is not None:
            self._loading[made[0]] = due
            extent = self._extents[made[0]]
            extent.is_unfetched, extent.read_from = True, source
            self._asked = None
        return made

    def _make_extent(
        self, hashes: str, start: int, count: int, *, is_awaited: bool, passes_on: bool = False
    ) -> tuple[int, int, tuple[HostDrop, ...]] | None:
        block_seconds = self._block_seconds(start, start + count)
        worth = self._aged + block_seconds
        one = _Candidate(
            hashes, start, count, [], block_seconds, worth, is_awaited=is_awaited, passes_on=passes_on
        )
        self._raise_before(one)
        drops, _ = self._make_room(one, one.blocks - self.ledger.free_blocks)
        one.blocks = min(one.blocks, self.ledger.free_blocks)
        if one.blocks == 0:
            return None
        if is_awaited:
            one.worth = max(one.worth, self._aged + block_seconds)  # the drops have aged the rest
        return self._store(one), one.blocks, tuple(drops)

    @property
    def loads(self) -> bool:
        """True if blocks are being read."""
        return bool(self._loading)

    @property
    def loading_blocks(self) -> int:
        """Blocks that are being read."""
        return sum(self._extents[extent].blocks for extent in self._loading)

    @property
    def fetching_blocks(self) -> int:
        """Blocks of fetches of which something is still to be copied."""
        return sum(one.count for held in self._fetching.values() for one in held)

    def blocks_before(self, source: KvTier, due: float) -> int:
        """Return how many blocks are read from a tier before those of a new read that is due at `due`.

        Among them are those of the largest read that is due later: it may have begun, and no read is interrupted.
        """
        before, later = 0, 0
        for number, read_due in self._loading.items():
            extent = self._extents[number]
            if extent.read_from != source:
                continue
            if read_due <= due:
                before += extent.blocks
            else:
                later = max(later, extent.blocks)
        return before + later

    def is_loading(self, extent: int) -> bool:
        return extent in self._loading

    def read_due(self, extent: int) -> float:
        """Return when the read of an extent is due; -inf if it is not being read."""
        return self._loading.get(extent, -inf)

    def blocks_of(self, extent: int) -> int:
        """Return the number of blocks of an extent that is here."""
        return self._extents[extent].blocks

    def end_load(self, extent: int, *, is_there: bool, is_in_no_file: bool = False) -> HostDrop | None:
        """Let requests fetch an extent that was loaded, or forget it; return what ranks must drop.

        One that `is_in_no_file` waits for the disk tier from then on.
        """
        self._loading.pop(extent, None)
        self._asked = None
        self._offer_again(extent)
        if is_there:
            if is_in_no_file:
                self._await_write(extent)
            return None
        one = self._extents[extent]
        for number, behind in one.children.items():
            behind.parent = None
            self._orphans.setdefault(behind.before, {})[number] = behind
        one.children.clear()
        self._forget(one, 0)
        return HostDrop(extent)

    def check(self) -> None:
        """Assert that extents, places, parents and the ledger agree; O(blocks), for tests."""
        self.ledger.check()
        assert sum(one.blocks for one in self._extents.values()) == self.ledger.held_blocks
        keys = {
            key for one in self._extents.values() for key in each_hash(hash_range(one.hashes, 0, one.blocks))
        }
        self._index.check(self._extents.values())
        wanted = {key for one in self._swapped for key in each_hash(one.hashes)}
        self._wanted.check([each for one in self._swapped for each in one.wanted])
        assert self.wanted_blocks == len(wanted)
        if self.unwritten is not None:
            self.unwritten.check({number: (one.worth, one.blocks) for number, one in self._extents.items()})
        valid = set(self._by_worth), set(self._unfetched_by_worth)
        for number, extent in self._extents.items():
            assert (extent.worth, number) in valid[extent.is_unfetched] or not self._may_drop(extent)
            own = each_hash(hash_range(extent.hashes, 0, extent.blocks))
            assert extent.swapped == max((at + 1 for at, key in enumerate(own) if key in wanted), default=0)
            assert self.ledger.runs(number, 0, extent.blocks)
            if extent.parent is not None:
                assert extent.parent.worth >= extent.worth
                assert extent.parent.children[number] is extent
            elif extent.before:
                assert extent.before not in keys
                assert self._orphans[extent.before][number] is extent


def _next_step(value: float) -> float:
    """Return the least number of a scale that is not below `value`; its steps are a sixteenth to an eighth of that."""
    fraction, exponent = frexp(value)
    return ldexp(ceil(16 * fraction) / 16, exponent)


def _cut(parts: Iterable[Held], blocks: int) -> list[Held]:
    """Return the first `blocks` blocks of parts that follow each other."""
    found: list[Held] = []
    for one in parts:
        if blocks <= 0:
            break
        found.append(one if one.count <= blocks else Held(one.extent, one.start, blocks))
        blocks -= one.count
    return found


def _joined(parts: Iterable[Held]) -> list[tuple[int, int]]:
    """Return the blocks of an extent that `parts` cover, as disjoint runs in order: each with first block and end."""
    runs: list[tuple[int, int]] = []
    for first, end in sorted((one.start, one.start + one.count) for one in parts):
        if runs and first <= runs[-1][1]:
            runs[-1] = runs[-1][0], max(runs[-1][1], end)
        else:
            runs.append((first, end))
    return runs


def _block_before(orphans: Mapping[int, _Extent]) -> int:
    """Return the place in the prompt of the block before some orphans, which lies before all of them."""
    return next(iter(orphans.values())).start - 1


Value = TypeVar("Value")


def _within(
    keys: Mapping[str, Value], hashes: str, start: int, stop: int, place: Callable[[Value], int]
) -> list[str]:
    """Return those of the hashes `keys` that the blocks `start .. stop` of a prompt have, in the order of these blocks.

    Where the blocks are many, this searches the keys, and finds those whose block has the same place in the prompt. `place`
    returns that of a key's block.
    """
    if not keys:
        return []
    if stop - start <= max(len(keys), SHORT_BLOCKS):
        return [key for block in range(start, stop) if (key := hash_at(hashes, block)) in keys]
    places = [(place(value), key) for key, value in keys.items()]
    return [key for at, key in sorted(places) if start <= at < stop and hash_at(hashes, at) == key]
