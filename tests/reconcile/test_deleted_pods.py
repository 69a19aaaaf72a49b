"""Whether the end of a gang counts as a restart: what has broken by itself does, what somebody has deleted does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from medha_operator.observed import ASKS_RESTART, Node, pod_of
from medha_operator.plan import SetStatus
from reconcile.world import GRID, World, condition, deleted_pods, uids


@pytest.fixture
def world() -> World:
    world = World(**GRID)
    assert world.settle() == 0
    return world


def delete(world: World, *names: str, **facts: Any) -> None:
    """As `kubectl delete pod` and `kubectl drain --disable-eviction` do: the pods are there until they have ended."""
    for name in names or sorted(world.pods):
        world.pods[name] = replace(world.pods[name], is_deleting=True, is_ready=False, **facts)


def crash(world: World, name: str) -> None:
    """The ranks of the pod have given up on the others, and its kubelet has started it again."""
    world.pods[name] = replace(world.pods[name], asks_restart=True, is_started=False, is_ready=False)


def crash_and_wait(world: World, name: str) -> None:
    """A crash soon after another one, so that the gang is to end only after the back-off."""
    crash(world, name)
    world.settle()
    world.now += 1
    crash(world, name)
    world.do(world.plan().actions)
    assert world.plan().again_seconds is not None
    assert (deleted_pods(world.plan()), world.status.restarts) == (set(), 1)


def settle(world: World) -> None:
    """Settle, with the end of every back-off."""
    for _ in range(4):
        world.settle()
        world.now += 70
    assert world.settle() == 0
    assert condition(world, "Ready") == ("True", "Serving")


# --- deleted alone --------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [["r-l1-0"], ["r-l0-1", "r-l1-0"], []], ids=["one", "two", "all"])
@pytest.mark.parametrize("facts", [{}, {"is_failed": True}], ids=["ending", "ended by SIGTERM"])
def test_pods_that_somebody_deletes_end_their_gang_and_count_as_no_restart(
    world: World, names: list[str], facts: dict[str, Any]
) -> None:
    before = uids(world)
    delete(world, *names, **facts)
    settle(world)
    assert not before & uids(world)
    assert world.created_pods == 8
    assert (world.status.restarts, world.status.last_restart_time) == (0, None)
    assert [told.reason for told in world.told] == (["PodsDeleted"] if names else [])


def test_a_deletion_waits_for_no_back_off_and_lengthens_none(world: World) -> None:
    crash(world, "r-l0-1")
    world.settle()
    last = world.status.last_restart_time
    for _ in range(3):
        world.now += 1
        delete(world, "r-l1-0")
        assert deleted_pods(world.plan()) == {"r-l0-0", "r-l0-1", "r-l1-1"}
        assert world.settle() == 0
    assert (world.status.restarts, world.status.last_restart_time) == (1, last)


def test_pods_that_are_deleted_one_after_another_count_as_no_restart(world: World) -> None:
    for name in ("r-l0-0", "r-l1-1"):
        delete(world, name)
        world.do(world.plan().actions[:1])  # the operator dies before it has ended the others
    settle(world)
    assert world.status.restarts == 0


def test_a_deletion_that_was_seen_is_none_the_less_one_when_the_pod_is_gone(world: World) -> None:
    before = uids(world)
    delete(world, "r-l1-0")
    actions = world.plan().actions
    written = next(index for index, action in enumerate(actions) if isinstance(action, SetStatus))
    world.do(actions[: written + 1])  # and the operator dies
    world.now += 5
    world.controllers()
    world.kubelets()  # the successor is ready before anybody looks
    assert len(before & uids(world)) == 3
    settle(world)
    assert not before & uids(world)
    assert world.status.restarts == 0


@pytest.mark.parametrize("deployment", [None, "owner"])
def test_a_drain_that_asks_no_budget_counts_as_no_restart(world: World, deployment: str | None) -> None:
    """`kubectl drain --disable-eviction`, of a replica that its deployment has given no leave to go, too."""
    world.deployment = deployment
    for name in ("r-l0-1", "r-l1-0"):
        world.pods[name] = replace(world.pods[name], node="a")
    world.settle()
    world.nodes["a"] = Node(cordoned=True)
    delete(world, "r-l0-1")
    world.do(world.plan().actions)
    delete(world, "r-l1-0")
    settle(world)
    assert world.status.restarts == 0


# --- beside a crash -------------------------------------------------------------------------------------

DELETIONS: list[Callable[[World], None]] = [
    lambda world: delete(world, "r-l0-1"),
    lambda world: delete(world, "r-l1-0"),
    lambda world: delete(world),
]
WHICH = ["the same pod", "another pod", "all pods"]


@pytest.mark.parametrize("deletion", DELETIONS, ids=WHICH)
def test_a_crash_that_was_seen_before_somebody_deletes_pods_counts_once(
    world: World, deletion: Callable[[World], None]
) -> None:
    crash(world, "r-l0-1")
    world.do(world.plan().actions[:2])  # the operator dies before it has ended the pods
    deletion(world)
    settle(world)
    assert world.status.restarts == 1


@pytest.mark.parametrize("deletion", DELETIONS[:2], ids=WHICH[:2])
def test_a_crash_that_is_seen_with_a_deletion_counts_once(
    world: World, deletion: Callable[[World], None]
) -> None:
    crash(world, "r-l0-1")
    deletion(world)
    settle(world)
    assert world.status.restarts == 1


@pytest.mark.parametrize("deletion", DELETIONS, ids=WHICH)
@pytest.mark.parametrize("is_gone", [False, True], ids=["ending", "gone"])
def test_a_crash_whose_back_off_runs_when_somebody_deletes_pods_counts_once(
    world: World, deletion: Callable[[World], None], is_gone: bool
) -> None:
    """Its trace in the pod goes with the pod: the status is what tells of it."""
    crash_and_wait(world, "r-l0-1")
    assert condition(world, "Degraded") == ("True", "RendezvousFailed")
    deletion(world)
    world.pods["r-l0-1"] = replace(world.pods["r-l0-1"], asks_restart=False)
    if is_gone:
        world.pods = {name: pod for name, pod in world.pods.items() if not pod.is_deleting}
    settle(world)
    assert world.status.restarts == 2


def test_a_crash_of_a_gang_that_a_deletion_has_broken_counts_for_nothing(world: World) -> None:
    delete(world, "r-l1-0")
    world.do(world.plan().actions[:2])  # the operator dies before it has ended the others
    crash(world, "r-l0-1")  # which have lost a member
    settle(world)
    assert world.status.restarts == 0


def test_a_pod_that_its_kubelet_has_evicted_counts_though_a_finalizer_holds_it(world: World) -> None:
    """The controller of StatefulSets tells it to end, with no grace."""
    delete(world, "r-l1-0", is_failed=True, is_held=True)
    settle(world)
    assert world.status.restarts == 1


def test_a_pod_on_a_silent_node_counts_whoever_tells_it_to_end(world: World) -> None:
    """As the node controller does some time after the node was last heard of."""
    world.pods["r-l1-0"] = replace(world.pods["r-l1-0"], node="lost")
    world.nodes["lost"] = Node(unreachable_since=world.now)
    delete(world, "r-l1-0")
    world.do(world.plan().actions)
    assert world.status.restarts == 1


def test_a_pod_that_was_lost_counts_though_its_successor_is_deleted(world: World) -> None:
    world.pods["r-l1-0"] = replace(world.pods["r-l1-0"], created=world.now + 1)
    world.now += 2
    delete(world, "r-l1-0")
    settle(world)
    assert world.status.restarts == 1


def test_a_pod_that_was_lost_counts_though_one_of_an_older_revision_has_yet_to_end(world: World) -> None:
    world.pods["r-l2-0"] = replace(
        world.pods["r-l1-0"], name="r-l2-0", uid="old", revision="old", is_deleting=True, is_ready=False
    )
    world.owners["r-l2-0"] = world.owners["r-l1-0"]
    del world.pods["r-l1-0"]
    world.do(world.plan().actions)
    assert world.status.restarts == 1


@pytest.mark.parametrize(("code", "asks"), [(ASKS_RESTART, True), (143, False), (137, False)])
def test_a_pod_that_ends_by_sigterm_or_sigkill_asks_for_no_restart(code: int, asks: bool) -> None:
    ended = {"name": "worker", "ready": False, "started": False, "state": {"terminated": {"exitCode": code}}}
    metadata = {
        "name": "r-l0-0",
        "uid": "u",
        "resourceVersion": "1",
        "creationTimestamp": "2030-01-01T00:00:00Z",
        "deletionTimestamp": "2030-01-01T00:01:00Z",
        "deletionGracePeriodSeconds": 30,
    }
    found = pod_of({"metadata": metadata, "status": {"phase": "Running", "containerStatuses": [ended]}})
    assert (found.is_deleting, found.is_held, found.asks_restart) == (True, False, asks)
