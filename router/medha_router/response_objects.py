"""The objects and events of OpenAI's Responses API, as dictionaries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from pydantic_core import to_json

from medha_router.api_error import ApiError
from medha_router.generation import OutputPart, Piece
from medha_router.prepare import Plan
from medha_router.thought_text import Thought
from medha_router.tool_call_text import CallPart
from medha_router.tool_formats import FORMATS, call_id

Usage = dict[str, Any]
Status = Literal["completed", "incomplete"]


Kind = Literal["message", "reasoning", "function_call"]
_PREFIXES: Mapping[Kind, str] = MappingProxyType({"message": "msg", "reasoning": "rs", "function_call": "fc"})


def _content_part(kind: Kind, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _kind(part: OutputPart) -> Kind:
    match part:
        case CallPart():
            return "function_call"
        case Thought():
            return "reasoning"
    return "message"


@dataclass
class _Item:
    """An item of the output: a message, thoughts, or a call of a function."""

    kind: Kind
    number: int
    id: str
    call_id: str = ""
    name: str = ""
    call: int | None = None
    """Number of the call; None: it is no call."""
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def takes(self, part: OutputPart) -> bool:
        """Return whether a part of the output belongs to this item."""
        return self.kind == _kind(part) and (not isinstance(part, CallPart) or self.call == part.call)

    def add(self, part: OutputPart) -> str:
        """Add a part, and return its text. An item of thoughts does not begin with the newline that separates messages."""
        match part:
            case CallPart():
                text = part.arguments
            case Thought():
                text = part.text if self.texts else part.text.lstrip("\n")
            case _:
                text = part
        self.texts += [text] if text else []
        return text

    def place(self) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": self.id, "output_index": self.number}
        return place if self.call is not None else {**place, "content_index": 0}

    def begun(self) -> dict[str, Any]:
        """Return the item before its first text."""
        whole = self._whole("", "in_progress")
        return whole if self.call is not None else {**whole, "content": []}

    def shown(self, status: Status) -> dict[str, Any]:
        return self._whole(self.text, status)

    def _whole(self, text: str, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"type": self.kind, "id": self.id, "status": status}
        if self.kind == "function_call":
            return {**item, "call_id": self.call_id, "name": self.name, "arguments": text}
        item["content"] = [_content_part(self.kind, text)]
        if self.kind == "message":
            return {**item, "role": "assistant"}
        return {**item, "summary": []}


class ResponseObjects:
    """Builds the response of one request, whole or as events: messages, thoughts, and calls of functions."""

    def __init__(self, request_id: str, created: int, plan: Plan, service_tier: str) -> None:
        """`service_tier` is the name of the service class that was applied."""
        self._id = request_id
        self._created, self._plan, self._service_tier = created, plan, service_tier
        self._items: list[_Item] = []
        self._finish_reason: str | None = None
        self._ends_with_calls = False
        self._events = 0

    def whole(self, pieces: list[Piece], usage: Usage) -> dict[str, Any]:
        """Return the response of a request that is not streamed; `pieces` has one whole piece."""
        (piece,) = pieces
        for part in piece.parts or [""]:
            self._item_of(part)[0].add(part)
        self._ends_with_calls = piece.ends_with_calls
        status, details = _ending(piece.finish_reason)
        return self._response(status, details, self._output(status), usage)

    def _item_of(self, part: OutputPart) -> tuple[_Item, bool]:
        """Return the item that a part of the output belongs to, and whether it is new."""
        last = self._items[-1] if self._items else None
        if last is not None and last.takes(part):
            return last, False
        number = len(self._items)
        suffix = self._id.removeprefix("resp_") + (f"_{number}" if number else "")
        kind = _kind(part)
        id_ = f"{_PREFIXES[kind]}_{suffix}"
        if isinstance(part, CallPart):
            item = _Item(kind, number, id_, self._call_id(part.call), part.name or "", part.call)
        else:
            item = _Item(kind, number, id_)
        self._items.append(item)
        return item, True

    def _call_id(self, call: int) -> str:
        assert self._plan.tools is not None
        return call_id(self._id, 0, call, short=FORMATS[self._plan.tools.format].short_ids)

    def _output(self, status: Status) -> list[dict[str, Any]]:
        """Return the items of the output; only the last one can be incomplete."""
        last = self._status_of_last(status)
        return [item.shown(last if item is self._items[-1] else "completed") for item in self._items]

    def _status_of_last(self, status: Status) -> Status:
        """Return the status of the last item of a response that has `status`: a stop string may have cut a call off."""
        is_cut = self._items[-1].call is not None and not self._ends_with_calls
        return "incomplete" if is_cut else status

    # --- events -------------------------------------------------------------------------------------

    def begin(self) -> bytes:
        """Return the events before any output. If the output cannot begin with thoughts or a call, its message begins here."""
        started = self._response("in_progress", None, [], None)
        events = self._event("response.created", response=started)
        events += self._event("response.in_progress", response=started)
        is_message = self._plan.tools is None and self._plan.thoughts is None
        return events + self._added(self._item_of("")[0]) if is_message else events

    def text(self, piece: Piece) -> bytes:
        """Return the events of new output; nothing if there is none."""
        self._finish_reason = piece.finish_reason or self._finish_reason
        self._ends_with_calls = piece.ends_with_calls
        return b"".join(map(self._part, piece.parts))

    def _part(self, part: OutputPart) -> bytes:
        before = self._items[-1] if self._items else None
        item, is_new = self._item_of(part)
        events = b""
        if is_new:
            events = (self._done(before, "completed") if before is not None else b"") + self._added(item)
        text = item.add(part)
        if not text:
            return events
        match item.kind:
            case "message":
                event = self._event("response.output_text.delta", **item.place(), delta=text, logprobs=[])
            case "reasoning":
                event = self._event("response.reasoning_text.delta", **item.place(), delta=text)
            case "function_call":
                event = self._event("response.function_call_arguments.delta", **item.place(), delta=text)
        return events + event

    def _added(self, item: _Item) -> bytes:
        event = self._event("response.output_item.added", output_index=item.number, item=item.begun())
        if item.call is None:
            event += self._event(
                "response.content_part.added", **item.place(), part=_content_part(item.kind, "")
            )
        return event

    def _done(self, item: _Item, status: Status) -> bytes:
        text, whole = item.text, item.shown(status)
        match item.kind:
            case "message":
                events = self._event("response.output_text.done", **item.place(), text=text, logprobs=[])
            case "reasoning":
                events = self._event("response.reasoning_text.done", **item.place(), text=text)
            case "function_call":
                done = {**item.place(), "name": item.name, "arguments": text}
                events = self._event("response.function_call_arguments.done", **done)
        if item.call is None:
            events += self._event("response.content_part.done", **item.place(), part=whole["content"][0])
        return events + self._event("response.output_item.done", output_index=item.number, item=whole)

    def end(self, usage: Usage) -> bytes:
        """Return the events after the last output."""
        status, details = _ending(self._finish_reason)
        events = b"" if self._items else self._added(self._item_of("")[0])
        events += self._done(self._items[-1], self._status_of_last(status))
        response = self._response(status, details, self._output(status), usage)
        return events + self._event(f"response.{status}", response=response)

    def failed(self, error: ApiError) -> bytes:
        """Return the event of an error after the stream has begun."""
        response = self._response("failed", None, [], None)
        response["error"] = {"code": "server_error", "message": error.message}
        return self._event("response.failed", response=response)

    def _event(self, name: str, /, **fields: Any) -> bytes:
        data = to_json({"type": name, "sequence_number": self._events, **fields})
        self._events += 1
        return b"event: %s\ndata: %s\n\n" % (name.encode(), data)

    # --- objects ------------------------------------------------------------------------------------

    def _response(
        self, status: str, details: dict[str, str] | None, output: list[dict[str, Any]], usage: Usage | None
    ) -> dict[str, Any]:
        sampling = self._plan.sampling
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": details,
            "model": self._plan.model,
            "output": output,
            "previous_response_id": None,
            "service_tier": self._service_tier,
            "store": False,
            "temperature": sampling.temperature,
            "top_logprobs": 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
            **self._plan.shown_fields,
        }


def _ending(finish_reason: str | None) -> tuple[Status, dict[str, str] | None]:
    """Return the status of a response, and why it is incomplete."""
    if finish_reason == "length":
        return "incomplete", {"reason": "max_output_tokens"}
    return "completed", None


def _usage(usage: Usage) -> Usage:
    """Return the counts of a chat completion in the Responses API's words."""
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"]},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
        "total_tokens": usage["total_tokens"],
    }
