"""A draft model that cannot guess for the served model is refused, with the field and the fix."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from medha.api.replica import MedhaReplicaSpec
from medha.errors import CheckpointInvalid, ConfigInvalid, MedhaError, ModelUnsupported
from medha_worker.checkpoints.draft_checkpoint import FIELD, draft_config
from medha_worker.checkpoints.preflight import require_possible
from medha_worker.checkpoints.presets import init_checkpoint
from medha_worker.model.model_config import ModelConfig


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint") / "tiny"
    init_checkpoint(directory, preset="tiny", seed=2)
    return directory


@pytest.fixture
def draft(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "draft"))


def change(directory: Path, **fields: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def add_token(directory: Path) -> None:
    path = directory / "tokenizer.json"
    document = json.loads(path.read_text())
    (last,) = [token for token, number in document["model"]["vocab"].items() if number == 511]
    document["model"]["vocab"]["another"] = document["model"]["vocab"].pop(last)
    document["model"]["merges"] = [
        one for one in document["model"]["merges"] if "".join(one).replace(" ", "") != last
    ]
    path.write_text(json.dumps(document))


def test_the_same_tokenizer_is_needed_and_no_more(checkpoint: Path, draft: Path) -> None:
    config = ModelConfig.from_directory(checkpoint, max_model_len=300)
    change(draft, vocab_size=600, num_hidden_layers=1)
    found = draft_config(draft, checkpoint, config)
    assert (found.max_model_len, found.vocab_size, found.num_layers) == (300, 600, 1)


@pytest.mark.parametrize(
    ("spoil", "error", "told"),
    [
        (shutil.rmtree, CheckpointInvalid, ["config.json"]),
        (lambda path: change(path, architectures=["Mamba"]), ModelUnsupported, ["Mamba"]),
        (
            lambda path: change(path, max_position_embeddings=256),
            ConfigInvalid,
            ["reads at most 256 tokens, and spec.model.maxModelLen is 300", "choose another draft model"],
        ),
        (
            lambda path: change(path, vocab_size=500),
            ConfigInvalid,
            ["vocab_size is 500, and the served model's 512", "ids up to 511"],
        ),
        (add_token, ConfigInvalid, ["tokenizer", "is not there and 511", "same family"]),
        (
            lambda path: (path / "tokenizer.json").unlink(),
            CheckpointInvalid,
            ["tokenizer.json is missing", "fetch the checkpoint with its tokenizer"],
        ),
    ],
    ids=["not there", "architecture", "length", "vocabulary", "tokenizer", "no tokenizer"],
)
def test_another_checkpoint_is_refused_with_the_field_and_the_fix(
    checkpoint: Path,
    draft: Path,
    spoil: Callable[[Path], object],
    error: type[MedhaError],
    told: list[str],
) -> None:
    config = ModelConfig.from_directory(checkpoint, max_model_len=300)
    spoil(draft)
    with pytest.raises(error) as raised:
        draft_config(draft, checkpoint, config)
    for part in (f"{FIELD} ({draft}): ", *told):
        assert part in str(raised.value)


def test_its_weights_count_before_anything_starts(checkpoint: Path, draft: Path) -> None:
    """Memory that suffices for the model alone does not for both."""
    spec = MedhaReplicaSpec.model_validate({"model": {"name": "m", "source": {"path": str(checkpoint)}}})
    weights_bytes = ModelConfig.from_directory(checkpoint).weights_bytes(4)
    free_bytes = 128 * 2**20 + weights_bytes + weights_bytes // 2
    require_possible(spec, checkpoint, free_bytes)
    with pytest.raises(ConfigInvalid, match="need at least"):
        require_possible(spec, checkpoint, free_bytes, draft)
