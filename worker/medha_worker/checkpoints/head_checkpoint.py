"""Checks of the prediction head that a manifest asks for: a layer of the served model's checkpoint, or a checkpoint of its own."""

from __future__ import annotations

from pathlib import Path

from medha.errors import ConfigInvalid, MedhaError
from medha_worker.model.eagle3_config import Eagle3Config
from medha_worker.model.eagle3_tensors import EMBEDDING, find_eagle3_tensors
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


def eagle3_config(directory: Path, config: ModelConfig) -> Eagle3Config:
    """Return the configuration of the EAGLE-3 head in `directory`, whose files are complete and fit the model of `config`.

    Raises:
        MedhaError: there is none, or it does not fit; the text names the field.
    """
    try:
        head = Eagle3Config.from_directory(directory, config)
        find_eagle3_tensors(directory, head)
    except MedhaError as error:
        raise type(error)(f"{FIELD}.source ({directory}): {error}") from error
    return head


def eagle3_weights_bytes(
    directory: Path, config: ModelConfig, element_bytes: int, *, holds_embedding: bool
) -> int:
    """Return the memory of the matrices of the EAGLE-3 head in `directory`.

    `holds_embedding` says that the rank that samples has the whole embedding of the served model of `config` anyway.

    Raises:
        MedhaError: as in `eagle3_config`.
    """
    head = eagle3_config(directory, config)
    found = head.weights_bytes(element_bytes)
    if head.needs_own_embedding or (
        holds_embedding and EMBEDDING not in find_eagle3_tensors(directory, head).places
    ):
        return found  # counted already
    return found + config.vocab_size * head.layer.hidden_size * element_bytes
