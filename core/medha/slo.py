"""Service classes: which TTFT deadline and which TPOT target hold for a request."""

from __future__ import annotations

from dataclasses import dataclass

from medha.api import ServiceClass


@dataclass(frozen=True, slots=True)
class Targets:
    """What a request is promised (seconds)."""

    ttft_seconds: float  # counted from arrival at the router
    tpot_seconds: float
    fair_tpot_seconds: float
    """What its class would give it: a request that asks for less may not slow the prefills of others for it."""


def targets(
    service_class: ServiceClass,
    work_seconds: float,
    asked_ttft_seconds: float | None = None,
    asked_tpot_seconds: float | None = None,
) -> Targets:
    """The targets of a request whose whole prefill takes `work_seconds` alone.

    d = max(floor, factor * w) unless the request asks for its own TTFT. A TPOT tighter than the class's floor
    is clamped to it: one client must not throttle the rest (DESIGN §5).
    """
    by_class = max(service_class.ttft_floor_seconds, service_class.ttft_factor * work_seconds)
    ttft = by_class if asked_ttft_seconds is None else asked_ttft_seconds
    tpot = service_class.tpot_target_seconds if asked_tpot_seconds is None else asked_tpot_seconds
    tpot = max(tpot, service_class.tpot_floor_seconds)
    return Targets(
        ttft_seconds=ttft,
        tpot_seconds=tpot,
        fair_tpot_seconds=max(tpot, service_class.tpot_target_seconds),
    )
