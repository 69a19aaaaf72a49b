"""The race as Triton compiles it, executed on a CPU: every access is inside its tensor, and no two programs write one place.

Triton's interpreter runs a kernel's Python instead, and sees neither. This takes 5.4 GB of packages: another torch and
Triton, and they need Python 3.12 or 3.13. What was compared is written to `benchmarks/results/triton_ir.json`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from medha_worker.kernels.triton import __name__ as package

from .further_packages import Environment
from .proved_results import write_proved
from .race_on_cuda import SIZES

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
MODULE = f"{package}.triton_race"
SOURCE = Path(__file__).parents[3] / "worker" / Path(*MODULE.split(".")).with_suffix(".py")

DEFECTS = (
    (', mask=is_token, other=-float("inf")', "", "past the end of the tensor passed as `scores`"),
    ("best + row * parts + part", "best + row * parts", "both touch element 0 of `best`"),
    ("value >> 27", "value >> 26", "other winners"),
)
"""What is right in the source, what is planted in its place, and what then is said."""


def newer_python() -> str:
    """Return a Python that the packages support."""
    found = [shutil.which("python3.13"), shutil.which("python3.12")]
    found += map(str, sorted(Path.home().glob(".pyenv/versions/3.1[23].*/bin/python")))
    for python in filter(None, found):  # one on PATH may be a script of pyenv that finds no version
        if not subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode:
            return python
    pytest.fail("no Python 3.12 or 3.13 is on PATH or in ~/.pyenv: install one")


def test_the_compiled_kernel_is_right_and_each_defect_is_found(tmp_path: Path) -> None:
    """One test, because each would install the packages."""
    environment = Environment(tmp_path, ["ttsem[triton]==0.1.0"], {}, newer_python())

    def executed(module: str) -> subprocess.CompletedProcess[str]:
        script = str(Path(__file__).with_name("race_on_cuda.py"))
        return environment.finished("ttsem.sanitize", script, "--", module)

    done = executed(MODULE)
    assert done.returncode == 0, done.stdout + done.stderr
    compared = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [(one["rows"], one["vocab"]) for one in compared] == list(SIZES)
    text = SOURCE.read_text(encoding="utf-8")
    for right, wrong, says in DEFECTS:
        assert text.count(right) == 1
        (environment.site / "planted_race.py").write_text(text.replace(right, wrong), encoding="utf-8")
        done = executed("planted_race")
        assert done.returncode != 0, says
        assert says in done.stdout + done.stderr
    write_proved(
        "triton_ir",
        __file__,
        packages=environment.versions("triton", "torch", "ttsem"),
        kernels=["race_kernel"],
        compared=compared,
        defects_found=[says for _, _, says in DEFECTS],
    )
