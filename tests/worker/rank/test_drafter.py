"""A draft model follows sequences where steps ask for it, and guesses what comes next; no text changes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from medha.kv.blocks import BlockCopy
from medha.topology import Topology
from medha.wire.messages import Admit, Done, Extent, Sampling, Step, StepEntry
from medha_worker.checkpoints.presets import init_checkpoint
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.sampler import TokenMask
from medha_worker.model.transformer import Transformer
from medha_worker.rank.drafter import Drafter

from ..models import load_model
from ..ranks import Ranks
from ..sampling_cases import any_sampling, third
from .test_executor import BLOCK_TOKENS, GREEDY, VOCAB, Engine, admit, entry, random_ids

MOST_TOKENS = 24
SAMPLINGS = [
    GREEDY,
    Sampling(temperature=0.9, ignore_eos=True, top_p=0.95, logprobs=2),
    Sampling(temperature=1.3, ignore_eos=True, top_k=30, logit_bias={9: 2.0}),
    Sampling(temperature=0.7, ignore_eos=True, min_p=0.02),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint") / "tiny"
    init_checkpoint(directory, preset="tiny", seed=2)
    return directory


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Transformer:
    return load_model(checkpoint, ModelConfig.from_directory(checkpoint, max_model_len=1024))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    """A model that knows nothing of the first one's texts."""
    directory = tmp_path_factory.mktemp("other") / "tiny"
    init_checkpoint(directory, preset="tiny", seed=77)
    return load_model(directory, ModelConfig.from_directory(directory, max_model_len=1024))


def drafter_of(draft: Any) -> Drafter:
    return Drafter(draft, draft.new_kv_cache(64, BLOCK_TOKENS), VOCAB)


@dataclass
class Decoding:
    """Sequences that an engine decodes, each with the guesses that came with its last token."""

    engine: Engine
    proposes: int = 0
    texts: dict[str, list[int]] = field(default_factory=dict)
    prompts: dict[str, np.ndarray] = field(default_factory=dict)
    drafts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    behind: dict[str, int] = field(default_factory=dict)  # tokens that the draft model has yet to compute
    followed: dict[str, int] = field(
        default_factory=dict
    )  # tokens that it had computed when a sequence began
    verified: int = 0
    accepted: int = 0

    def take(self, done: Done) -> None:
        assert done.failures == ()
        self.drafts = dict(done.drafts)
        self.followed |= dict(done.followed)
        for sample in done.samples:
            self.texts.setdefault(sample.id, []).append(sample.token)
            if sample.finish_reason is not None:
                self.ended.add(sample.id)

    def start(self, name: str, ids: np.ndarray, sampling: Sampling, chunk: int = 7, **more: object) -> None:
        """Prefill a prompt in chunks; the last step proposes guesses, too."""
        self.prompts[name] = ids
        self.engine.give(f"prompt of {name}", ids)
        admits: tuple[Admit, ...] = (admit(name, ids, sampling, **more),)
        for first in range(0, len(ids), chunk):
            count = min(chunk, len(ids) - first)
            ends = first + count == len(ids)
            one = replace(entry(name, first, count, samples=ends), proposes=self.proposes if ends else 0)
            one = replace(one, follows=first if one.proposes else 0)
            drafts = self.drafts
            self.take(self.engine.step(one, admits=admits))
            self.drafts = drafts | self.drafts
            admits = ()

    def step(self) -> None:
        """Decode one step of all sequences that have not ended, with the guesses that are there."""
        entries, before = [], 0
        for name, text in self.texts.items():
            if name in self.ended or len(text) >= MOST_TOKENS:
                continue
            drafts = self.drafts.get(name, ())
            start = len(self.prompts[name]) + len(text) - 1
            one = StepEntry(
                name, 0, (Extent(start, 1 + len(drafts)),), True, drafts=drafts, proposes=self.proposes
            )
            entries.append(replace(one, follows=self.behind.pop(name, 0)))
            self.verified += len(drafts)
            before += len(text) + 1
        self.take(self.engine.step(*entries))
        self.accepted += sum(len(self.texts[one.id]) for one in entries) - before

    def run(self) -> dict[str, list[int]]:
        while any(name not in self.ended and len(text) < MOST_TOKENS for name, text in self.texts.items()):
            self.step()
        return {name: text[:MOST_TOKENS] for name, text in self.texts.items()}


def decode(
    model: Transformer, samplings: Sequence[Sampling], draft: Any = None, proposes: int = 3, **more: Any
) -> Decoding:
    """Decode a sequence of each sampling until it ends, together; with a draft model, verify its guesses."""
    if draft is not None:
        more["drafter"] = drafter_of(draft)
    decoding = Decoding(Engine(model, **more), proposes if draft is not None else 0)
    for index, sampling in enumerate(samplings):
        decoding.start(f"s{index}", random_ids(12 + 9 * index, index), sampling, seed=index)
    decoding.run()
    return decoding


def assert_same(found: Decoding, plain: Decoding) -> None:
    for name, text in plain.texts.items():
        assert found.texts[name][: len(text)] == text
        if name in plain.ended:
            assert found.texts[name] == text, "a token behind the last one"


def assert_same_for_any_parameters(decode: Callable[..., Decoding], vocab_size: int, seed: int) -> None:
    """Assert that guesses of a head change no text of four random samplings, and that none is made under a mask."""
    chance = np.random.default_rng(seed)
    samplings = [any_sampling(chance, vocab_size) for _ in range(4)]

    def mask_for(admitted: Admit) -> TokenMask | None:
        return third(vocab_size, 1) if admitted.id == "s0" else None

    plain = decode(samplings, 0, mask_for=mask_for)
    found = decode(samplings, 1 + seed % 4, mask_for=mask_for)
    assert_same(found, plain)
    assert "s0" not in found.drafts, "nothing is guessed under a mask"


def test_the_model_itself_guesses_what_it_samples(model: Transformer) -> None:
    """Greedy and sampled, behind prompts that are computed in chunks: its KV is there for every position."""
    plain, found = decode(model, SAMPLINGS), decode(model, SAMPLINGS, draft=model)
    assert_same(found, plain)
    assert found.accepted >= 0.95 * found.verified > 50


def test_another_model_is_mostly_wrong_and_changes_nothing(model: Transformer, other: Transformer) -> None:
    plain, found = decode(model, SAMPLINGS), decode(model, SAMPLINGS, draft=other)
    assert_same(found, plain)
    assert found.verified > 100
    greedy = decode(model, [GREEDY] * 3, draft=other)  # flat distributions depend on the random numbers most
    assert greedy.accepted < 0.2 * greedy.verified


@pytest.mark.parametrize("seed", range(4))
def test_texts_are_those_without_a_draft_model_for_all_parameters(
    model: Transformer, other: Transformer, seed: int
) -> None:
    chance = np.random.default_rng(seed)
    samplings = [any_sampling(chance, VOCAB) for _ in range(4)]

    def mask_for(admitted: Admit) -> TokenMask | None:
        return third(VOCAB, 1) if admitted.id == "s0" else None

    plain = decode(model, samplings, mask_for=mask_for)
    for draft in (model, other):
        found = decode(model, samplings, draft, proposes=1 + seed % 4, mask_for=mask_for)
        assert_same(found, plain)


def test_penalties_of_known_tokens_are_followed(model: Transformer) -> None:
    samplings = [replace(one, repetition_penalty=1.3, presence_penalty=0.5) for one in SAMPLINGS]
    plain, found = decode(model, samplings), decode(model, samplings, draft=model, proposes=1)
    assert_same(found, plain)
    assert found.accepted >= 0.9 * found.verified > 0


def test_nothing_is_guessed_under_a_mask_or_behind_the_end(model: Transformer) -> None:
    text = decode(model, [GREEDY]).texts["s0"]
    stop = next(token for token in text[5:] if token not in text[:5])
    ends = replace(GREEDY, stop_token_ids=(stop,))

    def mask_for(admitted: Admit) -> TokenMask | None:
        return third(VOCAB, 1) if admitted.id == "s1" else None

    decoding = Decoding(Engine(model, drafter=drafter_of(model), mask_for=mask_for), proposes=4)
    decoding.start("s0", random_ids(12, 0), ends, seed=0)
    decoding.start("s1", random_ids(12, 1), GREEDY)
    while "s0" not in decoding.ended:
        assert "s1" not in decoding.drafts
        guesses = decoding.drafts["s0"]
        assert stop not in guesses[:-1], "a guess behind the stop token"
        decoding.step()
    assert "s0" not in decoding.drafts
    assert decoding.texts["s0"] == text[: text.index(stop) + 1]


def test_guesses_end_where_the_kv_of_a_sequence_ends(model: Transformer) -> None:
    decoding = Decoding(Engine(model, drafter=drafter_of(model)), proposes=4)
    ids = random_ids(BLOCK_TOKENS - 3, 0)
    decoding.start("a", ids, GREEDY, reserved_tokens=BLOCK_TOKENS)
    assert len(decoding.drafts["a"]) == 3, "the positions of the sampled token and of two guesses hold KV"
    decoding.drafts["a"] = decoding.drafts["a"][:2]  # a third one would be verified behind the KV
    decoding.step()
    assert len(decoding.texts["a"]) == 4
    assert decoding.drafts == {}


def forked(model: Transformer, drafter: Drafter | None, overwritten: int = 0) -> Decoding:
    """Return a sequence and two forks of it, decoded to their ends.

    Before it forks, the first blocks are `overwritten`, as far as the draft model knows.
    """
    sampling, ids = Sampling(temperature=0.9, ignore_eos=True), random_ids(39, 3)
    more = {} if drafter is None else {"drafter": drafter}
    decoding = Decoding(Engine(model, **more), 0 if drafter is None else 3)
    decoding.start("s0", ids, sampling)
    forks = tuple(
        admit(f"s{index}", ids, sampling, prompt="prompt of s0", sample_index=index, fork_of="s0", shared_tokens=38)
        for index in (1, 2)
    )  # fmt: skip
    drafts = decoding.drafts
    if drafter is not None and overwritten:
        drafter.overwritten(decoding.engine.executor.ledger.table("s0")[:overwritten])
    for one in forks:
        decoding.prompts[one.id], decoding.behind[one.id] = ids, 1
    decoding.take(decoding.engine.step(*(entry(one.id, 38, 1) for one in forks), admits=forks))
    decoding.drafts |= drafts
    decoding.run()
    return decoding


def test_forks_and_cached_prompts_share_what_the_draft_model_has_computed(model: Transformer) -> None:
    """The last block of the prompt is copied for the fork; whole blocks are shared."""
    plain, found = forked(model, None), forked(model, drafter_of(model))
    assert_same(found, plain)
    assert len({tuple(text) for text in plain.texts.values()}) == 3
    assert found.accepted >= 0.95 * found.verified > 20
    assert found.followed == {"s1": 38, "s2": 38}, "the last token of the prompt is computed again"


def test_what_was_computed_of_a_block_is_forgotten_once_a_spread_sequence_has_it(model: Transformer) -> None:
    plain, found = forked(model, None), forked(model, drafter_of(model), overwritten=1)
    assert_same(found, plain)
    assert found.followed == {}, "nothing is known of the first block, and so of none after it"


def test_a_copied_block_has_what_was_computed_of_its_source_alone(model: Transformer) -> None:
    """The copy lies in a block of which the draft model had computed other content."""
    engine = Engine(model, drafter=drafter_of(model))
    before = Decoding(engine, proposes=3)
    before.start("before", random_ids(20 * BLOCK_TOKENS, 9), GREEDY)
    engine.step(releases=("before",))
    decoding, ids = Decoding(engine), random_ids(BLOCK_TOKENS + 6, 3)
    decoding.start("s0", ids, GREEDY)
    engine.step(replace(entry("s0", len(ids), 1), follows=BLOCK_TOKENS))  # none of its second block
    fork = admit("s1", ids, prompt="prompt of s0", sample_index=1, fork_of="s0", shared_tokens=len(ids) - 1)
    done = engine.step(entry("s1", len(ids) - 1, 1), admits=(fork,))
    assert done.followed == (("s1", BLOCK_TOKENS),)


def test_a_draft_model_that_cannot_copy_kv_for_forks_costs_no_token(model: Transformer) -> None:
    cache = model.new_kv_cache(64, BLOCK_TOKENS)
    copies: list[BlockCopy] = []

    def exhausted(blocks: Sequence[BlockCopy]) -> None:
        copies.extend(blocks)
        if blocks:
            raise RuntimeError("no memory is left")

    cache.copy_blocks = exhausted  # type: ignore[method-assign]
    plain, found = forked(model, None), forked(model, Drafter(model, cache, VOCAB))
    assert copies
    assert_same(found, plain)


class Counting:
    """A model that counts the rows that it computes."""

    def __init__(self, model: Transformer) -> None:
        self._model, self.rows = model, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, tokens: torch.Tensor, step: Any) -> torch.Tensor:
        self.rows += len(tokens)
        return self._model.forward(tokens, step)


def test_each_token_is_computed_once(model: Transformer) -> None:
    """Guesses that are right are tokens whose KV is there already."""
    counting = Counting(model)
    found = decode(model, [GREEDY], draft=counting)
    assert found.accepted == found.verified
    assert counting.rows <= 12 + len(found.texts["s0"]) + 3


def test_a_sequence_is_followed_once_that_is_asked_for_in_pieces(model: Transformer) -> None:
    counting = Counting(model)
    decoding = Decoding(Engine(model, drafter=drafter_of(counting)))
    decoding.start("a", random_ids(30, 0), GREEDY)
    for _ in range(5):
        decoding.step()
    assert counting.rows == 0
    decoding.proposes = 3
    for rows in (
        20,
        36 + 2 + 2,
    ):  # all tokens before the second step, its own, the sampled one, and two guesses
        decoding.behind["a"] = 20
        decoding.step()
        assert counting.rows == rows
        assert bool(decoding.drafts) == (rows == 40)
    decoding.run()
    assert decoding.texts == decode_alone(model, 30)
    assert decoding.accepted == decoding.verified > 5


def decode_alone(model: Transformer, tokens: int) -> dict[str, list[int]]:
    """Return the text behind a prompt of so many tokens, without a draft model."""
    plain = Decoding(Engine(model))
    plain.start("a", random_ids(tokens, 0), GREEDY)
    return plain.run()


class Failing:
    """A model, or a head, whose forward passes fail from some call on."""

    def __init__(self, model: Any, calls: int) -> None:
        self._model, self.calls = model, calls

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, *arguments: Any) -> torch.Tensor:
        self.calls -= 1
        if self.calls < 0:
            raise RuntimeError("no memory is left")
        return self._model.forward(*arguments)


@pytest.mark.parametrize("calls", [0, 5, 14])
def test_a_draft_model_that_fails_costs_no_token(model: Transformer, calls: int) -> None:
    plain, found = decode(model, SAMPLINGS), decode(model, SAMPLINGS, draft=Failing(model, calls))
    assert_same(found, plain)
    assert found.drafts == {}


@pytest.mark.parametrize("rows", [VOCAB - 40, VOCAB + 40])
def test_a_vocabulary_may_be_padded_otherwise(
    model: Transformer, checkpoint: Path, tmp_path: Path, rows: int
) -> None:
    """Rows of the embedding that are missing, or beyond the served vocabulary, change no text."""
    directory = tmp_path / "padded"
    shutil.copytree(checkpoint, directory)
    (file,) = directory.glob("*.safetensors")
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if len(tensor) == VOCAB:
            more = torch.full((max(rows - VOCAB, 0), *tensor.shape[1:]), 9.0)
            tensors[name] = torch.cat([tensor[:rows], more]).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"vocab_size": rows}))
    draft = load_model(directory, ModelConfig.from_directory(directory, max_model_len=1024))
    plain, found = decode(model, SAMPLINGS), decode(model, SAMPLINGS, draft=draft)
    assert_same(found, plain)
    assert found.accepted > 10


@pytest.mark.timeout(400)
def test_the_last_stage_of_a_grid_guesses(model: Transformer, checkpoint: Path) -> None:
    """The rank that samples computes the draft model alone, while the others of its stage go on."""
    sampling = Sampling(temperature=0.8, ignore_eos=True)
    prompts = {"prompt of a": random_ids(21, 1), "prompt of b": random_ids(9, 2)}
    plain = Decoding(Engine(model))
    for name in ("a", "b"):
        plain.start(name, prompts[f"prompt of {name}"], sampling)
    plain.run()
    a, b = plain.texts["a"], plain.texts["b"]
    wrong = (a[4] + 1) % VOCAB
    steps = [
        Step(0, 0, (entry("a", 0, 13, samples=False),), admits=(admit("a", prompts["prompt of a"], sampling),)),
        Step(
            1,
            0,
            (replace(entry("a", 13, 8), proposes=2, follows=13), entry("b", 0, 9)),
            admits=(admit("b", prompts["prompt of b"], sampling),),
        ),
        Step(
            2,
            0,
            (
                StepEntry("a", 0, (Extent(21, 5),), True, drafts=(a[1], a[2], a[3], wrong), proposes=3),
                replace(entry("b", 9, 1), proposes=1, follows=9),
            ),
        ),
        Step(3, 0, (StepEntry("b", 0, (Extent(10, 2),), True, drafts=(b[2],), proposes=2), replace(entry("a", 25, 1), proposes=4))),
    ]  # fmt: skip
    ranks = Ranks(Topology(2, 2, 1), checkpoint, draft=checkpoint)
    found = ranks.run_once(steps, prompts, kv_blocks=64, block_tokens=BLOCK_TOKENS, steps_ahead=0)
    assert found == {"a": a[:6], "b": b[:4]}
    assert ranks.drafts == [
        ("a", tuple(a[1:3])),
        ("a", tuple(a[5:8])),
        ("b", tuple(b[2:3])),
        ("b", tuple(b[4:6])),
        ("a", tuple(a[6:10])),
    ]
