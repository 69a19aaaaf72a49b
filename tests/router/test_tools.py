"""Functions that a model may call, by OpenAI's own client: requests, answers and streams, in chats and responses."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import openai
import pytest
from openai.types.chat import ChatCompletion
from pydantic import BaseModel
from tokenizers import AddedToken, Tokenizer

from medha.api.declared import DeclaredModel, to_text
from medha_router import grammar_check
from medha_router.grammar_check import GrammarCheck, Unchecked
from medha_router.prepare import Catalog, ModelTerms, prepare
from medha_router.tokenizer_bundle import Bundle

from .conftest import (
    Router,
    Script,
    ScriptedReplica,
    byte_level_tokenizer,
    say,
    start_router,
    stop_router,
    wait_for,
)

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
TEMPLATE = (
    "{% if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|end|>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{% if message.name %}{{ message.name }}={% endif %}{{ message.content }}"
    "{% for call in message.tool_calls %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TWO_CALLS = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Pune", "unit": "C"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "unit": "C"}}\n</tool_call>'
)
ARGUMENTS = ['{"city": "Pune", "unit": "C"}', '{"city": "Köln", "unit": "C"}']


class weather(BaseModel):  # noqa: N801 - the client names the function after the class
    """Tell the weather of a city."""

    city: str
    unit: Literal["C", "F"]


STRICT: Any = openai.pydantic_function_tool(weather)
SCHEMA = STRICT["function"]["parameters"]
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
OTHER: dict[str, Any] = {"type": "function", "function": {"name": "time"}}
QUESTION = [{"role": "user", "content": "Weather?"}]


def files_of(template: object, marks: tuple[str, ...] = ()) -> dict[str, bytes]:
    tokenizer: Tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    config = {"bos_token": "<|bos|>", "eos_token": "<|end|>", "chat_template": template}
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
        "generation_config.json": json.dumps({"eos_token_id": 1}).encode(),
    }


@dataclass
class Serving:
    """A router with models of several families."""

    router: Router
    replicas: dict[str, ScriptedReplica]
    bundles: dict[str, Bundle]

    def script(self, model: str, text: str, **more: Any) -> ScriptedReplica:
        """Let a model say `text`, and then end."""
        replica = self.replicas[model]
        tokens = (*say(self.bundles[model], text), 1)
        replica.script = Script(**{"tokens": tokens, "finish": "stop", **more})
        replica.submits.clear()
        replica.cancels.clear()
        return replica


FILES = {
    "hermes": files_of(TEMPLATE),
    "mistral": files_of("{{ tools | tojson }}[TOOL_CALLS]{{ messages }}", ("[TOOL_CALLS]",)),
    "no-tools": files_of("{{ messages[0].content }}"),
    "unknown": files_of("{{ tools | tojson }}{{ messages }}"),
    "two-templates": files_of(
        [
            {"name": "default", "template": "{{ messages[0].content }}"},
            {"name": "tool_use", "template": "{{ tools | tojson }}<tool_call>{{ messages[0].content }}"},
        ]
    ),
    "declared": files_of("{{ tools | tojson }}{{ messages }}"),
    "no-channels": files_of("{{ tools }}<|channel|><|call|>{{ messages }}"),
    "no-end": files_of(TEMPLATE),
    "before": files_of(TEMPLATE),
}
LACKS = {"no-end": {"ends_texts": False}, "before": {"follows_grammars": False}}
"""The abilities that replicas of a model announce as missing."""


@contextmanager
def serving_models(
    paths: pytest.TempPathFactory,
    files_of_models: Mapping[str, dict[str, bytes]],
    declared: Sequence[DeclaredModel],
    **settings: Any,
) -> Iterator[Serving]:
    """Run a router and a scripted replica for each model; `settings` are the router's."""
    models = paths.mktemp("models")
    (models / "installation.json").write_text(to_text(declared))
    router = start_router(paths.mktemp("router"), models_directory=str(models), **settings)
    replicas = {
        name: ScriptedReplica(router, files, name=f"r-{name}", fields={"model": name, **LACKS.get(name, {})})
        for name, files in files_of_models.items()
    }
    wait_for(
        lambda: {one["id"] for one in router.http.get("/v1/models").json()["data"]} == files_of_models.keys(),
        "a model is missing",
    )
    yield Serving(router, replicas, {name: Bundle(files) for name, files in files_of_models.items()})
    for replica in replicas.values():
        replica.stop()
    assert stop_router(router) == 0


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    declared = [DeclaredModel(name="declared", replicas=1, tool_call_format="llama3_json")]
    with serving_models(tmp_path_factory, FILES, declared, large_body_bytes=200_000) as running:
        yield running


@pytest.fixture
def client(serving: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{serving.router.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(client: openai.OpenAI, model: str = "hermes", **fields: Any) -> Any:
    asked: dict[str, Any] = {"model": model, "messages": QUESTION, "tools": [TOOL], **fields}
    return client.chat.completions.create(**asked)


def called(answer: ChatCompletion) -> list[tuple[str, str]]:
    (choice,) = answer.choices
    calls: list[Any] = choice.message.tool_calls or []
    return [(call.function.name, call.function.arguments) for call in calls]


# --- chats ----------------------------------------------------------------------------------------------


def test_a_chat_answers_with_text_and_calls(client: openai.OpenAI, serving: Serving) -> None:
    replica = serving.script("hermes", TWO_CALLS)
    answer = chat(client)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    assert called(answer) == [("weather", arguments) for arguments in ARGUMENTS]
    ids = [call.id for call in choice.message.tool_calls]
    assert len(set(ids)) == 2
    assert answer.usage.completion_tokens == len(replica.script.tokens)
    (submit,) = replica.submits
    shown = {"name": "weather", "parameters": SCHEMA}
    wanted = f"<|system|>{json.dumps({'type': 'function', 'function': shown})}<|end|><|user|>Weather?<|end|><|assistant|>"
    bundle = serving.bundles["hermes"]
    assert replica.prompts[submit.prompt] == bundle.encode(wanted, add_special_tokens=False).tolist()
    assert submit.sampling.grammar == "", "a model that may choose is not held to anything"


@pytest.mark.parametrize("per_message", [1, 7, 1000])
def test_a_streams_deltas_add_up_to_the_same_calls(
    client: openai.OpenAI, serving: Serving, per_message: int
) -> None:
    serving.script("hermes", TWO_CALLS, per_message=per_message)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    text, calls, reasons = "", dict[int, list[str]](), []
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        text += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            if call.index not in calls:
                assert call.id.startswith("call_")
                assert call.type == "function"
                calls[call.index] = [call.function.name, ""]
            else:
                assert (call.id, call.function.name) == (None, None)
            calls[call.index][1] += call.function.arguments
        reasons.append(choice.finish_reason)
    assert text == "Let me see."
    assert list(calls.values()) == [["weather", arguments] for arguments in ARGUMENTS]
    assert reasons == [None] * (len(reasons) - 1) + ["tool_calls"]
    assert chunks[-1].usage.completion_tokens == len(serving.replicas["hermes"].script.tokens)
    if per_message == 1:
        fragments = [one for chunk in chunks[:-1] for one in chunk.choices[0].delta.tool_calls or ()]
        assert len(fragments) > 10, "arguments come as they are written"


def test_the_clients_own_helpers_parse_the_arguments(client: openai.OpenAI, serving: Serving) -> None:
    serving.script("hermes", TWO_CALLS)
    asked: Any = {"model": "hermes", "messages": QUESTION, "tools": [STRICT]}
    parsed = client.chat.completions.parse(**asked)
    calls = parsed.choices[0].message.tool_calls
    assert calls is not None
    assert [call.function.parsed_arguments for call in calls] == [
        weather(city=city, unit="C") for city in ("Pune", "Köln")
    ]
    with client.chat.completions.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert kinds.count("tool_calls.function.arguments.done") == 2
    again = final.choices[0].message.tool_calls
    assert again is not None
    assert [call.function.arguments for call in again] == ARGUMENTS


def test_a_text_without_calls_is_the_one_that_it_is_without_tools(
    client: openai.OpenAI, serving: Serving
) -> None:
    text = " a <b> <tool_cal and [TOOL_CALLS] \n"
    serving.script("hermes", text)
    answer = chat(client, logprobs=False)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (text, "stop")
    assert answer.choices[0].message.tool_calls is None
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chat(client, stream=True)) == text
    serving.script("hermes", TWO_CALLS)
    assert chat(client, tools=None).choices[0].message.content == TWO_CALLS
    assert chat(client, tool_choice="none").choices[0].message.content == TWO_CALLS


def test_special_tokens_that_mark_calls_are_seen_and_others_are_not_shown(
    client: openai.OpenAI, serving: Serving
) -> None:
    said = '<|user|>[TOOL_CALLS][{"name": "weather", "arguments": {"city": "<|user|>X"}}]'
    serving.script("mistral", said)
    answer = chat(client, model="mistral")
    assert called(answer) == [("weather", '{"city": "X"}')]
    (call,) = answer.choices[0].message.tool_calls
    assert len(call.id) == 9
    assert call.id.isalnum()
    assert answer.choices[0].message.content is None
    without = chat(client, model="mistral", tools=None)
    assert without.choices[0].message.content == '[{"name": "weather", "arguments": {"city": "X"}}]'


def test_the_manifest_names_the_form_of_a_model_whose_template_does_not_show_it(
    client: openai.OpenAI, serving: Serving
) -> None:
    serving.script("declared", '{"name": "weather", "parameters": {"city": "X"}}')
    assert called(chat(client, model="declared")) == [("weather", '{"city": "X"}')]


def test_a_checkpoints_own_template_for_tools_is_used_where_there_are_some(
    client: openai.OpenAI, serving: Serving
) -> None:
    for tools, prompt in (([OTHER], "<tool_call>Weather?"), (None, "Weather?")):
        replica = serving.script("two-templates", TWO_CALLS)
        answer = chat(client, model="two-templates", tools=tools)
        assert len(called(answer)) == (2 if tools else 0)
        text = serving.bundles["two-templates"].decode(prompt_of(serving, replica))
        assert text.endswith(prompt)
        assert text.startswith("[{") == bool(tools)


def test_a_client_that_wants_one_call_gets_one_and_the_rest_is_cancelled(
    client: openai.OpenAI, serving: Serving
) -> None:
    replica = serving.script("hermes", TWO_CALLS, hold=True)
    answer = chat(client, parallel_tool_calls=False)
    assert called(answer) == [("weather", ARGUMENTS[0])]
    assert answer.choices[0].finish_reason == "tool_calls"
    first = TWO_CALLS[: TWO_CALLS.index("</tool_call>") + len("</tool_call>")]
    assert answer.usage.completion_tokens < len(replica.script.tokens)
    assert answer.usage.completion_tokens >= len(say(serving.bundles["hermes"], first)) - 1
    replica.wait(lambda: replica.cancels != [])


def spelled(logprobs: list[Any]) -> str:
    return b"".join(bytes(one.bytes) for one in logprobs).decode()


def test_samples_logprobs_and_stop_strings_work_beside_calls(client: openai.OpenAI, serving: Serving) -> None:
    replica = serving.script("hermes", TWO_CALLS, logprobs=True)
    answer = chat(client, n=2, logprobs=True, top_logprobs=1)
    assert [choice.finish_reason for choice in answer.choices] == ["tool_calls"] * 2
    ids = {call.id for choice in answer.choices for call in choice.message.tool_calls}
    assert len(ids) == 4
    for choice in answer.choices:
        assert spelled(choice.logprobs.content) == TWO_CALLS
    streamed: list[Any] = []
    for chunk in chat(client, stream=True, logprobs=True, top_logprobs=1):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content
    assert spelled(streamed) == TWO_CALLS
    cut = chat(client, stop=['", "unit'])
    assert called(cut) == [("weather", '{"city": "Pune')]
    assert cut.choices[0].finish_reason == "stop", "the call is not whole"
    tokens = replica.script.tokens[:30]
    replica.script = Script(tokens=tokens, finish="length")
    assert chat(client).choices[0].finish_reason == "length"


def test_a_stream_that_moves_in_the_middle_of_a_call_has_the_same_deltas(serving: Serving) -> None:
    """Two replicas: the second continues from the tokens that the first has sent."""
    cut = TWO_CALLS.index("Pune")
    sent, rest = (say(serving.bundles["hermes"], text) for text in (TWO_CALLS[:cut], TWO_CALLS[cut:]))
    tokens = (*sent, *rest, 1)
    fields = {"model": "moving"}
    first = ScriptedReplica(serving.router, FILES["hermes"], name="r-first", fields=fields)
    first.script = Script(tokens=sent, hold=True)
    wait_for(lambda: serving.router.http.get("/v1/models/moving").status_code == 200, "it never joins")
    body = {"model": "moving", "messages": QUESTION, "tools": [TOOL], "stream": True}
    arguments = ""
    second = None
    try:
        with serving.router.http.stream("POST", CHAT, json=body) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                for call in chunk["choices"][0]["delta"].get("tool_calls", ()):
                    arguments += call["function"]["arguments"]
                if arguments and second is None:
                    second = ScriptedReplica(
                        serving.router, FILES["hermes"], name="r-second", fields=fields,
                        script=Script(tokens=tokens, finish="stop"),
                    )  # fmt: skip
                    first.stop()
        assert arguments == "".join(ARGUMENTS)
        assert second is not None
        (submit,) = second.submits
        assert submit.tokens == submit.prompt_length + len(sent)
    finally:
        first.stop()
        if second is not None:
            second.stop()


HISTORY: list[dict[str, Any]] = [
    *QUESTION,
    {
        "role": "assistant", "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Pune"}'}},
            {"id": "call_2", "type": "function", "function": {"name": "time", "arguments": ""}},
        ],
    },
    {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "noon"}]},
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
]  # fmt: skip
RENDERED = (
    '<|user|>Weather?<|end|><|assistant|><tool_call>{"name": "weather", "arguments": {"city": "Pune"}}</tool_call>'
    '<tool_call>{"name": "time", "arguments": {}}</tool_call><|end|>'
    "<|tool|>time=noon<|end|><|tool|>weather=sunny<|end|><|assistant|>"
)


def prompt_of(serving: Serving, replica: ScriptedReplica) -> list[int]:
    (submit,) = replica.submits
    return replica.prompts[submit.prompt]


def test_a_history_with_calls_and_results_reaches_the_template(
    client: openai.OpenAI, serving: Serving
) -> None:
    replica = serving.script("hermes", "Fine.")
    chat(client, messages=HISTORY, tools=None)
    expected = serving.bundles["hermes"].encode(RENDERED, add_special_tokens=False).tolist()
    assert prompt_of(serving, replica) == expected
    counted = serving.router.post("/tokenize", {"model": "hermes", "messages": HISTORY, "tools": [TOOL]})
    assert counted.json()["count"] > len(expected)
    refused = serving.router.post("/tokenize", {"model": "no-tools", "messages": HISTORY, "tools": [TOOL]})
    assert refused.json()["error"]["param"] == "tools"


def test_half_a_character_in_the_arguments_of_a_history_ends_no_connection(
    client: openai.OpenAI, serving: Serving
) -> None:
    function = {"name": "weather", "arguments": '{"city": "\\ud83d"}'}
    call = {"id": "call_1", "type": "function", "function": function}
    replica = serving.script("hermes", "Fine.")
    chat(client, messages=[*QUESTION, {"role": "assistant", "tool_calls": [call]}], tools=None)
    assert '{"city": "\ufffd"}' in serving.bundles["hermes"].decode(prompt_of(serving, replica))


def test_a_large_request_with_tools_is_prepared_in_a_process_of_its_own(
    client: openai.OpenAI, serving: Serving
) -> None:
    serving.script("hermes", TWO_CALLS)
    padded = {"type": "function", "function": {"name": "pad", "parameters": {"description": " " * 250_000}}}
    answer = chat(client, tools=[TOOL], tool_choice="required", metadata={"pad": "x" * 250_000})
    assert called(answer) == [("weather", arguments) for arguments in ARGUMENTS]
    with pytest.raises(openai.BadRequestError):
        chat(client, tools=[TOOL, padded])


# --- what the output is held to ----------------------------------------------------------------------------

NAMED = {"type": "function", "function": {"name": "weather"}}


def allowed(mode: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [NAMED]}}


@pytest.mark.parametrize(
    ("fields", "has", "has_not"),
    [
        ({"tool_choice": "required"}, ["weather", "time", "city"], ["TEXT"]),
        ({"tool_choice": NAMED}, ["weather", "city"], ["time", "TEXT"]),
        ({"tool_choice": allowed("required")}, ["weather"], ["time", "TEXT"]),
        ({"tool_choice": allowed("auto")}, ["weather", "TEXT"], ["time"]),
        ({"tools": [STRICT, OTHER]}, ["weather", "time", "city", "TEXT"], []),
        ({"tool_choice": "none"}, ["TEXT"], ["weather"]),
        ({"tool_choice": "none", "guided_regex": "a+"}, ["a+"], ["TEXT", "weather"]),
        ({"response_format": {"type": "json_object"}}, ["answer", "weather"], ["TEXT"]),
        ({"response_format": {"type": "text"}}, [], ["weather"]),
    ],
    ids=str,
)
def test_a_request_that_holds_the_model_to_calls_has_a_grammar(
    client: openai.OpenAI, serving: Serving, fields: dict[str, Any], has: list[str], has_not: list[str]
) -> None:
    replica = serving.script("hermes", "x")
    chat(client, extra_body={"tools": [TOOL, OTHER], **fields})
    (submit,) = replica.submits
    assert bool(submit.sampling.grammar) == bool(has)
    for word in has:
        assert word in submit.sampling.grammar
    for word in has_not:
        assert word not in submit.sampling.grammar


@pytest.mark.parametrize("model", LACKS)
def test_calls_are_forbidden_by_no_grammar_where_none_can_be_followed(
    client: openai.OpenAI, serving: Serving, model: str
) -> None:
    replica = serving.script(model, TWO_CALLS)
    (choice,) = chat(client, model, extra_body={"tools": [STRICT]}, tool_choice="none").choices
    assert [submit.sampling.grammar for submit in replica.submits] == [""]
    assert (choice.message.content, choice.message.tool_calls) == (TWO_CALLS, None)


@pytest.mark.parametrize(
    "fields",
    [{"tool_choice": "required"}, {"tools": [STRICT]}, {"tool_choice": "none", "guided_regex": "a+"}],
    ids=str,
)
def test_what_needs_a_grammar_is_refused_while_all_replicas_are_of_an_earlier_version(
    client: openai.OpenAI, serving: Serving, fields: dict[str, Any]
) -> None:
    replica = serving.script("before", "x")
    with pytest.raises(openai.InternalServerError) as refused:
        chat(client, "before", extra_body={"tools": [TOOL], **fields})
    error = refused.value
    assert (error.status_code, error.code, error.response.headers["retry-after"]) == (503, "unavailable", "1")
    assert "model `before` are of an earlier version of Medha, which ignores grammars: upgrade them" in str(
        error
    )
    assert replica.submits == []


def test_replicas_of_an_earlier_version_share_the_requests_that_a_newer_one_could_keep_from_calling(
    client: openai.OpenAI, serving: Serving
) -> None:
    """The router forbids calls only if all replicas follow grammars: a single newer one would get all such requests."""
    earlier = serving.script("before", "x")
    newer = ScriptedReplica(serving.router, FILES["before"], "r-newer", earlier.script, {"model": "before"})
    required = {"model": "before", "messages": QUESTION, "tools": [TOOL], "tool_choice": "required"}

    def is_known() -> bool:
        return serving.router.post("/v1/chat/completions", required).status_code == 200

    def both_are_asked() -> bool:
        """Ask with other functions each time: an idle replica that has a prompt's beginning would be preferred."""
        for number in range(8):
            own = {"type": "function", "function": TOOL["function"] | {"name": f"own_{number}"}}
            chat(client, "before", tool_choice="none", tools=[own])
        return bool(earlier.submits and newer.submits)

    try:
        wait_for(is_known, "the newer replica is not known")
        newer.submits.clear()
        wait_for(both_are_asked, "one of them gets all requests")
        assert {submit.sampling.grammar for submit in earlier.submits + newer.submits} == {""}
    finally:
        newer.stop()


def test_a_request_with_many_functions_is_prepared_few_times_though_others_displace_its_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar_check, "KEPT_ANSWERS", 2)
    check = GrammarCheck(waits=False)
    bundle = Bundle(FILES["hermes"], check)
    catalog = Catalog({"hermes": ModelTerms(bundle.digest, 10_000, 10_000, 1000)})
    unique = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    functions = [{"name": f"f{number}", "parameters": SCHEMA} for number in range(10)]
    functions += [
        {"name": f"g{number}", "parameters": {"type": "object", "required": [str(number)]}}
        for number in range(10)
    ]
    tools = [
        {"type": "function", "function": one} for one in [*functions, {"name": "h", "parameters": unique}]
    ]
    body = json.dumps({"model": "hermes", "messages": QUESTION, "tools": tools, "tool_choice": "required"})
    answers = dict[bytes, str]()
    for _ in range(4):  # all at once, then each by itself, then those that can be enforced
        try:
            with check.given(answers):
                assert prepare("chat", body.encode(), catalog, lambda _: bundle, 1).plan is not None
                return
        except Unchecked as unchecked:
            answers |= {question: check.learn(question) for question in unchecked.questions}
    pytest.fail("it is prepared again and again")


def test_all_tools_stay_in_the_prompt_whatever_the_choice_so_that_its_kv_stays_shared(
    client: openai.OpenAI, serving: Serving
) -> None:
    prompts = []
    for choice in ("auto", "none", "required", NAMED, allowed("auto")):
        replica = serving.script("hermes", "x")
        chat(client, tools=[TOOL, OTHER], tool_choice=choice)
        prompts.append(prompt_of(serving, replica))
    assert all(prompt == prompts[0] for prompt in prompts)


def test_a_schema_that_cannot_be_enforced_is_refused_only_if_it_is_strict(
    client: openai.OpenAI, serving: Serving
) -> None:
    schema = {"type": "object", "properties": {"a": {"not": {"type": "null"}}}}
    function = {"name": "odd", "parameters": schema}
    replica = serving.script("hermes", "x")
    chat(client, tools=[{"type": "function", "function": function}], tool_choice="required")
    assert "odd" in replica.submits[0].sampling.grammar
    with pytest.raises(openai.BadRequestError, match="Unimplemented keys") as refused:
        chat(client, tools=[{"type": "function", "function": {**function, "strict": True}}])
    assert refused.value.param == "tools.0.function.parameters"


def with_parameters(parameters: object) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}]}


def history(change: dict[str, Any], index: int = 3) -> dict[str, Any]:
    messages = [dict(message) for message in HISTORY]
    messages[index] |= change
    return {"messages": messages}


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [TOOL, TOOL]}, "tools.1.function.name", "as is `tools.0.function.name`; give each function its own name"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type", 'describe it by the type "function"'),
    ({"tools": [{"type": "function"}]}, "tools.0.function", "is missing"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", "matches"),
    (with_parameters([]), "tools.0.function.parameters", "it must be an object"),
    (with_parameters({"type": "array"}), "tools.0.function.parameters.type", 'give "object"'),
    (with_parameters({"properties": []}), "tools.0.function.parameters.properties", "is []"),
    (with_parameters({"properties": {"a": 5}}), "tools.0.function.parameters.properties.a", "is 5"),
    (with_parameters({"required": [1]}), "tools.0.function.parameters.required", "is [1]"),
    ({"tool_choice": "must"}, "tool_choice", "it must be 'none', 'auto' or 'required' or an object"),
    ({"tools": None, "tool_choice": "required"}, "tool_choice", "there are no `tools`"),
    ({"tools": [], "tool_choice": NAMED}, "tool_choice", "there are no `tools`"),
    ({"tool_choice": {"type": "custom", "custom": {}}}, "tool_choice.type", "'function' or 'allowed_tools'"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.function.name", "is missing"),
    ({"tools": [OTHER], "tool_choice": NAMED}, "tool_choice.function.name", "none of `tools`: time"),
    ({"tools": [OTHER], "tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools.0.function.name", "none of"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools", "give `mode` and `tools`"),
    ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos", "leave one of them out"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "objet"}}}},
     "response_format.json_schema.schema", "Invalid type: objet"),
    ({"guided_regex": "a+"}, "guided_regex", "beside `tools` that may be called"),
    ({"functions": [{"name": "f"}]}, "functions", "OpenAI has replaced it by `tools`: use that"),
    ({"function_call": {"name": "f"}}, "function_call", "OpenAI has replaced it by `tool_choice`"),
    (history({"tool_call_id": "call_9"}), "messages.3.tool_call_id", 'is "call_9", which is no call of an earlier message'),
    (history({"tool_call_id": None}), "messages.3.tool_call_id", "is missing"),
    (history({"role": "user"}, 1), "messages.1.tool_calls", "only the assistant calls functions"),
    (history({"tool_calls": [{"id": "1", "type": "function"}]}, 1), "messages.1.tool_calls.0.function", "is missing"),
    ({"model": "no-tools"}, "tools", "chat template has no place for them; serve a checkpoint"),
    ({"model": "no-channels"}, "tools", "has no channels, in which calls of the form harmony stand"),
    ({"model": "unknown"}, "tools", "set `spec.model.toolCallFormat` of its manifest to one of hermes"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "param", "said"), WRONG, ids=[f"{index} {param}" for index, (_, param, _) in enumerate(WRONG)]
)
def test_a_wrong_field_is_named_with_its_fix(
    client: openai.OpenAI, fields: dict[str, Any], param: str, said: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, extra_body=fields)
    assert refused.value.param == param
    assert said in refused.value.message


# --- responses ----------------------------------------------------------------------------------------------

FLAT: dict[str, Any] = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
ITEMS: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Pune"}', "id": "fc_1", "status": "completed"},
    {"type": "function_call", "call_id": "call_2", "name": "time", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "call_2", "output": "noon"},
    {"type": "function_call_output", "call_id": "call_1", "output": [{"type": "input_text", "text": "sunny"}]},
]  # fmt: skip


def test_a_response_has_a_message_and_an_item_for_each_call(client: openai.OpenAI, serving: Serving) -> None:
    serving.script("hermes", TWO_CALLS)
    tools: Any = [FLAT]
    answer = client.responses.create(model="hermes", input="Weather?", tools=tools)
    assert [item.type for item in answer.output] == ["message", "function_call", "function_call"]
    assert answer.output_text == "Let me see."
    calls = [item for item in answer.output if item.type == "function_call"]
    assert [(call.name, call.arguments, call.status) for call in calls] == [
        ("weather", arguments, "completed") for arguments in ARGUMENTS
    ]
    assert len({call.call_id for call in calls} | {item.id for item in answer.output}) == 5
    assert (answer.tool_choice, answer.parallel_tool_calls, answer.tools[0].type) == (
        "auto",
        True,
        "function",
    )


@pytest.mark.parametrize("per_message", [1, 1000])
def test_a_streamed_response_has_the_events_of_its_items(
    client: openai.OpenAI, serving: Serving, per_message: int
) -> None:
    serving.script("hermes", TWO_CALLS, per_message=per_message)
    tools: Any = [FLAT]
    events = list(client.responses.create(model="hermes", input="Weather?", tools=tools, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    collapsed = [kind for kind, before in zip(kinds, ["", *kinds], strict=False) if kind != before]
    call = [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    message = [
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
    ]
    assert collapsed == [
        "created",
        "in_progress",
        *message,
        "output_item.done",
        *call,
        *call,
        "completed",
    ]
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [event.arguments for event in done] == ARGUMENTS
    deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(event.delta for event in deltas) == "".join(ARGUMENTS)
    last = events[-1]
    assert last.type == "response.completed"
    assert [item.type for item in last.response.output] == ["message", "function_call", "function_call"]
    with client.responses.stream(model="hermes", input="Weather?", tools=tools) as stream:
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["message", "function_call", "function_call"]


def test_a_call_that_a_stop_string_cuts_off_is_an_incomplete_item(serving: Serving) -> None:
    serving.script("hermes", TWO_CALLS)
    tool = {"type": "function", **TOOL["function"]}
    body = {"model": "hermes", "input": "Weather?", "tools": [tool], "stop": ['", "unit']}
    whole = serving.router.post(RESPONSES, body).json()
    assert whole["output"][-1]["arguments"] == '{"city": "Pune'
    assert [item["status"] for item in whole["output"]] == ["completed", "incomplete"]
    streamed = serving.router.post(RESPONSES, {**body, "stream": True}).text
    assert streamed.count('"status":"incomplete"') == 2, "the item as it is done, and in the response"
    body.pop("stop")
    assert serving.router.post(RESPONSES, body).json()["output"][-1]["status"] == "completed"


def test_items_of_calls_and_their_outputs_reach_the_template(client: openai.OpenAI, serving: Serving) -> None:
    replica = serving.script("hermes", "Fine.")
    items: Any = ITEMS
    assert client.responses.create(model="hermes", input=items).output_text == "Fine."
    expected = serving.bundles["hermes"].encode(RENDERED, add_special_tokens=False).tolist()
    assert prompt_of(serving, replica) == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [ITEMS[0], ITEMS[3]]}, "input.1.call_id"),
        ({"input": [{"type": "function_call", "call_id": "a"}]}, "input.0.name"),
        ({"tools": [FLAT, FLAT]}, "tools.1.name"),
        ({"tools": [TOOL]}, "tools.0.name"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [FLAT], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"max_tool_calls": 3}, "max_tool_calls"),
    ],
)
def test_a_wrong_field_of_a_response_is_named(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    asked: Any = {"model": "hermes", "input": "Weather?", **fields}
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**asked)
    assert refused.value.param == param


def test_a_response_can_be_held_to_one_call(client: openai.OpenAI, serving: Serving) -> None:
    replica = serving.script("hermes", TWO_CALLS)
    asked: Any = {"tools": [FLAT], "tool_choice": {"type": "function", "name": "weather"}}
    answer = client.responses.create(model="hermes", input="Weather?", **asked)
    assert [item.type for item in answer.output] == ["message", "function_call"]
    assert "weather" in replica.submits[0].sampling.grammar
