"""A queue in which owners (API keys, or else addresses) take turns: many items of one owner do not delay others'."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

_Item = TypeVar("_Item", bound=Hashable)


class OwnerQueue(Generic[_Item]):
    """Items that wait, each of them once. Owners take turns: in its turn, an owner's earliest item is served.

    Removing an item takes equally long however many wait, because thousands of clients may go at once.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, OrderedDict[_Item, None]] = OrderedDict()  # whose turn is next first

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def of(self, owner: str) -> int:
        """Return the number of an owner's items."""
        return len(self._waiting.get(owner, ()))

    def add(self, owner: str, item: _Item) -> None:
        """Let an item wait, after those of its owner."""
        self._waiting.setdefault(owner, OrderedDict())[item] = None

    def take(self) -> _Item | None:
        """Remove the item that is next and return it; None if none waits."""
        if not self._waiting:
            return None
        owner, own = next(iter(self._waiting.items()))
        item, _ = own.popitem(last=False)
        if own:
            self._waiting.move_to_end(owner)
        else:
            del self._waiting[owner]
        return item

    def remove(self, owner: str, item: _Item) -> bool:
        """Forget an item, and return whether it waited."""
        own = self._waiting.get(owner)
        if own is None or item not in own:
            return False
        del own[item]
        if not own:
            del self._waiting[owner]
        return True

    def clear(self) -> None:
        self._waiting.clear()
