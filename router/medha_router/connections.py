"""HTTP connections: bounds on their number, on the time that each may wait, and on the head of a request.

This is uvicorn's protocol with the bounds that it lacks. Bodies have theirs in `medha_router.bodies`: uvicorn
stops reading a connection whose body nobody reads.

A connection has `head_seconds` to send the head (request line and headers) of a request, and uvicorn's
keep-alive timeout closes one that is idle between two requests. Requests are not pipelined: data that arrives
during an answer is dropped, and the connection closes after that answer; the client has to send the request
again (RFC 9112, section 9.3.2). So no client can queue work or memory behind a long generation.

Output that a client does not take waits in the kernel (256 KiB) and in the transport's buffer, up to its
high-water mark (64 KiB) or one answer, and whoever produces more waits, too. A connection is cut if the client
takes none of it for `output_seconds`, or takes it too slowly.

A router that stops ends its connections with their next answers (`Connection: close`). A client may still have
a connection whose last answer did not announce its end. It is served until the router has gone, which is at
least a second after that answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from http import HTTPStatus
from ipaddress import IPv4Network, IPv6Network, ip_address
from math import inf
from typing import Any

import httptools
from pydantic_core import to_json
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from medha_router.api_error import ApiError
from medha_router.bodies import LEAST_BYTES_PER_SECOND

log = logging.getLogger("medha.router")

MAX_HEAD_BYTES = 32 * 2**10
MAX_HEADERS = 100
_FRAMING = (b"content-length", b"transfer-encoding")
"""Headers of a request that has a body."""
_DISCARD_SECONDS = 5.0
"""Seconds for which the rest of a body is still read, and dropped, after its answer: a client that can send the rest also
reads the answer."""


def connection_limit(wanted: int, file_limit: int) -> int:
    """Return how many HTTP connections fit under the limit on open files, besides links, pipes and listeners."""
    return min(wanted, file_limit - min(512, file_limit // 2))


class Connections:
    """The open connections of one router, limited in total and per address.

    One address may hold at most three quarters of them, so that a single client cannot lock out all others. A trusted
    proxy may hold all, because its connections are those of many clients.
    """

    def __init__(
        self,
        limit: int,
        head_seconds: float,
        output_seconds: float,
        count_refused: Callable[[str], None],
        trusted_proxies: Sequence[IPv4Network | IPv6Network] = (),
    ) -> None:
        """Bound the connections.

        `count_refused` is called with the reason for each connection that is closed by its own fault, or because too many
        are open.
        """
        self._trusted_proxies = trusted_proxies
        self.limit = limit
        self.head_seconds = head_seconds
        self.output_seconds = output_seconds
        self.count_refused = count_refused
        self.leaving = False
        """Set once each answer must be the last one of its connection, so that clients turn to other routers."""
        self.draining = False
        """Set once requests of new connections are no longer served."""
        self.kept_at = -inf
        """Time on the loop's clock at which an answer last left its connection open for another request."""
        self._limit_by_address = max(1, limit - limit // 4)
        self._by_address: Counter[str] = Counter()
        self._refused = 0

    @property
    def open(self) -> int:
        return self._by_address.total()

    def enter(self, address: str) -> bool:
        """Count a new connection; return False if there is no room for it."""
        if self.open < self.limit and self._by_address[address] < self._limit_of(address):
            self._by_address[address] += 1
            return True
        self.count_refused("too_many")
        self._refused += 1
        if self._refused & (self._refused - 1) == 0:  # powers of two: nobody can fill the log
            log.warning(
                "refused a connection of %s: %d of %d are open, %d of them its own (%d refused so far)",
                address,
                self.open,
                self.limit,
                self._by_address[address],
                self._refused,
            )
        return False

    def _limit_of(self, address: str) -> int:
        if not self._trusted_proxies or not address:  # a peer that has gone has no address
            return self._limit_by_address
        is_proxy = any(ip_address(address) in network for network in self._trusted_proxies)
        return self.limit if is_proxy else self._limit_by_address

    def leave(self, address: str) -> None:
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]


class _Stop(Exception):
    """Ends parsing; the connection is refused already."""


class Connection(HttpToolsProtocol):
    """A single HTTP connection."""

    def __init__(self, connections: Connections, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._all = connections
        self._address: str | None = None  # address under which it is counted
        self._is_late = connections.draining
        self._is_open = False
        self._deaf = False  # incoming data is dropped
        self._in_body = False
        self._headers = 0
        self._head_bytes = 0
        self._skips_head = False  # the parser is fed with a head of our own
        self._unused_bytes = 0  # bytes since the parser last used some
        self._timer: asyncio.TimerHandle | None = None
        self._output_timer: asyncio.TimerHandle | None = None  # runs while output waits for the client

    @property
    def _answering(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    # Before it is open ----------------------------------------------------------------------------

    def is_counted_for(self, address: str) -> None:
        """Record that its address is counted already; unless it opens, `leave_unless_open` must follow."""
        self._address = address

    def leave_unless_open(self) -> None:
        if not self._is_open and self._address is not None:
            self._all.leave(self._address)
            self._address = None

    # Called by asyncio ----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._is_open = True
        address = self.client[0] if self.client else ""
        if self._address is None and not self._all.enter(address):
            message = "this router has no room for more connections; try again later"
            self._write(ApiError(503, message, code="overloaded", retry_after_seconds=1))
            self._close()
            return
        self._address = address
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()
        self._stop_output_timer()
        if self._address is not None:
            self._all.leave(self._address)
            self._address = None

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        self._unset_keepalive_if_required()
        self._feed(data)

    def _feed(self, data: bytes) -> None:
        self._unused_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._decline_upgrade(data[offer.args[0] :])
            return
        except httptools.HttpParserError as error:
            if not isinstance(error.__context__, _Stop):
                # Only parsing of the target raises in a callback of uvicorn's.
                what = str(error)[:200] if error.__context__ is None else "its target is not a path or URL"
                text = f"this is no HTTP/1 request: {what}"
                self._refuse("malformed", ApiError(400, text, code="invalid_http"))
            return
        if self._unused_bytes > MAX_HEAD_BYTES:
            self._refuse_head(f"is larger than {MAX_HEAD_BYTES} bytes")
        elif self._timer is None and not self._in_body and not self._answering:
            self._expect_head()

    def _decline_upgrade(self, rest: bytes) -> None:
        """Treat a request that offers another protocol, as Java's clients do for HTTP/2, like any other.

        The parser takes `rest`, and all that follows, for the other protocol. It may be a body, so another parser reads it.
        """
        if not self._in_body:
            return
        framing = b"".join(b"%b: %b\r\n" % header for header in self.headers if header[0] in _FRAMING)
        self.parser = httptools.HttpRequestParser(self)
        self._skips_head = True
        self.parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + b"\r\n")
        self._skips_head = False
        if rest:
            self._feed(rest)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_output()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_output_timer()
        if not self._answering:  # nobody writes more, so this is not called again
            self._watch_output()

    # Called by httptools --------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._skips_head:
            return
        if self._answering:
            self._refuse("pipelined", None)
            raise _Stop
        self._headers = self._head_bytes = 0
        if not self.flow.write_paused:  # the next answer adds to what waits, although the client reads
            self._stop_output_timer()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self._skips_head:
            return
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._skips_head:
            return
        self._headers += 1
        if self._headers > MAX_HEADERS:
            self._refuse_head(f"has more than {MAX_HEADERS} headers")
            raise _Stop
        self._count_head(len(name) + len(value) + len(": \r\n"))
        super().on_header(name, value)

    def _count_head(self, more_bytes: int) -> None:
        """Bound a head that arrives in one piece, while the parser reads it: `feed_data` returns only after all of it."""
        self._head_bytes += more_bytes
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse_head(f"is larger than {MAX_HEAD_BYTES} bytes")
            raise _Stop

    def on_headers_complete(self) -> None:
        if self._skips_head:
            return
        super().on_headers_complete()
        self._stop_timer()
        self._in_body = True
        self._unused_bytes = 0

    def on_body(self, body: bytes) -> None:
        self._unused_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade() and any(name in _FRAMING for name, _ in self.headers):
            return  # its body follows: see `_decline_upgrade`
        self._in_body = False
        self._unused_bytes = 0
        self._stop_timer()
        super().on_message_complete()

    # Called by uvicorn ----------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_output()
        if not self.transport.is_closing():
            self._all.kept_at = self.loop.time()
        if self._in_body and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self._timer = self.loop.call_later(_DISCARD_SECONDS, self._close)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if self._all.leaving:
            cycle.keep_alive = False
        cycle.scope["state"]["is_late"] = self._is_late
        is_old = cycle.scope["http_version"] == "1.0"
        super()._start_asgi_task(cycle, _until_closed(cycle, app) if is_old else app)

    # Output that waits ----------------------------------------------------------------------------

    def _watch_output(self) -> None:
        """Cut the connection unless the client reads what waits for it."""
        waiting_bytes = self.transport.get_write_buffer_size()
        if waiting_bytes and self._output_timer is None:
            patience = self._all.output_seconds
            due = self.loop.time() + patience + waiting_bytes / LEAST_BYTES_PER_SECOND
            self._output_timer = self.loop.call_later(patience, self._poll_output, waiting_bytes, due)

    def _poll_output(self, former_bytes: int, due: float) -> None:
        self._output_timer = None
        waiting_bytes = self.transport.get_write_buffer_size()
        if not waiting_bytes:
            return
        if waiting_bytes >= former_bytes or self.loop.time() > due:
            self._all.count_refused("unread")
            self.transport.abort()
            return
        self._output_timer = self.loop.call_later(
            self._all.output_seconds, self._poll_output, waiting_bytes, due
        )

    def _stop_output_timer(self) -> None:
        if self._output_timer is not None:
            self._output_timer.cancel()
            self._output_timer = None

    # Endings --------------------------------------------------------------------------------------

    def _expect_head(self) -> None:
        self._timer = self.loop.call_later(self._all.head_seconds, self._head_is_late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _head_is_late(self) -> None:
        error = None
        if self._unused_bytes:
            text = f"the request's head did not arrive within {self._all.head_seconds:g} s"
            error = ApiError(408, text, code="request_timeout")
        self._refuse("slow", error)

    def _refuse_head(self, what: str) -> None:
        self._refuse("malformed", ApiError(431, f"the head of the request {what}", code="head_too_large"))

    def _refuse(self, reason: str, error: ApiError | None) -> None:
        """Stop reading this connection and close it, after the current answer if there is one."""
        self._all.count_refused(reason)
        if self._answering and not self._in_body:
            self._deaf = True
            self.cycle.keep_alive = False
            return
        # An answer that has begun must stand alone: a second one would be taken for a part of it.
        if error is not None and not (self._in_body and self.cycle.response_started):
            self._write(error)
        self._close()

    def _write(self, error: ApiError) -> None:
        content = to_json(error.body())
        headers = {
            **error.headers(),
            "content-type": "application/json",
            "content-length": str(len(content)),
            "connection": "close",
        }
        lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + content)
        self._watch_output()

    def _close(self) -> None:
        self._deaf = True
        self._stop_timer()
        self._unset_keepalive_if_required()
        if not self.transport.is_closing():
            self.transport.close()


def _until_closed(cycle: RequestResponseCycle, app: Any) -> Any:
    """Return `app` adapted to HTTP/1.0 clients, which do not know chunks: the end of a stream closes the connection."""

    async def run(scope: Any, receive: Any, send: Any) -> None:
        is_stream = False

        async def send_plain(message: Any) -> None:
            nonlocal is_stream
            if message["type"] == "http.response.start":
                is_stream = all(name.lower() != b"content-length" for name, _ in message["headers"])
                if is_stream:
                    cycle.chunked_encoding = False
            elif is_stream:
                cycle.expected_content_length = len(message.get("body", b""))  # what uvicorn takes at once
            await send(message)

        await app(scope, receive, send_plain)

    return run
