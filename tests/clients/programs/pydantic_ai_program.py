"""Runs agents of Pydantic AI against a server."""

from __future__ import annotations

from typing import Literal

from checks import MODEL, URL, run
from pydantic import BaseModel, ConfigDict
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

SETTINGS = ModelSettings(max_tokens=200, seed=1)
SETTINGS_FREE = ModelSettings(max_tokens=200, parallel_tool_calls=False)


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")

    final: bool


def chat_model() -> OpenAIChatModel:
    return OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key="none"))


def text() -> None:
    """`run_sync`, then a second turn with the history"""
    agent = Agent(chat_model(), instructions="Be brief.", model_settings=ModelSettings(max_tokens=16))
    first = agent.run_sync("Hello")
    second = agent.run_sync("And then?", message_history=first.all_messages())
    assert first.output
    assert second.output
    assert second.usage.output_tokens <= 16


async def stream() -> None:
    """`run_stream`"""
    agent = Agent(chat_model(), model_settings=ModelSettings(max_tokens=16))
    async with agent.run_stream("Hello") as result:
        assert [chunk async for chunk in result.stream_text(delta=True)]


def structured() -> None:
    """`NativeOutput` with a pydantic class"""
    agent = Agent(chat_model(), output_type=NativeOutput(Answer), model_settings=SETTINGS)
    assert isinstance(agent.run_sync("Hello").output, Answer)


def responses() -> None:
    """`OpenAIResponsesModel`"""
    model = OpenAIResponsesModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key="none"))
    assert Agent(model, model_settings=ModelSettings(max_tokens=16)).run_sync("Hello").output


def agent() -> None:
    """An agent with a tool and a structured answer, its default: its loop runs until the model answers"""
    runner = Agent(chat_model(), output_type=Answer, model_settings=SETTINGS_FREE, retries=3)
    asked: list[str] = []

    @runner.tool_plain
    def stock(colour: Literal["red", "green"]) -> int:
        """Say how many parts of a colour there are."""
        asked.append(colour)
        return len(colour)

    for _ in range(6):
        assert isinstance(runner.run_sync("How many parts?").output, Answer)
    assert set(asked) <= {"red", "green"}
    assert asked, "six random runs never called the tool"


run(text, stream, structured, responses, agent)
