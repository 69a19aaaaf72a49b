"""The operator as the chart starts it: its command, its settings, and no rights but those of its ServiceAccount."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chart.helm import CHART, NAMESPACE, Helm
from chart.operating import PATIENCE_SECONDS, operator_of
from chart.tables import WITHIN_NAMESPACES
from cluster.api import eventually
from cluster.control_plane import ControlPlane

pytestmark = pytest.mark.timeout(300)  # it starts an API server, where none of its neighbours has before


def replica(name: str, namespace: str) -> str:
    source = {"hostPath": {"path": "/var/lib/medha/models/m"}}
    router = {"name": "medha-router", "namespace": NAMESPACE}
    return json.dumps(
        {
            "apiVersion": "medha.dev/v1alpha1",
            "kind": "MedhaReplica",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {"model": {"name": "m", "source": source}, "routerRef": router},
        }
    )


@pytest.mark.parametrize(
    ("values", "name"),
    [({"operator": {"clusterWide": True}}, "everywhere"), (WITHIN_NAMESPACES, "here-alone")],
    ids=["every namespace", "one namespace"],
)
def test_it_makes_replicas_and_routers_keys_with_the_charts_rights(
    helm: Helm, installer: Helm, accepting: ControlPlane, tmp_path: Path, values: dict[str, Any], name: str
) -> None:
    def names(kind: str, namespace: str) -> list[str]:
        listed = json.loads(accepting.kubectl("get", kind, "-n", namespace, "-o", "json"))
        return [each["metadata"]["name"] for each in listed["items"]]

    values = values | {"operator": values.get("operator", {}) | {"leaseSeconds": 3}}
    # Whoever brings the definitions, they are there.
    installer("install", "medha", str(CHART), "-n", NAMESPACE, values=values | {"crds": {"install": True}})
    accepting.kubectl("delete", "secret", "-n", NAMESPACE, "--all")
    with operator_of(helm.render(**values), accepting, tmp_path) as log:
        for namespace in ("team-a", "team-b"):
            accepting.kubectl("apply", "-f", "-", stdin=replica(name, namespace))
        eventually(
            lambda: names("statefulset", "team-a"), lambda found: f"{name}-l0" in found, PATIENCE_SECONDS
        )
        eventually(
            lambda: names("secret", NAMESPACE),
            lambda found: "medha-router-enrolment" in found,
            PATIENCE_SECONDS,
        )
        enrolment = accepting.kubectl(
            "get", "secret", "medha-router-enrolment", "-n", NAMESPACE, "-o", "json"
        )
        assert "ownerReferences" not in json.loads(enrolment)["metadata"]  # it outlives the release
        elsewhere = names("statefulset", "team-b")
        if name == "everywhere":
            elsewhere = eventually(lambda: names("statefulset", "team-b"), bool, PATIENCE_SECONDS)
        assert (f"{name}-l0" in elsewhere) is (name == "everywhere")
    said = log.read_text(encoding="utf-8", errors="replace")
    refused = [line for line in said.splitlines() if "forbidden" in line.lower()]
    assert [line for line in refused if "nodes" not in line or name == "everywhere"] == []
