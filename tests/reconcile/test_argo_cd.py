"""Run the Lua health check of docs/operator.md, which is for Argo CD, on a resource in each of its states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from lupa.lua51 import LuaRuntime  # the version of Argo CD's interpreter

from reconcile.deployment_world import DeploymentWorld, template
from reconcile.test_kstatus import troubled
from reconcile.world import World

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operator.md"


def documented_lua() -> str:
    """Return the script of the page's example of `argocd-cm`."""
    blocks = [block.partition("```")[0] for block in PAGE.read_text(encoding="utf-8").split("```yaml\n")[1:]]
    (example,) = [block for block in blocks if "resource.customizations" in block]
    return str(yaml.safe_load(example)["data"]["resource.customizations.health.medha.dev_MedhaReplica"])


def health(world: World | DeploymentWorld, *, has_status: bool = True) -> tuple[str, str]:
    """Return status and message that Argo CD would show."""
    document: dict[str, Any] = {"metadata": {"generation": world.generation}, "spec": world.spec}
    if has_status:
        document["status"] = world.status.model_dump(mode="json", by_alias=True, exclude_none=True)
    lua = LuaRuntime(unpack_returned_tuples=True)
    lua.globals()["obj"] = lua.table_from(document, recursive=True)
    found = lua.execute(documented_lua())
    return found["status"], found["message"]


def served() -> World:
    world = World()
    world.settle()
    return world


def test_a_replica_is_progressing_until_it_serves_and_while_it_changes() -> None:
    assert health(World(), has_status=False) == ("Progressing", "no status yet")
    assert health(troubled("InsufficientCapacity"))[0] == "Progressing"
    world = served()
    assert health(world) == ("Healthy", "Serving: every rank of the grid is ready")
    world.generation += 1
    assert health(world)[0] == "Progressing"


@pytest.mark.parametrize("problem", ["ImagePullFailed", "ModelFetchFailed", "NoAccelerator", "CrashLooping"])
def test_what_does_not_recover_by_itself_is_degraded_with_a_reason(problem: str) -> None:
    status, message = health(troubled(problem))
    assert status == "Degraded"
    assert message.startswith(f"{problem}: ")


def test_a_spec_that_cannot_be_served_is_degraded() -> None:
    world = World(parallelism={"tensor": 0})
    world.settle()
    assert health(world)[0] == "Degraded"


def test_what_its_user_has_stopped_is_suspended() -> None:
    world = served()
    world.spec = world.spec | {"suspend": True}
    world.settle()
    assert health(world)[0] == "Suspended"
    deployment = DeploymentWorld(1)
    deployment.settle()
    deployment.change(template=template(image="b"), paused=True)
    deployment.settle()
    assert health(deployment)[0] == "Suspended"


def test_a_deployment_is_healthy_progressing_or_degraded_by_the_same_text() -> None:
    world = DeploymentWorld(2, capacity=2)
    world.settle()
    assert health(world)[0] == "Healthy"
    world.change(template=template(image="b"))
    world.do(world.plan().actions)
    world.operate()
    world.do(world.plan().actions)
    assert health(world)[0] == "Progressing"
    world.operate()
    world.now += 1000
    world.do(world.plan().actions)
    assert health(world)[0] == "Degraded"
