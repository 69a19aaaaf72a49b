"""Calls a server with LangChain's `ChatOpenAI` and `OpenAI`."""

from __future__ import annotations

import os
from typing import Literal

from checks import MODEL, run
from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call
from langchain.agents.structured_output import ToolStrategy
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict, Field


class Order(BaseModel):
    """An order."""

    model_config = ConfigDict(extra="forbid")

    colour: Literal["red", "green"] = Field(description="The colour")
    count: int = Field(ge=0, le=99)


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid")

    colour: Literal["red", "green"]


@tool(args_schema=Part)
def stock(colour: Literal["red", "green"]) -> int:
    """Say how many parts of a colour there are."""
    return len(colour)


def model(**more: object) -> ChatOpenAI:
    return ChatOpenAI(**{"model": MODEL, "max_tokens": 24, "max_retries": 0, **more})


def invoke() -> None:
    """`ChatOpenAI.invoke` with system, human and AI messages"""
    answer = model(temperature=0).invoke(
        [SystemMessage("Be brief."), HumanMessage("One"), AIMessage("Two"), HumanMessage("Three")]
    )
    assert answer.content
    assert answer.usage_metadata["output_tokens"] <= 24
    assert answer.response_metadata["finish_reason"] in ("length", "stop")


def stream() -> None:
    """`stream`, `batch`, and a chain of prompt, model and parser"""
    assert "".join(chunk.content for chunk in model(stream_usage=True).stream("Hello"))
    assert len(model().batch(["One", "Two", "Three"])) == 3
    chain = ChatPromptTemplate.from_messages([("user", "{topic}?")]) | model() | StrOutputParser()
    assert isinstance(chain.invoke({"topic": "cats"}), str)


async def concurrent() -> None:
    """`ainvoke`, `astream`, `abatch`"""
    assert (await model().ainvoke("Hello")).content
    assert [chunk async for chunk in model().astream("Hello")]
    assert len(await model().abatch(["One", "Two"])) == 2


def structured() -> None:
    """`with_structured_output` by JSON Schema, strict and not, and by JSON mode"""
    for more in ({}, {"strict": True}, {"include_raw": True}):
        chosen = model(max_tokens=300).with_structured_output(Order, method="json_schema", **more)
        answer = chosen.invoke("An order")
        assert isinstance(answer["parsed"] if "include_raw" in more else answer, Order)
    found = model(max_tokens=300, seed=1).bind(response_format={"type": "json_object"}).invoke("JSON")
    assert found.content.lstrip().startswith("{")


def structured_stream() -> None:
    """`with_structured_output(...).stream`"""
    chunks = list(
        model(max_tokens=300).with_structured_output(Order, method="json_schema").stream("An order")
    )
    assert isinstance(chunks[-1], Order)


def logprobs() -> None:
    """`bind(logprobs=True)`"""
    answer = model().bind(logprobs=True, top_logprobs=2).invoke("Hello")
    assert answer.response_metadata["logprobs"]["content"]


def responses() -> None:
    """`use_responses_api=True`"""
    answer = model(use_responses_api=True, output_version="responses/v1").invoke("Hello")
    assert answer.text


def text() -> None:
    """`OpenAI` for text completions"""
    assert OpenAI(model=MODEL, max_tokens=8, max_retries=0).invoke("One")


def tools() -> None:
    """`bind_tools(tool_choice="any")`, the tool's run, and its `ToolMessage` in the next turn; streamed, too"""
    asked = HumanMessage("How many red parts?")
    bound = model(max_tokens=200, seed=1).bind_tools(
        [stock, Order], tool_choice="any", strict=True, parallel_tool_calls=False
    )
    answer = bound.invoke([asked])
    (call,) = answer.tool_calls
    assert call["name"] in ("stock", "Order")
    whole = sum_of(list(bound.stream([asked])))
    assert [(one["name"], one["args"]) for one in whole.tool_calls] == [(call["name"], call["args"])]
    result = ToolMessage("3", tool_call_id=call["id"])
    assert model().bind_tools([stock, Order], tool_choice="none").invoke([asked, answer, result]).content


def sum_of(chunks: list) -> AIMessage:
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    return whole


def structured_by_tool() -> None:
    """`with_structured_output(method="function_calling")`"""
    chosen = model(max_tokens=300).with_structured_output(Order, method="function_calling", strict=True)
    assert isinstance(chosen.invoke("An order"), Order)


@wrap_model_call
def strictly(request: object, handler: object) -> object:
    """Ask for strict arguments and one call at a time: a random model would go on until it is cut off."""
    return handler(request.override(model_settings={"strict": True, "parallel_tool_calls": False}))


def agent() -> None:
    """`create_agent` with a tool and a structured answer: its loop runs until the model answers"""
    found = create_agent(
        model(max_tokens=300, seed=1), [stock], response_format=ToolStrategy(Order), middleware=[strictly]
    ).invoke({"messages": [HumanMessage("Order what is missing.")]}, {"recursion_limit": 100})
    assert isinstance(found["structured_response"], Order), found["structured_response"]


assert os.environ["OPENAI_API_KEY"]
run(
    invoke,
    stream,
    concurrent,
    structured,
    structured_stream,
    logprobs,
    responses,
    text,
    tools,
    structured_by_tool,
    agent,
)
