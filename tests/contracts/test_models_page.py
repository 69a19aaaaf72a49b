"""Computed tables of docs/models.md and of the pages with measurements of models and guesses are what their script says."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmark import benchmark

DOCS = Path(__file__).parents[2] / "docs"
MODELS, PERFORMANCE = DOCS / "models.md", DOCS / "performance-models.md"
GUESSES = DOCS / "performance-speculation.md"


@pytest.mark.parametrize("page", [MODELS, PERFORMANCE, GUESSES])
def test_tables_are_those_of_the_planner_the_results_files_and_the_sources(page: Path) -> None:
    assert benchmark("models_page").page(page) == page.read_text(encoding="utf-8"), "run `make gen`"


@pytest.mark.parametrize(
    ("page", "part"),
    [(PERFORMANCE, "| DeepSeek-V2-Lite | H100 | 8 x 1 x 1 |"), (MODELS, "+QWEN3_MOE = Family(")],
)
def test_a_page_that_says_otherwise_is_noticed(page: Path, part: str) -> None:
    text = page.read_text(encoding="utf-8")
    assert part in text
    assert benchmark("models_page").page(page, text.replace(part, "stale")) == text
