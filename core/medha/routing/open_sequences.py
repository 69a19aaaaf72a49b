"""A sequence that a router has accepted, from its arrival until its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from medha.routing.router_events import Arrive, NewSequence
from medha.scheduler.request import NOWHERE

Key = tuple[str, str]
"""Name of a model, and digest of its bundle."""


@dataclass(frozen=True, slots=True)
class KvSource:
    """A replica that keeps KV of a sequence which has left it, and gives it to the next one."""

    replica: str
    wire_id: str
    """Name of the sequence there."""
    tokens: int
    """Its tokens whose KV is thought to be there."""
    has_decoded: bool
    """The sequence got a token there, so all of that KV was computed."""


@dataclass(slots=True, eq=False)
class OpenSequence:
    """The state of a sequence in a router. Times are in seconds, on the clock of `now`."""

    new: NewSequence
    request: Arrive
    arrived_at: float
    deadline: float
    """Time when the first token is due, from the length of the prompt with which the sequence arrived."""
    work_seconds: float
    """Prefill of the whole prompt on the fastest replica that holds it, as announced then."""
    tie: int
    """Place in the order of arrival."""
    turn: float
    """`AttainedService.turn` of its owner when it arrived."""
    leads: bool = True  # it is the first sample of its prompt
    # The turn with which it left the ledger, and comes back: of those of its owner, the earliest.
    taken_turn: float = -inf
    row: int = NOWHERE  # in the ledger, while it waits
    emitted: list[int] = field(default_factory=list)
    attempts: int = 0
    lost_attempts: int = 0  # attempts in a row that ended with their replicas (`RoutingLimits.max_attempts`)
    losses: int = 0  # those since its last token that count against it (`RoutingLimits.max_losses`)
    was_aboard: bool = False  # since its last token, a replica was lost that had it
    has_progress: bool = False  # this attempt has sampled a token
    has_moved: bool = False  # after it had a token; since then, `deadline` is that of its next token
    kv_dtype: str = ""  # of the KV with which its last token was sampled
    sent_at: float = 0.0  # when this attempt began
    known_tokens: int = 0  # of its prompt, which this attempt's replica was thought to have by then
    first_token_at: float = 0.0  # of this attempt, if it has progress
    first_tokens: int = 0  # length of `emitted` then
    kv_source: KvSource | None = None  # until this attempt has progress
    replica: str | None = None
    wire_id: str = ""  # differs between attempts, so that a late message of an old attempt is recognised

    @property
    def tokens(self) -> int:
        return self.new.prompt_length + len(self.emitted)

    @property
    def whole_tokens(self) -> int:
        """Tokens of its prompt and its longest output; without `max_tokens`, of one output token."""
        return self.new.prompt_length + (self.new.sampling.max_tokens or 1)

    def token_seconds(self, now: float) -> float | None:
        """Return the mean time from token to token of this attempt; None before its second one."""
        more = len(self.emitted) - self.first_tokens
        return (now - self.first_token_at) / more if self.has_progress and more > 0 else None

    @property
    def kv_tokens(self) -> int:
        """Number of its tokens with KV in the replica that decodes it, or did before it moved; 0 without one."""
        if self.replica is not None and self.has_progress:
            return self.tokens - 1
        source = self.kv_source
        return source.tokens if source is not None and source.has_decoded else 0

    @property
    def next_wire_id(self) -> str:
        """Name of its next attempt."""
        return self.new.id if self.attempts == 0 else f"{self.new.id}~{self.attempts}"

    @property
    def due_after_seconds(self) -> float | None:
        """Seconds from its arrival until it is due; None: by its service class. A move with a token sets them."""
        return self.deadline - self.arrived_at if self.has_moved else self.request.deadline_after_seconds

    @property
    def shares_prefill(self) -> bool:
        """True if another sample of its prompt, which goes with it, computes the prompt."""
        return not self.leads and not self.emitted

    def may_go_with(self, other: OpenSequence) -> bool:
        """Return whether it can share the KV of the prompt of `other`, a sequence of the same request."""
        return self.new.prompt == other.new.prompt and not self.emitted and not self.losses

    @property
    def key(self) -> Key:
        return self.request.model, self.request.digest

    @property
    def owner(self) -> str:
        return self.request.owner
