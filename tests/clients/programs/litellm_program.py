"""Calls a server with LiteLLM's SDK, as a server of OpenAI's API and as one of vLLM."""

from __future__ import annotations

import json

import litellm
from checks import MODEL, URL, raised, run
from pydantic import BaseModel

HELLO = [{"role": "user", "content": "Say hello."}]


class Answer(BaseModel):
    final: bool


def ask(provider: str = "openai", **more: object) -> object:
    asked = {"messages": HELLO, "max_tokens": 12, "num_retries": 0, "api_base": URL, **more}
    return litellm.completion(model=f"{provider}/{MODEL}", **asked)


def completion() -> None:
    """`completion` as `openai/` and as `hosted_vllm/`"""
    for provider in ("openai", "hosted_vllm"):
        answer = ask(provider, temperature=0, user="me", seed=1, metadata={"team": "a"})
        assert answer.choices[0].message.content
        assert answer.usage.completion_tokens <= 12


def stream() -> None:
    """`completion(stream=True)` with usage"""
    for provider in ("openai", "hosted_vllm"):
        chunks = list(ask(provider, stream=True, stream_options={"include_usage": True}))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert litellm.stream_chunk_builder(chunks).usage.completion_tokens <= 12


async def concurrent() -> None:
    """`acompletion`, eight at once"""
    import asyncio

    answers = await asyncio.gather(
        *(
            litellm.acompletion(
                model=f"openai/{MODEL}", messages=HELLO, max_tokens=8, api_base=URL, num_retries=0
            )
            for _ in range(8)
        )
    )
    assert len(answers) == 8


def structured() -> None:
    """`response_format` with a pydantic class"""
    for provider in ("openai", "hosted_vllm"):
        answer = ask(provider, response_format=Answer, max_tokens=200, seed=1)
        Answer.model_validate_json(answer.choices[0].message.content)
    found = ask(response_format={"type": "json_object"}, max_tokens=200, seed=1)
    assert found.choices[0].message.content.lstrip().startswith("{")


def text() -> None:
    """`text_completion`"""
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", prompt="One", max_tokens=4, api_base=URL, logprobs=1
    )
    assert answer.choices[0].text


def responses() -> None:
    """`responses`"""
    answer = litellm.responses(model=f"openai/{MODEL}", input="Hello", max_output_tokens=16, api_base=URL)
    assert answer.output[0].content[0].text


def refusal() -> None:
    """A refusal of the server as LiteLLM's `BadRequestError`"""
    error = raised(litellm.BadRequestError, lambda: ask(extra_body={"store": True}))
    assert "store" in str(error)


def models() -> None:
    """`get_valid_models` from the server's list"""
    found = litellm.get_valid_models(
        check_provider_endpoint=True, custom_llm_provider="openai", api_base=URL.removesuffix("/v1")
    )
    assert any(MODEL in name for name in found), json.dumps(found)


def tools() -> None:
    """`completion` with `tools`: a required call, its result in the next turn, and the same as a stream"""
    parameters = {
        "type": "object", "properties": {"colour": {"enum": ["red", "green"]}}, "required": ["colour"],
        "additionalProperties": False,
    }  # fmt: skip
    stock = {"type": "function", "function": {"name": "stock", "description": "d", "parameters": parameters}}
    for provider in ("openai", "hosted_vllm"):
        asked = {"tools": [stock], "max_tokens": 200, "seed": 1}
        named = {"type": "function", "function": {"name": "stock"}}
        message = ask(provider, **asked, tool_choice=named).choices[0].message
        (call,) = message.tool_calls
        assert json.loads(call.function.arguments)["colour"] in ("red", "green")
        chunks = list(ask(provider, **asked, tool_choice=named, stream=True))
        (streamed,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
        assert streamed.function.arguments == call.function.arguments
        result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
        history = [*HELLO, message, result]
        assert ask(provider, **asked, tool_choice="none", messages=history).choices[0].message.content


run(completion, stream, concurrent, structured, text, responses, refusal, models, tools)
