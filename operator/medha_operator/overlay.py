"""A user's overrides laid over a rendered pod: maps are merged, lists of named entries by name, all else replaced."""

from __future__ import annotations

from typing import Any


def overlaid(base: Any, over: Any) -> Any:
    """`base` with `over` laid over it; neither is changed. An entry that is null in `over` is removed.

    Lists whose entries all have a `name` (containers, volumes, environment, ports) are merged by it, in the order of
    `base` and then of `over`, as Kubernetes' own strategic merge does; any other list replaces the one below.
    """
    if isinstance(base, dict) and isinstance(over, dict):
        merged = {name: value for name, value in base.items() if over.get(name, value) is not None}
        for name, value in over.items():
            if value is not None:
                merged[name] = overlaid(base[name], value) if name in base else value
        return merged
    if _is_named(base) and _is_named(over):
        upper = {entry["name"]: entry for entry in over}
        below = [overlaid(entry, upper.pop(entry["name"], {})) for entry in base]
        return below + list(upper.values())
    return over


def _is_named(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, dict) and "name" in entry for entry in value)
