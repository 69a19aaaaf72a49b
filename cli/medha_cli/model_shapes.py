"""Shapes of models that options name: a preset, a `config.json`, or the folder of a checkpoint."""

from __future__ import annotations

from pathlib import Path

from medha.cost.hardware import MODELS, ModelShape
from medha.errors import ConfigInvalid
from medha_sim.plan import read_shape
from medha_worker.model.model_config import ModelConfig, read_json


def model_shape(option: str, name: str) -> ModelShape:
    """Return the shape of a preset, or of the model whose `config.json`, or whose folder, is named.

    Raises:
        MedhaError: there is none, or no replica serves it; names the `option`.
    """
    for preset in MODELS.values():
        if preset.name.lower() == name.lower():
            return preset
    if not Path(name).exists():
        raise ConfigInvalid(
            f"{option} {name}: neither a preset ({', '.join(MODELS)}) nor a file or folder that exists"
        )
    _require_served(Path(name))
    return read_shape(Path(name))


def _require_served(path: Path) -> None:
    """Refuse the models that `medha up` refuses, in the same words.

    Raises:
        MedhaError: the model is not supported, or its configuration is wrong.
    """
    if path.is_dir():
        ModelConfig.from_directory(path)
    else:
        ModelConfig.from_values(read_json(path))
