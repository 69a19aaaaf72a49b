"""Finds waiting sequences that no replica will serve: none is large enough, or none has served their model for too long."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from medha.routing.known_replicas import KnownReplica
from medha.routing.ledgers import Ledgers
from medha.routing.open_sequences import Key, OpenSequence
from medha.routing.replica_choice import ignored_grammar
from medha.routing.router_events import FailureKind
from medha.routing.routing_limits import RoutingLimits

Hopeless = tuple[OpenSequence, FailureKind, str]
"""A sequence, and why it ends."""


class _Kind(NamedTuple):
    """The sequences of a key that the same replicas can serve, apart from their length."""

    key: Key
    has_grammar: bool


class Unserved:
    """The kinds of waiting sequences that no replica serves now, and since when."""

    def __init__(self, limits: RoutingLimits) -> None:
        self._limits = limits
        self._since: dict[_Kind, float] = {}

    def hopeless(
        self, replicas: Iterable[KnownReplica], usable: Collection[str], waiting: Ledgers, now: float
    ) -> list[Hopeless]:
        """Return the waiting sequences to end now; `usable` names the replicas that serve."""
        longest: dict[_Kind, int] = {}
        recovering: set[_Kind] = set()
        for replica in replicas:
            card = replica.card
            for kind in _kinds(replica.key):
                if kind.has_grammar and not card.follows_grammars:
                    continue
                if card.replica in usable:
                    longest[kind] = max(longest.get(kind, 0), card.longest_request_tokens)
                elif not card.ready and not card.draining:
                    recovering.add(kind)
        since: dict[_Kind, float] = {}
        found: list[Hopeless] = []
        for key in waiting:
            ledger = waiting.of(key)
            for kind in _kinds(key):
                limit = longest.get(kind)
                if limit is not None:
                    detail = f"no replica is left that holds more than {limit} tokens"
                    too_long = ledger.with_tokens(limit, has_grammar=kind.has_grammar)
                    found += [(one, "too_long", detail) for one in too_long]
                    continue
                unserved = ledger.with_tokens(0, has_grammar=kind.has_grammar)
                if not unserved:
                    continue  # the time begins with the first one that waits
                since[kind] = self._since.get(kind, now)
                waited_seconds = now - since[kind]
                limits = self._limits
                allowed = limits.recovery_seconds if kind in recovering else limits.unserved_seconds
                if waited_seconds >= allowed:
                    detail = f"no replica of the model `{key[0]}` came back in {waited_seconds:.0f} s"
                    if kind._replace(has_grammar=False) in longest:
                        detail = ignored_grammar(key[0])
                    found += [(one, "unavailable", detail) for one in unserved]
        self._since = since
        return found


def _kinds(key: Key) -> tuple[_Kind, _Kind]:
    return _Kind(key, has_grammar=False), _Kind(key, has_grammar=True)
