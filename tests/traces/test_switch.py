"""The switch of traces and their destination: Medha's own setting, OpenTelemetry's variables, and off by default."""

from __future__ import annotations

import subprocess
import sys

import pytest

from medha.errors import ConfigInvalid
from medha_traces import switch
from medha_traces.switch import Destination, destination

BASE = "http://collector:4318"
OTLP = "OTEL_EXPORTER_OTLP_ENDPOINT"


@pytest.mark.parametrize(
    ("endpoint", "environment", "url"),
    [
        (BASE, {}, f"{BASE}/v1/traces"),
        (f"{BASE}/", {}, f"{BASE}/v1/traces"),
        (f"{BASE}/v1/traces", {}, f"{BASE}/v1/traces"),
        ("https://otel.example/tenant", {}, "https://otel.example/tenant/v1/traces"),
        (BASE, {OTLP: "http://other:4318"}, f"{BASE}/v1/traces"),
        (None, {OTLP: BASE}, None),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": BASE}, None),
        (None, {"OTEL_TRACES_EXPORTER": "otlp"}, None),
        (None, {OTLP: BASE, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, None),
    ],
)
def test_traces_are_on_by_setting_or_by_variable(
    endpoint: str | None, environment: dict[str, str], url: str | None
) -> None:
    found = destination(endpoint, environment)
    assert found is not None
    assert found.url == url


@pytest.mark.parametrize(
    ("endpoint", "environment"),
    [
        (None, {}),
        (None, {OTLP: ""}),
        (None, {"OTEL_SERVICE_NAME": "x"}),
        (BASE, {"OTEL_SDK_DISABLED": "true"}),
        (BASE, {"OTEL_TRACES_EXPORTER": "none"}),
    ],
)
def test_traces_are_off_by_default_and_on_request(endpoint: str | None, environment: dict[str, str]) -> None:
    assert destination(endpoint, environment) is None


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"OTEL_TRACES_EXPORTER": "console"}, "OTEL_TRACES_EXPORTER is 'console'.*otlp or none"),
        ({OTLP: BASE, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "PROTOCOL is 'grpc'.*http/protobuf.*4318"),
    ],
)
def test_what_medha_does_not_have_is_refused_by_name(environment: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigInvalid, match=text):
        destination(None, environment)


def test_a_setting_without_the_extra_is_an_error_that_names_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch, "_MODULES", ("opentelemetry_that_is_not_there.sdk",))
    with pytest.raises(ConfigInvalid, match=r"--otlp asks for traces.*pip install 'medha\[traces\]'"):
        switch.require_installed(Destination(BASE, "--otlp"))


def test_variables_that_opentelemetry_refuses_are_an_error_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "100")  # less than a batch
    with pytest.raises(
        ConfigInvalid, match=r"\(OTEL_\*\).*max_export_batch_size must be less.*OTEL_TRACES_EXPORTER=none"
    ):
        switch.start(BASE, None, "x", {}, lambda _reason, _spans: None)


def test_without_traces_no_process_imports_the_sdk() -> None:
    code = (
        "import sys, medha_router.process, medha_worker.controller.process, medha_cli.up_command\n"
        "from medha_traces.switch import start\n"
        "assert start(None, None, 'x', {}, lambda _reason, _spans: None) is None\n"
        "sys.exit(' '.join(name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter')))"
        " or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
