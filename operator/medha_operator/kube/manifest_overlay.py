"""Overlay and compare manifests.

Maps are merged, lists of entries that have a key are merged by it, all else is replaced.
"""

from __future__ import annotations

from typing import Any

_KEYS = ("mountPath", "devicePath", "name", "uid")
"""Fields by which Kubernetes merges lists of a pod: a volume may be mounted twice, but only one mount has a path."""


def overlaid(base: Any, over: Any) -> Any:
    """Return `base` with `over` laid over it; neither is changed. An entry that is null in `over` is removed.

    Lists whose entries all have a key (mounts: their path; containers, volumes, environment, ports: their name) are merged
    by it, in the order of `base` and then of `over`, as Kubernetes' own strategic merge does; any other list replaces
    the one in `base`.
    """
    if isinstance(base, dict) and isinstance(over, dict):
        merged = {name: value for name, value in base.items() if over.get(name, value) is not None}
        for name, value in over.items():
            if value is not None:
                merged[name] = overlaid(base[name], value) if name in base else value
        return merged
    key = _common_key(base, over)
    if key is not None:
        upper = {
            entry[key]: entry for entry in over
        }  # of variables with one name, Kubernetes also takes the last
        below = [overlaid(entry, upper.pop(entry[key], {})) for entry in base]
        return below + list(upper.values())
    return over


def _common_key(*lists: Any) -> str | None:
    """Return the field by which the entries of these lists are told apart; None if there is none, or one is no list."""
    if not all(isinstance(one, list) for one in lists):
        return None
    entries = [entry for one in lists for entry in one]
    return next(
        (key for key in _KEYS if all(isinstance(entry, dict) and key in entry for entry in entries)), None
    )


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
    key = _common_key(found, desired)
    if key is not None:  # others may have added entries of their own, which stay
        return all(any(here[key] == entry[key] and holds(here, entry) for here in found) for entry in desired)
    if isinstance(desired, list):
        return (
            isinstance(found, list)
            and len(found) == len(desired)
            and all(holds(here, there) for here, there in zip(found, desired, strict=True))
        )
    return bool(found == desired)
