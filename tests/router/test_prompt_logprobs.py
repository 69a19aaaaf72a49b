"""Prompts that come back with their output, and the log-probabilities of their tokens, over real HTTP."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest

from medha_router.prepare import MOST_PROMPT_LOGPROBS
from medha_router.tokenizer_bundle import Bundle

from .conftest import MODEL, Router, Script, ScriptedReplica, say

PROMPT = "quick Café"


@pytest.fixture
def client(router: Router) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def replica(replica: ScriptedReplica, bundle: Bundle) -> ScriptedReplica:
    replica.script = Script(tokens=say(bundle, " fox"), logprobs=True)
    return replica


def texts(bundle: Bundle, ids: list[int]) -> list[str]:
    return [bundle.token_bytes[token].decode("utf-8", "replace") for token in ids]


def test_an_echo_has_the_prompt_before_the_output_and_its_log_probabilities_before_theirs(
    client: openai.OpenAI, replica: ScriptedReplica, bundle: Bundle
) -> None:
    """The lists are OpenAI's: the first token of the prompt has no log-probability, and offsets count from the prompt's start."""
    answer = client.completions.create(model=MODEL, prompt=PROMPT, echo=True, logprobs=2, max_tokens=9)
    (choice,) = answer.choices
    assert choice.text == f"{PROMPT} fox"
    (submit,) = replica.submits
    assert submit.sampling.prompt_logprobs == 2
    ids = replica.prompts[submit.prompt]
    outputs = list(replica.script.tokens)
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens == texts(bundle, [*ids, *outputs])
    scores = [None, *(-float(place) for place in range(1, len(ids)))]
    assert logprobs.token_logprobs == [*scores, *(-0.25 for _ in outputs)]
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0] is None
    assert logprobs.top_logprobs[1] == {
        bundle.token_bytes[7].decode(): -0.25,
        bundle.token_bytes[8].decode(): -0.5,
        texts(bundle, ids)[1]: -1.0,
    }
    assert logprobs.text_offset is not None
    assert logprobs.text_offset[:2] == [0, 0]  # the first token is <|bos|>, which is not shown
    assert logprobs.text_offset[len(ids)] == len(PROMPT)


@pytest.mark.parametrize("prompts", [PROMPT, [PROMPT, "dog"]])
def test_a_stream_of_samples_echoes_each_of_them(
    router: Router, replica: ScriptedReplica, prompts: Any
) -> None:
    body = {"model": MODEL, "prompt": prompts, "echo": True, "logprobs": 0, "n": 2, "max_tokens": 9}
    whole = router.post("/v1/completions", body).json()["choices"]
    shown: dict[int, str] = {}
    counted: dict[int, int] = {}
    for line in router.post("/v1/completions", {**body, "stream": True}).text.split("\n\n"):
        if line.startswith("data: {"):
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            shown[choice["index"]] = shown.get(choice["index"], "") + choice["text"]
            counted[choice["index"]] = counted.get(choice["index"], 0) + len(choice["logprobs"]["tokens"])
    assert shown == {choice["index"]: choice["text"] for choice in whole}
    assert counted == {choice["index"]: len(choice["logprobs"]["tokens"]) for choice in whole}


def test_the_samples_of_a_prompt_share_the_log_probabilities_that_the_first_one_asks_for(
    client: openai.OpenAI, replica: ScriptedReplica
) -> None:
    """Only that one computes the whole prompt, under a name of its own, so that it shares no KV."""
    answer = client.completions.create(model=MODEL, prompt=PROMPT, echo=True, logprobs=1, n=3, max_tokens=9)
    first, *others = (choice.logprobs for choice in answer.choices)
    assert all(other == first for other in others)
    asking, *rest = sorted(replica.submits, key=lambda submit: submit.sample_index)
    assert [one.sampling.prompt_logprobs for one in (asking, *rest)] == [1, None, None]
    assert asking.prompt not in {one.prompt for one in rest}


def test_token_ids_are_echoed_as_text_without_special_tokens(client: openai.OpenAI, bundle: Bundle) -> None:
    ids = [0, *say(bundle, PROMPT)]
    answer = client.completions.create(model=MODEL, prompt=ids, echo=True, max_tokens=9)
    assert answer.choices[0].text == f"{PROMPT} fox"
    assert answer.choices[0].logprobs is None


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_max_tokens_0_shows_and_counts_no_output(
    client: openai.OpenAI, replica: ScriptedReplica, finish: str
) -> None:
    replica.script = Script(tokens=(1,), finish=finish, logprobs=True)
    answer = client.completions.create(model=MODEL, prompt=PROMPT, echo=True, logprobs=1, max_tokens=0)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (PROMPT, "length")
    assert choice.logprobs is not None
    (submit,) = replica.submits
    assert len(choice.logprobs.tokens or []) == submit.prompt_length
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


def test_beside_an_echo_the_stop_token_has_a_log_probability_too(
    client: openai.OpenAI, replica: ScriptedReplica
) -> None:
    """lm-eval asks for one token, and counts those of the prompt from the end."""
    replica.script = Script(tokens=(1,), finish="stop", logprobs=True)
    answer = client.completions.create(model=MODEL, prompt=PROMPT, echo=True, logprobs=1, max_tokens=1)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (PROMPT, "stop")
    assert choice.logprobs is not None
    assert len(choice.logprobs.tokens or []) == replica.submits[0].prompt_length + 1


def test_prompt_logprobs_have_vllms_form_in_both_apis(
    router: Router, replica: ScriptedReplica, bundle: Bundle
) -> None:
    completion = router.post(
        "/v1/completions", {"model": MODEL, "prompt": PROMPT, "prompt_logprobs": 1}
    ).json()
    messages = [{"role": "user", "content": "Hi"}]
    chat = router.post(
        "/v1/chat/completions", {"model": MODEL, "messages": messages, "prompt_logprobs": 0}
    ).json()
    first, second = replica.submits
    found = completion["choices"][0]["prompt_logprobs"]
    assert len(found) == first.prompt_length
    assert found[0] is None
    own = replica.prompts[first.prompt][2]
    assert found[2] == {
        str(own): {"logprob": -2.0, "rank": 3, "decoded_token": bundle.token_bytes[own].decode()},
        "7": {"logprob": -0.25, "rank": 1, "decoded_token": bundle.token_bytes[7].decode()},
    }
    assert [len(one or ()) for one in chat["prompt_logprobs"]] == [0] + [1] * (second.prompt_length - 1)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"prompt_logprobs": 1, "stream": True},
            "`prompt_logprobs` is 1, and a stream has no place for them",
        ),
        ({"prompt_logprobs": 21}, "`prompt_logprobs` is 21; it must be less than or equal to 20"),
        (
            {"prompt": [[7] * 2000] * 2, "prompt_logprobs": 1, "n": 17},
            f"`prompt_logprobs` asks for {4000 * 17 * 2} log-probabilities",
        ),
        (
            {"prompt": [7] * 2000, "echo": True, "logprobs": 1, "n": 33, "stream": True},
            f"`echo` asks for {2000 * 33 * 2} log-probabilities",
        ),
        (
            {"prompt": [[7] * 2000] * 4, "echo": True, "logprobs": 20},
            f"`echo` asks for {8000 * 21} log-probabilities of prompt tokens .* at most {MOST_PROMPT_LOGPROBS}",
        ),
    ],
)
def test_what_no_answer_can_hold_is_refused(router: Router, fields: dict[str, Any], said: str) -> None:
    answer = router.post("/v1/completions", {"model": MODEL, "prompt": PROMPT, **fields})
    assert answer.status_code == 400
    openai_error = answer.json()["error"]
    assert openai_error["param"] in fields
    assert re.search(said, openai_error["message"])


def test_a_replica_of_an_earlier_release_makes_an_error_and_no_wrong_answer(
    router: Router, replica: ScriptedReplica, bundle: Bundle
) -> None:
    replica.script = Script(tokens=say(bundle, "x"), is_earlier_release=True)
    answer = router.post("/v1/completions", {"model": MODEL, "prompt": PROMPT, "prompt_logprobs": 0})
    assert answer.status_code == 500
    assert "may be of an earlier release" in answer.json()["error"]["message"]
