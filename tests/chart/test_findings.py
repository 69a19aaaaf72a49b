"""Every finding of two public linters has a written answer, and no answer speaks of what is found no more."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from chart.helm import Helm, Manifest
from chart.linters import answered, checkov, kube_score
from chart.tables import EVERYTHING
from cluster.binaries import CannotBuild, build, cache_folder
from medha_cli.render_command import rendered
from medha_operator.operator_settings import OperatorSettings

REPLICA: dict[str, Any] = {
    "model": {
        "name": "m",
        "source": {"huggingFace": {"repository": "a/b", "tokenSecret": {"name": "hf"}}},
    },
    "routerRef": {"name": "medha-router", "namespace": "medha-system"},
    "parallelism": {"tensor": 8, "stream": 2, "kv": 2},
    "resources": {
        "requests": {"cpu": "16", "memory": "200Gi", "ephemeral-storage": "400Gi"},
        "limits": {"memory": "400Gi", "ephemeral-storage": "400Gi"},
    },
}
"""A replica whose author has said what it needs."""


def replica() -> list[Manifest]:
    """What `medha render` prints for it."""
    document = {
        "apiVersion": "medha.dev/v1alpha1",
        "kind": "MedhaReplica",
        "metadata": {"name": "llama"},
        "spec": REPLICA,
    }
    return list(rendered(document, "serving", "7f0c7c0e-0000-4000-8000-000000000000", OperatorSettings()))


@pytest.fixture(scope="session")
def linted(helm: Helm) -> list[list[Manifest]]:
    return [helm.render(), helm.render(**EVERYTHING), replica()]


def test_every_finding_of_kube_score_is_answered(linted: list[list[Manifest]]) -> None:
    try:
        program = build(["kube-score"])["kube-score"]
    except CannotBuild as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no kube-score: {error}")
    found = set().union(*(kube_score(program, manifests) for manifests in linted))
    assert found == {finding for finding in answered() if finding.linter == "kube-score"}


@pytest.mark.long
@pytest.mark.timeout(300)
def test_every_finding_of_checkov_is_answered(linted: list[list[Manifest]], tmp_path: Path) -> None:
    """Checkov has a hundred dependencies and an environment of its own: docs/chart-findings.md says how to make it."""
    program = cache_folder().parent / "checkov-venv" / "bin" / "checkov"
    if not program.is_file():
        pytest.skip(f"no checkov at {program}: docs/chart-findings.md")
    found = set()
    for index, manifests in enumerate(linted):
        folder = tmp_path / str(index)
        folder.mkdir()
        found |= checkov(program, folder, manifests)
    assert found == {finding for finding in answered() if finding.linter == "checkov"}


def test_no_answer_is_empty() -> None:
    assert [finding for finding, answer in answered().items() if len(answer) < 20] == []
