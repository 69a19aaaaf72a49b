"""Writes of new K and V to a paged pool in plain torch, in any dtype on any device."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from medha_worker.device import Device
from medha_worker.kernels.protocol import StepWrite

# A slice copy costs about as much as scattering this many rows.
_ROWS_PER_SLICE_COPY = 8


class TorchKVWriter:
    """Copies few long runs of slots as slices, and scatters many short ones."""

    def __init__(self, device: Device) -> None:
        """`device` is the pool's."""
        self._device = device

    def plan(self, slots: npt.NDArray[np.int64]) -> StepWrite:
        if len(slots) >= _ROWS_PER_SLICE_COPY:
            # Rows at which a run begins, but the first.
            breaks = np.flatnonzero(slots[1:] != slots[:-1] + 1) + 1
            if (len(breaks) + 1) * _ROWS_PER_SLICE_COPY <= len(slots):
                return _Slices(
                    [
                        (slice(first, stop), slice(int(slots[first]), int(slots[stop - 1]) + 1))
                        for first, stop in pairwise((0, *breaks.tolist(), len(slots)))
                    ]
                )
        return _Scatter(self._device.place(torch.from_numpy(slots)))

    def for_graph(self, rows: int) -> GraphScatter:
        return GraphScatter(rows, self._device)


class _Scatter:
    def __init__(self, slots: torch.Tensor) -> None:
        self._slots = slots

    def write(
        self, pool_keys: torch.Tensor, pool_values: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        _bits(pool_keys).index_copy_(1, self._slots, _bits(keys).transpose(0, 1))
        if pool_values is not pool_keys:
            _bits(pool_values).index_copy_(1, self._slots, _bits(values).transpose(0, 1))


def _bits(numbers: torch.Tensor) -> torch.Tensor:
    """Return FP8 as bytes, which torch can scatter, and other numbers as they are."""
    return numbers.view(torch.uint8) if numbers.dtype == torch.float8_e4m3fn else numbers


class GraphScatter(_Scatter):
    """`GraphWrite` that scatters every row."""

    def __init__(self, rows: int, device: Device) -> None:
        super().__init__(device.place(torch.zeros(rows, dtype=torch.int64)))
        self._device = device

    def replan(self, slots: npt.NDArray[np.int64]) -> None:
        self._slots.copy_(self._device.place(torch.from_numpy(slots)))


class _Slices:
    def __init__(self, runs: list[tuple[slice, slice]]) -> None:
        self._runs = runs  # rows, and their slots

    def write(
        self, pool_keys: torch.Tensor, pool_values: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        for rows, slots in self._runs:
            pool_keys[:, slots] = keys[rows].transpose(0, 1)
            if pool_values is not pool_keys:
                pool_values[:, slots] = values[rows].transpose(0, 1)
