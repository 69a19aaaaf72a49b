"""Checks of messages before they reach RouterCore: who sent them, and whether their values are plausible."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from itertools import pairwise
from math import isfinite
from typing import get_args

from medha.api.replica_role import ReplicaRole
from medha.errors import WireInvalid
from medha.kv.prefix_cache import HASH_CHARACTERS
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

_ABOVE_ZERO = frozenset(
    (
        "max_model_len",
        "vocab_size",
        "prefill_points",
        "ttft_floor_seconds",
        "max_wait_seconds",
        "demoted_share",
    )
)
"""Fields of an announcement whose numbers are above 0; those of others may be 0."""
REMEMBERED_TOKENS = 8  # connections of one replica that are remembered
REMEMBERED = 1000
"""Most former identities that are remembered, of connections that were replaced or have ended: their messages may still
arrive for a moment."""


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
    replica = f"replica {card.replica:.80}"
    _require_plausible_numbers(replace(card, work_ahead=()), replica)
    if not all(isfinite(key) and isfinite(seconds) and seconds >= 0 for key, seconds in card.work_ahead):
        raise WireInvalid(f"{replica} announces work_ahead with seconds below 0, or without end")
    if card.role not in get_args(ReplicaRole):
        raise WireInvalid(f"{replica} announces the role {card.role:.80}")
    if not all(
        before[0] <= after[0] and before[1] <= after[1] for before, after in pairwise(card.work_ahead)
    ):
        raise WireInvalid(f"{replica} announces work_ahead that decreases")
    if not all(before[0] < after[0] for before, after in pairwise(card.prefill_points)):
        raise WireInvalid(f"{replica} announces prefill_points that do not increase")


def require_plausible_use(report: RouterUse) -> None:
    """Check the numbers of another router's report.

    Raises:
        WireInvalid: a number that no router reports.
    """
    _require_plausible_numbers(report, f"router {report.router:.80}")


def require_plausible_progress(report: ProgressReport) -> None:
    """Check the numbers of a report of progress.

    Raises:
        WireInvalid: a number that no replica reports.
    """
    _require_plausible_numbers(report, "a report of progress")


def _require_plausible_numbers(message: Announce | RouterUse | ProgressReport, sender: str) -> None:
    for name, number in _numbers(message):
        if not (isfinite(number) and number >= 0) or (number == 0 and name in _ABOVE_ZERO):
            raise WireInvalid(f"{sender} has {name} {number}")


def _numbers(value: object, name: str = "") -> Iterator[tuple[str, float]]:
    """Yield every number in a message, with the name of its field."""
    if isinstance(value, tuple):
        for one in value:
            yield from _numbers(one, name)
    elif is_dataclass(value):
        for one in fields(value):
            yield from _numbers(getattr(value, one.name), one.name)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, value


def require_plausible_kv(message: KvAsk | KvTicket | KvDone) -> None:
    """Check a message that one replica sends to another.

    Raises:
        WireInvalid: a hash is cut off, a rank is at no TCP endpoint, or there are more blocks than tokens.
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
