"""Encrypted sockets (CURVE, ZeroMQ RFC 26), the choice of peers that may connect to them, and plain sockets for encrypted bytes.

A link is a bound ROUTER and the DEALERs that connect to it. Its queues are unlimited: dropping a message
would fork replicated state, and the open requests bound what waits. The size of a frame is limited: a larger
one ends its sender's connection. With heartbeats, a peer that answers none for a while counts as
disconnected; ZeroMQ's own thread answers, however busy the process is. Messages in flight are then lost, so
only links whose ends can handle that have heartbeats.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from typing import Any, Generic, TypeVar

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from medha_links.key_files import KeyPair

LINGER_MILLISECONDS = 2000  # lets a last message (RankFault, Refused) be delivered when its sender exits
HEARTBEAT_MILLISECONDS = 1000
SILENCE_MILLISECONDS = 4000  # without an answer to a heartbeat
CONNECT_MILLISECONDS = 2000  # over TCP, before another attempt
RECONNECT_MILLISECONDS = 100

CONTROL_FRAME_BYTES = 64 * 2**20  # the largest control message is a step with everything it names
TOKENS_FRAME_BYTES = 8 * 2**20  # ids come in pieces of 1 MiB

_UNREAD_FRAME_BYTES = 4096  # for sockets that only send

_DOMAIN = "medha"
_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,  # plaintext, or another key than this server's
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,  # a key that is not admitted
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,  # closed during the handshake
)
_WATCHED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _FAILED[0] | _FAILED[1] | _FAILED[2]
_monitors = count()  # for names of inproc endpoints

_Socket = TypeVar("_Socket", bound=zmq.Socket[Any])


class Connections:
    """The events of one socket's connections, as its ZeroMQ thread reports them."""

    def __init__(self, watched: zmq.Socket[Any]) -> None:
        endpoint = f"inproc://medha.monitor.{next(_monitors)}"
        watched.monitor(endpoint, _WATCHED)
        self.socket: zmq.Socket[bytes] = watched.context.socket(zmq.PAIR, socket_class=zmq.Socket)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)  # else ZeroMQ's thread would wait for a slow reader
        self.socket.connect(endpoint)

    def take(self) -> list[zmq.Event]:
        """Return the events since the last call, in order."""
        return [event for event, _ in self._take()]

    def refused(self) -> int:
        """Return the number of peers that were refused since the last call."""
        return self.refused_and_ended()[0]

    def refused_and_ended(self) -> tuple[int, set[int]]:
        """Return the number of refused peers, and the ended connections (see `connection_of`), since the last call."""
        happened = self._take()
        ended = {value for event, value in happened if event == zmq.EVENT_DISCONNECTED}
        return sum(event in _FAILED for event, _ in happened), ended

    def _take(self) -> list[tuple[zmq.Event, int]]:
        happened = []
        while self.socket.poll(0):
            message = recv_monitor_message(self.socket)
            happened.append((zmq.Event(message["event"]), int(message["value"])))
        return happened

    def close(self) -> None:
        self.socket.close()


def connection_of(frame: zmq.Frame) -> int:
    """Return the connection of a frame: its descriptor, which may be reused once the connection has ended.

    libzmq calls this option deprecated, but outside its drafts nothing else identifies a connection.
    """
    return int(frame.get(zmq.SRCFD))


@dataclass(frozen=True, slots=True)
class Opened(Generic[_Socket]):
    """A socket, and the events of its connections."""

    socket: _Socket
    connections: Connections

    def close(self, linger_milliseconds: int = LINGER_MILLISECONDS) -> None:
        if self.socket.closed:
            return
        # Closing the socket raises events too. Without a listener ZeroMQ's thread would wait for one for
        # ever, and with it every other connection of this process.
        self.socket.monitor(None, 0)
        self.connections.close()
        self.socket.close(linger_milliseconds)


def bind(
    context: zmq.Context[_Socket],
    endpoint: str,
    keys: KeyPair,
    *,
    largest_frame_bytes: int = CONTROL_FRAME_BYTES,
    heartbeats: bool = True,
    admits_all: bool = False,
) -> Opened[_Socket]:
    """Return a socket for peers that an `Authenticator` of this context admits; without one, nobody can connect.

    `admits_all`: for all who know its public key. Each message must then prove that its sender may send it.
    """
    opened = _open(context, zmq.ROUTER, largest_frame_bytes, heartbeats=heartbeats)
    socket = opened.socket
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an unknown peer is an error, not a silent drop
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a restarted peer takes over the identity of its predecessor
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    if not admits_all:
        socket.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    socket.bind(endpoint)
    return opened


def connect(
    context: zmq.Context[_Socket],
    endpoint: str,
    identity: bytes,
    keys: KeyPair,
    server: bytes,
    *,
    largest_frame_bytes: int = CONTROL_FRAME_BYTES,
    heartbeats: bool = True,
    reconnect_milliseconds: int = RECONNECT_MILLISECONDS,
) -> Opened[_Socket]:
    """Return a socket that connects as `identity`, and only to the holder of the secret key of `server`."""
    opened = _open(context, zmq.DEALER, largest_frame_bytes, heartbeats=heartbeats)
    socket = opened.socket
    socket.setsockopt(zmq.IDENTITY, identity)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt(zmq.CURVE_SERVERKEY, server)
    socket.setsockopt(zmq.RECONNECT_IVL, reconnect_milliseconds)
    return _connected(opened, endpoint)


def bind_plain(context: zmq.Context[_Socket], endpoint: str) -> Opened[_Socket]:
    """Return a socket without encryption that only sends, and only bytes which are encrypted already.

    Whoever has connected keeps its identity: nobody else takes it over.
    """
    opened = _open(context, zmq.ROUTER, _UNREAD_FRAME_BYTES, heartbeats=True)
    opened.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    opened.socket.setsockopt(zmq.RCVHWM, 1)  # nobody reads what arrives
    opened.socket.bind(endpoint)
    return opened


def connect_plain(
    context: zmq.Context[_Socket], endpoint: str, identity: bytes, *, largest_frame_bytes: int
) -> Opened[_Socket]:
    """Return a socket without encryption that only takes bytes, each of which must prove where it comes from."""
    opened = _open(context, zmq.DEALER, largest_frame_bytes, heartbeats=True)
    opened.socket.setsockopt(zmq.IDENTITY, identity)
    opened.socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MILLISECONDS)
    return _connected(opened, endpoint)


def crosses_network(endpoint: str) -> bool:
    """Return whether a connection can break while both of its processes live on."""
    return endpoint.startswith("tcp:")


def _open(
    context: zmq.Context[_Socket], kind: int, largest_frame_bytes: int, *, heartbeats: bool
) -> Opened[_Socket]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, LINGER_MILLISECONDS)
    socket.setsockopt(zmq.MAXMSGSIZE, largest_frame_bytes)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MILLISECONDS)
    if heartbeats:
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MILLISECONDS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MILLISECONDS)
    return Opened(socket, Connections(socket))


def _connected(opened: Opened[_Socket], endpoint: str) -> Opened[_Socket]:
    """Return a socket that connects; close it if this is no endpoint, since an open one would keep its context from ending."""
    try:
        opened.socket.connect(endpoint)
    except zmq.ZMQError:
        opened.close(0)
        raise
    return opened


class Authenticator:
    """Decides which peers may connect to a context's bound sockets (ZAP, ZeroMQ RFC 27), in its own thread.

    Make it before the first socket is bound. Public keys are not secret, so a plain lookup suffices.
    """

    def __init__(self, context: zmq.Context[Any], admitted: Iterable[bytes]) -> None:
        """Start the authenticator's thread; `admitted` are public keys in Z85."""
        self._admitted = frozenset(admitted)
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.configure_curve_callback(_DOMAIN, self)
        self._authenticator.start()

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a key is admitted; name and arguments are those that pyzmq's authenticator calls."""
        return domain == _DOMAIN and key in self._admitted

    def close(self) -> None:
        """Stop; call it once all sockets of the context are closed, and before the context ends."""
        self._authenticator.stop()
