"""Small EAGLE-3 heads: `medha model init DIR --eagle3-of TARGET`.

They are random, so they guess nothing right, but they have the exact form of published ones, with a reduced vocabulary. So
everything around them can be tried without a download.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch

from medha.errors import ConfigInvalid
from medha_worker.checkpoints.head_checkpoint import eagle3_config
from medha_worker.checkpoints.new_checkpoint import new_checkpoint, save_weights, write_json
from medha_worker.model.eagle3_config import Eagle3Config
from medha_worker.model.eagle3_tensors import GUESSABLE, TARGETS
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.weights import DTYPES


def init_eagle3(directory: Path | str, target: Path | str, *, seed: int, force: bool = False) -> None:
    """Create a random EAGLE-3 head in `directory` for the model in `target`; the same arguments give the same bytes.

    It guesses half of the model's tokens, and has no embedding of its own.

    Raises:
        MedhaError: `target` is no checkpoint, or has a single layer; the seed is negative; or the directory is in use.
    """
    if seed < 0:
        raise ConfigInvalid(f"seed is {seed}; it must be 0 or more")
    config = ModelConfig.from_directory(target)
    if config.num_layers < 2:
        raise ConfigInvalid(
            f"{target} has one layer, and an EAGLE-3 head takes hidden states of more; name another"
        )
    layers = config.num_layers
    inner = (2, layers // 2, layers - 3)
    heads = config.num_query_heads
    kv_heads = heads if config.latent is not None else config.num_kv_heads
    with new_checkpoint(directory, force=force) as made:
        write_json(
            made / "config.json",
            {
                "architectures": ["LlamaForCausalLMEagle3"],
                "model_type": "llama",
                "vocab_size": config.vocab_size,
                "draft_vocab_size": config.vocab_size // 2,
                "hidden_size": config.hidden_size,
                "intermediate_size": config.intermediate_size,
                "num_hidden_layers": 1,
                "num_attention_heads": heads,
                "num_key_value_heads": kv_heads,
                "head_dim": config.hidden_size // heads,
                "hidden_act": "silu",
                "max_position_embeddings": config.max_position_tokens,
                "rms_norm_eps": config.rms_norm_eps,
                "rope_theta": config.rope.theta,
                "tie_word_embeddings": False,
                "torch_dtype": config.dtype,
                "eagle_aux_hidden_state_layer_ids": list(inner if layers > 6 else (0, layers // 2, layers)),
            },
        )
        head = Eagle3Config.from_directory(made, config)
        save_weights(made, _random_weights(head, seed, DTYPES[config.dtype]))
        eagle3_config(made, config)


def _random_weights(head: Eagle3Config, seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return weights that keep the variance of their inputs, and the map of the tokens that the head guesses."""
    # numpy's stream is the same on every machine; torch.randn's depends on the vector width.
    stream = np.random.Generator(np.random.PCG64(seed))
    vocabulary, guessed = head.layer.vocab_size, head.draft_vocab_size
    weights: dict[str, torch.Tensor] = {}
    for name, shape in head.shapes().items():
        if name == TARGETS:
            continue
        values = stream.standard_normal(shape, dtype=np.float32)
        scaled = 1.0 + 0.1 * values if len(shape) == 1 else values / math.sqrt(shape[1])
        weights[name] = torch.from_numpy(scaled.astype(np.float32)).to(dtype)
    weights["lm_head.weight"] *= 3.0
    tokens = np.sort(stream.choice(vocabulary, size=guessed, replace=False))
    weights[TARGETS] = torch.from_numpy(tokens - np.arange(guessed))
    weights[GUESSABLE] = torch.zeros(vocabulary, dtype=torch.bool)
    weights[GUESSABLE][torch.from_numpy(tokens)] = True
    return weights
