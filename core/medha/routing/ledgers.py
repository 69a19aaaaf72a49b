"""The deadline ledgers of a router: one for each model and bundle, so that a model without replicas delays no other.

A ledger follows the policy that most of its serving replicas announce. If two policies have equally many, the one of
the replica whose name sorts first counts. While nothing serves, the last policy stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import ceil, inf

from medha.routing.deadline_ledger import DeadlineLedger, Facts
from medha.routing.known_replicas import KnownReplica
from medha.routing.open_sequences import Key, OpenSequence
from medha.routing.replica_choice import able_replicas, reservation_tokens
from medha.scheduler.owner_places import PLACES_PER_FREE_PLACE
from medha.wire.messages import PolicyTerms

_REFRESHED_ROWS = 64
"""Rows of a ledger whose remaining work is computed again at each refresh."""
_MOST_RETRY_SECONDS = 600


class Ledgers:
    """All sequences that wait."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._ledgers: dict[Key, DeadlineLedger[OpenSequence]] = {}
        self._waiting_of: Counter[str] = Counter()  # owner -> its sequences
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Key]:
        """Iterate over a snapshot of the keys for which sequences wait."""
        return iter(tuple(self._ledgers))

    def of(self, key: Key) -> DeadlineLedger[OpenSequence]:
        """Return the ledger of a key for which sequences wait."""
        return self._ledgers[key]

    def add(self, sequence: OpenSequence, serving: Sequence[KnownReplica]) -> float:
        """Let a sequence wait; return the prefill seconds that it has left."""
        ledger = self._ledgers.get(sequence.key)
        if ledger is None:
            ledger = self._ledgers[sequence.key] = DeadlineLedger()
            self.follow(sequence.key, serving)
        able = able_replicas(sequence, serving)
        facts = Facts(
            arrival=sequence.arrived_at,
            deadline=sequence.deadline,
            work_seconds=sequence.work_seconds,
            remaining_seconds=remaining_seconds(sequence, able),
            tie=sequence.tie,
            turn=sequence.taken_turn if sequence.attempts else sequence.turn,
            tokens=sequence.tokens,
            needed_tokens=min((reservation_tokens(sequence, one.card) for one in able), default=0),
            whole_tokens=sequence.whole_tokens,
            has_grammar=sequence.request.has_grammar,
        )
        ledger.add(sequence, facts)
        self._waiting_of[sequence.owner] += 1
        self._count += 1
        return facts.remaining_seconds

    def remove(self, sequence: OpenSequence, *, served: bool) -> None:
        ledger = self._ledgers[sequence.key]
        sequence.taken_turn = ledger.remove(sequence, served=served)
        if not len(ledger):
            del self._ledgers[sequence.key]
        self._waiting_of[sequence.owner] -= 1
        if not self._waiting_of[sequence.owner]:
            del self._waiting_of[sequence.owner]
        self._count -= 1

    def follow(self, key: Key, serving: Sequence[KnownReplica]) -> None:
        """Order the ledger of a key by the policy of the replicas that serve it."""
        ledger = self._ledgers.get(key)
        if ledger is not None and serving:
            ledger.follow(pool_terms(serving), sum(len(replica.lanes) for replica in serving))

    def refresh(self, key: Key, serving: Sequence[KnownReplica]) -> None:
        """Compute the remaining work of some rows again, because caches change; all rows have their turn."""
        ledger = self._ledgers[key]
        for sequence in ledger.next_rows(_REFRESHED_ROWS):
            ledger.update(sequence, remaining_seconds(sequence, able_replicas(sequence, serving)))

    # --- admission ----------------------------------------------------------------------------------

    def has_room_for(self, owner: str, waiting: int, of_owner: int) -> bool:
        """Return whether one more may wait, beside `waiting` others of which `of_owner` are the owner's.

        An owner that is not alone leaves places free for the others, as in `medha.scheduler.owner_places`.
        """
        free = self._max_waiting - waiting
        others = len(self._waiting_of) - (owner in self._waiting_of)
        return free > 0 and (not others or of_owner < PLACES_PER_FREE_PLACE * free)

    def waiting_of(self, owner: str) -> int:
        return self._waiting_of[owner]

    def start_seconds(self, sequence: OpenSequence, serving: Sequence[KnownReplica], now: float) -> float:
        """Return the predicted seconds until the prefill of a waiting sequence can begin.

        It waits for the more urgent work in the ledger, and for that of the replica that has least of it. Decodes
        that hold KV, and prefills that are yet to arrive, are not counted. Infinite if nothing serves.
        """
        ledger = self._ledgers[sequence.key]
        key = ledger.key(sequence, now)
        ahead = min(
            (
                replica.seconds_before(key) if replica.card.lanes else replica.seconds_ahead
                for replica in able_replicas(sequence, serving)
            ),
            default=inf,
        )
        return ledger.seconds_before(sequence, now) + ahead


def remaining_seconds(sequence: OpenSequence, able: Sequence[KnownReplica]) -> float:
    """Return the least prefill that a sequence has left on one of the replicas that can serve it."""
    if sequence.shares_prefill:
        return 0.0
    tokens, prefix = sequence.tokens, sequence.new.prefix
    return min(
        (one.own_seconds(tokens, one.prefixes.known_tokens(prefix) if prefix else 0) for one in able),
        default=sequence.work_seconds,
    )


def pool_terms(serving: Sequence[KnownReplica]) -> PolicyTerms:
    """Return the policy that most replicas announce; among equals, that of the first by name."""
    counts = Counter(replica.card.order for replica in serving)
    first = min(serving, key=lambda replica: (-counts[replica.card.order], replica.card.replica))
    return first.card.order


def retry_after_seconds(start_seconds: float) -> int:
    """Return the `Retry-After` of a request that could start after this time."""
    return min(_MOST_RETRY_SECONDS, max(1, ceil(min(start_seconds, _MOST_RETRY_SECONDS))))
