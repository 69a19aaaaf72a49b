"""HTTP servers for metrics and health: so many connections and threads at most, none of them idle for long.

The standard library's servers take a thread for each connection and wait for its request for ever. Here a connection
has a few seconds to send its request and must go on reading the answer; where too many are open, the one that has sent
nothing for longest makes room. So whoever asks quickly is answered, however many others only connect.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import BufferedIOBase
from socketserver import ThreadingMixIn
from threading import Lock, Thread
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

MOST_CONNECTIONS = 32
REQUEST_SECONDS = 5.0  # for a request to be there whole; it is one line and some headers
STALL_SECONDS = 10.0  # in which a client that is sent something has to take a part of it

Application = Callable[..., Any]
"""As in PEP 3333."""


class BoundedServer(ThreadingMixIn, HTTPServer):
    """An HTTP server with at most MOST_CONNECTIONS connections, each of them in a thread of its own."""

    daemon_threads = True
    request_queue_size = 2 * MOST_CONNECTIONS

    def __init__(self, host: str, port: int, handler: type[BoundedHandler]) -> None:
        """
        Raises:
            OSError: nothing can listen there.
        """
        self._lock = Lock()
        # Until when the request has to be there; the oldest first.
        self._reading: dict[socket.socket, float] = {}
        self._answering: set[socket.socket] = set()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), handler)

    def start(self, name: str) -> None:
        """Serve from a daemon thread until `shutdown`."""
        Thread(target=self.serve_forever, name=name, daemon=True).start()

    def has_asked(self, connection: socket.socket) -> None:
        """Called by the handler: the request is there."""
        with self._lock:
            if self._reading.pop(connection, None) is not None:
                self._answering.add(connection)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._reading) + len(self._answering) >= MOST_CONNECTIONS:
                if not self._reading:
                    self.close_request(request)
                    return
                self._break(next(iter(self._reading)))
            self._reading[request] = time.monotonic() + REQUEST_SECONDS
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Called twice a second by `serve_forever`: end the connections that are late."""
        now = time.monotonic()
        with self._lock:
            for connection in [one for one, until in self._reading.items() if now > until]:
                self._break(connection)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._reading.pop(request, None)
            self._answering.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that go away or are late."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def _break(self, connection: socket.socket) -> None:
        """Let the connection's thread read an end; it closes the connection."""
        del self._reading[connection]
        with suppress(OSError):  # it has gone by itself
            connection.shutdown(socket.SHUT_RDWR)


class BoundedHandler(BaseHTTPRequestHandler):
    """One request of one connection."""

    timeout = STALL_SECONDS
    server: BoundedServer

    def setup(self) -> None:
        super().setup()
        self.wfile = _Writer(self.connection)

    def parse_request(self) -> bool:
        is_whole = super().parse_request()
        self.server.has_asked(self.connection)
        return is_whole

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the base class's)
        """Say nothing: scrapes and probes come every few seconds."""


class BoundedWsgiServer(BoundedServer, WSGIServer):
    """The same for a WSGI application."""

    def __init__(self, host: str, port: int, application: Application) -> None:
        super().__init__(host, port, _WsgiHandler)
        self.set_app(application)


class _WsgiHandler(BoundedHandler, WSGIRequestHandler):
    server: BoundedWsgiServer


class _Writer(BufferedIOBase):
    """Sends to a client; one that takes nothing any more counts as gone, which wsgiref does not report as our error."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        try:
            self._connection.sendall(data)
        except TimeoutError as error:
            raise BrokenPipeError from error
        return len(data)
