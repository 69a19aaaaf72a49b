"""Models of `transformers` that round K and V to FP8, with the scales that a rank has, before any row attends to them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from medha_worker.model.kv_scales import LayerScales
from medha_worker.model.model_config import ModelConfig

from .models import load_model


def scales_of(directory: Path) -> list[LayerScales]:
    """Return the scales of all layers of a checkpoint, as a rank that has the whole model finds them."""
    model = load_model(directory, ModelConfig.from_directory(directory, kv_dtype="fp8"))
    scales = model._weights.kv_scales
    assert scales is not None
    return list(scales)


def to_fp8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the nearest numbers of FP8 times a scale, of the largest size at most."""
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) * scale


def round_kv(directory: Path, reference: Any) -> None:
    """Make the reference of a checkpoint round its K and V, or its latent rows."""
    scales = scales_of(directory)
    latent_rank = getattr(reference.config, "kv_lora_rank", None)
    if latent_rank is not None:
        for layer, one in zip(reference.model.layers, scales, strict=True):
            latent_scale = one.keys[:, :latent_rank]
            layer.self_attn.kv_a_layernorm.register_forward_hook(
                lambda _module, _inputs, latent, scale=latent_scale: to_fp8(latent, scale)
            )

    def attend(
        module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **more: Any
    ) -> Any:
        one = scales[module.layer_idx]
        if latent_rank is None:
            k, v = to_fp8(k, one.keys[:, None]), to_fp8(v, one.values[:, None])
        else:
            rotated = reference.config.qk_rope_head_dim
            scale = one.keys[0, latent_rank:]
            k = torch.cat([k[..., :-rotated], to_fp8(k[..., -rotated:], scale)], dim=-1)
        plain = sys.modules[type(module).__module__].eager_attention_forward
        return plain(module, q, k, v, *rest, **more)

    name = f"rounded {directory}"
    ALL_ATTENTION_FUNCTIONS.register(name, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    reference.set_attn_implementation(name)
