"""Heartbeats of a controller to its routers, sent by a thread of their own.

No step, long prompt or slow link delays them, because the thread does nothing else and has connections of its own.
They stop if the main loop does not run for STALLED_SECONDS, so that the routers move the streams elsewhere.

An unexpected error ends the thread, and then the controller, which its supervisor restarts. A replica without heartbeats
would seem to serve, but lose all streams at each step that is longer than its routers wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from threading import Event, Thread

import zmq

from medha.errors import PartFailed
from medha.wire.frames import encode
from medha.wire.messages import HEARTBEAT_SECONDS, Heartbeat
from medha_links.sockets import Opened
from medha_worker.link import Socket

OpenBeats = Callable[[bytes], Opened[Socket]]
"""Returns the socket for the heartbeats of the control link of this identity."""

STALLED_SECONDS = 5.0
"""Longest time without a turn of the main loop in which heartbeats are sent; the longest turn is far shorter."""


def is_driven(now: float, turned_at: float) -> bool:
    """Return whether the main loop, whose last turn began at `turned_at`, drives the replica."""
    return now - turned_at <= STALLED_SECONDS


class RouterHeartbeats:
    """A thread that sends a `Heartbeat` every HEARTBEAT_SECONDS, for as long as the main loop runs."""

    def __init__(self) -> None:
        # The main loop's last turn: when, and how to open the socket for each control link's identity.
        self._turn: tuple[float, Mapping[bytes, OpenBeats]] | None = None
        self._error: Exception | None = None
        self._ended = Event()
        self._thread = Thread(target=self._run, daemon=True, name="router heartbeats")
        self._thread.start()

    def allow(self, links: Mapping[bytes, OpenBeats]) -> None:
        """Record that the main loop runs, with control links of these identities.

        Raises:
            PartFailed: the thread has ended by an error.
        """
        if self._error is not None:
            raise PartFailed(
                "the thread that sends heartbeats to routers has ended, so they would take this replica for lost: "
                f"{self._error!r}"
            ) from self._error
        self._turn = time.monotonic(), links

    def close(self) -> None:
        """Stop sending, and close the connections."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        opened: dict[bytes, Opened[Socket]] = {}
        try:
            self._send(opened)
        except Exception as error:  # noqa: BLE001 - the main loop raises it
            self._error = error
        finally:
            for beats in opened.values():
                beats.close(0)

    def _send(self, opened: dict[bytes, Opened[Socket]]) -> None:
        """Send heartbeats until `close`; `opened` keeps the sockets, by the identity of their control link."""
        frames = encode(Heartbeat())
        while not self._ended.wait(HEARTBEAT_SECONDS):
            turn = self._turn
            if turn is None or not is_driven(time.monotonic(), turn[0]):
                continue
            links = turn[1]
            for identity in opened.keys() - links.keys():
                opened.pop(identity).close(0)
            for identity, open_socket in links.items():
                if identity not in opened:
                    opened[identity] = open_socket(identity)
                beats = opened[identity]
                beats.connections.take()  # unread events would pile up
                with suppress(zmq.Again):  # there is no connection
                    beats.socket.send_multipart(frames, zmq.NOBLOCK)
