"""Lets long requests step aside, so that requests which wait for KV are on time.

A long request may hold the KV that many others wait for. If one of these would miss its deadline, and the long one has
time to spare, the long one gives its KV back and waits (`medha.scheduler.growth` has the other reasons to step
aside). With a host tier, its KV is kept there and fetched when it comes back; without one, it is computed again. Both
have a price in seconds, and the same comparison decides.

Before its first token, a long request's time to spare is the slack to its deadline. After it, it is the time by which its
tokens are ahead of the TPOT target. That time must suffice for three things: the copies or the computing, the time for
which others are expected to need its KV, and the steps that pass until a change takes effect. When it comes back, its
deadline is earlier by the time for which others need its KV, and by the time to get it back. So it claims KV in time.

Requests do not swap back and forth. One steps aside at most `scheduling.maxSwaps` times for this, and never before it has
computed something. After a swap, the next one comes only once nine times its price has passed. A swap is made only for a
request that can still be on time, and only if one long request suffices for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from medha.cost.predictor import Predictor
from medha.cost.tier_seconds import TierSeconds
from medha.scheduler.admission import WAY_STEPS, Admission
from medha.scheduler.growth import MOST_ASIDES
from medha.scheduler.replica_config import ReplicaConfig
from medha.scheduler.request import Request
from medha.scheduler.request_table import RequestTable

PRICE_SHARE = 0.1
"""Largest share of the time that the price of swaps may take."""


@dataclass(frozen=True, slots=True)
class Needed:
    """A request that waits for KV, as the decision sees it."""

    slack_seconds: float
    """Time until its prefill must begin, or it is late."""
    holds_seconds: float
    """Time for which it is expected to hold its KV."""


@dataclass(frozen=True, slots=True)
class Price:
    """Predicted seconds to copy a request's KV to the host tier, and to have it on the device again afterwards."""

    out_seconds: float
    back_seconds: float

    @property
    def seconds(self) -> float:
        return self.out_seconds + self.back_seconds


@dataclass(frozen=True, slots=True)
class LongHolder:
    """A long request that holds KV, as the decision sees it."""

    tie: int
    slack_seconds: float
    """Time that it may lose without missing its own deadline."""
    price: Price
    swaps: int
    """Times that it has stepped aside for others."""
    is_enough: bool
    """True if the waiting request finds KV once this one has stepped aside."""


def who_swaps(needed: Needed, holders: Iterable[LongHolder], lead_seconds: float) -> LongHolder | None:
    """Return the long request that steps aside for a waiting one, or None.

    It suffices and stays on time; of several it is the one that stepped aside least often, then the one with most slack.

    Args:
        needed: the waiting request.
        holders: the long requests that may step aside.
        lead_seconds: longest time until KV that is given back can be used.
    """

    def left_seconds(one: LongHolder) -> float:
        return one.slack_seconds - one.price.seconds - needed.holds_seconds - lead_seconds

    found = [
        one
        for one in holders
        if one.is_enough
        and one.price.out_seconds <= needed.slack_seconds <= one.price.out_seconds + lead_seconds
        and left_seconds(one) >= 0
    ]
    return min(found, key=lambda one: (one.swaps, -left_seconds(one), one.tie), default=None)


def decode_slack_seconds(request: Request, now: float) -> float:
    """Return by how much the tokens that a decode has sampled here are ahead of its TPOT target."""
    tokens = request.known_tokens - request.paced_length
    return request.paced_from + tokens * request.targets.tpot_seconds - now


@dataclass(frozen=True, slots=True)
class Swap:
    """A long request that steps aside, and when it is due after that."""

    request: Request
    due: float


class LongSwaps:
    """Finds the long requests that step aside for the deadlines of others."""

    def __init__(
        self,
        config: ReplicaConfig,
        table: RequestTable,
        admission: Admission,
        predictor: Predictor,
        tier_seconds: TierSeconds | None,
    ) -> None:
        """`tier_seconds` are the times of the lanes' host tiers, if they have any."""
        self._config = config
        self._most_swaps = config.scheduling.max_swaps
        self._lead_seconds = WAY_STEPS * config.scheduling.max_step_seconds
        self._table = table
        self._admission = admission
        self._predictor = predictor
        self._tier_seconds = tier_seconds
        self._next_at = -inf
        self.count = 0
        """Times that a long request stepped aside for the deadline of another one."""

    def choose(self, now: float) -> Swap | None:
        """Return the long request that steps aside now, if any, and claim its KV for the request that needs it."""
        if not self._most_swaps or now < self._next_at or not self._table.waiting or self._admission.is_full:
            return None
        claimant = self._admission.claimant
        if claimant is not None and claimant.is_long:
            return None  # it would get the KV, and hold it for an unknown time
        holders = [request for request in self._table.holders if self._may_swap(request)]
        if not holders:
            return None
        correction = self._predictor.correction.prefill
        prices = {request.id: self._price(request) for request in holders}
        out_seconds = [price.out_seconds for price in prices.values()]
        most_seconds = self._lead_seconds + max(out_seconds)
        waiting = self._admission.soon_late(now, correction, min(out_seconds), most_seconds)
        if waiting is None:
            return None
        led = {one.leader.id for one in self._table.rows if one.leader is not None}
        holders = [request for request in holders if request.id not in led]
        places = {request.id: self._admission.place_without(request, waiting) for request in holders}
        remaining = self._table.remaining_seconds(waiting) * correction
        output = waiting.reservation_tokens - waiting.submit.tokens
        needed = Needed(
            slack_seconds=waiting.deadline - now - remaining,
            holds_seconds=remaining + max(output, 0) * waiting.targets.tpot_seconds,
        )
        by_tie = {request.tie: request for request in holders}
        found = who_swaps(
            needed,
            [
                LongHolder(
                    tie=request.tie,
                    slack_seconds=self._slack_seconds(request, now, correction),
                    price=prices[request.id],
                    swaps=request.ways,
                    is_enough=places[request.id] is not None,
                )
                for request in holders
            ],
            self._lead_seconds,
        )
        if found is None:
            return None
        request = by_tie[found.tie]
        lane = places[request.id]
        assert lane is not None
        self._admission.claim_on(lane, waiting)
        self._next_at = now + found.price.seconds * (1 / PRICE_SHARE - 1)
        self.count += 1
        due = now + found.slack_seconds + self._table.remaining_seconds(request) * correction
        return Swap(request, due - needed.holds_seconds - found.price.back_seconds)

    def _may_swap(self, request: Request) -> bool:
        """Return whether a request with KV may step aside: it is long, has computed something, and no other needs its prompt."""
        return (
            not request.ended
            and not request.streams  # no tier keeps its KV
            and request.length >= self._config.long_threshold_tokens
            and request.ways < self._most_swaps
            and request.asides < MOST_ASIDES
            and (request.has_sampled or request.computed > request.cached_tokens)
            and not request.prompt.waiting
            and not request.scores_prompt
        )

    def _slack_seconds(self, request: Request, now: float, correction: float) -> float:
        if request.has_sampled:
            return decode_slack_seconds(request, now)
        return self._table.due(request) - now - self._table.remaining_seconds(request) * correction

    def _price(self, request: Request) -> Price:
        """Return the predicted seconds to get the KV of a request back after it has stepped aside.

        An output on several lanes is computed again, and so is whatever the tier has no room for.
        """
        compute_seconds = self._predictor.prefill_seconds
        without = Price(0.0, compute_seconds(0, request.computed))
        seconds, size = self._tier_seconds, self._config.block_size_tokens
        if seconds is None or request.shard_map is None or not request.submit.block_hashes:
            return without
        kept = min(request.computed, request.submit.tokens) if request.is_spread else request.computed
        blocks = max((tokens // size for tokens in request.shard_map.local_lengths(kept).values()), default=0)
        room = self._admission.pools.tier_room(request.held_lanes)
        if blocks > room:
            kept, blocks = kept * room // blocks, room
        back_seconds = seconds.fetch_seconds(blocks) + compute_seconds(kept, request.computed)
        if back_seconds >= without.back_seconds:
            return without
        return Price(seconds.offload_seconds(blocks), back_seconds)
