"""Every benchmark's file says what it claims, in one form, so that a reader can hold each figure against its goal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
NAMES = sorted(
    script.stem
    for script in BENCHMARKS.glob("*.py")
    if (BENCHMARKS / "results" / f"{script.stem}.json").exists()
)


def test_there_are_results() -> None:
    assert {"parallel", "scheduler", "serve"} <= set(NAMES)


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"long"}))  # which holds tests, and no figures
def test_a_result_holds_claims_with_a_value_and_a_goal(name: str) -> None:
    claims = json.loads((BENCHMARKS / "results" / f"{name}.json").read_text(encoding="utf-8"))["claims"]
    assert claims
    for claim in claims:
        assert {"name", "value", "unit", "goal", "better"} <= set(claim)
        assert claim["better"] in ("less", "more")
        assert isinstance(claim["value"], float | int)
    assert len({claim["name"] for claim in claims}) == len(claims)


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"long"}))
def test_its_script_has_a_quick_form(name: str) -> None:
    assert '"--quick"' in (BENCHMARKS / f"{name}.py").read_text(encoding="utf-8")
