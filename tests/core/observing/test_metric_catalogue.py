"""The metric catalogue: well-formed names, and a reference page that is never out of date."""

import re
from pathlib import Path

import pytest

from medha.observing.metric_catalogue import CATALOGUE, Metric, prompt_length_label, reference_page

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("metric", CATALOGUE, ids=lambda metric: metric.name)
def test_a_name_carries_its_unit_and_leaves_total_to_the_exposition(metric: Metric) -> None:
    assert re.fullmatch(r"(medha_|vllm:)[a-z0-9_]+", metric.name)
    assert not metric.name.endswith(("_total", "_count", "_sum", "_bucket"))
    if metric.name.startswith("medha_") and metric.unit in ("seconds", "bytes", "tokens", "ratio"):
        assert metric.unit in metric.name


def test_no_name_is_used_twice() -> None:
    names = [metric.name for metric in CATALOGUE]
    assert len(names) == len(set(names))


def test_prompt_lengths_fall_into_their_class() -> None:
    assert [prompt_length_label(n) for n in (1, 128, 129, 5_000_000)] == [
        "le_128",
        "le_128",
        "le_1024",
        "more",
    ]


def test_the_reference_page_is_up_to_date() -> None:
    message = "docs/metrics.md is out of date; write medha.observing.metric_catalogue.reference_page() to it"
    assert (DOCS / "metrics.md").read_text(encoding="utf-8") == reference_page(), message
