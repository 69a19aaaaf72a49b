"""Matrix products in tiles of one size: each element is added up over `inner` in one order, whatever the rows beside it.

Libraries choose tiles, and whether to split `inner`, by the number of rows. Here the number of rows decides only how many
tiles there are. Run by Triton's interpreter and compiled for sm_80, sm_90 and sm_100 in the tests; unproven on a GPU
(docs/gpu.md).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILES = {"tile_rows": 64, "tile_columns": 64, "tile_inner": 64}


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def product_kernel(  # type: ignore[no-untyped-def]
    x, weight, out, rows, inner, columns, x_stride, inner_stride, column_stride, out_stride,
    tile_rows: tl.constexpr, tile_columns: tl.constexpr, tile_inner: tl.constexpr,
):  # fmt: skip
    """Write one tile of out = x @ weight, added up in float32.

    x: [rows, inner] with `x_stride`; weight: [inner, columns] with two strides; out: [rows, columns] with `out_stride`.
    """
    row = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    column = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)
    is_row, is_column = (row < rows)[:, None], (column < columns)[None, :]
    x_rows = x + row[:, None].to(tl.int64) * x_stride
    weight_columns = weight + column[None, :].to(tl.int64) * column_stride
    total = tl.zeros((tile_rows, tile_columns), dtype=tl.float32)
    for start in range(0, inner, tile_inner):
        index = start + tl.arange(0, tile_inner)
        left = tl.load(x_rows + index[None, :], mask=is_row & (index < inner)[None, :], other=0.0)
        at = weight_columns + index[:, None].to(tl.int64) * inner_stride
        right = tl.load(at, mask=(index < inner)[:, None] & is_column, other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    target = out + row[:, None].to(tl.int64) * out_stride + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=is_row & is_column)


class TritonProducts:
    """`MatrixProducts` on a GPU."""

    def product(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        (rows, inner), columns = x.shape, weight.shape[1]
        assert x.stride(1) == 1
        result = x.new_empty(rows, columns) if out is None else out
        assert result.stride(1) == 1
        grid = -(-rows // TILES["tile_rows"]), -(-columns // TILES["tile_columns"])
        if rows and columns:
            product_kernel[grid](
                x, weight, result, rows, inner, columns, x.stride(0), *weight.stride(), result.stride(0), **TILES
            )  # fmt: skip
        return result if bias is None else result.add_(bias)

    def add_product(self, target: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
        target.add_(self.product(x, weight))
