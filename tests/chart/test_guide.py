"""docs/install.md: what it shows can be used as it is."""

from __future__ import annotations

import re

import pytest
import yaml

from chart.helm import CHART, NAMESPACE, ROOT, Helm

GUIDE = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```yaml\n(.*?)```", GUIDE, flags=re.DOTALL)
VALUES = [block for block in BLOCKS if "apiVersion" not in block]
INLINE = [found for found in re.findall(r"`(\w+: \{[^`]*\})`", GUIDE) if not found.startswith("spec")]


@pytest.mark.parametrize("number", range(len(VALUES) + len(INLINE)))
def test_an_example_of_values_is_accepted(helm: Helm, number: int) -> None:
    block = [*VALUES, *INLINE][number]
    values = yaml.safe_load(block.replace('"sha256:..."', f'"sha256:{"0" * 64}"'))
    assert helm.render(**values) != helm.render(), "it changes nothing"


def test_there_are_examples() -> None:
    assert len(VALUES) >= 5
    assert len(INLINE) >= 3


def test_its_names_are_those_of_a_release_with_the_defaults(helm: Helm) -> None:
    names = {manifest["metadata"]["name"] for manifest in helm.render()}
    told = set(re.findall(r"`(medha-(?:router|operator))`", GUIDE))
    assert told == {"medha-router", "medha-operator"}
    assert told <= names
    assert f"helm install medha {CHART.relative_to(ROOT)} --namespace {NAMESPACE}" in GUIDE


def test_helm_of_the_version_that_it_asks_for_is_the_one_that_is_tested(helm: Helm) -> None:
    asked = re.search(r"Helm 3\.(\d+) or newer", GUIDE)
    tested = re.search(r"v3\.(\d+)", (ROOT / "tests/cluster/go/helm/go.mod").read_text(encoding="utf-8"))
    assert asked is not None
    assert tested is not None
    assert int(asked[1]) <= int(tested[1])
