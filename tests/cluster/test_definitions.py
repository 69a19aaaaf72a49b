"""The API server takes our definitions, fills in their defaults and refuses what cannot be meant."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cluster.control_plane import ControlPlane

MODEL: dict[str, Any] = {"name": "m", "source": {"path": "checkpoint"}}


def replica(name: str = "r", **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "medha.dev/v1alpha1",
        "kind": "MedhaReplica",
        "metadata": {"name": name},
        "spec": {"model": MODEL} | spec,
    }


def deployment(**spec: Any) -> dict[str, Any]:
    template = {"spec": replica()["spec"]}
    return replica() | {"kind": "MedhaDeployment", "spec": {"template": template} | spec}


def create(plane: ControlPlane, document: dict[str, Any]) -> str:
    """What `kubectl create` says of `document`, which is not kept."""
    return plane.kubectl(
        "create", "--dry-run=server", "-o", "json", "-f", "-", stdin=json.dumps(document), check=False
    )


def test_a_minimal_replica_gets_every_default_of_the_models(plane: ControlPlane) -> None:
    spec = json.loads(create(plane, replica()))["spec"]
    assert spec["parallelism"] == {"tensor": 1, "stream": 1, "kv": 1}
    assert spec["lifecycle"]["restart"]["backoffLimitSeconds"] == 600
    assert [entry["name"] for entry in spec["serviceClasses"]] == ["default"]
    assert spec["resources"] == {
        "accelerator": "nvidia.com/gpu",
        "devices": {},
        "sharedMemory": "8Gi",
        "nccl": {},
        "requests": {},
        "limits": {},
    }


PINNED = {"repository": "a/b", "revision": "0" * 40}
REFUSED = [
    (
        {"model": MODEL | {"source": {"path": "a", "hostPath": {"path": "/b"}}}},
        "model.source needs exactly one of path, huggingFace, pvc, hostPath, image",
    ),
    ({"model": MODEL | {"source": {}}}, "model.source needs exactly one of"),
    (
        {"model": MODEL | {"source": {"huggingFace": {"repository": "a/b", "cache": {"claimName": "c"}}}}},
        "huggingFace.cache keeps one version under one name; set huggingFace.revision to a commit",
    ),
    (
        {"model": MODEL | {"source": {"huggingFace": PINNED | {"cache": {}}}}},
        "huggingFace.cache needs exactly one of claimName and hostPath",
    ),
    (
        {
            "model": MODEL
            | {"source": {"huggingFace": PINNED | {"cache": {"claimName": "c", "hostPath": "/c"}}}}
        },
        "huggingFace.cache needs exactly one of claimName and hostPath",
    ),
    (
        {"model": MODEL | {"architecture": {"layers": 8, "queryHeads": 8}}, "parallelism": {"tensor": 3}},
        "parallelism.tensor must divide model.architecture.queryHeads",
    ),
    (
        {"model": MODEL | {"architecture": {"layers": 2, "queryHeads": 8}}, "parallelism": {"stream": 3}},
        "parallelism.stream is more stages than model.architecture.layers",
    ),
    (
        {"serviceClasses": [{"name": "a"}, {"name": "default"}]},
        "serviceClasses has `default` after the first",
    ),
    ({"serviceClasses": [{"name": "a"}, {"name": "a"}]}, "Duplicate value"),
    ({"serviceClasses": []}, "should have at least 1 items"),
    (
        {"serviceClasses": [{"name": "a", "tpotTargetSeconds": 0.001}]},
        "tpotTargetSeconds is below tpotFloorSeconds",
    ),
    (
        {"serviceClasses": [{"name": "a", "ttftFloorSeconds": 0}]},
        "should be greater than 0",
    ),
    ({"placement": {"gang": "kueue"}}, "gang kueue needs placement.queue"),
    ({"placement": {"queue": "q"}}, "placement.queue is read by gang kueue and volcano only"),
    ({"placement": {"gang": "core", "queue": "q"}}, "placement.queue is read by gang kueue and volcano only"),
    ({"placement": {"gang": "slurm"}}, 'supported values: "none", "kueue", "volcano", "core"'),
    ({"placement": {"laneTopology": {"mode": "required"}}}, "placement.laneTopology.key: Required value"),
    ({"placement": {"laneTopology": {"key": "rack", "mode": "always"}}}, 'supported values: "preferred"'),
    (
        {"lifecycle": {"restart": {"backoffSeconds": 60, "backoffLimitSeconds": 30}}},
        "restart.backoffLimitSeconds is below backoffSeconds",
    ),
    ({"scheduling": {"minChunkTokens": 4096}}, "scheduling.maxChunkTokens is below minChunkTokens"),
    ({"resources": {"devices": {"hca": 1}}}, "resources.devices has a name that is no device resource"),
    ({"resources": {"devices": {"nvidia.com/gpu": 1}}}, "resources.devices names the accelerator; remove it"),
    ({"resources": {"devices": {"rdma/hca": 0}}}, "should be greater than or equal to 1"),
    ({"resources": {"nccl": {"LD_PRELOAD": "x.so"}}}, "takes names that begin with NCCL_ only"),
    ({"resources": {"nccl": {"NCCL_DEBUG": ""}}}, "should be at least 1 chars long"),
    (
        {"resources": {"accelerator": "none", "nccl": {"NCCL_DEBUG": "INFO"}}},
        "resources.nccl is read with an accelerator only",
    ),
    ({"resources": {"sharedMemory": "0Gi"}}, "spec.resources.sharedMemory in body should match"),
    (
        {"resources": {"accelerator": "nvidia.com/mig-1g.10gb"}, "parallelism": {"kv": 2}},
        "NCCL cannot join the slices of a GPU; set parallelism.tensor, stream and kv to 1",
    ),
    (
        {"determinism": "batchInvariant", "parallelism": {"kv": 2}},
        "determinism batchInvariant needs parallelism.kv 1",
    ),
    ({"determinism": "exact"}, 'supported values: "bestEffort", "batchInvariant"'),
    ({"parallelism": {"tensor": 0}}, "should be greater than or equal to 1"),
    ({"parallelism": {"stream": 32, "kv": 32}}, "parallelism.stream x kv is more than 256 pods"),
    (
        {"parallelism": {"tensor": 64, "stream": 8, "kv": 8}},
        "parallelism.tensor x stream x kv is more than 2048 ranks",
    ),
    (
        {"kvCache": {"memoryFraction": 1}},
        "spec.kvCache.memoryFraction: Invalid value: 1: must be at most 0.98",
    ),
    ({"kvCache": {"memoryFraction": 0.99}}, "must be at most 0.98"),
    ({"kvCache": {"size": "0"}}, "must be above 0"),
    ({"kvCache": {"size": "16GB"}}, "must be a size; write a number with Ki, Mi, Gi or Ti, such as 16Gi"),
    (
        {"kvCache": {"tiers": {}}},
        "kvCache.tiers names no tier, so it would do nothing; add kvCache.tiers.host",
    ),
    (
        {"kvCache": {"tiers": {"host": {"size": "1Gi"}, "store": {"url": "file://x/y"}}}},
        "must be the address of a store; write s3://BUCKET/PREFIX, or file:// with an absolute path",
    ),
    ({"router": {"maxBodyBytes": "0Mi"}}, "must be above 0"),
    ({"scheduling": {"demotedShare": 0}}, "must be at least 0.01"),
    ({"scheduling": {"maxStepSeconds": 0}}, "must be at least 0.001"),
    ({"scheduling": {"policy": "lifo"}}, 'supported values: "fcfs"'),
    ({"paralellism": {"tensor": 1}}, 'unknown field "spec.paralellism"'),
]


@pytest.mark.parametrize(("spec", "notice"), REFUSED, ids=[str(index) for index in range(len(REFUSED))])
def test_what_cannot_be_meant_is_refused_in_words(
    plane: ControlPlane, spec: dict[str, Any], notice: str
) -> None:
    assert notice in create(plane, replica(**spec))


@pytest.mark.parametrize("grid", [(8, 16, 16), (64, 32, 1), (1, 256, 1), (1, 1, 256), (8, 4, 4)])
def test_the_largest_grids_that_can_be_meant_are_taken(
    plane: ControlPlane, grid: tuple[int, int, int]
) -> None:
    tensor, stream, kv = grid
    taken = replica(
        parallelism={"tensor": tensor, "stream": stream, "kv": kv}, kvCache={"memoryFraction": 0.98}
    )
    assert json.loads(create(plane, taken))["spec"]["parallelism"] == {
        "tensor": tensor,
        "stream": stream,
        "kv": kv,
    }


@pytest.mark.parametrize(("spec", "notice"), REFUSED, ids=[str(index) for index in range(len(REFUSED))])
def test_a_deployment_of_it_is_refused_in_the_same_words(
    plane: ControlPlane, spec: dict[str, Any], notice: str
) -> None:
    document = deployment(template={"spec": replica(**spec)["spec"]})
    assert notice.replace('"spec.', '"spec.template.spec.') in create(plane, document)


def test_a_pod_with_one_rank_may_have_a_slice_of_a_gpu(plane: ControlPlane) -> None:
    resources = {
        "accelerator": "nvidia.com/mig-1g.10gb",
        "devices": {"rdma/hca": 1},
        "nccl": {"NCCL_IB_HCA": "mlx5"},
    }
    taken = json.loads(create(plane, replica(resources=resources)))["spec"]["resources"]
    assert {name: taken[name] for name in resources} == resources


@pytest.mark.parametrize(
    "placement",
    [
        {"gang": "kueue", "queue": "q"},
        {"gang": "volcano"},
        {"gang": "volcano", "queue": "q"},
        {"gang": "core", "laneTopology": {"key": "rack", "mode": "required"}},
    ],
)
def test_gangs_and_topologies_that_go_together_are_taken(
    plane: ControlPlane, placement: dict[str, Any]
) -> None:
    assert json.loads(create(plane, replica(placement=placement)))["spec"]["placement"]["gang"]


def test_the_gang_of_a_deployments_replicas_can_be_changed(plane: ControlPlane) -> None:
    """It replaces them for it."""
    plane.kubectl("apply", "-f", "-", stdin=json.dumps(deployment()))
    changed = {"spec": replica(placement={"gang": "core"})["spec"]}
    plane.kubectl("apply", "-f", "-", stdin=json.dumps(deployment(template=changed)))
    found = plane.kubectl("get", "md", "r", "-o", "jsonpath={.spec.template.spec.placement.gang}")
    assert found == "core"
    plane.kubectl("delete", "md", "r")


def test_the_gang_of_a_replica_cannot_be_changed(plane: ControlPlane) -> None:
    plane.kubectl("apply", "-f", "-", stdin=json.dumps(replica("fixed")))
    changed = replica("fixed", placement={"gang": "core"})
    said = plane.kubectl("apply", "-f", "-", stdin=json.dumps(changed), check=False)
    assert "placement.gang cannot be changed; create a new replica" in said
    plane.kubectl("delete", "mr", "fixed")


@pytest.mark.parametrize("surge", [0, "0%"])
def test_a_rollout_that_could_never_move_is_refused(plane: ControlPlane, surge: object) -> None:
    rollout = {"maxSurge": surge, "maxUnavailable": 0}
    assert "no replica could ever be replaced" in create(plane, deployment(rollout=rollout))
    assert json.loads(create(plane, deployment(rollout={"maxSurge": surge, "maxUnavailable": "25%"})))


@pytest.mark.parametrize("surge", [-1, 10_001])
def test_numbers_are_bound_where_a_text_would_do_too(plane: ControlPlane, surge: int) -> None:
    notice = create(plane, deployment(rollout={"maxSurge": surge, "maxUnavailable": 1}))
    assert "spec.rollout.maxSurge" in notice
    assert "0" in notice
    amounts = {"requests": {"cpu": -1}}
    assert "spec.resources.requests.cpu" in create(plane, replica(resources=amounts))


def test_a_deployment_has_a_scale_subresource(plane: ControlPlane) -> None:
    plane.kubectl("apply", "-f", "-", stdin=json.dumps(deployment(replicas=2)))
    plane.kubectl("scale", "md/r", "--replicas=5")
    assert plane.kubectl("get", "md", "r", "-o", "jsonpath={.spec.replicas}") == "5"
    plane.kubectl("delete", "md", "r")


def test_kubectl_explain_shows_units_bounds_and_how_a_change_is_applied(plane: ControlPlane) -> None:
    said = plane.kubectl("explain", "mr.spec.scheduling.maxStepSeconds")
    assert "Bound of a step when nothing decodes" in said
    assert "A change reaches the running replica by a new epoch" in " ".join(said.split())
    said = plane.kubectl("explain", "mr.spec.lifecycle.restart.stableSeconds")
    assert "A change reaches the running replica." in " ".join(said.split())


@pytest.mark.parametrize("name", ["7b", "a.b", "r" * 42])
def test_a_deployments_name_leaves_room_for_those_of_its_replicas(plane: ControlPlane, name: str) -> None:
    notice = create(plane, deployment() | {"metadata": {"name": name}})
    assert "metadata.name must begin with a letter" in notice
    assert "no longer than 41" in notice
    assert json.loads(create(plane, deployment() | {"metadata": {"name": "r" * 41}}))


@pytest.mark.parametrize("name", ["7b", "a.b", "r" * 47])
def test_a_name_that_no_pod_could_have_is_refused(plane: ControlPlane, name: str) -> None:
    assert "metadata.name must begin with a letter" in create(plane, replica(name))
    assert json.loads(create(plane, replica("r" * 46)))


def heads(said: str) -> list[list[str]]:
    """The header of each table that `kubectl get` has printed, in its columns."""
    return [line.split() for line in said.splitlines() if line.startswith("NAME ")]


REPLICAS = ["NAME", "READY", "SHAPE", "GPUS", "PODS", "REASON", "AGE"]
DEPLOYMENTS = ["NAME", "READY", "DESIRED", "UPDATED", "AVAILABLE", "REASON", "AGE"]


def test_kubectl_get_knows_short_names_and_the_category_and_prints_what_matters(plane: ControlPlane) -> None:
    plane.kubectl("apply", "-f", "-", stdin=json.dumps(replica("shown")))
    plane.kubectl("apply", "-f", "-", stdin=json.dumps(deployment() | {"metadata": {"name": "shown"}}))
    try:
        assert heads(plane.kubectl("get", "mr,md")) == [REPLICAS, DEPLOYMENTS]
        wide = [[*REPLICAS[:-1], "MODEL", "REVISION", "AGE"], [*DEPLOYMENTS[:-1], "MODEL", "AGE"]]
        assert heads(plane.kubectl("get", "mr,md", "-o", "wide")) == wide
        notice = plane.kubectl("get", "medha", "-o", "name").split()
        assert notice == ["medhadeployment.medha.dev/shown", "medhareplica.medha.dev/shown"]
        assert set(notice) <= set(plane.kubectl("get", "all", "-o", "name").split())
    finally:
        plane.kubectl("delete", "mr,md", "shown")
