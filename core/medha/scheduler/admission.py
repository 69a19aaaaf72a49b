"""Admission: decides which requests get KV, and when.

A request gets KV for its prompt and its expected output at once, when the step that computes its first chunk is
formed, so that no request holds KV without making progress. Three rules keep short and long requests from
blocking each other (docs/design.md#reservation-and-admission):

* Long requests are capped in number and in their share of the pool. The first long request always passes,
  however large. Otherwise a stream of short ones could keep it out for ever.
* A request that finds too little free KV, or too little of the share of long requests, is overtaken by smaller
  ones until it is late. Then it *claims* KV that becomes free. The claim of a long request counts against the caps for
  all other long ones.
* Beside a claim, others are still admitted, so that no convoy forms behind it. Together they hold no more
  than the headroom for short requests. Once the claim would have its KV without them, no other is admitted.
  The claim then waits only for requests that end, so it does not starve. While it waits for long requests to
  end, others may also use the free KV beyond the claim.

A request that outgrows its expected output takes more KV, step by step. For this, free KV is held back from
admission (`medha.scheduler.growth`). An answer that has become as long as a long prompt counts as a long request
from then on. So several of them never take the headroom for short requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from medha.cost.tier_seconds import TierSeconds
from medha.kv.pools import KvPools, Placed
from medha.scheduler.growth import Growth, Held, who_make_way, with_too_much
from medha.scheduler.replica_config import ReplicaConfig
from medha.scheduler.request import Request
from medha.scheduler.request_table import Capacity, RequestTable
from medha.scheduler.window_places import WindowPlaces
from medha.wire.messages import Admit, Grow

LATE_SHARE = 0.35
"""Share of the KV pool. While long requests hold more, a demoted one waits until its revised deadline is near."""
MOST_DEFERRED_SECONDS = 60.0
"""Longest time for which requests of owners with more than an equal share of KV may not claim, if others wait."""
WAY_STEPS = 2
"""Others make way for a claimant once its latest start is so many of the longest steps away: freeing KV may take that long."""
GROWTH_TOKENS = 1024
"""Tokens by which KV grows at a time beyond its reservation: enough that block tables stay long runs."""
GROWTH_PART_OF_LANE = 16
"""Divisor of a lane's pool: the largest part of it that a request takes each time that it grows."""


@dataclass(slots=True)
class _Claim:
    """A late request that gets the freed KV of `lanes`, and the blocks of requests admitted beside it."""

    request: Request
    lanes: tuple[int, ...]
    blocks: int  # free ones on `lanes` that it waits for
    beside: dict[str, int] = field(default_factory=dict)
    is_overdue: bool = False  # it stays although its owner has more than an equal share of KV
    is_helped: bool = False  # requests make way for it, and will free as many blocks as it lacks


class Admission:
    """Lets requests into the KV pools."""

    def __init__(
        self, config: ReplicaConfig, table: RequestTable, tier_seconds: TierSeconds | None = None
    ) -> None:
        """`tier_seconds` are the times of the lanes' host tiers, if they have any."""
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
            host_blocks=0 if config.host_tier is None else config.host_tier.blocks,
            prices=tier_seconds,
            disk_blocks=0 if config.disk_tier is None else config.disk_tier.blocks,
            lane_ranks=[config.topology.ranks_of_lane(lane) for lane in range(config.topology.kv)],
            has_peers=config.peer_block_seconds is not None,
            window_pool=config.window_pool,
            object_blocks=0 if config.store_block_seconds is None else config.object_blocks,
            streamed_blocks=0 if config.streaming is None else config.streaming.blocks,
        )
        self._windows = _window_places(config)
        self._config = config
        self._lanes = tuple(range(config.topology.kv))
        self._has_one_lane = len(self._lanes) == 1
        self._prefilling_longs: set[str] = set()  # ids
        self._taken_by_longs: dict[str, int] = {}  # free blocks that each long request took
        self._held_by_shorts = 0  # blocks; shared ones count once for each short request
        self._pool_blocks = config.topology.kv * config.kv_blocks
        self._headroom_blocks = int(scheduling.short_headroom * self._pool_blocks)
        self._claim: _Claim | None = None
        self._defers_until = inf
        """Time from which an owner's request claims although the owner has more than an equal share of KV."""
        # Share of running places that late requests get. Only `guarded` needs it: under other policies late
        # requests come first anyway, except under `srpt`, which guarantees nothing to large ones.
        share = scheduling.demoted_share if scheduling.policy == "guarded" else 0.0
        self._others_per_late = round(1 / share) - 1 if share else inf
        self._last_places = 0  # taken by others since a late request got one
        self._growth = Growth(self._pool_blocks)
        self._growth_tokens = min(GROWTH_TOKENS, config.kv_tokens // GROWTH_PART_OF_LANE)
        self.is_paused = False
        """True while a running request lacks KV: no other gets any before it does."""

    # --- capacity -----------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """True if no more requests may hold KV now: all places are taken, or a running request lacks KV."""
        return self.is_paused or self._free_places <= 0

    def has_place(self, request: Request) -> bool:
        """Return whether a waiting request may hold KV: a place is free, and not reserved for other owners."""
        free = self._free_places
        if self.is_paused or free <= 0:
            return False
        return not self._table.owners.is_over(request.submit.owner, free, self._all_free_blocks)

    @property
    def has_place_for_any(self) -> bool:
        """True if `has_place` is true of a waiting request."""
        free = self._free_places
        if self.is_paused or free <= 0 or not self._table.waiting:
            return False
        return self._table.owners.any_may_take(free, self._all_free_blocks)

    @property
    def _free_places(self) -> int:
        free = self._max_running - self._table.running
        return free if self._windows is None else min(free, self._windows.free)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._config.block_size_tokens)

    def needed_blocks(self, request: Request) -> int:
        """Return how many free blocks a waiting request needs, given what others hold and share now."""
        if request.streams:
            return len(self._lanes) * self._config.streamed_device_blocks
        needed = self.blocks_for(request.reservation_tokens)
        if request.prompt.sharing is not None:
            return needed - (request.submit.tokens - 1) // self._config.block_size_tokens
        submit = request.submit
        _, held_by_others = self.pools.expected(
            submit.tokens, submit.block_hashes, is_long=request.may_spread
        )
        return needed - min(held_by_others, (submit.tokens - 1) // self._config.block_size_tokens)

    def _free_capacity(self) -> Capacity:
        """Return what waiting requests may take if no claim keeps them out."""
        free = [self._free_blocks(lane) for lane in self._lanes]
        owners, together = self._table.owners, sum(free)
        over = owners.over(self._free_places, together)
        return Capacity(
            max(free),
            together,
            self._left_for_longs(kept_blocks=self._kept_for_returning()),
            self._left_for_longs(),
            self._starts_long(),
            over,
            over_kv=bool(over) and owners.over_kv(together),
            above_share=owners.above_share(),
            early_seconds=self._way_seconds if owners.any_may_make_way() else 0.0,
        )

    @property
    def _way_seconds(self) -> float:
        """The time before its latest start from which others make way for a claimant."""
        return WAY_STEPS * self._config.scheduling.max_step_seconds

    def capacity(self, lanes: Sequence[int]) -> Capacity:
        """Return the most blocks that requests computed by `lanes` may take now."""
        free = max(self._free_blocks(lane) for lane in lanes)
        together = self._all_free_blocks
        over = self._table.owners.over(self._free_places, together)
        claim = self._claim
        if claim is not None:
            beside = self._capacity_beside(claim)
            together = min(together, beside)
            if all(lane in claim.lanes for lane in lanes):
                free = min(free, beside)
        left = self._left_for_longs(claim, kept_blocks=self._kept_for_returning(claim))
        return Capacity(free, together, left, self._left_for_longs(claim), self._starts_long(claim), over)

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
        free = self._all_free_blocks if request.may_spread else self._free_blocks(lane)
        return lane if needed <= free else None

    def free_tokens_on(self, lane: int) -> int:
        """Return the free KV of a lane that a request which arrives now could get, tokens."""
        blocks = 0 if self.is_paused else max(self._free_blocks(lane), 0)
        return blocks * self._config.block_size_tokens

    def _free_blocks(self, lane: int) -> int:
        """Return the free blocks of a lane without those held for growth; below 0 if growth has taken some."""
        return self.pools.free_blocks_on(lane) - self._held_for_growth // len(self._lanes)

    @property
    def _all_free_blocks(self) -> int:
        return self._free_blocks(0) if self._has_one_lane else sum(map(self._free_blocks, self._lanes))

    @property
    def _held_for_growth(self) -> int:
        """Free blocks of all lanes that are held for running requests that outgrow their expectation."""
        return self._growth.held_blocks(self._left_for_longs()) if self._growth.requests else 0

    def _lanes_open_to(self, request: Request) -> Sequence[int]:
        """Return the lanes on which no claim keeps out the request; one that may spread needs all lanes."""
        claim = self._claim
        if claim is None or claim.request is request:
            return self._lanes
        if self._table.needed_blocks(request) <= self._capacity_beside(claim):
            return self._lanes
        return () if request.may_spread else [lane for lane in self._lanes if lane not in claim.lanes]

    # The caps on long requests. The blocks that a long claimant is to get are not available to others.

    def _left_for_longs(self, claim: _Claim | None = None, *, kept_blocks: int = 0) -> int | None:
        """Return how many blocks another long request may take, if it leaves `kept_blocks`; None: any number."""
        claimed = 0
        if claim is not None and claim.request.is_long:
            claimed = self._table.needed_blocks(claim.request)
        if not (self._taken_by_longs or claimed or kept_blocks):
            return None
        share = 1 - self._config.scheduling.short_headroom
        return int(share * self._pool_blocks) - self._held_by_longs - claimed - kept_blocks

    def _kept_for_returning(self, claim: _Claim | None = None) -> int:
        """Return the blocks that other long requests leave to those that have stepped aside for a deadline, and wait.

        If one of these is the claimant, its blocks are left out: `_left_for_longs` subtracts them as claimed.
        """
        kept = self._table.returning_blocks
        if claim is not None and claim.request.returns:
            kept -= self._table.needed_blocks(claim.request)
        return kept

    @property
    def _held_by_longs(self) -> int:
        """Blocks that long requests hold; shared ones count once.

        They are the free blocks that each request took. Blocks of a long request that has ended may still be shared
        by others. If these make more of the held blocks than short requests account for, that number counts.
        """
        if not self._taken_by_longs:
            return 0
        return max(sum(self._taken_by_longs.values()), self.pools.held_blocks - self._held_by_shorts)

    def _starts_long(self, claim: _Claim | None = None) -> bool:
        """Return whether another long request may begin its prefill."""
        claimed = 1 if claim is not None and claim.request.is_long else 0
        return len(self._prefilling_longs) + claimed < self._config.scheduling.max_running_long

    def _has_share_for(self, request: Request) -> bool:
        """Return whether the caps admit a long request; one that claims or returns may also use blocks kept for returning."""
        claim = None if self.claimant is request else self._claim
        is_first = self.claimant is request or request.returns
        left = self._left_for_longs(claim, kept_blocks=0 if is_first else self._kept_for_returning(claim))
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
        if self._claim is not None and self._loses_claim(self._claim):
            self._claim = None
        claimant = self.claimant
        if claimant is None:
            room = self._free_capacity()
            if room.above_share and self._is_deferral_over(now):
                room.above_share = ()
            claimant = self._table.late_without_capacity(room, now, correction)
            if claimant is None and self._last_places >= self._others_per_late:
                claimant = self._table.late(room, now, correction)
            if claimant is not None:
                self._begin_claim(claimant, is_overdue=self._is_above_share(claimant))
        return claimant

    def _loses_claim(self, claim: _Claim) -> bool:
        request = claim.request
        if request.prompt.prefilling and not request.is_detached:
            return True  # it will share that prefill, and needs no KV before
        if not self.has_place(request):
            return True  # others get the places, so the claim would only keep KV from them
        return not claim.is_overdue and self._is_above_share(request)

    def _is_deferral_over(self, now: float) -> bool:
        """Return whether requests of owners with more than an equal share of KV were passed over for long enough."""
        self._defers_until = min(self._defers_until, now + MOST_DEFERRED_SECONDS)
        return now >= self._defers_until

    def _is_above_share(self, request: Request) -> bool:
        """Return whether a request is not long, its owner has more than an equal share of KV, and others wait."""
        if request.is_long:
            return False
        above = self._table.owners.above_share()
        return bool(above) and self._table.owner_number(request) in above

    def _begin_claim(self, request: Request, *, is_overdue: bool) -> None:
        """Give freed KV to `request` from now on, until it is admitted or gone."""
        emptiest = max(self._lanes, key=lambda lane: (self._free_blocks(lane), -lane))
        blocks = self._table.needed_blocks(request)
        self._claim = _Claim(request, (emptiest,), blocks, is_overdue=is_overdue)
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
        """Drop the claim of a waiting request that has left, and what tiers keep for it."""
        self.pools.end_swap(request.id)
        if self.claimant is request:
            self._claim = None

    def _capacity_beside(self, claim: _Claim) -> int:
        """Return how many blocks other requests may still get beside a claim."""
        held = sum(claim.beside.values())
        headroom = max(self._headroom_blocks - held, 0)
        beyond = sum(map(self._free_blocks, claim.lanes)) - claim.blocks
        if claim.is_helped:
            return 0  # the claim would lack what others took, and more requests would have to make way
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
        shared_tokens = 0 if request.streams or sibling is None else submit.tokens - 1
        placed = self._reserve(request, pending_seconds, remaining_seconds)
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
        if request.streams:
            request.streamed_blocks = self.pools.streamed_blocks_of(request.id)
        self._count_admitted(request, needed)
        return Admit(
            id=submit.id,
            prompt=submit.prompt,
            tokens=submit.tokens,
            prompt_length=submit.prompt_length,
            seed=submit.seed,
            sampling=replace(submit.sampling, grammar=request.grammar)
            if request.grammar
            else submit.sampling,
            reserved_tokens=placed.shards.tokens,
            sample_index=submit.sample_index,
            fork_of=None if sibling is None else sibling.id,
            shared_tokens=shared_tokens,
            segments=placed.segments,
            stripings=placed.stripings,
            cached_tokens=placed.cached_tokens,
            prefixes=placed.prefixes,
            evictions=placed.evictions,
            device_blocks=self._config.streamed_device_blocks if request.streams else 0,
        )

    def _reserve(
        self,
        request: Request,
        pending_seconds: Sequence[float],
        remaining_seconds: Callable[[int], float],
    ) -> Placed | None:
        """Reserve KV in the pools; the arguments are those of `admit`."""
        submit, sibling = request.submit, request.prompt.sharing
        if request.streams:
            return self.pools.admit_streamed(
                request.id, submit.tokens, request.reservation_tokens, self._config.streamed_device_blocks
            )
        if sibling is not None:
            return self.pools.fork(sibling.id, request.id, submit.tokens - 1, request.reservation_tokens)
        lanes_open = self._lanes if self._claim is None else self._lanes_open_to(request)
        return self.pools.admit(
            request.id,
            submit.tokens,
            request.reservation_tokens,
            block_hashes=submit.block_hashes,
            pending_seconds=pending_seconds,
            remaining_seconds=remaining_seconds,
            owners=None if lanes_open is self._lanes else lanes_open,
        )

    def _count_admitted(self, request: Request, needed: int) -> None:
        """Count a request that took `needed` free blocks: for its kind, its owner, and beside a claim."""
        if request.is_long:
            self._prefilling_longs.add(request.id)
            self._taken_by_longs[request.id] = needed
        else:
            self._held_by_shorts += self.blocks_for(request.reserved_tokens)
            self._count_for_owner(request, needed)
        if self._windows is not None:
            most_tokens = max(request.most_tokens, request.reservation_tokens)
            self._windows.take(request.id, self.blocks_for(most_tokens))
        self._watch_growth(request)
        is_claimant = self.claimant is request
        if self._claim is not None:
            self._record_beside_claim(self._claim, request, needed)
        self._table.place(request)
        self._last_places = 0 if is_claimant else self._last_places + self.is_full

    def grow(self, request: Request) -> Grow | None:
        """Grow the KV of a request that has used it up: by `GROWTH_TOKENS` or a part of the pool, or by what it needs now.

        Return None if there is too little free KV for either, or if a long one finds too little of the share of
        long requests.
        """
        held = self.blocks_for(request.reserved_tokens)
        if request.length >= self._config.long_threshold_tokens and request.id not in self._taken_by_longs:
            self._held_by_shorts -= held
            self._count_for_owner(request, -request.counted_blocks)
            self._taken_by_longs[request.id] = held
            self._watch_growth(request)
        for tokens in (min(request.length + self._growth_tokens, request.most_tokens), request.length):
            if not self._has_share_to_grow(request, self.blocks_for(tokens) - held):
                continue
            grow = self.pools.grow(request.id, tokens)
            if grow is not None:
                request.extend(self.pools.shards(request.id), self.pools.reserved_tokens(request.id))
                more = self.blocks_for(request.reserved_tokens) - held
                if request.id in self._taken_by_longs:
                    self._taken_by_longs[request.id] += more
                else:
                    self._held_by_shorts += more
                    self._count_for_owner(request, more)
                if self._claim is not None and request.id in self._claim.beside:
                    self._claim.beside[request.id] += more
                self._watch_growth(request)
                return grow
        return None

    def _count_for_owner(self, request: Request, blocks: int) -> None:
        request.counted_blocks += blocks
        self._table.owners.hold(request.submit.owner, blocks)

    def _has_share_to_grow(self, request: Request, blocks: int) -> bool:
        """Return whether the headroom for short requests stays free; a long request alone may take all."""
        if request.id not in self._taken_by_longs or len(self._taken_by_longs) == 1:
            return True
        left = self._left_for_longs()
        return left is None or blocks <= left

    def _watch_growth(self, request: Request) -> None:
        """Hold KV for a request's growth, as long as it may outgrow what it holds."""
        held, most = self.blocks_for(request.reserved_tokens), self.blocks_for(request.most_tokens)
        output = held - self.blocks_for(request.submit.prompt_length)
        self._growth.watch(request, most - held, output, is_long=request.id in self._taken_by_longs)

    def who_steps_aside(self, starved: Request) -> Request:
        """Return the running request that gives its KV back, so that `starved`, or others after it, can grow."""
        among_longs = starved.id in self._taken_by_longs and not self._has_share_to_grow(starved, 1)
        first_of = with_too_much(self._held_by_owner())
        return self._growth.who_steps_aside(starved, first_of, among_longs=among_longs)

    def who_make_way(self, now: float, correction: float) -> list[Request]:
        """Return the running requests that give their KV back to the claimant.

        There are none while the claimant can be on time without them, or if it is long. Blocks that ended requests are
        about to release count as free. If nobody on the claimed lane can make way, the claim moves to a lane where
        some can, unless the claimant must run on its lane.
        """
        claim = self._claim
        if claim is None:
            return []
        claim.is_helped = False
        if claim.is_overdue or self.is_paused or len(self._table.owners) == 1:
            return []
        request = claim.request
        slack_seconds = request.deadline - now - self._table.remaining_seconds(request) * correction
        if slack_seconds > self._way_seconds or request.is_long or not self.has_place(request):
            return []
        held: dict[str, Held] | None = None
        for lanes in self._claimable(claim):
            frees = self.pools.freed_in_turn(lanes)
            soon = sum(frees(one.id) for one in self._table.holders if one.ended)
            missing = claim.blocks - sum(map(self._free_blocks, lanes))
            if lanes == claim.lanes and missing <= soon:
                claim.is_helped = missing > 0
                return []
            held = held or self._held_by_owner()
            is_everywhere = len(lanes) == len(self._lanes)
            there = [
                one
                for one in self._table.holders
                if one.id not in self._taken_by_longs  # also of an answer that has become long
                and (is_everywhere or (one.lane == lanes[0] and not one.is_spread))
            ]
            found = who_make_way(there, held, request.submit.owner, claim.blocks, missing - soon, frees)
            if found:
                if lanes != claim.lanes:
                    claim.lanes, claim.beside = lanes, {}
                claim.is_helped = True
                return found
        return []

    # --- KV that long requests leave to others ------------------------------------------------------

    def soon_late(
        self, now: float, correction: float, least_seconds: float, most_seconds: float
    ) -> Request | None:
        """Return a waiting request that lacks free KV, and must begin within `most_seconds`, but not `least_seconds`."""
        return self._table.soon_late(self._free_capacity(), now, correction, least_seconds, most_seconds)

    def place_without(self, holder: Request, waiting: Request) -> int | None:
        """Return the lane on which a waiting request finds KV once `holder` has given its own back.

        Return None if there is no such lane, or if ended requests leave enough. Claims of other requests come first.
        """
        sibling, needed = waiting.prompt.sharing, self._table.needed_blocks(waiting)
        found: list[tuple[int, int]] = []
        for lane in self._lanes:
            frees, claim = self.pools.freed_in_turn((lane,)), self._claim
            free = self._free_blocks(lane) + sum(frees(one.id) for one in self._table.holders if one.ended)
            if claim is not None and claim.request is not waiting and lane in claim.lanes:
                free -= claim.blocks
            if sibling is not None and lane != sibling.lane:
                continue
            if free >= needed:
                return None
            if lane in holder.held_lanes:
                free += frees(holder.id)
                if free >= needed:
                    found.append((free, lane))
        return max(found, key=lambda one: (one[0], -one[1]))[1] if found else None

    def claim_on(self, lane: int, request: Request) -> None:
        """Give what comes free on a lane to a waiting request, unless another one claims."""
        if self._claim is None:
            self._claim = _Claim(request, (lane,), self._table.needed_blocks(request))
        if self._claim.request is request:
            if self._claim.lanes != (lane,):
                self._claim.lanes, self._claim.beside = (lane,), {}
            self._claim.is_helped = True

    def _claimable(self, claim: _Claim) -> list[tuple[int, ...]]:
        """Return the sets of lanes that a claim may move to, its present one first."""
        if claim.request.may_spread or claim.request.prompt.sharing is not None:
            return [claim.lanes]
        others = sorted(self._lanes, key=lambda lane: (-self._free_blocks(lane), lane))
        return [claim.lanes, *((lane,) for lane in others if (lane,) != claim.lanes)]

    def _held_by_owner(self) -> dict[str, Held]:
        """Return what the running requests of each owner hold."""
        found: dict[str, Held] = {}
        for request in self._table.holders:
            if not request.ended:
                held = found.setdefault(request.submit.owner, Held())
                held.requests += 1
                held.blocks += self._taken_by_longs.get(request.id, request.counted_blocks)
        return found

    @property
    def growth_blocks(self) -> int:
        """Free blocks that are held for running requests that outgrow their expectation."""
        return max(min(self._held_for_growth, sum(map(self.pools.free_blocks_on, self._lanes))), 0)

    @property
    def longs_exceed_share(self) -> bool:
        """True if long requests hold so much of the pool that a demoted one should not take more."""
        return self._held_by_longs > LATE_SHARE * self._pool_blocks

    def prefilled(self, request: Request) -> None:
        """Record that a prompt is wholly dispatched: its request no longer counts as a long prefill."""
        self._prefilling_longs.discard(request.id)

    def release(self, request: Request) -> None:
        """Release all KV that a request holds; if it steps aside, host tiers keep a copy until it comes back."""
        self.pools.release(request.id, request.computed, swaps=request.steps_aside)
        if self._windows is not None:
            self._windows.give_back(request.id)
        self._growth.forget(request)
        self.prefilled(request)
        if self._taken_by_longs.pop(request.id, None) is None:
            self._held_by_shorts -= self.blocks_for(request.reserved_tokens)
            self._count_for_owner(request, -request.counted_blocks)
        if self._claim is not None:
            self._claim.beside.pop(request.id, None)

    def _record_beside_claim(self, claim: _Claim, request: Request, needed: int) -> None:
        if claim.request is request:
            self._claim = None
            if claim.is_overdue:
                self._defers_until = inf
        elif any(lane in claim.lanes for lane in request.held_lanes):
            claim.beside[request.id] = needed


def _window_places(config: ReplicaConfig) -> WindowPlaces | None:
    """Return the counter of running sequences' windows; None if no layer frees KV before its window."""
    pool = config.window_pool
    return None if pool is None else WindowPlaces(config.window_need(pool.window_tokens), pool.blocks)
