"""The route that the chart makes, through an implementation of the Gateway API: Envoy Gateway, with the installed Envoy.

Without a cluster, Envoy Gateway knows no Services. An object of its own, a `Backend` with the router's address, stands for the
Service here; all else of the route and its policy is the chart's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml

from chart.conftest import helm as helm
from chart.helm import NAMESPACE, Helm, Manifest, find
from cluster.binaries import build
from gateways.behind_envoy_gateway import ENVOY_VERSION, GATEWAY_PORT, HOST, ROUTER_ADDRESS, SAID
from gateways.conftest import ROUTER_NAME, Certificates
from gateways.envoy import block

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]  # building Envoy Gateway takes minutes

NETWORK = ["unshare", "--net", "--", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]


def platform() -> list[Manifest]:
    """Return what the page leaves to the cluster: the Gateway that the route names, for Envoy on this machine."""
    api, envoy_api = "gateway.networking.k8s.io/v1", "gateway.envoyproxy.io/v1alpha1"
    host = {"type": "Host", "host": {"envoyVersion": ENVOY_VERSION}}
    parameters = {
        "group": "gateway.envoyproxy.io",
        "kind": "EnvoyProxy",
        "name": "host",
        "namespace": "gateways",
    }
    listener = {
        "name": "http",
        "protocol": "HTTP",
        "port": GATEWAY_PORT,
        "allowedRoutes": {"namespaces": {"from": "All"}},
    }
    return [
        {
            "apiVersion": envoy_api,
            "kind": "EnvoyProxy",
            "metadata": {"name": "host", "namespace": "gateways"},
            "spec": {"provider": host},
        },
        {
            "apiVersion": api,
            "kind": "GatewayClass",
            "metadata": {"name": "envoy"},
            "spec": {
                "controllerName": "gateway.envoyproxy.io/gatewayclass-controller",
                "parametersRef": parameters,
            },
        },
        {
            "apiVersion": api,
            "kind": "Gateway",
            "metadata": {"name": "public", "namespace": "gateways"},
            "spec": {"gatewayClassName": "envoy", "listeners": [listener]},
        },
        {
            "apiVersion": envoy_api,
            "kind": "Backend",
            "metadata": {"name": "medha-router", "namespace": NAMESPACE},
            "spec": {"endpoints": [{"ip": {"address": ROUTER_ADDRESS, "port": 8000}}]},
        },
    ]


def lead_to_backend(route: Manifest, policy: Manifest) -> None:
    """Replace the Service in a route and in its policy."""
    backend = {"group": "gateway.envoyproxy.io", "kind": "Backend", "name": "medha-router"}
    ((reference,),) = (rule["backendRefs"] for rule in route["spec"]["rules"])
    assert reference["name"] == backend["name"]
    route["spec"]["rules"][0]["backendRefs"] = [backend]
    (target,) = policy["spec"]["targetRefs"]
    assert (target["kind"], target["name"]) == ("Service", backend["name"])
    policy["spec"]["targetRefs"] = [backend]


def test_the_charts_route_and_its_policy_for_tls_lead_to_a_router(helm: Helm, tmp_path: Path) -> None:
    manifests = helm.render(**block("http-route"))
    certificates = Certificates(trustme.CA(), tmp_path / "certificates")
    for name, file in certificates.issue(ROUTER_NAME).items():
        (tmp_path / name).write_bytes(file.read_bytes())
    authority: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "llm-ca", "namespace": NAMESPACE},
        "data": {"ca.crt": certificates.authority.cert_pem.bytes().decode()},
    }
    route, policy = (find(manifests, kind, "medha-router") for kind in ("HTTPRoute", "BackendTLSPolicy"))
    assert route["spec"]["hostnames"] == [HOST]
    lead_to_backend(route, policy)
    (tmp_path / "resources").mkdir()
    (tmp_path / "resources" / "all.yaml").write_text(
        yaml.safe_dump_all([*platform(), authority, route, policy]), encoding="utf-8"
    )
    program = build(["envoy-gateway"])["envoy-gateway"]
    tests = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [*NETWORK, sys.executable, "-m", "gateways.behind_envoy_gateway", str(tmp_path), str(program)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tests), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    log = tmp_path / "envoy-gateway.log"
    assert done.returncode == 0, (
        done.stderr + (log.read_text(encoding="utf-8") if log.exists() else "")[-6000:]
    )
    assert json.loads(done.stdout) == {
        "answer": SAID,
        "stream": SAID,
        "other host": 404,
        "other path": 404,
    }
