"""Growth of running requests beyond their expected output: the KV held for it, and who steps aside for it.

A request reserves KV for the output that is expected of it (`medha.scheduler.output_lengths`), and takes more
when it outgrows that. Some free KV is held back from admission for such growth: for each request that may
outgrow what it holds, a part of its expected output; for long requests, at most what is left of their share of the pool.

If KV is short all the same, one request *steps aside*: it gives its KV back and waits. When it comes back, what the
host tier has kept of its KV is fetched, and the rest is computed again (`medha.kv.host_tier`). Its text stays the
same, as after the loss of a rank. Which one is decided by these rules, in this order:

1. It is of an owner that holds more than an equal share of KV by several requests, if there is one: a key with many
   answers must not displace those of a key with few.
2. It has stepped aside least often.
3. It is on the lanes of the request that lacks KV.
4. It has the fewest computed tokens, which take the least time to compute again, or to fetch.
5. It came last.

The oldest request of all is spared as long as there is another.

Requests also step aside for one that waits: if an owner with little KV would miss a deadline because others hold
the KV, decodes of those with too much give it back (`who_make_way`).

Three rules keep requests from displacing each other for ever:

* A request that stepped aside for growth comes back with a reservation for at least twice the output that it had,
  and from its `MOST_ASIDES`-th time on for all that it can ever need. One that made way comes back with the
  reservation that it had, because that is no sign of a long answer.
* A request that holds all that it can need never steps aside for growth.
* One that has stepped aside `MOST_ASIDES` times, for whatever reason, no longer makes way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from medha.scheduler.request import Request

GROWTH_SHARE = 0.1
"""Largest share of the KV pool that is held for growth."""
GROWTH_PART = 0.25
"""Part of its output reservation that is held in addition for each request that may outgrow it."""
MOST_ASIDES = 3
"""Most times that a request steps aside for growth. It makes way only while it has stepped aside less often."""


@dataclass(slots=True)
class Held:
    """The running requests of an owner, and the blocks that they took."""

    requests: int = 0
    blocks: int = 0


def with_too_much(held: Mapping[str, Held]) -> frozenset[str]:
    """Return the owners whose several requests hold more than an equal share of what all hold."""
    total = sum(one.blocks for one in held.values())
    return frozenset(owner for owner, one in held.items() if _has_too_much(one, len(held), total))


def _has_too_much(one: Held, owners: int, total_blocks: int) -> bool:
    return one.requests > 1 and one.blocks * owners > total_blocks


def who_make_way(
    running: Iterable[Request],
    held: Mapping[str, Held],
    owner: str,
    needed_blocks: int,
    missing_blocks: int,
    frees: Callable[[str], int],
) -> list[Request]:
    """Return the decodes that step aside so that a waiting request gets KV; none if they could not free enough.

    The owner of each holds more than an equal share of KV by several requests, and will still hold as much as the
    waiting request's owner then does: otherwise, owners of about the same load would displace each other.

    Args:
        running: requests whose KV would help. Those that are long, or have stepped aside too often, are spared.
        held: what each owner holds.
        owner: the owner of the waiting request.
        needed_blocks: KV that the waiting request takes.
        missing_blocks: the part of it that is not free.
        frees: a function of a request's id. It returns how many blocks come free if that request gives its KV back, given that
            the requests of all earlier calls have given theirs back.
    """
    held = {name: replace(one) for name, one in held.items()}
    will_hold = held.setdefault(owner, Held()).blocks + needed_blocks
    total = sum(one.blocks for one in held.values())
    candidates = [
        request
        for request in running
        if request.has_sampled and not request.is_long and not request.ended and request.asides < MOST_ASIDES
    ]
    candidates.sort(key=lambda request: (request.asides, request.computed, -request.tie))
    found: list[Request] = []
    for request in candidates:
        if missing_blocks <= 0:
            break
        own = held[request.submit.owner]
        if own.blocks - request.counted_blocks < will_hold or not _has_too_much(own, len(held), total):
            continue
        found.append(request)
        own.requests -= 1
        own.blocks -= request.counted_blocks
        total -= request.counted_blocks
        missing_blocks -= frees(request.id)
    return found if missing_blocks <= 0 else []


@dataclass(frozen=True, slots=True)
class _Watched:
    request: Request
    blocks: int
    is_long: bool


class Growth:
    """The running requests that may outgrow the KV that they hold."""

    def __init__(self, pool_blocks: int) -> None:
        self._most_blocks = int(GROWTH_SHARE * pool_blocks)
        self._watched: dict[str, _Watched] = {}
        self._of_longs = 0  # blocks to hold for long ones
        self._of_shorts = 0

    @property
    def requests(self) -> int:
        """Number of running requests that may outgrow what they hold."""
        return len(self._watched)

    def watch(self, request: Request, missing_blocks: int, output_blocks: int, *, is_long: bool) -> None:
        """Record a request that holds `output_blocks` for its output, and may need `missing_blocks` more.

        One that holds all that it can need is forgotten.
        """
        self.forget(request)
        if request.may_outgrow:
            blocks = min(missing_blocks, int(GROWTH_PART * max(output_blocks, 0)) + 1)
            self._watched[request.id] = _Watched(request, blocks, is_long)
            self._add(blocks, is_long=is_long)

    def forget(self, request: Request) -> None:
        """Forget a request; does nothing if it is not watched."""
        watched = self._watched.pop(request.id, None)
        if watched is not None:
            self._add(-watched.blocks, is_long=watched.is_long)

    def _add(self, blocks: int, *, is_long: bool) -> None:
        if is_long:
            self._of_longs += blocks
        else:
            self._of_shorts += blocks

    def held_blocks(self, left_for_longs: int | None) -> int:
        """Return the free blocks to hold; `left_for_longs` of them is the most that long requests may take."""
        longs = self._of_longs
        if left_for_longs is not None:
            longs = min(longs, max(left_for_longs, 0))
        return min(self._of_shorts + longs, self._most_blocks)

    def who_steps_aside(
        self, starved: Request, first_of: Collection[str] = (), *, among_longs: bool = False
    ) -> Request:
        """Return the request that gives its KV back.

        Args:
            starved: the request that lacks KV.
            first_of: the owners whose requests step aside before those of others (`with_too_much`).
            among_longs: only the KV of a long request helps.
        """
        found = [
            watched.request
            for watched in self._watched.values()
            if not watched.request.ended and (watched.is_long or not among_longs)
        ]
        assert starved in found, f"{starved.id} lacks KV, and holds all that it can need"
        oldest = min(found, key=lambda request: request.tie)
        lanes = set(starved.held_lanes)
        return min(
            [request for request in found if request is not oldest] or found,
            key=lambda request: (
                request.submit.owner not in first_of,
                request.asides,
                lanes.isdisjoint(request.held_lanes),
                request.computed,
                -request.tie,
            ),
        )
