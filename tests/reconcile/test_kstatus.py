"""Judge a resource in each of its states as kstatus does, and with it Flux and similar tools.

The rules are those that kstatus publishes for resources that it does not know (sigs.k8s.io/cli-utils, pkg/kstatus).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from reconcile.deployment_world import DeploymentWorld, template
from reconcile.world import World


def kstatus(world: World | DeploymentWorld) -> str:
    conditions = {one.type: one.status for one in world.status.conditions}
    if world.status.observed_generation != world.generation:
        return "InProgress"
    if conditions.get("Reconciling") == "True":
        return "InProgress"
    if conditions.get("Stalled") == "True":
        return "Failed"
    return "Current" if conditions.get("Ready", "True") == "True" else "InProgress"


def troubled(problem: str) -> World:
    world = World(parallelism={"stream": 2})
    world.do(world.plan().actions)
    world.controllers()
    world.pods = {
        name: replace(pod, is_scheduled=problem != "InsufficientCapacity", problem=(problem, "told"))
        for name, pod in world.pods.items()
    }
    world.do(world.plan().actions)
    return world


def test_a_replica_is_in_progress_until_it_serves() -> None:
    world = World()
    world.do(world.plan().actions)
    assert kstatus(world) == "InProgress"
    world.controllers()
    world.kubelets()
    world.settle()
    assert kstatus(world) == "Current"
    world.spec = world.spec | {"kvCache": {"size": "1Gi"}}
    world.generation += 1
    assert kstatus(world) == "InProgress"


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        ("InsufficientCapacity", "InProgress"),
        ("RendezvousFailed", "InProgress"),
        ("ImagePullFailed", "Failed"),
        ("ModelFetchFailed", "Failed"),
        ("NoAccelerator", "Failed"),
        ("CrashLooping", "Failed"),
    ],
)
def test_what_does_not_recover_by_itself_has_failed(problem: str, expected: str) -> None:
    assert kstatus(troubled(problem)) == expected


@pytest.mark.parametrize("change", [{"parallelism": {"tensor": 0}}, {"placement": {"gang": "core"}}])
def test_a_spec_that_cannot_be_served_has_failed(change: dict[str, Any]) -> None:
    world = World(**change)
    world.do(world.plan().actions)
    assert kstatus(world) == "Failed"


def test_a_deployment_is_in_progress_while_it_rolls_out_and_failed_where_there_is_no_room() -> None:
    world = DeploymentWorld(2, capacity=2)
    world.settle()
    assert kstatus(world) == "Current"
    world.change(template=template(image="b"))
    world.do(world.plan().actions)
    world.operate()
    world.do(world.plan().actions)
    assert kstatus(world) == "InProgress"
    world.operate()
    world.now += 1000
    world.do(world.plan().actions)
    assert kstatus(world) == "Failed"
    world.capacity = 3
    world.settle()
    assert kstatus(world) == "Current"
