"""Ranks round subnormal numbers to 0, which a CPU takes many times as long for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from medha.api.replica import MedhaReplicaSpec
from medha_process.part_settings import RankSettings

# The process of a rank, which counts products that are not 0 on both threads of torch, and on one as compiled kernels have.
PROGRAM = """
import sys, threading
import torch
from medha_worker.rank import process

def count_products(numbers):
    print((torch.full((numbers,), 1e-39) * 1.0).count_nonzero().item())

class Counting:
    def __init__(self, settings): ...
    def stop(self): ...
    def close(self): ...
    def run(self):
        torch.set_num_threads(2)
        count_products(1 << 20)
        thread = threading.Thread(target=count_products, args=(4,))
        thread.start()
        thread.join()

process.Rank = Counting
process.main(["--settings", sys.argv[1]])
"""


def test_every_thread_of_a_rank_rounds_subnormal_numbers_to_0(tmp_path: Path) -> None:
    model = {"model": {"name": "m", "source": {"path": str(tmp_path)}}}
    settings = RankSettings(
        rank=0,
        spec=MedhaReplicaSpec.model_validate(model),
        model_directory=tmp_path,
        control="",
        tokens="",
        key_file=tmp_path,
        controller_key_file=tmp_path,
    )
    file = tmp_path / "rank.json"
    file.write_text(settings.model_dump_json())
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "0"]
