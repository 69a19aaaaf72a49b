"""The messages of conversations, as clients send them and as chat templates expect them.

Templates get calls as in `transformers`: with their arguments as an object, and with the name of the function beside
each result.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from medha.errors import RequestInvalid
from medha_router.request_model import RequestModel, shown, without_lone_surrogates

Message = dict[str, Any]
"""A message as chat templates read it."""
THOUGHTS = "reasoning_content"
"""Name of a message's thoughts; the template may know them by another one."""
_HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""The escape of one half of a character in JSON."""


class TextPart(RequestModel):
    type: Literal["text"]
    text: str


class CalledFunction(RequestModel):
    name: Annotated[str, Field(min_length=1)]
    arguments: str


class ToolCall(RequestModel):
    id: Annotated[str, Field(min_length=1)]
    type: Literal["function"]
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        return _call_for_template(self.id, self.function.name, self.function.arguments)


class ChatMessage(RequestModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    def for_template(self) -> Message:
        """Return the message as chat templates expect it: text parts are joined by newlines, as in vLLM.

        Thoughts may have either name.
        """
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        message: Message = {"role": self.role, "content": content or ""}
        for field in ("name", "tool_call_id"):
            if getattr(self, field) is not None:
                message[field] = getattr(self, field)
        if thoughts := self.reasoning_content or self.reasoning:
            message[THOUGHTS] = thoughts
        if self.tool_calls:
            message["content"] = content or None
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return message


def chat_for_template(messages: Sequence[ChatMessage]) -> list[Message]:
    """Return a conversation as chat templates expect it.

    Raises:
        RequestInvalid: a message is about a call that no message before it has, or has calls and another role than
            `assistant`.
    """
    names: dict[str, str] = {}  # function by id of its call
    found = []
    for index, message in enumerate(messages):
        where = f"messages.{index}"
        if message.tool_calls and message.role != "assistant":
            text = f"`{where}.tool_calls` is in a message of role {message.role}; only the assistant calls functions"
            raise RequestInvalid(text, param=f"{where}.tool_calls", code="invalid_value")
        names |= {call.id: call.function.name for call in message.tool_calls or ()}
        one = message.for_template()
        if message.role == "tool":
            one.setdefault("name", _name_of(message.tool_call_id, names, f"{where}.tool_call_id"))
        found.append(one)
    return found


def one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Return a conversation in which each message of the assistant has one call, and the call's results follow it."""
    found: list[Message] = []
    start = 0
    while start < len(messages):
        message, end = messages[start], start + 1
        while end < len(messages) and messages[end]["role"] == "tool":
            end += 1
        results = list(messages[start + 1 : end])
        for index, call in enumerate(message.get("tool_calls", ())):
            first = message if index == 0 else {"role": message["role"], "content": None}
            found.append({**first, "tool_calls": [call]})
            found += [one for one in results if one["tool_call_id"] == call["id"]]
            results = [one for one in results if one["tool_call_id"] != call["id"]]
        if "tool_calls" not in message:
            found.append(message)
        found += results
        start = end
    return found


class InputPart(RequestModel):
    type: Literal["input_text", "output_text", "text"]
    text: str


def _joined(content: str | list[InputPart]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


class InputMessage(RequestModel):
    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputPart]

    def for_template(self) -> Message:
        """Return the message as chat templates expect it, as `ChatMessage` does."""
        return {"role": self.role, "content": _joined(self.content)}


class ReasoningText(RequestModel):
    type: Literal["reasoning_text"]
    text: str


class InputReasoning(RequestModel):
    """Thoughts of the model before a message or a call; a summary and an encrypted text are of no use here."""

    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None

    @property
    def thoughts(self) -> str:
        return "\n".join(part.text for part in self.content or ())


class InputCall(RequestModel):
    """A call of a function that the model made before."""

    type: Literal["function_call"]
    call_id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1)]
    arguments: str


class InputCallOutput(RequestModel):
    """The result of such a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[InputPart]


_TAGS = {"function_call": "[call]", "function_call_output": "[output]", "reasoning": "[reasoning]"}


def _kind(item: object) -> str:
    given = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return _TAGS.get(str(given), "[message]")


InputItem = Annotated[
    Annotated[InputMessage, Tag("[message]")]
    | Annotated[InputCall, Tag("[call]")]
    | Annotated[InputCallOutput, Tag("[output]")]
    | Annotated[InputReasoning, Tag("[reasoning]")],
    Discriminator(_kind),
]


def input_for_template(
    items: Sequence[InputMessage | InputCall | InputCallOutput | InputReasoning],
) -> list[Message]:
    """Return the input of the Responses API as chat templates expect it.

    Calls belong to the assistant's message before them, and thoughts to the one after them.

    Raises:
        RequestInvalid: an output is of a call that no item before it has.
    """
    names: dict[str, str] = {}
    found: list[Message] = []
    thoughts = list[str]()  # of the assistant's next message
    for index, item in enumerate(items):
        match item:
            case InputReasoning():
                thoughts += [item.thoughts] if item.thoughts else []
            case InputMessage():
                found.append(item.for_template())
            case InputCall():
                names[item.call_id] = item.name
                if thoughts or not found or found[-1]["role"] != "assistant":
                    found.append({"role": "assistant", "content": None})
                found[-1].setdefault("tool_calls", [])
                found[-1]["tool_calls"].append(_call_for_template(item.call_id, item.name, item.arguments))
            case InputCallOutput():
                name = _name_of(item.call_id, names, f"input.{index}.call_id")
                output = _joined(item.output)
                found.append({"role": "tool", "content": output, "tool_call_id": item.call_id, "name": name})
        if thoughts and found and not isinstance(item, InputReasoning):
            if found[-1]["role"] == "assistant":
                found[-1][THOUGHTS] = "\n".join(thoughts)
            thoughts = []
    return found


def _call_for_template(id_: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": _as_object(arguments)}}


def _as_object(arguments: str) -> object:
    """Return arguments as an object; text that is none stays text, as models may write such."""
    if not arguments.strip():
        return {}
    try:
        value = json.loads(arguments)
        if _HALF.search(arguments) is not None:  # models may write one without the other
            value = json.loads(without_lone_surrogates(json.dumps(value, ensure_ascii=False)))
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _name_of(id_: str | None, names: dict[str, str], where: str) -> str:
    """Return the function of the call that a result is about.

    Raises:
        RequestInvalid: there is no such call.
    """
    if id_ is None:
        text = f"`{where}` is missing; give the `id` of the call that this message answers"
        raise RequestInvalid(text, param=where, code="invalid_value")
    if id_ not in names:
        known = ", ".join(map(shown, _last(names, 3))) or "none"
        text = f"`{where}` is {shown(id_)}, which is no call of an earlier message; the last ones are {known}"
        raise RequestInvalid(text, param=where, code="invalid_value")
    return names[id_]


def _last(names: dict[str, str], count: int) -> Iterator[str]:
    return iter(list(names)[-count:])
