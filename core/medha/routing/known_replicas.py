"""A replica as its router sees it: what it announced, and what was forwarded to it since."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf, nextafter

import numpy as np

from medha.routing.deadline_ledger import Opening
from medha.routing.open_sequences import Key, OpenSequence
from medha.routing.prefix_memory import PrefixMemory, prefill_seconds
from medha.routing.router_events import Arrive
from medha.scheduler.policy import CLOCK_POLICIES, Floats
from medha.wire.messages import Announce, LaneLoad


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A sequence that was sent to a replica after its last announcement, and has not ended."""

    wire_id: str
    key: float
    lanes: tuple[int, ...]  # that will hold its KV, the one that computes it first
    tokens: int  # of KV
    seconds: float  # of prefill


@dataclass(frozen=True, slots=True)
class Berth:
    """The place that a replica would give a sequence."""

    lanes: tuple[int, ...]
    has_kv: bool
    seconds_ahead: float
    """Prefill seconds ahead of it on its lane, whatever their urgency, with its share of those that wait for KV."""


@dataclass(slots=True, eq=False)
class KnownReplica:
    card: Announce  # its last announcement
    heard_at: float  # when its last message of any kind arrived, in seconds of `Listening`
    announced_at: float
    open: dict[str, OpenSequence] = field(default_factory=dict)  # by wire id; see `opens` and `closes`
    forwarded: list[Forwarded] = field(default_factory=list)  # since that announcement, and still open
    forwarded_tokens: int = 0  # of KV, of all that was sent since that announcement, ended sequences included
    full: bool = False  # it has refused a sequence since that announcement
    prefixes: PrefixMemory = field(default_factory=PrefixMemory)
    _reserved_tokens: dict[str, int] = field(default_factory=dict)  # of KV, by wire id, as expected when sent
    _reserved_by_owner: dict[str, int] = field(default_factory=dict)  # of owners with open sequences only
    # Wire ids that `next_open` has yet to return, the next one last.
    _in_turn: list[str] = field(default_factory=list)

    def opens(self, wire_id: str, sequence: OpenSequence, reserved_tokens: int) -> None:
        """Note a sequence that is sent to it, and that is expected to reserve this much KV."""
        self.open[wire_id] = sequence
        self._reserved_tokens[wire_id] = reserved_tokens
        held = self._reserved_by_owner.get(sequence.owner, 0)
        self._reserved_by_owner[sequence.owner] = held + reserved_tokens

    def takes(self, sent: Forwarded) -> None:
        """Count what is sent to it, until it announces its load."""
        self.forwarded.append(sent)
        self.forwarded_tokens += sent.tokens

    def closes(self, wire_id: str) -> None:
        """Forget a sequence that has ended here."""
        self.forwarded = [one for one in self.forwarded if one.wire_id != wire_id]
        owner = self.open.pop(wire_id).owner
        self._reserved_by_owner[owner] -= self._reserved_tokens.pop(wire_id)
        if not self._reserved_by_owner[owner]:  # each sequence reserves a token at least
            del self._reserved_by_owner[owner]

    def exceeds_share(self, owner: str, reserved_tokens: int) -> bool:
        """Return whether an owner that has sequences here beside others would hold more than an equal share of the KV.

        Up to that share, decodes of others make way for it (`medha.scheduler.growth`). Only sequences of this router count.
        """
        held, owners = self._reserved_by_owner.get(owner, 0), len(self._reserved_by_owner)
        return held > 0 and owners > 1 and (held + reserved_tokens) * owners > self.card.kv_tokens_total

    def announce(self, card: Announce, now: float) -> None:
        self.card, self.announced_at = card, now
        self.forwarded, self.forwarded_tokens, self.full = [], 0, False

    def lacks_kv(self, reserved_tokens: int) -> bool:
        """Return whether too little KV is left for a sequence's reservation once those that wait here have theirs."""
        sent = sum(one.tokens for one in self.forwarded)
        return self.card.kv_tokens_free < self.card.kv_tokens_wanted + sent + reserved_tokens

    def next_open(self, most: int) -> list[OpenSequence]:
        """Return up to `most` of its open sequences; repeated calls return all of them in turn."""
        if not self._in_turn:
            self._in_turn = list(reversed(self.open))
        found: list[OpenSequence] = []
        while self._in_turn and len(found) < most:
            sequence = self.open.get(self._in_turn.pop())
            if sequence is not None:
                found.append(sequence)
        return found

    @property
    def key(self) -> Key:
        return self.card.model, self.card.digest

    @property
    def serves(self) -> bool:
        return self.card.ready and not self.card.draining

    def gives_kv(self, now: float) -> bool:
        """Return whether others may read its KV: it serves, or it drains and has time left."""
        return self.serves or (self.card.ready and self.drain_seconds_left(now) > 0)

    def drain_seconds_left(self, now: float) -> float:
        """Return the time, in seconds, until it returns what has not ended, if it drains; 0 if it gives no KV meanwhile."""
        limit = self.card.drain_seconds
        return max(limit - (now - self.announced_at), 0.0) if self.card.draining and limit else 0.0

    def reads_from(self, other: KnownReplica) -> bool:
        """Return whether it may read KV of another replica."""
        both = self.card.hands_kv_over and other.card.hands_kv_over
        return both and self is not other and self.card.kv_identity == other.card.kv_identity

    def follows(self, request: Arrive) -> bool:
        """Return whether the outputs of a request follow its grammar here, if it has one."""
        return self.card.follows_grammars or not request.has_grammar

    @property
    def has_place(self) -> bool:
        """True if its queue takes another sequence. A replica without a queue (limit 0) still takes one at a time."""
        return not self.full and self.card.waiting + len(self.forwarded) < max(1, self.card.waiting_limit)

    @property
    def is_idle(self) -> bool:
        return not (self.card.running or self.card.waiting or self.forwarded)

    # --- load ---------------------------------------------------------------------------------------

    @property
    def lanes(self) -> tuple[LaneLoad, ...]:
        """The announced load of its lanes; one lane if it announced only totals."""
        card = self.card
        return card.lanes or (LaneLoad(card.kv_tokens_free, card.pending_prefill_seconds),)

    @property
    def pending_seconds(self) -> float:
        """Prefill seconds of all that it has."""
        return self.card.pending_prefill_seconds + sum(one.seconds for one in self.forwarded)

    @property
    def seconds_ahead(self) -> float:
        """Prefill seconds of all that it has, per lane."""
        return self.pending_seconds / len(self.lanes)

    def berth(self, tokens: int, reserved_tokens: int) -> Berth:
        """Return the place for a sequence of `tokens` tokens that reserves KV for `reserved_tokens`.

        As in `medha.scheduler.admission`, it goes to the lane with KV and the least work ahead. KV that must be
        split over several lanes begins on the emptiest one.
        """
        card, lanes = self.card, self.lanes
        free = [lane.kv_tokens_free for lane in lanes]
        ahead = [lane.pending_prefill_seconds for lane in lanes]
        for one in self.forwarded:
            for lane in one.lanes:
                free[lane] -= one.tokens // len(one.lanes)
            ahead[one.lanes[0]] += one.seconds
        holding = sum(lane.pending_prefill_seconds for lane in lanes)
        queued = max(0.0, card.pending_prefill_seconds - holding) / len(lanes)
        every = range(len(lanes))
        if self._is_split(tokens, reserved_tokens):
            own = max(every, key=lambda lane: (free[lane], -lane))
            others = tuple(lane for lane in every if lane != own)
            return Berth((own, *others), sum(free) >= reserved_tokens, ahead[own] + queued)
        with_kv = [lane for lane in every if free[lane] >= reserved_tokens]
        own = min(with_kv or every, key=lambda lane: (ahead[lane], -free[lane], lane))
        return Berth((own,), bool(with_kv), ahead[own] + queued)

    def _is_split(self, tokens: int, reserved_tokens: int) -> bool:
        """Return whether KV is split over several lanes, as `medha.scheduler.validation.may_spread` decides."""
        card, lanes = self.card, len(self.lanes)
        if lanes == 1:
            return False
        share = max(card.tokens_per_lane or card.kv_tokens_total, -(-tokens // lanes))
        return tokens > share or reserved_tokens > card.kv_tokens_total // lanes

    def own_seconds(self, tokens: int, cached_tokens: int) -> float:
        """Return the seconds of prefill of a new sequence here, without the part that is cached."""
        points = self.card.prefill_points
        return prefill_seconds(points, tokens) - prefill_seconds(points, min(cached_tokens, tokens - 1))

    # --- how soon a sequence could begin ------------------------------------------------------------

    def seconds_before(self, key: float) -> float:
        """Return the work here that goes before a sequence with this key, per lane.

        A replica of an earlier release does not announce it; then it is only what was forwarded since.
        """
        points = self.card.work_ahead
        place = bisect_right(points, (key - self._since, inf))
        announced = points[place - 1][1] if place else 0.0
        added = sum(one.seconds for one in self.forwarded if one.key <= key)
        return (announced + added) / len(self.lanes)

    def seconds_before_each(self, keys: Floats) -> Floats:
        """Return `seconds_before` of each key; if only totals are announced, all work counts."""
        if not self.card.lanes:
            return np.full(len(keys), self.seconds_ahead)
        points = np.array([(key + self._since, seconds) for key, seconds in self.card.work_ahead])
        points = points.reshape(-1, 2)
        place = np.searchsorted(points[:, 0], keys, side="right")
        found = np.concatenate([[0.0], points[:, 1]])[place]
        for one in self.forwarded:
            found += one.seconds * (one.key <= keys)
        return found / len(self.lanes)

    @property
    def _since(self) -> float:
        """Time to which announced keys are relative."""
        return self.announced_at if self.card.order.policy in CLOCK_POLICIES else 0.0

    def opening(self, lookahead_seconds: float, most_tokens: int, *, takes_turns: bool = False) -> Opening:
        """Return the bounds of what it could begin within `lookahead_seconds`; an idle replica takes all that it can hold.

        `most_tokens` is the largest number of tokens that any replica for the same sequences can hold. If one of these
        replicas can hold a sequence with all of its output, the sequence goes to none that cannot.
        A sequence for which there is no KV waits in the router, where it can go to another replica, until it is late.
        Then it goes to this replica, and claims KV that becomes free there.
        `takes_turns`: not all sequences can be on time, so the replica, too, begins with the owner that attained least.

        If the turn of a sequence is earlier than those of all this router's sequences that wait in the replica, it
        waits neither for KV nor for their work: the replica leaves some KV and places to its owner
        (`medha.scheduler.owner_places`). Sequences of other routers do not count, because turns of different clocks
        cannot be compared. So several routers may each send a sequence before its turn. It then waits in the replica,
        which orders the sequences of all routers by turns of its own.
        """
        card, longest = self.card, self.card.longest_request_tokens
        follows = card.follows_grammars
        if not card.lanes or self.is_idle:  # an earlier release, or nothing to wait for
            return Opening(longest, longest, most_tokens, follows_grammars=follows)
        berth_tokens = self._most_free_tokens
        until_turn = self._least_turn if card.waiting else -inf
        if takes_turns:
            until_turn = max(until_turn, self._last_turn(lookahead_seconds))
        until_key = self._last_key(lookahead_seconds)
        return Opening(longest, longest, most_tokens, berth_tokens, until_key, until_turn, follows)

    @property
    def _most_free_tokens(self) -> int:
        """Upper bound of the KV that one sequence could get now."""
        taken = sum(one.tokens for one in self.forwarded)
        if len(self.lanes) == 1:
            return self.lanes[0].kv_tokens_free - taken
        return sum(lane.kv_tokens_free for lane in self.lanes) - taken

    def _last_key(self, lookahead_seconds: float) -> float:
        """Return the largest key before which less than `lookahead_seconds` of work remain, per lane."""
        candidates = [key + self._since for key, _ in self.card.work_ahead]
        candidates = sorted({*candidates, *(one.key for one in self.forwarded)})
        full = next((key for key in candidates if self.seconds_before(key) >= lookahead_seconds), inf)
        return full if full == inf else nextafter(full, -inf)  # equal keys count as being before

    @property
    def _unbegun(self) -> Iterator[OpenSequence]:
        """This router's sequences here that have got no token yet."""
        return (one for one in self.open.values() if not (one.has_progress or one.emitted))

    @property
    def _least_turn(self) -> float:
        """The earliest turn of this router's unbegun sequences here; -inf if there is none."""
        return min((one.taken_turn for one in self._unbegun), default=-inf)

    def _last_turn(self, lookahead_seconds: float) -> float:
        """Return the turn before which this router's unbegun sequences here are `lookahead_seconds` of work, per lane."""
        seconds = lookahead_seconds * len(self.lanes)
        for turn, work_seconds in sorted((one.turn, one.work_seconds) for one in self._unbegun):
            seconds -= work_seconds
            if seconds <= 0:
                return turn
        return inf
