"""The fields that constrain an output become one grammar, or an error that names the field, the value and the fix."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from medha.errors import RequestInvalid
from medha.wire.grammar_limits import MAX_GRAMMAR_BYTES
from medha_router.grammar_check import ByteVocabulary, GrammarCheck
from medha_router.openai_requests import ChatRequest, ResponsesRequest, validate
from medha_router.structured_output import grammar_of

from .conftest import Router, Script, ScriptedReplica

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def check() -> GrammarCheck:
    return GrammarCheck()


def grammar(check: GrammarCheck, **fields: Any) -> str:
    return grammar_of(validate(ChatRequest, {**BODY, **fields}), check)


def accepts(grammar: str, text: str) -> bool:
    """Whether a text is a whole one of a grammar."""
    matcher = LLMatcher(LLTokenizer(TokenizerWrapper(ByteVocabulary()), slices=[]), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


def json_schema(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, **more}}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": json_schema(SCHEMA)},
        {"response_format": json_schema(SCHEMA, strict=True, description="x")},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None, "json_object": False}},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"json_schema": json.dumps(SCHEMA)},
    ],
    ids=str,
)
def test_all_names_of_a_schema_give_the_same_grammar(check: GrammarCheck, fields: dict[str, Any]) -> None:
    found = grammar(check, **fields)
    assert found == grammar(check, guided_json=SCHEMA)
    assert accepts(found, '{"age":5}')
    assert accepts(found, '{\n  "age": 5\n}')
    for wrong in ('{"age":10}', '{"age":5,"b":1}', "{}", '{"age":"5"}', '{"age":' + " " * 65 + "5}"):
        assert not accepts(found, wrong)


@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    [
        ({"response_format": {"type": "json_object"}}, '{"a": [1, null]}', "[1]"),
        ({"structured_outputs": {"json_object": True}}, "{}", "1"),
        ({"response_format": {"type": "regex", "pattern": "a+b"}}, "aab", "ba"),
        ({"response_format": {"type": "regex", "regex": "a+b"}}, "ab", "a"),
        ({"guided_regex": "[0-9]{3}"}, "123", "12"),
        ({"regex": "(yes|no)"}, "no", "nope"),
        ({"structured_outputs": {"choice": ["red", "green"]}}, "green", "blue"),
        ({"guided_choice": ["red"]}, "red", "re"),
        ({"guided_grammar": 'root ::= "a" ("b" | "c")+'}, "abcb", "a"),
        ({"ebnf": 'root ::= "x" [0-9]'}, "x7", "x"),
        (
            {"response_format": {"type": "grammar", "grammar": 'start: "a" NUMBER\nNUMBER: /[0-9]+/'}},
            "a12",
            "a",
        ),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": "_"}, '{_"age":_5}', '{ "age":5}'),
        ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "_"}}, '{"age":5}', '{ "age":5}'),
    ],
    ids=str,
)
def test_a_grammar_accepts_what_was_asked_for(
    check: GrammarCheck, fields: dict[str, Any], right: str, wrong: str
) -> None:
    found = grammar(check, **fields)
    assert accepts(found, right)
    assert not accepts(found, wrong)


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"response_format": None}])
def test_nothing_asked_for_is_no_grammar(check: GrammarCheck, fields: dict[str, Any]) -> None:
    assert grammar(check, **fields) == ""


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        (
            {"response_format": {}},
            "response_format.type",
            "is null; give one of text, json_object, json_schema",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type", 'is "xml"; give one of'),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "give an object with `name`",
        ),
        (
            {"response_format": json_schema(SCHEMA, name="")},
            "response_format.json_schema.name",
            "give the schema a name",
        ),
        (
            {"response_format": json_schema(SCHEMA, strict="yes")},
            "response_format.json_schema.strict",
            'is "yes"',
        ),
        (
            {"response_format": json_schema(None)},
            "response_format.json_schema.schema",
            "is null; give a JSON Schema",
        ),
        (
            {"response_format": json_schema([])},
            "response_format.json_schema.schema",
            "is []; give a JSON Schema",
        ),
        (
            {"response_format": json_schema({"type": "objet"})},
            "response_format.json_schema.schema",
            "Invalid type: objet",
        ),
        (
            {"response_format": json_schema({"not": {"type": "null"}})},
            "response_format.json_schema.schema",
            '["not"]',
        ),
        (
            {"guided_json": {"minLength": 5, "maxLength": 2, "type": "string"}},
            "guided_json",
            "minLength (5) is greater",
        ),
        ({"guided_json": {"$ref": "#/$defs/none"}}, "guided_json", "'/$defs/none' does not exist"),
        ({"guided_json": {"$ref": "http://a.b/c"}}, "guided_json", "Default retriever does not fetch"),
        ({"guided_json": {"type": "string", "format": "colour"}}, "guided_json", "Unknown format: colour"),
        ({"guided_json": nested(80)}, "guided_json", "recursion limit"),
        ({"guided_json": "{"}, "guided_json", 'is "{", which is not JSON'),
        ({"guided_json": "[" * 100_000}, "guided_json", "which is not JSON"),
        ({"guided_json": {"const": "x" * MAX_GRAMMAR_BYTES}}, "guided_json", "make it smaller"),
        ({"guided_regex": "(a"}, "guided_regex", "regex parse error: unclosed group"),
        ({"guided_regex": "(?=a)b"}, "guided_regex", "cannot be followed"),
        ({"guided_regex": "(" * 5000 + ")" * 5000}, "guided_regex", "cannot be followed"),
        ({"guided_choice": []}, "guided_choice", "give a list of 1 to 10000 texts"),
        ({"guided_choice": ["a", ""]}, "guided_choice", "none empty"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice", "is [1]; give a list"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex", "is 5; give it as a text"),
        (
            {"structured_outputs": {"structural_tag": {}}},
            "structured_outputs.structural_tag",
            "it takes json, ",
        ),
        ({"guided_grammar": "root ::= foo"}, "guided_grammar", "Rule 'foo' not found"),
        (
            {"guided_grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000},
            "guided_grammar",
            "cannot be read",
        ),
        ({"guided_grammar": "start: <|end|>"}, "guided_grammar", "special_token"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "needs `guided_json`"),
        ({"guided_regex": "a", "guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "is for JSON"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex", "contradicts `guided_json`"),
        (
            {"guided_regex": "a", "response_format": {"type": "json_object"}},
            "guided_regex",
            "contradicts `response_format`",
        ),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "leave one of them out"),
        ({"guided_regex": "a", "min_tokens": 3}, "min_tokens", "is 3, but `guided_regex` decides"),
    ],
    ids=lambda one: str(one)[:60],
)
def test_a_grammar_that_cannot_be_followed_is_named_with_the_reason(
    check: GrammarCheck, fields: dict[str, Any], param: str, said: str
) -> None:
    with pytest.raises(RequestInvalid) as refused:
        grammar(check, **fields)
    assert refused.value.param == param
    assert said in str(refused.value)


def test_the_responses_api_has_the_format_in_its_text(check: GrammarCheck) -> None:
    def of(**text: Any) -> str:
        return grammar_of(
            validate(ResponsesRequest, {"model": "tiny", "input": "Hello", "text": text}), check
        )

    assert of(format={"type": "json_schema", "name": "a", "schema": SCHEMA}) == grammar(
        check, guided_json=SCHEMA
    )
    assert of(format={"type": "json_object"}, verbosity="medium") == grammar(
        check, response_format={"type": "json_object"}
    )
    assert of() == of(format={"type": "text"}) == ""
    for text, param in (
        ({"format": {"type": "json_schema", "name": "a", "schema": {"type": "objet"}}}, "text.format.schema"),
        ({"format": {"type": "json_schema"}}, "text.format.name"),
        ({"format": {"type": "xml"}}, "text.format"),
        ({"verbosity": "low"}, "text.verbosity"),
    ):
        with pytest.raises(RequestInvalid) as refused:
            of(**text)
        assert refused.value.param == param


def test_a_hint_to_the_library_lifts_nothing_of_a_schema(check: GrammarCheck) -> None:
    with pytest.raises(RequestInvalid, match="Unimplemented"):
        grammar(check, guided_json={"not": {}, "x-guidance": {"lenient": True}})


def test_a_replica_gets_the_grammar_and_a_bad_one_never_reaches_it(
    router: Router, replica: ScriptedReplica
) -> None:
    replica.script = Script(tokens=tuple(b"{}"), finish="length")
    answer = router.post(CHAT, {**BODY, "response_format": json_schema(SCHEMA)})
    assert answer.status_code == 200
    sent = len(replica.submits)
    assert '"age"' in replica.submits[-1].sampling.grammar
    answer = router.post(CHAT, {**BODY, "response_format": json_schema({"type": "objet"})})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "response_format.json_schema.schema"
    assert len(replica.submits) == sent


CHAIN = 3000


@pytest.mark.parametrize(
    "fields",
    [
        {  # the library recurses for each
            "guided_json": {
                "$ref": "#/$defs/0",
                "$defs": {
                    **{str(index): {"$ref": f"#/$defs/{index + 1}"} for index in range(CHAIN)},
                    str(CHAIN): {},
                },
            }
        },
        {
            "ebnf": "\n".join(
                [*(f"a{index}: a{index + 1}" for index in range(CHAIN)), f'a{CHAIN}: "x"', "start: a0"]
            )
        },
        {"guided_json": {"type": "integer", "multipleOf": 1_000_003}},  # it computes for minutes
        {"ebnf": 'root ::= "a"' + "\n" * 100_000},  # its conversion, too
    ],
    ids=["references", "rules", "time", "lines"],
)
def test_no_grammar_crashes_or_occupies_the_process_that_reads_it(
    check: GrammarCheck, fields: dict[str, Any]
) -> None:
    with pytest.raises(RequestInvalid, match="nested too deep, or takes more than"):
        grammar(check, **fields)
    assert grammar(check, guided_json=SCHEMA)


def test_a_lost_process_of_checks_is_started_anew(check: GrammarCheck) -> None:
    assert grammar(check, regex="first")
    process = check._process
    assert process is not None
    process.kill()
    process.wait()
    assert grammar(check, regex="second")
    assert check._process is not process
