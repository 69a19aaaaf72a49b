"""FlashInfer's kernels for one rank, and the conditions under which they can be used.

New K and V are written by plain torch: its scatter takes one index and writes anywhere, and its slices are as fast as a copy
can be. FlashInfer's append needs three index tensors per step for the same, and one compiled module more.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import torch

from medha_worker.device import Device
from medha_worker.kernels.flashinfer.flashinfer_attention import FlashInferAttention
from medha_worker.kernels.flashinfer.flashinfer_rows import FlashInferRows
from medha_worker.kernels.protocol import Kernels, KernelSizes, KernelsUnavailable

_HEAD_DIMS = (64, 128, 256)
# Rows of the MLP are read 16 bytes at a time.
_VALUES_AT_ONCE = 8


def flashinfer_kernels(sizes: KernelSizes, device: Device, others: Kernels) -> Kernels:
    """Return FlashInfer's attention and row operators; `others` write K and V, and run rows that these cannot.

    Raises:
        KernelsUnavailable: they cannot run this model on this device.
    """
    if device.torch_device.type != "cuda":
        raise KernelsUnavailable(f"they run on NVIDIA GPUs, and the device is {device.torch_device}")
    if device.dtype not in (torch.float16, torch.bfloat16):
        raise KernelsUnavailable(
            f"they compute in float16 and bfloat16, and the model runs in {device.dtype}"
        )
    if sizes.head_dim not in _HEAD_DIMS:
        raise KernelsUnavailable(
            f"they have heads of {', '.join(map(str, _HEAD_DIMS))} values, and the model's have {sizes.head_dim}"
        )
    if not torch.cuda.is_available():
        raise KernelsUnavailable("torch sees no GPU")
    attention = FlashInferAttention(_library(), device, sizes)
    kernels = replace(others, name="flashinfer", attention=attention)
    if sizes.intermediate_size % _VALUES_AT_ONCE:
        return kernels
    return replace(kernels, rows=FlashInferRows(attention.library, others.rows))


def _library() -> Any:
    """Import FlashInfer, which takes seconds."""
    try:
        return import_module("flashinfer")
    except Exception as error:  # its import runs code of a dozen packages, which raise what they like
        raise KernelsUnavailable(
            f"flashinfer cannot be imported ({type(error).__name__}: {error}); the extra medha[gpu] brings it"
        ) from error
