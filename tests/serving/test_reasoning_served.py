"""A model that thinks, through every room: OpenAI's own client against `medha up`, with thoughts that are random text.

A token of the vocabulary closes thoughts. A bias makes a random model write it sooner or later.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from medha_worker.checkpoints.presets import init_checkpoint

from .conftest import MODEL, Served, free_port, start, stop, write_manifest
from .test_tools import ASKED, CLASSES, TOOLS

CLOSES = 2
"""Id of the token that closes thoughts: that of padding, which a random model otherwise never writes."""


def make_thinking(checkpoint: Path) -> None:
    """Let a checkpoint's template open thoughts, and its tokenizer have a token that closes them."""
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    (token,) = (one for one in tokenizer["added_tokens"] if one["id"] == CLOSES)
    name = token["content"]
    token |= {"content": "</think>", "special": False}
    vocabulary = tokenizer["model"]["vocab"]
    if name in vocabulary:
        vocabulary["</think>"] = vocabulary.pop(name)
    (checkpoint / "tokenizer.json").write_text(json.dumps(tokenizer))
    file = checkpoint / "tokenizer_config.json"
    config = json.loads(file.read_text().replace(name, "</think>"))
    end = "<|assistant|>\\n' }}\n{%- endif %}"
    assert end in config["chat_template"]
    begun = "<|assistant|>\\n' + ('<think>\\n' if enable_thinking is not false else '<think>\\n\\n</think>\\n\\n') }}\n{%- endif %}"
    config["chat_template"] = config["chat_template"].replace(end, begun)
    file.write_text(json.dumps(config))


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("thinking")
    init_checkpoint(folder / "model", preset="tiny", seed=0)
    make_thinking(folder / "model")
    port = free_port()
    running = start(write_manifest(folder / "tiny.yaml", folder / "model", port), port, folder / "model")
    yield running
    stop(running)


@pytest.fixture
def client(thinking: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{thinking.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def asked(**more: Any) -> Any:
    return {
        "model": MODEL,
        "messages": ASKED,
        "max_tokens": 600,
        "seed": 1,
        "logit_bias": {str(CLOSES): 5},
        **more,
    }


def test_thoughts_are_apart_from_an_answer_that_follows_its_schema(client: openai.OpenAI) -> None:
    lengths = []
    for seed in range(3):
        parsed = client.chat.completions.parse(**asked(seed=seed), response_format=CLASSES["Lookup"])
        (choice,) = parsed.choices
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, CLASSES["Lookup"])
        details = parsed.usage.completion_tokens_details  # type: ignore[union-attr]
        assert details is not None
        assert details.reasoning_tokens is not None
        lengths.append(len((choice.message.model_extra or {}).get("reasoning_content", "")))
        assert (lengths[-1] > 0) == (details.reasoning_tokens > 1)
    assert max(lengths) > 0, "some answer has thoughts before it"


def test_streams_and_samples_have_the_thoughts_of_the_whole_answer(client: openai.OpenAI) -> None:
    fields = asked(n=2, max_tokens=80)
    whole = client.chat.completions.create(**fields)
    streamed = [["", ""], ["", ""]]
    for chunk in client.chat.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            streamed[choice.index][0] += (choice.delta.model_extra or {}).get("reasoning", "")
            streamed[choice.index][1] += choice.delta.content or ""
    assert streamed == [
        [(choice.message.model_extra or {}).get("reasoning", ""), choice.message.content or ""]
        for choice in whole.choices
    ]
    assert any(thoughts for thoughts, _ in streamed)


def test_calls_that_are_required_come_behind_thoughts_and_the_history_goes_on(client: openai.OpenAI) -> None:
    messages = list(ASKED)
    for seed in range(2):
        parsed = client.chat.completions.parse(
            **asked(seed=seed, messages=messages),
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=False,
        )
        (one,) = parsed.choices
        assert one.finish_reason == "tool_calls"
        (call,) = one.message.tool_calls or ()
        assert isinstance(call.function.parsed_arguments, CLASSES[call.function.name])
        messages.append(one.message.model_dump(exclude_none=True, exclude={"parsed", "refusal"}))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "done"})


def test_an_output_may_end_in_its_thoughts_or_have_none(client: openai.OpenAI) -> None:
    (choice,) = client.chat.completions.create(**asked(max_tokens=5, logit_bias={str(CLOSES): -100})).choices
    assert (choice.finish_reason, choice.message.content) == ("length", None)
    assert (choice.message.model_extra or {})["reasoning_content"]
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    (choice,) = client.chat.completions.create(**asked(max_tokens=5, logit_bias=None), extra_body=off).choices
    assert choice.message.content
    assert "reasoning_content" not in (choice.message.model_extra or {})


def test_a_response_is_streamed_as_thoughts_and_a_message(client: openai.OpenAI) -> None:
    more = {"seed": 1, "logit_bias": {str(CLOSES): 5}}
    fields: Any = {"model": MODEL, "input": "Order.", "max_output_tokens": 600, "extra_body": more}
    with client.responses.stream(**fields, text_format=CLASSES["Lookup"]) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message"]
    assert isinstance(final.output_parsed, CLASSES["Lookup"])
    assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")
    assert final.usage is not None
    assert final.usage.output_tokens_details.reasoning_tokens > 0
