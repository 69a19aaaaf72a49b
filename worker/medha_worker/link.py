"""Links of the worker's processes: sockets for `medha.wire.frames` that drop messages out of place.

Each pair of processes is connected by two links, so that a 40 MB prompt never blocks a step: `control`
carries small messages, `tokens` carries token ids.
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
from medha.wire.messages import (
    BEATS,
    Cancel,
    Emit,
    Failed,
    FetchBundle,
    KvAsk,
    KvDone,
    KvTicket,
    Message,
    Refused,
    RouterUse,
    Submit,
    Tokens,
    WatchProgress,
)
from medha_links.drops import Drops
from medha_links.key_files import KeyPair
from medha_links.sockets import (
    CONTROL_FRAME_BYTES,
    LINGER_MILLISECONDS,
    TOKENS_FRAME_BYTES,
    Opened,
    connect,
    connection_of,
)
from medha_process.part_settings import RouterEndpoints

ROUTER_RECONNECT_MILLISECONDS = 500
"""Delay of ZeroMQ's reconnects: the controller must detect a lost connection and close its sockets first."""

REFUSED_SECONDS = 5.0
"""Delay after which a router that refused this replica is called again, as its tokens may have changed."""

RouterLinkEvent = Literal["came", "gone", "refused"]
Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]


@dataclass(frozen=True, slots=True)
class Received:
    """A received message; `peer` is the sender's identity if the link is bound here, else empty."""

    peer: bytes
    message: Message
    payload: memoryview | None
    connection: int = -1  # connection on which it came, if the link is bound here


def rank_identity(rank: int, incarnation: str = "") -> bytes:
    """Return the identity of a rank's connections; each process has its own, so none takes over another's."""
    return b"rank-%d/%s" % (rank, incarnation.encode()) if incarnation else b"rank-%d" % rank


class Link:
    """A socket that drops and counts messages which cannot be read or do not belong here."""

    def __init__(
        self,
        opened: Opened[Socket],
        name: str,
        drops: Drops,
        *,
        accepts: Collection[type[Message]],
        peers: Collection[bytes] | None = None,
    ) -> None:
        """`accepts` are the types of messages that may come.

        If the link is bound here, `peers` are the known identities, up to a `/`.
        """
        self.socket = opened.socket
        self.connections = opened.connections
        self.name = name
        self._opened = opened
        self._drops = drops
        self._accepts = frozenset(accepts)
        self._peers = None if peers is None else frozenset(peers)

    def send(self, message: Message, payload: bytes | memoryview | None = None, *, peer: bytes = b"") -> None:
        """Queue a message; `peer` is the receiver if the link is bound here.

        The message is lost if a server has refused this client.

        Raises:
            zmq.ZMQError: the peer is not connected (EHOSTUNREACH).
        """
        frames = encode(message, payload)
        parts = frames if self._peers is None else [peer, *frames]
        with suppress(zmq.Again):  # queues are unbounded, so only a socket without any connection cannot send
            self.socket.send_multipart(parts, zmq.NOBLOCK, copy=False)

    def receive(self, timeout_seconds: float = 0.0) -> Received | None:
        """Return the next message that belongs here, or None if none comes within the timeout."""
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
        """Count a message that was read and turned out to be invalid here."""
        self._drops.drop(self.name, error)

    def close(self, linger_milliseconds: int = LINGER_MILLISECONDS) -> None:
        """Close the socket; queued messages get `linger_milliseconds` to be sent."""
        self._opened.close(linger_milliseconds)


class RouterLinks:
    """The two links of a controller to one router, replaced by new ones each time a connection is lost.

    Messages that were in transit are then lost in either direction, and neither side knows which. So nothing that
    was in progress may continue. The new links have another identity, by which the router recognises that they
    are new. Messages queued on the old links are discarded.
    """

    def __init__(
        self,
        context: Context,
        endpoints: RouterEndpoints,
        replica: str,
        keys: KeyPair,
        server: bytes,
        drops: Drops,
    ) -> None:
        """`server` is the router's public key."""
        self._context = context
        self.endpoints = endpoints
        self._replica = replica
        self._keys = keys
        self._server = server
        self._drops = drops
        self._open()

    def _open(self) -> None:
        identity = self.identity = f"{self._replica}/{secrets.token_hex(8)}".encode()
        """Identity of both links, which changes whenever they are replaced."""

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

        control = opened(self.endpoints.control, CONTROL_FRAME_BYTES)
        tokens = opened(self.endpoints.tokens, TOKENS_FRAME_BYTES)
        accepts = (Submit, Cancel, FetchBundle, RouterUse, WatchProgress, KvAsk, KvTicket, KvDone)
        self.control = Link(control, "router_control", self._drops, accepts=accepts)
        self.tokens = Link(tokens, "router_tokens", self._drops, accepts=(Tokens,))
        self._connected: set[str] = set()
        self._reopen_at: float | None = None

    def open_beats(self, identity: bytes) -> Opened[Socket]:
        """Return a new socket for the heartbeats of the links of this identity; it may be used by another thread."""
        return connect(self._context, self.endpoints.control, identity + BEATS, self._keys, self._server)

    @property
    def connected(self) -> bool:
        """True if both links to the router are connected; until then nothing should be sent."""
        return len(self._connected) == 2

    @property
    def sockets(self) -> tuple[Socket, ...]:
        """Sockets to poll; they are replaced when `poll` finds that the router has gone."""
        links = (self.control, self.tokens)
        return (*(link.socket for link in links), *(link.connections.socket for link in links))

    def poll(self, now: float) -> RouterLinkEvent | None:
        """Process connection events, and return a change if there is one; replace both links if the router has gone."""
        if self._reopen_at is not None and now >= self._reopen_at:
            self._reopen()
        before = self.connected
        for link in (self.control, self.tokens):
            for event in link.connections.take():
                match event:
                    case zmq.Event.HANDSHAKE_SUCCEEDED:
                        self._connected.add(link.name)
                    case zmq.Event.HANDSHAKE_FAILED_AUTH if self._reopen_at is None:
                        self._reopen_at = now + REFUSED_SECONDS  # ZeroMQ itself does not try again
                        return "refused"
                    case zmq.Event.DISCONNECTED if link.name in self._connected:
                        self._reopen()
                        return "gone"
        return "came" if self.connected and not before else None

    def answer(self, answer: Emit | Refused | Failed) -> None:
        """Send an answer if the router is connected; one that has gone gets no late answers."""
        if self.connected:
            self.control.send(answer)

    def _reopen(self) -> None:
        self.close(0)
        self._open()

    def close(self, linger_milliseconds: int = LINGER_MILLISECONDS) -> None:
        for link in (self.control, self.tokens):
            link.close(linger_milliseconds)
