"""The split of a model's layers over the stages of a lane, and which of a checkpoint's tensors each stage reads.

The rank that loads weights and the container that fetches them for it both use this module. It needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from medha.errors import CheckpointInvalid
from medha.model.config_fields import TEXT_CONFIGS
from medha.model.quantisation import shown
from medha.topology import stage_layers
from medha_worker.model.model_config import ModelConfig

if TYPE_CHECKING:  # `make gpu-check` runs without pydantic
    from medha.api.replica import MedhaReplicaSpec

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head."
KV_SCALES = "kv_scales.safetensors"
"""File of a checkpoint with scales of K and V that were measured (`medha model kv-scales`); all stages have it."""
_LAYER = "model.layers."
_OF_IMAGES = ("vision_tower.", "multi_modal_projector.")
_TEXT_PREFIXES = {"language_model.": "", "model.language_model.": "model."}
"""Prefixes of a text model's tensors, as published and as `transformers` holds them, and what they stand for."""


def split_layers(
    config: ModelConfig, stages: int, chunk_tokens: int, guessing_layers: int = 0
) -> list[range]:
    """Return the layers of each stage.

    `guessing_layers` is the time that a prediction head takes on the last stage, in units of the time of one layer.

    Stages are balanced for a prefill chunk of `chunk_tokens`, which is what the pipeline is for. A chunk
    samples from one row at most, so the output head is a negligible part of the last stage. A decode passes
    all stages anyway, however the layers are split.

    Raises:
        ConfigInvalid: there are fewer layers than stages.
    """
    head_weights = config.vocab_size * config.hidden_size
    layer_weights = (config.linear_flops_per_token / 2 - head_weights) / config.num_layers
    head_cost = head_weights / layer_weights / chunk_tokens
    return stage_layers(config.num_layers, stages, head_cost_layers=head_cost + guessing_layers)


def guessing_layers(spec: MedhaReplicaSpec) -> int:
    """Return the time of a replica's prediction head, in units of one layer's time: one rank computes all of it."""
    return 0 if spec.scheduling.speculation.prediction_head is None else spec.parallelism.tensor


def text_names(names: Iterable[str], config: ModelConfig) -> dict[str, str]:
    """Return a checkpoint's tensors by the names that a text model has for them.

    In a checkpoint of a model that also sees images, these tensors have a prefix; all other tensors are left out.
    """
    if config.family.model_type not in TEXT_CONFIGS:
        return {name: name for name in names}
    found: dict[str, str] = {}
    for name in names:
        if name.removeprefix("model.").startswith(_OF_IMAGES):
            continue
        prefix = next((prefix for prefix in _TEXT_PREFIXES if name.startswith(prefix)), "")
        found[_TEXT_PREFIXES.get(prefix, "") + name.removeprefix(prefix)] = name
    return found


def tensors_of_stage(names: Iterable[str], config: ModelConfig, layers: range) -> set[str]:
    """Return the tensors of a checkpoint that the ranks of a stage with `layers` read.

    Raises:
        CheckpointInvalid: the name of a layer's tensor lacks the layer's number.
    """
    is_first, is_last = layers.start == 0, layers.stop == config.num_layers

    def is_read(name: str) -> bool:
        if name.startswith(_LAYER):
            return _layer_of(name) in layers
        if name == EMBEDDING:
            return is_first or (is_last and config.tie_word_embeddings)
        return is_last and (name == FINAL_NORM or name.startswith(HEAD))

    return set(filter(is_read, names))


def _layer_of(name: str) -> int:
    try:
        return int(name.removeprefix(_LAYER).partition(".")[0])
    except ValueError as error:
        raise CheckpointInvalid(
            f"the checkpoint has a tensor {shown(name)}, but a number must follow {_LAYER!r}; fetch it again, or choose another"
        ) from error
