"""Computed tables of docs/models.md are what their script says."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmark import benchmark

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")


def test_tables_are_those_of_the_planner_the_results_files_and_the_sources() -> None:
    assert benchmark("models_page").page() == PAGE, "run `make gen`"


@pytest.mark.parametrize("part", ["| DeepSeek-V2-Lite | H100 | 8 x 1 x 1 |", "+QWEN3_MOE = Family("])
def test_a_page_that_says_otherwise_is_noticed(part: str) -> None:
    assert part in PAGE
    assert benchmark("models_page").page(PAGE.replace(part, "stale")) == PAGE
