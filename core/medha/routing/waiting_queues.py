"""Queues of the sequences that wait in a router, by model and bundle, the most urgent first."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from typing import Generic, Protocol, TypeVar


class Waiting(Protocol):
    """An element of the queues: its order never changes, and is unique."""

    @property
    def order(self) -> tuple[float, int]: ...


Key = tuple[str, str]
"""Name of a model, and digest of its bundle."""

_Sequence = TypeVar("_Sequence", bound=Waiting)


def _order(sequence: Waiting) -> tuple[float, int]:
    return sequence.order


class WaitingQueues(Generic[_Sequence]):
    """A queue for each key, so that a model without replicas delays no other. O(log n) comparisons per change."""

    def __init__(self) -> None:
        self._queues: dict[Key, list[_Sequence]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Key]:
        """Iterate over a snapshot of the keys for which sequences wait."""
        return iter(tuple(self._queues))

    def of(self, key: Key) -> list[_Sequence]:
        """Return the sequences that wait for a key, the most urgent first; the caller must not change the list."""
        return self._queues.get(key, [])

    def add(self, key: Key, sequence: _Sequence) -> None:
        insort(self._queues.setdefault(key, []), sequence, key=_order)
        self._count += 1

    def remove(self, key: Key, sequence: _Sequence) -> None:
        queue = self._queues[key]
        index = bisect_left(queue, sequence.order, key=_order)
        assert queue[index] is sequence
        del queue[index]
        self._count -= 1
        if not queue:
            del self._queues[key]

    def replace_front(self, key: Key, count: int, kept: Iterable[_Sequence]) -> None:
        """Replace the first `count` sequences of a queue by `kept`, in their order."""
        queue = self._queues[key]
        before = len(queue)
        queue[:count] = kept
        self._count -= before - len(queue)
        if not queue:
            del self._queues[key]
