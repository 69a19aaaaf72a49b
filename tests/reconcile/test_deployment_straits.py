"""A deployment in trouble: a quota is used up, no replica or pod is wanted, or its spec is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from medha_operator.kube.client import ApiError
from medha_operator.replica.actions import Apply, SetStatus
from medha_operator.status_fields import Condition
from reconcile.deployment_world import DeploymentWorld, applied, template, watched
from reconcile.fake_cluster import GRID, FakeCluster, Stage, resource

DEADLINE_SECONDS = 1800.0


class QuotaWorld(DeploymentWorld):
    """A quota of pods is the room: a replica beyond it gets no pod. The youngest one takes what becomes free."""

    def _record_event(self, name: str, document: dict[str, Any]) -> None:
        super()._record_event(name, document)
        for entry in document["status"]["conditions"]:
            if entry["reason"] == "InsufficientCapacity":
                entry["reason"] = "CreatingPods"

    def operate(self) -> None:
        self.replicas = dict(sorted(self.replicas.items(), reverse=True))
        super().operate()


@pytest.fixture
def world() -> DeploymentWorld:
    world = DeploymentWorld(2)
    assert world.settle() == 0
    return world


def wait(world: DeploymentWorld, seconds: float) -> None:
    """Only time passes."""
    for _ in range(3):
        world.do(world.plan().actions)
        world.operate()
        world.now += seconds / 3
    world.do(world.plan().actions)


# --- no room --------------------------------------------------------------------------------------------


def test_a_quota_is_a_lack_of_room_as_any() -> None:
    for unavailable, ends in ((1, ("True", "Complete")), (0, ("False", "SurgeUnschedulable"))):
        world = QuotaWorld(2, capacity=2, rollout={"maxSurge": 1, "maxUnavailable": unavailable})
        assert world.settle() == 0
        world.change(template=template(image="b"))
        assert watched(world, rounds=200)[0] == 2 - unavailable
        assert world.condition("Ready") == ends
        assert (world.images()[:2] == ["b", "b"]) is (unavailable == 1)


def test_a_node_is_emptied_though_a_quota_lets_nobody_stand_in() -> None:
    world = QuotaWorld(2, capacity=2, rollout={"maxSurge": 1, "maxUnavailable": 1})
    assert world.settle() == 0
    world.cordoned = {"d-0"}
    watched(world, rounds=200)
    assert world.cordoned == set()
    assert world.condition("Ready") == ("True", "Complete")
    assert sorted(world.replicas) == ["d-0", "d-1"]


def test_pods_that_are_not_created_yet_are_reported_as_that() -> None:
    world = QuotaWorld(2)
    world.do(world.plan().actions)
    world.capacity = 0
    world.operate()
    world.do(world.plan().actions)
    assert world.condition("Scheduled") == ("False", "CreatingPods")
    world.capacity = 2
    world.settle()
    assert world.condition("Scheduled") == ("True", "Placed")


# --- a refusal ------------------------------------------------------------------------------------------


def test_what_is_there_is_changed_before_another_one_is_made() -> None:
    """The API server may refuse the new one, and a refusal ends the reconcile."""
    world = DeploymentWorld(2, template=template(image="a"))
    world.broken.add("a")
    world.settle()
    world.change(replicas=3, template=template(image="b"))
    assert applied(world.plan()) == ["d-1", "d-0", "d-2"]


@pytest.mark.parametrize(("unavailable", "leaves"), [(1, True), (0, False)])
def test_where_a_stand_in_is_refused_a_node_is_emptied_as_where_there_is_no_room(
    unavailable: int, leaves: bool
) -> None:
    world = DeploymentWorld(2, rollout={"maxSurge": 1, "maxUnavailable": unavailable})
    world.settle()
    world.cordoned = {"d-0"}
    world.operate()
    assert "d-0" not in applied(world.plan())
    refused = Condition.model_validate(
        {
            "type": "Accepted",
            "status": "False",
            "reason": "Refused",
            "message": "exceeded quota",
            "last_transition_time": "2030-01-01T00:00:00Z",
            "observed_generation": 1,
        }
    )
    world.status = world.status.model_copy(update={"conditions": (refused,)})
    assert ("d-0" in applied(world.plan())) is leaves


@pytest.mark.parametrize("kind", ["StatefulSet", "Service"])
def test_a_replica_whose_objects_are_refused_lacks_no_room(kind: str) -> None:
    """Pods that nobody asks for are not created: that shows no lack of quota, however long it lasts."""

    def refuse(verb: str, of: str) -> None:
        if (verb, of) == ("apply", kind):
            raise ApiError(403, "Forbidden", "by policy")

    async def test() -> None:
        stage = Stage(FakeCluster(refuse))
        spec = {"replicas": 1, "template": {"spec": GRID}}
        key = stage.see(resource("MedhaDeployment", spec, "d"))
        await stage.work(60)
        assert stage.condition(key)[:2] == ("False", "Refused")
        assert stage.condition(key, "Scheduled")[0] == "True"
        assert stage.cluster.calls_of("status") <= 4  # two of the replica, two of the deployment

    asyncio.run(test())


def test_one_that_is_refused_beside_one_without_room_is_reported_in_the_same_words_each_time() -> None:
    world = DeploymentWorld(2, capacity=0)
    world.do(world.plan().actions)
    world.operate()
    world.hindered = {"d-1"}
    world.operate()
    world.do(world.plan().actions)
    for _ in range(3):
        assert world.plan().actions == ()
        world.now += 0.1


# --- no replicas ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("held", "then"), [({"rollout": {"partition": 1}}, ["", "b"]), ({"paused": True}, ["", ""])]
)
def test_what_is_held_back_is_so_still_after_there_was_no_replica(
    held: dict[str, Any], then: list[str], world: DeploymentWorld
) -> None:
    world.change(template=template(image="b"), **held)
    watched(world)
    assert world.images() == then
    world.change(replicas=0)
    watched(world)
    assert world.replicas == {}
    world.change(replicas=2)
    watched(world)
    assert world.images() == then


def test_a_stand_in_releases_no_canary() -> None:
    world = DeploymentWorld(1, rollout={"partition": 1})
    world.settle()
    before = world.status.current_revision
    world.change(template=template(image="b"))
    watched(world)
    world.cordoned = {"d-0"}
    world.do(world.plan().actions)  # the stand-in is made
    world.operate()
    del world.replicas["d-0"]  # by somebody
    world.do(world.plan().actions)
    assert world.status.current_revision == before
    world.settle()
    assert world.images() == [""]


# --- no pods --------------------------------------------------------------------------------------------


def test_a_suspended_deployment_rests_for_as_long_as_it_is(world: DeploymentWorld) -> None:
    world.change(template=template(suspend=True))
    watched(world)
    assert world.serving() == set()
    wait(world, 3 * DEADLINE_SECONDS)
    assert world.condition("Ready") == ("False", "Suspended")
    assert world.condition("Reconciling")[0] == world.condition("Stalled")[0] == "False"
    assert world.plan().actions == ()
    world.change(template=template())
    world.do(world.plan().actions)
    assert world.condition("Stalled")[0] == "False"  # the deadline begins with the move
    watched(world)
    assert world.condition("Ready") == ("True", "Complete")


def test_a_change_that_suspends_needs_nobody_in_the_stead_of_those_it_ends(world: DeploymentWorld) -> None:
    world.change(template=template(suspend=True, image="b"))
    assert watched(world)[:2] == (0, 2)
    assert world.images() == ["b", "b"]
    assert world.condition("Ready") == ("False", "Suspended")
    world.change(template=template(image="c"))
    assert watched(world)[1] == 2
    assert world.images() == ["c", "c"]
    assert world.condition("Ready") == ("True", "Complete")


@pytest.mark.parametrize("unavailable", [0, 1])
def test_who_stands_in_goes_when_all_are_suspended(unavailable: int) -> None:
    world = DeploymentWorld(2, rollout={"maxSurge": 1, "maxUnavailable": unavailable})
    world.settle()
    world.change(template=template(image="b"))
    world.do(world.plan().actions)
    for _ in range(4):
        world.operate()
    assert "d-2" in world.serving()
    world.change(template=template(image="b", suspend=True))
    watched(world)
    assert sorted(world.replicas) == ["d-0", "d-1"]
    assert world.serving() == set()
    assert world.condition("Ready") == ("False", "Suspended")


def test_who_stands_in_serves_though_the_others_are_to_have_no_pods(world: DeploymentWorld) -> None:
    world.change(template=template(suspend=True), rollout={"partition": 1})
    watched(world)
    world.cordoned = {"d-0"}
    assert watched(world)[:2] == (1, 3)
    assert world.cordoned == set()
    assert world.serving() == {"d-0"}


def test_one_that_hangs_beside_suspended_ones_is_reported(world: DeploymentWorld) -> None:
    world.broken.add("b")
    world.change(template=template(suspend=True), rollout={"partition": 1})
    watched(world)
    assert world.condition("Ready") == ("False", "Suspended")  # one serves, one is to have no pods
    world.replicas["d-0"]["status"].update(started=False, placed=False)
    world.capacity = 0
    world.operate()
    wait(world, DEADLINE_SECONDS)
    assert world.condition("Stalled")[0] == "True"


# --- no valid spec --------------------------------------------------------------------------------------


def test_a_refused_spec_freezes_no_status_of_replicas(world: DeploymentWorld) -> None:
    world.change(rollout={"maxSurge": -1})
    world.settle()
    assert world.condition("Ready") == ("False", "Invalid")
    assert world.condition("Available") == ("True", "EnoughReplicas")
    for one in world.replicas.values():
        one["status"].update(started=False)
        world._record_event(one["metadata"]["name"], one)
    world.do(world.plan().actions)
    assert (world.status.replicas, world.status.ready_replicas, world.status.available_replicas) == (2, 0, 0)
    assert world.condition("Available") == ("False", "TooFewReplicas")
    assert world.condition("Progressing") == ("False", "Invalid")
    assert world.condition("Stalled") == ("True", "Invalid")


def test_nodes_are_emptied_one_replica_after_the_other_while_the_spec_is_refused(
    world: DeploymentWorld,
) -> None:
    world.change(template=template(parallelism={"tensor": 0}))
    world.settle()
    world.cordoned = {"d-0", "d-1"}
    world.operate()
    least, most, order = watched(world)
    assert (least, most, sorted(order)) == (1, 2, ["d-0", "d-1"])
    assert world.cordoned == set()
    assert len(world.serving()) == 2
    assert world.condition("Ready") == ("False", "Invalid")


def test_a_refused_spec_of_a_deployment_without_replicas_makes_none() -> None:
    world = DeploymentWorld(2, rollout={"maxSurge": -1})
    (notice,) = world.plan().actions
    assert isinstance(notice, SetStatus)
    world.do([notice])
    assert world.status.replicas == 0
    assert not any(isinstance(action, Apply) for action in world.plan().actions)


def test_a_refused_spec_releases_no_pause(world: DeploymentWorld) -> None:
    world.replicas["d-0"]["status"].update(started=False)
    world._record_event("d-0", world.replicas["d-0"])
    world.change(template=template(image="b"))
    world.do(world.plan().actions)  # who serves nobody comes first
    world.change(paused=True)
    world.settle()
    assert world.images() == ["b", ""]
    world.change(progressDeadlineSeconds=-1)
    world.settle()
    del world.replicas["d-1"]
    world.settle()
    del world.spec["progressDeadlineSeconds"]
    world.change()
    world.settle()
    assert world.images() == ["b", ""]
    assert world.condition("Ready") == ("False", "Paused")


def test_revisions_of_a_refused_spec_are_reported_as_they_were(world: DeploymentWorld) -> None:
    before = world.status
    world.change(rollout={"maxSurge": -1})
    world.settle()
    assert world.status.current_revision == before.current_revision
    assert (world.status.update_revision, world.status.updated_replicas) == (before.update_revision, 2)
