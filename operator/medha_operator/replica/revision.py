"""The revision of a spec: a short name for the pods it asks for.

It is a hash of the fields whose change restarts a replica.

A revision is kept in a ControllerRevision together with its rendered pod templates. So running pods stay as they are
under a newer operator, which might render others. A kept revision is found by comparing fields, not hashes: fields that
a newer release has added count at their defaults.
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
    """A revision as it is kept."""

    name: str
    """Ten hexadecimal digits."""
    number: int
    """Number that counts the revisions of one replica upwards."""
    fields: Fields
    """Values of the fields whose change restarts, by their paths, e.g. `parallelism.tensor`."""
    templates: tuple[Fields, ...] = ()
    """Pod template of each lane, as first rendered; empty if not kept yet."""


def restart_fields(spec: MedhaReplicaSpec) -> Fields:
    """Return the values of the fields of `spec` whose change restarts a replica, by their paths."""
    values = spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    return {path: _at(values, path) for path in _restart_paths()}


def find(spec: MedhaReplicaSpec, kept: Iterable[Revision]) -> Revision | None:
    """Return the newest kept revision that asks for the same pods as `spec`; None if there is none."""
    fields, defaults = restart_fields(spec), _defaults()
    for revision in sorted(kept, key=lambda one: one.number, reverse=True):
        expected = defaults | revision.fields
        if all(fields[path] == expected[path] for path in fields):
            return revision
    return None


def begin(spec: MedhaReplicaSpec, kept: Iterable[Revision]) -> Revision:
    """Return a revision for `spec` that is none of `kept`; its templates are still to be rendered."""
    fields = restart_fields(spec)
    return Revision(digest(fields), 1 + max((one.number for one in kept), default=0), fields)


def stages_of(revision: Revision) -> int:
    """Return the number of stages, i.e. of pods of each lane."""
    return int((_defaults() | revision.fields)["parallelism.stream"])


def digest(value: Any) -> str:
    """Return a hash of any JSON value, as ten hexadecimal digits."""
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
    """Yield the paths of the topmost fields whose change restarts a replica."""
    for name, field in node.get("properties", {}).items():
        mark = field.get("x-apply")
        if mark == "restart" and name != "router":  # `router` is for `medha up` alone
            yield prefix + name
        elif mark is None and "$ref" in field:
            yield from _marked(definitions[field["$ref"].rpartition("/")[2]], definitions, f"{prefix}{name}.")


@cache
def _defaults() -> Fields:
    """Return the default of every field that has one: its value in a spec that sets only what is required."""
    least = MedhaReplicaSpec.model_validate({"model": {"name": "m", "source": {"path": "."}}})
    required = ("model.name", "model.source")
    return {path: value for path, value in restart_fields(least).items() if path not in required}
