"""Which pods a spec asks for, as one word: the revision, made of the fields whose change restarts a replica.

A revision is kept in a ControllerRevision together with the pods' templates that were rendered for it, so that a newer
operator, which would render them differently, goes on with what runs. A kept revision is found by comparing fields,
not hashes: fields that this release has added stand at their defaults in a spec that was written before.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from medha.api.replica import MedhaReplicaSpec

Fields = dict[str, Any]


@dataclass(frozen=True)
class Revision:
    """What is kept of a revision."""

    name: str
    """Ten hexadecimal digits."""
    number: int
    """Counts the revisions of one replica upwards."""
    fields: Fields
    """Values of the fields whose change restarts, by their paths, e.g. `parallelism.tensor`."""
    templates: tuple[Fields, ...] = ()
    """Template of the pods of each lane, as first rendered. None: not kept yet."""


def restart_fields(spec: MedhaReplicaSpec) -> Fields:
    """Values of the fields of `spec` whose change restarts a replica, by their paths."""
    values = spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    return {path: _at(values, path) for path in _restart_paths()}


def find(spec: MedhaReplicaSpec, kept: Iterable[Revision]) -> Revision | None:
    """The newest kept revision that asks for the same pods as `spec`."""
    fields, defaults = restart_fields(spec), _defaults()
    for revision in sorted(kept, key=lambda one: one.number, reverse=True):
        expected = defaults | revision.fields
        if all(fields[path] == expected[path] for path in fields):
            return revision
    return None


def begin(spec: MedhaReplicaSpec, kept: Iterable[Revision]) -> Revision:
    """A revision for `spec` that is none of `kept`; its templates are still to be rendered."""
    fields = restart_fields(spec)
    return Revision(digest(fields), 1 + max((one.number for one in kept), default=0), fields)


def stages_of(revision: Revision) -> int:
    """Pods of each of its lanes."""
    return int((_defaults() | revision.fields)["parallelism.stream"])


def digest(value: Any) -> str:
    """Ten hexadecimal digits of anything that JSON can say."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:10]


def _at(values: Mapping[str, Any], path: str) -> Any:
    found: Any = values
    for name in path.split("."):
        found = found.get(name)
        if found is None:
            return None
    return found


@cache
def _restart_paths() -> tuple[str, ...]:
    schema = MedhaReplicaSpec.model_json_schema(by_alias=True)
    return tuple(_marked(schema, schema["$defs"], ""))


def _marked(node: Fields, definitions: Fields, prefix: str) -> Iterable[str]:
    """Paths of the topmost fields that are marked so."""
    for name, field in node.get("properties", {}).items():
        mark = field.get("x-apply")
        if mark == "restart" and name != "router":  # which is for `medha up` alone
            yield prefix + name
        elif mark is None and "$ref" in field:
            yield from _marked(definitions[field["$ref"].rpartition("/")[2]], definitions, f"{prefix}{name}.")


@cache
def _defaults() -> Fields:
    """Default of every field that has one: what a spec has that names nothing but what it must."""
    least = MedhaReplicaSpec.model_validate({"model": {"name": "m", "source": {"path": "."}}})
    required = ("model.name", "model.source")
    return {path: value for path, value in restart_fields(least).items() if path not in required}
