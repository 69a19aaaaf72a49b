"""The page of `docs/` with every request field that is known: written by `make gen` from the fields themselves."""

from __future__ import annotations

import json
from collections.abc import Iterable

from medha_router.openai_requests import KINDS, Fate, fate_of, known_fields

_INTRODUCTION = """# Request fields

Written by `make gen` from the fields that the router knows. It knows those of OpenAI's API, and those that vLLM and SGLang add to it.

- *served*: the field does what its API says, within the bounds of [http-api.md](http-api.md#parameters).
- A value: only this value is accepted, because it asks for nothing. Any other gets a 400 that names the field, its value and what to do.
- *label*: accepted with any value, and without effect.

`null` is accepted for every optional field. Where the table is empty, and in fields that are not in it, any value is ignored, as in vLLM
and SGLang.
"""


def fields_page() -> str:
    """Return the page in Markdown."""
    header = [
        "| Field | " + " | ".join(f"`{path}`" for path in KINDS) + " |",
        "|---" * (1 + len(KINDS)) + "|",
    ]
    rows = [
        f"| `{field}` | " + " | ".join(_shown(fate_of(kind, field)) for kind in KINDS.values()) + " |"
        for field in known_fields()
    ]
    return "\n".join([_INTRODUCTION, *header, *rows]) + "\n"


def _shown(fate: Fate) -> str:
    if isinstance(fate, str):
        return "" if fate == "ignored" else fate
    return _values(fate) or "`null`"


def _values(values: Iterable[object]) -> str:
    return ", ".join(f"`{json.dumps(value)}`" for value in values if value is not None)
