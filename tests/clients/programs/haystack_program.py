"""Runs Haystack's generators against a server."""

from __future__ import annotations

from typing import Literal

from checks import MODEL, URL, run
from haystack import Pipeline
from haystack.components.agents import Agent
from haystack.components.builders import ChatPromptBuilder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from pydantic import BaseModel


class Answer(BaseModel):
    final: bool


def generator(callback: object = None, *, strict: bool = False, **more: object) -> OpenAIChatGenerator:
    asked = {"max_completion_tokens": 16, **more}
    return OpenAIChatGenerator(
        model=MODEL,
        api_base_url=URL,
        generation_kwargs=asked,
        streaming_callback=callback,
        max_retries=0,
        tools_strict=strict,
    )


def pipeline() -> None:
    """A pipeline of `ChatPromptBuilder` and `OpenAIChatGenerator`"""
    chain = Pipeline()
    chain.add_component("prompt", ChatPromptBuilder(template=[ChatMessage.from_user("About {{ topic }}?")]))
    chain.add_component("model", generator())
    chain.connect("prompt.prompt", "model.messages")
    (reply,) = chain.run({"prompt": {"topic": "cats"}})["model"]["replies"]
    assert reply.text


def stream() -> None:
    """A streaming callback"""
    chunks: list[object] = []
    generator(chunks.append).run([ChatMessage.from_user("Hello")])
    assert chunks


def structured() -> None:
    """`response_format` with a pydantic class"""
    asked = generator(response_format=Answer, max_completion_tokens=200, seed=1)
    (reply,) = asked.run([ChatMessage.from_user("Hello")])["replies"]
    Answer.model_validate_json(reply.text)


def stock(colour: Literal["red", "green"]) -> int:
    """Say how many parts of a colour there are."""
    return len(colour)


def agent() -> None:
    """`Agent` with a tool, which ends when the tool has run"""
    caller = generator(
        strict=True, tool_choice="required", parallel_tool_calls=False, max_completion_tokens=200
    )
    runner = Agent(chat_generator=caller, tools=[create_tool_from_function(stock)], exit_conditions=["stock"])
    found = runner.run(messages=[ChatMessage.from_user("How many red parts?")])
    assert found["messages"][-1].tool_call_result.result in ("3", "5")


run(pipeline, stream, structured, agent)
