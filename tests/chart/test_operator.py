"""The operator as the chart starts it: its command, its settings, and no rights but those of its ServiceAccount."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from chart.helm import CHART, NAMESPACE, Helm, Manifest, find, pods
from chart.tables import WITHIN_NAMESPACES
from cluster.api import eventually
from cluster.control_plane import ControlPlane, free_port

pytestmark = pytest.mark.timeout(300)  # it starts an API server, where none of its neighbours has before

NAME = "medha-operator"
PATIENCE_SECONDS = 90.0


def replica(name: str, namespace: str) -> str:
    source = {"hostPath": {"path": "/models/m"}}
    router = {"name": "medha-router", "namespace": NAMESPACE}
    return json.dumps(
        {
            "apiVersion": "medha.dev/v1alpha1",
            "kind": "MedhaReplica",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {"model": {"name": "m", "source": source}, "routerRef": router},
        }
    )


@contextmanager
def operator_of(manifests: list[Manifest], plane: ControlPlane, folder: Path) -> Iterator[Path]:
    """Be the kubelet of the operator's pod: run its container's command under its account; its log."""
    (container,) = pods(manifests)[NAME]["spec"]["containers"]
    settings = json.loads(find(manifests, "ConfigMap", NAME)["data"]["settings.json"])
    settings |= {"metrics_port": free_port("127.0.0.1")}
    (folder / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
    config = json.loads(plane.kubeconfig.read_text(encoding="utf-8"))
    token = plane.kubectl("create", "token", NAME, "-n", NAMESPACE, "--duration=1h").strip()
    config["users"] = [{"name": user["name"], "user": {"token": token}} for user in config["users"]]
    (folder / "kubeconfig").write_text(json.dumps(config), encoding="utf-8")
    command = [*container["command"], *container["args"]]
    command = [part.replace("0.0.0.0:8080", f"127.0.0.1:{free_port('127.0.0.1')}") for part in command]
    environment = {
        "KUBECONFIG": str(folder / "kubeconfig"),
        "MEDHA_OPERATOR_SETTINGS": str(folder / "settings.json"),
        "MEDHA_POD_NAME": "operator-0",
        "MEDHA_POD_NAMESPACE": NAMESPACE,
    }
    assert environment.keys() == {variable["name"] for variable in container["env"]} | {"KUBECONFIG"}
    log = folder / "operator.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "--", sys.executable, "-m", *command],
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        yield log
    finally:
        process.terminate()
        process.wait(20)


@pytest.mark.parametrize(
    ("values", "name"),
    [({}, "everywhere"), (WITHIN_NAMESPACES, "here-alone")],
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
