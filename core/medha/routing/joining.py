"""Decides when a router that has started may get requests: once the replicas that it should have, have joined it.

Until then another router, or nobody, serves. In a rollout the router that it replaces goes on meanwhile. The wait is
bounded, because a replica may be broken for a reason of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from medha.api.declared import DeclaredModel
from medha.wire.messages import Announce

UNDECLARED_SECONDS = 5.0
"""Longest wait if no manifest is known to name this router: for replicas that nobody declares, or none at all."""


def awaited(declared: Iterable[DeclaredModel], cards: Iterable[Announce]) -> dict[str, int]:
    """Return how many replicas of each declared model have not joined yet; models without a missing one are left out."""
    joined = Counter(card.model for card in cards)
    missing = {model.name: model.replicas - joined[model.name] for model in declared}
    return {name: count for name, count in missing.items() if count > 0}


def may_accept(
    declared: Iterable[DeclaredModel], cards: Iterable[Announce], waited_seconds: float, join_seconds: float
) -> bool:
    """Return whether a router that has waited so long may get requests; `join_seconds` is its longest wait."""
    declared, cards = tuple(declared), tuple(cards)
    if waited_seconds >= join_seconds:
        return True
    if any(model.replicas for model in declared):
        return not awaited(declared, cards)
    return bool(cards) or waited_seconds >= UNDECLARED_SECONDS
