"""Routers and replicas of the version before and of this one, mixed as in a rollout: every request comes back exactly."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import jsonschema
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
ORDER = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["colour", "count"], "additionalProperties": False,
}  # fmt: skip
SOURCES = ("core", "worker", "router", "operator", "sim", "cli")


class SetAlone(RouterSettings):
    """A router's settings, written without those that are not set: one of another version may not know them."""

    def write(self, path: Path) -> None:
        path.write_text(self.model_dump_json(by_alias=True, exclude_unset=True), encoding="utf-8")


def path_of(checkout: Path) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(str(checkout / name) for name in SOURCES)}


@pytest.fixture(scope="module")
def mixed(before: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A router and a replica of each version; each router has both replicas."""
    folder = tmp_path_factory.mktemp("mixed")
    fleet = benchmark("fleet")
    checkpoint = folder / "checkpoint"
    init_checkpoint(checkpoint, preset="tiny", seed=0)
    with ExitStack() as ends, pytest.MonkeyPatch.context() as patch:
        parts: dict[str, Any] = {}
        parts["router now"] = fleet.Router(folder / "router-now")
        ends.callback(parts["router now"].close)
        keys = parts["router now"].keys
        patch.setattr(fleet, "RouterSettings", SetAlone)
        parts["router before"] = fleet.Router(folder / "router-before", keys, path_of(before))
        ends.callback(parts["router before"].close)
        routers = [parts["router now"], parts["router before"]]
        parts["replica now"] = fleet.Replica(folder / "replica-now", (1, 1, 1), checkpoint, routers)
        parts["replica before"] = fleet.Replica(
            folder / "replica-before", (1, 1, 1), checkpoint, routers, path_of(before)
        )
        for name in ("replica now", "replica before"):
            ends.callback(parts[name].close)
            parts[name].start()
        for name in ("router now", "router before"):
            wait_for_replicas(parts, name, 2)
        yield parts


def texts(router: Any) -> list[str]:
    with httpx.Client(base_url=router.url, timeout=120) as client:
        answers = [client.post("/v1/completions", json=body).raise_for_status().json() for body in BODIES]
    return [answer["choices"][0]["text"] for answer in answers]


def wait_for_replicas(parts: dict[str, Any], name: str, count: int) -> None:
    """Wait until a router has so many replicas that are ready."""
    benchmark("fleet").wait_for(
        lambda: parts[name].metric("medha_router_replicas", state="ready") == count,
        f"{count} replicas at the {name}",
        *(part.log for part in parts.values()),
    )


def test_each_router_gets_the_same_texts_of_the_replicas_of_each_version(mixed: dict[str, Any]) -> None:
    expected = texts(mixed["router now"])
    assert texts(mixed["router before"]) == expected
    # And of each replica alone, while the other one is stopped.
    mixed["replica before"].stop()
    wait_for_replicas(mixed, "router now", 1)
    assert texts(mixed["router now"]) == expected
    mixed["replica before"].start()
    wait_for_replicas(mixed, "router now", 2)
    mixed["replica now"].stop()
    wait_for_replicas(mixed, "router now", 1)
    assert texts(mixed["router now"]) == expected


def check_order(router: Any, seed: int) -> None:
    """Ask for an order as JSON, and check that the answer follows the schema."""
    schema = {"type": "json_schema", "json_schema": {"name": "order", "schema": ORDER, "strict": True}}
    body = {
        "model": "m", "messages": [{"role": "user", "content": "An order"}], "seed": seed, "max_tokens": 200,
        "response_format": schema,
    }  # fmt: skip
    answer = httpx.post(f"{router.url}/v1/chat/completions", json=body, timeout=120).raise_for_status().json()
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), ORDER)


def test_replicas_of_each_version_follow_a_schema(mixed: dict[str, Any]) -> None:
    for name in ("replica before", "replica now"):
        if not mixed[name].is_alive:
            mixed[name].start()
    for name in ("router now", "router before"):
        wait_for_replicas(mixed, name, 2)
        for seed in range(8):
            check_order(mixed[name], seed)
    mixed["replica now"].stop()
    wait_for_replicas(mixed, "router now", 1)
    check_order(mixed["router now"], 0)
