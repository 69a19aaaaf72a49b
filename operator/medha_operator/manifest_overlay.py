"""Overlay and compare manifests.

Maps are merged, lists of named entries are merged by name, all else is replaced.
"""

from __future__ import annotations

from typing import Any


def overlaid(base: Any, over: Any) -> Any:
    """Return `base` with `over` laid over it; neither is changed. An entry that is null in `over` is removed.

    Lists whose entries all have a `name` (containers, volumes, environment, ports) are merged by it, in the
    order of `base` and then of `over`, as Kubernetes' own strategic merge does; any other list replaces the
    one in `base`.
    """
    if isinstance(base, dict) and isinstance(over, dict):
        merged = {name: value for name, value in base.items() if over.get(name, value) is not None}
        for name, value in over.items():
            if value is not None:
                merged[name] = overlaid(base[name], value) if name in base else value
        return merged
    if _is_keyed(base, "name") and _is_keyed(over, "name"):
        upper = {entry["name"]: entry for entry in over}
        below = [overlaid(entry, upper.pop(entry["name"], {})) for entry in base]
        return below + list(upper.values())
    return over


def _is_keyed(value: Any, key: str) -> bool:
    return isinstance(value, list) and all(isinstance(entry, dict) and key in entry for entry in value)


def holds(found: Any, desired: Any) -> bool:
    """Return whether `found` contains everything of `desired`.

    It may have more, such as defaults and others' fields. An empty, zero or false value may be missing in
    `found`: the API server leaves it out.
    """
    if isinstance(desired, dict):
        return hasattr(found, "get") and all(
            holds(found.get(name), value) or (found.get(name) is None and not value)
            for name, value in desired.items()
        )
    key = next((key for key in ("name", "uid") if _is_keyed(desired, key) and _is_keyed(found, key)), None)
    if key is not None:  # others may have added entries of their own, which stay
        here = {entry[key]: entry for entry in found}
        return all(entry[key] in here and holds(here[entry[key]], entry) for entry in desired)
    if isinstance(desired, list):
        return (
            isinstance(found, list)
            and len(found) == len(desired)
            and all(holds(here, there) for here, there in zip(found, desired, strict=True))
        )
    return bool(found == desired)
