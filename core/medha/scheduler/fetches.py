"""Copies of KV from host tiers to requests that hold blocks for it: which step carries how much of it.

An admitted request begins to compute once all its KV is copied. Ranks copy it beside the layers of a step, layer by layer
(`medha_worker.model.host_blocks`). If a step decodes, its copies may take only a part of its time, so that the decodes do
not wait for them; a long prefix then takes several steps. Requests with the nearest deadlines come first.
"""

from __future__ import annotations

from collections.abc import Iterable

from medha.cost.tier_seconds import TierSeconds
from medha.kv.pools import KvPools
from medha.scheduler.packer import Batch
from medha.scheduler.request import Request
from medha.wire.messages import KvFetch

FETCH_SHARE = 0.25
"""Part of the time of a step with decodes that the copies beside it may take."""


class Fetches:
    """The requests of a replica that hold KV, of which a part is still in host tiers."""

    def __init__(self, pools: KvPools, seconds: TierSeconds | None) -> None:
        """`seconds` are the times of copies; None: there is no tier."""
        self._pools, self._seconds = pools, seconds
        self._requests: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def begin(self, request: Request) -> None:
        """Note that a request was admitted, and may have something to fetch."""
        if self._pools.unfetched_blocks(request.id):
            request.fetches = True
            self._requests[request.id] = request

    def leave(self, request: Request) -> None:
        """Forget a request that gets no more steps."""
        request.fetches = False
        self._requests.pop(request.id, None)

    def turn(self, batch: Batch, lanes: tuple[int, ...], *, decodes: bool) -> FetchTurn:
        """Begin to choose the fetches of a step of `lanes`; if it `decodes`, they get only a part of its time."""
        return FetchTurn(self, batch, lanes, decodes=decodes)

    def on(self, lanes: tuple[int, ...]) -> list[Request]:
        """Return the requests whose fetches a step of `lanes` may carry, those with the nearest deadlines first."""
        here = [request for request in self._requests.values() if request.runs_on(lanes)]
        return sorted(here, key=lambda request: (request.deadline, request.tie))

    def take(self, request: Request, most_seconds: float, *, at_least_one: bool) -> KvFetch | None:
        """Return a request's next fetch: the blocks that can be copied in `most_seconds`; None if there are none.

        `at_least_one`: fetch one block even if it takes longer.
        """
        assert self._seconds is not None
        block_seconds = self._seconds.fetch_seconds(1)
        unfetched = self._pools.unfetched_blocks(request.id)
        # The tolerance keeps rounding errors from leaving out a block.
        most = int(most_seconds / block_seconds * (1 + 1e-9)) if block_seconds > 0 else unfetched
        blocks = min(max(most, int(at_least_one)), unfetched)
        if blocks <= 0:
            return None
        fetch = self._pools.fetch(request.id, blocks)
        if blocks == unfetched:
            self.leave(request)
        return fetch

    def copy_beside(self, batch: Batch, fetches: Iterable[KvFetch]) -> None:
        """Let a step make copies beside its layers."""
        assert self._seconds is not None
        batch.copy_beside(self._seconds.fetch_by_lane(fetches))


class FetchTurn:
    """The fetches of one step."""

    def __init__(self, fetches: Fetches, batch: Batch, lanes: tuple[int, ...], *, decodes: bool) -> None:
        self._fetches, self._batch, self._lanes = fetches, batch, lanes
        self._share = FETCH_SHARE if decodes else 1.0
        self.taken: list[KvFetch] = []

    def fetch_at_once(self, request: Request, step_seconds: float) -> None:
        """Let a request that this step admits fetch, unless the deadline of another one is nearer."""
        if self._fetches.on(self._lanes)[:1] == [request]:
            self._fetch((request,), step_seconds)

    def fetch(self, step_seconds: float) -> None:
        """Let requests fetch what can be copied beside a step of so many seconds, at least one block."""
        self._fetch(self._fetches.on(self._lanes), step_seconds)

    def _fetch(self, requests: Iterable[Request], step_seconds: float) -> None:
        for request in requests:
            left_seconds = self._share * step_seconds - self._batch.fetch_seconds
            taken = self._fetches.take(request, left_seconds, at_least_one=not self.taken)
            if taken is None:
                return
            self.taken.append(taken)
            self._fetches.copy_beside(self._batch, (taken,))
