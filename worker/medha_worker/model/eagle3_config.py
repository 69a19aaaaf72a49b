"""The EAGLE-3 head that a checkpoint's `config.json` describes, checked against the model that it is served with.

Two forms are published: the fields of a Llama with those of the head beside them (`LlamaForCausalLMEagle3`, as its authors
and SpecForge write it), and the format of the library speculators, which has the layer in `transformer_layer_config`. A
field that changes results is read or refused. Reading needs no torch.

Reference: EAGLE-3 (arXiv 2503.01840), and the configurations that vLLM, SGLang and SpecForge read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medha.errors import CheckpointInvalid, ConfigInvalid, ModelUnsupported
from medha_worker.model.model_config import ModelConfig, read_json

FLAT = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
"""Architectures whose config.json is flat."""
NESTED = ("Eagle3Speculator", "Eagle3DraftModel")
"""Architectures in the format of speculators."""
_LLAMA = "LlamaForCausalLM"
"""The architecture that the authors' own heads name. `draft_vocab_size` distinguishes them from a model."""
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_NOT_GIVEN: tuple[object, ...] = (None, [])
"""Layers that stand for the default; Model Optimizer writes an empty list."""
_COLLECTED = 3
_OFF: dict[str, tuple[object, ...]] = {
    "norm_before_fc": (None, False),
    "fc_norm": (None, False),
    "norm_output": (None, False),
    "parallel_drafting": (None, False),
    "quantization_config": (None,),
}
"""Fields of variants that are not supported, with the values that switch them off."""


@dataclass(frozen=True)
class Eagle3Config:
    """Shape and arithmetic of an EAGLE-3 head.

    Attributes:
        layer: Its layer, as that of a Llama with the vocabulary of the served model; q, k and v have twice the inputs.
        collected: Layers of the served model before which its hidden states are taken, in ascending order; the number of
            layers stands for the place after the last one.
        target_hidden_size: Width of those hidden states.
        draft_vocab_size: Tokens that the head can guess.
        norms_before_residual: Whether the layer adds its results to its normed input, and not to the input itself.
    """

    layer: ModelConfig
    collected: tuple[int, ...]
    target_hidden_size: int
    draft_vocab_size: int
    norms_before_residual: bool

    @classmethod
    def from_directory(cls, directory: Path, target: ModelConfig) -> Eagle3Config:
        """Read `config.json` in `directory`, for a head of the model of `target`.

        Raises:
            CheckpointInvalid: the file is missing, or its values contradict each other.
            ModelUnsupported: the head is of another kind, or needs something that is not implemented.
            ConfigInvalid: it is the head of another model.
        """
        values = _flattened(read_json(directory / "config.json"))
        for name, allowed in _OFF.items():
            if values.get(name) not in allowed:
                raise _unsupported(name, values[name], "choose a head without it")
        _require(values, "num_hidden_layers", 1, "heads of one layer are supported; choose one")
        if values.get("model_type") not in (None, "llama"):
            raise _unsupported(
                "model_type", values["model_type"], "choose a head whose layer is that of a llama"
            )
        eagle = values.get("eagle_config") or {}
        if not isinstance(eagle, Mapping):
            raise CheckpointInvalid(
                f"config.json: eagle_config is {eagle!r}, but must be an object; correct it"
            )
        if eagle.get("use_aux_hidden_state", True) is not True:
            raise _unsupported(
                "eagle_config.use_aux_hidden_state",
                eagle["use_aux_hidden_state"],
                "choose a head that takes the hidden states of three layers",
            )
        width = "hidden_size" if values.get("target_hidden_size") is None else "target_hidden_size"
        of_another = "choose a head that was trained for the served model"
        _require(
            values, width, target.hidden_size, f"it must be the served model's hidden_size; {of_another}"
        )
        _require(values, "vocab_size", target.vocab_size, f"it must be the served model's; {of_another}")
        normed = values.get("norm_before_residual", False)
        if not isinstance(normed, bool):
            raise CheckpointInvalid(
                f"config.json: norm_before_residual is {normed!r}, but must be true or false; correct it"
            )
        return cls(
            layer=_layer(values, target),
            collected=_collected(values, eagle, target),
            target_hidden_size=target.hidden_size,
            draft_vocab_size=_draft_vocab_size(values, target),
            norms_before_residual=normed,
        )

    @property
    def needs_own_embedding(self) -> bool:
        """True if the served model's embedding is of another width."""
        return self.layer.hidden_size != self.target_hidden_size

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the tensors of a head that it must have, with their shapes; those of its layer begin with `midlayer.`."""
        layer, hidden = self.layer, self.layer.hidden_size
        queries, keys = layer.num_query_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        attention, mlp = "midlayer.self_attn.", "midlayer.mlp."
        found: dict[str, tuple[int, ...]] = {
            "fc.weight": (hidden, len(self.collected) * self.target_hidden_size),
            "midlayer.input_layernorm.weight": (hidden,),
            "midlayer.hidden_norm.weight": (hidden,),
            "midlayer.post_attention_layernorm.weight": (hidden,),
            f"{attention}q_proj.weight": (queries, 2 * hidden),
            f"{attention}k_proj.weight": (keys, 2 * hidden),
            f"{attention}v_proj.weight": (keys, 2 * hidden),
            f"{attention}o_proj.weight": (hidden, queries),
            f"{mlp}gate_proj.weight": (layer.intermediate_size, hidden),
            f"{mlp}up_proj.weight": (layer.intermediate_size, hidden),
            f"{mlp}down_proj.weight": (hidden, layer.intermediate_size),
            "norm.weight": (hidden,),
            "lm_head.weight": (self.draft_vocab_size, hidden),
        }
        biased = [f"{attention}{name}_proj" for name in "qkv"] if layer.qkv_bias else []
        biased += [f"{attention}o_proj"] if layer.output_bias else []
        biased += [f"{mlp}{name}_proj" for name in ("gate", "up", "down")] if layer.mlp_bias else []
        found |= {f"{name}.bias": found[f"{name}.weight"][:1] for name in biased}
        if self.draft_vocab_size < layer.vocab_size:
            found["d2t"] = (self.draft_vocab_size,)
        if self.needs_own_embedding:
            found["embed_tokens.weight"] = self.embedding_shape
        return found

    def weights_bytes(self, element_bytes: int) -> int:
        """Return the memory of the head's tensors beside an embedding that it shares with the served model."""
        return sum(map(math.prod, self.shapes().values())) * element_bytes

    @property
    def embedding_shape(self) -> tuple[int, ...]:
        """Shape of the embedding, of its own or of the served model."""
        return self.layer.vocab_size, self.layer.hidden_size


def _flattened(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the head and of its layer side by side, with the defaults of its form."""
    names = values.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    if name in FLAT or (name == _LLAMA and values.get("draft_vocab_size") is not None):
        return dict(values)
    if name not in NESTED:
        raise ModelUnsupported(
            f"config.json: architectures is {names!r}, which is no EAGLE-3 head that is supported; choose one of "
            f"{', '.join((*FLAT, *NESTED))}, or {_LLAMA} with draft_vocab_size"
        )
    layer = values.get("transformer_layer_config")
    if not isinstance(layer, Mapping):
        raise CheckpointInvalid(
            f"config.json: transformer_layer_config is {layer!r}, but must be an object, as architectures says {name}; "
            "fetch the checkpoint again"
        )
    return {
        "norm_before_residual": True,
        **layer,
        **_without(values, "transformer_layer_config", "model_type"),
    }


def _without(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def _layer(values: Mapping[str, Any], target: ModelConfig) -> ModelConfig:
    """Return the layer as a Llama of one layer that reads as long sequences as the served model.

    A head is trained with shorter ones than it is used for, which its `max_position_embeddings` often states.
    """
    longest = values.get("max_position_embeddings")
    longest = longest if isinstance(longest, int) else 0
    fields = _without(values, "eagle_config", "target_hidden_size", "draft_vocab_size") | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": max(longest, target.max_model_len),
        "tie_word_embeddings": False,
    }
    return ModelConfig.from_values(fields, target.max_model_len, kv_dtype=target.kv_dtype)


def _draft_vocab_size(values: Mapping[str, Any], target: ModelConfig) -> int:
    found = values.get("draft_vocab_size")
    if found is None:
        return target.vocab_size
    if isinstance(found, bool) or not isinstance(found, int) or not 0 < found <= target.vocab_size:
        raise CheckpointInvalid(
            f"config.json: draft_vocab_size is {found!r}, but must be a whole number from 1 to vocab_size "
            f"({target.vocab_size}); fetch the checkpoint again"
        )
    return found


def _collected(values: Mapping[str, Any], eagle: Mapping[str, Any], target: ModelConfig) -> tuple[int, ...]:
    """Return the layers before which hidden states are taken.

    In `eagle_config`, a number means the layer whose result is taken (SpecForge, SGLang); beside the other fields, the one
    whose input is (vLLM, speculators).
    """
    layers = target.num_layers
    if values.get(_LAYER_IDS) not in _NOT_GIVEN:
        name, given, shift = _LAYER_IDS, values[_LAYER_IDS], 0
    elif eagle.get(_LAYER_IDS) not in _NOT_GIVEN:
        name, given, shift = f"eagle_config.{_LAYER_IDS}", eagle[_LAYER_IDS], 1
    else:
        found = (2, layers // 2, layers - 3)
        if not _ascends(found, layers):
            raise ConfigInvalid(
                f"config.json: {_LAYER_IDS} is missing, and the default of {list(found)} does not fit the {layers} layers of "
                "the served model; name three layers there, or choose a head that was trained for it"
            )
        return found
    most = layers - shift
    if not isinstance(given, list) or len(given) != _COLLECTED or not _ascends(given, most):
        raise ConfigInvalid(
            f"config.json: {name} is {given!r}, but must be {_COLLECTED} ascending layers from 0 to {most}, as the served "
            f"model has {layers}; choose a head that was trained for it"
        )
    return tuple(layer + shift for layer in given)


def _ascends(layers: Sequence[object], most: int) -> bool:
    """Return whether these are ascending whole numbers from 0 to `most`."""
    numbers = [one for one in layers if isinstance(one, int) and not isinstance(one, bool)]
    return (
        len(numbers) == len(layers)
        and sorted(set(numbers)) == numbers
        and numbers[0] >= 0
        and numbers[-1] <= most
    )


def _require(values: Mapping[str, Any], name: str, wanted: int, why: str) -> None:
    if values.get(name) != wanted:
        raise ConfigInvalid(f"config.json: {name} is {values.get(name)!r}, not {wanted}: {why}")


def _unsupported(name: str, value: object, remedy: str) -> ModelUnsupported:
    return ModelUnsupported(f"config.json: {name} is {value!r}, which is not supported; {remedy}")
