"""Operators of a model on each row by itself, between its products, in plain torch."""

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows it by


class TorchRows:
    """The operators in plain torch, in any dtype on any device."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        # The models define it like this: in float32, and rounded before the weight.
        if x.dtype == torch.float32:
            return F.rms_norm(x, (x.shape[-1],), weight, eps)
        return F.rms_norm(x.float(), (x.shape[-1],), None, eps).to(x.dtype) * weight

    def add_rms_norm(
        self, hidden: torch.Tensor, part: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> None: ...

    def rotate(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        cos, sin = cos[:, None], sin[:, None]  # the same for all heads
        first, second = heads.chunk(2, dim=-1)
        rotated = first * cos - second * sin
        second.mul_(cos).addcmul_(first, sin)
        first.copy_(rotated)

    def silu_multiply(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=1)
        return F.silu(gate, inplace=True).mul_(up)

    def gelu_multiply(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=1)
        return F.gelu(gate, approximate="tanh").mul_(up)
