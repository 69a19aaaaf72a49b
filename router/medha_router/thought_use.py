"""The use of thoughts in a request: how they are found in its output, and which variables of the chat template steer them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from medha.api.declared import AUTO
from medha.errors import RequestInvalid
from medha_router.channel_grammar import in_channels
from medha_router.chat_template import ChatTemplate
from medha_router.openai_requests import ChatRequest, ResponsesRequest
from medha_router.request_model import shown
from medha_router.structured_output import Placed
from medha_router.thought_formats import FORMS, form_of_thoughts, place_after, place_within
from medha_router.thought_grammar import ThoughtGrammar
from medha_router.thought_text import Phase, ThoughtMarks, ThoughtReader
from medha_router.tokenizer_bundle import Bundle

_EFFORT = "reasoning_effort"
_SWITCHES = ("enable_thinking", "thinking")
"""Variables by which the templates of Qwen3 and of DeepSeek-V3.1 switch thoughts on and off."""


Place = Literal["apart", "nowhere", "content"]


@dataclass(frozen=True)
class ThoughtPlan:
    """The form of the thoughts in a request's output, and their place in the answer."""

    form: str
    begins: Phase
    """Phase of the output's first character; meaningless in channels."""
    place: Place
    """Place of the thoughts in an answer: in fields of their own, nowhere, or as the model writes them in the content."""

    @property
    def reader(self) -> ThoughtReader | None:
        """Return the reader that separates the thoughts from the text of an output, None if there is none."""
        marks = FORMS[self.form]
        return None if marks is None or self.place == "content" else ThoughtReader(marks, self.begins)

    @property
    def grammar(self) -> ThoughtGrammar | None:
        """Return the grammar of the thoughts before an answer, None if the text has no thoughts."""
        marks = FORMS[self.form]
        if marks is None or self.begins in (Phase.AFTER, Phase.ANSWER):
            return None
        return ThoughtGrammar(marks, self.begins.is_in_thoughts)

    def special_ids(self, bundle: Bundle) -> Mapping[str, int]:
        """Return the ids of the marks that are special tokens."""
        marks = FORMS[self.form]
        return {} if marks is None else bundle.special_ids_of((marks.opens, marks.closes))


def thought_plan(
    request: ChatRequest | ResponsesRequest, bundle: Bundle, template: ChatTemplate, setting: str, prompt: str
) -> ThoughtPlan | None:
    """Return the plan to find the thoughts in the output of a prompt, None if the form of the model's is not known.

    `setting` is the form that the model's manifest names, or `auto`.

    Raises:
        RequestInvalid: the thoughts of this model cannot be treated as the request asks.
    """
    form = form_of_thoughts(template.source, setting)
    if form is None:
        return None
    marks, place = FORMS[form], _place(request)
    if marks is not None:
        return ThoughtPlan(form, _beginning(request, prompt, marks), place)
    if not bundle.marks_to_read("chat", skip_special_tokens=request.skip_special_tokens is not False):
        return None
    if place == "content":
        raise _invalid(
            "separate_reasoning",
            "is false, but thoughts of this model are messages of their own, for which `content` has no place; leave it out, or "
            "set `include_reasoning` to false",
        )
    return ThoughtPlan(form, Phase.ANSWER, place)


def _place(request: ChatRequest | ResponsesRequest) -> Place:
    if not isinstance(request, ChatRequest):
        return "apart"
    is_hidden = request.include_reasoning is False
    if request.separate_reasoning is not False:
        return "nowhere" if is_hidden else "apart"
    if is_hidden:
        raise _invalid(
            "separate_reasoning",
            "is false, and so is `include_reasoning`, which leaves thoughts out; leave one of them out",
        )
    return "content"


def _beginning(request: ChatRequest | ResponsesRequest, prompt: str, marks: ThoughtMarks) -> Phase:
    if isinstance(request, ChatRequest) and request.continue_final_message:
        place = place_within(str(request.messages[-1].for_template()["content"] or ""), marks)
        return place_after(prompt, marks) if place is Phase.UNDECIDED else place
    if isinstance(request, ChatRequest) and request.add_generation_prompt is False:
        return Phase.UNDECIDED
    return place_after(prompt, marks)


def answer_after(thoughts: ThoughtPlan | None, bundle: Bundle, channels: Mapping[str, int]) -> Placed | None:
    """Return a function that puts the grammar of an answer after the model's thoughts, None if all output is the answer.

    `channels` are the marks of channels if the output begins with the header of a message.
    """
    if channels:
        return partial(in_channels, special_ids=channels)
    if thoughts is None or thoughts.grammar is None:
        return None
    return partial(thoughts.grammar.before, special_ids=thoughts.special_ids(bundle))


def variables_of_template(
    request: ChatRequest | ResponsesRequest, template: ChatTemplate | None
) -> dict[str, Any] | None:
    """Return the variables that a request gives the chat template; its `chat_template_kwargs` override its effort.

    Raises:
        RequestInvalid: the template has no place for the effort.
    """
    if isinstance(request, ChatRequest):
        field, effort = "reasoning_effort", request.reasoning_effort
    else:
        field, effort = "reasoning.effort", None if request.reasoning is None else request.reasoning.effort
    if effort is None or template is None:
        return request.chat_template_kwargs
    found: dict[str, Any] = {}
    if _EFFORT in template.variables:
        found[_EFFORT] = effort
    found |= {switch: effort != "none" for switch in _SWITCHES if switch in template.variables}
    asks_for_nothing = effort == "none" and form_of_thoughts(template.source, AUTO) is None
    if not found and not asks_for_nothing:
        raise _invalid(
            field,
            f"is {shown(effort)}, but this model's chat template has no place for it; where the template has a variable of "
            "another name, put it into `chat_template_kwargs`; else leave it out",
            "unsupported_parameter",
        )
    return {**found, **(request.chat_template_kwargs or {})}


def _invalid(field: str, text: str, code: str = "invalid_value") -> RequestInvalid:
    return RequestInvalid(f"`{field}` {text}", param=field, code=code)
