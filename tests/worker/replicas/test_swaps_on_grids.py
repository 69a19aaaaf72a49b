"""On every kind of grid, requests that step aside come back exact, whether their KV is kept in the host tier or not.

A pool that holds everything gives the texts. Then a pool so small that long requests step aside serves the same requests:
for the deadlines of chats, and because answers outgrow their KV. Every token that ranks sample, also those that a
controller drops, is the same, and the logits of each position are within rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from medha.api.replica import SchedulingSpec, ServiceClass
from medha.kv.prefix_cache import HASH_CHARACTERS, PrefixHasher
from medha.scheduler.controller import ReplicaController
from medha.scheduler.replica_config import ReplicaConfig
from medha.topology import Topology
from medha.wire.messages import Done, HostTierFigures, Sampling, Step, Submit

from ..model.test_model_transformer import save_reference
from ..ranks import Ranks
from .grids import GRID_ROWS, model_of
from .test_controlled import GREEDY, MODEL, PROFILE, VOCAB, Life, Query

pytestmark = pytest.mark.timeout(400)

BLOCK_TOKENS = 4
LONG_OUTPUT, LANE_TOKENS = 44, 52
PER_TURN = 3  # a long request and two chats
SAMPLED = Sampling(temperature=0.8, top_p=0.95, ignore_eos=True)
HASHER = PrefixHasher(BLOCK_TOKENS, b"secret")
Texts = dict[str, list[int]]


@dataclass
class Told(Life):
    """A controller whose ranks sample given texts, and that hashes them, as a controller's process does."""

    texts: Texts = field(default_factory=dict)  # prompts and outputs
    lengths: dict[str, int] = field(default_factory=dict)

    def outcome(self, step: Step) -> Done:
        hashes = []
        for entry in step.entries:
            last = entry.extents[-1]
            known = last.start + (last.count - 1) * last.stride + 2  # with the token that it samples
            if entry.samples and known % BLOCK_TOKENS == 0 and known <= len(self.texts.get(entry.id, ())):
                ids = np.array(self.texts[entry.id][:known], dtype=np.int32)
                hashes.append((entry.id, HASHER.hashes(ids)[-HASH_CHARACTERS:]))
        return replace(super().outcome(step), block_hashes=tuple(hashes))


def pool_tokens(lanes: int) -> int:
    """Return the tokens of a lane's pool that is small: a long request leaves no place for a chat there."""
    return 160 if lanes == 1 else 80


def queries(lanes: int) -> list[Query]:
    """Return two long requests, which take a part of each lane, and chats, in the order in which they come."""
    rng, found = np.random.default_rng(5), []
    long_tokens = max(104, LANE_TOKENS * lanes)
    for turn in range(2):
        found.append(Query(f"long{turn}", rng.integers(0, VOCAB, long_tokens).astype(np.int32), LONG_OUTPUT))
        for number in range(PER_TURN - 1):
            ids = rng.integers(0, VOCAB, 50 + 5 * number).astype(np.int32)
            found.append(Query(f"chat{turn}.{number}", ids, 9))
    return found


def serve(life: Told, sampling: Sampling) -> None:
    """Let chats come when a long request has sampled a part of its text."""
    asked = queries(life.controller.config.topology.kv)
    for number, one in enumerate(asked):
        long = f"long{number // PER_TURN}"
        while one.prompt != long and life.sampled.get(long, 0) < LONG_OUTPUT // 2:
            life.move()
        life.handle(
            Submit(
                one.prompt, one.prompt, len(one.ids), len(one.ids), seed=number,
                sampling=replace(sampling, max_tokens=one.max_tokens), block_hashes=HASHER.hashes(one.ids),
            )
        )  # fmt: skip
    while len(life.ends) < len(asked):
        life.move()
    while life.moving:
        life.move()
    assert set(life.ends.values()) == {"length"}


def run(
    ranks: Ranks, sampling: Sampling, lane_tokens: int, host_blocks: int, max_swaps: int, texts: Texts
) -> tuple[Texts, dict[tuple[str, int], torch.Tensor], Told]:
    """Serve the requests and return their texts, logits by position, and what the controller decided.

    The pool of each lane has `lane_tokens` tokens.
    """
    asked = queries(ranks.topology.kv)
    config = ReplicaConfig(
        topology=ranks.topology,
        scheduling=SchedulingSpec(
            max_chunk_tokens=32, min_chunk_tokens=4, max_running=8, max_swaps=max_swaps, max_step_seconds=0.05,
            short_headroom=0.0,
        ),
        service_classes={
            "default": ServiceClass(
                name="default", default_output_tokens=4, ttft_floor_seconds=0.2, tpot_target_seconds=0.3
            )
        },
        default_class="default",
        max_model_len=LANE_TOKENS * ranks.topology.kv + 100,
        block_size_tokens=BLOCK_TOKENS,
        kv_blocks=lane_tokens // BLOCK_TOKENS,
        long_threshold_tokens=90,
        tokens_per_lane=LANE_TOKENS,
        host_tier=HostTierFigures(host_blocks, 1, 1e-7, 1e-7) if host_blocks else None,
    )  # fmt: skip
    life = Told(ReplicaController(config, PROFILE), Random(1), texts=texts)
    serve(life, sampling)
    prompts = {one.prompt: one.ids for one in asked}
    for aside in life.asides.values():
        prompts[aside.prompt] = np.array(texts[aside.id][: aside.tokens], dtype=np.int32)
    samples, logits = ranks.run(
        life.steps, prompts, kv_blocks=config.kv_blocks, block_tokens=BLOCK_TOKENS, host_blocks=host_blocks
    )
    places = [  # samples come lane after lane
        (entry.id, entry.extents[-1].start + entry.extents[-1].count)
        for lane in range(ranks.topology.kv)
        for step in life.steps
        for entry in step.entries
        if entry.samples and entry.lane == lane
    ]
    sampled: dict[tuple[str, int], int] = {}
    for sample, place in zip(samples, places, strict=True):
        assert sample.id == place[0]
        assert sampled.setdefault(place, sample.token) == sample.token, f"{place} was sampled twice"
    found = {}
    for one in asked:
        ends = range(len(one.ids), len(one.ids) + (one.max_tokens or 0))
        found[one.prompt] = [*one.ids.tolist(), *(sampled.pop((one.prompt, end)) for end in ends)]
    assert not sampled
    return found, logits, life


@pytest.mark.parametrize(
    ("shape", "architecture"),
    [
        pytest.param((1, 1, 1), "llama", id="one rank"),
        pytest.param((2, 2, 1), "mistral", id="TP2 x SPP2", marks=pytest.mark.long),
        pytest.param((1, 1, 2), "qwen3", id="KVP2", marks=pytest.mark.long),
    ],
)
def test_texts_are_those_of_a_pool_that_holds_everything(
    shape: tuple[int, int, int], architecture: str, tmp_path: Path
) -> None:
    save_reference(tmp_path, architecture, **MODEL, head_dim=16)
    compare(Ranks(Topology(*shape), tmp_path))


@pytest.mark.parametrize("grid", GRID_ROWS)
def test_texts_are_those_of_a_pool_that_holds_everything_on_every_grid(
    grid: Topology, tmp_path: Path
) -> None:
    save_reference(tmp_path, "llama-biased", **model_of(grid))
    compare(Ranks(grid, tmp_path))


def compare(ranks: Ranks) -> None:
    """Compare texts and logits of a small pool with those of one that holds everything."""
    try:
        for sampling, tiers in ((GREEDY, (400, 12, 0)), (SAMPLED, (400,))):
            small_tokens = pool_tokens(ranks.topology.kv)
            texts, expected, whole = run(ranks, sampling, 10 * small_tokens, 0, 0, {})
            assert not whole.asides
            for host_blocks in tiers:
                found, logits, life = run(ranks, sampling, small_tokens, host_blocks, 2, texts)
                assert found == texts
                for at in logits.keys() & expected.keys():
                    assert float((logits[at] - expected[at]).abs().max()) <= 1e-4, at
                assert life.controller.long_swaps > 0
                assert {aside.id for aside in life.asides.values()} & {"long0", "long1"}
                counts = life.controller.pools.tier_counts
                assert (counts.swapped_out_blocks > 0) == (host_blocks > 0)
                assert (counts.swapped_in_blocks > 0) == (host_blocks > 0)
    finally:
        ranks.close()
