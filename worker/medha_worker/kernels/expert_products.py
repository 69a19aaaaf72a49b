"""Products of rows with the weights of experts: on CPUs one for each expert that has rows, on GPUs all at once.

On a GPU the host does not know which experts have rows, and never asks: the ends of their rows stay on the device.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows it by

from medha_worker.device import Device
from medha_worker.kernels.protocol import ExpertProducts, MatrixProducts
from medha_worker.kernels.row_blocks import row_blocks

_ALIGNED_BYTES = 16
"""The grouped matmul takes matrices whose rows begin at multiples of this."""

_MOST_BLOCK_ROWS = 128
_TILE_NUMBERS, _LEAST_COLUMNS = 1 << 24, 16
"""Weights that are copied at a time: so many numbers, or so many columns of each block's expert if those are more."""

_log = logging.getLogger("medha.kernels")


class ProductPerExpert:
    """A product for each expert that has rows, in the order of experts: for tensors in host memory."""

    def __init__(self, products: MatrixProducts) -> None:
        self._products = products

    def product(self, x: torch.Tensor, weights: torch.Tensor, row_ends: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(x.shape[0], weights.shape[2])
        first = 0
        for expert, end in enumerate(row_ends.tolist()):
            if end > first:
                self._products.product(x[first:end], weights[expert], out=out[first:end])
            first = end
        return out


class BlockedProducts:
    """A product for each block of rows of one expert, all in one launch, in plain torch on any device.

    Each block has a copy of some columns of its expert's weights. Blocks hold about as many rows as an expert has on the average.
    """

    def product(self, x: torch.Tensor, weights: torch.Tensor, row_ends: torch.Tensor) -> torch.Tensor:
        (rows, inner), (experts, _, columns) = x.shape, weights.shape
        out = x.new_empty(rows, columns)
        if not rows:
            return out
        size = min(1 << (-(-rows // experts) - 1).bit_length(), _MOST_BLOCK_ROWS)
        blocks = row_blocks(row_ends, rows, size)
        within = torch.arange(size, device=x.device)
        entering = x[(blocks.first[:, None] + within).clamp_(max=rows - 1)]
        tile = max(_LEAST_COLUMNS, _TILE_NUMBERS // (len(blocks.expert) * inner))
        is_transposed = weights.stride(1) == 1
        for start in range(0, columns, tile):
            some = weights[:, :, start : start + tile]
            if is_transposed:
                own = some.transpose(1, 2).index_select(0, blocks.expert).transpose(1, 2)
            else:
                own = some.index_select(0, blocks.expert)
            out[:, start : start + tile] = torch.bmm(entering, own).flatten(0, 1)[blocks.place]
        return out


class GroupedProducts:
    """The products of all experts in one launch; `others` compute those whose sizes it does not take."""

    def __init__(self, others: ExpertProducts) -> None:
        self._others = others

    def product(self, x: torch.Tensor, weights: torch.Tensor, row_ends: torch.Tensor) -> torch.Tensor:
        if not _is_aligned(weights):
            return self._others.product(x, weights, row_ends)
        return F.grouped_mm(x, weights, offs=row_ends)


def _is_aligned(weights: torch.Tensor) -> bool:
    _experts, inner, columns = weights.shape
    return all(size * weights.element_size() % _ALIGNED_BYTES == 0 for size in (inner, columns))


def expert_products(products: MatrixProducts, device: Device) -> ExpertProducts:
    """Return a product for each expert on CPUs, on GPUs torch's grouped matmul where it works, else products of blocks.

    On GPUs without a kernel of its own (compute capabilities other than 9 and 10), torch reads the rows' ends on the host
    and multiplies expert by expert. The host would wait for the GPU, and decodes could not be captured.
    """
    if device.is_host:
        return ProductPerExpert(products)
    blocked = BlockedProducts()
    if device.dtype != torch.bfloat16 or not torch.cuda.is_available():
        return blocked
    try:
        x, weights = torch.ones(8, 16, dtype=device.dtype), torch.ones(2, 16, 8, dtype=device.dtype)
        row_ends = torch.tensor([0, 8], dtype=torch.int32)
        placed = device.place(x), device.place(weights), device.place(row_ends)
        with _waiting_fails():
            F.grouped_mm(*placed[:2], offs=placed[2])
        device.synchronise()
    except Exception as error:  # noqa: BLE001 - of a driver, or of a GPU that it was not made for
        _log.warning(
            "experts are multiplied in blocks of rows, because torch's grouped matmul fails or waits for the host (%s: %s)",
            type(error).__name__,
            error,
        )
        return blocked
    return GroupedProducts(blocked)


@contextmanager
def _waiting_fails() -> Iterator[None]:
    """Let torch raise an error where the host would wait for the GPU."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
