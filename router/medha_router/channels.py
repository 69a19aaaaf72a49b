"""Finds the answer and the thoughts in an output that has several channels, as gpt-oss writes it.

An output is a sequence of messages. Each has a header, `<|channel|>` and the name of a channel up to `<|message|>`, and
a text up to `<|end|>`; `<|start|>` begins the header of the next one. The prompt ends within the first header. The
channels `final` and `commentary` are for the user, and `analysis` has thoughts, unless a header names somebody else (`to=`).
A message to a function is a call, and `<|call|>` ends it. An output without headers is all for the user.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
CALL, CONSTRAIN = "<|call|>", "<|constrain|>"
MARKS = (START, CHANNEL, MESSAGE, END)
"""Special tokens of a model whose outputs have channels."""
BEGUN = "assistant"
"""Role after the `START` with which a prompt ends."""
_SHOWN = ("final", "commentary")
_THOUGHTS = ("analysis",)
_RECEIVER = b" to="
_FUNCTION = re.compile(r"\bto=functions\.([A-Za-z0-9_.:/-]+)")


class Mark(str):
    """The header of a call, or the mark that ends one: readers of calls see it as one character that no text has."""

    __slots__ = ()


class ThoughtBytes(bytes):
    """A piece of the model's thoughts."""

    __slots__ = ()


def called_function(header: str) -> str | None:
    """Return the function that a message with this header calls, None if it calls none."""
    found = _FUNCTION.search(header)
    return None if found is None else found[1]


class Channels:
    """Sorts an output, token by token, into text for the user, thoughts and calls."""

    def __init__(self, marks: Mapping[str, int], *, with_calls: bool = False) -> None:
        """`marks` are the ids of `MARKS`, and perhaps of `CALL` and `CONSTRAIN`; without `with_calls`, calls are dropped."""
        self._marks = {number: text for text, number in marks.items() if text != CONSTRAIN}
        self._with_calls = with_calls
        self._header: str | None = None  # of the next text, as far as it is known
        self._shows = True  # also before the first header
        self._calls = False  # the message is a call that is read
        self._lead: bytes | None = b""  # text that may be of the first header
        self._thinks = False  # the message has thoughts
        self._has_thought = False
        self._before_thought = b""  # a newline between two messages of thoughts

    def feed(self, token: int, text: bytes) -> bytes | ThoughtBytes | Mark | None:
        """Return what the next token brings (`text` is its own): text for the user, a thought, a call's mark, or nothing."""
        mark = self._marks.get(token)
        if self._lead is not None:
            if mark is None:
                return self._led(text)
            if self._lead.startswith(_RECEIVER):
                self._header = self._lead.decode("utf-8", "replace")
            self._lead = None
        if mark is None:
            if self._header is not None:
                self._header += text.decode("utf-8", "replace")
            elif self._thinks:
                before, self._before_thought = self._before_thought, b""
                self._has_thought = True
                return ThoughtBytes(before + text)
            return text if self._shows else None
        ends_call, self._calls = self._calls, False
        if self._thinks and self._has_thought:
            self._before_thought = b"\n"
        self._thinks = False
        if mark == MESSAGE:
            header, self._header = self._header or "", None
            self._calls = self._with_calls and called_function(header) is not None
            self._shows = self._calls or _is_to_nobody(header, _SHOWN)
            self._thinks = not self._shows and _is_to_nobody(header, _THOUGHTS)
            return Mark(header + MESSAGE) if self._calls else None
        begun = self._header or ""  # it may name the receiver before the channel
        self._header, self._shows = {START: "", CHANNEL: begun + CHANNEL}.get(mark), False
        return Mark(mark) if ends_call else None

    def _led(self, text: bytes) -> bytes | None:
        """Return the first text of an output, unless it may name the receiver of the first message."""
        found = (self._lead or b"") + text
        is_header = found.startswith(_RECEIVER) or _RECEIVER.startswith(found)
        self._lead = found if is_header else None
        return None if is_header else found

    def end(self) -> bytes:
        """Return text for the user that was held back; no more comes."""
        return self._lead or b""


def _is_to_nobody(header: str, channels: tuple[str, ...]) -> bool:
    """Return whether a header is of one of these channels, and names no receiver but the user."""
    before, _, channel = header.partition(CHANNEL)
    name, *others = channel.split() or [""]
    return name.startswith(channels) and not any("to=" in part for part in (before, *others))
