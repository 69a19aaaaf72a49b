"""RMSNorm with one program per row, whose order of addition depends on the row's size alone.

Tests run it by Triton's interpreter and compile it for sm_80, sm_90 and sm_100; `make gpu-check` runs it on a GPU (docs/gpu.md).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from medha_worker.kernels.protocol import RowOperators


@triton.jit(do_not_specialize=["row_stride"])  # type: ignore[untyped-decorator]
def norm_kernel(x, weight, out, row_stride, member_stride, size, eps, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the RMSNorm of x[row, member], rounded before the weight as the models define it.

    x: [rows, members, size] with two strides; weight: [size]; out: contiguous.
    """
    row, member, members = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    index = tl.arange(0, tile)
    is_value = index < size
    value = tl.load(x + row * row_stride + member * member_stride + index, mask=is_value, other=0.0).to(
        tl.float32
    )
    normed = value / tl.sqrt(tl.sum(value * value, axis=0) / size + eps)
    rounded = normed.to(x.dtype.element_ty).to(tl.float32)
    scaled = rounded * tl.load(weight + index, mask=is_value, other=0.0).to(tl.float32)
    tl.store(out + (row * members + member) * size + index, scaled.to(out.dtype.element_ty), mask=is_value)


class TritonRows:
    """`RowOperators` on a GPU: norms are computed here, and the operators on single values are those of `others`."""

    def __init__(self, others: RowOperators) -> None:
        self.rotate = others.rotate
        self.silu_multiply, self.gelu_multiply = others.silu_multiply, others.gelu_multiply

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rows = x if x.dim() == 3 else x[:, None]
        assert rows.stride(2) == 1
        count, members, size = rows.shape
        out = x.new_empty(x.shape)
        if count:
            strides = rows.stride(0), rows.stride(1)
            norm_kernel[count, members](x, weight, out, *strides, size, eps, triton.next_power_of_2(size))
        return out

    def add_rms_norm(
        self, hidden: torch.Tensor, part: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> None: ...
