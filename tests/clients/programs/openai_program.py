"""Calls a server with OpenAI's Python client, as its documentation does."""

from __future__ import annotations

from typing import Literal

import openai
from checks import MODEL, raised, run
from pydantic import BaseModel, Field

client = openai.OpenAI(max_retries=0)
HELLO = [{"role": "user", "content": "Say hello."}]


class Step(BaseModel):
    colour: Literal["red", "green"]
    count: int = Field(ge=0, le=99)


class Answer(BaseModel):
    final: bool
    steps: list[Step] = Field(min_length=1, max_length=2)


def models() -> None:
    """`models.list`, `models.retrieve`"""
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def chat() -> None:
    """`chat.completions.create`, with `max_completion_tokens`, `user`, `metadata`, `store=False`"""
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_completion_tokens=12, user="me", metadata={"a": "b"}, store=False,
        temperature=0, parallel_tool_calls=openai.omit,
    )  # fmt: skip
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens <= 12
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0


def chat_stream() -> None:
    """`chat.completions.create(stream=True)` with `stream_options`"""
    asked = {"model": MODEL, "messages": HELLO, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**asked).choices[0].message.content
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole
    assert chunks[-1].usage.completion_tokens <= 12


def chat_logprobs() -> None:
    """`logprobs`, `top_logprobs`, `n`, `stop`, `seed`, `logit_bias`"""
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=5, logprobs=True, top_logprobs=2, n=2, stop=["zzzz"], seed=3,
        logit_bias={"100": -100},
    )  # fmt: skip
    assert len(answer.choices) == 2
    assert all(len(one.top_logprobs) == 2 for one in answer.choices[0].logprobs.content)


def chat_parse() -> None:
    """`chat.completions.parse` into a pydantic class"""
    answer = client.chat.completions.parse(
        model=MODEL, messages=HELLO, response_format=Answer, max_tokens=300, seed=1
    )
    assert isinstance(answer.choices[0].message.parsed, Answer)


def chat_helper() -> None:
    """`chat.completions.stream` with a pydantic class, by its events"""
    with client.chat.completions.stream(
        model=MODEL, messages=HELLO, response_format=Answer, max_tokens=300, seed=2
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert isinstance(final.choices[0].message.parsed, Answer)


def text() -> None:
    """`completions.create` with texts, lists of texts, token ids, `echo`, `logprobs`, streamed"""
    made = client.completions.create(model=MODEL, prompt=["One", "Two"], max_tokens=4)
    assert len(made.choices) == 2
    echo = client.completions.create(
        model=MODEL, prompt=[40, 41, 42], max_tokens=2, echo=True, logprobs=1, temperature=0
    )
    assert len(echo.choices[0].logprobs.tokens) >= 4
    streamed = client.completions.create(model=MODEL, prompt="One", max_tokens=4, stream=True)
    assert [chunk.choices[0].finish_reason for chunk in streamed][-1] in ("length", "stop")


def responses() -> None:
    """`responses.create`, whole and streamed, with instructions and a conversation"""
    answer = client.responses.create(
        model=MODEL, input="Hello", instructions="Be brief.", max_output_tokens=16, temperature=0, store=False
    )
    assert answer.status in ("completed", "incomplete")
    assert answer.output_text
    events = list(
        client.responses.create(
            model=MODEL, input=[{"role": "user", "content": "Hello"}], max_output_tokens=16, stream=True
        )
    )
    assert events[0].type == "response.created"
    assert events[-1].type in ("response.completed", "response.incomplete")


def responses_parse() -> None:
    """`responses.parse` into a pydantic class, and `responses.stream` with one"""
    answer = client.responses.parse(
        model=MODEL, input="An order", text_format=Answer, max_output_tokens=300, temperature=0.5
    )
    assert isinstance(answer.output_parsed, Answer)
    with client.responses.stream(
        model=MODEL, input="An order", text_format=Answer, max_output_tokens=300
    ) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_response().output_parsed, Answer)


async def many() -> None:
    """`AsyncOpenAI`, eight streams at once, and one that is left early"""
    import asyncio

    async with openai.AsyncOpenAI(max_retries=0) as many_client:

        async def one(number: int) -> str:
            stream = await many_client.chat.completions.create(
                model=MODEL, messages=HELLO, max_tokens=16, seed=number, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        assert all(await asyncio.gather(*map(one, range(8))))
        stream = await many_client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=2000, stream=True
        )
        await anext(aiter(stream))
        await stream.close()


def refusals() -> None:
    """Errors as the client's classes: `BadRequestError`, `NotFoundError`, with `param` and `code`"""
    refused = raised(
        openai.BadRequestError,
        lambda: client.chat.completions.create(model=MODEL, messages=HELLO, store=True),
    )
    assert (refused.param, refused.code) == ("store", "unsupported_parameter")
    unknown = raised(
        openai.NotFoundError, lambda: client.chat.completions.create(model="other", messages=HELLO)
    )
    assert unknown.code == "model_not_found"
    elsewhere = raised(openai.NotFoundError, lambda: client.embeddings.create(model=MODEL, input="text"))
    assert "embeddings" in elsewhere.message


run(
    models, chat, chat_stream, chat_logprobs, chat_parse, chat_helper, text, responses, responses_parse, many, refusals,
)  # fmt: skip
