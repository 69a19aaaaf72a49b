"""Measure how close prefill comes to the machine's matrix-product rate, and how long a decode step takes.

    python benchmarks/prefill.py --quick
    python benchmarks/prefill.py --threads 1 --json benchmarks/results/prefill.json

The `small` preset (8 layers, hidden 512, 8/2 heads) prefills in chunks. A square float32 product runs between the chunks;
its rate is the limit for prefill. It is taken in the same seconds, because a shared machine changes its speed by the
minute. Run nothing else meanwhile.
"""

import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "3000")  # as `medha up` sets it for ranks; read when torch is loaded

import torch
from harness import Row, claim, exit_with, parser, progress, report, table
from torch.profiler import ProfilerActivity, profile, record_function

from medha_worker.checkpoints.presets import init_checkpoint
from medha_worker.device import host_device
from medha_worker.host_memory import keep_freed_memory
from medha_worker.kernels.name_table import choose_kernels
from medha_worker.kernels.sequence_span import SequenceSpan
from medha_worker.model.kv_cache import KVCache
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.transformer import Transformer
from medha_worker.model.weights import Shard

BLOCK_TOKENS = 16
SGEMM_SIZE = 2048
GOAL = 0.85

# torch's matrix products; the compiled operators are recorded under the names of their kernels' methods.
PRODUCTS = {"aten::mm", "aten::addmm", "aten::addmm_"}


def sgemm_seconds(square: torch.Tensor, out: torch.Tensor) -> float:
    start = time.perf_counter()
    torch.mm(square, square, out=out)
    return time.perf_counter() - start


def prefill_flops(config: ModelConfig, tokens: int) -> float:
    """Return the floating-point operations of a causal prefill without the output head."""
    heads = config.num_query_heads * config.head_dim
    kv_heads = config.num_kv_heads * config.head_dim
    linear = config.hidden_size * (2 * heads + 2 * kv_heads + 3 * config.intermediate_size)
    attention = 4 * heads * tokens * (tokens + 1) / 2
    return config.num_layers * (2 * linear * tokens + attention)


def run(
    model: Transformer,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    spans: list[SequenceSpan],
    cache: KVCache,
) -> torch.Tensor:
    """Prepare one step and run the model's layers over it."""
    return model.forward(tokens, model.prepare(positions, spans, cache))


class _Recorded:
    """Kernels whose calls the profiler records under one name."""

    def __init__(self, kernels: Any, name: str) -> None:
        self._kernels, self._name = kernels, name

    def __getattr__(self, method: str) -> Any:
        def call(*arguments: Any) -> Any:
            with record_function(self._name):
                result = getattr(self._kernels, method)(*arguments)
            return _Recorded(result, self._name) if method == "plan" else result

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
        start = time.perf_counter()
        span = SequenceSpan(0, count, first, self.blocks)
        positions = torch.arange(first, first + count)
        run(model or self.model, self.tokens[first : first + count], positions, [span], self.cache)
        return time.perf_counter() - start

    def prefill(self, length: int, chunk: int) -> tuple[float, float]:
        """Return the rates of a prefill and of the products between its chunks, both in FLOP/s."""
        square = torch.randn(SGEMM_SIZE, SGEMM_SIZE)
        out = torch.empty_like(square)
        chunks, products = [], []
        for first in range(0, length, chunk):
            products.append(sgemm_seconds(square, out))
            chunks.append(self.chunk(first, min(chunk, length - first)))
        rate = prefill_flops(self.model.config, length) / sum(chunks)
        return rate, 2 * SGEMM_SIZE**3 * len(products) / sum(products)

    def breakdown(self, length: int, chunk: int) -> dict[str, float]:
        """Return each part of the model's share of the operators' own time."""
        kernels = self.model.kernels
        attention: Any = _Recorded(kernels.attention, "attention")
        rows: Any = _Recorded(kernels.rows, "rows")
        model = self.model.with_kernels(replace(kernels, attention=attention, rows=rows))
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            for first in range(0, length, chunk):
                self.chunk(first, chunk, model)
        shares = dict.fromkeys(("linear layers", "attention", "norm, RoPE, SiLU", "other"), 0.0)
        names = {"attention": "attention", "rows": "norm, RoPE, SiLU"} | dict.fromkeys(
            PRODUCTS, "linear layers"
        )
        for event in recorded.key_averages():
            shares[names.get(event.key, "other")] += event.self_cpu_time_total
        total = sum(shares.values())
        return {name: share / total for name, share in shares.items()}

    def decode_seconds(self, sequences: int, context: int, steps: int) -> float:
        """Return the median time of a step in which each of `sequences` decodes one token, logits included."""
        per_sequence = -(-(context + 1) // BLOCK_TOKENS)
        cache = self.model.new_kv_cache(per_sequence * sequences, BLOCK_TOKENS)
        spans = [
            SequenceSpan(row, 1, context, range(row * per_sequence, (row + 1) * per_sequence))
            for row in range(sequences)
        ]
        positions = torch.full((sequences,), context)
        seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            hidden = run(self.model, self.tokens[:sequences], positions, spans, cache)
            self.model.logits(hidden)
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)


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
        peer = f"torch.mm {SGEMM_SIZE}^3 float32 between the chunks"
        claims.append(claim(name, max(ratios.values()), "ratio", GOAL, "more", peer))
    print(f"{arguments.threads} threads, torch {torch.__version__}")
    table(("prefill", "chunk", "GFLOP/s", "sgemm", "ratio", "tokens/s"), prefills)

    print(f"\nwhere {lengths[0] // 1024}K tokens in chunks of 512 spend their time")
    shares = bench.breakdown(lengths[0], 512)
    table(("part", "share"), [(part, f"{share:.0%}") for part, share in shares.items()])

    print()
    decodes = []
    for context in (128, 1024) if arguments.quick else (128, 1024, 8192):
        for sequences in (1, 8, 32):
            seconds = bench.decode_seconds(sequences, context, steps=10 if arguments.quick else 20)
            decodes.append((context, sequences, 1e3 * seconds, sequences / seconds))
    table(("decode behind", "sequences", "ms", "tokens/s"), decodes)
    return report(claims, arguments.json, {"threads": arguments.threads, "torch": torch.__version__})


if __name__ == "__main__":
    exit_with(main)
