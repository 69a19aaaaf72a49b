"""Many short columns of numbers in one flat array, so that all of them reach a device in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from medha_worker.device import Device

Integers = npt.NDArray[np.int64] | Sequence[int]
Reals = Sequence[float]

_WORD_BYTES = 8


class Column:
    """Numbers in host memory, and on the device as `tensor` once their `Columns` are staged."""

    __slots__ = ("tensor", "values")
    tensor: Tensor

    def __init__(self, values: npt.NDArray[Any]) -> None:
        self.values = values


class Columns:
    """Collects columns in host memory."""

    def __init__(self) -> None:
        self._columns: list[Column] = []

    def integers(self, values: Integers) -> Column:
        """Add int64 [n]."""
        return self._added(np.asarray(values, dtype=np.int64))

    def singles(self, values: Reals) -> Column:
        """Add float32 [n]."""
        return self._added(np.asarray(values, dtype=np.float32))

    def integers_of_rows(self, values: Integers) -> Column:
        """Add int64 [n, 1]."""
        return self._added(np.asarray(values, dtype=np.int64)[:, None])

    def singles_of_rows(self, values: Reals) -> Column:
        """Add float32 [n, 1]."""
        return self._added(np.asarray(values, dtype=np.float32)[:, None])

    def doubles_of_rows(self, values: Reals) -> Column:
        """Add float64 [n, 1]."""
        return self._added(np.asarray(values, dtype=np.float64)[:, None])

    def stage(self, device: Device) -> None:
        """Give each column its tensor on a device, in a single copy if the device has its own memory."""
        if not self._columns:
            return
        if device.is_host:
            for column in self._columns:
                column.tensor = torch.from_numpy(column.values)
        else:
            words = [_words(column.values) for column in self._columns]
            flat = device.place(torch.from_numpy(np.concatenate(words)))
            parts = torch.split(flat, [len(part) for part in words])
            for column, part in zip(self._columns, parts, strict=True):
                values = column.values
                typed = part.view(torch.from_numpy(values[:0]).dtype)
                column.tensor = typed[: values.size].view(values.shape)

    def _added(self, values: npt.NDArray[Any]) -> Column:
        column = Column(values)
        self._columns.append(column)
        return column


def _words(values: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return the bits of numbers as whole words."""
    flat = values.reshape(-1)
    padding = -flat.nbytes % _WORD_BYTES // flat.itemsize
    return np.concatenate([flat, np.zeros(padding, dtype=flat.dtype)]).view(np.int64)
