"""A small gpt-oss with random weights calls functions through every room: `medha up` and OpenAI's own client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from medha_worker.checkpoints.presets import init_checkpoint

from .conftest import MODEL, Served, free_port, start, stop, write_manifest
from .test_tools import ASKED, CLASSES, TOOLS

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("gpt-oss")
    init_checkpoint(folder / "model", preset="tiny", seed=0, architecture="gpt_oss", quantisation="mxfp4")
    port = free_port()
    running = start(write_manifest(folder / "tiny.yaml", folder / "model", port), port, folder / "model")
    yield running
    stop(running)


def test_an_agents_loop_of_required_calls_parses_and_an_answer_follows_its_schema(gpt_oss: Served) -> None:
    messages: list[Any] = list(ASKED)
    with openai.OpenAI(base_url=f"{gpt_oss.url}/v1", api_key="none", max_retries=0) as client:
        for choice in ("required", {"type": "function", "function": {"name": "Order"}}):
            asked: dict[str, Any] = {"model": MODEL, "messages": messages, "tools": TOOLS, "max_tokens": 1000}
            parsed = client.chat.completions.parse(**asked, tool_choice=choice, seed=len(messages))
            (one,) = parsed.choices
            assert one.finish_reason == "tool_calls"
            (call,) = one.message.tool_calls or ()
            assert isinstance(call.function.parsed_arguments, CLASSES[call.function.name])
            messages.append(one.message.model_dump(exclude_none=True, exclude={"parsed", "refusal"}))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "done <|call|>"})
        answer = client.chat.completions.parse(
            model=MODEL, messages=messages, response_format=CLASSES["Lookup"], seed=1, max_tokens=1000
        )
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(answer.choices[0].message.parsed, CLASSES["Lookup"])
