"""The messages by which this replica and others of its model agree to hand KV over (`medha.scheduler.peer_kv`).

A router passes them on. A question names the identity of the replica that asks: a hash of everything that the content
of KV depends on, at every rank. Only replicas of the same identity hand KV over. Names of tickets are random. They are
made here, because decisions use no random numbers.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from dataclasses import replace
from hashlib import blake2b

from medha.wire.messages import KvAsk, KvDone, KvTicket, Message, PeerFigures
from medha_worker.controller.router_fleet import RouterFleet
from medha_worker.link import RouterLinks

_MOST_TICKETS = 1024

KvMessage = KvAsk | KvTicket | KvDone


class Handover:
    """The hand-overs of one epoch: the links of the current question, and those on which tickets came."""

    def __init__(self, ranks: tuple[PeerFigures, ...]) -> None:
        """`ranks` are those of this replica, in order."""
        self._ranks = ranks
        self.identity = blake2b(repr([one.identity for one in ranks]).encode(), digest_size=16).hexdigest()
        self._asking: RouterLinks | None = None
        # Ticket of another replica -> the link that it came from.
        self._links: OrderedDict[str, RouterLinks] = OrderedDict()

    def receive(self, message: KvMessage, links: RouterLinks) -> KvMessage | None:
        """Return the message as an event for the core; None if it was answered here."""
        match message:
            case KvAsk() as ask:
                if ask.identity != self.identity:
                    reason = "KV of another model, grid or version"
                    _send(KvTicket(ask.id, ask.asker, reason=reason), links)
                    return None
                self._asking = links  # the core answers before the next message is received
                return replace(ask, ticket=secrets.token_hex(16))
            case KvTicket() as ticket:
                if ticket.ticket:
                    self._links[ticket.ticket] = links
                    while len(self._links) > _MOST_TICKETS:
                        self._links.popitem(last=False)
                return ticket
            case KvDone() as done:
                return done

    def send(self, message: KvMessage, routers: RouterFleet) -> None:
        """Send a message to another replica.

        If the router has gone, the message is lost, and the time limits of both sides apply.
        """
        match message:
            case KvAsk() as ask:
                links = routers.links_of(ask.id)
                message = replace(ask, identity=self.identity)
            case KvTicket() as ticket:
                links = self._asking
                message = replace(ticket, ranks=self._ranks if ticket.ticket else ())
            case KvDone() as done:
                links = self._links.pop(done.ticket, None)
        if links is not None:
            _send(message, links)


def _send(message: Message, links: RouterLinks) -> None:
    if links.connected:
        links.control.send(message)
