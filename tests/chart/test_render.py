"""What the chart renders for a table of values: what every pod must be, and what the programs in it can read."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from chart.helm import CHART, NAMESPACE, RELEASE, ROOT, Helm, HelmFailed, Manifest, find, pods
from chart.tables import EVERYTHING, TABLE
from medha_operator.operator_settings import OperatorSettings
from medha_process.router_settings import RouterSettings


def program(path: Path) -> Any:
    """A script of the repository's, as a module."""
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[path.stem] = module
    specification.loader.exec_module(module)
    return module


def settings(manifests: list[Manifest], name: str) -> Any:
    return json.loads(find(manifests, "ConfigMap", name)["data"]["settings.json"])


@pytest.mark.parametrize("name", ["defaults", "everything"])
def test_helms_linter_finds_nothing_in_the_chart(helm: Helm, name: str) -> None:
    helm("lint", "--strict", str(CHART), values=TABLE[name])


@pytest.mark.parametrize("name", TABLE)
def test_every_object_has_the_labels_by_which_it_is_found(helm: Helm, name: str) -> None:
    for manifest in helm.render(**TABLE[name]):
        labels = manifest["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"] == "medha"
        assert labels["app.kubernetes.io/instance"] == "medha"
        assert labels["app.kubernetes.io/managed-by"] == "Helm"
        assert {"app.kubernetes.io/component", "app.kubernetes.io/version", "helm.sh/chart"} <= labels.keys()
        if name == "everything":
            assert labels["team"] == "search"


@pytest.mark.parametrize("name", TABLE)
def test_no_two_objects_have_one_name(helm: Helm, name: str) -> None:
    found = [
        (each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"])
        for each in helm.render(**TABLE[name])
    ]
    assert len(found) == len(set(found))


@pytest.mark.parametrize("name", TABLE)
def test_every_pod_is_locked_down(helm: Helm, name: str) -> None:
    for pod in pods(helm.render(**TABLE[name])).values():
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        assert not any("hostPath" in volume for volume in spec.get("volumes", []))
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert {"cpu", "memory", "ephemeral-storage"} <= container["resources"]["requests"].keys()
            assert {"memory", "ephemeral-storage"} <= container["resources"]["limits"].keys()


def test_only_the_operator_holds_a_token_of_the_api_server(helm: Helm) -> None:
    found = {name: pod["spec"]["automountServiceAccountToken"] for name, pod in pods(helm.render()).items()}
    assert found == {"medha-operator": True, "medha-router": False, "medha-test": False}


@pytest.mark.parametrize("name", [name for name in TABLE if name != "router alone"])
def test_the_operator_can_read_its_settings(helm: Helm, name: str) -> None:
    manifests = helm.render(**TABLE[name])
    mine = [
        each for each in manifests if each["kind"] == "Deployment" and "operator" in each["metadata"]["name"]
    ]
    for deployment in mine:
        document = settings(manifests, deployment["metadata"]["name"])
        OperatorSettings.model_validate(document)
        assert document["lease_namespace"] == NAMESPACE


def test_every_setting_of_the_operator_is_written(helm: Helm) -> None:
    written = settings(helm.render(), "medha-operator").keys()
    assert OperatorSettings.model_fields.keys() - written == {"metrics_port"}  # the pod's ports are fixed


def test_the_operator_knows_this_releases_router_and_others(helm: Helm) -> None:
    own = {"name": "medha-router", "namespace": NAMESPACE}
    assert settings(helm.render(), "medha-operator")["routers"] == [own]
    other = {"name": "other-router", "namespace": "elsewhere"}
    assert settings(helm.render(**EVERYTHING), "medha-operator")["routers"] == [own, other]
    assert settings(helm.render(router={"enabled": False}), "medha-operator")["routers"] == []


def test_the_router_can_read_its_settings(helm: Helm) -> None:
    document = settings(helm.render(router={"drainSeconds": 120}), "medha-router")
    read = RouterSettings.model_validate(document)
    assert (read.host, read.port, read.drain_seconds) == ("0.0.0.0", 8000, 120)
    left = RouterSettings.model_fields.keys() - document.keys()
    assert left == {
        "ready_file", "large_body_bytes", "silence_seconds", "tokenize_seconds", "unserved_seconds",
        "max_bodies_bytes", "max_connections", "head_seconds", "body_seconds", "idle_seconds",
    }  # fmt: skip


def test_the_pods_ports_are_those_of_the_settings(helm: Helm) -> None:
    manifests = helm.render()
    read = RouterSettings.model_validate(settings(manifests, "medha-router"))
    (container,) = pods(manifests)["medha-router"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["http"] == read.port
    assert read.control_endpoint.endswith(f":{ports['control']}")
    assert read.tokens_endpoint.endswith(f":{ports['tokens']}")
    (operator,) = pods(manifests)["medha-operator"]["spec"]["containers"]
    assert {"name": "metrics", "containerPort": 9402, "protocol": "TCP"} in operator["ports"]


@pytest.mark.parametrize(
    ("part", "change"),
    [("operator", {"operator": {"resyncSeconds": 5}}), ("router", {"router": {"maxWaiting": 5}})],
)
def test_a_change_of_settings_replaces_the_pods_that_read_them_and_no_others(
    helm: Helm, part: str, change: dict[str, Any]
) -> None:
    before, after = pods(helm.render()), pods(helm.render(**change))
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {f"medha-{part}"}


def test_a_new_version_of_the_chart_alone_replaces_no_pod(helm: Helm) -> None:
    for name, pod in pods(helm.render()).items():
        if name != "medha-test":
            assert not {"helm.sh/chart", "app.kubernetes.io/version"} & pod["metadata"]["labels"].keys()


def test_a_router_gets_the_time_to_drain(helm: Helm) -> None:
    spec = pods(helm.render(router={"drainSeconds": 300, "leaveSeconds": 10}))["medha-router"]["spec"]
    assert spec["terminationGracePeriodSeconds"] >= 300 + 10 + 10
    assert spec["containers"][0]["lifecycle"]["preStop"] == {"sleep": {"seconds": 10}}


def test_a_router_is_ready_before_a_replica_has_joined_it(helm: Helm) -> None:
    """Replicas join through the Service, whose addresses are those of ready pods alone."""
    (container,) = pods(helm.render())["medha-router"]["spec"]["containers"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/health"


def test_images_are_named_by_registry_tag_or_digest(helm: Helm) -> None:
    rendered = pods(helm.render(**TABLE["images by digest"]))
    images = {name: pod["spec"]["containers"][0]["image"] for name, pod in rendered.items()}
    assert images["medha-operator"] == f"medha-operator@sha256:{'0' * 64}"
    assert images["medha-router"] == "medha-router:1.2.3"
    found = settings(helm.render(**TABLE["images by digest"]), "medha-operator")
    assert found["worker_image"] == "registry.example/worker:cpu"
    assert found["gpu_worker_image"] == f"medha-worker-gpu@sha256:{'1' * 64}"
    everything = helm.render(**EVERYTHING)
    found = settings(everything, "medha-operator")
    assert found["worker_image"] == "registry.example/medha/medha-worker:0.1.0"
    assert found["gpu_worker_image"] == "registry.example/medha/medha-worker-gpu:0.1.0"
    assert pods(everything)["medha-router"]["spec"]["imagePullSecrets"] == [{"name": "registry"}]


def test_namespaces_are_watched_and_written_alike(helm: Helm) -> None:
    manifests = helm.render(**TABLE["two namespaces"])
    (container,) = pods(manifests)["medha-operator"]["spec"]["containers"]
    assert container["args"][1:] == ["--namespace=team-a", "--namespace=team-b"]
    assert settings(manifests, "medha-operator")["namespaces"] == ["team-a", "team-b"]
    manifests = helm.render()
    (container,) = pods(manifests)["medha-operator"]["spec"]["containers"]
    assert container["args"][1:] == [f"--namespace={NAMESPACE}"]
    assert settings(manifests, "medha-operator")["namespaces"] == [NAMESPACE]
    manifests = helm.render(**TABLE["every namespace"])
    (container,) = pods(manifests)["medha-operator"]["spec"]["containers"]
    assert container["args"][1:] == ["--all-namespaces"]
    assert settings(manifests, "medha-operator")["namespaces"] == []


def test_users_of_ours_can_be_left_to_the_cluster(helm: Helm) -> None:
    for pod in pods(helm.render(**TABLE["no user of ours"])).values():
        assert not {"runAsUser", "runAsGroup", "fsGroup"} & pod["spec"]["securityContext"].keys()


def test_the_definitions_are_the_committed_ones_and_are_kept(helm: Helm) -> None:
    manifests = helm.render()
    committed = [yaml.safe_load(file.read_text(encoding="utf-8")) for file in (ROOT / "crds").iterdir()]
    expected = {crd["metadata"]["name"]: crd for crd in committed}
    found = {
        each["metadata"]["name"]: each for each in manifests if each["kind"] == "CustomResourceDefinition"
    }
    assert found.keys() == expected.keys()
    for name, crd in found.items():
        assert crd["spec"] == expected[name]["spec"]
        assert crd["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
        assert expected[name]["metadata"]["labels"].items() <= crd["metadata"]["labels"].items()
    going = helm.render(crds={"keep": False})
    assert "annotations" not in find(going, "CustomResourceDefinition", "medhareplicas.medha.dev")["metadata"]
    told = helm.render(crds={"keep": False, "annotations": {"a": "b"}})
    assert find(told, "CustomResourceDefinition", "medhareplicas.medha.dev")["metadata"]["annotations"] == {
        "a": "b"
    }
    kinds = [each["kind"] for each in helm.render(crds={"install": False})]
    assert "CustomResourceDefinition" not in kinds


def test_a_packaged_chart_renders_the_same(helm: Helm, tmp_path: Path) -> None:
    helm("package", str(CHART), "--destination", str(tmp_path))
    (archive,) = tmp_path.iterdir()
    text = helm("template", RELEASE, str(archive), "--namespace", NAMESPACE, values=EVERYTHING)
    assert [each for each in yaml.load_all(text, Loader=yaml.CSafeLoader) if each] == helm.render(
        **EVERYTHING
    )


def test_generated_files_are_up_to_date() -> None:
    for path, text in program(ROOT / "charts" / "generate.py").generated().items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run `make gen`"


def test_every_value_is_described_and_has_a_place_in_the_schema() -> None:
    described = {value.path for value in program(ROOT / "charts" / "generate.py").values()}
    defaults = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))

    def unknown(value: Any, node: Any, path: str) -> list[str]:
        if path in described:
            return []
        if not isinstance(value, dict):
            return [path]
        assert node["additionalProperties"] is False, path
        return [
            found
            for name, below in value.items()
            for found in unknown(below, node["properties"][name], f"{path}.{name}".lstrip("."))
        ]

    assert unknown(defaults, schema, "") == []


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a misspelt key": ({"router": {"replica": 1}}, "replica"),
    "more routers than replicas can join": ({"router": {"replicas": 2}}, "router/replicas"),
    "no replicas": ({"operator": {"replicas": -1}}, "operator/replicas"),
    "a namespace that cannot be": ({"operator": {"namespaces": ["Team A"]}}, "operator/namespaces/0"),
    "some namespaces and all of them": (
        {"operator": {"namespaces": ["team-a"], "clusterWide": True}},
        "operator.clusterWide is set, and operator.namespaces too",
    ),
    "a level that nobody knows": ({"admission": {"level": "strict"}}, "admission/level"),
    "a host path that climbs": ({"admission": {"hostPaths": ["/models/../etc"]}}, "admission/hostPaths/0"),
    "a writable host path that climbs": (
        {"admission": {"writableHostPaths": ["/cache/.."]}},
        "admission/writableHostPaths/0",
    ),
    "a host path in other words": ({"admission": {"hostPaths": ["/models//m"]}}, "admission/hostPaths/0"),
    "a host path that pods could replace by a link": (
        {"admission": {"hostPaths": ["/cache/m"], "writableHostPaths": ["/cache/"]}},
        "admission: /cache/m lies below /cache, which is one of writableHostPaths",
    ),
    "a writable host path that pods could replace by a link": (
        {"admission": {"writableHostPaths": ["/cache/m", "/cache"]}},
        "admission: /cache/m lies below /cache, which is one of writableHostPaths",
    ),
    "a host path that is none": ({"admission": {"hostPaths": ["models"]}}, "admission/hostPaths/0"),
    "an objective of 95": ({"monitoring": {"rules": {"objective": 95}}}, "monitoring/rules/objective"),
    "an Ingress without hosts": (
        {"router": {"ingress": {"enabled": True}}},
        "router.ingress.hosts: name at least one host",
    ),
    "a port that cannot be": ({"router": {"service": {"port": 70000}}}, "router/service/port"),
    "a level that nobody logs": ({"router": {"logLevel": "loud"}}, "router/logLevel"),
    "pods that run as root": (
        {"podSecurityContext": {"runAsNonRoot": False}},
        "podSecurityContext/runAsNonRoot",
    ),
    "pods that may run as root": (
        {"podSecurityContext": {"runAsNonRoot": None}},
        "missing property 'runAsNonRoot'",
    ),
    "a digest that is none": ({"router": {"image": {"digest": "latest"}}}, "router/image/digest"),
    "a route to no Gateway": ({"router": {"httpRoute": {"enabled": True}}}, "name at least one Gateway"),
    "text for a number": ({"operator": {"concurrentReplicas": "many"}}, "operator/concurrentReplicas"),
}


@pytest.mark.parametrize("name", BAD)
def test_values_that_cannot_be_are_refused_by_name(helm: Helm, name: str) -> None:
    values, said = BAD[name]
    with pytest.raises(HelmFailed, match=said):
        helm.render(**values)
