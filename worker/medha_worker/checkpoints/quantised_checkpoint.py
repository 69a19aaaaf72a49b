"""Writes quantised checkpoints: rounds the weights of linears, and packs them as a `quantization_config` says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from medha.model.quantisation import MXFP4_BLOCK, WeightFormat, decode

_LINEARS = ("_proj", "lm_head", "kv_a_proj_with_mqa", ".w1", ".w2", ".w3")
"""Ends of the names of linears that may be quantised; routers are not among them."""

_OF_HEADS = "eh_proj"
"""End of the name of a prediction head's projection, which published files hold unquantised."""

_FLOAT8_MAX = 448.0
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def _compressed(
    form: str,
    weights: dict[str, Any],
    activations: dict[str, Any] | None = None,
    kv_cache: dict[str, Any] | None = None,
) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": activations,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": kv_cache,
    }


def _numbers(kind: str, bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "num_bits": bits, "strategy": strategy, "symmetric": True, "dynamic": False} | more


QUANTISATIONS: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "w8a8": _compressed(
            "int-quantized", _numbers("int", 8, "channel"), _numbers("int", 8, "token", dynamic=True)
        ),
        "w4a16": _compressed("pack-quantized", _numbers("int", 4, "group", group_size=32)),
        "w4a16-asym": _compressed(
            "pack-quantized", _numbers("int", 4, "group", group_size=32, symmetric=False)
        ),
        "fp8-block": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
        "fp8-block-ue8m0": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "scale_fmt": "ue8m0",
        },
        "fp8": _compressed(
            "float-quantized", _numbers("float", 8, "channel"), _numbers("float", 8, "token", dynamic=True)
        ),
        "fp8-tensor": _compressed(
            "float-quantized", _numbers("float", 8, "tensor"), _numbers("float", 8, "tensor")
        ),
        "fp8-kv": _compressed(
            "float-quantized",
            _numbers("float", 8, "channel"),
            _numbers("float", 8, "token", dynamic=True),
            _numbers("float", 8, "tensor"),
        ),
        "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        "gptq": {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 32,
            "desc_act": False,
            "sym": True,
            "checkpoint_format": "gptq",
        },
        "gptq-desc-act": {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 32,
            "desc_act": True,
            "sym": False,
            "checkpoint_format": "gptq",
        },
    }
)
"""The `quantization_config` of each format that checkpoints are made in."""

EXPERT_QUANTISATIONS: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "mxfp4": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        }
    }
)
"""The `quantization_config` of each format that experts are made in."""

_FLOAT4_SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FLOAT4_EXPONENT = 2  # of the largest size
_SCALE_BIAS = 127


@dataclass(frozen=True)
class RoundedWeight:
    """A weight, [rows, columns], in the numbers of a format: (values - zero) x scale.

    `scale` and `zero` are [row blocks, groups]; `group_of` has the group of each column.
    """

    values: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    group_of: torch.Tensor
    block_rows: int

    @property
    def numbers(self) -> torch.Tensor:
        """The rounded weight, float32 [rows, columns]."""
        block_of = torch.arange(self.values.shape[0]) // self.block_rows
        scale = self.scale.float()[block_of][:, self.group_of]
        zero = 0 if self.zero is None else self.zero.float()[block_of][:, self.group_of]
        return (self.values.float() - zero) * scale


def quantise(
    weights: Mapping[str, torch.Tensor], settings: dict[str, Any], seed: int = 0
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return a checkpoint's tensors with its linears quantised by `settings`, a `quantization_config`; and their numbers.

    The numbers are the rounded weights of all quantised layers, float32, by the layer's name. If a format stores the group of
    each column, `seed` decides which columns share one.
    """
    description = decode(settings)
    stored, numbers = {}, {}
    for name, weight in weights.items():
        layer = name.removesuffix(".weight")
        is_linear = layer.endswith(_LINEARS) and not layer.endswith(_OF_HEADS)
        form = description.format_of(layer) if is_linear else None
        if form is None or not name.endswith(".weight"):
            stored[name] = weight
            continue
        form.require_divisible(layer, *weight.shape)
        made = round_weight(weight, form, seed)
        numbers[layer] = made.numbers
        stored |= {f"{layer}.{part}": tensor.contiguous() for part, tensor in pack(made, form).items()}
        kind = layer[-len("k_proj") :]
        if description.kv_scales is not None and kind in _KV_SCALES:
            stored[f"{layer.removesuffix(kind)}{_KV_SCALES[kind]}"] = _kv_scale(weight)
    return stored, numbers


_KV_SCALES = {"k_proj": "k_scale", "v_proj": "v_scale"}


def _kv_scale(weight: torch.Tensor) -> torch.Tensor:
    """Return a scale, [1], for what a weight makes of random inputs of size 1: up to eight standard deviations."""
    largest: torch.Tensor = 8.0 * weight.float().norm(dim=1).max()
    return (largest / _FLOAT8_MAX).to(weight.dtype).view(1)


def round_weight(weight: torch.Tensor, form: WeightFormat, seed: int = 0) -> RoundedWeight:
    """Return a weight rounded to the nearest numbers of a format, with the scales that its largest values need."""
    rows, columns = weight.shape
    height, width = form.block_rows or rows, form.group_size or columns
    order = torch.arange(columns)
    if form.has_group_index:
        order = torch.randperm(columns, generator=torch.Generator().manual_seed(seed))
    group_of = torch.empty(columns, dtype=torch.int64)
    group_of[order] = torch.arange(columns) // width
    blocks, groups = -(-rows // height), -(-columns // width)
    tiles = torch.zeros(blocks * height, groups * width)
    tiles[:rows, :columns] = weight.float()[:, order]
    tiles = tiles.view(blocks, height, groups, width)

    scale_dtype = torch.float16 if form.layout in ("awq", "gptq") else weight.dtype
    scale_dtype = torch.float32 if form.scale_name == "weight_scale_inv" else scale_dtype
    most = _FLOAT8_MAX if form.is_float else 2 ** (form.bits - 1) - 1
    zero = None
    if form.has_zero_points:
        least, largest = tiles.amin((1, 3)).clamp(max=0), tiles.amax((1, 3)).clamp(min=0)
        scale = _usable((largest - least) / (2**form.bits - 1), scale_dtype)
        zero = (-least / scale.float()).round().clamp(form.zero_point_offset, 2**form.bits - 1)
    else:
        scale = tiles.abs().amax((1, 3)) / most
        if form.activations is not None and form.activations.has_power_scales:
            scale = torch.exp2(torch.log2(scale).ceil())
        scale = _usable(scale, scale_dtype)
    steps = tiles / scale.float()[:, None, :, None]
    if form.is_float:
        steps = steps.clamp(-most, most)
    elif zero is not None:
        steps = (steps.round() + zero[:, None, :, None]).clamp(0, 2**form.bits - 1)
    else:
        steps = steps.round().clamp(-most - 1, most)
    values = torch.empty(rows, columns)
    values[:, order] = steps.reshape(blocks * height, groups * width)[:rows, :columns]
    if form.is_float:
        values = values.to(torch.float8_e4m3fn).float()
    return RoundedWeight(values, scale, zero, group_of, height)


def _usable(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return scales in the type that stores them, and 1 in place of 0: any scale is right for values that are all 0."""
    scale = scale.to(dtype)
    return scale.masked_fill(scale == 0, 1.0)


def pack(made: RoundedWeight, form: WeightFormat) -> dict[str, torch.Tensor]:
    """Return the tensors that store a rounded weight, by their names without the layer's."""
    if form.layout in ("awq", "gptq"):
        assert made.zero is not None
        zero, values = made.zero.t() - form.zero_point_offset, made.values.t()
        if form.layout == "awq":
            found = {"qweight": _words(values, 4, _AWQ_ORDER), "qzeros": _words(zero, 4, _AWQ_ORDER)}
        else:
            found = {"qweight": _words(made.values, form.bits).t(), "qzeros": _words(zero, form.bits)}
            found["g_idx"] = made.group_of.int()
        return found | {"scales": made.scale.t()}
    if form.layout == "packed":
        offset = 0 if form.has_zero_points else 2 ** (form.bits - 1)
        found = {
            "weight_packed": _words(made.values + offset, form.bits),
            "weight_shape": torch.tensor(made.values.shape),
        }
        if made.zero is not None:
            found["weight_zero_point"] = _words(made.zero.t(), form.bits).t()
        if form.has_group_index:
            found["weight_g_idx"] = made.group_of.int()
    else:
        shift = 128 if form.has_zero_points else 0  # bytes are signed
        found = {"weight": (made.values - shift).to(torch.float8_e4m3fn if form.is_float else torch.int8)}
        if made.zero is not None:
            found["weight_zero_point"] = (made.zero - shift).to(torch.int8)
    found[form.scale_name] = made.scale.reshape(1) if form.block_rows is None else made.scale
    if form.activations is not None and form.activations.is_static:
        found["input_scale"] = torch.tensor([8.0 / _FLOAT8_MAX], dtype=made.scale.dtype)
    return found


def _words(values: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Return values without a sign, [rows, columns], packed along columns into int32, the first in the lowest bits.

    `order` has the places, within each word's columns, of the values from the lowest bits on.
    """
    each = 32 // bits
    padded = torch.nn.functional.pad(values.to(torch.int64), (0, -values.shape[1] % each))
    columns = padded.view(values.shape[0], -1, each)[..., list(order or range(each))]
    words = (columns << (bits * torch.arange(each))).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def quantise_experts(
    weights: Mapping[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return a gpt-oss checkpoint's tensors with its experts in MXFP4; and the numbers that these stand for.

    The second are float32, of the shape of the weights, by their names.
    """
    stored, numbers = {}, {}
    for name, weight in weights.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = weight
            continue
        blocks, scales, rounded = round_mxfp4(weight.transpose(1, 2))
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        numbers[name] = rounded.transpose(1, 2).contiguous()
    return stored, numbers


def round_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a weight, [..., columns], as MXFP4: bytes [..., blocks, 16], scales [..., blocks], and the rounded numbers.

    The scale of a block is the power of two that its largest value needs, as the OCP specification has it.
    """
    tiles = weight.float().reshape(*weight.shape[:-1], -1, MXFP4_BLOCK)
    largest = tiles.abs().amax(-1)
    exponent = torch.frexp(largest).exponent - 1 - _FLOAT4_EXPONENT
    scales = (exponent + _SCALE_BIAS).clamp(0, 254).masked_fill(largest == 0, _SCALE_BIAS)
    power = torch.ldexp(torch.ones_like(largest), scales - _SCALE_BIAS)[..., None]
    sizes = torch.tensor(_FLOAT4_SIZES)
    borders = (sizes[1:] + sizes[:-1]) / 2
    size = torch.bucketize((tiles / power).abs().contiguous(), borders)
    values = size + 8 * (tiles < 0)
    blocks = (values[..., ::2] + 16 * values[..., 1::2]).to(torch.uint8)
    rounded = sizes[size] * torch.where(tiles < 0, -1.0, 1.0) * power
    return blocks, scales.to(torch.uint8), rounded.flatten(-2)
