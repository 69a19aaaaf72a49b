"""A queue of work with due times: what is due first comes first, and what is due at the same time in the order of arrival."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count
from typing import Generic, TypeVar

Item = TypeVar("Item")


class DueQueue(Generic[Item]):
    """Items by due time. It has no lock; iteration has no order."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Item]] = []
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Item]:
        return (item for _, _, item in self._heap)

    def add(self, item: Item, due: float = 0.0) -> None:
        """Add an item that is due at `due`, in seconds of any one clock. Items without a due time come in the order of arrival."""
        heappush(self._heap, (due, next(self._numbers), item))

    def first(self) -> Item | None:
        """Return the item that comes first, if there is any."""
        return self._heap[0][2] if self._heap else None

    def pop(self) -> Item:
        """Remove and return the item that comes first."""
        return heappop(self._heap)[2]

    def clear(self) -> None:
        self._heap.clear()
