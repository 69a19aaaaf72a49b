"""Models of Llama's form with random weights, made on a device without a checkpoint. It needs torch and numpy alone."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from medha_worker.device import Device
from medha_worker.kernels.protocol import Kernels
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.transformer import Transformer
from medha_worker.model.weights import LayerWeights, Shard, Weights


class Shape(Protocol):
    """The sizes of a model; those of `medha.cost.hardware` have them."""

    @property
    def layers(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def query_heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def intermediate(self) -> int: ...
    @property
    def vocab(self) -> int: ...


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """Sizes of a model, where `medha.cost.hardware` cannot be imported: it needs more packages."""

    layers: int
    hidden: int
    query_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int


LLAMA3_8B = LlamaShape(32, 4096, 32, 8, 128, 14336, 128256)
SMALL = LlamaShape(2, 256, 4, 2, 64, 512, 1024)

DEVIATION = 0.02
"""Standard deviation of weights, as models are initialised before they are trained."""


def config_fields(shape: Shape, layers: int) -> dict[str, Any]:
    """Return the fields of a `config.json`."""
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": shape.vocab,
        "hidden_size": shape.hidden, "intermediate_size": shape.intermediate, "num_hidden_layers": layers,
        "num_attention_heads": shape.query_heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 2**21, "rope_theta": 5e5, "torch_dtype": "bfloat16",
        "tie_word_embeddings": False, "hidden_act": "silu",
    }  # fmt: skip


def model_config(shape: Shape, layers: int) -> ModelConfig:
    """Return the configuration as it is read from a checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config_fields(shape, layers)), encoding="utf-8")
        return ModelConfig.from_directory(Path(folder))


def random_weights(config: ModelConfig, shard: Shard, device: Device, *, copies: bool = True) -> Weights:
    """Return normal weights of one rank; with `copies` false, all layers share the weights of the first."""

    def new(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=device.dtype, device=device.torch_device).normal_(0.0, DEVIATION)

    def norm() -> torch.Tensor:
        return new(config.hidden_size).add_(1.0)

    def layer() -> LayerWeights:
        return LayerWeights(
            input_norm=norm(), qkv=new(hidden, q + 2 * kv), qkv_bias=None, q_norm=None, k_norm=None,
            output=new(q, hidden), output_bias=None, post_norm=norm(), gate_up=new(hidden, 2 * wide), gate_up_bias=None,
            down=new(wide, hidden), down_bias=None,
        )  # fmt: skip

    q, kv = shard.query_heads(config) * config.head_dim, shard.kv_heads(config) * config.head_dim
    hidden, wide = config.hidden_size, config.intermediate_size // shard.tensor_size
    vocabulary = shard.vocabulary(config)[shard.tensor_rank]
    words = vocabulary.stop - vocabulary.start
    first = layer()
    layers = [first, *(layer() if copies else first for _ in range(1, config.num_layers))]
    return Weights(device, layers, vocabulary.start, new(words, hidden), norm(), new(hidden, words))


def random_model(
    shape: Shape, layers: int, device: Device, kernels: Kernels, *, tensor: int = 1, copies: bool = True
) -> Transformer:
    """Return a model of `layers` layers: whole, or the first of `tensor` ranks."""
    config = model_config(shape, layers)
    shard = Shard(0, tensor, 0, layers, layers)
    return Transformer(config, shard, random_weights(config, shard, device, copies=copies), kernels=kernels)
