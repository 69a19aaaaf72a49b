"""An agent's loop through every room: real clients against `medha up`, with a model whose text is random.

A random model chooses nothing, but where a call is required its grammar makes it write one, so the loop runs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from .conftest import MODEL, Served, free_port, start, stop, write_manifest

NPM_OPENAI = "openai@7.57.0"


class Lookup(BaseModel):
    """Look up the stock of a part."""

    model_config = ConfigDict(extra="forbid")

    colour: Literal["red", "green"]
    count: int = Field(ge=0, le=99)


class Order(BaseModel):
    """Order parts."""

    model_config = ConfigDict(extra="forbid")

    parts: list[Lookup] = Field(min_length=1, max_length=2)


CLASSES = {"Lookup": Lookup, "Order": Order}
TOOLS: Any = [openai.pydantic_function_tool(one) for one in CLASSES.values()]
ASKED: list[Any] = [{"role": "user", "content": "Order what is missing."}]


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(client: openai.OpenAI, **more: Any) -> Any:
    asked = {"model": MODEL, "messages": ASKED, "tools": TOOLS, "max_tokens": 400, "seed": 1, **more}
    return client.chat.completions.create(**asked)


def test_an_agents_loop_runs_its_turns_and_ends_with_a_text(client: openai.OpenAI) -> None:
    messages, turns = list(ASKED), 0
    for choice in ("required", {"type": "function", "function": {"name": "Order"}}, "none"):
        answer = client.chat.completions.parse(
            model=MODEL, messages=messages, tools=TOOLS, tool_choice=choice, max_tokens=600, seed=turns,
            parallel_tool_calls=False, stop=None if choice != "none" else [" "],
        )  # fmt: skip
        (one,) = answer.choices
        messages.append(one.message.model_dump(exclude_none=True, exclude={"parsed", "refusal"}))
        if choice == "none":
            assert one.message.tool_calls is None
            assert one.message.content is not None
            break
        assert one.finish_reason == "tool_calls"
        assert one.message.content is None
        (call,) = one.message.tool_calls or ()
        assert isinstance(call.function.parsed_arguments, CLASSES[call.function.name])
        messages.append({"role": "tool", "tool_call_id": call.id, "content": f"done {turns}"})
        turns += 1
    assert turns == 2
    assert [message["role"] for message in messages] == [
        "user",
        *("assistant", "tool") * 2,
        "assistant",
    ]


def test_streams_and_samples_have_the_calls_of_the_whole_answer(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"n": 2, "tool_choice": "required", "temperature": 0.8}
    whole = [
        [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
        for choice in chat(client, **asked).choices
    ]
    streamed: list[list[list[str]]] = [[], []]
    for event in chat(client, **asked, stream=True):
        for choice in event.choices:
            for call in choice.delta.tool_calls or ():
                if call.index == len(streamed[choice.index]):
                    streamed[choice.index].append([call.function.name, ""])
                streamed[choice.index][call.index][1] += call.function.arguments
    assert [[tuple(call) for call in calls] for calls in streamed] == whole
    for calls in whole:
        for name, arguments in calls[:-1]:  # the last one may be cut off by `max_tokens`
            CLASSES[name].model_validate_json(arguments)


def test_strict_functions_beside_free_text_leave_the_text_as_it_is(client: openai.OpenAI) -> None:
    plain = {"max_tokens": 60, "seed": 9, "temperature": 0}
    loose = [{"type": "function", "function": {**tool["function"], "strict": False}} for tool in TOOLS]
    free = chat(client, **{**plain, "tools": loose}).choices[0].message.content
    assert free
    assert chat(client, **plain).choices[0].message.content == free


def test_responses_call_functions_and_take_their_outputs(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
    history: list[Any] = list(ASKED)
    for turn in range(2):
        answer = client.responses.create(
            model=MODEL, input=history, tools=tools, tool_choice="required", parallel_tool_calls=False,
            max_output_tokens=600, extra_body={"seed": turn},
        )  # fmt: skip
        (call,) = answer.output
        assert call.type == "function_call"
        CLASSES[call.name].model_validate_json(call.arguments)
        history.append(call.model_dump(exclude_none=True))
        history.append({"type": "function_call_output", "call_id": call.call_id, "output": json.dumps(turn)})


@pytest.mark.long
def test_a_model_without_a_token_that_ends_a_text_answers_unless_a_grammar_is_needed(
    checkpoint: Path, tmp_path: Path
) -> None:
    endless = tmp_path / "endless"
    shutil.copytree(checkpoint, endless)
    for name in ("config.json", "generation_config.json"):
        config = json.loads((endless / name).read_text())
        del config["eos_token_id"]
        (endless / name).write_text(json.dumps(config))
    port = free_port()
    running = start(write_manifest(tmp_path / "tiny.yaml", endless, port), port, endless)
    try:
        with openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0) as client:
            (choice,) = chat(client, tool_choice="none", max_tokens=20).choices
            assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)
            assert choice.message.content
            with pytest.raises(openai.BadRequestError, match="name no eos_token_id"):
                chat(client, tool_choice="required")
    finally:
        stop(running)


SCRIPT = """
import OpenAI from 'openai';
const client = new OpenAI({ baseURL: process.argv[2] + '/v1', apiKey: 'none', maxRetries: 0 });
const parameters = { type: 'object', properties: { colour: { enum: ['red', 'green'] }, count: { type: 'integer', minimum: 0, maximum: 99 } },
  required: ['colour', 'count'], additionalProperties: false };
const seen = [];
const lookup = { type: 'function', function: { name: 'lookup', parameters, parse: JSON.parse,
  function: (given) => { seen.push(given); return 'some'; } } };
for (const stream of [false, true]) {
  const runner = client.chat.completions.runTools({ model: process.argv[3], stream, tool_choice: 'required', parallel_tool_calls: false,
    max_tokens: 300, messages: [{ role: 'user', content: 'Look it up.' }], tools: [lookup] }, { maxChatCompletions: 3 });
  await runner.done().catch((error) => { if (!/maxChatCompletions|ended without/.test(String(error))) throw error; });
  seen.push(runner.messages.map((message) => message.role));
}
console.log(JSON.stringify(seen));
"""


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("npm") is None, reason="needs npm (Debian: nodejs, npm)")
def test_the_loop_of_openais_npm_package_runs(served: Served, tmp_path: Path) -> None:
    environment = {**os.environ, "npm_config_cache": str(tmp_path / "cache")}
    subprocess.run(
        ["npm", "install", "--no-audit", "--no-fund", NPM_OPENAI], cwd=tmp_path, env=environment, check=True
    )
    (tmp_path / "loop.mjs").write_text(SCRIPT)
    ran = subprocess.run(
        ["node", "loop.mjs", served.url, MODEL],
        cwd=tmp_path,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    seen = json.loads(ran.stdout)
    assert len(seen) == 8
    for given in (*seen[:3], *seen[4:7]):
        assert given["colour"] in ("red", "green")
        assert 0 <= given["count"] <= 99
    for roles in (seen[3], seen[7]):
        assert roles[:1] + roles[1:] == ["user", *("assistant", "tool") * 3]
