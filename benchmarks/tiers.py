"""Measure what a host tier and a disk tier save: chats over documents whose KV is four times as large as the device's pool.

    python benchmarks/tiers.py --quick
    python benchmarks/tiers.py --json benchmarks/results/tiers.json

Three `medha up` serve the same checkpoint in float32, with pools of the same size: one forgets evicted KV, one has a host
tier that holds all documents, and one a small host tier with files behind it. Chats take turns, one request at a time, so that each
finds the KV of its document evicted. All servers are asked in each round, with salts that keep rounds apart.

For the turns in which a document returns, it prints the median and the 99th percentile of the TTFT and the prompt tokens that
were computed. The claims are that the host tier halves the median TTFT, that at most a quarter of the tokens is computed, and
that all texts are the same.
"""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx
import numpy as np
from harness import Row, claim, exit_with, in_turn, parser, ratio, report, table
from served import events_of, medha_up, served, write_manifest

from medha_worker.checkpoints.presets import init_checkpoint
from medha_worker.model.model_config import ModelConfig

DOCUMENTS, TURNS, TURN_TOKENS, OUTPUT_TOKENS = 8, 3, 64, 8
POOL_PART = 4  # of the documents' KV, one in so many fits the device's pool
FLOAT_BYTES = 4
IDS = 10, 500  # of tokens that both presets have


@dataclass
class Measured:
    """The turns of one round in which documents return."""

    ttft_seconds: list[float] = field(default_factory=list)
    computed_tokens: int = 0
    prompt_tokens: int = 0
    texts: list[str] = field(default_factory=list)


def ask(client: httpx.Client, model: str, prompt: list[int], salt: str) -> tuple[float, str, int]:
    """Return the TTFT of a greedy completion, its text, and the prompt tokens that were cached or fetched."""
    body: Row = {
        "model": model, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True}, "cache_salt": salt,
    }  # fmt: skip
    began, first, text, cached = time.perf_counter(), 0.0, "", 0
    with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        for event in events_of(response.iter_lines()):
            if event["choices"]:
                first = first or time.perf_counter() - began
                text += event["choices"][0]["text"]
            if event.get("usage"):
                cached = (event["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return first, text, cached


def chat(url: str, model: str, document_tokens: int, salt: str) -> Measured:
    """Let each chat take its turns, one after the other; a turn adds some tokens to what was said."""
    found, rng = Measured(), np.random.default_rng(0)
    history = [rng.integers(*IDS, document_tokens).tolist() for _ in range(DOCUMENTS)]
    with httpx.Client(base_url=url, timeout=600) as client:
        for turn in range(TURNS):
            for prompt in history:
                prompt += rng.integers(*IDS, TURN_TOKENS).tolist()
                ttft_seconds, text, cached = ask(client, model, prompt, salt)
                if turn > 0:
                    found.ttft_seconds.append(ttft_seconds)
                    found.computed_tokens += len(prompt) - cached
                    found.prompt_tokens += len(prompt)
                    found.texts.append(text)
    return found


def start(stack: ExitStack, folder: Path, name: str, model: str, document_tokens: int) -> str:
    config = ModelConfig.from_directory(folder / model)
    token_bytes = FLOAT_BYTES * config.kv_tensors * config.num_layers * config.num_kv_heads * config.head_dim
    set_bytes = DOCUMENTS * (document_tokens + TURNS * TURN_TOKENS) * token_bytes
    tiers: Row = {} if name == "none" else {"tiers": {"host": {"size": str(2 * set_bytes)}}}
    if name == "disk":  # host memory holds a part of the documents, and files the rest
        files = {"size": str(4 * set_bytes), "hostPath": str(folder / "kv-files")}
        tiers = {"tiers": {"host": {"size": str(set_bytes // 2)}, "disk": files}}
    spec = {
        "model": {
            "name": model,
            "source": {"path": str(folder / model)},
            "maxModelLen": document_tokens + (TURNS + 1) * TURN_TOKENS,
        },
        "kvCache": {"size": str(set_bytes // POOL_PART)} | tiers,
        "threads": len(os.sched_getaffinity(0)),
    }
    manifest = folder / f"{name}.yaml"
    url = write_manifest(manifest, name, spec)
    stack.enter_context(served(medha_up(manifest, "--run-dir", str(folder / f"run-{name}")), url))
    return url


def row(name: str, rounds: list[Measured]) -> Row:
    seconds = [one for measured in rounds for one in measured.ttft_seconds]
    return {
        "tier": name,
        "ttft_p50_seconds": float(np.quantile(seconds, 0.5)),
        "ttft_p99_seconds": float(np.quantile(seconds, 0.99)),
        "computed_tokens": sum(one.computed_tokens for one in rounds),
        "prompt_tokens": sum(one.prompt_tokens for one in rounds),
    }


def claims(found: dict[str, list[Measured]], rows: list[Row]) -> list[Row]:
    none, host = found["none"], found["host"]
    medians = [[float(np.median(one.ttft_seconds)) for one in each] for each in (host, none)]
    computed = [[float(one.computed_tokens) for one in each] for each in (host, none)]
    pairs = [
        pair
        for tier in (host, found["disk"])
        for a, b in zip(none, tier, strict=True)
        for pair in zip(a.texts, b.texts, strict=True)
    ]
    same = 100 * sum(a == b for a, b in pairs) / len(pairs)
    peer = f"no tier: {1e3 * rows[0]['ttft_p50_seconds']:.0f} ms, {rows[0]['computed_tokens']} tokens"
    return [
        claim("median TTFT against no tier", ratio(*medians), "ratio", 0.5, "less", peer),
        claim("computed prompt tokens against no tier", ratio(*computed), "ratio", 0.25, "less", peer),
        claim("texts that are the same", same, "%", 100, "more"),
    ]


def main() -> int:
    options = parser(__doc__, quick="documents of 1,024 tokens for the preset tiny, one round", rounds=3)
    arguments = options.parse_args()
    model, document_tokens = ("tiny", 1024) if arguments.quick else ("small", 4096)
    rounds = 1 if arguments.quick else arguments.rounds
    with tempfile.TemporaryDirectory(prefix="tiers-") as name, ExitStack() as stack:
        folder = Path(name)
        init_checkpoint(folder / model, preset=model, seed=0)
        urls = {tier: start(stack, folder, tier, model, document_tokens) for tier in ("none", "host", "disk")}
        salts = {tier: iter(range(rounds)) for tier in urls}

        def measure(tier: str) -> Measured:
            return chat(urls[tier], model, document_tokens, f"round {next(salts[tier])}")

        found = in_turn(rounds, {tier: partial(measure, tier) for tier in urls})
    rows = [row(tier, each) for tier, each in found.items()]
    names = ("tier", "TTFT p50 s", "TTFT p99 s", "computed tokens", "prompt tokens")
    table(names, [list(one.values()) for one in rows])
    figures: Row = {"model": model, "documents": DOCUMENTS, "document_tokens": document_tokens, "rows": rows}
    return report(claims(found, rows), arguments.json, figures)


if __name__ == "__main__":
    exit_with(main)
