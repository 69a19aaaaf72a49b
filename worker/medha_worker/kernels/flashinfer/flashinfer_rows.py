"""FlashInfer's operators on rows. They compute in float32 and round once, also where plain torch rounds twice.

Unproven until a GPU has run it: all numerics, and every speed.
"""

from __future__ import annotations

from typing import Any

import torch

from medha_worker.kernels.protocol import RowOperators


class FlashInferRows:
    """Operators in float16 and bfloat16. One instance serves one thread at a time."""

    def __init__(self, library: Any, plain: RowOperators) -> None:
        """`library` is the package `flashinfer`; `plain` does what its functions cannot."""
        self._library, self._plain = library, plain
        self._rotation: tuple[torch.Tensor, torch.Tensor] | None = None
        self._table: tuple[torch.Tensor, torch.Tensor] | None = None

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        assert x.dim() in (2, 3), f"rows or heads of rows are normed, not {tuple(x.shape)}"
        return self._library.rmsnorm(x, weight, eps, out=x.new_empty(x.shape))  # type: ignore[no-any-return]

    def add_rms_norm(
        self, hidden: torch.Tensor, part: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        self._library.fused_add_rmsnorm(part, hidden, weight, eps)
        return part

    def rotate(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        rows, count, head_dim = heads.shape
        if count == 1:
            self._plain.rotate(heads, cos, sin)
            return
        # Queries and keys are two arguments, neither of which may be empty; the last head goes as the keys.
        table, index = self._cached(cos, sin)
        self._library.apply_rope_with_cos_sin_cache_inplace(
            index,
            heads[:, :-1].view(rows, (count - 1) * head_dim),
            heads[:, -1:].view(rows, head_dim),
            head_dim,
            table,
            is_neox=True,
        )

    def silu_multiply(self, gate_up: torch.Tensor) -> torch.Tensor:
        # Its kernel ignores strides.
        return self._library.silu_and_mul(gate_up.contiguous())  # type: ignore[no-any-return]

    def _cached(self, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin side by side, float32 [rows, head_dim], and the rows' numbers.

        All layers of a step pass the same memory, which is kept here, so that nothing else can take its address.
        """
        kept = self._rotation
        if kept is None or self._table is None or not (_is_same(kept[0], cos) and _is_same(kept[1], sin)):
            self._rotation = cos, sin
            index = torch.arange(cos.shape[0], out=cos.new_empty(cos.shape[0], dtype=torch.int32))
            self._table = torch.cat([cos, sin], dim=1).float(), index
        return self._table


def _is_same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return (
        left.data_ptr() == right.data_ptr() and left.shape == right.shape and left.stride() == right.stride()
    )
