"""ZeroMQ sockets of the worker's processes, made and read in one place.

Each pair of processes is joined by two links, so that a 40 MB prompt never blocks a step: `control` carries
small messages, `tokens` carries token ids. A link is a ROUTER that is bound and a DEALER that connects under an
identity, both without a limit on queued messages: dropping one would fork the replicated state.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import zmq

from medha.errors import WireInvalid
from medha.messages import Message
from medha.wire import decode, encode

LARGEST_FRAME_BYTES = 256 * 2**20  # a bundle's tokenizer.json is the largest frame there is
LINGER_MILLISECONDS = 2000  # a last message (RankFault, Refused) is still delivered when its sender exits

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Received:
    """One message; `peer` is the sender's identity where the link is bound here, else empty."""

    peer: bytes
    message: Message
    payload: memoryview | None


def rank_identity(rank: int) -> bytes:
    return b"rank-%d" % rank


class Link:
    """One socket that speaks `medha.wire`; messages that cannot be decoded are dropped and counted."""

    def __init__(self, socket: zmq.Socket[bytes], *, bound: bool) -> None:
        self.socket = socket
        self.malformed = 0
        self._bound = bound

    @classmethod
    def bind(cls, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> Link:
        """A link that many peers connect to."""
        socket = _socket(context, zmq.ROUTER)
        _beat(socket, endpoint)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an unknown peer is an error, not a silent drop
        socket.setsockopt(
            zmq.ROUTER_HANDOVER, 1
        )  # a restarted peer takes its identity over from its former self
        socket.bind(endpoint)
        return cls(socket, bound=True)

    @classmethod
    def connect(
        cls, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, identity: bytes, *, beats: bool = False
    ) -> Link:
        """A link to one peer, under `identity`; `beats` says that it may connect anew and lose messages."""
        socket = _socket(context, zmq.DEALER)
        if beats:
            _beat(socket, endpoint)
        socket.setsockopt(zmq.IDENTITY, identity)
        socket.connect(endpoint)
        return cls(socket, bound=False)

    def send(self, message: Message, payload: bytes | memoryview | None = None, *, peer: bytes = b"") -> None:
        """Queue a message; `peer` says for whom where the link is bound here.

        Raises:
            zmq.ZMQError: the peer is not connected (EHOSTUNREACH).
        """
        frames = encode(message, payload)
        self.socket.send_multipart([peer, *frames] if self._bound else frames, copy=False)

    def receive(self, timeout_seconds: float = 0.0) -> Received | None:
        """The next well-formed message, or None when none comes within the time-out."""
        while self.socket.poll(round(timeout_seconds * 1000)):
            frames = [frame.buffer for frame in self.socket.recv_multipart(copy=False)]
            peer = bytes(frames.pop(0)) if self._bound else b""
            try:
                message, payload = decode(frames)
            except WireInvalid as error:
                self.malformed += 1
                _log.warning("dropped a malformed message (%d so far): %s", self.malformed, error)
                continue
            return Received(peer, message, payload)
        return None

    def close(self) -> None:
        self.socket.close()


def _beat(socket: zmq.Socket[bytes], endpoint: str) -> None:
    """Let ZeroMQ's own threads notice a peer that a network has cut off, and connect anew as soon as it is back.

    What was under way is lost then, which only those links may do whose peers count their messages: those of ranks. A
    socket of this machine breaks by nothing but the end of a process, so there it could only do harm.
    """
    if endpoint.startswith("tcp:"):
        socket.setsockopt(zmq.HEARTBEAT_IVL, 1000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 4000)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, 2000)


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, LINGER_MILLISECONDS)
    socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_FRAME_BYTES)
    return socket
