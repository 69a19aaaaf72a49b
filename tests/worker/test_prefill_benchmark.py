"""`benchmarks/prefill.py` records every operator of a step under the name of a part."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmark import benchmark
from medha_worker.checkpoints.presets import init_checkpoint
from medha_worker.model.model_config import ModelConfig

from .models import load_model


def test_the_shares_of_a_prefill_name_all_parts(tmp_path: Path) -> None:
    init_checkpoint(tmp_path / "tiny", preset="tiny", seed=0)
    model = load_model(tmp_path / "tiny", ModelConfig.from_directory(tmp_path / "tiny"))
    shares = benchmark("prefill").Bench(model, 64).breakdown(64, 32)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert all(0.0 < share < 1.0 for share in shares.values()), shares
