"""`benchmarks/fit.py`, on measurements that were made from known fractions."""

from __future__ import annotations

import csv
import hashlib
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from benchmark import benchmark
from medha.cost.cost_profile import Link
from medha.cost.fitted_hardware import SHA256
from medha.cost.hardware import A100, LLAMA3_8B, layer_operations

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "fit.py"
EFFICIENCY, BANDWIDTH, LAUNCH_SECONDS = 0.65, 0.8, 6e-6
TOKENS = [1, 4, 16, 64, 100, 200, 400, 600, 1000, 1500, 2500, 4000, 6000, 12000, 20000, 30000]


@pytest.fixture(scope="module")
def fit() -> ModuleType:
    return benchmark("fit")


@pytest.fixture
def data(tmp_path: Path, fit: ModuleType) -> Path:
    """Files in Vidur's form, from a machine that reaches the same fractions in everything."""
    (tmp_path / "compute").mkdir()
    (tmp_path / "network").mkdir()
    operations = {operation.name: operation for operation in layer_operations(LLAMA3_8B, A100, 1)}
    rows = []
    for tokens in TOKENS:
        row: dict[str, object] = {"num_tokens": tokens, "num_tensor_parallel_workers": 1}
        for name, column in fit.COLUMNS.items():
            ideal = operations[name]
            compute = tokens * ideal.compute_seconds_per_row / EFFICIENCY
            memory = (ideal.fixed_seconds + tokens * ideal.memory_seconds_per_row) / BANDWIDTH
            row[f"time_stats.{column}.median"] = 1e3 * (LAUNCH_SECONDS + max(compute, memory))
        rows.append(row)
    _write(tmp_path / "compute" / "a100_llama3_8b_mlp.csv", rows)
    for name, kind in (("h100_dgx_all_reduce", "all_reduce"), ("h100_dgx_send_recv", "send_recv")):
        link = Link(((30e-6, 2e-11), (200e-6, 1e-11)))
        sizes = np.geomspace(2048, 2**26, 60).astype(int)
        _write(
            tmp_path / "network" / f"{name}.csv",
            [
                {
                    "size": size,
                    "num_workers": 2,
                    "devices_per_node": 1,
                    f"time_stats.{kind}.median": 1e3 * seconds,
                }
                for size, seconds in zip(sizes, link.seconds(sizes), strict=True)
            ],
        )
    return tmp_path


def _write(path: Path, rows: list[dict[str, object]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


@pytest.mark.long
def test_ranges_that_the_fit_has_not_seen_are_predicted(
    fit: ModuleType, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "report.json"
    monkeypatch.setattr("sys.argv", ["fit", "--data", str(data), "--quick", "--json", str(report)])
    written = (SCRIPT.parents[1] / "core" / "medha" / "cost" / "fitted_hardware.py").read_bytes()
    assert fit.main() == 0
    found = json.loads(report.read_text())
    assert found["tile_rows"] == {"A100-80G": 1}  # these rows were not padded
    beyond = [row for row in found["layers"] if row["tokens"][0] > 16384]
    assert [row["gemm_percent"] < 1 for row in beyond] == [True]
    assert all(row["gemm_percent"] < 10 for row in found["layers"])
    assert all(row["seen_percent"] < 3 for row in found["links"])
    assert (
        SCRIPT.parents[1] / "core" / "medha" / "cost" / "fitted_hardware.py"
    ).read_bytes() == written  # --quick writes nothing
    name = "compute/a100_llama3_8b_mlp.csv"
    assert found["sha256"][name] == hashlib.sha256((data / name).read_bytes()).hexdigest()


def test_fractions_are_found_again(fit: ModuleType, data: Path) -> None:
    shapes = fit._read_compute(data / "compute" / "a100_llama3_8b_mlp.csv", A100, LLAMA3_8B)[1]
    for name in fit.GEMMS:
        fraction = fit._fit([shapes[name]], tile=1)
        assert fraction.efficiency == pytest.approx(EFFICIENCY, rel=0.03)
        assert fraction.bandwidth == pytest.approx(BANDWIDTH, rel=0.05)


def test_missing_files_are_named(
    fit: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["fit", "--data", str(tmp_path)])
    assert fit.main() == 2
    assert "lacks compute/a100_llama3_8b_mlp.csv" in capsys.readouterr().err


def test_the_committed_figures_say_which_files_they_come_from(fit: ModuleType) -> None:
    names = {f"compute/{name}_mlp.csv" for name, _, _ in fit.COMPUTE}
    names |= {f"network/{name}.csv" for name, _, _ in fit.NETWORK}
    assert set(SHA256) == names
