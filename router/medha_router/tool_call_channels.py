"""Calls as messages to functions: `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`, as of gpt-oss."""

from __future__ import annotations

import json

from medha_router.channels import Mark, called_function
from medha_router.tool_call_text import END, CallReader, Machine


class HarmonyReader(CallReader):
    """Reads calls of this form from `Channels`, which finds their headers and ends. The first call ends the output."""

    @property
    def is_done(self) -> bool:
        return self.calls > 0 and not self.is_open

    def _read(self) -> Machine:
        while (char := (yield from self._next())) != END:
            name = called_function(char) if isinstance(char, Mark) else None
            if name is not None:
                yield from self._call(name)
                return
            if char in " \t\r\n":
                self._add_space(char)
            else:
                self._show(char)

    def _call(self, name: str) -> Machine:
        """Read the arguments of a call; without the mark that ends them, it is whole if they are JSON."""
        self._begin(name)
        arguments: list[str] = []
        while (char := (yield from self._next())) != END and not isinstance(char, Mark):
            arguments.append(char)
            self._argue(char)
        text = "".join(arguments)
        if char == END:
            self.is_open = not _is_json(text)
        else:
            self.is_open = False
            if not text.strip():
                self._argue("{}")
        self._follows_call = True


def _is_json(text: str) -> bool:
    try:
        json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return False
    return True
