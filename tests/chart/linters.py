"""Two public linters of manifests, and what they find."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from chart.helm import ROOT, Manifest

ANSWERS = ROOT / "docs" / "chart-findings.md"


@dataclass(frozen=True, order=True)
class Finding:
    """One check that an object fails."""

    linter: str
    check: str
    where: str
    """Kind and name; the lanes of a replica are one."""


def kube_score(program: Path, manifests: list[Manifest]) -> set[Finding]:
    """What kube-score grades below its best."""
    arguments = ["score", "--kubernetes-version", "v1.35", "--output-format", "json", "-"]
    done = subprocess.run(
        [str(program), *arguments],
        input=yaml.safe_dump_all(manifests),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return {
        Finding("kube-score", check["check"]["id"], _where(scored["object_name"].split("/")[0], scored))
        for scored in json.loads(done.stdout)
        for check in scored["checks"]
        if not check["skipped"] and check["grade"] < 10
    }


def _where(kind: str, scored: dict[str, Any]) -> str:
    return _named(kind, str(scored["object_meta"]["name"]))


def checkov(program: Path, folder: Path, manifests: list[Manifest]) -> set[Finding]:
    """What checkov finds; `folder` is one to write in."""
    file = folder / "manifests.yaml"
    file.write_text(yaml.safe_dump_all(manifests), encoding="utf-8")
    arguments = ["-f", str(file), "--framework", "kubernetes", "--compact", "--quiet", "--skip-download"]
    arguments += ["--output", "json"]
    done = subprocess.run(
        [str(program), *arguments],
        cwd=folder,
        env=os.environ | {"LOG_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    report = json.loads(done.stdout)
    assert report["summary"]["parsing_errors"] == 0
    return {
        Finding("checkov", each["check_id"], _named(kind, name))
        for each in report["results"]["failed_checks"]
        for kind, _, name in [each["resource"].split(".", 2)]
    }


def _named(kind: str, name: str) -> str:
    return "StatefulSet/replica" if kind == "StatefulSet" else f"{kind}/{name}"


def answered() -> dict[Finding, str]:
    """Finding -> its answer, from the tables of docs/chart-findings.md."""
    return dict(_answers(ANSWERS.read_text(encoding="utf-8").splitlines()))


def _answers(lines: list[str]) -> Iterator[tuple[Finding, str]]:
    for line in lines:
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if len(cells) == 4 and cells[0] in ("kube-score", "checkov"):
            linter, check, places, answer = cells
            for where in places.replace("`", "").split(", "):
                yield Finding(linter, check.strip("`"), where), answer
