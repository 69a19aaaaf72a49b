"""Real ranks verify the drafts of a real controller, on every grid, and sample the text that one rank samples without.

The text of each request is first sampled on one rank, token by token. The controller then serves all requests, while a
drafter guesses parts of these texts and is wrong here and there. Ranks run the controller's steps, and have to report what
the text says that they find: the tokens, and how many of the guesses are right.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

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
from medha.wire.messages import Admit, Done, Extent, Sample, Sampling, Step, StepEntry, StepProfile, Tokens
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.transformer import Transformer
from medha_worker.rank.executor import Executor

from .models import load_model
from .ranks import Ranks
from .test_controlled import MODEL, VOCAB, Life, Query, live, pool_of_windows
from .test_model_transformer import save_reference

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
            vocab_size=VOCAB,
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
            right = text[known + count :][: self.random.randint(0, 5)]
            draft = [token if self.random.random() < self.chance else (token + 1) % VOCAB for token in right]
            drafts.append((entry.id, tuple(draft)))
        return Done(step.step_id, tuple(samples), (), 0.001, step.lanes, drafts=tuple(drafts))

    def text(self, name: str) -> list[int]:
        """Return the whole text of a request."""
        if not self.texts:
            self.texts = self.writer.texts(self.asked, self.sampling)
        return self.texts[name]


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
        config = ReplicaConfig(
            topology=topology,
            scheduling=SchedulingSpec(
                max_chunk_tokens=chunk_tokens,
                min_chunk_tokens=4,
                max_running=16,
                max_running_long=2,
                speculation=SpeculationSpec(method="promptLookup"),
            ),
            service_classes={"default": ServiceClass(name="default", default_output_tokens=9)},
            default_class="default",
            max_model_len=120,
            block_size_tokens=block_tokens,
            kv_blocks=pool_tokens // block_tokens,
            long_threshold_tokens=60,
            tokens_per_lane=share_blocks * block_tokens,
            prefix_caching=not frees,
            context_parallel=ContextParallel(strategy, RingCosts(8, 2)) if in_ring and strategy else None,
        )
        if frees:
            window = max(filter(None, ranks.windows))
            config = replace(config, window_pool=WindowPool(pool_of_windows(config, window), window))
        controller = ReplicaController(config, READS_WEIGHTS)
        life = Guessing(controller, Random(seed), writer=writer, sampling=sampling, chance=chance)
        live(life, sampling, life.asked)
        prompts = {one.prompt: one.ids for one in life.asked.values()}
        for aside in life.asides.values():
            prompts[aside.prompt] = np.array(life.text(aside.id)[: aside.tokens], dtype=np.int32)
        samples, _ = ranks.run(
            life.steps,
            prompts,
            kv_blocks=config.kv_blocks,
            block_tokens=block_tokens,
            steps_ahead=steps_ahead,
            window_blocks=config.window_pool.blocks if config.window_pool else 0,
        )
        found: dict[str, list[int]] = {}
        for sample in samples:
            found.setdefault(sample.id, []).append(sample.token)
        expected: dict[str, list[int]] = {}
        for (_, name), tokens in sorted(life.found.items()):  # ranks report lane by lane
            expected.setdefault(name, []).extend(tokens)
        assert found == expected
        accepted.append(life.accepted)

    run()
    assert sum(accepted) > 0, "no guess was right"
