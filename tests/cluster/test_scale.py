"""What a hundred replicas cost the API server; the rates are those of `benchmarks/operator_scale.py`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from cluster.conftest import skipping_what_cannot_run

pytestmark = pytest.mark.timeout(240)
BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "operator_scale.py"


def test_a_new_replica_costs_one_write_for_each_object_one_status_and_one_read(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("operator_scale", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    with skipping_what_cannot_run():
        row = benchmark.measure_writes(tmp_path, 100, 1)
    assert row["objects_per_replica"] == 8  # two StatefulSets, and six that there is one of
    assert row["calls_per_replica"] <= row["objects_per_replica"] + benchmark.MOST_FURTHER_CALLS
