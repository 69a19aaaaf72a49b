"""A replica leaves nodes that are being emptied, and its pods on lost nodes are replaced."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from medha_operator.replica.actions import Apply, Delete, RecordEvent
from medha_operator.replica.gang_restarts import EVICTION_SECONDS
from medha_operator.replica.manifests import OPEN_SINCE
from medha_operator.replica.nodes import CAPACITY_SECONDS, SETTLE_SECONDS, unsettled
from medha_operator.replica.observed import Capacity, Node
from reconcile.world import GRID, World, allowed_away, condition, deleted_pods, uids


@pytest.fixture
def world() -> World:
    world = World(**GRID)
    assert world.settle() == 0
    return world


def test_a_silent_node_is_reported_at_once_and_its_pods_replaced_after_the_limit(world: World) -> None:
    world.pods["r-l1-0"] = replace(world.pods["r-l1-0"], node="lost")
    world.nodes["lost"] = Node(unreachable_since=world.now)
    world.settle()
    assert condition(world, "Degraded") == ("True", "NodeUnreachable")
    assert deleted_pods(world.plan()) == set()
    world.now += 121
    assert world.settle() == 0
    assert condition(world, "Degraded") == ("False", "Healthy")
    assert condition(world, "Ready") == ("True", "Serving")
    assert world.status.restarts == 1


def test_no_pod_is_forced_while_no_node_at_all_reports(world: World) -> None:
    """Either the control plane is cut off from kubelets whose pods serve, or the only node has a kubelet that hangs."""
    before = uids(world)
    for index, (name, pod) in enumerate(sorted(world.pods.items())):
        world.pods[name] = replace(pod, node=f"node{index}")
        world.nodes[f"node{index}"] = Node(unreachable_since=world.now)
    world.other_nodes = [Node(unreachable_since=world.now)]
    for _ in range(5):
        world.now += 120
        assert world.settle() == 0
        assert world.plan().requeue_seconds is not None
    assert uids(world) == before
    assert condition(world, "Degraded") == ("True", "NoNodeReports")


def test_a_silence_is_counted_from_the_time_when_a_first_node_reports_again(world: World) -> None:
    """The others are about to be heard of as well."""
    world.pods["r-l1-0"] = replace(world.pods["r-l1-0"], node="lost")
    world.nodes["lost"] = Node(unreachable_since=world.now)
    world.other_nodes = [Node(unreachable_since=world.now)]
    world.now += 1000
    assert deleted_pods(world.plan()) == set()
    world.other_nodes = [Node(reporting_since=world.now), Node(reporting_since=world.now + 60)]
    assert world.plan().requeue_seconds == 120
    world.do(world.plan().actions)
    assert condition(world, "Degraded") == ("True", "NodeUnreachable")
    world.now += 120
    assert deleted_pods(world.plan()) >= {"r-l1-0"}


def test_a_node_that_comes_back_in_time_costs_nothing(world: World) -> None:
    before = uids(world)
    world.pods["r-l1-0"] = replace(world.pods["r-l1-0"], node="slow")
    world.nodes["slow"] = Node(unreachable_since=world.now)
    world.settle()
    world.now += 60
    world.nodes["slow"] = Node()
    assert world.settle() == 0
    assert uids(world) == before


def test_a_cordoned_node_is_emptied_but_a_deployment_surges_first(world: World) -> None:
    for name, pod in world.pods.items():
        world.pods[name] = replace(pod, node="a")
    world.nodes["a"] = Node(cordoned=True)
    world.deployment = "owner"
    assert deleted_pods(world.plan()) == set()
    world.deployment = None
    assert world.plan().requeue_seconds == EVICTION_SECONDS
    world.do(world.plan().actions)
    assert allowed_away(world) == "100%"
    assert deleted_pods(world.plan()) == set()  # evictors come first
    world.now += EVICTION_SECONDS
    assert deleted_pods(world.plan()) == set(world.pods)


def test_evictors_take_the_pods_of_a_cordoned_node_and_the_rest_follows_as_a_move(world: World) -> None:
    for name in ("r-l0-1", "r-l1-0"):
        world.pods[name] = replace(world.pods[name], node="a")
    world.nodes["a"] = Node(cordoned=True)
    before = uids(world)
    world.do(world.plan().actions)
    for name in ("r-l0-1", "r-l1-0"):  # each is asked for by its name until it is another one
        world.now += 2
        assert allowed_away(world) == "100%"
        assert deleted_pods(world.plan()) == set()
        world.pods[name] = replace(world.pods[name], is_deleting=True)
    assert deleted_pods(world.plan()) == {"r-l0-0", "r-l1-1"}
    assert world.settle() == 0
    assert allowed_away(world) == 0
    assert not uids(world) & before
    assert world.status.restarts == 0
    assert world.created_pods == 8


@pytest.mark.parametrize("forgotten", [None, "budget", "status"])
def test_an_evicted_pod_that_ends_before_the_next_reconcile_counts_as_a_move(
    world: World, forgotten: str | None
) -> None:
    """A user may delete the budget, and a refusal may end the reconcile that opened it before the status is written."""
    world.pods["r-l0-1"] = replace(world.pods["r-l0-1"], node="a")
    world.nodes["a"] = Node(cordoned=True)
    before = world.status
    world.do(world.plan().actions)
    del world.pods["r-l0-1"]
    if forgotten == "budget":
        del world.objects["PodDisruptionBudget", "r"]
    elif forgotten == "status":
        world.status = before
    assert world.settle() == 0
    assert world.status.restarts == 0
    assert allowed_away(world) == 0
    assert [notice.reason for notice in world.notice] == ["Moving"]
    del world.pods["r-l0-1"]
    world.settle()
    assert world.status.restarts == 1


def test_a_pod_that_was_created_again_meanwhile_is_left_where_it_is(world: World) -> None:
    for name in ("r-l0-1", "r-l1-0"):
        world.pods[name] = replace(world.pods[name], node="a")
    world.nodes["a"] = Node(cordoned=True)
    world.deployment, world.may_drain = "owner", world.status.newest_member
    world.do(world.plan().actions)
    world.now += 2
    world.pods["r-l0-1"] = replace(world.pods["r-l0-1"], is_deleting=True)
    world.controllers()
    world.kubelets()
    assert deleted_pods(world.plan()) == set()
    del world.pods["r-l1-0"]  # it ends before the next reconcile
    assert deleted_pods(world.plan()) == {"r-l0-0", "r-l1-1"}
    world.settle()
    assert world.status.restarts == 0


@pytest.mark.parametrize("has_deployment", [False, True])
@pytest.mark.parametrize("is_evicted", [True, False])
@pytest.mark.parametrize("deleted", [0, 1, 2])
def test_a_move_whose_deletions_were_interrupted_leaves_no_pod_of_the_old_gang(
    world: World, deleted: int, is_evicted: bool, has_deployment: bool
) -> None:
    """A conflict ends the reconcile after some of the deletions; the status has been written before them."""
    world.pods["r-l0-0"] = replace(world.pods["r-l0-0"], node="a")
    world.nodes["a"] = Node(cordoned=True)
    if has_deployment:
        world.deployment, world.may_drain = "owner", world.status.newest_member
    before = uids(world)
    world.do(world.plan().actions)
    if is_evicted:
        del world.pods["r-l0-0"]
    else:
        world.now += EVICTION_SECONDS
    actions = world.plan().actions
    deletions = [index for index, action in enumerate(actions) if isinstance(action, Delete)]
    assert len(deletions) == 4 - is_evicted
    world.do(actions[: deletions[deleted]])
    assert condition(world, "Degraded") == ("False", "Healthy"), "a move is no loss"
    world.controllers()
    world.kubelets()
    world.now += 2
    assert world.settle() == 0
    assert not uids(world) & before
    assert world.created_pods == 8
    assert world.status.restarts == 0
    assert [notice.reason for notice in world.notice].count("GangRestarted") == 0
    assert condition(world, "Ready") == ("True", "Serving")


def test_a_move_that_is_called_off_before_any_pod_has_left_hides_no_later_loss(world: World) -> None:
    on_node(world, "a")
    world.nodes["a"] = Node(cordoned=True)
    before = uids(world)
    world.do(world.plan().actions)
    world.now += EVICTION_SECONDS
    actions = world.plan().actions
    world.do(action for action in actions if not isinstance(action, Delete))
    world.nodes["a"] = Node()
    assert world.settle() == 0
    assert uids(world) == before
    del world.pods["r-l0-0"]
    planned = world.plan().actions
    world.do(action for action in planned if not isinstance(action, Delete))
    assert condition(world, "Degraded") == ("True", "MemberLost")
    assert world.settle() == 0
    assert world.status.restarts == 1


@pytest.mark.parametrize("is_time_known", [True, False])
def test_pods_that_come_back_to_a_cordoned_node_are_not_ended_again(
    world: World, is_time_known: bool
) -> None:
    """Pods that tolerate every taint do so, as is usual on nodes with GPUs."""
    for name, pod in world.pods.items():
        world.pods[name] = replace(pod, node="node", tolerates_emptying=not is_time_known)
    world.nodes["node"] = Node(cordoned=True, cordoned_since=world.now if is_time_known else None)
    before = uids(world)
    world.settle()  # the eviction's time is not over
    for _ in range(5):
        world.now += EVICTION_SECONDS
        world.settle()
    assert {pod.node for pod in world.pods.values()} == {"node"}
    assert world.created_pods == (8 if is_time_known else 4)
    assert bool(before & uids(world)) is not is_time_known
    assert condition(world, "Draining") == ("False", "NotDraining")
    assert condition(world, "Ready") == ("True", "Serving")
    assert allowed_away(world) == 0


def on_node(world: World, node: str) -> None:
    for name, pod in world.pods.items():
        world.pods[name] = replace(pod, node=node)


NO_ROOM = Capacity(False, "no other node may take its 4 pods")


def test_a_replica_that_would_find_no_other_node_serves_on_and_moves_when_there_is_one(world: World) -> None:
    on_node(world, "a")
    world.nodes["a"] = Node(cordoned=True)
    world.capacity = NO_ROOM
    before = uids(world)
    for _ in range(5):
        assert world.settle() == 0
        assert world.plan().requeue_seconds == CAPACITY_SECONDS
        world.now += 600
    assert (uids(world), allowed_away(world)) == (before, 0)
    assert condition(world, "Ready") == ("True", "Serving")
    assert condition(world, "Draining") == ("True", "NodeCordoned")
    draining = next(one for one in world.status.conditions if one.type == "Draining")
    assert "node a " in draining.message
    assert NO_ROOM.lacks in draining.message
    assert [(notice.reason, notice.is_warning) for notice in world.notice] == [("NodeCordoned", True)]
    world.capacity = Capacity(True)
    world.do(world.plan().actions)
    assert allowed_away(world) == "100%"
    world.now += EVICTION_SECONDS
    world.do(world.plan().actions)
    world.nodes = {"b": Node()}
    assert world.settle() == 0
    assert not uids(world) & before
    assert (allowed_away(world), world.status.restarts) == (0, 0)
    assert condition(world, "Draining") == ("False", "NotDraining")


def test_nobody_leaves_and_nothing_is_reported_while_nodes_are_being_cordoned(world: World) -> None:
    on_node(world, "a")
    cordoned = [
        Node(cordoned=True, cordoned_since=world.now),
        Node(cordoned=True, cordoned_since=world.now - 60),
    ]
    world.nodes["a"] = cordoned[0]
    settling = unsettled(cordoned, world.now + 2)
    assert settling is not None
    world.capacity = settling
    assert world.settle() == 0
    assert allowed_away(world) == 0
    assert condition(world, "Draining") == ("True", "NodesSettling")
    assert world.plan().requeue_seconds == SETTLE_SECONDS - 2
    assert world.notice == []
    assert unsettled(cordoned, world.now + SETTLE_SECONDS) is None
    assert unsettled([Node(), Node(cordoned=True)], world.now) is None, "whoever marked it has not said when"
    ahead = unsettled([Node(cordoned=True, cordoned_since=world.now + 3600)], world.now)
    assert ahead is not None
    assert ahead.requeue_seconds == SETTLE_SECONDS, "by a clock that is ahead"
    world.capacity = NO_ROOM
    world.settle()
    assert [notice.reason for notice in world.notice] == ["NodeCordoned"]


def test_room_that_goes_before_anybody_was_evicted_closes_the_budget_again(world: World) -> None:
    """All old nodes are cordoned one after the other before the first of them is drained."""
    on_node(world, "a")
    world.nodes["a"] = Node(cordoned=True)
    before = uids(world)
    world.do(world.plan().actions)
    assert allowed_away(world) == "100%"
    world.now += EVICTION_SECONDS
    world.capacity = NO_ROOM
    assert world.settle() == 0
    assert (uids(world), allowed_away(world)) == (before, 0)
    assert condition(world, "Draining") == ("True", "NodeCordoned")
    assert condition(world, "Ready") == ("True", "Serving")


def test_room_that_goes_after_a_pod_was_evicted_leaves_no_half_replica(world: World) -> None:
    on_node(world, "a")
    world.nodes["a"] = Node(cordoned=True)
    before = uids(world)
    world.do(world.plan().actions)
    world.pods["r-l0-1"] = replace(world.pods["r-l0-1"], is_deleting=True)
    world.capacity = NO_ROOM
    assert deleted_pods(world.plan()) == {"r-l0-0", "r-l1-0", "r-l1-1"}
    world.settle()
    assert not uids(world) & before
    assert world.status.restarts == 0


@pytest.mark.parametrize("spoilt", ["", "yesterday", "2999-01-01T00:00:00Z"])
def test_a_budget_whose_time_is_spoilt_gets_a_new_one(world: World, spoilt: str) -> None:
    for name, pod in world.pods.items():
        world.pods[name] = replace(pod, node="a")
    world.nodes["a"] = Node(cordoned=True)
    world.do(world.plan().actions)
    world.objects["PodDisruptionBudget", "r"]["metadata"]["annotations"] = {OPEN_SINCE: spoilt}
    world.do(world.plan().actions)
    world.now += EVICTION_SECONDS
    assert deleted_pods(world.plan()) == set(world.pods)


def test_a_replica_of_a_deployment_leaves_a_cordoned_node_only_with_permission(world: World) -> None:
    for name, pod in world.pods.items():
        world.pods[name] = replace(pod, node="a")
    world.nodes["a"] = Node(cordoned=True)
    world.deployment = "owner"
    assert world.settle() == 0
    assert condition(world, "Draining") == ("True", "AwaitingReplacement")
    assert condition(world, "Ready") == ("True", "Serving")
    world.may_drain = "2029-01-01T00:00:00Z"  # of an earlier gang
    assert deleted_pods(world.plan()) == set()
    assert allowed_away(world) == 0
    world.may_drain = world.status.newest_member
    world.do(world.plan().actions)
    world.now += EVICTION_SECONDS
    assert deleted_pods(world.plan()) == set(world.pods)
    assert world.settle() == 0
    assert condition(world, "Draining") == ("False", "NotDraining")
    assert world.status.restarts == 0


def test_a_replica_that_never_started_leaves_a_cordoned_node_without_permission() -> None:
    world = World(**GRID)
    world.do(world.plan().actions)
    world.controllers()
    world.pods = {name: replace(pod, node="a", is_scheduled=True) for name, pod in world.pods.items()}
    world.nodes["a"] = Node(cordoned=True)
    world.deployment = "owner"
    world.do(world.plan().actions)
    world.now += EVICTION_SECONDS
    assert deleted_pods(world.plan()) == set(world.pods)


@pytest.mark.parametrize("change", [{"suspend": True}, {"kvCache": {"size": "1Gi"}}])
def test_pods_on_a_lost_node_are_removed_whatever_else_is_to_be_done(
    world: World, change: dict[str, Any]
) -> None:
    world.pods["r-l1-0"] = replace(world.pods["r-l1-0"], node="lost", is_deleting=True)
    world.nodes["lost"] = Node(unreachable_since=world.now)
    world.spec = world.spec | change
    planned = world.plan()
    assert planned.requeue_seconds == 120
    world.now += 121
    forced = [action for action in world.plan().actions if isinstance(action, Delete) and action.is_forced]
    assert [action.name for action in forced] == ["r-l1-0"]


REFUSED: list[dict[str, Any]] = [{"parallelism": {"tensor": 0}}, {"placement": {"gang": "core"}}]


@pytest.mark.parametrize("deployment", [None, "owner"])
@pytest.mark.parametrize("change", REFUSED)
def test_what_runs_leaves_lost_and_cordoned_nodes_though_its_new_spec_is_refused(
    world: World, change: dict[str, Any], deployment: str | None
) -> None:
    world.deployment = deployment
    world.spec = world.spec | change | {"lifecycle": {"restart": {"nodeLostSeconds": 60}}}
    world.generation += 1
    assert world.settle() == 0
    world.pods["r-l0-0"] = replace(world.pods["r-l0-0"], node="cordoned")
    world.pods["r-l1-0"] = replace(world.pods["r-l1-0"], node="lost")
    world.nodes = {"cordoned": Node(cordoned=True), "lost": Node(unreachable_since=world.now)}
    planned = world.plan()
    assert planned.requeue_seconds == EVICTION_SECONDS
    world.do(planned.actions)
    assert allowed_away(world) == "100%"
    assert deleted_pods(world.plan()) == set()
    world.now += EVICTION_SECONDS
    planned = world.plan()
    assert deleted_pods(planned) == set(world.pods), "evictors have had their turn"
    world.do(planned.actions)
    assert world.status.restarts == 0
    world.now += 60 - EVICTION_SECONDS
    planned = world.plan()
    assert {action.name for action in planned.actions if isinstance(action, Delete) and action.is_forced} == {
        "r-l1-0"
    }
    world.do(planned.actions)
    world.nodes = {}
    assert world.settle() == 0
    assert allowed_away(world) == 0
    assert condition(world, "Accepted")[0] == "False"


@pytest.mark.parametrize("deployment", [None, "owner"])
@pytest.mark.parametrize("change", REFUSED)
def test_what_runs_stays_on_a_cordoned_node_without_room_elsewhere_though_its_new_spec_is_refused(
    world: World, change: dict[str, Any], deployment: str | None
) -> None:
    world.deployment, world.capacity = deployment, NO_ROOM
    world.spec = world.spec | change
    world.generation += 1
    on_node(world, "a")
    world.nodes["a"] = Node(cordoned=True)
    before = uids(world)
    for _ in range(3):
        assert world.settle() == 0
        assert world.plan().requeue_seconds == CAPACITY_SECONDS
        world.now += 600
    assert (uids(world), allowed_away(world)) == (before, 0)
    assert condition(world, "Ready") == ("True", "Serving")
    assert [notice.reason for notice in world.notice].count("NodeCordoned") == (deployment is None)


@pytest.mark.parametrize("change", REFUSED)
def test_nothing_is_made_of_a_spec_that_is_refused_from_the_beginning(change: dict[str, Any]) -> None:
    world = World(**change)
    assert world.settle() == 0
    assert world.objects == {}


def test_pods_leave_lost_and_cordoned_nodes_before_anything_that_may_be_refused(world: World) -> None:
    """The first action that the API server refuses ends a reconcile."""
    world.pods["r-l0-0"] = replace(world.pods["r-l0-0"], node="cordoned")
    world.pods["r-l1-0"] = replace(world.pods["r-l1-0"], node="lost")
    world.nodes = {"cordoned": Node(cordoned=True), "lost": Node(unreachable_since=world.now - 500)}
    world.spec = world.spec | {"routerRef": {"name": "front", "namespace": "nowhere"}}
    first, notice, budget, *_ = world.plan().actions
    assert isinstance(first, Delete)
    assert (first.name, first.is_forced) == ("r-l1-0", True)
    assert isinstance(notice, RecordEvent)
    assert isinstance(budget, Apply)
    assert budget.manifest["kind"] == "PodDisruptionBudget"


def test_no_pod_is_deleted_twice_in_one_plan(world: World) -> None:
    world.pods["r-l1-0"] = replace(world.pods["r-l1-0"], node="lost")
    world.nodes["lost"] = Node(unreachable_since=world.now)
    world.now += 500
    names = [action.name for action in world.plan().actions if isinstance(action, Delete)]
    assert sorted(names) == ["r-l0-0", "r-l0-1", "r-l1-0", "r-l1-1"]


def test_a_pod_on_a_lost_node_that_a_finalizer_holds_is_forced_once(world: World) -> None:
    world.pods["r-l1-0"] = replace(world.pods["r-l1-0"], node="lost")
    world.nodes["lost"] = Node(unreachable_since=world.now - 500)
    world.hold()
    world.do(world.plan().actions)
    assert world.pods["r-l1-0"].has_finalizer
    assert deleted_pods(world.plan()) == set()
    assert [notice.reason for notice in world.notice].count("NodeLost") == 1
    world.settle()
    assert condition(world, "Degraded") == ("True", "NodeUnreachable")
    world.release()
    assert world.settle() == 0
    assert condition(world, "Ready") == ("True", "Serving")


def lose_lane_and_node(world: World) -> None:
    """The lane `r-l1` is deleted, and the kubelet of one of its pods cannot confirm its end."""
    world.pods["r-l1-0"] = replace(world.pods["r-l1-0"], node="lost")
    world.nodes["lost"] = Node(unreachable_since=world.now)
    del world.objects["StatefulSet", "r-l1"]
    world.controllers()  # the garbage collector among them
    assert world.settle() == 0


def test_a_pod_of_an_earlier_statefulset_on_a_lost_node_gives_its_name_free(world: World) -> None:
    lose_lane_and_node(world)
    before = world.pods["r-l1-0"]
    assert condition(world, "Ready") == ("False", "NodeUnreachable")
    world.now += 120
    assert world.settle() == 0
    assert world.pods["r-l1-0"].uid != before.uid
    assert condition(world, "Ready") == ("True", "Serving")
    assert condition(world, "Degraded") == ("False", "Healthy")


def test_a_pod_of_somebody_else_that_is_labelled_as_ours_is_not_forced(world: World) -> None:
    """It has another owner, and nobody has deleted it."""
    world.pods["theirs"] = replace(world.pods["r-l1-0"], name="theirs", uid="theirs", node="lost")
    world.owners["theirs"] = "a Job"
    world.nodes["lost"] = Node(unreachable_since=world.now - 500)
    assert world.plan().actions == ()
    assert condition(world, "Ready") == ("True", "Serving")


@pytest.mark.parametrize(
    ("has_finalizer", "words"), [(False, "has not ended yet"), (True, "a finalizer holds")]
)
def test_what_keeps_a_name_that_a_pod_needs_is_reported(
    world: World, has_finalizer: bool, words: str
) -> None:
    world.pods = {"r-l0-1": replace(world.pods["r-l0-1"], is_deleting=True, has_finalizer=has_finalizer)}
    world.owners["r-l0-1"] = "an earlier StatefulSet"
    world.do(world.plan().actions)
    notice = next(entry for entry in world.status.conditions if entry.type == "Scheduled")
    assert notice.reason == "EndingPods"
    assert words in notice.message
    assert "r-l0-1" in notice.message
