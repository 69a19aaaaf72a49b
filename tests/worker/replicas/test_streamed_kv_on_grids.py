"""A request larger than the KV pools is streamed from host memory, and has the text and the logits of a pool that holds it.

A controller serves it among small requests. Ranks then run its steps, as threads of this process that are connected by
gloo. The same requests on pools that hold everything are the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from medha.api.replica import SchedulingSpec, ServiceClass
from medha.kv.prefix_cache import PrefixHasher
from medha.model.kv_dtype import KvDtype
from medha.scheduler.controller import ReplicaController
from medha.scheduler.replica_config import ReplicaConfig
from medha.topology import Topology
from medha.wire.messages import HostTierFigures, Sampling, StreamingFigures, Submit

from ..model.test_model_transformer import save_reference
from ..ranks import Ranks
from .grids import GRID_ROWS, model_of
from .late_copies import make_copies_late
from .test_controlled import GREEDY, MODEL, PROFILE, VOCAB, Life

pytestmark = pytest.mark.timeout(400)

BLOCK_TOKENS = 4
POOL_BLOCKS, STREAMED_BLOCKS, AMPLE_BLOCKS = (
    12,
    45,
    120,
)  # of all lanes together, unless a lane then has too few
LEAST_POOL_BLOCKS, LEAST_AMPLE_BLOCKS = 6, 40  # of a lane: a small request, and parts of the long ones
SAMPLED = Sampling(temperature=0.8, top_p=0.95, ignore_eos=True)
SHORT_PROMPTS = {"a": 9, "b": 17, "c": 12, "d": 40}
USUAL = ("long", "a", "b", "again", "c")
Logits = dict[tuple[str, int], torch.Tensor]


def prompt_tokens(lanes: int) -> dict[str, int]:
    """Return the lengths of the prompts; the long ones exceed what the pools of so many lanes hold."""
    pool_tokens = lanes * max(POOL_BLOCKS // lanes, LEAST_POOL_BLOCKS) * BLOCK_TOKENS
    return {"long": pool_tokens + 102, "again": pool_tokens + 82, **SHORT_PROMPTS}


def run(
    ranks: Ranks,
    sampling: Sampling,
    *,
    streams: bool,
    in_place: bool = True,
    prompts: Sequence[tuple[str, str]] = tuple((name, name) for name in USUAL),
    host_blocks: int = 0,
    pool_blocks: int = POOL_BLOCKS,
    short_headroom: float = 0.05,
) -> tuple[dict[str, list[int]], Logits, ReplicaController]:
    """Let a controller serve requests, each with the prompt of one in `prompt_tokens`; those called `then` come when all before have ended, and `beside` once the long one decodes."""
    lanes = ranks.topology.kv
    lengths = prompt_tokens(lanes)
    config = ReplicaConfig(
        topology=ranks.topology,
        scheduling=SchedulingSpec(
            max_chunk_tokens=32, min_chunk_tokens=4, max_running=8, short_headroom=short_headroom
        ),
        service_classes={"default": ServiceClass(name="default", default_output_tokens=4)},
        default_class="default",
        max_model_len=lengths["long"] + 50,
        block_size_tokens=BLOCK_TOKENS,
        kv_blocks=max(pool_blocks // lanes, LEAST_POOL_BLOCKS)
        if streams
        else max(AMPLE_BLOCKS // lanes, LEAST_AMPLE_BLOCKS),
        long_threshold_tokens=60,
        tokens_per_lane=-(-lengths["long"] // lanes),
        streaming=StreamingFigures(STREAMED_BLOCKS // lanes, 1, 1e-6) if streams else None,
        host_tier=HostTierFigures(host_blocks, 1, 1e-7, 1e-7) if host_blocks else None,
    )
    life = Life(ReplicaController(config, PROFILE), Random(1))
    rng, hasher = np.random.default_rng(5), PrefixHasher(BLOCK_TOKENS, b"secret")
    texts = {name: rng.integers(0, VOCAB, tokens).astype(np.int32) for name, tokens in lengths.items()}
    asked = {name: texts[text] for name, text in prompts}
    for number, (name, ids) in enumerate(asked.items()):
        while life.moving and (name.startswith("then ") or (name == "beside" and "long" not in life.sampled)):
            life.move()
        life.handle(
            Submit(
                name, name, len(ids), len(ids), seed=number, sampling=replace(sampling, max_tokens=7),
                block_hashes=hasher.hashes(ids),
            )
        )  # fmt: skip
    while life.moving or len(life.ends) < len(asked):
        life.move()
    assert life.ends == dict.fromkeys(asked, "length")
    samples, logits = ranks.run(
        life.steps,
        asked,
        kv_blocks=config.kv_blocks,
        block_tokens=BLOCK_TOKENS,
        streamed_blocks=0 if config.streaming is None else config.streaming.blocks,
        streams_in_place=in_place,
        host_blocks=host_blocks,
    )
    answers: dict[str, list[int]] = {name: [] for name in asked}
    for sample in samples:
        answers[sample.id].append(sample.token)
    fetching = [step for step in life.steps if step.fetches]
    assert bool(fetching) == bool(host_blocks and streams)
    if fetching:  # and computed what they fetched, in a step with the one that streams
        assert any({"long", step.fetches[0].id} <= {entry.id for entry in step.entries} for step in fetching)
    return answers, logits, life.controller


@pytest.mark.parametrize(
    ("shape", "architecture", "kv_dtype"),
    [
        pytest.param((1, 1, 1), "llama", "auto", id="one rank", marks=pytest.mark.long),
        pytest.param((2, 1, 1), "llama-biased", "auto", id="TP2", marks=pytest.mark.long),
        pytest.param((1, 2, 1), "mistral", "auto", id="SPP2", marks=pytest.mark.long),
        pytest.param((1, 1, 2), "qwen3", "auto", id="KVP2", marks=pytest.mark.long),
        pytest.param((1, 2, 2), "llama", "auto", id="SPP2 x KVP2", marks=pytest.mark.long),
        pytest.param((2, 1, 2), "qwen2", "auto", id="TP2 x KVP2", marks=pytest.mark.long),
        pytest.param((1, 1, 1), "deepseek_v2", "auto", id="one rank, latents", marks=pytest.mark.long),
        pytest.param((1, 1, 1), "llama", "fp8", id="one rank, FP8", marks=pytest.mark.long),
        pytest.param((1, 1, 1), "mistral-window", "auto", id="one rank, windows", marks=pytest.mark.long),
        pytest.param((1, 1, 2), "mistral-window", "auto", id="KVP2, windows", marks=pytest.mark.long),
    ],
)
def test_the_text_is_that_of_a_pool_which_holds_everything(
    shape: tuple[int, int, int], architecture: str, kv_dtype: KvDtype, tmp_path: Path
) -> None:
    has_latents = architecture.startswith("deepseek")  # then all heads have keys of their own
    sizes = MODEL | ({"num_key_value_heads": 4} if has_latents else {"head_dim": 16})
    save_reference(tmp_path, architecture, **sizes)
    ranks = Ranks(Topology(*shape), tmp_path, kv_dtype=kv_dtype)
    # Rounded to FP8, a number may become the other one of two where another chunk computed it.
    tolerance = 1e-4 if kv_dtype == "auto" else 0.05
    try:
        for sampling in (GREEDY, SAMPLED):
            compare(ranks, sampling, (True, False), tolerance)
    finally:
        ranks.close()


@pytest.mark.parametrize("grid", GRID_ROWS)
def test_the_text_is_that_of_a_pool_which_holds_everything_on_every_grid(
    grid: Topology, tmp_path: Path
) -> None:
    save_reference(tmp_path, "qwen3", **model_of(grid))
    ranks = Ranks(grid, tmp_path)
    try:
        for sampling in (GREEDY, SAMPLED):
            compare(ranks, sampling, (True, False), 1e-4)
    finally:
        ranks.close()


def test_sampled_text_on_two_lanes_is_that_of_pools_which_hold_everything(tmp_path: Path) -> None:
    save_reference(tmp_path, "qwen3", **(MODEL | {"head_dim": 16, "num_hidden_layers": 2}))
    ranks = Ranks(Topology(1, 1, 2), tmp_path)
    try:
        compare(ranks, SAMPLED, (False,), 1e-4)
    finally:
        ranks.close()


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "copied"])
def test_what_comes_from_a_host_tier_beside_a_streamed_request_is_there_in_time(
    in_place: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_copies_late(monkeypatch)
    save_reference(tmp_path, "llama", **MODEL)
    ranks = Ranks(Topology(1, 1, 1), tmp_path)
    prompts = (("b", "b"), ("then d", "d"), ("long", "long"), ("beside", "b"), ("c", "c"))
    try:
        wanted, logits, _ = run(ranks, SAMPLED, streams=False, prompts=prompts)
        texts, found, _ = run(
            ranks,
            SAMPLED,
            streams=True,
            in_place=in_place,
            prompts=prompts,
            host_blocks=80,
            pool_blocks=30,
            short_headroom=0.25,
        )
        assert texts == wanted
        for at in found.keys() & logits.keys():
            assert float((found[at] - logits[at]).abs().max()) <= 1e-4, at
    finally:
        ranks.close()


def compare(ranks: Ranks, sampling: Sampling, in_place: tuple[bool, ...], tolerance: float) -> None:
    """Compare texts, logits and what is left with those of ample pools."""
    texts, logits, _ = run(ranks, sampling, streams=False)
    for is_in_place in in_place:
        found, streamed, controller = run(ranks, sampling, streams=True, in_place=is_in_place)
        assert found == texts
        assert streamed.keys() == logits.keys()
        for at, wanted in logits.items():
            assert float((streamed[at] - wanted).abs().max()) <= tolerance, at
        for lane in range(ranks.topology.kv):
            ledger = controller.pools.ledger(lane)
            ledger.check()
            assert ledger.held_blocks == 0
            assert ledger.free_streamed_blocks == ledger.streamed_blocks
