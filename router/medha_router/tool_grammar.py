"""The grammar of an output that calls functions, in the form in which its model writes calls.

It is written in llguidance's dialect of Lark, like the grammar of `channel_grammar`, which defines what goes before
calls in channels.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from medha_router.channel_grammar import ANY, OPTIONS, THOUGHTS, THOUGHTS_AND_PREAMBLES, channel_rules, piece
from medha_router.structured_output import WHITESPACE
from medha_router.thought_grammar import ThoughtGrammar, escaped
from medha_router.tool_formats import Piece, ToolFormat

_OF_TAGS = frozenset(
    {"type", "properties", "required", "additionalProperties", "title", "description", "$defs", "definitions", "$schema"}
)  # fmt: skip
"""Keywords of an object that arguments as tags can follow, or that restrict nothing."""
_SHARED = ("#/$defs/", "#/definitions/")
_PLAIN_TEXT = frozenset({"type", "description", "title", "default", "examples"})


@dataclass(frozen=True)
class CallsGrammar:
    """The parts of a grammar: which functions may be called, and what else may be said."""

    format: ToolFormat
    functions: Sequence[tuple[str, Mapping[str, Any] | None]]
    """Name and schema of the arguments; None: any object."""
    one_call: bool
    may_answer: bool
    """The output may also be a text without calls, or a text before them."""
    answer: Mapping[str, Any] | None = None
    """JSON Schema of an output without calls; None: any text."""
    thoughts: ThoughtGrammar | None = None
    """Thoughts in the text before all that."""

    def lark(self, special_ids: Mapping[str, int]) -> str:
        """Return the grammar; `special_ids` are the marks that are special tokens."""
        writer = _Writer(self.format, special_ids)
        return writer.whole(self)


def no_calls(
    format_: ToolFormat, special_ids: Mapping[str, int], thoughts: ThoughtGrammar | None = None
) -> str:
    """Return the grammar of a text that begins no call; "" if the form has no marker and no channels."""
    if format_.in_channels:
        start = f"start: {THOUGHTS_AND_PREAMBLES} final TEXT"
        return "\n".join([OPTIONS, start, *channel_rules(special_ids)]) + "\n"
    if format_.marker is None:
        return ""
    without = "" if format_.marker in special_ids else f" & ~/{ANY}{escaped(format_.marker)}{ANY}/"
    if thoughts is None:
        return f"{OPTIONS}\nstart: TEXT\nTEXT: /{ANY}/{without}\n"
    rules = [f"start: {thoughts.lead} TEXT", f"TEXT: /{ANY}/{without}{thoughts.without(special_ids)}"]
    return "\n".join([OPTIONS, *rules, *thoughts.rules(special_ids, after_space=True)]) + "\n"


class _Writer:
    def __init__(self, format_: ToolFormat, special_ids: Mapping[str, int]) -> None:
        self._format = format_
        self._special_ids = special_ids
        self._rules = [OPTIONS]
        self._choices = dict[str, str]()  # names of rules by body

    def whole(self, grammar: CallsGrammar) -> str:
        form = self._format
        for index, (name, schema) in enumerate(grammar.functions):
            before = self._pieces(form.before).replace("%s", name)
            self._rule(f"call_{index}", f"{before} args_{index} {self._pieces(form.after)}")
            if form.as_tags:
                self._tags(f"args_{index}", schema)
            else:
                self._rule(f"args_{index}", _json({"type": "object"} if schema is None else schema))
        self._rule("call", " | ".join(f"call_{index}" for index in range(len(grammar.functions))))
        is_one = grammar.one_call or form.between is None
        more = "" if is_one else f"({self._pieces(form.between or ())} call)*"
        self._rule("calls", f"{self._pieces(form.opens[1:])} call {more} {self._pieces(form.closes)}")
        start = self._start(grammar)
        if grammar.thoughts is not None:
            is_free = grammar.may_answer and grammar.answer is None
            self._rules += grammar.thoughts.rules(self._special_ids, after_space=is_free)
            start = f"{grammar.thoughts.lead} ({start})"
        self._rule("start", start)
        return "\n".join(self._rules) + "\n"

    def _start(self, grammar: CallsGrammar) -> str:
        if self._format.in_channels:
            return self._start_in_channels(grammar)
        marker = self._format.marker
        opened = "calls" if marker is None else f"{self._piece(marker)} calls"
        if not grammar.may_answer:
            return opened
        if grammar.answer is not None:
            self._rule("answer", _json(grammar.answer))
            return f"answer | {opened}"
        without = "" if grammar.thoughts is None else grammar.thoughts.without(self._special_ids)
        if marker is None:
            self._rule("TEXT", rf"/[ \t\r\n]*([^ \t\r\n{{](.|\n)*)?/{without}")
            return "TEXT | calls"
        self._rule("TEXT", f"/{ANY}/{without}")
        # A lazy lexeme ends with its first marker, so no text continues after one.
        head = "lead" if marker in self._special_ids else "lead[lazy]"
        self._rule(head, f"TEXT {self._piece(marker)}")
        return "TEXT | lead calls"

    def _start_in_channels(self, grammar: CallsGrammar) -> str:
        self._rules += channel_rules(self._special_ids)
        if not grammar.may_answer:
            return f"{THOUGHTS_AND_PREAMBLES} calls"
        if grammar.answer is None:
            return f"{THOUGHTS_AND_PREAMBLES} (calls | final TEXT)"
        self._rule("answer", _json(grammar.answer))  # a preamble before it would be a part of the content
        return f"{THOUGHTS} (final answer | (preamble {THOUGHTS})* calls)"

    def _rule(self, name: str, body: str) -> None:
        self._rules.append(f"{name}: {body}")

    def _pieces(self, pieces: Sequence[Piece]) -> str:
        return " ".join(self._piece(one) if isinstance(one, str) else self._choice(one) for one in pieces)

    def _piece(self, text: str) -> str:
        return piece(text, self._special_ids)

    def _choice(self, ways: Sequence[tuple[str, ...]]) -> str:
        """Return a choice of several ways; one that names no function has a rule that all functions share."""
        body = " | ".join(self._pieces(way) or '""' for way in ways)
        if "%s" in body:
            return f"({body})"
        if body not in self._choices:
            self._choices[body] = f"way_{len(self._choices)}"
            self._rule(self._choices[body], body)
        return self._choices[body]

    def _tags(self, rule: str, schema: Mapping[str, Any] | None) -> None:
        """Add the rule of arguments that are tags, in the order of the schema."""
        if schema is None:
            self._rule(f"{rule}_value[lazy]", rf'/{ANY}/ "\n</parameter>\n"')
            self._rule(rule, rf'("<parameter=" /[^>\n]+/ ">\n" {rule}_value)*')
            return
        required = schema.get("required", ())
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        parts = []
        for index, (key, of_value) in enumerate(schema.get("properties", {}).items()):
            part, value = f"{rule}_{index}", f"{rule}_{index}_value"
            if isinstance(of_value, Mapping) and of_value.get("type") == "string":
                self._text(value, of_value)
            else:
                merged = {**shared, **of_value} if isinstance(of_value, Mapping) else of_value
                self._rule(value, rf'{_json(merged)} "\n</parameter>\n"')
            self._rule(part, f"{json.dumps(f'<parameter={key}>')} {json.dumps(chr(10))} {value}")
            parts.append(part if key in required else f"{part}?")
        self._rule(rule, " ".join(parts) or '""')

    def _text(self, rule: str, schema: Mapping[str, Any]) -> None:
        """Add the rule of a parameter's text, which stands without quotes."""
        if "enum" in schema or "const" in schema:
            values = schema.get("enum", [schema.get("const")])
            choices = " | ".join(json.dumps(value) for value in values if isinstance(value, str))
            self._rule(rule, rf'({choices}) "\n</parameter>\n"')
        else:
            self._rule(f"{rule}[lazy]", rf'/{ANY}/ "\n</parameter>\n"')


def unwritable(schema: Mapping[str, Any]) -> str | None:
    """Return the keyword or the parameter of a schema that a grammar of tags cannot enforce, or None."""
    properties = schema.get("properties", {})
    further = schema.keys() - _OF_TAGS
    if schema.get("additionalProperties", False) not in (True, False):
        further.add("additionalProperties")
    further |= set(schema.get("required", ())) - properties.keys()
    if further:
        return min(further)
    for key, of_value in properties.items():
        if of_value is False or not set(key).isdisjoint(">\n\r") or key != key.strip():
            return str(key)
        is_text = isinstance(of_value, Mapping) and of_value.get("type") == "string"
        if not (_is_writable_text(of_value) if is_text else _stands_alone(of_value)):
            return str(key)
    return None


def _is_writable_text(schema: Mapping[str, Any]) -> bool:
    """Return whether a text without quotes can be held to a schema."""
    restricting = schema.keys() - _PLAIN_TEXT
    if not restricting:
        return True
    values = schema.get("enum", [schema.get("const")])
    if restricting - {"enum", "const"} or not isinstance(values, list) or not values:
        return False
    if "const" in schema and values != [schema["const"]]:
        return False
    return all(isinstance(value, str) and "</parameter>" not in value for value in values)


def _stands_alone(schema: object) -> bool:
    """Return whether a schema refers to nothing but shared definitions, which go along with each parameter."""
    if isinstance(schema, list):
        return all(map(_stands_alone, schema))
    if not isinstance(schema, Mapping):
        return True
    target = schema.get("$ref", _SHARED[0])
    return isinstance(target, str) and target.startswith(_SHARED) and all(map(_stands_alone, schema.values()))


def _json(schema: Any) -> str:
    # Hints to llguidance could lift the guarantee that all of the schema holds.
    plain = {key: value for key, value in schema.items() if key != "x-guidance"} if schema is not True else {}
    return f"%json {json.dumps({**plain, 'x-guidance': {'whitespace_pattern': WHITESPACE}})}"
