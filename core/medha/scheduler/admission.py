"""Admission: decides which requests get KV, and when.

A request gets all of its KV at once, when the step that computes its first chunk is formed, so that no
request holds KV without making progress. Three rules keep short and long requests from blocking each other
(docs/design.md#reservation-and-admission):

* Long requests are capped in number and in their share of the pool. The first long request always passes,
  however large. Otherwise a stream of short ones could keep it out for ever.
* A request that finds too little free KV, or too little of the share of long requests, is overtaken by smaller
  ones until it is late. Then it *claims* KV that becomes free. The claim of a long request counts against the caps for
  all other long ones.
* Beside a claim, others are still admitted, so that no convoy forms behind it. Together they hold no more
  than the headroom for short requests. Once the claim would have its KV without them, no other is admitted.
  The claim then waits only for requests that end, so it does not starve. While it waits for long requests to
  end, others may also use the free KV beyond the claim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

from medha.kv.pools import KvPools, Placed
from medha.scheduler.replica_config import ReplicaConfig
from medha.scheduler.request import Request
from medha.scheduler.request_table import Capacity, RequestTable
from medha.wire.messages import Admit, Grow

LATE_SHARE = 0.35
"""Share of the KV pool. While long requests hold more, a demoted one waits until its revised deadline is near."""
GROWTH_TOKENS = 1024
"""Tokens by which KV grows at a time beyond its reservation: enough that block tables stay long runs."""


@dataclass(slots=True)
class _Claim:
    """A late request that gets the freed KV of `lanes`, and the blocks of requests admitted beside it."""

    request: Request
    lanes: tuple[int, ...]
    blocks: int  # free ones on `lanes` that it waits for
    beside: dict[str, int] = field(default_factory=dict)


class Admission:
    """Lets requests into the KV pools."""

    def __init__(self, config: ReplicaConfig, table: RequestTable) -> None:
        scheduling = config.scheduling
        self._table = table
        self._max_running = scheduling.max_running
        self.pools = KvPools(
            lanes=config.topology.kv,
            kv_blocks=config.kv_blocks,
            block_size_tokens=config.block_size_tokens,
            tokens_per_lane=config.tokens_per_lane,
            prefix_caching=config.prefix_caching,
            stripes_prompts=config.context_parallel is not None,
        )
        self._config = config
        self._lanes = tuple(range(config.topology.kv))
        self._has_one_lane = len(self._lanes) == 1
        self._prefilling_longs: set[str] = set()  # ids
        self._taken_by_longs: dict[str, int] = {}  # free blocks that each long request took
        self._held_by_shorts = 0  # blocks; shared ones count once for each short request
        self._pool_blocks = config.topology.kv * config.kv_blocks
        self._headroom_blocks = int(scheduling.short_headroom * self._pool_blocks)
        self._claim: _Claim | None = None
        # Share of running places that late requests get. Only `guarded` needs it: under other policies late
        # requests come first anyway, except under `srpt`, which guarantees nothing to large ones.
        share = scheduling.demoted_share if scheduling.policy == "guarded" else 0.0
        self._others_per_late = round(1 / share) - 1 if share else inf
        self._last_places = 0  # taken by others since a late request got one

    # --- capacity -----------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """True if no more requests may hold KV (`max_running`)."""
        return self._table.running >= self._max_running

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._config.block_size_tokens)

    def needed_blocks(self, request: Request) -> int:
        """Return how many free blocks a waiting request needs, given what others hold and share now."""
        needed = self.blocks_for(request.reservation_tokens)
        if request.prompt.sharing is not None:
            return needed - (request.submit.tokens - 1) // self._config.block_size_tokens
        submit = request.submit
        _, held_by_others = self.pools.expected(
            submit.tokens, submit.block_hashes, is_long=request.may_spread
        )
        return needed - min(held_by_others, (submit.tokens - 1) // self._config.block_size_tokens)

    def _free_capacity(self) -> Capacity:
        """Return the free blocks of the emptiest lane, of all lanes, and of the share of longs, ignoring claims."""
        free = [self._free_blocks(lane) for lane in self._lanes]
        return Capacity(max(free), sum(free), self._left_for_longs(), self._starts_long())

    def capacity(self, lanes: Sequence[int]) -> Capacity:
        """Return the most blocks that requests computed by `lanes` may take now."""
        free = max(self._free_blocks(lane) for lane in lanes)
        together = sum(self._free_blocks(lane) for lane in self._lanes)
        claim = self._claim
        if claim is not None:
            beside = self._capacity_beside(claim)
            together = min(together, beside)
            if all(lane in claim.lanes for lane in lanes):
                free = min(free, beside)
        return Capacity(free, together, self._left_for_longs(claim), self._starts_long(claim))

    def lane_for(
        self, request: Request, lanes: Sequence[int], pending_seconds: Sequence[float]
    ) -> int | None:
        """Return the one of `lanes` that should take a waiting request now; None if none should, or KV is short."""
        needed, sibling = self._table.needed_blocks(request), request.prompt.sharing
        if request.is_long and not self._has_share_for(request):
            return None
        lanes_open = self._lanes if self._claim is None else self._lanes_open_to(request)
        if sibling is not None:
            lane = sibling.lane
        elif self._has_one_lane:
            lane = 0
        elif request.may_spread:
            lane = max(self._lanes, key=lambda lane: (self._free_blocks(lane), -lane))
        else:
            with_capacity = [lane for lane in lanes_open if self._free_blocks(lane) >= needed]
            key = lambda lane: (pending_seconds[lane], -self._free_blocks(lane), lane)  # noqa: E731
            lane = min(with_capacity, key=key, default=-1)
        if lane not in lanes or lane not in lanes_open:
            return None
        free = sum(map(self._free_blocks, self._lanes)) if request.may_spread else self._free_blocks(lane)
        return lane if needed <= free else None

    def _free_blocks(self, lane: int) -> int:
        return self.pools.free_blocks_on(lane)

    def _lanes_open_to(self, request: Request) -> Sequence[int]:
        """Return the lanes on which no claim keeps out the request; one that may spread needs all lanes."""
        claim = self._claim
        if claim is None or claim.request is request:
            return self._lanes
        if self._table.needed_blocks(request) <= self._capacity_beside(claim):
            return self._lanes
        return () if request.may_spread else [lane for lane in self._lanes if lane not in claim.lanes]

    # The caps on long requests, beside a claim: what a long claimant is to get is not available to others.

    def _left_for_longs(self, claim: _Claim | None = None) -> int | None:
        """Return how many blocks another long request may take; None: any number."""
        claimed = 0
        if claim is not None and claim.request.is_long:
            claimed = self._table.needed_blocks(claim.request)
        if not self._taken_by_longs and not claimed:
            return None
        share = 1 - self._config.scheduling.short_headroom
        return int(share * self._pool_blocks) - self._held_by_longs - claimed

    @property
    def _held_by_longs(self) -> int:
        """Blocks that long requests hold; shared ones count once.

        Each request counts with the free blocks that it took. Blocks taken by a long request that has ended,
        which others still share, are counted as held by no short request.
        """
        if not self._taken_by_longs:
            return 0
        return max(sum(self._taken_by_longs.values()), self.pools.held_blocks - self._held_by_shorts)

    def _starts_long(self, claim: _Claim | None = None) -> bool:
        """Return whether another long request may begin its prefill."""
        claimed = 1 if claim is not None and claim.request.is_long else 0
        return len(self._prefilling_longs) + claimed < self._config.scheduling.max_running_long

    def _has_share_for(self, request: Request) -> bool:
        """Return whether the caps on long requests admit this one."""
        claim = None if self.claimant is request else self._claim
        left = self._left_for_longs(claim)
        return self._starts_long(claim) and (left is None or self._table.needed_blocks(request) <= left)

    # --- claims -------------------------------------------------------------------------------------

    @property
    def claimant(self) -> Request | None:
        """The late request that gets freed KV."""
        return None if self._claim is None else self._claim.request

    def find_claimant(self, now: float, correction: float) -> Request | None:
        """Return the claimant. If there is none, a late request that needs to claim becomes the claimant.

        A late request needs to claim if it lacks KV. It also needs to if it lacks a running place and others
        have taken the last ones: `demoted_share` of these places is for late requests.
        """
        claimant = self.claimant
        if claimant is not None and claimant.prompt.prefilling and not claimant.is_detached:
            self._claim = None  # it will share that prefill and needs no KV until then
            claimant = None
        if claimant is None:
            claimant = self._table.late_without_capacity(self._free_capacity(), now, correction)
            if claimant is None and self._last_places >= self._others_per_late:
                claimant = self._table.late(now, correction)
            if claimant is not None:
                self._begin_claim(claimant)
        return claimant

    def _begin_claim(self, request: Request) -> None:
        """Give freed KV to `request` from now on, until it is admitted or gone."""
        emptiest = max(self._lanes, key=lambda lane: (self._free_blocks(lane), -lane))
        self._claim = _Claim(request, (emptiest,), self._table.needed_blocks(request))
        self.update_claim()

    def update_claim(self) -> None:
        """Update the claim: to the blocks that the claimant needs now, and the lane of the request that it forks."""
        claim = self._claim
        assert claim is not None
        request, sibling = claim.request, claim.request.prompt.sharing
        claim.blocks = self._table.needed_blocks(request)
        if request.may_spread:
            claim.lanes = self._lanes
        elif sibling is not None:
            claim.lanes = (sibling.lane,)

    def withdraw(self, request: Request) -> None:
        """Drop the claim of a waiting request, if it has one: it is gone, or waits for something else."""
        if self.claimant is request:
            self._claim = None

    def _capacity_beside(self, claim: _Claim) -> int:
        """Return how many blocks other requests may still get beside a claim."""
        held = sum(claim.beside.values())
        headroom = max(self._headroom_blocks - held, 0)
        beyond = sum(map(self._free_blocks, claim.lanes)) - claim.blocks
        if claim.request.is_long and not self._has_share_for(claim.request):
            return max(headroom, beyond)
        return 0 if beyond + held >= 0 else headroom

    # --- giving and releasing KV --------------------------------------------------------------------

    def admit(
        self,
        request: Request,
        pending_seconds: Sequence[float],
        remaining_seconds: Callable[[int], float],
    ) -> Admit | None:
        """Give KV to a request for which there is a lane; return None, reserving nothing, if no place fits.

        `pending_seconds` is the prefill time ahead of a new request on each lane, `remaining_seconds(cached)`
        its own after `cached` tokens that need not be computed.
        """
        submit, sibling = request.submit, request.prompt.sharing
        needed = self._table.needed_blocks(request)
        shared_tokens = 0
        placed: Placed | None
        if sibling is not None:
            shared_tokens = submit.tokens - 1
            placed = self.pools.fork(sibling.id, request.id, shared_tokens, request.reservation_tokens)
        else:
            lanes_open = self._lanes if self._claim is None else self._lanes_open_to(request)
            placed = self.pools.admit(
                request.id,
                submit.tokens,
                request.reservation_tokens,
                block_hashes=submit.block_hashes,
                pending_seconds=pending_seconds,
                remaining_seconds=remaining_seconds,
                owners=None if lanes_open is self._lanes else lanes_open,
            )
        if placed is None:
            if self._claim is not None and self._claim.request is request:
                # It lacks a suitable place, not blocks: if need be it waits until its lanes are empty.
                self._claim.blocks = len(self._claim.lanes) * self._config.kv_blocks
            return None
        request.enter(
            placed.shards,
            self.pools.reserved_tokens(request.id),
            shared_tokens or placed.cached_tokens,
            in_ring=self._config.context_parallel is not None and request.may_spread,
        )
        request.cached_tokens = placed.cached_tokens
        if request.is_long:
            self._prefilling_longs.add(request.id)
            self._taken_by_longs[request.id] = needed
        else:
            self._held_by_shorts += self.blocks_for(request.reserved_tokens)
        is_claimant = self.claimant is request
        if self._claim is not None:
            self._record_beside_claim(self._claim, request, needed)
        self._table.place(request)
        self._last_places = 0 if is_claimant else self._last_places + self.is_full
        return Admit(
            id=submit.id,
            prompt=submit.prompt,
            tokens=submit.tokens,
            prompt_length=submit.prompt_length,
            seed=submit.seed,
            sampling=submit.sampling,
            reserved_tokens=placed.shards.tokens,
            sample_index=submit.sample_index,
            fork_of=None if sibling is None else sibling.id,
            shared_tokens=shared_tokens,
            segments=placed.segments,
            stripings=placed.stripings,
            cached_tokens=placed.cached_tokens,
            prefixes=placed.prefixes,
            evictions=placed.evictions,
        )

    def grow(self, request: Request) -> Grow | None:
        """Grow the KV of a request that has used it up: by `GROWTH_TOKENS`, or else by what it needs now.

        Return None if there is too little free KV for either.
        """
        for tokens in (min(request.length + GROWTH_TOKENS, request.limit_tokens), request.length):
            grow = self.pools.grow(request.id, tokens)
            if grow is not None:
                before = self.blocks_for(request.reserved_tokens)
                request.extend(self.pools.shards(request.id), self.pools.reserved_tokens(request.id))
                if not request.is_long:
                    self._held_by_shorts += self.blocks_for(request.reserved_tokens) - before
                return grow
        return None

    @property
    def longs_exceed_share(self) -> bool:
        """True if long requests hold so much of the pool that a demoted one should not take more."""
        return self._held_by_longs > LATE_SHARE * self._pool_blocks

    def prefilled(self, request: Request) -> None:
        """Record that a prompt is wholly dispatched: its request no longer counts as a long prefill."""
        self._prefilling_longs.discard(request.id)

    def release(self, request: Request) -> None:
        """Release all KV that a request holds."""
        self.pools.release(request.id, request.computed)
        if request.is_long:
            self.prefilled(request)
            del self._taken_by_longs[request.id]
        else:
            self._held_by_shorts -= self.blocks_for(request.reserved_tokens)
        if self._claim is not None:
            self._claim.beside.pop(request.id, None)

    def _record_beside_claim(self, claim: _Claim, request: Request, needed: int) -> None:
        if claim.request is request:
            self._claim = None
        elif any(lane in claim.lanes for lane in request.held_lanes):
            claim.beside[request.id] = needed
