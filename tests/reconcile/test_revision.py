"""A revision changes with what restarts a replica, with nothing else, and never by an upgrade of the operator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from medha.api.replica import MedhaReplicaSpec
from medha_operator.replica.revision import begin, find, restart_fields


def spec(**fields: Any) -> MedhaReplicaSpec:
    model = {"name": "m", "source": {"path": "checkpoint"}}
    return MedhaReplicaSpec.model_validate({"model": model} | fields)


@pytest.mark.parametrize(
    "change",
    [
        {"scheduling": {"policy": "edf"}},
        {"lifecycle": {"restart": {"stableSeconds": 5}}},
        {"serviceClasses": [{"name": "chat"}]},
        {"suspend": True},
        {"router": {"port": 9000}},  # of `medha up`
    ],
)
def test_live_fields_keep_the_revision(change: dict[str, Any]) -> None:
    assert find(spec(**change), [begin(spec(), [])]) is not None


@pytest.mark.parametrize(
    "change",
    [
        {"parallelism": {"kv": 2}},
        {"kvCache": {"size": "1Gi"}},
        {"kvCache": {"tiers": {"host": {"size": "1Gi"}}}},
        {"kvCache": {"tiers": {"host": {"size": "1Gi"}, "disk": {"size": "8Gi"}}}},
        {"kvCache": {"tiers": {"host": {"size": "1Gi"}, "peers": {"bandwidth": "1Gi"}}}},
        {"kvCache": {"tiers": {"host": {"size": "1Gi"}, "store": {"url": "s3://bucket"}}}},
        {"model": {"name": "m", "source": {"hostPath": {"path": "/m"}}}},
        {"image": "worker:2"},
        {"routerRef": {"name": "router"}},  # its address and its Secret stand in the pods' template
        {"resources": {"limits": {"cpu": 4}}},
        {"lifecycle": {"drainSeconds": 5}},  # a pod's grace is fixed when it is made
        {"template": {"spec": {"priorityClassName": "high"}}},
        {"placement": {"laneTopology": {"key": "rack"}}},
    ],
)
def test_fields_that_restart_make_another_revision(change: dict[str, Any]) -> None:
    kept = [begin(spec(), [])]
    assert find(spec(**change), kept) is None
    assert begin(spec(**change), kept).name != kept[0].name
    assert begin(spec(**change), kept).number == 2


def test_another_role_makes_another_revision() -> None:
    tiers = {"kvCache": {"tiers": {"host": {"size": "1Gi"}, "peers": {"bandwidth": "1Gi"}}}}
    kept = [begin(spec(role="prefill", **tiers), [])]
    assert find(spec(role="prefill", **tiers), kept) is not None
    assert find(spec(role="decode", **tiers), kept) is None
    assert find(spec(role="both", **tiers), [begin(spec(**tiers), [])]) is not None, "the default"


def test_going_back_finds_the_revision_that_was() -> None:
    first = begin(spec(), [])
    second = begin(spec(image="worker:2"), [first])
    assert find(spec(), [first, second]) == first


def test_the_same_spec_begins_the_same_revision_anywhere() -> None:
    assert begin(spec(image="a"), []) == begin(spec(image="a"), [])


def test_a_field_that_a_newer_operator_adds_keeps_the_revision_while_it_has_its_default() -> None:
    kept = begin(spec(), [])
    older = {path: value for path, value in kept.fields.items() if path != "kvCache.tokensPerLane"}
    assert find(spec(), [replace(kept, fields=older)]) is not None
    assert find(spec(kvCache={"tokensPerLane": 4096}), [replace(kept, fields=older)]) is None


def test_a_field_that_an_older_operator_kept_and_this_one_does_not_know_is_ignored() -> None:
    kept = begin(spec(), [])
    assert find(spec(), [replace(kept, fields=kept.fields | {"kvCache.gone": 3})]) is not None


def test_every_marked_field_is_counted() -> None:
    fields = restart_fields(spec())
    assert {"parallelism.tensor", "kvCache.size", "model.source", "template.spec", "threads"} <= fields.keys()
    assert not any(path.startswith(("router.", "lifecycle.restart", "suspend")) for path in fields)


def test_every_field_that_restarts_is_part_of_a_revision() -> None:
    schema = MedhaReplicaSpec.model_json_schema(by_alias=True)

    def restarting(node: dict[str, Any], prefix: str) -> Iterator[str]:
        for name, field in node.get("properties", {}).items():
            if field.get("x-apply") == "restart":
                yield prefix + name
                continue
            for one in (field, *field.get("anyOf", ())):
                if "$ref" in one:
                    yield from restarting(schema["$defs"][one["$ref"].rpartition("/")[2]], f"{prefix}{name}.")

    found = {path for path in restarting(schema, "") if path.partition(".")[0] != "router"}
    assert found == restart_fields(spec()).keys()
