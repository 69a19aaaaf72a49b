"""Harmful additions by others to objects of ours, and the patch that removes them.

Server-side apply restores what others have changed and keeps what they have added, which is right for labels and
annotations. But an additional key in a selector empties a Service, an additional peer opens a NetworkPolicy, and
an additional node selector or container keeps the next pods from starting. These fields must be exactly what we
render.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

_PLACING = (
    "nodeSelector",
    "affinity",
    "schedulingGates",
    "topologySpreadConstraints",
    "nodeName",
    "schedulerName",
    "runtimeClassName",
    "priorityClassName",
    "resourceClaims",
    "hostNetwork",
    "hostPID",
    "hostIPC",
)
_TEMPLATE = ("spec", "template", "spec")
EXACT: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "Service": (("spec", "selector"),),
    "NetworkPolicy": (("spec",),),
    "PodDisruptionBudget": (("spec",),),
    "StatefulSet": (("spec", "ordinals"), *((*_TEMPLATE, field) for field in _PLACING)),
}
"""Kind -> the fields in which nothing may be added."""
NAMED: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "StatefulSet": tuple((*_TEMPLATE, field) for field in ("initContainers", "containers", "volumes")),
}
"""Kind -> the lists of named entries to which no name may be added."""
_DEFAULTS: Mapping[tuple[str, ...], str] = {(*_TEMPLATE, "schedulerName"): "default-scheduler"}
"""Default that the API server adds to such a field by itself, by the field's path."""


def additions(found: Mapping[str, Any], desired: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the merge patch that removes what `found` has beyond `desired`, and the paths that it removes.

    Only fields in which nothing may be added matter. Both results may be empty.
    """
    patch: dict[str, Any] = {}
    paths: list[str] = []
    for path in EXACT.get(desired["kind"], ()):
        here, there = _at(found, path), _at(desired, path)
        if here == _DEFAULTS.get(path, ()) and there is None:
            continue
        if _is_same(here, there):
            continue
        change, names = _taken_away(here, there, ".".join(path))
        paths += names
        _put(patch, path, change)
    volumes = _added_names(found, desired, (*_TEMPLATE, "volumes"))
    for path in NAMED.get(desired["kind"], ()):
        ours = {entry["name"] for entry in _at(desired, path) or ()}
        here = _at(found, path) or ()
        theirs = _added_names(found, desired, path)
        if theirs:
            paths += [f"{'.'.join(path)}[{name}]" for name in theirs]
        kept = [_without_mounts(entry, volumes) for entry in here if entry["name"] in ours]
        if kept != list(here):
            _put(patch, path, kept or None)
    return patch, tuple(paths)


def _added_names(found: Mapping[str, Any], desired: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    """Return the names in a list of named entries of `found` that the list of `desired` lacks."""
    ours = {entry["name"] for entry in _at(desired, path) or ()}
    return [entry["name"] for entry in _at(found, path) or () if entry["name"] not in ours]


def _without_mounts(container: Mapping[str, Any], volumes: Collection[str]) -> Mapping[str, Any]:
    """Return a container without the mounts of volumes that are removed: pods with such mounts are refused."""
    mounts = {
        field: [mount for mount in container[field] if mount["name"] not in volumes]
        for field in ("volumeMounts", "volumeDevices")
        if container.get(field)
    }
    return {**container, **mounts}


def _taken_away(found: Any, desired: Any, path: str) -> tuple[Any, list[str]]:
    """Return the merge patch of one field, and the paths of what it changes there."""
    if not (isinstance(found, Mapping) and isinstance(desired, Mapping)):
        return desired, [path]
    change: dict[str, Any] = {}
    names: list[str] = []
    for name in sorted({*found, *desired}):
        if not _is_same(found.get(name), desired.get(name)):
            change[name], below = _taken_away(found.get(name), desired.get(name), f"{path}.{name}")
            names += below
    return change, names


def _is_same(found: Any, desired: Any) -> bool:
    """Return whether both mean the same.

    Zero, false and empty lists may be missing, because the API server leaves them out. An empty map is not the same as
    none: as a selector, it selects everything.
    """
    if isinstance(found, Mapping) and isinstance(desired, Mapping):
        return all(_is_same(found.get(name), desired.get(name)) for name in {*found, *desired})
    if isinstance(found, list) and isinstance(desired, list):
        return len(found) == len(desired) and all(map(_is_same, found, desired))
    has_meaning = found or desired or isinstance(found, Mapping) or isinstance(desired, Mapping)
    return bool(found == desired) or not has_meaning


def _at(document: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    found: Any = document
    for name in path:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _put(patch: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for name in path[:-1]:
        patch = patch.setdefault(name, {})
    patch[path[-1]] = value
