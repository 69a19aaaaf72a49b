"""The history of a router's sequences, derived from RouterCore's events and commands: where each is, and what happened to it.

It has no clock and does no I/O: the same events and commands give the same facts, which `router_metrics` exports.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from dataclasses import replace as dataclass_replace
from math import inf
from typing import Literal, get_args

from medha.observing.metric_catalogue import LONG_PROMPT_TOKENS
from medha.observing.timeline import Finished, Interrupted, Placed, Sampled, Timeline
from medha.routing.prefix_memory import prefill_seconds
from medha.routing.router_events import (
    Abandon,
    Arrive,
    Deliver,
    Fail,
    LinkLost,
    Move,
    NewSequence,
    Received,
    Reject,
    RouterCommand,
    RouterEvent,
    Send,
)
from medha.scheduler.request_progress import happenings_of
from medha.wire.messages import Announce, Cancel, Failed, ProgressReport, Refused, Submit

LeaveReason = Literal["refused", "rank_lost", "replica_lost", "moved", "prefilled"]
"""Reason why a sequence left a replica before its end: it was refused there; it was lost with a rank or the replica; it
moved because the replica drains; or its prompt is computed, and another replica decodes (`medha.routing.roles`)."""
LEAVE_REASONS: tuple[LeaveReason, ...] = get_args(LeaveReason)


@dataclass(frozen=True, slots=True)
class Resubmitted:
    """A sequence was sent to a replica once more."""

    model: str
    reason: LeaveReason


@dataclass(frozen=True, slots=True)
class Resumed:
    """A stream that had been interrupted has its next token."""

    model: str
    reason: LeaveReason
    """Why it left its replica; if it has left several since its last token, why it left the first."""
    is_elsewhere: bool
    """The token is from another replica."""
    pause_seconds: float
    """Time since its last token before."""


@dataclass(frozen=True, slots=True)
class ForwardedFirstToken:
    """A sequence has its first token from a replica."""

    model: str
    prompt_tokens: int
    predicted_seconds: float
    """Time from forwarding, predicted from the announced load: prefills that go before, and its own without the cached part."""
    observed_seconds: float


@dataclass(frozen=True, slots=True)
class Moved:
    """A sequence that moved from the replica that computed its prompt has its next token."""

    model: str
    tokens: int
    """Tokens whose KV it needed there."""
    read_tokens: int
    """Tokens whose KV it read, and did not compute again."""


Fact = Resubmitted | Resumed | ForwardedFirstToken | Moved


@dataclass(slots=True)
class _Entry:
    """A sequence, from its arrival until it is forgotten."""

    new: NewSequence
    request: Arrive
    arrived_at: float
    replica: str | None = None  # that has it now
    wire_id: str = ""
    sent_at: float = 0.0
    tokens: int = 0  # to prefill there
    ahead_seconds: float = 0.0  # of prefill that was expected to go before it there
    in_prefill: bool = False  # no token since it was sent
    last_token_at: float | None = None
    left_because: LeaveReason | None = None
    interrupted: tuple[LeaveReason, str] | None = None  # since its last token: why, and the replica it left
    is_beside_long: bool = False
    has_ended: bool = False

    @property
    def is_long_prefill(self) -> bool:
        return self.in_prefill and self.tokens >= LONG_PROMPT_TOKENS


@dataclass(slots=True)
class _Replica:
    card: Announce  # its last announcement
    entries: dict[str, _Entry] = field(default_factory=dict)  # by wire id
    long_prefills: int = 0
    long_prefill_ended_at: float = -inf  # the last one


class SequenceHistory:
    """Follows every sequence from `Arrive` until `forget`."""

    def __init__(self, timeline: Timeline) -> None:
        """`timeline` has a bar for each sequence whose beginning it was given; what follows is added here."""
        self._timeline = timeline
        self._entries: dict[str, _Entry] = {}  # by sequence
        self._replicas: dict[str, _Replica] = {}

    def fold(self, event: RouterEvent, commands: Iterable[RouterCommand], now: float) -> list[Fact]:
        """Take an event and the commands that RouterCore returned for it; return what happened."""
        self._take(event, now)
        facts: list[Fact] = []
        for command in commands:
            match command:
                case Send(replica=replica, message=Submit() as submit, ahead_seconds=ahead_seconds):
                    facts += self._sent(replica, submit, ahead_seconds, now)
                case Send(replica=replica, message=Cancel(id=wire_id, moves=True)):
                    self._leave(replica, wire_id, "moved", now)
                case Deliver():
                    facts += self._delivered(command, now)
                case Fail(id=sequence_id, kind=kind):
                    self._end(sequence_id, kind, now)
                case Reject(replica=replica):
                    self._lose(replica, "replica_lost", now)
                case Move(id=sequence_id, replica=replica):
                    self._leave(replica, self._entries[sequence_id].wire_id, "prefilled", now)
        return facts

    def waiting(self) -> Counter[tuple[str, str, str]]:
        """Return the number of sequences that wait for a replica, by model, service class and owner."""
        return Counter(
            (entry.request.model, entry.request.service_class, entry.request.owner)
            for entry in self._entries.values()
            if entry.replica is None and not entry.has_ended
        )

    def is_beside_long(self, sequence_id: str) -> bool:
        """Return whether a long prefill was in flight on the sequence's replica between its arrival and its first token.

        False before the first token, and always for a sequence whose own prefill is long.
        """
        return self._entries[sequence_id].is_beside_long

    def progress(self, replica: str, report: ProgressReport, now: float) -> None:
        """Add to the timeline what a replica reports of sequences that it has."""
        known = self._replicas.get(replica)
        if known is None:
            return
        for happening in happenings_of(report, now):
            entry = known.entries.get(happening.id)
            if entry is not None:
                self._timeline.take(dataclass_replace(happening, id=entry.new.id), now)

    def forget(self, sequence_ids: Iterable[str], now: float) -> None:
        """Remove sequences of which nothing more is asked."""
        for sequence_id in sequence_ids:
            self._end(sequence_id, "cancelled", now)
            self._entries.pop(sequence_id, None)

    # --- what happens to a sequence -----------------------------------------------------------------

    def _take(self, event: RouterEvent, now: float) -> None:
        match event:
            case Arrive():
                for new in event.sequences:
                    self._entries[new.id] = _Entry(new, event, now)
            case Abandon(id=sequence_id, outcome=outcome):
                self._end(sequence_id, outcome, now)
            case Received(replica=replica, message=Announce() as card):
                self._announced(replica, card, now)
            case Received(replica=replica, message=Refused(id=wire_id)):
                self._leave(replica, wire_id, "refused", now)
            case Received(replica=replica, message=Failed(id=wire_id)):
                self._leave(replica, wire_id, "rank_lost", now)
            case LinkLost(replica=replica):
                self._lose(replica, "replica_lost", now)

    def _announced(self, name: str, card: Announce, now: float) -> None:
        known = self._replicas.setdefault(name, _Replica(card))
        is_same = (known.card.model, known.card.digest, known.card.epoch) == (
            card.model,
            card.digest,
            card.epoch,
        )
        if not (is_same and card.ready):  # it has none of them any more
            for wire_id in list(known.entries):
                self._leave(name, wire_id, "rank_lost", now)
        known.card = card

    def _sent(self, name: str, submit: Submit, ahead_seconds: float, now: float) -> list[Fact]:
        # A later attempt has the sequence's id, `~` and a number; a client's own id may hold a `~`, too.
        entry = self._entries.get(submit.id) or self._entries[submit.id.rpartition("~")[0]]
        replica = self._replicas[name]
        entry.replica, entry.wire_id, entry.sent_at = name, submit.id, now
        entry.tokens, entry.in_prefill = submit.tokens, True
        entry.ahead_seconds = ahead_seconds
        replica.entries[submit.id] = entry
        replica.long_prefills += entry.is_long_prefill
        self._timeline.take(Placed(entry.new.id, name), now)
        return [] if entry.left_because is None else [Resubmitted(entry.request.model, entry.left_because)]

    def _delivered(self, command: Deliver, now: float) -> list[Fact]:
        entry = self._entries[command.id]
        facts: list[Fact] = []
        if command.tokens:
            assert entry.replica is not None
            model, replica = entry.request.model, self._replicas[entry.replica]
            if entry.in_prefill:
                self._end_prefill(entry, now)
                if entry.last_token_at is None:
                    began_before_its_end = replica.long_prefill_ended_at >= entry.arrived_at
                    own = entry.tokens >= LONG_PROMPT_TOKENS
                    entry.is_beside_long = not own and (replica.long_prefills > 0 or began_before_its_end)
                if entry.left_because == "prefilled":
                    facts.append(Moved(model, entry.tokens, min(command.cached_tokens, entry.tokens)))
                elif entry.new.sample_index == 0:  # the others share its prefill
                    points = replica.card.prefill_points
                    cached = min(command.cached_tokens, entry.tokens - 1)
                    own_seconds = prefill_seconds(points, entry.tokens) - prefill_seconds(points, cached)
                    predicted = entry.ahead_seconds + own_seconds
                    facts.append(ForwardedFirstToken(model, entry.tokens, predicted, now - entry.sent_at))
            if entry.interrupted is not None and entry.last_token_at is not None:
                reason, left = entry.interrupted
                facts.append(Resumed(model, reason, entry.replica != left, now - entry.last_token_at))
            entry.interrupted, entry.last_token_at = None, now
            self._timeline.take(Sampled(command.id, len(command.tokens), command.cached_tokens), now)
        if command.finish_reason is not None:
            self._end(command.id, command.finish_reason, now)
        return facts

    def _lose(self, name: str, reason: LeaveReason, now: float) -> None:
        lost = self._replicas.get(name)
        if lost is not None:
            for wire_id in list(lost.entries):
                self._leave(name, wire_id, reason, now)
            del self._replicas[name]

    def _leave(self, name: str, wire_id: str, reason: LeaveReason, now: float) -> None:
        """Note that a sequence is no longer at a replica, if it was there."""
        known = self._replicas.get(name)
        entry = None if known is None else known.entries.get(wire_id)
        if entry is not None:
            self._remove(entry, now)
            self._timeline.take(Interrupted(entry.new.id, "moved", reason), now)
            entry.left_because = reason
            entry.interrupted = entry.interrupted or (reason, name)

    def _end(self, sequence_id: str, outcome: str, now: float) -> None:
        entry = self._entries.get(sequence_id)
        if entry is not None:
            self._remove(entry, now)
            self._timeline.take(Finished(sequence_id, outcome), now)
            entry.has_ended = True

    def _remove(self, entry: _Entry, now: float) -> None:
        """Take a sequence from the replica that has it, if one has."""
        if entry.replica is not None:
            self._end_prefill(entry, now)
            del self._replicas[entry.replica].entries[entry.wire_id]
            entry.replica = None

    def _end_prefill(self, entry: _Entry, now: float) -> None:
        assert entry.replica is not None
        if entry.is_long_prefill:
            replica = self._replicas[entry.replica]
            replica.long_prefills -= 1
            replica.long_prefill_ended_at = now
        entry.in_prefill = False
