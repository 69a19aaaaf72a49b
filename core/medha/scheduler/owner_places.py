"""Shares the places for running sequences, and KV, between owners: none takes the last of them from the others.

A request names its owner by an opaque string. A client request with `n` samples is `n` sequences of one owner,
each with a place of its own (`max_running` in all). No decode steps aside for a place, so a request that comes when
all places are taken waits until a whole answer ends. Therefore an owner gets another place only while it holds few in
comparison with those that are free. This is the dynamic threshold of shared buffers (Choudhury and Hahne,
IEEE/ACM Transactions on Networking 6, 1998): it needs no setting for each owner, and leaves places to owners
that come later. An owner that is alone may take all of them; it is alone if no other had a request here for
`REMEMBERED_SECONDS`.

The same holds for the KV of requests that are not long, except that an owner with less than an equal share of it
always gets more. KV of long requests is not counted: they leave a headroom (`medha.scheduler.admission`), and an
owner's long request does not keep out its short ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

PLACES_PER_FREE_PLACE = 8
"""Most places that an owner may hold for each free one. One owner can hold 8/9 of all, so the reserve is small."""
REMEMBERED_SECONDS = 60.0
"""Time for which others leave a reserve to an owner whose last request has ended."""


@dataclass(slots=True, eq=False)
class Owner:
    """The requests of one owner."""

    name: str
    number: int  # unique; stands for the owner in columns
    waiting: int = 0
    waiting_shorts: int = 0  # those of them that are not long
    running: int = 0  # requests that hold KV
    blocks: int = 0  # of KV that those which are not long took


class OwnerPlaces:
    """The owners of all requests of a replica."""

    def __init__(self) -> None:
        self._owners: dict[str, Owner] = {}
        self._holding: dict[str, Owner] = {}  # owners that hold places or KV; few, if many wait
        self._large: dict[str, Owner] = {}  # owners with enough places to be over the threshold
        self._with_waiting_shorts = 0  # number of owners
        self._blocks = 0  # of all owners
        self._arrivals = 0
        self._now = -inf
        self._gone: list[tuple[str, float]] = []  # the last two owners that left, and when

    def __len__(self) -> int:
        return len(self._owners)

    def at(self, now: float) -> None:
        """Set the time of the next calls, and forget owners that left long ago."""
        self._now = now
        if self._gone and self._gone[0][1] < now - REMEMBERED_SECONDS:
            self._gone = [one for one in self._gone if one[1] >= now - REMEMBERED_SECONDS]

    def arrive(self, name: str, *, is_long: bool = False) -> int:
        """Count a request that waits; return its owner's number."""
        owner = self._owners.get(name)
        if owner is None:
            self._arrivals += 1
            owner = self._owners[name] = Owner(name, self._arrivals)
        owner.waiting += 1
        self._count_short(owner, 0 if is_long else 1)
        return owner.number

    def _count_short(self, owner: Owner, change: int) -> None:
        had_some = owner.waiting_shorts > 0
        owner.waiting_shorts += change
        self._with_waiting_shorts += (owner.waiting_shorts > 0) - had_some

    def place(self, name: str, *, is_long: bool = False) -> None:
        """Count a waiting request that now has a place."""
        owner = self._holding[name] = self._owners[name]
        owner.waiting -= 1
        self._count_short(owner, 0 if is_long else -1)
        owner.running += 1
        if owner.running >= PLACES_PER_FREE_PLACE:
            self._large[name] = owner

    def hold(self, name: str, blocks: int) -> None:
        """Count blocks of KV that an owner's requests take, or, if it is negative, that they give back."""
        owner = self._holding[name] = self._owners[name]
        owner.blocks += blocks
        self._blocks += blocks

    def leave(self, name: str, *, waited: bool, is_long: bool = False) -> None:
        """Forget a request, which holds nothing any more."""
        owner = self._owners[name]
        if waited:
            owner.waiting -= 1
            self._count_short(owner, 0 if is_long else -1)
        else:
            owner.running -= 1
            if not owner.running:
                del self._holding[name]
            if owner.running < PLACES_PER_FREE_PLACE:
                self._large.pop(name, None)
        if owner.waiting == owner.running == 0:
            del self._owners[name]
            self._gone = [*(one for one in self._gone if one[0] != name), (name, self._now)][-2:]

    def has_several(self, name: str) -> bool:
        """Return whether an owner that is not alone has several requests."""
        if len(self._owners) == 1:
            return False
        owner = self._owners[name]
        return owner.waiting + owner.running > 1

    def is_over(self, name: str, free_places: int, free_blocks: int) -> bool:
        """Return whether an owner must leave the free places and KV to others."""
        if not self._any_over(free_blocks):
            return False
        owner = self._owners.get(name)
        return owner is not None and self._exceeds(owner, free_places, free_blocks)

    def over(self, free_places: int, free_blocks: int) -> tuple[int, ...]:
        """Return the numbers of the owners whose waiting requests must leave the free places and KV to others."""
        if not self._any_over(free_blocks):
            return ()
        return tuple(
            owner.number
            for owner in self._holding.values()
            if owner.waiting and self._exceeds(owner, free_places, free_blocks)
        )

    def over_kv(self, free_blocks: int) -> bool:
        """Return whether the owner of a waiting request must leave the free KV to others."""
        if self._blocks <= PLACES_PER_FREE_PLACE * free_blocks:
            return False
        return any(
            owner.waiting and self._holds_too_much(owner, self._others(owner), free_blocks)
            for owner in self._holding.values()
        )

    def above_share(self) -> tuple[int, ...]:
        """Return the numbers of owners with more KV than an equal share, if a request of another one waits.

        Only requests that are not long count: long ones have caps and claims of their own.
        """
        if len(self._owners) == 1:
            return ()
        above = tuple(
            owner.number
            for owner in self._holding.values()
            if owner.waiting_shorts and owner.blocks * len(self._owners) > self._blocks
        )
        return above if len(above) < self._with_waiting_shorts else ()

    def any_may_make_way(self) -> bool:
        """Return whether an owner of several running requests has more than an equal share of KV, beside another one."""
        if len(self._owners) == 1:
            return False
        sharers = len(self._holding) + 1
        return any(
            owner.running > 1 and owner.blocks * sharers > self._blocks for owner in self._holding.values()
        )

    def any_may_take(self, free_places: int, free_blocks: int) -> bool:
        """Return whether a request waits whose owner may take one of the free places."""
        over = set(self.over(free_places, free_blocks))
        return any(owner.waiting and owner.number not in over for owner in self._owners.values())

    def _any_over(self, free_blocks: int) -> bool:
        """Return False if surely no owner exceeds a threshold: a quick check, which nearly always suffices."""
        if len(self._owners) == 1 and not self._gone:
            return False
        return bool(self._large) or self._blocks > PLACES_PER_FREE_PLACE * free_blocks

    def _exceeds(self, owner: Owner, free_places: int, free_blocks: int) -> bool:
        others = self._others(owner)
        if others and owner.running >= PLACES_PER_FREE_PLACE * free_places:
            return True
        return self._holds_too_much(owner, others, free_blocks)

    def _others(self, owner: Owner) -> int:
        """Return how many others have requests here; if none has, how many had some lately."""
        return len(self._owners) - 1 or sum(name != owner.name for name, _ in self._gone)

    def _holds_too_much(self, owner: Owner, others: int, free_blocks: int) -> bool:
        has_more_than_its_share = owner.blocks * (1 + others) > self._blocks
        return others > 0 and has_more_than_its_share and owner.blocks > PLACES_PER_FREE_PLACE * free_blocks
