"""The disk tier's decisions: which files count, which are written, and which are deleted."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import pytest

from medha.api.replica import SchedulingSpec
from medha.cost.tier_seconds import ReadSeconds
from medha.kv.disk_tier import FILE_BLOCKS, MOST_CONSIDERED, DiskTier, OnDisk, file_name
from medha.kv.host_tier import HostTier, Kept
from medha.kv.pools import KvPools
from medha.kv.prefix_cache import Branch, hash_count, hash_range
from medha.kv.unwritten_blocks import UnwrittenBlocks
from medha.scheduler.controller import ReplicaController
from medha.scheduler.history import History
from medha.scheduler.status_report import status
from medha.wire.messages import DiskFile, DiskReport, DiskTierFigures, DiskWrite, HostDrop, KvPart, Tick

from ..scheduler.test_store_kv import HASHER, Replica, ids


class Fixed:
    """Times by which everything is worth a file, unless `computes` is 0."""

    computes = 1.0

    def load_seconds(self, blocks: int, files: int) -> float:
        return 0.01 * blocks

    def peer_seconds(self, blocks: int) -> float:
        return 0.01 * blocks

    def store_seconds(self, blocks: int, objects: int) -> float:
        return 0.01 * blocks

    def fetch_seconds(self, blocks: int) -> float:
        return 0.001 * blocks

    def compute_seconds(self, context: int, tokens: int) -> float:
        return self.computes * (tokens - context)


def chain(name: int, blocks: int) -> str:
    return "".join(f"{1000 * name + block:032x}" for block in range(blocks))


@dataclass
class Waiting:
    """Blocks that wait in no real host tier, in the order in which they came."""

    kept: deque[Kept] = field(default_factory=deque)
    again: list[str] = field(default_factory=list)
    dropped: set[int] = field(default_factory=set)  # extents
    numbers: count[int] = field(default_factory=count)

    def add(self, hashes: str, start: int = 0, before: str = "") -> int:
        """Let blocks wait, and return the number of their extent."""
        extent = next(self.numbers)
        for first in range(0, hash_count(hashes), FILE_BLOCKS):
            part = hash_range(hashes, first, min(first + FILE_BLOCKS, hash_count(hashes)))
            behind = hash_range(hashes, first - 1, first) if first else before
            self.kept.append(Kept(extent, part, behind, start + first, first))
        return extent

    def take_unwritten(self, most_blocks: int) -> Kept | None:
        assert all(hash_count(one.hashes) <= most_blocks for one in self.kept)
        return self.kept.popleft() if self.kept else None

    def wait_again(self, kept: Kept) -> int:
        self.again.append(kept.hashes)
        return 1

    def holds(self, extent: int, stop: int) -> bool:
        assert stop > 0
        return extent not in self.dropped


def tier(blocks: int = 100, ranks: int = 2, most_writing: int = 1000) -> DiskTier:
    found = empty(blocks, ranks, most_writing)
    for rank in range(ranks):
        found.report(DiskReport(rank, found_all=True))
    return found


def empty(blocks: int, ranks: int = 1, most_writing: int = 100) -> DiskTier:
    """Return a tier whose ranks have not reported yet."""
    return DiskTier(blocks, range(ranks), 16, Fixed(), most_writing, Waiting())


def waiting(disk: DiskTier) -> Waiting:
    assert isinstance(disk._source, Waiting)
    return disk._source


def write(disk: DiskTier, hashes: str, start: int = 0, *, before: str = "") -> tuple[DiskWrite, ...]:
    waiting(disk).add(hashes, start, before)
    return disk.write(0)


def written(disk: DiskTier, writes: tuple[DiskWrite, ...], ranks: int = 2) -> None:
    for rank in range(ranks):
        disk.report(DiskReport(rank, written=tuple(one.file.name for one in writes)))
        disk.check()


def test_blocks_count_once_every_rank_has_written_them() -> None:
    disk, hashes = tier(), chain(1, 10)
    (one,) = write(disk, hashes)
    assert disk.match(hashes, 0, 10) == []
    disk.report(DiskReport(0, written=(one.file.name,)))
    disk.report(DiskReport(7, written=(one.file.name,)))  # no rank of the lane
    assert disk.match(hashes, 0, 10) == []
    disk.report(DiskReport(1, written=(one.file.name,)))
    assert disk.match(hashes, 3, 9) == [OnDisk(one.file.name, 3, 6)]
    assert write(disk, hashes) == (), "it is there already"
    disk.check()


def test_long_extents_become_several_files_which_continue_each_other() -> None:
    disk, hashes = tier(1000), chain(1, 2 * FILE_BLOCKS + 5)
    writes = write(disk, hashes, start=7)
    assert [len(one.file.hashes) // 32 for one in writes] == [FILE_BLOCKS, FILE_BLOCKS, 5]
    assert [(one.first, one.file.start) for one in writes] == [
        (0, 7),
        (FILE_BLOCKS, 7 + FILE_BLOCKS),
        (128, 135),
    ]
    assert writes[1].file.before == hash_range(hashes, FILE_BLOCKS - 1, FILE_BLOCKS)
    written(disk, writes)
    assert sum(one.count for one in disk.match(hashes, 0, 133)) == 133


def test_a_rank_that_cannot_write_ends_the_file_for_all() -> None:
    disk, hashes = tier(), chain(1, 10)
    (one,) = write(disk, hashes)
    disk.report(DiskReport(0, written=(one.file.name,)))
    disk.report(DiskReport(1, not_written=(one.file.name,)))
    assert [delete.file for delete in disk.take_deletes(0)] == [one.file.name]
    disk.report(DiskReport(0, written=(one.file.name,)))
    assert disk.match(hashes, 0, 10) == []
    assert (disk.held_blocks, disk.counts.failed_writes) == (0, 1)
    disk.check()


def no_space(disk: DiskTier, rank: int, one: DiskWrite) -> None:
    name = (one.file.name,)
    disk.report(DiskReport(rank, not_written=name, no_space=name))
    disk.check()


def test_a_tier_shrinks_to_what_it_holds_if_a_rank_has_no_space_for_a_file() -> None:
    disk = tier(blocks=1000)
    files = [write(disk, chain(name, 10)) for name in range(3)]
    for one in files:
        written(disk, one)
    (lost,) = write(disk, chain(3, 8))
    no_space(disk, 1, lost)
    assert (disk.blocks, disk.held_blocks, disk.counts.failed_writes) == (30, 30, 1)
    assert all(disk.match(chain(name, 10), 0, 10) for name in range(3)), "files that are there can be read"
    assert [one.file for one in disk.take_deletes(0)] == [lost.file.name], "other ranks may have written it"
    assert waiting(disk).again == [], "rank 0 may still write it"
    disk.report(DiskReport(0, written=(lost.file.name,)))
    assert waiting(disk).again == [lost.file.hashes]
    assert disk.match(lost.file.hashes, 0, 8) == []
    written(disk, write(disk, lost.file.hashes))
    assert [one.file for one in disk.take_deletes(0)] == [files[0][0].file.name], "the oldest makes room"
    assert len(disk.match(lost.file.hashes, 0, 8)) == 1
    assert (disk.blocks, disk.held_blocks, disk.fault) == (30, 28, "")


def test_files_that_fail_together_let_the_tier_shrink_once() -> None:
    """All of them were begun before the first one failed, so the others say nothing about the size that it has since."""
    disk = tier(blocks=1000)
    under_way = [one for name in range(4) for one in write(disk, chain(name, 10))]
    assert len(under_way) == 4
    for one in under_way:
        no_space(disk, 1, one)
    assert (disk.blocks, disk.held_blocks) == (30, 0)
    for one in under_way:
        disk.report(DiskReport(0, written=(one.file.name,)))
    written(disk, write(disk, chain(10, 10)))
    (lost,) = write(disk, chain(11, 10))
    no_space(disk, 1, lost)
    assert (disk.blocks, disk.held_blocks) == (10, 10), "it was begun since"


def test_a_file_without_space_is_written_again_once_no_rank_writes_it_any_more() -> None:
    disk = tier(blocks=1000)
    written(disk, write(disk, chain(1, 20)))
    (lost,) = write(disk, chain(2, 10))
    no_space(disk, 0, lost)
    assert write(disk, lost.file.hashes) == ()
    no_space(disk, 1, lost)
    assert disk.blocks == 20, "both ranks mean the same file"
    assert waiting(disk).again == [lost.file.hashes]
    assert len(write(disk, lost.file.hashes)) == 1
    disk.check()


def test_each_file_without_space_lets_a_tier_shrink_and_an_empty_one_takes_no_file_any_more() -> None:
    disk = tier(blocks=1000, ranks=1)
    sizes = []
    for name in range(6):
        (one,) = write(disk, chain(name, 10))
        if name < 3:
            written(disk, (one,), ranks=1)
        else:
            no_space(disk, 0, one)
        sizes.append(disk.blocks)
    assert sizes == [1000, 1000, 1000, 30, 20, 10]
    (last,) = write(disk, chain(6, 10))
    no_space(disk, 0, last)
    assert (disk.blocks, disk.held_blocks, disk.is_used, disk.has_place) == (0, 0, False, False)
    assert write(disk, chain(7, 10)) == ()
    assert len(waiting(disk).kept) == 1, "nothing is taken"
    assert disk.fault == ""


def test_a_volume_without_space_for_one_file_leaves_writes_that_go_on_alone() -> None:
    disk = tier(blocks=1000, ranks=1)
    first, second = write(disk, chain(1, FILE_BLOCKS + 5))
    no_space(disk, 0, first)
    assert (disk.blocks, disk.writing_blocks, disk.has_place) == (5, 5, False)
    written(disk, (second,), ranks=1)
    assert (disk.blocks, disk.held_blocks, disk.has_place) == (5, 5, True)
    assert [hash_count(one.file.hashes) for one in write(disk, chain(2, 5))] == [5]
    disk.check()


def test_of_a_prompt_larger_than_a_tier_that_shrank_the_beginning_is_written() -> None:
    disk, hashes = tier(100 * FILE_BLOCKS, ranks=1, most_writing=FILE_BLOCKS), chain(1, 5 * FILE_BLOCKS)
    writes, count = write(disk, hashes), 0
    while writes:
        count += 1
        if count > 3:
            no_space(disk, 0, writes[0])
        else:
            written(disk, writes, ranks=1)
        writes = disk.write(0)
    assert (disk.blocks, count) == (3 * FILE_BLOCKS, 4), "what is behind has no place, and is not tried"
    assert sum(one.count for one in disk.match(hashes, 0, 320)) == 3 * FILE_BLOCKS


def test_a_file_without_space_that_the_host_tier_has_dropped_lets_a_tier_shrink_too() -> None:
    disk = tier(blocks=1000, ranks=1)
    (one,) = write(disk, chain(1, 10))
    waiting(disk).dropped.add(one.extent)
    no_space(disk, 0, one)
    assert (disk.blocks, disk.counts.failed_writes, disk.counts.skipped_blocks) == (0, 1, 1)


def test_after_a_restart_only_files_of_all_ranks_count_and_the_rest_is_deleted() -> None:
    disk = empty(100, ranks=2)
    files = [DiskFile(file_name("", chain(name, 4)), 0, chain(name, 4)) for name in range(4)]
    wrong = DiskFile(file_name("", chain(8, 4)), 0, chain(9, 4))
    disk.report(DiskReport(0, found=(files[0], files[1], wrong)))
    disk.report(DiskReport(1, found=(files[1], files[2], wrong), found_all=True))
    assert not disk.has_changes, "rank 0 may have found more"
    disk.report(DiskReport(0, found=(files[2],), found_all=True))
    assert [delete.file for delete in disk.take_deletes(0)] == [files[0].name]
    assert [bool(disk.match(chain(name, 4), 0, 4)) for name in range(4)] == [False, True, True, False]
    assert disk.match(chain(9, 4), 0, 4) == [], "its name belongs to other hashes"
    disk.check()


def test_many_files_of_one_long_prompt_are_found_in_any_order_without_a_walk_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hashes, files, walked = chain(1, 400), [], []
    for first in range(0, 400, 4):
        part, before = (
            hash_range(hashes, first, first + 4),
            hash_range(hashes, first - 1, first) if first else "",
        )
        files.append(DiskFile(file_name(before, part), first, part, before))
    monkeypatch.setattr(DiskTier, "_use", lambda _, file: walked.append(file))
    for found in (files, files[::-1]):
        disk = empty(360)
        disk.report(DiskReport(0, found=tuple(found), found_all=True))
        assert {one.file for one in disk.take_deletes(0)} == {one.name for one in files[90:]}
        disk.check()
    assert walked == []


def test_a_smaller_size_deletes_what_was_written_first() -> None:
    disk = empty(8)
    files = [DiskFile(file_name("", chain(name, 4)), 0, chain(name, 4)) for name in range(3)]
    disk.report(DiskReport(0, found=tuple(files), found_all=True))
    assert [delete.file for delete in disk.take_deletes(0)] == [files[0].name]
    disk.check()


def test_files_make_room_in_the_order_of_use_and_beginnings_stay_longest() -> None:
    disk = tier(blocks=12)
    first = write(disk, chain(1, 4))
    written(disk, first)
    behind = write(disk, chain(2, 4), start=4, before=hash_range(chain(1, 4), 3, 4))
    written(disk, behind)
    other = write(disk, chain(3, 4))
    written(disk, other)
    disk.use([OnDisk(behind[0].file.name, 0, 4)])  # uses the beginning, too
    assert write(disk, chain(4, 4)) != ()
    assert [delete.file for delete in disk.take_deletes(0)] == [other[0].file.name]
    disk.check()


def test_a_file_waits_until_others_that_are_read_or_written_leave_room_for_it() -> None:
    disk = tier(blocks=12)
    read = write(disk, chain(1, 4))
    written(disk, read)
    disk.begin_load(OnDisk(read[0].file.name, 0, 4), 5, 4)
    assert (disk.has_place, write(disk, chain(2, 12))) == (False, ())
    for rank in range(2):
        disk.report(DiskReport(rank, loaded=((5, 0.1),)))
    disk.check()
    assert len(disk.write(0)) == 1
    assert [delete.file for delete in disk.take_deletes(0)] == [read[0].file.name]
    assert disk.counts.skipped_blocks == 0
    disk.check()


@pytest.mark.parametrize("most_writing", [FILE_BLOCKS, 2 * FILE_BLOCKS, 100 * FILE_BLOCKS])
def test_of_a_prompt_for_which_a_tier_is_too_small_the_beginning_is_written(most_writing: int) -> None:
    disk, hashes = tier(4 * FILE_BLOCKS, most_writing=most_writing), chain(1, 10 * FILE_BLOCKS)
    other = write(disk, chain(2, FILE_BLOCKS))
    written(disk, other)
    writes = write(disk, hashes)
    while writes or waiting(disk).kept:
        written(disk, writes)
        writes = disk.write(0)
    assert sum(one.count for one in disk.match(hashes, 0, 640)) == 4 * FILE_BLOCKS
    assert disk.counts.skipped_blocks == 6 * FILE_BLOCKS
    assert [delete.file for delete in disk.take_deletes(0)] == [other[0].file.name]


def parts(hashes: str) -> list[Kept]:
    """Return the files of a prompt, in the order in which it continues in them."""
    found = Waiting()
    found.add(hashes)
    return list(found.kept)


def test_a_file_waits_if_others_that_are_read_would_have_to_make_room_for_it() -> None:
    disk, hashes, other = tier(4 * FILE_BLOCKS), chain(1, 3 * FILE_BLOCKS), chain(2, 2 * FILE_BLOCKS)
    *beginning, end = parts(hashes)
    for text in (other, hash_range(hashes, 0, 2 * FILE_BLOCKS)):
        written(disk, write(disk, text))
    for extent, found in enumerate(disk.match(other, 0, 2 * FILE_BLOCKS)):
        disk.begin_load(found, extent, FILE_BLOCKS)
    waiting(disk).kept.append(end)
    assert disk.write(0) == ()
    assert (waiting(disk).again, disk.has_place) == ([end.hashes], False), (
        "it waits, and no step tries in vain"
    )
    for rank in range(2):
        assert not disk.has_place
        disk.report(DiskReport(rank, loaded=((1, 0.1),)))
    assert disk.has_place
    waiting(disk).kept.append(end)
    assert [one.file.start for one in disk.write(0)] == [2 * FILE_BLOCKS]
    assert (disk.counts.skipped_blocks, len(disk.match(hashes, 0, 192))) == (0, len(beginning))
    disk.check()


def test_of_a_prompt_that_is_evicted_from_its_end_only_what_a_tier_can_hold_is_written() -> None:
    disk, hashes = tier(4 * FILE_BLOCKS), chain(1, 10 * FILE_BLOCKS)
    starts = []
    for one in reversed(parts(hashes)):
        waiting(disk).kept.append(one)
        writes = disk.write(0)
        starts += [write.file.start for write in writes]
        written(disk, writes)
    assert starts == [192, 128, 64, 0]


def test_what_is_behind_a_file_that_could_not_be_written_does_not_replace_the_beginning() -> None:
    disk, hashes = tier(4 * FILE_BLOCKS, most_writing=FILE_BLOCKS), chain(1, 10 * FILE_BLOCKS)
    writes = write(disk, hashes)
    for _ in range(3):
        written(disk, writes)
        writes = disk.write(0)
    disk.report(DiskReport(1, not_written=(writes[0].file.name,)))
    assert disk.write(0) == ()
    assert sum(one.count for one in disk.match(hashes, 0, 640)) == 3 * FILE_BLOCKS


def test_one_step_considers_a_bounded_number_of_files() -> None:
    disk, hashes = tier(), chain(1, 10)
    written(disk, write(disk, hashes))
    for _ in range(MOST_CONSIDERED + 1):
        waiting(disk).add(hashes)
    assert (disk.write(0), len(waiting(disk).kept)) == ((), 1)
    assert (disk.write(0), len(waiting(disk).kept)) == ((), 0)


def test_a_prompt_uses_each_of_its_files_once_and_the_beginning_last(monkeypatch: pytest.MonkeyPatch) -> None:
    disk, hashes = tier(20 * FILE_BLOCKS), chain(1, 20 * FILE_BLOCKS)
    for at in range(0, 640, FILE_BLOCKS):
        before = hash_range(hashes, at - 1, at) if at else ""
        written(disk, write(disk, hash_range(hashes, at, at + FILE_BLOCKS), at, before=before))
    written(disk, write(disk, chain(2, FILE_BLOCKS)))
    looked_at = 0
    lines = DiskTier._line

    def count(self: DiskTier, file: Any) -> Iterator[Any]:
        nonlocal looked_at
        for one in lines(self, file):
            looked_at += 1
            yield one

    monkeypatch.setattr(DiskTier, "_line", count)
    found = disk.match(hashes, 0, 640)
    disk.use(found)
    assert looked_at <= 2 * len(found)
    disk.check()
    first_hashes = [file.hashes[:32] for file in disk._in_order()]
    assert first_hashes == [f"{2000:032x}", *(f"{1000 + at:032x}" for at in range(576, -1, -FILE_BLOCKS))]


def test_a_load_ends_when_every_rank_has_reported_it() -> None:
    disk, hashes = tier(), chain(1, 10)
    (one,) = write(disk, hashes)
    written(disk, (one,))
    disk.begin_load(OnDisk(one.file.name, 2, 5), 7, 5)
    assert disk.loading_blocks == 5
    assert disk.report(DiskReport(0, loaded=((7, 0.5),))) == []
    (ended,) = disk.report(DiskReport(1, loaded=((7, 0.2),)))
    assert (ended.extent, ended.blocks, ended.seconds, ended.is_there) == (7, 5, 0.5, True)
    disk.begin_load(OnDisk(one.file.name, 2, 5), 8, 5)
    assert disk.report(DiskReport(0, not_loaded=(8,), damaged=(one.file.name,))) == []
    (ended,) = disk.report(DiskReport(1, loaded=((8, 0.2),)))
    assert not ended.is_there
    assert disk.match(hashes, 0, 10) == []
    assert [delete.file for delete in disk.take_deletes(0)] == [one.file.name]
    assert disk.report(DiskReport(1, loaded=((8, 0.2), (99, 1.0)))) == [], "unknown extents are ignored"
    disk.check()


@pytest.mark.parametrize("is_there", [True, False])
def test_a_load_of_a_removed_file_leaves_its_successor_alone(is_there: bool) -> None:
    disk, hashes = tier(blocks=10, ranks=1), chain(1, 10)
    (one,) = write(disk, hashes)
    written(disk, (one,), ranks=1)
    disk.begin_load(OnDisk(one.file.name, 0, 5), 7, 5)
    disk.begin_load(OnDisk(one.file.name, 5, 5), 8, 5)
    disk.report(DiskReport(0, not_loaded=(7,), damaged=(one.file.name,)))
    written(disk, write(disk, hashes), ranks=1)
    report = DiskReport(0, loaded=((8, 0.1),)) if is_there else DiskReport(0, not_loaded=(8,))
    (ended,) = disk.report(report)
    assert ended.is_there == is_there
    assert len(disk.match(hashes, 0, 10)) == 1, "it was written anew"
    assert len(write(disk, chain(2, 10))) == 1, "nothing reads it, so it makes room"
    disk.check()


def test_a_rank_without_a_disk_switches_the_tier_off() -> None:
    disk, hashes = tier(), chain(1, 10)
    (one,) = write(disk, hashes)
    written(disk, (one,))
    disk.begin_load(OnDisk(one.file.name, 0, 10), 3, 10)
    disk.report(DiskReport(1, fault="no space"))
    assert disk.fault == "rank 1: no space"
    assert disk.match(hashes, 0, 10) == []
    assert write(disk, chain(2, 4)) == ()
    disk.report(DiskReport(0, loaded=((3, 0.1),)))
    (ended,) = disk.report(DiskReport(1, not_loaded=(3,)))
    assert not ended.is_there
    disk.check()


def test_what_a_slow_disk_has_no_place_for_waits_until_earlier_files_are_written() -> None:
    disk = tier(blocks=1000, most_writing=3 * FILE_BLOCKS)
    first = write(disk, chain(1, 5 * FILE_BLOCKS))
    assert [one.first for one in first] == [0, FILE_BLOCKS, 2 * FILE_BLOCKS]
    assert (disk.has_place, disk.writing_blocks) == (False, 3 * FILE_BLOCKS)
    assert disk.write(0) == ()
    written(disk, first[:1])
    assert disk.has_place
    (fourth,) = disk.write(0)
    written(disk, (*first[1:], fourth))
    (last,) = disk.write(0)
    written(disk, (last,))
    assert sum(one.count for one in disk.match(chain(1, 320), 0, 320)) == 320
    assert disk.counts.skipped_blocks == 0
    assert disk.has_place


def test_a_small_host_tier_has_one_file_written_at_a_time() -> None:
    disk = tier(most_writing=10)
    (one,) = write(disk, chain(1, 8))
    assert write(disk, chain(2, 8)) == ()
    written(disk, (one,))
    assert len(disk.write(0)) == 1


def test_nothing_is_written_before_all_ranks_have_reported_what_they_have() -> None:
    disk, hashes = empty(100, ranks=2), chain(1, 8)
    there = DiskFile(file_name("", hashes), 0, hashes)
    disk.report(DiskReport(0, found=(there,), found_all=True))
    assert (disk.has_place, write(disk, hashes)) == (False, ())
    disk.report(DiskReport(1, found=(there,), found_all=True))
    assert (disk.has_place, disk.write(0)) == (True, ()), "it is there already"
    assert len(disk.match(hashes, 0, 8)) == 1


def test_a_write_that_is_called_off_is_no_failure_and_what_is_left_of_its_blocks_waits_again() -> None:
    disk, hashes = tier(), chain(1, 10)
    (one,) = write(disk, hashes)
    waiting(disk).dropped.add(one.extent)
    disk.report(DiskReport(0, written=(one.file.name,)))
    disk.report(DiskReport(1, not_written=(one.file.name,)))
    assert waiting(disk).again == [hashes]
    assert (disk.counts.failed_writes, disk.counts.skipped_blocks) == (0, 1)
    assert [delete.file for delete in disk.take_deletes(0)] == [one.file.name]
    assert disk.writing_blocks == disk.held_blocks == 0
    disk.check()


@pytest.mark.parametrize("is_off", [True, False])
def test_a_late_report_of_a_write_that_was_given_up_does_not_count_for_the_next_one(is_off: bool) -> None:
    """Both write a file of the same name. The write of rank 0 fails, or is called off, while rank 1 still writes it."""
    disk, hashes = tier(), chain(1, 10)
    (one,) = write(disk, hashes)
    if is_off:
        waiting(disk).dropped.add(one.extent)
    disk.report(DiskReport(0, not_written=(one.file.name,)))
    assert write(disk, hashes) == ()
    assert waiting(disk).again == [], "rank 1 may still write it"
    disk.report(DiskReport(1, written=(one.file.name,)))
    assert waiting(disk).again == [hashes] * is_off
    again = write(disk, hashes)
    assert [delete.file for delete in disk.take_deletes(0)] == [one.file.name] == [w.file.name for w in again]
    disk.report(DiskReport(0, written=(one.file.name,)))
    assert disk.match(hashes, 0, 10) == []
    written(disk, again)
    assert disk.match(hashes, 0, 10) == [OnDisk(one.file.name, 0, 10)]


def test_what_is_worth_most_is_written_first_and_a_prefix_before_what_continues_it() -> None:
    host = HostTier(400, 16, Fixed())
    host.unwritten = UnwrittenBlocks()
    text, other = chain(1, 300), chain(2, 30)
    host.offload([Branch(text, 200, 100, [(200, 100)])])
    host.offload([Branch(text, 0, 200, [(0, 200)])])
    host.offload([Branch(other, 0, 30, [(500, 30)])])
    host.check()
    assert host.unwritten.blocks == 330
    taken = []
    while (kept := host.take_unwritten(FILE_BLOCKS)) is not None:
        taken.append((kept.start, hash_count(kept.hashes), kept.before))
    in_text = [one for one in taken if one[2] != "" or one[1] == FILE_BLOCKS]
    assert [start for start, _, _ in in_text] == [0, 64, 128, 192, 200, 264]
    assert [before for _, _, before in in_text] == [
        "",
        *(text[32 * (at - 1) : 32 * at] for at in (64, 128, 192, 200, 264)),
    ]
    assert sum(blocks for _, blocks, _ in taken) == 330
    assert not host.unwritten


def test_what_the_host_tier_drops_does_not_wait_any_longer_and_costs_no_memory() -> None:
    host = HostTier(40, 16, Fixed())
    host.unwritten = UnwrittenBlocks()
    for name in range(200):
        host.offload([Branch(chain(name, 20), 0, 20, [(0, 20)])])
        host.check()
        assert host.unwritten.blocks <= 40
        assert len(host.unwritten._turns) <= 100
    lost_blocks = host.unwritten.lost_blocks
    assert lost_blocks == 200 * 20 - host.unwritten.blocks > 3000
    assert host.take_unwritten(15) is not None
    waiting = host.unwritten.blocks
    host.offload([Branch(chain(900, 40), 0, 40, [(0, 40)])])
    assert host.unwritten.lost_blocks - lost_blocks == waiting + 40 - host.unwritten.blocks > 0


def test_what_the_host_tier_has_no_place_for_is_lost_unless_a_file_has_it() -> None:
    """Blocks that are worth less than all that the tier holds are turned away; five of them are in a file."""
    host = HostTier(20, 16, Fixed())
    text = chain(2, 20)
    host.unwritten = UnwrittenBlocks(
        lambda hashes, start, stop: 5 if (hashes, start, stop) == (text, 0, 20) else 0
    )
    kept = chain(1, 20)
    host.begin_swap(kept)
    host.offload([Branch(kept, 0, 20, [(0, 20)])])
    assert host.offload([Branch(text, 0, 20, [(100, 20)])]) == ((), ())
    assert host.unwritten.lost_blocks == 15


def test_blocks_wait_again_if_they_are_still_there() -> None:
    host = HostTier(40, 16, Fixed())
    host.unwritten = UnwrittenBlocks()
    hashes = chain(1, 20)
    host.offload([Branch(hashes, 0, 10, [(0, 10)])])
    whole, end = (
        Kept(0, hash_range(hashes, 0, 10), "", 0),
        Kept(0, hash_range(hashes, 4, 10), hash_range(hashes, 3, 4), 4, 4),
    )
    assert host.take_unwritten(64) == whole
    assert host.wait_again(end) == 0
    assert host.take_unwritten(64) == end
    assert host.take_unwritten(64) is None
    host.begin_swap(chain(2, 36))
    drops, _ = host.offload([Branch(chain(2, 36), 0, 36, [(100, 36)])])
    assert drops == (HostDrop(0, 4),)
    assert host.wait_again(Kept(0, hash_range(hashes, 2, 10), hash_range(hashes, 1, 2), 2, 2)) == 6
    assert host.take_unwritten(64) == Kept(0, hash_range(hashes, 2, 4), hash_range(hashes, 1, 2), 2, 2)
    assert host.take_unwritten(64) == Kept(1, chain(2, 36), "", 0)


def test_blocks_wait_again_where_they_have_come_back_but_not_while_they_are_read() -> None:
    host = HostTier(40, 16, Fixed())
    host.unwritten = UnwrittenBlocks()
    hashes = chain(1, 20)
    host.offload([Branch(hashes, 0, 10, [(0, 10)])])
    gone = host.take_unwritten(64)
    assert gone == Kept(0, hash_range(hashes, 0, 10), "", 0)
    made = host.begin_load(chain(2, 40), 0, 40, "disk", due=0.0)
    assert made is not None
    assert made[2] == (HostDrop(0),)
    assert host.wait_again(gone) == 10
    assert host.end_load(made[0], is_there=False) == HostDrop(1)
    host.offload([Branch(hashes, 0, 6, [(0, 6)])])
    assert host.take_unwritten(64) == Kept(2, hash_range(hashes, 0, 6), "", 0)
    made = host.begin_load(hashes, 6, 4, "disk", due=0.0)
    assert host.wait_again(gone) == 4, "these are being read"
    assert host.take_unwritten(64) == Kept(2, hash_range(hashes, 0, 6), "", 0)
    host.check()


@pytest.mark.parametrize(
    ("start", "stop", "computes", "wanted"),
    [
        pytest.param(0, 20, 1.0, True, id="it lacks some"),
        pytest.param(0, 10, 1.0, False, id="it has all"),
        pytest.param(0, 200, 1.0, True, id="it has room for the beginning"),
        pytest.param(100, 200, 1.0, False, id="it has no room for the prompt up to here"),
        pytest.param(0, 20, 0.0, False, id="computing is faster"),
    ],
)
def test_a_tier_wants_what_it_lacks_and_would_write(
    start: int, stop: int, computes: float, wanted: bool
) -> None:
    disk = tier(blocks=100)
    written(disk, write(disk, chain(1, 10)))
    disk._prices.computes = computes  # type: ignore[attr-defined]
    assert disk.wants(chain(1, 200), start, stop) == wanted


def test_blocks_between_those_of_files_are_written_though_computing_them_alone_is_faster() -> None:
    disk, hashes = tier(), chain(1, 30)
    written(disk, write(disk, hash_range(hashes, 0, 10)))
    end = write(disk, hash_range(hashes, 20, 30), 20, before=hash_range(hashes, 19, 20))
    disk._prices.computes = 0.0  # type: ignore[attr-defined]
    alone = chain(2, 10)
    assert not disk.wants(alone, 0, 10)
    assert write(disk, alone) == ()
    written(disk, end)
    assert disk.wants(hashes, 10, 20)
    assert not disk.wants(hashes, 10, 19)
    between = write(disk, hash_range(hashes, 10, 20), 10, before=hash_range(hashes, 9, 10))
    written(disk, between)
    assert disk.held_from(hashes, 0, 30) == 30


@dataclass
class ReplicaWithFiles(Replica):
    """A controller with a disk tier and without a store; the tests play what its ranks report of their files."""

    policy: str = "guarded"
    read_seconds: float = 1e-8  # of a block

    def new_core(self) -> ReplicaController:
        files = DiskTierFigures(1000, 1e-7, self.read_seconds)
        config = replace(
            super().new_core().config,
            scheduling=SchedulingSpec(policy=self.policy),  # type: ignore[arg-type]
            kv_blocks=60,
            store_block_seconds=None,
            object_blocks=0,
            disk_tier=files,
        )
        return ReplicaController(config, self.profile)

    @property
    def writes(self) -> list[DiskWrite]:
        return [one for step in self.steps for one in step.writes]

    @property
    def waiting_blocks(self) -> int:
        unwritten = self.core.pools.tiers[0].unwritten
        return 0 if unwritten is None else unwritten.blocks


def busy_with_files() -> ReplicaWithFiles:
    """Return an idle replica of which one file is being written, while more blocks wait."""
    replica = ReplicaWithFiles(host_blocks=160)
    replica.report(found_all=True)
    for number in range(5):
        replica.submit(f"a{number}", ids(number, 101))
    assert len(replica.writes) == 1
    assert replica.waiting_blocks > 40
    assert replica.core.idle, "it waits for its disk, not the other way round"
    return replica


def test_an_idle_replica_goes_on_to_write_as_files_are_finished_until_nothing_waits() -> None:
    replica = busy_with_files()
    finished = 0
    while finished < len(replica.writes):
        replica.report(written=(replica.writes[finished].file.name,))
        finished += 1
        assert replica.core.idle
    (disk,) = replica.core.pools.disks
    assert (replica.waiting_blocks, disk.writing_blocks) == (0, 0)
    assert sum(one.count for one in disk.match(HASHER.hashes(ids(0, 101)), 0, 25)) == 25
    counts = replica.core.pools.disk_counts
    assert counts.written_blocks == replica.core.pools.tier_counts.offloaded_blocks
    assert counts.skipped_blocks == counts.failed_writes == 0


@pytest.mark.parametrize("writes_at_once", [1, 2])
def test_prompts_are_written_whole_though_the_host_tier_is_full_of_what_is_worth_more(
    writes_at_once: int,
) -> None:
    """Writes end with the arrival of the next request, or of the one after that."""
    replica = ReplicaWithFiles(host_blocks=70)
    replica.report(found_all=True)
    lengths = [201, 201, *[61] * 9]
    finished = 0
    for number, tokens in enumerate(lengths):
        replica.submit(f"a{number}", ids(number, tokens))
        while number % writes_at_once == 0 and finished < len(replica.writes):
            replica.report(written=(replica.writes[finished].file.name,))
            finished += 1
    (disk,) = replica.core.pools.disks
    for number, tokens in enumerate(lengths[:7]):  # the others are still on the device
        blocks = tokens // 4
        assert disk.held_from(HASHER.hashes(ids(number, tokens)), 0, blocks) == blocks
    assert replica.core.pools.disk_counts.skipped_blocks == 0


@pytest.mark.parametrize("has_space", [False, True])
def test_nothing_waits_for_a_disk_tier_that_is_off_or_whose_volume_is_full(has_space: bool) -> None:
    replica = busy_with_files()
    if has_space:
        replica.handle(DiskReport(0, fault="no answer"))
    else:
        lost = (replica.writes[0].file.name,)
        replica.handle(DiskReport(0, not_written=lost, no_space=lost))
        shown = status(replica.core, History(), 0.0).lanes[0].disk_tier
        assert shown is not None
        assert (shown.blocks, shown.held, shown.waiting, shown.failures, shown.fault) == (0, 0, 0, 1, "")
    assert replica.waiting_blocks == 0
    replica.submit("b", ids(9, 101))
    assert replica.waiting_blocks == 0
    assert len(replica.writes) == 1
    assert replica.core.idle


@pytest.mark.parametrize(("seconds", "cached_tokens"), [(0.45, 100), (0.55, 0)])
def test_a_request_waits_for_slow_reads_for_a_part_of_the_time_that_they_save(
    seconds: float, cached_tokens: int
) -> None:
    """To compute the prompt takes 1 s, and no time was measured yet in which a read would take so long."""
    replica = ReplicaWithFiles(host_blocks=160)
    hashes = hash_range(HASHER.hashes(ids(0, 101)), 0, 25)
    replica.report(found=(DiskFile(file_name("", hashes), 0, hashes),), found_all=True)
    replica.submit("a", ids(0, 101))
    (load,) = [one for step in replica.steps for one in step.loads]
    assert (load.count, replica.admitted) == (25, {})
    replica.now = seconds
    replica.handle(Tick())
    replica.report(loaded=((0, seconds),))
    assert replica.admitted == {"a": cached_tokens}
    avoided_seconds = replica.core.pools.avoided_prefill_seconds
    assert [name for name, one in avoided_seconds.items() if one] == ["disk"] * (cached_tokens > 0)


@pytest.mark.parametrize(("policy", "loaded"), [("guarded", [50, 5]), ("lars", [50, 5]), ("fcfs", [50])])
def test_a_short_prompt_waits_for_one_file_of_a_long_one_before_it_alone(
    policy: str, loaded: list[int]
) -> None:
    """To read a block takes a quarter of the time to compute it: the short prompt is computed if it comes behind 50 of them."""
    replica = ReplicaWithFiles(host_blocks=160, policy=policy, read_seconds=0.01)
    prompts = {"long": ids(0, 201), "short": ids(1, 21)}
    files = []
    for prompt in prompts.values():
        hashes = HASHER.hashes(prompt)
        for start in range(0, (len(prompt) - 1) // 4, 5):
            before = hash_range(hashes, start - 1, start) if start else ""
            part = hash_range(hashes, start, start + 5)
            files.append(DiskFile(file_name(before, part), start, part, before))
    replica.report(found=tuple(files), found_all=True)
    for name, prompt in prompts.items():
        replica.submit(name, prompt)
    dues: dict[float, int] = {}
    for load in (one for step in replica.steps for one in step.loads):
        dues[load.due] = dues.get(load.due, 0) + load.count
    assert list(dues.values()) == loaded, "in the order of arrival"
    assert list(dues) == sorted(dues, reverse=True), "what arrived last is due first"
    assert ("short" in replica.admitted) == (policy == "fcfs")


def test_a_prompt_that_begins_as_a_long_one_is_computed_rather_than_wait_for_its_reads() -> None:
    """The blocks that both need are read when they are due for the long prompt, whose one file takes a second."""
    replica = ReplicaWithFiles(host_blocks=160, read_seconds=0.02)
    hashes = hash_range(HASHER.hashes(ids(0, 201)), 0, 50)
    replica.report(found=(DiskFile(file_name("", hashes), 0, hashes),), found_all=True)
    replica.submit("long", ids(0, 201))
    assert replica.admitted == {}
    replica.submit("short", ids(0, 201)[:21])
    assert replica.admitted == {"short": 0}


def test_kv_that_was_read_from_another_replica_waits_to_be_written_once_it_is_there() -> None:
    pools = KvPools(
        lanes=1, kv_blocks=60, block_size_tokens=16, tokens_per_lane=1000, host_blocks=100, prices=Fixed(),
        disk_blocks=100, lane_ranks=[[0]], has_peers=True,
    )  # fmt: skip
    pools.disk_report(DiskReport(0, found_all=True))
    hashes = chain(1, 20)
    pools.begin_peer_loads("ticket", [KvPart(0, hashes)])
    assert not pools.take_writes()[1]
    pools.disk_report(DiskReport(0, loaded=((0, 0.1),)))
    assert pools.has_changes
    (write,) = pools.take_writes()[1]
    assert write.file.hashes == hashes


def test_what_is_computed_sooner_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fixed, "computes", 1e-5)
    assert write(tier(), chain(1, 8)) == ()


def test_reads_show_what_an_access_and_a_block_take() -> None:
    reads = ReadSeconds(0.001, 0.0001)
    assert reads.seconds(64, 1) == pytest.approx(0.001 + 64 * 0.0001)
    for blocks in (1, 10, 40, 64, 5, 30) * 10:
        reads.observe(blocks, 0.02 + blocks * 0.001)
    assert reads.access_seconds == pytest.approx(0.02, rel=0.05)
    assert reads.seconds_per_block == pytest.approx(0.001, rel=0.05)
    for _ in range(200):
        reads.observe(10, 0.5)  # one size alone
    assert reads.seconds(10, 1) == pytest.approx(0.5, rel=0.01)
    before = reads.seconds(7, 1)
    reads.observe(0, 1.0)
    reads.observe(5, float("nan"))
    assert reads.seconds(7, 1) == before


def test_a_read_that_hung_does_not_end_all_reads() -> None:
    reads = ReadSeconds(0.001, 0.001)
    for _ in range(20):
        reads.observe(64, 0.07)
    reads.observe(64, 4.0)
    assert reads.seconds(64, 1) < 2 * 0.07
    for _ in range(20):
        reads.observe(64, 4.0)  # a network that has become slow is believed
    assert reads.seconds(64, 1) > 2.0
    stopped = ReadSeconds(0.0, 0.0)
    for _ in range(20):
        stopped.observe(64, 1.0)
    assert stopped.seconds(64, 1) > 0.5
