"""A rank's store behind a network and disks that fail: no wrong byte reaches a host block, and nothing waits for long."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from cluster.binaries import CannotBuild
from faulty_proxy import Fault, FaultyProxy, faulty_proxy
from held_points import WRITE_POINTS, HeldPoints, held_writes
from medha.api.kv_cache_spec import StoreSpec
from medha_worker.rank import kv_objects
from medha_worker.rank.kv_objects import KvObjects, StoreFailed
from medha_worker.rank.store_threads import REMAINS_SECONDS, opened_within
from object_store import ACCESS_KEY, BUCKET, SECRET_KEY, ObjectStore, object_store
from small_disk import small_disk

from .store_rank import BLOCKS, SLOTS, Rank, content_of, fill, opened, small_host

pytest.importorskip("obstore")

pytestmark = pytest.mark.timeout(1200)  # the first one may have to build the service

FAULTS: list[Fault] = [
    "answers 500", "hangs", "resets", "cuts answers", "stalls answers", "stalls questions"
]  # fmt: skip


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    folder = tmp_path_factory.mktemp("s3")
    try:
        with object_store(folder / "s3", folder / "s3.log") as service:
            yield service
    except CannotBuild as error:
        pytest.skip(str(error))


@pytest.fixture
def proxy(service: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setattr(kv_objects, "_REQUEST_SECONDS", 0.4)
    monkeypatch.setattr(kv_objects, "_RETRY_SECONDS", 0.1)
    with faulty_proxy(service.endpoint) as proxy:
        yield proxy


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_a_service_that_fails_costs_time_only(
    fault: Fault, proxy: FaultyProxy, service: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    host = small_host()
    fill(host)
    place = StoreSpec(url=f"s3://{BUCKET}/{fault.replace(' ', '-')}", endpoint=proxy.endpoint)
    with closing(Rank(opened(place, host), host, rest_seconds=0.0)) as rank:
        rank.write(0)
        assert [one.stored for one in rank.told()] == [(content_of(0).name,)]
        before, objects = host.rows(0, 32).copy(), service.objects
        proxy.fault = fault
        caplog.clear()
        told = []
        for work in (lambda: rank.read(0, ((16, 4),)), lambda: rank.write(1), lambda: rank.look_up(0)):
            work()
            (one,) = rank.told()
            told.append(one)
        read, write, look = told
        short_questions_pass = fault in ("cuts answers", "stalls answers", "stalls questions")
        if fault != "stalls questions":
            assert read.not_loaded == (100,)
            assert read.store_fault
            assert (host.rows(0, 32) == before).all(), "no byte of it is in a host block"
        if fault in ("cuts answers", "stalls answers"):
            assert write.stored == (content_of(1).name,)
        else:
            assert write.not_stored == (content_of(1).name,)
            assert write.store_fault
            assert service.objects == objects, "half an object is none"
        assert look.looked_up == ((7, int(short_questions_pass)),)
        assert bool(look.store_fault) == (not short_questions_pass)
        assert "the store has failed" in caplog.text
        assert SECRET_KEY not in caplog.text
        proxy.fault = ""
        rank.look_up(0, 1)
        rank.write(1)
        rank.read(0, ((16, 4),))
        told = rank.told()
        assert not [one.store_fault for one in told if one.store_fault], "it is used again"
        assert [one.stored for one in told if one.stored] == [(content_of(1).name,)]
        assert sum(len(one.loaded) for one in told) == 1
        assert (host.rows(16, 2) == host.rows(0, 2)).all()
    files = {path for path in (service.directory / BUCKET).rglob("*") if path.is_file()}
    assert files == set(service.objects), "the service has no remains of what failed"


@pytest.mark.long
def test_an_object_whose_write_was_killed_is_written_again(proxy: FaultyProxy, service: ObjectStore) -> None:
    prefix = "killed"
    proxy.fault = "stalls questions"
    writer = subprocess.Popen(
        [sys.executable, "-c", _WRITER, f"url=s3://{BUCKET}/{prefix}", f"endpoint={proxy.endpoint}"],
        cwd=Path(__file__).parents[3],
    )
    try:
        assert proxy.asked.acquire(timeout=60)  # HEAD
        assert proxy.asked.acquire(timeout=60)  # the beginning of PUT
    finally:
        writer.kill()
        writer.wait()
    proxy.fault = ""
    host = small_host()
    fill(host)
    place = StoreSpec(url=f"s3://{BUCKET}/{prefix}", endpoint=proxy.endpoint)
    with closing(Rank(opened(place, host), host)) as rank:
        rank.look_up(0)
        assert [one.looked_up for one in rank.told()] == [((7, 0),)]
        rank.write(0)
        rank.told()
        rank.read(0, ((16, 4),))
        assert [len(one.loaded) for one in rank.told()] == [1]
    assert len([path for path in service.objects if prefix in path.parts]) == 1


_WRITER = """
import sys
from contextlib import closing
from medha.api.kv_cache_spec import StoreSpec
from tests.worker.rank.store_rank import Rank, fill, opened, small_host
host = small_host()
fill(host)
place = StoreSpec(**dict(one.split("=", 1) for one in sys.argv[1:]))
with closing(Rank(opened(place, host), host)) as rank:
    for number in range(10**6):
        rank.write(number)
        rank.told()
        print(number, flush=True)
"""


@pytest.mark.parametrize(
    "kills", [pytest.param((5,), id="once"), pytest.param((1, 7, 20, 50), id="often", marks=pytest.mark.long)]
)
def test_a_process_that_is_killed_while_it_writes_leaves_whole_files_only(
    kills: tuple[int, ...], tmp_path: Path
) -> None:
    place = StoreSpec(url=f"file://{tmp_path}/shared")
    host = small_host()
    fill(host)
    expected = np.concatenate([host.rows(slot, count) for slot, count in SLOTS])
    for writes in kills:
        writer = subprocess.Popen(
            [sys.executable, "-c", _WRITER, f"url={place.url}"],
            cwd=Path(__file__).parents[3], stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert writer.stdout is not None
        for _ in range(writes):
            assert writer.stdout.readline()
        os.kill(writer.pid, signal.SIGKILL)  # in the midst of the next ones
        writer.wait()
        writer.stdout.close()
    objects = opened(place, host)
    there = [number for number in range(10_000) if objects.has(content_of(number).name)]
    assert len(there) >= max(kills)
    for number in there:
        assert (objects.read(content_of(number).name, 0, BLOCKS) == expected).all()
    names = {content_of(number).name for number in there}
    files = [path.name for path in (tmp_path / "shared").rglob("*") if path.is_file()]
    others = [name for name in files if name.removesuffix(".kv") not in names]
    assert all(re.fullmatch(r"[0-9a-f]+\.kv#\d+", name) for name in others), (
        "what the manual says how to delete"
    )


@contextmanager
def held_writer(place: StoreSpec, points: HeldPoints, point: str) -> Iterator[subprocess.Popen[str]]:
    """Run a process that writes objects, and that has come to a point of a write; kill it at the end."""
    writer = subprocess.Popen(
        [sys.executable, "-c", _WRITER, f"url={place.url}"],
        cwd=Path(__file__).parents[3], stdout=subprocess.PIPE, text=True, env=os.environ | points.environment,
    )  # fmt: skip
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline()
        points.hold(point)
        points.wait(point)
        yield writer
    finally:
        writer.kill()
        writer.communicate()


def unfinished(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if "#" in path.name)


def make_old(paths: Iterable[Path]) -> None:
    """Let files look as if nobody had changed them for longer than the writer of one may take."""
    for path in paths:
        long_ago = path.stat().st_mtime - REMAINS_SECONDS - 60
        os.utime(path, (long_ago, long_ago))


@pytest.mark.parametrize(
    "point",
    [point if point == "half" else pytest.param(point, marks=pytest.mark.long) for point in WRITE_POINTS],
)
def test_what_a_writer_leaves_that_is_killed_at_any_point_is_no_object_and_is_deleted_once_it_is_old(
    point: str, tmp_path: Path
) -> None:
    folder, points = tmp_path / "shared", held_writes(tmp_path / "held")
    place, host = StoreSpec(url=f"file://{folder}"), small_host()
    fill(host)
    with held_writer(place, points, point):
        pass
    points.release(point)
    left = unfinished(folder)
    assert len(left) == (point != "renamed")
    objects = opened(place, host)
    there = [number for number in range(1000) if objects.has(content_of(number).name)]
    assert {content_of(number).name for number in there} == {path.stem for path in folder.rglob("*.kv")}
    expected = np.concatenate([host.rows(slot, count) for slot, count in SLOTS])
    for number in there:
        assert (objects.read(content_of(number).name, 0, BLOCKS) == expected).all()

    assert objects.delete_remains(REMAINS_SECONDS) == 0, "its writer may be another replica's, and alive"
    assert unfinished(folder) == left
    others = [
        path.with_name(name)
        for path in folder.rglob("*.kv")
        for name in (f"{path.name}#1.bak", f"{path.stem}.kv#", f"{path.stem}#1", "notes#1")
    ]
    others += [folder / "hash-key#a", folder / ("ab" * 16) / "11" / f"{content_of(0).name}.kv#1"]
    others[-1].parent.mkdir(parents=True)
    for path in (folder / "hash-key#1", *others):
        path.write_bytes(b"")
    make_old((folder / "hash-key#1", *left, *others))
    with closing(Rank(opened(place, host), host)) as rank:
        rank.write(len(there))
        assert [one.stored for one in rank.told()] == [(content_of(len(there)).name,)]
        end = time.monotonic() + 60
        while set(unfinished(folder)) != set(others):
            assert time.monotonic() < end
            time.sleep(0.01)


def test_a_writer_that_lives_though_its_file_was_taken_for_remains_harms_nothing(
    tmp_path: Path,
) -> None:
    folder, points = tmp_path / "shared", held_writes(tmp_path / "held")
    place, host = StoreSpec(url=f"file://{folder}"), small_host()
    fill(host)
    objects = opened(place, host)
    with held_writer(place, points, "whole") as writer:
        (mine,) = unfinished(folder)
        make_old([mine])
        assert objects.delete_remains(REMAINS_SECONDS) == 1
        points.release("whole")
        assert writer.stdout is not None
        for _ in range(3):
            assert writer.stdout.readline(), "it goes on"
        name = mine.name.partition(".")[0]
        assert not objects.has(name)
    with closing(Rank(opened(place, host), host)) as rank:
        number = next(number for number in range(1000) if content_of(number).name == name)
        rank.write(number)
        assert [one.stored for one in rank.told()] == [(name,)]


def test_a_folder_that_cannot_be_read_keeps_its_remains_and_costs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> int:
        raise PermissionError("not for you")

    monkeypatch.setattr(KvObjects, "delete_remains", refused)
    host = small_host()
    fill(host)
    with closing(Rank(opened(StoreSpec(url=f"file://{tmp_path}/shared"), host), host)) as rank:
        rank.write(0)
        assert [one.stored for one in rank.told()] == [(content_of(0).name,)]
        end = time.monotonic() + 60
        while "stay in the store: not for you" not in caplog.text:
            assert time.monotonic() < end
            time.sleep(0.01)


def test_a_full_disk_is_a_fault_of_the_store_and_no_loss(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", 96 * 1024) as folder:
        host = small_host()
        fill(host)
        place = StoreSpec(url=f"file://{folder}/shared")
        with closing(Rank(opened(place, host), host, rest_seconds=0.0)) as rank:
            told = []
            for number in range(40):
                rank.write(number)
                told += rank.told()
            written = [one.stored[0] for one in told if one.stored]
            faults = [one.store_fault for one in told if one.store_fault]
            assert 0 < len(written) < 40
            assert len(faults) == 40 - len(written)
            assert "No space left" in faults[0]
            for number in range(len(written)):
                rank.read(number, ((16, 4),))
            assert sum(len(one.loaded) for one in rank.told()) == len(written)
            assert (host.rows(16, 2) == host.rows(0, 2)).all()
            files = [path for path in folder.rglob("*") if path.is_file()]
            assert sorted(path.stem for path in files) == sorted(written), "failed writes leave nothing"
            files[0].unlink()
            rank.write(39)
            assert [one.stored for one in rank.told()] == [(content_of(39).name,)], (
                "it goes on once there is space"
            )


class Bucket(BaseHTTPRequestHandler):
    """Answers as a service does with an empty bucket that forgets what is written, or without the bucket."""

    is_there = True

    def do_HEAD(self) -> None:
        self.send_error(404)

    def do_GET(self) -> None:
        self.send_error(404)

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        if not self.is_there:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("etag", '"1"')
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.mark.parametrize("vanishes", [False, True])
def test_a_bucket_that_is_not_there_is_a_fault_that_names_what_to_set(
    vanishes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setattr(Bucket, "is_there", vanishes)
    host = small_host()
    with ThreadingHTTPServer(("127.0.0.1", 0), Bucket) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            where = StoreSpec(url="s3://typo/kv", endpoint=f"http://127.0.0.1:{server.server_port}")
            if vanishes:
                with closing(Rank(opened(where, host), host)) as rank:
                    monkeypatch.setattr(Bucket, "is_there", False)
                    rank.write(0)
                    (told,) = rank.told()
                assert told.not_stored == (content_of(0).name,)
                fault = told.store_fault
            else:
                with pytest.raises(StoreFailed) as failed:
                    opened_within(lambda: opened(where, host), 60)
                fault = str(failed.value)
        finally:
            server.shutdown()
    assert "kvCache.tiers.store.url is s3://typo/kv, and the service has no such bucket" in fault


@pytest.mark.parametrize("found", [{}, {"AWS_ACCESS_KEY_ID": "a"}, {"AWS_SECRET_ACCESS_KEY": "a"}])
def test_a_store_without_credentials_names_what_to_set(
    monkeypatch: pytest.MonkeyPatch, found: dict[str, str]
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    where = StoreSpec(url="s3://bucket/kv", endpoint="http://127.0.0.1:9")
    with pytest.raises(StoreFailed) as failed:
        KvObjects(where, "identity", 64).shared_key()
    for part in (
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        "kvCache.tiers.store.secretName",
        "`medha up`",
    ):
        assert part in str(failed.value)
