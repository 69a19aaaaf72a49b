"""Memory that runs out on one rank of a grid ends the request that needs it, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from medha.messages import Admit, Done, Extent, Sampling, Step, StepEntry, Tokens
from medha.topology import Topology
from medha_worker.executor import Executor

from .ranks import Ranks
from .test_model_transformer import save_reference

GREEDY = Sampling(temperature=0.0, ignore_eos=True)
LARGE = 40  # rows of one sequence
BLOCK_TOKENS, KV_BLOCKS = 4, 32


class Tight:
    """Attention of a rank whose memory does not hold what one of `LARGE` rows needs."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def plan(self, spans: Any, block_tokens: int) -> Any:
        planned = self._backend.plan(spans, block_tokens)
        return TightStep(planned) if any(span.row_count >= LARGE for span in spans) else planned


class TightStep:
    def __init__(self, planned: Any) -> None:
        self._planned = planned

    def attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Any:
        self._planned.attend(q, keys, values)
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 byte")


@pytest.fixture(params=[(2, 1, 1), (1, 2, 1), (2, 2, 1)], ids=["TP2", "SPP2", "TP2 x SPP2"])
def ranks(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ranks]:
    save_reference(tmp_path, "llama")
    ranks = Ranks(Topology(*request.param), tmp_path)
    yield ranks
    ranks.close()


def admit(name: str, tokens: int) -> Admit:
    return Admit(name, name, tokens, tokens, seed=1, sampling=GREEDY, reserved_tokens=tokens + 4)


def entry(name: str, start: int, count: int, *, samples: bool = True) -> StepEntry:
    return StepEntry(name, 0, (Extent(start, count),), samples)


def steps(*, large: bool) -> list[Step]:
    """A small request decodes while a large prompt comes in two chunks; another small one takes its KV later.

    The second chunk is in flight when the first one's failure is known: whatever comes of it is dropped.
    """
    first = [entry("small", 0, 9)] + ([entry("large", 0, LARGE, samples=False)] if large else [])
    second = [entry("small", 9, 1)] + ([entry("large", LARGE, 20)] if large else [])
    return [
        Step(
            0, 0, tuple(first), admits=(admit("small", 9), *([admit("large", LARGE + 20)] if large else []))
        ),
        Step(1, 0, tuple(second)),
        Step(
            2,
            0,
            (entry("small", 10, 1), entry("after", 0, 30)),
            releases=("large",) if large else (),
            admits=(admit("after", 30),),
        ),
        Step(3, 0, (entry("small", 11, 1), entry("after", 30, 1))),
    ]


def run(ranks: Ranks, *, large: bool, tight_rank: int | None) -> list[Done]:
    """What the drawing rank reports of each step."""
    ids = {
        name: np.random.default_rng(len(name)).integers(0, 100, 64).astype(np.int32)
        for name in ("small", "large", "after")
    }
    ranks._meet()

    def work(rank: int) -> list[Done]:
        grid = ranks._grids[rank]
        model = ranks._models[rank].in_grid(grid.tensor_group, grid)
        if rank == tight_rank:
            tight: Any = Tight(model.kernels.attention)
            model.kernels = type(model.kernels)(attention=tight, rows=model.kernels.rows)
        executor = Executor(
            model, model.new_kv_cache(KV_BLOCKS, BLOCK_TOKENS), vocab_size=100, eos_token_ids=(),
            clock=lambda: 0.0, pipeline=grid,
        )  # fmt: skip
        reported = []
        for step in steps(large=large):
            executor.prepare(step)
            for name in executor.missing_prompts(step):
                tokens = next(one.tokens for one in step.admits if one.prompt == name)
                executor.add_tokens(Tokens(prompt=name, offset=0, total=tokens), ids[name][:tokens])
            done = executor.execute(step)
            assert done is not None
            reported.append(done)
        return reported

    reports: list[list[Done]] = ranks.on_all(work)
    return reports[ranks._grids[0].drawing_rank]


def test_only_the_sequence_that_does_not_fit_fails_and_what_takes_its_blocks_is_whole(ranks: Ranks) -> None:
    expected = run(ranks, large=False, tight_rank=None)
    assert all(done.failures == () for done in run(ranks, large=True, tight_rank=None))
    for tight_rank in range(ranks.topology.ranks):
        found = run(ranks, large=True, tight_rank=tight_rank)
        failed = [[one.id for one in done.failures] for done in found]
        assert failed[0] == ["large"]
        assert failed[2:] == [[], []]
        for done, alone in zip(found, expected, strict=True):
            drawn = [(one.id, one.token) for one in done.samples if one.id != "large"]
            assert drawn == [(one.id, one.token) for one in alone.samples]
