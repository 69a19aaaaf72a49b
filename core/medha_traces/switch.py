"""Decides whether a process exports traces, and where to; imports OpenTelemetry only if it does."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from medha.errors import ConfigInvalid

if TYPE_CHECKING:
    from medha_traces.exporting import CountLost, SpanSource

EXPORTER = "OTEL_TRACES_EXPORTER"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL = "http/protobuf"
_PATH = "/v1/traces"
_MODULES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


@dataclass(frozen=True, slots=True)
class Destination:
    """A collector that gets the traces; `url` is None if OpenTelemetry's own variables name it."""

    url: str | None
    asked_by: str
    """The setting or the variable that switches traces on."""


def destination(endpoint: str | None, environment: Mapping[str, str]) -> Destination | None:
    """Return where the traces of a process go; None: it makes none.

    `endpoint` is the base URL of a collector, from a setting of Medha's own, and goes before OpenTelemetry's variables.
    `OTEL_SDK_DISABLED=true` and `OTEL_TRACES_EXPORTER=none` switch all traces off.

    Raises:
        ConfigInvalid: a variable asks for an exporter or a protocol that Medha does not have.
    """
    exporter = environment.get(EXPORTER, "").strip().lower()
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or exporter == "none":
        return None
    if exporter not in ("", "otlp"):
        raise ConfigInvalid(f"{EXPORTER} is {exporter!r}; Medha exports by OTLP only: set it to otlp or none")
    named = next((name for name in ENDPOINTS if environment.get(name, "").strip()), None)
    if endpoint is None and named is None and not exporter:
        return None
    for name in PROTOCOLS:
        protocol = environment.get(name, "").strip()
        if protocol not in ("", _PROTOCOL):
            raise ConfigInvalid(
                f"{name} is {protocol!r}; Medha speaks {_PROTOCOL}: set it to that, and the endpoint to the collector's "
                "port for it, which is usually 4318"
            )
    if endpoint is None:
        return Destination(None, named or EXPORTER)
    base = endpoint.rstrip("/")
    return Destination(base if base.endswith(_PATH) else base + _PATH, f"the endpoint {endpoint}")


def require_installed(found: Destination) -> None:
    """Check that what exports traces is installed.

    Raises:
        ConfigInvalid: it is not.
    """
    for module in _MODULES:
        try:
            is_there = find_spec(module) is not None
        except ModuleNotFoundError:  # not even the package above it
            is_there = False
        if not is_there:
            raise ConfigInvalid(
                f"{found.asked_by} asks for traces, and {module} is not installed; add it: pip install 'medha[traces]', or "
                f"set {EXPORTER}=none"
            )


def start(
    endpoint: str | None,
    ratio: float | None,
    service: str,
    environment: Mapping[str, str],
    count_lost: CountLost,
) -> SpanSource | None:
    """Return what makes and exports the spans of this process; None if traces are off.

    `ratio` is the share of the traces that begin here to keep; None: OpenTelemetry's variables decide, and by default
    all are kept. `service` is the name of the process in traces unless `OTEL_SERVICE_NAME` is set. `count_lost` is called
    with a reason and the number of spans that are lost.

    Raises:
        ConfigInvalid: as `destination` and `require_installed`, or OpenTelemetry refuses a variable of its own.
    """
    found = destination(endpoint, environment)
    if found is None:
        return None
    require_installed(found)
    from medha_traces.exporting import SpanSource  # imported here: it needs the extra `traces`

    try:
        instance = f"{socket.gethostname()}:{os.getpid()}"
        return SpanSource.exporting(found, ratio, service, instance, count_lost)
    except (ValueError, OSError) as error:
        raise ConfigInvalid(
            f"traces cannot be made with OpenTelemetry's variables (OTEL_*) as they are set: {error} Correct them, or set "
            f"{EXPORTER}=none"
        ) from error
