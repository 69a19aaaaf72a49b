"""The compiled matrix products as an operator: one call of the helper team for each product."""

from __future__ import annotations

import torch

from medha_worker.kernels.cpu.helper_team import HelperTeam
from medha_worker.kernels.cpu.host_compiler import Target
from medha_worker.kernels.cpu.huge_pages import HugePages
from medha_worker.kernels.cpu.product_code import CHUNK_ROWS, ProductSizes, compiled_products
from medha_worker.kernels.packed_weight import MatrixWeight, PackedWeight

_PARTS_PER_THREAD = 4  # so that a thread that begins late takes less


class CompiledProducts:
    """`MatrixProducts` of float32, in which a row gets the same bits beside any other rows.

    One instance serves one thread at a time: its products share the threads' scratch memory.
    """

    def __init__(self, team: HelperTeam) -> None:
        self._team = team
        target = Target.of_host()
        self._sizes = ProductSizes(target)
        self._panel_columns = self._sizes.panel_columns
        compiled = compiled_products(target)
        self._products = [team.function(compiled, name) for name in ("product", "product_transposed")]
        self._packed_product = team.function(compiled, "packed_product")
        self._row_product = team.function(compiled, "row_product")
        self._scratch = torch.empty(0)
        self._huge_pages = HugePages()
        self._zeros = torch.zeros(self._sizes.zeros)
        self._nothing = self._zeros.data_ptr(), 0, 0  # is added to a product

    def product(
        self,
        x: torch.Tensor,
        weight: MatrixWeight,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if out is None:
            out = torch.empty(x.shape[0], weight.shape[1])
        if bias is None:
            self._run(x, weight, self._nothing, out)
        else:
            self._run(x, weight, (bias.data_ptr(), 0, 1), out)
        return out

    def add_product(self, target: torch.Tensor, x: torch.Tensor, weight: MatrixWeight) -> None:
        self._run(x, weight, (target.data_ptr(), target.stride(0), 1), target)

    def pack(self, weight: torch.Tensor) -> MatrixWeight:
        """Return a copy of a weight in which products read memory in one run, or the weight itself if there is no such form.

        The numbers of a product are the same to the bit. A weight with adjacent rows stays as it is, because it shares memory
        with an embedding.
        """
        width = self._sizes.panel_columns
        if weight.dim() != 2 or not weight.numel() or weight.shape[1] % width or weight.stride(1) != 1:
            return weight
        inner, columns = weight.shape
        panels = self._huge_pages.take(columns // width, inner, width)
        panels.copy_(weight.view(inner, -1, width).transpose(0, 1))
        return PackedWeight(panels)

    def _run(
        self, x: torch.Tensor, weight: MatrixWeight, base: tuple[int, int, int], out: torch.Tensor
    ) -> None:
        """Compute out = base + x @ weight; `base` has the address and the steps between rows and columns."""
        rows, inner = x.shape
        wanted_inner, columns = weight.shape
        assert wanted_inner == inner
        assert out.shape == (rows, columns)
        (x_stride, x_step), (out_stride, out_step) = x.stride(), out.stride()
        assert x_step == out_step == 1
        threads = self._team.grow(torch.get_num_threads())
        tasks = -(-columns // self._panel_columns) * -(-rows // CHUNK_ROWS)
        parts = min(tasks, threads * _PARTS_PER_THREAD if threads > 1 else 1)
        if isinstance(weight, PackedWeight):
            fields = (
                rows, inner, columns, x.data_ptr(), x_stride, weight.address, inner * self._panel_columns,
                *base, out.data_ptr(), out_stride, 0, 0,
            )  # fmt: skip
            self._packed_product(fields, parts)
            return
        is_transposed = weight.stride(1) != 1
        assert weight.stride(0 if is_transposed else 1) == 1
        if self._scratch.shape[0] < threads:
            self._scratch = torch.zeros(threads, self._sizes.scratch_floats)
        fields = (
            rows, inner, columns, x.data_ptr(), x_stride, weight.data_ptr(), weight.stride(int(is_transposed)),
            *base, out.data_ptr(), out_stride, self._scratch.data_ptr(), self._scratch.stride(0),
        )  # fmt: skip
        fills_vectors = columns % self._sizes.target.lanes == 0
        is_alone = rows == 1 and not is_transposed and fills_vectors
        (self._row_product if is_alone else self._products[is_transposed])(fields, parts)
