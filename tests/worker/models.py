"""Models that tests load without a rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from medha.api.determinism import Determinism
from medha_worker.checkpoints.head_checkpoint import eagle3_config
from medha_worker.device import host_device
from medha_worker.kernels.name_table import choose_kernels, torch_kernels
from medha_worker.kernels.protocol import Kernels
from medha_worker.kernels.sequence_span import SequenceSpan
from medha_worker.model.eagle3_head import Eagle3Head
from medha_worker.model.kv_cache import KVCache
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.mtp_head import MtpHead
from medha_worker.model.spread import SpreadPlan
from medha_worker.model.transformer import Transformer
from medha_worker.model.weights import DTYPES, Shard, load_embedding


def kernels_of_a_rank(
    config: ModelConfig, shard: Shard | None = None, determinism: Determinism = "bestEffort"
) -> Kernels:
    """Return the kernels that a rank chooses for the checkpoint's dtype on this machine."""
    sizes = (shard or Shard.whole(config)).kernel_sizes(config)
    return choose_kernels(sizes, host_device(DTYPES[config.dtype]), determinism)


def load_model(
    directory: Path,
    config: ModelConfig,
    shard: Shard | None = None,
    *,
    dtype: torch.dtype | None = None,
    kernels: Kernels | None = None,
    collected: Sequence[int] = (),
) -> Transformer:
    """Load a checkpoint on the CPU: by default all of it, in its own dtype and with plain torch."""
    device = host_device(dtype or DTYPES[config.dtype])
    return Transformer.load(
        directory,
        config,
        shard or Shard.whole(config),
        device=device,
        kernels=kernels or torch_kernels(device),
        collected=collected,
    )


def load_eagle3(
    directory: Path, config: ModelConfig, model_directory: Path, kernels: Kernels | None = None
) -> Eagle3Head:
    """Load an EAGLE-3 head for the model of `config` on the CPU, in its dtype and with plain torch."""
    device = host_device(DTYPES[config.dtype])
    return Eagle3Head.read(
        directory,
        eagle3_config(directory, config),
        device=device,
        kernels=kernels or torch_kernels(device),
        embedding=load_embedding(model_directory, config, device=device),
    )


def load_head(directory: Path, config: ModelConfig) -> MtpHead:
    """Load the prediction head of a checkpoint on the CPU, in its own dtype and with plain torch."""
    device = host_device(DTYPES[config.dtype])
    return MtpHead.read(directory, config.with_head(), device=device, kernels=torch_kernels(device))


def run_step(
    model: Transformer,
    tokens_or_hidden: torch.Tensor,
    positions: torch.Tensor,
    spans: Sequence[SequenceSpan],
    kv_cache: KVCache,
    spread: SpreadPlan | None = None,
) -> torch.Tensor:
    """Prepare one step and run a model's layers over it."""
    return model.forward(tokens_or_hidden, model.prepare(positions, spans, kv_cache, spread))
