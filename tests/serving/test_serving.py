"""Real requests through every room: the `openai` client against `medha up`."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from medha_worker.model.model_config import ModelConfig

from .conftest import MODEL, Served

BLOCK_TOKENS = 16
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "seven",
    "wizards",
    "box",
    "with",
    "liquor",
    "jugs",
]


def text_of(words: int, seed: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def reference_text(served: Served, prompt: str, tokens: int) -> str:
    """Greedy continuation by transformers, in fp32."""
    tokenizer = AutoTokenizer.from_pretrained(served.checkpoint)
    model = AutoModelForCausalLM.from_pretrained(served.checkpoint, dtype=torch.float32)
    encoded = tokenizer(prompt, return_tensors="pt")
    out = model.generate(**encoded, max_new_tokens=tokens, do_sample=False)
    return str(tokenizer.decode(out[0, encoded.input_ids.shape[1] :], skip_special_tokens=True))


def test_a_chat_streams_its_text_its_end_and_its_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Say something."}],
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 24
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    whole = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Say something."}],
        max_tokens=24,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert whole.choices[0].message.content == text
    assert text


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_logprobs_are_those_of_the_sampled_tokens(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=5,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
        extra_body={"ignore_eos": True},
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert len(content) == 5
    for token in content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == token.top_logprobs[0].logprob <= 0  # greedy draws the most probable
        assert token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob


def test_the_log_probabilities_of_a_prompt_are_those_of_transformers_though_it_is_cached(
    served: Served, client: openai.OpenAI
) -> None:
    """`lm-eval` asks like this for the likelihood of a text; such a prompt takes no KV from the cache."""
    prompt = text_of(300, seed=5)
    client.completions.create(model=MODEL, prompt=prompt, max_tokens=1)  # now it is cached
    answer = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=1, temperature=0, echo=True, logprobs=1
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert_reference_logprobs(served, prompt, answer.choices[0])


def assert_reference_logprobs(served: Served, prompt: str, choice: openai.types.CompletionChoice) -> None:
    """Compare the log-probabilities of a prompt's tokens, and the likeliest ones, with transformers."""
    tokenizer = AutoTokenizer.from_pretrained(served.checkpoint)
    model = AutoModelForCausalLM.from_pretrained(served.checkpoint, dtype=torch.float32)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.inference_mode():
        natural = torch.log_softmax(model(ids).logits[0], dim=-1)
    assert choice.text.startswith(prompt)
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    count = ids.shape[1]
    wanted = natural[:-1].gather(1, ids[0, 1:, None]).flatten().tolist()
    assert logprobs.token_logprobs[1:count] == pytest.approx(wanted, abs=1e-4)
    best = [max(top.values()) for top in logprobs.top_logprobs[1:count]]
    assert best == pytest.approx(natural[:-1].max(dim=-1).values.tolist(), abs=1e-4)
    assert len(logprobs.token_logprobs) == count + 1


def test_greedy_text_equals_transformers(served: Served, client: openai.OpenAI) -> None:
    prompt = text_of(60, seed=1)
    answer = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=64, temperature=0, extra_body={"ignore_eos": False}
    )
    assert answer.choices[0].text == reference_text(served, prompt, 64)


def test_sixteen_at_once_give_the_same_text_as_one_by_one(served: Served) -> None:
    prompts = [text_of(words, seed=words) for words in range(4, 900, 56)]
    assert len(prompts) == 16

    async def run() -> tuple[list[str], list[str]]:
        async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:

            async def one(prompt: str) -> str:
                answer = await client.completions.create(
                    model=MODEL, prompt=prompt, max_tokens=32, temperature=0, extra_body={"ignore_eos": True}
                )
                return answer.choices[0].text

            together = await asyncio.gather(*map(one, prompts))  # first, before their prompts are cached
            alone = [await one(prompt) for prompt in prompts]
            return alone, together

    alone, together = asyncio.run(run())
    assert together == alone


def test_prompts_that_begin_as_an_earlier_one_get_the_same_text_from_cached_kv(
    served: Served, client: openai.OpenAI
) -> None:
    """The same prompt, one that goes on, and one that parts from it half-way; each as transformers continues it."""
    words = text_of(300, seed=31).split()
    document = " ".join(words)
    prompts = [
        document,
        document,
        document + " " + text_of(50, seed=32),
        " ".join([*words[:150], "However,", *words[150:]]),
    ]
    cached, lengths = [], []
    for prompt in prompts:
        answer = client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=24, temperature=0, extra_body={"ignore_eos": False}
        )
        assert answer.choices[0].text == reference_text(served, prompt, 24)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
        lengths.append(answer.usage.prompt_tokens)
    size = 16  # tokens of a block
    assert cached[0] == 0
    assert cached[1] == (lengths[0] - 1) // size * size, "all whole blocks; the last token is computed again"
    assert cached[2] in (lengths[0] // size * size, (lengths[0] - 1) // size * size)
    assert 0 < cached[3] < lengths[0] * 0.6
    assert all(tokens % size == 0 for tokens in cached)


def test_prompts_share_kv_under_one_cache_salt_and_never_under_two(
    served: Served, client: openai.OpenAI
) -> None:
    """Also where they run at the same time, and where the beginning of a later prompt is an earlier answer."""
    prompt = text_of(300, seed=33)

    def ask(text: str, salt: str | None) -> tuple[str, int]:
        extra = {"ignore_eos": False} if salt is None else {"ignore_eos": False, "cache_salt": salt}
        answer = client.completions.create(
            model=MODEL, prompt=text, max_tokens=24, temperature=0, extra_body=extra
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.choices[0].text, answer.usage.prompt_tokens_details.cached_tokens or 0

    salts = [None, "a", "b", "é🙂"]
    with ThreadPoolExecutor(len(salts)) as pool:
        together = list(pool.map(lambda salt: ask(prompt, salt), salts))
    assert [cached for _, cached in together] == [0] * len(salts)
    again = [ask(prompt, salt) for salt in salts]
    assert all(cached > 250 for _, cached in again)
    assert {text for text, _ in together + again} == {reference_text(served, prompt, 24)}

    longer = prompt + together[0][0]
    assert ask(longer, "c")[1] == 0
    assert ask(longer, "a")[1] > 250
    served.wait_idle()


def test_a_prefix_shared_by_many_at_once_gives_each_its_own_text(served: Served) -> None:
    document = text_of(400, seed=41)
    prompts = [document + " " + text_of(5 + 7 * index, seed=index) for index in range(8)]

    async def run() -> list[tuple[str, int]]:
        async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:

            async def one(prompt: str) -> tuple[str, int]:
                answer = await client.completions.create(
                    model=MODEL, prompt=prompt, max_tokens=16, temperature=0, extra_body={"ignore_eos": False}
                )
                assert answer.usage is not None
                assert answer.usage.prompt_tokens_details is not None
                return answer.choices[0].text, answer.usage.prompt_tokens_details.cached_tokens or 0

            first = await one(document)
            return [first, *await asyncio.gather(*map(one, prompts))]

    results = asyncio.run(run())
    assert [text for text, _ in results[1:]] == [reference_text(served, prompt, 16) for prompt in prompts]
    assert results[0][1] == 0
    assert all(cached > 1000 for _, cached in results[1:])
    served.wait_idle()


def test_the_next_turn_finds_prompt_and_answer_cached(served: Served, client: openai.OpenAI) -> None:
    tokenizer = AutoTokenizer.from_pretrained(served.checkpoint)
    model = AutoModelForCausalLM.from_pretrained(served.checkpoint, dtype=torch.float32)
    ids = tokenizer(text_of(40, seed=51)).input_ids
    found, expected = [], [0]
    for _ in range(3):
        with torch.inference_mode():
            out = model.generate(torch.tensor([ids]), max_new_tokens=40, do_sample=False)[
                0, len(ids) :
            ].tolist()
        answer = client.completions.create(
            model=MODEL, prompt=ids, max_tokens=40, temperature=0, extra_body={"ignore_eos": False}
        )
        assert answer.choices[0].text == tokenizer.decode(out, skip_special_tokens=True)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        found.append(answer.usage.prompt_tokens_details.cached_tokens)
        computed = len(ids) + len(out) - 1  # the last sampled token has no KV
        expected.append(computed // 16 * 16)
        ids = [*ids, *out, *tokenizer(" and then").input_ids]
    assert found == expected[:-1]


def test_a_seed_gives_the_same_samples_again_and_n_gives_different_ones(client: openai.OpenAI) -> None:
    def draw() -> list[str]:
        answer = client.completions.create(
            model=MODEL,
            prompt=text_of(40, seed=5),
            max_tokens=24,
            n=4,
            seed=1234,
            temperature=1.0,
            extra_body={"ignore_eos": True},
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 4 * 24
        return [choice.text for choice in sorted(answer.choices, key=lambda choice: choice.index)]

    first = draw()
    assert draw() == first
    assert len(set(first)) == 4


def test_prompts_of_one_request_are_sampled_independently_and_a_seed_repeats_them(
    client: openai.OpenAI,
) -> None:
    def draw(prompts: int, n: int, tokens: int, seed: int | None) -> list[str]:
        answer = client.completions.create(
            model=MODEL,
            prompt=[text_of(40, seed=5)] * prompts,
            max_tokens=tokens,
            n=n,
            seed=seed,
            temperature=1.0,
            logprobs=0,
            extra_body={"ignore_eos": True, "top_k": 4},
        )
        choices = sorted(answer.choices, key=lambda choice: choice.index)
        return ["|".join(choice.logprobs.tokens) for choice in choices if choice.logprobs is not None]

    assert len(set(draw(5, 1, 24, seed=None))) == 5
    texts = draw(3, 2, 24, seed=1234)
    assert len(set(texts)) == 6
    assert draw(3, 2, 24, seed=1234) == texts
    assert draw(1, 2, 24, seed=1234) == texts[:2]
    # The first tokens of many prompts are distributed as those of many samples of one prompt.
    by_prompts, by_samples = (Counter(draw(*shape, 1, seed=77)) for shape in ((120, 1), (1, 120)))
    chi_square = 0.0
    for token in by_prompts | by_samples:
        expected = (by_prompts[token] + by_samples[token]) / 2
        chi_square += ((by_prompts[token] - expected) ** 2 + (by_samples[token] - expected) ** 2) / expected
    assert len(by_prompts) > 1
    assert chi_square < 30  # of up to 3 degrees of freedom: less than one in 700,000 where they are alike


def test_a_prompt_beyond_the_models_length_gets_openais_error(served: Served, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="word " * (2**20 + 10), max_tokens=1)
    assert caught.value.code == "context_length_exceeded"
    assert str(2**20) in caught.value.message


@pytest.mark.long
def test_64_chats_that_name_no_max_tokens_run_at_once(served: Served) -> None:
    """Each reserves its class's default output, not the million tokens that the model could write."""
    most = 0

    async def run() -> None:
        nonlocal most
        async with httpx.AsyncClient(base_url=served.url, timeout=120) as http:
            body = {
                "model": MODEL,
                "messages": [{"role": "user", "content": "go on"}],
                "stream": True,
                "temperature": 0,
                "ignore_eos": True,
            }
            started = asyncio.Semaphore(0)
            release = asyncio.Event()

            async def one() -> None:
                async with http.stream("POST", "/v1/chat/completions", json=body) as response:
                    assert response.status_code == 200
                    tokens = 0
                    async for line in response.aiter_lines():
                        tokens += line.startswith("data: {")
                        if tokens == 3:
                            started.release()
                        if release.is_set():
                            return

            tasks = [asyncio.create_task(one()) for _ in range(64)]
            for _ in range(64):
                await asyncio.wait_for(started.acquire(), timeout=100)
            end = time.monotonic() + 10  # what a replica runs is announced twice a second
            while most < 64 and time.monotonic() < end:
                await asyncio.sleep(0.1)
                most = max(most, int(served.metric("medha_replica_sequences_running")))
            release.set()
            await asyncio.gather(*tasks)

    asyncio.run(run())
    assert most == 64
    served.wait_idle()


def test_200_requests_with_cancels_and_disconnects_leave_nothing_behind(
    served: Served, checkpoint: Path
) -> None:
    rng = random.Random(7)

    async def run(count: int) -> None:
        async with httpx.AsyncClient(base_url=served.url, timeout=120) as http:
            limit = asyncio.Semaphore(24)

            async def one(index: int) -> None:
                body = {
                    "model": MODEL,
                    "prompt": text_of(rng.choice([3, 30, 300, 1500]), seed=index),
                    "max_tokens": rng.choice([1, 8, 60]),
                    "stream": rng.random() < 0.7,
                    "n": rng.choice([1, 1, 1, 3]),
                    "ignore_eos": True,
                }
                patience = rng.choice([0.01, 0.1, 0.5, 60])
                async with limit:
                    try:
                        async with asyncio.timeout(patience):
                            if body["stream"]:
                                async with http.stream("POST", "/v1/completions", json=body) as response:
                                    async for _ in response.aiter_lines():
                                        pass
                            else:
                                await http.post("/v1/completions", json=body)
                    except TimeoutError:
                        pass  # the client has gone away: that is the point

            await asyncio.gather(*(one(index) for index in range(count)))

    def held_bytes() -> float:
        """Return what all processes hold, without blocks of KV: they take memory once they are first written."""
        served.wait_idle()
        return served.resident_bytes() - sum(served.blocks_by_lane()) * block_bytes

    model = ModelConfig.from_directory(checkpoint)
    numbers_of_a_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim
    block_bytes = BLOCK_TOKENS * numbers_of_a_token * torch.float32.itemsize
    asyncio.run(run(100))  # warms every buffer
    before = held_bytes()
    asyncio.run(run(200))
    grown = held_bytes() - before
    assert grown < 64 * 2**20, f"{grown / 2**20:.0f} MiB more than before"


def test_stop_strings_end_the_text_before_them(served: Served, client: openai.OpenAI) -> None:
    prompt = text_of(30, seed=11)
    whole = (
        client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=40, temperature=0, extra_body={"ignore_eos": True}
        )
        .choices[0]
        .text
    )
    stop = whole[12:15]
    cut = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=40, temperature=0, stop=[stop], extra_body={"ignore_eos": True}
    ).choices[0]
    assert cut.text == whole[: whole.index(stop)]
    assert cut.finish_reason == "stop"
    served.wait_idle()


NUMBERS = [
    "0", "-0", "-0.0", "1", "-1", "5e-324", "-5e-324", "1e-320", "1e-45", "1e-38", "1e-16", "0.01", "0.010000001", "2", "20",
    "99.99999999999999", "100", "100.00000000000001", "2147483647", "2147483648", "9223372036854775807",
    "-9223372036854775808", "9223372036854775808", "1e308", "1e309", "-1e309", "1e400", "NaN", "Infinity", "-Infinity",
    "1" + "0" * 400, "0." + "0" * 400 + "1", '"1"', "true", "[]", "{}",
]  # fmt: skip
NUMERIC = [
    "temperature", "top_p", "top_k", "min_p", "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
    "max_tokens", "min_tokens", "logprobs", "stop_token_ids", "logit_bias", "length_penalty", "priority",
]  # fmt: skip


@pytest.mark.parametrize("field", NUMERIC)
def test_no_number_in_a_request_breaks_what_serves_it(served: Served, field: str) -> None:
    """Penalties and biases get a prompt and two tokens to work on, at a temperature that draws."""
    statuses = set()
    with httpx.Client(base_url=served.url, timeout=60) as http:
        for number in NUMBERS:
            value = {"stop_token_ids": f"[{number}]", "logit_bias": f'{{"7": {number}}}'}.get(field, number)
            own = "" if field == "max_tokens" else '"max_tokens": 2, '
            # What an unbounded output would take does not matter here.
            own += '"stop": ["e", "a", " "], ' if field == "max_tokens" else ""
            body = (
                f'{{"model": "{MODEL}", "prompt": [5, 6, 7, 7], "ignore_eos": true, {own}"{field}": {value}}}'
            )
            answer = http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
            assert answer.status_code in (200, 400), f"{field}: {number}: {answer.text}"
            assert answer.status_code == 200 or "error" in answer.json()
            statuses.add(answer.status_code)
    assert statuses == {200, 400}
    served.wait_idle()


@pytest.mark.parametrize("header", ["x-slo-ttft-ms", "x-slo-tpot-ms"])
def test_no_target_breaks_what_serves_it(served: Served, header: str) -> None:
    body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 2}
    for number in [
        "1e-300",
        "1e-9",
        "1",
        "1e300",
        "1.7976931348623157e308",
        "1e309",
        "5e-324",
        "nan",
        "-0",
        "1_0",
    ]:
        answer = httpx.post(served.url + "/v1/completions", json=body, headers={header: number}, timeout=60)
        assert answer.status_code in (200, 400), f"{number}: {answer.text}"
    served.wait_idle()


def test_tokenize_and_detokenize_are_inverse(served: Served) -> None:
    text = "The quick brown fox; ünïcödé 🦊"
    ids = httpx.post(served.url + "/tokenize", json={"model": MODEL, "prompt": text}).json()["tokens"]
    back = httpx.post(served.url + "/detokenize", json={"model": MODEL, "tokens": ids}).json()
    assert text in json.dumps(back, ensure_ascii=False)


def test_metrics_name_the_gauges_that_gateways_read(served: Served) -> None:
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        assert served.metric(name) >= 0
