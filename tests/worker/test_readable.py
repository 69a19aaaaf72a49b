"""Pods can read a model that another user has made; if they cannot, the error names the user and the path."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from medha.errors import CheckpointInvalid
from medha_worker.checkpoints.presets import init_checkpoint
from medha_worker.checkpoints.read_bundle import read_bundle
from medha_worker.device import host_device
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.weights import Shard, load_weights

POD_USER = 65532


@pytest.fixture
def model() -> Iterator[Path]:
    """Make a checkpoint in a folder that everybody may enter, unlike pytest's own folder."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        init_checkpoint(Path(folder) / "tiny", preset="tiny", seed=0)
        yield Path(folder) / "tiny"


@contextmanager
def as_user_of_a_pod() -> Iterator[None]:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    os.seteuid(POD_USER)
    try:
        yield
    finally:
        os.seteuid(0)


def read_everything(model: Path) -> None:
    """Read all that controller and rank read when they start."""
    read_bundle(model)
    config = ModelConfig.from_directory(model)
    load_weights(model, config, Shard.whole(config), device=host_device(torch.float32))


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_every_file_of_a_checkpoint_has_the_mode_that_the_umask_asks_for(
    umask: int, mode: int, tmp_path: Path
) -> None:
    before = os.umask(umask)
    try:
        init_checkpoint(tmp_path / "tiny", preset="tiny", seed=0)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "tiny").iterdir()}
    assert set(modes.values()) == {mode}
    assert "model.safetensors" in modes


def test_a_pod_reads_what_root_has_made(model: Path) -> None:
    with as_user_of_a_pod():
        read_everything(model)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_file_that_may_not_be_read_is_not_reported_as_missing(model: Path, name: str) -> None:
    (model / name).chmod(0o600)
    with as_user_of_a_pod(), pytest.raises(CheckpointInvalid) as caught:
        read_everything(model)
    assert str(caught.value) == (
        f"{model / name}: cannot be read by uid 65532: {model / name} has mode 0600 and belongs to uid 0; "
        f"where the model is kept, run: chmod -R a+rX {model}"
    )


def test_a_folder_that_may_not_be_entered_is_named(model: Path) -> None:
    model.chmod(0o700)
    with as_user_of_a_pod(), pytest.raises(CheckpointInvalid, match=f"65532: {model} has mode 0700"):
        read_everything(model)


def test_a_file_that_is_missing_is_still_reported_as_missing(model: Path) -> None:
    (model / "model.safetensors").unlink()
    with pytest.raises(CheckpointInvalid, match=r"model\.safetensors is missing"):
        read_everything(model)
    shutil.rmtree(model)
    with pytest.raises(CheckpointInvalid, match=r"tokenizer\.json is missing"):
        read_bundle(model)


@pytest.mark.parametrize("other", ["tiktoken.model", "tokenizer.model"])
def test_a_tokenizer_in_another_form_is_named(model: Path, other: str) -> None:
    (model / "tokenizer.json").rename(model / other)
    with pytest.raises(CheckpointInvalid, match=f"tokenizer.json is missing, and {other} is not read"):
        read_bundle(model)
