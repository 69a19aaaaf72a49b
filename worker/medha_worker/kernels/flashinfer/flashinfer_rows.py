"""FlashInfer's operators on rows. They compute in float32 and round once, also where plain torch rounds twice.

`make gpu-check` runs them on a GPU; docs/gpu.md has the results.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from medha_worker.kernels.protocol import RowOperators


class FlashInferRows:
    """Operators in float16 and bfloat16. One instance serves one thread at a time."""

    def __init__(self, library: Any, plain: RowOperators) -> None:
        """`library` is the package `flashinfer`; `plain` does what its functions cannot."""
        self._library, self._plain = library, plain
        # Cosines, sines, their table and the rows' numbers; layers with a window may turn by other angles than the others.
        self._tables: deque[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]] = deque(maxlen=2)

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

    def gelu_multiply(self, gate_up: torch.Tensor) -> torch.Tensor:
        # FlashInfer has a kernel for it, in a module of its own that images would have to hold.
        return self._plain.gelu_multiply(gate_up)

    def _cached(self, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin side by side, float32 [rows, head_dim], and the rows' numbers.

        All layers of a step with one RoPE pass the same memory, which is kept here, so that nothing else can take its
        address.
        """
        for kept_cos, kept_sin, table, index in self._tables:
            if _is_same(kept_cos, cos) and _is_same(kept_sin, sin):
                return table, index
        index = torch.arange(cos.shape[0], out=cos.new_empty(cos.shape[0], dtype=torch.int32))
        table = torch.cat([cos, sin], dim=1).float()
        self._tables.append((cos, sin, table, index))
        return table, index


def _is_same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return (
        left.data_ptr() == right.data_ptr() and left.shape == right.shape and left.stride() == right.stride()
    )
