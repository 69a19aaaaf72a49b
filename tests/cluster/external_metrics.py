"""A source of external metrics in a cluster of real nodes: Prometheus, and prometheus-adapter in a pod, set up as `docs/autoscaling.md` says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from cluster.binaries import build
from cluster.control_plane import Server
from cluster.guide import blocks
from cluster.images import ROOT
from cluster.namespaces import CannotRun
from cluster.nodes import ADDRESS, Cluster
from cluster.tiny_image import write_image

PAGE = ROOT / "docs" / "autoscaling.md"
PREPARING = "Prepare deployment and Prometheus"
BY_KEDA = "With KEDA"
BY_HPA = "With a HorizontalPodAutoscaler alone"
NAMESPACE = "monitoring"
_IMAGE = "medha.test/prometheus-adapter:1"
_NAME = "prometheus-adapter"
_PORT = 6443
_RELIST_SECONDS = 5
SECONDS = 600
"""Limit of the start of a pod; a busy machine takes minutes."""


def adapter_image(folder: Path) -> Path:
    """Write an archive of prometheus-adapter's image.

    Raises:
        CannotBuild: it cannot be built.
    """
    program = build([_NAME])[_NAME]
    return write_image(folder / "adapter.tar", _IMAGE, {"/adapter": program}, ["/adapter"])


def install_adapter(cluster: Cluster) -> None:
    """Install prometheus-adapter with the page's values, and wait until it serves."""
    apply(cluster, _adapter(yaml.safe_load(blocks(PAGE, BY_HPA, "yaml")[0])))
    cluster.kubectl("-n", NAMESPACE, "rollout", "status", f"deployment/{_NAME}", f"--timeout={SECONDS}s")


def apply(cluster: Cluster, documents: list[dict[str, Any]]) -> None:
    listed = {"apiVersion": "v1", "kind": "List", "items": documents}
    cluster.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(listed))


@contextmanager
def prometheus(cluster: Cluster, folder: Path) -> Iterator[None]:
    """Run a Prometheus on the first node, which scrapes routers with the page's job, until the end of the block.

    Raises:
        CannotRun: the machine has no Prometheus.
    """
    program = shutil.which("prometheus")
    if program is None:
        raise CannotRun("no prometheus: install the package prometheus")
    settings = yaml.safe_load(blocks(PAGE, PREPARING, "yaml")[0])
    for job in settings["scrape_configs"]:
        job["scrape_interval"] = "2s"
        for discovery in job["dns_sd_configs"]:
            discovery["refresh_interval"] = "2s"
    config = folder / "prometheus.yml"
    config.write_text(yaml.safe_dump(settings), encoding="utf-8")
    node = cluster.nodes[0]
    assert node.sandbox is not None
    arguments = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'prometheus'}"]
    # It runs in no pod, and finds names as in one.
    resolver = folder / "resolv.conf"
    resolver.write_text(f"nameserver {ADDRESS}\nsearch svc.cluster.local cluster.local\noptions ndots:5\n")
    script = f'mount --bind {resolver} "$(realpath /etc/resolv.conf)" && exec "$@"'
    inside = [*node.sandbox.inside(), "unshare", "--mount", "sh", "-ec", script, "sh"]
    server = Server(folder, Path(program), arguments, inside)
    try:
        with cluster.forward(node.address, 9090) as port:
            server.wait_until(lambda: _is_ready(f"http://127.0.0.1:{port}/-/ready"), "answered /-/ready")
        cluster.kubectl("create", "namespace", NAMESPACE)
        apply(cluster, _service_of_prometheus(cluster))
        yield
    finally:
        server.stop()


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def _service_of_prometheus(cluster: Cluster) -> list[dict[str, Any]]:
    """Return the objects by which pods reach Prometheus under the page's address."""
    port = {"name": "http", "port": 9090, "protocol": "TCP"}
    metadata = {"name": "prometheus", "namespace": NAMESPACE}
    labels = {"kubernetes.io/service-name": "prometheus"}
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {"ports": [port]}},
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": metadata | {"labels": labels},
            "addressType": "IPv4",
            "ports": [port],
            "endpoints": [{"addresses": [cluster.nodes[0].address]}],
        },
    ]


def _adapter(values: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the objects that prometheus-adapter's chart makes of its values, as far as they matter here."""
    metadata = {"name": _NAME, "namespace": NAMESPACE}
    labels = {"app": _NAME}
    prometheus, rules = values["prometheus"], values["rules"]
    assert not rules["default"]
    group, version = "external.metrics.k8s.io", "v1beta1"
    container = {
        "name": "adapter",
        "image": _IMAGE,
        "imagePullPolicy": "Never",
        "args": [
            f"--prometheus-url={prometheus['url']}:{prometheus['port']}",
            f"--metrics-relist-interval={_RELIST_SECONDS}s",
            "--config=/etc/adapter/config.yaml",
            "--cert-dir=/run/keys",
            f"--secure-port={_PORT}",
        ],
        "readinessProbe": {
            "httpGet": {"path": "/readyz", "port": _PORT, "scheme": "HTTPS"},
            "periodSeconds": 1,
        },
        "volumeMounts": [
            {"name": "config", "mountPath": "/etc/adapter"},
            {"name": "keys", "mountPath": "/run/keys"},
            {"name": "keys", "mountPath": "/tmp"},  # noqa: S108 - in its pod
        ],
    }
    pod = {
        "serviceAccountName": _NAME,
        "securityContext": {"fsGroup": 65532},
        "containers": [container],
        "volumes": [
            {"name": "config", "configMap": {"name": _NAME}},
            {"name": "keys", "emptyDir": {}},
        ],
    }
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        *(
            {
                "apiVersion": "rbac.authorization.k8s.io/v1",
                "kind": binding,
                "metadata": {"name": _NAME} | where,
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": role},
                "subjects": [{"kind": "ServiceAccount", "name": _NAME, "namespace": NAMESPACE}],
            }
            for binding, where, kind, role in (
                ("ClusterRoleBinding", {}, "ClusterRole", "system:auth-delegator"),
                (
                    "RoleBinding",
                    {"namespace": "kube-system"},
                    "Role",
                    "extension-apiserver-authentication-reader",
                ),
            )
        ),
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": metadata,
            "data": {"config.yaml": yaml.safe_dump({"externalRules": rules["external"]})},
        },
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": metadata,
            "spec": {
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": pod},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata,
            "spec": {"selector": labels, "ports": [{"port": 443, "targetPort": _PORT}]},
        },
        {
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": f"{version}.{group}"},
            "spec": {
                "group": group,
                "version": version,
                "groupPriorityMinimum": 100,
                "versionPriority": 100,
                "insecureSkipTLSVerify": True,  # its certificate is its own
                "service": {"name": _NAME, "namespace": NAMESPACE},
            },
        },
    ]
