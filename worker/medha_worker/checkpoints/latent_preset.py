"""The parts of small random checkpoints that DeepSeek's models have and others do not: latents, and their experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from medha.model.latent_shape import LatentShape

Linear = Callable[..., torch.Tensor]
"""Makes a matrix of so many rows and columns, which scales the variance of its input by the square of a gain."""

_GROUPS, _KEPT_GROUPS = 4, 2


def latent_shape(version: Literal[2, 3], hidden: int, heads: int) -> LatentShape:
    """Return sizes that belong to a hidden size; V2 projects queries at once, as V2-Lite does."""
    head_dim = hidden // heads
    return LatentShape(
        query_rank=0 if version == 2 else hidden // 2,
        kv_rank=hidden // 2,
        plain_dim=head_dim,
        rope_dim=head_dim,
        value_dim=head_dim,
    )


def config_fields(version: Literal[2, 3], latent: LatentShape, heads: int) -> dict[str, Any]:
    """Return the fields of config.json that replace, or come on top of, those that all models have."""
    fields: dict[str, Any] = {
        "num_key_value_heads": heads,
        "q_lora_rank": latent.query_rank or None,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.plain_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.0 if version == 2 else 1.5,
    }
    if version == 2:
        return fields | {"topk_method": "greedy", "norm_topk_prob": False}
    return fields | {
        "n_group": _GROUPS,
        "topk_group": _KEPT_GROUPS,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 0,
    }


def attention_weights(
    attention: str,
    latent: LatentShape,
    hidden: int,
    heads: int,
    *,
    qk_gain: float,
    linear: Linear,
    norm: Callable[[int], torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Return the tensors of a layer's attention but its output, by names that begin with `attention`.

    `norm` makes the weight of a norm.
    """
    queries = heads * latent.query_dim
    weights: dict[str, torch.Tensor] = {}
    if latent.query_rank:
        weights["q_a_proj.weight"] = linear(latent.query_rank, hidden)
        weights["q_a_layernorm.weight"] = norm(latent.query_rank)
        weights["q_b_proj.weight"] = linear(queries, latent.query_rank, qk_gain)
    else:
        weights["q_proj.weight"] = linear(queries, hidden, qk_gain)
    weights["kv_a_proj_with_mqa.weight"] = linear(latent.row_dim, hidden, qk_gain)
    weights["kv_a_layernorm.weight"] = norm(latent.kv_rank)
    # Keys have the gain of scores, values that of other models' values.
    made = [part for _ in range(heads) for part in _head(latent, qk_gain, linear)]
    weights["kv_b_proj.weight"] = torch.cat(made)
    return {f"{attention}{name}": tensor for name, tensor in weights.items()}


def _head(latent: LatentShape, qk_gain: float, linear: Linear) -> tuple[torch.Tensor, torch.Tensor]:
    return linear(latent.plain_dim, latent.kv_rank, qk_gain), linear(latent.value_dim, latent.kv_rank, 2.0)
