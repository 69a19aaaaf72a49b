"""Calls a server with LlamaIndex's `OpenAILike`."""

from typing import Literal

from checks import MODEL, URL, run
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, ConfigDict


def model(**more: object) -> OpenAILike:
    asked = {"api_base": URL, "api_key": "none", "max_tokens": 16, "max_retries": 0, "context_window": 4096}
    return OpenAILike(model=MODEL, **{**asked, **more})


def text() -> None:
    """`complete`, `stream_complete`"""
    assert model().complete("One").text
    assert list(model().stream_complete("One"))


def chat() -> None:
    """`chat`, `stream_chat`"""
    messages = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Hello")]
    assert model(is_chat_model=True).chat(messages).message.content
    assert list(model(is_chat_model=True).stream_chat(messages))


async def concurrent() -> None:
    """`achat`, `astream_chat`"""
    messages = [ChatMessage(role="user", content="Hello")]
    assert (await model(is_chat_model=True).achat(messages)).message.content
    assert [chunk async for chunk in await model(is_chat_model=True).astream_chat(messages)]


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid")

    colour: Literal["red", "green"]


def stock(colour: Literal["red", "green"]) -> int:
    """Say how many parts of a colour there are."""
    return len(colour)


def tools() -> None:
    """`chat_with_tools(tool_required=True)`, and `predict_and_call`, which runs the tool"""
    caller = model(is_chat_model=True, is_function_calling_model=True, max_tokens=200)
    chosen = [FunctionTool.from_defaults(stock, fn_schema=Part)]
    answer = caller.chat_with_tools(chosen, user_msg="How many?", tool_required=True)
    calls = caller.get_tool_calls_from_response(answer)
    assert {call.tool_name for call in calls} == {"stock"}
    ran = caller.predict_and_call(chosen, user_msg="How many?", tool_required=True)
    assert int(ran.sources[0].raw_output) in (3, 5)


run(text, chat, concurrent, tools)
