"""With a host tier, ranks of every kind of grid compute what they compute without, and find more of it done.

A controller serves chats over documents that together exceed the device's pool several times. Ranks then run its steps, as
threads of this process that are connected by gloo. The run without a tier is the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from medha.api.replica import SchedulingSpec, ServiceClass
from medha.kv.context_parallel import ContextParallel, RingCosts
from medha.kv.prefix_cache import PrefixHasher
from medha.model.kv_dtype import KvDtype
from medha.scheduler.controller import ReplicaController
from medha.scheduler.replica_config import ReplicaConfig
from medha.topology import Topology
from medha.wire.messages import DiskTierFigures, HostTierFigures, Sampling, Step, Submit

from ..model.test_model_transformer import save_reference
from ..ranks import Ranks
from .grids import STRIPED_GRID_ROWS, model_of
from .test_controlled import GREEDY, MODEL, PROFILE, VOCAB, Life, Query

pytestmark = pytest.mark.timeout(400)

BLOCK_TOKENS, POOL_TOKENS = 4, 160
LEAST_BLOCKS = 8
"""Least blocks of a lane's pool, and of its host tier if there are files: a stripe has six."""
SAMPLED = Sampling(temperature=0.8, top_p=0.95, ignore_eos=True)
DOCUMENTS, TURNS = 4, 3
IN_PIECES = 1e-4
"""Seconds to fetch a block, so that a prefix comes with several steps beside which others decode."""
Answers = dict[str, list[int]]


def chats(life: Life, sampling: Sampling) -> dict[str, Query]:
    """Let a controller serve a few turns of a chat over each document, two requests at a time."""
    config, random = life.controller.config, Random(3)
    rng, hasher = np.random.default_rng(5), PrefixHasher(BLOCK_TOKENS, b"secret")
    history = [rng.integers(0, VOCAB, 60 + 10 * number) for number in range(DOCUMENTS)]
    asked: dict[str, Query] = {}
    for turn in range(TURNS):
        for number in range(DOCUMENTS):
            name = f"d{number}.t{turn}"
            history[number] = np.concatenate([history[number], rng.integers(0, VOCAB, random.randint(3, 9))])
            one = asked[name] = Query(name, history[number].astype(np.int32), random.randint(1, 4))
            assert len(one.ids) + 4 <= config.max_model_len
            while len(asked) - len(life.ends) > 2:
                life.move()
            life.handle(
                Submit(
                    name, name, len(one.ids), len(one.ids), seed=number,
                    sampling=replace(sampling, max_tokens=one.max_tokens), block_hashes=hasher.hashes(one.ids),
                )
            )  # fmt: skip
    while life.moving or len(life.ends) < len(asked):
        life.move()
    assert set(life.ends) == set(asked)
    assert set(life.ends.values()) == {"length"}
    return asked


def run(
    ranks: Ranks,
    sampling: Sampling,
    host_blocks: int,
    *,
    striped: bool = False,
    disk: Path | None = None,
    disk_blocks: int = 400,
    new_life: Callable[[ReplicaController, Random], Life] = Life,
    fetch_seconds: float = 1e-7,
    steps: list[Step] | None = None,
) -> tuple[Answers, dict[tuple[str, int], torch.Tensor], ReplicaController]:
    config = ReplicaConfig(
        topology=ranks.topology,
        scheduling=SchedulingSpec(max_chunk_tokens=32, min_chunk_tokens=4, max_running=8),
        service_classes={"default": ServiceClass(name="default", default_output_tokens=4)},
        default_class="default",
        max_model_len=150,
        block_size_tokens=BLOCK_TOKENS,
        kv_blocks=max(POOL_TOKENS // BLOCK_TOKENS // ranks.topology.kv, LEAST_BLOCKS),
        long_threshold_tokens=60,
        tokens_per_lane=24,
        context_parallel=ContextParallel("striped", RingCosts(8, 2)) if striped else None,
        host_tier=HostTierFigures(host_blocks, 1, fetch_seconds, 1e-7) if host_blocks else None,
        disk_tier=DiskTierFigures(disk_blocks, 1e-6, 1e-7) if disk else None,
    )
    life = new_life(ReplicaController(config, PROFILE), Random(1))
    asked = chats(life, sampling)
    if steps is not None:
        steps += life.steps
    samples, logits = ranks.run(
        life.steps,
        {one.prompt: one.ids for one in asked.values()},
        kv_blocks=config.kv_blocks,
        block_tokens=BLOCK_TOKENS,
        host_blocks=host_blocks,
        disk=disk,
    )
    answers: Answers = {name: [] for name in asked}
    for sample in samples:
        answers[sample.id].append(sample.token)
    return answers, logits, life.controller


@pytest.mark.parametrize(
    ("shape", "architecture", "kv_dtype", "striped"),
    [
        pytest.param((1, 1, 1), "llama", "auto", False, id="one rank"),
        pytest.param((2, 1, 1), "llama-biased", "auto", False, id="TP2", marks=pytest.mark.long),
        pytest.param((1, 2, 1), "mistral", "auto", False, id="SPP2", marks=pytest.mark.long),
        pytest.param((1, 1, 2), "qwen3", "auto", False, id="KVP2", marks=pytest.mark.long),
        pytest.param((1, 1, 2), "qwen3", "auto", True, id="KVP2, striped"),
        pytest.param((1, 1, 1), "deepseek_v2", "auto", False, id="one rank, latents"),
        pytest.param(
            (2, 1, 2), "deepseek_v2", "auto", False, id="TP2 x KVP2, latents", marks=pytest.mark.long
        ),
        pytest.param((1, 2, 2), "llama", "auto", False, id="SPP2 x KVP2", marks=pytest.mark.long),
        pytest.param((1, 1, 1), "llama", "fp8", False, id="one rank, FP8", marks=pytest.mark.long),
    ],
)
def test_texts_are_those_without_a_tier_and_less_is_computed(
    shape: tuple[int, int, int], architecture: str, kv_dtype: KvDtype, striped: bool, tmp_path: Path
) -> None:
    has_latents = architecture.startswith("deepseek")  # then all heads have keys of their own
    sizes = MODEL | ({"num_key_value_heads": 4} if has_latents else {"head_dim": 16})
    save_reference(tmp_path, architecture, **sizes)
    # Rounded to FP8, a number may become the other one of two where another chunk computed it.
    tolerance = 1e-4 if kv_dtype == "auto" else 0.05
    compare(Ranks(Topology(*shape), tmp_path, kv_dtype=kv_dtype), tolerance, striped=striped)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((1, 1, 1), id="one rank"),
        pytest.param((2, 2, 1), id="TP2 x SPP2", marks=pytest.mark.long),
    ],
)
def test_with_batch_invariance_logits_are_those_without_a_tier_to_the_bit(
    shape: tuple[int, int, int], tmp_path: Path
) -> None:
    save_reference(tmp_path, "llama", **MODEL, head_dim=16)
    compare(Ranks(Topology(*shape), tmp_path, determinism="batchInvariant"), 0.0, striped=False)


@pytest.mark.parametrize(("grid", "striped"), STRIPED_GRID_ROWS)
def test_texts_are_those_without_a_tier_on_every_grid(grid: Topology, striped: bool, tmp_path: Path) -> None:
    save_reference(tmp_path, "llama", **model_of(grid))
    compare(Ranks(grid, tmp_path), 1e-4, striped=striped)


def compare(ranks: Ranks, tolerance: float, *, striped: bool) -> None:
    """Compare texts, logits and what is computed with those without a tier."""
    topology = ranks.topology
    few_blocks = 25 if topology.kv <= 2 else 40 // topology.kv
    try:
        cases = ((GREEDY, 400, 1e-7), (SAMPLED, 400, IN_PIECES), (GREEDY, few_blocks, 1e-7))
        for sampling, host_blocks, seconds in cases:
            texts, logits, without = run(ranks, sampling, 0, striped=striped)
            steps: list[Step] = []
            found, fetched, controller = run(
                ranks, sampling, host_blocks, striped=striped, fetch_seconds=seconds, steps=steps
            )
            assert found == texts
            computed = [{entry.id for entry in step.entries} for step in steps]
            comes_before = [
                one.id not in ids for step, ids in zip(steps, computed, strict=True) for one in step.fetches
            ]
            # A lane of several has less of a prompt. With many stages, few steps decode, and only beside decodes do
            # copies come in pieces.
            if seconds == IN_PIECES and topology.kv == 1 and topology.stream <= 2:
                assert any(comes_before)
            for at in fetched.keys() & logits.keys():
                assert float((fetched[at] - logits[at]).abs().max()) <= tolerance, at
            if topology.kv == 1:
                assert fetched.keys() < logits.keys()
            else:  # requests may lie on other lanes than without a tier, and share another part of their KV
                assert len(fetched) < len(logits)
            counts = controller.pools.tier_counts
            assert counts.fetched_blocks > 0
            assert (counts.dropped_blocks > 0) == (host_blocks == few_blocks)
            assert without.pools.tier_counts.offloaded_blocks == 0
            for tier in controller.pools.tiers:
                tier.check()
    finally:
        ranks.close()
