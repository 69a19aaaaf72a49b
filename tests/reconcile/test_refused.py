"""The API server accepts a spec that cannot be served: running pods are left alone and reported as they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from medha_operator.kube.kinds import Key
from medha_operator.operator_settings import OperatorSettings
from medha_operator.replica.actions import Delete, RecordEvent, SetStatus
from medha_operator.replica.observed import Node
from reconcile.fake_cluster import GRID as SPEC
from reconcile.fake_cluster import Stage
from reconcile.test_argo_cd import health
from reconcile.test_kstatus import kstatus
from reconcile.test_reconciler import on_stage, pod, serving
from reconcile.world import GRID, World, condition, uids

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"parallelism": {"tensor": 0}}, "Invalid"),
    ({"parallelism": {"tensor": 2, "stream": 2, "kv": 2}, "colour": "red"}, "Invalid"),
    ({"placement": {"gang": "core"}}, "GangUnavailable"),
]


@pytest.fixture
def world() -> World:
    world = World(**GRID)
    assert world.settle() == 0
    return world


def refuse(world: World, change: dict[str, Any]) -> None:
    world.spec = world.spec | change
    world.generation += 1


@pytest.mark.parametrize(("change", "reason"), REFUSED)
def test_a_replica_that_serves_is_ready_and_its_new_spec_is_not_accepted(
    world: World, change: dict[str, Any], reason: str
) -> None:
    before, since, objects = uids(world), condition_since(world, "Serving"), dict(world.objects)
    world.now += 100
    refuse(world, change)
    actions = world.plan().actions
    assert [type(action) for action in actions] == [SetStatus, RecordEvent]
    assert world.settle() == 0
    assert (uids(world), world.objects) == (before, objects)
    assert condition(world, "Ready") == condition(world, "Serving") == ("True", "Serving")
    assert condition_since(world, "Serving") == since
    assert condition(world, "Accepted") == ("False", reason)
    assert condition(world, "Stalled") == ("True", reason)
    assert condition(world, "Reconciling")[0] == "False"
    assert world.status.ready_text == "4/4"
    assert [(notice.reason, notice.is_warning) for notice in world.notice] == [(reason, True)]
    assert (kstatus(world), health(world)[0]) == ("Failed", "Degraded")
    assert health(world)[1].startswith(f"{reason}: ")


def condition_since(world: World, kind: str) -> str:
    return next(one.last_transition_time for one in world.status.conditions if one.type == kind)


@pytest.mark.parametrize(("change", "reason"), REFUSED)
def test_the_status_goes_on_following_the_pods(world: World, change: dict[str, Any], reason: str) -> None:
    refuse(world, change)
    world.settle()
    whole = dict(world.pods)
    world.pods["r-l0-1"] = replace(whole["r-l0-1"], is_ready=False)
    world.do(world.plan().actions)
    assert condition(world, "Ready") == ("False", reason)
    assert condition(world, "Serving") == ("False", "RendezvousPending")
    assert world.status.ready_text == "3/4"
    world.pods = dict(whole)
    world.settle()
    assert condition(world, "Ready") == ("True", "Serving")
    assert [notice.reason for notice in world.notice] == [reason], "the same refusal is told once"


@pytest.mark.parametrize(("change", "reason"), REFUSED)
def test_a_gang_that_has_lost_a_member_restarts_once_and_later_each_time(
    world: World, change: dict[str, Any], reason: str
) -> None:
    refuse(world, change | {"lifecycle": {"restart": {"backoffSeconds": 7}}})
    world.settle()
    before = uids(world)
    del world.pods["r-l1-0"]
    world.do(world.plan().actions)
    assert condition(world, "Ready") == ("False", reason)
    assert condition(world, "Degraded") == ("True", "MemberLost")
    assert world.status.restarts == 1
    assert world.settle() == 0
    assert condition(world, "Ready") == ("True", "Serving")
    assert uids(world).isdisjoint(before)
    assert [notice.reason for notice in world.notice] == [reason, "GangRestarted"]
    del world.pods["r-l0-0"]
    planned = world.plan()
    assert planned.requeue_seconds is not None
    assert 0 < planned.requeue_seconds <= 7
    assert not [action for action in planned.actions if isinstance(action, Delete)]


@pytest.mark.parametrize("accepted", [{"image": "b"}, {"parallelism": {"tensor": 2, "stream": 3, "kv": 3}}])
@pytest.mark.parametrize("reconciles", range(1, 5))
@pytest.mark.parametrize("loses", [False, True])
def test_a_change_that_was_under_way_is_finished(
    world: World, accepted: dict[str, Any], reconciles: int, loses: bool
) -> None:
    """However far it has come: the StatefulSets make what the last accepted spec asks for."""
    before = uids(world)
    refuse(world, accepted)
    for _ in range(reconciles):
        world.do(world.plan().actions)
    refuse(world, REFUSED[0][0])
    world.do(world.plan().actions)
    if loses and world.pods:
        del world.pods[min(world.pods)]
    world.controllers()
    world.kubelets()
    assert world.settle() == 0
    assert condition(world, "Ready") == ("True", "Serving")
    assert uids(world).isdisjoint(before)
    assert len(world.pods) == (9 if "parallelism" in accepted else 4)


def test_the_event_comes_behind_what_the_api_server_may_refuse(world: World) -> None:
    """Each retry begins at the first action: the actions before the refused one are repeated each time."""
    refuse(world, REFUSED[0][0])
    world.pods["r-l1-0"] = replace(world.pods["r-l1-0"], is_failed=True)
    actions = world.plan().actions
    assert [type(action) for action in actions if isinstance(action, Delete)]
    assert actions[-1] == RecordEvent("Invalid", actions[-1].message, is_warning=True)  # type: ignore[union-attr]


def test_revisions_that_somebody_has_spoilt_describe_no_pods(world: World) -> None:
    refuse(world, REFUSED[0][0])
    world.revisions = {name: replace(one, templates=()) for name, one in world.revisions.items()}
    assert world.settle() == 0
    assert condition(world, "Ready") == ("False", "Invalid")


def test_a_suspended_replica_stays_so(world: World) -> None:
    world.spec = world.spec | {"suspend": True}
    world.generation += 1
    assert world.settle() == 0
    refuse(world, REFUSED[0][0])
    assert world.settle() == 0
    assert world.pods == {}
    assert condition(world, "Ready") == ("False", "Invalid")
    assert condition(world, "Degraded")[0] == "False"
    assert condition(world, "Scheduled") == ("False", "Suspended")


def test_a_lost_node_takes_the_readiness_with_its_pods(world: World) -> None:
    refuse(world, REFUSED[0][0])
    world.settle()
    world.pods["r-l1-0"] = replace(world.pods["r-l1-0"], node="lost")
    world.nodes["lost"] = Node(unreachable_since=world.now)
    world.now += 120
    world.do(world.plan().actions)
    assert condition(world, "Ready") == ("False", "Invalid")
    assert world.status.ready_text == "0/4", "the others start anew with it"


@pytest.mark.parametrize(("change", "reason"), REFUSED)
def test_a_replica_that_never_had_pods_is_not_ready(change: dict[str, Any], reason: str) -> None:
    world = World(**change)
    assert world.settle() == 0
    assert condition(world, "Ready") == ("False", reason)
    assert {one.type for one in world.status.conditions} == {"Ready", "Accepted", "Reconciling", "Stalled"}


@pytest.mark.parametrize(("change", "reason"), REFUSED)
def test_a_replica_whose_pods_have_all_gone_is_not_ready_and_does_not_serve(
    world: World, change: dict[str, Any], reason: str
) -> None:
    refuse(world, change)
    world.settle()
    world.pods.clear()
    world.do(world.plan().actions)
    assert condition(world, "Ready") == ("False", reason)
    assert condition(world, "Serving")[0] == "False"
    assert world.status.ready_text == "0/4"


def test_pods_of_two_revisions_serve_nobody(world: World) -> None:
    """The spec is refused while an earlier change is under way."""
    refuse(world, REFUSED[0][0])
    world.settle()
    world.pods["r-l1-0"] = replace(world.pods["r-l1-0"], revision="another")
    world.do(world.plan().actions)
    assert condition(world, "Ready") == ("False", "Invalid")
    assert condition(world, "Serving")[0] == "False"


def test_a_spec_that_is_corrected_leaves_no_trace_of_its_refusal(world: World) -> None:
    before, said = uids(world), world.status
    refuse(world, REFUSED[0][0])
    world.settle()
    refuse(world, GRID)
    assert world.settle() == 0
    assert uids(world) == before
    assert {one.type: (one.status, one.reason) for one in world.status.conditions} == {
        one.type: (one.status, one.reason) for one in said.conditions
    }


def test_a_refusal_in_other_words_is_reported_again(world: World) -> None:
    refuse(world, {"parallelism": {"tensor": 0}})
    world.settle()
    refuse(world, {"parallelism": {"stream": 0}})
    world.settle()
    assert [notice.reason for notice in world.notice] == ["Invalid", "Invalid"]


def test_a_refusal_is_one_event_and_no_child_is_written() -> None:
    async def test(stage: Stage) -> None:
        key: Key = await serving(stage)
        stage.cluster.calls.clear()
        changed = stage.cluster.objects[key]
        changed["spec"] = SPEC | {"parallelism": {"tensor": 0}}
        changed["metadata"]["generation"] += 1
        stage.see(changed)
        assert await stage.work() == []
        stage.queue.add(key)
        assert await stage.work() == []
        assert stage.condition(key)[:2] == ("True", "Serving")
        assert stage.condition(key, "Accepted")[:2] == ("False", "Invalid")
        assert "parallelism.tensor" in stage.condition(key, "Accepted")[2]
        assert stage.cluster.notice == ["Invalid"]
        assert set(stage.cluster.calls) == {("status", "MedhaReplica"), ("record", "Event")}
        stage.see(pod(stage, "b", is_started=False))
        await stage.work()
        assert stage.condition(key)[:2] == ("False", "Invalid")

    on_stage(test, settings=OperatorSettings())
