"""Makes spans with OpenTelemetry's SDK, and exports them by OTLP (HTTP, protobuf) from a thread of its own.

Whoever makes a span never waits for a collector: ended spans go to a bounded queue, and when it is full, the oldest are lost. A
collector that cannot be reached is reported once, and once more when it is back.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from threading import Lock, Thread
from typing import Literal
from urllib.parse import urlsplit, urlunsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import (
    Span,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    get_current_span,
    set_span_in_context,
    use_span,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from medha_traces import attribute_names as names
from medha_traces.sequence_spans import LONGEST_TRACE, SpanFacts, Value
from medha_traces.switch import Destination

FLUSH_SECONDS = 2.0
"""Longest time for which the end of a process waits for its last spans to be taken."""

_QUEUED_SPANS = 2048
"""Spans that wait to be exported, unless `OTEL_BSP_MAX_QUEUE_SIZE` says otherwise; OpenTelemetry's own default."""

CountLost = Callable[[str, int], None]
"""Counts spans that are lost, by a reason of `LOST_SPANS`; it is called from any thread."""

Kind = Literal["internal", "server", "client"]
_KINDS = {"internal": SpanKind.INTERNAL, "server": SpanKind.SERVER, "client": SpanKind.CLIENT}
_PROPAGATOR = TraceContextTextMapPropagator()

_TOO_LOUD = (
    "opentelemetry.exporter",  # logs each failure, and so does the next; `_Report` logs the first one
    "opentelemetry.sdk._shared_internal",
    "opentelemetry.trace",  # quotes each `tracestate` of clients that is not valid
)
"""Loggers that are silenced."""

_log = logging.getLogger("medha.traces")


class LiveSpan:
    """A span that has begun. Once it has ended, nothing changes it any more."""

    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span

    @property
    def is_recorded(self) -> bool:
        """False if its trace was not chosen to be kept."""
        return self._span.is_recording()

    @property
    def trace_id(self) -> str:
        return f"{self._span.get_span_context().trace_id:032x}"

    @property
    def trace(self) -> str:
        """The trace context for another process: W3C `traceparent`, a space and `tracestate`; empty if it is not recorded.

        A client's `tracestate` that is too long is left out.
        """
        if not self.is_recorded:
            return ""
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, set_span_in_context(self._span, Context()))
        parent, state = carrier["traceparent"], carrier.get("tracestate", "")
        both = f"{parent} {state}".rstrip()
        return both if len(both) <= LONGEST_TRACE else parent

    def name(self, name: str) -> None:
        self._span.update_name(name)

    def set(self, attributes: Mapping[str, Value | None]) -> None:
        """Set attributes; None stands for an unknown value, which is left out."""
        for name, value in attributes.items():
            if value is not None:
                self._span.set_attribute(name, value)

    def event(self, name: str, attributes: Mapping[str, Value] | None = None) -> None:
        self._span.add_event(name, attributes or {})

    def end(self, error: str | None = None) -> None:
        """End the span; `error` is the kind of what went wrong, never a message, which might quote a prompt."""
        if error is not None:
            self._span.set_attribute(names.ERROR_TYPE, error)
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()

    @contextmanager
    def as_current(self) -> Iterator[None]:
        """Make the span the parent of those that begin within, in this task and in those that it starts."""
        with use_span(self._span, record_exception=False, set_status_on_exception=False):
            yield

    def child(
        self, name: str, attributes: Mapping[str, Value | None] | None = None, kind: Kind = "internal"
    ) -> LiveSpan:
        """Begin a span within this one."""
        context = set_span_in_context(self._span, Context())
        begun = self._tracer.start_span(name, context, _KINDS[kind], _known(attributes or {}))
        return LiveSpan(self._tracer, begun)


class SpanSource:
    """The spans of one process."""

    def __init__(self, provider: TracerProvider, report: _Report) -> None:
        self._provider = provider
        self._report = report
        self._tracer = provider.get_tracer("medha", version("medha"))

    @classmethod
    def exporting(
        cls, to: Destination, ratio: float | None, service: str, instance: str, count_lost: CountLost
    ) -> SpanSource:
        """Return a source whose spans are exported to a collector. OpenTelemetry's variables set all else.

        Raises:
            ValueError, OSError: a variable has a value that cannot be used.
        """
        for name in _TOO_LOUD:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        attributes = {names.SERVICE_VERSION: version("medha"), names.SERVICE_INSTANCE: instance}
        if not os.environ.get("OTEL_SERVICE_NAME"):
            attributes[names.SERVICE_NAME] = service
        sampler = None if ratio is None else ParentBased(TraceIdRatioBased(ratio))
        provider = TracerProvider(sampler, Resource.create(attributes), shutdown_on_exit=False)
        size = int(os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE") or _QUEUED_SPANS)
        places = _Places(size, count_lost)
        report = _Report(OTLPSpanExporter(endpoint=to.url), places, count_lost)
        provider.add_span_processor(_Queue(report, places))
        _log.info("traces go to %s", report.where)
        return cls(provider, report)

    def serve(
        self, name: str, headers: Mapping[str, str], attributes: Mapping[str, Value | None]
    ) -> LiveSpan:
        """Begin the span of a request from outside; its parent is that of the headers, if they name one."""
        context = _PROPAGATOR.extract(headers, Context())
        span = self._tracer.start_span(name, context, SpanKind.SERVER, _known(attributes))
        return LiveSpan(self._tracer, span)

    def current(self) -> LiveSpan:
        """Return the span that is current in this task; one that is not recorded if there is none."""
        return LiveSpan(self._tracer, get_current_span())

    def add(self, trace: str, facts: SpanFacts) -> None:
        """Add a span that has ended, and those within it, below the span of a trace context.

        Times of `facts` are of the monotonic clock. If the context is not valid or not recorded, nothing is added.
        """
        parent, _, state = trace.partition(" ")
        context = _PROPAGATOR.extract({"traceparent": parent, "tracestate": state}, Context())
        if get_current_span(context).get_span_context().trace_flags.sampled:
            self._add(context, facts, _unix_offset_seconds(), SpanKind.SERVER)

    def _add(self, context: Context, facts: SpanFacts, offset: float, kind: SpanKind) -> None:
        def at(seconds: float) -> int:
            return int((seconds + offset) * 1e9)

        span = self._tracer.start_span(
            facts.name, context, kind, _known(facts.attributes), start_time=at(facts.start)
        )
        for event in facts.events:
            span.add_event(event.name, _known(event.attributes), at(event.at))
        if facts.error is not None:
            span.set_attribute(names.ERROR_TYPE, facts.error)
            span.set_status(Status(StatusCode.ERROR))
        below = set_span_in_context(span, Context())
        for child in facts.children:
            self._add(below, child, offset, SpanKind.INTERNAL)
        span.end(at(facts.end))

    def close(self) -> None:
        """Export what has ended, for a short time at most; what a collector has not taken by then is lost."""
        # The SDK's own limits do not hold for an export that is under way.
        flush = Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        flush.start()
        flush.join(FLUSH_SECONDS)
        if flush.is_alive():
            _log.warning("the last spans did not reach %s within %g s", self._report.where, FLUSH_SECONDS)


class _Places:
    """The places of the queue of spans. The SDK only logs that it is full, and the oldest span then makes room."""

    def __init__(self, size: int, count_lost: CountLost) -> None:
        self.size = size
        self._count_lost = count_lost
        self._lock = Lock()
        self._taken = 0

    def take(self) -> None:
        with self._lock:
            is_full = self._taken >= self.size
            self._taken += not is_full
        if is_full:
            self._count_lost("queue_full", 1)

    def free(self, spans: int) -> None:
        with self._lock:
            self._taken -= spans


class _Queue(BatchSpanProcessor):
    """Queues spans for its thread, and counts those that make room for others."""

    def __init__(self, report: _Report, places: _Places) -> None:
        super().__init__(report, max_queue_size=places.size)
        self._places = places

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is not None and span.context.trace_flags.sampled:
            self._places.take()
        super().on_end(span)


class _Report(SpanExporter):
    """Exports by another exporter, and logs when that begins to fail and when it works again."""

    def __init__(self, exporter: OTLPSpanExporter, places: _Places, count_lost: CountLost) -> None:
        self._exporter = exporter
        self._places = places
        self._count_lost = count_lost
        self._fails = False
        self._lost = 0
        self.where = _shown(exporter._endpoint)  # it has no public name

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._places.free(len(spans))
        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            if self._fails:
                _log.info("%s takes traces again; %d spans were lost", self.where, self._lost)
            self._fails, self._lost = False, 0
        else:
            if not self._fails:
                _log.warning(
                    "%s takes no traces; requests are served, and spans are lost until it does", self.where
                )
            self._fails = True
            self._lost += len(spans)
            self._count_lost("not_taken", len(spans))
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


def _shown(endpoint: str) -> str:
    """Return an address for logs: one that a variable names may hold a password or a token."""
    whole = urlsplit(endpoint)
    return urlunsplit((whole.scheme, whole.netloc.rpartition("@")[2], whole.path, "", ""))


def _unix_offset_seconds() -> float:
    """Return what a reading of the monotonic clock lacks to the time of Unix, now."""
    return (time.time_ns() - time.monotonic_ns()) / 1e9


def _known(attributes: Mapping[str, Value | None]) -> dict[str, Value]:
    return {name: value for name, value in attributes.items() if value is not None}
