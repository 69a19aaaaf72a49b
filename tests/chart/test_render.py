"""What the chart renders for a table of values: what every pod must be, and what the programs in it can read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import medha
from chart.chart_generator import chart_generator
from chart.helm import CHART, NAMESPACE, RELEASE, ROOT, Helm, HelmFailed, Manifest, find, pods
from chart.tables import EVERYTHING, TABLE
from medha.api.replica import MedhaReplicaSpec
from medha.observing.metric_catalogue import ROUTER_METRICS
from medha_operator.operator_settings import OperatorSettings
from medha_operator.replica.manifests import Owner, pod_templates, router_address
from medha_process.pod_contract import ROUTER_CONTROL_PORT, ROUTER_TOKENS_PORT
from medha_process.router_settings import RouterSettings


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
    assert read.api_keys_file is None
    left = RouterSettings.model_fields.keys() - document.keys()
    assert left == {
        "ready_file", "large_body_bytes", "silence_seconds", "tokenize_seconds", "unserved_seconds",
        "max_bodies_bytes", "max_connections", "head_seconds", "body_seconds", "idle_seconds", "output_seconds",
        "poll_seconds",
    }  # fmt: skip


def test_the_largest_waiting_room_that_the_chart_accepts_is_the_largest_of_a_router(helm: Helm) -> None:
    manifests = helm.render(router={"maxBodyBytes": 1000, "waitingRoom": {"bytes": 4000}})
    document = settings(manifests, "medha-router")
    assert RouterSettings.model_validate(document).waiting_room_budget_bytes == 4000
    with pytest.raises(ValueError, match="more than half"):
        RouterSettings.model_validate(document | {"waiting_room_bytes": 4001})


@pytest.mark.parametrize(
    ("operator", "expected"),
    [
        ({}, {"matchNames": [NAMESPACE]}),
        ({"namespaces": ["team-a", "team-b"]}, {"matchNames": ["team-a", "team-b"]}),
        ({"clusterWide": True}, {"any": True}),
    ],
    ids=["its own namespace", "two namespaces", "every namespace"],
)
def test_replicas_are_scraped_in_the_namespaces_that_the_operator_manages(
    helm: Helm, operator: dict[str, Any], expected: dict[str, Any]
) -> None:
    manifests = helm.render(operator=operator, monitoring={"monitors": True})
    assert find(manifests, "PodMonitor", "medha-replicas")["spec"]["namespaceSelector"] == expected


def test_the_router_finds_the_api_keys_where_their_secret_is_mounted(helm: Helm) -> None:
    manifests = helm.render(router={"apiKeys": {"secretName": "llm-keys", "key": "clients.yaml"}})
    read = RouterSettings.model_validate(settings(manifests, "medha-router"))
    pod = pods(manifests)["medha-router"]["spec"]
    (volume,) = [
        each["name"] for each in pod["volumes"] if each.get("secret", {}).get("secretName") == "llm-keys"
    ]
    (mount,) = [each for each in pod["containers"][0]["volumeMounts"] if each["name"] == volume]
    assert "subPath" not in mount, "such a file would never change"
    assert read.api_keys_file == Path(mount["mountPath"]) / "clients.yaml"


def test_routers_and_replicas_send_traces_to_the_collector_that_is_named(helm: Helm) -> None:
    plain = helm.render()
    assert RouterSettings.model_validate(settings(plain, "medha-router")).traces_endpoint is None
    assert OperatorSettings.model_validate(settings(plain, "medha-operator")).traces_endpoint is None
    assert "env" not in pods(plain)["medha-router"]["spec"]["containers"][0]

    url = "https://collector.example:4318/tenant"
    manifests = helm.render(traces={"endpoint": url, "ratio": 0.1, "headersSecret": {"name": "collector"}})
    read = RouterSettings.model_validate(settings(manifests, "medha-router"))
    assert (read.traces_endpoint, read.traces_ratio) == (url, 0.1)
    operator = OperatorSettings.model_validate(settings(manifests, "medha-operator"))
    assert operator.traces_endpoint == url
    (router,) = pods(manifests)["medha-router"]["spec"]["containers"]
    secret = {"name": "collector", "key": "headers"}
    assert router["env"] == [{"name": "OTEL_EXPORTER_OTLP_HEADERS", "valueFrom": {"secretKeyRef": secret}}]

    mine, key = "http://mine:4318", {"name": "mine", "key": "h"}
    own = {"traces": {"endpoint": mine, "headersSecret": key}}
    whole = {
        "traces": {"endpoint": f"{mine}/v1/traces/"}
    }  # OpenTelemetry adds this path to what the variable names
    for traces, expected in (({}, [url, None]), (own, [mine, key]), (whole, [mine, None])):
        spec = {"model": {"name": "m", "source": {"path": "/m"}}, **traces}
        owner = Owner("r", "team", "0123456789")
        (template,) = pod_templates(owner, MedhaReplicaSpec.model_validate(spec), "0", operator)
        found = {each["name"]: each for each in template["spec"]["containers"][0]["env"]}
        headers = found.get("OTEL_EXPORTER_OTLP_HEADERS", {}).get("valueFrom", {}).get("secretKeyRef")
        assert [found["OTEL_EXPORTER_OTLP_ENDPOINT"]["value"], headers] == expected


def test_the_router_finds_its_certificate_where_its_secret_is_mounted(helm: Helm) -> None:
    manifests = helm.render(router={"tls": {"secretName": "llm-tls"}})
    read = RouterSettings.model_validate(settings(manifests, "medha-router"))
    pod = pods(manifests)["medha-router"]["spec"]
    (volume,) = [
        each["name"] for each in pod["volumes"] if each.get("secret", {}).get("secretName") == "llm-tls"
    ]
    (mount,) = [each for each in pod["containers"][0]["volumeMounts"] if each["name"] == volume]
    assert "subPath" not in mount, "such a file would never change"
    folder = Path(mount["mountPath"])
    assert (read.tls_certificate_file, read.tls_key_file) == (folder / "tls.crt", folder / "tls.key")
    (asked,) = pods(manifests)["medha-test"]["spec"]["containers"]
    assert "https://medha-router" in asked["args"][0]
    plain = RouterSettings.model_validate(settings(helm.render(), "medha-router"))
    assert plain.tls_certificate_file is plain.tls_key_file is None


def test_the_pods_ports_are_those_of_the_settings(helm: Helm) -> None:
    manifests = helm.render()
    read = RouterSettings.model_validate(settings(manifests, "medha-router"))
    (container,) = pods(manifests)["medha-router"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["http"] == read.port
    assert ports["metrics"] == read.metrics_port
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


def test_a_router_gets_the_time_to_leave_and_to_drain(helm: Helm) -> None:
    manifests = helm.render(router={"drainSeconds": 300, "leaveSeconds": 10, "joinSeconds": 90})
    spec = pods(manifests)["medha-router"]["spec"]
    assert spec["terminationGracePeriodSeconds"] >= 300 + 10 + 10
    read = RouterSettings.model_validate(settings(manifests, "medha-router"))
    assert (read.join_seconds, read.leave_seconds, read.drain_seconds) == (90, 10, 300)


def test_replicas_find_all_routers_whether_ready_or_not_and_clients_the_ready_ones(helm: Helm) -> None:
    manifests = helm.render()
    labels = pods(manifests)["medha-router"]["metadata"]["labels"]
    links, clients = (find(manifests, "Service", f"medha-router{end}") for end in ("-links", ""))
    for service in (links, clients):
        assert service["spec"]["selector"].items() <= labels.items()
    assert links["spec"]["clusterIP"] == "None"
    assert links["spec"]["publishNotReadyAddresses"] is True
    assert {port["port"] for port in links["spec"]["ports"]} == {ROUTER_CONTROL_PORT, ROUTER_TOKENS_PORT}
    assert "publishNotReadyAddresses" not in clients["spec"]
    assert [port["name"] for port in clients["spec"]["ports"]] == ["http"]
    (container,) = pods(manifests)["medha-router"]["spec"]["containers"]
    probe = container["readinessProbe"]["httpGet"]
    assert (probe["path"], probe["port"]) == ("/accepting", "metrics")


def test_the_name_that_replicas_look_up_is_that_of_the_routers_links(helm: Helm) -> None:
    reference = {"name": "medha-router", "namespace": NAMESPACE}
    spec = MedhaReplicaSpec.model_validate(
        {"model": {"name": "m", "source": {"path": "/m"}}, "routerRef": reference}
    )
    address = router_address(Owner("r", "team-a", "u"), spec)
    assert address == f"medha-router-links.{NAMESPACE}.svc"
    find(helm.render(), "Service", address.partition(".")[0])
    longest = helm.render(fullnameOverride="n" * 50)
    assert all(len(each["metadata"]["name"]) <= 63 for each in longest if each["kind"] == "Service")


def test_routers_are_replaced_by_new_ones_that_are_ready_and_requests_of_all_fit_on_two_cores(
    helm: Helm,
) -> None:
    manifests = helm.render()
    spec = find(manifests, "Deployment", "medha-router")["spec"]
    assert spec["replicas"] == 2
    assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    requested = {
        name: pod["spec"]["containers"][0]["resources"]["requests"]["cpu"]
        for name, pod in pods(manifests).items()
    }
    millicores = {name: int(cpu.removesuffix("m")) for name, cpu in requested.items()}
    # A control plane by kubeadm requests 850m, and one replica of the example 100m for each of its two ranks.
    assert 850 + 200 + millicores["medha-operator"] + 3 * millicores["medha-router"] <= 1930


def test_an_autoscaler_alone_sets_the_number_of_routers(helm: Helm) -> None:
    manifests = helm.render(
        router={
            "replicas": 0, "drainSeconds": 90,
            "autoscaling": {"enabled": True, "minReplicas": 3, "maxReplicas": 9, "targetCpu": "500m"},
        },
        monitoring={"rules": {"enabled": True}},
    )  # fmt: skip
    assert "replicas" not in find(manifests, "Deployment", "medha-router")["spec"]
    found = find(manifests, "HorizontalPodAutoscaler", "medha-router")["spec"]
    assert found["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "medha-router"}
    assert (found["minReplicas"], found["maxReplicas"]) == (3, 9)
    (metric,) = found["metrics"]
    assert metric["resource"] == {"name": "cpu", "target": {"type": "AverageValue", "averageValue": "500m"}}
    assert found["behavior"]["scaleDown"]["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": 95}]
    assert "MedhaNoRouter" in json.dumps(find(manifests, "PrometheusRule", "medha"))
    assert "HorizontalPodAutoscaler" not in [each["kind"] for each in helm.render()]


def test_keda_asks_for_the_sum_of_what_all_routers_need_and_takes_no_answer_for_no_reason(helm: Helm) -> None:
    manifests = helm.render(**EVERYTHING)
    found = {name: find(manifests, "ScaledObject", name) for name in ("chat", "code")}
    assert {one["metadata"]["namespace"] for one in found.values()} == {NAMESPACE, "team-a"}
    chat, code = found["chat"]["spec"], found["code"]["spec"]
    assert (chat["minReplicaCount"], chat["maxReplicaCount"], code["minReplicaCount"]) == (0, 8, 2)
    assert code["scaleTargetRef"] == {
        "apiVersion": "medha.dev/v1alpha1", "kind": "MedhaDeployment", "name": "code",
    }  # fmt: skip
    (trigger,) = code["triggers"]
    assert (trigger["type"], trigger["metricType"]) == ("prometheus", "AverageValue")
    metric = next(one for one in ROUTER_METRICS if one.name == "medha_deployment_desired_replicas")
    assert trigger["metadata"] == {
        "serverAddress": "http://prometheus.monitoring:9090",
        "query": f'sum({metric.name}{{namespace="{NAMESPACE}", model="org/code"}})',
        "threshold": "1",
        "activationThreshold": "0",
        "ignoreNullValues": "false",
    }


def test_an_autoscaler_reads_the_same_metric_and_adds_up_its_values(helm: Helm) -> None:
    values = {"by": "hpa", "startSeconds": 60, "downSeconds": 90}
    chat = {"name": "chat", "minReplicas": 1, "maxReplicas": 3}
    manifests = helm.render(scaling=values | {"deployments": [chat]})
    found = find(manifests, "HorizontalPodAutoscaler", "chat")["spec"]
    (metric,) = found["metrics"]
    assert metric["external"] == {
        "metric": {
            "name": "medha_deployment_desired_replicas",
            "selector": {"matchLabels": {"namespace": NAMESPACE, "model": "chat"}},
        },
        "target": {"type": "AverageValue", "averageValue": "1"},
    }
    assert found["behavior"] == {"scaleDown": {"stabilizationWindowSeconds": 90}}
    assert settings(manifests, "medha-router")["replica_start_seconds"] == 60


def test_no_router_is_replaced_because_there_are_more_of_them(helm: Helm) -> None:
    values = ({}, {"replicas": 5}, {"autoscaling": {"enabled": True, "minReplicas": 4, "maxReplicas": 9}})
    first, *others = (pods(helm.render(router=each))["medha-router"] for each in values)
    assert others == [first, first]


@pytest.mark.parametrize("by", ["keda", "hpa"])
def test_names_that_yaml_takes_for_something_else_stay_names(helm: Helm, by: str) -> None:
    names = ["null", "on"]
    scaled = [{"name": one, "namespace": "123", "minReplicas": 1, "maxReplicas": 2} for one in names]
    scaling = {"by": by, "prometheusAddress": "http://prometheus", "deployments": scaled}
    found = [each for each in helm.render(scaling=scaling) if each["metadata"].get("namespace") == "123"]
    assert [each["metadata"]["name"] for each in found] == names
    assert [each["spec"]["scaleTargetRef"]["name"] for each in found] == names


def test_at_most_one_router_is_evicted_at_a_time(helm: Helm) -> None:
    manifests = helm.render()
    budget = find(manifests, "PodDisruptionBudget", "medha-router")["spec"]
    assert budget["maxUnavailable"] == 1
    assert (
        budget["selector"]["matchLabels"].items()
        <= pods(manifests)["medha-router"]["metadata"]["labels"].items()
    )
    spread = pods(manifests)["medha-router"]["spec"]["topologySpreadConstraints"]
    assert [each["topologyKey"] for each in spread] == [
        "kubernetes.io/hostname",
        "topology.kubernetes.io/zone",
    ]
    assert {each["whenUnsatisfiable"] for each in spread} == {"ScheduleAnyway"}, "it runs on one node, too"


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
    assert found["worker_image"] == f"registry.example/medha/medha-worker:{medha.__version__}"
    assert found["gpu_worker_image"] == f"registry.example/medha/medha-worker-gpu:{medha.__version__}"
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
    for path, text in chart_generator().generated().items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run `make gen`"


def test_every_value_is_described_and_has_a_place_in_the_schema() -> None:
    described = {value.path for value in chart_generator().values()}
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
    "fewer routers than none": ({"router": {"replicas": -1}}, "router/replicas"),
    "more routers at least than at most": (
        {"router": {"autoscaling": {"enabled": True, "minReplicas": 7}}},
        "router.autoscaling.minReplicas is 7, above maxReplicas, 6",
    ),
    "an autoscaler that may stop serving": (
        {"router": {"autoscaling": {"minReplicas": 0}}},
        "router/autoscaling/minReplicas",
    ),
    "a scaler that knows no Prometheus": (
        {"scaling": {"deployments": [{"name": "chat", "minReplicas": 1, "maxReplicas": 2}]}},
        "name its address in scaling.prometheusAddress",
    ),
    "more replicas at least than at most": (
        {"scaling": {"by": "hpa", "deployments": [{"name": "chat", "minReplicas": 3, "maxReplicas": 2}]}},
        "minReplicas of chat is 3, above maxReplicas, 2",
    ),
    "zero replicas for which no request would wait": (
        {"scaling": {"by": "hpa", "deployments": [{"name": "chat", "maxReplicas": 2}]}},
        "router.waitingRoom.seconds is 0: raise that",
    ),
    "zero replicas for which requests would not wait for long enough": (
        {
            "router": {"waitingRoom": {"seconds": 119}},
            "scaling": {"by": "hpa", "deployments": [{"name": "chat", "maxReplicas": 2}]},
        },
        r"takes scaling.startSeconds \(120\), but router.waitingRoom.seconds is 119",
    ),
    "zero replicas for which KEDA would look too late": (
        {
            "router": {"waitingRoom": {"seconds": 134}},
            "scaling": {"prometheusAddress": "http://p", "deployments": [{"name": "chat", "maxReplicas": 2}]},
        },
        r"startSeconds \(120\) and scaling.pollingSeconds \(15\), but router.waitingRoom.seconds is 134",
    ),
    "replicas that follow no router": (
        {"router": {"enabled": False}, "scaling": {"deployments": [{"name": "chat", "maxReplicas": 2}]}},
        "scaling.deployments needs router.enabled",
    ),
    "a model that would end the query": (
        {"scaling": {"deployments": [{"name": "chat", "model": 'a"} or b', "maxReplicas": 2}]}},
        "scaling/deployments/0/model",
    ),
    "two scalers of one deployment": (
        {
            "scaling": {
                "by": "hpa",
                "deployments": [
                    {"name": "chat", "model": "a", "minReplicas": 1, "maxReplicas": 2},
                    {"name": "chat", "model": "b", "minReplicas": 1, "maxReplicas": 2},
                ],
            }
        },
        f"two of them have the name {NAMESPACE}/chat",
    ),
    "two deployments that would each get all of a model's load": (
        {
            "scaling": {
                "by": "hpa",
                "deployments": [
                    {"name": "chat", "minReplicas": 1, "maxReplicas": 2},
                    {"name": "more", "model": "chat", "minReplicas": 1, "maxReplicas": 2},
                ],
            }
        },
        "two of them have the model chat",
    ),
    "a model that a HorizontalPodAutoscaler cannot select": (
        {
            "scaling": {
                "by": "hpa",
                "deployments": [{"name": "chat", "model": "org/chat", "minReplicas": 1, "maxReplicas": 2}],
            }
        },
        '"org/chat" cannot be a label\'s value: set scaling.by to keda',
    ),
    "a CPU that is none": ({"router": {"autoscaling": {"targetCpu": "70%"}}}, "router/autoscaling/targetCpu"),
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
    "TLS to a router that has none": (
        {
            "router": {
                "httpRoute": {
                    "enabled": True,
                    "parentRefs": [{"name": "g"}],
                    "backendTls": {"hostname": "llm.example"},
                }
            }
        },
        "the router speaks plain HTTP: set router.tls.secretName too",
    ),
    "a pool without a picker": (
        {"router": {"inferencePool": {"enabled": True}}},
        "router.inferencePool.endpointPicker.name: name the Service",
    ),
    "a pool of encrypted endpoints": (
        {
            "router": {
                "tls": {"secretName": "llm-tls"},
                "inferencePool": {"enabled": True, "endpointPicker": {"name": "picker"}},
            }
        },
        "gateways speak plain HTTP to the endpoints of a pool, but router.tls.secretName is set",
    ),
    "a failure mode that is none": (
        {"router": {"inferencePool": {"endpointPicker": {"failureMode": "Open"}}}},
        "router/inferencePool/endpointPicker/failureMode",
    ),
    "proxies by name": ({"router": {"trustedProxies": ["gateway.example"]}}, "router/trustedProxies/0"),
    "every address a proxy": ({"router": {"trustedProxies": ["0.0.0.0/0"]}}, "router/trustedProxies/0"),
    "a collector that is no URL": ({"traces": {"endpoint": "collector:4318"}}, "traces/endpoint"),
    "a collector with a password": ({"traces": {"endpoint": "http://a:b@collector"}}, "traces/endpoint"),
    "headers for no collector": (
        {"traces": {"headersSecret": {"name": "collector"}}},
        "traces.headersSecret.name is set, but no collector: set traces.endpoint too",
    ),
    "more bodies in the waiting room than the router would start with": (
        {"router": {"maxBodyBytes": 1000, "waitingRoom": {"bytes": 4001}}},
        "router.waitingRoom.bytes is 4001, more than four times router.maxBodyBytes, 1000",
    ),
    "more traces than requests": ({"traces": {"ratio": 10}}, "traces/ratio"),
    "text for a number": ({"operator": {"concurrentReplicas": "many"}}, "operator/concurrentReplicas"),
}


@pytest.mark.parametrize("name", BAD)
def test_values_that_cannot_be_are_refused_by_name(helm: Helm, name: str) -> None:
    values, said = BAD[name]
    with pytest.raises(HelmFailed, match=said):
        helm.render(**values)
