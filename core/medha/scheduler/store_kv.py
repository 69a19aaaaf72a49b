"""Asks whether the store has KV of arriving prompts, and begins to load what it has.

The controller does not know the content of the store (`medha.kv.store_tier`). If reading all that a prompt lacks is predicted
to be faster than computing it, its request waits while ranks check which objects exist (`StoreLookup`), and then for their
loads. Missing objects are remembered for a while, and not asked for again.

A store that fails is not used for a few seconds, and each time longer, until something succeeds. The same holds if it does
not answer before a request would have computed its prompt. After a fault, one prompt at a time asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count, takewhile

from medha.kv.pools import Awaited, EndedLoads, KvPools, Sought
from medha.scheduler.load_waits import LoadWaits
from medha.scheduler.request import Request
from medha.wire.messages import DiskReport, StoreLookup

_MISS_SECONDS = 30.0
"""Time for which an object that was not there is not asked for."""
_MOST_MISSES = 4096
_MOST_LOOKUPS = 64
"""Most prompts that are asked for at a time."""
_FIRST_REST_SECONDS = 5.0
_LONGEST_REST_SECONDS = 300.0
_NOWHERE = -2  # lane of the answers that are awaited; those of peers have another one


@dataclass(slots=True)
class _Lookup:
    sought: list[Sought]
    counts: list[int]  # of the objects of each that exist, as far as ranks have answered
    left: set[tuple[int, int]]  # (rank, lane) that have not answered
    requests: list[Request] = field(default_factory=list)
    has_failed: bool = False  # so it is unknown which objects are missing


class StoreKv:
    """The questions of one replica to its store."""

    def __init__(
        self, pools: KvPools, waits: LoadWaits, lane_ranks: list[tuple[int, ...]], epoch: int
    ) -> None:
        self._pools, self._waits, self._lane_ranks, self._epoch = pools, waits, lane_ranks, epoch
        self._lookups: dict[int, _Lookup] = {}
        self._by_prompt: dict[str, int] = {}
        self._misses: dict[str, float] = {}  # object -> time until which it is not asked for
        self._numbers = count()
        self._rest_seconds = 0.0
        self._rests_until = 0.0
        self.fault = ""
        """The last error; empty: nothing has failed since something succeeded."""

    @property
    def next_due(self) -> float | None:
        """Time at which the store is used again; None if it is in use."""
        store = self._pools.store
        return self._rests_until if store is not None and store.rests else None

    def go_on(self, now: float) -> None:
        """Use the store again once its rest is over."""
        store = self._pools.store
        if store is not None and store.rests and now >= self._rests_until:
            store.rests = False

    # --- questions ------------------------------------------------------------------------------------

    def ask(self, request: Request, now: float) -> list[StoreLookup]:
        """Let a new request wait for KV from the store, if that is worth it; return the questions to the ranks."""
        submit, store = request.submit, self._pools.store
        if store is None or store.rests or request.awaits_load:
            return []
        is_long = request.may_spread
        found = self._pools.sought(submit.tokens, submit.block_hashes, is_long=is_long)
        sought = [one for one in (self._without_misses(one, now) for one in found) if one.objects]
        counts = [len(one.objects) for one in sought]
        seconds = self._pools.wait_for_store_seconds(
            submit.tokens, submit.block_hashes, counts, is_long=is_long
        )
        number = self._by_prompt.get(submit.prompt)
        # After a fault, the others do not wait for an answer that may not come.
        most = 1 if self._rest_seconds else _MOST_LOOKUPS
        if seconds is None or (number is None and len(self._lookups) >= most):
            return []
        asks: list[StoreLookup] = []
        if number is None:
            number = self._by_prompt[submit.prompt] = next(self._numbers)
            left = {(rank, one.lane) for one in sought for rank in self._lane_ranks[one.lane]}
            self._lookups[number] = _Lookup(sought, counts, left)
            store.counts.lookups += 1
            asks = [
                StoreLookup(number, tuple(item.name for item in one.objects), one.lane, self._epoch)
                for one in sought
            ]
        self._lookups[number].requests.append(request)
        self._waits.begin(request, Awaited(frozenset({(_NOWHERE, number)}), seconds), now)
        return asks

    def _without_misses(self, sought: Sought, now: float) -> Sought:
        objects = takewhile(lambda one: self._misses.get(one.name, now) <= now, sought.objects)
        return Sought(sought.lane, sought.chain, sought.first, tuple(objects))

    # --- answers --------------------------------------------------------------------------------------

    def report(
        self, report: DiskReport, ended: EndedLoads, now: float, go_on: Callable[[Request], None]
    ) -> None:
        """Process a rank's report, by which loads have `ended`; requests that then wait for nothing go on."""
        if self._pools.store is None:
            return
        if report.store_fault:
            self._rest(report.store_fault, now)
        elif (report.looked_up or report.stored or ended.from_store) and now >= self._rests_until:
            self._rest_seconds, self.fault = 0.0, ""
        for name in ended.lacks:
            self._miss(name, now)
        for name in report.stored:
            self._misses.pop(name, None)
        for number, there in report.looked_up:
            lookup = self._lookups.get(number)
            if lookup is None or (report.rank, report.lane) not in lookup.left:
                continue
            lookup.left.discard((report.rank, report.lane))
            lookup.has_failed = lookup.has_failed or bool(report.store_fault)
            for at, one in enumerate(lookup.sought):
                if one.lane == report.lane:
                    lookup.counts[at] = max(min(lookup.counts[at], there), 0)
            if not lookup.left:
                self._answered(number, lookup, now, go_on)

    def _answered(self, number: int, lookup: _Lookup, now: float, go_on: Callable[[Request], None]) -> None:
        self._forget(number)
        store = self._pools.store
        for one, there in zip(lookup.sought, lookup.counts, strict=True):
            if store is not None and there < len(one.objects) and not lookup.has_failed:
                self._miss(one.objects[there].name, now)
                store.lacks(one.objects[there:])
        waiting = [one for one in lookup.requests if one.awaits_load and one.waits and not one.ended]
        awaited: frozenset[tuple[int, int]] = frozenset()
        if waiting:
            submit = waiting[0].submit
            seconds = self._pools.wait_for_store_seconds(
                submit.tokens, submit.block_hashes, lookup.counts, is_long=waiting[0].may_spread
            )
            if seconds is not None:
                due = min(one.read_due for one in waiting)
                awaited = self._pools.begin_store_loads(lookup.sought, lookup.counts, due)
        if awaited:
            for request in waiting:
                self._waits.follow(request, awaited)
        else:
            for request in self._waits.loaded(_NOWHERE, [number]):
                go_on(request)

    def late(self, requests: Iterable[Request], now: float) -> None:
        """Record which requests no longer wait; if the store has not answered them, it is not used for a while."""
        for request in requests:
            if self._awaits_answer(request):
                self._rest("it did not answer before the prompt could have been computed", now)
                self.leave(request)

    def leave(self, request: Request) -> None:
        """Forget a request that has left; an answer for which no request waits begins no loads."""
        if self._awaits_answer(request):
            self._lookups[self._by_prompt[request.submit.prompt]].requests.remove(request)

    def _awaits_answer(self, request: Request) -> bool:
        lookup = self._lookups.get(self._by_prompt.get(request.submit.prompt, -1))
        return lookup is not None and request in lookup.requests

    def _forget(self, number: int) -> None:
        del self._lookups[number]
        self._by_prompt = {prompt: other for prompt, other in self._by_prompt.items() if other != number}

    def _miss(self, name: str, now: float) -> None:
        self._misses.pop(name, None)
        self._misses[name] = now + _MISS_SECONDS
        if len(self._misses) > _MOST_MISSES:
            del self._misses[next(iter(self._misses))]

    # --- faults ---------------------------------------------------------------------------------------

    def _rest(self, fault: str, now: float) -> None:
        """Do not use the store for a while, each time longer; faults of work that was under way then do not count."""
        store = self._pools.store
        if store is None or store.rests:
            return
        longer_seconds = min(2 * self._rest_seconds, _LONGEST_REST_SECONDS)
        self._rest_seconds = max(longer_seconds, _FIRST_REST_SECONDS)
        self._rests_until = now + self._rest_seconds
        self.fault, store.rests = fault[:500], True
