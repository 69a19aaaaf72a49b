"""Matrix products by torch, on any device. Its libraries choose an algorithm by the number of rows, and each rounds in its own way."""

from __future__ import annotations

import torch


class TorchProducts:
    """Products in one call."""

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
