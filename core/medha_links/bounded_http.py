"""HTTP servers for metrics and health, with bounds on connections, threads and idle time.

The standard library's servers use a thread per connection and wait for its request for ever. Here a
connection has a few seconds to send its request and must keep reading the answer. If too many are open, the
one that has sent nothing for longest is closed. A client that sends its request quickly is therefore
answered, however many others only connect.
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
REQUEST_SECONDS = 5.0  # time for a request to arrive; it is one line and some headers
STALL_SECONDS = 10.0  # a client must accept some of its answer within this time

Application = Callable[..., Any]
"""A WSGI application (PEP 3333)."""


class BoundedServer(ThreadingMixIn, HTTPServer):
    """An HTTP server with at most MOST_CONNECTIONS connections, each in its own thread."""

    daemon_threads = True
    request_queue_size = 2 * MOST_CONNECTIONS

    def __init__(self, host: str, port: int, handler: type[BoundedHandler]) -> None:
        """Bind to the address.

        Raises:
            OSError: the address cannot be bound.
        """
        self._lock = Lock()
        # Deadline of each connection's request; oldest first.
        self._reading: dict[socket.socket, float] = {}
        self._answering: set[socket.socket] = set()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), handler)

    def start(self, name: str) -> None:
        """Serve from a daemon thread until `shutdown`."""
        Thread(target=self.serve_forever, name=name, daemon=True).start()

    def has_asked(self, connection: socket.socket) -> None:
        """Record that the request has arrived; called by the handler."""
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
        """Close the connections that are late; called twice a second by `serve_forever`."""
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
        """Report errors, except those of clients that have gone or are late."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def _break(self, connection: socket.socket) -> None:
        """Shut a connection down, so that its thread reads the end and closes it."""
        del self._reading[connection]
        with suppress(OSError):  # it has already gone
            connection.shutdown(socket.SHUT_RDWR)


class BoundedHandler(BaseHTTPRequestHandler):
    """Handles the single request of a connection."""

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
        """Log nothing: scrapes and probes come every few seconds."""


class BoundedWsgiServer(BoundedServer, WSGIServer):
    """The same for a WSGI application."""

    def __init__(self, host: str, port: int, application: Application) -> None:
        super().__init__(host, port, _WsgiHandler)
        self.set_app(application)


class _WsgiHandler(BoundedHandler, WSGIRequestHandler):
    server: BoundedWsgiServer


class _Writer(BufferedIOBase):
    """Sends to a client. One that accepts nothing counts as gone, which wsgiref does not report as an error."""

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
