"""Links of the worker's processes: sockets that speak `medha.wire.frames`, and drop what does not belong on them.

Each pair of processes is joined by two links, so that a 40 MB prompt never blocks a step: `control` carries
small messages, `tokens` carries token ids.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import zmq

from medha.errors import WireInvalid
from medha.wire.frames import decode, encode
from medha.wire.messages import Cancel, FetchBundle, Message, Submit, Tokens
from medha_links.drops import Drops
from medha_links.keys import KeyPair
from medha_links.sockets import (
    CONTROL_FRAME_BYTES,
    LINGER_MILLISECONDS,
    TOKENS_FRAME_BYTES,
    Opened,
    connect,
    connection_of,
)

ROUTER_RECONNECT_MILLISECONDS = 500
"""The controller must have noticed a lost connection, and given its sockets up, before ZeroMQ makes a new one."""

REFUSED_SECONDS = 5.0
"""After which a router that does not admit this replica is asked again: its tokens may have been changed."""

RouterNews = Literal["came", "gone", "refused"]
Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]


@dataclass(frozen=True, slots=True)
class Received:
    """One message; `peer` is the sender's identity where the link is bound here, else empty."""

    peer: bytes
    message: Message
    payload: memoryview | None
    connection: int = -1  # by which it came, where the link is bound here


def rank_identity(rank: int, incarnation: str = "") -> bytes:
    """By which a rank's connections are known: each process has its own, so that none can take another's over."""
    return b"rank-%d/%s" % (rank, incarnation.encode()) if incarnation else b"rank-%d" % rank


class Link:
    """One socket; messages that cannot be read or do not belong here are dropped and counted."""

    def __init__(
        self,
        opened: Opened[Socket],
        name: str,
        drops: Drops,
        *,
        accepts: Collection[type[Message]],
        peers: Collection[bytes] | None = None,
    ) -> None:
        """`accepts` are the types that may come; `peers` the identities up to a `/`, if the link is bound here."""
        self.socket = opened.socket
        self.connections = opened.connections
        self.name = name
        self._opened = opened
        self._drops = drops
        self._accepts = frozenset(accepts)
        self._peers = None if peers is None else frozenset(peers)

    def send(self, message: Message, payload: bytes | memoryview | None = None, *, peer: bytes = b"") -> None:
        """Queue a message; `peer` says for whom where the link is bound here. It is lost if a server has refused us.

        Raises:
            zmq.ZMQError: the peer is not connected (EHOSTUNREACH).
        """
        frames = encode(message, payload)
        parts = frames if self._peers is None else [peer, *frames]
        with suppress(
            zmq.Again
        ):  # queues have no bound, so that only a socket without any connection cannot send
            self.socket.send_multipart(parts, zmq.NOBLOCK, copy=False)

    def receive(self, timeout_seconds: float = 0.0) -> Received | None:
        """The next message that belongs here, or None when none comes within the time-out."""
        while self.socket.poll(round(timeout_seconds * 1000)):
            frames = self.socket.recv_multipart(copy=False)
            connection = -1 if self._peers is None else connection_of(frames[0])
            try:
                return self._read([frame.buffer for frame in frames], connection)
            except WireInvalid as error:
                self.drop(error)
        return None

    def _read(self, frames: list[memoryview], connection: int) -> Received:
        peer = b""
        if self._peers is not None:
            peer = bytes(frames.pop(0))
            if peer.partition(b"/")[0] not in self._peers:
                raise WireInvalid(f"{peer[:80]!r} is not expected here", reason="peer")
        message, payload = decode(frames)
        if type(message) not in self._accepts:
            raise WireInvalid(f"{type(message).__name__} is not expected here", reason="unexpected")
        return Received(peer, message, payload, connection)

    def drop(self, error: WireInvalid) -> None:
        """Count a message that was read and turned out to be out of place."""
        self._drops.drop(self.name, error)

    def close(self, linger_milliseconds: int = LINGER_MILLISECONDS) -> None:
        """Messages that are queued get a moment to leave."""
        self._opened.close(linger_milliseconds)


class RouterLinks:
    """The two links of a controller to its router, made anew each time a connection is lost.

    What was on its way then is lost without a trace, in either direction. So nothing may go on that was in progress: the
    new links have another identity, by which the router knows that they are new, and what was queued goes with the old.
    """

    def __init__(
        self,
        context: Context,
        endpoints: tuple[str, str],
        replica: str,
        keys: KeyPair,
        server: bytes,
        drops: Drops,
    ) -> None:
        """`endpoints` are those of the router's control and token links, `server` is its public key."""
        self._context = context
        self._endpoints = endpoints
        self._replica = replica
        self._keys = keys
        self._server = server
        self._drops = drops
        self._open()

    def _open(self) -> None:
        identity = f"{self._replica}/{secrets.token_hex(8)}".encode()

        def opened(endpoint: str, largest_frame_bytes: int) -> Opened[Socket]:
            return connect(
                self._context,
                endpoint,
                identity,
                self._keys,
                self._server,
                largest_frame_bytes=largest_frame_bytes,
                reconnect_milliseconds=ROUTER_RECONNECT_MILLISECONDS,
            )

        control = opened(self._endpoints[0], CONTROL_FRAME_BYTES)
        tokens = opened(self._endpoints[1], TOKENS_FRAME_BYTES)
        self.control = Link(control, "router_control", self._drops, accepts=(Submit, Cancel, FetchBundle))
        self.tokens = Link(tokens, "router_tokens", self._drops, accepts=(Tokens,))
        self._met: set[str] = set()
        self._reopen_at: float | None = None

    @property
    def connected(self) -> bool:
        """Whether the router is there; until then nothing should be sent."""
        return len(self._met) == 2

    @property
    def sockets(self) -> tuple[Socket, ...]:
        """Those to be polled; others after `look` has found that the router has gone."""
        links = (self.control, self.tokens)
        return (*(link.socket for link in links), *(link.connections.socket for link in links))

    def look(self, now: float) -> RouterNews | None:
        """Take what has happened to the connections. Where the router has gone, the links are new."""
        if self._reopen_at is not None and now >= self._reopen_at:
            self._reopen()
        before = self.connected
        for link in (self.control, self.tokens):
            for event in link.connections.take():
                match event:
                    case zmq.Event.HANDSHAKE_SUCCEEDED:
                        self._met.add(link.name)
                    case zmq.Event.HANDSHAKE_FAILED_AUTH if self._reopen_at is None:
                        self._reopen_at = now + REFUSED_SECONDS  # ZeroMQ itself does not try again
                        return "refused"
                    case zmq.Event.DISCONNECTED if link.name in self._met:
                        self._reopen()
                        return "gone"
        return "came" if self.connected and not before else None

    def _reopen(self) -> None:
        self.close(0)
        self._open()

    def close(self, linger_milliseconds: int = LINGER_MILLISECONDS) -> None:
        for link in (self.control, self.tokens):
            link.close(linger_milliseconds)
