"""The extra `gpu`, as pinned, can be imported on a machine without a GPU, and so can the oldest FlashInfer that we support.

Their signatures are those that are recorded, and the adapter runs on their Python code with a kernel of ours. These tests
install them beside the torch that is there: 1.3 GB and a minute for the newest with a fast index, 1.1 GB and half a minute
for the oldest. That is too much for each run of CI.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from .flashinfer_defects import STEPS

ROOT = Path(__file__).parents[2]


def own_requirements() -> list[str]:
    """Return what the extra adds to `medha[worker]`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [line for line in project["optional-dependencies"]["gpu"] if Requirement(line).name != "medha"]


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("version", "unpinned"),
    [
        (pins()["flashinfer-python"], []),
        # The pinned cuda-tile has an extra that asks for a newer CUDA than torch brings; this FlashInfer wants that extra.
        ("0.6.13", ["cuda-tile"]),
    ],
)
def test_the_extra_imports_and_runs_to_its_kernels_without_a_gpu(
    version: str, unpinned: list[str], tmp_path: Path
) -> None:
    kept = {name: pin for name, pin in pins().items() if name not in unpinned} | {
        "flashinfer-python": version
    }
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("".join(f"{name}=={pin}\n" for name, pin in kept.items()))
    environment = tmp_path / "environment"
    venv.create(environment)
    python = str(environment / "bin" / "python")
    site = subprocess.check_output(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
    )
    Path(site.strip(), "installed_already.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    installing = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--disable-pip-version-check",
    ]
    subprocess.run(
        [*installing, "--constraint", str(constraints), *own_requirements(), "cuda-bindings"], check=True
    )
    here = [str(ROOT / folder) for folder in ("core", "worker")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(here)}

    def run(*argv: str) -> str:
        done = subprocess.run(
            [python, "-m", *argv], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    recorded = run("tests.worker.flashinfer_signatures", "--check")
    assert f"FlashInfer {version}: all signatures are as recorded" in recorded
    assert run("tests.worker.flashinfer_real").count("as plain torch") == len(STEPS) + 2
