"""Values that are set to null. Helm removes them before it reads the schema, so the chart refuses them as missing."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from chart.chart_generator import chart_generator
from chart.helm import CHART, RELEASE, Helm, HelmFailed, find

DEFAULTS: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
VALUES = {value.path: value.default for value in chart_generator().values()}


def maps(node: dict[str, Any], above: str = "") -> Iterator[str]:
    for name, below in node.items():
        if isinstance(below, dict):
            path = f"{above}{name}"
            yield path
            yield from maps(below, f"{path}.")


def is_within_value(path: str) -> bool:
    """Return whether a path leads to an entry of a value that is a map, such as `router.resources.limits`."""
    return any(path.startswith(f"{value}.") for value in VALUES)


MAPS = [path for path in maps(DEFAULTS) if not is_within_value(path)]


def nulls(*paths: str) -> dict[str, Any]:
    """Return values that are null at these paths."""
    values: dict[str, Any] = {}
    for path in paths:
        *above, name = path.split(".")
        node = values
        for each in above:
            node = node.setdefault(each, {})
        node[name] = None
    return values


def missing(said: str) -> set[str]:
    """Return the paths of the values that Helm calls missing."""
    found = re.findall(r"^ *- at '([^']*)': missing propert(?:y|ies) (.*)$", said, re.MULTILINE)
    return {
        f"{above}/{name}".strip("/").replace("/", ".")
        for above, names in found
        for name in re.findall(r"'([^']+)'", names)
    }


def refusal(helm: Helm, *paths: str) -> str:
    """Return what Helm says of nulls at these paths."""
    with pytest.raises(HelmFailed) as refused:
        helm.render(**nulls(*paths))
    return str(refused.value)


@pytest.mark.parametrize("depth", range(3))
def test_each_map_that_is_null_is_refused_by_its_name_alone(helm: Helm, depth: int) -> None:
    paths = [path for path in MAPS if path.count(".") == depth]
    assert len(paths) > 1
    assert missing(refusal(helm, *paths)) == set(paths)


def test_no_map_lies_deeper() -> None:
    assert max(path.count(".") for path in MAPS) == 2


def test_every_value_that_is_null_is_refused_by_name_if_that_is_not_its_default(helm: Helm) -> None:
    assert missing(refusal(helm, *VALUES)) == {path for path in VALUES if VALUES[path] is not None}


def test_a_value_may_be_null_if_that_is_its_default(helm: Helm) -> None:
    optional = [path for path in VALUES if VALUES[path] is None]
    assert optional == ["router.waitingRoom.bytes"]
    assert helm.render(**nulls(*optional)) == helm.render()


def test_null_removes_an_entry_of_a_value_that_is_a_map(helm: Helm) -> None:
    left = {"operator": ("limits", "requests"), "router": ("requests", "limits")}
    rendered = helm.render(**nulls(*(f"{part}.resources.{removed}" for part, (removed, _) in left.items())))
    for part, (_, kept) in left.items():
        (container,) = find(rendered, "Deployment", f"medha-{part}")["spec"]["template"]["spec"]["containers"]
        assert container["resources"] == {kept: DEFAULTS[part]["resources"][kept]}


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("podSecurityContext.seccompProfile", "at '/podSecurityContext': missing property 'seccompProfile'"),
        ("router.nodeSelector.pool", "at '/router/nodeSelector/pool': got null, want string"),
        ("router.resources.limits.cpu", "at '/router/resources/limits/cpu': got null"),
        ("router.waitingrooms", "at '/router': additional properties 'waitingrooms' not allowed"),
    ],
    ids=["an entry that pods need", "a new entry", "a new limit", "a value that does not exist"],
)
def test_other_nulls_are_refused_by_name(helm: Helm, path: str, said: str) -> None:
    assert said in refusal(helm, path)


def test_nulls_are_refused_in_a_chart_that_includes_this_one_too(helm: Helm, tmp_path: Path) -> None:
    chart = tmp_path / "platform"
    shutil.copytree(CHART, chart / "charts" / "medha")
    (chart / "Chart.yaml").write_text("apiVersion: v2\nname: platform\nversion: 1.0.0\n", encoding="utf-8")
    paths = ("traces", "router.waitingRoom", "router.tls.secretName")
    with pytest.raises(HelmFailed) as refused:
        helm("template", RELEASE, str(chart), values={"medha": nulls(*paths)})
    assert missing(str(refused.value)) == set(paths)
