"""Definitions of another version: the operator names what older ones lack, and ignores the defaults of newer ones."""

from __future__ import annotations

import asyncio
import copy
import logging
from typing import Any, cast

import pytest

from medha_operator import program
from medha_operator.definitions import missing_fields, own_schemas, without_newer_defaults
from medha_operator.kube.client import ApiError, Cluster
from medha_operator.program import wait_for_definitions

Document = dict[str, Any]
MODEL: Document = {"name": "m", "source": {"path": "x"}}


def described(*without: str) -> Document:
    """Return the API server's answer about definitions like ours that lack the fields at these paths."""
    schemas = {}
    for kind, schema in own_schemas().items():
        named = [{"group": "medha.dev", "version": "v1alpha1", "kind": kind}]
        schemas[f"dev.medha.v1alpha1.{kind}"] = copy.deepcopy(schema) | {
            "x-kubernetes-group-version-kind": named
        }
    for path in without:
        kind, *names, last = path.split(".")
        node = schemas[f"dev.medha.v1alpha1.{kind}"]
        for name in names:
            node = node["properties"][name]
        del node["properties"][last]
    return {"components": {"schemas": schemas}}


@pytest.mark.parametrize(
    "without",
    [
        [],
        ["MedhaReplica.spec.model.aliases"],
        ["MedhaReplica.status.shape", "MedhaDeployment.spec.template.spec.determinism"],
    ],
)
def test_fields_that_definitions_lack_are_named(without: list[str]) -> None:
    assert missing_fields(described(*without)) == without


def test_definitions_that_are_not_there_are_named_by_their_kind() -> None:
    assert missing_fields({}) == ["MedhaReplica", "MedhaDeployment"]


def test_definitions_with_further_fields_lack_nothing() -> None:
    newer = described()
    replica = newer["components"]["schemas"]["dev.medha.v1alpha1.MedhaReplica"]
    replica["properties"]["spec"]["properties"]["lookahead"] = {"type": "integer"}
    assert missing_fields(newer) == []


class Upgraded:
    """An API server whose definitions lack a field at first, and whose first answer is an error."""

    def __init__(self, *answers: Document | ApiError) -> None:
        self._answers = list(answers)
        self.asked = 0

    async def describe(self, _: str) -> Document:
        answer = self._answers[min(self.asked, len(self._answers) - 1)]
        self.asked += 1
        if isinstance(answer, ApiError):
            raise answer
        return answer


def waited(server: Upgraded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "_DEFINITIONS_SECONDS", 0.0)
    asyncio.run(wait_for_definitions(cast("Cluster", server)))


def test_the_operator_waits_for_older_definitions_and_says_once_what_they_lack(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    older = described("MedhaReplica.spec.model.aliases")
    server = Upgraded(ApiError(0, "NoAnswer", "refused"), older, older, described())
    with caplog.at_level(logging.ERROR):
        waited(server, monkeypatch)
    assert server.asked == 4
    (said,) = [record.getMessage() for record in caplog.records]
    assert "lack MedhaReplica.spec.model.aliases. Apply" in said


def test_an_operator_that_may_not_see_the_definitions_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Upgraded(ApiError(403, "Forbidden", "no"))
    waited(server, monkeypatch)
    assert server.asked == 1


def replica(spec: Document, *owned: Document) -> Document:
    fields = [{"manager": "user", "fieldsV1": {"f:spec": one}} for one in owned]
    status = {"manager": "medha-operator", "subresource": "status", "fieldsV1": {"f:status": {"f:epoch": {}}}}
    metadata = {"name": "r", "namespace": "default", "managedFields": [*fields, status]}
    return {"kind": "MedhaReplica", "metadata": metadata, "spec": spec}


SET: Document = {"f:model": {".": {}, "f:name": {}, "f:source": {"f:path": {}}}}


def test_a_new_field_that_nobody_has_set_is_ignored() -> None:
    newer = {"model": MODEL | {"nicknames": []}, "lookahead": 2}
    assert without_newer_defaults(replica(newer, SET))["spec"] == {"model": MODEL}


@pytest.mark.parametrize(
    "owned",
    [SET | {"f:lookahead": {}}, SET | {"f:lookahead": {"f:steps": {}}}, {}],
    ids=["the field", "a part of it", "all of the spec"],
)
def test_a_new_field_that_somebody_has_set_is_kept(owned: Document) -> None:
    spec = {"model": MODEL, "lookahead": {"steps": 2}}
    assert without_newer_defaults(replica(spec, owned))["spec"] == spec


def test_new_fields_in_the_items_of_a_list_are_ignored_unless_somebody_has_set_them() -> None:
    classes = [{"name": "chat", "weight": 1}, {"name": "batch", "weight": 2}]
    owned = SET | {
        "f:serviceClasses": {
            'k:{"name":"chat"}': {".": {}, "f:name": {}},
            'k:{"name":"batch"}': {".": {}, "f:name": {}, "f:weight": {}},
        }
    }
    found = without_newer_defaults(replica({"model": MODEL, "serviceClasses": classes}, owned))["spec"]
    assert found["serviceClasses"] == [{"name": "chat"}, {"name": "batch", "weight": 2}]


def test_a_spec_of_known_fields_is_left_as_it_is() -> None:
    known = replica({"model": MODEL, "template": {"spec": {"anything": [{"goes": 1}]}}}, SET)
    assert without_newer_defaults(known) is known


def test_without_a_record_of_who_set_what_every_field_is_kept() -> None:
    unknown = replica({"model": MODEL, "lookahead": 2})
    assert without_newer_defaults(unknown) is unknown
