"""The tensors of latent attention in a checkpoint: their names and shapes, and how a rank reads those of its heads.

The down-projections belong to no head, so every tensor rank has all of them. Where RoPE pairs neighbouring values,
the rows that make the rotated parts of queries and keys are read in another order: the first value of every pair, then
the second. RoPE then pairs halves, as it does in all other models, and scores are the same.

The linear that makes keys and values of latents is held as numbers, whatever format it is stored in: queries and results
absorb it, or it makes those of a chunk. Latents are not rounded for it, as in DeepSeek's own code for the absorbed form.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from medha.model.linear_sizes import HEADS_UP
from medha_worker.device import Device
from medha_worker.model.linear_reader import LinearReader
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.quantised_weights import Linear, tensors_of, weight_of

_QUERY, _QUERY_DOWN, _QUERY_NORM, _QUERY_UP = "q_proj", "q_a_proj", "q_a_layernorm.weight", "q_b_proj"
_ROW_DOWN, _LATENT_NORM = "kv_a_proj_with_mqa", "kv_a_layernorm.weight"


@dataclass(frozen=True)
class LatentWeights:
    """A rank's matrices of latent attention after the first product, which is `LayerWeights.qkv`.

    That product returns three parts side by side: queries, or the input from which `query_up` makes them; the latent; and
    the key with position.

    Attributes:
        query_norm: [query_rank]; None if queries are projected at once.
        query_up: [query_rank, own heads * query_dim]; None likewise.
        latent_norm: [kv_rank].
        key_up: [own heads, plain_dim, kv_rank]: the key matrix that a query absorbs.
        value_up: [own heads, kv_rank, value_dim]: makes a head's result of a sum of latents.
    """

    query_norm: torch.Tensor | None
    query_up: Linear | None
    latent_norm: torch.Tensor
    key_up: torch.Tensor
    value_up: torch.Tensor

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield what is held in memory."""
        for weight in (self.query_norm, self.query_up, self.latent_norm, self.key_up, self.value_up):
            if weight is not None:
                yield from tensors_of(weight)


class LatentTensors:
    """Names, shapes and reading of the latent attention of a model's layers."""

    def __init__(self, config: ModelConfig) -> None:
        assert config.latent is not None
        self._config, self._latent = config, config.latent

    def shapes(self, attention: str) -> dict[str, tuple[int, ...]]:
        """Return name and shape of each tensor that is no linear's weight; `attention` is a prefix that ends with a dot."""
        latent = self._latent
        shapes: dict[str, tuple[int, ...]] = {f"{attention}{_LATENT_NORM}": (latent.kv_rank,)}
        biases = {_ROW_DOWN: latent.row_dim}
        if latent.query_rank:
            shapes[f"{attention}{_QUERY_NORM}"] = (latent.query_rank,)
            biases[_QUERY_DOWN] = latent.query_rank
        for name, width in biases.items() if self._config.qkv_bias else ():
            shapes[f"{attention}{name}.bias"] = (width,)
        return shapes

    def read(
        self, linears: LinearReader, attention: str, heads: slice, device: Device
    ) -> tuple[Linear, torch.Tensor | None, LatentWeights]:
        """Return the first product's weight, [hidden, width], its bias, and the matrices after it.

        Args:
            linears: Reads parts of linears and tensors.
            attention: Prefix of the layer's names, with a dot at its end.
            heads: The query heads that this rank has.
            device: Where the weights go, and their number format.
        """
        latent, everything, read = self._latent, slice(None), linears.read

        def place(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device=device.torch_device, dtype=device.dtype).contiguous()

        own = slice(heads.start * latent.query_dim, heads.stop * latent.query_dim)
        queries_in_halves = self._queries_in_halves(heads.stop - heads.start)
        row_in_halves = self._in_halves(latent.kv_rank)
        row = linears.rows(f"{attention}{_ROW_DOWN}", slice(0, latent.row_dim)).reordered(row_in_halves)
        query_norm: torch.Tensor | None = None
        query_up: Linear | None = None
        if latent.query_rank:
            first = linears.rows(f"{attention}{_QUERY_DOWN}", slice(0, latent.query_rank))
            query_norm = place(read(f"{attention}{_QUERY_NORM}", everything))
            query_up = weight_of([linears.rows(f"{attention}{_QUERY_UP}", own).reordered(queries_in_halves)])
        else:
            first = linears.rows(f"{attention}{_QUERY}", own).reordered(queries_in_halves)
        bias = None
        if self._config.qkv_bias:
            row_bias = read(f"{attention}{_ROW_DOWN}.bias", everything)[row_in_halves]
            if latent.query_rank:
                first_bias = read(f"{attention}{_QUERY_DOWN}.bias", everything)
            else:
                first_bias = row_bias.new_zeros(first.rows)
            bias = place(torch.cat([first_bias, row_bias]))
        made = latent.plain_dim + latent.value_dim
        up = linears.numbers(f"{attention}{HEADS_UP}", slice(heads.start * made, heads.stop * made))
        up = up.view(heads.stop - heads.start, made, latent.kv_rank)
        weights = LatentWeights(
            query_norm=query_norm,
            query_up=query_up,
            latent_norm=place(read(f"{attention}{_LATENT_NORM}", everything)),
            key_up=place(up[:, : latent.plain_dim]),
            value_up=place(up[:, latent.plain_dim :].transpose(1, 2)),
        )
        return weight_of([first, row]), bias, weights

    def _queries_in_halves(self, heads: int) -> torch.Tensor:
        """Return the order of the values of the queries of heads in which RoPE pairs halves."""
        each = torch.arange(heads)[:, None] * self._latent.query_dim
        return (each + self._in_halves(self._latent.plain_dim)).flatten()

    def _in_halves(self, before: int) -> torch.Tensor:
        """Return the indexes of `before` values that RoPE does not rotate, and of those after them that it does."""
        rotated = torch.arange(self._latent.rope_dim)
        if self._config.rope_is_interleaved:
            rotated = torch.cat([rotated[0::2], rotated[1::2]])
        return torch.cat([torch.arange(before), before + rotated])
