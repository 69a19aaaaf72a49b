"""Replicas of two ranks whose tiers fail at one of them only: the texts are those of a replica without tiers.

With two tensor ranks, each has half of the heads of every block. With two lanes, no lane holds a whole document, so each has
some of its blocks. What one rank lacks, the other one must not use either, and must not keep.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from held_points import READ_POINTS, WRITE_POINTS, HeldPoints
from small_disk import small_disk

from .conftest import stop
from .tier_leaks import blocks_in, status_of, wait_for, wait_released
from .tier_site import (
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

SEED = 1
DAMAGES = ("truncated", "flipped", "gone")
Grid = Mapping[str, int]
FAULTY_RANK = {"tensor": 1, "kv": 0}
"""The one whose tiers fail, by what its grid has two of. The first lane holds most of each document, so that it reads files."""
GRIDS = [pytest.param({"tensor": 2}, id="TP2"), pytest.param({"kv": 2}, id="KVP2")]


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


def faulty_rank(grid: Grid) -> int:
    (name,) = grid
    return FAULTY_RANK[name]


def with_folder(maker: Maker, grid: Grid) -> tuple[Site, Path]:
    """Return a replica whose store, a folder, has its documents, and that folder."""
    folder = maker.folder / "shared"
    site = maker.site(SEED, grid=grid, store={"url": f"file://{folder}", "bandwidth": "4Gi"})
    site.ask_all()
    wait_for("objects in the store", lambda: any(folder.rglob("*.kv")))
    wait_released(site.controller)
    return site, folder


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("how", DAMAGES)
def test_files_that_are_damaged_at_one_rank_are_used_by_none(
    how: str, grid: Grid, maker: Maker, tmp_path: Path
) -> None:
    site = with_files(maker, SEED, tmp_path / "files", grid)
    wait_written(site)
    before = site.disk_failures()
    (folder,) = site.files.rglob(f"rank-{faulty_rank(grid)}")
    files = sorted(folder.glob("*.kv"))
    assert files
    blocks = {path.name: blocks_in(path) for path in files}
    damage(files, how)
    site.ask_until(f"{how} files", lambda: site.disk_failures() > before)
    site.check(None, are_files_gone=how == "gone", damaged=blocks)
    assert site.errors == 0


@pytest.mark.parametrize("how", DAMAGES)
def test_objects_that_are_damaged_for_one_tensor_rank_are_used_by_none(how: str, maker: Maker) -> None:
    site, folder = with_folder(maker, {"tensor": 2})
    by_rank: dict[Path, list[Path]] = {}
    for path in sorted(folder.rglob("*.kv")):
        by_rank.setdefault(folder / path.relative_to(folder).parts[0], []).append(path)
    assert len(by_rank) == 2
    *_, objects = by_rank.values()
    before = site.counted("medha_store_tier_failures_total")
    looked = site.counted("medha_store_tier_lookups_total")

    def has_met() -> bool:
        """Return whether an object was missed: one that is gone is found missing by a lookup, or by a load."""
        if how != "gone":
            return site.counted("medha_store_tier_failures_total") > before
        return site.counted("medha_store_tier_lookups_total") > looked

    damage(objects, how)
    site.ask_until(f"{how} objects", has_met)
    site.check(folder)
    assert site.errors == 0


@pytest.mark.parametrize("grid", GRIDS)
def test_a_disk_that_is_full_at_one_rank_costs_time_only(grid: Grid, maker: Maker, tmp_path: Path) -> None:
    size_bytes = 3 * 2**20 // grid.get("tensor", 1)  # one file, and a half
    (tmp_path / "files" / "served").mkdir(parents=True)
    with small_disk(tmp_path / "files" / "served" / f"rank-{faulty_rank(grid)}", size_bytes) as folder:
        site = with_files(maker, SEED, tmp_path / "files", grid)
        site.ask_until("a full disk", lambda: site.disk_failures() > 0)
        site.check(None)
        tiers = [lane["disk_tier"] for lane in status_of(site.controller)["lanes"]]
        assert [tier["fault"] for tier in tiers] == [""] * len(tiers)
        assert tiers[0]["held"] > 0
        assert any(folder.glob("*.kv"))
        if len(tiers) == 2:
            assert tiers[0]["blocks"] < tiers[1]["blocks"], "the other lane has not shrunk"
        assert site.errors == 0
        stop(site.served)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("point", WRITE_POINTS)
def test_one_rank_that_is_killed_at_a_point_of_the_write_of_a_file_changes_no_text(
    point: str, grid: Grid, maker: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank goes on with its write, and may complete it: then only one of them has the file."""
    points = HeldPoints(tmp_path / "points", WRITE_POINTS)
    set_all(monkeypatch, points.environment)
    site = with_files(maker, SEED, tmp_path / "files", grid)
    wait_written(site)
    site.kill_at(points, point, number=faulty_rank(grid))
    site.check(None)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("point", ["put", "loaded"])
def test_one_rank_that_is_killed_at_a_point_of_the_read_of_a_file_changes_no_text(
    point: str, grid: Grid, maker: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = HeldPoints(tmp_path / "points", READ_POINTS)
    set_all(monkeypatch, points.environment)
    site = with_files(maker, SEED, tmp_path / "files", grid)
    wait_written(site)
    site.kill_at(points, point, number=faulty_rank(grid))
    site.check(None)
