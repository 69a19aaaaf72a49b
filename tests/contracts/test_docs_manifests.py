"""The manifests on the pages are valid: whole ones as they are, and pieces of a `spec` in a small replica."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from medha.api.deployment import parse_deployment
from medha.api.replica import parse_replica

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"])
REPLICA = {
    "apiVersion": "medha.dev/v1alpha1",
    "kind": "MedhaReplica",
    "metadata": {"name": "example"},
    "spec": {"model": {"name": "example", "source": {"path": "/model"}}},
}


def manifests(page: str) -> Iterator[dict[str, Any]]:
    """Yield the MedhaReplicas and MedhaDeployments of a page; a piece that has a `spec` alone is put into `REPLICA`."""
    for block in re.findall(r"^ *```yaml\n(.*?)^ *```", page, re.MULTILINE | re.DOTALL):
        for document in yaml.safe_load_all(block):
            if not isinstance(document, dict):
                continue
            if document.keys() == {"spec"}:
                yield merged(REPLICA, document)
            elif str(document.get("apiVersion", "")).startswith("medha.dev/"):
                yield document


def merged(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with the fields of `more`, object by object. A source of a model takes the place of another."""
    found = {**base, **more}
    for name in base.keys() & more.keys() - {"source"}:
        if isinstance(base[name], dict):
            found[name] = merged(base[name], more[name])
    return found


def test_pieces_are_put_into_a_replica_and_other_kinds_are_left_out() -> None:
    page = "```yaml\nkind: Pod\n---\nspec:\n  model:\n    source: {image: a}\n```\n"
    [found] = manifests(page)
    assert found["spec"]["model"] == {"name": "example", "source": {"image": "a"}}


@pytest.mark.parametrize(
    "page",
    [path for path in PAGES if any(manifests(path.read_text()))],
    ids=lambda path: path.name,
)
def test_the_manifests_of_a_page_are_valid(page: Path) -> None:
    for manifest in manifests(page.read_text()):
        (parse_deployment if manifest["kind"] == "MedhaDeployment" else parse_replica)(manifest)
