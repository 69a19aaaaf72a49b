"""Matrix products by torch: the fastest for the rows at hand, or tile by tile, so that rows do not depend on each other."""

from __future__ import annotations

import torch

TILE_ROWS = 32
"""Rows of a tile: few, because a single decode is padded to one, and enough that a chunk does not read its weights too often."""


class TorchProducts:
    """Products in one call. The library chooses an algorithm by the number of rows, and each rounds in its own way."""

    def product(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return torch.mm(x, weight, out=out) if bias is None else torch.addmm(bias, x, weight, out=out)

    def add_product(self, target: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
        target.addmm_(x, weight)


class TiledProducts:
    """Products of `TILE_ROWS` rows at a time, padded by zeros: every product with a weight then has one shape.

    So the library takes one algorithm for all of them. That such an algorithm treats all rows of a tile alike is no
    promise of the library's; `batch_invariant.try_products` checks it where the kernels are made.
    """

    def product(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        rows = x.shape[0]
        # Memory of its own: libraries also choose by alignment.
        padded = x.new_zeros(-(-rows // TILE_ROWS) * TILE_ROWS, x.shape[1])
        padded[:rows] = x
        tiles = x.new_empty(len(padded), weight.shape[1])
        for first in range(0, len(padded), TILE_ROWS):
            tile = slice(first, first + TILE_ROWS)
            torch.mm(padded[tile], weight, out=tiles[tile])
        result = tiles[:rows]
        if bias is not None:
            result.add_(bias)
        return result if out is None else out.copy_(result)

    def add_product(self, target: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
        target.add_(self.product(x, weight))
