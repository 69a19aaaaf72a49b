"""Run the race in Triton on tensors that say that they are on a GPU, and compare the winners with plain torch's.

It prints a line of JSON for each size that is equal.

    python -m ttsem.sanitize tests/worker/kernels/race_on_cuda.py -- MODULE

`ttsem` calls `main`, and executes what Triton compiles MODULE's kernel to, on a CPU. `test_triton_ir.py` runs this.
"""

from __future__ import annotations

import importlib
import json
import sys

import torch

from medha_worker.kernels.torch_race import DenseRace

SIZES = ((3, 7), (2, 1024), (2, 3001), (5, 2049))
"""Rows, and tokens of the vocabulary: less than one program's, just one's, and several."""


def main() -> None:
    race = importlib.import_module(sys.argv[-1]).TritonRace()
    random = torch.Generator().manual_seed(0)
    for rows, vocab in SIZES:
        scores = torch.randn(rows, vocab, dtype=torch.float64, generator=random) * 3
        scores -= scores.amax(1, keepdim=True)
        scores[scores < -6] = -float("inf")
        keys = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=random)
        wanted = DenseRace().winners(scores.clone(), keys)
        found = race.winners(scores.to("cuda"), keys.to("cuda")).cpu()
        assert torch.equal(found, wanted), f"other winners: {found.tolist()}, not {wanted.tolist()}"
        compared = {"rows": rows, "vocab": vocab, "winners": found.numel()}
        print(json.dumps(compared | {"largest_difference": int((found - wanted).abs().max())}))
