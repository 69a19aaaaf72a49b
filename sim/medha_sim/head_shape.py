"""The memory that a prediction head takes on the GPU that samples, and the sizes that its time follows from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from medha.cost.hardware import ModelShape
from medha.errors import ConfigInvalid

_COLLECTED = 3
"""Layers of the model whose hidden states an EAGLE-3 head takes."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """A prediction head: its name, its weights in bytes, and the bytes of its KV of a token.

    `layer` has the sizes of its layer and of its output head; the small projections before the layer are not in it.
    """

    name: str
    weights_bytes: int
    kv_bytes_per_token: int
    layer: ModelShape


def mtp_shape(model: ModelShape, where: str = "--prediction-head mtp") -> HeadShape:
    """Return the MTP layer of a model: a layer as its last one, with an embedding, an output head and a projection.

    `where` names in errors what asks for it.

    Raises:
        ConfigInvalid: no model of this kind has one.
    """
    if model.latent is None or model.experts is None:
        raise ConfigInvalid(
            f"{where}: {model.name} is no DeepSeek-V3, which alone has MTP layers; choose that model, or an EAGLE-3 head"
        )
    layer = replace(model, layers=1, experts=replace(model.experts, layers=1), tied_embeddings=False)
    projection = 2 * model.hidden * model.hidden * model.dtype_bytes
    return HeadShape("its MTP layer", layer.weights_bytes + projection, layer.kv_bytes_per_token, layer)


def read_eagle3_shape(config: Path, model: ModelShape) -> HeadShape:
    """Read the EAGLE-3 head of a model from its `config.json`, or from the folder that holds it.

    The embedding counts, although a head on the only GPU shares the model's.

    Raises:
        ConfigInvalid: the file cannot be read, or a size is missing.
    """
    path = config / "config.json" if config.is_dir() else config
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigInvalid(
            f"--prediction-head {config}: {error}; give mtp, or the folder of an EAGLE-3 head"
        ) from error
    if not isinstance(values, dict):
        raise ConfigInvalid(f"{path}: is no JSON object; give mtp, or the folder of an EAGLE-3 head")
    layer = values.get("transformer_layer_config")
    sizes = {**layer, **values} if isinstance(layer, dict) else values

    hidden, heads = _size(path, sizes, "hidden_size"), _size(path, sizes, "num_attention_heads")
    kv_heads = _size(path, sizes, "num_key_value_heads", heads)
    head_dim = _size(path, sizes, "head_dim", hidden // heads)
    vocabulary = _size(path, sizes, "vocab_size")
    attention = hidden * head_dim * (3 * heads + 4 * kv_heads)  # q, k and v have two inputs, and o one
    intermediate, guessed = (
        _size(path, sizes, "intermediate_size"),
        _size(path, sizes, "draft_vocab_size", vocabulary),
    )
    parameters = attention + 3 * hidden * intermediate + hidden * (vocabulary + guessed)
    parameters += _COLLECTED * model.hidden * hidden
    name = path.parent.name or "the head"
    layer = ModelShape(
        name,
        1,
        hidden,
        heads,
        kv_heads,
        head_dim,
        intermediate,
        guessed,
        model.dtype_bytes,
        model.kv_dtype_bytes,
    )
    return HeadShape(name, parameters * model.dtype_bytes, layer.kv_bytes_per_token, layer)


def _size(path: Path, values: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = default if values.get(name) is None else values[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigInvalid(f"{path}: {name} is {value!r}; it must be a positive whole number")
    return value
