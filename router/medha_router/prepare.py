"""Turns the bytes of a request into token ids and a plan. Pure except for its bundles, so it runs in any process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from pydantic_core import from_json, to_json

from medha.api.declared import AUTO
from medha.errors import RequestInvalid
from medha.wire.frames import TokenIds
from medha.wire.messages import Sampling
from medha_router.api_error import ApiError
from medha_router.openai_requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    ReasoningFields,
    ResponsesRequest,
    TokenizeRequest,
    refuse_unsupported,
    validate,
)
from medha_router.request_model import shown
from medha_router.structured_output import grammar_of
from medha_router.thought_use import ThoughtPlan, answer_after, thought_plan, variables_of_template
from medha_router.tokenizer_bundle import Bundle, SamplingDefaults
from medha_router.tool_use import (
    ToolPlan,
    ToolUse,
    conversation,
    form_of_calls,
    shown_in_response,
    template_of_tools,
    tool_use,
    tools_for_template,
)

Generating = Literal["chat", "completions", "responses"]
Endpoint = Literal["chat", "completions", "responses", "tokenize", "detokenize"]
PROMPT_FIELDS: Mapping[Generating, str] = MappingProxyType(
    {"chat": "messages", "completions": "prompt", "responses": "input"}
)
"""The field that has the prompt, by endpoint."""

_COMPLETION_DEFAULT_TOKENS = 16
"""Default `max_tokens` of /v1/completions, as in OpenAI's API and vLLM."""
MOST_PROMPT_LOGPROBS = 2**17
"""Largest number of log-probabilities of prompt tokens in one answer; each alternative counts as one, too."""
MOST_LOGPROBS = 2**20
"""Largest number of log-probabilities of output tokens in an answer that is no stream; each alternative counts as one."""
MOST_MESSAGES = 2**15
"""Most messages and parts of their contents, counted together, that a conversation may have."""


@dataclass(frozen=True)
class ModelTerms:
    """The facts about a served model that are needed to check a request."""

    digest: str
    max_model_len: int
    longest_request_tokens: int
    vocab_size: int
    tool_call_format: str = AUTO
    """The form of the model's calls of functions, as its manifest names it."""
    reasoning_format: str = AUTO
    """The form of the model's thoughts, as its manifest names it."""
    follows_grammars: bool = True
    """All ready replicas can follow grammars. Otherwise a request that needs one waits for a replica that can, or ends
    with an error later on if there is none."""

    @property
    def longest(self) -> int:
        """Largest number of prompt and output tokens that fit."""
        return min(self.max_model_len, self.longest_request_tokens)


@dataclass(frozen=True)
class Catalog:
    """The models that are served now, and those that are known but have no ready replica."""

    models: Mapping[str, ModelTerms]
    unavailable: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Further names of models, as alias -> model."""

    def name(self, requested: str) -> str:
        """Return the own name of the model that a client asks for."""
        return requested if requested in self.models else self.aliases.get(requested, requested)

    def terms(self, model: str) -> ModelTerms:
        """Return the terms of `model`.

        Raises:
            ApiError: 404 if the model is unknown, 503 if nothing serves it now.
        """
        if model in self.models:
            return self.models[model]
        if model in self.unavailable or not (self.models or self.unavailable):
            message = f"no ready replica serves the model {model[:200]!r} now; try again later"
            raise ApiError(503, message, code="unavailable", retry_after_seconds=1)
        raise ApiError(404, f"The model `{model[:200]}` does not exist.", "model", "model_not_found")


@dataclass(frozen=True)
class Plan:
    """A generation request, checked and with its defaults filled in."""

    endpoint: Generating
    model: str
    digest: str
    sampling: Sampling
    samples: int
    seed: int | None
    stream: bool
    include_usage: bool
    continuous_usage: bool
    stop: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    service_tier: str | None
    cache_salt: str
    computes_only: bool = False
    """Only the prompt is computed: the token that is sampled after it is not shown (`max_tokens: 0`)."""
    echo: tuple[str, ...] | None = None
    """Texts of the prompts, with which the outputs begin."""
    echo_logprobs: bool = False
    """Log-probabilities of the prompt's tokens go before those of the output."""
    shown_fields: dict[str, Any] = field(default_factory=dict)
    """Fields of the request that a response of the Responses API shows again."""
    prompt_logprobs: int | None = None
    """Number of alternatives in the answer's own list of the prompt's log-probabilities, vLLM's `prompt_logprobs`."""
    tools: ToolPlan | None = None
    """The calls of functions that the output may have."""
    thoughts: ThoughtPlan | None = None
    """The form of the thoughts that the output may have."""

    @property
    def scored_samples(self) -> int:
        """Samples of a prompt that bring its log-probabilities, and compute the whole of it for that.

        The first one's serve all, but in a stream no sample can wait for another.
        """
        if self.sampling.prompt_logprobs is None:
            return 0
        return self.samples if self.stream else 1

    @property
    def times_computed(self) -> int:
        """Times that each prompt is computed: once for each sample that scores it, and once for the others together."""
        return self.scored_samples + (self.scored_samples < self.samples)


@dataclass(frozen=True)
class Prepared:
    """A plan with its prompts (int32 [n] each), or, for /tokenize and /detokenize, the answer itself (JSON)."""

    plan: Plan | None = None
    prompts: tuple[TokenIds, ...] = ()
    answer: bytes | None = None


def prepare(
    endpoint: Endpoint,
    body: bytes | bytearray,
    catalog: Catalog,
    bundle_of: Callable[[str], Bundle],
    max_samples: int,
) -> Prepared:
    """Return the plan and prompts of a request, or its answer for /tokenize and /detokenize.

    Raises:
        RequestInvalid: the body is not a JSON object.
        ApiError: the request is invalid, or its model is unknown or not served now; names the requested model and tier.
        Unchecked: its grammars have to be checked first, and the bundle's `grammar_check` does not wait.
    """
    fields = _parse(body)
    if isinstance(requested := fields.get("model"), str):
        fields["model"] = catalog.name(requested)
    try:
        for name in ("messages", "input"):
            _check_messages(fields.get(name), name)
        match endpoint:
            case "chat":
                return _prepare_chat(fields, catalog, bundle_of, max_samples)
            case "completions":
                return _prepare_completion(fields, catalog, bundle_of, max_samples)
            case "responses":
                return _prepare_response(fields, catalog, bundle_of)
            case "tokenize":
                return _tokenize(fields, catalog, bundle_of)
            case "detokenize":
                return _detokenize(fields, catalog, bundle_of)
    except RequestInvalid as error:
        raise _naming(ApiError.from_invalid(error), fields) from error
    except ApiError as error:
        raise _naming(error, fields) from error


def _check_messages(messages: object, name: str) -> None:
    """Refuse a conversation with too many messages and parts, before they cost time and memory.

    Raises:
        RequestInvalid: it has too many.
    """
    if not isinstance(messages, list):
        return
    count = len(messages)
    if count <= MOST_MESSAGES:
        contents = (message.get("content") for message in messages if isinstance(message, dict))
        count += sum(len(content) for content in contents if isinstance(content, list))
    if count > MOST_MESSAGES:
        text = (
            f"`{name}` has {count} messages and parts of messages; this server takes up to {MOST_MESSAGES}: join some of "
            "them, or send the prompt to /v1/completions"
        )
        raise RequestInvalid(text, param=name, code="too_many_messages")


def _naming(error: ApiError, fields: Mapping[str, Any]) -> ApiError:
    model, tier = fields.get("model"), fields.get("service_tier")
    return replace(
        error,
        model=model if isinstance(model, str) else None,
        service_tier=tier if isinstance(tier, str) else None,
    )


def _parse(body: bytes | bytearray) -> dict[str, Any]:
    try:
        fields = from_json(body, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise RequestInvalid(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise RequestInvalid(f"the body is {shown(fields)}, expected a JSON object", code="invalid_json")
    return fields


def _prepare_chat(
    fields: dict[str, Any], catalog: Catalog, bundle_of: Callable[[str], Bundle], max_samples: int
) -> Prepared:
    refuse_unsupported(ChatRequest, fields)
    request = validate(ChatRequest, fields)
    if request.top_logprobs and not request.logprobs:
        text = f"`top_logprobs` is {request.top_logprobs}, which needs `logprobs: true`; add that, or leave it out"
        raise RequestInvalid(text, param="top_logprobs", code="invalid_value")
    _check_samples(request, 1, max_samples)
    terms = catalog.terms(request.model)
    bundle = bundle_of(terms.digest)
    use = tool_use(request, bundle, terms.tool_call_format)
    template = bundle.template(with_tools=use is not None)
    variables = variables_of_template(request, template)
    text = _rendered(request, bundle, terms, None if use is None else use.shown, variables)
    thoughts = (
        None if template is None else thought_plan(request, bundle, template, terms.reasoning_format, text)
    )
    prompt = _encode(bundle.encode_rendered, bundle, text, terms, "messages")
    return _plan("chat", request, [prompt], terms, bundle, "messages", use, thoughts)


def _rendered(
    request: ChatRequest | TokenizeRequest,
    bundle: Bundle,
    terms: ModelTerms,
    tools: list[dict[str, Any]] | None,
    variables: dict[str, Any] | None,
) -> str:
    """Return the prompt text of a conversation; if its last message is to be continued, it ends inside that."""
    assert request.messages is not None
    continues = bool(request.continue_final_message)
    if continues and request.add_generation_prompt:
        raise RequestInvalid(
            "`continue_final_message` is true, and so is `add_generation_prompt`, which begins a new message; set "
            "`add_generation_prompt` to false",
            param="continue_final_message",
            code="invalid_value",
        )
    return bundle.render(
        conversation(request, bundle, terms.tool_call_format),
        add_generation_prompt=request.add_generation_prompt is not False and not continues,
        continue_final_message=continues,
        variables=variables,
        tools=tools,
    )


def _begins_message(request: ChatRequest) -> bool:
    """Return whether the output of a chat begins with a new message."""
    return request.add_generation_prompt is not False and not request.continue_final_message


def _prepare_completion(
    fields: dict[str, Any], catalog: Catalog, bundle_of: Callable[[str], Bundle], max_samples: int
) -> Prepared:
    refuse_unsupported(CompletionRequest, fields)
    request = validate(CompletionRequest, fields)
    terms = catalog.terms(request.model)
    bundle = bundle_of(terms.digest)
    given = _prompt_list(request.prompt)
    _check_samples(request, len(given), max_samples)
    prompts = []
    for prompt in given:
        if isinstance(prompt, str):
            encode = partial(bundle.encode, add_special_tokens=request.add_special_tokens is not False)
            prompts.append(_encode(encode, bundle, prompt, terms, "prompt"))
        else:
            prompts.append(_token_ids(prompt, terms.vocab_size, "prompt"))
    prepared = _plan("completions", request, prompts, terms, bundle, "prompt")
    if not request.echo:
        return prepared
    assert prepared.plan is not None
    texts = (
        one if isinstance(one, str) else _text_of(ids, bundle, skip_special=prepared.plan.skip_special_tokens)
        for one, ids in zip(given, prompts, strict=True)
    )
    plan = replace(prepared.plan, echo=tuple(texts), echo_logprobs=request.logprobs is not None)
    return replace(prepared, plan=plan)


def _text_of(ids: TokenIds, bundle: Bundle, *, skip_special: bool) -> str:
    """Return the text of token ids as a text of its own, without special tokens if `skip_special`."""
    hidden = bundle.special_ids if skip_special else frozenset[int]()
    return bundle.decode([token for token in ids.tolist() if token not in hidden])


def _prepare_response(
    fields: dict[str, Any], catalog: Catalog, bundle_of: Callable[[str], Bundle]
) -> Prepared:
    refuse_unsupported(ResponsesRequest, fields)
    request = validate(ResponsesRequest, fields)
    terms = catalog.terms(request.model)
    bundle = bundle_of(terms.digest)
    use = tool_use(request, bundle, terms.tool_call_format)
    template = bundle.template(with_tools=use is not None)
    text = bundle.render(
        conversation(request, bundle, terms.tool_call_format),
        variables=variables_of_template(request, template),
        tools=None if use is None else use.shown,
    )
    thoughts = (
        None if template is None else thought_plan(request, bundle, template, terms.reasoning_format, text)
    )
    prompt = _encode(bundle.encode_rendered, bundle, text, terms, "input")
    prepared = _plan("responses", request, [prompt], terms, bundle, "input", use, thoughts)
    assert prepared.plan is not None
    shown_fields = {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "user": request.user,
        "text": {"format": {"type": "text"}, **(request.text or {})},
        "reasoning": {
            "effort": None,
            "summary": None,
            **(request.reasoning or ReasoningFields()).model_dump(exclude_none=True),
        },
        **shown_in_response(request),
    }
    return replace(prepared, plan=replace(prepared.plan, shown_fields=shown_fields))


def _prompt_list(prompt: object) -> list[str | list[Any]]:
    """Return OpenAI's four types of prompt (text, texts, ids, lists of ids) as a list of texts or of ids."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        first = prompt[0]
        if isinstance(first, int) and not isinstance(first, bool):
            return [prompt]
        if isinstance(first, (str, list)) and all(type(entry) is type(first) for entry in prompt):
            return prompt
    raise RequestInvalid(
        "`prompt` must be a text, a list of texts, a list of token ids or a list of such lists, and not empty",
        param="prompt",
        code="invalid_value",
    )


def _token_ids(ids: object, vocab_size: int, param: str) -> TokenIds:
    # Check that all are ints first: numpy would turn true into 1, and mixed lists into floats or texts.
    if isinstance(ids, list) and set(map(type, ids)) <= {int}:
        if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
            return np.asarray(ids, dtype=np.int32)
        worst = min(ids) if min(ids) < 0 else max(ids)
        text = f"`{param}` has the token id {worst}; this model's ids are 0 to {vocab_size - 1}"
        raise RequestInvalid(text, param=param, code="invalid_value")
    raise RequestInvalid(
        f"`{param}` must be a list of token ids (integers)", param=param, code="invalid_value"
    )


def _encode(
    encode: Callable[[str], TokenIds], bundle: Bundle, text: str, terms: ModelTerms, param: str
) -> TokenIds:
    at_least = -(-len(text) // bundle.longest_token_bytes)
    if at_least > terms.max_model_len:  # do not tokenise what cannot fit
        raise _too_long(terms, f"at least {at_least}", None, param)
    ids = encode(text)
    largest = int(ids.max(initial=0))
    if largest >= terms.vocab_size:  # checkpoints add tokens, such as a pad token, that have no embedding
        name = bundle.token_bytes[largest].decode("utf-8", "replace")
        message = (
            f"`{param}` holds {name[:80]!r}, which is the token {largest} of the tokenizer; the model has the tokens "
            f"0 to {terms.vocab_size - 1} only, so leave that text out"
        )
        raise RequestInvalid(message, param=param, code="invalid_value")
    return ids


def _too_long(terms: ModelTerms, prompt: str, output: int | None, param: str) -> RequestInvalid:
    requested = f"your prompt has {prompt} tokens"
    if output is not None:
        requested += f" and asks for {output} output tokens"
    if terms.longest < terms.max_model_len:
        limit = f"the KV cache of this server holds {terms.longest} tokens per request"
    else:
        limit = f"this model's maximum context length is {terms.longest} tokens"
    text = f"{limit}, but {requested}; shorten the prompt or ask for fewer output tokens"
    return RequestInvalid(text, param=param, code="context_length_exceeded")


def _check_samples(request: GenerationRequest, prompts: int, max_samples: int) -> None:
    samples = (request.n or 1) * prompts
    if samples > max_samples:
        text = f"`n` times the number of prompts is {samples}; this server takes up to {max_samples}"
        raise RequestInvalid(text, param="n", code="invalid_value")


def _plan(
    endpoint: Generating,
    request: GenerationRequest,
    prompts: list[TokenIds],
    terms: ModelTerms,
    bundle: Bundle,
    param: str,
    use: ToolUse | None = None,
    thoughts: ThoughtPlan | None = None,
) -> Prepared:
    if request.stream_options is not None and not request.stream:
        text = "`stream_options` is allowed only with `stream: true`"
        raise RequestInvalid(text, param="stream_options", code="invalid_value")
    scored = _scored_prompts(request)
    if scored is not None:
        _check_prompt_logprobs(request, prompts, scored)
    if not all(len(prompt) for prompt in prompts):
        raise RequestInvalid(f"`{param}` is empty: it has no token", param=param, code="invalid_value")
    longest = max(map(len, prompts), default=0)
    if longest >= terms.longest:
        raise _too_long(terms, str(longest), None, param)
    skips_special = request.skip_special_tokens is not False
    channels = bundle.marks_to_read(endpoint, skip_special_tokens=skips_special)
    if isinstance(request, ChatRequest) and not _begins_message(request):
        channels = {}
    if use is not None and isinstance(request, (ChatRequest, ResponsesRequest)):
        grammar = use.grammar(request, bundle, channels, thoughts, is_followed=terms.follows_grammars)
    else:
        grammar = grammar_of(request, bundle.grammar_check, answer_after(thoughts, bundle, channels))
    most = None if request.stream else _most_tokens(request, len(prompts))
    sampling = _sampling(endpoint, request, longest, terms, bundle.defaults, param, grammar, most)
    sampling = replace(sampling, prompt_logprobs=scored)
    options = request.stream_options
    plan = Plan(
        endpoint=endpoint,
        model=request.model,
        digest=terms.digest,
        sampling=sampling,
        samples=request.n or 1,
        seed=request.seed,
        stream=bool(request.stream),
        include_usage=bool(options and (options.include_usage or options.continuous_usage_stats)),
        continuous_usage=bool(options and options.continuous_usage_stats),
        stop=tuple(request.stop or ()),
        include_stop=bool(request.include_stop_str_in_output),
        skip_special_tokens=skips_special,
        service_tier=request.service_tier,
        cache_salt=request.cache_salt or "",
        computes_only=request.requested_max_tokens() == 0,
        prompt_logprobs=request.prompt_logprobs,
        tools=None if use is None else use.plan,
        thoughts=thoughts,
    )
    return Prepared(plan, tuple(prompts))


def _scored_prompts(request: GenerationRequest) -> int | None:
    """Return the number of alternatives to each prompt token in its log-probabilities; None: none are asked for."""
    asked = [request.prompt_logprobs]
    if isinstance(request, CompletionRequest) and request.echo:
        asked.append(request.logprobs)
    return max((one for one in asked if one is not None), default=None)


def _check_prompt_logprobs(request: GenerationRequest, prompts: list[TokenIds], alternatives: int) -> None:
    """Refuse log-probabilities of prompts that are too many for an answer, or for which a stream has no place."""
    param = "echo" if request.prompt_logprobs is None else "prompt_logprobs"
    if request.stream and request.prompt_logprobs is not None:
        text = f"`prompt_logprobs` is {request.prompt_logprobs}, and a stream has no place for them; set `stream` to false"
        raise RequestInvalid(text, param=param, code="invalid_value")
    # A chat has one list; each choice of a text completion has its own.
    lists = 1 if isinstance(request, ChatRequest) else request.n or 1
    wanted = lists * sum(map(len, prompts)) * (1 + alternatives)
    if wanted > MOST_PROMPT_LOGPROBS:
        text = (
            f"`{param}` asks for {wanted} log-probabilities of prompt tokens and of their alternatives; one answer has "
            f"at most {MOST_PROMPT_LOGPROBS}: send fewer or shorter prompts, or ask for fewer samples "
            "(`n`) or alternatives"
        )
        raise RequestInvalid(text, param=param, code="invalid_value")


def _most_tokens(request: GenerationRequest, prompts: int) -> int | None:
    """Return how long each output of an answer may be, by the log-probabilities that it asks for; None: it asks for none.

    Raises:
        RequestInvalid: it asks for longer outputs.
    """
    alternatives = request.requested_logprobs()
    if alternatives is None:
        return None
    outputs = (request.n or 1) * prompts
    most = MOST_LOGPROBS // (outputs * (1 + alternatives))
    max_tokens = request.requested_max_tokens()
    if max_tokens is not None and max_tokens > most:
        text = (
            f"`logprobs` asks for the log-probabilities of {outputs} outputs of {max_tokens} tokens, with {alternatives} "
            f"alternatives to each; one answer has at most {MOST_LOGPROBS}, alternatives included: ask for at most {most} "
            "tokens, for fewer outputs or alternatives, or set `stream` to true"
        )
        raise RequestInvalid(text, param="logprobs", code="invalid_value")
    return most


def _sampling(
    endpoint: str,
    request: GenerationRequest,
    prompt_tokens: int,
    terms: ModelTerms,
    defaults: SamplingDefaults,
    param: str,
    grammar: str,
    most_tokens: int | None,
) -> Sampling:
    """Return how to sample; `most_tokens` bounds an output whose length the client leaves open."""
    room = terms.longest - prompt_tokens
    max_tokens = request.requested_max_tokens()
    if max_tokens is not None and max_tokens > room:
        raise _too_long(terms, str(prompt_tokens), max_tokens, param)
    if max_tokens is None:
        fallback = _COMPLETION_DEFAULT_TOKENS if endpoint == "completions" else defaults.max_new_tokens
        if most_tokens is not None and most_tokens < room:
            fallback = most_tokens if fallback is None else min(fallback, most_tokens)
        max_tokens = None if fallback is None else min(fallback, room)
    if max_tokens == 0:
        max_tokens = 1  # the last chunk samples a token anyway; it is not shown
    min_tokens = request.min_tokens or 0
    longest_output = room if max_tokens is None else max_tokens
    if min_tokens > longest_output:
        text = (
            f"`min_tokens` is {min_tokens}, but the output may have at most {longest_output} tokens; lower it, or raise "
            "the maximum number of tokens"
        )
        raise RequestInvalid(text, param="min_tokens", code="invalid_value")
    bias = {int(token): value for token, value in (request.logit_bias or {}).items()}
    if bias and max(bias) >= terms.vocab_size:
        text = f"`logit_bias` names token {max(bias)}; this model's ids are 0 to {terms.vocab_size - 1}"
        raise RequestInvalid(text, param="logit_bias", code="invalid_value")

    def chosen(requested: float | None, default: float) -> float:
        return default if requested is None else requested

    return Sampling(
        temperature=chosen(request.temperature, defaults.temperature),
        top_k=max(0, int(chosen(request.top_k, defaults.top_k))),  # -1 keeps all, as in vLLM
        top_p=chosen(request.top_p, defaults.top_p),
        min_p=chosen(request.min_p, defaults.min_p),
        repetition_penalty=chosen(request.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias=bias,
        logprobs=request.requested_logprobs(),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        min_tokens=min_tokens,
        max_tokens=max_tokens,
        grammar=grammar,
    )


def _tokenize(fields: dict[str, Any], catalog: Catalog, bundle_of: Callable[[str], Bundle]) -> Prepared:
    refuse_unsupported(TokenizeRequest, fields)
    request = validate(TokenizeRequest, fields)
    terms = catalog.terms(request.model)
    bundle = bundle_of(terms.digest)
    if (request.prompt is None) == (request.messages is None):
        raise RequestInvalid("give either `prompt` or `messages`", param="prompt", code="invalid_value")
    if request.messages is not None:
        tools = None
        if request.tools:
            form = form_of_calls(template_of_tools(bundle), terms.tool_call_format)
            tools = tools_for_template([tool.function for tool in request.tools], form)
        text = _rendered(request, bundle, terms, tools, request.chat_template_kwargs)
        ids = bundle.encode_rendered(text, add_special_tokens=bool(request.add_special_tokens)).tolist()
    else:
        special = request.add_special_tokens is not False
        ids = bundle.encode(request.prompt or "", add_special_tokens=special).tolist()
    answer = {"count": len(ids), "max_model_len": terms.max_model_len, "tokens": ids}
    return Prepared(answer=to_json(answer))


def _detokenize(fields: dict[str, Any], catalog: Catalog, bundle_of: Callable[[str], Bundle]) -> Prepared:
    refuse_unsupported(DetokenizeRequest, fields)
    request = validate(DetokenizeRequest, fields)
    terms = catalog.terms(request.model)
    ids = _token_ids(request.tokens, terms.vocab_size, "tokens")
    return Prepared(answer=to_json({"prompt": bundle_of(terms.digest).decode(ids.tolist())}))
