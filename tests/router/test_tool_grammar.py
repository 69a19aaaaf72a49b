"""The grammar of calls holds a model to the form of its family and to the schemas of the functions."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper, grammar_from
from tokenizers import AddedToken, Tokenizer

from medha_router.channel_grammar import in_channels
from medha_router.channels import CALL, CONSTRAIN, MARKS
from medha_router.grammar_check import ByteVocabulary, GrammarCheck
from medha_router.structured_output import json_grammar
from medha_router.tool_formats import FORMATS
from medha_router.tool_grammar import CallsGrammar, no_calls, unwritable
from medha_worker.rank.grammar_masks import Vocabulary

from .conftest import byte_level_tokenizer
from .test_tool_call_text import joined, symbols, written

ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "unit": {"type": "string", "enum": ["cm", "in"]}},
    "required": ["a", "unit"],
    "additionalProperties": False,
}
FUNCTIONS: list[tuple[str, dict[str, Any] | None]] = [("add", ADD), ("note", None)]
RIGHT = ("add", {"a": 1, "unit": "cm"})
WRONG = [("add", {"a": 1}), ("add", {"a": "x", "unit": "cm"}), ("add", {"a": 1, "unit": "mm"}), ("other", {})]
BYTES = LLTokenizer(TokenizerWrapper(ByteVocabulary()), slices=[])


@pytest.fixture(scope="module")
def check() -> GrammarCheck:
    return GrammarCheck()


def accepts(grammar: str, text: str) -> bool:
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


def grammar(
    name: str, *, one: bool = False, free: bool = False, answer: dict[str, Any] | None = None
) -> CallsGrammar:
    return CallsGrammar(FORMATS[name], FUNCTIONS, one, free, answer)


def said(name: str, text: str) -> str:
    """An answer as a model of this family writes it."""
    return f"<|channel|>final<|message|>{text}" if FORMATS[name].in_channels else text


@pytest.mark.parametrize("name", FORMATS)
def test_required_calls_follow_their_schemas(check: GrammarCheck, name: str) -> None:
    found = grammar(name).lark({})
    assert check.fault(found) is None
    assert accepts(found, written(name, [RIGHT]))
    assert accepts(found, written(name, [("note", {"text": "any"})]))
    for wrong in WRONG:
        assert not accepts(found, written(name, [wrong]))
    for text in ("", "Hello", "Hello " + written(name, [RIGHT]), said(name, "Hello")):
        assert not accepts(found, text)
    several = written(name, [RIGHT, RIGHT])
    assert accepts(found, several) == (FORMATS[name].between is not None)
    assert not accepts(grammar(name, one=True).lark({}), several)


@pytest.mark.parametrize("name", FORMATS)
def test_text_is_free_until_a_call_begins(check: GrammarCheck, name: str) -> None:
    found = grammar(name, free=True).lark({})
    assert check.fault(found) is None
    for text in ("", "Hello!\n\nI < you [and] <tools> é", " \n", "```\n{}\n```"):
        assert accepts(found, said(name, text))
    assert accepts(found, written(name, [RIGHT]))
    for wrong in WRONG:
        assert not accepts(found, written(name, [wrong]))
    if FORMATS[name].marker is not None:
        assert accepts(found, "I look.\n" + written(name, [RIGHT]))
        assert not accepts(found, f"I look. {FORMATS[name].marker} no call")


@given(text=st.text(max_size=40))
@settings(max_examples=200)
def test_no_text_without_a_marker_is_forbidden_by_a_grammar_that_forbids_or_allows_calls(text: str) -> None:
    for name in ("hermes", "mistral"):
        assert accepts(_NO_CALLS[name], text)
        assert accepts(_FREE[name], text)


_NO_CALLS = {name: no_calls(FORMATS[name], {}) for name in ("hermes", "mistral")}
_FREE = {name: grammar(name, free=True).lark({}) for name in ("hermes", "mistral")}


def test_a_grammar_can_forbid_calls() -> None:
    found = no_calls(FORMATS["hermes"], {})
    assert accepts(found, "I have no <tool_cal> here")
    assert not accepts(found, "x " + written("hermes", [RIGHT]))


def test_an_answer_with_a_schema_of_its_own_stands_beside_calls() -> None:
    found = grammar("hermes", free=True, answer={"type": "array", "items": {"type": "integer"}}).lark({})
    assert accepts(found, "[1, 2]")
    assert accepts(found, written("hermes", [RIGHT]))
    assert not accepts(found, "Hello")


def test_optional_parameters_between_tags_may_be_left_out_and_texts_may_have_lines() -> None:
    schema = {
        "type": "object",
        "properties": {"path": {"type": "string"}, "tags": {"type": "array", "items": {"type": "string"}}},
        "required": ["path"],
    }
    found = CallsGrammar(FORMATS["qwen3_coder"], [("write", schema)], True, False).lark({})
    assert accepts(found, written("qwen3_coder", [("write", {"path": "two\nlines <b>"})]))
    assert accepts(found, written("qwen3_coder", [("write", {"path": "x", "tags": ["a"]})]))
    assert not accepts(found, written("qwen3_coder", [("write", {"tags": ["a"]})]))
    assert unwritable(schema) is None
    assert unwritable({"properties": {"a": {"type": "string", "pattern": "x"}}}) == "a"
    assert unwritable({"properties": {"a": {"type": "string", "enum": ["x"], "const": "x"}}}) is None
    assert unwritable({"properties": {}, "required": ["b"]}) == "b"
    assert unwritable({"properties": {}, "minProperties": 1}) == "minProperties"
    assert unwritable({"additionalProperties": {"type": "string"}}) == "additionalProperties"


@pytest.mark.parametrize(
    ("key", "schema"),
    [
        ("a>b", {"type": "string"}),
        ("a\nb", {"type": "integer"}),
        (" a", {"type": "integer"}),
        ("a", False),
        ("a", {"type": "string", "enum": 5}),
        ("a", {"type": "string", "enum": []}),
        ("a", {"type": "string", "enum": ["x", 1]}),
        ("a", {"type": "string", "enum": ["</parameter>"]}),
        ("a", {"type": "string", "enum": ["x", "yy"], "minLength": 2}),
        ("a", {"type": "string", "enum": ["x", "y"], "const": "x"}),
        ("a", {"$ref": "#/properties/b"}),
        ("a", {"type": "array", "items": {"$ref": "#"}}),
    ],
)
def test_what_tags_cannot_spell_or_hold_to_is_named(key: str, schema: Any) -> None:
    assert unwritable({"type": "object", "properties": {"b": {"type": "string"}, key: schema}}) == key


def test_choices_between_tags_may_have_any_characters() -> None:
    choices = ["é", 'a "b"', "two\nlines"]
    schema = {"type": "object", "properties": {"a": {"type": "string", "enum": choices}}, "required": ["a"]}
    found = CallsGrammar(FORMATS["qwen3_coder"], [("f", schema)], True, False).lark({})
    for choice in choices:
        assert accepts(found, written("qwen3_coder", [("f", {"a": choice})]))
    assert not accepts(found, written("qwen3_coder", [("f", {"a": "e"})]))


def test_marks_that_are_special_tokens_are_followed_as_the_tokens_that_they_are() -> None:
    """A rank's own vocabulary: special tokens never belong to a text there."""
    tokenizer: Tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in ("[TOOL_CALLS]", "[ARGS]")])
    size = tokenizer.get_vocab_size()
    vocabulary = Vocabulary(tokenizer.to_str().encode(), size, [1])
    form = FORMATS["mistral_args"]
    special = {mark: tokenizer.token_to_id(mark) for mark in ("[TOOL_CALLS]", "[ARGS]")}
    followed = LLTokenizer(TokenizerWrapper(vocabulary), eos_token=[1])
    ids = tokenizer.encode("Hi. " + written("mistral_args", [RIGHT, RIGHT]), add_special_tokens=False).ids
    assert special["[ARGS]"] in ids
    for free, begin in ((True, 0), (False, ids.index(special["[TOOL_CALLS]"]))):
        lark = CallsGrammar(form, FUNCTIONS, False, free).lark(special)
        matcher = LLMatcher(followed, lark, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        assert matcher.try_consume_tokens(ids[begin:]) == len(ids) - begin
        assert matcher.is_accepting()
        fresh = LLMatcher(followed, lark, log_level=0)
        text = tokenizer.encode("say", add_special_tokens=False).ids
        assert (fresh.try_consume_tokens(text) == len(text)) == free
        spelled = vocabulary("[TOOL_CALLS]")
        assert special["[TOOL_CALLS]"] not in spelled
    silent = LLMatcher(followed, no_calls(form, special), log_level=0)
    assert silent.try_consume_tokens(ids) == ids.index(special["[TOOL_CALLS]"])


@pytest.mark.parametrize("name", FORMATS)
def test_what_the_grammar_lets_through_is_read_as_the_same_calls(name: str) -> None:
    text = written(name, [RIGHT, ("note", {})][: 1 if FORMATS[name].between is None else 2])
    assert accepts(grammar(name).lark({}), text)
    reader = FORMATS[name].reader({one: schema or {} for one, schema in FUNCTIONS})
    shown, calls = joined(reader.feed(symbols(name, text)) + reader.end())
    assert shown == ""
    assert calls[0] == (RIGHT[0], json.dumps(RIGHT[1]))


# --- in channels ----------------------------------------------------------------------------------------------

MARKS_OF_CHANNELS = (*MARKS, CONSTRAIN, CALL)
NEXT = "<|end|><|start|>assistant"
THOUGHT, PREAMBLE = (
    f"<|channel|>analysis<|message|>I think: é\n{NEXT}",
    f"<|channel|>commentary<|message|>I look.{NEXT}",
)
HEADERS = [
    f"{receiver}{kind}<|message|>"
    for receiver in ("<|channel|>commentary to=functions.add", " to=functions.add<|channel|>commentary")
    for kind in (" <|constrain|>json", "<|constrain|>json", " json", "")
]
ARGUMENTS = '{"a": 1, "unit": "cm"}'


class Followed:
    """A rank's own vocabulary of a model with channels."""

    def __init__(self) -> None:
        tokenizer = byte_level_tokenizer()
        names = (*MARKS_OF_CHANNELS, "<|return|>")
        tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
        self.tokenizer = tokenizer
        self.special = {mark: tokenizer.token_to_id(mark) for mark in MARKS_OF_CHANNELS}
        ends = self.ends = [tokenizer.token_to_id("<|return|>"), self.special[CALL]]
        vocabulary = Vocabulary(tokenizer.to_str().encode(), tokenizer.get_vocab_size(), ends)
        self.tokens = LLTokenizer(TokenizerWrapper(vocabulary), eos_token=ends)

    def accepts(self, grammar: str, output: str) -> bool:
        """Whether a whole output follows a grammar; then both tokens that end one may follow."""
        matcher = LLMatcher(self.tokens, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        ids = self.tokenizer.encode(output, add_special_tokens=False).ids
        if matcher.try_consume_tokens(ids) < len(ids) or not matcher.is_accepting():
            return False
        mask = matcher.compute_bitmask()
        return all(mask[one // 8] >> one % 8 & 1 for one in self.ends)


@pytest.fixture(scope="module")
def followed() -> Followed:
    return Followed()


@pytest.mark.parametrize("header", HEADERS)
def test_calls_in_channels_have_any_header_that_models_write_and_thoughts_before(
    followed: Followed, header: str
) -> None:
    required = grammar("harmony").lark(followed.special)
    auto = grammar("harmony", free=True).lark(followed.special)
    beside = grammar("harmony", free=True, answer=ADD).lark(followed.special)
    silent = no_calls(FORMATS["harmony"], followed.special)
    for before in ("", THOUGHT, THOUGHT * 2 + PREAMBLE, PREAMBLE + THOUGHT):
        for found in (required, auto, beside):
            assert followed.accepts(found, before + header + ARGUMENTS)
            assert not followed.accepts(found, before + header + '{"a": "x"}')
            assert not followed.accepts(found, before + header.replace(".add", ".other") + "{}")
        assert not followed.accepts(silent, before + header + ARGUMENTS)


def test_answers_in_channels_are_free_or_follow_their_schema(followed: Followed) -> None:
    final = "<|channel|>final<|message|>"
    grammars = {
        "required": grammar("harmony").lark(followed.special),
        "auto": grammar("harmony", free=True).lark(followed.special),
        "none": no_calls(FORMATS["harmony"], followed.special),
        "beside": grammar("harmony", free=True, answer=ADD).lark(followed.special),
        "alone": in_channels(json_grammar("f", ADD), followed.special),
    }
    outputs = {
        f"{THOUGHT}{final}Hello": {"auto", "none"},
        f"{PREAMBLE}{final}Hello": {"auto", "none"},
        f"{THOUGHT}{final}{ARGUMENTS}": {"auto", "none", "beside", "alone"},
        f"{final[:-11]} <|constrain|>json<|message|>{ARGUMENTS}": {"auto", "none", "beside", "alone"},
        f"{PREAMBLE}{final}{ARGUMENTS}": {"auto", "none"},
        THOUGHT: set[str](),
        "Hello": set[str](),
    }
    for output, allowing in outputs.items():
        assert {name for name, found in grammars.items() if followed.accepts(found, output)} == allowing, (
            output
        )


@pytest.mark.parametrize(
    ("own", "right", "wrong"),
    [
        (grammar_from("regex", "a+"), "aa", "b"),
        (grammar_from("choice", '["x", "y"]'), "y", "z"),
        ('start: "(" NUMBER ")"\nNUMBER: /[0-9]+/\n', "(12)", "()"),
    ],
)
def test_a_grammar_of_any_kind_holds_for_the_answer_after_thoughts(
    followed: Followed, own: str, right: str, wrong: str
) -> None:
    found = in_channels(own, followed.special)
    assert followed.accepts(found, f"{THOUGHT}<|channel|>final<|message|>{right}")
    assert not followed.accepts(found, f"{THOUGHT}<|channel|>final<|message|>{wrong}")
    assert not followed.accepts(found, right)
