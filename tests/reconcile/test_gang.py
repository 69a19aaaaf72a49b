"""A replica is one gang over all of its lanes, whoever schedules it.

Kueue and Volcano cannot be run here: what is rendered for them is compared with what their documentation allows.
"""

from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from medha.api.replica import MedhaReplicaSpec
from medha_operator.operator_settings import OperatorSettings
from medha_operator.replica.actions import Apply
from medha_operator.replica.manifests import Owner, gang_object, pod_templates
from medha_operator.replica.plan import plan
from reconcile.world import World

OWNER = Owner("r", "default", "u")
SETTINGS = OperatorSettings(gang_apis=("core", "volcano"))
LABEL = r"^[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"


class Strict(BaseModel):
    """Nothing but what its documentation names, in the types that it gives."""

    model_config = ConfigDict(extra="forbid", strict=True)


class PodGroupSpec(Strict):
    """https://volcano.sh/en/docs/podgroup/"""

    min_member: int = Field(alias="minMember", ge=1)
    min_task_member: dict[str, int] | None = Field(default=None, alias="minTaskMember")
    min_resources: dict[str, str] | None = Field(default=None, alias="minResources")
    queue: str = "default"
    priority_class_name: str = Field(default="", alias="priorityClassName")


class PodGroup(Strict):
    api_version: Literal["scheduling.volcano.sh/v1beta1"] = Field(alias="apiVersion")
    kind: Literal["PodGroup"]
    metadata: dict[str, Any]
    spec: PodGroupSpec


class VolcanoAnnotations(Strict):
    """The scheduler reads the first, its webhooks and newer releases the second; both name the PodGroup."""

    of_kubernetes: str = Field(alias="scheduling.k8s.io/group-name")
    of_volcano: str = Field(alias="scheduling.volcano.sh/group-name")


class KueueLabels(Strict):
    """https://kueue.sigs.k8s.io/docs/tasks/run/plain_pods/: what makes pods a group"""

    queue: str = Field(alias="kueue.x-k8s.io/queue-name", min_length=1)
    group: str = Field(alias="kueue.x-k8s.io/pod-group-name", pattern=LABEL)


class KueueAnnotations(Strict):
    total_count: str = Field(alias="kueue.x-k8s.io/pod-group-total-count", pattern="^[1-9][0-9]*$")
    serving: Literal["true"] = Field(alias="kueue.x-k8s.io/pod-group-serving")


def of_kueue(entries: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in entries.items() if name.startswith("kueue.x-k8s.io/")}


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


@pytest.mark.parametrize(("more", "queue"), [({}, "default"), ({"queue": "research"}, "research")])
def test_volcano_gets_one_pod_group_over_all_lanes(more: dict[str, str], queue: str) -> None:
    wanted = spec("volcano", **more)
    group = gang_object(OWNER, wanted, "abc")
    assert group is not None
    read = PodGroup.model_validate(group)
    assert (read.spec.min_member, read.spec.queue) == (6, queue)
    for one in templates(wanted):
        assert one["spec"]["schedulerName"] == "volcano"
        annotations = VolcanoAnnotations.model_validate(one["metadata"]["annotations"])
        assert annotations.of_kubernetes == annotations.of_volcano == group["metadata"]["name"]


def test_kueue_gets_labels_for_the_pods_that_belong_together() -> None:
    wanted = spec("kueue", queue="research")
    assert gang_object(OWNER, wanted, "abc") is None
    groups = set()
    for one in templates(wanted):
        labels = KueueLabels.model_validate(of_kueue(one["metadata"]["labels"]))
        annotations = KueueAnnotations.model_validate(of_kueue(one["metadata"]["annotations"]))
        assert labels.queue == "research"
        assert annotations.total_count == "6"
        assert "schedulerName" not in one["spec"]
        groups.add(labels.group)
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
