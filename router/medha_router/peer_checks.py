"""Checks of messages before they reach RouterCore: who sent them, and whether their values are plausible."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from math import inf, isfinite, ulp
from typing import get_args

from medha.errors import WireInvalid
from medha.kv.prefix_cache import HASH_CHARACTERS
from medha.replica_role import ReplicaRole
from medha.wire.messages import (
    BEATS,
    Announce,
    Emit,
    KvAsk,
    KvDone,
    KvTicket,
    ProgressReport,
    RouterUse,
)

POSITIVE = ulp(0.0)
"""The smallest number greater than 0."""
REMEMBERED_TOKENS = 8  # connections of one replica that are remembered
REMEMBERED = 1000
"""Number of identities that were replaced, or have ended, that are remembered; messages of a closed connection may still arrive for a moment."""


class Peers:
    """Replicas by the ZeroMQ identities of their connections, `name/number of the connection`."""

    def __init__(self) -> None:
        self._control: dict[str, bytes] = {}
        self._tokens: dict[str, deque[bytes]] = {}  # the last ones: a new one may be heard here first
        self._cards: dict[bytes, Announce] = {}  # by control identity
        self._replaced: deque[bytes] = deque(maxlen=REMEMBERED)

    def received_on_control(self, card: Announce, identity: bytes, *, is_alive: bool = False) -> bytes | None:
        """Record a replica's announcement; return the identity of its former connection if this is a new one.

        `is_alive`: the present connection was heard recently. It is then not replaced by an earlier epoch: a
        controller that was cut off or stopped and comes back must not take its successor's place.

        Raises:
            WireInvalid: the connection is another replica's, was replaced, or is of an earlier epoch.
        """
        self._require_own(card.replica, identity)
        former = self._control.get(card.replica)
        present = None if former is None or former == identity else self._cards[former]
        if present is not None and is_alive and card.epoch < present.epoch:
            raise WireInvalid(
                f"{identity[:80]!r} is in epoch {card.epoch}, and {card.replica:.80} is in a later one",
                reason="peer",
            )
        self._control[card.replica] = identity
        self._cards[identity] = card
        if former is None or former == identity:
            return None
        del self._cards[former]
        self._replaced.append(former)
        return former

    def received_on_tokens(self, replica: str, identity: bytes) -> Announce | None:
        """Record an announcement on the token link.

        Return the replica's last card if its present connection is whole from now on and was not before.

        Raises:
            WireInvalid: the connection is another replica's, or was replaced.
        """
        self._require_own(replica, identity)
        heard = self._tokens.setdefault(replica, deque(maxlen=REMEMBERED_TOKENS))
        if identity in heard:
            return None
        heard.append(identity)
        return self._cards.get(identity)

    def forget(self, identity: bytes) -> None:
        """Forget a control connection that has ended; does nothing if it was replaced or never announced a replica.

        Names come and go with the revisions of models. Nothing is sent to the replica until it announces itself again,
        on another connection: messages of this one that still arrive must not displace its successor.
        """
        card = self._cards.pop(identity, None)
        if card is None:
            return
        del self._control[card.replica]
        self._replaced.append(identity)
        heard = self._tokens.get(card.replica)
        if heard is not None and identity in heard:
            heard.remove(identity)
        if not heard:
            self._tokens.pop(card.replica, None)

    def is_whole(self, replica: str) -> bool:
        """Return whether both links of the present connection have been heard."""
        return self._control.get(replica) in self._tokens.get(replica, ())

    def card(self, identity: bytes) -> Announce:
        """Return the last announcement of the peer of a control connection.

        Raises:
            WireInvalid: it never announced itself, or has a newer connection.
        """
        if identity not in self._cards:
            raise WireInvalid(f"{identity[:80]!r} has not announced itself", reason="peer")
        return self._cards[identity]

    def beating(self, identity: bytes) -> str | None:
        """Return the replica whose heartbeats come under an identity; None if its present control link is another."""
        return self.replica(identity.removesuffix(BEATS)) if identity.endswith(BEATS) else None

    def replica(self, identity: bytes) -> str | None:
        """Return the replica whose present control link has an identity; None if there is none."""
        card = self._cards.get(identity)
        return None if card is None else card.replica

    def identity(self, replica: str) -> bytes:
        """Return the identity under which a replica is addressed, on either link."""
        return self._control[replica]

    def _require_own(self, replica: str, identity: bytes) -> None:
        if identity.rpartition(b"/")[0] != replica.encode():
            raise WireInvalid(f"{identity[:80]!r} calls itself {replica:.80}", reason="peer")
        if identity in self._replaced:
            raise WireInvalid(f"{identity[:80]!r} has been replaced", reason="peer")


def require_plausible(card: Announce) -> None:
    """Check the numbers of an announcement.

    Raises:
        WireInvalid: a number that no replica can have.
    """
    least: dict[str, float] = {
        "kv_tokens_total": 0,
        "kv_tokens_free": 0,
        "running": 0,
        "waiting": 0,
        "longest_request_tokens": 0,
        "waiting_limit": 0,
        "max_model_len": 1,
        "vocab_size": 1,
        "pending_prefill_seconds": 0,
    }
    numbers = [(name, getattr(card, name), bound) for name, bound in least.items()]
    for terms in card.service_classes:
        numbers += [
            (f"{terms.name:.80}'s {name}", getattr(terms, name), 0)
            for name in (
                "default_output_tokens",
                "expected_output_tokens",
                "ttft_factor",
                "tpot_target_seconds",
                "tpot_floor_seconds",
            )
        ]
        numbers.append((f"{terms.name:.80}'s ttft_floor_seconds", terms.ttft_floor_seconds, POSITIVE))
        if terms.max_wait_seconds is not None:
            numbers.append((f"{terms.name:.80}'s max_wait_seconds", terms.max_wait_seconds, POSITIVE))
    for point in card.prefill_points:
        numbers += [("prefill_points", number, POSITIVE) for number in point]
    for lane in card.lanes:
        numbers += [
            ("lanes.kv_tokens_free", lane.kv_tokens_free, 0),
            ("lanes.pending_prefill_seconds", lane.pending_prefill_seconds, 0),
        ]
    numbers += [
        ("tokens_per_lane", card.tokens_per_lane, 0),
        ("order.demoted_share", card.order.demoted_share, POSITIVE),
        ("order.grace_seconds", card.order.grace_seconds, 0),
        ("read_seconds", card.read_seconds, 0),
        ("read_seconds_per_token", card.read_seconds_per_token, 0),
        ("drain_seconds", card.drain_seconds or 0.0, 0),
    ]
    for key, seconds in card.work_ahead:
        numbers += [("work_ahead", key, -inf), ("work_ahead", seconds, 0)]
    if card.role not in get_args(ReplicaRole):
        raise WireInvalid(f"replica {card.replica:.80} announces the role {card.role:.80}")
    for name, number, bound in numbers:
        if not (isfinite(number) and number >= bound):
            raise WireInvalid(f"replica {card.replica:.80} announces {name} {number}")
    if not all(
        before[0] <= after[0] and before[1] <= after[1] for before, after in pairwise(card.work_ahead)
    ):
        raise WireInvalid(f"replica {card.replica:.80} announces work_ahead that decreases")
    if not all(before[0] < after[0] for before, after in pairwise(card.prefill_points)):
        raise WireInvalid(f"replica {card.replica:.80} announces prefill_points that do not increase")


def require_plausible_use(report: RouterUse) -> None:
    """Check the numbers of another router's report.

    Raises:
        WireInvalid: a number that no router reports.
    """
    for use in report.keys:
        numbers = (use.requests, use.tokens, use.open_requests, use.requests_level, use.tokens_level)
        if not all(isfinite(number) and number >= 0 for number in numbers):
            raise WireInvalid(f"router {report.router:.80} reports {numbers} for the API key {use.key:.80}")


def require_plausible_progress(report: ProgressReport) -> None:
    """Check the numbers of a report of progress.

    Raises:
        WireInvalid: a number that no replica reports.
    """
    numbers = (report.began_seconds, *(number for one in report.chunks for number in (one.tokens, one.lane)))
    if not all(isfinite(number) and number >= 0 for number in numbers):
        raise WireInvalid(f"a report of progress has the numbers {numbers[:20]}")


def require_plausible_kv(message: KvAsk | KvTicket | KvDone) -> None:
    """Check a replica's message for another one.

    Raises:
        WireInvalid: it names what no replica has.
    """
    hashes = [message.hashes] if isinstance(message, KvAsk) else []
    hashes += [part.hashes for part in message.parts] if isinstance(message, KvTicket) else []
    if any(len(one) % HASH_CHARACTERS for one in hashes):
        raise WireInvalid(f"a {type(message).__name__} has a part of a hash")
    if isinstance(message, KvTicket) and any(not one.endpoint.startswith("tcp://") for one in message.ranks):
        raise WireInvalid(f"the ranks of the ticket for {message.id:.80} are at no TCP endpoint")
    if isinstance(message, KvAsk) and message.tokens < len(message.hashes) // HASH_CHARACTERS:
        raise WireInvalid(f"{message.id:.80} has more blocks than tokens")


def require_in_vocabulary(emit: Emit, vocab_size: int) -> None:
    """Check the tokens of an `Emit`.

    Raises:
        WireInvalid: a token that the model does not have, or log-probabilities that are not one for each token.
    """
    scored = emit.prompt_logprobs
    named = (*emit.tokens, *(token for one in emit.logprobs for token, _ in one.top))
    named += scored.top_ids if scored is not None else ()
    if any(not 0 <= token < vocab_size for token in named):
        raise WireInvalid(f"{emit.id:.80} has a token outside of 0 .. {vocab_size - 1}")
    if len(emit.logprobs) not in (0, len(emit.tokens)) or emit.cached_tokens < 0:
        raise WireInvalid(
            f"{emit.id:.80}: {len(emit.logprobs)} log-probabilities of {len(emit.tokens)} tokens"
        )
    if scored is not None:
        columns = (len(scored.ranks), len(scored.top_logprobs), scored.alternatives * len(scored.logprobs))
        if columns != (len(scored.logprobs), len(scored.top_ids), len(scored.top_ids)):
            raise WireInvalid(
                f"{emit.id:.80}: columns of {columns} numbers for {len(scored.logprobs)} tokens of the prompt"
            )
