"""The core imports what decides and computes, and nothing else: an allow-list, so that a new import is a decision."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

CORE = Path(__file__).parents[2] / "core" / "medha"
ALLOWED = {
    "__future__", "bisect", "collections", "dataclasses", "hashlib", "heapq", "itertools", "math", "medha", "numpy", "re",
    "typing",
}  # fmt: skip
"""Without I/O, clock, randomness or threads."""
ALSO = {
    ("api", "pydantic"): "manifests and files are validated there",
    ("api/api_keys.py", "yaml"): "API keys are read from YAML files",
    ("api/api_keys.py", "hmac"): "for a comparison in constant time",
    ("cost/cost_profile.py", "pydantic"): "profiles are read from files",
    ("model/config_fields.py", "types"): "for a table that nobody changes",
    ("scheduler/status_report.py", "pydantic"): "the status goes over HTTP",
    ("wire/frames.py", "pydantic_core"): "frames are JSON",
    ("wire/frames.py", "pydantic"): "and are validated",
    ("scheduler/request.py", "sys"): "for `maxsize`",
}


def imported(source: str) -> Iterator[str]:
    """Names of the top-level packages that a module imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]


def refused(file: str, source: str) -> set[str]:
    """Return the names that a module of the core imports and may not; `file` is its path below the core."""
    also = {name for place, name in ALSO if file == place or file.startswith(f"{place}/")}
    return set(imported(source)) - ALLOWED - also


def test_the_core_imports_only_what_is_allowed() -> None:
    found = {str(path.relative_to(CORE)): path.read_text(encoding="utf-8") for path in CORE.rglob("*.py")}
    assert {file: names for file, source in found.items() if (names := refused(file, source))} == {}
    used = {(file, name) for file, source in found.items() for name in imported(source)}
    for place, name in ALSO:
        assert any(name == one and file.startswith(place) for file, one in used), f"{place} needs no {name}"


def test_an_import_that_is_not_allowed_is_noticed() -> None:
    assert refused("kv/blocks.py", "import os\nfrom pydantic import BaseModel\nimport numpy as np") == {
        "os",
        "pydantic",
    }
