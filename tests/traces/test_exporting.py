"""Spans reach a collector as they were made, and a collector that fails is reported once."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Sequence
from threading import Event

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

from medha_traces import attribute_names as names
from medha_traces.exporting import CountLost, SpanSource, _Places
from medha_traces.exporting import _Report as Report
from medha_traces.sequence_spans import SpanEvent, SpanFacts
from medha_traces.switch import Destination
from otlp_collector import collecting

FACTS = SpanFacts(
    names.AT_REPLICA,
    10.0,
    20.0,
    {names.SEQUENCE_ID: "a", names.OUTPUT_TOKENS: 3},
    (SpanEvent(names.FIRST_SAMPLED, 15.0),),
    "rank_lost",
    (SpanFacts(names.CHUNK, 11.0, 12.0), SpanFacts(names.DECODE, 15.0, 19.0)),
)
SAMPLED = f"00-{'1' * 32}-{'2' * 16}-01"


def uncounted(_reason: str, _spans: int) -> None:
    raise AssertionError("spans were lost")


def source(url: str, ratio: float | None = None, count_lost: CountLost = uncounted) -> SpanSource:
    to = Destination(f"{url}/v1/traces", "a test")
    return SpanSource.exporting(to, ratio, "medha-test", "host:1", count_lost)


def test_spans_that_have_ended_are_exported_with_their_times_events_and_children(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20secret")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    with collecting() as collector:
        made = source(collector.url)
        made.add(f"{SAMPLED} vendor=value", FACTS)
        made.close()
        (there,) = collector.named(names.AT_REPLICA)
        assert collector.paths == ["/v1/traces"]
        assert collector.headers[0]["authorization"] == "Bearer secret"
    assert (there.trace_id, there.parent_id, there.trace_state) == ("1" * 32, "2" * 16, "vendor=value")
    assert (there.service, there.kind, there.is_error) == ("medha-test", 2, True)
    assert there.attributes == {names.SEQUENCE_ID: "a", names.OUTPUT_TOKENS: 3, names.ERROR_TYPE: "rank_lost"}
    ((event, at, _),) = there.events
    assert event == names.FIRST_SAMPLED
    assert at - there.start == pytest.approx(5.0, abs=1e-3)
    assert there.end - there.start == pytest.approx(10.0, abs=1e-3)
    assert [part.name for part in collector.children(there)] == [names.CHUNK, names.DECODE]
    assert all(there.holds(part) for part in collector.children(there))


@pytest.mark.parametrize(
    "trace",
    [
        "",
        "nonsense",
        f"00-{'1' * 32}-{'2' * 16}-00",  # its request was not sampled
        f"00-{'0' * 32}-{'2' * 16}-01",
    ],
)
def test_a_context_that_is_invalid_or_not_sampled_adds_nothing(trace: str) -> None:
    with collecting() as collector:
        made = source(collector.url)
        made.add(trace, FACTS)
        made.close()
        assert collector.spans == []


def test_a_span_passes_its_context_on_and_ends_once() -> None:
    with collecting() as collector:
        made = source(collector.url, ratio=0.0)
        span = made.serve("POST", {"traceparent": SAMPLED, "tracestate": "a=b"}, {names.METHOD: "POST"})
        child = span.child("attempt", {names.REPLICA: "r0", names.LANE: None}, "client")
        assert child.trace.startswith(f"00-{'1' * 32}-")
        assert child.trace.endswith("-01 a=b")
        state = ",".join(f"vendor{number}={'x' * 100}" for number in range(12))
        burdened = made.serve("POST", {"traceparent": SAMPLED, "tracestate": state}, {})
        assert re.fullmatch(f"00-{'1' * 32}-[0-9a-f]{{16}}-01", burdened.trace)
        unsampled = made.serve("POST", {}, {})  # the ratio keeps none of those that begin here
        assert (unsampled.is_recorded, unsampled.trace) == (False, "")
        with unsampled.as_current():
            assert not made.current().is_recorded
        with span.as_current():
            assert made.current().is_recorded
        assert not made.current().is_recorded
        child.end("refused")
        child.end()
        span.end()
        unsampled.end()
        made.close()
        assert len(collector.spans) == 2
        (attempt,) = collector.named("attempt")
        assert attempt.attributes == {names.REPLICA: "r0", names.ERROR_TYPE: "refused"}


def test_a_tracestate_that_is_not_valid_is_left_out_and_never_quoted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with collecting() as collector:
        made = source(collector.url)
        for state in ("my prompt", "a=b,".ljust(9000, "x")):
            span = made.serve("POST", {"traceparent": SAMPLED, "tracestate": state}, {})
            assert re.fullmatch(f"00-{'1' * 32}-[0-9a-f]{{16}}-01", span.trace)
            span.end()
        made.close()
    assert [one.name for one in caplog.records if one.name != "medha.traces"] == []


def test_what_a_variable_names_is_logged_without_its_secrets(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    variable = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
    monkeypatch.setenv(variable, "http://me:password@127.0.0.1:9/v1/traces?token=secret")
    with caplog.at_level(logging.INFO):
        to = Destination(None, variable)
        SpanSource.exporting(to, None, "medha-test", "host:1", uncounted).close()
    assert [one.getMessage() for one in caplog.records] == ["traces go to http://127.0.0.1:9/v1/traces"]


class Scripted:
    """An exporter whose results are given."""

    _endpoint = "http://collector/v1/traces"

    def __init__(self, *results: SpanExportResult) -> None:
        self.results = list(results)

    def export(self, _spans: object) -> SpanExportResult:
        return self.results.pop(0)


def test_a_failure_is_logged_once_and_so_is_its_end(caplog: pytest.LogCaptureFixture) -> None:
    bad, good = SpanExportResult.FAILURE, SpanExportResult.SUCCESS
    lost = Counter[str]()

    def count_lost(reason: str, spans: int) -> None:
        lost[reason] += spans

    exporter = Scripted(good, bad, bad, bad, good, good, bad)
    report = Report(exporter, _Places(10, count_lost), count_lost)  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO):
        for _ in range(7):
            report.export([None])  # type: ignore[list-item]
    assert lost == {"not_taken": 4}
    assert [(one.levelname, one.getMessage().partition(" takes ")[2]) for one in caplog.records] == [
        ("WARNING", "no traces; requests are served, and spans are lost until it does"),
        ("INFO", "traces again; 3 spans were lost"),
        ("WARNING", "no traces; requests are served, and spans are lost until it does"),
    ]


def test_spans_that_make_room_for_others_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "10")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "10")
    lost, is_exporting, may_go_on = Counter[str](), Event(), Event()

    def export(exporter: OTLPSpanExporter, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        is_exporting.set()
        assert may_go_on.wait(60)
        return take(exporter, spans)

    def count_lost(reason: str, spans: int) -> None:
        lost[reason] += spans

    take = OTLPSpanExporter.export
    monkeypatch.setattr(OTLPSpanExporter, "export", export)
    with collecting() as collector:
        made = source(collector.url, None, count_lost)
        for _ in range(10):
            made.serve("POST", {}, {}).end()
        assert is_exporting.wait(60), "a whole batch is not exported"
        for _ in range(17):
            made.serve("POST", {}, {}).end()
        assert lost == {"queue_full": 7}
        may_go_on.set()
        made.close()
        assert len(collector.spans) == 20
    assert lost == {"queue_full": 7}
