"""`crds/` holds what the models say, in the form that Kubernetes calls structural."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from medha.api.replica import MOST_PODS, MOST_RANKS
from medha_operator.crds import deployment_crd, files, replica_crd

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", sorted(files()))
def test_the_committed_definitions_are_those_of_the_models(name: str) -> None:
    assert (ROOT / "crds" / name).read_text(encoding="utf-8") == files()[name], "run `make gen`"


def test_nothing_else_lies_beside_them() -> None:
    assert sorted(path.name for path in (ROOT / "crds").iterdir()) == sorted(files())


def _nodes(node: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, node
    for name, below in node.get("properties", {}).items():
        yield from _nodes(below, f"{path}.{name}")
    for name in ("items", "additionalProperties"):
        if isinstance(node.get(name), dict):
            yield from _nodes(node[name], f"{path}[]")


@pytest.mark.parametrize("crd", [replica_crd(), deployment_crd()], ids=["replica", "deployment"])
def test_every_node_has_a_type_and_nothing_that_a_structural_schema_may_not_hold(crd: dict[str, Any]) -> None:
    root = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for path, node in _nodes(root, "$"):
        assert "type" in node or node.get("x-kubernetes-int-or-string"), path
        assert not {"$ref", "$defs", "title", "x-apply", "const", "examples", "nullable"} & node.keys(), path
        assert not ({"properties", "additionalProperties"} <= node.keys()), path
        assert isinstance(node.get("exclusiveMinimum", True), bool), path


@pytest.mark.parametrize("crd", [replica_crd(), deployment_crd()], ids=["replica", "deployment"])
def test_every_field_says_what_it_is_and_every_number_of_the_spec_has_bounds(crd: dict[str, Any]) -> None:
    root = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    for part in ("spec", "status"):
        for path, node in _nodes(root[part], part):
            for name, field in node.get("properties", {}).items():
                told = re.sub(r"A change (reaches|replaces) [^.]*\.", "", field.get("description", ""))
                assert len(told.split()) > 1, f"{path}.{name} has no words of its own"
    for path, node in _nodes(root["spec"], "spec"):
        if node.get("type") in ("integer", "number"):
            rules = " ".join(one["rule"] for one in node.get("x-kubernetes-validations", ()))
            assert "minimum" in node or "self >" in rules, f"{path} has no least value"
            assert "maximum" in node or "self <" in rules, f"{path} has no greatest value"
            whole = [node.get(bound, 0) for bound in ("minimum", "maximum")]
            assert all(bound == int(bound) for bound in whole), f"the API server rounds a bound of {path}"


def test_how_a_change_is_applied_is_told_where_kubectl_explain_shows_it() -> None:
    spec = yaml.safe_load(files()["medhareplicas.yaml"])["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    fields = spec["properties"]["spec"]["properties"]
    assert "replaces the replica's pods" in fields["parallelism"]["properties"]["tensor"]["description"]
    assert "by a new epoch" in fields["scheduling"]["properties"]["policy"]["description"]
    assert "by a new epoch" in fields["serviceClasses"]["items"]["properties"]["ttftFactor"]["description"]
    live = fields["lifecycle"]["properties"]["restart"]["properties"]["stableSeconds"]["description"]
    assert live.endswith("A change reaches the running replica.")
    assert f"{MOST_RANKS:,} ranks in {MOST_PODS} pods" in fields["parallelism"]["description"]
