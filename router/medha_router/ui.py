"""The page `/ui` on the port for metrics: what happens now, and a timeline with a bar for each request.

    GET /ui                 the page; its files are in the folder `page`, and it loads nothing from elsewhere
    GET /ui/state           all that the page shows, as JSON
    GET /ui/events          the same as server-sent events: first all of it, then what has changed

Bars have request ids and names of API keys. So only clients on this machine get an answer (in Kubernetes: through
`kubectl port-forward`), and only under a name of this machine, so that no other site's page can read it. No answer
holds a prompt, an output or a token id.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import suppress
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request, Response

from medha.observing.replica_figures import replica_figures
from medha.observing.timeline import Timeline
from medha.routing.router_core import RouterCore
from medha_router.api_error import ApiError
from medha_router.event_streams import EventStream, event, json_response
from medha_router.origin_policy import host_name, is_loopback
from medha_router.page_updates import PageUpdates
from medha_router.replica_link import ReplicaLink

MOST_WATCHERS = 8
"""Most event streams at a time; the port has to stay open for scrapers and probes."""
MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def snapshot(
    core: RouterCore,
    waiting: Counter[tuple[str, str, str]],
    timeline: Timeline,
    *,
    since: int,
    now: float,
    wall_seconds: float,
) -> dict[str, Any]:
    """Return what the page shows at `now`, with the bars that have changed since change number `since`.

    Times count from the timeline's origin; `wall_seconds` is the Unix time at `now`.
    """
    by_class: Counter[str] = Counter()
    for (_, service_class, _), count in waiting.items():
        by_class[service_class] += count
    return {
        "now": round(now - timeline.origin, 4),
        "wall": round(wall_seconds, 3),
        "ready": core.fleet.ready,
        "open": core.open,
        "waiting": dict(by_class),
        "replicas": [
            replica_figures(card) for card in sorted(core.fleet.cards(), key=lambda card: card.replica)
        ],
        "bars": timeline.changes(since),
    }


class Ui:
    """The endpoints of the page, on top of the link to replicas."""

    def __init__(self, link: ReplicaLink) -> None:
        self._link = link
        self._watchers = 0
        self._updates = PageUpdates(self._update, lambda: link.timeline.change)
        self._ended = asyncio.Event()
        folder = files("medha_router") / "page"
        self._files = {
            item.name: item.read_bytes()
            for item in folder.iterdir()
            if item.name.rpartition(".")[2] in MEDIA_TYPES
        }

    def add_to(self, app: FastAPI) -> None:
        """Add the endpoints to an application."""
        app.add_api_route("/ui", self.page, methods=["GET", "HEAD"])
        app.add_api_route("/ui/state", self.state, methods=["GET", "HEAD"])
        app.add_api_route("/ui/events", self.events, methods=["GET", "HEAD"])
        app.add_api_route("/ui/{name}", self.file, methods=["GET", "HEAD"])

    def end(self) -> None:
        """End all event streams, because the router stops."""
        self._ended.set()

    async def page(self, request: Request) -> Response:
        return await self.file(request, "index.html")

    async def file(self, request: Request, name: str) -> Response:
        _require_this_machine(request)
        content = self._files.get(name)
        if content is None:
            raise ApiError(404, f"Not Found: GET /ui/{name[:80]}", code="not_found")
        return Response(content, headers={**HEADERS, "Content-Type": MEDIA_TYPES[name.rpartition(".")[2]]})

    async def state(self, request: Request) -> Response:
        _require_this_machine(request)
        return json_response(self._snapshot(0), headers={**HEADERS, "Cache-Control": "no-store"})

    async def events(self, request: Request) -> Response:
        _require_this_machine(request)
        if self._watchers >= MOST_WATCHERS:
            text = f"{self._watchers} pages are open already: close one"
            raise ApiError(503, text, code="overloaded", retry_after_seconds=5)
        self._watchers += 1
        return EventStream(self._changes(), HEADERS, self._leave)

    def _leave(self) -> None:
        self._watchers -= 1

    async def _changes(self) -> AsyncGenerator[bytes]:
        loop = asyncio.get_running_loop()
        self._link.watch()
        content, seen = self._updates.first(loop.time())
        yield content
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), self._updates.seconds_left(loop.time()))
            if self._ended.is_set():
                return
            self._link.watch()
            content, seen = self._updates.next(seen, loop.time())
            yield content

    def _update(self, since: int | None) -> bytes:
        return event(self._snapshot(since or 0) | {"whole": since is None})

    def _snapshot(self, since: int) -> dict[str, Any]:
        link = self._link
        return snapshot(
            link.core,
            link.history.waiting(),
            link.timeline,
            since=since,
            now=asyncio.get_running_loop().time(),
            wall_seconds=datetime.now(UTC).timestamp(),
        )


def _require_this_machine(request: Request) -> None:
    """Check that a client is on this machine and calls it by its own name.

    Raises:
        ApiError: 403.
    """
    address = "" if request.client is None else request.client.host.partition("%")[0]
    names = [host_name(host) for host in request.headers.getlist("host")]
    if not is_loopback(address.removeprefix("::ffff:")) or not all(map(is_loopback, names)):
        text = (
            "/ui names requests and is answered to this machine only: open http://127.0.0.1:PORT/ui there, "
            "in Kubernetes through `kubectl port-forward`"
        )
        raise ApiError(403, text, code="forbidden")
