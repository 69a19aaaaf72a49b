"""Several ranks serve as one does: tensor ranks within a stage, stages in a pipeline, long contexts over lanes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
import yaml

from .conftest import MODEL, Served, free_port, start, stop, write_manifest
from .test_serving import assert_reference_logprobs, reference_text, text_of

EXAMPLE = Path(__file__).parents[2] / "examples" / "grid.yaml"
SHAPES = [
    pytest.param(None, id="TP2 x SPP2 x KVP2, as in examples/grid.yaml", marks=pytest.mark.long),
    pytest.param((2, 2, 2, "ownerCompute"), id="TP2 x SPP2 x KVP2", marks=pytest.mark.long),
    pytest.param((1, 1, 2, "auto"), id="KVP2, context parallel", marks=pytest.mark.long),
    # More tensor ranks than KV heads.
    pytest.param((4, 1, 1, "ownerCompute"), id="TP4", marks=pytest.mark.long),
    pytest.param((1, 2, 1, "ownerCompute"), id="SPP2", marks=pytest.mark.long),
    pytest.param((1, 1, 3, "ownerCompute"), id="KVP3", marks=pytest.mark.long),
    pytest.param((1, 2, 2, "ownerCompute"), id="SPP2 x KVP2"),
    pytest.param((1, 1, 3, "striped"), id="KVP3, striped", marks=pytest.mark.long),
    pytest.param((1, 2, 2, "passQ"), id="SPP2 x KVP2, pass-Q", marks=pytest.mark.long),
    pytest.param((2, 1, 2, "passKv"), id="TP2 x KVP2, pass-KV", marks=pytest.mark.long),
]


@pytest.fixture(scope="module", params=SHAPES)
def grid(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    port, path = free_port(), tmp_path_factory.mktemp("grid") / "grid.yaml"
    running = start(manifest(request.param, path, checkpoint, port), port, checkpoint)
    yield running
    stop(running)


def manifest(shape: tuple[int, int, int, str] | None, path: Path, checkpoint: Path, port: int) -> Path:
    """A grid of this shape, whose lanes take little; or the example's, of which nothing but model path and port changes."""
    if shape is None:
        example = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
        example["spec"]["model"]["source"]["path"] = str(checkpoint)
        example["spec"]["router"] = {"port": port}
        path.write_text(yaml.safe_dump(example), encoding="utf-8")
        return path
    tensor, stream, kv, strategy = shape
    return write_manifest(
        path,
        checkpoint,
        port,
        model={"name": MODEL, "source": {"path": str(checkpoint)}, "maxModelLen": 8192},
        parallelism={"tensor": tensor, "stream": stream, "kv": kv},
        # A prompt takes several chunks and fills the pipeline; the longer ones pass from lane to lane.
        scheduling={"maxChunkTokens": 128, "longThresholdTokens": 400, "prefillStrategy": strategy},
        kvCache={"size": "16Mi", "tokensPerLane": 400},
    )


def complete(url: str, prompts: list[str], **options: object) -> list[str]:
    """The texts of all prompts, asked at once."""

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
            answers = [
                client.completions.create(model=MODEL, prompt=prompt, max_tokens=24, **options)  # type: ignore[call-overload]
                for prompt in prompts
            ]
            return [answer.choices[0].text for answer in await asyncio.gather(*answers)]

    return asyncio.run(run())


PROMPTS = [text_of(words, seed=words) for words in (1, 3, 60, 130, 260, 500, 900, 1200)]


def test_the_text_of_a_grid_is_transformers_text(grid: Served) -> None:
    found = complete(grid.url, PROMPTS, temperature=0)
    assert found == [reference_text(grid, prompt, 24) for prompt in PROMPTS]


def test_the_log_probabilities_of_a_prompt_on_a_grid_are_those_of_transformers(grid: Served) -> None:
    """In several chunks, and on all lanes."""
    prompt = text_of(900, seed=9)
    with openai.OpenAI(base_url=grid.url + "/v1", api_key="none", max_retries=0) as client:
        answer = client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=1, temperature=0, echo=True, logprobs=1
        )
    assert_reference_logprobs(grid, prompt, answer.choices[0])


@pytest.mark.parametrize("grid", SHAPES[:1], indirect=True)
def test_a_prompt_that_passes_one_lanes_share_is_on_both_lanes_of_the_example(grid: Served) -> None:
    prompt, before = text_of(1500, seed=1), grid.blocks_by_lane()
    assert complete(grid.url, [prompt], temperature=0) == [reference_text(grid, prompt, 24)]
    more = [after - here for after, here in zip(grid.blocks_by_lane(), before, strict=True)]
    assert max(more) == 4096 // 16, "tokensPerLane in blocks"
    assert min(more) > 0


@pytest.mark.parametrize("grid", SHAPES[:1], indirect=True)
def test_every_rank_of_the_example_reports_what_it_waits_for(grid: Served) -> None:
    """With ranks TP2 x SPP2 x KVP2, in this order: lane, stage, tensor."""
    complete(grid.url, [text_of(1500, seed=2)], temperature=0)  # on both lanes

    def spent(rank: int, part: str) -> bool:
        return samples.get(("medha_rank_step_seconds", str(rank), part), 0.0) > 0

    def missing(rank: int) -> list[str]:
        owns, is_later = rank < 4, rank // 2 % 2 == 1
        expected = {"forward", "exchange"}
        if owns:  # a lane that helps may have no rows of its own
            expected |= {"all_reduce", "receive", "gather"} if is_later else {"all_reduce", "send"}
        return sorted(part for part in expected if not spent(rank, part))

    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        samples = grid.rank_samples()
        if not any(missing(rank) for rank in range(8)):
            break
        time.sleep(0.2)  # each rank reports for itself
    assert {rank: parts for rank in range(8) if (parts := missing(rank))} == {}
    for rank in range(8):
        is_later = rank // 2 % 2 == 1
        assert is_later or not spent(rank, "gather"), "only the last stage has logits"
        assert samples["medha_rank_estimated_flops", str(rank), ""] > 0
        assert samples["medha_rank_memory_bytes", str(rank), "used"] > 0


def test_a_grid_samples_the_tokens_of_one_rank(grid: Served, served: Served) -> None:
    """Penalties depend on the tokens sampled before, which another rank may have sampled."""
    options = {"temperature": 0.9, "seed": 11, "presence_penalty": 1.0}
    assert complete(grid.url, PROMPTS, **options) == complete(served.url, PROMPTS, **options)


def test_clients_that_go_away_leave_nothing_on_any_rank(grid: Served) -> None:
    async def run() -> None:
        async with httpx.AsyncClient(base_url=grid.url, timeout=60) as http:
            body = {"model": MODEL, "prompt": text_of(600, 1), "max_tokens": 2000, "ignore_eos": True}
            asked = [
                asyncio.create_task(http.post("/v1/completions", json=body | {"seed": i})) for i in range(12)
            ]
            for index, task in enumerate(asked):
                await asyncio.sleep(0.02 * index)
                task.cancel()

    asyncio.run(run())
    grid.wait_idle()
