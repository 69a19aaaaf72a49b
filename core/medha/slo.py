"""Service classes: the TTFT deadline and the TPOT target of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from medha.api.replica import ServiceClass
from medha.wire.messages import ServiceClassTerms

FALLBACK_TERMS = ServiceClassTerms("default", 2.0, 3.0, 0.05, 0.01, 4096)
"""Terms that apply to a replica that announces no service class."""


@dataclass(frozen=True, slots=True)
class Targets:
    """The latency targets of a request (seconds)."""

    ttft_seconds: float  # counted from arrival at the router
    tpot_seconds: float
    fair_tpot_seconds: float
    """TPOT of its class, or its own target if that is looser. A tighter target may not slow the prefills of others."""


def class_terms(classes: Sequence[ServiceClassTerms], name: str) -> ServiceClassTerms:
    """Return the terms of the class `name` that a replica announces; `default` and unknown names get the first."""
    return next((terms for terms in classes if terms.name == name), classes[0] if classes else FALLBACK_TERMS)


def ttft_target_seconds(
    terms: ServiceClass | ServiceClassTerms, work_seconds: float, requested_seconds: float | None = None
) -> float:
    """Return d = max(floor, factor * w), or the request's own TTFT target if it has one.

    Routers and controllers both order requests by it; a router uses the `work_seconds` that replicas
    announce.
    """
    if requested_seconds is not None:
        return requested_seconds
    return max(terms.ttft_floor_seconds, terms.ttft_factor * work_seconds)


def targets(
    service_class: ServiceClass,
    work_seconds: float,
    requested_ttft_seconds: float | None = None,
    requested_tpot_seconds: float | None = None,
) -> Targets:
    """Return the targets of a request whose whole prefill takes `work_seconds` alone.

    A TPOT target tighter than the class's floor is clamped to it: one client must not throttle the rest
    (docs/design.md#deadlines).
    """
    tpot = service_class.tpot_target_seconds if requested_tpot_seconds is None else requested_tpot_seconds
    tpot = max(tpot, service_class.tpot_floor_seconds)
    return Targets(
        ttft_seconds=ttft_target_seconds(service_class, work_seconds, requested_ttft_seconds),
        tpot_seconds=tpot,
        fair_tpot_seconds=max(tpot, service_class.tpot_target_seconds),
    )
