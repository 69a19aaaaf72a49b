"""Thoughts are separated from the answer by their marks, however the text is cut into pieces."""

from __future__ import annotations

from itertools import pairwise
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medha.api.model_spec import ReasoningFormat
from medha_router.thought_formats import FORMS, form_of_thoughts, place_after, place_within
from medha_router.thought_text import (
    MOST_HELD_SPACES,
    Phase,
    Thought,
    ThoughtMarks,
    ThoughtReader,
    ThoughtState,
    read,
)

THINK = ThoughtMarks("<think>", "</think>")
BEGINNINGS = (Phase.UNDECIDED, Phase.BEGUN, Phase.THINKING, Phase.ANSWER)


def parsed(text: str, begins: Phase, cuts: list[int] | None = None) -> tuple[str, str]:
    """The thoughts and the answer of a text that arrives in pieces."""
    reader = ThoughtReader(THINK, begins)
    parts: list[Thought | str] = []
    for start, end in pairwise(sorted({0, len(text), *(cut for cut in cuts or () if cut < len(text))})):
        parts += reader.feed(text[start:end])
    parts += reader.end()
    assert "" not in parts
    assert Thought("") not in parts
    thoughts = "".join(part.text for part in parts if isinstance(part, Thought))
    return thoughts, "".join(part for part in parts if isinstance(part, str))


@pytest.mark.parametrize(
    ("begins", "text", "thoughts", "answer"),
    [
        (Phase.UNDECIDED, "<think>\nI see.\n</think>\n\nHi é", "I see.", "Hi é"),
        (Phase.UNDECIDED, " \n<think>I see.</think>Hi", "I see.", "Hi"),
        (Phase.UNDECIDED, " \nHi <think>no</think>", "", " \nHi <think>no</think>"),
        (Phase.UNDECIDED, " <thin", "", " <thin"),
        (Phase.UNDECIDED, "<think>I see", "I see", ""),
        (Phase.UNDECIDED, "<think></think>", "", ""),
        (Phase.BEGUN, "\nI see.\n\n</think>\n\nHi\n", "I see.", "Hi\n"),
        (Phase.BEGUN, "<think>\nI see.</think>Hi", "I see.", "Hi"),
        (Phase.BEGUN, "</think>Hi", "", "Hi"),
        (Phase.BEGUN, "\n</think>\n\n", "", ""),
        (Phase.BEGUN, "I <b> </thin> see </think> </think>", "I <b> </thin> see", "</think>"),
        (Phase.BEGUN, "I see </thi", "I see </thi", ""),
        (Phase.BEGUN, "I see \n", "I see", ""),
        (Phase.BEGUN, "</thi", "</thi", ""),
        (Phase.THINKING, " see.</think> Hi <think>", " see.", "Hi <think>"),
        (Phase.ANSWER, " Hi</think>", "", " Hi</think>"),
    ],
)
def test_a_text_has_thoughts_and_an_answer(begins: Phase, text: str, thoughts: str, answer: str) -> None:
    assert parsed(text, begins) == (thoughts, answer)
    assert parsed(text, begins, list(range(len(text)))) == (thoughts, answer)


PIECES = st.sampled_from(["<think>", "</think>", "<", "</", "think>", " ", "\n", "a", "é", " b", "</think"])
TEXTS = st.lists(PIECES, max_size=12).map("".join)


@given(text=TEXTS, cuts=st.lists(st.integers(0, 60), max_size=20), begins=st.sampled_from(BEGINNINGS))
@settings(max_examples=1000)
def test_the_pieces_in_which_a_text_arrives_change_nothing(text: str, cuts: list[int], begins: Phase) -> None:
    assert parsed(text, begins, cuts) == parsed(text, begins)


@given(
    runs=st.lists(
        st.tuples(
            st.sampled_from([0, 3, MOST_HELD_SPACES, MOST_HELD_SPACES + 1, 2 * MOST_HELD_SPACES + 5]),
            st.sampled_from(["a", "<think>", "</think>", "</thi", "<"]),
        ),
        max_size=4,
    ),
    cuts=st.lists(st.integers(0, 40_000), max_size=20),
    begins=st.sampled_from(BEGINNINGS),
)
def test_white_space_is_held_back_up_to_a_bound(
    runs: list[tuple[int, str]], cuts: list[int], begins: Phase
) -> None:
    text = "".join(" " * spaces + word for spaces, word in runs)
    assert parsed(text, begins, cuts) == parsed(text, begins)
    state = ThoughtState(begins)
    for start in range(0, len(text), 1000):
        state, _ = read(THINK, state, text[start : start + 1000])
        assert len(state.held) <= MOST_HELD_SPACES + len(THINK.closes)


@given(text=TEXTS)
def test_nothing_but_marks_and_white_space_is_lost(text: str) -> None:
    thoughts, answer = parsed(text, Phase.THINKING)
    before, mark, behind = text.partition(THINK.closes)
    assert thoughts == before.rstrip()
    assert answer == (behind.lstrip() if mark else "")


@pytest.mark.parametrize(
    ("prompt", "begins"),
    [
        ("<|assistant|>", Phase.UNDECIDED),
        ("</think> a <think> b<|assistant|>\n", Phase.UNDECIDED),
        ("<|assistant|>\n<think>\n", Phase.BEGUN),
        ("<|assistant|><think>\n\n</think>\n\n", Phase.ANSWER),
        ("<|assistant|></think>", Phase.ANSWER),
    ],
)
def test_the_end_of_the_prompt_decides_where_an_output_begins(prompt: str, begins: Phase) -> None:
    assert place_after(prompt, THINK) is begins


@pytest.mark.parametrize(
    ("message", "begins"),
    [
        ("<think>I", Phase.THINKING),
        ("<think>\n", Phase.BEGUN),
        ("<think>I</think>\n", Phase.AFTER),
        ("<think>I</think>Hi", Phase.ANSWER),
        ("Hi", Phase.ANSWER),
        ("The mark <think> begins", Phase.ANSWER),
        ("<think>I</think>The mark <think> begins", Phase.ANSWER),
        ("\n", Phase.UNDECIDED),
    ],
)
def test_a_message_that_is_continued_may_be_within_its_thoughts(message: str, begins: Phase) -> None:
    assert place_within(message, THINK) is begins


def test_a_template_shows_the_form_unless_the_manifest_names_it() -> None:
    assert {"auto", "none", *FORMS} == set(get_args(ReasoningFormat))
    found = [
        form_of_thoughts(template, setting)
        for template, setting in (
            ("{{ m.split('</think>')[-1] }}", "auto"),
            ("[THINK]{{ m }}[/THINK]", "auto"),
            ("<|channel|>analysis", "auto"),
            ("<|channel|></think>", "none"),
            ("{{ m }}", "think"),
            ("{{ m }}", "auto"),
            ("</think>", "of-a-newer-release"),
        )
    ]
    assert found == ["think", "mistral", "harmony", None, "think", None, "think"]
