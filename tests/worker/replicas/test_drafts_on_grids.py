"""Real ranks verify the drafts of a real controller, on every grid, and sample the text that one rank samples without.

The text of each request is first sampled on one rank, token by token. The controller then serves all requests, while a
drafter guesses parts of these texts and is wrong here and there. Ranks run the controller's steps, and have to report what
the text says that they find: the tokens, and how many of the guesses are right.

Ranks with draft models or heads also propose the guesses that the steps ask for. On several lanes, they are proposed for requests
that lie on one lane, beside others that are spread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from medha.api.replica import SchedulingSpec, ServiceClass
from medha.api.speculation_spec import SpeculationSpec
from medha.kv.context_parallel import ContextParallel, PrefillStrategy, RingCosts
from medha.kv.pools import WindowPool
from medha.scheduler.controller import ReplicaController
from medha.scheduler.replica_config import ReplicaConfig
from medha.topology import Topology
from medha.wire.messages import (
    Admit,
    Done,
    DraftCosts,
    Extent,
    Sample,
    Sampling,
    Step,
    StepEntry,
    StepProfile,
    Tokens,
)
from medha_worker.checkpoints.presets import init_checkpoint
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.transformer import Transformer
from medha_worker.rank.executor import Executor
from medha_worker.rank.kv_parallel_plan import LOCAL

from ..model.test_eagle3_head import make
from ..model.test_model_transformer import save_reference
from ..models import load_model
from ..ranks import Ranks
from .test_controlled import MODEL, VOCAB, Life, Query, live, pool_of_windows

pytestmark = pytest.mark.timeout(400)

MOST_TOKENS = 130
READS_WEIGHTS = StepProfile(0.01, 1e-6, 1e-9, 1e-6)
"""A device on which verifying guesses costs next to nothing."""
SHAPES = [
    pytest.param(((1, 1, 1), "llama", 3), id="one rank", marks=pytest.mark.long),
    pytest.param(((2, 2, 1), "qwen3", 2), id="TP2 x SPP2", marks=pytest.mark.long),
    pytest.param(((1, 1, 2), "llama-biased", 2), id="KVP2"),
    pytest.param(((1, 1, 1), "gemma3_text-window", 3), id="one rank, windows", marks=pytest.mark.long),
] + [
    pytest.param((shape, architecture, 30), id=f"{Topology(*shape)} long", marks=pytest.mark.long)
    for shape, architecture in [
        ((1, 1, 1), "qwen3"),
        ((1, 1, 3), "llama"),
        ((1, 2, 3), "llama"),
        ((1, 4, 1), "mistral"),
        ((2, 1, 2), "llama-biased"),
        ((2, 2, 2), "mistral"),
    ]
]
SAMPLINGS = [
    Sampling(temperature=0.0, ignore_eos=True),
    Sampling(temperature=0.9, ignore_eos=True, top_p=0.95),
    Sampling(
        temperature=0.5, ignore_eos=True, repetition_penalty=1.2, frequency_penalty=0.3, logit_bias={3: 2.0}
    ),
]


class Writer:
    """Samples the texts of requests on one rank, token by token."""

    def __init__(self, model: Transformer) -> None:
        self._model = model

    def texts(self, asked: dict[str, Query], sampling: Sampling) -> dict[str, list[int]]:
        """Return the prompt and the output of each request that is not refused, together `MOST_TOKENS` tokens."""
        asked = {name: one for name, one in asked.items() if len(one.ids) < MOST_TOKENS}
        blocks = MOST_TOKENS // 16 + 1
        executor = Executor(
            self._model,
            self._model.new_kv_cache(blocks * len(asked), 16),
            vocab_size=self._model.config.vocab_size,
            eos_token_ids=(),
            clock=lambda: 0.0,
        )
        texts = {name: one.ids.tolist() for name, one in asked.items()}
        admits = []
        for name, one in asked.items():
            tokens, sample_index = len(one.ids), int(name.partition(".")[2])
            executor.add_tokens(Tokens(prompt=name, offset=0, total=tokens), one.ids)
            admits.append(Admit(name, name, tokens, tokens, 1, sampling, blocks * 16, sample_index))
        computed = dict.fromkeys(asked, 0)
        for number in range(MOST_TOKENS - min(len(one.ids) for one in asked.values())):
            going = [name for name, text in texts.items() if len(text) < MOST_TOKENS]
            entries = tuple(
                StepEntry(name, 0, (Extent(computed[name], len(texts[name]) - computed[name]),), True)
                for name in going
            )
            done = executor.execute(Step(number, 0, entries, admits=tuple(admits) if number == 0 else ()))
            assert done is not None
            for sample in done.samples:
                computed[sample.id] = len(texts[sample.id])
                texts[sample.id].append(sample.token)
        return texts


@dataclass
class Guessing(Life):
    """A controller whose ranks find what the texts say, and that gets guesses at these."""

    writer: Writer = field(kw_only=True)
    asked: dict[str, Query] = field(default_factory=dict)
    sampling: Sampling = SAMPLINGS[0]
    chance: float = 0.8
    texts: dict[str, list[int]] = field(default_factory=dict)
    found: dict[tuple[int, str], list[int]] = field(default_factory=dict)  # by lane and request
    accepted: int = 0

    def outcome(self, step: Step) -> Done:
        samples, drafts = [], []
        for entry in step.entries:
            if not entry.samples:
                continue
            text = self.text(entry.id)
            known = entry.extents[-1].last + 1 - len(entry.drafts)
            count = 1
            for draft, token in zip(entry.drafts, text[known:], strict=False):
                if draft != token:
                    break
                count += 1
            tokens = text[known : known + count]
            self.accepted += count - 1
            self.found.setdefault((entry.lane, entry.id), []).extend(tokens)
            samples += [Sample(entry.id, token) for token in tokens]
            if (most := self.most_guesses(entry)) is None:
                continue
            right = text[known + count :][:most]
            draft = [token if self.random.random() < self.chance else (token + 1) % VOCAB for token in right]
            drafts.append((entry.id, tuple(draft)))
        return Done(step.step_id, tuple(samples), (), 0.001, step.lanes, drafts=tuple(drafts))

    def most_guesses(self, entry: StepEntry) -> int | None:
        """Return how many guesses come at most for the tokens after an entry; None if none are reported."""
        return self.random.randint(0, 5)

    def text(self, name: str) -> list[int]:
        """Return the whole text of a request."""
        if not self.texts:
            self.texts = self.writer.texts(self.asked, self.sampling)
        return self.texts[name]


@dataclass
class Asking(Guessing):
    """The same with guesses only where steps ask for them, as those of draft models and heads are."""

    def most_guesses(self, entry: StepEntry) -> int | None:
        return entry.proposes or None


def config_of(topology: Topology, speculation: SpeculationSpec, **sizes: Any) -> ReplicaConfig:
    """Return the settings of a small replica with lanes of `pool_tokens` in blocks of `block_tokens`."""
    block_tokens = sizes["block_tokens"]
    return ReplicaConfig(
        topology=topology,
        scheduling=SchedulingSpec(
            max_chunk_tokens=sizes["chunk_tokens"],
            min_chunk_tokens=4,
            max_running=16,
            max_running_long=2,
            speculation=speculation,
        ),
        service_classes={"default": ServiceClass(name="default", default_output_tokens=9)},
        default_class="default",
        max_model_len=120,
        block_size_tokens=block_tokens,
        kv_blocks=sizes["pool_tokens"] // block_tokens,
        long_threshold_tokens=60,
        tokens_per_lane=sizes["share_blocks"] * block_tokens,
    )


def run_and_compare(ranks: Ranks, life: Guessing, **options: Any) -> None:
    """Let ranks run the steps of a controller, and compare their samples with the texts."""
    config, prompts = life.controller.config, {one.prompt: one.ids for one in life.asked.values()}
    for aside in life.asides.values():
        prompts[aside.prompt] = np.array(life.text(aside.id)[: aside.tokens], dtype=np.int32)
    samples, _ = ranks.run(
        life.steps,
        prompts,
        kv_blocks=config.kv_blocks,
        block_tokens=config.block_size_tokens,
        window_blocks=config.window_pool.blocks if config.window_pool else 0,
        **options,
    )
    found: dict[str, list[int]] = {}
    for sample in samples:
        found.setdefault(sample.id, []).append(sample.token)
    expected: dict[str, list[int]] = {}
    for (_, name), tokens in sorted(life.found.items()):  # ranks report lane by lane
        expected.setdefault(name, []).extend(tokens)
    assert found == expected


@pytest.fixture(params=SHAPES)
def replica(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Ranks, Writer, int]]:
    shape, architecture, examples = request.param
    directory: Path = tmp_path_factory.mktemp(architecture)
    save_reference(directory, architecture, **MODEL, head_dim=16)
    ranks = Ranks(Topology(*shape), directory)
    yield ranks, Writer(load_model(directory, ModelConfig.from_directory(directory))), examples
    ranks.close()


def test_ranks_find_of_each_draft_what_a_text_without_drafts_says(replica: tuple[Ranks, Writer, int]) -> None:
    ranks, writer, examples = replica
    topology = ranks.topology
    accepted: list[int] = []

    @given(
        strategy=st.sampled_from([None, "passKv", "striped"]),
        block_tokens=st.sampled_from([4, 1, 8]),
        pool_tokens=st.sampled_from([80, 160, 400]),
        share_blocks=st.sampled_from([2, 4, 15]),
        chunk_tokens=st.sampled_from([8, 64]),
        sampling=st.sampled_from(SAMPLINGS),
        chance=st.sampled_from([0.0, 0.8, 1.0]),
        seed=st.integers(0, 10_000),
        steps_ahead=st.integers(0, 2),
    )
    @example(
        strategy=None, block_tokens=4, pool_tokens=160, share_blocks=4, chunk_tokens=8, sampling=SAMPLINGS[2], chance=0.8,
        seed=9, steps_ahead=1,
    )  # fmt: skip
    @settings(max_examples=examples, deadline=None)
    def run(
        strategy: PrefillStrategy | None,
        block_tokens: int,
        pool_tokens: int,
        share_blocks: int,
        chunk_tokens: int,
        sampling: Sampling,
        chance: float,
        seed: int,
        steps_ahead: int,
    ) -> None:
        frees = any(ranks.windows) and topology.kv == 1
        in_ring = strategy is not None and topology.kv > 1
        config = replace(
            config_of(
                topology,
                SpeculationSpec(method="promptLookup"),
                block_tokens=block_tokens,
                pool_tokens=pool_tokens,
                share_blocks=share_blocks,
                chunk_tokens=chunk_tokens,
            ),
            prefix_caching=not frees,
            context_parallel=ContextParallel(strategy, RingCosts(8, 2)) if in_ring and strategy else None,
        )
        if frees:
            window = max(filter(None, ranks.windows))
            config = replace(config, window_pool=WindowPool(pool_of_windows(config, window), window))
        controller = ReplicaController(config, READS_WEIGHTS)
        life = Guessing(controller, Random(seed), writer=writer, sampling=sampling, chance=chance)
        live(life, sampling, life.asked)
        run_and_compare(ranks, life, steps_ahead=steps_ahead)
        accepted.append(life.accepted)

    run()
    assert sum(accepted) > 0, "no guess was right"


# --- draft models and heads on every lane ---------------------------------------------------------------

DRAFT_MODEL = {"method": "draftModel", "draftModel": {"path": "draft"}}
HEAD = {"method": "predictionHead", "predictionHead": {"kind": "mtp"}}
COSTS = DraftCosts(1e-4, 1e-6, 1e-7)
DRAWING = [
    pytest.param(((1, 1, 2), "itself", 3), id="KVP2, draft model"),
    pytest.param(((1, 1, 2), "mtp", 2), id="KVP2, MTP head"),
] + [
    pytest.param((shape, drafter, 12), id=f"{Topology(*shape)}, {drafter} long", marks=pytest.mark.long)
    for shape in [(1, 1, 2), (2, 1, 2), (1, 2, 2)]
    for drafter in ["itself", "another", "mtp", "eagle3"]
]


@pytest.fixture(params=DRAWING)
def proposing(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[Ranks, Writer, SpeculationSpec, str, int]]:
    """Ranks with a draft model or head on each lane, and what samples their texts without."""
    shape, drafter, examples = request.param
    directory, topology = tmp_path / "tiny", Topology(*shape)
    speculation = HEAD if drafter in ("mtp", "eagle3") else DRAFT_MODEL
    if drafter == "mtp":
        init_checkpoint(directory, preset="tiny", seed=2, architecture="deepseek_v3", mtp_layers=1)
        ranks = Ranks(topology, directory, has_head=True)
    elif drafter == "eagle3":
        make(tmp_path, "qwen3")
        ranks = Ranks(topology, directory, eagle3=tmp_path / "head")
    else:
        init_checkpoint(directory, preset="tiny", seed=2)
        init_checkpoint(tmp_path / "another", preset="tiny", seed=77)
        ranks = Ranks(topology, directory, draft=directory if drafter == "itself" else tmp_path / "another")
    writer = Writer(load_model(directory, ModelConfig.from_directory(directory)))
    yield ranks, writer, SpeculationSpec.model_validate(speculation), drafter, examples
    ranks.close()


def test_lanes_guess_for_what_lies_on_them_alone_beside_spread_requests(
    proposing: tuple[Ranks, Writer, SpeculationSpec, str, int],
) -> None:
    """Texts are those without guesses, and a draft model that is the served model guesses them, whatever a block held before."""
    ranks, writer, speculation, drafter, examples = proposing
    beside, accepted, guesses = 0, 0, [0, 0]

    @given(
        strategy=st.sampled_from([None, "passKv", "striped"]),
        block_tokens=st.sampled_from([4, 1, 8]),
        pool_tokens=st.sampled_from([80, 160, 400]),
        share_blocks=st.sampled_from([4, 15]),
        chunk_tokens=st.sampled_from([8, 64]),
        sampling=st.sampled_from(SAMPLINGS),
        chance=st.sampled_from([0.8, 1.0]),
        seed=st.integers(0, 10_000),
        steps_ahead=st.integers(0, 2),
    )
    @example(
        strategy=None, block_tokens=4, pool_tokens=160, share_blocks=4, chunk_tokens=8, sampling=SAMPLINGS[0], chance=1.0,
        seed=9, steps_ahead=1,
    )  # fmt: skip
    @settings(max_examples=examples, deadline=None)
    def run(
        strategy: PrefillStrategy | None,
        sampling: Sampling,
        chance: float,
        seed: int,
        steps_ahead: int,
        **sizes: int,
    ) -> None:
        nonlocal beside, accepted
        config = replace(
            config_of(ranks.topology, speculation, **sizes),
            draft_costs=COSTS if drafter in ("itself", "another") else replace(COSTS, token_seconds=0.0),
            context_parallel=ContextParallel(strategy, RingCosts(8, 2)) if strategy else None,
        )
        controller = ReplicaController(config, READS_WEIGHTS)
        life = Asking(controller, Random(seed), writer=writer, sampling=sampling, chance=chance)
        live(life, sampling, life.asked)
        run_and_compare(ranks, life, steps_ahead=steps_ahead)
        accepted += life.accepted
        for step in life.steps:
            asking = [entry.strategy for entry in step.entries if entry.proposes or entry.follows]
            assert set(asking) <= {LOCAL}
            beside += bool(asking) and any(entry.strategy != LOCAL for entry in step.entries)
        for name, draft in ranks.drafts:
            text = life.text(name)
            if len(draft) > 1 and sampling is not SAMPLINGS[2]:  # penalties of guesses are not followed
                guesses[0] += 1
                guesses[1] += any(text[at : at + len(draft)] == [*draft] for at in range(len(text)))

    run()
    assert accepted > 0, "no guess was right"
    assert beside > 0, "no guess was proposed beside a spread request"
    assert guesses[0] > 0, "ranks have proposed nothing"
    if drafter == "itself":
        assert guesses[1] > 0.95 * guesses[0]
