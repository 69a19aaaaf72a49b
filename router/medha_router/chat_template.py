"""Chat templates, rendered in the environment that Hugging Face templates are written for.

The environment (sandbox, block trimming, loop controls, `tojson`, `raise_exception`, `strftime_now`, the
`generation` tag) is the one that `transformers` documents; a test compares the text of both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from medha.errors import CheckpointInvalid, RequestInvalid
from medha_router.conversations import THOUGHTS

_END_MARK = "\ue000end of the message to continue\ue000 "
"""Mark after the text of a message that is to be continued; its last space shows whether the template trims messages."""
_TESTS_CONTENT = re.compile(r"""content(['"]\])?\s+is\s+(not\s+)?none""")

_THOUGHTS_NAMES = tuple(
    (name, re.compile(rf"""\.{name}\b|['"]{name}['"]""")) for name in (THOUGHTS, "reasoning", "thinking")
)
"""The names by which templates know the thoughts of a message, and what shows that they read them."""


class _GenerationTag(Extension):
    """The tag `{% generation %}`, which marks the assistant's text for training; in serving it renders its content.

    Its body has its own scope, as in `transformers`: variables set inside end there.
    """

    tags = {"generation"}  # noqa: RUF012 - the base class declares it per instance

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # noqa: DTZ005 - templates mean the server's local date


class ChatTemplate:
    """A compiled template and the special tokens that it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile the template.

        Raises:
            CheckpointInvalid: the template has a syntax error.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        try:
            self._template = environment.from_string(source)
            self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))
            """The variables that the template reads."""
        except (jinja2.TemplateSyntaxError, SyntaxError) as error:  # the latter: in Python made of it
            raise CheckpointInvalid(
                f"the chat template has an error in line {error.lineno}: {error}"
            ) from error
        self._special_tokens = dict(special_tokens)
        self.source = source
        self._thoughts_name = next(
            (name for name, known in _THOUGHTS_NAMES if known.search(source)), THOUGHTS
        )
        self._knows_developer = "developer" in source
        self._knows_null = _TESTS_CONTENT.search(source) is not None

    @property
    def knows_tools(self) -> bool:
        return "tools" in self.variables

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return the prompt text of a conversation; with `continue_final_message`, it ends with the last message's text.

        For templates that do not know them, the role `developer` becomes `system`, which OpenAI treats alike, and null as
        the content of a message with calls becomes the empty text. Thoughts of messages get the name by which the template
        knows them.

        Raises:
            RequestInvalid: the template does not accept these messages.
        """
        if not self._knows_developer:
            messages = [
                {**message, "role": "system"} if message["role"] == "developer" else message
                for message in messages
            ]
        if not self._knows_null:
            messages = [
                {**message, "content": ""} if message["content"] is None else message for message in messages
            ]
        if self._thoughts_name != THOUGHTS:
            messages = [_with_thoughts(message, self._thoughts_name) for message in messages]
        if continue_final_message:
            messages = _marked(messages)
        try:
            text = self._template.render(
                **{
                    **self._special_tokens,
                    "tools": None,
                    "documents": None,
                    **(variables or {}),
                    **({} if tools is None else {"tools": tools}),
                    "messages": messages,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        # A template is a program that comes with the model: any error that it raises concerns these messages.
        except Exception as error:
            message = f"the model's chat template does not accept these messages: {error}"
            raise RequestInvalid(message, param="messages", code="invalid_messages") from error
        return _before_mark(text) if continue_final_message else text


def _with_thoughts(message: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a message with its thoughts under another name.

    Beside calls, templates that read `thinking` take either that or a text, and show both alike: the thoughts get the text.
    """
    if THOUGHTS not in message:
        return message
    renamed = {key: value for key, value in message.items() if key != THOUGHTS} | {name: message[THOUGHTS]}
    if name == "thinking" and message.get("tool_calls") and message["content"]:
        renamed |= {"content": "", name: f"{message[THOUGHTS]}\n{message['content']}"}
    return renamed


def _marked(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages with the end of the last one's text marked.

    Raises:
        RequestInvalid: the last message has no text.
    """
    last = messages[-1]
    if not str(last["content"] or "").strip():
        raise RequestInvalid(
            "`continue_final_message` is true, but the last message has no text to continue; give it a `content`, or set "
            "`continue_final_message` to false",
            param="continue_final_message",
            code="invalid_value",
        )
    return [*messages[:-1], {**last, "content": f"{last['content']}{_END_MARK}"}]


def _before_mark(text: str) -> str:
    """Return a rendered conversation up to the marked end of its last message.

    Where the template trims messages, spaces before the mark go too, as in `transformers`.

    Raises:
        RequestInvalid: the template leaves out the end of that message.
    """
    place = text.rfind(_END_MARK.strip())
    if place < 0:
        raise RequestInvalid(
            "`continue_final_message` is true, but the model's chat template does not show the last message as it is; "
            "set `continue_final_message` to false",
            param="continue_final_message",
            code="invalid_messages",
        )
    before = text[:place]
    return before if text.startswith(_END_MARK, place) else before.rstrip()
