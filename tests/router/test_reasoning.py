"""Clients get thoughts apart from the answer, by OpenAI's own client, in chats and responses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from medha.api.declared import DeclaredModel

from .conftest import Script, ScriptedReplica, say, wait_for
from .test_tools import CHAT, QUESTION, RESPONSES, STRICT, TOOL, Serving, files_of, serving_models, spelled
from .test_tools_in_channels import CALLED, FILES, PREAMBLE, THOUGHT

TURNS = (
    "{% for message in messages %}<|{{ message.role }}|>{% if message.reasoning_content %}<think>{{ message.reasoning_content }}"
    "</think>{% endif %}{{ message.content }}{% for call in message.tool_calls %}<tool_call>{{ call.function.name }}</tool_call>"
    "{% endfor %}<|end|>{% endfor %}{{ tools }}{% if add_generation_prompt %}<|assistant|>"
)
TEMPLATES = {
    "switched": f"{TURNS}{{% if enable_thinking is defined and enable_thinking is false %}}<think>\n\n</think>\n\n{{% endif %}}{{% endif %}}",
    "opened": f"{TURNS}<think>\n{{% endif %}}",
    "effort": f"{{{{ reasoning_effort }}}}{TURNS}{{% endif %}}",
}
SAID = "\nThey ask <tool_call>? Stop.\n"
THOUGHTS = SAID.strip()
ANSWER = "Sunny, é."
CALLS = '<tool_call>\n{"name": "weather", "arguments": {"city": "Pune", "unit": "C"}}\n</tool_call>'
OUTPUTS = {"switched": f"<think>{SAID}</think>\n\n", "opened": f"{SAID}</think>\n\n"}


def with_marks(files: dict[str, bytes], *, special: bool) -> dict[str, bytes]:
    tokenizer = json.loads(files["tokenizer.json"])
    first = max(tokenizer["model"]["vocab"].values(), default=0)
    first = max([first, *(one["id"] for one in tokenizer["added_tokens"])]) + 1
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}
    tokenizer["added_tokens"] += [
        {"id": first + place, "content": mark, **flags} for place, mark in enumerate(("<think>", "</think>"))
    ]
    return {**files, "tokenizer.json": json.dumps(tokenizer).encode()}


MODELS = {
    "switched": files_of(TEMPLATES["switched"]),
    "opened": files_of(TEMPLATES["opened"]),
    "effort": files_of(TEMPLATES["effort"]),
    "tokens": with_marks(files_of(TEMPLATES["switched"]), special=False),
    "special": with_marks(files_of(TEMPLATES["switched"]), special=True),
    "none": files_of(TEMPLATES["switched"]),
    "harmony": FILES,
    "none-harmony": FILES,
}


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    declared = [
        DeclaredModel(name=name, replicas=1, reasoning_format="none") for name in ("none", "none-harmony")
    ]
    with serving_models(tmp_path_factory, MODELS, declared) as running:
        yield running


@pytest.fixture
def client(serving: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{serving.router.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(client: openai.OpenAI, model: str = "switched", **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": model, "messages": QUESTION, **fields})


def script(serving: Serving, model: str, text: str, **more: Any) -> ScriptedReplica:
    """Let a model say `text`, with its marks as the tokens that they are."""
    replica = serving.script(model, "", **more)
    encode = serving.bundles[model].encode
    tokens = encode(text, add_special_tokens=False).tolist()
    end = () if model.endswith("harmony") else (1,)
    replica.script = Script(**{"tokens": (*tokens, *end), "finish": "stop", **more})
    return replica


def rendered(serving: Serving, replica: ScriptedReplica, model: str) -> str:
    (submit,) = replica.submits
    return serving.bundles[model].decode(replica.prompts[submit.prompt])


def of_stream(chunks: Any) -> dict[int, tuple[str, str, str]]:
    """The thoughts under both names and the answer by choice; no chunk has thoughts behind the answer."""
    found: dict[int, tuple[str, str, str]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            first, second, answer = found.get(choice.index, ("", "", ""))
            delta = choice.delta
            assert not answer or getattr(delta, "reasoning_content", None) is None
            first += getattr(delta, "reasoning_content", None) or ""
            second += getattr(delta, "reasoning", None) or ""
            found[choice.index] = (first, second, answer + (delta.content or ""))
    return found


# --- chats ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["switched", "opened", "tokens", "special"])
@pytest.mark.parametrize("per_message", [1, 5, 1000])
def test_thoughts_are_apart_from_the_answer(
    client: openai.OpenAI, serving: Serving, model: str, per_message: int
) -> None:
    lead = OUTPUTS["opened" if model == "opened" else "switched"]
    replica = script(serving, model, lead + ANSWER, per_message=per_message, logprobs=True)
    counted = f'medha_reasoning_tokens_total{{model="{model}"}}'
    before = serving.router.metric(counted)
    whole = chat(client, model, n=2, logprobs=True)
    for choice in whole.choices:
        message = choice.message
        assert (message.content, choice.finish_reason) == (ANSWER, "stop")
        assert (message.reasoning_content, message.reasoning) == (THOUGHTS, THOUGHTS)
        assert spelled(choice.logprobs.content) == ANSWER
    used = whole.usage.completion_tokens_details.reasoning_tokens
    wait_for(lambda: serving.router.metric(counted) == before + used, "the tokens are not counted")
    bundle = serving.bundles[model]
    thinking = len(bundle.encode(lead.strip(), add_special_tokens=False))
    assert 2 * thinking <= used < 2 * (len(replica.script.tokens) - 2)
    chunks = list(chat(client, model, n=2, stream=True, stream_options={"include_usage": True}))
    assert of_stream(chunks) == dict.fromkeys(range(2), (THOUGHTS, THOUGHTS, ANSWER))
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == used


def test_an_answer_without_thoughts_is_as_it_is(client: openai.OpenAI, serving: Serving) -> None:
    text = " \n<thin> Hi </think>"
    script(serving, "switched", text, logprobs=True)
    answer = chat(client, logprobs=True)
    message = answer.choices[0].message
    assert message.content == text
    assert spelled(answer.choices[0].logprobs.content) == text
    assert not {"reasoning_content", "reasoning"} & message.model_dump().keys()
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0
    assert of_stream(chat(client, stream=True)) == {0: ("", "", text)}


def test_an_output_that_ends_in_its_thoughts_has_no_answer(client: openai.OpenAI, serving: Serving) -> None:
    tokens = say(serving.bundles["opened"], SAID)
    script(serving, "opened", "", tokens=tokens, finish="length")
    answer = chat(client, "opened")
    (choice,) = answer.choices
    assert (choice.message.content, choice.message.reasoning_content) == (None, THOUGHTS)
    assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens_details.reasoning_tokens == len(tokens)
    response = client.responses.create(model="opened", input="Weather?")
    assert [item.type for item in response.output] == ["reasoning"]
    assert (response.status, response.output_text) == ("incomplete", "")
    hidden = chat(client, "opened", extra_body={"include_reasoning": False}).choices[0].message
    assert hidden.content is None
    assert "reasoning_content" not in hidden.model_dump()


@pytest.mark.parametrize("per_message", [1, 1000])
def test_a_stop_token_amid_thoughts_in_channels_is_not_among_them(
    client: openai.OpenAI, serving: Serving, per_message: int
) -> None:
    said = "<|channel|>analysis<|message|>They ask"
    script(serving, "harmony", f"{said}<|bos|>.<|user|>", per_message=per_message)
    answer = chat(client, "harmony")
    (choice,) = answer.choices
    assert (choice.message.content, choice.message.reasoning_content) == (None, "They ask.")
    thoughts = serving.bundles["harmony"].encode("They ask<|bos|>.", add_special_tokens=False)
    assert answer.usage.completion_tokens_details.reasoning_tokens == len(thoughts)


def test_a_stop_string_counts_in_the_answer_alone(client: openai.OpenAI, serving: Serving) -> None:
    script(serving, "switched", f"{OUTPUTS['switched']}One. Stop. Two")
    (choice,) = chat(client, stop=["Stop"]).choices
    assert (choice.message.content, choice.finish_reason) == ("One. ", "stop")
    assert choice.message.reasoning_content == THOUGHTS


@pytest.mark.parametrize("model", ["switched", "harmony"])
def test_a_client_may_leave_thoughts_out(client: openai.OpenAI, serving: Serving, model: str) -> None:
    said = f"{THOUGHT}<|channel|>final<|message|>{ANSWER}<|return|>"
    script(serving, model, OUTPUTS["switched"] + ANSWER if model == "switched" else said)
    answer = chat(client, model, extra_body={"include_reasoning": False})
    message = answer.choices[0].message
    assert message.content == ANSWER
    assert "reasoning_content" not in message.model_dump()
    assert answer.usage.completion_tokens_details.reasoning_tokens > 0


def test_a_manifest_may_leave_the_thoughts_of_channels_out(client: openai.OpenAI, serving: Serving) -> None:
    script(serving, "none-harmony", f"{THOUGHT}<|channel|>final<|message|>{ANSWER}<|return|>")
    message = chat(client, "none-harmony").choices[0].message
    assert (message.content, "reasoning_content" in message.model_dump()) == (ANSWER, False)
    response = client.responses.create(model="none-harmony", input="Weather?")
    assert [item.type for item in response.output] == ["message"]


def test_thoughts_may_stay_in_the_content(client: openai.OpenAI, serving: Serving) -> None:
    text = OUTPUTS["switched"] + ANSWER
    for model in ("switched", "special"):
        script(serving, model, text)
        left_in = chat(client, model, extra_body={"separate_reasoning": False})
        assert left_in.choices[0].message.content == text, (
            "with its marks, also where they are special tokens"
        )
    script(serving, "none", text)
    message = chat(client, "none").choices[0].message
    assert message.content == text, "the manifest says so"
    completed = client.completions.create(model="switched", prompt="Weather?")
    script(serving, "switched", text)
    completed = client.completions.create(model="switched", prompt="Weather?")
    assert completed.choices[0].text == text


def test_calls_come_behind_thoughts(client: openai.OpenAI, serving: Serving) -> None:
    script(serving, "switched", f"{OUTPUTS['switched']}I look.\n{CALLS}", per_message=1)
    (choice,) = chat(client, tools=[TOOL]).choices
    assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
    assert choice.message.reasoning_content == THOUGHTS
    assert [one.function.name for one in choice.message.tool_calls] == ["weather"]
    assert of_stream(chat(client, tools=[TOOL], stream=True)) == {0: (THOUGHTS, THOUGHTS, "I look.")}


def test_thoughts_in_channels_are_shown(client: openai.OpenAI, serving: Serving) -> None:
    thought = "They ask. Stop: \u0020to=functions.none?"
    for lead, thoughts in ((THOUGHT, thought), (THOUGHT * 2, f"{thought}\n{thought}")):
        script(serving, "harmony", lead + PREAMBLE + CALLED, per_message=1)
        answer = chat(client, "harmony", tools=[TOOL])
        (choice,) = answer.choices
        assert (choice.message.content, choice.message.reasoning_content) == ("I look.", thoughts)
        assert len(choice.message.tool_calls) == 1
        tokens = len(serving.bundles["harmony"].encode(thought, add_special_tokens=False))
        assert answer.usage.completion_tokens_details.reasoning_tokens >= tokens
        assert of_stream(chat(client, "harmony", stream=True)) == {0: (thoughts, thoughts, "I look. ")}


def test_a_stream_that_moves_within_its_thoughts_goes_on(serving: Serving) -> None:
    """Two replicas: the second continues from the tokens that the first has sent, in the middle of a mark."""
    text = OUTPUTS["switched"] + ANSWER
    cut = text.index("nk>\n\n")
    sent, rest = (say(serving.bundles["switched"], part) for part in (text[:cut], text[cut:]))
    fields = {"model": "moving"}
    first = ScriptedReplica(serving.router, MODELS["switched"], name="r-first", fields=fields)
    first.script = Script(tokens=sent, hold=True)
    wait_for(lambda: serving.router.http.get("/v1/models/moving").status_code == 200, "it never joins")
    body = {"model": "moving", "messages": QUESTION, "stream": True}
    thoughts, answer, second = "", "", None
    try:
        with serving.router.http.stream("POST", CHAT, json=body) as stream:
            for line in stream.iter_lines():
                if not line.startswith("data: {"):
                    continue
                delta = json.loads(line.removeprefix("data: "))["choices"][0]["delta"]
                thoughts += delta.get("reasoning_content", "")
                answer += delta.get("content") or ""
                if thoughts == THOUGHTS and second is None:
                    second = ScriptedReplica(
                        serving.router, MODELS["switched"], name="r-second", fields=fields,
                        script=Script(tokens=(*sent, *rest, 1), finish="stop"),
                    )  # fmt: skip
                    first.stop()
    finally:
        for replica in (first, second):
            if replica is not None and replica.is_alive():
                replica.stop()
    assert second is not None
    assert (thoughts, answer) == (THOUGHTS, ANSWER)


# --- prompts -------------------------------------------------------------------------------------------------


def test_an_effort_goes_where_the_template_reads_it(client: openai.OpenAI, serving: Serving) -> None:
    replica = script(serving, "effort", ANSWER)
    chat(client, "effort", reasoning_effort="high")
    assert rendered(serving, replica, "effort").startswith("high")
    replica = script(serving, "effort", ANSWER)
    shown = client.responses.create(
        model="effort", input="Hi", reasoning={"effort": "low", "summary": "auto"}
    )
    assert rendered(serving, replica, "effort").startswith("low")
    assert shown.reasoning is not None
    assert (shown.reasoning.effort, shown.reasoning.summary) == ("low", "auto")


@pytest.mark.parametrize(
    "fields",
    [{"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}],
)
def test_thoughts_may_be_switched_off(
    client: openai.OpenAI, serving: Serving, fields: dict[str, Any]
) -> None:
    replica = script(serving, "switched", f"<think>{ANSWER}")
    asked = {**fields, "response_format": {"type": "json_object"}}
    message = chat(client, extra_body=asked).choices[0].message
    assert rendered(serving, replica, "switched").endswith("<think>\n\n</think>\n\n")
    assert message.content == f"<think>{ANSWER}", "the prompt has ended the thoughts"
    assert "thought" not in replica.submits[0].sampling.grammar
    replica = script(serving, "switched", OUTPUTS["switched"] + ANSWER)
    assert chat(client, reasoning_effort="low").choices[0].message.content == ANSWER
    assert rendered(serving, replica, "switched").endswith("<|assistant|>")


def test_a_message_that_is_continued_may_be_continued_in_its_thoughts(
    client: openai.OpenAI, serving: Serving
) -> None:
    told = (None, " ask.</think>Hi")
    for begun, answer in (("<think>They", (" ask.", "Hi")), ("They", told), ("The mark <think> is", told)):
        script(serving, "switched", " ask.</think>Hi")
        messages = [*QUESTION, {"role": "assistant", "content": begun}]
        asked = {"add_generation_prompt": False, "continue_final_message": True}
        message = chat(client, messages=messages, extra_body=asked).choices[0].message
        assert (getattr(message, "reasoning_content", None), message.content) == answer


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thoughts_of_a_history_go_into_the_prompt(client: openai.OpenAI, serving: Serving, name: str) -> None:
    replica = script(serving, "switched", ANSWER)
    history: Any = [*QUESTION, {"role": "assistant", "content": "Rain.", name: "Hm."}, *QUESTION]
    chat(client, messages=history)
    prompt = rendered(serving, replica, "switched")
    assert "<|assistant|><think>Hm.</think>Rain.<|end|>" in prompt


def test_a_responses_output_is_the_input_of_the_next_one(client: openai.OpenAI, serving: Serving) -> None:
    tools: Any = [{"type": "function", **TOOL["function"]}]
    script(serving, "switched", OUTPUTS["switched"] + CALLS)
    answer = client.responses.create(model="switched", input="Weather?", tools=tools)
    assert [item.type for item in answer.output] == ["reasoning", "function_call"]
    history: Any = [{"role": "user", "content": "Weather?"}, *(one.model_dump() for one in answer.output)]
    history.append({"type": "function_call_output", "call_id": answer.output[1].call_id, "output": "sunny"})  # type: ignore[union-attr]
    replica = script(serving, "switched", OUTPUTS["switched"] + ANSWER)
    assert client.responses.create(model="switched", input=history, tools=tools).output_text == ANSWER
    prompt = rendered(serving, replica, "switched")
    assert f"<|assistant|><think>{THOUGHTS}</think><tool_call>weather</tool_call><|end|>" in prompt


# --- responses -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["switched", "harmony"])
def test_a_response_has_an_item_of_thoughts(client: openai.OpenAI, serving: Serving, model: str) -> None:
    script(
        serving,
        model,
        OUTPUTS[model] + ANSWER if model == "switched" else THOUGHT + PREAMBLE + THOUGHT + CALLED,
    )
    tools: Any = [{"type": "function", **TOOL["function"]}] if model == "harmony" else openai.omit
    whole = client.responses.create(model=model, input="Weather?", tools=tools)
    kinds = {
        "switched": ["reasoning", "message"],
        "harmony": ["reasoning", "message", "reasoning", "function_call"],
    }
    assert [item.type for item in whole.output] == kinds[model]
    thoughts = [item for item in whole.output if item.type == "reasoning"]
    texts = [part.text for item in thoughts for part in item.content or ()]
    assert texts == [THOUGHTS] if model == "switched" else len(set(texts)) == 1
    assert all(item.summary == [] and item.status == "completed" for item in thoughts)
    assert whole.usage is not None
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    with client.responses.stream(model=model, input="Weather?", tools=tools) as stream:
        events = list(stream)
        final = stream.get_final_response()
    ids = {
        "exclude": {"id": True, "call_id": True, "parsed_arguments": True, "content": {"__all__": {"parsed"}}}
    }
    assert [item.model_dump(**ids) for item in final.output] == [
        item.model_dump(**ids) for item in whole.output
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    of_first = [event.type for event in events if getattr(event, "output_index", None) == 0]
    deltas = of_first.count("response.reasoning_text.delta")
    assert of_first == [
        "response.output_item.added", "response.content_part.added", *["response.reasoning_text.delta"] * deltas,
        "response.reasoning_text.done", "response.content_part.done", "response.output_item.done",
    ]  # fmt: skip
    streamed = "".join(
        event.delta for event in events
        if event.type == "response.reasoning_text.delta" and event.output_index == 0
    )  # fmt: skip
    assert streamed == texts[0]


# --- grammars and refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "fields", "has", "has_not"),
    [
        ("switched", {"response_format": {"type": "json_object"}}, ["thoughts? @answer"], []),
        ("opened", {"response_format": {"type": "json_object"}}, ["thoughts @answer"], []),
        ("opened", {"guided_regex": "a+"}, ["thoughts @answer", "a+"], []),
        ("none", {"response_format": {"type": "json_object"}}, ["json_schema"], ["thought"]),
        ("opened", {"tools": [STRICT]}, ["thoughts (TEXT | lead calls)"], []),
        ("opened", {"tools": [TOOL], "tool_choice": "required"}, ['thoughts ("<tool_call>" calls)'], []),
        ("opened", {"tools": [TOOL], "tool_choice": "none"}, ["thoughts TEXT"], []),
        ("special", {"response_format": {"type": "json_object"}}, ["thoughts?", "THOUGHT <["], ["[lazy]"]),
        ("opened", {}, [], ["thought"]),
    ],
    ids=str,
)  # fmt: skip
def test_what_an_output_is_held_to_holds_behind_its_thoughts(
    client: openai.OpenAI, serving: Serving, model: str, fields: dict[str, Any], has: list[str], has_not: list[str]
) -> None:  # fmt: skip
    replica = script(serving, model, ANSWER)
    chat(client, model, extra_body=fields)
    grammar = " ".join(replica.submits[0].sampling.grammar.replace("\\n", " ").split())
    assert bool(grammar) == bool(has)
    assert [word for word in has if word not in grammar] == []
    assert [word for word in has_not if word in grammar] == []


@pytest.mark.parametrize(
    ("path", "model", "fields", "param", "says"),
    [
        (CHAT, "opened", {"reasoning_effort": "low"}, "reasoning_effort", "has no place for it"),
        (CHAT, "opened", {"reasoning_effort": "none"}, "reasoning_effort", "has no place for it"),
        (CHAT, "effort", {"reasoning_effort": "much"}, "reasoning_effort", "'none', 'minimal'"),
        (CHAT, "harmony", {"separate_reasoning": False}, "separate_reasoning", "messages of their own"),
        (CHAT, "switched", {"separate_reasoning": False, "include_reasoning": False}, "separate_reasoning", "leave one"),
        (CHAT, "switched", {"enable_thinking": False}, "enable_thinking", "`chat_template_kwargs`"),
        (CHAT, "switched", {"thinking": {"type": "disabled"}}, "thinking", "`chat_template_kwargs`"),
        (CHAT, "switched", {"stream_reasoning": False}, "stream_reasoning", "leave it out"),
        (CHAT, "switched", {"reasoning": {"effort": "low"}}, "reasoning", "leave it out"),
        (RESPONSES, "opened", {"reasoning": {"effort": "low"}}, "reasoning.effort", "has no place for it"),
        (RESPONSES, "effort", {"reasoning": {"summary": "detailed"}}, "reasoning.summary", "leave it out"),
        (RESPONSES, "effort", {"reasoning": {"budget": 3}}, "reasoning.budget", "leave it out"),
        (RESPONSES, "switched", {"separate_reasoning": False}, "separate_reasoning", "leave it out"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_served_is_refused_by_name(
    serving: Serving, path: str, model: str, fields: dict[str, Any], param: str, says: str
) -> None:
    asked: dict[str, Any] = {"messages": QUESTION} if path == CHAT else {"input": "Weather?"}
    answer = serving.router.post(path, {"model": model, **asked, **fields})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], says in error["message"]) == (param, True), error
