"""Needle in a haystack over depth and length, through the whole server: one prompt holds 11 passkeys.

The prompt is computed once. Each passkey is asked for by a question behind it, over its cached KV.
"""

from __future__ import annotations

import asyncio
import copy
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import openai.types
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from medha_worker.checkpoints.haystack import Haystack, make_haystack, question
from medha_worker.checkpoints.measured_kv_scales import measure_scales, random_sequences, write_scales
from medha_worker.checkpoints.presets import init_checkpoint

from .conftest import MODEL, Served, free_port, start, stop, write_manifest

pytestmark = pytest.mark.long

BLOCK_TOKENS = 16
KV_BYTES_PER_TOKEN = 1024
ROOM_TOKENS = 32  # for a question and its answer
LANES = 4

SHORT = [4096, 8192, 16_384]
LONG = [32_768, 65_536, 131_072, 262_144]
GRIDS = {"one rank": (1, 1, 2), "SPP2": (2, 1, 1), "KVP4": (1, LANES, 1)}
"""Stages, lanes and threads of a rank."""


@pytest.fixture(scope="module")
def needle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("needle") / "needle"
    init_checkpoint(directory, preset="needle", seed=0)
    return directory


@pytest.fixture(scope="module")
def haystack(needle: Path) -> Callable[[int], Haystack]:
    """Makes a text that fills a context of so many tokens, but for a question and its answer."""
    tokenizer = Tokenizer.from_file(str(needle / "tokenizer.json"))
    return lambda length: make_haystack(tokenizer, length - ROOM_TOKENS, seed=length)


@contextmanager
def serving(
    needle: Path,
    folder: Path,
    length: int,
    *,
    stream: int = 1,
    kv: int = 1,
    threads: int = 1,
    **cache: object,
) -> Iterator[Served]:
    """Serve the model with room for the KV of a text; `cache` are further fields of `kvCache`."""
    port = free_port()
    cache |= {"size": f"{2 * length * KV_BYTES_PER_TOKEN // (stream * kv * 2**20) + 4}Mi"}
    if kv > 1:
        cache["tokensPerLane"] = length // kv
    manifest = write_manifest(
        folder / "needle.yaml",
        needle,
        port,
        model={"name": MODEL, "source": {"path": str(needle)}, "maxModelLen": length},
        parallelism={"stream": stream, "kv": kv},
        kvCache=cache,
        threads=threads,
    )
    served = start(manifest, port, needle)
    try:
        yield served
    finally:
        stop(served)


def ask(served: Served, haystack: Haystack) -> dict[str, str]:
    """The greedy answers to all questions; fails the test if the haystack is computed more than once."""

    async def run() -> list[openai.types.Completion]:
        async with openai.AsyncOpenAI(
            base_url=served.url + "/v1", api_key="none", max_retries=0, timeout=3000
        ) as client:

            async def complete(prompt: str, tokens: int) -> openai.types.Completion:
                return await client.completions.create(
                    model=MODEL, prompt=prompt, max_tokens=tokens, temperature=0
                )

            await complete(haystack.text, 1)
            asked = [complete(haystack.text + question(name), 8) for name in haystack.passkeys]
            return await asyncio.gather(*asked)

    answers, cached = {}, 0
    for name, answer in zip(haystack.passkeys, asyncio.run(run()), strict=True):
        answers[name] = answer.choices[0].text
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        found = answer.usage.prompt_tokens_details.cached_tokens or 0
        assert found > haystack.tokens - BLOCK_TOKENS
        cached += found
    assert served.metric("medha_cached_prompt_tokens_total") >= cached
    return answers


def expected(haystack: Haystack) -> dict[str, str]:
    return {name: f" {passkey}" for name, passkey in haystack.passkeys.items()}


@pytest.fixture(scope="module")
def one_rank(needle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(needle, tmp_path_factory.mktemp("served"), max(SHORT)) as served:
        yield served


def test_every_passkey_is_found(one_rank: Served, haystack: Callable[[int], Haystack]) -> None:
    text = haystack(SHORT[-1])
    assert ask(one_rank, text) == expected(text)


def test_transformers_answers_the_same(
    one_rank: Served, needle: Path, haystack: Callable[[int], Haystack]
) -> None:
    text = haystack(SHORT[0])
    tokenizer = transformers.AutoTokenizer.from_pretrained(needle)
    model = transformers.AutoModelForCausalLM.from_pretrained(needle, dtype=torch.float32)
    with torch.inference_mode():
        computed = model(tokenizer(text.text, return_tensors="pt").input_ids).past_key_values
    answers = {}
    for name in text.passkeys:
        asked = tokenizer(text.text + question(name), return_tensors="pt")
        output = model.generate(
            **asked, past_key_values=copy.deepcopy(computed), max_new_tokens=8, do_sample=False
        )
        answers[name] = tokenizer.decode(output[0, asked.input_ids.shape[1] :], skip_special_tokens=True)
    assert ask(one_rank, text) == answers


def test_a_chat_about_a_long_text_answers_with_the_passkey(
    one_rank: Served, haystack: Callable[[int], Haystack]
) -> None:
    text = haystack(SHORT[0])
    with openai.OpenAI(base_url=one_rank.url + "/v1", api_key="none", max_retries=0) as client:
        for name, passkey in text.passkeys.items():
            asked = f"{text.text} What is the passkey of {name}?"
            answer = client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": asked}], max_tokens=8, temperature=0
            )
            assert answer.choices[0].message.content == f" {passkey}"


@pytest.mark.parametrize("length", [SHORT[-1], 65_536])
def test_passkeys_on_four_lanes_are_found_and_lost_with_the_lane_that_holds_them(
    needle: Path,
    haystack: Callable[[int], Haystack],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    length: int,
) -> None:
    """A rank is made to leave out what another lane's attention has found: the answers prove that it counts."""
    dropped = tmp_path / "dropped"
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "drop_partial"))
    monkeypatch.setenv("TEST_DROPPED_PARTIAL", str(dropped))
    text = haystack(length)
    shard = [position * LANES // length for position in text.positions.values()]
    assert set(shard) == set(range(LANES))

    with serving(needle, tmp_path, length, kv=LANES) as served:
        right = expected(text)
        assert ask(served, text) == right
        assert BLOCK_TOKENS * min(served.blocks_by_lane()) >= length // LANES - ROOM_TOKENS - BLOCK_TOKENS
        lost = []
        for helper in range(1, LANES):
            dropped.write_text(str(helper))
            found = ask(served, text)
            lost.append({part for part, name in zip(shard, right, strict=True) if found[name] != right[name]})
            if lost[-1] != set(range(LANES)):  # but the lane that has the question, too
                assert [n for n in right if found[n] != right[n]] == [
                    n for n, part in zip(right, shard, strict=True) if part in lost[-1]
                ]
        dropped.unlink()
        assert ask(served, text) == right
    # The owner has the first shard, and the last one's lane the question.
    assert lost == [{1}, {2}, set(range(LANES))]


@pytest.mark.parametrize("shape", ["one rank", "SPP2", "KVP4"])
@pytest.mark.parametrize("length", [*SHORT, *LONG])
def test_every_passkey_is_found_in_long_texts(
    needle: Path, haystack: Callable[[int], Haystack], tmp_path: Path, length: int, shape: str
) -> None:
    text = haystack(length)
    stream, kv, threads = GRIDS[shape]
    with serving(needle, tmp_path, length, stream=stream, kv=kv, threads=threads) as served:
        assert ask(served, text) == expected(text)
        if kv > 1:
            assert BLOCK_TOKENS * min(served.blocks_by_lane()) >= length // LANES - ROOM_TOKENS - BLOCK_TOKENS


def right_in_fp8(directory: Path, folder: Path, shape: str) -> list[bool]:
    """Return for each passkey of a text whether a model with KV in FP8 finds it on this grid."""
    length = SHORT[-1]
    text = make_haystack(
        Tokenizer.from_file(str(directory / "tokenizer.json")), length - ROOM_TOKENS, seed=length
    )
    stream, kv, threads = GRIDS[shape]
    with serving(directory, folder, length, stream=stream, kv=kv, threads=threads, dtype="fp8") as served:
        found = ask(served, text)
    return [found[name] == passkey for name, passkey in expected(text).items()]


@pytest.mark.parametrize("shape", GRIDS)
def test_every_passkey_is_found_in_fp8_by_the_preset_for_it(tmp_path: Path, shape: str) -> None:
    directory = tmp_path / "needle-fp8"
    init_checkpoint(directory, preset="needle-fp8", seed=0)
    assert all(right_in_fp8(directory, tmp_path, shape))


@pytest.mark.parametrize("shape", GRIDS)
def test_nearly_every_passkey_is_found_in_fp8_with_measured_scales(
    needle: Path, tmp_path: Path, shape: str
) -> None:
    """Without them the preset finds none."""
    scaled = Path(shutil.copytree(needle, tmp_path / "scaled"))
    write_scales(scaled, measure_scales(scaled, random_sequences(scaled, 4096, 0)))
    assert sum(right_in_fp8(scaled, tmp_path, shape)) >= 10
