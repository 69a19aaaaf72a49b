"""Drafts change no text: each token is the one that a step of its own would sample, whatever was drafted."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medha.errors import PartFailed
from medha.wire.messages import Admit, Extent, Sample, Sampling, StepEntry
from medha_worker.checkpoints.presets import init_checkpoint
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.sampler import TokenMask
from medha_worker.model.transformer import Transformer
from medha_worker.rank.grammar_masks import GrammarMasks, masks_of

from ..models import load_model
from ..sampling_cases import any_sampling, third
from .test_executor import GREEDY, VOCAB, Engine, admit, entry, random_ids
from .test_grammar_masks import EOS, compiled, json_grammar

MOST_TOKENS = 14

Drafter = Callable[[str, list[int]], Sequence[int]]
"""Function that returns drafts behind some outputs of a sequence."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint") / "tiny"
    init_checkpoint(directory, preset="tiny", seed=2)
    return directory


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Transformer:
    return load_model(checkpoint, ModelConfig.from_directory(checkpoint, max_model_len=1024))


@pytest.fixture(scope="module")
def masks(checkpoint: Path) -> GrammarMasks:
    return masks_of(checkpoint, VOCAB, EOS)


@dataclass
class Text:
    """The tokens sampled for a sequence so far, and the number of steps that took."""

    admit: Admit
    samples: list[Sample] = field(default_factory=list)
    steps: int = 0

    @property
    def tokens(self) -> list[int]:
        return [sample.token for sample in self.samples]

    @property
    def has_ended(self) -> bool:
        return len(self.samples) >= MOST_TOKENS or self.samples[-1].finish_reason is not None


def run(
    model: Transformer,
    prompts: dict[str, np.ndarray],
    samplings: dict[str, Sampling],
    drafter: Drafter,
    mask_for: Callable[[Admit], TokenMask | None] = lambda _: None,
    beside: np.ndarray | None = None,
    first_seed: int = 0,
) -> dict[str, Text]:
    """Decode all sequences together, each with the next seed; chunks of the prompt `beside` are computed in the same steps."""
    engine = Engine(model, mask_for=mask_for)
    texts: dict[str, Text] = {}
    for name, ids in prompts.items():
        seed = first_seed + len(texts)
        texts[name] = Text(admit(name, ids, samplings[name], seed=seed, reserved_tokens=len(ids) + 40))
        take(engine.start(name, ids, samplings[name], seed=seed), texts)
    computed = 0
    while going := {name: one for name, one in texts.items() if not one.has_ended}:
        entries = []
        for name, one in going.items():
            drafts = tuple(drafter(name, one.tokens))
            start = len(prompts[name]) + len(one.samples) - 1
            entries.append(drafted(name, start, drafts))
        admits: tuple[Admit, ...] = ()
        if beside is not None and computed < len(beside):
            count = min(11, len(beside) - computed)
            if computed == 0:
                engine.give("prompt of beside", beside)
                admits = (admit("beside", beside),)
            entries.append(entry("beside", computed, count, samples=computed + count == len(beside)))
            computed += count
        take(engine.step(*entries, admits=admits), texts)
    return texts


def drafted(name: str, start: int, drafts: tuple[int, ...]) -> StepEntry:
    return replace(entry(name, start, 1 + len(drafts)), drafts=drafts)


def take(done: Any, texts: dict[str, Text]) -> None:
    assert done.failures == ()
    for name in {sample.id for sample in done.samples} & set(texts):
        texts[name].steps += 1
    for sample in done.samples:
        if sample.id in texts:
            texts[sample.id].samples.append(sample)


def nothing(_name: str, _outputs: list[int]) -> tuple[int, ...]:
    return ()


def partly_right(plain: dict[str, Text], seed: int) -> Drafter:
    """Return a drafter that knows the text, and is right for some tokens and then wrong for some."""
    chance = np.random.default_rng(seed)

    def drafter(name: str, outputs: list[int]) -> list[int]:
        right = plain[name].tokens[len(outputs) :][: int(chance.integers(0, 5))]
        return [*right, *chance.integers(0, VOCAB, int(chance.integers(0, 4))).tolist()]

    return drafter


def assert_same(found: dict[str, Text], plain: dict[str, Text]) -> None:
    for name, one in plain.items():
        count = len(one.samples)
        assert found[name].tokens[:count] == one.tokens
        if one.samples[-1].finish_reason is not None:
            assert len(found[name].samples) == count, "a token behind the last one"
        for sample, expected in zip(found[name].samples, one.samples, strict=False):
            assert sample.finish_reason == expected.finish_reason
            assert (sample.logprob is None) == (expected.logprob is None)
            if sample.logprob is not None and expected.logprob is not None:
                assert math.isclose(sample.logprob.logprob, expected.logprob.logprob, abs_tol=1e-3)
                assert len(sample.logprob.top) == len(expected.logprob.top)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), chunks=st.booleans(), masked=st.booleans())
def test_texts_are_those_of_steps_without_drafts(
    model: Transformer, seed: int, chunks: bool, masked: bool
) -> None:
    """Every sampling parameter, alone and together, with masks that follow the output; a prompt is computed beside."""
    chance = np.random.default_rng(seed)
    names = [f"s{index}" for index in range(int(chance.integers(1, 4)))]
    prompts = {name: random_ids(int(chance.integers(1, 40)), int(chance.integers(9))) for name in names}
    samplings = {name: any_sampling(chance, VOCAB) for name in names}
    beside = random_ids(60, 77) if chunks else None

    def mask_for(admit: Admit) -> TokenMask | None:
        return third(VOCAB, 1) if masked and admit.id == "s0" else None

    plain = run(model, prompts, samplings, nothing, mask_for)
    found = run(model, prompts, samplings, partly_right(plain, seed), mask_for, beside)
    assert_same(found, plain)


@pytest.mark.long
def test_a_thousand_seeds_give_the_same_texts_with_drafts_and_without(model: Transformer) -> None:
    """The prompt and the sampling parameters are the same for all, so only the seeds make the texts differ."""
    sampling = Sampling(temperature=1.0, top_p=0.95, ignore_eos=True)
    different: set[tuple[int, ...]] = set()
    for first_seed in range(0, 1000, 10):
        prompts = {f"s{number}": random_ids(24, 1) for number in range(10)}
        samplings = dict.fromkeys(prompts, sampling)
        plain = run(model, prompts, samplings, nothing, first_seed=first_seed)
        found = run(model, prompts, samplings, partly_right(plain, first_seed), first_seed=first_seed)
        assert_same(found, plain)
        assert sum(one.steps for one in found.values()) < sum(one.steps for one in plain.values())
        different |= {tuple(one.tokens) for one in plain.values()}
    assert len(different) > 990


def test_right_drafts_save_steps_and_wrong_ones_cost_none(model: Transformer) -> None:
    prompts, samplings = {"a": random_ids(20, 1)}, {"a": GREEDY}
    plain = run(model, prompts, samplings, nothing)
    assert plain["a"].steps == MOST_TOKENS

    def right(_: str, outputs: list[int]) -> list[int]:
        return plain["a"].tokens[len(outputs) :][:3]

    def wrong(_: str, outputs: list[int]) -> list[int]:
        return [(token + 1) % VOCAB for token in right(_, outputs)]

    assert_same(quick := run(model, prompts, samplings, right), plain)
    assert quick["a"].steps == 1 + math.ceil((MOST_TOKENS - 1) / 4)
    assert_same(slow := run(model, prompts, samplings, wrong), plain)
    assert slow["a"].steps == MOST_TOKENS


def test_a_text_under_a_grammar_is_the_same_with_drafts_that_break_it(
    model: Transformer, masks: GrammarMasks
) -> None:
    """Drafts are compared with what is sampled under the grammar, so it need not be asked about them."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    sampling = Sampling(grammar=compiled(masks, json_grammar(schema)), stop_token_ids=EOS)
    prompts = {"a": random_ids(20, 1), "b": random_ids(9, 3)}
    samplings = {"a": sampling, "b": GREEDY}
    plain = run(model, prompts, samplings, nothing, masks.mask_for)
    for seed in range(5):
        found = run(model, prompts, samplings, partly_right(plain, seed), masks.mask_for)
        assert_same(found, plain)


def test_nothing_is_sampled_behind_a_stop_token(model: Transformer) -> None:
    prompts = {"a": random_ids(20, 1)}
    text = run(model, prompts, {"a": GREEDY}, nothing)["a"].tokens
    stop = next(token for token in text[2:] if token not in text[:2])
    at = text.index(stop)
    samplings = {"a": replace(GREEDY, stop_token_ids=(stop,))}

    def right(_: str, outputs: list[int]) -> list[int]:
        return text[len(outputs) :][:6]

    found = run(model, prompts, samplings, right)["a"]
    assert found.tokens == text[: at + 1]
    assert found.samples[-1].finish_reason == "stop"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"samples": False}, "3 tokens are drafted"),
        ({"extents": (Extent(20, 5),)}, "3 tokens are drafted"),
        ({"extents": (Extent(20, 3),)}, "3 tokens are drafted"),
    ],
    ids=["samples nothing", "too many positions", "too few positions"],
)
def test_drafts_that_do_not_fit_their_entry_fail_alone(
    model: Transformer, changes: dict[str, Any], problem: str
) -> None:
    engine = Engine(model)
    engine.start("a", random_ids(20, 1))
    engine.start("b", random_ids(9, 1))
    done = engine.step(replace(drafted("a", 20, (1, 2, 3)), **changes), entry("b", 9, 1))
    assert [(one.id, problem in one.detail) for one in done.failures] == [("a", True)]
    assert [one.id for one in done.samples] == ["b"]


def test_a_step_may_begin_only_where_drafts_can_have_been_accepted(model: Transformer) -> None:
    engine = Engine(model)
    engine.start("a", random_ids(20, 1))
    engine.step(drafted("a", 20, (1, 2)))
    with pytest.raises(PartFailed, match="positions 24 to 25: 21 are computed"):
        engine.step(entry("a", 24, 1))
