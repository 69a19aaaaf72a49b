"""The fields that a checkpoint's `config.json` may leave out, with the values that `transformers` takes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

CONFIG_DEFAULTS: Mapping[str, Mapping[str, int | bool]] = MappingProxyType(
    {
        "gemma3_text": MappingProxyType(
            {
                "vocab_size": 262_208,
                "hidden_size": 2304,
                "intermediate_size": 9216,
                "num_hidden_layers": 26,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "head_dim": 256,
                "max_position_embeddings": 131_072,
                "tie_word_embeddings": True,
            }
        )
    }
)
"""Sizes that may be missing, by model type: published files of these leave some out."""

TEXT_CONFIGS: Mapping[str, tuple[str, str]] = MappingProxyType({"gemma3": ("text_config", "gemma3_text")})
"""The field with the text model's configuration, and the type of that model, by the type of models that also see images."""

_SAME_MODELS: Mapping[str, str] = MappingProxyType({"kimi_k2": "deepseek_v3"})
"""Model types whose fields and tensors are those of another type: Kimi K2 has the code of DeepSeek-V3 under a name of its own."""

_OF_WHOLE_MODEL = ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config", "compression_config")


def same_model_type(kind: object) -> object:
    """Return the type whose fields and tensors a model of type `kind` has: its own, but for a few."""
    return _SAME_MODELS.get(kind, kind) if isinstance(kind, str) else kind


def text_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the text model in a config.json, which may hold them inside, with defaults for missing ones.

    A field of the text model that is no object counts as empty.
    """
    kind = values.get("model_type")
    if isinstance(kind, str) and kind in TEXT_CONFIGS:
        name, kind = TEXT_CONFIGS[kind]
        inner = values.get(name)
        outer = {name: values[name] for name in _OF_WHOLE_MODEL if values.get(name) is not None}
        values = {**(inner if isinstance(inner, dict) else {}), **outer, "model_type": kind}
    defaults = CONFIG_DEFAULTS.get(kind, {}) if isinstance(kind, str) else {}
    return {**defaults, **values}
