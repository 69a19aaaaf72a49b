"""Measure what a host tier and a disk tier save: chats over documents whose KV is four times as large as the device's pool.

    python benchmarks/tiers.py --quick
    python benchmarks/tiers.py --json benchmarks/results/tiers.json

Three `medha up` serve the same checkpoint in float32, with pools of the same size: one forgets evicted KV, one has a host
tier that holds all documents, and one a small host tier with files behind it. Chats take turns, one request at a time, so that each
finds the KV of its document evicted. All servers are asked in each round, with salts that keep rounds apart.

For the turns in which a document returns, it prints the median and the 99th percentile of the TTFT and the prompt tokens that
were computed. The claims are that the host tier halves the median TTFT, that at most a quarter of the tokens is computed, and
that all texts are the same.

Then a controller and a rank without sockets serve two longer documents, of which the device's pool holds one, so that each
comes back from the host tier. First nothing else runs: the copies of a fetch, made beside the layers of its step, must reach 80 %
of the rate of one long copy. Then others decode: their steps may take 10 % longer while a fetch is copied beside them.
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
import torch
from harness import Row, claim, exit_with, in_turn, parser, ratio, report, table
from served import events_of, medha_up, served, write_manifest

from medha.api.replica import SchedulingSpec, ServiceClass
from medha.kv.host_tier import TierCopy
from medha.kv.prefix_cache import PrefixHasher
from medha.scheduler.controller import ReplicaController
from medha.scheduler.replica_config import ReplicaConfig
from medha.topology import Topology
from medha.wire.frames import TokenIds
from medha.wire.messages import (
    ControllerEvent,
    HostTierFigures,
    Sampling,
    StageFree,
    Step,
    StepProfile,
    Submit,
    Tokens,
)
from medha_worker.checkpoints.presets import init_checkpoint
from medha_worker.device import host_device
from medha_worker.kernels.name_table import choose_kernels
from medha_worker.model.host_blocks import HostBlocks
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.transformer import Transformer
from medha_worker.model.weights import Shard
from medha_worker.rank.executor import Executor

DOCUMENTS, TURNS, TURN_TOKENS, OUTPUT_TOKENS = 8, 3, 64, 8
POOL_PART = 4  # of the documents' KV, one in so many fits the device's pool
FLOAT_BYTES = 4
IDS = 10, 500  # of tokens that both presets have
BLOCK_TOKENS, ROOM_BLOCKS = 16, 200  # of the pool, beside a document
DECODING, DECODED_TOKENS, PLAIN_STEPS = 4, 600, 30
PROFILE = StepProfile(4e-3, 1e-4, 1e-8, 1e-5)  # to begin with; measured steps correct it


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


@dataclass
class Fetched:
    """Figures of fetches that a rank has measured."""

    alone_bytes_per_second: list[float] = field(default_factory=list)  # of each, while nothing else ran
    long_copy_bytes_per_second: list[float] = field(default_factory=list)
    decode_seconds: list[float] = field(default_factory=list)  # of steps that decode and nothing else
    beside_seconds: list[float] = field(default_factory=list)  # of the same steps, with copies beside them
    pieces: int = 0


class LoneRank:
    """A controller and one rank, joined without sockets; the pool holds one document and a bit more."""

    def __init__(self, folder: Path, document_tokens: int, threads: int) -> None:
        torch.set_num_threads(threads)
        device, config = host_device(torch.float32), ModelConfig.from_directory(folder)
        self._vocab = config.vocab_size
        shard = Shard.whole(config)
        kernels = choose_kernels(shard.kernel_sizes(config), device, "bestEffort")
        model = Transformer.load(folder, config, shard, device=device, kernels=kernels)
        self.document_blocks = document_tokens // BLOCK_TOKENS
        pool = model.new_kv_cache(self.document_blocks + ROOM_BLOCKS, BLOCK_TOKENS)
        self.host = HostBlocks(pool, 3 * self.document_blocks)
        for one in (False, True, True):  # the first ones take the pages
            self._long_copy(is_fetch=one)
        seconds = self.host.seconds_per_block(time.perf_counter)
        self._executor = Executor(
            model,
            pool,
            vocab_size=self._vocab,
            eos_token_ids=(),
            clock=time.perf_counter,
            host_blocks=[self.host],
        )
        replica = ReplicaConfig(
            topology=Topology(),
            scheduling=SchedulingSpec(),
            service_classes={"default": ServiceClass(name="default", tpot_target_seconds=1.0)},
            default_class="default",
            max_model_len=config.max_model_len,
            block_size_tokens=BLOCK_TOKENS,
            kv_blocks=pool.num_blocks,
            long_threshold_tokens=config.max_model_len,
            host_tier=HostTierFigures(self.host.blocks, self.host.block_bytes, *seconds),
        )
        self.core = ReplicaController(replica, PROFILE)
        self._hasher = PrefixHasher(BLOCK_TOKENS, b"benchmark")
        self._steps: list[Step] = []
        self._ids: dict[str, TokenIds] = {}
        self.timed: list[tuple[Step, float, float]] = []  # steps, their seconds, and those of their copies

    def _long_copy(self, *, is_fetch: bool) -> float:
        started = time.perf_counter()
        self.host.copy([TierCopy(is_fetch, 0, 0, self.document_blocks)])
        return time.perf_counter() - started

    def long_copy_rate(self) -> float:
        """Return the bytes per second of a fetch of a whole document that is copied at once, while nothing runs."""
        return self.document_blocks * self.host.block_bytes / self._long_copy(is_fetch=True)

    def ask(self, name: str, ids: TokenIds, output_tokens: int) -> None:
        self._ids[name] = ids
        sampling = Sampling(temperature=0.0, ignore_eos=True, max_tokens=output_tokens)
        hashes = self._hasher.hashes(ids)
        self._handle(Submit(name, name, len(ids), len(ids), seed=1, sampling=sampling, block_hashes=hashes))

    def run(self, most_steps: int | None = None) -> None:
        """Run steps until nothing is left, or so many."""
        while self._steps and most_steps != 0:
            most_steps = None if most_steps is None else most_steps - 1
            step = self._steps.pop(0)
            self._executor.prepare(step)
            for name in self._executor.missing_prompts(step):
                ids = self._ids[name]
                self._executor.add_tokens(Tokens(prompt=name, offset=0, total=len(ids)), ids)
            plan = self._executor.plan(step)
            started = time.perf_counter()
            done = self._executor.run(plan)
            assert done is not None
            self.timed.append((step, time.perf_counter() - started, done.copy_seconds))
            self._handle(StageFree(step.step_id, 0))
            self._handle(done)

    def _handle(self, event: ControllerEvent) -> None:
        self._steps += [one for one in self.core.handle(event, time.perf_counter()) if isinstance(one, Step)]


def fetched(folder: Path, document_tokens: int, rounds: int) -> Fetched:
    """Let two documents come back in turn, alone and beside requests that decode."""
    rank, found, rng = LoneRank(folder, document_tokens, threads=1), Fetched(), np.random.default_rng(0)
    texts = [rng.integers(*IDS, document_tokens).astype(np.int32) for _ in range(2)]
    names = iter(f"r{number}" for number in range(10_000))
    for turn in range(2 * rounds + 2):
        if turn > 2:
            found.long_copy_bytes_per_second.append(rank.long_copy_rate())
        rank.timed.clear()
        rank.ask(next(names), texts[turn % 2], 1)
        rank.run()
        sizes = [_fetched_blocks(step) * rank.host.block_bytes for step, *_ in rank.timed]
        if turn > 2:
            found.alone_bytes_per_second.append(sum(sizes) / sum(copied for *_, copied in rank.timed))
    for _ in range(DECODING):
        rank.ask(next(names), rng.integers(*IDS, TURN_TOKENS).astype(np.int32), DECODED_TOKENS)
    rank.run(2 * PLAIN_STEPS)
    for turn in range(2 * rounds):
        rank.timed.clear()
        rank.run(PLAIN_STEPS)
        rank.ask(next(names), texts[turn % 2], 1)
        while len(rank.timed) < 2 * PLAIN_STEPS or rank.core.load().running > DECODING:
            rank.run(1)
        for step, seconds, _ in rank.timed:
            if all(entry.samples and entry.token_count == 1 for entry in step.entries) and not step.admits:
                (found.beside_seconds if step.fetches else found.decode_seconds).append(seconds)
                found.pieces += bool(step.fetches)
    return found


def _fetched_blocks(step: Step) -> int:
    return sum(part.count for one in step.fetches for part in one.blocks)


def fetch_claims(found: Fetched) -> list[Row]:
    rates = [
        float(np.median(one)) for one in (found.alone_bytes_per_second, found.long_copy_bytes_per_second)
    ]
    steps = [float(np.median(one)) for one in (found.beside_seconds, found.decode_seconds)]
    return [
        claim(
            "rate of a fetch alone, against one long copy", rates[0] / rates[1], "ratio", 0.8, "more",
            f"{rates[1] / 1e9:.2f} GB/s",
        ),
        claim(
            "decode step with a fetch beside it, against one without", steps[0] / steps[1], "ratio", 1.1, "less",
            f"{1e3 * steps[1]:.2f} ms; {found.pieces} pieces",
        ),
    ]  # fmt: skip


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
        longer = fetched(folder / model, 4 * document_tokens, rounds)
    rows = [row(tier, each) for tier, each in found.items()]
    names = ("tier", "TTFT p50 s", "TTFT p99 s", "computed tokens", "prompt tokens")
    table(names, [list(one.values()) for one in rows])
    figures: Row = {"model": model, "documents": DOCUMENTS, "document_tokens": document_tokens, "rows": rows}
    return report(claims(found, rows) + fetch_claims(longer), arguments.json, figures)


if __name__ == "__main__":
    exit_with(main)
