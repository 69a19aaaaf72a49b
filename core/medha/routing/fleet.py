"""The live replicas that a router knows, and what they serve together."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from medha.routing.known_bundles import KnownBundles
from medha.routing.known_replicas import KnownReplica
from medha.routing.open_sequences import Key
from medha.routing.prefix_memory import prefill_seconds
from medha.routing.router_events import Arrive
from medha.routing.routing_limits import RoutingLimits
from medha.slo import class_terms, ttft_target_seconds
from medha.wire.messages import Announce


class Fleet:
    """The replicas of one router by name, and the bundles without which it cannot use them."""

    def __init__(self, limits: RoutingLimits) -> None:
        self.replicas: dict[str, KnownReplica] = {}
        self.bundles = KnownBundles(limits)

    def cards(self, model: str | None = None) -> list[Announce]:
        """Return the announcements of live replicas whose bundle is known; only those of `model`, if one is named."""
        return [
            replica.card
            for replica in self.replicas.values()
            if replica.card.digest in self.bundles and model in (None, replica.card.model)
        ]

    def is_served(self, model: str) -> bool:
        """Return whether a replica serves a model now."""
        return any(self.is_usable(one) for one in self.replicas.values() if one.card.model == model)

    @property
    def ready(self) -> bool:
        return any(self.is_usable(replica) for replica in self.replicas.values())

    def is_usable(self, replica: KnownReplica) -> bool:
        """Return whether a replica serves, and requests for it can be prepared."""
        return replica.serves and replica.card.digest in self.bundles

    def serving(self, request: Arrive) -> list[KnownReplica]:
        """Return the replicas that can serve a request now, apart from its length."""
        return [one for one in self.serving_key((request.model, request.digest)) if one.follows(request)]

    def serving_key(self, key: Key) -> list[KnownReplica]:
        """Return the replicas that serve a version of a model now."""
        return [
            replica for replica in self.replicas.values() if replica.key == key and self.is_usable(replica)
        ]

    def ttft_target_seconds(self, request: Arrive, prompt_tokens: int) -> float:
        """Return the seconds from arrival until a prompt's first token is due: the client's deadline, else its class's.

        Replicas of one model may differ in speed. The tightest target among the serving replicas that can
        hold the prompt counts, so that it waits here no longer than any of them would let it. It is computed
        from the announced prefill times, so it differs from the replica's own target by a few per cent.
        Infinite if no replica serves the request.
        """
        if request.deadline_after_seconds is not None:
            return request.deadline_after_seconds
        cards = [replica.card for replica in self.serving(request)]
        return min(
            (
                ttft_target_seconds(
                    class_terms(card.service_classes, request.service_class),
                    prefill_seconds(card.prefill_points, prompt_tokens),
                )
                for card in cards
                if card.longest_request_tokens > prompt_tokens
            ),
            default=inf,
        )

    def work_seconds(self, request: Arrive, prompt_tokens: int) -> float:
        """Return the prefill time of a whole prompt on the fastest replica that can hold it."""
        return min(
            (
                prefill_seconds(replica.card.prefill_points, prompt_tokens)
                for replica in self.serving(request)
                if replica.card.longest_request_tokens > prompt_tokens
            ),
            default=0.0,
        )

    def most_wait_seconds(self, request: Arrive) -> float | None:
        """Return how long a request of this class may wait for its prefill to begin; None: for ever.

        If replicas differ, the longest time counts.
        """
        found: list[float] = []
        for replica in self.serving(request):
            terms = class_terms(replica.card.service_classes, request.service_class)
            if terms.max_wait_seconds is None:
                return None
            found.append(terms.max_wait_seconds)
        return max(found, default=None)

    def refusal_of(self, card: Announce) -> str | None:
        """Return why a replica cannot join the others of its model, None if it can."""
        for other in self.replicas.values():
            mixes = other.card.model == card.model and other.card.digest != card.digest
            if mixes and other.card.replica != card.replica:
                return (
                    f"its bundle {card.digest[:12]} of model {card.model!r} differs from {other.card.digest[:12]} "
                    f"of replica {other.card.replica!r}; give both the same checkpoint, or different model names"
                )
        return None


def most_tokens(serving: Iterable[KnownReplica]) -> dict[bool, int]:
    """Return the most tokens of a request that any replica holds: of those that follow grammars, and of all."""
    most = {True: 0, False: 0}
    for card in (replica.card for replica in serving):
        for follows in {False, card.follows_grammars}:
            most[follows] = max(most[follows], card.longest_request_tokens)
    return most
