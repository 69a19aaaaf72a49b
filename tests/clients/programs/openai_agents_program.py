"""Runs agents of OpenAI's Agents SDK against a server."""

from __future__ import annotations

from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from checks import MODEL, run
from openai import AsyncOpenAI
from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")

    final: bool


def agent(*, chat: bool = True, **more: object) -> Agent:
    # A client of each agent's own: each run has an event loop of its own.
    model = OpenAIChatCompletionsModel(MODEL, openai_client=AsyncOpenAI(max_retries=0)) if chat else MODEL
    settings = ModelSettings(max_tokens=4000)  # the SDK takes an answer that is cut off for an error
    return Agent(
        **{"name": "one", "instructions": "Be brief.", "model": model, "model_settings": settings, **more}
    )


async def chat() -> None:
    """`Runner.run` over chat completions, and a second turn"""
    first = await Runner.run(agent(), "Hello")
    assert first.final_output is not None
    again = await Runner.run(agent(), [*first.to_input_list(), {"role": "user", "content": "And then?"}])
    assert again.final_output is not None


async def structured() -> None:
    """`output_type` with a pydantic class"""
    assert isinstance((await Runner.run(agent(output_type=Answer), "Hello")).final_output, Answer)


async def streamed() -> None:
    """`Runner.run_streamed`"""
    result = Runner.run_streamed(agent(), "Hello")
    assert [event async for event in result.stream_events()]


async def responses() -> None:
    """`Runner.run` over the Responses API, the SDK's default"""
    assert (await Runner.run(agent(chat=False), "Hello")).final_output is not None


@function_tool
def stock(colour: Literal["red", "green"]) -> int:
    """Say how many parts of a colour there are."""
    CALLED.append(colour)
    return len(colour)


CALLED: list[str] = []


async def tools() -> None:
    """A loop with a required tool, over chat completions and over the Responses API, whole and streamed"""
    settings = ModelSettings(max_tokens=4000, tool_choice="required", parallel_tool_calls=False)
    for chat in (True, False):
        one = agent(chat=chat, tools=[stock], model_settings=settings)
        assert (await Runner.run(one, "How many red parts?")).final_output is not None
        assert CALLED
        CALLED.clear()
        result = Runner.run_streamed(one, "How many red parts?")
        assert [event async for event in result.stream_events()]
        assert CALLED
        CALLED.clear()


set_tracing_disabled(True)
run(chat, structured, streamed, responses, tools)
