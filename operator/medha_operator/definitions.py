"""Definitions of another version than the operator's: older ones, which it waits for, and newer ones, whose defaults it ignores.

Definitions and operator are upgraded one after the other. With older definitions, the API server would silently drop
what users and the operator write to new fields, so a new operator first waits until none of its fields is missing. With
newer definitions, the API server adds the defaults of new fields to every resource that it shows. Nobody has set these, as
`managedFields` says, so an older operator may ignore them. It still refuses a new field that somebody has set, by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from medha_operator.crds import GROUP, VERSION, deployment_crd, replica_crd

Document = dict[str, Any]
OPENAPI_PATH = f"/openapi/v3/apis/{GROUP}/{VERSION}"
"""Path of the API server's description of our resources, which every account may read (`system:discovery`)."""
_PARTS = ("spec", "status")


@cache
def own_schemas() -> Mapping[str, Document]:
    """Return the schemas of this version's definitions, by kind."""
    return {
        crd["spec"]["names"]["kind"]: crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        for crd in (replica_crd(), deployment_crd())
    }


def missing_fields(described: Document) -> list[str]:
    """Return what this version's definitions have and the API server's have not, outermost fields only.

    Args:
        described: The API server's answer at `OPENAPI_PATH`; an empty one if it does not know our resources.
    """
    served = dict(_schemas(described))
    missing = []
    for kind, own in own_schemas().items():
        if kind not in served:
            missing.append(kind)
            continue
        properties = served[kind].get("properties", {})
        for part in _PARTS:
            here, there = own["properties"][part], properties.get(part, {})
            missing += [f"{kind}.{part}.{path}" for path in _absent(here, there)]
    return missing


def _schemas(described: Document) -> Iterator[tuple[str, Document]]:
    for schema in described.get("components", {}).get("schemas", {}).values():
        for named in schema.get("x-kubernetes-group-version-kind", ()):
            if (named.get("group"), named.get("version")) == (GROUP, VERSION):
                yield named["kind"], schema


def _absent(own: Document, served: Document) -> Iterator[str]:
    """Yield the paths of fields below `own` that `served` does not have."""
    if served.get("x-kubernetes-preserve-unknown-fields"):
        return
    if "items" in own:
        yield from _absent(own["items"], served.get("items", {}))
    found = served.get("properties", {})
    for name, below in own.get("properties", {}).items():
        if name not in found:
            yield name
        else:
            yield from (f"{name}.{path}" for path in _absent(below, found[name]))


def without_newer_defaults(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a resource of ours without the fields of its spec that this version does not know and nobody has set."""
    schema = own_schemas()[document["kind"]]["properties"]["spec"]
    owned = [
        entry["fieldsV1"]["f:spec"]
        for entry in document["metadata"].get("managedFields", ())
        if "f:spec" in entry.get("fieldsV1", {})
    ]
    if not owned:  # somebody has removed what would say who has set a field
        return document
    spec = _pruned(document["spec"], schema, owned)
    return document if spec is document["spec"] else {**document, "spec": spec}


def _pruned(value: Any, schema: Document, owned: list[Document]) -> Any:
    """Return `value` without unknown fields that no set of `owned` has; the same object if there are none."""
    if isinstance(value, list) and "items" in schema:
        items = [_pruned(item, schema["items"], _of_item(item, owned)) for item in value]
        return value if all(new is old for new, old in zip(items, value, strict=True)) else items
    if not isinstance(value, dict) or "properties" not in schema:
        return value
    kept = {}
    for name, below in value.items():
        known = schema["properties"].get(name)
        if known is not None:
            kept[name] = _pruned(below, known, _below(owned, f"f:{name}"))
        elif _is_owned(owned, f"f:{name}"):
            kept[name] = below
    is_same = len(kept) == len(value) and all(kept[name] is value[name] for name in kept)
    return value if is_same else kept


def _is_owned(owned: Iterable[Document], key: str) -> bool:
    """Return whether somebody has set this field, or all of the structure that contains it."""
    return any(key in fields or not fields for fields in owned)


def _below(owned: Iterable[Document], key: str) -> list[Document]:
    """Return the ownership records of a field. A record without members covers everything below it."""
    return [fields.get(key, {}) if fields else fields for fields in owned if key in fields or not fields]


def _of_item(item: Any, owned: Iterable[Document]) -> list[Document]:
    """Return the ownership records of an item of a list; the records identify items by the values of their key fields."""
    found = []
    for fields in owned:
        if not fields:
            found.append(fields)
        for key, below in fields.items():
            named = json.loads(key[2:]) if key.startswith("k:") else None
            if named is not None and isinstance(item, dict) and named.items() <= item.items():
                found.append(below)
    return found
