"""The tokens that end a text: which file of a checkpoint names them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from medha.errors import CheckpointInvalid
from medha_worker.checkpoints.end_of_text import eos_token_ids


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        pytest.param({"generation_config.json": {"eos_token_id": [1, 3]}}, (1, 3), id="a list"),
        pytest.param({"config.json": {"eos_token_id": 2}}, (2,), id="the configuration's"),
        pytest.param(
            {"generation_config.json": {"eos_token_id": 5}, "config.json": {"eos_token_id": 2}},
            (5,),
            id="both",
        ),
        pytest.param({"generation_config.json": {}, "config.json": {"eos_token_id": 0}}, (0,), id="zero"),
        pytest.param({}, (), id="none"),
    ],
)
def test_where_the_ids_that_end_a_text_come_from(
    tmp_path: Path, files: dict[str, object], ids: tuple[int, ...]
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert eos_token_ids(tmp_path) == ids


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ('{"eos_token_id": ["</s>"]}', r"eos_token_id is \['</s>'\], but must be a token id"),
        ('{"eos_token_id": true}', "eos_token_id is True, but must be a token id"),
        ('{"eos_token_id": [1, -2]}', r"eos_token_id is \[1, -2\]"),
        ('{"eos_token_id": ', "is not JSON"),
        ("[1]", "holds a list"),
    ],
)
def test_an_end_id_that_is_no_id_is_refused(content: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointInvalid, match=rf"generation_config\.json: {named}.*fetch"):
        eos_token_ids(tmp_path)
