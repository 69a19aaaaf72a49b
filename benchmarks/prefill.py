"""Measure how close prefill comes to the machine's matrix-product rate, and how long a decode step takes.

    python benchmarks/prefill.py --quick
    python benchmarks/prefill.py --threads 1 --json benchmarks/results/prefill.json

The `small` preset (8 layers, hidden 512, 8/2 heads) prefills in chunks. Square float32 products run between the chunks,
by torch and by the rank's own kernel; the rate of the faster is the limit for prefill. It is taken in the same seconds,
because a shared machine changes its speed by the minute. Decode steps take turns with the same steps whose products are
torch's. Times of one thread are its CPU time, those of several are wall-clock time. Run nothing else meanwhile.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "3000")  # as `medha up` sets it for ranks; read when torch is loaded

import numpy as np
import torch
from harness import Row, claim, exit_with, parser, progress, ratio, report, table

from medha_worker.checkpoints.presets import init_checkpoint
from medha_worker.device import host_device
from medha_worker.host_memory import keep_freed_memory
from medha_worker.kernels.name_table import choose_kernels
from medha_worker.kernels.sequence_span import SequenceSpan
from medha_worker.kernels.torch_products import TorchProducts
from medha_worker.model.kv_cache import KVCache
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.transformer import Transformer
from medha_worker.model.weights import Shard

BLOCK_TOKENS = 16
SGEMM_SIZE = 2048
GOAL = 0.85

PARTS = {"attention": "attention", "products": "linear layers", "rows": "norm, RoPE, SiLU"}
"""Fields of `Kernels`, and what the tables call the time in them."""


def clock() -> float:
    """Return the seconds of CPU that this thread has taken, if it computes alone, else those of the wall clock."""
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def sgemm_seconds(product: Callable[..., torch.Tensor], square: torch.Tensor, out: torch.Tensor) -> float:
    start = clock()
    product(square, square, out=out)
    return clock() - start


def prefill_flops(config: ModelConfig, tokens: int) -> float:
    """Return the floating-point operations of a causal prefill without the output head."""
    heads = config.num_query_heads * config.head_dim
    kv_heads = config.num_kv_heads * config.head_dim
    linear = config.hidden_size * (2 * heads + 2 * kv_heads + 3 * config.intermediate_size)
    attention = 4 * heads * tokens * (tokens + 1) / 2
    return config.num_layers * (2 * linear * tokens + attention)


def linear_flops(config: ModelConfig, tokens: int) -> float:
    """Return the floating-point operations of the linear layers, without the output head."""
    return prefill_flops(config, tokens) - attention_flops(config, 0, tokens)


def attention_flops(config: ModelConfig, context: int, tokens: int) -> float:
    """Return the floating-point operations of the attention of a chunk behind `context` tokens."""
    heads = config.num_query_heads * config.head_dim
    return config.num_layers * 4 * heads * tokens * (context + (tokens + 1) / 2)


def run(
    model: Transformer,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    spans: list[SequenceSpan],
    cache: KVCache,
) -> torch.Tensor:
    """Prepare one step and run the model's layers over it."""
    return model.forward(tokens, model.prepare(positions, spans, cache))


class _Timed:
    """Kernels whose calls add to the seconds of a part."""

    def __init__(self, kernels: Any, part: str, seconds: dict[str, float]) -> None:
        self._kernels, self._part, self._seconds = kernels, part, seconds

    def __getattr__(self, method: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            start = clock()
            result = getattr(self._kernels, method)(*arguments, **options)
            self._seconds[self._part] += clock() - start
            return _Timed(result, self._part, self._seconds) if method == "plan" else result

        return call


class Bench:
    """The model, a prompt and a pool, ready to run chunk by chunk."""

    def __init__(self, model: Transformer, longest: int) -> None:
        self.model = model
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(0, model.config.vocab_size, (longest,), generator=generator)
        self.blocks = range(longest // BLOCK_TOKENS)
        self.cache: KVCache = model.new_kv_cache(len(self.blocks), BLOCK_TOKENS)

    def chunk(self, first: int, count: int, model: Transformer | None = None) -> float:
        start = clock()
        span = SequenceSpan(0, count, first, self.blocks)
        positions = torch.arange(first, first + count)
        run(model or self.model, self.tokens[first : first + count], positions, [span], self.cache)
        return clock() - start

    def prefill(self, length: int, chunk: int) -> tuple[float, float]:
        """Return the rates of a prefill and of the products between its chunks, both in FLOP/s."""
        square = torch.randn(SGEMM_SIZE, SGEMM_SIZE)
        out = torch.empty_like(square)
        ways: tuple[Callable[..., torch.Tensor], ...] = (torch.mm, self.model.kernels.products.product)
        chunks, products = list[float](), np.zeros(len(ways))
        for first in range(0, length, chunk):
            products += [sgemm_seconds(way, square, out) for way in ways]
            chunks.append(self.chunk(first, min(chunk, length - first)))
        rate = prefill_flops(self.model.config, length) / sum(chunks)
        return rate, 2 * SGEMM_SIZE**3 * len(chunks) / float(products.min())

    def split(self, first: int, count: int) -> dict[str, float]:
        """Run a chunk; return the seconds in each part of the model."""
        seconds = dict.fromkeys((*PARTS.values(), "other"), 0.0)
        kernels = self.model.kernels
        timed = {name: _Timed(getattr(kernels, name), part, seconds) for name, part in PARTS.items()}
        model = self.model.with_kernels(replace(kernels, **timed))
        seconds["other"] = self.chunk(first, count, model) - sum(seconds.values())
        return seconds

    def breakdown(self, length: int, chunk: int) -> dict[str, float]:
        """Return each part's share of a prefill's time."""
        splits = [self.split(first, chunk) for first in range(0, length, chunk)]
        total = sum(sum(one.values()) for one in splits)
        return {part: sum(one[part] for one in splits) / total for part in splits[0]}

    def best_split(self, first: int, count: int, rounds: int) -> dict[str, float]:
        """Return the split of the fastest of several runs of a chunk."""
        return min((self.split(first, count) for _ in range(rounds)), key=lambda one: sum(one.values()))

    def decode_seconds(self, sequences: int, context: int, steps: int) -> tuple[list[float], list[float]]:
        """Return times of steps in which each of `sequences` decodes one token, logits included: ours, and by torch's products."""
        per_sequence = -(-(context + 1) // BLOCK_TOKENS)
        cache = self.model.new_kv_cache(per_sequence * sequences, BLOCK_TOKENS)
        spans = [
            SequenceSpan(row, 1, context, range(row * per_sequence, (row + 1) * per_sequence))
            for row in range(sequences)
        ]
        positions = torch.full((sequences,), context)
        other = self.model.with_kernels(replace(self.model.kernels, products=TorchProducts()))
        found: tuple[list[float], list[float]] = [], []
        for _ in range(steps):
            for model, seconds in zip((self.model, other), found, strict=True):
                start = clock()
                model.logits(run(model, self.tokens[:sequences], positions, spans, cache))
                seconds.append(clock() - start)
        return found


def main() -> int:
    found = parser(__doc__, quick="4K tokens only, fewer decode steps")
    text = "CPU threads (default: all cores)"
    found.add_argument("--threads", type=int, default=torch.get_num_threads(), metavar="N", help=text)
    arguments = found.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()

    lengths = [4096] if arguments.quick else [8192, 32_768]
    chunk_sizes = [512, 2048] if arguments.quick else [512, 1024, 2048]
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "small"
        init_checkpoint(directory, preset="small", seed=0)
        config = ModelConfig.from_directory(directory)
        shard, device = Shard.whole(config), host_device(torch.float32)
        kernels = choose_kernels(shard.kernel_sizes(config), device)
        model = Transformer.load(directory, config, shard, device=device, kernels=kernels)
    bench = Bench(model, lengths[-1])
    bench.prefill(2048, 512)

    claims, prefills = list[Row](), []
    for length in lengths:
        ratios = {}
        for chunk in chunk_sizes:
            progress(f"prefill of {length} tokens in chunks of {chunk}")
            rates = [bench.prefill(length, chunk) for _ in range(2 if length == 8192 else 1)]
            rate, ceiling = max(rates, key=lambda pair: pair[0] / pair[1])
            ratios[chunk] = rate / ceiling
            speed = length * rate / prefill_flops(model.config, length)
            prefills.append((length, chunk, rate / 1e9, ceiling / 1e9, rate / ceiling, speed))
        name = f"prefill of {length // 1024}K tokens, share of the sgemm rate, best chunk size"
        peer = f"the faster product {SGEMM_SIZE}^3 float32 between the chunks"
        claims.append(claim(name, max(ratios.values()), "ratio", GOAL, "more", peer))
    print(f"{arguments.threads} threads, torch {torch.__version__}")
    table(("prefill", "chunk", "GFLOP/s", "sgemm", "ratio", "tokens/s"), prefills)

    print(f"\nwhere {lengths[0] // 1024}K tokens in chunks of 512 spend their time")
    shares = bench.breakdown(lengths[0], 512)
    table(("part", "share"), [(part, f"{share:.0%}") for part, share in shares.items()])

    print("\nwhere a chunk behind a context spends its time: the fastest of three")
    splits = []
    for context in (0, 4096 - 512) if arguments.quick else (0, 8192, 16_384, 30_720):
        for chunk in (32, 512) if arguments.quick else (32, 64, 128, 512, 2048):
            split = bench.best_split(context, chunk, rounds=3)
            splits.append(
                {"context": context, "chunk": chunk} | {part: round(s, 6) for part, s in split.items()}
            )
    rows = []
    for one in splits:
        context, chunk = one["context"], one["chunk"]
        seconds = sum(one[part] for part in (*PARTS.values(), "other"))
        attention = attention_flops(model.config, context, chunk) / one["attention"]
        linear = linear_flops(model.config, chunk) / one["linear layers"]
        shares = [f"{one[part] / seconds:.0%}" for part in (*PARTS.values(), "other")]
        rows.append((str(context), chunk, 1e6 * seconds / chunk, attention / 1e9, linear / 1e9, *shares))
    head = ("context", "chunk", "us/token", "attention GFLOP/s", "linear GFLOP/s", *PARTS.values(), "other")
    table(head, rows)

    print()
    decodes = []
    for context in (128, 1024) if arguments.quick else (128, 1024, 8192):
        for sequences in (1, 8, 32):
            ours, torchs = bench.decode_seconds(sequences, context, steps=10 if arguments.quick else 30)
            seconds, share = statistics.median(ours), ratio(ours, torchs)
            decodes.append((context, sequences, 1e3 * seconds, sequences / seconds, share))
            name = f"decode of {sequences} sequences behind {context} tokens"
            claims.append(claim(name, share, "ratio", 1.0, peer="the same step with torch's products"))
    table(("decode behind", "sequences", "ms", "tokens/s", "ratio"), decodes)
    figures = {"threads": arguments.threads, "torch": torch.__version__, "splits": splits}
    return report(claims, arguments.json, figures)


if __name__ == "__main__":
    exit_with(main)
