"""What OpenAI clients see, over real HTTP."""

import asyncio
import json
import time
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from medha.wire.frames import encode
from medha.wire.messages import BundlePart, Emit, Failed, ServiceClassTerms
from medha_router.tokenizer_bundle import Bundle

from .conftest import MAX_MODEL_LEN, MODEL, TEXT, Router, Script, ScriptedReplica, say, wait_for

HELLO: Any = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def client(router: Router) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0)


def events(response: httpx.Response) -> list[Any]:
    """The data of a whole event stream, checked to end in [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    *parts, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(part.removeprefix("data: ")) for part in parts if not part.startswith(":")]


def test_a_chat_answers_with_text_usage_and_finish_reason(
    client: openai.OpenAI, replica: ScriptedReplica, bundle: Bundle
) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=500)
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].finish_reason == "length"
    assert answer.object == "chat.completion"
    expected = bundle.encode("<|bos|><|user|>Hello<|end|><|assistant|>", add_special_tokens=False).tolist()
    (submit,) = replica.submits
    assert replica.prompts[submit.prompt] == expected
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(expected)
    assert answer.usage.completion_tokens == len(replica.script.tokens)
    assert answer.usage.total_tokens == len(expected) + len(replica.script.tokens)


def test_a_stream_has_role_text_finish_usage_and_done_in_this_order(router: Router) -> None:
    body = {
        "model": MODEL,
        "messages": HELLO,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    first, *middle, finish, last = events(router.post("/v1/chat/completions", body))
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in middle) == TEXT
    assert len(middle) > 10
    assert all("\ufffd" not in chunk["choices"][0]["delta"]["content"] for chunk in middle)
    assert all(chunk["usage"] is None for chunk in (first, *middle, finish))
    assert (finish["choices"][0]["delta"], finish["choices"][0]["finish_reason"]) == ({}, "length")
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] > 10
    assert len({chunk["id"] for chunk in (first, *middle, finish, last)}) == 1


@pytest.mark.parametrize("stream", [True, False])
def test_usage_counts_the_cached_tokens_of_each_prompt_once(
    router: Router, replica: ScriptedReplica, bundle: Bundle, stream: bool
) -> None:
    replica.script = Script(tokens=say(bundle, TEXT), cached_tokens=3)
    body = {"model": MODEL, "prompt": ["one two", "three four"], "n": 2, "max_tokens": 9, "stream": stream}
    if stream:
        answer = router.post("/v1/completions", {**body, "stream_options": {"include_usage": True}})
        usage = events(answer)[-1]["usage"]
    else:
        usage = router.post("/v1/completions", body).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 6}


def test_without_include_usage_no_chunk_speaks_of_usage(router: Router) -> None:
    body = {"model": MODEL, "messages": HELLO, "stream": True}
    assert not any("usage" in chunk for chunk in events(router.post("/v1/chat/completions", body)))


def test_the_async_client_streams_many_at_once(router: Router) -> None:
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key="none") as client:

            async def one() -> str:
                stream = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*(one() for _ in range(16)))

    assert asyncio.run(run()) == [TEXT] * 16


def test_a_stop_token_is_counted_and_not_shown(
    client: openai.OpenAI, replica: ScriptedReplica, bundle: Bundle
) -> None:
    replica.script = Script(tokens=(*say(bundle, "Hi"), 1), finish="stop")
    answer = client.chat.completions.create(model=MODEL, messages=HELLO)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("Hi", "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(replica.script.tokens)


@pytest.mark.parametrize("per_message", [1, 7, 1000])
def test_a_stop_string_ends_the_text_cancels_and_hides_the_overshoot(
    client: openai.OpenAI, replica: ScriptedReplica, bundle: Bundle, per_message: int
) -> None:
    replica.script = Script(tokens=say(bundle, TEXT), per_message=per_message, hold=True)
    stream = client.chat.completions.create(
        model=MODEL, messages=HELLO, stop=["Stop here"], stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == TEXT[: TEXT.index("Stop here")]
    assert chunks[-2].choices[0].finish_reason == "stop"
    # Tokens up to the one that completes the stop string.
    count = next(
        number
        for number in range(len(replica.script.tokens))
        if "Stop here" in bundle.decode(replica.script.tokens[:number])
    )
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == count
    replica.wait(lambda: set(replica.cancels) == {replica.submits[0].id})  # again for each late token


@pytest.mark.parametrize("min_tokens", [1, 4, 9, 11, 14])
@pytest.mark.parametrize("per_message", [1, 1000])
def test_a_stop_string_counts_if_it_ends_after_min_tokens_wherever_it_begins(
    client: openai.OpenAI, replica: ScriptedReplica, bundle: Bundle, min_tokens: int, per_message: int
) -> None:
    text = "0123456789 23456789"  # each character is a token
    replica.script = Script(tokens=say(bundle, text), per_message=per_message)
    assert len(replica.script.tokens) == len(text)
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, stop=["3456"], extra_body={"min_tokens": min_tokens}
    )
    ends = next(end for end in range(min_tokens + 1, len(text) + 1) if text[:end].endswith("3456"))
    assert answer.choices[0].message.content == text[: ends - 4]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == ends


def test_samples_share_one_prompt_and_come_in_order(client: openai.OpenAI, replica: ScriptedReplica) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({submit.prompt for submit in replica.submits}) == 1
    assert [submit.sample_index for submit in replica.submits] == [0, 1, 2]
    assert len({submit.seed for submit in replica.submits}) == 1


def test_all_sequences_of_a_request_have_one_owner_and_other_requests_have_others(
    client: openai.OpenAI, replica: ScriptedReplica
) -> None:
    client.completions.create(model=MODEL, prompt=["one", "two"], n=2)
    client.completions.create(model=MODEL, prompt="three")
    owners = [submit.owner for submit in replica.submits]
    assert owners[0]
    assert owners == [owners[0]] * 4 + [owners[4]]
    assert owners[0] != owners[4]


def test_several_prompts_are_indexed_as_openai_indexes_them(
    client: openai.OpenAI, replica: ScriptedReplica
) -> None:
    answer = client.completions.create(model=MODEL, prompt=["one", "two"], n=2, max_tokens=100)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    prompts = [submit.prompt for submit in replica.submits]
    assert prompts[0] == prompts[1] != prompts[2] == prompts[3]


@pytest.mark.parametrize("prompt", ["Hello", [5, 6, 7], [[5, 6], [7]], ["a", "b"]])
def test_a_prompt_is_text_texts_ids_or_lists_of_ids(
    client: openai.OpenAI, replica: ScriptedReplica, prompt: Any, bundle: Bundle
) -> None:
    client.completions.create(model=MODEL, prompt=prompt)
    ids = [replica.prompts[submit.prompt] for submit in replica.submits]
    if isinstance(prompt, str):
        assert ids == [bundle.encode(prompt, add_special_tokens=True).tolist()]
        assert ids[0][0] == 0, "completions begin with BOS"
    elif isinstance(prompt[0], int):
        assert ids == [prompt]
    elif isinstance(prompt[0], list):
        assert ids == prompt
    else:
        assert len(ids) == 2
    assert all(submit.sampling.max_tokens == 16 for submit in replica.submits)


def test_sampling_fields_reach_the_replica_and_generation_config_fills_the_rest(
    router: Router, replica: ScriptedReplica
) -> None:
    body = {
        "model": MODEL,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
        ],
        "max_completion_tokens": 9,
        "top_p": 0.5,
        "min_p": 0.1,
        "presence_penalty": 0.25,
        "logit_bias": {"5": -3},
        "seed": -4,
        "stop_token_ids": [3],
        "min_tokens": 2,
        "ignore_eos": True,
        "unknown_field": {"is": "ignored"},
    }
    assert router.post("/v1/chat/completions", body).status_code == 200
    sampling = replica.submits[0].sampling
    assert (sampling.max_tokens, sampling.top_p, sampling.min_p, sampling.presence_penalty) == (
        9,
        0.5,
        0.1,
        0.25,
    )
    assert (sampling.logit_bias, sampling.stop_token_ids) == ({5: -3.0}, (3,))
    assert (sampling.min_tokens, sampling.ignore_eos) == (2, True)
    assert (sampling.temperature, sampling.top_k) == (0.6, 20), "as generation_config.json says"
    assert 0 <= replica.submits[0].seed < 2**63


@pytest.mark.parametrize("padding", [0, 300_000], ids=["in a thread", "in a process"])
def test_the_cache_salt_goes_with_the_prompt(router: Router, replica: ScriptedReplica, padding: int) -> None:
    body = {"model": MODEL, "prompt": ["one", "two"], "user": "x" * padding}
    for salt in ({"cache_salt": "mine"}, {"cache_salt": None}, {}):
        assert router.post("/v1/completions", {**body, **salt}).status_code == 200
    assert [replica.salts[submit.prompt] for submit in replica.submits] == ["mine", "mine", "", "", "", ""]


def test_chat_logprobs_have_openais_shape(
    client: openai.OpenAI, replica: ScriptedReplica, bundle: Bundle
) -> None:
    replica.script = Script(tokens=(*say(bundle, "é🙂"), 1), finish="stop", logprobs=True)
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, logprobs=True, top_logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert b"".join(bytes(entry.bytes or []) for entry in logprobs.content) == "é🙂".encode()
    assert [top.logprob for top in logprobs.content[0].top_logprobs] == [-0.5, -1.5, -9999.0]
    assert replica.submits[0].sampling.logprobs == 3


def test_completion_logprobs_have_openais_shape(
    client: openai.OpenAI, replica: ScriptedReplica, bundle: Bundle
) -> None:
    replica.script = Script(tokens=say(bundle, "quick fox"), logprobs=True)
    answer = client.completions.create(model=MODEL, prompt="x", logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens) == "quick fox"
    assert logprobs.text_offset is not None
    assert logprobs.text_offset == [
        len("".join(logprobs.tokens[:position])) for position in range(len(logprobs.tokens))
    ]
    assert logprobs.top_logprobs is not None
    assert all(len(top) == 3 for top in logprobs.top_logprobs), "two alternatives and the sampled token"
    assert logprobs.token_logprobs == [-0.25] * len(logprobs.tokens)


def test_models_are_listed_and_found_by_name(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "medha"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


def test_tokenize_and_detokenize_are_inverse(router: Router) -> None:
    tokens = router.post("/tokenize", {"model": MODEL, "prompt": TEXT, "add_special_tokens": False}).json()
    assert tokens["count"] == len(tokens["tokens"]) > 10
    assert tokens["max_model_len"] == MAX_MODEL_LEN
    back = router.post("/detokenize", {"model": MODEL, "tokens": tokens["tokens"]}).json()
    assert back == {"prompt": TEXT}
    chat = router.post("/tokenize", {"model": MODEL, "messages": HELLO}).json()
    shown = router.post("/detokenize", {"model": MODEL, "tokens": chat["tokens"]}).json()
    assert shown["prompt"] == "<|bos|><|user|>Hello<|end|><|assistant|>"


def test_request_ids_are_echoed_or_made(router: Router) -> None:
    assert router.http.get("/health", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    made = {router.http.get(path).headers["x-request-id"] for path in ("/health", "/ready", "/nowhere")}
    assert len(made) == 3


def test_slo_targets_are_clamped_passed_on_and_returned(router: Router, replica: ScriptedReplica) -> None:
    headers = {"x-slo-ttft-ms": "1500", "x-slo-tpot-ms": "1"}
    answer = router.post("/v1/completions", {"model": MODEL, "prompt": "x"}, headers=headers)
    assert answer.headers["x-medha-service-class"] == "interactive"
    assert answer.headers["x-medha-ttft-target-ms"] == "1500"
    assert answer.headers["x-medha-tpot-target-ms"] == "20"
    submit = replica.submits[0]
    assert (submit.deadline_after_seconds, submit.tpot_target_seconds) == (1.5, 0.02)
    body = {"model": MODEL, "prompt": "x", "service_tier": "batch"}
    assert router.post("/v1/completions", body).headers["x-medha-service-class"] == "batch"
    assert replica.submits[1].service_class == "batch"
    distant = router.post("/v1/completions", body, headers={"x-slo-ttft-ms": "1e12"})
    assert distant.headers["x-medha-ttft-target-ms"] == "86400000"
    assert replica.submits[2].deadline_after_seconds == 86400.0


def test_llm_ds_headers_set_targets_where_ours_are_missing(router: Router, replica: ScriptedReplica) -> None:
    theirs = {"x-llm-d-slo-ttft-ms": "1500", "x-llm-d-slo-tpot-ms": "30"}
    body = {"model": MODEL, "prompt": "x"}
    router.post("/v1/completions", body, headers=theirs)
    router.post("/v1/completions", body, headers={**theirs, "x-slo-ttft-ms": "700"})
    targets = [(one.deadline_after_seconds, one.tpot_target_seconds) for one in replica.submits]
    assert targets == [(1.5, 0.03), (0.7, 0.03)]
    refused = router.post("/v1/completions", body, headers={"x-llm-d-slo-ttft-ms": "soon"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "x-llm-d-slo-ttft-ms")


@pytest.mark.parametrize(
    ("headers", "tier", "used"),
    [
        ({"x-llm-d-inference-objective": "batch"}, None, "batch"),
        ({"x-gateway-inference-objective": "batch"}, None, "batch"),
        (
            {"x-llm-d-inference-objective": "interactive", "x-gateway-inference-objective": "batch"},
            None,
            "interactive",
        ),
        ({"x-llm-d-inference-objective": "batch"}, "interactive", "interactive"),
        ({"x-llm-d-inference-objective": "somebody else's"}, None, "interactive"),
        ({"x-llm-d-inference-fairness-id": "batch"}, None, "interactive"),
    ],
)
def test_a_gateways_objective_names_a_class_unless_the_request_names_one(
    router: Router, replica: ScriptedReplica, headers: dict[str, str], tier: str | None, used: str
) -> None:
    body = {"model": MODEL, "prompt": "x", "service_tier": tier}
    assert router.post("/v1/completions", body, headers=headers).headers["x-medha-service-class"] == used
    assert [one.service_class for one in replica.submits] == [used]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_cancels_its_sequences(
    router: Router, replica: ScriptedReplica, bundle: Bundle, stream: bool
) -> None:
    replica.script = Script(tokens=say(bundle, "Hello"), hold=True)
    body = {"model": MODEL, "messages": HELLO, "n": 2, "stream": stream}
    with httpx.Client(base_url=router.url, timeout=0.7 if not stream else 30) as http:
        if stream:
            with http.stream("POST", "/v1/chat/completions", json=body) as response:
                next(response.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                http.post("/v1/chat/completions", json=body)
    replica.wait(lambda: len(replica.submits) == 2)
    # Each cancel may come again for a late token: those of an earlier test, too.
    replica.wait(lambda: {submit.id for submit in replica.submits} <= set(replica.cancels))


@pytest.mark.parametrize(
    ("reason", "status", "code"),
    [("too_long", 400, "context_length_exceeded"), ("invalid", 400, "invalid_value")],
)
@pytest.mark.parametrize("stream", [True, False])
def test_a_replicas_refusal_becomes_a_status_and_an_error_object(
    router: Router, replica: ScriptedReplica, reason: str, status: int, code: str, stream: bool
) -> None:
    replica.script = Script(refuse=reason)
    answer = router.post("/v1/chat/completions", {"model": MODEL, "messages": HELLO, "stream": stream})
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("chat/completions", {"messages": HELLO}),
        ("completions", {"prompt": "x"}),
        ("responses", {"input": "x"}),
    ],
)
def test_a_replica_that_finds_a_prompt_too_long_blames_the_field_that_has_it(
    router: Router, replica: ScriptedReplica, path: str, prompt: dict[str, Any]
) -> None:
    replica.script = Script(refuse="too_long")
    error = router.post(f"/v1/{path}", {"model": MODEL, **prompt}).json()["error"]
    assert [error["param"]] == list(prompt)


def test_an_error_after_the_stream_began_is_one_event_and_then_done(
    router: Router, replica: ScriptedReplica, bundle: Bundle
) -> None:
    replica.script = Script(tokens=say(bundle, "Hello"), hold=True)
    body = {"model": MODEL, "messages": HELLO, "stream": True}
    with router.http.stream("POST", "/v1/chat/completions", json=body) as response:
        replica.wait(lambda: len(replica.submits) == 1)
        replica.order("send", Failed(replica.submits[0].id, "out_of_memory", "no room"))
        response.read()
    *_, last = events(response)
    assert last["error"]["message"] == "no room"
    assert last["error"]["code"] == "out_of_memory"


def test_a_stream_goes_on_where_it_was_when_the_replica_meets_a_new_epoch(
    router: Router, replica: ScriptedReplica, bundle: Bundle
) -> None:
    replica.script = Script(tokens=say(bundle, "Hello, "), hold=True)
    body = {"model": MODEL, "messages": HELLO, "stream": True, "seed": 11}
    with router.http.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = response.iter_lines()
        while "," not in next(lines):
            pass
        emitted = replica.script.tokens
        replica.script = Script(tokens=(*emitted, *say(bundle, "world")), finish="length")
        replica.order("announce", {"epoch": replica.card.epoch + 1})
        rest = "".join(lines)
    assert "world" in "".join(
        json.loads(part)["choices"][0]["delta"].get("content", "")
        for part in rest.replace("[DONE]", "").split("data: ")
        if part
    )
    first, second = replica.submits
    assert (second.prompt_length, second.tokens) == (first.tokens, first.tokens + len(emitted))
    assert second.seed == first.seed == 11
    assert replica.prompts[second.prompt] == replica.prompts[first.prompt] + list(emitted)


def test_metrics_have_our_names_and_those_of_vllm(router: Router) -> None:
    assert router.post("/v1/completions", {"model": MODEL, "prompt": "x"}).status_code == 200
    assert router.metric("medha_requests_total{") >= 1
    assert router.metric("medha_request_ttft_seconds_count{") >= 1
    assert router.metric("medha_request_ttft_attainment_total{") >= 1
    assert router.metric('vllm:num_requests_waiting{engine="r0",model_name="tiny"}') == 2
    assert router.metric('vllm:num_requests_running{engine="r0",model_name="tiny"}') == 1
    assert router.metric('vllm:kv_cache_usage_perc{engine="r0",model_name="tiny"}') == 0.25
    assert router.metric("vllm:time_to_first_token_seconds_count{") >= 1
    assert router.metric('vllm:request_success_total{engine="router",finished_reason="length"') >= 1


@pytest.mark.parametrize("choices", [{"prompt": ["x", "y"]}, {"prompt": "x", "n": 2}])
def test_the_time_per_output_token_is_that_of_each_sequence(
    router: Router, replica: ScriptedReplica, bundle: Bundle, choices: dict[str, Any]
) -> None:
    """The replica sends one token at a time, so the time from a sequence's first to its last token is the sum of its gaps."""
    replica.script = Script(tokens=say(bundle, "Hello there"))
    tpot, gap = "medha_request_tpot_seconds", "medha_inter_token_seconds"
    names = (
        f"{tpot}_count",
        f"{tpot}_sum",
        f"{gap}_count",
        f"{gap}_sum",
        "medha_request_tpot_attainment_total",
    )
    names += ("vllm:request_time_per_output_token_seconds_count",)
    before = [router.metric(name) for name in names]
    assert router.post("/v1/completions", {"model": MODEL, "temperature": 1, **choices}).status_code == 200
    after = [router.metric(name) for name in names]
    count, seconds, gaps, gap_seconds, judged, count_of_alias = np.subtract(after, before)
    gaps_each = len(replica.script.tokens) - 1
    assert (count, count_of_alias, gaps) == (2, 2, 2 * gaps_each)
    assert seconds * gaps_each == pytest.approx(gap_seconds)
    assert judged == 1, "objectives count requests"


@pytest.mark.parametrize("slow_ends_first", [True, False])
def test_a_request_misses_its_tpot_target_if_one_of_its_sequences_does(
    router: Router, replica: ScriptedReplica, bundle: Bundle, slow_ends_first: bool
) -> None:
    first, second = say(bundle, "dog jumps")[:2]
    replica.script = Script(tokens=(first,), hold=True)
    name = 'medha_request_tpot_attainment_total{met="%s"'
    before = [router.metric(name % met) for met in ("true", "false")]
    body = {"model": MODEL, "prompt": ["x", "y"], "stream": True}
    with router.http.stream("POST", "/v1/completions", json=body) as response:
        lines = (line for line in response.iter_lines() if line.startswith("data: {"))
        choices = (json.loads(line.removeprefix("data: "))["choices"][0] for line in lines)
        assert {next(choices)["index"], next(choices)["index"]} == {0, 1}
        time.sleep(0.06)  # the class has a target of 0.05
        slow, fast = (submit.id for submit in replica.submits)
        # The rest of its tokens comes in one message, so this sequence is fast on any machine.
        ends = [Emit(slow, (second,), "length"), Emit(fast, (second,) * 1000, "length")]
        for end in ends if slow_ends_first else reversed(ends):
            replica.order("send", end)
        assert {choice["index"] for choice in choices} == {0, 1}
    assert [router.metric(name % met) for met in ("true", "false")] == [before[0], before[1] + 1]


def test_first_tokens_are_held_against_what_the_class_gives_so_long_a_prompt(
    router: Router, replica: ScriptedReplica
) -> None:
    """The floor of this class is over at once; its factor times the announced prefill time is an hour and more."""
    before = replica.card
    tight = ServiceClassTerms("tight", 1e-9, 3.0, 0.05, 0.02, 4096)
    classes = (*before.service_classes, tight)
    body = {"model": MODEL, "prompt": "x", "service_tier": "tight"}
    met = 'medha_request_ttft_attainment_total{met="%s",model="tiny",prompt_tokens="le_128",service_class="tight"}'
    try:
        replica.order("announce", {"service_classes": classes, "prefill_points": ((1, 2000.0),)})
        wait_for(lambda: router.post("/v1/completions", body).status_code == 200, "it is not announced")
    finally:
        replica.order("announce", {"service_classes": before.service_classes, "prefill_points": ()})
    assert (router.metric(met % "true"), router.metric(met % "false")) == (1, 0)
    wait_for(lambda: router.post("/v1/completions", body).status_code == 400, "the old card is not back")


def test_malformed_messages_are_counted_and_change_nothing(router: Router, replica: ScriptedReplica) -> None:
    before = router.metric("medha_router_dropped_messages_total")
    traversal = [bytes(frame) for frame in encode(BundlePart("d", "../../etc/passwd", 0), b"x")]
    for frames in (
        traversal,
        [b"not json"],
        [b'{"v":9,"type":"Emit","body":{}}'],
        [b'{"v":1,"type":"Step","body":{}}'],
    ):
        replica.order("raw", frames)
    answer = router.post("/v1/completions", {"model": MODEL, "prompt": "x"})
    assert answer.status_code == 200
    assert router.metric("medha_router_dropped_messages_total") == before + 4
