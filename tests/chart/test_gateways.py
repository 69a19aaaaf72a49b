"""docs/gateways.md: the chart makes what it shows, and an API server accepts it."""

from __future__ import annotations

import json
from ipaddress import ip_network

import pytest

from chart.helm import NAMESPACE, Helm, Manifest, find, pods
from cluster.control_plane import ControlPlane
from gateways.envoy import block, documents
from medha_process.router_settings import RouterSettings

ROUTER = "medha-router"
SHOWN = ("trusted-proxies", "http-route", "inference-pool")


def accepted(plane: ControlPlane, manifests: list[Manifest]) -> list[Manifest]:
    """Return the objects as an API server would store them."""
    objects = json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests})
    arguments = ("apply", "--server-side", "--dry-run=server", "--validate=strict", "-o", "json", "-f", "-")
    answer = plane.kubectl(*arguments, stdin=objects)
    assert "Warning" not in answer
    return list(json.loads(answer)["items"])


@pytest.mark.timeout(300)  # whoever comes first starts an API server and fetches definitions
def test_an_api_server_accepts_what_the_page_shows(helm: Helm, accepting: ControlPlane) -> None:
    route, pool = helm.render(**block("http-route")), helm.render(**block("inference-pool"))
    objects = [
        find(route, "HTTPRoute", ROUTER),
        find(route, "BackendTLSPolicy", ROUTER),
        find(pool, "InferencePool", ROUTER),
        *documents("picker-deployment.yaml"),
    ]
    stored = accepted(accepting, objects)
    assert [each["kind"] for each in stored] == [each["kind"] for each in objects]


@pytest.mark.parametrize("name", SHOWN)
def test_each_example_of_values_changes_something(helm: Helm, name: str) -> None:
    assert helm.render(**block(name)) != helm.render()


def test_routers_trust_the_proxies_that_are_named(helm: Helm) -> None:
    values = block("trusted-proxies")
    settings = find(helm.render(**values), "ConfigMap", ROUTER)["data"]["settings.json"]
    read = RouterSettings.model_validate_json(settings)
    assert read.trusted_proxies == tuple(ip_network(each) for each in values["router"]["trustedProxies"])
    assert (
        RouterSettings.model_validate_json(
            find(helm.render(), "ConfigMap", ROUTER)["data"]["settings.json"]
        ).trusted_proxies
        == ()
    )


def test_gateways_check_the_certificate_of_the_port_that_the_route_leads_to(helm: Helm) -> None:
    manifests = helm.render(**block("http-route"))
    (rule,) = find(manifests, "HTTPRoute", ROUTER)["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    (port,) = find(manifests, "Service", backend["name"])["spec"]["ports"]
    (target,) = find(manifests, "BackendTLSPolicy", ROUTER)["spec"]["targetRefs"]
    assert (target["kind"], target["name"], target["sectionName"]) == (
        "Service",
        backend["name"],
        port["name"],
    )
    assert backend["port"] == port["port"]
    assert rule["timeouts"] == {"request": "0s", "backendRequest": "0s"}


def test_the_pool_is_of_the_routers_and_the_route_leads_to_it(helm: Helm) -> None:
    manifests = helm.render(**block("inference-pool"))
    spec = find(manifests, "InferencePool", ROUTER)["spec"]
    selected = [
        name
        for name, pod in pods(manifests).items()
        if spec["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    ]
    assert selected == [ROUTER]
    (container,) = pods(manifests)[ROUTER]["spec"]["containers"]
    (http,) = [port["containerPort"] for port in container["ports"] if port["name"] == "http"]
    assert spec["targetPorts"] == [{"number": http}]
    ((backend,),) = (rule["backendRefs"] for rule in find(manifests, "HTTPRoute", ROUTER)["spec"]["rules"])
    assert backend == {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": ROUTER}
    picker = find(documents("picker-deployment.yaml"), "Service", spec["endpointPickerRef"]["name"])
    assert picker["metadata"]["namespace"] == NAMESPACE
    assert spec["endpointPickerRef"]["port"]["number"] in [port["port"] for port in picker["spec"]["ports"]]
