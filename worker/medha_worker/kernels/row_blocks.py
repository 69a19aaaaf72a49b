"""Blocks of rows that are sorted by expert, found on the device: the host knows how many there are at most, not whose rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RowBlocks:
    """Blocks of a fixed number of rows, each with rows of one expert alone.

    Attributes:
        expert: The expert of each block, int64 [blocks].
        first: The first row of each block, int64 [blocks].
        end: The row behind the last one of the block's expert, int64 [blocks]. A block whose `first` is not before it has no rows.
        place: The place of each row among the rows of all blocks, int64 [rows].
    """

    expert: torch.Tensor
    first: torch.Tensor
    end: torch.Tensor
    place: torch.Tensor


def row_blocks(row_ends: torch.Tensor, rows: int, size: int) -> RowBlocks:
    """Return blocks of `size` rows that have room for `rows` rows, however these are distributed over experts.

    `row_ends` is as in `ExpertProducts.product`. There are rows // size + min(experts, rows) blocks, of which some may be empty.
    """
    ends = row_ends.long()
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    counts = (ends - starts + (size - 1)).div_(size, rounding_mode="floor")
    behind = counts.cumsum(0)
    before = behind - counts
    block = torch.arange(rows // size + min(len(row_ends), rows), device=ends.device)
    # Empty blocks are the last ones, and get the last expert, behind its rows.
    expert = torch.searchsorted(behind, block, right=True).clamp_(max=len(row_ends) - 1)
    first = starts[expert] + (block - before[expert]) * size
    row = torch.arange(rows, device=ends.device)
    own = experts_of_rows(row_ends, rows)
    return RowBlocks(expert, first, ends[expert], before[own] * size + row - starts[own])


def experts_of_rows(row_ends: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the expert of each row, int64 [rows]."""
    row = torch.arange(rows, dtype=row_ends.dtype, device=row_ends.device)
    return torch.searchsorted(row_ends, row, right=True)
