"""The controller's HTTP pages `/metrics`, `/status` and `/trace`. They only read; nothing is decided here.

    GET /metrics                                for Prometheus
    GET /status?order=urgency&requests=50       `medha.scheduler.status_report.ReplicaStatus` as JSON: for `medha top`
    GET /trace?seconds=5                        Trace Event JSON, streamed: for `medha trace`

`/metrics` is served to everyone who can reach the port. The other two contain request names, so they are
served to this machine only (in Kubernetes: through `kubectl port-forward`). The controller's own loop answers
them between two messages, so that no other thread reads the state that it changes.
"""

from __future__ import annotations

import ipaddress
import json
import socket
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TookTooLong
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, get_args
from urllib.parse import parse_qs

from prometheus_client import CollectorRegistry, make_wsgi_app

from medha.errors import ConfigInvalid
from medha.scheduler.status_report import MOST_REQUESTS, Order
from medha_links.bounded_http import BoundedWsgiServer
from medha_process.part_settings import in_url

ANSWER_SECONDS = 2.0
"""Time limit for an answer of the controller's loop, which checks for questions between two messages."""
MOST_TRACE_SECONDS = 600.0

StartResponse = Callable[[str, list[tuple[str, str]]], Any]


@dataclass(frozen=True, slots=True)
class StatusQuery:
    """A question that is answered with a `ReplicaStatus` as JSON."""

    order: Order
    most_requests: int
    answer: Future[bytes] = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class TraceQuery:
    """A question that is answered with the pieces of a trace as they come.

    The answer is None while another trace is taken, and before the first epoch.
    """

    seconds: float
    answer: Future[Iterator[bytes] | None] = field(default_factory=Future)


Question = StatusQuery | TraceQuery


class Questions:
    """A queue of questions from the HTTP threads to the controller's loop, which polls `fileno`."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[Question] = SimpleQueue()
        self._ring, self._bell = socket.socketpair()
        self._bell.setblocking(False)

    def fileno(self) -> int:
        """Return a file descriptor that is readable when a question waits."""
        return self._bell.fileno()

    def ask(self, question: Question) -> None:
        self._waiting.put(question)
        self._ring.send(b"?")

    def take(self) -> Iterator[Question]:
        """Yield all questions that wait."""
        try:
            self._bell.recv(4096)
        except BlockingIOError:
            return
        while True:
            try:
                yield self._waiting.get_nowait()
            except Empty:
                return

    def close(self) -> None:
        self._ring.close()
        self._bell.close()


class _Refusal(Exception):
    """An HTTP error answer."""

    def __init__(self, status: str, text: str) -> None:
        super().__init__(text)
        self.status = status


class Telemetry:
    """The three pages as one WSGI application."""

    def __init__(self, registry: CollectorRegistry, questions: Questions) -> None:
        self._metrics = make_wsgi_app(registry)
        self._questions = questions

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        try:
            if environ.get("REQUEST_METHOD") not in ("GET", "HEAD"):
                raise _Refusal("405 Method Not Allowed", "only GET is answered here")
            if path == "/status":
                return self._status(environ, start_response)
            if path == "/trace":
                return self._trace(environ, start_response)
            if path in ("/", "/metrics"):
                pages: Iterable[bytes] = self._metrics(environ, start_response)
                return pages
            raise _Refusal("404 Not Found", f"{path[:80]!r} is not here: /metrics, /status, /trace")
        except _Refusal as refusal:
            body = json.dumps({"error": str(refusal)}).encode()
            start_response(refusal.status, [("Content-Type", "application/json")])
            return [body]

    def _status(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        _require_this_machine(environ)
        query = parse_qs(environ.get("QUERY_STRING", ""))
        order = query.get("order", ["urgency"])[-1]
        if order not in get_args(Order):
            raise _Refusal("400 Bad Request", f"order is {order[:40]!r}: one of {', '.join(get_args(Order))}")
        most = _number(query, "requests", 50, 0, MOST_REQUESTS)
        body: bytes = self._answer(StatusQuery(order, int(most)))
        start_response("200 OK", [("Content-Type", "application/json"), ("Cache-Control", "no-store")])
        return [body]

    def _trace(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        _require_this_machine(environ)
        query = parse_qs(environ.get("QUERY_STRING", ""))
        seconds = _number(query, "seconds", 5.0, 0.0, MOST_TRACE_SECONDS)
        pieces: Iterator[bytes] | None = self._answer(TraceQuery(seconds))
        if pieces is None:
            raise _Refusal("409 Conflict", "another trace is being taken; wait until it ends")
        start_response("200 OK", [("Content-Type", "application/json"), ("Cache-Control", "no-store")])
        return pieces

    def _answer(self, question: Any) -> Any:
        try:
            self._questions.ask(question)
            return question.answer.result(ANSWER_SECONDS)
        except (TookTooLong, OSError) as error:
            raise _Refusal(
                "503 Service Unavailable", f"the controller did not answer in {ANSWER_SECONDS:g} s"
            ) from error


def _require_this_machine(environ: dict[str, Any]) -> None:
    address = ipaddress.ip_address(environ.get("REMOTE_ADDR", "0.0.0.0").partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    if not (mapped or address).is_loopback:
        raise _Refusal(
            "403 Forbidden", "only this machine is answered here; in Kubernetes use kubectl port-forward"
        )


def _number(query: dict[str, list[str]], name: str, default: float, least: float, most: float) -> float:
    given = query.get(name, [str(default)])[-1]
    try:
        value = float(given)
    except ValueError:
        value = float("nan")
    if not least <= value <= most:
        raise _Refusal("400 Bad Request", f"{name} is {given[:40]!r}: give {least:g} to {most:g}")
    return value


def serve(registry: CollectorRegistry, questions: Questions, host: str, port: int) -> str:
    """Start a server with its own threads, and return the URL of the metrics. Port 0 takes any free port.

    Raises:
        ConfigInvalid: the server cannot listen there.
    """
    try:
        server = BoundedWsgiServer(host, port, Telemetry(registry, questions))
    except OSError as error:
        raise ConfigInvalid(
            f"spec.metrics: cannot listen on {host} port {port}: {error.strerror}; set spec.metrics.port to 0"
        ) from error
    server.start("telemetry")
    return f"http://{in_url(host)}:{server.server_port}/metrics"
