"""The names of OpenTelemetry's conventions are those of its own package, and our own are recognisable."""

from __future__ import annotations

import re
from pathlib import Path

from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.attributes import (
    error_attributes,
    http_attributes,
    service_attributes,
    url_attributes,
)

from medha_router.openapi import document
from medha_traces import attribute_names as names

ROOT = Path(__file__).parents[2]
VALUES = {name: value for name, value in vars(names).items() if name.isupper() and isinstance(value, str)}
ATTRIBUTES = {value for value in VALUES.values() if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", value)}
CONVENTIONS = (gen_ai_attributes, error_attributes, http_attributes, service_attributes, url_attributes)
KNOWN = {value for module in CONVENTIONS for value in vars(module).values() if isinstance(value, str)}


def test_every_name_is_a_convention_or_ours() -> None:
    assert len(ATTRIBUTES) > 30
    assert {name for name in ATTRIBUTES if not name.startswith("medha.")} <= KNOWN
    assert not {name for name in ATTRIBUTES if name.startswith("medha.")} & KNOWN


def test_no_convention_has_an_old_name() -> None:
    """All are marked as moved to a repository of their own; those that others replace are the old ones."""
    source = Path(str(gen_ai_attributes.__file__)).read_text(encoding="utf-8")
    for value in ATTRIBUTES:
        if value.startswith("gen_ai."):
            after = source.partition(f'= "{value}"')[2].partition("Final")[0]
            assert "Replaced by" not in after, value


def test_operations_are_values_of_the_convention_and_paths_of_the_api() -> None:
    operations = {one.value for one in gen_ai_attributes.GenAiOperationNameValues}
    assert set(names.OPERATIONS.values()) <= operations
    assert set(names.OPERATIONS) <= set(document("0")["paths"])


def test_the_names_of_generative_ai_are_in_one_module() -> None:
    folders = ("core", "router", "worker", "operator", "cli", "sim")
    found = [
        str(path.relative_to(ROOT))
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if "gen_ai." in path.read_text(encoding="utf-8")
    ]
    assert found == ["core/medha_traces/attribute_names.py"]


def test_the_page_lists_every_name() -> None:
    page = (ROOT / "docs" / "traces.md").read_text(encoding="utf-8")
    missing = [value for value in VALUES.values() if f"`{value}`" not in page and value != names.OUR_PROVIDER]
    assert missing == []
