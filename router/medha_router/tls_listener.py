"""Accepts the TLS connections of clients, and counts them from then on.

asyncio's own servers report a connection only after its handshake. So clients that never begin one could take
all files of the process.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

from medha_router.connections import Connection, Connections

log = logging.getLogger("medha.router")

_PAUSE_SECONDS = 0.1
"""Time until the next try when the system has no room for a connection."""


class TlsListener:
    """A server on one listening socket that uvicorn can close; `connect` makes the protocol of a connection."""

    def __init__(
        self,
        listener: socket.socket,
        connections: Connections,
        context: ssl.SSLContext,
        connect: Callable[[], Connection],
    ) -> None:
        """Accept connections from now on, in the running loop."""
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._connections = connections
        self._context = context
        self._connect = connect
        listener.setblocking(False)
        self._handshakes: set[asyncio.Task[None]] = set()
        self._accepting = self._loop.create_task(self._accept())

    def close(self) -> None:
        """Stop accepting, and end the handshakes that are under way."""
        for task in (self._accepting, *self._handshakes):
            task.cancel()

    async def wait_closed(self) -> None:
        await asyncio.gather(self._accepting, *self._handshakes, return_exceptions=True)

    async def _accept(self) -> None:
        while True:
            try:
                accepted, peer = await self._loop.sock_accept(self._listener)
            except OSError as error:
                log.warning("no connection can be accepted now: %s", error)
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            address = peer[0]
            if self._connections.enter(address):
                handshake = self._loop.create_task(self._secure(accepted, address))
                self._handshakes.add(handshake)
                handshake.add_done_callback(self._handshakes.discard)
            else:
                accepted.close()  # there is no way to say why before the handshake

    async def _secure(self, accepted: socket.socket, address: str) -> None:
        connection = self._connect()
        connection.is_counted_for(address)
        try:
            await self._loop.connect_accepted_socket(
                lambda: connection,
                accepted,
                ssl=self._context,
                ssl_handshake_timeout=self._connections.head_seconds,
            )
        except OSError:  # no TLS, too slow, or gone: of no interest to anybody
            pass
        finally:
            connection.leave_unless_open()
