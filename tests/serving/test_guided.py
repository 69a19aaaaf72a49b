"""Structured output through every room: the `openai` client against `medha up`, with a model whose text is random."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from medha.scheduler.grammars import grammar_name

from .conftest import MODEL, Served, free_port, start, stop, write_manifest

SEEDS = range(6)


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid")

    colour: Literal["red", "green"]
    count: int = Field(ge=0, le=99)


class Order(BaseModel):
    model_config = ConfigDict(extra="forbid")

    express: bool
    code: str = Field(pattern="^[A-Z]{2}[0-9]{2}$")
    parts: list[Part] = Field(min_length=1, max_length=2)


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(
        **{
            "model": MODEL,
            "messages": [{"role": "user", "content": "An order"}],
            "max_tokens": 300,
            "seed": 1,
            **more,
        }
    )


def schema_format() -> dict[str, Any]:
    schema = Order.model_json_schema()
    return {"type": "json_schema", "json_schema": {"name": "order", "schema": schema, "strict": True}}


@pytest.mark.parametrize("seed", SEEDS)
def test_the_client_parses_what_a_model_class_asked_for(client: openai.OpenAI, seed: int) -> None:
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": "An order"}],
        response_format=Order,
        max_tokens=300,
        seed=seed,
        temperature=1.0,
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Order)


def test_streams_samples_and_logprobs_are_those_of_one_guided_text(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "n": 3, "response_format": schema_format(), "logprobs": True, "top_logprobs": 1,
        "presence_penalty": 0.5, "temperature": 0.8,
    }  # fmt: skip
    whole = chat(client, **asked)
    texts = [choice.message.content for choice in whole.choices]
    assert len(set(texts)) == 3
    for choice, text in zip(whole.choices, texts, strict=True):
        jsonschema.validate(json.loads(text), Order.model_json_schema())
        assert "".join(one.token for one in choice.logprobs.content) == text
    streamed = ["", "", ""]
    for event in chat(client, **asked, stream=True):
        for choice in event.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": "(ab|cd){2,4}!"}}, "(ab|cd){2,4}!"),
        ({"guided_choice": ["left", "right"]}, "left|right"),
        ({"ebnf": 'root ::= "x=" [0-9] ("," [0-9])? ";"'}, "x=[0-9](,[0-9])?;"),
        ({"guided_regex": "[a-c]{3}-[0-9]{2}", "stop": ["-"]}, "[a-c]{3}"),
    ],
    ids=str,
)
def test_other_grammars_hold_up_to_a_stop_string(
    client: openai.OpenAI, fields: dict[str, Any], pattern: str
) -> None:
    stop = fields.pop("stop", None)
    answer = client.completions.create(
        model=MODEL, prompt="Go", max_tokens=60, seed=3, stop=stop, extra_body=fields
    )
    (choice,) = answer.choices
    assert re.fullmatch(pattern, choice.text)
    assert choice.finish_reason == "stop"


def test_a_text_beside_guided_ones_is_the_one_that_it_is_alone(client: openai.OpenAI) -> None:
    plain = {"max_tokens": 60, "seed": 9}
    alone = chat(client, **plain).choices[0].message.content
    guided = chat(client, response_format={"type": "json_object"}, stream=True, seed=4)
    assert chat(client, **plain).choices[0].message.content == alone
    guided.close()


def test_a_schema_that_cannot_be_followed_is_refused_with_the_reason(client: openai.OpenAI) -> None:
    schema = {"name": "a", "schema": {"type": "array", "items": {"not": {"type": "null"}}}}
    with pytest.raises(openai.BadRequestError, match="Unimplemented keys") as refused:
        chat(client, response_format={"type": "json_schema", "json_schema": schema})
    assert refused.value.param == "response_format.json_schema.schema"


# --- grammars that take long to compile -------------------------------------------------------------------

SLOW = [{"type": "integer", "multipleOf": number} for number in (30011, 30013, 30029, 30047, 30059)]
"""Each takes hundreds of times as long to compile as a step takes."""


@pytest.fixture
def recorded(checkpoint: Path, tmp_path: Path) -> Iterator[tuple[Served, Path]]:
    """A server of its own, and the file that it records to."""
    port, record = free_port(), tmp_path / "record.jsonl"
    manifest = write_manifest(
        tmp_path / "tiny.yaml",
        checkpoint,
        port,
        model={"name": MODEL, "source": {"path": str(checkpoint)}, "maxModelLen": 8192},
        kvCache={"size": "16Mi"},
    )
    running = start(manifest, port, checkpoint, "--record", str(record))
    yield running, record
    stop(running)


def samples_while_compiling(record: Path) -> int:
    """Return the number of tokens sampled between the arrival of a request with a new grammar and its compilation."""
    found, asked, ready = 0, set[str](), set[str]()
    for line in record.read_text().splitlines()[2:]:
        event = json.loads(line)["event"]
        body = event.get("body", {})
        match event["type"]:
            case "Submit" if grammar := body["sampling"].get("grammar"):
                asked.add(grammar_name(grammar))
            case "GrammarReady":
                ready.add(body["name"])
            case "Done" if asked - ready:
                found += len(body.get("samples", ()))
    assert len(asked) == len(SLOW)
    return found


@pytest.mark.long
def test_streams_go_on_while_grammars_are_compiled_and_clients_of_such_come_and_go(
    recorded: tuple[Served, Path],
) -> None:
    served, record = recorded
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(
            model=MODEL, prompt="Go", max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)

        def ask(schema: dict[str, Any]) -> None:
            answer = client.completions.create(
                model=MODEL, prompt="Go", max_tokens=100, extra_body={"guided_json": schema}
            )
            (choice,) = answer.choices
            number = int(choice.text)
            assert choice.finish_reason == "length" or number % schema["multipleOf"] == 0

        with ThreadPoolExecutor(len(SLOW)) as pool:
            asked = [pool.submit(ask, schema) for schema in SLOW[1:]]
            leaves = client.completions.create(
                model=MODEL, prompt="Go", stream=True, extra_body={"guided_json": SLOW[0]}
            )
            leaves.close()
            for one in asked:
                one.result()
        ask(SLOW[1])
        stream.close()
    served.wait_idle()
    assert samples_while_compiling(record) > 10
    replayed = subprocess.run([sys.executable, "-m", "medha_cli.main", "replay", str(record)], check=False)
    assert replayed.returncode == 0
