"""Quantised checkpoints beside their references: models of `transformers` with the rounded weights and activations.

The rounding of activations is written here a second time, by the formulas of compressed-tensors 0.20.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows it by
from safetensors.torch import load_file, save_file

from medha.linear_sizes import HEADS_UP
from medha.quantisation import ActivationFormat, decode
from medha_worker.checkpoints.quantised_checkpoint import (
    EXPERT_QUANTISATIONS,
    QUANTISATIONS,
    quantise,
    quantise_experts,
)

STATIC_SCALE = 8.0 / 448.0
"""The `input_scale` of checkpoints made here."""

Rounding = Callable[[torch.Tensor], torch.Tensor]


def with_sizes(name: str, group_size: int) -> dict[str, Any]:
    """Return the settings of a format with groups, or blocks, of this size."""
    settings: dict[str, Any] = json.loads(json.dumps(QUANTISATIONS[name]))
    if "weight_block_size" in settings:
        settings["weight_block_size"] = [group_size, group_size]
    elif "group_size" in settings:
        settings["group_size"] = group_size
    elif "group_size" in (weights := settings["config_groups"]["group_0"]["weights"]):
        weights["group_size"] = group_size
    return settings


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
