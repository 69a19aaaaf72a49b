"""A collector of traces for tests: an OTLP receiver (HTTP, protobuf) that keeps the spans that it gets."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

WAIT_SECONDS = 60


@dataclass(frozen=True)
class Received:
    """A span as it was received; times are in seconds since 1970."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    kind: int
    start: float
    end: float
    attributes: dict[str, Any]
    events: tuple[tuple[str, float, dict[str, Any]], ...]
    is_error: bool
    service: str
    trace_state: str

    def holds(self, other: Received, slack_seconds: float = 0.0) -> bool:
        """Return whether `other` lies within this span's time; clocks of two processes differ by the slack."""
        return self.start - slack_seconds <= other.start and other.end <= self.end + slack_seconds


@dataclass
class Collector:
    port: int
    spans: list[Received] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    close: Callable[[], None] = lambda: None
    """Stop listening, and take nothing more."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def named(self, name: str) -> list[Received]:
        return sorted((span for span in self.spans if span.name == name), key=lambda span: span.start)

    def children(self, parent: Received) -> list[Received]:
        found = [span for span in self.spans if span.parent_id == parent.span_id]
        return sorted(found, key=lambda span: (span.start, span.end))

    def wait(self, is_there: Callable[[], object], what: str) -> None:
        end = time.monotonic() + WAIT_SECONDS
        while not is_there():
            assert time.monotonic() < end, f"{what}; spans: {[span.name for span in self.spans]}"
            time.sleep(0.05)


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind) if kind else None


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _spans(request: ExportTraceServiceRequest) -> Iterator[Received]:
    for resource in request.resource_spans:
        service = _attributes(resource.resource.attributes)["service.name"]
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Received(
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.name,
                    span.kind,
                    span.start_time_unix_nano / 1e9,
                    span.end_time_unix_nano / 1e9,
                    _attributes(span.attributes),
                    tuple(
                        (event.name, event.time_unix_nano / 1e9, _attributes(event.attributes))
                        for event in span.events
                    ),
                    span.status.code == 2,
                    service,
                    span.trace_state,
                )


@contextmanager
def collecting(port: int = 0) -> Iterator[Collector]:
    """Run a collector on a port of the loopback."""
    found = Collector(port)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            found.bodies.append(body)
            found.headers.append({name.lower(): value for name, value in self.headers.items()})
            found.paths.append(self.path)
            found.spans.extend(_spans(ExportTraceServiceRequest.FromString(body)))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    found.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    found.close = close
    try:
        yield found
    finally:
        close()
