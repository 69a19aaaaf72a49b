"""Checks that a checkpoint has the prediction head that a manifest asks for."""

from __future__ import annotations

from pathlib import Path

from medha.errors import ConfigInvalid
from medha_worker.model.model_config import ModelConfig

FIELD = "spec.scheduling.speculation.predictionHead"


def head_config(directory: Path, config: ModelConfig) -> ModelConfig:
    """Return the configuration of a checkpoint's model with its prediction head.

    Raises:
        ConfigInvalid: it has none; the text names the field.
    """
    if config.further_layers:
        return config.with_head()
    raise ConfigInvalid(
        f"{FIELD}.kind is mtp, but {directory} is a {config.architecture} without MTP layers: config.json has no "
        "num_nextn_predict_layers, or 0; choose a checkpoint with them, such as DeepSeek-V3, or set "
        "speculation.method to promptLookup or draftModel"
    )
