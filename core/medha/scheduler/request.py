"""State of one sequence inside the controller.

Three counts of token positions say where it stands::

    0 ......... computed ......... dispatched ......... length
      KV is there    in the pipeline       known, not yet dispatched

`length` counts the tokens whose ids exist: the prompt, output resumed from elsewhere, and output drawn
here. The step that dispatches the last known position also draws the next token, so a decoding sequence has
`length - dispatched` equal to 1 when it may run, and 0 while its token is in flight. One that goes ahead runs on before
that token has come: it counts from then on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from sys import maxsize

from medha.shards import ShardMap
from medha.slo import Targets
from medha.wire.messages import Submit

NOWHERE = -1
"""The lane of a request that holds no KV, and the row of one that waits for no step."""


@dataclass(slots=True)
class Prompt:
    """Requests here that name one prompt, and whether its KV can be shared."""

    name: str
    tokens: int
    users: int = 0
    waiting: dict[str, Request] = field(default_factory=dict)
    holders: dict[str, Request] = field(default_factory=dict)  # hold KV; in the order of admission
    sharing: Request | None = None  # its whole prefill is computed: others may fork it
    prefilling: bool = False  # it has holders, and none can be forked yet


@dataclass(slots=True, eq=False)
class Request:
    """One sequence, from its `Submit` until its KV is released."""

    submit: Submit
    id: str
    prompt: Prompt
    tie: int  # unique; rises with each arrival here
    arrival: float  # on the controller's clock, age already taken off
    targets: Targets
    work_seconds: float  # predicted prefill, alone
    is_long: bool
    length: int
    limit_tokens: int  # prompt plus output may not pass it
    reservation_tokens: int  # of KV that it is promised at admission
    may_spread: bool = False  # its KV may be cut over several lanes
    wanted_blocks: int = 0  # free blocks of KV that it needs to be admitted
    row: int = NOWHERE  # in the table of candidates
    lane: int = NOWHERE  # that computes it
    reserved_tokens: int = 0  # that its blocks can hold
    shard_map: ShardMap | None = None  # once it holds KV
    is_spread: bool = False  # several lanes hold its KV, or will
    in_ring: bool = False  # all of its lanes compute its prompt together (context parallelism)
    lanes: tuple[int, ...] = ()  # that a step with it needs, its own first
    joins_at: int = maxsize  # the position at which a further lane joins
    lane_tokens: dict[int, int] = field(default_factory=dict)  # dispatched KV by lane, if it has several
    dispatched: int = 0
    computed: int = 0
    cached_tokens: int = 0  # of its prompt, whose KV was there before it came; expected ones while it waits
    goes_alone: bool = False  # its prompt is being computed, but by nobody who will be done in time
    leader: Request | None = None  # a running prefill that computes the beginning of its prompt, too
    goes_ahead: bool = False  # the last token of its length is still to come
    emitted: int = 0  # tokens drawn here
    steps_in_flight: int = 0
    ended: bool = False  # no more steps; KV waits in quarantine for those in flight

    @property
    def deadline(self) -> float:
        """a + d, on the controller's clock."""
        return self.arrival + self.targets.ttft_seconds

    def relative_slack(self, remaining_seconds: float, now: float) -> float:
        """rho: what is left until the deadline beside its own work, as a share of its whole work."""
        return (self.deadline - now - remaining_seconds) / max(self.work_seconds, 1e-6)

    @property
    def known_tokens(self) -> int:
        """Tokens whose ids exist."""
        return self.length - self.goes_ahead

    @property
    def goes_on(self) -> bool:
        """Whether it goes on behind the token that a step in flight draws, if that is no stop token."""
        return not self.ended and self.length + 1 < self.limit_tokens

    @property
    def can_go_ahead(self) -> bool:
        """Whether it may go on before that token has come: there is KV, for none is looked for on behalf of what may never be."""
        return not self.goes_ahead and self.length < self.reserved_tokens

    @property
    def is_decoding(self) -> bool:
        """Its prefill is over: every further step computes one token."""
        return self.emitted > 0

    @property
    def is_held(self) -> bool:
        """It had better wait: its prompt, or the beginning of it, is being computed."""
        if self.prompt.prefilling and not self.goes_alone:
            return True
        return self.leader is not None and self.prompt.sharing is None

    @property
    def waits(self) -> bool:
        """It holds no KV."""
        return self.lane == NOWHERE

    @property
    def held_lanes(self) -> tuple[int, ...]:
        """Lanes that hold its KV, or will."""
        return () if self.shard_map is None else self.shard_map.lanes

    def runs_on(self, lanes: Sequence[int]) -> bool:
        """Whether a step of `lanes` has all that its next position needs."""
        for lane in self.lanes:  # noqa: SIM110 - a generator takes longer
            if lane not in lanes:
                return False
        return True

    def enter(
        self, shard_map: ShardMap, reserved_tokens: int, there_tokens: int, *, in_ring: bool = False
    ) -> None:
        """It holds KV from now on, of which that of `there_tokens` tokens is there already."""
        self.dispatched = self.computed = there_tokens
        self.lane = shard_map.owner
        self.in_ring = in_ring and len(shard_map.lanes) > 1
        self.extend(shard_map, reserved_tokens)

    def extend(self, shard_map: ShardMap, reserved_tokens: int) -> None:
        """Its KV lies as `shard_map` says; what was there stays where it is."""
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
        """A step with its next `count` positions is launched."""
        if self.is_spread and self.shard_map is not None:
            for piece in self.shard_map.pieces(self.dispatched, self.dispatched + count):
                self.lane_tokens[piece.lane] = piece.local_start + piece.stop - piece.start
        self.dispatched += count
        self.steps_in_flight += 1
        if self.dispatched >= self.joins_at and self.shard_map is not None:
            self._join(self.shard_map)

    def _join(self, shard_map: ShardMap) -> None:
        """Lanes take part progressively: once there is a position of theirs to compute. Those of a ring begin together."""
        if not self.is_spread:
            self.lanes = (shard_map.owner,)
            return
        if self.in_ring:
            self.lanes, self.joins_at = shard_map.lanes, maxsize
            return
        self.lanes = shard_map.participants(self.dispatched + 1)
        outside = (segment.start for segment in shard_map.segments if segment.lane not in self.lanes)
        self.joins_at = next(outside, maxsize)
