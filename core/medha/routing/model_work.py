"""The demand of a router's clients for each model, from its open sequences and its deadline ledgers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping

import numpy as np

from medha.routing.known_replicas import KnownReplica
from medha.routing.ledgers import Ledgers
from medha.routing.open_sequences import Key, OpenSequence
from medha.routing.replica_choice import able_replicas, reservation_tokens
from medha.routing.replica_demand import ArrivedWork, DemandTerms, ModelWork, ReplicaSize
from medha.scheduler.policy import Floats


class ModelWorks:
    """The work of all models: what arrived, and the sizes of replicas, which are kept while none serves."""

    def __init__(self, terms: DemandTerms) -> None:
        self.terms = terms
        self._arrived: dict[str, ArrivedWork] = {}
        self._sizes: dict[str, ReplicaSize] = {}

    def arrived(self, model: str, work_seconds: float, due_seconds: float, now: float) -> None:
        """Count the prefill of a sequence that has just arrived, and is due in `due_seconds`."""
        arrived = self._arrived.setdefault(model, ArrivedWork(self.terms))
        arrived.add(work_seconds, due_seconds, now)

    def ended(self, model: str, now: float) -> None:
        """Note that a sequence has ended."""
        if model in self._arrived:
            self._arrived[model].end(now)

    def follow(self, model: str, serving: Collection[KnownReplica]) -> None:
        """Take the size of a model's replicas from those that serve now."""
        if serving:
            count = len(serving)
            self._sizes[model] = ReplicaSize(
                lanes=sum(len(one.lanes) for one in serving) / count,
                kv_tokens=sum(one.card.kv_tokens_total for one in serving) / count,
                routers=max(1, *(one.card.routers for one in serving)),
            )

    def forget(self, known: Collection[str]) -> None:
        """Forget all models but these."""
        for model in [one for one in {*self._arrived, *self._sizes} if one not in known]:
            self._arrived.pop(model, None)
            self._sizes.pop(model, None)

    def size(self, model: str) -> ReplicaSize | None:
        return self._sizes.get(model)

    def now(
        self,
        models: Iterable[str],
        sequences: Iterable[OpenSequence],
        ledgers: Ledgers,
        serving_of: Callable[[Key], list[KnownReplica]],
        guests: Mapping[str, int],
        now: float,
    ) -> dict[str, ModelWork]:
        """Return the work of each model. `guests` are requests in the waiting room, by model."""
        serving: dict[Key, list[KnownReplica]] = {}
        sent_seconds: defaultdict[tuple[str, str], float] = defaultdict(float)  # by model and replica
        kinds: dict[Key, list[KnownReplica]] = {}
        kv_tokens: Counter[str] = Counter()
        open_requests = Counter(guests)
        replicas: dict[str, KnownReplica] = {}
        for sequence in sequences:
            model, key = sequence.request.model, sequence.key
            open_requests[model] += 1
            if key not in serving:
                serving[key] = serving_of(key)
                kinds[key] = _kinds(serving[key])
                replicas |= {one.card.replica: one for one in serving[key]}
            kv_tokens[model] += _reserved_tokens(sequence, replicas, kinds[key])
            if sequence.replica is not None and not (sequence.has_progress or sequence.shares_prefill):
                sent_seconds[model, sequence.replica] += sequence.work_seconds
        pending, lanes, missed = (defaultdict[str, float](float) for _ in range(3))
        for (model, name), seconds in sent_seconds.items():
            # A replica has done a part of a long prefill, and has cached others: it cannot have more left than it says.
            pending[model] += min(seconds, replicas[name].pending_seconds) if name in replicas else seconds
        for key in ledgers:
            ahead = _ahead(serving.get(key, []), self.terms.start_seconds)
            waiting = ledgers.of(key).outlook(now, ahead, self.terms.urgent_seconds)
            pending[key[0]] += waiting.pending_seconds
            lanes[key[0]] += waiting.lanes
            missed[key[0]] += waiting.missed_seconds
        rates = {model: self._rates(model, now, idle=not open_requests[model]) for model in models}
        return {
            model: ModelWork(
                arrival_rate=arrival_rate,
                urgent_rate=urgent_rate,
                urgent_growth=self._growth(model, now),
                pending_seconds=pending[model],
                waiting_lanes=lanes[model],
                missed_seconds=missed[model],
                kv_tokens=kv_tokens[model],
                open_requests=open_requests[model],
            )
            for model, (arrival_rate, urgent_rate) in rates.items()
        }

    def _rates(self, model: str, now: float, *, idle: bool) -> tuple[float, float]:
        arrived = self._arrived.get(model)
        return arrived.rates(now, idle=idle) if arrived is not None else (0.0, 0.0)

    def _growth(self, model: str, now: float) -> float:
        arrived, size = self._arrived.get(model), self._sizes.get(model)
        return arrived.growth(size.routers if size else 1, now) if arrived is not None else 0.0


def _ahead(serving: list[KnownReplica], start_seconds: float) -> Callable[[Floats], Floats]:
    """Return a function of keys: the work before each on the replica with least; `start_seconds` if none serves."""

    def ahead(keys: Floats) -> Floats:
        if not serving:
            return np.full(len(keys), start_seconds)
        found: Floats = np.min([one.seconds_before_each(keys) for one in serving], axis=0)
        return found

    return ahead


def _kinds(serving: Iterable[KnownReplica]) -> list[KnownReplica]:
    """Return one of each kind of replicas that reserve the same KV for the same sequences; most are alike, and sequences
    may be thousands.
    """
    cards = [(one, one.card) for one in serving]
    kinds = {
        (card.service_classes, card.longest_request_tokens, card.follows_grammars): one for one, card in cards
    }
    return list(kinds.values())


def _reserved_tokens(
    sequence: OpenSequence, replicas: Mapping[str, KnownReplica], kinds: list[KnownReplica]
) -> int:
    """Return the KV that a sequence has where it is, or the least that a replica would reserve for it."""
    own = None if sequence.replica is None else replicas.get(sequence.replica)
    able = [own] if own is not None else able_replicas(sequence, kinds)
    reserved = min((reservation_tokens(sequence, one.card) for one in able), default=sequence.tokens)
    return reserved - sequence.new.prompt_length * sequence.shares_prefill
