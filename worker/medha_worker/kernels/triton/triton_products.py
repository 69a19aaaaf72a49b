"""Matrix products in tiles of one size: each element is added up over `inner` in one order, whatever the rows beside it.

Libraries choose tiles, and whether to split `inner`, by the number of rows. Here the number of rows decides only how many
tiles there are. Tests run them by Triton's interpreter and compile them for sm_80, sm_90 and sm_100;
`make gpu-check` runs them on a GPU (docs/gpu.md).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from medha_worker.kernels.packed_weight import MatrixWeight, matrix_of
from medha_worker.kernels.row_blocks import row_blocks

TILES = {"tile_rows": 64, "tile_columns": 64, "tile_inner": 64}


@triton.jit  # type: ignore[untyped-decorator]
def _write_tile(  # type: ignore[no-untyped-def]
    x, weight, out, row, rows, column, inner, columns, x_stride, inner_stride, column_stride, out_stride,
    tile_rows: tl.constexpr, tile_columns: tl.constexpr, tile_inner: tl.constexpr,
):  # fmt: skip
    """Write the rows `row` and columns `column` of out = x @ weight, where they are below `rows` and `columns`."""
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
    _write_tile(
        x, weight, out, row, rows, column, inner, columns, x_stride, inner_stride, column_stride, out_stride,
        tile_rows, tile_columns, tile_inner,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def expert_product_kernel(  # type: ignore[no-untyped-def]
    x, weights, out, experts, firsts, ends, inner, columns,
    x_stride, expert_stride, inner_stride, column_stride, out_stride,
    tile_rows: tl.constexpr, tile_columns: tl.constexpr, tile_inner: tl.constexpr,
):  # fmt: skip
    """Write one tile of the products of a block of rows with the weights of its expert, as `product_kernel` adds them up.

    experts, firsts, ends: those of `RowBlocks`; weights: [experts, inner, columns] with three strides.
    """
    block = tl.program_id(0)
    first, end = tl.load(firsts + block), tl.load(ends + block)
    if first < end:
        row = first + tl.arange(0, tile_rows)
        column = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)
        weight = weights + tl.load(experts + block) * expert_stride
        _write_tile(
            x, weight, out, row, end, column, inner, columns, x_stride, inner_stride, column_stride, out_stride,
            tile_rows, tile_columns, tile_inner,
        )  # fmt: skip


class TritonProducts:
    """`MatrixProducts` on a GPU."""

    def product(
        self,
        x: torch.Tensor,
        weight: MatrixWeight,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        (rows, inner), columns = x.shape, weight.shape[1]
        matrix = matrix_of(weight)
        assert x.stride(1) == 1
        result = x.new_empty(rows, columns) if out is None else out
        assert result.stride(1) == 1
        grid = -(-rows // TILES["tile_rows"]), -(-columns // TILES["tile_columns"])
        if rows and columns:
            product_kernel[grid](
                x, matrix, result, rows, inner, columns, x.stride(0), *matrix.stride(), result.stride(0), **TILES
            )  # fmt: skip
        return result if bias is None else result.add_(bias)

    def add_product(self, target: torch.Tensor, x: torch.Tensor, weight: MatrixWeight) -> None:
        target.add_(self.product(x, weight))


class TritonExpertProducts:
    """`ExpertProducts` on a GPU: each row has the bits of `TritonProducts` with its expert's weights."""

    def product(self, x: torch.Tensor, weights: torch.Tensor, row_ends: torch.Tensor) -> torch.Tensor:
        (rows, inner), columns = x.shape, weights.shape[2]
        assert x.stride(1) == 1
        out = x.new_empty(rows, columns)
        if rows and columns:
            blocks = row_blocks(row_ends, rows, TILES["tile_rows"])
            expert_product_kernel[len(blocks.expert), -(-columns // TILES["tile_columns"])](
                x, weights, out, blocks.expert, blocks.first, blocks.end, inner, columns,
                x.stride(0), *weights.stride(), out.stride(0), **TILES,
            )  # fmt: skip
        return out
