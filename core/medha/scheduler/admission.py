"""Who gets KV, and when: the ledgers of all lanes, the caps on long requests, and what a late one may claim.

A request gets all of its KV at once, when the step that computes its first chunk is formed, so that nobody holds KV
that does not move. Three rules keep shorts and longs out of each other's way (DESIGN §5):

* Longs are capped in number and in their share of the pool. The first long always passes, however large:
  otherwise a stream of shorts could keep it out for ever.
* A request that finds no room, or no share of longs, is overtaken by smaller ones, until it is late. Then it *claims*
  what becomes free. What a long one claims is taken off the share of longs, and one off their number, for all others.
* Beside a claim others are still admitted, so that no convoy forms behind it, but all of them together hold no more
  than the head-room for shorts; and none any more once they alone stand between the claim and its KV. What the
  claim waits for is then held by requests that end, so it does not starve. While it waits for longs to end, others may
  also have what is free beyond it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from medha.kv.pools import KvPools, Placed
from medha.scheduler.config import ReplicaConfig
from medha.scheduler.candidates import Room
from medha.scheduler.request import Request
from medha.wire.messages import Admit, Grow
from medha.wire.quick import new_admit

LATE_SHARE = 0.35
"""Of the KV pool: while long requests hold more, one that was given up waits, unless its promise is near."""
GROWTH_TOKENS = 1024
"""How far an unreserved request's KV grows at a time: large enough to stay in long runs of blocks."""


@dataclass(slots=True)
class _Claim:
    """A late request to which freed KV of `lanes` goes, and what those admitted beside it hold there (blocks)."""

    request: Request
    lanes: tuple[int, ...]
    blocks: int  # free ones on `lanes` that it waits for
    beside: dict[str, int] = field(default_factory=dict)


class Admission:
    """Lets requests into the KV pools."""

    def __init__(self, config: ReplicaConfig) -> None:
        scheduling = config.scheduling
        self.pools = KvPools(
            lanes=config.topology.kv,
            kv_blocks=config.kv_blocks,
            block_size_tokens=config.block_size_tokens,
            tokens_per_lane=config.tokens_per_lane,
            prefix_caching=config.prefix_caching,
            deals_prompts=config.context_parallel is not None,
        )
        self._config = config
        self._lanes = tuple(range(config.topology.kv))
        self._has_one_lane = len(self._lanes) == 1
        self._prefilling_longs: set[str] = set()  # ids
        self._taken_by_longs: dict[str, int] = {}  # blocks that were free until a long one got them
        self._held_by_shorts = 0  # blocks, those counted twice that they share
        self._pool_blocks = config.topology.kv * config.kv_blocks
        self._headroom_blocks = int(scheduling.short_headroom * self._pool_blocks)
        self._claim: _Claim | None = None

    # --- room ---------------------------------------------------------------------------------------

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._config.block_size_tokens)

    def wanted_blocks(self, request: Request) -> int:
        """Free blocks that a waiting request needs, by what is held and shared now."""
        wanted = self.blocks_for(request.reservation_tokens)
        if request.prompt.sharing is not None:
            return wanted - (request.submit.tokens - 1) // self._config.block_size_tokens
        submit = request.submit
        _, held_by_others = self.pools.expected(
            submit.tokens, submit.block_hashes, is_long=request.may_spread
        )
        return wanted - min(held_by_others, (submit.tokens - 1) // self._config.block_size_tokens)

    def free_room(self) -> Room:
        """What is free on the emptiest lane and on all, and of the share of longs, without regard to claims."""
        free = [self._free_blocks(lane) for lane in self._lanes]
        return Room(max(free), sum(free), self._left_for_longs(), self._starts_long())

    def room(self, lanes: Sequence[int]) -> Room:
        """What requests that `lanes` compute may take now, at most."""
        free = max(self._free_blocks(lane) for lane in lanes)
        together = sum(self._free_blocks(lane) for lane in self._lanes)
        claim = self._claim
        if claim is not None:
            beside = self._room_beside(claim)
            together = min(together, beside)
            if all(lane in claim.lanes for lane in lanes):
                free = min(free, beside)
        return Room(free, together, self._left_for_longs(claim), self._starts_long(claim))

    def lane_for(
        self, request: Request, lanes: Sequence[int], pending_seconds: Sequence[float]
    ) -> int | None:
        """Which of `lanes` should take a waiting request now; None: none of them, or there is no room."""
        wanted, sibling = request.wanted_blocks, request.prompt.sharing
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
            with_room = [lane for lane in lanes_open if self._free_blocks(lane) >= wanted]
            key = lambda lane: (pending_seconds[lane], -self._free_blocks(lane), lane)  # noqa: E731
            lane = min(with_room, key=key, default=-1)
        if lane not in lanes or lane not in lanes_open:
            return None
        free = sum(map(self._free_blocks, self._lanes)) if request.may_spread else self._free_blocks(lane)
        return lane if wanted <= free else None

    def _free_blocks(self, lane: int) -> int:
        return self.pools.free_blocks_on(lane)

    def _lanes_open_to(self, request: Request) -> Sequence[int]:
        """Lanes whose free KV is not claimed by somebody else; one that may spread needs all."""
        claim = self._claim
        if claim is None or claim.request is request or request.wanted_blocks <= self._room_beside(claim):
            return self._lanes
        return () if request.may_spread else [lane for lane in self._lanes if lane not in claim.lanes]

    # The caps on longs, beside a claim: what a long claimant is to have is not for others.

    def _left_for_longs(self, claim: _Claim | None = None) -> int | None:
        """Blocks that another long request may take; None: any number."""
        claimed = claim.request.wanted_blocks if claim is not None and claim.request.is_long else 0
        if not self._taken_by_longs and not claimed:
            return None
        share = 1 - self._config.scheduling.short_headroom
        return int(share * self._pool_blocks) - self._held_by_longs - claimed

    @property
    def _held_by_longs(self) -> int:
        """Blocks; those that several of them share count once.

        Each took what was free until then. What one took that is gone, and others still share, is held by no short.
        """
        if not self._taken_by_longs:
            return 0
        return max(sum(self._taken_by_longs.values()), self.pools.held_blocks - self._held_by_shorts)

    def _starts_long(self, claim: _Claim | None = None) -> bool:
        """Whether another long request may begin its prefill."""
        claimed = 1 if claim is not None and claim.request.is_long else 0
        return len(self._prefilling_longs) + claimed < self._config.scheduling.max_running_long

    def _has_share_for(self, request: Request) -> bool:
        """Whether the caps on longs let a long request in."""
        claim = None if self.claimant is request else self._claim
        left = self._left_for_longs(claim)
        return self._starts_long(claim) and (left is None or request.wanted_blocks <= left)

    # --- claims -------------------------------------------------------------------------------------

    @property
    def claimant(self) -> Request | None:
        """The late request that freed KV goes to."""
        return None if self._claim is None else self._claim.request

    def claim(self, request: Request) -> None:
        """From now on freed KV goes to `request`, until it is admitted or gone."""
        assert self._claim is None
        emptiest = max(self._lanes, key=lambda lane: (self._free_blocks(lane), -lane))
        self._claim = _Claim(request, (emptiest,), request.wanted_blocks)
        self.look_at_claim()

    def look_at_claim(self) -> None:
        """What the claimant wants, or from whom it forks, may have changed."""
        claim = self._claim
        assert claim is not None
        request, sibling = claim.request, claim.request.prompt.sharing
        claim.blocks = request.wanted_blocks
        if request.may_spread:
            claim.lanes = self._lanes
        elif sibling is not None:
            claim.lanes = (sibling.lane,)

    def withdraw(self, request: Request) -> None:
        """A waiting request is gone, or waits for something else."""
        if self.claimant is request:
            self._claim = None

    def _room_beside(self, claim: _Claim) -> int:
        """Blocks that may still be given to others beside a claim."""
        held = sum(claim.beside.values())
        headroom = max(self._headroom_blocks - held, 0)
        beyond = sum(map(self._free_blocks, claim.lanes)) - claim.blocks
        if claim.request.is_long and not self._has_share_for(claim.request):
            return max(headroom, beyond)
        return 0 if beyond + held >= 0 else headroom

    # --- KV is given and taken ----------------------------------------------------------------------

    def admit(
        self,
        request: Request,
        pending_seconds: Sequence[float],
        remaining_seconds: Callable[[int], float],
    ) -> Admit | None:
        """Give KV to a request for which there is a lane; None: the pools have no place for it, and nothing has changed.

        `pending_seconds` are the prefill seconds ahead of a new request on each lane, `remaining_seconds(cached)` its
        own behind `cached` tokens that need not be computed.
        """
        submit, sibling = request.submit, request.prompt.sharing
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
                # It is not a number of blocks that it lacks: it waits until its lanes are empty, if need be.
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
            self._taken_by_longs[request.id] = request.wanted_blocks
        else:
            self._held_by_shorts += self.blocks_for(request.reserved_tokens)
        if self._claim is not None:
            self._note_beside_claim(self._claim, request, request.wanted_blocks)
        return new_admit(
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
            deals=placed.deals,
            cached_tokens=placed.cached_tokens,
            prefixes=placed.prefixes,
            evictions=placed.evictions,
        )

    def grow(self, request: Request) -> Grow | None:
        """Let a request that has used up its KV go on: by a large piece, else by what it needs now, else None."""
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
    def longs_crowd(self) -> bool:
        """Whether long requests hold so much of the pool that one who is late anyway should not add to it."""
        return self._held_by_longs > LATE_SHARE * self._pool_blocks

    def prefilled(self, request: Request) -> None:
        """All of a request's prompt is dispatched: it counts no more as a long one in prefill."""
        self._prefilling_longs.discard(request.id)

    def release(self, request: Request) -> None:
        """Take back all that a request holds."""
        self.pools.release(request.id, request.computed)
        if request.is_long:
            self.prefilled(request)
            del self._taken_by_longs[request.id]
        else:
            self._held_by_shorts -= self.blocks_for(request.reserved_tokens)
        if self._claim is not None:
            self._claim.beside.pop(request.id, None)

    def _note_beside_claim(self, claim: _Claim, request: Request, wanted: int) -> None:
        if claim.request is request:
            self._claim = None
        elif any(lane in claim.lanes for lane in request.held_lanes):
            claim.beside[request.id] = wanted
