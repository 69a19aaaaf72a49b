"""A rank of a served grid whose state parts from the controller's costs an epoch: no process, and no text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from medha.scheduler.controller import STATE_HASH_EVERY_STEPS

from .conftest import MODEL, free_port, start, stop, write_manifest
from .test_failures import BODY, processes, streamed

FORK = """
import sys

if any(argument.endswith("/rank-1.json") for argument in sys.orig_argv):
    from medha_worker.rank.executor import Executor

    plan, steps = Executor.plan, 0

    def forked(self, step):
        global steps
        steps += bool(step.entries)
        if steps == 200:
            steps += 1
            print(f"parts in step {step.step_id} of epoch {step.epoch}", flush=True)
            assert self.ledger.reserve("of nobody", 1)
        return plan(self, step)

    Executor.plan = forked
"""
"""Python runs it as each process begins; that of rank 1 takes a block of KV which nobody has given to anybody."""


@pytest.mark.long
@pytest.mark.parametrize("parallelism", [{"kv": 2}, {"stream": 2}])
def test_a_fork_of_one_rank_ends_its_epoch_soon_and_nothing_else(
    parallelism: dict[str, int], checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(FORK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    port = free_port()
    model = {"name": MODEL, "source": {"path": str(checkpoint)}, "maxModelLen": 4096}
    manifest = write_manifest(
        tmp_path / "grid.yaml", checkpoint, port, model=model, parallelism=parallelism,
        kvCache={"size": "16Mi", "tokensPerLane": 64},
    )  # fmt: skip
    served = start(manifest, port, checkpoint)
    try:
        ranks = [process.pid for process in processes(served, "medha_worker.rank")]
        text = streamed(served, 400, BODY)  # parts somewhere in here
        assert streamed(served, 400, BODY) == text
        assert [process.pid for process in processes(served, "medha_worker.rank")] == ranks
    finally:
        stop(served)
    printed = "".join(served.lines)
    (step,) = re.findall(r"parts in step (\d+) of epoch 0", printed)
    found = re.findall(r"step (\d+): .* disagree: the ledgers differ", printed)
    assert found, printed
    assert int(step) <= int(found[0]) < int(step) + STATE_HASH_EVERY_STEPS
