"""Products of rows with the weights of experts: one product for each expert that has rows, or torch's grouped matmul."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows it by

from medha_worker.device import Device
from medha_worker.kernels.protocol import ExpertProducts, MatrixProducts

_ALIGNED_BYTES = 16
"""The grouped matmul takes matrices whose rows begin at multiples of it."""

_log = logging.getLogger("medha.kernels")


class ProductPerExpert:
    """A product for each expert that has rows, in the order of experts; the host reads which they are."""

    def __init__(self, products: MatrixProducts) -> None:
        self._products = products

    def can_capture(self, weights: torch.Tensor) -> bool:  # noqa: ARG002 - the host waits for any
        return False

    def product(self, x: torch.Tensor, weights: torch.Tensor, row_ends: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(x.shape[0], weights.shape[2])
        first = 0
        for expert, end in enumerate(row_ends.tolist()):
            if end > first:
                self._products.product(x[first:end], weights[expert], out=out[first:end])
            first = end
        return out


class GroupedProducts:
    """The products of all experts in one launch; `others` compute those whose sizes it does not take."""

    def __init__(self, others: ExpertProducts) -> None:
        self._others = others

    def can_capture(self, weights: torch.Tensor) -> bool:
        return _is_aligned(weights)

    def product(self, x: torch.Tensor, weights: torch.Tensor, row_ends: torch.Tensor) -> torch.Tensor:
        if not _is_aligned(weights):
            return self._others.product(x, weights, row_ends)
        return F.grouped_mm(x, weights, offs=row_ends)


def _is_aligned(weights: torch.Tensor) -> bool:
    _experts, inner, columns = weights.shape
    return all(size * weights.element_size() % _ALIGNED_BYTES == 0 for size in (inner, columns))


def expert_products(products: MatrixProducts, device: Device) -> ExpertProducts:
    """Return the grouped matmul where the device has one that works, else a product for each expert.

    On GPUs without a kernel of its own (compute capabilities other than 9 and 10), torch reads the rows' ends on the host
    and multiplies expert by expert. That cannot be captured, and is no faster than our own loop.
    """
    each = ProductPerExpert(products)
    if device.torch_device.type != "cuda" or device.dtype != torch.bfloat16 or not torch.cuda.is_available():
        return each
    try:
        x, weights = torch.ones(8, 16, dtype=device.dtype), torch.ones(2, 16, 8, dtype=device.dtype)
        row_ends = torch.tensor([0, 8], dtype=torch.int32)
        placed = device.place(x), device.place(weights), device.place(row_ends)
        with _waiting_fails():
            F.grouped_mm(*placed[:2], offs=placed[2])
        device.synchronise()
    except Exception as error:  # noqa: BLE001 - of a driver, or of a GPU that it was not made for
        _log.warning(
            "experts are multiplied one by one, because torch's grouped matmul fails or waits for the host (%s: %s)",
            type(error).__name__,
            error,
        )
        return each
    return GroupedProducts(each)


@contextmanager
def _waiting_fails() -> Iterator[None]:
    """Let torch raise an error where the host would wait for the GPU."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
