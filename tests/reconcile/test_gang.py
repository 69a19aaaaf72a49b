"""A replica is one gang over all of its lanes, whoever schedules it.

Kueue and Volcano cannot be run here: what is rendered for them is compared with what their documentation allows.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from medha.api import MedhaReplicaSpec
from medha_operator.plan import Apply, plan
from medha_operator.render import Owner, gang_object, pod_templates
from medha_operator.settings import OperatorSettings
from reconcile.world import World

OWNER = Owner("r", "default", "u")
SETTINGS = OperatorSettings(gang_apis=("core", "volcano"))
LABEL = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]{0,61})?[A-Za-z0-9])?")

# https://volcano.sh/en/docs/podgroup/: fields of a PodGroup's spec, and their types
VOLCANO_POD_GROUP = {
    "minMember": int,
    "minTaskMember": dict,
    "minResources": dict,
    "queue": str,
    "priorityClassName": str,
}
# https://kueue.sigs.k8s.io/docs/tasks/run/plain_pods/: what makes pods a group
KUEUE_LABELS = {"kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/pod-group-name"}


def spec(gang: str, **placement: Any) -> MedhaReplicaSpec:
    return MedhaReplicaSpec.model_validate(
        {
            "model": {"name": "m", "source": {"path": "x"}},
            "parallelism": {"tensor": 2, "stream": 2, "kv": 3},
            "placement": {"gang": gang} | placement,
        }
    )


def templates(wanted: MedhaReplicaSpec) -> tuple[dict[str, Any], ...]:
    return pod_templates(OWNER, wanted, "abc", SETTINGS)


def test_without_a_gang_there_is_nothing_of_one() -> None:
    assert gang_object(OWNER, spec("none"), "abc") is None
    assert all("schedulerName" not in one["spec"] for one in templates(spec("none")))


def test_the_schedulers_own_gang_counts_the_pods_of_all_lanes() -> None:
    wanted = spec("core")
    workload = gang_object(OWNER, wanted, "abc")
    assert workload is not None
    (group,) = workload["spec"]["podGroups"]
    assert group["policy"] == {"gang": {"minCount": 6}}
    references = [one["spec"]["workloadRef"] for one in templates(wanted)]
    assert references == [{"name": workload["metadata"]["name"], "podGroup": group["name"]}] * 3


def test_volcano_gets_one_pod_group_over_all_lanes() -> None:
    wanted = spec("volcano", queue="research")
    group = gang_object(OWNER, wanted, "abc")
    assert group is not None
    assert group["spec"] == {"minMember": 6, "queue": "research"}
    for name, value in group["spec"].items():
        assert isinstance(value, VOLCANO_POD_GROUP[name])
    for one in templates(wanted):
        assert one["spec"]["schedulerName"] == "volcano"
        assert set(one["metadata"]["annotations"].values()) == {group["metadata"]["name"]}


def test_kueue_gets_labels_that_say_which_pods_belong_together() -> None:
    wanted = spec("kueue", queue="research")
    assert gang_object(OWNER, wanted, "abc") is None
    groups = set()
    for one in templates(wanted):
        labels, annotations = one["metadata"]["labels"], one["metadata"]["annotations"]
        assert labels.keys() >= KUEUE_LABELS
        assert all(LABEL.fullmatch(labels[name]) for name in KUEUE_LABELS)
        assert labels["kueue.x-k8s.io/queue-name"] == "research"
        assert annotations["kueue.x-k8s.io/pod-group-total-count"] == "6"
        groups.add(labels["kueue.x-k8s.io/pod-group-name"])
    assert len(groups) == 1


@pytest.mark.parametrize("mode", ["preferred", "required"])
def test_stages_of_a_lane_are_kept_close_and_lanes_are_not(mode: str) -> None:
    topology = {"key": "example.com/rack", "mode": mode}
    kind = f"{mode}DuringSchedulingIgnoredDuringExecution"
    for index, one in enumerate(templates(spec("none", laneTopology=topology))):
        (term,) = one["spec"]["affinity"]["podAffinity"][kind]
        term = term.get("podAffinityTerm", term)
        assert term["topologyKey"] == "example.com/rack"
        assert term["labelSelector"]["matchLabels"] == {
            "medha.dev/replica": "r",
            "medha.dev/lane": str(index),
        }


def test_the_object_of_a_gang_comes_before_its_pods_and_goes_with_its_revision() -> None:
    world = World(parallelism={"stream": 2, "kv": 2}, placement={"gang": "core"})
    first = plan(world.observe(), world.now, SETTINGS)
    kinds = [action.manifest["kind"] for action in first.actions if isinstance(action, Apply)]
    assert kinds.index("Workload") < kinds.index("StatefulSet")
    for _ in range(8):
        world.do(plan(world.observe(), world.now, SETTINGS).actions)
        world.controllers()
        world.kubelets()
    before = [name for kind, name in world.objects if kind == "Workload"]
    world.spec = world.spec | {"parallelism": {"stream": 2, "kv": 1}}
    for _ in range(8):
        world.do(plan(world.observe(), world.now, SETTINGS).actions)
        world.controllers()
        world.kubelets()
    (after,) = [name for kind, name in world.objects if kind == "Workload"]
    assert [after] != before
    assert world.objects["Workload", after]["spec"]["podGroups"][0]["policy"]["gang"]["minCount"] == 2


def test_a_gang_that_the_installation_does_not_name_makes_nothing_and_stalls() -> None:
    world = World(placement={"gang": "volcano"})
    planned = plan(world.observe(), world.now, OperatorSettings())
    world.do(planned.actions)
    assert world.objects == {}
    stalled = next(one for one in world.status.conditions if one.type == "Stalled")
    assert (stalled.status, stalled.reason) == ("True", "GangUnavailable")
