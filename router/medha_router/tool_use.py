"""The use of tools in a request: which functions are shown to the model, and which it may or must call.

Each of the two APIs has its own form of the same fields. This module turns both into one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn

from medha.api.declared import AUTO
from medha.errors import RequestInvalid
from medha_router.chat_template import ChatTemplate
from medha_router.conversations import Message, one_call_each
from medha_router.grammar_check import GrammarCheck, Unchecked
from medha_router.openai_requests import ChatRequest, ResponsesRequest, TokenizeRequest
from medha_router.request_model import shown
from medha_router.structured_output import (
    grammar_of,
    json_grammar,
    require,
    require_free_end,
    schema_of_answer,
)
from medha_router.thought_use import ThoughtPlan, answer_after
from medha_router.tokenizer_bundle import Bundle
from medha_router.tool_call_text import CallReader
from medha_router.tool_formats import FORMATS, ToolFormat, detected
from medha_router.tool_grammar import CallsGrammar, no_calls, unwritable
from medha_router.tool_requests import (
    ChatToolChoice,
    FunctionFields,
    ResponseToolChoice,
)

Mode = Literal["none", "auto", "required"]


@dataclass(frozen=True)
class ToolPlan:
    """The form, functions and marks by which calls are found in a request's output."""

    format: str
    functions: dict[str, dict[str, Any]]
    """Schemas of the arguments by function, empty where the form of the calls needs none."""
    one_call: bool


@dataclass(frozen=True)
class _Function:
    at: str  # its place in the request
    fields: FunctionFields

    @property
    def schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the arguments, which is always that of an object."""
        return {"type": "object", **self.fields.schema_of_parameters}


@dataclass(frozen=True)
class _Choice:
    mode: Mode
    allowed: frozenset[str]
    is_named: bool = False  # one function is named, and must be called exactly once
    is_subset: bool = False


@dataclass(frozen=True)
class ToolUse:
    """A request's tools, checked against its model."""

    shown: list[dict[str, Any]]
    """The functions as the chat template gets them."""
    format_name: str
    functions: tuple[_Function, ...]
    choice: _Choice
    one_call: bool
    special_ids: Mapping[str, int] = field(default_factory=dict)

    @property
    def format(self) -> ToolFormat:
        return FORMATS[self.format_name]

    @property
    def plan(self) -> ToolPlan | None:
        """Return the plan by which calls are read from the output, or None if it has none."""
        if self.choice.mode == "none":
            return None
        functions = {
            one.fields.name: one.fields.schema_of_parameters if self.format.as_tags else {}
            for one in self.functions
        }
        return ToolPlan(self.format_name, functions, self.one_call)

    def grammar(
        self,
        request: ChatRequest | ResponsesRequest,
        bundle: Bundle,
        channels: Mapping[str, int],
        thoughts: ThoughtPlan | None = None,
        *,
        is_followed: bool = True,
    ) -> str:
        """Return the grammar of the output, "" if it may be anything.

        `channels` are the marks of channels if the output begins with the header of a message, and `thoughts`
        may go before the rest of its text. If a ready replica follows no grammars (not `is_followed`), the output
        has one only if the request cannot be served otherwise.

        Raises:
            RequestInvalid: names the field that asks for what cannot be followed.
        """
        choice, check = self.choice, bundle.grammar_check
        in_text = None if thoughts is None or self.format.in_channels else thoughts.grammar
        special_ids = self.special_ids
        if thoughts is not None and in_text is not None:
            special_ids = {**special_ids, **thoughts.special_ids(bundle)}
        answer = schema_of_answer(request) if choice.mode == "auto" else None
        allowed = [one for one in self.functions if one.fields.name in choice.allowed]
        is_free = choice.mode == "auto" and not (
            answer or choice.is_subset or any(one.fields.strict for one in allowed)
        )
        if choice.mode == "none" or is_free:
            own = grammar_of(request, check, answer_after(thoughts, bundle, channels))
            if own or is_free or request.ignore_eos or request.min_tokens or not is_followed:
                return own
            is_unread = self.format.in_channels and not channels
            return "" if is_unread else no_calls(self.format, special_ids, in_text)
        if self.format.in_channels and not channels:
            _refuse_part_of_a_message(request)
        asked = None if answer is None else answer[1]
        functions = [(one.fields.name, one.schema) for one in allowed]
        found = CallsGrammar(self.format, functions, self.one_call, choice.mode == "auto", asked, in_text)
        if self._has_fault(found, allowed, check):  # then each schema is checked by itself
            if answer is not None:
                require(json_grammar(*answer), answer[0], check)
            found = replace(found, functions=self._all_enforced(allowed, check))
            require(found.lark({}), "tools", check)
        require_free_end(request, "tools")
        return found.lark(special_ids)

    def _has_fault(self, found: CallsGrammar, allowed: list[_Function], check: GrammarCheck) -> bool:
        if self.format.as_tags and any(unwritable(one.schema) is not None for one in allowed):
            return True
        try:
            require(found.lark({}), "tools", check)
        except RequestInvalid:
            return True
        return False

    def _all_enforced(
        self, functions: list[_Function], check: GrammarCheck
    ) -> list[tuple[str, dict[str, Any] | None]]:
        """Return the schemas that arguments follow; all missing checks are asked for together."""
        found, questions = [], list[bytes]()
        for function in functions:
            try:
                found.append((function.fields.name, self._enforced(function, check)))
            except Unchecked as unchecked:
                questions += unchecked.questions
        if questions:
            raise Unchecked(*questions)
        return found

    def _enforced(self, function: _Function, check: GrammarCheck) -> dict[str, Any] | None:
        """Return the schema that the arguments follow; one that cannot be enforced is an error only if it is `strict`."""
        at = f"{function.at}.parameters"
        try:
            if self.format.as_tags and (key := unwritable(function.schema)) is not None:
                _refuse(
                    at,
                    f"cannot be enforced in this model's form of calls, because of {shown(key)}; change that, or set `strict` to "
                    "false",
                )
            require(json_grammar(at, function.schema), at, check)
        except RequestInvalid:
            if function.fields.strict:
                raise
            return None
        return function.schema


def reader_of(plan: ToolPlan) -> CallReader:
    """Return the reader of a plan's output."""
    return FORMATS[plan.format].reader(plan.functions, one_call=plan.one_call)


def tool_use(request: ChatRequest | ResponsesRequest, bundle: Bundle, setting: str) -> ToolUse | None:
    """Return what a request asks of tools, None if it has none; `setting` is the model's form of calls, or `auto`.

    Raises:
        RequestInvalid: a field is wrong, or the model cannot call functions.
    """
    functions = _functions(request)
    choice = _choice(request, functions)
    if not functions:
        return None
    template = template_of_tools(bundle)
    name = form_of_calls(template, setting)
    if name is None:
        text = (
            f"`tools` has {len(functions)} functions, but the form of this model's calls is not known; set "
            f"`spec.model.toolCallFormat` of its manifest to one of {', '.join(FORMATS)}"
        )
        raise RequestInvalid(text, param="tools", code="unknown_tool_format")
    form = FORMATS[name]
    if form.in_channels:
        _require_channels(request, bundle, name, choice)
    one_call = request.parallel_tool_calls is False or choice.is_named
    special_ids = bundle.special_ids_of(form.marks)
    shown_tools = tools_for_template([one.fields for one in functions], name)
    return ToolUse(shown_tools, name, functions, choice, one_call, special_ids)


def form_of_calls(template: ChatTemplate, setting: str) -> str | None:
    """Return the name of the form of a model's calls, None if it is not known; `setting` is its manifest's."""
    return detected(template.source) if setting == AUTO or setting not in FORMATS else setting


def conversation(
    request: ChatRequest | ResponsesRequest | TokenizeRequest, bundle: Bundle, setting: str
) -> list[Message]:
    """Return the messages of a request as the model's chat template expects them."""
    messages = request.messages_for_template()
    name = None if bundle.tool_template is None else form_of_calls(bundle.tool_template, setting)
    return one_call_each(messages) if name is not None and FORMATS[name].one_call_each else messages


def tools_for_template(functions: Sequence[FunctionFields], form: str | None) -> list[dict[str, Any]]:
    """Return functions as the chat templates of a form of calls expect them."""
    description = "" if form is not None and FORMATS[form].needs_description else None
    return [one.for_template(description) for one in functions]


def _require_channels(
    request: ChatRequest | ResponsesRequest, bundle: Bundle, form: str, choice: _Choice
) -> None:
    """Refuse calls in channels where channels are not read."""
    if not bundle.channel_marks:
        text = (
            f"`tools` has functions, but this model has no channels, in which calls of the form {form} stand; set "
            "`spec.model.toolCallFormat` of its manifest to another one, or leave them out"
        )
        raise RequestInvalid(text, param="tools", code="unknown_tool_format")
    if request.skip_special_tokens is False and choice.mode != "none":
        _refuse(
            "skip_special_tokens",
            "is false, but calls of this model are found by its special tokens; leave it out, or set `tool_choice` to "
            '"none"',
        )


def _refuse_part_of_a_message(request: ChatRequest | ResponsesRequest) -> NoReturn:
    continues = isinstance(request, ChatRequest) and bool(request.continue_final_message)
    _refuse(
        "continue_final_message" if continues else "add_generation_prompt",
        f"is {shown(continues)}, but a call of this model is a message of its own, and these `tools` hold the output to that; "
        "leave one of them out",
    )


def template_of_tools(bundle: Bundle) -> ChatTemplate:
    """Return the model's template for conversations with tools.

    Raises:
        RequestInvalid: the model has none.
    """
    template = bundle.tool_template
    if template is None or not template.knows_tools:
        text = (
            "`tools` has functions, but this model's chat template has no place for them; serve a checkpoint whose template "
            "reads `tools`, or leave them out"
        )
        raise RequestInvalid(text, param="tools", code="no_tools_in_template")
    return template


def _functions(request: ChatRequest | ResponsesRequest) -> tuple[_Function, ...]:
    if isinstance(request, ChatRequest):
        chat_tools = request.tools or ()
        functions = [_Function(f"tools.{n}.function", tool.function) for n, tool in enumerate(chat_tools)]
    else:
        functions = [_Function(f"tools.{n}", tool) for n, tool in enumerate(request.tools or ())]
    found: dict[str, _Function] = {}
    for function in functions:
        name = function.fields.name
        if name in found:
            _refuse(
                f"{function.at}.name",
                f"is {shown(name)}, as is `{found[name].at}.name`; give each function its own name",
            )
        _check_schema(function)
        found[name] = function
    return tuple(found.values())


def _check_schema(function: _Function) -> None:
    """Refuse a schema of arguments that is not one of an object."""
    schema, at = function.fields.schema_of_parameters, f"{function.at}.parameters"
    if schema and schema.get("type", "object") != "object":
        _refuse(f"{at}.type", f'is {shown(schema["type"])}; arguments are an object, so give "object"')
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        _refuse(f"{at}.properties", f"is {shown(properties)}; give an object with a schema for each argument")
    for key, value in properties.items():
        if not isinstance(value, (dict, bool)):
            _refuse(f"{at}.properties.{key}", f"is {shown(value)}; give a JSON Schema (an object)")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        _refuse(f"{at}.required", f"is {shown(required)}; give a list of names of arguments")


def _choice(request: ChatRequest | ResponsesRequest, functions: tuple[_Function, ...]) -> _Choice:
    given, names = request.tool_choice, frozenset(one.fields.name for one in functions)
    if given in (None, "auto", "none"):
        return _Choice("none" if given == "none" else "auto", names)
    if not functions:
        as_given = given if isinstance(given, str) or given is None else given.model_dump(exclude_none=True)
        _refuse("tool_choice", f"is {shown(as_given)}, but there are no `tools`; add them, or leave it out")
    if given == "required":
        return _Choice("required", names)
    assert isinstance(given, (ChatToolChoice, ResponseToolChoice))
    mode, listed = _listed(given)
    for at, name in listed:
        if name not in names:
            _refuse(at, f"is {shown(name)}, which is none of `tools`: {', '.join(sorted(names)[:20])}")
    allowed = frozenset(name for _, name in listed)
    return _Choice(mode, allowed, is_named=given.type == "function", is_subset=allowed != names)


def _listed(given: ChatToolChoice | ResponseToolChoice) -> tuple[Mode, list[tuple[str, str]]]:
    """Return the mode, and the functions that may be called, each with its place in the request."""
    names: list[str] | None
    if isinstance(given, ChatToolChoice):
        at, name, inner = "tool_choice.function.name", given.function, given.allowed_tools
        named = None if name is None else name.name
        mode = None if inner is None else inner.mode
        names = None if inner is None else [tool.function.name for tool in inner.tools]
        of_all, of_each = "tool_choice.allowed_tools", "tools.{}.function.name"
    else:
        at, named, mode = "tool_choice.name", given.name, given.mode
        names = None if given.tools is None else [tool.name for tool in given.tools]
        of_all, of_each = "tool_choice", "tools.{}.name"
    if given.type == "function":
        if named is None:
            _refuse(at, "is missing; name the function that must be called")
        return "required", [(at, named)]
    if mode is None or names is None:
        _refuse(of_all, "is not whole; give `mode` and `tools`")
    return mode, [(f"{of_all}.{of_each.format(index)}", one) for index, one in enumerate(names)]


def shown_in_response(request: ResponsesRequest) -> dict[str, Any]:
    """Return the fields about tools that a response shows again."""
    choice = request.tool_choice
    tools = [
        {"type": "function", "description": None, "strict": False, **tool.model_dump(exclude_none=True)}
        | {"parameters": tool.schema_of_parameters}
        for tool in request.tools or ()
    ]
    if isinstance(choice, ResponseToolChoice):
        named: Any = choice.model_dump(exclude_none=True)
    else:
        named = choice or ("auto" if tools else "none")
    return {
        "tools": json.loads(json.dumps(tools)),
        "tool_choice": named,
        "parallel_tool_calls": bool(tools) and request.parallel_tool_calls is not False,
    }


def _refuse(field_: str, text: str) -> NoReturn:
    raise RequestInvalid(f"`{field_}` {text}", param=field_, code="invalid_value")
