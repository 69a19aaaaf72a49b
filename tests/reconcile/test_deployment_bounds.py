"""Both bounds of a deployment hold in every plan: whatever is refused, and whatever happens."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medha_operator.deployment.observed_deployment import Child, child_of
from medha_operator.operator_settings import OperatorSettings
from medha_operator.replica.actions import Apply, Plan
from reconcile.deployment_world import DeploymentWorld, applied, deleted, template, watched
from reconcile.world import World

# --- refusals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["hindered", "refused", "untold"])
def test_replicas_that_serve_though_something_is_refused_are_changed_behind_others(what: str) -> None:
    world = DeploymentWorld(3)
    world.settle()
    names: set[str] = getattr(world, what)
    names |= {"d-0", "d-1", "d-2"}
    world.operate()
    notice = {one["status"]["conditions"][0]["reason"] for one in world.replicas.values()}
    assert notice == {"Serving" if what == "refused" else "Refused"}
    world.change(template=template(image="b"))
    for _ in range(20):
        world.do(bounded(world).actions)
        world.operate()
        assert len(world.serving()) >= 3
        assert sum(world.is_ending(name) for name in world.replicas) <= 1
    names.clear()
    assert watched(world)[0] == 3
    assert world.images() == ["b", "b", "b"]


def test_a_replica_whose_gang_is_not_to_be_had_any_more_is_counted_on_until_it_is_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Return such a replica with the status that its own planner writes, as the deployment reads it."""

    def seen() -> Child:
        named = {"name": "d-0", "uid": "v", "resourceVersion": "1", "generation": replica.generation}
        metadata = named | {"creationTimestamp": "2030-01-01T00:00:00Z"}
        status = replica.status.model_dump(mode="json", by_alias=True, exclude_none=True)
        document = {"metadata": metadata, "spec": replica.spec, "status": status}
        return child_of(document, 0, "u", replica.revisions.values())

    monkeypatch.setattr("reconcile.world.SETTINGS", OperatorSettings(gang_apis=("core",)))
    replica = World(placement={"gang": "core"})
    replica.settle()
    assert (seen().serving_since is not None, seen().may_serve) == (True, False)
    monkeypatch.setattr("reconcile.world.SETTINGS", OperatorSettings())
    replica.settle()
    assert seen().problem[0] == "GangUnavailable"
    assert (seen().serving_since is not None, seen().may_serve) == (True, False)
    replica.spec = replica.spec | {"image": "b"}
    replica.generation += 1
    assert (seen().serving_since, seen().may_serve) == (
        None,
        False,
    )  # it may well be accepted, and its pods end
    replica.settle()
    assert (seen().serving_since, seen().may_serve) == (None, True)
    replica.spec = replica.spec | {"parallelism": {"tensor": 0}}
    replica.generation += 1
    replica.settle()
    assert seen().problem[0] == "Invalid"
    assert (seen().serving_since, seen().may_serve) == (None, True)
    replica.pods.clear()
    replica.do(replica.plan().actions)
    assert (seen().serving_since, seen().may_serve) == (None, False)


def test_a_rollout_stops_at_a_replica_whose_new_spec_is_refused_though_its_earlier_pods_serve() -> None:
    world = DeploymentWorld(3, rollout={"maxSurge": 0, "maxUnavailable": 1})
    world.settle()
    world.change(template=template(image="b"))
    world.do(world.plan().actions)
    world.refused = {"d-2"}
    for _ in range(20):
        world.operate()
        world.do(bounded(world).actions)
        world.now += 5
    assert world.images() == ["", "", "b"]
    assert world.serving() == {"d-0", "d-1", "d-2"}
    assert world.status.available_replicas == 2
    assert world.condition("Ready") == ("False", "Refused")
    assert world.condition("Stalled") == ("True", "Refused")
    world.refused.clear()
    assert watched(world)[0] == 2
    assert world.images() == ["b", "b", "b"]


def test_a_replica_whose_spec_is_refused_gets_the_spec_of_its_pods_back_at_once() -> None:
    """The change ends no pod, so it does not wait for a stand-in, for which there may be no room."""
    world = DeploymentWorld(3, capacity=3, rollout={"maxSurge": 0, "maxUnavailable": 1})
    world.settle()
    world.change(template=template(image="b"))
    world.do(world.plan().actions)
    world.refused = {"d-2"}
    world.operate()
    world.change(template=template(), rollout={"maxSurge": 1, "maxUnavailable": 0})
    assert applied(world.plan()) == ["d-2"]
    world.do(world.plan().actions)
    world.refused.clear()
    assert watched(world) == (3, 3, [])


def test_a_deployment_whose_replicas_serve_what_it_asks_for_is_complete_though_their_specs_are_refused() -> (
    None
):
    """For example, a gang scheduler was removed: the deployment has nothing to do, and each replica reports why."""
    world = DeploymentWorld(2)
    world.settle()
    world.refused = {"d-0", "d-1"}
    world.operate()
    world.settle()
    assert world.condition("Ready") == ("True", "Complete")
    assert world.condition("Available")[0] == "True"


def test_replicas_that_were_refused_something_for_a_while_need_not_be_ready_for_long_again() -> None:
    world = DeploymentWorld(3, minReadySeconds=60)
    world.settle()
    world.now += 60
    world.hindered = {"d-0", "d-1", "d-2"}
    world.operate()
    world.now += 1
    world.hindered = set()
    world.operate()
    world.do(world.plan().actions)
    assert world.condition("Ready") == ("True", "Complete")
    world.change(template=template(image="b"))
    assert applied(world.plan()) == ["d-3"]


def test_a_status_written_by_a_reconcile_that_has_not_judged_the_pods_counts_for_nothing() -> None:
    """When planning fails, the status has the newest generation and conditions of an earlier one."""
    world = DeploymentWorld(3)
    world.settle()
    world.change(template=template(image="b"), rollout={"maxSurge": 0, "maxUnavailable": 1})
    world.do(world.plan().actions)
    status = world.replicas["d-2"]["status"]
    assert status["observedGeneration"] == 1
    status["observedGeneration"] = 2
    assert applied(world.plan()) == []


# --- from anywhere --------------------------------------------------------------------------------------

TEMPLATES = [
    template(),
    template(image="b"),
    template(image="bad"),
    template(scheduling={"policy": "edf"}),
    template(image="b", placement={"gang": "core"}),
]
ROLLOUTS: list[dict[str, Any]] = [
    {},
    {"maxSurge": 0, "maxUnavailable": 1},
    {"maxSurge": "50%", "maxUnavailable": "50%"},
    {"maxSurge": 2, "maxUnavailable": 1},
]
STEPS = st.one_of(
    st.tuples(st.just("template"), st.integers(0, 4)),
    st.tuples(st.just("replicas"), st.integers(0, 5)),
    st.tuples(st.just("rollout"), st.integers(0, 3)),
    st.tuples(st.just("paused"), st.integers(0, 1)),
    st.tuples(st.just("lose replica"), st.integers(0, 5)),
    st.tuples(st.just("lose status"), st.just(0)),
    st.tuples(st.just("cordon"), st.integers(0, 5)),
    st.tuples(st.just("hinder"), st.integers(0, 5)),
    st.tuples(st.just("refuse"), st.integers(0, 5)),
    st.tuples(st.just("leave untold"), st.integers(0, 5)),
    st.tuples(st.just("lose history"), st.just(0)),
    st.tuples(st.just("room"), st.integers(2, 8)),
    st.tuples(st.just("die after"), st.integers(0, 6)),
    st.tuples(st.just("wait"), st.sampled_from([1, 400, 4000])),
    st.tuples(st.just("turn"), st.just(0)),
)


def disturb(world: DeploymentWorld, kind: str, index: int) -> None:
    names = sorted(world.replicas)
    if kind == "template":
        world.change(template=copy.deepcopy(TEMPLATES[index]))
    elif kind == "replicas":
        world.change(replicas=index)
    elif kind == "rollout":
        world.change(rollout=ROLLOUTS[index])
    elif kind == "paused":
        world.change(paused=bool(index))
    elif kind == "lose replica" and names:
        world.replicas[names[index % len(names)]]["metadata"]["deletionTimestamp"] = "2030-01-01T00:00:00Z"
    elif kind == "lose status":
        world.status = type(world.status)()
    elif kind == "cordon" and names:
        world.cordoned.add(names[index % len(names)])
        world.operate()
    elif kind in ("hinder", "refuse", "leave untold") and names:
        chosen = {"hinder": world.hindered, "refuse": world.refused, "leave untold": world.untold}[kind]
        chosen.add(names[index % len(names)])
        world.operate()
    elif kind == "lose history":
        world.templates.clear()
    elif kind == "room":
        world.capacity = index
    elif kind == "die after":
        world.do(world.plan().actions[:index])
    elif kind == "wait":
        world.now += index
    else:
        world.do(world.plan().actions)
        world.operate()


@settings(max_examples=60)
@given(st.lists(STEPS, max_size=14))
def test_whatever_happens_it_ends_at_the_spec_and_keeps_its_bounds(steps: list[tuple[str, int]]) -> None:
    """Reconciliation becomes stable, and every plan on the way keeps both bounds."""
    world = DeploymentWorld(3)
    world.broken.add("bad")
    for kind, index in steps:
        disturb(world, kind, index)
        bounded(world)
    if world.spec["template"]["spec"].get("image") == "bad":
        world.change(template=template())
    world.change(paused=False)
    world.hindered.clear()
    world.refused.clear()
    world.untold.clear()
    world.capacity = 100
    for _ in range(120):
        planned = bounded(world)
        before = copy.deepcopy(world.replicas)
        world.do(planned.actions)
        world.operate()
        if not planned.actions and world.replicas == before:
            break
        world.now += 5
    assert world.plan().actions == ()
    assert sorted(world.replicas) == [f"d-{index}" for index in range(world.spec["replicas"])]
    assert world.revisions() <= {world.status.update_revision}
    assert len(world.serving()) == world.spec["replicas"]
    assert world.condition("Ready") == ("True", "Complete")


def bounded(world: DeploymentWorld) -> Plan:
    """Check the present plan, any part of which may be carried out, against both bounds."""
    wanted = world.spec["replicas"]
    rollout = world.spec.get("rollout", {})
    surge = share(rollout.get("maxSurge", 1), wanted, up=True)
    unavailable = share(rollout.get("maxUnavailable", 0), wanted, up=False) or (0 if surge else 1)
    planned = world.plan()
    present = {name for name, one in world.replicas.items() if "deletionTimestamp" not in one["metadata"]}
    made = set(applied(planned)) - present
    extra = made - {f"d-{index}" for index in range(wanted)}
    assert not extra or len(present | made) <= wanted + surge
    serving = {name for name in world.serving() if not world.is_ending(name)}
    ended = {name for name in deleted(planned) if name in serving}
    ended |= {
        action.manifest["metadata"]["name"]
        for action in planned.actions
        if isinstance(action, Apply) and world.ended_by(action.manifest)
    }
    left = serving - ended
    assert not ended or len(left) >= wanted - unavailable
    return planned


def share(bound: int | str, whole: int, *, up: bool) -> int:
    if isinstance(bound, int):
        return bound
    exact = int(bound.rstrip("%")) * whole
    return -(-exact // 100) if up else exact // 100
