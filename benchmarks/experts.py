"""Measure what it would gain, and lose, to divide a model's experts over lanes, beside what lanes and tensor ranks do today.

    python benchmarks/experts.py --quick
    python benchmarks/experts.py --json benchmarks/results/experts.json

Random checkpoints have the routers of published models (experts, choices and groups) in small sizes. The rows of a step
are positions of random texts, as a layer in the middle of the model sees them, and the engine's own router chooses for them.
Their experts are then computed, on one thread, by one of several ranks that hold the layer:

* `whole`: a lane that holds all experts computes its share of the rows, as lanes do today;
* `divided`: a lane that holds every n-th part of the experts computes all rows that go to these: the busiest lane counts, and
  nothing is counted for sending rows to lanes and results back;
* `tensor`: a tensor rank that holds a part of each expert's width computes all rows.

For each number of rows it prints how many rows go to the busiest lane (1: all have equally many), the share of the experts
that `whole` and `divided` read, of all experts of the layer, and the seconds of each. Claims are times of `tensor` over
`divided`: the former divides the same memory over as many ranks.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from harness import Row, claim, exit_with, in_turn, parser, progress, ratio, report, table

from medha_worker.device import host_device
from medha_worker.kernels.name_table import choose_kernels
from medha_worker.kernels.protocol import Kernels
from medha_worker.model.experts_mlp import Choice, choose, experts_mlp
from medha_worker.model.model_config import ExpertsConfig, ModelConfig
from medha_worker.model.quantised_weights import LinearProducts
from medha_worker.model.tensor_group import Alone
from medha_worker.model.transformer import Transformer
from medha_worker.model.weights import LayerWeights, Shard

ROWS = (1, 8, 32, 512)
LANES = (2, 8)
DRAWS = 8  # sets of rows, whose imbalance is averaged
TEXTS, TEXT_TOKENS = 32, 64
WAYS = ("whole", "divided", "tensor")
SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "initializer_range": 0.05,
}
FAMILIES: Mapping[str, tuple[type, type, dict[str, Any]]] = {
    "mixtral": (
        transformers.MixtralConfig,
        transformers.MixtralForCausalLM,
        {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 3584},
    ),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        transformers.Qwen3MoeForCausalLM,
        {
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "intermediate_size": 512,
            "head_dim": 64,
            "norm_topk_prob": True,
        },
    ),
    "deepseek_v3": (
        transformers.DeepseekV3Config,
        transformers.DeepseekV3ForCausalLM,
        {
            "num_key_value_heads": 8,
            "q_lora_rank": 128,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 512,
            "intermediate_size": 512,
            "routed_scaling_factor": 2.5,
        },
    ),
}


@dataclass(frozen=True)
class SparseLayer:
    """The last layer of a random checkpoint, and the rows of many texts as it sees them, [rows, hidden]."""

    kernels: Kernels
    products: LinearProducts
    experts: ExpertsConfig
    weights: LayerWeights
    rows: torch.Tensor

    def choice(self, rows: torch.Tensor) -> Choice:
        return choose(self.kernels, self.experts, self.weights, rows)

    def whole(self, rows: torch.Tensor) -> Callable[[], object]:
        """Return the work of a lane that holds all experts."""
        return partial(
            experts_mlp,
            self.kernels,
            self.products,
            self.experts,
            self.weights,
            rows,
            self.choice(rows),
        )

    def divided(self, rows: torch.Tensor, lane: int, lanes: int) -> Callable[[], object]:
        """Return the work of a lane that holds a part of the experts: a row for each choice of one of them."""
        assert isinstance(self.weights.gate_up, torch.Tensor)
        assert isinstance(self.weights.down, torch.Tensor)
        weights, chosen = self.choice(rows)
        part = _experts_of(lane, lanes, self.experts.count)
        mine, place = torch.where((chosen >= part.start) & (chosen < part.stop))
        if not len(mine):
            return lambda: None
        held = replace(self.weights, gate_up=self.weights.gate_up[part], down=self.weights.down[part])
        few = replace(self.experts, count=part.stop - part.start, per_token=1)
        own = weights[mine, place, None], chosen[mine, place, None] - part.start
        return partial(experts_mlp, self.kernels, self.products, few, held, rows[mine], own)

    def tensor(self, rows: torch.Tensor, ranks: int) -> Callable[[], object]:
        """Return the work of one of several tensor ranks: a part of the width of each expert."""
        assert isinstance(self.weights.gate_up, torch.Tensor)
        assert isinstance(self.weights.down, torch.Tensor)
        width = self.experts.intermediate_size // ranks
        gate, up = self.weights.gate_up.chunk(2, dim=2)
        gate_up = torch.cat([gate[..., :width], up[..., :width]], dim=2).contiguous()
        held = replace(self.weights, gate_up=gate_up, down=self.weights.down[:, :width].contiguous())
        return partial(experts_mlp, self.kernels, self.products, self.experts, held, rows, self.choice(rows))


def _experts_of(lane: int, lanes: int, count: int) -> slice:
    return slice(lane * count // lanes, (lane + 1) * count // lanes)


def main() -> int:
    options = parser(__doc__, quick="two numbers of rows, eight lanes, one round", rounds=3, seed=True)
    arguments = options.parse_args()
    torch.set_num_threads(1)
    rounds = 1 if arguments.quick else arguments.rounds
    lanes = LANES[1:2] if arguments.quick else LANES
    found = []
    with tempfile.TemporaryDirectory() as scratch, torch.inference_mode():
        for family in FAMILIES:
            progress(family)
            layer = sparse_layer(family, Path(scratch) / family, arguments.seed)
            for count in (8, 512) if arguments.quick else ROWS:
                found += [measure(family, layer, count, ranks, rounds, arguments.seed) for ranks in lanes]
    columns = ("family", "rows", "lanes", "busiest", "whole_share", "divided_share", "tensor_over_divided")
    table(columns, [[row[column] for column in columns] for row in found])
    claims = [
        claim(
            f"{row['family']}, {row['rows']} rows on {row['lanes']} ranks: tensor over divided",
            row["tensor_over_divided"],
            "ratio",
            1.0,
        )
        for row in found
        if row["lanes"] == max(lanes)
    ]
    return report(claims, arguments.json, {"results": found})


def sparse_layer(family: str, directory: Path, seed: int) -> SparseLayer:
    """Make a random checkpoint and load it; its own layers compute the rows that its last layer sees."""
    config_class, model_class, extra = FAMILIES[family]
    torch.manual_seed(seed)
    model = model_class(config_class(**SIZES | extra)).eval()
    model.save_pretrained(directory)
    seen: list[torch.Tensor] = []
    hook = model.model.layers[-1].mlp.register_forward_pre_hook(
        lambda _module, inputs: seen.append(inputs[0].flatten(0, 1))
    )
    model(torch.randint(0, SIZES["vocab_size"], (TEXTS, TEXT_TOKENS)))
    hook.remove()
    config = ModelConfig.from_directory(directory)
    device = host_device(torch.float32)
    kernels = choose_kernels(Shard.whole(config).kernel_sizes(config), device)
    loaded = Transformer.load(directory, config, Shard.whole(config), device=device, kernels=kernels)
    assert config.experts is not None
    products = LinearProducts(kernels.products, Alone(), 0, 1)
    return SparseLayer(kernels, products, config.experts, loaded._weights.layers[-1], seen[0])


def measure(family: str, layer: SparseLayer, count: int, lanes: int, rounds: int, seed: int) -> Row:
    """Return how so many rows of a step divide over lanes, and the seconds of one rank."""
    stream = torch.Generator().manual_seed(seed)
    drawn = [layer.rows[torch.randperm(len(layer.rows), generator=stream)[:count]] for _ in range(DRAWS)]
    busiest, whole_share, divided_share = [], [], []
    for rows in drawn:
        _, chosen = layer.choice(rows)
        parts = [_experts_of(lane, lanes, layer.experts.count) for lane in range(lanes)]
        passes = [int(((chosen >= part.start) & (chosen < part.stop)).sum()) for part in parts]
        busiest.append(max(passes) * lanes / sum(passes))
        own = chosen[: -(-count // lanes)]  # the rows of one lane
        whole_share.append(own.unique().numel() / layer.experts.count)
        touched = chosen.unique()
        read = [int(((touched >= part.start) & (touched < part.stop)).sum()) for part in parts]
        divided_share.append(max(read) / layer.experts.count)
    _, chosen = layer.choice(drawn[0])
    parts = [_experts_of(lane, lanes, layer.experts.count) for lane in range(lanes)]
    worst = max(
        range(lanes),
        key=lambda lane: int(((chosen >= parts[lane].start) & (chosen < parts[lane].stop)).sum()),
    )
    work = {
        "whole": layer.whole(drawn[0][: -(-count // lanes)]),
        "divided": layer.divided(drawn[0], worst, lanes),
        "tensor": layer.tensor(drawn[0], lanes),
    }
    seconds = in_turn(rounds, {way: partial(timed, work[way]) for way in WAYS})
    return {
        "family": family,
        "rows": count,
        "lanes": lanes,
        "busiest": round(statistics.mean(busiest), 3),
        "whole_share": round(statistics.mean(whole_share), 4),
        "divided_share": round(statistics.mean(divided_share), 4),
        **{f"{way}_seconds": round(statistics.median(seconds[way]), 6) for way in WAYS},
        "divided_over_whole": round(ratio(seconds["divided"], seconds["whole"]), 3),
        "tensor_over_divided": round(ratio(seconds["tensor"], seconds["divided"]), 3),
    }


def timed(work: Callable[[], object]) -> float:
    """Return the least CPU seconds of three runs."""
    taken = []
    for _ in range(3):
        started = time.thread_time()
        work()
        taken.append(time.thread_time() - started)
    return min(taken)


if __name__ == "__main__":
    exit_with(main)
