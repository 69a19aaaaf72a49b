"""A user's overrides reach any field of a pod and leave the rest as rendered."""

from __future__ import annotations

from typing import Any

import pytest

from medha_operator.kube.manifest_overlay import holds, overlaid

POD: dict[str, Any] = {
    "containers": [{"name": "worker", "image": "a", "env": [{"name": "A", "value": "1"}], "args": ["x"]}],
    "volumes": [{"name": "tmp", "emptyDir": {}}],
    "securityContext": {"runAsUser": 65532},
}


@pytest.mark.parametrize(
    ("over", "path", "expected"),
    [
        ({"tolerations": [{"key": "gpu"}]}, ("tolerations",), [{"key": "gpu"}]),
        ({"securityContext": {"fsGroup": 1}}, ("securityContext",), {"runAsUser": 65532, "fsGroup": 1}),
        ({"securityContext": {"runAsUser": None}}, ("securityContext",), {}),
        ({"securityContext": None}, ("securityContext",), None),
        ({"containers": [{"name": "worker", "image": "b"}]}, ("containers", 0, "image"), "b"),
        ({"containers": [{"name": "worker", "image": "b"}]}, ("containers", 0, "args"), ["x"]),
        ({"containers": [{"name": "worker", "args": ["y", "z"]}]}, ("containers", 0, "args"), ["y", "z"]),
        (
            {"containers": [{"name": "worker", "env": [{"name": "B", "value": "2"}]}]},
            ("containers", 0, "env"),
            [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}],
        ),
        ({"containers": [{"name": "side", "image": "s"}]}, ("containers", 1), {"name": "side", "image": "s"}),
        (
            {"volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}}]},
            ("volumes", 0, "emptyDir"),
            {"sizeLimit": "1Gi"},
        ),
    ],
    ids=[
        "a new field",
        "beside",
        "taken away below",
        "taken away",
        "by name",
        "by name, the rest",
        "a plain list",
        "environment",
        "another container",
        "volume",
    ],
)
def test_overrides_are_merged_by_name(over: dict[str, Any], path: tuple[Any, ...], expected: Any) -> None:
    found: Any = overlaid(POD, over)
    for step in path:
        found = found.get(step) if isinstance(found, dict) else found[step]
    assert found == expected


MOUNTS = [{"name": "data", "mountPath": "/a"}, {"name": "data", "mountPath": "/b", "subPath": "b"}]


def test_a_volume_may_be_mounted_at_several_paths() -> None:
    below = [{"name": "model", "mountPath": "/model", "readOnly": True}]
    over = [*MOUNTS, {"name": "model", "mountPath": "/mine"}]
    assert overlaid(below, over) == below + over
    assert overlaid(below, [{"name": "data", "mountPath": "/model"}])[0]["name"] == "data"
    assert holds(MOUNTS, MOUNTS)
    assert holds([*below, *MOUNTS], MOUNTS)
    assert not holds([MOUNTS[0], {**MOUNTS[1], "subPath": "c"}], MOUNTS)
    assert not holds(MOUNTS[:1], MOUNTS)


def test_of_variables_with_one_name_the_last_counts() -> None:
    twice = [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]
    assert overlaid([{"name": "A", "value": "0"}], twice) == [{"name": "A", "value": "2"}]
    assert holds(twice, twice)


def test_no_overrides_change_nothing_and_neither_side_is_changed() -> None:
    before = str(POD)
    assert overlaid(POD, {}) == POD
    overlaid(POD, {"containers": [{"name": "worker", "image": "b"}]})
    assert str(POD) == before


@pytest.mark.parametrize(
    ("found", "wanted", "expected"),
    [
        ({"a": 1, "b": 2}, {"a": 1}, True),
        ({"a": 1}, {"a": 2}, False),
        ({"a": None}, {"a": {}}, True),
        ([1, 2], [1], False),
        ([{"name": "a", "x": 1}, {"name": "b"}], [{"name": "a"}], True),
        ([{"name": "b"}], [{"name": "a"}], False),
        ([{"uid": "1"}, {"uid": "2", "kind": "K"}], [{"uid": "2"}], True),
    ],
    ids=["more", "other", "empty", "list", "others' entry", "missing entry", "others' owner"],
)
def test_an_object_holds_what_is_wanted_beside_what_others_added(
    found: Any, wanted: Any, expected: bool
) -> None:
    assert holds(found, wanted) is expected
