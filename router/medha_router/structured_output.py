"""The grammar that a request asks its output to follow, from the fields of OpenAI, vLLM and SGLang.

A grammar is a text in the form of llguidance, which ranks read too. It is checked here, so that a request with a grammar
that cannot be followed is refused before any of it is scheduled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from llguidance import LLMatcher, grammar_from

from medha.errors import RequestInvalid
from medha.wire.grammar_limits import MAX_GRAMMAR_BYTES
from medha_router.grammar_check import GrammarCheck, brief
from medha_router.openai_requests import GenerationRequest, ResponsesRequest
from medha_router.request_model import shown

MOST_CHOICES = 10_000
WHITESPACE = r"[ \n\r\t]{1,64}"
"""White space between the tokens of JSON. It is bounded, so that no model writes it without end."""

_FORMATS = ("text", "json_object", "json_schema", "regex", "grammar")
_ANY_OBJECT: Mapping[str, Any] = MappingProxyType({"type": "object"})


class Wanted(NamedTuple):
    """A grammar as a request asks for it."""

    field: str  # with its place in the request
    kind: str  # json, regex, choice or grammar
    value: Any


Placed = Callable[[str], str]
"""Function from the grammar of an answer to the grammar of the whole output."""


def grammar_of(request: GenerationRequest, check: GrammarCheck, placed: Placed | None = None) -> str:
    """Return the grammar of a request's output, "" if it may be any text; `placed` adds the output before the answer.

    Raises:
        RequestInvalid: names the field that asks for a grammar that cannot be followed, or that contradicts another.
    """
    wanted = list(_wanted(request))
    if not wanted:
        if request.guided_whitespace_pattern is not None:
            raise _invalid("guided_whitespace_pattern", "needs `guided_json`; add that, or leave it out")
        return ""
    if len(wanted) > 1:
        first, second = wanted[0].field, wanted[1].field
        raise _invalid(second, f"contradicts `{first}`: an output follows one grammar; leave one of them out")
    grammar = _written(wanted[0], _whitespace(request, wanted[0]), check)
    require(grammar, wanted[0].field, check)
    require_free_end(request, wanted[0].field)
    return grammar if placed is None else placed(grammar)


def schema_of_answer(request: GenerationRequest) -> tuple[str, dict[str, Any]] | None:
    """Return the field and the JSON Schema that an answer without calls has to follow; None if it may be any text.

    Raises:
        RequestInvalid: it asks for a grammar of another kind, or for several.
    """
    wanted = list(_wanted(request))
    if not wanted:
        return None
    field, kind, value = wanted[0]
    if len(wanted) > 1 or kind != "json" or request.guided_whitespace_pattern is not None:
        raise _invalid(
            wanted[-1].field,
            'cannot be followed beside `tools` that may be called; use a `response_format` with a JSON Schema, or set `tool_choice` to "none"',
        )
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise _invalid(field, f"is {shown(value)}, which is not JSON: {error}") from error
    if value is True:
        value = {}
    if not isinstance(value, dict):
        raise _invalid(field, f"is {shown(value)}; give a JSON Schema (an object)")
    return field, value


def require(grammar: str, field: str, check: GrammarCheck) -> None:
    """Refuse a grammar that ranks cannot follow.

    Raises:
        RequestInvalid: names the field and the reason.
    """
    _require_size(field, grammar)
    fault = check.fault(grammar)
    if fault is not None:
        raise _invalid(field, f"cannot be followed: {fault}; change that, or leave the field out")


def _require_size(field: str, grammar: str) -> None:
    size = len(grammar.encode())
    if size > MAX_GRAMMAR_BYTES:
        raise _invalid(
            field, f"has {size} bytes; this server takes up to {MAX_GRAMMAR_BYTES}: make it smaller"
        )


def require_free_end(request: GenerationRequest, field: str) -> None:
    """Refuse fields that would forbid an output to end where its grammar is complete.

    Raises:
        RequestInvalid: names the field and its value.
    """
    if request.ignore_eos:
        raise _invalid(
            "ignore_eos", f"is true, but `{field}` ends the output by a stop token; leave one of them out"
        )
    if request.min_tokens:
        text = (
            f"is {request.min_tokens}, but `{field}` decides where the output may end; leave one of them out"
        )
        raise _invalid("min_tokens", text)


def _wanted(request: GenerationRequest) -> Iterator[Wanted]:
    """Yield every grammar that a request asks for.

    Raises:
        RequestInvalid: a field is not what it must be.
    """
    if request.response_format is not None:
        yield from _of_format(request.response_format, "response_format")
    if isinstance(request, ResponsesRequest) and request.text is not None:
        yield from _of_text(request.text)
    if request.structured_outputs is not None:
        yield from _of_structured_outputs(request.structured_outputs)
    for field, kind in _FIELDS.items():
        value = getattr(request, field)
        if value is not None:
            yield Wanted(field, kind, value)


_FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "guided_json": "json",
        "guided_regex": "regex",
        "guided_choice": "choice",
        "guided_grammar": "grammar",
        "json_schema": "json",
        "regex": "regex",
        "ebnf": "grammar",
    }
)
"""Fields of vLLM and SGLang beside OpenAI's, and the kinds of their grammars."""


def _of_format(given: Mapping[str, Any], at: str) -> Iterator[Wanted]:
    match given.get("type"):
        case "text":
            pass
        case "json_object":
            yield Wanted(at, "json", dict(_ANY_OBJECT))
        case "json_schema":
            inner = given.get("json_schema")
            if not isinstance(inner, dict):
                raise _invalid(
                    f"{at}.json_schema", f"is {shown(inner)}; give an object with `name` and `schema`"
                )
            yield from _of_json_schema(inner, f"{at}.json_schema")
        case "regex":
            field = "pattern" if "pattern" in given else "regex"
            yield Wanted(f"{at}.{field}", "regex", given.get(field))
        case "grammar":
            yield Wanted(f"{at}.grammar", "grammar", given.get("grammar"))
        case other:
            raise _invalid(f"{at}.type", f"is {shown(other)}; give one of {', '.join(_FORMATS)}")


def _of_json_schema(given: Mapping[str, Any], at: str) -> Iterator[Wanted]:
    name = given.get("name")
    if not isinstance(name, str) or not name:
        raise _invalid(f"{at}.name", f"is {shown(name)}; give the schema a name")
    if given.get("strict") not in (None, True, False):
        raise _invalid(f"{at}.strict", f"is {shown(given['strict'])}; give true or false")
    yield Wanted(f"{at}.schema", "json", given.get("schema"))


def _of_text(given: Mapping[str, Any]) -> Iterator[Wanted]:
    """Yield what `text` of the Responses API asks for: its format has the fields of a `json_schema` itself."""
    for field, value in given.items():
        if field != "format" and not (field == "verbosity" and value in (None, "medium")):
            raise _invalid(
                f"text.{field}", f"is {shown(value)}, which this server does not support; leave it out"
            )
    inner = given.get("format")
    if inner is None:
        return
    if not isinstance(inner, dict) or inner.get("type") not in _FORMATS:
        raise _invalid(
            "text.format", f"is {shown(inner)}; give an object whose `type` is one of {', '.join(_FORMATS)}"
        )
    if inner["type"] == "json_schema":
        yield from _of_json_schema(inner, "text.format")
    else:
        yield from _of_format(inner, "text.format")


def _of_structured_outputs(given: Mapping[str, Any]) -> Iterator[Wanted]:
    for field, value in given.items():
        if value is None or value is False:
            continue
        at = f"structured_outputs.{field}"
        match field:
            case "json" | "regex" | "choice" | "grammar":
                yield Wanted(at, field, value)
            case "json_object":
                yield Wanted(at, "json", dict(_ANY_OBJECT))
            case "whitespace_pattern":
                pass
            case _:
                known = "json, json_object, regex, choice, grammar, whitespace_pattern"
                raise _invalid(at, f"is {shown(value)}, which this server does not support; it takes {known}")


def _whitespace(request: GenerationRequest, wanted: Wanted) -> str:
    inner = (request.structured_outputs or {}).get("whitespace_pattern")
    field = "guided_whitespace_pattern" if inner is None else "structured_outputs.whitespace_pattern"
    pattern = request.guided_whitespace_pattern if inner is None else inner
    if pattern is None:
        return WHITESPACE
    if wanted.kind != "json":
        raise _invalid(field, f"is for JSON, but `{wanted.field}` is none; leave it out")
    if not isinstance(pattern, str) or not pattern:
        raise _invalid(field, f"is {shown(pattern)}; give a regular expression")
    return pattern


def _written(wanted: Wanted, whitespace: str, check: GrammarCheck) -> str:
    """Return a grammar in the form of llguidance.

    Raises:
        RequestInvalid: its value is of a wrong type, or cannot be read.
    """
    field, kind, value = wanted
    match kind:
        case "json":
            return json_grammar(field, value, whitespace)
        case "choice":
            is_list = isinstance(value, list) and 0 < len(value) <= MOST_CHOICES
            if not is_list or not all(isinstance(one, str) and one for one in value):
                raise _invalid(
                    field, f"is {shown(value)}; give a list of 1 to {MOST_CHOICES} texts, none empty"
                )
            return grammar_from("choice", json.dumps(value))
        case _:
            if not isinstance(value, str) or not value:
                raise _invalid(field, f"is {shown(value)}; give it as a text")
            _require_size(field, value)
            return _read(
                field, lambda: check.lark(value) if kind == "grammar" else grammar_from("regex", value)
            )


def json_grammar(field: str, schema: object, whitespace: str = WHITESPACE) -> str:
    """Return the grammar of the values of a JSON Schema, which may be given as its text.

    Raises:
        RequestInvalid: it is no schema.
    """
    if isinstance(schema, str):
        text = schema
        try:
            schema = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _invalid(field, f"is {shown(text)}, which is not JSON: {error}") from error
    if not isinstance(schema, (dict, bool)):
        raise _invalid(field, f"is {shown(schema)}; give a JSON Schema (an object)")
    # Hints to llguidance could lift the guarantee that all of the schema holds.
    plain = (
        {key: value for key, value in schema.items() if key != "x-guidance"}
        if isinstance(schema, dict)
        else {}
    )
    if schema is False:
        raise _invalid(field, "is false, which no value satisfies; give a JSON Schema (an object)")
    overrides: Any = {"whitespace_pattern": whitespace}
    return _read(field, lambda: LLMatcher.grammar_from_json_schema(plain, overrides=overrides))


def _read(field: str, read: Callable[[], str]) -> str:
    try:
        return read()
    except (ValueError, RecursionError) as error:
        raise _invalid(field, f"cannot be read: {brief(str(error))}") from error


def _invalid(field: str, text: str) -> RequestInvalid:
    return RequestInvalid(f"`{field}` {text}", param=field, code="invalid_value")
