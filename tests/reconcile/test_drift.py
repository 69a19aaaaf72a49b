"""The operator removes harmful additions to its objects, and repeats contested repairs more and more slowly."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from medha_operator.kube.kinds import Key
from medha_operator.replica.actions import Prune
from medha_operator.replica.drift_repairs import AT_ONCE, FIRST_SECONDS, LONGEST_SECONDS
from reconcile.fake_cluster import Stage, merged, resource
from reconcile.test_reconciler import on_stage
from reconcile.world import GRID, World, uids

Change = dict[str, Any]
HARM: list[tuple[str, str, Change, tuple[str, ...]]] = [
    ("Service", "r", {"selector": {"a": "b"}}, ("spec.selector.a",)),
    ("NetworkPolicy", "r", {"podSelector": {"matchLabels": {"a": "b"}}}, ("spec.podSelector.matchLabels.a",)),
    ("NetworkPolicy", "r", {"podSelector": {"matchExpressions": [{"key": "a"}]}}, ("spec.podSelector.matchExpressions",)),
    ("NetworkPolicy", "r", {"egress": [{}]}, ("spec.egress",)),
    ("PodDisruptionBudget", "r", {"selector": {"matchLabels": {"a": "b"}}}, ("spec.selector.matchLabels.a",)),
    ("PodDisruptionBudget", "r", {"unhealthyPodEvictionPolicy": "AlwaysAllow"}, ("spec.unhealthyPodEvictionPolicy",)),
    ("StatefulSet", "r-l1", {"ordinals": {"start": 1}}, ("spec.ordinals",)),
    ("StatefulSet", "r-l0", {"template": {"spec": {"nodeSelector": {"a": "b"}}}}, ("spec.template.spec.nodeSelector",)),
    ("StatefulSet", "r-l0", {"template": {"spec": {"affinity": {"nodeAffinity": {}}}}}, ("spec.template.spec.affinity",)),
    ("StatefulSet", "r-l0", {"template": {"spec": {"schedulerName": "mine"}}}, ("spec.template.spec.schedulerName",)),
    ("StatefulSet", "r-l0", {"template": {"spec": {"schedulerName": "default-scheduler"}}}, ()),
    ("StatefulSet", "r-l0", {"template": {"spec": {"runtimeClassName": "gvisor"}}}, ("spec.template.spec.runtimeClassName",)),
    ("StatefulSet", "r-l0", {"template": {"spec": {"priorityClassName": "low"}}}, ("spec.template.spec.priorityClassName",)),
    ("StatefulSet", "r-l0", {"template": {"spec": {"resourceClaims": [{"name": "c"}]}}}, ("spec.template.spec.resourceClaims",)),
    ("StatefulSet", "r-l0", {"template": {"spec": {"hostNetwork": True}}}, ("spec.template.spec.hostNetwork",)),
    ("StatefulSet", "r-l0", {"template": {"spec": {"hostNetwork": False}}}, ()),
    ("StatefulSet", "r-l0", {"template": {"metadata": {"annotations": {"restartedAt": "now"}}}}, ()),
    ("StatefulSet", "r-l0", {"persistentVolumeClaimRetentionPolicy": {"whenDeleted": "Retain"}}, ()),
    ("Service", "r", {"sessionAffinity": "None", "internalTrafficPolicy": "Cluster"}, ()),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "change", "paths"), HARM)
def test_only_what_does_harm_is_taken_away(
    kind: str, name: str, change: Change, paths: tuple[str, ...]
) -> None:
    world = World(**GRID)
    world.settle()
    before = copy.deepcopy(world.objects[kind, name])
    world.objects[kind, name] = merged(before, {"spec": change, "metadata": {"labels": {"theirs": "x"}}})
    planned = [action for action in world.plan().actions if isinstance(action, Prune)]
    assert tuple(path for action in planned for path in action.paths) == paths
    alive = uids(world)
    assert world.settle() == 0
    after = world.objects[kind, name]
    assert (after["spec"] == before["spec"]) is bool(paths)
    assert after["metadata"]["labels"]["theirs"] == "x"
    assert uids(world) == alive


@pytest.mark.parametrize("selector", [{}, {"matchLabels": {"a": "b"}}])
def test_one_peer_more_in_a_rule_is_replaced_with_the_rules_as_they_were(selector: Change) -> None:
    """An empty selector lets everybody in."""
    world = World(**GRID)
    world.settle()
    policy = world.objects["NetworkPolicy", "r"]
    before = copy.deepcopy(policy["spec"])
    policy["spec"]["ingress"][0]["from"][0]["namespaceSelector"] = selector
    world.settle()
    assert world.objects["NetworkPolicy", "r"]["spec"] == before


@pytest.mark.parametrize("field", ["initContainers", "containers", "volumes"])
def test_an_entry_more_in_a_list_of_named_ones_is_taken_away(field: str) -> None:
    """The next gang would have to start it, or to mount it."""
    world = World(**GRID)
    world.settle()
    lane = world.objects["StatefulSet", "r-l0"]
    before = copy.deepcopy(lane["spec"])
    lane["spec"]["template"]["spec"].setdefault(field, []).append({"name": "theirs"})
    (planned,) = [action for action in world.plan().actions if isinstance(action, Prune)]
    assert planned.paths == (f"spec.template.spec.{field}[theirs]",)
    world.settle()
    assert world.objects["StatefulSet", "r-l0"]["spec"] == before


def test_with_a_volume_its_mounts_are_taken_away() -> None:
    """The API server accepts a template that mounts a missing volume, and refuses every pod made from it."""
    world = World(**GRID)
    world.settle()
    lane = world.objects["StatefulSet", "r-l0"]
    before = copy.deepcopy(lane["spec"])
    pod = lane["spec"]["template"]["spec"]
    pod["volumes"].append({"name": "theirs", "emptyDir": {}})
    pod["containers"][0]["volumeMounts"].append({"name": "theirs", "mountPath": "/theirs"})
    world.settle()
    assert world.objects["StatefulSet", "r-l0"]["spec"] == before


def drift(stage: Stage, key: Key, change: Change) -> None:
    """Write to an object of the replica as somebody else, and report that to the operator."""
    stage.index.offer(stage.cluster.put(merged(stage.cluster.objects[key], {"spec": change})))


SERVICE = Key("Service", "default", "r")


@pytest.mark.parametrize("change", [{"selector": {"a": "b"}}, {"publishNotReadyAddresses": False}])
def test_a_fight_over_an_object_is_reported_and_gets_slower_and_slower(change: Change) -> None:
    async def test(stage: Stage) -> None:
        key = stage.see(resource("MedhaReplica"))
        await stage.work()
        writes = stage.cluster.calls_of("patch") + stage.cluster.calls_of("apply")

        def repairs() -> int:
            return stage.cluster.calls_of("patch") + stage.cluster.calls_of("apply") - writes

        for count in range(1, AT_ONCE + 1):
            drift(stage, SERVICE, change)
            await stage.work()
            assert repairs() == count
            assert not _has_drifted(stage, change)
        assert stage.cluster.notice.count("DriftRepaired") == AT_ONCE
        for _ in range(5):
            drift(stage, SERVICE, change)
            await stage.work()
        assert repairs() == AT_ONCE
        assert stage.cluster.notice.count("Contended") == 1
        wait = FIRST_SECONDS
        for count in range(1, 10):
            stage.queue.add(key)
            await stage.queue.take()
            result = await stage.reconciler.reconcile(key)
            stage.queue.done(key)
            assert result.requeue_seconds is not None
            assert 0 < result.requeue_seconds <= wait
            stage.now += wait
            stage.queue.add(key)
            await stage.work()
            assert repairs() == AT_ONCE + count
            drift(stage, SERVICE, change)
            await stage.work()
            wait = min(2 * wait, LONGEST_SECONDS)
        assert stage.cluster.notice.count("Contended") == 1

    on_stage(test)


def _has_drifted(stage: Stage, change: Change) -> bool:
    spec = stage.cluster.objects[SERVICE]["spec"]
    return bool(merged(spec, change) == spec)


def test_what_comes_back_with_every_patch_is_tried_once() -> None:
    """A webhook that adds to every write does this."""

    async def test(stage: Stage) -> None:
        key = stage.see(resource("MedhaReplica"))
        await stage.work()
        drift(stage, SERVICE, {"selector": {"a": "b"}})
        here = stage.cluster.objects[SERVICE]

        async def patch(*_: object) -> Change:
            stage.cluster.calls.append(("patch", "Service"))
            return copy.deepcopy(here)

        stage.cluster.patch = patch  # type: ignore[method-assign]
        for _ in range(4):
            stage.queue.add(key)
            assert await stage.work() == []
        assert stage.cluster.calls_of("patch") == 1
        assert "DriftRepaired" not in stage.cluster.notice

    on_stage(test)
