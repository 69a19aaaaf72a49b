"""Multi-head latent attention in absorbed form: all heads attend to the same rows, which are keys and values at once.

A key of head h is K_h c, for a token's latent c, and so the score of a query q is (K_h^T q) c. Likewise, a sum of
values V_h c is V_h times the sum of the latents. So a head's queries absorb its key matrix, and its value matrix is
applied behind attention: K and V of heads are never made. Attention itself is that of a single KV head whose values
are its keys, by any implementation. The part of the result that lies behind the latent is not used.

Reference: DeepSeek-V2, "A Strong, Economical, and Efficient Mixture-of-Experts Language Model", section 2.1.
"""

from __future__ import annotations

import math

import torch

from medha_worker.kernels.protocol import Kernels
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.prepared_step import Rotation
from medha_worker.model.quantised_weights import LinearProducts
from medha_worker.model.rope import yarn_temperature
from medha_worker.model.weights import LayerWeights, Shard

_NORM_EPS = 1e-6
"""Epsilon of the norms of latents; no field states it."""


class LatentAttention:
    """A rank's products before and behind the attention of a layer."""

    def __init__(self, config: ModelConfig, shard: Shard, kernels: Kernels, products: LinearProducts) -> None:
        assert config.latent is not None
        self._latent, self._kernels, self._products = config.latent, kernels, products
        self._heads = shard.query_heads(config)
        # Attention divides scores by the root of a row's width, but latents are wider than the queries were.
        self._factor = _softmax_scale(config) * math.sqrt(config.latent.row_dim)

    def heads(
        self, layer: LayerWeights, normed: torch.Tensor, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the queries of own heads, [rows, heads, row_dim], and the rows of the KV pool, [rows, 1, row_dim], twice.

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
        q = q.reshape(count, self._heads, latent.query_dim)

        row = first.new_empty(count, 1, latent.row_dim)
        row[:, 0, : latent.kv_rank] = operators.rms_norm(row_latent, weights.latent_norm, _NORM_EPS)
        key = _copied(row_key).view(count, 1, latent.rope_dim)
        operators.rotate(key, *rotation)
        row[:, :, latent.kv_rank :] = key

        queries = first.new_empty(count, self._heads, latent.row_dim)
        plain, rotated = q[..., : latent.plain_dim], _copied(q[..., latent.plain_dim :])
        queries[..., : latent.kv_rank] = self._each_head(plain, weights.key_up)
        operators.rotate(rotated, *rotation)
        queries[..., latent.kv_rank :] = rotated
        return queries.mul_(self._factor), row, row

    def values(self, layer: LayerWeights, attended: torch.Tensor) -> torch.Tensor:
        """Return the results of own heads side by side, [rows, heads * value_dim], of [rows, heads, row_dim]."""
        assert layer.latent is not None
        return self._each_head(attended[..., : self._latent.kv_rank], layer.latent.value_up).flatten(1)

    def _each_head(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Multiply [rows, heads, inner] by the matrix of each head, [heads, inner, columns]: [rows, heads, columns].

        These are products of experts, of which each gets equally many rows.
        """
        rows, heads, inner = x.shape
        by_head = x.transpose(0, 1).reshape(heads * rows, inner)
        row_ends = torch.arange(1, heads + 1, dtype=torch.int32, device=x.device) * rows
        found = self._kernels.experts.product(by_head, weights, row_ends)
        return found.view(heads, rows, weights.shape[2]).transpose(0, 1)


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
