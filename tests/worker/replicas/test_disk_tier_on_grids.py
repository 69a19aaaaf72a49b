"""With a disk tier, ranks of every kind of grid compute what they compute without, also after a restart.

The host tier is too small for the documents, so that much of what returns comes from files. Ranks write and read real files.
A second life finds those of the first, with a new controller and new memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from random import Random

import pytest

from medha.model.kv_dtype import KvDtype
from medha.scheduler.controller import ReplicaController
from medha.topology import Topology
from medha.wire.messages import ControllerEvent, DiskReport
from medha_worker.model.kv_files import KvFiles

from ..model.test_model_transformer import save_reference
from ..ranks import Ranks
from .grids import STRIPED_GRID_ROWS, model_of
from .test_controlled import GREEDY, MODEL, Life
from .test_host_tier_on_grids import LEAST_BLOCKS, SAMPLED, run

pytestmark = pytest.mark.timeout(400)

HOST_BLOCKS, KEY = 40, "00" * 32


class DiskLife(Life):
    """A life in which the ranks of each lane report what steps ask of their disks, late and one by one."""

    def __init__(self, controller: ReplicaController, random: Random, found: Iterable[DiskReport]) -> None:
        super().__init__(controller, random)
        self.reports: list[DiskReport] = list(found)
        self.seen = 0
        while self.reports:
            self.handle(self.reports.pop(0))

    def handle(self, event: ControllerEvent) -> None:
        super().handle(event)
        topology = self.controller.config.topology
        for step in self.steps[self.seen :]:
            for lane in range(topology.kv):
                loaded = [number for number, load in self.extents(step.step_id, lane) if load]
                written = tuple(write.file.name for write in step.writes if write.lane == lane)
                if loaded or written:
                    self.reports += [
                        DiskReport(rank, lane, written=written, loaded=tuple((one, 1e-6) for one in loaded))
                        for rank in topology.ranks_of_lane(lane)
                    ]
        self.seen = len(self.steps)

    def extents(self, step_id: int, lane: int) -> list[tuple[int, bool]]:
        """Return the numbers of the extents that a step makes on a lane, and whether each is loaded."""
        counted: list[tuple[int, bool]] = []
        for step in self.steps[: step_id + 1]:
            begun = len(counted)
            counted += [(0, True) for load in step.loads if load.lane == lane and load.file]
            evictions = [one for part in (*step.grows, *step.admits) for one in part.evictions]
            counted += [(0, False) for one in evictions if one.lane == lane for _ in one.offloads]
        return [(number, is_load) for number, (_, is_load) in enumerate(counted) if number >= begun]

    def move(self) -> None:
        if self.reports and (not self.moving or self.random.random() < 0.5):
            self.now += 0.001
            self.handle(self.reports.pop(0))
            return
        super().move()


def found_in(ranks: Ranks, disk: Path) -> list[DiskReport]:
    """Return what the ranks report of their directories when an epoch begins."""
    reports = []
    for rank in range(ranks.topology.ranks):
        files = KvFiles(disk / f"rank-{rank}", f"rank {rank}", ranks.block_bytes[rank])
        files.acquire()
        files.keep_key(KEY)
        lane = ranks.topology.coordinates(rank).kv
        reports.append(DiskReport(rank, lane, found=tuple(files.scan()), found_all=True))
        files.release()
    return reports


@pytest.mark.parametrize(
    ("shape", "architecture", "kv_dtype", "striped"),
    [
        pytest.param((1, 1, 1), "llama", "auto", False, id="one rank", marks=pytest.mark.long),
        pytest.param((2, 1, 1), "llama-biased", "auto", False, id="TP2", marks=pytest.mark.long),
        pytest.param((1, 1, 2), "qwen3", "auto", False, id="KVP2", marks=pytest.mark.long),
        pytest.param((1, 1, 2), "qwen3", "auto", True, id="KVP2, striped"),
        pytest.param(
            (1, 2, 2), "deepseek_v2", "auto", False, id="SPP2 x KVP2, latents", marks=pytest.mark.long
        ),
        pytest.param((1, 1, 1), "llama", "fp8", False, id="one rank, FP8", marks=pytest.mark.long),
    ],
)
def test_texts_are_those_without_a_tier_and_survive_a_restart(
    shape: tuple[int, int, int], architecture: str, kv_dtype: KvDtype, striped: bool, tmp_path: Path
) -> None:
    has_latents = architecture.startswith("deepseek")
    sizes = MODEL | ({"num_key_value_heads": 4} if has_latents else {"head_dim": 16})
    save_reference(tmp_path, architecture, **sizes)
    tolerance = 1e-4 if kv_dtype == "auto" else 0.05
    compare(Ranks(Topology(*shape), tmp_path, kv_dtype=kv_dtype), tmp_path / "kv", tolerance, striped=striped)


@pytest.mark.parametrize(("grid", "striped"), STRIPED_GRID_ROWS)
def test_texts_are_those_without_a_tier_on_every_grid(grid: Topology, striped: bool, tmp_path: Path) -> None:
    save_reference(tmp_path, "qwen3", **model_of(grid))
    compare(Ranks(grid, tmp_path), tmp_path / "kv", 1e-4, striped=striped)


def compare(ranks: Ranks, disk: Path, tolerance: float, *, striped: bool) -> None:
    """Compare the texts and logits of two lives with those without a tier."""
    host_blocks = max(HOST_BLOCKS // ranks.topology.kv, LEAST_BLOCKS)
    try:
        for sampling in (GREEDY, SAMPLED):
            texts, logits, _ = run(ranks, sampling, 0, striped=striped)
            found: list[DiskReport] = [
                DiskReport(rank, ranks.topology.coordinates(rank).kv, found_all=True)
                for rank in range(ranks.topology.ranks)
            ]
            for life in ("first", "second"):
                new_life = partial(DiskLife, found=found)
                answers, computed, controller = run(
                    ranks,
                    sampling,
                    host_blocks,
                    striped=striped,
                    disk=disk,
                    new_life=new_life,
                )
                assert answers == texts, life
                for at in computed.keys() & logits.keys():
                    assert float((computed[at] - logits[at]).abs().max()) <= tolerance, at
                failed = [one for one in ranks.disk_reports if one.not_loaded or one.not_written or one.fault]
                assert not failed, failed
                counts = controller.pools.disk_counts
                # The host tiers of many lanes may hold all that returns in the first life.
                assert counts.loaded_blocks > 0 or life == "first"
                assert counts.failed_loads == counts.failed_writes == 0
                for tier, one in zip(controller.pools.tiers, controller.pools.disks, strict=True):
                    tier.check()
                    one.check()
                found = found_in(ranks, disk)
                assert not list(disk.rglob("*.partial"))
                assert sum(len(one.found) for one in found) > 0
    finally:
        ranks.close()
