"""Measure how long chats wait beside requests that name a `max_tokens` far beyond what they use.

    python benchmarks/long_max_tokens.py --quick
    python benchmarks/long_max_tokens.py --json benchmarks/results/long_max_tokens.json

Two things are measured on a replica of the `tiny` checkpoint, each with the texts that clients get:

* `chats`    twelve chats at once, which end by themselves after a few hundred tokens, with `max_tokens` 4,000 and
  120,000 in turn: a pool of 262,144 tokens holds two of the latter;
* `streams`  two streams that go on for as long as they may, each for almost half of the pool, and chats one after the
  other while they run; then the same chats, and the same streams, each alone.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
from harness import Row, claim, exit_with, in_turn, parser, progress, ratio, report, table
from served import medha_up, served, write_manifest

from medha_worker.checkpoints.presets import init_checkpoint

MODEL = "tiny"
TOKEN_BYTES = 1024  # of KV, in this checkpoint
CHATS = 12
CHATS_POOL_TOKENS = 262_144
FEW_TOKENS, MANY_TOKENS = 4_000, 120_000
Result = TypeVar("Result")


@dataclass(frozen=True)
class Answer:
    """The text of one request, its time to first token and its longest pause after that (seconds)."""

    text: str
    tokens: int
    ttft_seconds: float
    pause_seconds: float


async def ask(http: httpx.AsyncClient, seed: int, max_tokens: int, *, endless: bool = False) -> Answer:
    """Generate one answer; if it is `endless`, until `max_tokens`."""
    body = {
        "model": MODEL, "prompt": f"Chat number {seed}", "max_tokens": max_tokens, "temperature": 1, "seed": seed,
        "ignore_eos": endless, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    began = time.perf_counter()
    text, tokens, stamps = "", 0, [began]
    async with http.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            if event["choices"]:
                text += event["choices"][0]["text"]
                stamps.append(time.perf_counter())
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
    return Answer(text, tokens, stamps[1] - began, float(np.diff(stamps)[1:].max(initial=0.0)))


def with_client(url: str, work: Callable[[httpx.AsyncClient], Coroutine[Any, Any, Result]]) -> Result:
    async def run() -> Result:
        async with httpx.AsyncClient(base_url=url, timeout=3600) as http:
            return await work(http)

    return asyncio.run(run())


async def together(http: httpx.AsyncClient, max_tokens: int) -> list[Answer]:
    return list(await asyncio.gather(*(ask(http, seed, max_tokens) for seed in range(CHATS))))


@dataclass
class Beside:
    """Streams, the chats beside them, and the seconds until a first stream had ended."""

    streams: list[Answer]
    chats: list[Answer]
    first_end_seconds: float


async def chats_beside(http: httpx.AsyncClient, stream_tokens: int, chat_tokens: int) -> Beside:
    """Send chats one after the other for as long as both streams run."""
    began = time.perf_counter()
    streams = [asyncio.create_task(ask(http, seed, stream_tokens, endless=True)) for seed in (1000, 1001)]
    chats: list[Answer] = []
    first_end = 0.0
    await asyncio.sleep(0.5)
    while not all(stream.done() for stream in streams):
        chats.append(await ask(http, len(chats), chat_tokens))
        if not first_end and any(stream.done() for stream in streams):
            first_end = time.perf_counter() - began
    return Beside(list(await asyncio.gather(*streams)), chats, first_end)


async def alone(http: httpx.AsyncClient, beside: Beside, stream_tokens: int, chat_tokens: int) -> Beside:
    """Send the same requests again, each alone."""
    chats = [await ask(http, seed, chat_tokens) for seed in range(len(beside.chats))]
    streams = [await ask(http, seed, stream_tokens, endless=True) for seed in (1000, 1001)]
    return Beside(streams, chats, 0.0)


def manifest(folder: Path, checkpoint: Path, pool_tokens: int) -> tuple[Path, str]:
    path = folder / f"pool-{pool_tokens}.yaml"
    spec = {
        "model": {
            "name": MODEL,
            "source": {"path": str(checkpoint)},
            "maxModelLen": min(pool_tokens, 131_072),
        },
        "threads": 1,
        "kvCache": {"size": f"{pool_tokens * TOKEN_BYTES // 2**20}Mi"},
    }
    return path, write_manifest(path, MODEL, spec)


def main() -> int:
    options = parser(__doc__, quick="one round, and a pool of 4,096 tokens instead of 65,536", rounds=3)
    arguments = options.parse_args()
    rounds, pool_tokens, chat_tokens = (
        (1, 4096, 200) if arguments.quick else (arguments.rounds, 65_536, 2_000)
    )
    stream_tokens = int(0.49 * pool_tokens)
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        checkpoint = folder / MODEL
        init_checkpoint(checkpoint, preset=MODEL, seed=0)
        path, url = manifest(folder, checkpoint, CHATS_POOL_TOKENS)
        with served(medha_up(path), url):
            with_client(url, lambda http: together(http, 8))  # warm up
            found = in_turn(
                rounds,
                {
                    str(tokens): (lambda tokens=tokens: with_client(url, lambda http: together(http, tokens)))  # type: ignore[misc]
                    for tokens in (FEW_TOKENS, MANY_TOKENS)
                },
            )
        path, url = manifest(folder, checkpoint, pool_tokens)
        with served(medha_up(path), url):
            with_client(url, lambda http: ask(http, 0, 8))
            progress("  streams and chats")
            beside = with_client(url, lambda http: chats_beside(http, stream_tokens, chat_tokens))
            progress("  each alone")
            lone = with_client(url, lambda http: alone(http, beside, stream_tokens, chat_tokens))
    return _report(found, beside, lone, arguments.json)


def _report(found: dict[str, list[list[Answer]]], beside: Beside, lone: Beside, target: Path | None) -> int:
    few, many = found[str(FEW_TOKENS)], found[str(MANY_TOKENS)]
    medians = [[_quantile(answers, 0.5) for answers in one] for one in (few, many)]
    lasts = [[max(answer.ttft_seconds for answer in answers) for answers in one] for one in (few, many)]
    texts = [[answer.text for answer in answers] for one in (few, many) for answers in one]
    different = sum(one != texts[0][index] for each in texts for index, one in enumerate(each))
    pairs = list(zip(beside.chats + beside.streams, lone.chats + lone.streams, strict=True))
    different_beside = sum(one.text != other.text for one, other in pairs)
    head = ["", "requests", "TTFT p50 (s)", "TTFT p90 (s)", "TTFT max (s)", "longest pause (s)"]
    shown = {f"12 chats, max_tokens {tokens}": list(chain(*one)) for tokens, one in found.items()}
    shown |= {"chats beside streams": beside.chats, "chats alone": lone.chats, "streams": beside.streams}
    rows = []
    for name, answers in shown.items():
        ttfts = [_quantile(answers, share) for share in (0.5, 0.9, 1.0)]
        rows.append([name, len(answers), *ttfts, max(one.pause_seconds for one in answers)])
    table(head, rows)
    print(f"the first stream ended after {beside.first_end_seconds:.1f} s")
    peer = f"the same chats with max_tokens {FEW_TOKENS:,}, in the same rounds"
    claims: list[Row] = [
        claim("median TTFT of twelve chats with max_tokens 120,000", ratio(medians[1], medians[0]), "times", 1.3, peer=peer),
        claim("longest TTFT of twelve chats with max_tokens 120,000", ratio(lasts[1], lasts[0]), "times", 1.3, peer=peer),
        claim("texts of twelve chats that depend on max_tokens", different, "texts", 0),
        claim(
            "p90 TTFT of chats beside two streams that may use the whole pool",
            _quantile(beside.chats, 0.9) / beside.first_end_seconds, "of the time until a stream ends", 0.05,
        ),
        claim("texts of chats and streams that differ from those of each alone", different_beside, "texts", 0),
    ]  # fmt: skip
    figures = {"rows": [dict(zip(["name", *head[1:]], row, strict=True)) for row in rows]}
    figures["tokens"] = [
        [one.tokens for one in answers] for answers in (few[0], beside.chats, beside.streams)
    ]
    return report(claims, target, figures)


def _quantile(answers: list[Answer], share: float) -> float:
    return float(np.quantile([answer.ttft_seconds for answer in answers], share))


if __name__ == "__main__":
    exit_with(main)
