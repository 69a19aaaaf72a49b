"""The API server takes every object that a replica is rendered to, and changes nothing in it that we would fight over."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cluster.control_plane import ControlPlane
from medha.api.replica import MedhaReplicaSpec
from medha_operator.kube.kinds import Manifest
from medha_operator.operator_settings import OperatorSettings
from medha_operator.replica.manifests import (
    Owner,
    config_map,
    disruption_budget,
    lane,
    network_policy,
    pod_templates,
    service,
)
from medha_operator.replica.revision import begin

OWNER = Owner("llama", "default", "7f0c7c0e-0000-4000-8000-000000000000")


def rendered(**fields: Any) -> list[Manifest]:
    spec = MedhaReplicaSpec.model_validate(
        {"model": {"name": "m", "source": {"hostPath": {"path": "/models/m"}}}} | fields
    )
    revision = begin(spec, []).name
    templates = pod_templates(OWNER, spec, revision, OperatorSettings())
    stages = spec.parallelism.stream
    return [
        service(OWNER),
        disruption_budget(OWNER),
        network_policy(OWNER),
        config_map(OWNER, spec, revision),
        *(lane(OWNER, index, stages, stages, template) for index, template in enumerate(templates)),
    ]


def kept(sent: Any, received: Any, path: str = "") -> list[str]:
    """Paths of what was sent and did not come back the same."""
    if isinstance(sent, dict):
        return [
            found
            for name, value in sent.items()
            for found in kept(
                value, received.get(name) if isinstance(received, dict) else None, f"{path}.{name}"
            )
        ]
    if isinstance(sent, list) and isinstance(received, list) and len(sent) == len(received):
        return [found for i, value in enumerate(sent) for found in kept(value, received[i], f"{path}[{i}]")]
    return [] if sent == received else [f"{path}: {sent!r} became {received!r}"]


SPECS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "grid": {"parallelism": {"tensor": 8, "stream": 4, "kv": 3}},
    "cpu": {"resources": {"accelerator": "none", "requests": {"cpu": "2", "memory": "4Gi"}}},
    "devices": {
        "parallelism": {"tensor": 8},
        "resources": {
            "devices": {"rdma/hca": 2},
            "runtimeClassName": "nvidia",
            "sharedMemory": "16Gi",
            "nccl": {"NCCL_IB_HCA": "mlx5", "NCCL_SOCKET_IFNAME": "eth1"},
        },
    },
    "hub": {
        "model": {
            "name": "m",
            "source": {"huggingFace": {"repository": "a/b", "tokenSecret": {"name": "hf"}}},
        }
    },
    "claim": {"model": {"name": "m", "source": {"pvc": {"claimName": "weights", "path": "m/8b"}}}},
    "image volume": {
        "model": {
            "name": "m",
            "source": {
                "image": {"reference": "models.example/m:1", "pullPolicy": "IfNotPresent", "path": "m/8b"}
            },
        }
    },
    "in the image": {"model": {"name": "m", "source": {"path": "/opt/model"}}},
    "near": {"placement": {"laneTopology": {"key": "topology.kubernetes.io/zone", "mode": "required"}}},
    "overrides": {
        "imagePullSecrets": [{"name": "registry"}],
        "template": {
            "metadata": {"labels": {"team": "search"}},
            "spec": {
                "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
                "containers": [{"name": "worker", "env": [{"name": "NCCL_DEBUG", "value": "INFO"}]}],
            },
        },
    },
}


@pytest.mark.parametrize("name", SPECS)
def test_every_object_is_accepted_as_it_was_sent(plane: ControlPlane, name: str) -> None:
    objects = rendered(**SPECS[name])
    answer = plane.kubectl(
        "apply",
        "--server-side",
        "--field-manager=medha-operator",
        "--dry-run=server",
        "-o",
        "json",
        "-f",
        "-",
        stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}),
    )
    received = json.loads(answer)["items"]
    assert [entry["kind"] for entry in received] == [entry["kind"] for entry in objects]
    for sent, came in zip(objects, received, strict=True):
        assert kept(sent, came) == []


def test_pods_satisfy_the_restricted_standard(plane: ControlPlane) -> None:
    plane.kubectl("create", "namespace", "strict")
    plane.kubectl("label", "namespace", "strict", "pod-security.kubernetes.io/enforce=restricted")
    plane.kubectl("create", "serviceaccount", "default", "-n", "strict")
    spec = MedhaReplicaSpec.model_validate(
        {"model": {"name": "m", "source": {"huggingFace": {"repository": "a/b"}}}}
    )
    (template,) = pod_templates(OWNER, spec, "r", OperatorSettings())
    pod = {"apiVersion": "v1", "kind": "Pod", **template}
    pod["metadata"] |= {"name": "p", "namespace": "strict"}
    said = plane.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(pod))
    assert "created" in said
