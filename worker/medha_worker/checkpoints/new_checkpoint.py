"""The directory of a checkpoint that is made here: it appears all at once, and replaces nothing but one of its kind."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from medha.errors import ConfigInvalid
from medha_worker.model.stage_split import KV_SCALES

_CONFIG, _WEIGHTS = "config.json", "model.safetensors"
_FILES = frozenset(
    (_CONFIG, "generation_config.json", _WEIGHTS, "tokenizer.json", "tokenizer_config.json", KV_SCALES)
)


@contextmanager
def new_checkpoint(directory: Path | str, *, force: bool) -> Iterator[Path]:
    """Yield an empty directory that takes the place of `directory` once it is filled.

    The files appear all at once (a temporary directory beside it is renamed), so nothing half-made is left. Their modes
    follow the umask. `force` replaces an earlier checkpoint that was made here; a directory that holds anything else is
    never touched.

    Raises:
        ConfigInvalid: the directory is in use.
    """
    # Resolved, because a path such as "." has no parent and no name, and so that the target of a link is replaced, not the link.
    target = Path(directory).resolve()
    _require_replaceable(target, force)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as scratch:
        made = Path(scratch) / "new"
        made.mkdir()
        yield made
        _require_replaceable(target, force)
        if target.exists():
            target.rename(Path(scratch) / "old")
        made.rename(target)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write an object as JSON, in an order that does not depend on how it was made."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def save_weights(directory: Path, weights: dict[str, torch.Tensor]) -> None:
    """Write the weights of a checkpoint beside its `config.json`."""
    save_file(weights, directory / _WEIGHTS, metadata={"format": "pt"})
    # safetensors makes the file readable by its owner alone, but a pod runs as another user.
    shutil.copymode(directory / _CONFIG, directory / _WEIGHTS)


def _require_replaceable(target: Path, force: bool) -> None:
    if target.exists() and not target.is_dir():
        raise ConfigInvalid(f"{target} is a file; name a directory that is new or empty")
    found = sorted(os.listdir(target)) if target.exists() else []
    foreign = [name for name in found if name not in _FILES]
    if found and not force:
        raise ConfigInvalid(
            f"{target} is not empty (it holds {found[0]}); name a new one, or use force to replace a checkpoint"
        )
    if foreign:
        raise ConfigInvalid(
            f"{target} holds {foreign[0]}, which is no part of a checkpoint made here; name another directory"
        )
