"""The waiting room: requests for a model that a manifest declares and that no replica serves yet.

Their bodies are kept as they came, because nothing can tokenise them before a replica brings the tokenizer. The
bytes in the room are bounded, for all owners together and for each, and so is the time of each request. Events come in
as calls, and the driver carries out what they return.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Literal

RoomRefusal = Literal["full", "share", "late"]
"""Reason why a request may not wait, or not any longer; `share`: its owner has all the room that one may take."""
ROOM_REFUSALS: tuple[RoomRefusal, ...] = ("full", "share", "late")


@dataclass(frozen=True, slots=True)
class Guest:
    """A request that waits; `since` is in seconds on the clock of `now`."""

    id: str
    model: str
    owner: str
    body_bytes: int
    since: float


class WaitingRoom:
    """The requests that wait, in the order of arrival."""

    def __init__(self, most_bytes: int, most_owner_bytes: int, most_seconds: float) -> None:
        """Open a room for bodies of `most_bytes`, and `most_owner_bytes` of one owner; `most_seconds` of 0 lets nobody in."""
        self._most_bytes = most_bytes
        self._most_owner_bytes = most_owner_bytes
        self._most_seconds = most_seconds
        self._guests: dict[str, Guest] = {}
        self._held_by_owner: Counter[str] = Counter()
        self.held_bytes = 0

    def __len__(self) -> int:
        return len(self._guests)

    @property
    def is_open(self) -> bool:
        return self._most_seconds > 0

    def by_model(self) -> dict[str, int]:
        """Return the number of waiting requests of each model."""
        return dict(Counter(guest.model for guest in self._guests.values()))

    def enter(self, guest: Guest) -> RoomRefusal | None:
        """Let a request wait; return why not, and change nothing, if there is no room for its body."""
        assert guest.id not in self._guests
        if not self.is_open or self.held_bytes + guest.body_bytes > self._most_bytes:
            return "full"
        if self._held_by_owner[guest.owner] + guest.body_bytes > self._most_owner_bytes:
            return "share"
        self._guests[guest.id] = guest
        self.held_bytes += guest.body_bytes
        self._held_by_owner[guest.owner] += guest.body_bytes
        return None

    def leave(self, id_: str) -> None:
        """Forget a request whose client has gone; one that is not here is ignored."""
        guest = self._guests.pop(id_, None)
        if guest is not None:
            self.held_bytes -= guest.body_bytes
            self._held_by_owner[guest.owner] -= guest.body_bytes
            if not self._held_by_owner[guest.owner]:
                del self._held_by_owner[guest.owner]

    def go_on(self, is_awaited: Callable[[str], bool]) -> list[Guest]:
        """Let the requests out whose model need not be awaited any more; return them in the order of arrival."""
        return self._let_out([one for one in self._guests.values() if not is_awaited(one.model)])

    def late(self, now: float) -> list[Guest]:
        """Let the requests out that have waited for too long, and return them."""
        return self._let_out([one for one in self._guests.values() if now - one.since >= self._most_seconds])

    def everybody(self) -> list[Guest]:
        """Let all requests out, and return them."""
        return self._let_out(list(self._guests.values()))

    def seconds_until_room(self, now: float, owner: str | None = None) -> int:
        """Return a `Retry-After`: until the request that has waited longest must go, of all or of an owner."""
        guests = (guest for guest in self._guests.values() if owner in (None, guest.owner))
        first = min((guest.since for guest in guests), default=now)
        return max(1, ceil(first + self._most_seconds - now))

    def _let_out(self, guests: list[Guest]) -> list[Guest]:
        for guest in guests:
            self.leave(guest.id)
        return guests
