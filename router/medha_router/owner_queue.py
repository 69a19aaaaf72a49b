"""A queue in which owners (API keys, or else addresses) take turns: many items of one owner do not delay others'."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

_Item = TypeVar("_Item")


class OwnerQueue(Generic[_Item]):
    """Items that wait. Each owner in turn gets its earliest one served; items compare by identity or equality."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[_Item]] = {}  # by owner, whose turn is next first

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def of(self, owner: str) -> int:
        """Return the number of an owner's items."""
        return len(self._waiting.get(owner, ()))

    def add(self, owner: str, item: _Item) -> None:
        """Let an item wait behind those of its owner."""
        self._waiting.setdefault(owner, deque()).append(item)

    def take(self) -> _Item | None:
        """Remove the item that is next and return it; None if none waits."""
        if not self._waiting:
            return None
        owner, own = next(iter(self._waiting.items()))
        item = own.popleft()
        del self._waiting[owner]
        if own:
            self._waiting[owner] = own  # behind the others
        return item

    def remove(self, owner: str, item: _Item) -> bool:
        """Forget an item, and return whether it waited."""
        own = self._waiting.get(owner, deque())
        if item not in own:
            return False
        own.remove(item)
        if not own:
            del self._waiting[owner]
        return True

    def clear(self) -> None:
        self._waiting.clear()
