"""Calls as tags: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`, as of Qwen3-Coder."""

from __future__ import annotations

import json
from collections.abc import Mapping

from medha_router.request_model import without_lone_surrogates
from medha_router.tool_call_text import Char, Found, Machine, TaggedReader

_ARE_TEXT = ("string", "str", "text")


class CoderReader(TaggedReader):
    """Reads calls of this form. The value of a parameter goes out once it is complete, because its type decides how."""

    def _call(self) -> Machine:
        self._back((yield from self._after_space()))
        yield from self._expect("<function=")
        name = yield from self._up_to(">")
        self._begin(name.strip())
        properties = self.functions.get(name.strip(), {}).get("properties", {})
        self._argue("{")
        separator = ""
        while (yield from self._is_parameter()):
            key = (yield from self._up_to(">")).strip()
            value = (yield from self._up_to("</parameter>")).removeprefix("\n").removesuffix("\n")
            shown = json_of(value, properties.get(key))
            self._argue(f"{separator}{json.dumps(key, ensure_ascii=False)}: {shown}")
            separator = ", "
        self._argue("}")
        yield from self._skip("</function>")
        yield from self._skip("</tool_call>")

    def _is_parameter(self) -> Found:
        """Return whether another parameter begins; otherwise nothing is read but white space."""
        self._fail_at_end(char := (yield from self._after_space()))
        read = char
        while read != "<parameter=":
            if not "<parameter=".startswith(read):
                self._back(read)
                return False
            self._fail_at_end(char := (yield from self._next()))
            read += char
        return True

    def _up_to(self, mark: str) -> Char:
        """Read up to and including `mark`, and return what is before it."""
        found: list[str] = []
        while True:
            char = yield from self._next()
            self._fail_at_end(char)
            found.append(char)
            if char == mark[-1] and "".join(found[-len(mark) :]) == mark:
                return "".join(found[: -len(mark)])


def json_of(value: str, schema: object) -> str:
    """Return a parameter's text as JSON: texts as they are, other values as what they spell."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind in _ARE_TEXT:
        return json.dumps(value, ensure_ascii=False)
    if kind == "boolean":
        value = value.lower()
    try:  # JSON has no NaN and no infinity, which Python reads
        parsed = json.dumps(json.loads(value, strict=False), ensure_ascii=False, allow_nan=False)
        return without_lone_surrogates(parsed)
    except (ValueError, RecursionError):
        return json.dumps(value, ensure_ascii=False)
