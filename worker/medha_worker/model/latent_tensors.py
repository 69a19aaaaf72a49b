"""The tensors of latent attention in a checkpoint: their names and shapes, and how a rank reads those of its heads.

The projections down belong to no head, so that every tensor rank has all of them. Where RoPE pairs neighbouring values,
the rows that make the rotated parts of queries and keys are read in another order: the first value of every pair, then
the second. RoPE then pairs halves, as it does in all other models, and scores are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from medha_worker.device import Device
from medha_worker.model.expert_tensors import ReadSlice
from medha_worker.model.model_config import ModelConfig

_QUERY, _QUERY_DOWN, _QUERY_NORM, _QUERY_UP = "q_proj", "q_a_proj", "q_a_layernorm.weight", "q_b_proj.weight"
_ROW_DOWN, _LATENT_NORM, _HEADS_UP = "kv_a_proj_with_mqa", "kv_a_layernorm.weight", "kv_b_proj.weight"


@dataclass(frozen=True)
class LatentWeights:
    """A rank's matrices of latent attention behind the first product, which is `LayerWeights.qkv`.

    That product returns queries, or what `query_up` makes queries of, then the latent, and then the key with position.

    Attributes:
        query_norm: [query_rank]; None if queries are projected at once.
        query_up: [query_rank, own heads * query_dim]; None likewise.
        latent_norm: [kv_rank].
        key_up: [own heads, plain_dim, kv_rank]: the key matrix that a query absorbs.
        value_up: [own heads, kv_rank, value_dim]: makes a head's result of a sum of latents.
    """

    query_norm: torch.Tensor | None
    query_up: torch.Tensor | None
    latent_norm: torch.Tensor
    key_up: torch.Tensor
    value_up: torch.Tensor

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield what is held in memory."""
        for tensor in (self.query_norm, self.query_up, self.latent_norm, self.key_up, self.value_up):
            if tensor is not None:
                yield tensor


class LatentTensors:
    """Names, shapes and reading of the latent attention of a model's layers."""

    def __init__(self, config: ModelConfig) -> None:
        assert config.latent is not None
        self._config, self._latent = config, config.latent

    def shapes(self, attention: str) -> dict[str, tuple[int, ...]]:
        """Return name and shape of each tensor but the output's; `attention` is a prefix that ends with a dot."""
        latent, hidden, heads = self._latent, self._config.hidden_size, self._config.num_query_heads
        queries = heads * latent.query_dim
        shapes: dict[str, tuple[int, ...]] = {}
        down = {_ROW_DOWN: latent.row_dim}
        if latent.query_rank:
            down[_QUERY_DOWN] = latent.query_rank
            shapes[f"{attention}{_QUERY_NORM}"] = (latent.query_rank,)
            shapes[f"{attention}{_QUERY_UP}"] = (queries, latent.query_rank)
        else:
            shapes[f"{attention}{_QUERY}.weight"] = (queries, hidden)
        for name, width in down.items():
            shapes[f"{attention}{name}.weight"] = (width, hidden)
            if self._config.qkv_bias:
                shapes[f"{attention}{name}.bias"] = (width,)
        shapes[f"{attention}{_LATENT_NORM}"] = (latent.kv_rank,)
        made = heads * (latent.plain_dim + latent.value_dim)
        shapes[f"{attention}{_HEADS_UP}"] = (made, latent.kv_rank)
        return shapes

    def read(
        self, read: ReadSlice, attention: str, heads: slice, device: Device
    ) -> tuple[torch.Tensor, torch.Tensor | None, LatentWeights]:
        """Return the first product's weight, [hidden, width], its bias, and the matrices behind it.

        Args:
            read: Reads a part of a tensor.
            attention: Prefix of the layer's names, with a dot at its end.
            heads: The query heads that this rank has.
            device: Where the weights go, and their number format.
        """
        latent, everything = self._latent, slice(None)

        def place(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device=device.torch_device, dtype=device.dtype).contiguous()

        own = slice(heads.start * latent.query_dim, heads.stop * latent.query_dim)
        row = self._row_in_halves(read(f"{attention}{_ROW_DOWN}.weight", everything))
        query_norm = query_up = None
        if latent.query_rank:
            first = read(f"{attention}{_QUERY_DOWN}.weight", everything)
            query_norm = place(read(f"{attention}{_QUERY_NORM}", everything))
            query_up = place(self._queries_in_halves(read(f"{attention}{_QUERY_UP}", own)).t())
        else:
            first = self._queries_in_halves(read(f"{attention}{_QUERY}.weight", own))
        bias = None
        if self._config.qkv_bias:
            row_bias = self._row_in_halves(read(f"{attention}{_ROW_DOWN}.bias", everything))
            if latent.query_rank:
                first_bias = read(f"{attention}{_QUERY_DOWN}.bias", everything)
            else:
                first_bias = row_bias.new_zeros(len(first))
            bias = place(torch.cat([first_bias, row_bias]))
        made = latent.plain_dim + latent.value_dim
        up = read(f"{attention}{_HEADS_UP}", slice(heads.start * made, heads.stop * made))
        up = up.view(heads.stop - heads.start, made, latent.kv_rank)
        weights = LatentWeights(
            query_norm=query_norm,
            query_up=query_up,
            latent_norm=place(read(f"{attention}{_LATENT_NORM}", everything)),
            key_up=place(up[:, : latent.plain_dim]),
            value_up=place(up[:, latent.plain_dim :].transpose(1, 2)),
        )
        return place(torch.cat([first, row]).t()), bias, weights

    def _row_in_halves(self, row: torch.Tensor) -> torch.Tensor:
        """Return what makes a token's row, [row_dim, ...], in the order of values in which RoPE pairs halves."""
        return row[self._in_halves(self._latent.kv_rank)]

    def _queries_in_halves(self, queries: torch.Tensor) -> torch.Tensor:
        """Return what makes the queries of heads, [heads * query_dim, inner], in that order."""
        by_head = queries.view(-1, self._latent.query_dim, queries.shape[-1])
        return by_head[:, self._in_halves(self._latent.plain_dim)].reshape(queries.shape)

    def _in_halves(self, before: int) -> torch.Tensor:
        """Return the indexes of `before` values that RoPE does not rotate, and of those behind them that it does."""
        rotated = torch.arange(self._latent.rope_dim)
        if self._config.rope_is_interleaved:
            rotated = torch.cat([rotated[0::2], rotated[1::2]])
        return torch.cat([torch.arange(before), before + rotated])
