"""`operator/` is a plain folder: with an `__init__.py` it would replace Python's own `operator` module."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHOW = "import operator; print(operator.__file__); operator.eq(1, 1)"


@pytest.mark.parametrize(
    ("argv", "environment"),
    [
        (["-c", SHOW], {}),
        (["-c", SHOW], {"PYTHONPATH": str(ROOT)}),
        (["-S", "-c", SHOW], {"PYTHONPATH": str(ROOT)}),  # no .pth file has imported anything before
        (["-m", "timeit", "-n1", "-r1", SHOW], {}),
        (["-m", "timeit", "-n1", "-r1", SHOW], {"PYTHONPATH": str(ROOT)}),
    ],
)
def test_pythons_own_operator_module_is_imported_at_the_root(
    argv: list[str], environment: dict[str, str]
) -> None:
    done = subprocess.run(
        [sys.executable, *argv],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.splitlines()[0]) == Path(os.__file__).with_name("operator.py")


def test_only_medha_operator_can_be_imported_from_the_folder() -> None:
    found = {path.name for path in (ROOT / "operator").iterdir()} - {"__pycache__"}
    assert found == {"medha_operator"}


def test_no_test_folder_is_called_operator() -> None:
    assert [path for path in (ROOT / "tests").rglob("operator") if path.is_dir()] == []
