"""The bad-input table: each row over real HTTP, each answer OpenAI's error object that names the field."""

import signal
from typing import Any, get_type_hints

import httpx
import psutil
import pytest
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params

from medha_router.openai_requests import ChatRequest, CompletionRequest, is_known

from .conftest import MAX_MODEL_LEN, MODEL, Router, ScriptedReplica

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
JSON = {"Content-Type": "application/json"}
GOOD_CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
GOOD_TEXT: dict[str, Any] = {"model": MODEL, "prompt": "Hello"}


def assert_error(answer: httpx.Response, status: int, param: str | None, code: str | None = None) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code", "request_id"}
    assert error["request_id"] == answer.headers["x-request-id"]
    assert error["message"]
    assert error["param"] == param, error
    assert answer.headers["x-request-id"]
    if code is not None:
        assert error["code"] == code


CHAT_ROWS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "Hello"}, "messages"),
    ({"messages": [{"role": "user"}, 5]}, "messages.1"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id"),
    ({"model": 5}, "model"),
    ({"model": ""}, "model"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": 1e300}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -7}, "top_k"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"min_tokens": 9, "max_tokens": 5}, "min_tokens"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 10**9}, "n"),
    ({"seed": 2**64}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": [""]}, "stop.0"),
    ({"stop": 5}, "stop"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    ({"logit_bias": {"999999": 1}}, "logit_bias"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"top_logprobs": 2, "logprobs": False}, "top_logprobs"),
    ({"logprobs": 5}, "logprobs"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 1e-38}, "repetition_penalty"),
    ({"repetition_penalty": 5e-324}, "repetition_penalty"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"service_tier": "platinum"}, "service_tier"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "x" * 1025}, "cache_salt"),
    ({"cache_salt": 5}, "cache_salt"),
]


@pytest.mark.parametrize(("change", "param"), CHAT_ROWS, ids=[str(change)[:40] for change, _ in CHAT_ROWS])
def test_a_wrong_chat_field_is_named(router: Router, change: dict[str, Any], param: str) -> None:
    assert_error(router.post(CHAT, {**GOOD_CHAT, **change}), 400, param)


def test_the_most_that_min_tokens_may_be_is_named(router: Router) -> None:
    answer = router.post(CHAT, {**GOOD_CHAT, "min_tokens": 9, "max_tokens": 5})
    said = "`min_tokens` is 9, but the output may have at most 5 tokens; lower it, or raise"
    assert said in answer.json()["error"]["message"]


UNSUPPORTED_ROWS: list[tuple[str, dict[str, Any], str]] = [
    (TEXT, {"tools": [{"type": "function"}]}, "tools"),
    (TEXT, {"tool_choice": "required"}, "tool_choice"),
    (CHAT, {"functions": [{"name": "f"}]}, "functions"),
    (CHAT, {"function_call": {"name": "f"}}, "function_call"),
    (CHAT, {"audio": {"voice": "x"}}, "audio"),
    (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
    (CHAT, {"echo": True}, "echo"),
    (
        CHAT,
        {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]},
        "messages.0.function_call",
    ),
    (CHAT, {"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages.0.role"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages.0.content.0.type",
    ),
    (TEXT, {"continue_final_message": True}, "continue_final_message"),
    (TEXT, {"suffix": "x"}, "suffix"),
    (TEXT, {"best_of": 3}, "best_of"),
    (TEXT, {"best_of": 3, "n": 2}, "best_of"),
    (CHAT, {"best_of": 2}, "best_of"),
    (
        CHAT,
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
    ),
    (CHAT, {"messages": [{"role": "assistant", "refusal": "no"}]}, "messages.0.refusal"),
    (TEXT, {"messages": GOOD_CHAT["messages"]}, "messages"),
    (TEXT, {"top_logprobs": 3}, "top_logprobs"),
    (TEXT, {"max_completion_tokens": 3}, "max_completion_tokens"),
    (CHAT, {"prompt": "x"}, "prompt"),
    (CHAT, {"add_special_tokens": True}, "add_special_tokens"),
    ("/tokenize", {"return_token_strs": True}, "return_token_strs"),
]
UNSERVED: dict[str, Any] = {
    "structural_tag": "{}", "guided_decoding_backend": "xgrammar", "priority": 3, "return_token_ids": True, "detokenize": False,
    "length_penalty": 0.5, "lora_path": "x", "reasoning_effort": "low", "verbosity": "low", "store": True, "moderation": {},
    "prompt_cache_retention": "24h", "prompt_cache_options": {}, "request_id": "x", "rid": "x", "extra_key": "x",
    "use_beam_search": True, "spaces_between_special_tokens": False,
    "thinking_token_budget": 5, "stop_regex": "a", "no_stop_trim": True, "return_hidden_states": True, "input_ids": [1],
    "repetition_detection": {}, "logprob_token_ids": [1], "vllm_xargs": {"a": 1}, "custom_params": {"a": 1},
}  # fmt: skip
UNSUPPORTED_ROWS += [
    (path, {field: value}, field) for path in (CHAT, TEXT) for field, value in UNSERVED.items()
]
UNSUPPORTED_ROWS += [
    (TEXT, {field: value}, field)
    for field, value in (("include_reasoning", False), ("separate_reasoning", True))
]


@pytest.mark.parametrize(("path", "change", "param"), UNSUPPORTED_ROWS)
def test_an_unsupported_field_is_refused_by_name_and_never_ignored(
    router: Router, path: str, change: dict[str, Any], param: str
) -> None:
    good = GOOD_CHAT if path == CHAT else GOOD_TEXT
    answer = router.post(path, {**good, **change})
    assert_error(answer, 400, param, "unsupported_parameter")
    message = answer.json()["error"]["message"]
    assert message.startswith(f"`{param}` is ")
    assert "; " in message, "it says what to do"


OPENAI = {
    CHAT: (ChatRequest, chat_params.CompletionCreateParamsStreaming),
    TEXT: (CompletionRequest, text_params.CompletionCreateParamsStreaming),
}


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_every_parameter_of_the_openai_package_is_known(path: str) -> None:
    kind, parameters = OPENAI[path]
    names = get_type_hints(parameters).keys()
    assert {"model", "stream", "temperature", "service_tier" if path == CHAT else "suffix"} <= names
    assert [name for name in names if not is_known(kind, name)] == []


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_null_asks_for_nothing_in_any_parameter_that_is_known(router: Router, path: str) -> None:
    kind, parameters = OPENAI[path]
    good = GOOD_CHAT if path == CHAT else GOOD_TEXT
    names = {*get_type_hints(parameters), *UNSERVED, *kind.model_fields} - good.keys()
    assert router.post(path, {**dict.fromkeys(names), **good}).status_code == 200


SAYS = [
    (CHAT, {"messages": None}, "`messages` is null; it must be a list"),
    (CHAT, {"messages": ["x"]}, '`messages.0` is "x"; it must be an object'),
    (
        CHAT,
        {"messages": [{"role": "user", "content": 5}]},
        "`messages.0.content` is 5; it must be a text or a list",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "`messages.0.content.0.text` is missing",
    ),
    (CHAT, {"stream": "yes"}, '`stream` is "yes"; it must be true or false'),
    (CHAT, {"max_tokens": True}, "`max_tokens` is true; it must be an integer"),
    (CHAT, {"stop": 5}, "`stop` is 5; it must be a text or a list of texts"),
    (CHAT, {"stop": ["."] * 17}, "it must be a list of at most 16 elements"),
    (CHAT, {"stop": "." * 257}, "it must be a text of at most 256 characters"),
    (
        CHAT,
        {"logit_bias": {str(token): 1 for token in range(1025)}},
        "it must be an object with at most 1024 fields",
    ),
    (CHAT, {"max_tokens": -1}, "`max_tokens` is -1; it must be greater than or equal to 0"),
    (
        CHAT,
        {"functions": [{"name": "f"}]},
        '`functions` is [{"name":"f"}], which this server does not support here; OpenAI has replaced it by `tools`: use that',
    ),
    (CHAT, {"logit_bias": {"5": None}}, "`logit_bias.5` is null; it must be a number"),
    (CHAT, {"top_logprobs": 3}, "`top_logprobs` is 3, which needs `logprobs: true`"),
    (CHAT, {"reasoning_effort": "low"}, "put it into `chat_template_kwargs`"),
    (TEXT, {"best_of": 3}, "`best_of` is 3, which this server does not support here; make it equal to `n`"),
]


@pytest.mark.parametrize(("path", "change", "said"), SAYS)
def test_errors_speak_of_json_and_of_the_clients_own_names(
    router: Router, path: str, change: dict[str, Any], said: str
) -> None:
    answer = router.post(path, {**(GOOD_CHAT if path == CHAT else GOOD_TEXT), **change})
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "said"), [(b"null", "is null"), (b"true", "is true"), (b"[]", "is []"), (b'"x"', 'is "x"')]
)
def test_a_body_that_is_no_object_is_shown_as_json(router: Router, body: bytes, said: str) -> None:
    answer = router.http.post(TEXT, content=body, headers=JSON)
    assert f"the body {said}, expected a JSON object" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "change",
    [
        {"tools": None, "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"]},
        {"no_such_field": 1, "metadata": {"a": "b"}, "store": False, "user": "me", "stop": ""},
        {"prompt_cache_key": "k", "safety_identifier": "s", "session_id": "x", "parallel_tool_calls": False},
        {"priority": 0, "length_penalty": 1, "best_of": 2, "n": 2, "verbosity": "medium", "top_logprobs": 0},
        {"stream_options": {"include_obfuscation": False}, "stream": True, "add_special_tokens": False},
    ],
)
def test_fields_that_ask_for_nothing_and_unknown_ones_are_ignored(
    router: Router, change: dict[str, Any]
) -> None:
    assert router.post(CHAT, {**GOOD_CHAT, **change}).status_code == 200


@pytest.mark.parametrize(
    "prompt",
    [None, [], {}, 5, True, [[]], [True], [1, "a"], ["a", 1], [-1], [10**6], [1.5], [[1], "a"], [2**40]],
)
def test_a_prompt_of_a_wrong_shape_is_refused(router: Router, prompt: object) -> None:
    assert_error(router.post(TEXT, {"model": MODEL, "prompt": prompt}), 400, "prompt")


def test_an_empty_prompt_is_refused(router: Router) -> None:
    body = {"model": MODEL, "prompt": "", "add_special_tokens": False}
    assert_error(router.post(TEXT, body), 400, "prompt")
    assert_error(router.post(TEXT, {"model": MODEL}), 400, "prompt")


DEEP = b"[" * 100_000 + b"]" * 100_000
BODY_ROWS = {
    "empty": b"",
    "cut off": b'{"model": "tiny", ',
    "a list": b"[]",
    "a number": b"5",
    "invalid UTF-8": b'{"model": "tiny", "prompt": "\xff\xfe"}',
    "a lone surrogate": b'{"model": "tiny", "prompt": "\\ud800"}',
    "NaN": b'{"model": "tiny", "prompt": "x", "temperature": NaN}',
    "Infinity": b'{"model": "tiny", "prompt": "x", "temperature": Infinity}',
    "deep nesting": b'{"model": "tiny", "prompt": ' + DEEP + b"}",
    "trailing garbage": b'{"model": "tiny", "prompt": "x"} x',
}


@pytest.mark.parametrize("name", BODY_ROWS)
def test_a_body_that_is_no_json_object_is_refused(router: Router, name: str) -> None:
    assert_error(router.http.post(TEXT, content=BODY_ROWS[name], headers=JSON), 400, None, "invalid_json")


def test_a_number_beyond_floats_is_refused(router: Router) -> None:
    body = b'{"model": "tiny", "prompt": "x", "temperature": 1e999}'
    assert router.http.post(TEXT, content=body, headers=JSON).status_code == 400


def test_an_unknown_model_is_404(router: Router) -> None:
    assert_error(router.post(CHAT, {**GOOD_CHAT, "model": "other"}), 404, "model", "model_not_found")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TEXT, {"model": MODEL, "prompt": [5] * MAX_MODEL_LEN}, "prompt"),
        (TEXT, {"model": MODEL, "prompt": [5] * (MAX_MODEL_LEN - 5), "max_tokens": 6}, "prompt"),
        (TEXT, {"model": MODEL, "prompt": "ab " * 50_000}, "prompt"),
        (CHAT, {**GOOD_CHAT, "max_tokens": MAX_MODEL_LEN}, "messages"),
        (CHAT, {"model": MODEL, "messages": [{"role": "user", "content": "x" * 90_000}]}, "messages"),
        (CHAT, {"model": MODEL, "messages": [{"role": "user", "content": "x" * 500_000}]}, "messages"),
    ],
    ids=["ids", "with output", "text", "output alone", "chat", "chat in a process"],
)
def test_a_request_that_does_not_fit_the_context_gets_an_error_that_says_so(
    router: Router, path: str, body: dict[str, Any], param: str
) -> None:
    answer = router.post(path, body)
    assert_error(answer, 400, param, "context_length_exceeded")
    assert str(MAX_MODEL_LEN) in answer.json()["error"]["message"]


def test_a_prompt_that_just_fits_is_served(router: Router, replica: ScriptedReplica) -> None:
    body = {"model": MODEL, "prompt": [5] * (MAX_MODEL_LEN - 5), "max_tokens": 5}
    assert router.post(TEXT, body).status_code == 200
    assert replica.submits[0].tokens == MAX_MODEL_LEN - 5


def test_a_large_body_is_served_from_a_process_as_a_small_one_is(
    router: Router, replica: ScriptedReplica
) -> None:
    padding = "x" * 300_000  # the body is large, its prompt is not
    answer = router.post(TEXT, {**GOOD_TEXT, "user": padding, "logit_bias": {"5": 1}, "stop": "never"})
    assert answer.status_code == 200
    small = router.post(TEXT, {**GOOD_TEXT, "logit_bias": {"5": 1}, "stop": "never"})
    assert answer.json()["choices"] == small.json()["choices"]
    first, second = replica.submits
    assert first.sampling == second.sampling
    assert replica.prompts[first.prompt] == replica.prompts[second.prompt]
    assert router.metric('medha_router_tokenize_seconds_count{place="process"}') >= 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_large_body_is_served_by_another_process_if_the_first_one_is_lost(
    router: Router, replica: ScriptedReplica, number: signal.Signals
) -> None:
    body = {**GOOD_TEXT, "user": "x" * 300_000}
    assert router.post(TEXT, body).status_code == 200
    children = psutil.Process(router.process.pid).children()
    processes = [child for child in children if "medha_router.tokenizing" in child.cmdline()]
    assert processes
    for process in processes:
        process.send_signal(number)
    assert router.post(TEXT, body).status_code == 200
    assert psutil.wait_procs(processes, timeout=5)[1] == []


@pytest.mark.parametrize("streamed", [False, True], ids=["with a length", "streamed without a length"])
def test_a_body_beyond_the_limit_is_413(router: Router, streamed: bool) -> None:
    body = b" " * (2**20 + 1)
    content = (body[start : start + 65536] for start in range(0, len(body), 65536)) if streamed else body
    assert_error(router.http.post(TEXT, content=content, headers=JSON), 413, None, "body_too_large")


@pytest.mark.parametrize("header", ["x-slo-ttft-ms", "x-slo-tpot-ms"])
@pytest.mark.parametrize("value", ["soon", "-1", "0", "5e-324", "nan", "inf"])
def test_a_wrong_slo_header_is_named(router: Router, header: str, value: str) -> None:
    assert_error(router.post(CHAT, GOOD_CHAT, headers={header: value}), 400, header)


def test_unknown_paths_and_methods_get_the_error_object(router: Router) -> None:
    for path in ("/v1/nowhere", "/health/", "/v1/chat/completions/", "//health"):
        assert_error(router.http.get(path), 404, None)
    for method, path, allowed in (
        ("GET", CHAT, "POST, OPTIONS"),
        ("DELETE", "/v1/models", "GET, HEAD, OPTIONS"),
        ("POST", "/health", "GET, HEAD, OPTIONS"),
    ):
        answer = router.http.request(method, path)
        assert_error(answer, 405, None, "method_not_allowed")
        assert answer.headers["allow"] == allowed


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", f"/v1/models/{MODEL}"])
def test_head_is_get_without_the_body_and_options_names_the_methods(router: Router, path: str) -> None:
    head = router.http.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == router.http.get(path).headers["content-type"]
    options = router.http.options(path)
    assert (options.status_code, options.headers["allow"]) == (204, "GET, HEAD, OPTIONS")


@pytest.mark.parametrize("coding", ["gzip", "br", "deflate, gzip"])
def test_a_compressed_body_is_refused_as_such(router: Router, coding: str) -> None:
    answer = router.http.post(TEXT, content=b"\x1f\x8b", headers=JSON | {"Content-Encoding": coding})
    assert_error(answer, 415, "content-encoding", "unsupported_media_type")
    assert "uncompressed" in answer.json()["error"]["message"]
    plain = router.http.post(TEXT, json=GOOD_TEXT, headers={"Content-Encoding": "identity"})
    assert plain.status_code == 200


@pytest.mark.parametrize("tokens", [None, "x", ["a"], [-1], [10**7], [True]])
def test_detokenize_refuses_what_are_no_ids(router: Router, tokens: object) -> None:
    assert_error(router.post("/detokenize", {"model": MODEL, "tokens": tokens}), 400, "tokens")


def test_tokenize_wants_a_prompt_or_messages(router: Router) -> None:
    assert_error(router.post("/tokenize", {"model": MODEL}), 400, "prompt")
