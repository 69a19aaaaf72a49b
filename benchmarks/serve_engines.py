"""Engines that generate for a number of prompts at once, and the times at which their tokens come."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.streamers import BaseStreamer

VOCAB = range(300, 4000)  # ordinary tokens of the `small` preset: no specials, no single bytes
MODEL = "small"
"""Name under which every engine serves its checkpoint."""


@dataclass(frozen=True)
class Timing:
    """The figures of one round of one engine (seconds; medians over its streams)."""

    engine: str
    streams: int
    prompt_tokens: int
    output_tokens: int
    ttft_seconds: float
    tpot_seconds: float
    tokens_per_second: float


def timing(engine: str, prompts: list[list[int]], start: float, stamps: list[list[float]]) -> Timing:
    """Return the figures of a round; `stamps[i]` are the times at which the output tokens of stream i came."""
    firsts = [stream[0] - start for stream in stamps]
    gaps = [(stream[-1] - stream[0]) / max(len(stream) - 1, 1) for stream in stamps]
    tokens = sum(map(len, stamps))
    return Timing(
        engine=engine,
        streams=len(prompts),
        prompt_tokens=len(prompts[0]),
        output_tokens=len(stamps[0]),
        ttft_seconds=statistics.median(firsts),
        tpot_seconds=statistics.median(gaps),
        tokens_per_second=tokens / (max(stream[-1] for stream in stamps) - start),
    )


Engine = Callable[[list[list[int]], int], Timing]
"""A function that generates so many tokens for each prompt, greedily, for all prompts at once."""


def random_prompts(count: int, tokens: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return rng.integers(VOCAB.start, VOCAB.stop, (count, tokens)).tolist()  # type: ignore[no-any-return]


def http_engine(name: str, url: str) -> Engine:
    """Return an engine for any OpenAI-compatible server, streamed over HTTP."""

    async def stream(http: httpx.AsyncClient, prompt: list[int], tokens: int) -> list[float]:
        body = {
            "model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True,
            "ignore_eos": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        stamps: list[float] = []
        async with http.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if (event["choices"] and event["choices"][0]["finish_reason"] is None) or (
                        event["choices"] and event["choices"][0]["text"]
                    ):
                        stamps.append(time.perf_counter())
                    if event.get("usage"):
                        assert event["usage"]["completion_tokens"] == tokens
        # A chunk may hold several tokens, or none while a character is incomplete: spread the rest evenly.
        return list(np.linspace(stamps[0], stamps[-1], tokens))

    async def run(prompts: list[list[int]], tokens: int) -> Timing:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=3600, limits=limits) as http:
            start = time.perf_counter()
            stamps = await asyncio.gather(*(stream(http, prompt, tokens) for prompt in prompts))
        return timing(name, prompts, start, list(stamps))

    return lambda prompts, tokens: asyncio.run(run(prompts, tokens))


class _Stamps(BaseStreamer):
    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:  # noqa: ARG002 - the signature is the base class's
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def generate_engine(checkpoint: Path) -> Engine:
    """Return an engine of transformers' padded `generate`.

    All prompts here have one length, so padding costs nothing.
    """
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)

    def run(prompts: list[list[int]], tokens: int) -> Timing:
        stamps = _Stamps()
        ids = torch.tensor(prompts)
        start = time.perf_counter()
        options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
        if len(prompts) == 1:
            model.generate(ids, attention_mask=torch.ones_like(ids), streamer=stamps, **options)
            times = stamps.times[1:]  # the first call is the prompt
        else:  # streamers take one sequence: time the first token by a run of its own
            first = time.perf_counter()
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                **{**options, "max_new_tokens": 1, "min_new_tokens": 1},
            )
            ttft = time.perf_counter() - first
            start = time.perf_counter()
            model.generate(ids, attention_mask=torch.ones_like(ids), **options)
            times = list(np.linspace(start + ttft, time.perf_counter(), tokens))
        return timing("transformers generate", prompts, start, [times] * len(prompts))

    return run


def continuous_engine(checkpoint: Path) -> Engine:
    """Return an engine of transformers' continuous batching, as `transformers serve` runs it."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="sdpa")
    settings = ContinuousBatchingConfig(page_size=256, num_blocks=200, max_batch_tokens=2048)

    def run(prompts: list[list[int]], tokens: int) -> Timing:
        config = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        with model.continuous_batching_context_manager(
            generation_config=config, continuous_batching_config=settings
        ) as manager:
            start = time.perf_counter()
            ids = [manager.add_request(prompt, max_new_tokens=tokens, streaming=True) for prompt in prompts]
            stamps: dict[str, list[float]] = {name: [] for name in ids}
            while any(len(times) < tokens for times in stamps.values()):
                result = manager.get_result(timeout=600)
                assert result is not None
                assert result.error is None, result.error
                times = stamps[result.request_id]
                times.extend([time.perf_counter()] * (len(result.generated_tokens) - len(times)))
        return timing("transformers continuous", prompts, start, [stamps[name] for name in ids])

    return run


def median_timing(timings: list[Timing]) -> Timing:
    """Return the round with the median of the tokens per second."""
    ordered = sorted(timings, key=lambda timing: timing.tokens_per_second)
    return ordered[len(ordered) // 2]
