"""Pods get the devices, the runtime, the shared memory and NCCL's settings that their replica asks for."""

from __future__ import annotations

from typing import Any

import pytest

from medha.api.replica import MedhaReplicaSpec
from medha_operator.operator_settings import OperatorSettings
from medha_operator.replica.manifests import Owner, network_policy, peer_ports, pod_templates
from medha_operator.replica.node_capacity import needs_of
from medha_process.pod_contract import PEERS_PORT

EPHEMERAL = str(2 * (8 * 2**30 + 64 * 2**20))
"""Bytes of files of two ranks with 8 GiB each, and of what they may exceed that by."""
HUB = {"name": "m", "source": {"huggingFace": {"repository": "a/b"}}}


def pod(resources: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    """Return the spec of the only pod of a replica, whose model an init container downloads."""
    fields = {"model": HUB, "resources": resources or {}} | spec
    owner, parsed = Owner("r", "default", "u"), MedhaReplicaSpec.model_validate(fields)
    (template,) = pod_templates(owner, parsed, "revision", OperatorSettings())
    found: dict[str, Any] = template["spec"]
    return found


def variables(spec: dict[str, Any]) -> dict[str, str]:
    """Return NCCL's variables of the worker."""
    entries = spec["containers"][0]["env"]
    return {one["name"]: one["value"] for one in entries if one["name"].startswith("NCCL_")}


def test_devices_are_requested_and_limited_alike_and_not_for_what_downloads_the_model() -> None:
    resources = {"devices": {"rdma/hca": 2}, "requests": {"cpu": "8"}, "limits": {"memory": "64Gi"}}
    spec = pod(resources, parallelism={"tensor": 8})
    devices = {"nvidia.com/gpu": "8", "rdma/hca": "2"}
    assert spec["containers"][0]["resources"] == {
        "requests": {"cpu": "8"} | devices,
        "limits": {"memory": "64Gi"} | devices,
    }
    assert spec["initContainers"][0]["resources"] == {"requests": {"cpu": "8"}, "limits": {"memory": "64Gi"}}
    amounts = needs_of({"spec": spec}).amounts
    assert (amounts["nvidia.com/gpu"], amounts["rdma/hca"]) == (8, 2), (
        "a move to another node needs room for them"
    )


def test_the_image_is_the_accelerators_unless_the_replica_names_one() -> None:
    def images(spec: dict[str, Any]) -> set[str]:
        return {one["image"] for one in (*spec["containers"], *spec["initContainers"])}

    settings = OperatorSettings()
    assert settings.worker_image != settings.gpu_worker_image
    assert (
        images(pod()) == images(pod({"accelerator": "nvidia.com/mig-1g.10gb"})) == {settings.gpu_worker_image}
    )
    assert images(pod({"accelerator": "none"})) == {settings.worker_image}
    assert images(pod(image="mine")) == images(pod({"accelerator": "none"}, image="mine")) == {"mine"}


def test_a_replica_on_cpus_may_ask_for_other_devices() -> None:
    spec = pod({"accelerator": "none", "devices": {"rdma/hca": 1}})
    assert spec["containers"][0]["resources"]["limits"] == {"rdma/hca": "1"}


def test_shared_memory_has_a_bound() -> None:
    def shared(spec: dict[str, Any]) -> dict[str, Any]:
        (volume,) = (one for one in spec["volumes"] if one["name"] == "shm")
        found: dict[str, Any] = volume["emptyDir"]
        return found

    assert shared(pod()) == {"medium": "Memory", "sizeLimit": "8Gi"}
    assert shared(pod({"sharedMemory": "512Mi"})) == {"medium": "Memory", "sizeLimit": "512Mi"}
    mounts = {one["name"]: one["mountPath"] for one in pod()["containers"][0]["volumeMounts"]}
    assert mounts["shm"] == "/dev/shm"  # noqa: S108 - of the container


def test_the_runtime_class_is_the_nodes_own_unless_one_is_named() -> None:
    assert "runtimeClassName" not in pod()
    assert pod({"runtimeClassName": "nvidia"})["runtimeClassName"] == "nvidia"


def test_nccl_logs_its_errors_and_has_what_the_replica_sets() -> None:
    assert variables(pod()) == {"NCCL_DEBUG": "WARN"}
    own = {"NCCL_SOCKET_IFNAME": "eth1", "NCCL_DEBUG": "INFO"}
    found = variables(pod({"nccl": own}))
    assert found == own
    assert list(found) == sorted(found), "the same replica renders the same pod"
    assert variables(pod({"accelerator": "none"})) == {}


def test_the_template_has_the_last_word() -> None:
    container = {"name": "worker", "env": [{"name": "NCCL_DEBUG", "value": "TRACE"}]}
    overlay = {"containers": [container], "runtimeClassName": "kata"}
    spec = pod({"runtimeClassName": "nvidia"}, template={"spec": overlay})
    assert variables(spec) == {"NCCL_DEBUG": "TRACE"}
    assert spec["runtimeClassName"] == "kata"


def test_nodes_with_an_interconnect_are_chosen_beside_the_domain_of_a_lane() -> None:
    joined = {"matchExpressions": [{"key": "nvlink", "operator": "Exists"}]}
    nodes = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [joined]}}
    overlay = {"nodeSelector": {"fabric": "a"}, "affinity": {"nodeAffinity": nodes}}
    spec = pod(placement={"laneTopology": {"key": "rack", "mode": "required"}}, template={"spec": overlay})
    assert spec["nodeSelector"] == {"fabric": "a"}
    assert spec["affinity"]["nodeAffinity"] == nodes
    (term,) = spec["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "rack"


@pytest.mark.parametrize("method", ["draftModel", "predictionHead"])
def test_a_draft_model_or_head_is_mounted_from_its_own_volume(method: str) -> None:
    def mounted(source: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        drafter = source if method == "draftModel" else {"kind": "eagle3", "source": source}
        speculation = {"method": method, method: drafter}
        spec = pod(scheduling={"speculation": speculation})
        mounts = spec["containers"][0]["volumeMounts"]
        return (
            [one for one in spec["volumes"] if one["name"] == "draft-model"],
            [one for one in mounts if one["name"] == "draft-model"],
        )

    mount = {"name": "draft-model", "mountPath": "/draft-model", "readOnly": True}
    claim = {"claimName": "c", "readOnly": True}
    assert mounted({"pvc": {"claimName": "c", "path": "/a/b"}}) == (
        [{"name": "draft-model", "persistentVolumeClaim": claim}],
        [mount | {"subPath": "a/b"}],
    )
    image = {"reference": "r/m:1", "pullPolicy": "IfNotPresent"}
    assert mounted({"image": {"reference": "r/m:1"}}) == ([{"name": "draft-model", "image": image}], [mount])
    assert mounted({"path": "/models/small"}) == ([], []), "a directory of the pods' image"


@pytest.mark.parametrize(
    ("resources", "requested", "limited"),
    [
        ({}, 2 * 2**30, None),
        ({"requests": {"memory": "4Gi"}}, 6 * 2**30, None),
        ({"limits": {"memory": "4Gi"}}, 6 * 2**30, 6 * 2**30),
        ({"requests": {"memory": "1Gi"}, "limits": {"memory": "8Gi"}}, 3 * 2**30, 10 * 2**30),
    ],
)
def test_pods_request_the_memory_of_their_ranks_host_tiers(
    resources: dict[str, Any], requested: int, limited: int | None
) -> None:
    """Two ranks of a pod have 1 GiB each; the container that downloads the model needs none of it."""
    spec = pod(
        {"accelerator": "none"} | resources,
        parallelism={"tensor": 2},
        kvCache={"tiers": {"host": {"size": "1Gi"}}},
    )
    found = spec["containers"][0]["resources"]
    assert found["requests"]["memory"] == str(requested)
    assert found.get("limits", {}).get("memory") == (None if limited is None else str(limited))
    assert spec["initContainers"][0]["resources"] == resources


@pytest.mark.parametrize(
    ("volume", "expected", "ephemeral"),
    [
        ({}, {"emptyDir": {"sizeLimit": EPHEMERAL}}, EPHEMERAL),
        ({"claimName": "kv"}, {"persistentVolumeClaim": {"claimName": "kv"}}, None),
        ({"hostPath": "/var/kv"}, {"hostPath": {"path": "/var/kv", "type": "Directory"}}, None),
    ],
    ids=["ephemeral", "claim", "directory of the node"],
)
def test_pods_have_a_volume_for_their_ranks_disk_tiers(
    volume: dict[str, str], expected: dict[str, Any], ephemeral: str | None
) -> None:
    tiers = {"host": {"size": "1Gi"}, "disk": {"size": "8Gi"} | volume}
    spec = pod({"accelerator": "none"}, parallelism={"tensor": 2}, kvCache={"tiers": tiers})
    (found,) = [one for one in spec["volumes"] if one["name"] == "kv-files"]
    assert found == {"name": "kv-files"} | expected
    mounts = spec["containers"][0]["volumeMounts"]
    assert {"name": "kv-files", "mountPath": "/kv-files"} in mounts
    assert spec["containers"][0]["resources"]["requests"].get("ephemeral-storage") == ephemeral
    without = pod({"accelerator": "none"}, kvCache={"tiers": {"host": {"size": "1Gi"}}})
    assert "kv-files" not in [one["name"] for one in without["volumes"]]


@pytest.mark.parametrize(
    ("store", "expected"),
    [
        ({"url": "s3://bucket/kv"}, None),
        ({"url": "file:///mnt/kv"}, {"hostPath": {"path": "/mnt/kv", "type": "Directory"}}),
        ({"url": "file:///x", "claimName": "kv"}, {"persistentVolumeClaim": {"claimName": "kv"}}),
    ],
    ids=["S3", "directory of the node", "claim"],
)
def test_pods_mount_a_store_of_files(store: dict[str, str], expected: dict[str, Any] | None) -> None:
    spec = pod({"accelerator": "none"}, kvCache={"tiers": {"host": {"size": "1Gi"}, "store": store}})
    found = [one for one in spec["volumes"] if one["name"] == "kv-store"]
    assert found == ([] if expected is None else [{"name": "kv-store"} | expected])
    mounts = [one for one in spec["containers"][0]["volumeMounts"] if one["name"] == "kv-store"]
    assert mounts == ([] if expected is None else [{"name": "kv-store", "mountPath": "/kv-store"}])


def test_pods_get_the_credentials_of_a_store_from_its_secret_alone() -> None:
    store = {"url": "s3://bucket/kv", "secretName": "s3"}
    spec = pod({"accelerator": "none"}, kvCache={"tiers": {"host": {"size": "1Gi"}, "store": store}})
    found = {one["name"]: one for one in spec["containers"][0]["env"] if one["name"].startswith("AWS_")}
    assert {name: one["valueFrom"]["secretKeyRef"] for name, one in found.items()} == {
        "AWS_ACCESS_KEY_ID": {"name": "s3", "key": "AWS_ACCESS_KEY_ID"},
        "AWS_SECRET_ACCESS_KEY": {"name": "s3", "key": "AWS_SECRET_ACCESS_KEY"},
        "AWS_SESSION_TOKEN": {"name": "s3", "key": "AWS_SESSION_TOKEN", "optional": True},
    }


def test_other_replicas_reach_the_ports_at_which_ranks_give_kv_and_no_others() -> None:
    tiers = {"host": {"size": "1Gi"}, "peers": {}}
    fields = {"parallelism": {"tensor": 2}, "kvCache": {"tiers": tiers}}
    joined = fields | {"routerRef": {"name": "router"}}
    ports = {
        one["name"]: one["containerPort"]
        for one in pod({"accelerator": "none"}, **joined)["containers"][0]["ports"]
    }
    assert {name: port for name, port in ports.items() if name.startswith("peer")} == {
        f"peer-{at}": PEERS_PORT + at for at in range(4)
    }
    owner = Owner("a", "models", "1")
    spec = MedhaReplicaSpec.model_validate(
        {"model": {"name": "m", "source": {"hostPath": {"path": "/m"}}}} | joined
    )
    rules = network_policy(owner, peers_at=peer_ports(spec))["spec"]["ingress"]
    assert rules[2]["ports"] == [{"protocol": "TCP", "port": PEERS_PORT, "endPort": PEERS_PORT + 3}]
    assert rules[2]["from"] == [
        {"podSelector": {"matchExpressions": [{"key": "medha.dev/replica", "operator": "Exists"}]}}
    ]
    without_router = pod({"accelerator": "none"}, **fields)["containers"][0]["ports"]
    assert not [one for one in without_router if one["name"].startswith("peer")], (
        "it has no router to meet others at"
    )
    assert len(network_policy(owner)["spec"]["ingress"]) == 2
