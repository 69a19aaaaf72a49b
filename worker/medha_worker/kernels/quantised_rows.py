"""Rows of quantised weights as a checkpoint stores them, and the form in which a device's own units multiply with them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from medha.model.quantisation import ActivationFormat
from medha_worker.device import is_in_host_memory


class WeightRows(Protocol):
    """Consecutive rows of a weight, [rows, columns], in any form."""

    @property
    def rows(self) -> int: ...

    @property
    def columns(self) -> int: ...

    @property
    def activations(self) -> ActivationFormat | None:
        """The rounding of activations; None leaves them as they are."""
        ...

    @property
    def input_scale(self) -> torch.Tensor | None:
        """The scale of activations if the checkpoint has one for all of them, [1]."""
        ...

    def tensors(self) -> Iterator[torch.Tensor]:
        """Return what is held in memory."""
        ...

    def numbers(self, rows: slice, dtype: torch.dtype) -> torch.Tensor:
        """Return the numbers of some rows, [rows, columns]."""
        ...


@dataclass(frozen=True)
class PlainRows:
    """Rows that are not quantised, beside others of the same product that are."""

    values: torch.Tensor
    activations: ActivationFormat | None = None
    input_scale: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        return self.values.shape[0]

    @property
    def columns(self) -> int:
        return self.values.shape[1]

    def tensors(self) -> Iterator[torch.Tensor]:
        yield self.values

    def reordered(self, index: torch.Tensor) -> PlainRows:
        """Return these rows in another order, int64 [rows]."""
        return replace(self, values=self.values[index.to(self.values.device)])

    def numbers(self, rows: slice, dtype: torch.dtype) -> torch.Tensor:
        return self.values[rows].to(dtype)


@dataclass(frozen=True)
class QuantisedRows:
    """Rows of integers or FP8 with scales: a number is (value - zero point) x scale.

    Attributes:
        values: One value in each element, [rows, columns]; or two of 4 bits in each byte, [rows, columns / 2] rounded up,
            of which the first is the low one.
        columns: Number of columns.
        scale: [row blocks, groups].
        zero: Zero points, of the shape of `scale`; None if all are `offset`.
        offset: The zero point of all groups if `zero` is None.
        has_pairs: True if a byte holds two values.
        group_size: Neighbouring columns that share a scale, from the first one; None if all do.
        group_of: The group of each column, int32 [columns], or that of each row and column, [rows, columns], if groups are not
            those of `group_size`.
        block_rows: Neighbouring rows that share a scale; None if all do.
        block_start: Rows of the first block that lie before the first row here.
        block_of: The block of each row, int32 [rows], if rows are not in the order of blocks.
    """

    values: torch.Tensor
    columns: int
    scale: torch.Tensor
    zero: torch.Tensor | None = None
    offset: int = 0
    has_pairs: bool = False
    group_size: int | None = None
    group_of: torch.Tensor | None = None
    block_rows: int | None = 1
    block_start: int = 0
    block_of: torch.Tensor | None = None
    activations: ActivationFormat | None = None
    input_scale: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        return self.values.shape[0]

    def reordered(self, index: torch.Tensor) -> QuantisedRows:
        """Return these rows in another order, int64 [rows]."""
        at = index.to(self.values.device)
        # torch cannot select rows of all 8-bit types.
        values = self.values.view(torch.uint8)[at].view(self.values.dtype)
        if self.block_rows is None:
            return replace(self, values=values)
        if self.block_rows == 1:
            zero = None if self.zero is None else self.zero[at]
            return replace(self, values=values, scale=self.scale[at], zero=zero)
        block_of = self._blocks(at) if self.block_of is None else self.block_of[at]
        return replace(self, values=values, block_of=block_of.int())

    def tensors(self) -> Iterator[torch.Tensor]:
        for tensor in (
            self.values,
            self.scale,
            self.zero,
            self.group_of,
            self.block_of,
            self.input_scale,
        ):
            if tensor is not None:
                yield tensor

    def numbers(self, rows: slice, dtype: torch.dtype) -> torch.Tensor:
        values = self._values(rows, dtype)
        scale = self._of_rows(self.scale, rows)
        zero = None if self.zero is None else self._of_rows(self.zero, rows).to(dtype)
        if self.group_of is not None:
            scale = self._of_columns(scale, rows)
            zero = None if zero is None else self._of_columns(zero, rows)
        elif self.group_size is not None and scale.shape[1] > 1:
            values = values.view(values.shape[0], scale.shape[1], self.group_size)
            scale, zero = scale[:, :, None], None if zero is None else zero[:, :, None]
        if zero is not None:
            values = values.sub_(zero)
        elif self.offset:
            values = values.sub_(self.offset)
        # A scale may be finer than the type of the product: rounding it first would shift a whole group.
        made = values.mul_(scale) if scale.dtype == dtype else (values * scale).to(dtype)
        return made.view(made.shape[0], self.columns)

    def _values(self, rows: slice, dtype: torch.dtype) -> torch.Tensor:
        """Return values as numbers, [rows, columns], in memory of their own."""
        some = self.values[rows]
        if some.dtype == torch.float8_e4m3fn and is_in_host_memory(some):
            return _of_float8(some, dtype)
        if not self.has_pairs:
            return some.to(dtype, copy=True)
        pairs = torch.empty(*some.shape, 2, dtype=dtype, device=some.device)
        pairs[..., 0] = some & 15
        pairs[..., 1] = some >> 4
        wide = pairs.view(some.shape[0], -1)
        return wide if wide.shape[1] == self.columns else wide[:, : self.columns].contiguous()

    def _of_rows(self, of_blocks: torch.Tensor, rows: slice) -> torch.Tensor:
        """Return the entries of some rows, [rows or 1, groups]."""
        if self.block_rows is None:
            return of_blocks
        if self.block_rows == 1:
            return of_blocks[rows]
        return of_blocks.index_select(0, self.blocks(rows))

    def blocks(self, rows: slice) -> torch.Tensor:
        """Return the block of each of some rows, by which an entry of `scale` is found."""
        if self.block_of is not None:
            return self.block_of[rows]
        index = torch.arange(rows.start, rows.stop, device=self.scale.device)
        return torch.zeros_like(index) if self.block_rows is None else self._blocks(index)

    def _of_columns(self, of_groups: torch.Tensor, rows: slice) -> torch.Tensor:
        """Return the entry of each column of some rows, [rows or 1, columns]."""
        assert self.group_of is not None
        if self.group_of.ndim == 1:
            return of_groups.index_select(1, self.group_of)
        return of_groups.gather(1, self.group_of[rows].long())

    def _blocks(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the blocks of rows by their indexes."""
        assert self.block_rows is not None
        return (rows + self.block_start).div_(self.block_rows, rounding_mode="floor")


def _of_float8(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers of FP8 (E4M3) that are not NaN; on a CPU, torch's own conversion takes several times as long.

    Moved down by one bit behind the sign, the bits are those of a float16 that is 2^8 times as small.
    """
    bits = values.view(torch.int8).to(torch.int16)
    bits = bits.bitwise_left_shift_(8).bitwise_right_shift_(1).bitwise_and_(~0x4000)
    return bits.view(torch.float16).to(dtype, copy=True).mul_(256.0)


class FastRows(ABC):
    """Rows of a weight whose products a device computes without making their numbers first.

    They are held in the form that the product takes, and in no other one.
    """

    @property
    @abstractmethod
    def rows(self) -> int: ...

    @property
    @abstractmethod
    def columns(self) -> int: ...

    @property
    @abstractmethod
    def activations(self) -> ActivationFormat | None:
        """The rounding of activations, as in `WeightRows`."""

    @property
    @abstractmethod
    def input_scale(self) -> torch.Tensor | None:
        """The scale of activations, as in `WeightRows`."""

    @abstractmethod
    def tensors(self) -> Iterator[torch.Tensor]:
        """Return what is held in memory."""

    @abstractmethod
    def numbers(self, rows: slice, dtype: torch.dtype) -> torch.Tensor:
        """Return the numbers of some rows, [rows, columns], for products that are faster with them."""

    def takes(self, rows: int) -> bool:
        """Return True if `product` is the fastest for so many rows of activations; else numbers are made."""
        return rows > 0

    @abstractmethod
    def product(self, x: torch.Tensor, largest: torch.Tensor | None) -> torch.Tensor:
        """Return the product of x, [rows, columns], with these rows, [rows, own rows], in the type of x.

        `largest` has the largest size in each whole row, [rows, 1], if activations are rounded by it.
        """
