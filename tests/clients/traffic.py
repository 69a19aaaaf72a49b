"""Copies the bytes of connections between a client and a server unchanged, and reads from the copy what was asked."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import h11
import httptools


@dataclass
class Exchange:
    """A request of a client, and the status and text of its answer; 0 if the client left before it."""

    method: str
    path: str
    body: bytes
    headers: dict[str, str]
    status: int = 0
    answer: bytes = b""

    @property
    def fields(self) -> dict[str, Any]:
        """The body's fields."""
        try:
            found = json.loads(self.body)
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}


@dataclass
class _Connection:
    asked: list[bytes] = field(default_factory=list)
    answered: list[bytes] = field(default_factory=list)


class Recorder:
    """A listener in front of a server, as `url`."""

    def __init__(self, target: str) -> None:
        parts = urlsplit(target)
        self._target = (parts.hostname, parts.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._connections: list[_Connection] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def exchanges(self) -> list[Exchange]:
        """Return what was asked so far, connection by connection."""
        return [exchange for connection in self._connections for exchange in _read(connection)]

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            try:
                server = socket.create_connection(self._target)
            except OSError:
                client.close()
                continue
            kept = _Connection()
            self._connections.append(kept)
            threading.Thread(target=_copy, args=(client, server, kept), daemon=True).start()


def _copy(client: socket.socket, server: socket.socket, kept: _Connection) -> None:
    with client, server:
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        asking = threading.Thread(target=_pass_on, args=(client, server, kept.asked), daemon=True)
        asking.start()
        _pass_on(server, client, kept.answered)
        asking.join()


def _pass_on(source: socket.socket, sink: socket.socket, copy: list[bytes]) -> None:
    try:
        while data := source.recv(65536):
            copy.append(data)
            sink.sendall(data)
    except OSError:  # one of the ends is gone
        pass
    for end, how in ((sink, socket.SHUT_WR), (source, socket.SHUT_RD)):
        with suppress(OSError):
            end.shutdown(how)


@contextmanager
def recorded(target: str) -> Iterator[Recorder]:
    recorder = Recorder(target)
    try:
        yield recorder
    finally:
        recorder.close()


class _Requests:
    """The callbacks of httptools' parser: method, URL, headers and body of each request."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str, dict[str, str], bytes]] = []
        self.parser = httptools.HttpRequestParser(self)
        self.on_message_begin()

    def on_message_begin(self) -> None:
        self._url, self._headers, self._body = b"", dict[str, str](), b""

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode().lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        method = self.parser.get_method().decode()
        self.found.append((method, self._url.decode(), self._headers, self._body))


def _read(connection: _Connection) -> Iterator[Exchange]:
    requests = _Requests()
    for chunk in list(connection.asked):
        requests.parser.feed_data(chunk)
    answers = h11.Connection(h11.CLIENT)
    answers.receive_data(b"".join(list(connection.answered)))
    for method, url, headers, body in requests.found:
        exchange = Exchange(method, urlsplit(url).path, body, headers)
        exchange.status, exchange.answer = _next_answer(answers, method)
        yield exchange


def _next_answer(answers: h11.Connection, method: str) -> tuple[int, bytes]:
    """Return status and body of the answer to a request of this method; status 0 if there is none, or not all of it."""
    if answers.our_state is not h11.IDLE:
        return 0, b""
    answers.send(
        h11.Request(method=method, target="/", headers=[("Host", "a")])
    )  # an answer to HEAD has no body
    answers.send(h11.EndOfMessage())
    status, body = 0, b""
    try:
        while not isinstance(event := answers.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                return 0, b""
            if isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
    except h11.RemoteProtocolError:  # the client left before the answer's end
        return 0, b""
    if answers.our_state is h11.DONE and answers.their_state is h11.DONE:
        answers.start_next_cycle()
    return status, body
