"""The index selects the facts of one replica from all that is known about the cluster."""

from __future__ import annotations

import asyncio
from typing import Any

from reconcile.fake_cluster import GRID, FakeCluster, Stage, resource

SILENT_SINCE = "2029-12-31T20:00:00Z"


def node(name: str, status: str, since: str = SILENT_SINCE) -> dict[str, Any]:
    ready = {"type": "Ready", "status": status, "lastTransitionTime": since}
    metadata = {"name": name, "namespace": ""}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "status": {"conditions": [ready]}}


def pod_of_lane(lane: dict[str, Any], **metadata: Any) -> dict[str, Any]:
    """The first pod of a StatefulSet, on the node `n`."""
    name, labels = lane["metadata"]["name"], lane["spec"]["template"]["metadata"]["labels"]
    owner = {"kind": "StatefulSet", "name": name, "uid": lane["metadata"]["uid"], "controller": True}
    common = {"name": f"{name}-0", "namespace": "default", "labels": labels, "ownerReferences": [owner]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": common | metadata,
        "spec": {"nodeName": "n"},
        "status": {},
    }


def test_a_replica_that_is_created_again_is_rid_of_the_pod_of_its_predecessor_on_a_lost_node() -> None:
    """Its kubelet cannot confirm its end, so it still has the name that its successor needs."""

    async def test() -> None:
        stage = Stage(FakeCluster())
        stage.see(resource("MedhaReplica"))
        await stage.work()
        old = stage.cluster.objects["StatefulSet", "default", "r-l0"]
        stage.lose(
            "MedhaReplica", *{kind for kind, _, _ in stage.cluster.objects} - {"MedhaReplica", "Secret"}
        )
        key = stage.see(resource("MedhaReplica"))
        stage.see(pod_of_lane(old, deletionTimestamp="2029-12-31T23:00:00Z"))
        stage.see(node("n", "Unknown"))
        stage.see(node("other", "True"))
        observed = stage.index.observe(key)
        assert observed is not None
        assert ([pod.name for pod in observed.earlier_pods], observed.pods) == (["r-l0-0"], ())
        await stage.work()
        assert ("Pod", "default", "r-l0-0") not in stage.cluster.objects

    asyncio.run(test())


def test_copies_of_a_pod_are_no_members() -> None:
    """`kubectl debug r-l0-0 --copy-to=debug --keep-labels` makes such a copy."""

    async def test() -> None:
        stage = Stage(FakeCluster())
        key = stage.see(resource("MedhaReplica"))
        await stage.work()
        lane = stage.cluster.objects["StatefulSet", "default", "r-l0"]
        stage.see(pod_of_lane(lane))
        stage.see(pod_of_lane(lane, name="r-l0-1", ownerReferences=[]))
        for name in ("debug", "r-l0-1-copy", "other-r-l0-1"):
            stage.see(pod_of_lane(lane, name=name, ownerReferences=[]))
        observed = stage.index.observe(key)
        assert observed is not None
        assert sorted(pod.name for pod in observed.pods) == ["r-l0-0", "r-l0-1"]
        assert observed.earlier_pods == ()

    asyncio.run(test())


def test_a_silent_node_is_judged_by_all_nodes_of_the_cluster() -> None:
    async def test() -> None:
        stage = Stage(FakeCluster())
        key = stage.see(resource("MedhaReplica"))
        await stage.work()
        stage.see(pod_of_lane(stage.cluster.objects["StatefulSet", "default", "r-l0"]))
        for other, status, expected in (("n", "Unknown", None), ("other", "True", 1893441600.0)):
            stage.see(node(other, status))
            observed = stage.index.observe(key)
            assert observed is not None
            assert observed.any_report_since == expected

    asyncio.run(test())


def test_a_deployment_sees_of_each_replica_the_revision_that_it_runs() -> None:
    async def test() -> None:
        stage = Stage(FakeCluster())
        key = stage.see(resource("MedhaDeployment", {"replicas": 2, "template": {"spec": GRID}}, name="d"))
        for _ in range(5):
            await stage.work()
            for kind, _, name in list(stage.cluster.objects):
                if kind == "MedhaReplica":
                    stage.index.offer(stage.cluster.objects[kind, "default", name])
        observed = stage.index.observe_deployment(key)
        assert observed is not None
        running = [child.running for child in observed.children]
        assert [one and one.name for one in running] == [
            child.document["status"]["revision"] for child in observed.children
        ]
        assert len({one.name for one in running if one}) == 1
        stage.lose("ControllerRevision")
        observed = stage.index.observe_deployment(key)
        assert observed is not None
        assert [child.running for child in observed.children] == [None, None]

    asyncio.run(test())
