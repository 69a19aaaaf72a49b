"""The use of API keys at other routers, as their reports say.

Routers share no storage. Each reports the totals of its own clients (`RouterUse`), by way of any replica, as often
as they change. What has been added since a router's last report fills the key's buckets here too
(`medha.routing.key_limits`). A report that is lost or arrives twice changes nothing, because the next one has the
whole totals.

So between two reports, each router may admit what all of them together may. Over-admission is at most the number
of routers, times what a key's limits admit within the time that a report takes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from medha.routing.key_limits import LevelElsewhere, UsedElsewhere
from medha.wire.messages import KeyUse, RouterUse

REPORT_SECONDS = 1.0
"""Longest time between two reports of a router; it reports sooner if something has changed."""
SILENCE_SECONDS = 3 * REPORT_SECONDS
"""Seconds without a report after which the open requests of a router are not counted; it has gone, or is cut off."""
FORGET_SECONDS = 10 * REPORT_SECONDS
"""Seconds without a report after which the next one counts as a router's first."""

_NOTHING = KeyUse(key="", begun=0, requests=0, tokens=0, open_requests=0)


@dataclass(slots=True)
class _Router:
    heard_at: float
    number: int = 0  # of its last report
    keys: dict[str, KeyUse] = field(default_factory=dict)
    counts_open: bool = True


class FleetUse:
    """The last report of each other router."""

    def __init__(self) -> None:
        self._routers: dict[str, _Router] = {}

    def heard(self, report: RouterUse, now: float) -> list[tuple[str, UsedElsewhere | LevelElsewhere]]:
        """Take a report at `now` (seconds, any monotonic origin); return the events of the keys that it concerns.

        Nobody knows how old the totals of a router's first report are, so only its levels count.
        """
        for name in [one for one, it in self._routers.items() if now - it.heard_at > FORGET_SECONDS]:
            del self._routers[name]
        known = self._routers.get(report.router)
        events: list[tuple[str, UsedElsewhere | LevelElsewhere]] = []
        if known is None:
            known = self._routers[report.router] = _Router(now)
            events += [(use.key, LevelElsewhere(use.requests_level, use.tokens_level)) for use in report.keys]
        elif report.number <= known.number:
            return []
        else:
            for use in report.keys:
                former = known.keys.get(use.key, _NOTHING)
                if former.begun != use.begun:
                    former = _NOTHING
                requests, tokens = use.requests - former.requests, use.tokens - former.tokens
                if requests > 0 or tokens > 0:
                    events.append((use.key, UsedElsewhere(max(0, requests), max(0, tokens))))
        known.heard_at, known.number, known.counts_open = now, report.number, True
        known.keys = {use.key: use for use in report.keys}
        return events

    def lost(self, router: str) -> None:
        """Count no open requests of a router until its next report: they have ended if it has."""
        if router in self._routers:
            self._routers[router].counts_open = False

    def open_requests(self, key: str, now: float) -> int:
        """Return how many requests of a key are open at other routers."""
        return sum(
            use.open_requests
            for router in self._routers.values()
            if router.counts_open
            and now - router.heard_at <= SILENCE_SECONDS
            and (use := router.keys.get(key)) is not None
        )
