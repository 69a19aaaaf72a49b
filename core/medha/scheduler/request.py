"""State of one sequence inside the controller.

Three counts of token positions describe its progress::

    0 ......... computed ......... dispatched ......... length
      KV is there    in the pipeline       known, not yet dispatched

`length` counts the tokens whose ids exist: the prompt, output resumed from elsewhere, and output sampled
here. The step that dispatches the last known position also samples the next token, so a decoding sequence has
`length - dispatched` equal to 1 when it may run, and 0 while its token is in flight. A sequence that *runs
ahead* is in another step before that token has arrived; `length` then counts the token already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from sys import maxsize

from medha.shards import ShardMap
from medha.slo import Targets
from medha.wire.messages import PromptLogprobs, Submit

NOWHERE = -1
"""Lane of a request that holds no KV, and row of a request that has none in the table."""


@dataclass(slots=True)
class Prompt:
    """The requests that name one prompt, and whether its KV can be shared."""

    name: str
    tokens: int
    users: int = 0
    waiting: dict[str, Request] = field(default_factory=dict)
    holders: dict[str, Request] = field(default_factory=dict)  # requests with KV, in the order of admission
    sharing: Request | None = None  # a holder whose whole prefill is computed: others may fork it
    prefilling: bool = False  # a holder computes it, and none can be forked yet


@dataclass(slots=True, eq=False)
class Request:
    """A sequence, from its `Submit` until its KV is released."""

    submit: Submit
    id: str
    prompt: Prompt
    tie: int  # unique; increases with each arrival here
    arrival: float  # on the controller's clock, with the age subtracted
    targets: Targets
    is_long: bool
    length: int
    limit_tokens: int  # upper bound of prompt plus output
    reservation_tokens: int  # KV that it reserves at admission
    turn: float = -inf  # of its owner when it arrived; while it has a row, the table has its turn
    contested_until: float = -inf  # deadline up to which not all of its router's sequences can be on time
    most_tokens: int = 0  # KV that it can need at most
    service_class: str = "default"
    expected_output_tokens: int = 0  # whole output that was expected when it began to wait
    asides: int = 0  # how often it has stepped aside
    ways: int = 0  # how often of these it made way for a waiting request
    may_spread: bool = False  # its KV may be split over several lanes
    streams: bool = False  # a part of its KV is streamed from host memory: the pools cannot hold all of it
    streamed_blocks: int = 0  # of the lane that streams most, once it holds KV
    row: int = NOWHERE  # in the table of requests, while it has prompt left to dispatch
    lane: int = NOWHERE  # the lane that computes it
    reserved_tokens: int = 0  # tokens that its blocks can hold
    counted_blocks: int = 0  # KV blocks that count for its owner (`medha.scheduler.owner_places`)
    shard_map: ShardMap | None = None  # once it holds KV
    is_spread: bool = False  # several lanes hold its KV, or will
    in_ring: bool = False  # all of its lanes compute its prompt together (context parallelism)
    lanes: tuple[int, ...] = ()  # lanes that a step with it needs, its own first
    joins_at: int = maxsize  # the position at which a further lane joins
    lane_tokens: dict[int, int] = field(default_factory=dict)  # dispatched KV by lane, if it has several
    dispatched: int = 0
    computed: int = 0
    cached_tokens: int = 0  # prompt tokens whose KV was cached at admission; an estimate while it waits
    first_cached_tokens: int | None = None  # the same when it first got KV, if it has stepped aside since
    is_detached: bool = False  # it does not wait for the running prefill of its prompt, which ends too late
    leader: Request | None = None  # a running prefill that also computes the beginning of its prompt
    runs_ahead: bool = False  # the last token that `length` counts has not arrived yet
    emitted: int = 0  # tokens sampled here
    steps_in_flight: int = 0
    ended: bool = False  # no more steps; its KV waits in quarantine for those in flight
    steps_aside: bool = False  # it gives its KV back, and then waits to compute it again
    makes_way: bool = False  # it steps aside for a waiting request
    due_back: float | None = None  # when it is due, if it is long and steps aside for another's deadline
    returns: bool = False  # it has stepped aside for a deadline, and is back
    paced_from: float = inf  # when the first of its tokens was sampled here
    paced_length: int = 0  # its length then
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)  # of the chunks that are computed
    grammar: str = ""  # name of its grammar; empty: it has none
    awaits_grammar: bool = False  # until it is compiled, the last position of its prompt is not computed
    read_due: float = 0.0  # due time of the reads that it waits for (`medha.scheduler.policy`)
    awaits_load: bool = False  # until a tier has loaded what it has of its prompt, it gets no KV
    fetches: bool = False  # some of its blocks are still to be copied from a host tier
    draft: tuple[int, ...] = ()  # guesses at the tokens after those that have arrived
    draft_chance: float = 0.5  # chance that the next one of its guesses is right
    draft_tokens: float = 0.0  # tokens from which that chance is known
    followed: int = 0  # tokens that the draft model has computed

    @property
    def deadline(self) -> float:
        """The deadline a + d, on the controller's clock."""
        return self.arrival + self.targets.ttft_seconds

    @property
    def known_tokens(self) -> int:
        """Number of tokens whose ids exist."""
        return self.length - self.runs_ahead

    @property
    def output_tokens(self) -> int:
        """Number of output tokens, those sampled elsewhere or before it stepped aside included."""
        return self.known_tokens - self.submit.prompt_length

    @property
    def has_output_in_prompt(self) -> bool:
        """True if output that was sampled earlier, here or elsewhere, is part of its prompt."""
        return self.submit.tokens > self.submit.prompt_length

    @property
    def served_from_cache(self) -> int:
        """Prompt tokens that were cached when it first got KV, without those that it has computed itself."""
        return self.cached_tokens if self.first_cached_tokens is None else self.first_cached_tokens

    @property
    def scores_prompt(self) -> bool:
        """True if the log-probabilities of its prompt are asked for and have not been sent yet."""
        return self.submit.sampling.prompt_logprobs is not None and not self.has_output_in_prompt

    @property
    def may_dispatch_to(self) -> int:
        """Position up to which it may be dispatched now, on the lanes that take part."""
        return min(self.length - self.awaits_grammar, self.joins_at)

    @property
    def stalls(self) -> bool:
        """True if none of its tokens can be computed before its grammar is compiled, or before KV comes from a tier."""
        if self.fetches or (self.awaits_load and self.waits):
            return True
        if not self.awaits_grammar:
            return False
        there = self.dispatched
        if self.waits:
            is_shared = self.prompt.sharing is not None or self.prompt.prefilling
            there = self.submit.tokens - 1 if is_shared else self.cached_tokens
        return there >= self.length - 1

    @property
    def may_outgrow(self) -> bool:
        """True if it may need more KV than it holds."""
        return self.reserved_tokens < self.most_tokens

    @property
    def continues(self) -> bool:
        """True if it continues after the token that a step in flight samples, unless that is a stop token."""
        return not self.ended and self.length + 1 < self.limit_tokens

    @property
    def can_run_ahead(self) -> bool:
        """True if it may continue before that token arrives.

        It must hold KV for the step already, because no KV is reserved for tokens that may never exist.
        """
        return not self.runs_ahead and self.length < self.reserved_tokens

    @property
    def has_sampled(self) -> bool:
        """True if a token was sampled here since it last got KV: every further entry of it is a decode.

        `medha.scheduler.history` defines what a decode is.
        """
        return self.emitted > 0

    @property
    def waits(self) -> bool:
        """True if it holds no KV."""
        return self.lane == NOWHERE

    @property
    def held_lanes(self) -> tuple[int, ...]:
        """Lanes that hold its KV, or will."""
        return () if self.shard_map is None else self.shard_map.lanes

    def runs_on(self, lanes: Sequence[int]) -> bool:
        """Return whether a step on `lanes` includes every lane that its next position needs."""
        for lane in self.lanes:  # noqa: SIM110 - a generator takes longer
            if lane not in lanes:
                return False
        return True

    def continue_from(self, before: Request) -> None:
        """Take over what remains of `before`, the same sequence as it stepped aside: its place, and its counts."""
        self.tie, self.arrival, self.turn = before.tie, before.arrival, before.turn
        self.contested_until = before.contested_until
        self.asides, self.ways = before.asides + 1, before.ways + before.makes_way
        self.first_cached_tokens = before.served_from_cache
        self.paced_from, self.paced_length = before.paced_from, before.paced_length
        self.returns = before.due_back is not None
        self.is_long = self.is_long or self.returns

    def enter(
        self, shard_map: ShardMap, reserved_tokens: int, there_tokens: int, *, in_ring: bool = False
    ) -> None:
        """Record the KV that it holds from now on; the first `there_tokens` tokens of it are computed."""
        self.dispatched = self.computed = there_tokens
        self.lane = shard_map.owner
        self.in_ring = in_ring and len(shard_map.lanes) > 1
        self.extend(shard_map, reserved_tokens)

    def extend(self, shard_map: ShardMap, reserved_tokens: int) -> None:
        """Set the shard map of its KV; what was placed before stays in place."""
        lanes = shard_map.lanes
        self.shard_map = shard_map
        self.is_spread = len(lanes) > 1
        if not self.is_spread:
            self.reserved_tokens, self.lanes = reserved_tokens, lanes
            return
        self.reserved_tokens = shard_map.tokens
        self.lane_tokens = shard_map.local_lengths(self.dispatched)
        if self.in_ring:
            self.lane_tokens = dict.fromkeys(lanes, 0) | self.lane_tokens
        self._join(shard_map)

    def dispatch(self, count: int) -> None:
        """Record that a step with its next `count` positions is launched."""
        self._advance(count)
        self.steps_in_flight += 1

    def accept(self, count: int) -> None:
        """Record that `count` drafted tokens of the last step were right: they are known, and their KV is computed."""
        self.length += count
        self.computed += count
        if self.followed == self.dispatched:  # guesses were proposed after the last of them
            self.followed += count
        self._advance(count)

    def _advance(self, count: int) -> None:
        if self.is_spread and self.shard_map is not None:
            for piece in self.shard_map.pieces(self.dispatched, self.dispatched + count):
                self.lane_tokens[piece.lane] = piece.local_start + piece.stop - piece.start
        self.dispatched += count
        if self.dispatched >= self.joins_at and self.shard_map is not None:
            self._join(self.shard_map)

    def _join(self, shard_map: ShardMap) -> None:
        """Update the lanes that take part.

        Each joins once there is a position of it to compute. The lanes of a ring begin together.
        """
        if not self.is_spread:
            self.lanes = (shard_map.owner,)
            return
        if self.in_ring:
            self.lanes, self.joins_at = shard_map.lanes, maxsize
            return
        self.lanes = shard_map.participants(self.dispatched + 1)
        outside = (segment.start for segment in shard_map.segments if segment.lane not in self.lanes)
        self.joins_at = next(outside, maxsize)
