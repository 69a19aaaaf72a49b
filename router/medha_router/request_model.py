"""The base of the models that validate requests, and a value as its client wrote it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict
from pydantic_core import to_json

INT32_MAX = 2**31 - 1


class RequestModel(BaseModel):
    """Strict fields; unknown ones are ignored."""

    # strict: "5" is not a number and true not an integer, as in OpenAI's API; NaN and infinity are never meant.
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


def shown(value: object) -> str:
    """Return a value of a request in JSON, as its client wrote it, truncated."""
    text = to_json(value).decode()
    return text if len(text) <= 80 else f"{text[:80]}..."


def without_lone_surrogates(text: str) -> str:
    """Return a text that can be encoded: escapes in JSON may spell halves of characters, which become U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
