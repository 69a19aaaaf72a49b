"""Answers that may be large are bounded, and built beside the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any
from unittest.mock import Mock

import pytest

from medha.wire.messages import Sampling, TokenLogprob
from medha_router.generation import Piece, ShownToken
from medha_router.large_answers import LargeAnswers
from medha_router.openai_responses import Answers
from medha_router.prepare import MOST_LOGPROBS

from .conftest import MODEL, Router, ScriptedReplica


@pytest.mark.parametrize(
    ("sampling", "is_large"),
    [
        (Sampling(), False),
        (Sampling(logprobs=0), True),
        (Sampling(prompt_logprobs=0), True),
    ],
)
def test_answers_with_log_probabilities_are_built_in_threads(sampling: Sampling, is_large: bool) -> None:
    async def thread() -> int:
        return await LargeAnswers().build(Mock(sampling=sampling), threading.get_ident)

    assert (asyncio.run(thread()) != threading.get_ident()) == is_large


def test_few_large_answers_are_built_at_once() -> None:
    now, most = 0, 0

    def make() -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        time.sleep(0.01)
        now -= 1

    async def build_all() -> None:
        answers, plan = LargeAnswers(), Mock(sampling=Sampling(logprobs=0))
        await asyncio.gather(*(answers.build(plan, make) for _ in range(12)))

    asyncio.run(build_all())
    assert most <= 4


def test_of_alternatives_with_one_text_the_sampled_one_counts_or_else_the_most_probable() -> None:
    """The tokens 1, 2 and 4 are parts of characters, which have one text."""
    spelled = {1: b"\xe2", 2: b"\xf0", 3: b"a", 4: b"\xe3"}
    plan = Mock(endpoint="completions", sampling=Sampling(logprobs=3), echo=None, include_usage=False)
    top = ((1, -0.1), (3, -2.5), (2, -6.0))
    tokens = [ShownToken(3, TokenLogprob(-2.5, top), 0), ShownToken(4, TokenLogprob(-9.0, top), 0)]
    (chunk,) = Answers("x", 0, plan, Mock(token_bytes=spelled), {}).chunks(Piece(0, ["a"], tokens))
    found = chunk["choices"][0]["logprobs"]["top_logprobs"]
    assert found == [{"\ufffd": -0.1, "a": -2.5}, {"\ufffd": -9.0, "a": -2.5}]


CHAT = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 20}


@pytest.mark.parametrize(
    ("path", "fields", "said"),
    [
        ("chat/completions", {**CHAT, "n": 128, "max_tokens": 391}, "128 outputs of 391 tokens, with 20 "),
        ("chat/completions", {**CHAT, "n": 128, "max_completion_tokens": 391}, "at most 390 tokens"),
        (
            "completions",
            {"prompt": ["a", "b"], "n": 64, "logprobs": 3, "max_tokens": 3000},
            "`stream` to true",
        ),
    ],
)
def test_more_log_probabilities_than_an_answer_holds_are_refused(
    router: Router, path: str, fields: dict[str, Any], said: str
) -> None:
    answer = router.post(f"/v1/{path}", {"model": MODEL, **fields})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "logprobs"
    assert said in error["message"]
    assert f"at most {MOST_LOGPROBS}, alternatives included" in error["message"]


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({"n": 128, "max_tokens": 390}, 390),
        ({"n": 128}, 390),
        ({"n": 128, "max_tokens": 391, "stream": True}, 391),
        ({"n": 1, "max_tokens": 2000}, 2000),
        ({"n": 1}, None),
    ],
)
def test_an_output_whose_length_is_left_open_ends_where_its_answer_is_full(
    router: Router, replica: ScriptedReplica, fields: dict[str, Any], most: int | None
) -> None:
    assert router.post("/v1/chat/completions", {"model": MODEL, **CHAT, **fields}).status_code == 200
    assert {submit.sampling.max_tokens for submit in replica.submits} == {most}
