"""OpenAI's Responses API, by its own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, get_type_hints

import openai
import pytest
from openai.types.responses import response_create_params

from medha.wire.messages import Failed
from medha_router.openai_requests import ResponsesRequest, is_known
from medha_router.tokenizer_bundle import Bundle

from .conftest import MODEL, TEXT, Router, Script, ScriptedReplica, say

PATH = "/v1/responses"
GOOD = {"model": MODEL, "input": "Hello"}


@pytest.fixture
def client(router: Router) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def rendered(bundle: Bundle, text: str) -> list[int]:
    ids: list[int] = bundle.encode(text, add_special_tokens=False).tolist()
    return ids


def test_a_response_has_the_text_of_a_chat_with_its_instructions(
    client: openai.OpenAI, replica: ScriptedReplica, bundle: Bundle
) -> None:
    answer = client.responses.create(
        model=MODEL,
        instructions="Be brief.",
        input=[
            {"role": "user", "content": "Hello"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hi."}]},  # type: ignore[list-item]
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}],
            },
        ],
        max_output_tokens=500,
        metadata={"who": "me"},
        temperature=0.25,
        store=False,
    )
    wanted = "<|bos|><|system|>Be brief.<|end|><|user|>Hello<|end|><|assistant|>Hi.<|end|><|user|>one\ntwo<|end|><|assistant|>"
    (submit,) = replica.submits
    assert replica.prompts[submit.prompt] == rendered(bundle, wanted)
    assert (submit.sampling.max_tokens, submit.sampling.temperature) == (500, 0.25)
    assert answer.output_text == TEXT
    assert (answer.status, answer.metadata, answer.instructions) == ("incomplete", {"who": "me"}, "Be brief.")
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    assert answer.usage.output_tokens == len(replica.script.tokens)
    assert answer.usage.total_tokens == submit.prompt_length + len(replica.script.tokens)


def test_a_stream_has_openais_events_in_their_order(
    client: openai.OpenAI, replica: ScriptedReplica, bundle: Bundle
) -> None:
    replica.script = Script(tokens=(*say(bundle, TEXT), 1), finish="stop")
    events = list(client.responses.create(model=MODEL, input="Hello", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert deltas > 10
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * deltas,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == TEXT
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == TEXT
    assert last.response.usage is not None
    assert last.response.usage.output_tokens == len(replica.script.tokens)


def test_the_clients_own_stream_helper_collects_the_response(
    client: openai.OpenAI, replica: ScriptedReplica, bundle: Bundle
) -> None:
    replica.script = Script(tokens=(*say(bundle, TEXT), 1), finish="stop")
    with client.responses.stream(model=MODEL, input="Hello") as stream:
        assert stream.get_final_response().output_text == TEXT


def test_an_error_after_the_stream_has_begun_is_an_event(router: Router, replica: ScriptedReplica) -> None:
    replica.script = Script(tokens=replica.script.tokens[:3], hold=True)
    with router.http.stream("POST", PATH, json={**GOOD, "stream": True}) as answer:
        lines = answer.iter_lines()
        while "output_text.delta" not in next(lines):
            pass

        replica.order("send", Failed(replica.submits[-1].id, "not_finite", "as the test says"))
        *_, last = (json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: "))
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert "as the test says" in last["response"]["error"]["message"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "c"}, "conversation"),
    ({"store": True}, "store"),
    ({"background": True}, "background"),
    ({"include": ["message.output_text.logprobs"]}, "include"),
    ({"truncation": "auto"}, "truncation"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0.type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type"),
]


@pytest.mark.parametrize(("change", "param"), REFUSED)
def test_what_a_server_without_state_cannot_do_is_refused_by_name(
    client: openai.OpenAI, change: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**{**GOOD, **change})
    assert (refused.value.param, refused.value.code) == (param, "unsupported_parameter")


def test_encrypted_thoughts_may_be_asked_for_though_there_are_none(client: openai.OpenAI) -> None:
    """Codex CLI and the Vercel AI SDK do so wherever nothing is stored."""
    answer = client.responses.create(**{**GOOD, "store": False, "include": ["reasoning.encrypted_content"]})
    assert answer.status == "incomplete"


@pytest.mark.parametrize("field", ["max_tokens", "n", "prompt_logprobs"])
def test_fields_of_other_endpoints_are_refused_by_name(router: Router, field: str) -> None:
    answer = router.post(PATH, {**GOOD, field: 2})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_every_parameter_of_the_openai_package_is_known_here() -> None:
    names = get_type_hints(response_create_params.ResponseCreateParamsStreaming).keys()
    assert {"input", "text", "reasoning"} <= names
    assert [name for name in names if not is_known(ResponsesRequest, name)] == []


def test_responses_are_not_stored(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="responses are not stored") as refused:
        client.responses.retrieve("resp_1")
    assert refused.value.code == "unsupported_endpoint"
