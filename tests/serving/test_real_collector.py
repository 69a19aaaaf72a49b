"""An OpenTelemetry Collector, which others wrote, takes the traces of `medha up` and passes them on."""

from __future__ import annotations

import subprocess
from pathlib import Path

import httpx
import pytest
import yaml

from cluster.binaries import CannotBuild, build
from otlp_collector import collecting

from .conftest import MODEL, free_port, start, stop, write_manifest

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1800),
]  # building the Collector takes seven minutes of processor time

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def test_the_collector_takes_every_span_of_a_request(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        program = build(["collector"])["collector"]
    except CannotBuild as error:
        pytest.skip(str(error))
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    port, taken_at = free_port(), free_port()
    with collecting() as behind:
        configuration = tmp_path / "collector.yaml"
        receiver = {"protocols": {"http": {"endpoint": f"127.0.0.1:{taken_at}"}}}
        document = {
            "receivers": {"otlp": receiver},
            "exporters": {"otlp_http": {"endpoint": behind.url}},
            "service": {
                "telemetry": {"metrics": {"level": "none"}},
                "pipelines": {"traces": {"receivers": ["otlp"], "exporters": ["otlp_http"]}},
            },
        }
        configuration.write_text(yaml.safe_dump(document))
        collector = subprocess.Popen([program, "--config", configuration])
        try:
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{taken_at}")
            served = start(write_manifest(tmp_path / "tiny.yaml", checkpoint, port), port, checkpoint)
            try:
                headers = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
                body = {"model": MODEL, "prompt": "hi " * 500, "max_tokens": 4, "ignore_eos": True}
                url = served.url + "/v1/completions"
                httpx.post(url, json=body, headers=headers, timeout=100).raise_for_status()
                wanted = {
                    "POST /v1/completions",
                    "receive body",
                    "tokenise",
                    "sequence",
                    "queue",
                    "attempt",
                    "sequence at replica",
                    "prefill chunk",
                    "decode",
                }
                behind.wait(lambda: wanted <= {span.name for span in behind.spans}, "spans are missing")
                assert {span.trace_id for span in behind.spans} == {TRACE}
                assert served.interrupt() == 0
            finally:
                stop(served)
        finally:
            collector.terminate()
            collector.wait(timeout=30)
