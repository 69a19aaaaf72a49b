"""The choice of kernels for a model on this machine."""

from __future__ import annotations

import torch

from medha_worker.kernels.cpu.compiled_attention import CpuAttention
from medha_worker.kernels.cpu.compiled_rows import CompiledRows
from medha_worker.kernels.cpu.host_compiler import Target
from medha_worker.kernels.cpu.openmp import torchs_openmp
from medha_worker.kernels.protocol import Kernels
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.weights import Shard


def choose_kernels(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, shard: Shard | None = None
) -> Kernels:
    """Return compiled kernels for float32 on a CPU if a rank's sizes fill vector registers, else plain torch.

    `shard` is the rank's part of the model; by default, all of it.
    """
    shard = shard or Shard.whole(config)
    openmp = torchs_openmp()
    if dtype != torch.float32 or device.type != "cpu" or openmp is None:
        return Kernels()
    lanes = Target.of_host().lanes
    group = shard.query_heads(config) // shard.kv_heads(config)
    kernels = Kernels()
    if config.head_dim % lanes == 0:
        kernels = Kernels(CpuAttention(config.head_dim, group, openmp), kernels.rows)
    sizes = config.hidden_size, config.intermediate_size // shard.tensor_size, config.head_dim // 2
    if all(size % lanes == 0 for size in sizes):
        kernels = Kernels(kernels.attention, CompiledRows(openmp))
    return kernels
