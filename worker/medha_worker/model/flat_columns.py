"""Many short columns of numbers of one step in two flat arrays, so that all reach a device in two copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Integers = npt.NDArray[np.int64] | Sequence[int]
Reals = npt.NDArray[np.float64] | Sequence[float]


class Columns:
    """Collects columns in host memory; the slice that a column gets finds it again in `StagedColumns`."""

    def __init__(self) -> None:
        self._integers: list[npt.NDArray[np.int64]] = []
        self._reals: list[npt.NDArray[np.float64]] = []
        self._integer_count = self._real_count = 0

    def integers(self, values: Integers) -> slice:
        column = np.asarray(values, dtype=np.int64)
        self._integers.append(column)
        first, self._integer_count = self._integer_count, self._integer_count + len(column)
        return slice(first, self._integer_count)

    def reals(self, values: Reals) -> slice:
        column = np.asarray(values, dtype=np.float64)
        self._reals.append(column)
        first, self._real_count = self._real_count, self._real_count + len(column)
        return slice(first, self._real_count)

    def flat(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Return all columns of integers, and all of reals."""
        return (
            np.concatenate(self._integers) if self._integers else np.empty(0, dtype=np.int64),
            np.concatenate(self._reals) if self._reals else np.empty(0, dtype=np.float64),
        )


@dataclass(frozen=True, slots=True)
class StagedColumns:
    """The columns on the device: int64 [n] and float64 [m]."""

    integers: Tensor
    reals: Tensor

    @classmethod
    def staged(
        cls,
        flat: tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]],
        stage: Callable[[Tensor], Tensor],
    ) -> StagedColumns:
        """Copy columns that are not empty to a device by `stage`."""
        integers, reals = (torch.from_numpy(column) for column in flat)
        return cls(stage(integers) if len(integers) else integers, stage(reals) if len(reals) else reals)
