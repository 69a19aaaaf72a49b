"""Print, as JSON, which of FlashInfer's modules the adapter asks for, and which are declared to be compiled.

    FLASHINFER_USE_CUDA_NORM=1 FLASHINFER_CUDA_ARCH_LIST=9.0a python -m tests.worker.kernels.flashinfer_asked

Modules are neither compiled nor loaded: one that computes nothing stands for each of them.
"""

from __future__ import annotations

import importlib
import json
from itertools import product
from typing import Any
from unittest.mock import MagicMock

import torch

from medha_worker.device import host_device
from medha_worker.kernels.flashinfer.compiled_modules import (
    DTYPES,
    HEAD_DIMS,
    WIDE_HEAD_DIMS,
    declared_modules,
)
from medha_worker.kernels.flashinfer.flashinfer_attention import FlashInferAttention, ScaledPool
from medha_worker.kernels.flashinfer.flashinfer_rows import FlashInferRows
from medha_worker.kernels.protocol import KernelSizes
from medha_worker.kernels.sequence_span import SequenceSpan
from medha_worker.kernels.torch_rows import TorchRows

from .flashinfer_real import without_pinned_memory

BLOCK_TOKENS, BLOCKS = 16, [0, 1]
SPANS = [
    SequenceSpan(0, 1, 20, BLOCKS),
    SequenceSpan(1, 3, 5, BLOCKS),
    SequenceSpan(4, 3, 5, BLOCKS, stride=2),
]
"""A decode, a chunk, and a strided chunk, which is two batches and a merge."""


def asked() -> set[str]:
    """Return the names of modules that are loaded by steps of all types, heads, windows and pools."""
    names = set()

    def load(spec: Any) -> MagicMock:
        names.add(spec.name)
        return MagicMock()

    importlib.import_module("flashinfer.jit.core").JitSpec.build_and_load = load
    library = importlib.import_module("flashinfer")
    pools = (None, ScaledPool(torch.float8_e4m3fn, 1.0, 1.0))
    for dtype, head_dim, window, scaled, wide_rows in product(
        DTYPES.values(), HEAD_DIMS, (None, 7), pools, (None, 3)
    ):
        if wide_rows is not None and (scaled is not None or head_dim not in WIDE_HEAD_DIMS):
            continue
        sizes = KernelSizes(4, 2, head_dim, 256, 512)
        heads = torch.zeros(SPANS[-1].rows.stop, 4, head_dim, dtype=dtype)
        pool = torch.zeros(2, len(BLOCKS) * BLOCK_TOKENS, head_dim, dtype=scaled.dtype if scaled else dtype)
        attention = FlashInferAttention(
            library, host_device(dtype), sizes, wide_rows=wide_rows, scaled_pool=scaled
        )
        attention.plan(SPANS, BLOCK_TOKENS, window).attend(heads, pool, pool)
        rows, angles = FlashInferRows(library, TorchRows()), heads[:, 0, : head_dim // 2]
        rows.rms_norm(heads, heads[0, 0], 1e-5)
        rows.rotate(heads, angles, angles)
        rows.silu_multiply(heads.flatten(1))
    return names


def main() -> None:
    without_pinned_memory()
    declared = {make().name for make in declared_modules().values()}
    print(json.dumps({"asked": sorted(asked()), "declared": sorted(declared)}))


if __name__ == "__main__":
    main()
