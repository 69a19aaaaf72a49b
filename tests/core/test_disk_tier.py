"""The disk tier's decisions: which files count, which are written, and which are deleted."""

from __future__ import annotations

import pytest

from medha.cost.tier_seconds import ReadSeconds
from medha.kv.disk_tier import FILE_BLOCKS, DiskTier, OnDisk, file_name
from medha.kv.host_tier import Kept
from medha.kv.prefix_cache import hash_range
from medha.wire.messages import DiskFile, DiskReport, DiskWrite


class Fixed:
    """Times by which everything is worth a file, unless `computes` is 0."""

    computes = 1.0

    def load_seconds(self, blocks: int, files: int) -> float:
        return 0.01 * blocks

    def fetch_seconds(self, blocks: int) -> float:
        return 0.001 * blocks

    def compute_seconds(self, context: int, tokens: int) -> float:
        return self.computes * (tokens - context)


def chain(name: int, blocks: int) -> str:
    return "".join(f"{1000 * name + block:032x}" for block in range(blocks))


def tier(blocks: int = 100, ranks: int = 2, most_writing: int = 1000) -> DiskTier:
    found = DiskTier(blocks, range(ranks), 16, Fixed(), most_writing)
    for rank in range(ranks):
        found.report(DiskReport(rank, found_all=True))
    return found


def write(disk: DiskTier, hashes: str, start: int = 0, *, before: str = "") -> tuple[DiskWrite, ...]:
    return disk.write([Kept(0, hashes, before, start)], 0)


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


def test_after_a_restart_only_files_of_all_ranks_count_and_the_rest_is_deleted() -> None:
    disk = DiskTier(100, range(2), 16, Fixed(), 100)
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
        disk = DiskTier(360, range(1), 16, Fixed(), 100)
        disk.report(DiskReport(0, found=tuple(found), found_all=True))
        assert {one.file for one in disk.take_deletes(0)} == {one.name for one in files[90:]}
        disk.check()
    assert walked == []


def test_a_smaller_size_deletes_what_was_written_first() -> None:
    disk = DiskTier(8, range(1), 16, Fixed(), 100)
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
    disk.begin_load(OnDisk(behind[0].file.name, 0, 4), 5, 4)  # uses the beginning, too
    assert write(disk, chain(4, 4)) != ()
    assert [delete.file for delete in disk.take_deletes(0)] == [other[0].file.name]
    assert write(disk, chain(5, 12)) == (), "nothing that is read or written makes room"
    assert disk.take_deletes(0) == ()
    disk.check()


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


def test_a_slow_disk_gets_no_more_than_it_can_write() -> None:
    disk = tier(most_writing=10)
    (one,) = write(disk, chain(1, 8))
    assert write(disk, chain(2, 8)) == ()
    assert disk.counts.skipped_blocks == 8
    written(disk, (one,))
    assert len(write(disk, chain(2, 8))) == 1


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
