"""Masks follow grammars: what is sampled under them is what the grammar says, wherever a sequence is resumed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from threading import Event, Semaphore
from types import SimpleNamespace
from typing import Any, cast

import hypothesis.strategies as st
import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from llguidance import LLMatcher, grammar_from

from medha.wire.messages import Sampling
from medha_worker.checkpoints.presets import init_checkpoint
from medha_worker.checkpoints.tokenizer_files import whole_tokenizer
from medha_worker.model.model_config import ModelConfig
from medha_worker.rank.engine import Loaded
from medha_worker.rank.grammar_masks import (
    FORMER_GRAMMARS,
    GrammarMask,
    GrammarMasks,
    Vocabulary,
    masks_of,
)

from ..models import load_model
from .test_executor import Engine, admit, entry, random_ids

VOCAB = 512
EOS = (1, 3)
MOST_TOKENS = 200


def json_grammar(schema: Any) -> str:
    return LLMatcher.grammar_from_json_schema(
        json.dumps(schema), overrides={"whitespace_pattern": "[ ]{1,2}"}
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint") / "tiny"
    init_checkpoint(directory, preset="tiny", seed=2)
    return directory


@pytest.fixture(scope="module")
def vocabulary(checkpoint: Path) -> Vocabulary:
    return Vocabulary(whole_tokenizer(checkpoint)["tokenizer.json"], VOCAB, EOS)


@pytest.fixture(scope="module")
def masks(checkpoint: Path) -> GrammarMasks:
    return masks_of(checkpoint, VOCAB, EOS)


def test_a_report_is_true_although_its_grammar_was_dropped_and_asked_for_again_meanwhile(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that cancels and tries again: the first report may arrive after the second question was sent."""
    masks, grammar = masks_of(checkpoint, VOCAB, EOS), grammar_from("regex", "x7")
    compiling, may_end, reported = Event(), Semaphore(0), Semaphore(0)
    compile_ = masks._matcher

    def slow(text: str) -> Any:
        compiling.set()
        assert may_end.acquire(timeout=60)
        return compile_(text)

    monkeypatch.setattr(masks, "_matcher", slow)
    masks.compile(grammar, grammar, lambda _: reported.release())
    assert compiling.wait(60)
    masks.drop(grammar)
    masks.compile(grammar, grammar, lambda _: reported.release())
    may_end.release()
    assert reported.acquire(timeout=60)
    mask = masks.mask_for(admit("a", random_ids(4, 1), Sampling(grammar=grammar)))
    assert mask is not None
    assert allowed(mask, [])
    assert mask.fault is None
    may_end.release()


def compiled(masks: GrammarMasks, grammar: str) -> str:
    """Compile a grammar, and return its name."""
    done = Event()
    masks.compile(grammar, grammar, lambda _: done.set())
    assert done.wait(60)
    return grammar


def mask_of(masks: GrammarMasks, grammar: str) -> GrammarMask:
    mask = masks.mask_for(admit("a", random_ids(4, 1), Sampling(grammar=compiled(masks, grammar))))
    assert mask is not None
    return mask


def allowed(mask: GrammarMask, outputs: list[int]) -> list[int]:
    """The tokens that a mask allows behind some outputs."""
    bits = np.unpackbits(mask.words(outputs).numpy().view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def walk(mask: GrammarMask, chance: np.random.Generator) -> list[int]:
    """Sample any allowed token, again and again; the end where it may come, with an even chance."""
    outputs: list[int] = []
    for _ in range(MOST_TOKENS):
        tokens = allowed(mask, outputs)
        assert tokens, mask.fault
        ends = [token for token in tokens if token in EOS]
        if ends and (len(ends) == len(tokens) or chance.random() < 0.5):
            return outputs
        outputs.append(int(chance.choice([token for token in tokens if token not in EOS])))
        mask.ahead(outputs)
    return [*outputs, -1]


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    """Schemas whose values are short."""
    leaves = st.one_of(
        st.sampled_from(
            [{"type": "boolean"}, {"type": "null"}, {"const": 5}, {"type": "string", "maxLength": 3}]
        ),
        st.lists(st.sampled_from(["a", 'b"', "é", 1, None, True]), min_size=1, unique=True).map(
            lambda one: {"enum": one}
        ),
        st.tuples(st.integers(-50, 50), st.integers(0, 60)).map(
            lambda one: {"type": "integer", "minimum": one[0], "maximum": one[0] + one[1]}
        ),
    )

    def containers(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
        objects = st.dictionaries(st.sampled_from("abxyz"), inner, min_size=1, max_size=3).flatmap(
            lambda properties: st.sets(st.sampled_from(sorted(properties))).map(
                lambda required: {
                    "type": "object",
                    "properties": properties,
                    "required": sorted(required),
                    "additionalProperties": False,
                }
            )
        )
        arrays = st.tuples(inner, st.integers(0, 2)).map(
            lambda one: {"type": "array", "items": one[0], "minItems": one[1], "maxItems": one[1] + 1}
        )
        choices = st.lists(inner, min_size=1, max_size=2).map(lambda one: {"anyOf": one})
        return st.one_of(objects, arrays, choices)

    return st.recursive(leaves, containers, max_leaves=5)


@settings(max_examples=25)
@given(schema=schemas(), seed=st.integers(0, 2**32))
def test_whatever_is_sampled_under_a_schema_is_valid(
    schema: dict[str, Any], seed: int, masks: GrammarMasks, vocabulary: Vocabulary
) -> None:
    mask = mask_of(masks, json_grammar(schema))
    outputs = walk(mask, np.random.default_rng(seed))
    if outputs[-1:] == [-1]:
        return
    text = b"".join(vocabulary.tokens[token] for token in outputs).decode()
    jsonschema.validate(json.loads(text), schema)


@settings(max_examples=25)
@given(schema=schemas(), seed=st.integers(0, 2**32), data=st.data())
def test_a_sequence_that_is_resumed_anywhere_has_the_masks_that_it_had(
    schema: dict[str, Any], seed: int, data: st.DataObject, masks: GrammarMasks
) -> None:
    grammar = json_grammar(schema)
    mask = mask_of(masks, grammar)
    outputs = [token for token in walk(mask, np.random.default_rng(seed)) if token >= 0]
    first, *others = [mask_of(masks, grammar) for _ in range(3)]
    for length in range(len(outputs) + 1):
        expected = allowed(first, outputs[:length])
        if data.draw(st.booleans()):
            others[0].ahead(outputs[:length])
        assert allowed(others[0], outputs[:length]) == expected
        if data.draw(st.booleans()):  # resumed here, with all that it has
            others[1] = mask_of(masks, grammar)
        assert allowed(others[1], outputs[:length]) == expected
        assert allowed(others[1], outputs[:length]) == expected  # planned a second time


def test_no_text_is_spelled_by_a_special_token(masks: GrammarMasks, vocabulary: Vocabulary) -> None:
    """The text `<|user|>` is allowed in a string, and the token of that name is not: it would end the turn."""
    user = vocabulary.tokens.index(b"<|user|>")
    mask = mask_of(masks, json_grammar({"const": "<|user|>"}))
    outputs = walk(mask, np.random.default_rng(0))
    assert user not in outputs
    assert b"".join(vocabulary.tokens[token] for token in outputs) == b'"<|user|>"'
    assert user not in vocabulary("<|user|>")


def test_a_text_that_the_grammar_completes_can_only_end(masks: GrammarMasks, vocabulary: Vocabulary) -> None:
    mask = mask_of(masks, grammar_from("choice", json.dumps(["yes", "no"])))
    outputs = vocabulary("yes")
    assert allowed(mask, outputs) == list(EOS)


def test_a_grammar_that_is_too_costly_says_so(masks: GrammarMasks) -> None:
    mask = mask_of(masks, grammar_from("regex", "(.*a){200}(.|b){300}c" * 20))
    outputs: list[int] = []
    chance = np.random.default_rng(3)
    for _ in range(400):
        tokens = allowed(mask, outputs)
        if not tokens:
            break
        outputs.append(int(chance.choice(tokens)))
    assert mask.fault is None or "cannot be followed further" in mask.fault


def test_a_model_without_a_stop_token_follows_no_grammar(checkpoint: Path) -> None:
    faults = list[str]()
    masks, done = masks_of(checkpoint, VOCAB, ()), Event()
    masks.compile("g", grammar_from("regex", "a"), lambda fault: (faults.append(fault), done.set()))
    assert done.wait(60)
    assert "eos_token_id" in faults[0]
    mask = masks.mask_for(admit("a", random_ids(4, 1), Sampling(grammar="g")))
    assert mask is not None
    assert allowed(mask, []) == []
    assert mask.fault == faults[0]


def test_a_dropped_grammar_is_compiled_anew_and_a_sequence_that_has_it_goes_on(
    masks: GrammarMasks, vocabulary: Vocabulary
) -> None:
    def text(mask: GrammarMask) -> bytes:
        return b"".join(vocabulary.tokens[token] for token in walk(mask, np.random.default_rng(0)))

    grammar = grammar_from("regex", "x7")
    first = mask_of(masks, grammar)
    masks.drop(grammar)
    with pytest.raises(ValueError, match="nobody waits"):
        masks.mask_for(admit("a", random_ids(4, 1), Sampling(grammar=grammar)))
    second = mask_of(masks, grammar)
    assert text(first) == text(second) == b"x7"


def test_a_grammar_that_waits_is_not_compiled_once_it_is_dropped_and_the_last_ones_outlive_an_epoch(
    checkpoint: Path,
) -> None:
    compiling, reported = Event(), list[str]()
    masks = masks_of(checkpoint, VOCAB, EOS)
    grammars = [grammar_from("regex", f"x{number}") for number in range(FORMER_GRAMMARS + 1)]
    for grammar in grammars:
        compiled(masks, grammar)
    masks.begin_epoch()
    held = masks._compiles.submit(compiling.wait)  # another grammar, which takes long
    for grammar in (*grammars, grammar_from("regex", "y"), grammar_from("regex", "z")):
        masks.compile(grammar, grammar, lambda _, grammar=grammar: reported.append(grammar))
    assert reported == grammars[1:], "they are there at once"
    masks.drop(grammar_from("regex", "y"))
    compiling.set()
    assert held.result()
    compiled(masks, "the last one")
    assert reported[len(grammars) - 1 :] == [grammars[0], grammar_from("regex", "z")]


@pytest.mark.parametrize("fails", ["matcher", "consume_token_par", "unsafe_compute_mask_ptr"])
def test_a_mask_that_could_not_be_computed_is_right_when_it_is_asked_for_again(
    fails: str, masks: GrammarMasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar = grammar_from("regex", "[ab]c")
    mask, other = mask_of(masks, grammar), mask_of(masks, grammar)
    outputs = [allowed(mask, [])[0]]

    def failing(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        if fails == "matcher":
            patched.setattr(mask, "matcher", failing)
        else:
            real = masks._follower._computes
            names = ("consume_token_par", "unsafe_compute_mask_ptr")
            double = SimpleNamespace(**{name: getattr(real, name) for name in names} | {fails: failing})
            patched.setattr(masks._follower, "_computes", double)
        with pytest.raises(MemoryError):
            mask.words(outputs)
    assert allowed(mask, outputs) == allowed(other, outputs)


def test_the_end_of_a_rank_waits_for_no_grammar_that_is_queued(checkpoint: Path) -> None:
    begun, may_end, reported = Event(), Event(), list[str]()
    masks = masks_of(checkpoint, VOCAB, EOS)
    held = masks._compiles.submit(lambda: (begun.set(), may_end.wait()))
    assert begun.wait(60)
    masks.compile("queued", grammar_from("regex", "x"), reported.append)
    Loaded.close(cast("Loaded", SimpleNamespace(_masks=masks, _disk=None, _peers=None, _store=None)))
    may_end.set()
    assert held.result(60)
    assert masks._compiled["queued"].cancelled()
    assert reported == []


@given(text=st.text() | st.sampled_from(["<|user|>", "a<|eos|>b", "  two", "日本語"]))
def test_a_vocabulary_tokenises_any_text_without_special_tokens(text: str, vocabulary: Vocabulary) -> None:
    for given_text in (text, text.encode(), text.encode()[1:]):
        ids = vocabulary(given_text)
        spelled = b"".join(vocabulary.tokens[number] for number in ids)
        assert spelled == (given_text.encode() if isinstance(given_text, str) else given_text)
        assert not set(ids) & set(vocabulary.special_token_ids)


# --- on a rank --------------------------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{3,6}$"},
        "numbers": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 999},
            "minItems": 2,
            "maxItems": 4,
        },
    },
    "required": ["name", "numbers"],
    "additionalProperties": False,
}
GUIDED = Sampling(
    temperature=1.0, grammar=json_grammar(SCHEMA), logprobs=1, repetition_penalty=1.1, max_tokens=80
)


@pytest.fixture
def engine(checkpoint: Path) -> Engine:
    model = load_model(checkpoint, ModelConfig.from_directory(checkpoint, max_model_len=1024))
    masks = masks_of(checkpoint, VOCAB, EOS[:1])
    compiled(masks, GUIDED.grammar)
    compiled(masks, "start: nothing")
    return Engine(model, mask_for=masks.mask_for, begin_masks=masks.begin)


def generated(engine: Engine, name: str, known: np.ndarray, prompt_length: int, **more: Any) -> list[int]:
    """Run a guided sequence until it ends; return its outputs, those that were known first."""
    more = {"reserved_tokens": prompt_length + 100, **more}
    samples = engine.start(name, known, GUIDED, prompt_length=prompt_length, **more).samples
    outputs = known[prompt_length:].tolist()
    while samples:
        (sample,) = samples
        outputs.append(sample.token)
        if sample.finish_reason is not None:
            assert sample.finish_reason == "stop"
            return outputs
        done = engine.step(entry(name, prompt_length + len(outputs) - 1, 1))
        assert done.failures == ()
        samples = done.samples
    raise AssertionError


@pytest.mark.parametrize("seed", range(3))
def test_a_guided_sequence_is_valid_and_continues_with_the_same_text_where_it_is_resumed(
    engine: Engine, vocabulary: Vocabulary, seed: int
) -> None:
    prompt = random_ids(20, seed)
    outputs = generated(engine, "whole", prompt, len(prompt), seed=seed)
    text = b"".join(vocabulary.tokens[token] for token in outputs[:-1]).decode()
    jsonschema.validate(json.loads(text), SCHEMA)
    assert re.fullmatch(r'\{ {0,2}"name".*', text)
    for cut in (1, len(outputs) // 2, len(outputs) - 1):
        known = np.concatenate([prompt, np.array(outputs[:cut], dtype=np.int32)])
        assert generated(engine, f"cut at {cut}", known, len(prompt), seed=seed) == outputs


def test_a_sequence_without_a_grammar_samples_what_it_samples_beside_none(engine: Engine) -> None:
    plain = Sampling(temperature=1.0)
    prompts = {"plain": random_ids(8, 1), "guided": random_ids(8, 2)}
    alone = [engine.start("alone", prompts["plain"], plain).samples[0].token]
    alone += engine.decode({"alone": 9}, 6)["alone"]
    beside = [engine.start("plain", prompts["plain"], plain).samples[0].token]
    engine.start("guided", prompts["guided"], GUIDED)
    beside += engine.decode({"plain": 9, "guided": 9}, 6)["plain"]
    assert beside == alone


def test_a_fault_of_a_grammar_ends_its_own_sequence_with_that_reason(engine: Engine) -> None:
    wrong = Sampling(grammar="start: nothing", temperature=0.0)
    engine.start("plain", random_ids(8, 1))
    ids = random_ids(8, 2)
    engine.give("prompt of wrong", ids)
    done = engine.step(entry("plain", 8, 1), entry("wrong", 0, 8), admits=(admit("wrong", ids, wrong),))
    assert [sample.id for sample in done.samples] == ["plain"]
    (failure,) = done.failures
    assert (failure.id, failure.reason) == ("wrong", "grammar")
    assert "cannot follow the grammar" in failure.detail


def test_a_mask_has_a_bit_for_each_token_whatever_the_vocabulary(checkpoint: Path) -> None:
    for size in (500, 512, 530):
        mask = mask_of(masks_of(checkpoint, size, EOS), grammar_from("regex", "[a-z]+"))
        words = mask.words([])
        assert (words.dtype, len(words)) == (torch.int32, -(-size // 32))
        assert max(allowed(mask, [])) < min(size, VOCAB)


def test_a_grammar_is_compiled_on_a_deeper_stack_than_routers_check_it_on(masks: GrammarMasks) -> None:
    """The grammar here ends the process on a stack of 8 MiB; routers have less."""
    rules = [*(f"a{index}: a{index + 1}" for index in range(3000)), 'a3000: "x"', "start: a0"]
    mask = mask_of(masks, grammar_from("lark", "\n".join(rules)))
    assert allowed(mask, [])


def test_a_sequence_whose_grammar_is_not_here_fails_alone(engine: Engine) -> None:
    engine.start("plain", random_ids(8, 1))
    ids = random_ids(8, 2)
    engine.give("prompt of unknown", ids)
    unknown = Sampling(grammar="unknown", temperature=0.0)
    done = engine.step(entry("plain", 8, 1), entry("unknown", 0, 8), admits=(admit("unknown", ids, unknown),))
    assert [sample.id for sample in done.samples] == ["plain"]
    assert ["its grammar is not here" in failure.detail for failure in done.failures] == [True]
