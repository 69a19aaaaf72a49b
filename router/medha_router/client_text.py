"""Keeps clients from writing special tokens: a rendered conversation has a break in each name of one in their text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

_BREAK = "\ue000break\ue000"


class ClientText:
    """Breaks the names of a vocabulary's special tokens."""

    def __init__(self, special_tokens: Iterable[str]) -> None:
        names = sorted((name for name in special_tokens if len(name) > 1), key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, names)) or r"(?!)")

    def broken(self, value: Any) -> Any:
        """Return a value of JSON in whose texts no special token is named."""
        match value:
            case str():
                while (found := self._names.sub(_with_break, value)) != value:
                    value = found  # the rest of a name may begin another one
                return value
            case list():
                return [self.broken(one) for one in value]
            case dict():
                return {self.broken(key): self.broken(one) for key, one in value.items()}
        return value


def _with_break(name: re.Match[str]) -> str:
    return name[0][0] + _BREAK + name[0][1:]


def pieces_of(rendered: str) -> list[str]:
    """Return the pieces of a rendered conversation that are tokenised one by one."""
    return rendered.split(_BREAK)
