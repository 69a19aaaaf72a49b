"""All routers of a replica: the links to each, which requests are whose, and the messages from one router to the others.

A request belongs to the links on which it came. Only they may cancel it, and only they get its output. When they
break, its requests end: the router has gone, or will submit them again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import zmq

from medha.wire.messages import (
    Announce,
    Cancel,
    Emit,
    Failed,
    Message,
    ProgressReport,
    Refused,
    RouterLost,
    RouterUse,
)
from medha_process.part_settings import RouterEndpoints
from medha_worker.controller.router_heartbeats import OpenBeats
from medha_worker.link import RouterLinkEvent, RouterLinks

Answer = Emit | Refused | Failed


class RouterFleet:
    """The links to every router that was found, and to those that are no longer found but still connected.

    A router that drains has left the Service, and its streams go on.
    """

    def __init__(self, open_links: Callable[[RouterEndpoints], RouterLinks]) -> None:
        self._open = open_links
        self._wanted: Collection[RouterEndpoints] = ()
        self._links: dict[RouterEndpoints, RouterLinks] = {}
        self._by_identity: dict[bytes, RouterLinks] = {}
        self._owners: dict[str, bytes] = {}  # open request -> identity of its links
        self._routers: dict[bytes, str] = {}  # identity of links -> the router's name for itself
        self._watched_until: dict[bytes, float] = {}  # by identity of links

    def follow(self, wanted: Collection[RouterEndpoints]) -> None:
        """Connect to these routers; end the links to others that are not connected."""
        if wanted != self._wanted:
            self._wanted = wanted
            for endpoints in wanted:
                if endpoints not in self._links:
                    self._add(self._open(endpoints))
        for endpoints, links in list(self._links.items()):
            if endpoints not in wanted and not links.connected:
                self._drop(links)

    def poll(self, now: float) -> Iterator[tuple[RouterLinkEvent, RouterLinks, bytes]]:
        """Process connection events; yield each change with the links, and the identity that they had before it."""
        for links in list(self._links.values()):
            before = links.identity
            event = links.poll(now)
            if links.identity != before:
                del self._by_identity[before]
                self._by_identity[links.identity] = links
            if event is not None:
                yield event, links, before

    def __iter__(self) -> Iterator[RouterLinks]:
        return iter(list(self._links.values()))

    @property
    def count(self) -> int:
        """The number of routers that were found and are connected; one that drains is no longer found."""
        return sum(links.connected for endpoints, links in self._links.items() if endpoints in self._wanted)

    @property
    def sockets(self) -> set[zmq.Socket[bytes]]:
        """Sockets to poll; they change with the routers, and when one of them has gone."""
        return {socket for links in self._links.values() for socket in links.sockets}

    @property
    def beats(self) -> dict[bytes, OpenBeats]:
        """The functions that open the sockets for heartbeats, by the identity of each control link."""
        return {identity: links.open_beats for identity, links in self._by_identity.items()}

    # --- requests -----------------------------------------------------------------------------------

    def accept(self, request_id: str, links: RouterLinks) -> bool:
        """Record that a request came on these links; return False if there is an open one of this id."""
        if request_id in self._owners:
            return False
        self._owners[request_id] = links.identity
        return True

    def cancel(self, cancel: Cancel, links: RouterLinks) -> bool:
        """Forget a request that its router cancels, unless it moves; return False if it is not open there.

        One that moves is cancelled once more, or ends with its router.
        """
        if self._owners.get(cancel.id) != links.identity:
            return False
        if not cancel.moves:
            del self._owners[cancel.id]
        return True

    def links_of(self, request_id: str) -> RouterLinks | None:
        """Return the links on which an open request came; None if its router has gone."""
        return self._by_identity.get(self._owners.get(request_id, b""))

    def abandon(self, identity: bytes) -> list[str]:
        """Forget all requests of links that have ended; return their ids."""
        gone = [request_id for request_id, owner in self._owners.items() if owner == identity]
        for request_id in gone:
            del self._owners[request_id]
        return gone

    def forget_requests(self) -> None:
        """Forget all requests, because no epoch has any of them."""
        self._owners.clear()

    def answer(self, answer: Answer) -> None:
        """Send an answer to the router that has the request, if it is still connected, and forget an ended request."""
        identity = self._owners.get(answer.id)
        if identity is None:
            return
        if not isinstance(answer, Emit) or answer.finish_reason is not None:
            del self._owners[answer.id]
        links = self._by_identity.get(identity)
        if links is not None:
            links.answer(answer)

    # --- routers that watch -------------------------------------------------------------------------

    def watch(self, links: RouterLinks, until: float) -> None:
        """Report the progress of requests to a router until a time."""
        self._watched_until[links.identity] = until

    def is_watched(self, now: float) -> bool:
        """Return whether a router watches."""
        if self._watched_until and max(self._watched_until.values()) < now:
            self._watched_until.clear()
        return bool(self._watched_until)

    def report_progress(self, report: ProgressReport, now: float) -> None:
        """Send a report to all routers that watch."""
        for identity, until in self._watched_until.items():
            links = self._by_identity.get(identity)
            if links is not None and links.connected and now <= until:
                links.control.send(report)

    # --- all routers --------------------------------------------------------------------------------

    def announce(self, card: Announce) -> None:
        """Send an announcement to all connected routers.

        It goes out on both links: a ROUTER socket sends only to peers that it has heard, and a restarted router has
        heard none.
        """
        for links in self:
            if links.connected:
                links.control.send(card)
                links.tokens.send(card)

    def pass_on(self, report: RouterUse, links: RouterLinks) -> None:
        """Send a router's report to all other routers."""
        self._routers[links.identity] = report.router
        self._send_to_others(report, links)

    def lost(self, identity: bytes, links: RouterLinks) -> None:
        """Notify the other routers that the connection to one has ended."""
        router = self._routers.pop(identity, None)
        if router is not None:
            self._send_to_others(RouterLost(router), links)

    def close(self) -> None:
        """Close all links, with a short time for queued messages to be sent."""
        for links in self:
            links.close()

    def _send_to_others(self, message: Message, links: RouterLinks) -> None:
        for other in self:
            if other is not links and other.connected:
                other.control.send(message)

    def _add(self, links: RouterLinks) -> None:
        self._links[links.endpoints] = links
        self._by_identity[links.identity] = links

    def _drop(self, links: RouterLinks) -> None:
        del self._links[links.endpoints], self._by_identity[links.identity]
        self._routers.pop(links.identity, None)
        links.close(0)
