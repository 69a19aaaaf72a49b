"""`medha up` whose store and disk fail in every way while requests use them: the texts are those of a replica without tiers.

Each row starts a replica whose device and host memory hold some two documents, so that others come back from files or from
the store. It lets the fault happen, asks until the fault was met, and takes it away. Behind it, all documents are asked
for again, and what each tier still holds is counted: nothing may be left for anybody.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cluster.binaries import CannotBuild
from faulty_proxy import Fault, FaultyProxy, faulty_proxy
from held_points import WRITE_POINTS, HeldPoints, held_writes
from object_store import BUCKET, ObjectStore, object_store
from small_disk import small_disk

from .conftest import stop
from .tier_leaks import (
    blocks_in,
    remains_in_store,
    status_of,
    wait_for,
    wait_released,
)
from .tier_site import (
    DAMAGES,
    Maker,
    Reference,
    Site,
    damage,
    made_sites,
    reference_replica,
    set_all,
    wait_written,
    with_files,
)

pytest.importorskip("obstore")
pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

SEEDS = (1, 2)
SERVICE_FAULTS: tuple[Fault, ...] = (
    "answers 500",
    "hangs",
    "resets",
    "vanishes",
    "cuts answers",
    "stalls answers",
)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    folder = tmp_path_factory.mktemp("s3")
    try:
        with object_store(folder / "s3", folder / "s3.log") as service:
            yield service
    except CannotBuild as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def reference(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    with reference_replica(checkpoint, tmp_path_factory.mktemp("reference")) as reference:
        yield reference


@pytest.fixture
def maker(
    checkpoint: Path, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Maker]:
    with made_sites(checkpoint, tmp_path, reference, monkeypatch) as maker:
        yield maker


@pytest.fixture
def proxy(service: ObjectStore) -> Iterator[FaultyProxy]:
    with faulty_proxy(service.endpoint, passed_bytes=100_000) as proxy:
        yield proxy


def with_store(maker: Maker, seed: int, proxy: FaultyProxy, service: ObjectStore) -> tuple[Site, Path]:
    """Return a replica whose store has its documents, and where that store keeps them."""
    prefix = maker.folder.name
    url = f"s3://{BUCKET}/{prefix}"
    site = maker.site(seed, store={"url": url, "endpoint": proxy.endpoint, "bandwidth": "4Gi"})
    site.ask_all()
    store = service.directory / BUCKET / prefix
    wait_for("objects in the store", lambda: any(store.rglob("*.kv")))
    wait_released(site.controller)
    return site, store


@pytest.mark.parametrize("fault", SERVICE_FAULTS)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_store_that_fails_costs_time_only(
    seed: int, fault: Fault, maker: Maker, proxy: FaultyProxy, service: ObjectStore
) -> None:
    site, store = with_store(maker, seed, proxy, service)
    before = status_of(site.controller)["store"]["failures"]
    proxy.fault = fault
    site.ask_until(f"the fault {fault}", lambda: site.store_has_failed(before))
    site.ask_all()
    proxy.fault = ""
    site.check(store)
    wait_for("the end of the rest", lambda: not status_of(site.controller)["store"]["rests"], 400)
    site.ask_until("an answer of the store", lambda: not status_of(site.controller)["store"]["fault"])
    assert site.errors == 0


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("seed", SEEDS)
def test_damaged_objects_are_never_used(
    seed: int, how: str, maker: Maker, proxy: FaultyProxy, service: ObjectStore
) -> None:
    site, store = with_store(maker, seed, proxy, service)

    def has_met() -> bool:
        """Whether an object was missed: one that is gone is found missing by a lookup, or by a load."""
        if how != "gone":
            return bool(status_of(site.controller)["store"]["failures"] > before)
        return site.counted("medha_store_tier_lookups_total") > looked

    before = status_of(site.controller)["store"]["failures"]
    looked = site.counted("medha_store_tier_lookups_total")
    damage(sorted(store.rglob("*.kv")), how)
    site.ask_until(f"{how} objects", has_met)
    site.check(store)
    assert site.errors == 0


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("seed", SEEDS)
def test_damaged_files_are_never_used(seed: int, how: str, maker: Maker, tmp_path: Path) -> None:
    site = with_files(maker, seed, tmp_path / "files")
    wait_written(site)
    before = site.disk_failures()
    files = sorted(site.files.rglob("*.kv"))
    blocks = {path.name: blocks_in(path) for path in files}
    damage(files, how)
    site.ask_until(f"{how} files", lambda: site.disk_failures() > before)
    site.check(None, are_files_gone=how == "gone", damaged=blocks)
    assert site.errors == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_a_full_disk_costs_time_only(seed: int, maker: Maker, tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", 3 * 2**20) as folder:
        site = with_files(maker, seed, folder / "files")
        site.ask_until("a full disk", lambda: site.disk_failures() > 0)
        site.check(None)
        tier = site.disk_tier()
        assert (tier["fault"], tier["held"] > 0) == ("", True)
        block_bytes = site.counted("medha_disk_tier_bytes") / tier["held"]
        assert tier["blocks"] * block_bytes <= 3 * 2**20, "it has shrunk to what fits"
        assert site.errors == 0
        stop(site.served)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_slow_disk_costs_time_only(seed: int, maker: Maker, tmp_path: Path) -> None:
    site = with_files(maker, seed, tmp_path / "files")
    wait_written(site)
    site.slow_disk.write_text("1.5")
    log = site.slow_disk.with_suffix(".in")
    site.ask_until("a slow read", lambda: log.exists() and "read" in log.read_text())
    site.ask_all()
    site.slow_disk.unlink()
    site.check(None)
    assert site.errors == 0


@pytest.mark.parametrize("part", ["medha_worker.rank", "medha_worker.controller"])
@pytest.mark.parametrize("when", ["write", "read"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_part_that_is_killed_while_the_store_is_used_changes_no_text(
    seed: int, when: str, part: str, maker: Maker, proxy: FaultyProxy, service: ObjectStore
) -> None:
    site, store = with_store(maker, seed, proxy, service)
    proxy.fault = "stalls questions" if when == "write" else "stalls answers"
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(
            site.ask_until, f"a {when} that is under way", lambda: proxy.stopped.acquire(blocking=False)
        )
        asked.result()
        last = pool.submit(site.ask, 50)  # it is under way as the part dies
        site.kill(part)
        proxy.fault = ""
        last.result()
    site.check(store)


@pytest.mark.parametrize("part", ["medha_worker.rank", "medha_worker.controller"])
@pytest.mark.parametrize("when", ["write", "read"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_part_that_is_killed_while_files_are_used_changes_no_text(
    seed: int, when: str, part: str, maker: Maker, tmp_path: Path
) -> None:
    site = with_files(maker, seed, tmp_path / "files")
    wait_written(site)
    site.slow_disk.write_text("3")
    log = site.slow_disk.with_suffix(".in")
    site.ask_until(f"a {when} that is under way", lambda: log.exists() and when in log.read_text())
    with ThreadPoolExecutor(1) as pool:
        last = pool.submit(site.ask, 50)
        site.kill(part)
        site.slow_disk.unlink()
        last.result()
    site.check(None)


@pytest.mark.parametrize("point", WRITE_POINTS)
def test_a_rank_that_is_killed_at_a_point_of_the_write_of_a_file_changes_no_text(
    point: str, maker: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = HeldPoints(tmp_path / "points", WRITE_POINTS)
    set_all(monkeypatch, points.environment)
    site = with_files(maker, SEEDS[0], tmp_path / "files")
    wait_written(site)
    points.hold(point)
    site.ask_until(f"a write at the point {point}", lambda: points.is_held(point))
    with ThreadPoolExecutor(1) as pool:
        last = pool.submit(site.ask, 50)
        site.kill("medha_worker.rank")
        points.release(point)
        last.result()
    site.check(None)


@pytest.mark.parametrize("part", ["medha_worker.rank", "medha_worker.controller"])
@pytest.mark.parametrize("point", WRITE_POINTS)
def test_a_part_that_is_killed_at_a_point_of_a_write_to_a_folder_changes_no_text_and_nothing_stays(
    point: str, part: str, maker: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a killed rank leaves is deleted by the next one. Here it looks as old as it has to be for that."""
    points, folder = held_writes(tmp_path / "points"), tmp_path / "shared"
    set_all(monkeypatch, points.environment)
    site = maker.site(SEEDS[0], store={"url": f"file://{folder}", "bandwidth": "4Gi"})
    site.ask_all()
    wait_for("objects in the store", lambda: any(folder.rglob("*.kv")))
    wait_released(site.controller)
    points.hold(point)
    site.ask_until(f"a write at the point {point}", lambda: points.is_held(point))
    assert bool(remains_in_store(folder)) == (point != "renamed")
    with ThreadPoolExecutor(1) as pool:
        last = pool.submit(site.ask, 50)
        for path in folder.rglob("*#*"):
            os.utime(path, (0, 0))
        site.kill(part)
        points.release(point)
        last.result()
    site.check(folder)
