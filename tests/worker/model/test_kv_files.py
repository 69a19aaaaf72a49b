"""Files of KV: what comes back is what was written, or nothing, whatever happened to the files."""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from zlib import crc32

import numpy as np
import pytest
import torch

from medha.kv.disk_tier import file_name
from medha.kv.lane_replay import HostTierWork, ReadBlocks, WriteBlocks
from medha.wire.messages import DiskFile, DiskReport, HostDrop
from medha_worker.checkpoints.weights_identity import weights_identity
from medha_worker.device import host_device
from medha_worker.model import kv_files
from medha_worker.model.disk_blocks import MOST_FAILURES, DiskBlocks
from medha_worker.model.file_pages import PAGE_BYTES
from medha_worker.model.host_blocks import HostBlocks
from medha_worker.model.kv_cache import KVCache
from medha_worker.model.kv_files import (
    FileDamaged,
    KvFiles,
    Rows,
    blocks_within,
)
from small_disk import small_disk

BLOCK_BYTES, KEY = 64, "ab" * 32
SIZE_BYTES = 2**30


def described(name: int, blocks: int = 3) -> DiskFile:
    hashes = "".join(f"{100 * name + block:032x}" for block in range(blocks))
    return DiskFile(file_name("", hashes), 0, hashes)


def content(name: int, blocks: int = 3) -> Rows:
    return np.random.default_rng(name).integers(0, 256, (blocks, BLOCK_BYTES)).astype(np.uint8)


def opened(
    directory: Path,
    identity: str = "model",
    key: str = KEY,
    block_bytes: int = BLOCK_BYTES,
    piece_blocks: int = 0,
) -> KvFiles:
    files = KvFiles(directory, identity, block_bytes, piece_blocks=piece_blocks)
    files.acquire()
    files.keep_key(key)
    return files


@pytest.fixture
def files(tmp_path: Path) -> Iterator[KvFiles]:
    found = opened(tmp_path / "rank-0")
    yield found
    found.release()


def kept(files: KvFiles) -> list[str]:
    return sorted(path.name for path in files.directory.iterdir() if path.suffix in (".kv", ".partial"))


@pytest.mark.parametrize("piece_blocks", [0, 1, 2])
def test_blocks_come_back(tmp_path: Path, piece_blocks: int) -> None:
    files = opened(tmp_path / "rank-0", piece_blocks=piece_blocks)
    files.write(described(1), iter([content(1)[:1], content(1)[1:]]))
    assert list(files.scan()) == [described(1)]
    for start, count in ((0, 3), (1, 2), (2, 1)):
        rows = [piece.copy() for piece in files.read(described(1).name, start, count)]
        assert [len(piece) for piece in rows[:-1]] == [piece_blocks] * (len(rows) - 1)
        assert np.array_equal(np.concatenate(rows), content(1)[start : start + count])
    assert os.stat(files.directory / f"{described(1).name}.kv").st_size == PAGE_BYTES + 3 * BLOCK_BYTES
    assert blocks_within(PAGE_BYTES + BLOCK_BYTES, BLOCK_BYTES) == 1
    assert blocks_within(PAGE_BYTES, BLOCK_BYTES) == 0
    with pytest.raises(FileDamaged, match="3 blocks, and 2\\+2"):
        list(files.read(described(1).name, 2, 2))
    files.delete(described(1).name)
    files.delete(described(1).name)
    assert kept(files) == []
    files.release()


def flip(at: int) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[at] ^= 4
        path.write_bytes(data)

    return change


@pytest.mark.parametrize(
    ("change", "is_found"),
    [
        pytest.param(flip(-1), True, id="a bit of the last block"),
        pytest.param(flip(PAGE_BYTES), True, id="a bit of the first block"),
        pytest.param(flip(3), False, id="a bit of the version"),
        pytest.param(flip(40), False, id="a bit of the header"),
        pytest.param(
            lambda path: os.truncate(path, PAGE_BYTES + BLOCK_BYTES), False, id="cut off in a block"
        ),
        pytest.param(lambda path: os.truncate(path, 5), False, id="cut off in the header"),
        pytest.param(lambda path: os.truncate(path, 0), False, id="empty"),
        pytest.param(lambda path: os.truncate(path, PAGE_BYTES + 9 * BLOCK_BYTES), False, id="longer"),
        pytest.param(lambda path: path.write_bytes(b"x" * 9000), False, id="no file of KV"),
    ],
)
def test_what_was_changed_is_never_read(
    files: KvFiles, change: Callable[[Path], None], is_found: bool
) -> None:
    files.write(described(1), iter([content(1)]))
    change(files.directory / f"{described(1).name}.kv")
    with pytest.raises(FileDamaged):
        list(files.read(described(1).name, 0, 3))
    assert [one.name for one in files.scan()] == [
        described(1).name
    ] * is_found  # blocks are verified when read
    assert len(kept(files)) == is_found


@pytest.mark.parametrize("header", [b"[]", b"\xff", b"{}", b"no JSON"])
def test_a_sound_checksum_over_another_header_ends_no_scan(files: KvFiles, header: bytes) -> None:
    files.write(described(1), iter([content(1)]))
    begin = struct.pack("<8sII", b"MEDHAKV1", len(header), crc32(header)) + header
    (files.directory / f"{described(2).name}.kv").write_bytes(begin)
    other = json.loads(
        (files.directory / f"{described(1).name}.kv").read_bytes()[16:PAGE_BYTES].rstrip(b"\0")
    )
    text = json.dumps(other | {"hashes": None}).encode()
    begin = struct.pack("<8sII", b"MEDHAKV1", len(text), crc32(text)) + text
    (files.directory / f"{described(3).name}.kv").write_bytes(begin)
    assert list(files.scan()) == [described(1)]
    assert kept(files) == [f"{described(1).name}.kv"]


def test_a_disk_that_is_full_at_the_start_can_still_be_read(
    files: KvFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write(described(1), iter([content(1)]))
    monkeypatch.setattr(os, "pwrite", full)
    assert files.measured_seconds(perf_counter) == (0.0, 0.0)
    assert list(files.scan()) == [described(1)]
    assert kept(files) == [f"{described(1).name}.kv"]


def test_the_probe_of_a_disk_leaves_no_file(files: KvFiles) -> None:
    files.write(described(1), iter([content(1)]))
    access_seconds, block_seconds = files.measured_seconds(perf_counter)
    assert access_seconds + block_seconds > 0
    assert kept(files) == [f"{described(1).name}.kv"]


def test_a_disk_that_returns_other_bytes_than_were_written_is_not_used(
    files: KvFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_files, "crc32", lambda _: next(numbers))
    numbers = itertools.count()
    with pytest.raises(OSError, match="what was written is not what is read"):
        files.measured_seconds(perf_counter)
    assert kept(files) == []


def test_a_file_under_another_name_is_not_used(files: KvFiles) -> None:
    files.write(described(1), iter([content(1)]))
    (files.directory / f"{described(1).name}.kv").rename(files.directory / f"{described(2).name}.kv")
    with pytest.raises(FileDamaged, match="name of another file"):
        list(files.read(described(2).name, 0, 3))
    with pytest.raises(OSError, match="no name of a file"):
        list(files.read("../../etc/passwd", 0, 1))
    assert list(files.scan()) == []


@pytest.mark.parametrize(
    "other", [{"identity": "other"}, {"key": "cd" * 32}, {"block_bytes": 32}], ids=["model", "key", "size"]
)
def test_files_of_another_model_key_or_size_are_deleted(tmp_path: Path, other: dict[str, str]) -> None:
    first = opened(tmp_path)
    first.write(described(1), iter([content(1)]))
    first.release()
    second = opened(tmp_path, **other)  # type: ignore[arg-type]
    with pytest.raises(FileDamaged, match="it is of another"):
        list(second.read(described(1).name, 0, 3))
    assert list(second.scan()) == []
    assert kept(second) == []
    second.release()


def test_a_directory_has_one_user_and_keeps_its_key(tmp_path: Path) -> None:
    first = opened(tmp_path / "rank-0")
    second = KvFiles(tmp_path / "rank-0", "model", BLOCK_BYTES)
    with pytest.raises(OSError, match=r"another process uses it, or this one hangs in it.*rank-0"):
        second.acquire()
    assert second.kept_key() == KEY
    assert (tmp_path / "rank-0" / "hash-key").stat().st_mode & 0o077 == 0
    first.release()
    second.acquire()
    (tmp_path / "rank-0" / "hash-key").write_text("no key")
    assert second.kept_key() == ""
    second.release()


def test_directories_of_ranks_that_a_grid_lacks_are_deleted(tmp_path: Path) -> None:
    used = opened(tmp_path / "rank-9")
    for rank in (1, 5):
        opened(tmp_path / f"rank-{rank}").release()
    files = opened(tmp_path / "rank-0")
    files.delete_ranks_from(2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0", "rank-1", "rank-9"]
    used.release()
    files.release()


_KILLED = """
import os, signal, sys
import numpy as np
from pathlib import Path
from medha.kv.disk_tier import file_name
from medha.wire.messages import DiskFile
from medha_worker.model.kv_files import KvFiles

folder, do, call, number, when = sys.argv[1:]
calls = 0

def killed(name, real):
    def counting(*arguments, **named):
        global calls
        calls += name == call
        if name != call or calls != int(number):
            return real(*arguments, **named)
        if when == "midst":
            descriptor, data, at = arguments
            real(descriptor, data[: len(data) // 2], at)
        elif when == "after":
            real(*arguments, **named)
        os.kill(os.getpid(), signal.SIGKILL)
    return counting

files = KvFiles(Path(folder), "model", int(os.environ["BLOCK_BYTES"]))
files.acquire()
files.keep_key(os.environ["KEY"])
for name in ("open", "pwrite", "fsync", "replace", "unlink"):
    setattr(os, name, killed(name, getattr(os, name)))
if do == "key":
    files.keep_key(os.environ["KEY"][::-1])
elif do == "delete":
    files.delete(os.environ["NAME"])
else:
    hashes = os.environ["HASHES"]
    rows = np.load(os.environ["ROWS"])
    files.write(DiskFile(file_name("", hashes), 0, hashes), iter((rows[:1], rows[1:])))
"""
"""A process that kills itself at a call: before it, after it, or with half of its bytes written."""


def kill_at(directory: Path, do: str, point: tuple[str, int, str], rows: Path) -> None:
    """Let a process write file 2, delete file 1, or take another key, and be killed at a point of that."""
    call, number, when = point
    variables = {
        "BLOCK_BYTES": str(BLOCK_BYTES), "KEY": KEY, "NAME": described(1).name, "HASHES": described(2).hashes,
        "ROWS": str(rows), "PYTHONPATH": os.pathsep.join(sys.path),
    }  # fmt: skip
    command = [sys.executable, "-c", _KILLED, str(directory), do, call, str(number), when]
    assert subprocess.run(command, env=os.environ | variables, check=False).returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    "point",
    [
        pytest.param(("open", 1, "before"), id="before the file is made"),
        pytest.param(("open", 1, "after"), id="the file was made"),
        pytest.param(("pwrite", 1, "midst"), id="within a block"),
        pytest.param(("pwrite", 1, "after"), id="between pieces"),
        pytest.param(("pwrite", 2, "midst"), id="within the last blocks"),
        pytest.param(("pwrite", 2, "after"), id="before the header"),
        pytest.param(("pwrite", 3, "midst"), id="within the header"),
        pytest.param(("pwrite", 3, "after"), id="behind the header"),
        pytest.param(("fsync", 1, "after"), id="the file was synchronised"),
        pytest.param(("replace", 1, "before"), id="before it has its name"),
        pytest.param(("replace", 1, "after"), id="it has its name"),
    ],
)
def test_a_writer_that_is_killed_at_any_point_leaves_whole_files_only(
    point: tuple[str, int, str], tmp_path: Path
) -> None:
    directory, rows = tmp_path / "rank-0", tmp_path / "rows.npy"
    np.save(rows, content(2))
    files = opened(directory)
    files.write(described(1), iter([content(1)]))
    files.release()
    kill_at(directory, "write", point, rows)

    is_there = point == ("replace", 1, "after")
    is_partial = not is_there and point != ("open", 1, "before")
    assert len(list(directory.glob("*.partial"))) == is_partial
    files = opened(directory)  # the lock ended with the process
    whole = [1, 2] if is_there else [1]
    assert list(files.scan()) == [described(name) for name in whole]
    assert kept(files) == sorted(f"{described(name).name}.kv" for name in whole)
    files.write(described(2), iter([content(2)]))
    for name in (1, 2):
        assert np.array_equal(np.concatenate(list(files.read(described(name).name, 0, 3))), content(name))
    assert len(list(files.scan())) == 2
    files.release()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_process_that_is_killed_as_it_deletes_a_file_leaves_all_of_it_or_nothing(
    when: str, tmp_path: Path
) -> None:
    files = opened(tmp_path / "rank-0")
    files.write(described(1), iter([content(1)]))
    files.release()
    kill_at(tmp_path / "rank-0", "delete", ("unlink", 1, when), tmp_path)
    files = opened(tmp_path / "rank-0")
    assert list(files.scan()) == [described(1)] * (when == "before")
    files.release()


@pytest.mark.parametrize(
    "point",
    [
        pytest.param(("open", 1, "after"), id="the file was made"),
        pytest.param(("fsync", 1, "before"), id="it was written"),
        pytest.param(("replace", 1, "before"), id="before it has its name"),
        pytest.param(("replace", 1, "after"), id="it has its name"),
    ],
)
def test_a_process_that_is_killed_as_it_takes_another_key_leaves_the_old_one_or_the_new_one(
    point: tuple[str, int, str], tmp_path: Path
) -> None:
    files = opened(tmp_path / "rank-0")
    files.write(described(1), iter([content(1)]))
    files.release()
    kill_at(tmp_path / "rank-0", "key", point, tmp_path)
    is_new = point == ("replace", 1, "after")
    files = KvFiles(tmp_path / "rank-0", "model", BLOCK_BYTES)
    assert files.kept_key() == (KEY[::-1] if is_new else KEY)
    files.acquire()
    files.keep_key(files.kept_key())
    assert list(files.scan()) == [described(1)] * (not is_new), (
        "files of the old key are foreign to the new one"
    )
    assert not list(files.directory.glob("*.partial"))
    files.release()


def test_the_identity_of_weights_follows_their_content(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(100_000))
    found = [weights_identity(tmp_path), weights_identity(tmp_path)]
    times = weights.stat().st_mtime_ns
    weights.write_bytes(bytes(99_999) + b"x")
    os.utime(weights, ns=(times, times))
    found.append(weights_identity(tmp_path))
    (tmp_path / "config.json").write_text('{"a": 1}')
    found.append(weights_identity(tmp_path))
    assert found[0] == found[1]
    assert len(set(found)) == 3


# --- the thread that reads and writes them --------------------------------------------------------------


class Disk:
    """A rank's disk tier over host blocks with numbers in them, and what it reports."""

    def __init__(
        self,
        directory: Path,
        fault: str = "",
        clock: Callable[[], float] = perf_counter,
        *,
        piece_blocks: int = 0,
    ) -> None:
        pool = KVCache(
            num_layers=2, kv_heads=1, head_dim=4, num_blocks=4, block_tokens=2, tensors=2, device=host_device(torch.float32)
        )  # fmt: skip
        self.host = HostBlocks(pool, 12)
        for slot in range(12):
            self.host.put_rows(slot, np.full((1, self.host.block_bytes), slot, dtype=np.uint8))
        self.files = KvFiles(directory, "model", self.host.block_bytes, piece_blocks=piece_blocks)
        self.blocks = DiskBlocks(self.files, self.host, clock, fault, size_bytes=SIZE_BYTES)
        self.reports: list[DiskReport] = []
        self.begin()

    def begin(self, epoch: int = 0) -> None:
        self.blocks.begin_epoch(DiskReport(3, 0, epoch), KEY, self.reports.append)
        assert self.blocks.drain(30)

    def work(self, **work: object) -> list[DiskReport]:
        """Let it do some work, and return what it reports."""
        self.reports.clear()
        self.blocks.submit(HostTierWork(**work))  # type: ignore[arg-type]
        assert self.blocks.drain(30)
        return list(self.reports)

    def write(self, name: int, slot: int, extent: int = 0) -> list[DiskReport]:
        return self.work(writes=(WriteBlocks(described(name), extent, 0, ((slot, 2), (slot + 3, 1))),))

    def read(self, name: int, slot: int, extent: int = 9) -> list[DiskReport]:
        return self.work(reads=(ReadBlocks(described(name).name, 0, extent, ((slot, 1), (slot + 2, 2))),))

    def held(self, slot: int) -> int:
        (value,) = set(self.host.rows(slot, 1).ravel().tolist())
        return int(value)


@pytest.fixture(params=[0, 1], ids=["one piece", "several pieces"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    found = Disk(tmp_path / "rank-3", piece_blocks=request.param)
    yield found
    found.blocks.close()


@pytest.mark.parametrize("piece_blocks", [1, 100])
def test_host_blocks_go_to_files_and_back(
    disk: Disk, piece_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk.blocks, "_piece_blocks", piece_blocks)
    assert disk.reports == [DiskReport(3, found_all=True)]
    assert disk.write(1, 0) == [DiskReport(3, written=(described(1).name,))]
    (report,) = disk.read(1, 6)
    assert [extent for extent, _ in report.loaded] == [9]
    assert [disk.held(slot) for slot in (6, 7, 8, 9)] == [0, 7, 1, 3]
    disk.begin(epoch=1)
    assert disk.reports[-1] == DiskReport(3, 0, 1, found=(described(1),), found_all=True)
    assert disk.work(deletes=(described(1).name,)) == []
    assert kept(disk.files) == []


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(flip(-1), id="a bit of the last block"),
        pytest.param(flip(20), id="a bit of the header"),
        pytest.param(lambda path: path.unlink(), id="vanished"),
        pytest.param(lambda path: os.truncate(path, 10), id="cut off"),
    ],
)
def test_a_file_that_cannot_be_read_is_reported_and_places_nothing_wrong(
    disk: Disk, change: Callable[[Path], None]
) -> None:
    disk.write(1, 0)
    change(disk.files.directory / f"{described(1).name}.kv")
    assert disk.read(1, 6) == [DiskReport(3, not_loaded=(9,), damaged=(described(1).name,))]
    assert disk.held(9) == 9, "the damaged block is in no host block"
    assert disk.write(2, 0) == [DiskReport(3, written=(described(2).name,))], "the tier goes on"


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def broken(*_: object) -> None:
    raise OSError(errno.EIO, "Input/output error")


def test_a_broken_disk_costs_files_and_then_the_tier(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", broken)
    for name in range(1, MOST_FAILURES):
        assert disk.write(name, 0) == [DiskReport(3, not_written=(described(name).name,))]
    reports = disk.write(50, 0)
    assert reports[0] == DiskReport(3, not_written=(described(50).name,))
    assert "Input/output error" in reports[1].fault
    monkeypatch.undo()
    assert disk.write(51, 0) == [DiskReport(3, not_written=(described(51).name,))], "it stays off"
    assert disk.read(51, 6) == [DiskReport(3, not_loaded=(9,))]
    disk.begin(epoch=1)
    assert "Input/output error" in disk.reports[-1].fault
    assert kept(disk.files) == []


@pytest.mark.parametrize("fails", ["read", "write", "delete"])
def test_a_disk_on_which_one_kind_of_work_always_fails_costs_the_tier(
    fails: str, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.write(0, 0)
    monkeypatch.setattr(disk.files, "_open" if fails == "read" else fails, broken)
    kinds: dict[str, Callable[[], list[DiskReport]]] = {
        "read": lambda: disk.read(0, 6),
        "write": lambda: disk.write(1, 0),
        "delete": lambda: disk.work(deletes=(described(2).name,)),
    }
    for _ in range(MOST_FAILURES):
        assert not disk.blocks.fault
        for kind in sorted(kinds, key=lambda kind: kind == fails):
            kinds[kind]()
    assert f"{MOST_FAILURES} {fails}s in a row have failed" in disk.blocks.fault


@pytest.mark.parametrize("call", ["open", "pwrite", "fsync"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_lack_of_space_is_reported_as_such_is_logged_once_and_never_switches_the_tier_off(
    disk: Disk,
    call: str,
    number: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk.write(1, 0)
    real = getattr(os, call)

    def fails(*arguments: object) -> object:
        if call != "open" or str(arguments[0]).endswith(".partial"):
            raise OSError(number, "no space")
        return real(*arguments)

    monkeypatch.setattr(os, call, fails)
    for name in range(2, 3 * MOST_FAILURES):
        lost = described(name).name
        assert disk.write(name, 0) == [DiskReport(3, not_written=(lost,), no_space=(lost,))]
    assert len(disk.read(1, 6)[0].loaded) == 1, "what is there can be read"
    (warning,) = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    size = (disk.files.directory / f"{described(1).name}.kv").stat().st_size
    for part in (str(disk.files.directory), f"{size} bytes", f"asks for {SIZE_BYTES} bytes", "larger"):
        assert part in warning
    disk.begin(epoch=1)
    disk.write(2, 0)
    assert len([one for one in caplog.records if one.levelname == "WARNING"]) == 2, "once in each epoch"
    monkeypatch.undo()
    assert disk.write(2, 0) == [DiskReport(3, 0, 1, written=(described(2).name,))]


def test_a_disk_that_is_really_full_keeps_what_is_written_and_no_remains(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", 96 * 1024) as folder:
        disk = Disk(folder / "rank-3")
        try:
            names = range(1, 30)
            told = {name: disk.write(name, 0) for name in names}
            written = [name for name in names if told[name][0].written]
            assert 0 < len(written) < len(names)
            assert all(told[name][0].no_space for name in names if name not in written)
            assert kept(disk.files) == sorted(f"{described(name).name}.kv" for name in written)
            disk.begin(epoch=1)
            assert disk.reports[-1].fault == ""
        finally:
            disk.blocks.close()
        again = Disk(folder / "rank-3")  # as when a rank starts
        try:
            assert {file.name for one in again.reports for file in one.found} == {
                described(name).name for name in written
            }
            for name in written:
                assert [len(one.loaded) for one in again.read(name, 6)] == [1]
                assert [again.held(slot) for slot in (6, 8, 9)] == [0, 1, 3]
        finally:
            again.blocks.close()


def test_a_directory_that_cannot_be_used_switches_the_tier_off(tmp_path: Path) -> None:
    (tmp_path / "rank-3").write_text("no directory")
    disk = Disk(tmp_path / "rank-3")
    assert str(tmp_path / "rank-3") in disk.reports[-1].fault
    assert disk.write(1, 0) == [DiskReport(3, not_written=(described(1).name,))]
    disk.blocks.close()


class Hang:
    """Makes a call of `os` hang until it may go on: a disk that does not answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.began, self.goes_on = threading.Event(), threading.Event()
        real = getattr(os, name)

        def hanging(*arguments: object) -> object:
            self.began.set()
            self.goes_on.wait(60)
            return real(*arguments)

        monkeypatch.setattr(os, name, hanging)


def test_blocks_that_get_other_owners_reach_no_file_and_a_slow_disk_blocks_no_step(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang = Hang(monkeypatch, "pwrite")
    monkeypatch.setattr(disk.blocks, "_piece_blocks", 1)
    disk.reports.clear()
    writes = tuple(WriteBlocks(described(name), name, 0, ((0, 3),)) for name in (1, 2, 3))
    disk.blocks.submit(HostTierWork(writes=writes))
    assert hang.began.wait(60)
    disk.blocks.drop(
        [HostDrop(1, keep=1), HostDrop(2), HostDrop(3, keep=3)]
    )  # while the first one is written
    disk.host.put_rows(0, np.full((3, disk.host.block_bytes), 77, dtype=np.uint8))
    hang.goes_on.set()
    assert disk.blocks.drain(60)
    done = [(one.written, one.not_written) for one in disk.reports]
    names = [described(name).name for name in (1, 2, 3)]
    assert done == [((), (names[0],)), ((), (names[1],)), ((names[2],), ())]
    assert kept(disk.files) == [f"{names[2]}.kv"]


def test_a_read_does_not_wait_for_a_write(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    disk.write(1, 0)
    hang = Hang(monkeypatch, "pwrite")
    disk.blocks.submit(HostTierWork(writes=(WriteBlocks(described(2), 0, 0, ((0, 3),)),)))
    assert hang.began.wait(60)
    disk.reports.clear()
    disk.blocks.submit(HostTierWork(reads=(ReadBlocks(described(1).name, 0, 9, ((6, 3),)),)))
    end = threading.Event()
    while not disk.reports:
        assert not end.wait(0.01)
    assert [extent for extent, _ in disk.reports[0].loaded] == [9]
    hang.goes_on.set()
    assert disk.blocks.drain(60)
    assert disk.reports[1:] == [DiskReport(3, written=(described(2).name,))]


def test_reads_that_are_due_first_go_before_those_that_came_first(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.write(1, 0)
    hang = Hang(monkeypatch, "preadv")
    read = ReadBlocks(described(1).name, 0, 9, ((6, 3),))
    disk.blocks.submit(HostTierWork(reads=(read,)))
    assert hang.began.wait(60)
    disk.reports.clear()
    dues = {10: 60.0, 11: 2.0, 12: 60.0, 13: 1.0}
    disk.blocks.submit(
        HostTierWork(reads=tuple(replace(read, extent=extent, due=due) for extent, due in dues.items()))
    )
    hang.goes_on.set()
    assert disk.blocks.drain(60)
    assert [one.loaded[0][0] for one in disk.reports] == [9, 13, 11, 10, 12]


class LastBlock:
    """Calls `then` before the last block of file 1 is copied to host block 8, once the read of file 2 has begun."""

    def __init__(self, disk: Disk, monkeypatch: pytest.MonkeyPatch, then: Callable[[], None]) -> None:
        self._second, self._then = threading.Event(), then
        self.has_begun = False
        self._open, self._put_rows = disk.files._open, disk.host.put_rows
        monkeypatch.setattr(disk.files, "_open", self.open)
        monkeypatch.setattr(disk.host, "put_rows", self.put_rows)

    def open(self, name: str) -> object:
        if name == described(2).name:
            self._second.set()
        return self._open(name)

    def put_rows(self, slot: int, rows: Rows) -> None:
        if slot + len(rows) == 9 and not self.has_begun:
            self.has_begun = self._second.wait(60)
            self._then()
        self._put_rows(slot, rows)


def reads_of(*names: int) -> tuple[ReadBlocks, ...]:
    """Return reads of files into host blocks 6 to 8, for the extents 9, 10 and so on, all due at the same time."""
    return tuple(
        ReadBlocks(described(name).name, 0, 9 + number, ((6, 3),), due=5.0)
        for number, name in enumerate(names)
    )


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_the_next_file_is_read_before_the_last_block_of_a_file_is_copied(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.write(1, 0)
    disk.write(2, 1)
    before = descriptors()
    last = LastBlock(disk, monkeypatch, lambda: None)
    found = disk.work(reads=reads_of(1, 2))
    assert last.has_begun
    assert [one.loaded[0][0] for one in found] == [9, 10]
    assert [disk.held(slot) for slot in (6, 7, 8)] == [1, 2, 4]
    assert descriptors() == before


def test_a_read_that_has_begun_waits_for_one_that_is_due_before_it(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.write(1, 0)
    disk.write(2, 1)
    before = descriptors()
    urgent = replace(*reads_of(1), extent=20, due=1.0)
    last = LastBlock(disk, monkeypatch, lambda: disk.blocks.submit(HostTierWork(reads=(urgent,))))
    found = disk.work(reads=reads_of(1, 2))
    assert last.has_begun
    assert [one.loaded[0][0] for one in found] == [9, 20, 10]
    assert [disk.held(slot) for slot in (6, 7, 8)] == [1, 2, 4]
    assert descriptors() == before


def test_a_read_that_has_begun_ends_with_its_epoch(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    disk.write(1, 0)
    disk.write(2, 1)
    before = descriptors()
    last = LastBlock(disk, monkeypatch, disk.blocks.end_epoch)
    assert disk.work(reads=reads_of(1, 2)) == []
    assert last.has_begun
    disk.begin(epoch=1)
    assert [one.loaded[0][0] for one in disk.work(reads=reads_of(1))] == [9]
    assert [disk.held(slot) for slot in (6, 7, 8)] == [0, 1, 3]
    assert descriptors() == before


def test_closing_leaves_behind_a_read_that_hangs_ahead_of_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(tmp_path / "rank-3")
    disk.write(1, 0)
    disk.write(2, 1)
    before = descriptors()
    last = LastBlock(disk, monkeypatch, disk.blocks.end_epoch)
    goes_on, open_file = threading.Event(), disk.files._open

    def hanging(name: str) -> object:
        file = open_file(name)
        if name == described(2).name:
            goes_on.wait(60)
        return file

    monkeypatch.setattr(disk.files, "_open", hanging)
    closing = threading.Thread(target=disk.blocks.close, daemon=True)
    try:
        assert disk.work(reads=reads_of(1, 2)) == []
        assert last.has_begun
        closing.start()
        closing.join(30)
        assert not closing.is_alive()
    finally:
        goes_on.set()
    for thread in disk.blocks._threads:
        thread.join(30)
    assert descriptors() == before


def test_an_epoch_that_ends_calls_off_reads(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    disk.write(1, 0)
    hang = Hang(monkeypatch, "preadv")
    disk.blocks.submit(HostTierWork(reads=(ReadBlocks(described(1).name, 0, 9, ((6, 3),)),)))
    assert hang.began.wait(60)
    disk.reports.clear()
    disk.blocks.end_epoch()
    hang.goes_on.set()
    assert disk.blocks.drain(60)
    assert disk.reports == []
    assert [disk.held(slot) for slot in (6, 7, 8)] == [6, 7, 8]


@pytest.mark.parametrize(("work", "piece_blocks"), [("read", 0), ("read", 1), ("write", 0)])
def test_a_disk_that_hangs_switches_the_tier_off_and_nothing_waits_for_it(
    work: str, piece_blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    disk = Disk(tmp_path / "rank-3", clock=lambda: now, piece_blocks=piece_blocks)
    disk.write(1, 0)
    hang = Hang(monkeypatch, "preadv" if work == "read" else "pwrite")
    read = ReadBlocks(described(1).name, 0, 9, ((6, 3),))
    write = WriteBlocks(described(2), 0, 0, ((0, 2), (3, 1)))
    try:
        disk.reports.clear()
        if work == "read":
            disk.blocks.submit(HostTierWork(reads=(read,)))
        else:
            disk.blocks.submit(HostTierWork(writes=(write,)))
        assert hang.began.wait(60)
        disk.blocks.submit(HostTierWork(reads=(replace(read, extent=10),), writes=(write,)))
        end = threading.Event()
        while not disk.reports:  # what does not hang goes on
            assert not end.wait(0.01)
        assert [bool(one.loaded or one.written) for one in disk.reports] == [True]
        now = 31.0
        lost = {9, 10} if work == "read" else set()
        unwritten = [] if work == "read" else [(described(2).name,)] * 2
        while len(disk.reports) < 1 + 2 * 2:
            assert not end.wait(0.01)
        assert {one.not_loaded[0] for one in disk.reports if one.not_loaded} == lost
        assert [one.not_written for one in disk.reports if one.not_written] == unwritten
        assert all("30 s" in one.fault for one in disk.reports if one.fault)
        disk.blocks.submit(HostTierWork(reads=(replace(read, extent=11),)))
        while disk.reports[-1].not_loaded != (11,):
            assert not end.wait(0.01)
        told, before = list(disk.reports), disk.host.rows(0, 12)
        hang.goes_on.set()
        assert disk.blocks.drain(60)
        assert disk.reports == told, "what was called off is reported once"
        assert (disk.host.rows(0, 12) == before).all(), "its host blocks may have other owners"
    finally:
        hang.goes_on.set()
        disk.blocks.close()


def test_a_disk_that_hangs_while_ranks_look_through_it_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    disk = Disk(tmp_path / "rank-3", clock=lambda: now)
    disk.write(1, 0)
    hang = Hang(monkeypatch, "pread")
    disk.reports.clear()
    try:
        disk.blocks.begin_epoch(DiskReport(3, 0, 1), KEY, disk.reports.append)
        assert hang.began.wait(60)
        now = 31.0
        end = threading.Event()
        while not disk.reports:
            assert not end.wait(0.01)
        hang.goes_on.set()
        assert disk.blocks.drain(60)
        assert ["30 s" in one.fault for one in disk.reports] == [True]
        assert not any(one.found_all for one in disk.reports)
    finally:
        hang.goes_on.set()
        disk.blocks.close()


def test_a_disk_that_hangs_as_an_epoch_ends_is_off_in_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    disk = Disk(tmp_path / "rank-3", clock=lambda: now)
    disk.write(1, 0)
    hang = Hang(monkeypatch, "preadv")
    try:
        disk.blocks.submit(HostTierWork(reads=(ReadBlocks(described(1).name, 0, 9, ((6, 3),)),)))
        assert hang.began.wait(60)
        disk.reports.clear()
        disk.blocks.begin_epoch(DiskReport(3, 0, 1), KEY, disk.reports.append)
        end = threading.Event()
        while not disk.reports:
            assert not end.wait(0.01)
        assert disk.reports == [DiskReport(3, 0, 1, found=(described(1),), found_all=True)]
        now = 31.0
        while not any(one.fault for one in disk.reports):
            assert not end.wait(0.01)
        assert {one.epoch for one in disk.reports} == {1}
    finally:
        hang.goes_on.set()
        disk.blocks.close()


def test_an_error_of_ours_leaves_no_request_waiting(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    disk.write(1, 0)
    monkeypatch.setattr(disk.host, "put_rows", full_of_bugs)
    fault, failed = disk.read(1, 6)
    assert "unexpected error" in fault.fault
    assert failed == DiskReport(3, not_loaded=(9,))


def full_of_bugs(*_: object) -> None:
    raise AssertionError("a bug")
