"""The tokens that penalties apply to, as tables over the vocabulary on the device: one row for each sequence.

A table only repeats what the sequence has in host memory. Each step first writes what has changed since the last one, and
writes new values, not increments. So a step that fails, or is planned twice, does no harm.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from medha_worker.model.flat_columns import Column, Columns
from medha_worker.model.sampler import SequenceSampler

Slots = slice | Column
"""Rows of the tables: a slice if they lie side by side, which is read without a copy."""


@dataclass(slots=True)
class PenaltySlot:
    """The row of the tables that a sequence has, and how many of its tokens are there."""

    index: int
    known: int | None = None  # None: the row still holds what another sequence left


class PenaltySlots:
    """Assigns rows of the tables to sequences; a row is free when its sequence is no longer referenced."""

    def __init__(self) -> None:
        self._slots: WeakKeyDictionary[SequenceSampler, PenaltySlot] = WeakKeyDictionary()

    def slot_of(self, sequence: SequenceSampler) -> PenaltySlot:
        slot = self._slots.get(sequence)
        if slot is None:
            taken = {one.index for one in self._slots.values()}
            slot = PenaltySlot(next(index for index in count() if index not in taken))
            self._slots[sequence] = slot
        return slot

    def rows_of(self, sequences: Iterable[SequenceSampler], columns: Columns) -> Slots:
        """Return the rows of these sequences, in their order; there is at least one."""
        indices = [self.slot_of(one).index for one in sequences]
        first = indices[0]
        if indices == list(range(first, first + len(indices))):
            return slice(first, first + len(indices))
        return columns.integers(indices)


class TableUpdate(NamedTuple):
    """The writes of a step to one table, made before it reads the table."""

    capacity: int  # rows that the table must have
    cleared: Column | None  # rows that new sequences take over
    places: Column | None  # places in the flat table; if one is there twice, its values are equal
    values: Column | None  # their new values; None: true


class PenaltyUpdate(NamedTuple):
    """The writes of a step to both tables, and the number of tokens of each sequence that are there afterwards."""

    seen: TableUpdate | None
    counts: TableUpdate | None
    reached: Sequence[tuple[PenaltySlot, int]]

    def record(self) -> None:
        """Note that the update has been applied."""
        for slot, known in self.reached:
            slot.known = known


def plan_update(
    penalised: Sequence[tuple[SequenceSampler, PenaltySlot]], vocab: int, columns: Columns
) -> PenaltyUpdate:
    """Return what brings the tables up to date for sequences, all of which have penalties."""
    seen, counted = _Changes(), _Changes()
    counts: list[float] = []
    for sequence, slot in penalised:
        start, length = slot.index * vocab, sequence.prompt_length
        outputs = sequence.outputs if slot.known is None else sequence.outputs[slot.known - length :]
        places = [start + token for token in outputs]
        if sequence.penalises_repetition:
            seen.add(slot, places)
            if slot.known is None:
                seen.prompts.append(start + sequence.prompt.astype(np.int64))
        if sequence.penalises_counts:
            counted.add(slot, places)
            counts += [sequence.output_counts[token] for token in outputs]
    places_of_counts = counted.column(columns)
    same = not seen.prompts and seen.places == counted.places
    return PenaltyUpdate(
        seen.planned(columns, places_of_counts if same else seen.column(columns), None),
        counted.planned(columns, places_of_counts, columns.singles(counts) if counts else None),
        [(slot, sequence.prompt_length + len(sequence.outputs)) for sequence, slot in penalised],
    )


class _Changes:
    """Collects the changes to one table."""

    def __init__(self) -> None:
        self.places: list[int] = []
        self.prompts: list[npt.NDArray[np.int64]] = []  # more places
        self._capacity = 0
        self._cleared: list[int] = []

    def add(self, slot: PenaltySlot, places: list[int]) -> None:
        self._capacity = max(self._capacity, slot.index + 1)
        if slot.known is None:
            self._cleared.append(slot.index)
        self.places += places

    def column(self, columns: Columns) -> Column | None:
        """Return all places."""
        if self.prompts:
            return columns.integers(np.concatenate([*self.prompts, np.array(self.places, dtype=np.int64)]))
        return columns.integers(self.places) if self.places else None

    def planned(self, columns: Columns, places: Column | None, values: Column | None) -> TableUpdate | None:
        if not self._capacity:
            return None
        cleared = columns.integers(self._cleared) if self._cleared else None
        return TableUpdate(self._capacity, cleared, places, values)


class PenaltyTables:
    """The tables on one device; each takes memory once a sequence needs it."""

    def __init__(self, device: torch.device) -> None:
        self._seen = torch.empty(0, 0, dtype=torch.bool, device=device)
        self._counts = torch.empty(0, 0, dtype=torch.float32, device=device)

    def update(self, update: PenaltyUpdate, vocab: int) -> None:
        if update.seen is not None:
            self._seen = _updated(self._seen, update.seen, vocab)
        if update.counts is not None:
            self._counts = _updated(self._counts, update.counts, vocab)

    def seen(self, slots: Slots) -> Tensor:
        """Return bool [n, vocab]: the tokens in prompt or output."""
        return _rows(self._seen, slots)

    def counts(self, slots: Slots) -> Tensor:
        """Return float32 [n, vocab]: how often each token is in the output."""
        return _rows(self._counts, slots)


def _rows(table: Tensor, slots: Slots) -> Tensor:
    return table[slots] if isinstance(slots, slice) else table.index_select(0, slots.tensor)


def _updated(table: Tensor, update: TableUpdate, vocab: int) -> Tensor:
    if len(table) < update.capacity:
        larger = table.new_zeros(max(update.capacity, 2 * len(table)), vocab)
        if len(table):
            larger[: len(table)] = table
        table = larger
    if update.cleared is not None:
        table.index_fill_(0, update.cleared.tensor, 0)
    if update.places is not None:
        flat, places = table.view(-1), update.places.tensor
        if update.values is None:
            flat.index_fill_(0, places, 1)
        else:
            flat.index_copy_(0, places, update.values.tensor)
    return table
