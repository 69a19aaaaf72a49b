"""Reads which tokens end a text of a model."""

from __future__ import annotations

import json
from pathlib import Path

from medha.errors import CheckpointInvalid


def eos_token_ids(directory: Path) -> tuple[int, ...]:
    """Return the ids that end a sequence: generation_config.json's, which lists all, else config.json's.

    Raises:
        CheckpointInvalid: `eos_token_id` is neither an id nor a list of ids.
    """
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
        if found is None:
            continue
        ids = found if isinstance(found, list) else [found]
        if not all(isinstance(one, int) and one >= 0 for one in ids):
            raise CheckpointInvalid(
                f"{path}: eos_token_id is {found!r}, expected a token id or a list of them"
            )
        return tuple(ids)
    return ()
