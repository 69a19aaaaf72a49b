"""Scenarios of user actions during faults: manifests applied one after the other, and deletions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Document = dict[str, Any]

SPEC: Document = {
    "model": {"name": "m", "source": {"path": "checkpoint"}},
    "parallelism": {"tensor": 1, "stream": 2, "kv": 2},
    "resources": {"accelerator": "none"},
    # Short waits: the defaults, which protect a cluster, would take too long here.
    "lifecycle": {"restart": {"backoffSeconds": 0.2, "backoffLimitSeconds": 0.5, "stableSeconds": 1}},
}


def replica(**changes: Any) -> Document:
    return {
        "apiVersion": "medha.dev/v1alpha1",
        "kind": "MedhaReplica",
        "metadata": {"name": "r"},
        "spec": SPEC | changes,
    }


def deployment(replicas: int, **changes: Any) -> Document:
    template = SPEC | {"parallelism": {"tensor": 1, "stream": 1, "kv": 1}} | changes
    return {
        "apiVersion": "medha.dev/v1alpha1",
        "kind": "MedhaDeployment",
        "metadata": {"name": "r"},
        "spec": {"replicas": replicas, "template": {"spec": template}},
    }


@dataclass(frozen=True)
class Scenario:
    """Manifests of a resource, each applied once the previous one has settled, and maybe its deletion."""

    name: str
    steps: tuple[Document, ...]
    deletes: bool = False


_LANES: Callable[[int], Document] = lambda kv: {"tensor": 1, "stream": 2, "kv": kv}  # noqa: E731

SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("apply", (replica(),)),
        Scenario(
            "update", (replica(), replica(scheduling={"policy": "edf"}), replica(kvCache={"size": "1Gi"}))
        ),
        Scenario("revert", (replica(), replica(kvCache={"size": "1Gi"}), replica())),
        Scenario("scale", (replica(), replica(parallelism=_LANES(3)), replica(parallelism=_LANES(1)))),
        Scenario("suspend", (replica(), replica(suspend=True), replica())),
        Scenario("delete", (replica(),), deletes=True),
        Scenario("rollout", (deployment(2), deployment(2, kvCache={"size": "1Gi"}))),
        Scenario("resize", (deployment(1), deployment(3), deployment(1))),
        Scenario("withdraw", (deployment(2),), deletes=True),
    )
}
