"""The OpenAI request fields that are served, their bounds, and clear errors for those that are not.

Unknown fields are ignored, as in vLLM and SGLang. So are labels (`_HINTS`), and fields that are known at other paths
only (`fate_of`). Other fields that OpenAI, vLLM or SGLang know are never ignored: one that asks for something that is
not served gets a 400 that names it, its value and what to do. A client that asks for images must not get plain text.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from medha.errors import RequestInvalid
from medha_router.conversations import (
    ChatMessage,
    InputItem,
    Message,
    chat_for_template,
    input_for_template,
)
from medha_router.request_model import INT32_MAX, RequestModel, shown
from medha_router.tool_requests import (
    ChatToolChoice,
    ChatTools,
    ResponseToolChoice,
    ResponseTools,
    WordChoice,
)

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_CACHE_SALT_CHARACTERS = 1024


def _stop_list(value: object) -> object:
    """Turn a single text into a list; the empty text asks for nothing, as in OpenAI's API."""
    if isinstance(value, str):
        return [value] if value else []
    if value is not None and not isinstance(value, list):
        raise PydanticCustomError("stop_type", "a text or a list of texts")
    return value


class StreamOptions(RequestModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ReasoningFields(RequestModel):
    """The field `reasoning` of the Responses API. No summaries are made, so `auto` asks for none."""

    effort: Effort | None = None
    summary: Literal["auto"] | None = None


class GenerationRequest(RequestModel):
    """The fields that chat and text completions have in common."""

    model: Annotated[str, Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]],
            BeforeValidator(_stop_list),
            Field(max_length=MAX_STOP_STRINGS),
        ]
        | None
    ) = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    # Smaller values would make logits infinite.
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[str, Field(pattern="^[0-9]{1,10}$")], Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=MAX_LOGIT_BIAS),
        ]
        | None
    ) = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    user: str | None = None
    min_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: (
        Annotated[list[Annotated[int, Field(ge=0, le=INT32_MAX)]], Field(max_length=256)] | None
    ) = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    service_tier: str | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_CACHE_SALT_CHARACTERS)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    # OpenAI's, vLLM's and SGLang's fields for a grammar of the output: `medha_router.structured_output` reads them.
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None

    @abstractmethod
    def requested_logprobs(self) -> int | None:
        """Return the number of alternatives per token in the log-probabilities; None: no log-probabilities."""

    def requested_max_tokens(self) -> int | None:
        return self.max_tokens


class ChatRequest(GenerationRequest):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: ChatTools | None = None
    tool_choice: WordChoice | ChatToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None

    def messages_for_template(self) -> list[Message]:
        return chat_for_template(self.messages)

    def requested_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def requested_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(GenerationRequest):
    prompt: Any  # checked by hand in `prepare`: pydantic would try four types on millions of ids
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None

    def requested_logprobs(self) -> int | None:
        return self.logprobs


class ResponsesRequest(GenerationRequest):
    """A request of OpenAI's Responses API: one text that answers a conversation."""

    input: str | Annotated[list[InputItem], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    metadata: dict[str, str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # These fields of other endpoints have another name here, or no place in the answer.
    max_tokens: None = None
    n: Literal[1] | None = None
    prompt_logprobs: None = None
    response_format: None = None
    text: dict[str, Any] | None = None
    tools: ResponseTools | None = None
    tool_choice: WordChoice | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningFields | None = None

    def requested_logprobs(self) -> int | None:
        return None

    def requested_max_tokens(self) -> int | None:
        return self.max_output_tokens

    def messages_for_template(self) -> list[Message]:
        """Return the conversation, with the instructions as its first message."""
        before: list[Message] = (
            [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        )
        if isinstance(self.input, str):
            return [*before, {"role": "user", "content": self.input}]
        return before + input_for_template(self.input)


class TokenizeRequest(RequestModel):
    model: Annotated[str, Field(min_length=1)]
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: ChatTools | None = None

    def messages_for_template(self) -> list[Message]:
        return chat_for_template(self.messages or [])


class DetokenizeRequest(RequestModel):
    model: Annotated[str, Field(min_length=1)]
    tokens: Any


_HINTS = frozenset({"metadata", "safety_identifier", "prompt_cache_key", "session_id"})
"""Known fields that never affect the answer, whatever their value: labels, and other servers' cache hints."""

_OFF = (None, False)
_ON = (None, True)
_EMPTY_LIST: tuple[Any, ...] = (None, [])
_EMPTY_OBJECT: tuple[Any, ...] = (None, {})
_ONLY_NULL = (None,)
_HARMLESS: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        # OpenAI's
        "audio": _ONLY_NULL,
        "best_of": _ONLY_NULL,  # or the value of `n`
        "echo": _OFF,
        "function_call": (None, "none", "auto"),
        "functions": _EMPTY_LIST,
        "max_completion_tokens": _ONLY_NULL,
        "messages": _ONLY_NULL,
        "modalities": (None, ["text"]),
        "moderation": _ONLY_NULL,
        "parallel_tool_calls": (None, True, False),  # about tools, which are not served here
        "prediction": _ONLY_NULL,
        "prompt": _ONLY_NULL,
        "prompt_cache_options": _ONLY_NULL,
        "prompt_cache_retention": (None, "in_memory"),
        "reasoning_effort": _ONLY_NULL,
        "response_format": (None, {"type": "text"}),
        "store": _OFF,
        "suffix": (None, ""),
        "tool_choice": (None, "none", "auto"),
        "tools": _EMPTY_LIST,
        "top_logprobs": (None, 0),
        "verbosity": (None, "medium"),
        "web_search_options": _ONLY_NULL,
        # vLLM's, of this year's and last year's versions
        "add_generation_prompt": _ON,
        "add_special_tokens": _OFF,
        "allowed_token_ids": _ONLY_NULL,
        "bad_words": _EMPTY_LIST,
        "chat_template": _ONLY_NULL,
        "chat_template_kwargs": _EMPTY_OBJECT,
        "continue_final_message": _OFF,
        "detokenize": _ON,
        "enable_thinking": _ONLY_NULL,
        "documents": _EMPTY_LIST,
        "ec_transfer_params": _ONLY_NULL,
        "guided_choice": _ONLY_NULL,
        "guided_decoding_backend": _ONLY_NULL,
        "guided_grammar": _ONLY_NULL,
        "guided_json": _ONLY_NULL,
        "guided_regex": _ONLY_NULL,
        "guided_whitespace_pattern": _ONLY_NULL,
        "include_reasoning": _ON,
        "kv_transfer_params": _ONLY_NULL,
        "length_penalty": (None, 1, 1.0),
        "logits_processors": _EMPTY_LIST,
        "logprob_token_ids": _ONLY_NULL,
        "media_io_kwargs": _EMPTY_OBJECT,
        "mm_processor_kwargs": _EMPTY_OBJECT,
        "priority": (None, 0),
        "prompt_embeds": _ONLY_NULL,
        "prompt_logprobs": _ONLY_NULL,
        "repetition_detection": _ONLY_NULL,
        "request_id": _ONLY_NULL,
        "return_mm_kwargs": _ON,
        "return_prompt_text": _OFF,
        "return_token_ids": _OFF,
        "return_token_offsets": _OFF,
        "return_token_strs": _OFF,
        "return_tokens_as_token_ids": _OFF,
        "routed_experts_prompt_start": (None, 0),
        "spaces_between_special_tokens": _ON,
        "stream_interval": (None, 1),
        "structured_outputs": _ONLY_NULL,
        "thinking_token_budget": (None, -1),
        "truncate_prompt_tokens": _ONLY_NULL,
        "truncation_side": _ONLY_NULL,
        "use_beam_search": _OFF,
        "vllm_xargs": _EMPTY_OBJECT,
        "watermarking": _OFF,
        # SGLang's
        "bootstrap_host": _ONLY_NULL,
        "bootstrap_port": _ONLY_NULL,
        "bootstrap_room": _ONLY_NULL,
        "custom_labels": _EMPTY_OBJECT,
        "custom_logit_processor": _ONLY_NULL,
        "custom_params": _EMPTY_OBJECT,
        "data_parallel_rank": _ONLY_NULL,
        "disagg_prefill_dp_rank": _ONLY_NULL,
        "ebnf": _ONLY_NULL,
        "extra_key": _ONLY_NULL,
        "images_config": _EMPTY_OBJECT,
        "input_ids": _ONLY_NULL,
        "json_schema": _ONLY_NULL,
        "lora_path": _ONLY_NULL,
        "max_dynamic_patch": _ONLY_NULL,
        "min_dynamic_patch": _ONLY_NULL,
        "ngram_corpus_id": _ONLY_NULL,
        "no_stop_trim": _OFF,
        "reasoning": _ONLY_NULL,
        "regex": _ONLY_NULL,
        "return_cached_tokens_details": _OFF,
        "return_hidden_states": _OFF,
        "return_meta_info": _OFF,
        "return_prompt_token_ids": _OFF,
        "return_routed_experts": _OFF,
        "rid": _ONLY_NULL,
        "routed_dp_rank": _ONLY_NULL,
        "routed_experts_start_len": (None, 0),
        "separate_reasoning": _OFF,
        "session_params": _ONLY_NULL,
        "stop_regex": (None, []),
        "stream_reasoning": _ON,
        "structural_tag": _ONLY_NULL,
        "task": _ONLY_NULL,
        "thinking": _ONLY_NULL,
        "use_audio_in_video": _OFF,
    }
)
"""Known fields that an endpoint may not serve, and the values with which they ask for nothing."""

_HARMLESS_IN_RESPONSES: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "access_programs": _ONLY_NULL,
        "background": _OFF,
        "context_management": _EMPTY_LIST,
        "conversation": _ONLY_NULL,
        "image": _ONLY_NULL,
        "include": (None, [], ["reasoning.encrypted_content"]),  # thoughts are shown, and none are encrypted
        "max_tool_calls": _ONLY_NULL,
        "previous_response_id": _ONLY_NULL,
        "separate_reasoning": _ON,
        "text": _ONLY_NULL,
        "truncation": (None, "disabled"),
    }
)
"""The same for fields that only the Responses API has, or that have another meaning there."""

_FIXES: Mapping[str, str] = MappingProxyType(
    {
        "add_special_tokens": "the chat template adds them; leave it out",
        "best_of": "make it equal to `n`, or leave it out",
        "function_call": "OpenAI has replaced it by `tool_choice`: use that, with `tools`",
        "functions": "OpenAI has replaced it by `tools`: use that",
        "enable_thinking": "put it into `chat_template_kwargs`",
        "extra_key": "use `cache_salt` to keep caches apart, or leave it out",
        "max_completion_tokens": "use `max_tokens`",
        "conversation": "this server keeps no state: send the whole conversation in `input`",
        "no_stop_trim": "use `include_stop_str_in_output`",
        "previous_response_id": "this server keeps no state: send the whole conversation in `input`",
        "reasoning_effort": "where the model's template knows it, put it into `chat_template_kwargs`; else leave it out",
        "request_id": "use the header x-request-id",
        "rid": "use the header x-request-id",
        "thinking": "put the variable by which the model's template switches thoughts into `chat_template_kwargs`",
    }
)


def is_known(kind: type[RequestModel], field: str) -> bool:
    """Return whether a field is served, refused, or accepted because it asks for nothing; others are ignored."""
    return field in kind.model_fields or field in _harmless(kind) or field in _HINTS


def _harmless(kind: type[RequestModel]) -> Mapping[str, tuple[Any, ...]]:
    return {**_HARMLESS, **_HARMLESS_IN_RESPONSES} if kind is ResponsesRequest else _HARMLESS


KINDS: Mapping[str, type[RequestModel]] = MappingProxyType(
    {
        "/v1/chat/completions": ChatRequest,
        "/v1/completions": CompletionRequest,
        "/v1/responses": ResponsesRequest,
        "/tokenize": TokenizeRequest,
        "/detokenize": DetokenizeRequest,
    }
)
"""The kind of request that each path takes."""

Fate = Literal["served", "label", "ignored"] | tuple[Any, ...]
"""The treatment of a field; a tuple has the values with which it asks for nothing."""


def known_fields() -> list[str]:
    """Return every field that some path knows, sorted."""
    served = {field for kind in KINDS.values() for field in kind.model_fields}
    return sorted({*served, *_HARMLESS, *_HARMLESS_IN_RESPONSES, *_HINTS})


def fate_of(kind: type[RequestModel], field: str) -> Fate:
    """Return what becomes of a known field in a request of this kind."""
    if field in kind.model_fields:
        return _ONLY_NULL if kind.model_fields[field].annotation is type(None) else "served"
    if field in _HINTS:
        return "label"
    return _harmless(kind).get(field, "ignored")


def refuse_unsupported(kind: type[RequestModel], body: Mapping[str, Any]) -> None:
    """Refuse a body with fields that are not served.

    Raises:
        RequestInvalid: names the first field that asks for something that is not served.
    """
    harmless_here = _harmless(kind)
    for field, value in body.items():
        harmless = harmless_here.get(field)
        if harmless is None or field in kind.model_fields or _is_among(value, harmless):
            continue
        if field == "best_of" and _is_among(value, (body.get("n") or 1,)):
            continue
        raise RequestInvalid(
            f"`{field}` is {shown(value)}, which this server does not support here; {_FIXES.get(field, 'leave it out')}",
            param=field,
            code="unsupported_parameter",
        )
    _refuse_unsupported_reasoning(kind, body.get("reasoning"))
    options = body.get("stream_options")
    if isinstance(options, dict) and not _is_among(options.get("include_obfuscation"), _OFF):
        raise RequestInvalid(
            f"`stream_options.include_obfuscation` is {shown(options['include_obfuscation'])}, which this server does not "
            "support; leave it out",
            param="stream_options.include_obfuscation",
            code="unsupported_parameter",
        )
    tools = body.get("tools")
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        _refuse_unsupported_tool(tool, f"tools.{index}")
    name = "input" if kind is ResponsesRequest else "messages"
    messages = body.get(name)
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        if name == "input":
            _refuse_unsupported_item(message, f"input.{index}")
        if name == "messages" or not isinstance(message, dict) or message.get("type") != "reasoning":
            _refuse_unsupported_message(message, f"{name}.{index}")


def _refuse_unsupported_reasoning(kind: type[RequestModel], reasoning: object) -> None:
    if kind is not ResponsesRequest or not isinstance(reasoning, dict):
        return
    served = {
        "effort": None,
        "summary": (None, "auto"),
        "context": (None, "auto"),
        "mode": (None, "standard"),
    }
    for field, value in reasoning.items():
        values = served.get(field, _ONLY_NULL)
        if values is not None and not _is_among(value, values):
            raise RequestInvalid(
                f"`reasoning.{field}` is {shown(value)}, which this server does not support; leave it out",
                param=f"reasoning.{field}",
                code="unsupported_parameter",
            )


def _refuse_unsupported_tool(tool: object, where: str) -> None:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if isinstance(kind, str) and kind != "function":
        raise RequestInvalid(
            f'`{where}.type` is {shown(kind)}; this server runs no tools of its own: describe it by the type "function", and '
            "run it where the client runs",
            param=f"{where}.type",
            code="unsupported_parameter",
        )


def _refuse_unsupported_item(item: object, where: str) -> None:
    kind = item.get("type") if isinstance(item, dict) else None
    if isinstance(kind, str) and kind not in (
        "message",
        "reasoning",
        "function_call",
        "function_call_output",
    ):
        raise RequestInvalid(
            f"`{where}.type` is {shown(kind)}; this server accepts messages, reasoning, and calls of functions with their outputs",
            param=f"{where}.type",
            code="unsupported_parameter",
        )


def _is_among(value: object, values: tuple[Any, ...]) -> bool:
    # Compare types too: False and 0 are equal in Python but not in JSON.
    return any(type(value) is type(one) and value == one for one in values)


def _refuse_unsupported_message(message: object, where: str) -> None:
    if not isinstance(message, dict):
        return
    if message.get("role") == "function":
        raise RequestInvalid(
            f'`{where}.role` is "function", which this server does not support; OpenAI has replaced it by "tool": use that',
            param=f"{where}.role",
            code="unsupported_parameter",
        )
    for field in ("function_call", "audio", "refusal"):
        if message.get(field):
            fix = "use `tool_calls`" if field == "function_call" else "leave it out"
            raise RequestInvalid(
                f"`{where}.{field}` is {shown(message[field])}, which this server does not support; {fix}",
                param=f"{where}.{field}",
                code="unsupported_parameter",
            )
    content = message.get("content")
    for part_index, part in enumerate(content if isinstance(content, list) else []):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind not in ("text", "input_text", "output_text"):
            raise RequestInvalid(
                f"`{where}.content.{part_index}.type` is {shown(kind)}; this server accepts text only",
                param=f"{where}.content.{part_index}.type",
                code="unsupported_parameter",
            )


RequestKind = TypeVar("RequestKind", bound=RequestModel)


_EXPECTED: Mapping[str, str] = MappingProxyType(
    {
        "bool_type": "true or false",
        "dict_type": "an object",
        "float_type": "a number",
        "int_type": "an integer",
        "list_type": "a list",
        "model_attributes_type": "an object",
        "model_type": "an object",
        "none_required": "null, because this endpoint does not serve it",
        "too_long": "a list of at most {max_length} elements",
        "too_short": "a list that is not empty",
        "string_too_long": "a text of at most {max_length} characters",
        "string_too_short": "a text that is not empty",
        "string_type": "a text",
    }
)
"""Descriptions of pydantic's error types for clients who know JSON but not Python."""
_BOUNDED = ("too_long", "string_too_long")
"""Types whose description names the bound."""


def validate(kind: type[RequestKind], body: Mapping[str, Any]) -> RequestKind:
    """Return `body` as a validated request of this kind.

    Raises:
        RequestInvalid: names the first wrong field, its value and what was expected.
    """
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        # The union branch that got furthest is the one that was meant; branches that got equally far are
        # alternatives.
        paths = [_where(problem["loc"]) for problem in problems]
        furthest = max((path for path in paths if path[: len(paths[0])] == paths[0]), key=len)
        meant = [problem for problem, path in zip(problems, paths, strict=True) if path == furthest]
        where, value = ".".join(furthest), meant[0]["input"]
        if meant[0]["type"] == "missing":
            message = f"`{where}` is missing"
        else:
            expected = " or ".join(dict.fromkeys(_expected(problem) for problem in meant))
            message = f"`{where}` is {shown(value)}; it must be {expected}"
        raise RequestInvalid(message, param=where or None, code="invalid_value") from error


_BRANCHES = ("str", "TextPart", "InputPart", "ChatToolChoice", "ResponseToolChoice")
"""Names of pydantic's branches of unions."""


def _where(location: tuple[int | str, ...]) -> tuple[str, ...]:
    """Return a field's path as a client knows it: names and indices, without pydantic's branches and key marks."""
    path = [str(part) for part in location if isinstance(part, int) or part.replace("_", "").isalnum()]
    return tuple(part for part in path if part not in _BRANCHES)


def _expected(problem: ErrorDetails) -> str:
    known = _EXPECTED.get(problem["type"])
    if known is not None and problem["type"] in _BOUNDED:
        known = known.format(**problem["ctx"])
    if problem["type"] == "too_long" and isinstance(problem["input"], dict):
        known = "an object with at most {max_length} fields".format(**problem["ctx"])
    words: str = problem["msg"].replace("String should match pattern", "a text that matches", 1)
    return known or words.removeprefix("Input should be ").removeprefix("a valid ")
