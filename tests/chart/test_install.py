"""The chart against a real API server: what it renders is accepted, and releases come, change and go as they should."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from chart.conftest import OURS
from chart.helm import CHART, NAMESPACE, Helm, HelmFailed
from chart.tables import EVERYTHING, TABLE
from cluster.control_plane import ControlPlane
from cluster.definitions import wait_until_established

pytestmark = pytest.mark.timeout(300)  # whoever comes first starts an API server and fetches definitions

SAMPLE = ("defaults", "everything", "within namespaces", "a pool of routers")
"""Tables of values that each run installs; `make test-long` has the others."""

REPLICA = json.dumps(
    {
        "apiVersion": "medha.dev/v1alpha1",
        "kind": "MedhaReplica",
        "metadata": {"name": "llama", "namespace": "team-a"},
        "spec": {"model": {"name": "m", "source": {"hostPath": {"path": "/var/lib/medha/models/m"}}}},
    }
)


def install(helm: Helm, *arguments: str, chart: Path = CHART, **values: Any) -> str:
    return helm("upgrade", "--install", "medha", str(chart), "-n", NAMESPACE, *arguments, values=values)


def uids(plane: ControlPlane) -> dict[str, str]:
    """Name -> identity of our definitions."""
    listed = json.loads(
        plane.kubectl("get", "crd", "--ignore-not-found", *OURS, "-o", "json") or '{"items": []}'
    )
    return {each["metadata"]["name"]: each["metadata"]["uid"] for each in listed["items"]}


def with_another_column(folder: Path) -> Path:
    """A copy of the chart whose definitions show one column more: the next version of Medha."""
    copy = folder / "medha"
    shutil.copytree(CHART, copy)
    file = copy / "templates" / "crds" / "medhareplicas.yaml"
    text = file.read_text(encoding="utf-8")
    column = "    additionalPrinterColumns:\n    - name: Epoch\n      type: string\n      jsonPath: .status.epoch\n"
    assert text.count("    additionalPrinterColumns:\n") == 1
    file.write_text(text.replace("    additionalPrinterColumns:\n", column), encoding="utf-8")
    return copy


def columns(plane: ControlPlane) -> list[str]:
    crd = json.loads(plane.kubectl("get", "crd", "medhareplicas.medha.dev", "-o", "json"))
    return [each["name"] for each in crd["spec"]["versions"][0]["additionalPrinterColumns"]]


@pytest.mark.parametrize(
    "name", [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.long) for name in TABLE]
)
def test_the_api_server_accepts_every_object(helm: Helm, accepting: ControlPlane, name: str) -> None:
    manifests = helm.render(**TABLE[name])
    for manifest in manifests:
        if manifest["kind"] == "Pod":  # made of its own, its account must be there before
            manifest["spec"]["serviceAccountName"] = "default"
    answer = accepting.kubectl(
        "apply",
        "--server-side",
        "--dry-run=server",
        "--validate=strict",
        "-o",
        "json",
        "-f",
        "-",
        stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests}),
    )
    assert "Warning" not in answer, "a pod that the restricted standard would refuse"
    received = json.loads(answer)
    received = received["items"] if received["kind"] == "List" else [received]
    assert [each["kind"] for each in received] == [each["kind"] for each in manifests]


@pytest.mark.long
def test_an_upgrade_changes_the_definitions_and_keeps_every_replica(
    installer: Helm, accepting: ControlPlane, tmp_path: Path
) -> None:
    install(installer)
    wait_until_established(accepting, *OURS)
    accepting.kubectl("apply", "-f", "-", stdin=REPLICA)
    before, replica = uids(accepting), accepting.kubectl("get", "mr", "-A", "-o", "jsonpath={..uid}")
    assert "Epoch" not in columns(accepting)
    install(installer, chart=with_another_column(tmp_path))
    assert "Epoch" in columns(accepting)
    assert uids(accepting) == before
    assert accepting.kubectl("get", "mr", "-A", "-o", "jsonpath={..uid}") == replica
    installer("rollback", "medha", "1", "-n", NAMESPACE)
    assert "Epoch" not in columns(accepting)
    assert accepting.kubectl("get", "mr", "-A", "-o", "jsonpath={..uid}") == replica


@pytest.mark.long
def test_null_returns_a_value_that_was_set_to_its_default_when_a_release_is_upgraded(
    installer: Helm, accepting: ControlPlane
) -> None:
    def limits() -> tuple[int, int]:
        found = accepting.kubectl("get", "configmap", "medha-router", "-n", NAMESPACE, "-o", "json")
        read = json.loads(json.loads(found)["data"]["settings.json"])
        return read["max_waiting"], read["waiting_room_seconds"]

    install(installer, router={"maxWaiting": 5, "waitingRoom": {"seconds": 60}})
    assert limits() == (5, 60)
    nulls = ("--set", "router.waitingRoom=null")
    install(installer, "--reset-then-reuse-values", *nulls)
    assert limits() == (5, 0)


def test_an_upgrade_that_reuses_the_defaults_before_names_the_values_that_they_lack(
    installer: Helm, tmp_path: Path
) -> None:
    before = tmp_path / "medha"
    shutil.copytree(CHART, before, ignore=shutil.ignore_patterns("templates", "values.schema.json"))
    defaults = yaml.safe_load((before / "values.yaml").read_text(encoding="utf-8"))
    del defaults["traces"]
    (before / "values.yaml").write_text(yaml.safe_dump(defaults), encoding="utf-8")
    install(installer, chart=before)
    with pytest.raises(HelmFailed, match="at '': missing property 'traces'"):
        install(installer, "--reuse-values")


@pytest.mark.long
def test_an_uninstall_leaves_definitions_and_replicas_and_nothing_else(
    installer: Helm, accepting: ControlPlane
) -> None:
    install(installer, **EVERYTHING)
    wait_until_established(accepting, *OURS)
    accepting.kubectl("apply", "-f", "-", stdin=REPLICA)
    before, replica = uids(accepting), accepting.kubectl("get", "mr", "-A", "-o", "jsonpath={..uid}")
    installer("uninstall", "medha", "-n", NAMESPACE)
    assert uids(accepting) == before
    assert accepting.kubectl("get", "mr", "-A", "-o", "jsonpath={..uid}") == replica
    kinds = "deploy,svc,cm,sa,pdb,netpol,role,rolebinding,clusterrole,clusterrolebinding,validatingadmissionpolicy,validatingadmissionpolicybinding,ingress,httproute,backendtlspolicy,inferencepool,podmonitor,servicemonitor,prometheusrule"
    left = accepting.kubectl("get", kinds, "-A", "-l", "app.kubernetes.io/instance=medha", "-o", "name")
    assert "No resources found" in left or left == ""
    install(installer)  # takes the definitions that it left up again
    assert uids(accepting) == before


@pytest.mark.long
def test_an_upgrade_that_stops_installing_definitions_leaves_them(
    installer: Helm, accepting: ControlPlane
) -> None:
    install(installer)
    before = uids(accepting)
    install(installer, crds={"install": False})
    assert uids(accepting) == before


@pytest.mark.long
def test_definitions_that_another_release_left_are_taken_over_when_asked(
    installer: Helm, accepting: ControlPlane
) -> None:
    install(installer)
    installer("uninstall", "medha", "-n", NAMESPACE)
    before = uids(accepting)
    other = ("install", "other", str(CHART), "-n", NAMESPACE)
    with pytest.raises(HelmFailed, match="invalid ownership metadata"):
        installer(*other)
    installer(*other, "--take-ownership")
    assert uids(accepting) == before


def test_definitions_go_with_the_release_when_asked(installer: Helm, accepting: ControlPlane) -> None:
    install(installer, crds={"keep": False})
    assert len(uids(accepting)) == 2
    installer("uninstall", "medha", "-n", NAMESPACE)
    accepting.kubectl("wait", "--for=delete", "--timeout=30s", "crd", *OURS)


def test_what_is_printed_after_an_install_shows_how_a_replica_joins(installer: Helm) -> None:
    notes = install(installer, "--dry-run=server")
    assert "routerRef: {name: medha-router, namespace: medha-system}" in notes


def test_what_is_printed_after_an_install_shows_how_clients_call_a_router_with_tls_and_keys(
    installer: Helm,
) -> None:
    assert "curl http://127.0.0.1:8000/v1/models" in install(installer, "--dry-run=server")
    secrets = {"tls": {"secretName": "llm-tls"}, "apiKeys": {"secretName": "llm-keys"}}
    notes = install(installer, "--dry-run=server", router=secrets)
    assert "curl --insecure https://127.0.0.1:8000/v1/models" in notes
    assert "Authorization: Bearer" in notes


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, [f"manages replicas in these namespaces, and in no others: {NAMESPACE}."]),
        ({"operator": {"namespaces": ["team-a", "team-b"]}}, ["and in no others: team-a, team-b."]),
        (
            {"operator": {"clusterWide": True}},
            ["manages replicas in every namespace", "can read every Secret"],
        ),
        ({"admission": {"enabled": False}}, ["any pod, and so root on the nodes"]),
    ],
    ids=["defaults", "two namespaces", "every namespace", "nothing judged"],
)
def test_an_installation_prints_which_namespaces_it_manages_and_what_its_rights_amount_to(
    installer: Helm, values: dict[str, Any], said: list[str]
) -> None:
    notes = install(installer, "--dry-run=server", **values)
    assert all(each in notes for each in said)


@pytest.mark.long
def test_two_releases_live_in_two_namespaces(installer: Helm, accepting: ControlPlane) -> None:
    install(installer, operator={"namespaces": [NAMESPACE]})
    mine = {"crds": {"install": False}, "operator": {"namespaces": ["team-a"]}}
    installer("install", "medha", str(CHART), "-n", "team-a", values=mine)
    listed = json.loads(installer("list", "--all-namespaces", "--output", "json"))
    assert {line["namespace"] for line in listed} == {NAMESPACE, "team-a"}


def test_the_clusters_own_roles_include_ours(installer: Helm, accepting: ControlPlane) -> None:
    install(installer)
    bound = [f"{role}binding" for role in ("admin", "edit", "view")]
    # Without controllers nobody aggregates: the roles that would be are bound as they are.
    for role in ("admin", "edit", "view"):
        ours = f"--clusterrole=medha-{NAMESPACE}-{role}"
        accepting.kubectl("create", "rolebinding", f"{role}binding", ours, f"--user={role}", "-n", "team-a")

    def may(role: str, verb: str, resource: str, part: str = "") -> bool:
        what = (verb, resource, f"--subresource={part}", f"--as={role}", "-n", "team-a")
        said = accepting.kubectl("auth", "can-i", *what, check=False)
        return said.strip().splitlines()[-1] == "yes"

    for resource in ("medhareplicas.medha.dev", "medhadeployments.medha.dev"):
        assert all(may(role, "list", resource) for role in ("admin", "edit", "view"))
        assert [may(role, "delete", resource) for role in ("admin", "edit", "view")] == [True, True, False]
        assert not any(may(role, "update", resource, "status") for role in ("admin", "edit", "view"))
    assert [may(role, "patch", "medhadeployments.medha.dev", "scale") for role in ("edit", "view")] == [
        True,
        False,
    ]
    accepting.kubectl("delete", "rolebinding", *bound, "-n", "team-a")
