"""`make test-long` runs a row again when anything has changed that the row reads."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LONG = runpy.run_path(str(ROOT / "benchmarks" / "long.py"))
PARTS = {
    "medha": "core", "medha_links": "core", "medha_cli": "cli", "medha_operator": "operator", "medha_router": "router",
    "medha_sim": "sim", "medha_worker": "worker",
}  # fmt: skip


@pytest.mark.parametrize(
    "path",
    [
        "benchmarks/recovery.py",
        "examples/needle.yaml",
        "pyproject.toml",
        "worker/medha_worker/rank.py",
        "tests/serving",
    ],
)
def test_a_row_depends_on_the_programs_examples_and_settings_that_its_tests_use(path: str) -> None:
    read = LONG["read_by"]("tests/serving/test_recovery.py::test")
    assert (ROOT / path).exists()
    assert any(Path(path).is_relative_to(one) for one in read)
    assert not any(Path("benchmarks/results/long.json").is_relative_to(one) for one in read)


@pytest.mark.parametrize("folder", LONG["READ"])
def test_tests_of_a_folder_that_reads_few_parts_name_no_other(folder: str) -> None:
    """What those parts stand on is the core alone: import-linter sees to that."""
    texts = [path.read_text() for path in (ROOT / folder).rglob("*.py")]
    named = {
        PARTS[name] for text in texts for name in re.findall(r"\bmedha(?:_[a-z]+)?\b", text) if name in PARTS
    }
    assert named
    assert named <= {path.partition("/")[0] for path in LONG["read_by"](folder)}
