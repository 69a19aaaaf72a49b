"""Finds the calls of functions in the text of a model as it arrives, and separates them from the text for the user.

A machine reads one character at a time, so calls and text depend only on the characters, not on how they were cut into
pieces. Text that may begin a call is held back until that is certain, and shown whole if it is none. A call begins when
its function and the start of its arguments are known; from then on, its arguments go out as the model writes them.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NoReturn

from medha_router.request_model import without_lone_surrogates

END = ""
"""Input that marks the end of a text for a reader."""
MOST_HELD_CHARACTERS = 65_536
"""Longest text that is held back before it must be a call."""
_READ_AGAIN_CHARACTERS = 1024
"""Longest text that is searched for further calls after it turned out to be none; a longer one is shown as it is."""
_SPACE = " \t\r\n"

Machine = Generator[None, str, Any]
Char = Generator[None, str, str]
Found = Generator[None, str, bool]


@dataclass(frozen=True)
class CallPart:
    """New text of call number `call` of an output; the first part of a call has the function's name."""

    call: int
    name: str | None = None
    arguments: str = ""


Part = str | CallPart


class _NotACall(Exception):
    """The text that was held back is no call."""


class CallReader(ABC):
    """Reads the text of one output; `feed` it, then `end` it."""

    def __init__(self, functions: Mapping[str, Mapping[str, Any]], *, one_call: bool = False) -> None:
        """`functions` are the schemas of the arguments by name. With `one_call`, what follows the first call is dropped."""
        self.functions = functions
        self.calls = 0
        """Number of calls that have begun."""
        self.is_open = False
        """True while a call has begun and not ended."""
        self._one_call = one_call
        self._parts: list[CallPart | str] = []
        self._at_end = False
        self._follows_call = False  # nothing was shown since a call ended
        self._again: deque[str] = deque()  # characters that are read a second time
        self._held: list[str] | None = None  # what was read since the hold began
        self._spaces = ""  # white space that is shown if text follows
        self._machine = self._main()
        next(self._machine)

    def feed(self, text: Iterable[str]) -> list[Part]:
        """Return the parts that these characters complete. In channels, marks are among the characters."""
        for char in text:
            self._machine.send(char)
        return self._taken()

    def end(self) -> list[Part]:
        """Return what was held back; no more text comes."""
        self._machine.send(END)
        return self._taken()

    @property
    def is_done(self) -> bool:
        """True if everything that follows is dropped."""
        return self._one_call and self.calls > 0 and not self.is_open

    def _taken(self) -> list[Part]:
        """Return the new parts, with neighbours of one kind joined."""
        taken, self._parts = self._parts, []
        joined: list[Part] = []
        for call, parts in groupby(taken, lambda part: part.call if isinstance(part, CallPart) else None):
            group = list(parts)
            if call is None:
                joined.append("".join(part for part in group if isinstance(part, str)))
            else:
                of_call = [part for part in group if isinstance(part, CallPart)]
                joined.append(CallPart(call, of_call[0].name, "".join(part.arguments for part in of_call)))
        return joined

    # --- the machine ------------------------------------------------------------------------------------

    def _main(self) -> Machine:
        yield from self._read()
        if not self._follows_call:
            self._show("")
        while True:
            yield  # the output has ended, or the rest is dropped

    @abstractmethod
    def _read(self) -> Machine:
        """Read the whole output."""

    def _next(self) -> Char:
        """Read a character."""
        if self._again:
            char = self._again.popleft()
        elif self._at_end:
            return END
        else:
            char = yield
            self._at_end = char == END
        if self._held is not None and char != END:
            self._held.append(char)
            if len(self._held) > MOST_HELD_CHARACTERS:
                raise _NotACall
        return char

    def _back(self, text: str) -> None:
        """Put back the characters that were read last, so that they are read again."""
        self._again.extendleft(reversed(text))
        if self._held is not None and text:
            del self._held[-len(text) :]

    def _attempt(self, read: Callable[[], Machine], marker: str = "") -> Found:
        """Return whether `read` finds a call after `marker`; if not, all but the marker is read again as text."""
        before = self.calls
        self._held = list(marker)
        try:
            yield from read()
        except _NotACall:
            held, self._held = "".join(self._held or ()), None
            if self.calls == before:
                is_long = len(held) > _READ_AGAIN_CHARACTERS
                self._back("" if is_long else held[len(marker) :])
                self._show(held if is_long else marker)
                return False
            is_cut = self._at_end
        else:
            self._held, is_cut = None, False
        self.is_open, self._follows_call = is_cut, True
        return True

    def _text_before(self, marker: str) -> Found:
        """Show text up to `marker`; return False if it never comes. A marker must not repeat its first character."""
        matched = 0
        while True:
            char = yield from self._next()
            if matched and char != marker[matched]:
                self._show(marker[:matched])
                matched = 0
            if char == END:
                return False
            if char == marker[matched]:
                matched += 1
                if matched == len(marker):
                    return True
            elif char in _SPACE:
                self._add_space(char)
            else:
                self._show(char)

    def _add_space(self, char: str) -> None:
        """Hold white space back, up to a bound."""
        if len(self._spaces) == MOST_HELD_CHARACTERS:
            self._show("")
        self._spaces += char

    def _show(self, text: str) -> None:
        """Show text, after the white space that was held back; at the end of an output, "" shows that alone."""
        text, self._spaces = self._spaces + text, ""
        if text:
            self._parts.append(text)
            self._follows_call = False

    # --- calls ------------------------------------------------------------------------------------------

    def _begin(self, name: str) -> None:
        self._held = None
        self._spaces = ""  # the white space between text and calls is part of neither
        self.is_open = True
        self._parts.append(CallPart(self.calls, name))
        self.calls += 1

    def _argue(self, text: str) -> None:
        """Add to the arguments of the call that is open."""
        self._parts.append(CallPart(self.calls - 1, None, text))

    def _after_space(self) -> Char:
        """Read the first character that is no white space."""
        while True:
            char = yield from self._next()
            if char == END or char not in _SPACE:
                return char

    def _expect(self, text: str) -> Machine:
        """Read exactly `text`."""
        for wanted in text:
            if (yield from self._next()) != wanted:
                raise _NotACall

    def _skip(self, text: str) -> Machine:
        """Read white space and `text`, if they come."""
        spaces: list[str] = []
        while (char := (yield from self._next())) != END and char in _SPACE:
            if len(spaces) < MOST_HELD_CHARACTERS:  # it is shown only if other text follows
                spaces.append(char)
        read = char
        while char != END and read != text and text.startswith(read):
            char = yield from self._next()
            read += char
        if read != text:
            self._back("".join(spaces) + read)

    def _json_value(self, first: str, sink: Callable[[str], None]) -> Machine:
        """Read a JSON value that begins with `first`, and pass its text to `sink`."""
        sink(first)
        if first == '"':
            yield from self._rest_of_string(sink)
        elif first in "{[":
            depth = 1
            while depth:
                char = yield from self._next()
                self._fail_at_end(char)
                sink(char)
                if char == '"':
                    yield from self._rest_of_string(sink)
                depth += (char in "{[") - (char in "}]")
        else:
            while (char := (yield from self._next())).isalnum() or char in ("+", "-", "."):
                sink(char)
            self._fail_at_end(char)
            self._back(char)

    def _rest_of_string(self, sink: Callable[[str], None]) -> Machine:
        while True:
            char = yield from self._next()
            self._fail_at_end(char)
            sink(char)
            if char == '"':
                return
            if char == "\\":
                sink((yield from self._next()))

    @staticmethod
    def _fail_at_end(char: str) -> None:
        if char == END:
            raise _NotACall

    def _fail_at(self, char: str) -> NoReturn:
        """End the call before `char`, which is read again."""
        self._back(char)
        raise _NotACall

    def _json_text(self, first: str) -> Char:
        """Read a JSON value and return its text."""
        found: list[str] = []
        yield from self._json_value(first, found.append)
        return "".join(found)

    def _object_call(self, *, known_only: bool = False) -> Machine:
        """Read the rest of `{"name": ..., "arguments": {...}}`, with `parameters` as another name of the latter.

        With `known_only`, the name must be one of the functions, and there must be arguments.
        """
        name, arguments, begun = "", "", False
        while True:
            char = yield from self._after_space()
            if char == "}":
                break
            if char != '"':
                self._fail_at(char)
            key = _loaded((yield from self._json_text(char)))
            if (char := (yield from self._after_space())) != ":":
                self._fail_at(char)
            first = yield from self._after_space()
            self._fail_at_end(first)
            is_arguments = key in ("arguments", "parameters") and not arguments
            if is_arguments and name and first == "{":
                begun, arguments = True, "{"
                self._begin(name)
                yield from self._json_value(first, self._argue)
            else:
                text = yield from self._json_text(first)
                if is_arguments:
                    arguments = text
                elif key == "name" and not name:
                    name = self._checked(_loaded(text), known_only=known_only)
            char = yield from self._after_space()
            if char == "}":
                break
            if char != ",":
                self._fail_at(char)
        if begun:
            return
        if not name or (known_only and not arguments):
            raise _NotACall
        self._begin(name)
        self._argue(_plain(arguments))

    def _checked(self, name: object, *, known_only: bool) -> str:
        if not isinstance(name, str) or not name or (known_only and name not in self.functions):
            raise _NotACall
        return without_lone_surrogates(name)


def _loaded(text: str) -> object:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError) as error:
        raise _NotACall from error


def _plain(arguments: str) -> str:
    """Return arguments as the text of an object, if they are that inside a text, or null."""
    if not arguments or arguments == "null":
        return "{}"
    return without_lone_surrogates(str(_loaded(arguments))) if arguments.startswith('"') else arguments


class TaggedReader(CallReader):
    """Reads calls that each stand in `<tool_call>...</tool_call>`; subclasses read what is inside, and the end."""

    def _read(self) -> Machine:
        while (yield from self._text_before("<tool_call>")):
            yield from self._attempt(self._call, "<tool_call>")
            if self.is_done:
                return

    @abstractmethod
    def _call(self) -> Machine:
        """Read a call after its `<tool_call>`, up to and with `</tool_call>`."""


class HermesReader(TaggedReader):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as of Hermes and Qwen."""

    def _call(self) -> Machine:
        if (yield from self._after_space()) != "{":
            raise _NotACall
        yield from self._object_call()
        yield from self._skip("</tool_call>")


class LlamaReader(CallReader):
    """`{"name": ..., "parameters": {...}}` at the beginning, or anywhere after `<|python_tag|>`; `;` or `,` separates several."""

    def _read(self) -> Machine:
        char = yield from self._after_space_of_text()
        self._back(char)
        if char == "{":
            yield from self._calls("")
            if self.is_done:
                return
        while (yield from self._text_before("<|python_tag|>")):
            yield from self._calls("<|python_tag|>")
            if self.is_done:
                return

    def _after_space_of_text(self) -> Char:
        while True:
            char = yield from self._next()
            if char == END or char not in _SPACE:
                return char
            self._add_space(char)

    def _calls(self, marker: str) -> Machine:
        found = yield from self._attempt(self._call, marker)
        while found and not self.is_done:
            found = yield from self._attempt(self._further)

    def _call(self) -> Machine:
        if (yield from self._after_space()) != "{":
            raise _NotACall
        yield from self._object_call(known_only=True)

    def _further(self) -> Machine:
        if (yield from self._after_space()) not in (";", ","):
            raise _NotACall
        yield from self._call()


class MistralReader(CallReader):
    """`[TOOL_CALLS]` before a list of objects, or before each `name[ARGS]{...}`."""

    def _read(self) -> Machine:
        while (yield from self._text_before("[TOOL_CALLS]")):
            self._is_list = False
            found = yield from self._attempt(self._call, "[TOOL_CALLS]")
            while found and self._is_list and not self.is_done:
                found = yield from self._attempt(self._further)
            if self.is_done:
                return

    def _call(self) -> Machine:
        char = yield from self._after_space()
        if char == "[":
            self._is_list = True
            char = yield from self._after_space()
        if char == "{":
            yield from self._object_call()
            if self._is_list:
                yield from self._list_end()
            return
        name = ""
        while char not in (END, "[", "{", *_SPACE):
            name += char
            char = yield from self._next()
        if not name or self._is_list:
            raise _NotACall
        if char == "[":
            yield from self._marks()
            char = yield from self._after_space()
        if char != "{":
            raise _NotACall
        self._begin(name)
        yield from self._json_value(char, self._argue)

    def _marks(self) -> Machine:
        """Read the rest of `[ARGS]`, or of `[CALL_ID]...[ARGS]`."""
        mark = ""
        while not mark.endswith("ARGS]"):
            char = yield from self._next()
            mark += char
            if char == END or not ("ARGS]".startswith(mark) or "CALL_ID]".startswith(mark[:8])):
                raise _NotACall

    def _further(self) -> Machine:
        if (yield from self._after_space()) != "," or (yield from self._after_space()) != "{":
            raise _NotACall
        yield from self._object_call()
        yield from self._list_end()

    def _list_end(self) -> Machine:
        char = yield from self._after_space()
        self._is_list = char != "]"
        if self._is_list:
            self._back(char)
