"""Reads which tokens end a text of a model."""

from __future__ import annotations

from pathlib import Path

from medha.errors import CheckpointInvalid
from medha.model.quantisation import shown
from medha_worker.model.model_config import read_json


def eos_token_ids(directory: Path) -> tuple[int, ...]:
    """Return the ids that end a sequence: generation_config.json's, which lists all, else config.json's.

    Raises:
        CheckpointInvalid: a file cannot be read, or its `eos_token_id` is neither an id nor a list of ids.
    """
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        found = read_json(path).get("eos_token_id") if path.is_file() else None
        if found is None:
            continue
        ids = found if isinstance(found, list) else [found]
        if not all(type(one) is int and one >= 0 for one in ids):
            raise CheckpointInvalid(
                f"{path}: eos_token_id is {shown(found)}, but must be a token id or a list of them; fetch the checkpoint again "
                "or correct the field"
            )
        return tuple(ids)
    return ()
