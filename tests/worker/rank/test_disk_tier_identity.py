"""Files of KV are used by ranks that would compute the same KV, and by no others."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from medha.api.replica import MedhaReplicaSpec
from medha.kv.disk_tier import file_name
from medha.kv.lane_replay import HostTierWork, WriteBlocks
from medha.wire.messages import DiskFile, DiskReport, Rendezvous
from medha_process.part_settings import RankSettings
from medha_worker.checkpoints.presets import init_checkpoint
from medha_worker.rank.engine import Loaded, load
from medha_worker.rank.step_recorder import StepRecorder

KEY, HASHES = "ab" * 32, "cd" * 16
FILE = DiskFile(file_name("", HASHES), 0, HASHES)


def loaded(folder: Path, **spec: Any) -> Loaded:
    document = {
        "model": {"name": "m", "source": {"path": str(folder / "tiny")}, "maxModelLen": 128},
        "kvCache": {"size": "384Ki", "tiers": {"host": {"size": "384Ki"}, "disk": {"size": "1Mi"}}},
        "scheduling": {"maxChunkTokens": 32, "maxRunning": 4},
        "threads": 1,
    }
    settings = RankSettings(
        rank=0,
        spec=MedhaReplicaSpec.model_validate(document | spec),
        model_directory=folder / "tiny",
        disk_directory=folder / "kv",
        control="",
        tokens="",
        key_file=folder,
        controller_key_file=folder,
    )
    return load(settings, StepRecorder(0), lambda *_: None)


def life(
    rank: Loaded, *, writes: bool = False, before: Callable[[], None] = lambda: None
) -> list[DiskReport]:
    """Let a rank take part in an epoch, and return what it reports; it may write a file."""
    before()
    disk = rank.rendezvous(Rendezvous(epoch=0, address="")).disk
    assert disk is not None
    reports: list[DiskReport] = []
    disk.begin_epoch(DiskReport(0), KEY, reports.append)
    if writes:
        disk.submit(HostTierWork(writes=(WriteBlocks(FILE, 0, 0, ((0, 1),)),)))
    assert disk.drain(60)
    rank.close()
    return reports


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    init_checkpoint(tmp_path / "tiny", preset="tiny", seed=0)
    return tmp_path


def test_a_rank_finds_files_again_unless_it_would_compute_other_bits(folder: Path) -> None:
    assert life(loaded(folder), writes=True)[-1].written == (FILE.name,)
    assert life(loaded(folder))[-1].found == (FILE,)
    assert life(loaded(folder, determinism="batchInvariant"))[-1].found == ()


def test_kv_of_weights_that_were_replaced_on_the_disk_is_not_kept_as_that_of_the_new_ones(
    folder: Path,
) -> None:
    def replace_weights() -> None:
        init_checkpoint(folder / "other", preset="tiny", seed=1)
        shutil.copy2(folder / "other" / "model.safetensors", folder / "tiny" / "model.safetensors")

    assert life(loaded(folder), writes=True, before=replace_weights)[-1].written == (FILE.name,)
    assert life(loaded(folder))[-1].found == ()


def test_a_checkpoint_that_changes_while_it_is_read_has_no_disk_tier(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = iter(["before", "behind"])
    monkeypatch.setattr("medha_worker.rank.engine.weights_identity", lambda _: next(found))
    assert "cannot be distinguished from others" in life(loaded(folder))[-1].fault


def test_a_rank_starts_without_its_disk_tier_if_the_checkpoint_has_a_file_that_it_cannot_read(
    folder: Path,
) -> None:
    (folder / "tiny" / "dangling.json").symlink_to(folder / "nothing")
    assert "cannot be distinguished from others" in life(loaded(folder))[-1].fault
