"""Grammars leave thoughts free, and hold for what is behind them."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from tokenizers import AddedToken, Tokenizer

from medha_router.grammar_check import GrammarCheck
from medha_router.structured_output import json_grammar
from medha_router.thought_formats import FORMS
from medha_router.thought_grammar import ThoughtGrammar
from medha_router.tool_formats import FORMATS
from medha_router.tool_grammar import CallsGrammar, no_calls
from medha_worker.rank.grammar_masks import Vocabulary

from .conftest import byte_level_tokenizer
from .test_tool_call_text import written
from .test_tool_grammar import ADD, RIGHT, WRONG, accepts

MARKS = FORMS["think"]
assert MARKS is not None
OPEN, MAYBE = (ThoughtGrammar(MARKS, is_open) for is_open in (True, False))
SCHEMA = json_grammar("f", {"type": "array", "items": {"type": "integer"}})
THOUGHTS = "\nI could <tool_call> or say [1], é.\n"
ALL = [(OPEN, f"{THOUGHTS}</think>"), (MAYBE, f"<think>{THOUGHTS}</think>")]


@pytest.mark.parametrize(("thoughts", "thought"), ALL)
def test_a_schema_holds_behind_thoughts(thoughts: ThoughtGrammar, thought: str) -> None:
    grammar = thoughts.before(SCHEMA, {})
    assert GrammarCheck().fault(grammar) is None
    for answer in ("[1]", "\n\n[1, 2]"):
        assert accepts(grammar, thought + answer)
    for wrong in ("", "x", "[1]x", "\n\n[x]", "</think>[1]"):
        assert not accepts(grammar, thought + wrong)
    assert accepts(grammar, "[1]") == (thoughts is MAYBE)
    assert not accepts(grammar, THOUGHTS)


def calls(form: str, thoughts: ThoughtGrammar, *, free: bool = False, answer: Any = None) -> str:
    return CallsGrammar(FORMATS[form], [("add", ADD)], False, free, answer, thoughts).lark({})


@pytest.mark.parametrize("form", [name for name, one in FORMATS.items() if not one.in_channels])
@pytest.mark.parametrize(("thoughts", "thought"), ALL)
def test_calls_come_behind_thoughts(form: str, thoughts: ThoughtGrammar, thought: str) -> None:
    right, *wrong = (written(form, [one]) for one in (RIGHT, *WRONG))
    for free in (False, True):
        grammar = calls(form, thoughts, free=free)
        assert GrammarCheck().fault(grammar) is None
        assert accepts(grammar, f"{thought}\n\n{right}")
        assert not any(accepts(grammar, thought + one) for one in wrong)
        assert accepts(grammar, f"{thought}\n\nHello") == free
        assert accepts(grammar, f"\n{thought}\n\n{right}") == (free or thoughts is OPEN), (
            "white space is a text"
        )
        assert accepts(grammar, right) == (thoughts is MAYBE)
        assert not any(accepts(grammar, one) for one in wrong) or thoughts is OPEN


def test_an_answer_or_no_calls_come_behind_thoughts() -> None:
    for thoughts, thought in ALL:
        grammar = calls("hermes", thoughts, free=True, answer={"type": "integer"})
        assert accepts(grammar, f"{thought}12")
        assert accepts(grammar, thought + written("hermes", [RIGHT]))
        assert not accepts(grammar, f"{thought}Hello")
        forbidding = no_calls(FORMATS["hermes"], {}, thoughts)
        assert GrammarCheck().fault(forbidding) is None
        assert accepts(forbidding, f"{thought}\n\nHello <tool_cal>")
        assert not accepts(forbidding, f"{thought}\n\nHello <tool_call>")
        assert accepts(forbidding, "Hello") == (thoughts is MAYBE)


@pytest.mark.parametrize("is_special", [True, False])
def test_marks_may_be_tokens_of_their_own(is_special: bool) -> None:
    tokenizer: Tokenizer = byte_level_tokenizer()
    names = (MARKS.opens, MARKS.closes)
    marks = [AddedToken(name, special=is_special) for name in names]
    (tokenizer.add_special_tokens if is_special else tokenizer.add_tokens)(marks)
    vocabulary = Vocabulary(tokenizer.to_str().encode(), tokenizer.get_vocab_size(), [1])
    special = {name: tokenizer.token_to_id(name) for name in names} if is_special else {}
    followed = LLTokenizer(TokenizerWrapper(vocabulary), eos_token=[1])

    def is_followed(grammar: str, output: str) -> bool:
        matcher = LLMatcher(followed, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        ids = tokenizer.encode(output, add_special_tokens=False).ids
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    for thoughts, thought in ALL:
        grammar = thoughts.before(SCHEMA, special)
        assert is_followed(grammar, f"{thought}\n\n[1]")
        assert not is_followed(grammar, f"{thought}x")
        assert is_followed(grammar, "[1]") == (thoughts is MAYBE)
        free = CallsGrammar(FORMATS["hermes"], [("add", ADD)], False, True, None, thoughts).lark(special)
        for said in ("Hello", written("hermes", [RIGHT])):
            assert is_followed(free, thought + said)
            assert is_followed(free, f"\n{thought}{said}")
            assert is_followed(free, f"\n{said}") == (thoughts is MAYBE)
        assert not is_followed(free, thought + written("hermes", [WRONG[0]]))
