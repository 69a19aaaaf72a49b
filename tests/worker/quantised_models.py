"""Quantised checkpoints beside their references: models of `transformers` with the rounded weights and activations.

The rounding of activations is written here a second time, by the formulas of compressed-tensors 0.20.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows it by
from safetensors.torch import load_file, save_file

from medha.model.linear_sizes import HEADS_UP
from medha.model.quantisation import ActivationFormat, decode
from medha_worker.checkpoints.quantised_checkpoint import (
    EXPERT_QUANTISATIONS,
    QUANTISATIONS,
    quantise,
    quantise_experts,
)

STATIC_SCALE = 8.0 / 448.0
"""The `input_scale` of checkpoints made here."""

Rounding = Callable[[torch.Tensor], torch.Tensor]


def _changed(
    name: str,
    *,
    form: str | None = None,
    weights: Mapping[str, Any] | None = None,
    activations: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the settings of a format of compressed-tensors with other fields; empty `activations` are not rounded.

    `form` is named for the group, too, because the package does not choose it for such layers by itself.
    """
    settings: dict[str, Any] = json.loads(json.dumps(QUANTISATIONS[name]))
    group = settings["config_groups"]["group_0"]
    group["weights"] |= weights or {}
    if activations is not None:
        group["input_activations"] = (
            {**(group["input_activations"] or {}), **activations} if activations else None
        )
    if form is not None:
        settings["format"] = group["format"] = form
    return settings


_OF_CHANNEL = {"strategy": "channel", "group_size": None}
_IN_GROUPS = {"strategy": "group", "group_size": 32}
_IN_BLOCKS = {"strategy": "block", "block_structure": [128, 128]}
_STATIC = {"strategy": "tensor", "dynamic": False}
_INT8_OF_TOKEN = {"type": "int", "num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}
FURTHER: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "w4a16-channel": _changed("w4a16", weights=_OF_CHANNEL),
        "w4a16-actorder": _changed("w4a16", weights={"actorder": "group"}),
        "w4a8": _changed("w4a16", form="pack-quantized", activations=_INT8_OF_TOKEN),
        "w8a16-packed": _changed("w4a16", weights={"num_bits": 8} | _OF_CHANNEL),
        "w8a16-packed-group": _changed("w4a16", weights={"num_bits": 8}),
        "w8a16-packed-asym": _changed("w4a16-asym", weights={"num_bits": 8}),
        "w8a16": _changed("w8a8", form="naive-quantized", activations={}),
        "w8a8-tensor": _changed("w8a8", weights={"strategy": "tensor"}),
        "w8a8-group": _changed("w8a8", weights=_IN_GROUPS),
        "w8a8-asym": _changed("w8a8", weights={"symmetric": False}),
        "w8a8-static": _changed("w8a8", activations=_STATIC),
        "fp8-weights": _changed("fp8", form="naive-quantized", activations={}),
        "fp8-tensor-token": _changed("fp8-tensor", activations={"strategy": "token", "dynamic": True}),
        "fp8-channel-static": _changed("fp8", activations=_STATIC),
        "fp8-group": _changed("fp8", weights=_IN_GROUPS),
        "fp8-compressed-block": _changed("fp8", weights=_IN_BLOCKS, activations=_IN_GROUPS),
        "gptq-8": QUANTISATIONS["gptq"] | {"bits": 8},
        "gptq-8-desc-act": QUANTISATIONS["gptq-desc-act"] | {"bits": 8},
        "gptq-v2": QUANTISATIONS["gptq"] | {"checkpoint_format": "gptq_v2"},
    }
)
"""The `quantization_config` of formats that Medha serves, and that `medha model init` does not make."""

FORMATS: Mapping[str, dict[str, Any]] = MappingProxyType({**QUANTISATIONS, **FURTHER})
"""The `quantization_config` of each format that checkpoints are made in here."""


def with_sizes(name: str, group_size: int) -> dict[str, Any]:
    """Return the settings of a format with groups, or blocks, of this size."""
    settings: dict[str, Any] = json.loads(json.dumps(FORMATS[name]))
    if "weight_block_size" in settings:
        settings["weight_block_size"] = [group_size, group_size]
    elif "group_size" in settings:
        settings["group_size"] = group_size
    else:
        group = settings["config_groups"]["group_0"]
        for numbers in (group["weights"], group["input_activations"] or {}):
            if numbers.get("group_size") is not None:
                numbers["group_size"] = group_size
            if "block_structure" in numbers:
                numbers["block_structure"] = [group_size, group_size]
    return settings


def activations_of(name: str) -> ActivationFormat | None:
    """Return the rounding of activations in a format; None if they are as they are."""
    ((_, form),) = decode(FORMATS[name]).formats
    return form.activations


def rounding_of(form: ActivationFormat, *, is_smooth: bool = False) -> Rounding:
    """Return the rounding of activations that a format asks for; `is_smooth`: with `bend` in place of its steps."""

    def nearest(steps: torch.Tensor) -> torch.Tensor:
        if is_smooth:
            return bend(steps)
        if form.kind == "int8":
            return torch.clamp(torch.round(steps), -128, 127)
        return steps.clamp(-448, 448).to(torch.float8_e4m3fn).to(steps.dtype)

    def dynamic(x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(-1, keepdim=True) / (127.5 if form.kind == "int8" else 448)
        scale = scale.masked_fill(
            scale == 0, torch.finfo(scale.dtype).eps
        )  # a row may be zero, as that of a pad token
        if form.has_power_scales:
            scale = torch.exp2(scale.double().log2().ceil()).float()
        return nearest(x / scale) * scale

    def static(x: torch.Tensor) -> torch.Tensor:
        scale = torch.tensor([STATIC_SCALE])
        return (nearest(x / scale) * scale).to(x.dtype)

    if form.group_size is not None:
        return lambda x: torch.cat([dynamic(part) for part in x.split(form.group_size or 1, dim=-1)], dim=-1)
    return static if form.is_static else dynamic


def bend(steps: torch.Tensor, *_: object) -> torch.Tensor:
    """Stand in for the rounding of steps: it depends on scales as much, but a last bit decides nothing."""
    return steps + 0.1 * steps.sin()


def quantise_checkpoint(
    directory: Path, reference: Any, settings: dict[str, Any], *, is_smooth: bool = False
) -> None:
    """Rewrite a checkpoint of one file in a quantised format, and make `reference` compute what that stands for."""
    path, config = directory / "model.safetensors", directory / "config.json"
    stored, numbers = quantise(load_file(path), settings)
    save_file(stored, path)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": settings}))
    description = decode(settings)
    for layer, weight in numbers.items():
        form = description.format_of(layer)
        assert form is not None
        rounding = None if form.activations is None else rounding_of(form.activations, is_smooth=is_smooth)
        index, expert = re.search(r"layers\.(\d+)\.", layer), re.search(r"\.experts\.(\d+)\.", layer)
        if expert is None or index is None:
            is_absorbed = layer.endswith(HEADS_UP)  # whose input is not rounded
            replace_linear(reference.get_submodule(layer), weight, None if is_absorbed else rounding)
        else:
            experts = reference.model.layers[int(index[1])].mlp.experts
            replace_expert(experts, int(expert[1]), layer.rpartition(".")[2], weight, rounding)


def replace_linear(module: Any, weight: torch.Tensor, rounding: Rounding | None) -> None:
    with torch.no_grad():
        module.weight.copy_(weight)
    if rounding is not None:
        module.register_forward_pre_hook(lambda _, inputs: (rounding(inputs[0]),))


def replace_expert(
    experts: Any, expert: int, linear: str, weight: torch.Tensor, rounding: Rounding | None
) -> None:
    """Give one linear of an expert other weights; all experts then round what enters their linears, if that is asked for."""
    place = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1}.get(linear)
    with torch.no_grad():
        if place is None:
            experts.down_proj[expert].copy_(weight)
        else:
            experts.gate_up_proj[expert].view(2, *weight.shape)[place].copy_(weight)

    def forward(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(x)
        for one in chosen.unique().tolist():
            rows, places = torch.where(chosen == one)
            gate, up = F.linear(rounding(x[rows]), experts.gate_up_proj[one]).chunk(2, dim=-1)
            found = F.linear(rounding(experts.act_fn(gate) * up), experts.down_proj[one])
            total.index_add_(0, rows, found * weights[rows, places, None])
        return total

    if rounding is not None:
        experts.forward = forward


def quantise_experts_of(directory: Path, reference: Any) -> None:
    """Rewrite a gpt-oss checkpoint of one file with experts in MXFP4, and make `reference` compute what these stand for."""
    path, config = directory / "model.safetensors", directory / "config.json"
    stored, numbers = quantise_experts(load_file(path))
    save_file(stored, path)
    settings = {"quantization_config": EXPERT_QUANTISATIONS["mxfp4"]}
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))
    with torch.no_grad():
        for name, weight in numbers.items():
            reference.get_parameter(name).copy_(weight)
