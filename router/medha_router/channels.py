"""Finds the answer in an output that has several channels, as gpt-oss writes it: its thoughts are not part of the answer.

An output is a sequence of messages. Each has a header, `<|channel|>` and the name of a channel up to `<|message|>`, and
a text up to `<|end|>`; `<|start|>` begins the header of the next one. The prompt ends within the first header. The
channels `final` and `commentary` are for the user, unless a header names somebody else (`to=`), and `analysis` is not.
An output without headers, as a grammar may ask for, is all for the user.
"""

from __future__ import annotations

from collections.abc import Mapping

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
MARKS = (START, CHANNEL, MESSAGE, END)
"""Special tokens of a model whose outputs have channels."""
_SHOWN = ("final", "commentary")


class Channels:
    """Says token by token what is for the user."""

    def __init__(self, marks: Mapping[str, int]) -> None:
        """`marks` are the ids of `MARKS`."""
        self._marks = {number: text for text, number in marks.items()}
        self._header: str | None = None  # of the next text, as far as it is known
        self._shows = True  # also before the first header

    def shows(self, token: int, text: bytes) -> bool:
        """Return whether the next token, which stands for `text`, is for the user."""
        mark = self._marks.get(token)
        if mark is None:
            if self._header is not None:
                self._header += text.decode("utf-8", "replace")
            return self._shows
        if mark == MESSAGE:
            before, _, header = (self._header or "").partition(CHANNEL)
            name, *others = header.split() or [""]
            names_another = any("to=" in part for part in (before, *others))
            self._header, self._shows = None, name.startswith(_SHOWN) and not names_another
        else:
            begun = self._header or ""  # it may name the receiver before the channel
            self._header, self._shows = {START: "", CHANNEL: begun + CHANNEL}.get(mark), False
        return False
