"""Every shape of grid computes the logits of `transformers`, whoever computes and whoever holds what.

Steps are written here, at random, and run by real ranks: they meet over gloo, as threads of this process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medha.context_parallel import OWNER, PASS_KV, PASS_Q, balanced, striped
from medha.messages import Admit, Extent, Grow, Sampling, Step, StepEntry
from medha.pools import KvPools, Placed
from medha.prefix import PrefixHasher
from medha.topology import Topology

from .ranks import Ranks
from .test_model_transformer import save_reference

TOLERANCE = 1e-4
BLOCK_TOKENS = 4
KV_BLOCKS = 256
VOCAB = 160
GREEDY = Sampling(temperature=0.0, ignore_eos=True)

ARCHITECTURES = ("llama", "llama-biased", "mistral", "qwen2", "qwen3")
# Eight stages need as many layers, eight tensor ranks as many heads: four times as many as there are KV heads.
SIZES = {"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2, "initializer_range": 0.1}

POWERS = (1, 2, 4, 8)
SHAPES = [shape for shape in product(POWERS, repeat=3) if np.prod(shape) <= 8]
# Each pair of sizes that fits eight ranks occurs, and so does each architecture.
PAIRWISE = [
    ((2, 2, 2), "llama"),
    ((1, 2, 4), "qwen3"),
    ((4, 1, 2), "qwen2"),
    ((1, 8, 1), "mistral"),
    ((8, 1, 1), "llama-biased"),
    ((1, 1, 8), "llama"),
    ((1, 4, 2), "llama-biased"),
    ((2, 4, 1), "qwen2"),
    ((4, 2, 1), "qwen3"),
    ((2, 1, 4), "mistral"),
]

CASES = [
    pytest.param((shape, architecture, 16 // max(shape[0], 2)), id=f"{Topology(*shape)} {architecture}")
    for shape, architecture in PAIRWISE  # fewer examples where many all-reduces share two cores
] + [
    pytest.param(
        (shape, ARCHITECTURES[index % len(ARCHITECTURES)], 40),
        id=f"{Topology(*shape)} long",
        marks=pytest.mark.long,
    )
    for index, shape in enumerate(SHAPES)
]

Cut = Callable[[int, int, int], list[tuple[Extent, ...]]]
STRATEGIES: tuple[tuple[str, Cut], ...] = (
    (OWNER, balanced),
    (PASS_KV, balanced),
    (PASS_Q, balanced),
    (PASS_KV, striped),
    (PASS_Q, striped),
)


@dataclass(frozen=True)
class Asked:
    """A prompt, and how much is drawn behind it. Prompts of one family begin alike; a fork has another's prompt."""

    prompt_tokens: int
    output_tokens: int
    family: int = 0
    fork: bool = False


@dataclass
class Running:
    name: str
    asked: Asked
    prompt: str
    computed: int
    strategies: list[tuple[str, Cut]]
    there: int = 0  # computed by others

    @property
    def length(self) -> int:
        """Positions that will have been computed when it ends: the last token drawn is not."""
        return self.asked.prompt_tokens + self.asked.output_tokens - 1


@dataclass
class Planner:
    """Writes steps: the replica's ledgers are real, what goes into a step is a matter of chance."""

    lanes: int
    tokens_per_lane: int
    deals: bool
    rng: np.random.Generator
    kv_blocks: int = KV_BLOCKS
    chunks: tuple[int, ...] = ()  # of each prompt, one per step; none: of any size, at any step
    joined: int = 0  # grows on to a further lane
    steps: list[Step] = field(default_factory=list)
    prompts: dict[str, npt.NDArray[np.int32]] = field(default_factory=dict)
    running: list[Running] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pools = KvPools(
            lanes=self.lanes,
            kv_blocks=self.kv_blocks,
            block_size_tokens=BLOCK_TOKENS,
            tokens_per_lane=self.tokens_per_lane,
            deals_prompts=self.deals,
        )
        self.hasher = PrefixHasher(BLOCK_TOKENS, b"secret")

    def admit(self, asked: Asked, strategies: list[tuple[str, Cut]]) -> Admit:
        """Give a request its KV: shared with one of the same prompt, cached, or new."""
        name = f"r{len(self.prompts)}"
        parent = next(
            (one for one in self.running if asked.fork and one.computed >= one.asked.prompt_tokens), None
        )
        if parent is not None:
            asked = Asked(parent.asked.prompt_tokens, asked.output_tokens, parent.asked.family)
            self.prompts[name] = self.prompts[parent.name]
        else:
            ids = np.random.default_rng(asked.family).integers(0, VOCAB, asked.prompt_tokens)
            self.prompts[name] = ids.astype(np.int32)
        reserved = asked.prompt_tokens
        reserved += asked.output_tokens if self.rng.random() < 0.5 else 0  # else it grows
        placed: Placed | None
        if parent is not None:
            shared = asked.prompt_tokens - 1
            placed = self.pools.fork(parent.name, name, shared, reserved)
        else:
            shared = 0
            hashes = self.hasher.hashes(self.prompts[name])
            placed = self.pools.admit(name, asked.prompt_tokens, reserved, block_hashes=hashes)
        assert placed is not None, "the pools of this test are large enough"
        there = shared or placed.cached_tokens
        self.running.append(Running(name, asked, name, there, strategies, there))
        return Admit(
            id=name, prompt=name, tokens=asked.prompt_tokens, prompt_length=asked.prompt_tokens, seed=1,
            sampling=GREEDY, reserved_tokens=placed.shards.tokens, fork_of=parent.name if parent else None,
            shared_tokens=shared, segments=placed.segments, deals=placed.deals, cached_tokens=placed.cached_tokens,
            prefixes=placed.prefixes, evictions=placed.evictions,
        )  # fmt: skip

    def grow(self) -> list[Grow]:
        """Room for the next output of those that have used up theirs; ahead of admits, as ranks replay it."""
        grows = []
        for one in self.running:
            shards = self.pools.shards(one.name)
            if one.computed >= shards.tokens:
                grow = self.pools.grow(one.name, one.computed + 1 + int(self.rng.integers(6)))
                assert grow is not None, "the pools of this test are large enough"
                grows.append(grow)
                self.joined += self.pools.shards(one.name).lanes != shards.lanes
        return grows

    def step(self, admits: list[Admit], grows: list[Grow]) -> None:
        """A step of some of the running requests; those that it finishes leave."""
        entries: list[StepEntry] = []
        publishes, releases = (
            self.pools.take_publishes(),
            self.pools.take_releases(),
        )
        for one in self.running:
            if not self.chunks and self.rng.random() < 0.3:
                continue
            left = one.asked.prompt_tokens - one.computed
            count = self._chunk(one, left) if left > 0 else 1
            entries += self._entries(one, count)
            one.computed += count
        lanes = {lane for entry in entries for lane in self._lanes(entry)}
        if self.rng.random() < 0.3:  # some take part without being needed
            lanes = set(range(self.lanes))
        self.steps.append(
            Step(
                step_id=len(self.steps), epoch=0, entries=tuple(entries), grows=tuple(grows), admits=tuple(admits),
                publishes=publishes, releases=releases, lanes=tuple(sorted(lanes)), state_hashes=self.pools.state_hashes(),
            )
        )  # fmt: skip
        for one in self.running:
            self.pools.computed(one.name, min(one.computed, one.asked.prompt_tokens))
        for one in [one for one in self.running if one.computed == one.length]:
            self.running.remove(one)
            self.pools.release(one.name, one.computed)

    def _chunk(self, one: Running, left: int) -> int:
        if not self.chunks:
            return min(left, int(self.rng.choice([1, 7, 16, 33, left])))
        ends = np.cumsum(self.chunks)
        return min(left, int(ends[ends.searchsorted(one.computed, side="right")]) - one.computed)

    def _entries(self, one: Running, count: int) -> list[StepEntry]:
        shards = self.pools.shards(one.name)
        start, stop = one.computed, one.computed + count
        samples = stop >= one.asked.prompt_tokens
        if len(shards.lanes) == 1:
            return [StepEntry(one.name, shards.owner, (Extent(start, count),), samples)]
        strategy, cut = one.strategies[int(self.rng.integers(len(one.strategies)))]
        extents: list[tuple[Extent, ...]] = [(Extent(start, count),)]
        if strategy != OWNER and stop <= one.asked.prompt_tokens:  # outputs are known to the owner alone
            extents = cut(start, stop, len(shards.lanes))
        return [
            StepEntry(one.name, lane, runs, samples and lane == shards.owner, strategy, shards.version)
            for lane, runs in zip(shards.lanes, extents, strict=False)
            if runs
        ]

    def _lanes(self, entry: StepEntry) -> set[int]:
        """Those that a step with the entry needs."""
        shards = self.pools.shards(entry.id)
        if entry.strategy in (PASS_KV, PASS_Q):
            return set(shards.lanes)
        return {entry.lane, *shards.participants(entry.extents[-1].start + entry.extents[-1].count)}


def check(
    ranks: Ranks,
    reference: torch.nn.Module,
    planner: Planner,
    asked: list[Asked],
    strategies: list[tuple[str, Cut]],
    steps_ahead: int,
    *,
    one_by_one: bool = False,
) -> dict[str, Running]:
    """Run random steps of these requests, and compare the logits of every position that was computed."""
    waiting = list(asked)
    everyone: dict[str, Running] = {}
    while waiting or planner.running:
        grows, admits = planner.grow(), []
        if waiting and (not planner.running or (not one_by_one and planner.rng.random() < 0.5)):
            admits.append(planner.admit(waiting.pop(0), strategies))
            everyone[admits[0].id] = planner.running[-1]
        planner.step(admits, grows)
    samples, logits = ranks.run(
        planner.steps, planner.prompts, kv_blocks=planner.kv_blocks, block_tokens=BLOCK_TOKENS, steps_ahead=steps_ahead
    )  # fmt: skip
    for name, one in everyone.items():
        drawn = [sample.token for sample in samples if sample.id == name]
        assert len(drawn) == one.asked.output_tokens
        ids = torch.tensor([*planner.prompts[name].tolist(), *drawn[:-1]])
        with torch.inference_mode():
            wanted = reference(ids[None]).logits[0]
        computed = range(one.there, one.length)
        found = torch.stack([logits[name, position] for position in computed])
        error = float((found - wanted[one.there :]).abs().max())
        assert error <= TOLERANCE, f"{name}: {error}"
        greedy = wanted[one.asked.prompt_tokens - 1 :].argmax(-1)
        assert drawn == greedy.tolist()
    return everyone


def asked(most: int) -> st.SearchStrategy[Asked]:
    lengths = st.one_of(st.integers(1, 12), st.integers(13, most), st.sampled_from([16, 32, 48, 64]))
    return st.builds(Asked, lengths, st.integers(1, 5), st.integers(0, 1), st.booleans())


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, torch.nn.Module]]:
    made: dict[str, tuple[Path, torch.nn.Module]] = {}

    def checkpoint(architecture: str) -> tuple[Path, torch.nn.Module]:
        if architecture not in made:
            directory = tmp_path_factory.mktemp(architecture)
            head_dim = {} if architecture == "qwen2" else {"head_dim": 16}
            made[architecture] = directory, save_reference(directory, architecture, **SIZES, **head_dim)
        return made[architecture]

    return checkpoint


@pytest.fixture(params=CASES)
def replica(
    request: pytest.FixtureRequest, checkpoints: Callable[[str], tuple[Path, torch.nn.Module]]
) -> Iterator[tuple[Ranks, torch.nn.Module, int]]:
    shape, architecture, examples = request.param
    directory, reference = checkpoints(architecture)
    ranks = Ranks(Topology(*shape), directory)
    yield ranks, reference, examples
    ranks.close()


def test_logits_are_those_of_transformers(replica: tuple[Ranks, torch.nn.Module, int]) -> None:
    """Short and long requests, forks and cached prefixes in one batch; lanes join, help each other, share prefills.

    Steps are planned ahead of those that run, as they are in a rank that is busy when they come.
    """
    ranks, reference, examples = replica

    @given(
        requests=st.lists(asked(150), min_size=1, max_size=5),
        strategies=st.lists(st.sampled_from(STRATEGIES), min_size=1, max_size=5),
        tokens_per_lane=st.sampled_from([16, 24, 60]),
        deals=st.booleans(),
        seed=st.integers(0, 1000),
        steps_ahead=st.integers(0, 3),
    )
    @settings(max_examples=examples)
    def run(
        requests: list[Asked],
        strategies: list[tuple[str, Cut]],
        tokens_per_lane: int,
        deals: bool,
        seed: int,
        steps_ahead: int,
    ) -> None:
        planner = Planner(ranks.topology.kv, tokens_per_lane, deals, np.random.default_rng(seed))
        check(ranks, reference, planner, requests, strategies, steps_ahead)

    run()


def test_ranks_that_get_nothing_of_a_small_vocabulary_embed_and_draw_with_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine tokens over eight tensor ranks: two each, then one, then none."""
    monkeypatch.setitem(globals(), "VOCAB", 9)
    reference = save_reference(
        tmp_path, "llama", **SIZES | {"num_hidden_layers": 1, "vocab_size": 9}, head_dim=16
    )
    ranks = Ranks(Topology(8, 1, 1), tmp_path)
    planner = Planner(1, 60, False, np.random.default_rng(1))
    check(ranks, reference, planner, [Asked(5, 3, 0), Asked(30, 2, 1)], STRATEGIES[:1], 1)
    ranks.close()


def test_outputs_grow_on_to_a_further_lane_and_whole_prompts_are_found_cached(
    checkpoints: Callable[[str], tuple[Path, torch.nn.Module]],
) -> None:
    """One lane of twelve blocks is full after 48 tokens; of a cached prompt only the last block is computed again."""
    directory, reference = checkpoints("llama")
    for shape in ((1, 1, 2), (1, 2, 2)):
        ranks = Ranks(Topology(*shape), directory)
        try:
            for seed in (0, 1):
                planner = Planner(2, 1000, False, np.random.default_rng(seed), kv_blocks=12)
                requests = [Asked(30, 46), Asked(30, 50), Asked(40, 3, 1), Asked(40, 3, 1), Asked(38, 4, 1)]
                everyone = check(ranks, reference, planner, requests, [STRATEGIES[0]], seed, one_by_one=True)
                assert planner.joined >= 1
                there = [one.there for one in everyone.values()]
                assert there[3:] == [36, 36]
        finally:
            ranks.close()


BORDERS = (16, 32, 48)
"""Where the shards of a prompt of 64 tokens begin and end, with 16 tokens a lane."""


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: f"{strategy[0]} {strategy[1].__name__}")
@pytest.mark.parametrize(
    "chunks",
    [
        pytest.param((16, 16, 16, 16), id="one chunk a shard"),
        pytest.param((15, 1, 1, 14, 1, 1, 30, 1), id="one token at each side of a border"),
        pytest.param((32, 1, 31), id="two shards, then one token"),
    ],
)
def test_chunks_may_end_at_the_borders_of_shards(
    four_lanes: tuple[Ranks, torch.nn.Module], chunks: tuple[int, ...], strategy: tuple[str, Cut]
) -> None:
    """The shards behind a chunk are empty when it runs. Of the second prompt, which is cached, a block is computed."""
    ranks, reference = four_lanes
    planner = Planner(4, 16, False, np.random.default_rng(0), chunks=chunks)
    everyone = check(
        ranks, reference, planner, [Asked(64, 3), Asked(64, 3)], [strategy], len(chunks) % 3, one_by_one=True
    )
    assert [one.there for one in everyone.values()] == [0, 60]
    counts = [sum(entry.token_count for entry in step.entries if entry.id == "r0") for step in planner.steps]
    ends = set(np.cumsum(counts).tolist())
    assert ends >= set(np.cumsum(chunks).tolist())
    assert ends & set(BORDERS)


@pytest.fixture(scope="module")
def four_lanes(
    checkpoints: Callable[[str], tuple[Path, torch.nn.Module]],
) -> Iterator[tuple[Ranks, torch.nn.Module]]:
    directory, reference = checkpoints("llama")
    ranks = Ranks(Topology(kv=4, stream=2, tensor=1), directory)
    yield ranks, reference
    ranks.close()
