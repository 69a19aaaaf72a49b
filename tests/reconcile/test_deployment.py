"""A deployment brings its replicas to the spec, whole replicas at a time, within its bounds, from any state."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from medha_operator.deployment.observed_deployment import DEPLOYMENT_LABEL, child_of
from medha_operator.replica.actions import Delete
from reconcile.deployment_world import DeploymentWorld, applied, deleted, template, watched


@pytest.fixture
def world() -> DeploymentWorld:
    world = DeploymentWorld(3)
    assert world.settle() == 0
    return world


def test_a_new_deployment_has_its_replicas_and_then_nothing_is_written(world: DeploymentWorld) -> None:
    assert sorted(world.replicas) == ["d-0", "d-1", "d-2"]
    assert world.condition("Ready") == ("True", "Complete")
    assert (world.status.replicas, world.status.available_replicas, world.status.updated_replicas) == (
        3,
        3,
        3,
    )
    assert world.plan().actions == ()


def test_a_volume_that_is_mounted_twice_begins_no_rollout_after_the_first() -> None:
    mounts = [{"name": "data", "mountPath": f"/{part}", "subPath": part} for part in ("a", "b")]
    sidecar = {"name": "side", "image": "s", "volumeMounts": mounts}
    pods = {"spec": {"containers": [sidecar], "volumes": [{"name": "data", "emptyDir": {}}]}}
    world = DeploymentWorld(2, template=template(template=pods))
    assert world.settle() == 0
    assert world.condition("Ready") == ("True", "Complete")
    assert world.plan().actions == ()


def test_a_deployment_that_is_being_deleted_says_so_once(world: DeploymentWorld) -> None:
    world.is_deleting = True
    world.do(world.plan().actions)
    assert world.condition("Ready") == ("False", "Deleting")
    assert world.status.available_replicas == 3
    assert world.plan().actions == ()


def test_the_scale_selector_finds_one_labelled_pod_a_replica(world: DeploymentWorld) -> None:
    assert world.status.selector == "medha.dev/deployment=d,medha.dev/lane=0,apps.kubernetes.io/pod-index=0"
    pods = world.replicas["d-0"]["spec"]["template"]["metadata"]["labels"]
    assert pods == {"medha.dev/deployment": "d"}


def test_a_new_template_goes_from_the_highest_index_down_behind_one_more_replica(
    world: DeploymentWorld,
) -> None:
    world.change(template=template(image="b"))
    assert watched(world) == (3, 4, ["d-2", "d-1", "d-0"])
    assert world.images() == ["b", "b", "b"]


@pytest.mark.parametrize(
    ("rollout", "least", "most"),
    [
        ({"maxSurge": 0, "maxUnavailable": 1}, 2, 3),
        ({"maxSurge": 2, "maxUnavailable": 0}, 3, 5),
        ({"maxSurge": "34%", "maxUnavailable": "34%"}, 2, 5),
        ({"maxSurge": 0, "maxUnavailable": "10%"}, 2, 3),  # rounded down to none, which could never move
        ({"maxSurge": 0, "maxUnavailable": "100%"}, 0, 3),
    ],
)
def test_bounds_are_numbers_or_shares_of_the_replicas(rollout: dict[str, Any], least: int, most: int) -> None:
    world = DeploymentWorld(3, rollout=rollout)
    world.settle()
    world.change(template=template(image="b"))
    assert watched(world)[:2] == (least, most)
    assert world.images() == ["b", "b", "b"]


def test_a_change_that_ends_no_pods_reaches_all_at_once_and_none_stands_in(world: DeploymentWorld) -> None:
    world.change(template=template(scheduling={"policy": "edf"}))
    planned = world.plan()
    assert applied(planned) == ["d-2", "d-1", "d-0"]
    world.do(planned.actions)
    world.do(world.plan().actions)  # before any replica had its turn
    assert world.condition("Available") == ("True", "EnoughReplicas")
    assert watched(world)[:2] == (3, 3)
    assert len(world.revisions()) == 1


def test_replicas_below_the_partition_stay_as_they_were(world: DeploymentWorld) -> None:
    world.change(template=template(image="b"), rollout={"partition": 2})
    watched(world)
    assert world.images() == ["", "", "b"]
    assert world.condition("Ready") == ("True", "Complete")
    world.replicas.pop("d-0")  # and come back so
    watched(world)
    assert world.images() == ["", "", "b"]
    world.change(rollout={"partition": 0})
    watched(world)
    assert world.images() == ["b", "b", "b"]
    assert world.status.current_revision == world.status.update_revision


def test_a_paused_deployment_is_scaled_and_not_changed(world: DeploymentWorld) -> None:
    world.change(template=template(image="b"), paused=True, replicas=4)
    watched(world)
    assert world.images() == ["", "", "", ""]
    assert world.condition("Ready") == ("False", "Paused")
    assert world.condition("Stalled") == ("False", "Paused")
    world.change(paused=False)
    watched(world)
    assert world.images() == ["b"] * 4


def test_a_deployment_that_was_made_paused_holds_back_a_later_template_too() -> None:
    world = DeploymentWorld(2, paused=True)
    world.settle()
    assert world.revisions() == set(world.templates)
    world.change(template=template(image="b"), replicas=3)
    assert watched(world)[2] == []
    assert world.images() == ["", "", ""]
    assert world.condition("Ready") == ("False", "Paused")
    world.change(paused=False)
    watched(world)
    assert world.images() == ["b", "b", "b"]


@pytest.mark.parametrize("held", [{"paused": True}, {"rollout": {"partition": 3}}])
def test_a_template_that_is_held_back_stays_so_though_the_history_is_deleted(held: dict[str, Any]) -> None:
    world = DeploymentWorld(3, template=template() | {"metadata": {"labels": {"team": "a"}}})
    world.settle()
    world.replicas["d-1"]["metadata"]["labels"]["colour"] = "red"  # by somebody else
    world.templates.clear()
    before = copy.deepcopy(world.replicas)
    world.change(template=template(image="b"), **held)
    watched(world)
    assert world.replicas == before
    world.cordoned = {"d-1"}  # it still leaves its node, as it is
    assert watched(world)[0] == 3
    assert world.cordoned == set()
    assert world.images() == ["", "", ""]
    assert world.replicas["d-1"]["metadata"]["labels"].items() >= {"team": "a", "colour": "red"}.items()
    assert "annotations" not in world.replicas["d-1"]["metadata"]


def test_a_change_that_never_starts_leaves_all_that_serve(world: DeploymentWorld) -> None:
    world.broken.add("bad")
    world.change(template=template(image="bad"))
    least, _, order = watched(world)
    assert (least, order) == (3, [])
    assert world.images() == ["", "", "", "bad"]
    assert world.condition("Stalled") == ("True", "CrashLooping")
    assert world.condition("Available") == ("True", "EnoughReplicas")


def test_going_back_uses_the_template_that_was_kept_and_is_not_held_up(world: DeploymentWorld) -> None:
    first = world.status.update_revision
    world.broken.add("bad")
    world.change(template=template(image="bad"), rollout={"maxSurge": 0, "maxUnavailable": 1})
    watched(world)
    assert world.images() == ["", "", "bad"]
    world.change(template=template())
    watched(world)
    assert world.revisions() == {first} == {world.status.update_revision}
    assert world.templates[first].number == 3
    assert world.condition("Ready") == ("True", "Complete")


def test_no_more_templates_are_kept_than_asked_for() -> None:
    world = DeploymentWorld(1, revisionHistoryLimit=2)
    for image in "abcde":
        world.change(template=template(image=image))
        watched(world)
    assert sorted(one.template["spec"]["image"] for one in world.templates.values()) == ["c", "d", "e"]


def test_a_template_that_does_not_go_is_not_deleted_again() -> None:
    world = DeploymentWorld(1, revisionHistoryLimit=0)
    world.settle()
    world.change(template=template(image="b"))
    watched(world)
    (kept,) = world.templates.values()
    held = replace(kept, name="0123456789", number=0)
    world.templates[held.name] = held
    assert [action.name for action in world.plan().actions if isinstance(action, Delete)] == ["d-0123456789"]
    world.templates[held.name] = replace(held, is_deleting=True)
    assert not [action for action in world.plan().actions if isinstance(action, Delete)]


def test_a_default_that_a_newer_release_adds_begins_no_rollout(world: DeploymentWorld) -> None:
    world.spec["template"]["spec"]["threads"] = None
    world.spec["template"]["spec"]["suspend"] = False
    assert world.status.update_revision in world.revisions()
    before = copy.deepcopy(world.templates)
    watched(world)
    assert world.templates == before


# --- room -----------------------------------------------------------------------------------------------


def test_no_room_for_one_more_is_reported_after_a_while_and_nothing_is_taken_down() -> None:
    world = DeploymentWorld(2, capacity=2)
    world.settle()
    world.change(template=template(image="b"))
    for _ in range(5):
        world.do(world.plan().actions)
        world.operate()
    assert world.condition("Ready") == ("False", "RollingOut")
    again = world.plan().requeue_seconds
    assert again is not None
    world.now += again
    world.do(world.plan().actions)
    assert world.condition("Stalled") == ("True", "SurgeUnschedulable")
    assert len(world.serving()) == 2
    world.capacity = 3  # a node was added
    assert watched(world)[0] == 2
    assert world.images() == ["b", "b"]


def test_without_room_the_bound_of_unavailable_ones_is_used() -> None:
    world = DeploymentWorld(2, capacity=2, rollout={"maxSurge": 1, "maxUnavailable": 1})
    world.settle()
    world.change(template=template(image="b"))
    least, most, _ = watched(world, rounds=200)
    assert (least, most) == (1, 3)
    assert world.images() == ["b", "b"]


def test_room_is_waited_for_since_it_was_checked_not_since_the_pods_were_missing() -> None:
    """A replica that was suspended had no node for a day; an autoscaler gets its time all the same."""
    world = DeploymentWorld(2, capacity=1, template=template(suspend=True))
    world.settle()
    assert world.condition("Scheduled") == ("True", "Placed")
    world.now += 86_400
    world.change(template=template(suspend=False))
    for _ in range(4):
        world.do(world.plan().actions)
        world.operate()
    assert world.condition("Scheduled") == ("False", "InsufficientCapacity")
    assert world.condition("Stalled")[0] == "False"
    planned = world.plan()
    assert planned.requeue_seconds == 300
    world.now += 300
    world.do(world.plan().actions)
    assert world.condition("Stalled") == ("True", "InsufficientCapacity")
    world.capacity = 2
    watched(world)
    assert world.condition("Scheduled") == ("True", "Placed")


# --- scale ----------------------------------------------------------------------------------------------


def test_fewer_replicas_lose_the_highest_and_the_unready_first(world: DeploymentWorld) -> None:
    world.change(replicas=5)
    world.settle()
    world.replicas["d-3"]["status"]["started"] = False
    world._record_event("d-3", world.replicas["d-3"])
    world.change(replicas=2)
    assert deleted(world.plan()) == ["d-3", "d-4", "d-2"]
    watched(world)
    assert sorted(world.replicas) == ["d-0", "d-1"]


def test_one_too_many_stays_while_it_stands_in_for_one_that_is_down(world: DeploymentWorld) -> None:
    world.replicas["d-0"]["status"].update(started=False, placed=False)
    world.capacity = 2
    world.operate()
    world.change(replicas=2)
    assert deleted(world.plan()) == []
    world.capacity = 3
    watched(world)
    assert sorted(world.replicas) == ["d-0", "d-1"]


def test_no_replicas_is_a_number_too(world: DeploymentWorld) -> None:
    world.change(replicas=0)
    watched(world)
    assert world.replicas == {}
    assert world.condition("Ready") == ("True", "Complete")


def test_another_gang_needs_other_objects_of_the_same_names(world: DeploymentWorld) -> None:
    before = {one["metadata"]["uid"] for one in world.replicas.values()}
    world.change(template=template(placement={"gang": "core"}))
    least, most, _ = watched(world)
    assert (least, most) == (3, 4)
    assert not before & {one["metadata"]["uid"] for one in world.replicas.values()}


# --- time -----------------------------------------------------------------------------------------------


def test_a_replica_counts_only_after_it_was_ready_for_as_long_as_asked() -> None:
    world = DeploymentWorld(2, minReadySeconds=60)
    for _ in range(4):
        world.do(world.plan().actions)
        world.operate()
    assert len(world.serving()) == 2
    planned = world.plan()
    world.do(planned.actions)
    assert world.condition("Ready") == ("False", "WaitingForMinReady")
    assert planned.requeue_seconds == 60
    world.now += 60
    world.do(world.plan().actions)
    assert world.condition("Ready") == ("True", "Complete")


def test_what_is_ready_and_not_yet_available_is_taken_down_at_once() -> None:
    """Nobody counts on it: neither removing it nor fixing a bad change waits for `minReadySeconds`."""
    world = DeploymentWorld(2, minReadySeconds=3600)
    for _ in range(4):
        world.do(world.plan().actions)
        world.operate()
    assert len(world.serving()) == 2
    world.change(template=template(image="b"))
    assert applied(world.plan()) == ["d-1", "d-0"]
    world.change(replicas=0)
    assert deleted(world.plan()) == ["d-1", "d-0"]


def test_what_has_been_ready_for_a_short_time_leaves_its_node_behind_another_one_all_the_same() -> None:
    world = DeploymentWorld(2, minReadySeconds=60)
    for _ in range(4):
        world.do(world.plan().actions)
        world.operate()
    world.cordoned = {"d-1"}
    assert watched(world)[:2] == (2, 3)
    assert world.cordoned == set()


def test_what_is_available_waits_for_its_stand_in_to_be_so_too() -> None:
    world = DeploymentWorld(2, minReadySeconds=60)
    for _ in range(4):
        world.do(world.plan().actions)
        world.operate()
    world.now += 60
    world.change(template=template(image="b"))
    for _ in range(4):
        world.do(world.plan().actions)
        world.operate()
    assert sorted(world.serving()) == ["d-0", "d-1", "d-2"]
    assert applied(world.plan()) == []
    world.now += 60
    assert applied(world.plan()) == ["d-1"]


def test_no_progress_for_too_long_is_reported_and_progress_later_takes_it_back() -> None:
    world = DeploymentWorld(1, capacity=0, progressDeadlineSeconds=100, rollout={"maxUnavailable": 1})
    for _ in range(4):
        world.do(world.plan().actions)
        world.operate()
    planned = world.plan()
    assert planned.requeue_seconds is not None
    world.now += 101
    world.do(world.plan().actions)
    assert world.condition("Progressing") == ("False", "ProgressDeadlineExceeded")
    world.capacity = 1
    watched(world)
    assert world.condition("Progressing") == ("True", "Complete")


def late(world: DeploymentWorld, rounds: int = 30) -> bool:
    """Return whether any status on the way to rest says that nothing moves."""
    said = set()
    for _ in range(rounds):
        world.do(world.plan().actions)
        said.add(world.condition("Stalled"))
        world.operate()
        world.now += 5
    assert world.plan().actions == ()
    return ("True", "ProgressDeadlineExceeded") in said


@pytest.mark.parametrize("rollout", [{"maxSurge": 1}, {"maxSurge": 0, "maxUnavailable": 1}])
def test_a_drain_after_a_long_rest_is_not_late_from_the_beginning(rollout: dict[str, Any]) -> None:
    world = DeploymentWorld(2, rollout=rollout)
    world.settle()
    world.now += 100_000
    world.cordoned.add("d-1")
    world.operate()
    assert not late(world)
    assert world.condition("Ready") == ("True", "Complete")


def test_room_that_comes_late_is_used_in_time() -> None:
    world = DeploymentWorld(1, capacity=0)
    for _ in range(4):
        world.do(world.plan().actions)
        world.operate()
    world.now += 100_000
    world.do(world.plan().actions)
    assert world.condition("Stalled") == ("True", "InsufficientCapacity")
    world.capacity = 1
    world.operate()
    assert not late(world)


def test_progress_that_is_to_come_was_made_by_nobody(world: DeploymentWorld) -> None:
    world.status = world.status.model_copy(update={"last_progress_time": "2099-01-01T00:00:00Z"})
    world.settle()
    assert world.status.last_progress_time is not None
    assert world.status.last_progress_time < "2031"


# --- nodes ----------------------------------------------------------------------------------------------


def test_a_replica_on_a_cordoned_node_leaves_once_another_one_is_there(world: DeploymentWorld) -> None:
    world.cordoned = {"d-1"}
    assert watched(world)[:2] == (3, 4)
    assert world.cordoned == set()
    assert sorted(world.replicas) == ["d-0", "d-1", "d-2"]
    assert "annotations" not in world.replicas["d-1"]["metadata"]


def test_a_replica_whose_pods_are_being_deleted_is_not_ready_though_its_status_still_shows_it(
    world: DeploymentWorld,
) -> None:
    document = world.replicas["d-1"]
    assert child_of(document, 1, "u").serving_since is not None
    for entry in document["status"]["conditions"]:
        entry["status"] = "True" if entry["type"] == "Draining" else entry["status"]
    assert child_of(document, 1, "u").serving_since is not None  # it serves until it may leave
    document["status"]["newestMember"] = None
    assert child_of(document, 1, "u").serving_since is None


@pytest.mark.parametrize(
    ("fields_of_then", "spec", "serves"),
    [
        ({}, {}, True),
        ({}, {"image": "b"}, False),
        ({"kvCache.tokensPerLane": None}, {}, True),  # which this release has added
        (
            {"kvCache.tokensPerLane": 4096},
            {"kvCache": {"tokensPerLane": 4096}},
            True,
        ),  # the default of then, as stored
        ({"kvCache.tokensPerLane": 4096}, {}, False),  # and that of now
    ],
)
def test_a_change_that_its_replica_has_yet_to_see_leaves_it_serving_if_it_asks_for_the_same_pods(
    fields_of_then: dict[str, Any], spec: dict[str, Any], serves: bool, world: DeploymentWorld
) -> None:
    """Any release may have kept the revision of the pods, with defaults of its own."""
    document = copy.deepcopy(world.replicas["d-1"])
    then = world.kept_of_replicas[document["status"]["revision"]]
    fields = {path: value for path, value in (then.fields | fields_of_then).items() if value is not None}
    kept = [replace(then, name="ofthen", fields=fields), replace(then, name="another")]
    document["metadata"]["generation"] += 1
    document["spec"] |= {"scheduling": {"policy": "edf"}} | spec  # what restarts nothing
    document["status"]["revision"] = "ofthen"
    assert (child_of(document, 1, "u", kept).serving_since is not None) == serves
    assert child_of(document, 1, "u", kept[1:]).serving_since is None


def test_without_room_it_leaves_only_if_one_may_be_missing() -> None:
    for unavailable, stays in ((0, True), (1, False)):
        rollout = {"maxSurge": 1, "maxUnavailable": unavailable}
        world = DeploymentWorld(2, capacity=2, rollout=rollout)
        world.settle()
        world.cordoned = {"d-0"}
        watched(world, rounds=200)
        assert (world.cordoned == {"d-0"}) is stays
        expected = ("True", "SurgeUnschedulable") if stays else ("False", "Complete")
        assert world.condition("Stalled") == expected


# --- others ---------------------------------------------------------------------------------------------


def test_a_replica_of_somebody_else_is_never_touched() -> None:
    world = DeploymentWorld(2)
    world.do(DeploymentWorld(2).plan().actions)
    foreign = world.replicas["d-1"]["metadata"]
    foreign["ownerReferences"] = [{"uid": "else", "controller": True}]
    world.settle()
    assert world.condition("Stalled") == ("True", "NameConflict")
    assert foreign["ownerReferences"] == [{"uid": "else", "controller": True}]
    world.change(replicas=1)
    world.settle()
    assert "d-1" in world.replicas


@pytest.mark.parametrize(
    "labels", [{}, {DEPLOYMENT_LABEL: "other"}], ids=["made by hand", "left by another one"]
)
def test_a_name_that_nobody_wants_may_be_anybodys(world: DeploymentWorld, labels: dict[str, str]) -> None:
    foreign = copy.deepcopy(world.replicas["d-2"])
    foreign["metadata"] |= {"name": "d-70", "uid": "else", "labels": labels, "ownerReferences": []}
    world.replicas["d-70"] = foreign
    watched(world)
    assert world.condition("Ready") == ("True", "Complete")
    world.change(template=template(image="b"))
    watched(world)
    assert (world.condition("Ready"), world.replicas["d-70"]) == (("True", "Complete"), foreign)
    world.change(replicas=71)
    world.settle()
    assert world.condition("Stalled") == ("True", "NameConflict")


def test_replicas_of_a_deleted_deployment_of_the_same_name_are_waited_for(world: DeploymentWorld) -> None:
    earlier = {"kind": "MedhaDeployment", "name": "d", "uid": "earlier", "controller": True}
    for one in world.replicas.values():
        one["metadata"]["ownerReferences"] = [earlier]
    world.settle()
    assert world.condition("Stalled") == ("False", "Creating")
    assert all(one["metadata"]["ownerReferences"] == [earlier] for one in world.replicas.values())
    world.replicas.clear()  # the garbage collector has come
    watched(world)
    assert world.condition("Ready") == ("True", "Complete")


def test_a_deployment_takes_up_the_replicas_that_one_of_its_name_left(world: DeploymentWorld) -> None:
    for one in world.replicas.values():
        one["metadata"]["ownerReferences"] = []
    before = {one["metadata"]["uid"] for one in world.replicas.values()}
    assert watched(world)[:2] == (3, 3)
    assert {one["metadata"]["uid"] for one in world.replicas.values()} == before
    assert all(one["metadata"]["ownerReferences"][0]["uid"] == "u" for one in world.replicas.values())


def test_a_spec_that_cannot_be_read_changes_no_replica(world: DeploymentWorld) -> None:
    world.change(template=template(parallelism={"tensor": 0}))
    world.settle()
    assert world.condition("Stalled") == ("True", "Invalid")
    assert len(world.serving()) == 3
