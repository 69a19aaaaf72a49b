"""A client's stream: free text, a text that follows a schema, or a function call, with the times at which its pieces came."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import pairwise

import httpx
from harness import Row
from served import StreamFailed, events_of

MODEL = "m"
ROWS: Row = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "id": {"type": "integer", "minimum": 0},
            "colour": {"enum": ["red", "green", "blue"]},
            "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2,9}$"}, "maxItems": 3},
        },
        "required": ["id", "colour", "tags"],
        "additionalProperties": False,
    },
    "minItems": 1000,
}
"""A schema that no stream is long enough to complete."""
FORMS = ("text", "schema", "function")
"""Forms of output: free text, a text that follows `ROWS`, a call of a strict function whose argument follows `ROWS`."""


@dataclass
class Stream:
    """A stream of one output. `text` is what the client got, of a function call its name and arguments."""

    prompt: str
    seed: int
    tokens: int
    form: str = "text"
    temperature: float = 1.0
    text: str = ""
    times: list[float] = field(default_factory=list)
    taken: bool = False  # the router has begun to answer
    error: str = ""

    def ask(self, url: str, *, timeout_seconds: float) -> None:
        """Ask the router at `url`, and read until the stream ends; `error` is an error that came in the stream.

        Raises:
            httpx.HTTPError: the answer has another status than 200, or the connection breaks before the end.
        """
        self.text = ""
        path = "/v1/chat/completions" if self.form == "function" else "/v1/completions"
        with httpx.stream("POST", url + path, json=self.body(), timeout=timeout_seconds) as response:
            response.raise_for_status()
            self.taken = True
            try:
                for event in events_of(response.iter_lines()):
                    for piece in map(_text_of, event["choices"]):
                        self.text += piece
                        self.times.append(time.monotonic())
            except StreamFailed as failed:
                self.error = str(failed)

    def pause(self, since: float) -> float:
        """Return the longest wait for a token (seconds) since then; 0 if the stream was over by then."""
        times = [since, *(at for at in self.times if at >= since)]
        return max((after - before for before, after in pairwise(times)), default=0.0)

    def body(self) -> Row:
        """Return the body of the request."""
        common = {
            "model": MODEL, "seed": self.seed, "temperature": self.temperature, "max_tokens": self.tokens, "stream": True,
        }  # fmt: skip
        match self.form:
            case "text":
                return {**common, "prompt": self.prompt, "ignore_eos": True}
            case "schema":
                schema = {"type": "json_schema", "json_schema": {"name": "rows", "schema": ROWS}}
                return {**common, "prompt": self.prompt, "response_format": schema}
            case "function":
                parameters = {
                    "type": "object",
                    "properties": {"rows": ROWS},
                    "required": ["rows"],
                    "additionalProperties": False,
                }
                function = {"name": "store", "parameters": parameters, "strict": True}
                return {
                    **common,
                    "messages": [{"role": "user", "content": self.prompt}],
                    "tools": [{"type": "function", "function": function}],
                    "tool_choice": "required",
                }
        raise ValueError(f"form is {self.form!r}; it must be one of {', '.join(FORMS)}")


def _text_of(choice: Row) -> str:
    """Return what a choice of an event adds to the text."""
    if "text" in choice:
        return str(choice["text"])
    delta = choice["delta"]
    functions = [call["function"] for call in delta.get("tool_calls") or ()]
    called = "".join((one.get("name") or "") + (one.get("arguments") or "") for one in functions)
    return (delta.get("content") or "") + called
