"""Measure a decode of latent attention on one of several ranks: tensor ranks share its heads, lanes share its context.

    python benchmarks/latents.py --quick
    python benchmarks/latents.py --json benchmarks/results/latents.json

The model is one dense layer of DeepSeek-V2-Lite's sizes with random weights in float32. Latents belong to all heads: one of n
tensor ranks computes an n-th of the heads and of the MLP, and reads the rows of the whole context. One of n lanes computes
all heads and the whole MLP, and reads an n-th of the rows. The step is that of one sequence, in CPU time of one thread. What
ranks send each other is not part of it: two all-reduces of a row in each layer for tensor ranks, and queries and partial
results for lanes.

The claim is the time of a lane over that of a tensor rank, behind the longest context. docs/performance-models.md shows the milliseconds beside those that the predictor
expects of GPUs.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
import transformers
from harness import Row, claim, exit_with, in_turn, parser, progress, ratio, report, table

from medha_worker.device import host_device
from medha_worker.kernels.name_table import choose_kernels
from medha_worker.kernels.sequence_span import SequenceSpan
from medha_worker.model.kv_cache import KVCache
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.transformer import Transformer
from medha_worker.model.weights import Shard

CONTEXTS = (16_384, 65_536, 262_144, 1_048_576)
RANKS = (1, 2, 4, 8)
BLOCK_TOKENS = 64
MORE_TOKENS = BLOCK_TOKENS  # room for the decoded token


def main() -> int:
    arguments = parser(__doc__, quick=f"a context of {CONTEXTS[0]:,} tokens", rounds=5).parse_args()
    contexts = CONTEXTS[:1] if arguments.quick else CONTEXTS
    rounds = 1 if arguments.quick else arguments.rounds
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch, torch.inference_mode():
        directory = Path(scratch)
        make_checkpoint(directory)
        config = ModelConfig.from_directory(directory)
        parts = {ranks: load(directory, config, ranks) for ranks in RANKS}
        pool = new_pool(parts[1], max(contexts) + MORE_TOKENS)
        rows = []
        for context in contexts:
            progress(f"{context:,} tokens")
            rows += measure(parts, pool, context, rounds)
    columns = ("context", "ranks", "tensor_ms", "lane_ms", "lane_over_tensor")
    table(columns, [[row[column] for column in columns] for row in rows])
    claims = [
        claim(
            f"a lane of {row['ranks']} over a tensor rank of {row['ranks']}, {row['context']:,} tokens",
            row["lane_over_tensor"],
            "ratio",
            1.0,
        )
        for row in rows
        if row["ranks"] == max(RANKS) and row["context"] == max(contexts)
    ]
    return report(claims, arguments.json, {"rows": rows})


def make_checkpoint(directory: Path) -> None:
    """Write one dense layer of DeepSeek-V2-Lite's sizes."""
    config = transformers.DeepseekV2Config(
        vocab_size=1024,
        hidden_size=2048,
        intermediate_size=10_944,
        num_hidden_layers=1,
        num_attention_heads=16,
        num_key_value_heads=16,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        first_k_dense_replace=1,
        topk_method="greedy",
        routed_scaling_factor=1.0,
        n_group=1,
        topk_group=1,
        max_position_embeddings=2 * max(CONTEXTS),
    )
    torch.manual_seed(0)
    transformers.DeepseekV2ForCausalLM(config).save_pretrained(directory)


def load(directory: Path, config: ModelConfig, ranks: int) -> Transformer:
    """Load the part of the first of so many tensor ranks, with the kernels that a rank chooses."""
    shard, device = Shard(0, ranks, 0, config.num_layers, config.num_layers), host_device(torch.float32)
    kernels = choose_kernels(shard.kernel_sizes(config), device)
    return Transformer.load(directory, config, shard, device=device, kernels=kernels)


def new_pool(model: Transformer, tokens: int) -> KVCache:
    """Return a pool whose rows are random; zeros would be pages that the system keeps once."""
    pool = model.new_kv_cache(-(-tokens // BLOCK_TOKENS), BLOCK_TOKENS)
    for rows in pool.keys:
        first = torch.randn_like(rows.flatten(0, -2)[: 64 * BLOCK_TOKENS])
        flat = rows.flatten(0, -2)
        for start in range(0, len(flat), len(first)):
            part = flat[start : start + len(first)]
            part.copy_(first[: len(part)])
    return pool


def measure(parts: dict[int, Transformer], pool: KVCache, context: int, rounds: int) -> list[Row]:
    """Return the milliseconds of a decode on one tensor rank and on one lane, for each number of ranks."""
    work = {("tensor", ranks): partial(timed, parts[ranks], pool, context) for ranks in RANKS}
    work |= {
        ("lane", ranks): partial(timed, parts[1], pool, context // ranks) for ranks in RANKS if ranks > 1
    }
    names = {f"{way} {ranks}": run for (way, ranks), run in work.items()}
    seconds = in_turn(rounds, names)
    seconds["lane 1"] = seconds["tensor 1"]
    return [
        {
            "context": context,
            "ranks": ranks,
            "tensor_ms": round(1e3 * statistics.median(seconds[f"tensor {ranks}"]), 3),
            "lane_ms": round(1e3 * statistics.median(seconds[f"lane {ranks}"]), 3),
            "lane_over_tensor": round(ratio(seconds[f"lane {ranks}"], seconds[f"tensor {ranks}"]), 3),
        }
        for ranks in RANKS
    ]


def timed(model: Transformer, pool: KVCache, context: int) -> float:
    """Return the CPU seconds of one decode behind so many tokens."""
    blocks = np.arange(-(-(context + 1) // BLOCK_TOKENS))
    span = SequenceSpan(0, 1, context, blocks)
    step = model.prepare(torch.tensor([context]), [span], pool)
    started = time.thread_time()
    model.forward(torch.tensor([1]), step)
    return time.thread_time() - started


if __name__ == "__main__":
    exit_with(main)
