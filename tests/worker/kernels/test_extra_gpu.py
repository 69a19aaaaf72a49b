"""The extra `gpu`, as pinned, can be imported on a machine without a GPU, and so can the oldest FlashInfer that we support.

Their signatures are those that are recorded, and the adapter runs on their Python code with a kernel of ours. These tests
install them beside the torch that is there: 1.3 GB and a minute for the newest with a fast index, 1.1 GB and half a minute
for the oldest. That is too much for each run of CI.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from .flashinfer_defects import STEPS
from .further_packages import Environment, pins, required_by


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
    environment = Environment(tmp_path, [*required_by("gpu"), "cuda-bindings"], kept)
    recorded = environment.run("tests.worker.kernels.flashinfer_signatures", "--check")
    assert f"FlashInfer {version}: all signatures are as recorded" in recorded
    assert environment.run("tests.worker.kernels.flashinfer_real").count("as plain torch") == len(STEPS) + 2
