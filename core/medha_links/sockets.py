"""Encrypted sockets (CURVE, ZeroMQ RFC 26), and who may connect to them.

A link is a ROUTER that is bound and the DEALERs that connect to it. None limits its queue: dropping a message would
fork replicated state, and what waits is bounded by the open requests. Each limits the size of a frame: a larger one
ends its sender's connection. With heartbeats, who answers none for a while (from ZeroMQ's own thread, however busy the
process is) counts as disconnected. What was on its way is lost then, so that only links have them whose ends know what
to do about it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from typing import Any, Generic, TypeVar

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from medha_links.keys import KeyPair

LINGER_MILLISECONDS = 2000  # a last message (RankFault, Refused) is still delivered when its sender exits
HEARTBEAT_MILLISECONDS = 1000
SILENCE_MILLISECONDS = 4000  # without an answer to a heartbeat
CONNECT_MILLISECONDS = 2000  # over TCP, until another attempt begins
RECONNECT_MILLISECONDS = 100

CONTROL_FRAME_BYTES = 64 * 2**20  # the largest control message is a step with all that it names
TOKENS_FRAME_BYTES = 8 * 2**20  # ids come in pieces of 1 MiB

_DOMAIN = "medha"
_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,  # plaintext, or another key than this server's
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,  # a key that is not admitted
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,  # gone in the middle of it
)
_WATCHED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _FAILED[0] | _FAILED[1] | _FAILED[2]
_monitors = count()  # for names of inproc endpoints

_Socket = TypeVar("_Socket", bound=zmq.Socket[Any])


class Connections:
    """What happens to the connections of one socket, as its ZeroMQ thread reports it."""

    def __init__(self, watched: zmq.Socket[Any]) -> None:
        endpoint = f"inproc://medha.monitor.{next(_monitors)}"
        watched.monitor(endpoint, _WATCHED)
        self.socket: zmq.Socket[bytes] = watched.context.socket(zmq.PAIR, socket_class=zmq.Socket)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)  # ZeroMQ's thread would wait for whoever is slow to look
        self.socket.connect(endpoint)

    def take(self) -> list[zmq.Event]:
        """What has happened since the last call, in order."""
        return [event for event, _ in self._take()]

    def refused(self) -> int:
        """Peers that did not get in since the last call."""
        return self.refused_and_ended()[0]

    def refused_and_ended(self) -> tuple[int, set[int]]:
        """Since the last call: how many peers did not get in, and which connections ended (see `connection_of`)."""
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
    """By which connection a frame came: its descriptor, which is another one's once it has ended.

    libzmq calls this option deprecated, and has nothing else that names a connection outside of its drafts.
    """
    return int(frame.get(zmq.SRCFD))


@dataclass(frozen=True, slots=True)
class Opened(Generic[_Socket]):
    """A socket, and what happens to its connections."""

    socket: _Socket
    connections: Connections

    def close(self, linger_milliseconds: int = LINGER_MILLISECONDS) -> None:
        if self.socket.closed:
            return
        # What happens while the socket closes is told, too: to nobody, ZeroMQ's thread would wait for a listener for ever,
        # and with it every other connection of this process.
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
) -> Opened[_Socket]:
    """A socket that peers connect to, if a `Doorkeeper` of this context admits them; without one nobody comes in."""
    opened = _open(context, zmq.ROUTER, largest_frame_bytes, heartbeats=heartbeats)
    socket = opened.socket
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an unknown peer is an error, not a silent drop
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a restarted peer takes its identity over from its former self
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
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
    """A socket that connects under `identity` to who holds the secret of the public key `server`, and to nobody else."""
    opened = _open(context, zmq.DEALER, largest_frame_bytes, heartbeats=heartbeats)
    socket = opened.socket
    socket.setsockopt(zmq.IDENTITY, identity)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt(zmq.CURVE_SERVERKEY, server)
    socket.setsockopt(zmq.RECONNECT_IVL, reconnect_milliseconds)
    socket.connect(endpoint)
    return opened


def crosses_network(endpoint: str) -> bool:
    """Whether a connection can break although both of its processes live on."""
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


class Doorkeeper:
    """Says who may connect to the bound sockets of a context (ZAP, ZeroMQ RFC 27), from a thread of its own.

    Make it before the first socket is bound. Public keys are no secrets, so that it looks them up plainly.
    """

    def __init__(self, context: zmq.Context[Any], admitted: Iterable[bytes]) -> None:
        """`admitted` are public keys in Z85."""
        self._admitted = frozenset(admitted)
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.configure_curve_callback(_DOMAIN, self)
        self._authenticator.start()

    def callback(self, domain: str, key: bytes) -> bool:
        """The authenticator's question; its name and arguments are that one's."""
        return domain == _DOMAIN and key in self._admitted

    def close(self) -> None:
        """Once all sockets of the context are closed, and before it ends."""
        self._authenticator.stop()
