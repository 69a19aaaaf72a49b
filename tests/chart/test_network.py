"""Who can connect to whom, once a cluster's network enforces the policies of the chart and of replicas."""

from __future__ import annotations

from typing import Any

import pytest

from chart.helm import NAMESPACE, Helm, Manifest, pods
from chart.network import End, Outside, Pod, is_open
from chart.tables import EVERYTHING
from medha.api.replica import MedhaReplicaSpec
from medha_operator.operator_settings import OperatorSettings
from medha_operator.replica.manifests import Owner, network_policy, pod_templates
from medha_operator.replica.revision import begin

A, B = Owner("llama", "team-a", "a" * 36), Owner("qwen", "team-a", "b" * 36)
RENDEZVOUS = (5600, 5601, 9400, 9401, 29500, 48173, 65535)
"""Ports within a replica: ours, and some that gloo may choose."""
PORTS = sorted({*RENDEZVOUS, 22, 53, 443, 5353, 5700, 5701, 6443, 8000, 8080, 9402, 9403})


def policy(name: str = "p", namespace: str = "here", **spec: Any) -> Manifest:
    return {"metadata": {"name": name, "namespace": namespace}, "spec": {"podSelector": {}} | spec}


def pod(name: str, namespace: str, template: Manifest) -> Pod:
    ports = [port for container in template["spec"]["containers"] for port in container.get("ports", [])]
    return Pod(
        name,
        namespace,
        template["metadata"]["labels"],
        {port["name"]: port["containerPort"] for port in ports},
        namespace_labels={"kubernetes.io/metadata.name": namespace},
    )


def stranger(name: str, namespace: str) -> Pod:
    return Pod(name, namespace, {"app": name}, namespace_labels={"kubernetes.io/metadata.name": namespace})


def workers(owner: Owner) -> list[Pod]:
    """The pods of a replica of two lanes, one stage each."""
    spec = MedhaReplicaSpec.model_validate(
        {
            "model": {"name": "m", "source": {"hostPath": {"path": "/models/m"}}},
            "parallelism": {"tensor": 1, "stream": 1, "kv": 2},
        }
    )
    templates = pod_templates(owner, spec, begin(spec, []).name, OperatorSettings())
    return [pod(f"{owner.name}-l{lane}-0", owner.namespace, each) for lane, each in enumerate(templates)]


class Site:
    """A cluster with the chart, two replicas, and others who live there."""

    def __init__(self, manifests: list[Manifest]) -> None:
        self.policies = [each for each in manifests if each["kind"] == "NetworkPolicy"]
        (mounted,) = [
            each["data"]["settings.json"]
            for each in manifests
            if each["kind"] == "ConfigMap" and each["metadata"]["name"] == "medha-operator"
        ]
        settings = OperatorSettings.model_validate_json(mounted)
        self.policies += [network_policy(owner, settings.metrics_from) for owner in (A, B)]
        made = pods(manifests)
        self.router = pod("router", NAMESPACE, made["medha-router"])
        self.operator = pod("operator", NAMESPACE, made["medha-operator"])
        self.a, self.b = workers(A), workers(B)
        self.client, self.prometheus = stranger("client", "apps"), stranger("prometheus", "monitoring")
        self.neighbour = stranger("neighbour", "team-a")
        self.world = Outside("203.0.113.7")

    @property
    def ends(self) -> dict[str, End]:
        named = [self.router, self.operator, *self.a, *self.b, self.client, self.prometheus, self.neighbour]
        return {each.name: each for each in named} | {"world": self.world}

    def open_ports(self, source: End, target: End) -> list[int]:
        return [port for port in PORTS if is_open(self.policies, source, target, port)]


@pytest.fixture
def site(helm: Helm) -> Site:
    return Site(helm.render())


def test_pods_of_a_replica_reach_each_other_on_every_port(site: Site) -> None:
    assert site.open_ports(*site.a) == PORTS
    assert site.open_ports(*reversed(site.a)) == PORTS


def test_every_other_connection_that_is_open_is_one_that_is_needed(site: Site) -> None:
    everybody = set(site.ends) - {"world"}
    needed = {
        "router": {
            8000: everybody - {"operator"} | {"world"},
            9403: everybody - {"operator"} | {"world"},
            5700: set(),
            5701: set(),
        },
        "operator": {9402: everybody - {"router"} | {"world"}},
    }
    for worker in (*site.a, *site.b):
        needed["router"][5700].add(worker.name)
        needed["router"][5701].add(worker.name)
        needed[worker.name] = {9400: everybody - {"router", "operator"} | {"world"}}
    for target_name, ports in needed.items():
        target = site.ends[target_name]
        mates = next(({each.name for each in group} for group in (site.a, site.b) if target in group), set())
        for source_name, source in site.ends.items():
            if source_name == target_name or source_name in mates:
                continue
            expected = [port for port in PORTS if source_name in ports.get(port, set())]
            assert site.open_ports(source, target) == expected, f"{source_name} -> {target_name}"


def are_name_servers_open(policies: list[Manifest], source: End, target: End) -> bool:
    """Return whether the name servers of Kubernetes (port 53) and of OpenShift (5353) can be reached."""
    return all(
        is_open(policies, source, target, port, protocol)
        for port in (53, 5353)
        for protocol in ("UDP", "TCP")
    )


def test_the_router_opens_no_connection_and_the_operator_those_to_the_api_server(site: Site) -> None:
    for end in site.ends.values():
        if end is not site.router:
            assert site.open_ports(site.router, end) == []
    assert site.open_ports(site.operator, site.world) == [53, 443, 5353, 6443]
    assert are_name_servers_open(site.policies, site.operator, site.world)
    assert not is_open(site.policies, site.operator, site.world, 443, "UDP")


@pytest.mark.parametrize(
    ("endpoint", "port"),
    [("http://collector:4318", 4318), ("https://collector.example/otlp", 443), ("http://collector", 80)],
)
def test_a_router_that_makes_traces_reaches_its_collector(helm: Helm, endpoint: str, port: int) -> None:
    site = Site(helm.render(traces={"endpoint": endpoint}))
    for other in PORTS:
        assert is_open(site.policies, site.router, site.world, other) == (other in (53, 5353, port))
    assert is_open(site.policies, site.router, site.world, port)
    assert are_name_servers_open(site.policies, site.router, site.world)


def test_replicas_may_go_out_for_their_model(site: Site) -> None:
    assert site.open_ports(site.a[0], site.world) == PORTS


def test_clients_and_scrapers_can_be_named(helm: Helm) -> None:
    site = Site(helm.render(**EVERYTHING))
    assert site.open_ports(site.client, site.router) == [8000]
    assert site.open_ports(site.prometheus, site.router) == [9403]
    assert site.open_ports(site.prometheus, site.operator) == [9402]
    assert site.open_ports(site.prometheus, site.a[0]) == [9400]
    for other in (site.client, site.neighbour, site.b[0], site.world):
        assert site.open_ports(other, site.a[0]) == []
    assert site.open_ports(site.client, site.operator) == []
    assert site.open_ports(site.neighbour, site.router) == []
    assert site.open_ports(site.world, site.router) == []
    assert site.open_ports(site.a[0], site.router) == [5700, 5701]


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "clients named"])
def test_helm_test_reaches_the_router_and_nothing_else(helm: Helm, values: dict[str, Any]) -> None:
    manifests = helm.render(**values)
    site, asking = Site(manifests), pod("test", NAMESPACE, pods(manifests)["medha-test"])
    assert 8000 in site.open_ports(asking, site.router)
    assert site.open_ports(asking, site.operator) == site.open_ports(asking, site.a[0]) == []
    assert site.open_ports(asking, site.world) == [53, 5353]
    assert are_name_servers_open(site.policies, asking, site.world)
    assert site.open_ports(site.client, asking) == []


def test_without_a_policy_something_is_open_that_was_not(site: Site) -> None:
    def count(policies: list[Manifest]) -> int:
        ends = list(site.ends.values())
        return sum(is_open(policies, s, t, port) for s in ends for t in ends if s is not t for port in PORTS)

    kept = [
        each for each in site.policies if each["metadata"]["name"] != "medha-test"
    ]  # of a pod that comes and goes
    closed = count(kept)
    for index in range(len(kept)):
        assert count(kept[:index] + kept[index + 1 :]) > closed


# --- the evaluator itself, by the sentences of the reference --------------------------------------------

HERE, ELSEWHERE = Pod("x", "here", {"app": "x"}), Pod("y", "there", {"app": "y"}, {"web": 8000})


@pytest.mark.parametrize(
    ("spec", "opened"),
    [
        ({"policyTypes": ["Ingress"]}, False),
        ({"policyTypes": ["Ingress"], "ingress": [{}]}, True),
        ({"policyTypes": ["Egress"]}, True),
        ({"ingress": [{"from": []}]}, True),
        ({"ingress": [{"from": [{"podSelector": {}}]}]}, False),
        ({"ingress": [{"from": [{"namespaceSelector": {}}]}]}, True),
        ({"ingress": [{"from": [{"namespaceSelector": {"matchLabels": {"a": "b"}}}]}]}, False),
        ({"ingress": [{"from": [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": "x"}}}]}]}, True),
        ({"ingress": [{"from": [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": "z"}}}]}]}, False),
        ({"ingress": [{"from": [{"podSelector": {}}, {"namespaceSelector": {}}]}]}, True),
        ({"ingress": [{"from": [{"ipBlock": {"cidr": "10.0.0.0/24"}}]}]}, True),
        ({"ingress": [{"from": [{"ipBlock": {"cidr": "10.0.0.0/24", "except": ["10.0.0.1/32"]}}]}]}, False),
        ({"ingress": [{"ports": [{"port": 8000}]}]}, True),
        ({"ingress": [{"ports": [{"port": "web"}]}]}, True),
        ({"ingress": [{"ports": [{"port": "ssh"}]}]}, False),
        ({"ingress": [{"ports": [{"port": 7000, "endPort": 9000}]}]}, True),
        ({"ingress": [{"ports": [{"port": 7000}]}]}, False),
        ({"ingress": [{"ports": [{"protocol": "UDP", "port": 8000}]}]}, False),
        ({"ingress": [{"ports": [{"protocol": "TCP"}]}]}, True),
        ({"podSelector": {"matchLabels": {"app": "z"}}, "policyTypes": ["Ingress"]}, True),
        ({"podSelector": {"matchExpressions": [{"key": "app", "operator": "Exists"}]}}, False),
        ({"podSelector": {"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["y"]}]}}, True),
    ],
)  # fmt: skip
def test_a_policy_of_the_target_opens_what_its_rules_allow(spec: dict[str, Any], opened: bool) -> None:
    assert is_open([policy(namespace="there", **spec)], HERE, ELSEWHERE, 8000) is opened


def test_policies_add_up_and_both_ends_must_agree() -> None:
    closed = policy(namespace="there", policyTypes=["Ingress"])
    opening = policy(namespace="there", ingress=[{"ports": [{"port": 8000}]}])
    assert not is_open([closed], HERE, ELSEWHERE, 8000)
    assert is_open([closed, opening], HERE, ELSEWHERE, 8000)
    assert not is_open([opening, policy(policyTypes=["Egress"])], HERE, ELSEWHERE, 8000)
    leaving = policy(policyTypes=["Egress"], egress=[{"to": [{"namespaceSelector": {}}]}])
    assert is_open([opening, leaving], HERE, ELSEWHERE, 8000)
    assert not is_open([leaving], HERE, Outside("203.0.113.7"), 443)
