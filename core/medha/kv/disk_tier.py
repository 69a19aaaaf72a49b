"""The disk tier of one lane: files with blocks of the host tier, which outlive it, the epoch and the pods.

Blocks that come to the host tier are also written to files, each of up to `FILE_BLOCKS` blocks. A disk is slow, so they
wait there until earlier files are written (`medha.kv.unwritten_blocks`). If a prompt continues in a file behind what device
and host tier hold, its blocks are *loaded*: read into the host tier, from where they are fetched. The request waits
meanwhile, but no step does. A load that fails, or that takes too long, costs time only: nothing is fetched before all ranks
of the lane have reported that the blocks are there and are what was written.

`DiskTier` decides, at the controller, and has no files. A block counts only where every rank of the lane has reported
the file that holds it: when the epoch began, or once it was written. Files are deleted in the order in which prompts
last used them. A prompt uses the beginning last, so a file is deleted before those that it continues.

A disk may have less space than the tier's size. Once a rank finds no space for a file, the tier is as large as what it holds
without that file, for the rest of the epoch. So from then on, files that were used least recently make room there, too.

A long prompt is written file by file, and each file uses all files before it. To put all of these in order each time would
take quadratic time. So files that were used are only noted, and are put in order when no other file can make room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import repeat, takewhile
from typing import Protocol

from medha.kv.host_tier import Kept
from medha.kv.prefix_cache import HASH_CHARACTERS, each_hash, hash_at, hash_count, hash_range
from medha.kv.rank_loads import Loaded, RankLoads
from medha.kv.span_index import common_blocks
from medha.wire.messages import DiskDelete, DiskFile, DiskReport, DiskWrite

FILE_BLOCKS = 64
"""Most blocks of a file: a file is written, or deleted, as a whole."""
MOST_CONSIDERED = 256
"""Most files that one step considers to write: many may not be worth it, and no step is to take long because of them."""
MOST_REPORTED_BYTES = 4 * 2**20
"""Most bytes of hashes in one report of files that were found."""


class DiskPrices(Protocol):
    """Predicted times that the tier's decisions compare; `medha.cost.tier_seconds` has them."""

    def load_seconds(self, blocks: int, files: int) -> float:
        """Return the predicted time to read so many blocks of so many files into the host tier."""
        ...

    def fetch_seconds(self, blocks: int) -> float:
        """Return the predicted time to fetch so many blocks from the host tier."""
        ...

    def compute_seconds(self, context: int, tokens: int) -> float:
        """Return the predicted time to bring a prompt from `context` to `tokens` tokens of KV."""
        ...


class Source(Protocol):
    """The host tier, from whose blocks files are written; `medha.kv.host_tier` has it."""

    def take_unwritten(self, most_blocks: int) -> Kept | None:
        """Take up to `most_blocks` blocks that wait to be written, those that come next; None if none waits."""
        ...

    def wait_again(self, kept: Kept) -> int:
        """Let blocks that were taken wait again; return how many are not there."""
        ...

    def holds(self, extent: int, stop: int) -> bool:
        """Return whether the first `stop` blocks of an extent are there."""
        ...


def file_name(before: str, hashes: str) -> str:
    """Return the name of the file with blocks of these hashes, which follow a block of the hash `before`."""
    return blake2b(f"{before}/{hashes}".encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class OnDisk:
    """Blocks `start .. start + count` of a file, which a prompt may load."""

    file: str
    start: int
    count: int


@dataclass(slots=True, eq=False)
class _File:
    name: str
    hashes: str
    before: str
    blocks: int
    ranks: set[int] = field(default_factory=set)  # that have it
    is_writing: bool = False
    tier_blocks: int = 0  # most blocks of the tier when the write of this file began
    source: Kept | None = None  # of the host tier, from which it is written
    loads: int = 0  # that read it
    used_at: int = (
        0  # the tier's count of uses when a prompt last named this file; not set for files that it continues
    )

    @property
    def is_in_use(self) -> bool:
        return self.is_writing or self.loads > 0

    def block_hashes(self) -> list[str]:
        return each_hash(self.hashes)


@dataclass(slots=True)
class DiskCounts:
    """Blocks that came and went, and failures, since the epoch began."""

    hits: int = 0  # requests that waited for loads
    loaded_blocks: int = 0
    written_blocks: int = 0
    failed_loads: int = 0
    failed_writes: int = 0
    skipped_blocks: int = 0
    """Blocks that were not written: the host tier had dropped them before, or their prompt up to them is larger than the tier."""


class DiskTier:
    """Decides what the disk tier of a lane holds, and finds prefixes there; the controller's part."""

    def __init__(
        self,
        blocks: int,
        ranks: Iterable[int],
        block_size_tokens: int,
        prices: DiskPrices,
        most_writing: int,
        source: Source,
    ) -> None:
        """`ranks` are those of the lane. No more than `most_writing` blocks of `source`, or one file, are written at a time.

        The others wait there: it may drop them, but seldom drops what is being written.
        """
        self.blocks = blocks
        """Most blocks that it holds: its size, or fewer if a rank's disk has no space for so many."""
        self.held_blocks = 0
        self.counts = DiskCounts()
        self.fault = ""
        """Reason why the tier is off; empty: it is not."""
        self._ranks = frozenset(ranks)
        self._size = block_size_tokens
        self._prices = prices
        self._most_writing = most_writing
        self._source = source
        self._files: dict[str, _File] = {}
        self._older: dict[str, _File] = {}  # those that are in order, the least recently used first
        # Those used since the others were put in order, each with all that it continues.
        self._recent: dict[str, _File] = {}
        self._uses = 0
        self._places: dict[str, tuple[_File, int]] = {}  # hash -> file that all ranks have, and block of it
        self._loads = RankLoads(self._ranks)
        self._in_use = 0  # blocks of files that are read or written, which therefore stay
        self._loaded: dict[int, _File] = {}  # extent -> file that is read into it
        self._to_report = set(self._ranks)  # ranks that have not reported all that they found
        self._writing = 0  # blocks
        self._being_written: dict[str, _File] = {}  # by the hash of the last block
        self._continued = Counter[str]()  # hash of a block -> files that continue it
        self._most_in_use = blocks  # blocks; with more in use, the next file had no room
        self._deletes: list[str] = []
        # Files that a rank could not write: what is to wait again, and the ranks that may still be writing them.
        self._failing: dict[str, tuple[Kept | None, set[int]]] = {}

    @property
    def is_used(self) -> bool:
        """False if nothing will be written any more: the tier is off, or a rank's disk has no space for any file."""
        return not self.fault and self.blocks > 0

    @property
    def loading_blocks(self) -> int:
        """Blocks that are being read."""
        return self._loads.blocks

    @property
    def writing_blocks(self) -> int:
        """Blocks that are being written."""
        return self._writing

    @property
    def files(self) -> int:
        return len(self._files)

    def match(self, hashes: str, start: int, stop: int) -> list[OnDisk]:
        """Return what the tier holds of the blocks `start .. stop` (exclusive) of a prompt, without a gap."""
        found: list[OnDisk] = []
        while start < stop:
            place = self._places.get(hash_at(hashes, start))
            if place is None:
                break
            file, block = place
            count = common_blocks(hashes, start, stop, file, block)
            found.append(OnDisk(file.name, block, count))
            start += count
        return found

    def held_from(self, hashes: str, start: int, stop: int) -> int:
        """Return how many of the blocks `start .. stop` (exclusive) of a prompt files hold, from the first one on."""
        return sum(one.count for one in self.match(hashes, start, stop))

    def wants(self, hashes: str, start: int, stop: int) -> bool:
        """Return whether some of the blocks `start .. stop` (exclusive) of a prompt are to be written, once the host tier has them."""
        stop = min(stop, self.blocks)
        first_file = hash_range(hashes, start, min(stop, start + FILE_BLOCKS))
        if not self.is_used or stop <= start or not self._is_worth_writing(start, first_file):
            return False
        return self.held_from(hashes, start, stop) < stop - start

    # --- loads ----------------------------------------------------------------------------------------

    def begin_load(self, found: OnDisk, extent: int, count: int) -> None:
        """Note that ranks read the first `count` blocks of `found` into an extent of the host tier."""
        file = self._files[found.file]
        if not file.is_in_use:
            self._in_use += file.blocks
        file.loads += 1
        self._loads.begin(extent, count)
        self._loaded[extent] = file

    def use(self, found: Iterable[OnDisk]) -> None:
        """Note that a prompt uses these files, which come in the order of its blocks, and all that they continue."""
        self._use([self._files[one.file] for one in found])

    # --- writes ---------------------------------------------------------------------------------------

    @property
    def has_place(self) -> bool:
        """True if another file may be written now.

        Ranks have reported what they have, the writes that go on leave a place, and the files that are read or written leave room.
        """
        if not self.is_used or self._to_report:
            return False
        has_room = self._in_use <= min(self.blocks - self._most_blocks, self._most_in_use)
        return has_room and (not self._writing or self._writing + FILE_BLOCKS <= self._most_writing)

    @property
    def _most_blocks(self) -> int:
        """Most blocks of a file; fewer than `FILE_BLOCKS` only in a tier that has fewer."""
        return min(FILE_BLOCKS, self.blocks)

    def write(self, lane: int) -> tuple[DiskWrite, ...]:
        """Choose which blocks of the host tier are written now, and give them room."""
        writes: list[DiskWrite] = []
        for _ in range(MOST_CONSIDERED):
            if not self.has_place or (one := self._source.take_unwritten(self._most_blocks)) is None:
                break
            file = DiskFile(file_name(one.before, one.hashes), one.start, one.hashes, one.before)
            if self._takes(file, one):
                writes.append(DiskWrite(file, one.extent, one.first, lane))
        return tuple(writes)

    def _takes(self, file: DiskFile, kept: Kept) -> bool:
        """Return whether a file of these blocks is to be written now, and note it if so.

        There may be no room beside the files that it continues and those that are being read or written. Then it waits until
        fewer of these are. If the tier cannot hold it together with all of its prompt before it, it would be of no use, and
        is not written.
        """
        blocks = hash_count(file.hashes)
        if file.name in self._files or file.name in self._failing:
            return False
        keys = each_hash(file.hashes)
        if all(key in self._places for key in keys):
            return False
        if not self._is_worth_writing(file.start, file.hashes):
            return False
        can_fit = file.start + blocks <= self.blocks  # with all of its prompt before it
        if not can_fit or not self._make_room(blocks, file.before):
            if can_fit and self._in_use:
                self._most_in_use = self._in_use - 1
                self._source.wait_again(kept)
            else:
                self.counts.skipped_blocks += blocks
            return False
        self._most_in_use = self.blocks
        added = self._add(file)
        added.is_writing, added.source = True, kept
        added.tier_blocks = self.blocks
        self._being_written[keys[-1]] = added
        self._writing += blocks
        self._in_use += blocks
        return True

    def _is_worth_writing(self, start: int, hashes: str) -> bool:
        """Return whether reading some blocks of a prompt, those from `start` on, is predicted to be faster than computing them.

        Few blocks may be computed faster than their file is read, but not together with all that other files hold behind them.
        """
        if any(key in self._continued for key in each_hash(hashes)):
            return True
        blocks = hash_count(hashes)
        tokens = start * self._size, (start + blocks) * self._size
        seconds = self._prices.load_seconds(blocks, 1) + self._prices.fetch_seconds(blocks)
        return seconds < self._prices.compute_seconds(*tokens)

    def _add(self, file: DiskFile) -> _File:
        added = _File(file.name, file.hashes, file.before, hash_count(file.hashes))
        self._files[file.name] = added
        self._older[file.name] = added
        self._continued[file.before] += 1
        self.held_blocks += added.blocks
        if not self._to_report:
            self._use([added])
        return added

    def _make_room(self, blocks: int, before: str = "") -> bool:
        """Delete files that were used least recently, until there is room for so many blocks behind the block `before`.

        What somebody reads or writes stays, and so does what the new file continues: without its beginning, it is of no use.
        Return False, and delete nothing, if the other files are too few.
        """
        missing = self.held_blocks + blocks - self.blocks
        if missing <= 0:
            return True
        # Recent files make no room at first, nor does anything that they continue: it is recent, too.
        line = takewhile(lambda one: one.name not in self._recent, self._line_before(before))
        chosen = self._least_recent(missing, {one.name for one in line})
        if chosen is None and self._recent:
            self._put_in_order()
            chosen = self._least_recent(missing, {one.name for one in self._line_before(before)})
        if chosen is None:
            return False
        for file in chosen:
            self._remove(file)
        return True

    def _least_recent(self, blocks: int, continued: Set[str]) -> list[_File] | None:
        """Return the least recently used files that have so many blocks, without those that are needed; None if too few have."""
        chosen: list[_File] = []
        for file in self._older.values():
            if not file.is_in_use and file.name not in continued:
                chosen.append(file)
                blocks -= file.blocks
                if blocks <= 0:
                    return chosen
        return None

    def _use(self, files: Sequence[_File]) -> None:
        """Note that a prompt uses files, and all that they continue."""
        for file in reversed(files):  # the first one is used last
            self._uses += 1
            file.used_at = self._uses
            for one in takewhile(lambda one: one.name not in self._recent, self._line(file)):
                self._recent[one.name] = one
                self._older.pop(one.name, None)

    def _put_in_order(self) -> None:
        """Put the recent files behind the older ones."""
        self._older = {one.name: one for one in self._in_order()}
        self._recent = {}

    def _in_order(self) -> list[_File]:
        """Return all files, the least recently used first.

        It is as if each use had at once put its file last, and then what that file continues. The order differs only
        where a later file holds some of the same blocks: what continued the earlier file now counts as continuing the
        later one.
        """
        latest_first = self._latest_first(
            sorted(self._recent.values(), key=lambda one: one.used_at, reverse=True)
        )
        moved = {one.name for one in latest_first}
        return [*(one for one in self._older.values() if one.name not in moved), *reversed(latest_first)]

    def _latest_first(self, files: Iterable[_File]) -> list[_File]:
        """Return files, and all that they continue, in the order of `files`, but each before those that continue it.

        Each file is examined once, however many of `files` continue it.
        """
        order: dict[str, _File] = {}
        for file in files:
            line = list(takewhile(lambda one: one.name not in order, self._line(file)))
            order.update((one.name, one) for one in reversed(line))
        return list(order.values())

    def _line(self, file: _File) -> Iterator[_File]:
        """Yield a file, and all that it continues."""
        yield file
        yield from takewhile(lambda one: one is not file, self._line_before(file.before))

    def _line_before(self, before: str) -> Iterator[_File]:
        """Yield the file that holds the block of this hash, and all that it continues.

        A file that is being written counts only if it ends with that block.
        """
        seen: set[str] = set()
        while True:
            file, _ = self._places.get(before, (self._being_written.get(before), 0))
            if file is None or file.name in seen:
                return
            seen.add(file.name)
            yield file
            before = file.before

    def _remove(self, file: _File) -> None:
        if file.name in self._recent:  # what it continues keeps its place
            self._put_in_order()
        del self._files[file.name], self._older[file.name]
        self._continued[file.before] -= 1
        if not self._continued[file.before]:
            del self._continued[file.before]
        self.held_blocks -= file.blocks
        if file.is_writing:
            self._end_writing(file)
        if file.is_in_use:
            self._in_use -= file.blocks
        for key in file.block_hashes():
            place = self._places.get(key)
            if place is not None and place[0] is file:
                del self._places[key]
        self._deletes.append(file.name)

    def _end_writing(self, file: _File) -> None:
        self._writing -= file.blocks
        last = hash_at(file.hashes, file.blocks - 1)
        if self._being_written.get(last) is file:  # else another file that ends with the same block
            del self._being_written[last]

    def take_deletes(self, lane: int) -> tuple[DiskDelete, ...]:
        """Take the files that ranks are to delete."""
        deletes, self._deletes = self._deletes, []
        return tuple(DiskDelete(name, lane) for name in deletes)

    @property
    def has_changes(self) -> bool:
        return bool(self._deletes)

    # --- reports --------------------------------------------------------------------------------------

    def report(self, report: DiskReport) -> list[Loaded]:
        """Take a rank's report; return the loads that have ended with it."""
        if report.rank not in self._ranks:
            return []
        if report.fault and not self.fault:
            self._switch_off(f"rank {report.rank}: {report.fault}")
        for found in report.found:
            self._found(report.rank, found)
        if report.found_all and report.rank in self._to_report:
            self._to_report.discard(report.rank)
            if not self._to_report:
                self._settle()
        for name in report.written:
            self._has(self._files.get(name), report.rank)
        for name in (*report.not_written, *report.damaged):
            file = self._files.get(name)
            if file is not None:
                self._remove(file)
                if file.is_writing:
                    self._was_not_written(file, has_space=name not in report.no_space)
        for name in (*report.written, *report.not_written):
            self._ended_writing(name, report.rank)
        ended = self._loads.report(report)
        for one in ended:
            self._end_load(one)
        return ended

    def _was_not_written(self, file: _File, *, has_space: bool) -> None:
        """Count a write that came to nothing: it has failed, or was called off because the host tier has dropped blocks of it.

        Its blocks wait again, unless it has failed for another reason than space. They do so once all ranks have reported
        this write: their reports of the next one have the same name.
        """
        source = file.source
        assert source is not None
        is_off = has_space and not self._source.holds(source.extent, source.first + file.blocks)
        self.counts.failed_writes += not is_off
        if not has_space:
            self._found_no_space(file)
        self._failing[file.name] = None if has_space and not is_off else source, set(self._ranks - file.ranks)

    def _found_no_space(self, file: _File) -> None:
        """Note that a disk has no space for a file, which was removed: the tier holds no more than it does without it.

        A file that was begun before the tier shrank last says nothing about its size now: many may be written at once.
        """
        if file.tier_blocks == self.blocks:
            self.blocks = self.held_blocks

    def _ended_writing(self, name: str, rank: int) -> None:
        """Note that a rank no longer writes a file; does nothing unless a rank could not write it."""
        if name not in self._failing:
            return
        source, writing = self._failing[name]
        writing.discard(rank)
        if not writing:
            del self._failing[name]
            if source is not None:
                self.counts.skipped_blocks += self._source.wait_again(source)

    def _found(self, rank: int, found: DiskFile) -> None:
        is_sound = (
            bool(found.hashes)
            and len(found.hashes) % HASH_CHARACTERS == 0
            and found.start >= 0
            and found.name == file_name(found.before, found.hashes)
        )
        if not is_sound or self.fault:
            return
        self._has(self._files.get(found.name) or self._add(found), rank)

    def _has(self, file: _File | None, rank: int) -> None:
        """Note that a rank has a file; once all have it, its blocks count."""
        if file is None:
            return  # it is to be deleted
        file.ranks.add(rank)
        if file.ranks != self._ranks:
            return
        if file.is_writing:
            file.is_writing = False
            self._end_writing(file)
            self._in_use -= 0 if file.is_in_use else file.blocks
            self.counts.written_blocks += file.blocks
        self._places.update(
            zip(file.block_hashes(), zip(repeat(file), range(file.blocks), strict=False), strict=True)
        )
        if not self._to_report:  # else all are put in order at once
            self._use([file])  # after those that continue it

    def _settle(self) -> None:
        """Delete what not all ranks have found, and what exceeds the size."""
        for file in [one for one in self._files.values() if one.ranks != self._ranks]:
            self._remove(file)
        self._put_in_order()
        # The same order as if each were used in turn.
        self._older = {one.name: one for one in reversed(self._latest_first(reversed(self._older.values())))}
        self._make_room(0)

    def _end_load(self, load: Loaded) -> None:
        """Count a load that has ended, and delete its file if it has failed."""
        file = self._loaded.pop(load.extent)
        file.loads -= 1
        is_here = self._files.get(file.name) is file  # else it was removed, and may have been written again
        if is_here and not file.is_in_use:
            self._in_use -= file.blocks
        if load.is_there:
            self.counts.loaded_blocks += load.blocks
            return
        self.counts.failed_loads += 1
        if is_here:
            self._remove(file)

    def _switch_off(self, reason: str) -> None:
        """Use the tier no more in this epoch; loads that have begun still end."""
        self.fault = reason
        self._files.clear()
        self._older.clear()
        self._recent.clear()
        self._places.clear()
        self._deletes.clear()
        self._being_written.clear()
        self._continued.clear()
        self._failing.clear()
        self.held_blocks = self._writing = self._in_use = 0

    def check(self) -> None:
        """Assert that files, places and sizes agree; O(blocks), for tests."""
        assert self.held_blocks == sum(file.blocks for file in self._files.values()) <= self.blocks
        assert self._writing == sum(file.blocks for file in self._files.values() if file.is_writing)
        assert all(file.is_writing for file in self._being_written.values())
        assert self._continued == Counter(file.before for file in self._files.values())
        assert self._files.keys().isdisjoint(self._failing)
        assert self._in_use == sum(file.blocks for file in self._files.values() if file.is_in_use)
        for key, (file, block) in self._places.items():
            assert self._files[file.name] is file
            assert hash_at(file.hashes, block) == key
            assert file.ranks == self._ranks
        order = {one.name: at for at, one in enumerate(self._in_order())}
        assert order.keys() == self._files.keys()
        assert self._older.keys().isdisjoint(self._recent)
        for file in self._files.values():
            place = self._places.get(file.before)
            assert place is None or place[0] is file or order[place[0].name] > order[file.name]
