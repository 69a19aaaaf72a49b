"""The tokens that penalties apply to, as tables over the vocabulary on the device: one row for each sequence.

A table only repeats what the sequence has in host memory. Each step first adds the tokens that are new since the
last one, as values that replace those there. So a step that fails, or is planned twice, does no harm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from medha_worker.model.flat_columns import Columns, StagedColumns
from medha_worker.model.sampler import SequenceSampler


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


@dataclass(frozen=True, slots=True)
class TableUpdate:
    """The writes of a step to one table, made before it reads the table; slices are columns."""

    capacity: int  # rows that the table must have
    cleared: slice  # rows that new sequences take over
    places: slice  # places in the flat table, none of them twice
    values: slice  # and their new values


@dataclass(frozen=True, slots=True)
class PenaltyUpdate:
    """The writes of a step to both tables, and the number of tokens of each sequence that are there afterwards."""

    seen: TableUpdate | None
    counts: TableUpdate | None
    reached: tuple[tuple[PenaltySlot, int], ...]

    def record(self) -> None:
        """Note that the update has been applied."""
        for slot, known in self.reached:
            slot.known = known


def plan_update(
    sequences: Sequence[SequenceSampler], slots: PenaltySlots, vocab: int, columns: Columns
) -> PenaltyUpdate:
    """Return what brings the tables up to date for these sequences."""
    seen, counts = _Changes(vocab), _Changes(vocab)
    reached = []
    for sequence in sequences:
        if not (sequence.penalises_repetition or sequence.penalises_counts):
            continue
        slot = slots.slot_of(sequence)
        reached.append((slot, sequence.prompt_length + len(sequence.outputs)))
        known = slot.known or 0
        if sequence.penalises_repetition:
            tokens = np.unique(sequence.tokens_from(known))
            seen.add(slot, tokens, np.ones(len(tokens)))
        if sequence.penalises_counts:
            tokens = np.unique(sequence.tokens_from(max(known, sequence.prompt_length)))
            counts.add(
                slot,
                tokens,
                np.array([sequence.output_counts[token] for token in tokens.tolist()], dtype=float),
            )
    return PenaltyUpdate(seen.planned(columns), counts.planned(columns), tuple(reached))


class PenaltyTables:
    """The tables on one device; each takes memory once a sequence needs it."""

    def __init__(self, device: torch.device) -> None:
        self._seen = torch.empty(0, 0, dtype=torch.bool, device=device)
        self._counts = torch.empty(0, 0, dtype=torch.float32, device=device)

    def update(self, update: PenaltyUpdate, vocab: int, columns: StagedColumns) -> None:
        if update.seen is not None:
            self._seen = _updated(self._seen, update.seen, vocab, columns)
        if update.counts is not None:
            self._counts = _updated(self._counts, update.counts, vocab, columns)

    def seen(self, slots: Tensor) -> Tensor:
        """Return bool [n, vocab]: the tokens in prompt or output."""
        return self._seen.index_select(0, slots)

    def counts(self, slots: Tensor) -> Tensor:
        """Return float32 [n, vocab]: how often each token is in the output."""
        return self._counts.index_select(0, slots)


class _Changes:
    """Collects the changes to one table."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self._capacity = 0
        self._cleared: list[int] = []
        self._places: list[npt.NDArray[np.int64]] = []
        self._values: list[npt.NDArray[np.float64]] = []

    def add(self, slot: PenaltySlot, tokens: npt.NDArray[np.int64], values: npt.NDArray[np.float64]) -> None:
        self._capacity = max(self._capacity, slot.index + 1)
        if slot.known is None:
            self._cleared.append(slot.index)
        self._places.append(slot.index * self._vocab + tokens)
        self._values.append(values)

    def planned(self, columns: Columns) -> TableUpdate | None:
        if not self._capacity:
            return None
        return TableUpdate(
            self._capacity,
            columns.integers(self._cleared),
            columns.integers(np.concatenate(self._places)),
            columns.reals(np.concatenate(self._values)),
        )


def _updated(table: Tensor, update: TableUpdate, vocab: int, columns: StagedColumns) -> Tensor:
    if len(table) < update.capacity:
        larger = table.new_zeros(max(update.capacity, 2 * len(table)), vocab)
        if len(table):
            larger[: len(table)] = table
        table = larger
    table.index_fill_(0, columns.integers[update.cleared], 0)
    places, values = columns.integers[update.places], columns.reals[update.values]
    table.view(-1).index_copy_(0, places, values.to(table.dtype))
    return table
