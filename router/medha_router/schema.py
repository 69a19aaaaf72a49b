"""The fields of OpenAI's requests that are served, their bounds, and a clear answer to those that are not.

Unknown fields are ignored, as OpenAI's servers do. Known fields that are not served get a 400 that names them:
a client that asks for tools must not get plain text.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from medha.errors import RequestInvalid

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_CACHE_SALT_CHARACTERS = 256
_INT32_MAX = 2**31 - 1


def _stop_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


class _Request(BaseModel):
    # strict: "5" is no number and true no integer, as at OpenAI; NaN and infinity are never meant.
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class StreamOptions(_Request):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(_Request):
    """What chat and text completions have in common."""

    model: Annotated[str, Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1, le=_INT32_MAX)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_INT32_MAX)] | None = None
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
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[str, Field(pattern="^[0-9]{1,10}$")], Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=MAX_LOGIT_BIAS),
        ]
        | None
    ) = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    user: str | None = None
    min_tokens: Annotated[int, Field(ge=0, le=_INT32_MAX)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: (
        Annotated[list[Annotated[int, Field(ge=0, le=_INT32_MAX)]], Field(max_length=256)] | None
    ) = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    service_tier: str | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_CACHE_SALT_CHARACTERS)] | None = None

    @abstractmethod
    def asked_logprobs(self) -> int | None:
        """How many alternatives each token's log-probability comes with; None: no log-probabilities."""

    def asked_max_tokens(self) -> int | None:
        return self.max_tokens


class TextPart(_Request):
    type: Literal["text"]
    text: str


class ChatMessage(_Request):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None

    def for_template(self) -> dict[str, Any]:
        """Text parts are joined by newlines, as vLLM does for templates that expect text."""
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        message: dict[str, Any] = {"role": self.role, "content": content or ""}
        for field in ("name", "tool_call_id"):
            if getattr(self, field) is not None:
                message[field] = getattr(self, field)
        return message


class ChatRequest(GenerationRequest):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=_INT32_MAX)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def asked_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def asked_max_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(GenerationRequest):
    prompt: Any  # checked by hand in `prepare`: pydantic would try four shapes on millions of ids
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: bool | None = None

    def asked_logprobs(self) -> int | None:
        return self.logprobs


class TokenizeRequest(_Request):
    model: Annotated[str, Field(min_length=1)]
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(_Request):
    model: Annotated[str, Field(min_length=1)]
    tokens: Any


@dataclass(frozen=True)
class _Unsupported:
    """A known field that is not served, and the values with which it asks for nothing."""

    field: str
    harmless: tuple[Any, ...] = (None,)


_UNSUPPORTED_ANYWHERE = (
    _Unsupported("prompt_logprobs"),
    _Unsupported("use_beam_search", (None, False)),
    _Unsupported("echo", (None, False)),
    _Unsupported("structured_outputs"),
    _Unsupported("guided_json"),
    _Unsupported("guided_regex"),
    _Unsupported("guided_choice"),
    _Unsupported("guided_grammar"),
    _Unsupported("allowed_token_ids"),
    _Unsupported("bad_words", (None, [])),
    _Unsupported("logits_processors"),
    _Unsupported("truncate_prompt_tokens"),
    _Unsupported("kv_transfer_params"),
    _Unsupported("prompt_embeds"),
)
UNSUPPORTED_CHAT = (
    *_UNSUPPORTED_ANYWHERE,
    _Unsupported("tools", (None, [])),
    _Unsupported("tool_choice", (None, "none")),
    _Unsupported("functions", (None, [])),
    _Unsupported("function_call", (None, "none")),
    _Unsupported("response_format", (None, {"type": "text"})),
    _Unsupported("audio"),
    _Unsupported("modalities", (None, ["text"])),
    _Unsupported("prediction"),
    _Unsupported("web_search_options"),
    _Unsupported("documents", (None, [])),
    _Unsupported("chat_template"),
    _Unsupported("continue_final_message", (None, False)),
)
UNSUPPORTED_COMPLETION = (
    *_UNSUPPORTED_ANYWHERE,
    _Unsupported("suffix", (None, "")),
    _Unsupported("response_format", (None, {"type": "text"})),
)


def refuse_unsupported(body: Mapping[str, Any], fields: tuple[_Unsupported, ...]) -> None:
    """
    Raises:
        RequestInvalid: names the first field that asks for something that is not served.
    """
    for unsupported in fields:
        value = body.get(unsupported.field)
        # Compared with their types: False and 0 are equal in Python and not in JSON.
        if not any(type(value) is type(harmless) and value == harmless for harmless in unsupported.harmless):
            raise RequestInvalid(
                f"`{unsupported.field}` is not supported by this server; leave it out",
                param=unsupported.field,
                code="unsupported_parameter",
            )
    messages = body.get("messages")
    if not isinstance(messages, list):
        return
    for index, message in enumerate(messages):
        _refuse_unsupported_message(message, f"messages.{index}")


def _refuse_unsupported_message(message: object, where: str) -> None:
    if not isinstance(message, dict):
        return
    for field in ("tool_calls", "function_call", "audio"):
        if message.get(field):
            raise RequestInvalid(
                f"`{where}.{field}` is not supported by this server",
                param=f"{where}.{field}",
                code="unsupported_parameter",
            )
    content = message.get("content")
    for part_index, part in enumerate(content if isinstance(content, list) else []):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise RequestInvalid(
                f"content parts of type {kind[:40]!r} are not supported: this server takes text only",
                param=f"{where}.content.{part_index}.type",
                code="unsupported_parameter",
            )


RequestKind = TypeVar("RequestKind", bound=_Request)


def validate(kind: type[RequestKind], body: Mapping[str, Any]) -> RequestKind:
    """
    Raises:
        RequestInvalid: names the first wrong field, its value and what was expected.
    """
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
        # Union branches and key markers are pydantic's; a client knows field names and indices alone.
        path = [str(part) for part in problem["loc"] if isinstance(part, int) or str(part).isidentifier()]
        where = ".".join(part for part in path if part not in ("str", "TextPart"))
        if problem["type"] == "missing":
            message = f"`{where}` is missing"
        else:
            message = f"`{where}`: {problem['msg']} (found {str(problem['input'])[:80]!r})"
        raise RequestInvalid(message, param=where or None, code="invalid_value") from error
