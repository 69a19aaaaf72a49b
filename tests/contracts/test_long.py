"""`make test-long` runs a row again when anything has changed that the row reads."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


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
    read = runpy.run_path(str(ROOT / "benchmarks" / "long.py"))["read_by"](
        "tests/serving/test_recovery.py::test"
    )
    assert (ROOT / path).exists()
    assert any(Path(path).is_relative_to(one) for one in read)
    assert not any(Path("benchmarks/results/long.json").is_relative_to(one) for one in read)
