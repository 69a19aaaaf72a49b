"""The traces of `medha up`: one request as a tree of spans from HTTP to its chunks, and what a lost collector costs."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import httpx
import psutil
import pytest

from otlp_collector import WAIT_SECONDS, Collector, Received, collecting

from .conftest import MODEL, Served, free_port, start, stop, write_manifest

PATH = "/v1/completions"
CLIENTS_TRACE, CLIENTS_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SLACK_SECONDS = 0.1
"""Most by which the clocks of two processes may differ: each reads the system's, but not at the same time."""
MARKER = "zebracorn"


@dataclass
class Traced:
    served: Served
    collector: Collector
    record: Path

    def post(self, id_: str, **body: object) -> httpx.Response:
        given = {"model": MODEL, "max_tokens": 8, "ignore_eos": True, "temperature": 0, **body}
        headers = {"x-request-id": id_}
        if id_ == "long":
            headers["traceparent"] = f"00-{CLIENTS_TRACE}-{CLIENTS_SPAN}-01"
            headers["tracestate"] = "vendor=value"
        return httpx.post(self.served.url + PATH, json=given, headers=headers, timeout=100)

    def root(self, id_: str) -> Received:
        """The span of a request, once it was exported."""

        def found() -> list[Received]:
            return [span for span in self.collector.spans if span.attributes.get("medha.request.id") == id_]

        self.collector.wait(found, f"no span of request {id_}")
        (span,) = found()
        return span

    def wait_for_line(self, text: str, times: int = 1) -> None:
        wait(lambda: self.lines_with(text) >= times, f"{text!r} is not logged:\n{''.join(self.served.lines)}")

    def lines_with(self, text: str) -> int:
        return sum(text in line for line in self.served.lines)


def wait(is_there: Callable[[], object], what: str) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not is_there():
        assert time.monotonic() < end, what
        time.sleep(0.05)


@pytest.fixture(scope="module")
def traced(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    folder, port = tmp_path_factory.mktemp("traces"), free_port()
    manifest = write_manifest(
        folder / "tiny.yaml",
        checkpoint,
        port,
        model={"name": MODEL, "source": {"path": str(checkpoint)}, "maxModelLen": 16384},
        kvCache={"size": "64Mi"},
        scheduling={"policy": "edf", "maxChunkTokens": 256, "spaceSharingCap": 0},
        serviceClasses=[
            {"name": "patient", "ttftFloorSeconds": 600},
            {"name": "urgent", "ttftFloorSeconds": 1},
        ],
    )
    record = folder / "record.jsonl"
    with pytest.MonkeyPatch.context() as patch, collecting() as collector:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        patch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")  # for how long an export is tried again
        served = start(manifest, port, checkpoint, "--otlp", collector.url, "--record", str(record))
        yield Traced(served, collector, record)
        stop(served)


def require_nested(collector: Collector, parent: Received) -> None:
    """Fail unless every span below `parent` is in its trace and lies within its own parent."""
    for child in collector.children(parent):
        assert child.trace_id == parent.trace_id
        slack = 0.0 if child.service == parent.service else SLACK_SECONDS
        assert parent.holds(child, slack), (parent, child)
        require_nested(collector, child)


def test_a_long_request_that_short_ones_preempt_is_one_trace_below_its_client(traced: Traced) -> None:
    collector = traced.collector
    with ThreadPoolExecutor(1) as pool:
        prompt = f"{MARKER} " + "word " * 2500
        answer = pool.submit(traced.post, "long", prompt=prompt, service_tier="patient")
        number = 0
        while not answer.done():
            number += 1
            ids = [3 + (number + place) % 200 for place in range(700)]
            traced.post(f"short-{number}", prompt=ids, service_tier="urgent", max_tokens=1)
        assert answer.result().status_code == 200
        assert answer.result().headers["x-request-id"] == "long"

    root = traced.root("long")
    assert (root.trace_id, root.parent_id) == (CLIENTS_TRACE, CLIENTS_SPAN)
    assert (root.name, root.kind, root.service) == (f"POST {PATH}", 2, "medha-router")
    prompt_tokens = answer.result().json()["usage"]["prompt_tokens"]
    assert (
        root.attributes.items()
        >= {
            "http.response.status_code": 200,
            "http.route": PATH,
            "gen_ai.operation.name": "text_completion",
            "gen_ai.request.model": MODEL,
            "gen_ai.usage.input_tokens": prompt_tokens,
            "gen_ai.usage.output_tokens": 8,
            "gen_ai.response.finish_reasons": ["length"],
        }.items()
    )
    assert [span.name for span in collector.children(root)] == ["receive body", "tokenise", "sequence"]
    sequence = collector.children(root)[-1]
    queue, attempt = collector.children(sequence)
    assert (queue.name, attempt.name, attempt.kind) == ("queue", "attempt", 3)
    assert queue.attributes["medha.policy"] == "edf"
    assert queue.attributes["medha.service_class"] == "patient"
    assert 0 < queue.attributes["medha.slack_seconds"] < 600
    assert [event[0] for event in attempt.events] == ["first token"]

    collector.wait(lambda: collector.children(attempt), "the replica has exported nothing")
    (there,) = collector.children(attempt)
    assert (there.name, there.kind, there.service) == ("sequence at replica", 2, "medha-replica")
    collector.wait(lambda: any(span.name == "decode" for span in collector.children(there)), "no decode")
    parts = collector.children(there)
    chunks = [span for span in parts if span.name == "prefill chunk"]
    assert len(chunks) > 5
    assert sum(span.attributes["medha.tokens"] for span in chunks) == prompt_tokens
    assert [span.name for span in parts if span.name != "wait for KV"] == ["prefill chunk"] * len(chunks) + [
        "decode"
    ]
    assert all(before.end <= after.start for before, after in pairwise(parts))
    require_nested(collector, root)

    preempted = [event for event in there.events if event[0] == "preempted"]
    assert len(preempted) == there.attributes["medha.preemptions"] > 0
    for _, at, attributes in preempted:
        assert attributes["medha.preempting_steps"] >= 1
        assert chunks[0].start < at < chunks[-1].start
    shorts = [span for span in collector.named("prefill chunk") if span.trace_id != CLIENTS_TRACE]
    assert any(chunks[0].start < span.start and span.end < chunks[-1].end for span in shorts)
    assert all(
        span.trace_state == "vendor=value" for span in collector.spans if span.trace_id == CLIENTS_TRACE
    )


def test_one_id_joins_answer_log_record_and_trace_and_no_text_leaves(traced: Traced) -> None:
    answer = traced.post("join", prompt=f"{MARKER} once")
    root = traced.root("join")
    traced.wait_for_line(f"id=join model={MODEL} outcome=length")
    (line,) = [line for line in traced.served.lines if "id=join" in line]
    assert f"trace={root.trace_id}" in line
    (sequence,) = [span for span in traced.collector.children(root) if span.name == "sequence"]
    name = sequence.attributes["medha.sequence.id"]
    assert name.startswith("cmpl-join-")
    submits = [
        json.loads(line)["event"] for line in traced.record.read_text().splitlines()[2:] if name in line
    ]
    assert submits[0]["type"] == "Submit"
    assert "trace" not in submits[0]["body"]  # a record is the same whether or not somebody traces

    error = traced.post("wrong", prompt="x", temperature=-1)
    assert error.status_code == 400
    assert error.json()["error"]["request_id"] == error.headers["x-request-id"] == "wrong"
    refused = traced.root("wrong")
    assert refused.attributes["http.response.status_code"] == 400
    assert not refused.is_error

    text = answer.json()["choices"][0]["text"]
    sent = b"".join(traced.collector.bodies)
    assert MARKER.encode() not in sent
    assert len(text) < 4 or text.encode() not in sent
    assert b"cmpl-join-" in sent


def test_a_client_that_was_not_sampled_is_not_traced(traced: Traced) -> None:
    headers = {"traceparent": f"00-{'1' * 32}-{'2' * 16}-00"}
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 1}
    answer = httpx.post(traced.served.url + PATH, json=body, headers=headers, timeout=60)
    assert answer.status_code == 200
    traced.post("later", prompt="hi")
    traced.root("later")
    assert all(span.trace_id != "1" * 32 for span in traced.collector.spans)


@pytest.mark.long
def test_a_request_whose_rank_dies_has_a_second_attempt(traced: Traced) -> None:
    (rank,) = [part for part in traced.served.parts() if "medha_worker.rank" in part.cmdline()]
    body = {"model": MODEL, "prompt": "go on", "max_tokens": 300, "ignore_eos": True, "stream": True}
    headers, pieces = {"x-request-id": "failover"}, 0
    with httpx.stream("POST", traced.served.url + PATH, json=body, headers=headers, timeout=100) as answer:
        for line in answer.iter_lines():
            pieces += line.startswith("data: {")
            if pieces == 20 and rank.is_running():
                os.kill(rank.pid, signal.SIGKILL)
                psutil.wait_procs([rank], timeout=10)
    root, collector = traced.root("failover"), traced.collector
    assert not root.is_error
    spans = {span.name: span for span in collector.children(root)}
    assert [name for name, _, _ in spans["stream"].events] == ["first chunk"]
    parts = collector.children(spans["sequence"])
    assert [span.name for span in parts] == ["queue", "attempt", "queue", "attempt"]
    _, first, again, second = parts
    assert (first.is_error, first.attributes["error.type"]) == (True, "rank_lost")
    assert again.attributes["medha.attempt.left_because"] == "rank_lost"
    assert not second.is_error
    assert (first.attributes["medha.attempt.number"], second.attributes["medha.attempt.number"]) == (1, 2)
    assert second.attributes["medha.attempt.resumed_tokens"] > 0
    for attempt, outcome in ((first, "rank_lost"), (second, "length")):
        collector.wait(lambda: collector.children(attempt), "a replica's span is missing")  # noqa: B023 - waited for here
        (there,) = collector.children(attempt)
        assert there.attributes["medha.outcome"] == outcome
    require_nested(collector, root)


@pytest.mark.long
def test_a_collector_that_dies_costs_no_request_and_is_reported_once(traced: Traced) -> None:
    lost = "takes no traces"
    traced.collector.close()
    end = time.monotonic() + WAIT_SECONDS
    while traced.lines_with(lost) < 2:  # one of the router, one of the controller
        assert traced.post("during", prompt="hi").status_code == 200
        assert time.monotonic() < end, "".join(traced.served.lines)
    assert traced.post("still", prompt="hi").status_code == 200
    with collecting(traced.collector.port) as again:
        end = time.monotonic() + WAIT_SECONDS
        while traced.lines_with("takes traces again") < 2:
            assert traced.post("after", prompt="hi").status_code == 200
            assert time.monotonic() < end, "".join(traced.served.lines)
        assert {span.service for span in again.spans} == {"medha-router", "medha-replica"}
    assert traced.lines_with(lost) == 2
    assert traced.post("last", prompt="hi").status_code == 200
    assert traced.served.interrupt() == 0  # nobody takes the last spans
