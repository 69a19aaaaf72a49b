"""Pods run on a real node: they answer through Services and names, are logged, entered, and restarted."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest

from cluster.api import eventually
from cluster.conftest import HELLO_IMAGE
from cluster.nodes import Cluster

pytestmark = pytest.mark.timeout(300)  # whoever comes first starts the cluster

ANSWER_SECONDS = 60.0


def deployed(name: str, replicas: int) -> str:
    labels = {"app": name}
    container = {
        "name": "hello",
        "image": HELLO_IMAGE,
        "imagePullPolicy": "Never",
        "ports": [{"containerPort": 8080}],
        "securityContext": {
            "runAsNonRoot": True,
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "readinessProbe": {"httpGet": {"path": "/", "port": 8080}, "periodSeconds": 1},
    }
    deployment: dict[str, Any] = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {"containers": [container], "terminationGracePeriodSeconds": 1},
            },
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"selector": labels, "ports": [{"port": 80, "targetPort": 8080}]},
    }
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": [deployment, service]})


@pytest.fixture(scope="module")
def hello(node: Cluster) -> Cluster:
    node.kubectl("apply", "-f", "-", stdin=deployed("hello", 2))
    node.kubectl("rollout", "status", "deployment/hello", "--timeout=60s")
    return node


def names(cluster: Cluster) -> list[str]:
    said = cluster.kubectl("get", "pods", "-l", "app=hello", "-o", "jsonpath={.items[*].metadata.name}")
    return said.split()


def test_a_service_answers_on_the_node_in_a_pod_by_name_and_here(hello: Cluster) -> None:
    pods = names(hello)
    assert len(pods) == 2
    address = hello.kubectl("get", "service", "hello", "-o", "jsonpath={.spec.clusterIP}")
    program = str(hello.plane.programs["hello"])

    def on_the_node() -> str:
        return str(hello.run([program, "get", f"http://{address}"], check=False).stdout)

    def in_a_pod() -> str:
        url = "http://hello.default.svc.cluster.local"
        return hello.kubectl("exec", pods[0], "--", "/hello", "get", url, check=False)

    def here() -> str:
        try:
            with hello.forward(address, 80) as port:
                answer = urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=5)
                with answer:
                    return str(answer.read().decode())
        except OSError as error:
            return str(error)

    # Pods that are ready say nothing of the Service: kube-proxy's rules and CoreDNS's names come after them, on a busy
    # machine seconds later. Who asks too early tries again.
    for ask in (on_the_node, in_a_pod, here):
        eventually(ask, lambda answer: answer in pods, ANSWER_SECONDS)


def test_a_container_that_is_killed_from_outside_is_restarted_in_its_pod(hello: Cluster) -> None:
    victim = names(hello)[0]
    before = json.loads(hello.kubectl("get", "pod", victim, "-o", "json"))
    container = before["status"]["containerStatuses"][0]["containerID"].removeprefix("containerd://")
    hello.nodes[0].kill_container(container)
    hello.kubectl(
        "wait", "pod", victim, "--for=jsonpath={.status.containerStatuses[0].restartCount}=1", "--timeout=60s"
    )
    after = json.loads(hello.kubectl("get", "pod", victim, "-o", "json"))
    assert after["metadata"]["uid"] == before["metadata"]["uid"]


def test_pods_outlive_a_restart_of_the_kubelet_alone(hello: Cluster) -> None:
    before = hello.kubectl("get", "pods", "-o", "jsonpath={.items[*].metadata.uid}")
    hello.nodes[0].restart_kubelet()
    hello.nodes[0].wait_until_ready()
    assert hello.kubectl("get", "pods", "-o", "jsonpath={.items[*].metadata.uid}") == before
    hello.kubectl("wait", "pod", "-l", "app=hello", "--for=condition=Ready", "--timeout=60s")


def test_charts_can_be_installed(node: Cluster) -> None:
    assert "v3" in node.helm("version", "--short")
    assert node.helm("list", "-A", "-o", "json").strip() == "[]"
