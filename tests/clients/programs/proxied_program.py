"""Calls LiteLLM's proxy, behind which the server is, with OpenAI's Python client."""

from __future__ import annotations

import openai
from checks import MODEL, raised, run
from pydantic import BaseModel

client = openai.OpenAI(max_retries=0)
HELLO = [{"role": "user", "content": "Say hello."}]


class Answer(BaseModel):
    final: bool


def chat() -> None:
    """`chat.completions.create`, whole and streamed"""
    asked = {"model": MODEL, "messages": HELLO, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**asked).choices[0].message.content
    chunks = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole


def parse() -> None:
    """`chat.completions.parse`"""
    answer = client.chat.completions.parse(
        model=MODEL, messages=HELLO, response_format=Answer, max_tokens=200
    )
    assert isinstance(answer.choices[0].message.parsed, Answer)


def text() -> None:
    """`completions.create`"""
    assert client.completions.create(model=MODEL, prompt="One", max_tokens=4).choices[0].text


def responses() -> None:
    """`responses.create`"""
    assert client.responses.create(model=MODEL, input="Hello", max_output_tokens=16).output_text


def refusal() -> None:
    """A refusal as `BadRequestError`"""
    error = raised(
        openai.BadRequestError,
        lambda: client.chat.completions.create(model=MODEL, messages=HELLO, temperature=-1),
    )
    assert "temperature" in error.message


run(chat, parse, text, responses, refusal)
