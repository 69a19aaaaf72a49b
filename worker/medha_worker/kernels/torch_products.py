"""Matrix products by torch, on any device. Its libraries choose an algorithm by the number of rows, and each rounds in its own way."""

from __future__ import annotations

import torch

from medha_worker.kernels.packed_weight import MatrixWeight, matrix_of


class TorchProducts:
    """Products in one call."""

    def product(
        self,
        x: torch.Tensor,
        weight: MatrixWeight,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        matrix = matrix_of(weight)
        return torch.mm(x, matrix, out=out) if bias is None else torch.addmm(bias, x, matrix, out=out)

    def add_product(self, target: torch.Tensor, x: torch.Tensor, weight: MatrixWeight) -> None:
        target.addmm_(x, matrix_of(weight))
