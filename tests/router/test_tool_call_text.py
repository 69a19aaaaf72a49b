"""Calls are found in a model's text in the form of its family, however the text is cut into pieces."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medha.api.model_spec import ToolCallFormat
from medha_router.channels import Mark
from medha_router.tool_call_text import MOST_HELD_CHARACTERS, CallPart, Part
from medha_router.tool_call_xml import json_of
from medha_router.tool_formats import FORMATS, Piece, call_id, detected

FUNCTIONS: dict[str, dict[str, Any]] = {
    "add": {"properties": {"a": {"type": "integer"}, "note": {"type": "string"}}},
    "get_time": {"properties": {"zone": {"type": "string"}}},
}
Call = tuple[str, str]


def read(name: str, pieces: list[str], **options: Any) -> tuple[str, list[Call]]:
    """The text and the calls of an output, joined."""
    reader = FORMATS[name].reader(FUNCTIONS, **options)
    parts = [part for piece in pieces for part in reader.feed(symbols(name, piece))] + reader.end()
    return joined(parts)


_MARK = re.compile(r"((?:<\|channel\|>|<\|start\|>| to=)[^{]*?<\|message\|>|<\|(?:call|end)\|>)")


def symbols(name: str, text: str) -> Iterable[str]:
    """The characters of a text; in channels, headers and marks of calls are one, as special tokens are."""
    if not FORMATS[name].in_channels:
        return text
    pieces = _MARK.split(text)
    return [one for n, piece in enumerate(pieces) for one in ([Mark(piece)] if n % 2 else piece)]


def joined(parts: list[Part]) -> tuple[str, list[Call]]:
    text, calls = "", list[list[str]]()
    for part in parts:
        if isinstance(part, str):
            text += part
            continue
        if part.name is not None:
            calls.append([part.name, ""])
        assert part.call == len(calls) - 1, "calls come one after the other, and the name first"
        calls[-1][1] += part.arguments
    return text, [(name, arguments) for name, arguments in calls]


def first_way(pieces: tuple[Piece, ...]) -> str:
    """The text of pieces, in the first of the ways that there are."""
    return "".join(piece if isinstance(piece, str) else "".join(piece[0]) for piece in pieces)


def written(name: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """Calls as a model of this family writes them."""
    form = FORMATS[name]

    def one(function: str, arguments: dict[str, Any]) -> str:
        text = json.dumps(arguments, ensure_ascii=False)
        if form.as_tags:
            spelled = {
                key: value if isinstance(value, str) else json.dumps(value)
                for key, value in arguments.items()
            }
            text = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in spelled.items())
        return first_way(form.before).replace("%s", function) + text + "".join(form.after)

    between = "; " if form.between is None else "".join(form.between)
    return "".join(form.opens) + between.join(one(*call) for call in calls) + "".join(form.closes)


def test_every_form_of_the_manifest_can_be_read_and_no_other() -> None:
    assert {"auto", *FORMATS} == set(get_args(ToolCallFormat))


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<function=add>", "</function>",
    "<parameter=a>", "</parameter>", '{"name": "add", ', '"arguments": ', '"parameters": ', '{"a": 1}', "}", "]", "[", '"', "\\", "{",
    ",", ":", ";", " ", "\n", "add", "<", "<tool", "[TOOL", "é", "x", "Hello", "1", "null", '{"name": "add", "arguments": {"a": [1]}}',
    '{"name": "get_time", "parameters": {"zone": "<tool_call>"}}',
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)


@given(
    name=st.sampled_from(sorted(FORMATS)), text=TEXTS, cuts=st.lists(st.integers(0, 200)), one=st.booleans()
)
def test_cutting_a_text_into_pieces_changes_nothing(name: str, text: str, cuts: list[int], one: bool) -> None:
    given = list(symbols(name, text))
    places = sorted({0, len(given), *(cut for cut in cuts if cut < len(given))})
    pieces = [given[start:end] for start, end in pairwise(places)]
    whole = read(name, [text], one_call=one)
    for cut in (pieces, [[symbol] for symbol in given]):
        reader = FORMATS[name].reader(FUNCTIONS, one_call=one)
        assert joined([part for piece in cut for part in reader.feed(piece)] + reader.end()) == whole
    if not whole[1]:
        assert whole[0] == text, "a text that is no call passes whole"
    if one:
        assert len(whole[1]) <= 1


ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "a": st.integers(),
        "note": st.text(st.sampled_from('ab"\\{}[]<>é \n;,'), max_size=8).map(lambda text: f"n{text}n"),
    },
)
CALLS = st.lists(st.tuples(st.sampled_from(["add", "unknown.tool"]), ARGUMENTS), min_size=1, max_size=3)


@given(
    name=st.sampled_from(sorted(FORMATS)),
    calls=CALLS,
    before=st.sampled_from(["", "I will look.", "a < b [c]"]),
)
def test_what_a_family_writes_is_read(
    name: str, calls: list[tuple[str, dict[str, Any]]], before: str
) -> None:
    if name == "llama3_json":
        calls = [("add", arguments) for _, arguments in calls]
        before = ""
    if FORMATS[name].in_channels:
        calls = calls[:1]  # the first one ends the output
    text, found = read(name, [before + "\n\n" * bool(before) + written(name, calls) + "\n"])
    assert text == before, "the white space around calls is part of neither"
    assert [(function, json.loads(arguments)) for function, arguments in found] == calls


def test_text_that_may_begin_a_call_is_held_back_until_it_is_none() -> None:
    reader = FORMATS["hermes"].reader(FUNCTIONS)
    assert reader.feed("See <tool") == ["See"]
    assert reader.feed("s> ") == [" <tools>"]
    assert reader.feed('<tool_call>{"name": "ad') == []
    assert reader.feed('d", "arguments": {"a"') == [CallPart(0, "add", '{"a"')]
    assert reader.feed(": 1}}") == [CallPart(0, None, ": 1}")]
    assert reader.is_open
    assert reader.feed("</tool_call>\n") == []
    assert not reader.is_open
    assert reader.end() == []


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', [("add", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "add"}</tool_call>', [("add", "{}")]),
        ("hermes", '<tool_call>{"name": "add", "arguments": null}', [("add", "{}")]),
        (
            "hermes",
            '<tool_call>{"id": 5, "name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
            [("add", '{"a": 1}')],
        ),
        ("llama3_json", '<|python_tag|>{"name": "add", "parameters": {}}', [("add", "{}")]),
        ("llama3_json", '{"name": "Bob", "parameters": {}}', []),
        ("llama3_json", '{"name": "add", "age": 5}', []),
        ("llama3_json", 'See {"name": "add", "parameters": {}}', []),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {}}]', [("add", "{}")]),
        ("mistral", '[TOOL_CALLS]add[CALL_ID]123456789[ARGS]{"a": 1}', [("add", '{"a": 1}')]),
        ("mistral_args", '[TOOL_CALLS]add{"a": 1}', [("add", '{"a": 1}')]),
        ("mistral_args", "[TOOL_CALLS] are nice", []),
        (
            "qwen3_coder",
            "<tool_call>\n<function=add>\n<parameter=a>\n007\n</parameter>\n</function>",
            [("add", '{"a": "007"}')],
        ),
        (
            "harmony",
            '<|channel|>commentary to=functions.add<|message|>{"a": 1}<|call|>',
            [("add", '{"a": 1}')],
        ),
        ("harmony", " to=functions.add<|channel|>commentary json<|message|><|call|>", [("add", "{}")]),
        ("harmony", "<|channel|>analysis to=functions.a.b<|message|>no JSON<|end|>", [("a.b", "no JSON")]),
    ],
)
def test_variants_that_models_write(name: str, text: str, found: list[Call]) -> None:
    shown, calls = read(name, [text])
    assert calls == found
    assert shown == ("" if found else text)


def test_a_call_that_is_cut_off_stays_open() -> None:
    reader = FORMATS["hermes"].reader(FUNCTIONS)
    parts = reader.feed('<tool_call>{"name": "add", "arguments": {"a": ') + reader.end()
    assert joined(parts) == ("", [("add", '{"a": ')])
    assert reader.is_open


@pytest.mark.parametrize(
    ("rest", "is_open"), [('{"a": 1}', False), ('{"a": 1', True), ("", True), ('{"a": 1<|call|>', False)]
)
def test_a_call_in_channels_is_whole_by_its_mark_or_by_its_json(rest: str, is_open: bool) -> None:
    reader = FORMATS["harmony"].reader(FUNCTIONS)
    begun = reader.feed(
        symbols("harmony", f"I look. <|channel|>commentary to=functions.add<|message|>{rest}")
    )
    assert begun[:1] == ["I look."], "the white space before a call is no part of the text"
    assert reader.is_done == rest.endswith("<|call|>")
    reader.end()
    assert (reader.is_open, reader.is_done) == (is_open, not is_open)


def test_what_is_held_back_is_bounded() -> None:
    text = '<tool_call>{"arguments": "' + "x" * MOST_HELD_CHARACTERS
    reader = FORMATS["hermes"].reader(FUNCTIONS)
    assert reader.feed(text[:MOST_HELD_CHARACTERS]) == []
    assert joined(reader.feed(text[MOST_HELD_CHARACTERS:])) == (text, [])
    spaces = "\n" * MOST_HELD_CHARACTERS
    assert joined(FORMATS["hermes"].reader(FUNCTIONS).feed(spaces + "\n")) == (spaces, [])


def test_white_space_behind_a_call_is_read_once() -> None:
    """A model may write it without end; to read it again for each character would take hours here."""
    call = '<tool_call>{"name": "add", "arguments": {}}'
    spaces = "\n" * 1_000_000
    assert read("hermes", [call, spaces, "</tool_call>"]) == ("", [("add", "{}")])
    text, calls = read("hermes", [call, spaces, "!"])
    assert (text.strip("\n"), calls) == ("!", [("add", "{}")])


@pytest.mark.parametrize(
    ("name", "text", "call"),
    [
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}', ("\ufffd", "{}")),
        ("hermes", '<tool_call>{"name": "f", "arguments": "\\ud83d"}', ("f", "\ufffd")),
        (
            "qwen3_coder",
            '<tool_call><function=f><parameter=a>"\\ud800 \\ud83d\\ude00"</parameter></function>',
            ("f", '{"a": "\ufffd 😀"}'),
        ),
    ],
)
def test_half_a_character_in_json_becomes_one_that_can_be_sent(name: str, text: str, call: Call) -> None:
    shown, calls = read(name, [text])
    assert (shown, calls) == ("", [call])


@pytest.mark.parametrize(
    ("value", "schema", "text"),
    [
        ("5", {"type": "integer"}, "5"),
        ("5", {"type": "string"}, '"5"'),
        ("True", {"type": "boolean"}, "true"),
        ('["a"]', None, '["a"]'),
        ("NaN", {"type": "number"}, '"NaN"'),
        ("[1e999]", None, '"[1e999]"'),
        ("a b", {"type": "integer"}, '"a b"'),
    ],
)
def test_values_between_tags_get_the_type_of_their_schema(
    value: str, schema: dict[str, str] | None, text: str
) -> None:
    assert json_of(value, schema) == text


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("<tool_call>\n<function=f>", "qwen3_coder"),
        ("[TOOL_CALLS]", "mistral"),
        ("[TOOL_CALLS]{{ name }}[ARGS]", "mistral_args"),
        ("<|python_tag|>", "llama3_json"),
        ("<|channel|>{{ name }}<|call|>", "harmony"),
        ("""'{"name": "' + name + '", ' + '"parameters": '""", "llama3_json"),
        ("{{ tools }}", None),
    ],
)
def test_the_template_shows_the_form(template: str, name: str | None) -> None:
    assert detected(template) == name


def test_ids_differ_by_request_choice_and_call_and_mistrals_are_nine_letters_or_digits() -> None:
    ids = {call_id(request, *place, short=False) for request in "ab" for place in ((0, 0), (0, 1), (1, 0))}
    assert len(ids) == 6
    short = call_id("a", 0, 0, short=True)
    assert len(short) == 9
    assert short.isalnum()
