"""Extracts objects with Instructor, in its modes of tools and of JSON Schema."""

from __future__ import annotations

from typing import Literal

import instructor
import openai
from checks import MODEL, run
from pydantic import BaseModel, ConfigDict, Field

HELLO = [{"role": "user", "content": "An order"}]


class Order(BaseModel):
    model_config = ConfigDict(extra="forbid")

    colour: Literal["red", "green"]
    count: int = Field(ge=0, le=99)


def extract(mode: instructor.Mode, **more: object) -> object:
    client = instructor.from_openai(openai.OpenAI(max_retries=0), mode=mode)
    return client.chat.completions.create(
        model=MODEL, messages=HELLO, response_model=Order, max_tokens=300, seed=1, max_retries=0, **more
    )


def json_schema() -> None:
    """`Mode.JSON_SCHEMA`"""
    assert isinstance(extract(instructor.Mode.JSON_SCHEMA), Order)


def tools() -> None:
    """`Mode.TOOLS`, its default, and `Mode.TOOLS_STRICT`"""
    assert isinstance(extract(instructor.Mode.TOOLS), Order)
    assert isinstance(extract(instructor.Mode.TOOLS_STRICT), Order)


def partial() -> None:
    """`create_partial`: a stream of objects that fill up"""
    client = instructor.from_openai(openai.OpenAI(max_retries=0), mode=instructor.Mode.JSON_SCHEMA)
    found = list(
        client.chat.completions.create_partial(
            model=MODEL, messages=HELLO, response_model=Order, max_tokens=300, seed=1
        )
    )
    assert found[-1].colour in ("red", "green")


run(json_schema, tools, partial)
