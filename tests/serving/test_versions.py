"""Routers and replicas of the version before and of this one, mixed as in a rollout: every request comes back exactly."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

from benchmark import benchmark
from medha_process.router_settings import RouterSettings
from medha_worker.checkpoints.presets import init_checkpoint

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

BODIES: list[dict[str, Any]] = [
    {
        "model": "m", "prompt": f"question {number}: " + "word " * (40 * number), "seed": number,
        "temperature": number % 2, "max_tokens": 30, "ignore_eos": True,
    }
    for number in range(6)
]  # fmt: skip
SOURCES = ("core", "worker", "router", "operator", "sim", "cli")


def module_of(checkout: Path) -> ModuleType:
    """The benchmarks' `fleet` of another checkout: the processes that it starts are of that checkout, given its path."""
    spec = importlib.util.spec_from_file_location("fleet_before", checkout / "benchmarks" / "fleet.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


class SetAlone(RouterSettings):
    """A router's settings, written without those that are not set: one of another version may not know them."""

    def write(self, path: Path) -> None:
        path.write_text(self.model_dump_json(by_alias=True, exclude_unset=True), encoding="utf-8")


def path_of(checkout: Path) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(str(checkout / name) for name in SOURCES)}


@pytest.fixture(scope="module")
def mixed(before: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A router and a replica of each version; each replica has joined both routers."""
    folder = tmp_path_factory.mktemp("mixed")
    fleet = benchmark("fleet")
    fleet_before = module_of(before)
    fleet_before.RouterSettings = SetAlone  # type: ignore[attr-defined]
    checkpoint = folder / "checkpoint"
    init_checkpoint(checkpoint, preset="tiny", seed=0)
    with ExitStack() as ends:
        parts: dict[str, Any] = {}
        parts["router now"] = fleet.Router(folder / "router-now")
        ends.callback(parts["router now"].close)
        keys = parts["router now"].keys
        parts["router before"] = fleet_before.Router(folder / "router-before", keys, path_of(before))
        ends.callback(parts["router before"].close)
        routers = [parts["router now"], parts["router before"]]
        grid = (1, 1, 1)
        parts["replica now"] = fleet.Replica(folder / "replica-now", grid, checkpoint, routers)
        parts["replica before"] = fleet_before.Replica(
            folder / "replica-before", grid, checkpoint, routers, path_of(before)
        )
        for name in ("replica now", "replica before"):
            ends.callback(parts[name].close)
            parts[name].start()
        wait_for_replicas(parts, 2)
        yield parts


def texts(router: Any) -> list[str]:
    with httpx.Client(base_url=router.url, timeout=120) as client:
        answers = [client.post("/v1/completions", json=body).raise_for_status().json() for body in BODIES]
    return [answer["choices"][0]["text"] for answer in answers]


def wait_for_replicas(parts: dict[str, Any], count: int) -> None:
    """Wait until both routers have so many replicas that are ready."""
    logs = [part.log for part in parts.values()]
    for name in ("router now", "router before"):
        benchmark("fleet").wait_for(
            lambda router=parts[name]: router.metric("medha_router_replicas", state="ready") == count,
            f"{count} replicas at the {name}",
            *logs,
        )


def test_each_router_gets_the_same_texts_of_both_replicas(mixed: dict[str, Any]) -> None:
    routers = [mixed["router now"], mixed["router before"]]
    expected = texts(routers[0])
    assert texts(routers[1]) == expected
    # And of each replica alone, while the other one is stopped.
    for stopped in ("replica now", "replica before"):
        mixed[stopped].stop()
        wait_for_replicas(mixed, 1)
        assert [texts(router) for router in routers] == [expected, expected], f"without the {stopped}"
        mixed[stopped].start()
        wait_for_replicas(mixed, 2)
