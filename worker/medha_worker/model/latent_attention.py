"""The products of a layer with latent attention: they make queries, and the row of the KV pool that all heads share.

A row is a token's latent, and after it the key with position. `medha_worker.model.latent_forms` attends to it.
"""

from __future__ import annotations

import math

import torch

from medha_worker.device import Device
from medha_worker.kernels.protocol import Kernels
from medha_worker.model.latent_forms import LatentForms
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.prepared_step import Rotation
from medha_worker.model.quantised_weights import LinearProducts
from medha_worker.model.rope import yarn_temperature
from medha_worker.model.weights import LayerWeights, Shard

_NORM_EPS = 1e-6
"""Epsilon of the norms of latents; no field states it."""


class LatentAttention:
    """A rank's products before the attention of a layer, and the `forms` of attention itself."""

    def __init__(
        self, config: ModelConfig, shard: Shard, kernels: Kernels, products: LinearProducts, device: Device
    ) -> None:
        assert config.latent is not None
        self._latent, self._kernels, self._products = config.latent, kernels, products
        self._heads = shard.query_heads(config)
        self.forms = LatentForms(config.latent, self._heads, _softmax_scale(config), kernels, device)

    def heads(
        self, layer: LayerWeights, normed: torch.Tensor, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the queries of own heads, [rows, heads, query_dim], and the rows of the KV pool, [rows, 1, row_dim], twice.

        `normed` is [rows, hidden_size].
        """
        assert layer.latent is not None
        latent, weights, operators, count = self._latent, layer.latent, self._kernels.rows, normed.shape[0]
        first = self._products.product(normed, layer.qkv, layer.qkv_bias)
        widths = [first.shape[1] - latent.row_dim, latent.kv_rank, latent.rope_dim]
        q, row_latent, row_key = torch.split(first, widths, dim=1)
        if weights.query_up is not None:
            assert weights.query_norm is not None
            q = operators.rms_norm(q, weights.query_norm, _NORM_EPS)
            q = self._products.product(q, weights.query_up)
        q = _copied(q.reshape(count, self._heads, latent.query_dim))

        row = first.new_empty(count, 1, latent.row_dim)
        row[:, 0, : latent.kv_rank] = operators.rms_norm(row_latent, weights.latent_norm, _NORM_EPS)
        key, rotated = _copied(row_key).view(count, 1, latent.rope_dim), _copied(q[..., latent.plain_dim :])
        operators.rotate(key, *rotation)
        operators.rotate(rotated, *rotation)
        row[:, :, latent.kv_rank :] = key
        q[..., latent.plain_dim :] = rotated
        return q, row, row


def _copied(x: torch.Tensor) -> torch.Tensor:
    """Return a copy with the strides of its shape; `contiguous` would leave those of a tensor without rows."""
    return x.clone(memory_format=torch.contiguous_format)


def _softmax_scale(config: ModelConfig) -> float:
    """Return the factor on scores: by the width of queries, and by YaRN's temperature if `mscale_all_dim` asks for it."""
    assert config.latent is not None
    scale = 1 / math.sqrt(config.latent.query_dim)
    rope = config.rope
    if rope.kind == "yarn" and rope.mscale_all_dim:
        scale *= yarn_temperature(rope.factor, rope.mscale_all_dim) ** 2
    return scale
