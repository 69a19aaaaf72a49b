"""What a hundred replicas cost the API server; the rates are those of `benchmarks/operator_scale.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmark import benchmark
from cluster.conftest import skipping_what_cannot_run

pytestmark = pytest.mark.timeout(240)


@pytest.mark.long
def test_a_new_replica_costs_one_write_for_each_object_one_status_and_one_read(tmp_path: Path) -> None:
    scale = benchmark("operator_scale")
    with skipping_what_cannot_run():
        row = scale.measure_writes(tmp_path, 100, 1)
    assert row["objects_per_replica"] == 8  # two StatefulSets, and six that there is one of
    assert row["calls_per_replica"] <= row["objects_per_replica"] + scale.MOST_FURTHER_CALLS
