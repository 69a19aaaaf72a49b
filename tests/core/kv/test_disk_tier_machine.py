"""The disk tier and the host tier of one lane under any events, against two ranks with queues, which may fail.

A rank writes what its host blocks hold when it comes to a file, which may be long after they were handed to it. So each file
must have the blocks that its name says, and what is read back must be what was asked for. At the end nothing waits, and
everything that the host tier still holds is in files, unless a disk has failed. Whatever the tier has been through, a prompt that
comes then is written: all of it, or its beginning.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from medha.kv.blocks import Run
from medha.kv.disk_tier import FILE_BLOCKS, DiskTier, file_name
from medha.kv.host_tier import HostLedger, HostTier
from medha.kv.prefix_cache import Branch, each_hash, hash_at, hash_count, hash_range
from medha.kv.store_tier import TiersBelow
from medha.kv.unwritten_blocks import UnwrittenBlocks
from medha.wire.messages import DiskFile, DiskReport, DiskWrite, HostDrop

TEXTS, TEXT_BLOCKS, SIZE = 4, 160, 16
NEW = TEXTS
"""The text that comes at the end."""
TEXT = ["".join(f"{1000 * text + block:032x}" for block in range(TEXT_BLOCKS)) for text in range(TEXTS + 1)]


class Prices:
    """Times by which everything is worth a file, and later blocks cost more than earlier ones."""

    def load_seconds(self, blocks: int, files: int) -> float:
        return 1e-6 * blocks

    def fetch_seconds(self, blocks: int) -> float:
        return 1e-7 * blocks

    def compute_seconds(self, context: int, tokens: int) -> float:
        return (tokens - context) * (1 + (tokens + context) / 1000)


@dataclass(eq=False)
class Write:
    """A write in the queue of a rank; `slots` are the host blocks that it copies."""

    write: DiskWrite
    slots: list[Run]
    is_off: bool = False


@dataclass(frozen=True)
class Read:
    """A read in the queue of a rank."""

    file: str
    start: int
    count: int
    extent: int
    slots: list[Run]


@dataclass
class Rank:
    """A rank's host blocks, its files, and the work that it has not done."""

    number: int
    ledger: HostLedger
    content: dict[int, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    space: int = 10**9
    """Blocks that its disk has space for."""
    others: deque[Write | str] = field(default_factory=deque)
    reads: deque[Read] = field(default_factory=deque)

    def drop(self, drops: Iterable[HostDrop]) -> None:
        for drop in drops:
            self.ledger.drop(drop.extent, drop.keep)
            for job in self.others:
                if isinstance(job, Write) and job.write.extent == drop.extent:
                    stop = job.write.first + hash_count(job.write.file.hashes)
                    job.is_off = job.is_off or stop > drop.keep

    def has_space(self, hashes: str) -> bool:
        held = sum(map(hash_count, self.files.values()))
        return held + hash_count(hashes) <= self.space

    def fill(self, slots: Iterable[Run], hashes: str) -> None:
        for block, slot in enumerate(each(slots)):
            self.content[slot] = hash_at(hashes, block)


def each(slots: Iterable[Run]) -> list[int]:
    return [first + at for first, length in slots for at in range(length)]


class DiskMachine(RuleBasedStateMachine):
    @initialize(
        host_blocks=st.sampled_from([3, 20, 120, 400]),
        disk_blocks=st.sampled_from([10, 64, 100, 10_000]),
        most_writing=st.sampled_from([1, 70, 140, 400]),
        found=st.lists(
            st.tuples(st.integers(0, TEXTS - 1), st.integers(0, TEXT_BLOCKS - 10), st.sets(st.integers(0, 1)))
        ),
        pieces=st.lists(st.tuples(st.integers(1, 64), st.booleans())),
        space=st.tuples(*[st.sampled_from([0, 7, 64, 150, *[10**9] * 4])] * 2),
    )
    def start(
        self,
        host_blocks: int,
        disk_blocks: int,
        most_writing: int,
        found: list[tuple[int, int, set[int]]],
        pieces: list[tuple[int, bool]],
        space: tuple[int, int],
    ) -> None:
        """Begin an epoch, with files of a former one.

        `found` are these: the text, the first block, and the ranks. The last text comes in `pieces`. `space` is what else the
        disk of each rank has space for, in blocks.
        """
        self.host = HostTier(host_blocks, SIZE, Prices())
        self.host.unwritten = UnwrittenBlocks()
        self.disk = DiskTier(disk_blocks, range(2), SIZE, Prices(), most_writing, self.host)
        self.host.below = TiersBelow(0, self.disk, None)
        self.disk_blocks = disk_blocks
        self.ranks = [Rank(number, HostLedger(host_blocks)) for number in range(2)]
        self.most_writing = max(most_writing, 64)
        self.has_failed = False
        self.pieces = pieces
        for rank in self.ranks:
            files: list[DiskFile] = []
            for text, first, ranks in found:
                hashes = hash_range(TEXT[text], first, first + 10)
                before = hash_at(TEXT[text], first - 1) if first else ""
                if rank.number in ranks:
                    files.append(DiskFile(file_name(before, hashes), first, hashes, before))
            rank.files = {one.name: one.hashes for one in files}
            rank.space = space[rank.number] + sum(map(hash_count, rank.files.values()))
            self.report(rank, found=tuple(files), found_all=True)

    # --- the controller -------------------------------------------------------------------------------

    @rule(
        text=st.integers(0, TEXTS - 1),
        start=st.integers(0, TEXT_BLOCKS - 1),
        blocks=st.integers(1, TEXT_BLOCKS),
    )
    def evict(self, text: int, start: int, blocks: int) -> None:
        stop = min(start + blocks, TEXT_BLOCKS)
        pool = 1000 * text + start
        branch = Branch(hash_range(TEXT[text], 0, stop), start, stop - start, [(pool, stop - start)])
        drops, offloads = self.host.offload([branch])
        for rank in self.ranks:
            rank.drop(drops)
            for one in offloads:
                _, slots = rank.ledger.store(one.count)
                last = one.last - 1000 * text
                rank.fill(slots, hash_range(TEXT[text], last + 1 - one.count, last + 1))

    @rule(text=st.integers(0, TEXTS - 1), blocks=st.integers(1, TEXT_BLOCKS))
    def use(self, text: int, blocks: int) -> None:
        """Let a request fetch a prefix, which is worth more from then on."""
        self.host.fetch("request", self.host.match(TEXT[text], 0, blocks), 0)
        self.host.fetched("request")

    @rule()
    def step(self) -> None:
        """Send ranks what they write and delete: deletes go first, as in a step."""
        waited = self.host.unwritten is not None and bool(self.host.unwritten)
        had_place = self.disk.has_place
        writes = list(self.disk.write(0))
        while self.disk.has_place and self.host.unwritten:  # one step considers few files
            writes += self.disk.write(0)
        deletes = self.disk.take_deletes(0)
        assert had_place or not writes
        assert waited or not writes
        assert self.disk.writing_blocks <= self.most_writing
        for rank in self.ranks:
            rank.others += [one.file for one in deletes]
            for one in writes:
                slots = rank.ledger.runs(one.extent, one.first, hash_count(one.file.hashes))
                rank.others.append(Write(one, slots))

    @rule(text=st.integers(0, TEXTS - 1), start=st.integers(0, TEXT_BLOCKS - 1))
    def load(self, text: int, start: int) -> None:
        """Read the first blocks of a text that are in a file, and that the host tier lacks."""
        for at in range(start, TEXT_BLOCKS):
            lacks = self.host.lacks(TEXT[text], at, TEXT_BLOCKS)
            if not (in_files := self.disk.match(TEXT[text], at, at + lacks)):
                continue
            found = in_files[0]
            began = self.host.begin_load(TEXT[text], at, found.count, "disk", due=0.0)
            if began is None:
                return
            extent, count, drops = began
            self.disk.begin_load(found, extent, count)
            self.disk.use([found])
            for rank in self.ranks:
                assert found.file in rank.files
                rank.drop(drops)
                number, slots = rank.ledger.store(count)
                assert number == extent
                rank.reads.append(Read(found.file, found.start, count, extent, slots))
            return

    # --- the ranks ------------------------------------------------------------------------------------

    @precondition(lambda self: any(rank.others for rank in self.ranks))
    @rule(which=st.integers(0, 1), times=st.integers(1, 6), fails=st.sampled_from([False] * 9 + [True]))
    def works(self, which: int, times: int, fails: bool) -> None:
        """A rank writes and deletes files."""
        rank = self.ranks[which]
        for _ in range(min(times, len(rank.others))):
            match rank.others.popleft():
                case str() as name:
                    rank.files.pop(name, None)
                case Write(write, slots, is_off):
                    if is_off or fails:
                        self.has_failed |= not is_off
                        self.report(rank, not_written=(write.file.name,))
                        continue
                    if not rank.has_space(write.file.hashes):
                        before, lost = self.disk.blocks, (write.file.name,)
                        file = self.disk._files.get(write.file.name)  # None: another rank has reported first
                        self.report(rank, not_written=lost, no_space=lost)
                        is_known = (
                            file is None or file.tier_blocks > before
                        )  # the tier has shrunk since it was begun
                        assert self.disk.blocks < before or is_known, "else it would fail for ever"
                        continue
                    found = "".join(rank.content[slot] for slot in each(slots))
                    assert found == write.file.hashes, "bytes of other owners reach a file"
                    rank.files[write.file.name] = found
                    self.report(rank, written=(write.file.name,))

    @precondition(lambda self: any(rank.reads for rank in self.ranks))
    @rule(which=st.integers(0, 1), fails=st.sampled_from([False] * 9 + [True]))
    def reads(self, which: int, fails: bool) -> None:
        """A rank reads a file, if it is still there."""
        rank = self.ranks[which]
        if not rank.reads:
            return
        read = rank.reads.popleft()
        file = rank.files.get(read.file)
        if fails or file is None:
            self.has_failed = True
            self.report(rank, not_loaded=(read.extent,), damaged=(read.file,))
            return
        rank.fill(read.slots, hash_range(file, read.start, read.start + read.count))
        self.report(rank, loaded=((read.extent, 0.1),))

    @rule()
    def time_passes(self) -> None:
        """A step comes, and both ranks do all that waits."""
        self.step()
        for which, rank in enumerate(self.ranks):
            while rank.reads:
                self.reads(which, fails=False)
            self.works(which, times=1000, fails=False)

    def report(self, rank: Rank, **fields: object) -> None:
        for ended in self.disk.report(DiskReport(rank.number, **fields)):  # type: ignore[arg-type]
            dropped = self.host.end_load(ended.extent, is_there=ended.is_there)
            for one in self.ranks:
                one.drop([] if dropped is None else [dropped])
        if not self.disk.is_used:
            self.host.unwritten = None  # as `KvPools` does

    # --- what always holds ----------------------------------------------------------------------------

    @invariant()
    def all_agree(self) -> None:
        if not hasattr(self, "host"):
            return
        self.host.check()
        self.disk.check()
        for rank in self.ranks:
            assert rank.ledger.digest() == self.host.ledger.digest()
            assert {file.name for file, _ in self.disk._places.values()} <= rank.files.keys()

    @invariant()
    def host_blocks_hold_what_the_controller_thinks(self) -> None:
        if not hasattr(self, "host"):
            return
        for text in TEXT:
            at = 0
            while at < TEXT_BLOCKS:
                for held in self.host.match(text, at, TEXT_BLOCKS):
                    expected = hash_range(text, at, at + held.count)
                    for rank in self.ranks:
                        slots = rank.ledger.runs(held.extent, held.start, held.count)
                        assert "".join(rank.content[slot] for slot in each(slots)) == expected
                    at += held.count
                at += 1

    def teardown(self) -> None:
        if not hasattr(self, "host"):
            return
        for _ in range(10_000):
            self.step()
            if not any(rank.others or rank.reads for rank in self.ranks):
                break
            self.time_passes()
        else:
            raise AssertionError("still busy")
        assert not self.host.unwritten
        assert self.disk.has_place == self.disk.is_used
        assert self.disk.writing_blocks == self.disk.loading_blocks == 0
        for rank in self.ranks:
            assert sum(map(hash_count, rank.files.values())) == self.disk.held_blocks
        if self.disk.blocks == 10_000 and not self.has_failed:
            for extent in self.host._extents.values():
                for key in each_hash(hash_range(extent.hashes, 0, extent.blocks)):
                    assert key in self.disk._places, "it is in no file"
        self.a_new_text_comes()
        if not self.disk.is_used:
            assert min(rank.space for rank in self.ranks) < FILE_BLOCKS
            assert not self.disk.held_blocks
            return
        held = sum(one.count for one in self.disk.match(TEXT[NEW], 0, TEXT_BLOCKS))
        most_blocks = min(FILE_BLOCKS, self.disk.blocks)
        assert held >= min(TEXT_BLOCKS, self.disk.blocks - most_blocks + 1)

    def a_new_text_comes(self) -> None:
        """Evict a text piece by piece from its end to an empty host tier, and write it."""
        self.disk._source = self.host = HostTier(2 * TEXT_BLOCKS, SIZE, Prices())
        self.host.unwritten = UnwrittenBlocks() if self.disk.is_used else None
        self.host.below = TiersBelow(0, self.disk, None)
        for rank in self.ranks:
            rank.ledger = HostLedger(2 * TEXT_BLOCKS)
        stop = TEXT_BLOCKS
        for most_blocks, is_followed_by_step in [*self.pieces, (TEXT_BLOCKS, True)]:
            blocks = min(most_blocks, stop)
            stop -= blocks
            if blocks:
                self.evict(NEW, stop, blocks)
            if is_followed_by_step:
                self.time_passes()
        while self.host.unwritten:
            self.time_passes()
        self.time_passes()
        self.all_agree()


DiskMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestDiskTier = DiskMachine.TestCase
