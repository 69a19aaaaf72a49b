"""The bundles of tokenizer files that a router has, by digest: when one is requested, and when it is dropped."""

from __future__ import annotations

from collections.abc import Iterable

from medha.routing.router_events import DropBundle, RouterCommand, Send
from medha.routing.routing_limits import RoutingLimits
from medha.wire.messages import Announce, FetchBundle


class KnownBundles:
    """The bundles of one router."""

    def __init__(self, limits: RoutingLimits) -> None:
        self._limits = limits
        self._known: set[str] = set()
        self._unneeded_since: dict[str, float] = {}  # known ones that nothing needs -> since when
        self._requested_at: dict[str, float] = {}  # unknown ones that replicas have -> the last request

    def __contains__(self, digest: str) -> bool:
        return digest in self._known

    def add(self, digest: str) -> None:
        """Note that the router has a bundle now."""
        self._known.add(digest)
        self._requested_at.pop(digest, None)

    def request(self, card: Announce, now: float) -> list[RouterCommand]:
        """Return the request for a replica's bundle, unless it is known or was requested lately."""
        requested_at = self._requested_at.get(card.digest)
        is_due = requested_at is None or now - requested_at >= self._limits.fetch_seconds
        if card.digest in self._known or not is_due:
            return []
        self._requested_at[card.digest] = now
        return [Send(card.replica, FetchBundle(card.digest))]

    def drop_unneeded(self, announced: set[str], open_ones: Iterable[str], now: float) -> list[RouterCommand]:
        """Drop bundles that nothing has needed for long; a new revision of a model brings another one each time.

        `announced` are those of live replicas, `open_ones` those of open sequences.
        """
        self._requested_at = {digest: at for digest, at in self._requested_at.items() if digest in announced}
        unneeded = self._known - announced
        if unneeded:
            unneeded -= set(open_ones)
        self._unneeded_since = {digest: self._unneeded_since.get(digest, now) for digest in sorted(unneeded)}
        late = [
            digest
            for digest, since in self._unneeded_since.items()
            if now - since >= self._limits.bundle_seconds
        ]
        self._known.difference_update(late)
        return [DropBundle(digest) for digest in late]
