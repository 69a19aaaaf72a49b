"""The planner reaches what a spec asks for from any state of the cluster, and then writes nothing more."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medha_operator.replica.actions import Action, Apply, Confirm, Delete, Plan, SetStatus
from medha_operator.replica.observed import Node
from reconcile.world import GRID, World, condition, deleted_pods, uids


@pytest.fixture
def world() -> World:
    world = World(**GRID)
    assert world.settle() == 0
    return world


def test_a_new_replica_becomes_ready_and_then_nothing_is_written(world: World) -> None:
    assert sorted(world.pods) == ["r-l0-0", "r-l0-1", "r-l1-0", "r-l1-1"]
    assert condition(world, "Ready") == ("True", "Serving")
    assert (world.status.ready_text, world.status.accelerators) == ("4/4", 8)
    assert world.status.shape == "TP2 x SPP2 x KVP2"
    assert world.plan().actions == ()


def test_pods_know_their_revision_so_that_their_ranks_meet_no_other(world: World) -> None:
    for name in ("r-l0", "r-l1"):
        (worker,) = world.objects["StatefulSet", name]["spec"]["template"]["spec"]["containers"]
        assert {"name": "MEDHA_REVISION", "value": world.status.revision} in worker["env"]


def test_a_replica_that_is_being_deleted_says_so_and_is_left_to_the_garbage_collector(world: World) -> None:
    before = world.status
    world.is_deleting = True
    (action,) = world.plan().actions
    assert isinstance(action, SetStatus)
    world.do([action])
    assert condition(world, "Ready") == ("False", "Deleting")
    assert condition(world, "Reconciling") == ("True", "Deleting")
    assert condition(world, "Serving") == ("True", "Serving"), "its pods finish open requests"
    assert world.status.newest_member == before.newest_member
    assert world.plan() == Plan(())


def test_a_replica_that_waits_for_its_pods_to_end_is_rid_of_those_on_a_lost_node(world: World) -> None:
    """`kubectl delete --cascade=foreground` does this."""
    world.is_deleting = True
    world.do(world.plan().actions)
    world.pods = {name: replace(pod, is_deleting=True) for name, pod in world.pods.items()}
    world.pods["r-l1-0"] = replace(world.pods["r-l1-0"], node="lost")
    world.nodes["lost"] = Node(unreachable_since=world.now)
    assert world.plan() == Plan((), requeue_seconds=120)
    world.now += 120
    assert deleted_pods(world.plan()) == {"r-l1-0"}


def test_live_fields_reach_the_settings_and_no_pod_is_touched(world: World) -> None:
    before = uids(world)
    world.spec = world.spec | {"scheduling": {"policy": "edf"}}
    assert world.settle() == 0
    assert uids(world) == before
    config = world.objects["ConfigMap", f"r-{world.status.revision}"]
    assert '"policy": "edf"' in config["data"]["replica.json"]


def test_fields_that_restart_replace_all_pods_once(world: World) -> None:
    before, made = uids(world), world.created_pods
    world.spec = world.spec | {"kvCache": {"size": "1Gi"}}
    assert world.settle() == 0
    assert not before & uids(world)
    assert world.created_pods == made + 4
    assert condition(world, "Ready") == ("True", "Serving")
    assert world.status.restarts == 0


def test_a_change_is_reported_as_a_change_and_never_as_a_loss(world: World) -> None:
    world.spec = world.spec | {"kvCache": {"size": "1Gi"}}
    notice = []
    for _ in range(8):
        world.do(world.plan().actions)
        notice += [condition(world, "Ready"), condition(world, "Degraded")]
        world.controllers()
        world.kubelets()
    assert set(notice) == {("False", "RevisionChanging"), ("True", "Serving"), ("False", "Healthy")}


def test_fewer_lanes_leave_no_lane_behind(world: World) -> None:
    world.spec = world.spec | {"parallelism": {"tensor": 2, "stream": 2, "kv": 1}}
    assert world.settle() == 0
    assert sorted(world.pods) == ["r-l0-0", "r-l0-1"]
    assert ("StatefulSet", "r-l1") not in world.objects


def test_a_newer_operator_that_renders_differently_touches_no_pod(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    from reconcile import world as module

    before = uids(world)
    monkeypatch.setattr(module, "SETTINGS", module.SETTINGS.model_copy(update={"worker_image": "worker:new"}))
    assert world.settle() == 0
    assert uids(world) == before


def test_a_suspended_replica_has_no_pods_and_comes_back(world: World) -> None:
    world.spec = world.spec | {"suspend": True}
    assert world.settle() == 0
    assert world.pods == {}
    assert condition(world, "Ready") == ("False", "Suspended")
    world.spec = world.spec | {"suspend": False}
    assert world.settle() == 0
    assert condition(world, "Ready") == ("True", "Serving")


def test_what_others_have_changed_or_deleted_is_put_back(world: World) -> None:
    world.objects["Service", "r"]["spec"]["publishNotReadyAddresses"] = False
    del world.objects["PodDisruptionBudget", "r"]
    assert world.settle() == 0
    assert world.objects["Service", "r"]["spec"]["publishNotReadyAddresses"] is True
    assert ("PodDisruptionBudget", "r") in world.objects


def test_a_replica_of_which_all_is_missing_is_asked_for_again_before_there_are_pods(world: World) -> None:
    """The deletion of a replica may be reported late, or happen while the other objects are created."""
    world.objects, world.pods = {}, {}
    actions = world.plan().actions
    (first,) = [index for index, action in enumerate(actions) if _makes(action, "StatefulSet", "r-l0")]
    assert actions[0] == actions[first - 1] == Confirm()
    assert any(_makes(action, "Service", "r") for action in actions[:first])


def _makes(action: Action, kind: str, name: str) -> bool:
    if not isinstance(action, Apply):
        return False
    return (action.manifest["kind"], action.manifest["metadata"]["name"]) == (kind, name)


def test_a_field_that_others_have_added_stays(world: World) -> None:
    world.objects["Service", "r"]["metadata"]["labels"]["theirs"] = "1"
    assert world.plan().actions == ()


def test_keys_are_made_once(world: World) -> None:
    uid = world.objects["Secret", "r-keys-u"]["metadata"]["uid"]
    world.spec = world.spec | {"kvCache": {"size": "1Gi"}}
    world.settle()
    assert world.objects["Secret", "r-keys-u"]["metadata"]["uid"] == uid


def test_pods_of_an_older_revision_end_when_the_controller_of_statefulsets_knows_the_newer_one(
    world: World,
) -> None:
    """Until then it would create pods of the older one in their place, which would have to end, too."""
    world.spec = world.spec | {"kvCache": {"size": "1Gi"}}
    changed = world.plan()
    assert deleted_pods(changed) == set()
    world.do(changed.actions)
    lanes = [found for (kind, _), found in world.objects.items() if kind == "StatefulSet"]
    lanes[0]["metadata"]["generation"] = 1  # one that was made of this revision: its status is not kept
    lanes[1]["metadata"]["generation"], lanes[1]["status"] = 2, {"observedGeneration": 1}
    assert deleted_pods(world.plan()) == set()
    lanes[1]["status"] = {"observedGeneration": 2}
    worker = lanes[1]["spec"]["template"]["spec"]["containers"][0]
    worker["resources"] = {"limits": {"cpu": "1"}}  # as the API server writes the 1000m of a template
    assert any(isinstance(action, Apply) for action in world.plan().actions)
    assert deleted_pods(world.plan()) == set(world.pods)


def test_what_is_too_much_and_held_by_a_finalizer_is_deleted_once(world: World) -> None:
    old = world.status.revision
    world.hold()
    world.spec = world.spec | {"parallelism": {"tensor": 2, "stream": 2, "kv": 1}}
    world.generation += 1
    assert world.settle() == 0
    held = [name for name, found in world.objects.items() if "deletionTimestamp" in found["metadata"]]
    assert held == [("StatefulSet", "r-l1")]  # the older revision's settings are in use
    world.pods = {name: pod for name, pod in world.pods.items() if not pod.is_deleting}
    assert world.settle() == 0
    assert "deletionTimestamp" in world.objects["ConfigMap", f"r-{old}"]["metadata"]
    world.release()
    assert world.settle() == 0
    assert ("ConfigMap", f"r-{old}") not in world.objects


# --- restarts -------------------------------------------------------------------------------------------


def test_the_enrolment_of_a_router_elsewhere_is_copied_once_and_again_for_another_router() -> None:
    world = World(routerRef={"name": "front", "namespace": "elsewhere"})
    world.settle()
    (first,) = [name for kind, name in world.objects if kind == "Secret" and "enrolment" in name]
    assert world.settle() == 0
    world.spec = world.spec | {"routerRef": {"name": "front", "namespace": "other"}}
    world.generation += 1
    world.settle()
    copies = [name for kind, name in world.objects if kind == "Secret" and "enrolment" in name]
    assert len(copies) == 2
    template = json.dumps(world.objects["StatefulSet", "r-l0"])
    assert [copies[1] in template, first in template] == [True, False]


@pytest.mark.parametrize("router", [{"name": "front"}, {"name": "front", "namespace": "default"}])
def test_the_enrolment_of_a_router_of_the_same_namespace_is_mounted_as_it_is(router: dict[str, str]) -> None:
    world = World(routerRef=router)
    world.settle()
    assert [name for kind, name in world.objects if kind == "Secret" and "enrolment" in name] == []
    assert '"front-enrolment"' in json.dumps(world.objects["StatefulSet", "r-l0"])


def test_one_lost_pod_makes_exactly_one_restart(world: World) -> None:
    before, made = uids(world), world.created_pods
    del world.pods["r-l1-0"]
    assert world.settle() == 0
    assert not before & uids(world)
    assert world.created_pods == made + 4
    assert world.status.restarts == 1
    assert [notice.reason for notice in world.notice].count("GangRestarted") == 1


def test_a_pod_that_was_replaced_while_no_operator_ran_is_noticed(world: World) -> None:
    del world.pods["r-l0-1"]
    world.now += 100
    world.controllers()
    world.kubelets()
    before = uids(world)
    assert world.settle() == 0
    survivors = before & uids(world)
    assert len(survivors) == 1  # the youngest; the others are of the broken gang
    assert world.status.restarts == 1


def test_nobody_counts_on_pods_that_are_about_to_end(world: World) -> None:
    """All are ready, a newer one among them; if it counted, a deployment would let the next replica go."""
    world.pods["r-l0-1"] = replace(world.pods["r-l0-1"], uid="new", created=world.now + 1)
    world.now += 2
    planned = world.plan().actions
    assert deleted_pods(world.plan()) == {"r-l0-0", "r-l1-0", "r-l1-1"}
    first_end = next(index for index, action in enumerate(planned) if isinstance(action, Delete))
    world.do(planned[:first_end])
    assert condition(world, "Ready") == ("False", "MemberLost")
    assert world.status.ready_pods == 1


def test_an_evicted_pod_is_taken_away_with_its_gang(world: World) -> None:
    world.pods["r-l0-0"] = replace(world.pods["r-l0-0"], is_failed=True, is_ready=False)
    before = uids(world)
    assert world.settle() == 0
    assert not before & uids(world)


def test_pods_that_have_never_all_started_are_left_alone() -> None:
    world = World(**GRID)
    world.do(world.plan().actions)
    world.controllers()
    problem = ("ImagePullFailed", "container worker: no such image")
    world.pods["r-l0-1"] = replace(world.pods["r-l0-1"], is_scheduled=True, problem=problem)
    for name in ("r-l0-0", "r-l1-0", "r-l1-1"):
        world.pods[name] = replace(world.pods[name], is_scheduled=True, is_started=True)
    before = uids(world)
    for _ in range(5):
        world.do(world.plan().actions)
        world.now += 600
        world.controllers()
    assert uids(world) == before
    assert condition(world, "Ready") == ("False", "ImagePullFailed")
    assert condition(world, "Stalled") == ("True", "ImagePullFailed")


def test_a_pod_that_does_not_start_is_reported_before_those_that_wait_for_it() -> None:
    world = World(**GRID)
    world.do(world.plan().actions)
    world.controllers()
    world.kubelets()
    troubles = {"r-l0-0": "RendezvousFailed", "r-l0-1": "StartingContainers"}
    for name, reason in troubles.items():
        notice = (reason, "words of a kubelet")
        world.pods[name] = replace(world.pods[name], is_started=False, is_ready=False, problem=notice)
    world.do(world.plan().actions)
    ready = next(entry for entry in world.status.conditions if entry.type == "Ready")
    assert (ready.status, ready.reason) == ("False", "StartingContainers")
    assert "pod r-l0-1: words of a kubelet" in ready.message
    assert condition(world, "Reconciling")[0] == "True"
    assert condition(world, "Stalled")[0] == "False"


def test_the_second_restart_waits_and_later_ones_wait_longer(world: World) -> None:
    waits = []
    for _ in range(4):
        del world.pods["r-l1-1"]
        world.controllers()
        began = world.now
        while not deleted_pods(planned := world.plan()):
            world.do(planned.actions)
            assert planned.requeue_seconds is not None
            world.now += planned.requeue_seconds
        waits.append(world.now - began)
        assert world.settle() == 0
        world.now += 1
    assert waits[0] == 0
    assert 0 < waits[1] <= 30 < waits[2] <= 60 < waits[3] <= 120


def spoil(world: World, **times: str) -> None:
    world.status = world.status.model_copy(update=times)


def test_a_record_that_is_later_than_its_pods_is_made_again_and_hides_no_lost_pod(world: World) -> None:
    record = world.status.newest_member
    spoil(world, newest_member="2099-01-01T00:00:00Z")
    assert world.settle() == 0
    assert world.status.newest_member == record
    del world.pods["r-l0-1"]
    world.now += 10
    world.controllers()  # it was replaced before anybody looked
    world.kubelets()
    world.settle()
    assert world.status.restarts == 1


def test_a_record_that_is_spoilt_while_a_pod_is_lost_is_made_again_by_the_next_gang(world: World) -> None:
    del world.pods["r-l0-1"]
    spoil(world, newest_member="2099-01-01T00:00:00Z")
    assert world.settle() == 0
    assert world.status.newest_member is not None
    assert world.status.newest_member < "2031"
    assert condition(world, "Ready") == ("True", "Serving")


def test_a_restart_that_is_to_come_holds_up_no_other(world: World) -> None:
    del world.pods["r-l0-1"]
    world.settle()
    spoil(world, last_restart_time="2099-01-01T00:00:00Z")
    del world.pods["r-l0-1"]
    world.settle()
    assert world.status.restarts == 2
    assert world.status.last_restart_time is not None
    assert world.status.last_restart_time < "2031"


def test_a_condition_since_a_time_to_come_is_since_now(world: World) -> None:
    spoilt = [
        entry.model_copy(update={"last_transition_time": "2099-01-01T00:00:00Z"})
        for entry in world.status.conditions
    ]
    world.status = world.status.model_copy(update={"conditions": tuple(spoilt)})
    assert world.settle() == 0
    assert all(entry.last_transition_time < "2031" for entry in world.status.conditions)


def test_a_long_stable_time_forgets_earlier_restarts(world: World) -> None:
    del world.pods["r-l1-1"]
    world.settle()
    assert world.status.restarts == 1
    left = world.plan().requeue_seconds
    assert left is not None
    world.now += left
    world.settle()
    assert world.status.restarts == 0


def test_time_without_serving_is_not_stable_time(world: World) -> None:
    del world.pods["r-l1-1"]
    world.do(world.plan().actions)  # a restart; then nobody is ready for long
    world.do(world.plan().actions)
    world.controllers()
    world.do(world.plan().actions)
    world.now += 5000
    world.settle()
    assert world.status.restarts == 1


def test_ranks_that_restart_in_place_are_unready_for_a_while_and_nothing_else(world: World) -> None:
    before = dict(world.pods)
    world.pods = {name: replace(pod, is_ready=False) for name, pod in before.items()}
    planned = world.plan()
    assert deleted_pods(planned) == set()
    world.do(planned.actions)
    assert condition(world, "Ready") == ("False", "RendezvousPending")
    assert condition(world, "Degraded") == ("False", "Healthy")
    world.pods = before
    assert world.settle() == 0
    assert condition(world, "Ready") == ("True", "Serving")
    assert world.status.restarts == 0


def test_a_member_that_gives_up_on_the_others_restarts_the_gang_once(world: World) -> None:
    before = uids(world)
    world.pods["r-l0-1"] = replace(
        world.pods["r-l0-1"], requests_restart=True, is_ready=False, is_started=False
    )
    assert deleted_pods(world.plan()) == set(world.pods)
    assert world.settle() == 0
    assert not before & uids(world)
    assert world.status.restarts == 1


# --- from anywhere --------------------------------------------------------------------------------------

DISTURBANCES = st.one_of(
    st.tuples(st.just("lose pod"), st.integers(0, 7)),
    st.tuples(st.just("fail pod"), st.integers(0, 7)),
    st.tuples(st.just("lose object"), st.integers(0, 20)),
    st.tuples(st.just("spec"), st.integers(0, 5)),
    st.tuples(st.just("die after"), st.integers(0, 12)),
    st.tuples(st.just("wait"), st.sampled_from([1, 40, 1000])),
    st.tuples(st.just("cluster"), st.just(0)),
    st.tuples(st.just("hold"), st.just(0)),
    st.tuples(st.just("silence"), st.integers(0, 7)),
    st.tuples(st.just("cut off"), st.just(0)),
    st.tuples(st.just("release"), st.just(0)),
)
SPECS: list[dict[str, Any]] = [
    GRID,
    {"parallelism": {"tensor": 1, "stream": 2, "kv": 1}},
    GRID | {"kvCache": {"size": "1Gi"}},
    GRID | {"scheduling": {"policy": "edf"}},
    GRID | {"suspend": True},
    {"parallelism": {"tensor": 1, "stream": 1, "kv": 3}},
]


def disturb(world: World, kind: str, index: int) -> None:
    if kind == "lose pod" and world.pods:
        del world.pods[sorted(world.pods)[index % len(world.pods)]]
    elif kind == "fail pod" and world.pods:
        name = sorted(world.pods)[index % len(world.pods)]
        world.pods[name] = replace(world.pods[name], is_failed=True, is_ready=False)
    elif kind == "lose object":
        losable = sorted(key for key in world.objects if key[0] != "ControllerRevision")
        if losable:
            del world.objects[losable[index % len(losable)]]
    elif kind == "spec":
        world.spec = {"model": world.spec["model"]} | SPECS[index]
        world.generation += 1
    elif kind == "die after":
        world.do(world.plan().actions[:index])
    elif kind == "wait":
        world.now += index
    elif kind == "silence" and world.pods:
        name = sorted(world.pods)[index % len(world.pods)]
        world.pods[name] = replace(world.pods[name], node="lost")
        world.nodes.setdefault("lost", Node(unreachable_since=world.now))
    elif kind == "cut off":
        world.other_nodes = []
    elif kind == "hold":
        world.hold()
    elif kind == "release":
        world.release()
    else:
        world.controllers()
        world.kubelets()


@given(st.lists(DISTURBANCES, max_size=14))
def test_whatever_happens_it_ends_where_a_fresh_replica_of_the_spec_ends(
    disturbances: list[tuple[str, int]],
) -> None:
    """Once nothing disturbs the cluster any more, its state is a function of the spec alone."""
    world = World(**GRID)
    for kind, index in disturbances:
        disturb(world, kind, index)
    world.settle()  # with what is held, where no write may follow upon its own success
    world.release()
    world.other_nodes = [Node(reporting_since=world.now)]
    for _ in range(8):  # restarts may have to wait for their back-off
        world.settle()
        world.now += 700
    assert world.settle() == 0
    fresh = World(**{key: value for key, value in world.spec.items() if key != "model"})
    assert fresh.settle() == 0
    live = [kind_name for kind_name in world.objects if kind_name[0] != "ControllerRevision"]
    expected = [kind_name for kind_name in fresh.objects if kind_name[0] != "ControllerRevision"]
    assert sorted(live) == sorted(expected)
    assert sorted(world.pods) == sorted(fresh.pods)
    assert {pod.revision for pod in world.pods.values()} <= {world.status.revision}
    assert condition(world, "Ready") == condition(fresh, "Ready")
    for key in expected:
        mine, theirs = (dict(one.objects[key]) for one in (world, fresh))
        for one in (mine, theirs):
            one["metadata"] = {k: v for k, v in one["metadata"].items() if k in ("name", "labels")}
        assert mine == theirs


def test_restarts_without_a_time_were_not_written_by_the_operator_and_are_forgotten() -> None:
    world = World(**GRID)
    world.settle()
    world.status = world.status.model_copy(update={"restarts": 1_000_000})
    world.settle()
    assert world.status.restarts == 0
    del world.pods["r-l1-0"]
    world.settle()
    assert world.status.restarts == 1


def test_revisions_that_were_left_behind_go_with_the_next_replica_of_the_name() -> None:
    """After `kubectl delete --cascade=orphan`, the garbage collector has removed their owner."""
    world = World(**GRID)
    world.settle()
    (revision,) = (one for (kind, _), one in world.objects.items() if kind == "ControllerRevision")
    owners = revision["metadata"].pop("ownerReferences")
    before = uids(world)
    assert world.settle() == 0
    (adopted,) = (one for (kind, _), one in world.objects.items() if kind == "ControllerRevision")
    assert adopted["metadata"]["ownerReferences"] == owners
    assert adopted["data"] == revision["data"]
    assert uids(world) == before


def test_an_annotation_of_the_pods_restarts_them_as_docs_say() -> None:
    world = World(**GRID)
    world.settle()
    before = uids(world)
    world.spec["template"] = {"metadata": {"annotations": {"restarted-at": "2030-01-01T00:00:00Z"}}}
    world.generation += 1
    assert world.settle() == 0
    assert not uids(world) & before
    assert world.status.restarts == 0


def test_a_pod_without_its_accelerator_is_named_before_pods_that_wait_for_its_ranks() -> None:
    world = World(**GRID)
    world.settle()
    waiting, lacking, *_ = sorted(world.pods)
    problems = {waiting: ("RendezvousFailed", "no answer"), lacking: ("NoAccelerator", "no GPU")}
    for name, problem in problems.items():
        world.pods[name] = replace(world.pods[name], is_started=False, is_ready=False, problem=problem)
    world.do(world.plan().actions)
    conditions = {one.type: one for one in world.status.conditions}
    for kind in ("Ready", "WeightsLoaded", "Degraded"):
        assert conditions[kind].reason == "NoAccelerator"
        assert f"pod {lacking}: no GPU" in conditions[kind].message
    assert conditions["Ready"].status == "False"


def test_pods_that_crash_repeatedly_are_reported_in_the_same_words_each_time() -> None:
    world = World(**GRID)
    world.settle()
    world.notice.clear()
    crashes = ("CrashLooping", "container worker: ended with exit code 1 (Error)")
    for attempt in range(3):
        for problem in (crashes, None):
            for name, pod in world.pods.items():
                last_words = None if problem is None else (problem[0], f"{problem[1]}: attempt {attempt}")
                world.pods[name] = replace(pod, is_started=False, is_ready=False, problem=last_words)
            for _ in range(2):  # once to say so, once with nothing new to say
                world.do(world.plan().actions)
    notice = [(one.reason, one.message, one.is_warning) for one in world.notice]
    assert [reason for reason, _, _ in notice] == ["CrashLooping"] * 3
    assert len(set(notice)) == 1
