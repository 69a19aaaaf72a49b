"""The threads of a rank's store: real files and a real S3-compatible service, and everything that goes wrong with them."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cluster.binaries import CannotBuild
from medha.api.kv_cache_spec import StoreSpec
from medha.cost.tier_seconds import PARALLEL_READS
from medha.kv.lane_replay import HostTierWork, ReadBlocks, StoreBlocks
from medha.wire.messages import DiskFile, DiskReport, HostDrop, StoreLookup
from medha_worker.model.host_blocks import HostBlocks
from medha_worker.model.kv_files import FileDamaged
from medha_worker.rank.kv_objects import KvObjects, ObjectMissing, StoreFailed
from medha_worker.rank.store_threads import StoreThreads, opened_within
from object_store import ACCESS_KEY, BUCKET, SECRET_KEY, object_store

from .store_rank import BLOCKS, IDENTITY, KEY, SLOTS, Rank, content_of, fill, opened, small_host

pytest.importorskip("obstore")

pytestmark = pytest.mark.timeout(1200)  # the first one may have to build the service


@pytest.fixture
def host() -> HostBlocks:
    return small_host()


@pytest.fixture(params=["files", pytest.param("S3", marks=pytest.mark.long)])
def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[StoreSpec]:
    if request.param == "files":
        yield StoreSpec(url=f"file://{tmp_path}/shared")
        return
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    try:
        with object_store(tmp_path / "s3", tmp_path / "s3.log") as service:
            yield StoreSpec(url=f"s3://{BUCKET}/prefix", endpoint=service.endpoint)
    except CannotBuild as error:
        pytest.skip(str(error))


def files_of(place: StoreSpec, tmp_path: Path) -> list[Path]:
    root = tmp_path / ("shared" if place.is_files else "s3")
    return sorted(root.rglob("*.kv"))


def test_another_replica_finds_and_reads_what_one_has_written(
    place: StoreSpec, host: HostBlocks, tmp_path: Path
) -> None:
    fill(host)
    with closing(Rank(opened(place, host), host)) as writer:
        writer.look_up(0, 1)
        assert [one.looked_up for one in writer.told()] == [((7, 0),)]
        writer.write(0)
        writer.write(1, ((8, 4),))
        told = writer.told()
        assert sorted(name for one in told for name in one.stored) == sorted(
            content_of(number).name for number in (0, 1)
        )
        assert not any(one.found_stored for one in told)
        assert len(files_of(place, tmp_path)) == 2
        writer.write(0)
        there = (content_of(0).name,)
        assert [(one.stored, one.found_stored) for one in writer.told()] == [(there, there)]
    with closing(Rank(opened(place, host), host)) as reader:
        reader.look_up(0, 1, 2, 3)
        assert [one.looked_up for one in reader.told()] == [((7, 2),)]
        reader.read(0, ((16, 1), (20, 3)))
        reader.read(1, ((24, 2),), start=1)
        told = reader.told()
        assert sorted(extent for one in told for extent, _ in one.loaded) == [100, 101]
        assert (host.rows(16, 1) == host.rows(0, 1)).all()
        assert (host.rows(20, 3) == np.concatenate([host.rows(1, 1), host.rows(4, 2)])).all()
        assert (host.rows(24, 2) == host.rows(9, 2)).all()


def append_key(keys: list[str], objects: KvObjects) -> None:
    keys.append(objects.shared_key())


def test_replicas_find_one_key_whoever_is_first(place: StoreSpec, host: HostBlocks) -> None:
    keys: list[str] = []
    stores = [opened(place, host, identity=str(number)) for number in range(6)]
    threads = [threading.Thread(target=append_key, args=(keys, one)) for one in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(keys) == 6
    assert len(set(keys)) == 1
    assert len(bytes.fromhex(keys[0])) == 32


def test_a_key_that_another_replica_is_making_is_waited_for(
    place: StoreSpec, host: HostBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service may refuse to make an object whose first upload has not ended, although nobody can read it yet."""
    from obstore.exceptions import AlreadyExistsError

    key = opened(place, host).shared_key()
    objects, calls = opened(place, host), []

    def get(path: str) -> bytes:
        calls.append("get")
        if len(calls) < 8:
            raise ObjectMissing(path)
        return key.encode()

    def put(*_: object, **__: object) -> None:
        calls.append("put")
        raise AlreadyExistsError("being made")

    monkeypatch.setattr(objects, "_get", get)
    monkeypatch.setattr(objects, "_put", put)
    assert objects.shared_key() == key
    assert calls == ["get", "put"] * 4 + ["get"]


@pytest.mark.parametrize(("identity", "key"), [("another grid", KEY), (IDENTITY, "33" * 32)])
def test_objects_of_another_model_grid_or_key_are_not_found(
    identity: str, key: str, place: StoreSpec, host: HostBlocks
) -> None:
    opened(place, host).write(content_of(0), host.rows(0, BLOCKS))
    other = opened(place, host, identity, key)
    assert not other.has(content_of(0).name)
    with pytest.raises(ObjectMissing):
        other.read(content_of(0).name, 0, 1)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "foreign", "moved", "gone", "header"])
def test_a_damaged_object_is_a_miss_and_is_written_again(
    damage: str, place: StoreSpec, host: HostBlocks, tmp_path: Path
) -> None:
    fill(host)
    with closing(Rank(opened(place, host), host)) as rank:
        rank.write(0)
        rank.told()
        (path,) = files_of(place, tmp_path)
        data = path.read_bytes()
        match damage:
            case "truncated":
                path.write_bytes(data[:-1])
            case "flipped":
                path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
            case "header":
                path.write_bytes(data[:40] + bytes([data[40] ^ 1]) + data[41:])
            case "empty":
                path.write_bytes(b"")
            case "foreign":
                path.write_bytes(b"what somebody else has put here")
            case "moved":  # a sound object of other blocks
                rank.write(1)
                rank.told()
                (other,) = [one for one in files_of(place, tmp_path) if one != path]
                path.write_bytes(other.read_bytes())
            case "gone":
                path.unlink()
        before = host.rows(16, 4)
        rank.read(0, ((16, 4),))
        (told,) = rank.told()
        assert told.not_loaded == (100,)
        assert told.store_fault == "", "the store itself is sound"
        assert (host.rows(16, 4) == before).all()
        rank.write(0)
        assert [one.stored for one in rank.told()] == [(content_of(0).name,)]
        rank.read(0, ((16, 4),))
        assert [len(one.loaded) for one in rank.told()] == [1]
        assert (host.rows(16, 2) == host.rows(0, 2)).all()


def test_writes_are_called_off_once_their_blocks_have_other_owners(host: HostBlocks, tmp_path: Path) -> None:
    place = StoreSpec(url=f"file://{tmp_path}/shared")
    entered, may_go_on = threading.Event(), threading.Event()

    class Slow(KvObjects):
        def has(self, name: str) -> bool:
            entered.set()
            assert may_go_on.wait(60)
            return super().has(name)

    slow = Slow(place, IDENTITY, host.block_bytes)
    with closing(Rank(slow, host)) as rank:
        rank.write(0)
        assert entered.wait(60)
        rank.threads.drop([HostDrop(0, keep=BLOCKS - 1)])
        may_go_on.set()
        assert [one.not_stored for one in rank.told()] == [(content_of(0).name,)]
        assert files_of(place, tmp_path) == []


@pytest.mark.long
def test_a_store_that_refuses_credentials_is_a_fault_that_names_no_secret(
    tmp_path: Path, host: HostBlocks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-secret")
    try:
        with object_store(tmp_path / "s3", tmp_path / "s3.log") as service:
            place = StoreSpec(url=f"s3://{BUCKET}", endpoint=service.endpoint)
            with closing(Rank(opened(place, host), host)) as rank:
                rank.write(0)
                (told,) = rank.told()
            with pytest.raises(StoreFailed) as failed:
                opened_within(lambda: opened(place, host), 60)
    except CannotBuild as error:
        pytest.skip(str(error))
    assert told.not_stored == (content_of(0).name,)
    for text in (told.store_fault, str(failed.value), caplog.text):
        assert "not-the-secret" not in text
    assert told.store_fault


def test_a_folder_that_cannot_be_made_is_a_failure_of_the_store_and_no_missing_object(
    host: HostBlocks,
) -> None:
    """The kernel answers a new folder in /proc with ENOENT."""
    with pytest.raises(StoreFailed, match=r"FileNotFoundError: .*/proc/medha"):
        opened_within(lambda: opened(StoreSpec(url="file:///proc/medha"), host), 60)


def test_after_an_error_work_fails_at_once_and_later_the_store_is_used_again(
    host: HostBlocks, tmp_path: Path
) -> None:
    place = StoreSpec(url=f"file://{tmp_path}/shared")
    asked: list[str] = []
    fails = True

    class Failing(KvObjects):
        def has(self, name: str) -> bool:
            asked.append(name)
            if fails:
                raise StoreFailed("it answers 500")
            return super().has(name)

    now = 100.0
    reports: list[DiskReport] = []
    threads = StoreThreads(Failing(place, IDENTITY, host.block_bytes), host, lambda: now, rest_seconds=5.0)
    threads.begin_epoch(DiskReport(0, 0, 1), KEY, reports.append)
    try:
        for number in range(3):
            threads.look_up(StoreLookup(number, (content_of(number).name,), 0, 1))
            assert threads.drain(60)
        assert [(one.looked_up, one.store_fault) for one in reports] == [
            (((number, 0),), "it answers 500") for number in range(3)
        ]
        assert asked == [content_of(0).name]
        fails, now = False, 106.0
        threads.look_up(StoreLookup(3, (content_of(3).name,), 0, 1))
        assert threads.drain(60)
        assert reports[-1].store_fault == ""
    finally:
        threads.close()


def test_work_that_hangs_is_given_up_and_nothing_waits_for_it(host: HostBlocks, tmp_path: Path) -> None:
    place = StoreSpec(url=f"file://{tmp_path}/shared")
    entered, may_go_on = threading.Semaphore(0), threading.Event()

    class Hanging(KvObjects):
        def read(self, name: str, start: int, count: int) -> np.ndarray:
            entered.release()
            may_go_on.wait(60)
            return np.full((count, host.block_bytes), 255, dtype=np.uint8)

    reports: list[DiskReport] = []
    now = 0.0
    threads = StoreThreads(Hanging(place, IDENTITY, host.block_bytes), host, lambda: now, hung_seconds=30.0)
    threads.begin_epoch(DiskReport(0, 0, 1), KEY, reports.append)
    told = threading.Event()

    def wait_for(extents: int) -> list[int]:
        while sum(len(one.not_loaded) for one in reports) < extents:
            assert not told.wait(0.01)
        return sorted(extent for one in reports for extent in one.not_loaded)

    try:
        for extent in range(6):  # more than there are threads
            read = ReadBlocks(content_of(0).name, 0, extent, ((0, 1),), is_stored=True)
            threads.submit(HostTierWork(reads=(read,)))
        for _ in range(4):
            assert entered.acquire(timeout=60)
        now = 31.0
        assert wait_for(6) == list(range(6)), "also those that waited for a thread"
        assert all("30 s" in one.store_fault for one in reports)
        before = host.rows(0, 1)
        may_go_on.set()
        assert threads.drain(60)
        assert (host.rows(0, 1) == before).all(), "its host block may have another owner"
        assert not [one for one in reports if one.loaded]
    finally:
        may_go_on.set()
        threads.close()


def test_questions_go_before_reads_and_what_is_due_first_before_what_came_first(
    host: HostBlocks, tmp_path: Path
) -> None:
    """All threads hang, and then one of them goes on alone, so that turns are taken one after the other."""
    began, goes_on, all_go_on = threading.Semaphore(0), threading.Semaphore(0), threading.Event()
    turns: list[str] = []

    class Slow(KvObjects):
        def has(self, name: str) -> bool:
            turns.append("question")
            return False

        def read(self, name: str, start: int, count: int) -> np.ndarray:
            if name == "first":
                began.release()
                while not (goes_on.acquire(timeout=0.01) or all_go_on.is_set()):
                    pass
            else:
                turns.append(name)
            raise ObjectMissing(name)

    slow = Slow(StoreSpec(url=f"file://{tmp_path}/shared"), IDENTITY, host.block_bytes)
    threads = StoreThreads(slow, host, time.monotonic)
    threads.begin_epoch(DiskReport(0, 0, 1), KEY, lambda _: None)
    read = ReadBlocks("first", 0, 0, ((0, 1),), is_stored=True)
    try:
        threads.submit(HostTierWork(reads=(read,) * PARALLEL_READS))
        for _ in range(PARALLEL_READS):
            assert began.acquire(timeout=60)
        dues = {"a": 60.0, "b": 2.0, "c": 60.0, "d": 1.0}
        reads = tuple(replace(read, file=name, due=due) for name, due in dues.items())
        threads.submit(HostTierWork(reads=reads))
        threads.look_up(StoreLookup(1, (content_of(0).name,), 0, 1))
        goes_on.release()
        end = time.monotonic() + 60
        while len(turns) < 5:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert turns == ["question", "d", "b", "a", "c"]
    finally:
        all_go_on.set()
        threads.close()


def test_a_write_that_hangs_is_given_up_even_if_its_blocks_have_other_owners(
    host: HostBlocks, tmp_path: Path
) -> None:
    entered, told, may_go_on = threading.Event(), threading.Event(), threading.Event()

    class Hanging(KvObjects):
        def write(self, content: DiskFile, rows: np.ndarray) -> None:
            entered.set()
            may_go_on.wait(60)

    reports: list[DiskReport] = []

    def send(report: DiskReport) -> None:
        reports.append(report)
        told.set()

    now = 0.0
    hanging = Hanging(StoreSpec(url=f"file://{tmp_path}/shared"), IDENTITY, host.block_bytes)
    threads = StoreThreads(hanging, host, lambda: now, hung_seconds=30.0)
    threads.begin_epoch(DiskReport(0, 0, 1), KEY, send)
    try:
        threads.submit(HostTierWork(stores=(StoreBlocks(content_of(0), ((0, BLOCKS),), SLOTS),)))
        assert entered.wait(60)
        threads.drop([HostDrop(0, keep=0)])
        now = 31.0
        assert told.wait(60)
        assert [one.not_stored for one in reports] == [(content_of(0).name,)]
        may_go_on.set()
        assert threads.drain(60)
        assert len(reports) == 1
    finally:
        may_go_on.set()
        threads.close()


def test_the_end_of_a_rank_does_not_wait_for_a_store_that_hangs(
    host: HostBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    with socket.socket() as silent:  # it takes connections, and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        place = StoreSpec(url="s3://bucket", endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(StoreFailed, match="has not answered"):
            opened_within(lambda: KvObjects(place, IDENTITY, host.block_bytes), 0.2)
        rank = Rank(opened(place, host), host)
        rank.look_up(0)
        began = [thread for thread in threading.enumerate() if thread.name.startswith("medha-store")]
        assert len(began) >= 7
        rank.close()
        assert rank.reports == []
        assert all(thread.daemon for thread in began)


def test_an_error_of_ours_while_a_store_is_opened_is_not_taken_for_silence() -> None:
    def broken() -> KvObjects:
        raise ZeroDivisionError

    with pytest.raises(StoreFailed, match="an unexpected ZeroDivisionError"):
        opened_within(broken, 60)


def test_nothing_is_left_of_threads_and_handles(host: HostBlocks, tmp_path: Path) -> None:
    place = StoreSpec(url=f"file://{tmp_path}/shared")
    threads = {one for one in threading.enumerate() if one.name.startswith("medha-store")}

    def live(number: int) -> None:
        with closing(Rank(opened(place, host), host)) as rank:
            rank.write(number)
            rank.told()
            rank.read(number, ((16, 4),))
            rank.told()

    live(0)  # what the library keeps for the process is opened once
    handles = len(os.listdir("/proc/self/fd"))
    for number in range(1, 5):
        live(number)
    assert len(os.listdir("/proc/self/fd")) <= handles
    assert {one for one in threading.enumerate() if one.name.startswith("medha-store")} <= threads


def test_a_lookup_of_an_epoch_that_begins_later_is_answered_then(host: HostBlocks, tmp_path: Path) -> None:
    place = StoreSpec(url=f"file://{tmp_path}/shared")
    with closing(Rank(opened(place, host), host)) as rank:
        rank.threads.look_up(StoreLookup(1, (content_of(0).name,), 0, 2))
        rank.threads.look_up(StoreLookup(2, (content_of(0).name,), 0, 0))
        assert rank.told() == []
        rank.threads.begin_epoch(DiskReport(0, 0, 2), KEY, rank.reports.append)
        assert [(one.epoch, one.looked_up) for one in rank.told()] == [(2, ((1, 0),))]


def test_a_block_that_an_object_lacks_is_no_block_of_it(host: HostBlocks, tmp_path: Path) -> None:
    objects = opened(StoreSpec(url=f"file://{tmp_path}/shared"), host)
    objects.write(content_of(0), host.rows(0, BLOCKS))
    with pytest.raises(FileDamaged, match="4 blocks, and 3\\+2 are asked for"):
        objects.read(content_of(0).name, 3, 2)
