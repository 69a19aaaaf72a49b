"""A rank that is killed, a prompt that comes again, and 200 cancels, with each form in which KV and weights are held."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from medha_worker.checkpoints.presets import init_checkpoint

from .conftest import MODEL, Served, free_port, start, stop, write_manifest
from .test_failures import BODY, processes, streamed

pytestmark = pytest.mark.long

BLOCK_TOKENS, WINDOW_TOKENS = 16, 64
LONG_PROMPT = [12 + position * position % 91 for position in range(350)]
"""Several windows, chunks and shares of a lane."""
CANCELS = 200
UNUSED = {"free", "cached"}
"""States of blocks that no sequence has."""


@dataclass(frozen=True)
class Layout:
    """A small checkpoint and what a manifest says of it.

    Attributes:
        checkpoint: arguments of `init_checkpoint`.
        ranks: dimensions of the grid that are not 1.
        spec: further fields.
        kv_dtype: of `kvCache`.
        pools: metrics that count the blocks of its pools.
    """

    checkpoint: dict[str, object]
    ranks: dict[str, int]
    spec: dict[str, object] = field(default_factory=dict)
    kv_dtype: str = "auto"
    pools: tuple[str, ...] = ("medha_kv_blocks",)


WINDOWS = ("medha_kv_blocks", "medha_kv_window_blocks")
EQUAL_NUMBERS = {"determinism": "batchInvariant"}
"""Settings of layouts that round activations or KV: sums in one order, because a resumed text would differ after a number that
lies between two rounded ones."""
ONE, LANES, TENSOR, STAGES = {}, {"kv": 2}, {"tensor": 2}, {"stream": 2}


def windowed(architecture: str, **more: object) -> dict[str, object]:
    return {"architecture": architecture, "window_tokens": WINDOW_TOKENS, **more}


LAYOUTS = {
    "windows of gemma3": Layout(windowed("gemma3_text"), ONE, pools=WINDOWS),
    "windows of gemma3 on lanes": Layout(windowed("gemma3_text"), LANES, pools=WINDOWS),
    "windows of gpt_oss in MXFP4": Layout(windowed("gpt_oss", quantisation="mxfp4"), ONE, pools=WINDOWS),
    "windows of gpt_oss on lanes": Layout(windowed("gpt_oss"), LANES, pools=WINDOWS),
    "windows of mistral": Layout(windowed("mistral"), ONE, pools=WINDOWS),
    "windows of mistral on stages": Layout(windowed("mistral"), STAGES, pools=WINDOWS),
    "latents of deepseek_v2": Layout({"architecture": "deepseek_v2"}, ONE),
    "latents of deepseek_v2 on lanes": Layout({"architecture": "deepseek_v2"}, LANES),
    "latents of deepseek_v3 in FP8 blocks": Layout(
        {"architecture": "deepseek_v3", "quantisation": "fp8-block"}, ONE, EQUAL_NUMBERS
    ),
    "latents of deepseek_v3 on tensor ranks": Layout({"architecture": "deepseek_v3"}, TENSOR),
    "FP8 KV": Layout({"quantisation": "fp8-kv"}, ONE, EQUAL_NUMBERS, "fp8"),
    "FP8 KV on tensor ranks": Layout({"architecture": "qwen3"}, TENSOR, EQUAL_NUMBERS, "fp8"),
    "FP8 KV of latents": Layout({"architecture": "deepseek_v2"}, STAGES, EQUAL_NUMBERS, "fp8"),
    "INT4 weights": Layout({"architecture": "qwen2", "quantisation": "w4a16"}, ONE),
    "INT4 weights on tensor ranks": Layout({"architecture": "qwen2", "quantisation": "w4a16"}, TENSOR),
    "experts in AWQ": Layout({"architecture": "qwen3_moe", "quantisation": "awq"}, ONE),
    "experts on tensor ranks": Layout({"architecture": "mixtral"}, TENSOR),
}


@dataclass
class Replica:
    """A `medha up` and its layout."""

    served: Served
    layout: Layout

    def blocks(self) -> dict[tuple[str, str, str], int]:
        """Return the blocks of each pool by metric, lane and state."""
        families = {one.name: one for one in text_string_to_metric_families(self.served.controller_page())}
        return {
            (pool, sample.labels["lane"], sample.labels["state"]): int(sample.value)
            for pool in self.layout.pools
            for sample in families[pool].samples
        }

    def totals(self) -> dict[tuple[str, str, str], int]:
        """Return the blocks that no sequence has in each pool, and those that one has, by state."""
        found: dict[tuple[str, str, str], int] = {}
        for (pool, lane, state), blocks in self.blocks().items():
            key = (pool, lane, "unused" if state in UNUSED else state)
            found[key] = found.get(key, 0) + blocks
        return found

    def complete(self, prompt: list[int]) -> tuple[str, int]:
        """Return the text behind a prompt and how many tokens of it were cached."""
        body = BODY | {"prompt": prompt, "max_tokens": 24, "stream": False}
        answer = (
            httpx.post(self.served.url + "/v1/completions", json=body, timeout=60).raise_for_status().json()
        )
        details = answer["usage"].get("prompt_tokens_details") or {}
        return answer["choices"][0]["text"], details.get("cached_tokens", 0)

    def num_ended(self) -> Counter[str]:
        """Return the requests for the model that ended, by outcome."""
        ended: Counter[str] = Counter()
        for outcome, requests in re.findall(
            rf'^medha_requests_total{{.*model="{MODEL}",outcome="(\w+)"}} (\S+)$',
            self.served.router_metrics(),
            re.MULTILINE,
        ):
            ended[outcome] += int(float(requests))
        return ended

    def looked_up(self) -> tuple[float, float]:
        """Return how many tokens were looked up in the prefix cache, and found."""
        page = self.served.controller_page()
        queried, hit = (
            float(re.findall(rf"^medha_prefix_cache_{what}_tokens_total (\S+)$", page, re.MULTILINE)[0])
            for what in ("queried", "hit")
        )
        return queried, hit


@pytest.fixture(scope="module", params=LAYOUTS)
def replica(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    layout = LAYOUTS[request.param]
    folder = tmp_path_factory.mktemp("layout")
    init_checkpoint(folder / "model", preset="tiny", seed=0, **layout.checkpoint)
    port = free_port()
    manifest = write_manifest(
        folder / "layout.yaml",
        folder / "model",
        port,
        model={"name": MODEL, "source": {"path": str(folder / "model")}, "maxModelLen": 2048},
        parallelism=layout.ranks,
        kvCache={"size": "8Mi", "tokensPerLane": 256, "dtype": layout.kv_dtype},
        scheduling={"maxChunkTokens": 128, "maxRunning": 8},
        **layout.spec,
    )
    served = start(manifest, port, folder / "model")
    yield Replica(served, layout)
    stop(served)


def test_a_prompt_that_comes_again_is_found_cached_and_has_the_same_text(replica: Replica) -> None:
    before = replica.looked_up()
    found = [
        replica.complete(prompt) for prompt in (LONG_PROMPT, LONG_PROMPT, [*LONG_PROMPT, *range(40, 80)])
    ]
    replica.served.wait_idle()
    queried, hit = (now - then for now, then in zip(replica.looked_up(), before, strict=True))
    whole = (len(LONG_PROMPT) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert all(replica.served.blocks_by_lane()), "a lane has no part of the prompt"
    assert [cached for _, cached in found] == [0, whole, whole]
    assert found[1][0] == found[0][0]
    assert (queried, hit) == (3 * len(LONG_PROMPT) + 40, 2 * whole)


def test_a_stream_goes_on_with_the_same_text_when_a_rank_dies(replica: Replica) -> None:
    body = BODY | {"prompt": LONG_PROMPT[5:]}
    undisturbed = streamed(replica.served, 120, body)
    victim = processes(replica.served, "medha_worker.rank")[-1]
    assert streamed(replica.served, 120, body, kill=victim, after=30) == undisturbed
    assert not victim.is_running()
    replica.served.wait_idle()


def test_after_random_cancels_no_block_is_held_and_texts_are_as_before(replica: Replica) -> None:
    """Prompts begin alike, and have up to three samples. Clients leave before the first token, or while they read."""
    text, _ = replica.complete(LONG_PROMPT)
    replica.served.wait_idle()
    before, ended = replica.totals(), replica.num_ended()
    assert not any(blocks for (_, _, state), blocks in before.items() if state != "unused")
    rng, cancelled = random.Random(3), 0
    while cancelled < CANCELS:  # a few clients leave before their request has arrived
        asyncio.run(cancel_many(replica.served, 20, rng))
        replica.served.wait_idle()
        added = replica.num_ended() - ended
        assert set(added) == {"cancelled"}
        cancelled = added["cancelled"]
    assert replica.totals() == before
    assert replica.complete(LONG_PROMPT)[0] == text


async def cancel_many(served: Served, count: int, rng: random.Random) -> None:
    """Begin requests and leave each of them before its end, 12 at a time."""
    limit = asyncio.Semaphore(12)

    async def one(http: httpx.AsyncClient) -> None:
        body = BODY | {
            "prompt": [
                *LONG_PROMPT[: rng.choice([1, 15, 16, 64, 65, 200, 330])],
                *rng.choices(range(12, 300), k=9),
            ],
            "max_tokens": 1000,
            "n": rng.choice([1, 1, 1, 3]),
        }
        pieces, patience_seconds = rng.choice([(0, 0.05), (0, 0.3), (1, 60), (3, 60), (30, 60)])
        async with limit:
            with suppress(TimeoutError):  # the client leaves before it reads
                async with (
                    asyncio.timeout(patience_seconds),
                    http.stream("POST", served.url + "/v1/completions", json=body) as response,
                ):
                    assert response.status_code == 200
                    async for line in response.aiter_lines():
                        pieces -= line.startswith("data: {")
                        if pieces == 0:
                            return
                    pytest.fail("the stream ended before its client left")

    async with httpx.AsyncClient(timeout=60) as http:
        await asyncio.gather(*(one(http) for _ in range(count)))
