"""FlashInfer's kernels for one rank, and the conditions under which they can be used.

New K and V are written by plain torch: its scatter takes one index and writes anywhere, and its slices are as fast as a copy
can be. FlashInfer's append needs three index tensors per step for the same, and one compiled module more.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch

from medha_worker.device import Device
from medha_worker.kernels.flashinfer.compiled_modules import DTYPES, HEAD_DIMS, WIDE_HEAD_DIMS
from medha_worker.kernels.flashinfer.flashinfer_attention import FlashInferAttention, ScaledPool
from medha_worker.kernels.flashinfer.flashinfer_rows import FlashInferRows
from medha_worker.kernels.protocol import Kernels, KernelSizes, KernelsUnavailable
from medha_worker.kernels.sequence_span import SequenceSpan

# Rows of the MLP are read 16 bytes at a time.
_VALUES_AT_ONCE = 8
_HOPPER = 9  # major compute capability
_WIDE_TILE_ROWS = 128
_WIDE_SHARE = 0.75  # of a GPU's processors that have a tile at least

_log = logging.getLogger("medha.kernels")


def flashinfer_kernels(sizes: KernelSizes, device: Device, others: Kernels) -> Kernels:
    """Return FlashInfer's attention and row operators.

    Args:
        sizes: Heads and widths of the model's part.
        device: Where it runs.
        others: Kernels that write K and V, and run rows that these cannot.

    Raises:
        KernelsUnavailable: they cannot run this model on this device.
    """
    if device.torch_device.type != "cuda":
        raise KernelsUnavailable(f"they run on NVIDIA GPUs, and the device is {device.torch_device}")
    if device.dtype not in DTYPES.values():
        raise KernelsUnavailable(
            f"they compute in {' and '.join(DTYPES)}, and the model runs in {device.dtype}"
        )
    if sizes.made_head_dim:
        raise KernelsUnavailable(
            "they have no attention over latents here, which all heads of the model share"
        )
    if sizes.head_dim not in HEAD_DIMS:
        raise KernelsUnavailable(
            f"they have heads of {', '.join(map(str, HEAD_DIMS))} values, and the model's have {sizes.head_dim}"
        )
    if not torch.cuda.is_available():
        raise KernelsUnavailable("torch sees no GPU")
    # The model multiplies queries and results by the scales of their heads.
    scaled_pool = ScaledPool(torch.float8_e4m3fn, 1.0, 1.0) if sizes.has_fp8_kv else None
    library = _library()
    attention = FlashInferAttention(
        library, device, sizes, wide_rows=_tried_wide_rows(library, sizes, device), scaled_pool=scaled_pool
    )
    kernels = replace(others, name="flashinfer", attention=attention)
    if not (sizes.intermediate_size % _VALUES_AT_ONCE or sizes.expert_intermediate_size % _VALUES_AT_ONCE):
        kernels = replace(kernels, rows=FlashInferRows(attention.library, others.rows))
    try:
        try_out(kernels, sizes, device)
    except Exception as error:  # a compiler's or a driver's
        raise KernelsUnavailable(
            f"they failed when they were tried out ({type(error).__name__}: {error})"
        ) from error
    return kernels


def wide_rows(sizes: KernelSizes, capability: tuple[int, int], processors: int) -> int | None:
    """Return the rows from which chunks run on FlashInfer's "fa3" on a GPU, or None if they never do.

    Its tiles are 128 rows of one head, and unlike "fa2" it does not split keys among processors. So it is faster where nearly
    all of them have a tile: on an H200, for 32 heads of 128 values behind 524,288 tokens, 512 rows ran at 527 TFLOP/s against 344,
    and 32 rows at 36 against 292 (docs/performance-gpu.md).

    Args:
        sizes: Heads and widths of the model's part.
        capability: Compute capability of the GPU.
        processors: Number of its multiprocessors.
    """
    if capability[0] != _HOPPER or sizes.head_dim not in WIDE_HEAD_DIMS or sizes.has_fp8_kv:
        return None
    return -(-int(_WIDE_SHARE * processors * _WIDE_TILE_ROWS) // sizes.query_heads)


def _tried_wide_rows(library: Any, sizes: KernelSizes, device: Device) -> int | None:
    """Return `wide_rows` of this device, or None if its kernel cannot run here; then the log says why."""
    about = torch.cuda.get_device_properties(device.torch_device)
    rows = wide_rows(sizes, (about.major, about.minor), about.multi_processor_count)
    if rows is None:
        return None
    try:
        _try_wide(FlashInferAttention(library, device, sizes, wide_rows=rows), sizes, device, rows)
    except Exception as error:  # noqa: BLE001 - a compiler's or a driver's
        _log.warning(
            "large chunks run on FlashInfer's fa2, because fa3 failed (%s: %s)", type(error).__name__, error
        )
        return None
    return rows


@torch.inference_mode()
def _try_wide(attention: FlashInferAttention, sizes: KernelSizes, device: Device, rows: int) -> None:
    block_tokens = 16
    blocks = list(range(-(-rows // block_tokens)))
    one = device.place(torch.zeros(1, dtype=device.dtype))
    pool = one.new_zeros(sizes.kv_heads, len(blocks) * block_tokens, sizes.head_dim)
    heads = one.new_zeros(rows, sizes.query_heads, sizes.head_dim)
    attention.plan([SequenceSpan(0, rows, 0, blocks)], block_tokens).attend(heads, pool, pool)
    device.synchronise()


@torch.inference_mode()
def try_out(kernels: Kernels, sizes: KernelSizes, device: Device) -> None:
    """Run each kernel once. Those that are not compiled yet are compiled here, for minutes, and not in a request's step."""
    one = device.place(torch.zeros(1, dtype=device.dtype))
    block_tokens, blocks = 16, [0, 1]
    spans = [
        SequenceSpan(0, 1, 20, blocks),
        SequenceSpan(1, 3, 5, blocks),
        SequenceSpan(4, 3, 5, blocks, stride=2),  # a mask, and a merge
        SequenceSpan(7, 3, 5, blocks, is_causal=False),
    ]
    rows = spans[-1].rows.stop
    heads = one.new_zeros(rows, sizes.query_heads, sizes.head_dim)
    pool = one.new_zeros(sizes.kv_heads, len(blocks) * block_tokens, sizes.head_dim)
    if sizes.has_fp8_kv:
        pool = pool.to(torch.float8_e4m3fn)
    angles = one.new_zeros(rows, sizes.head_dim // 2)
    kernels.rows.rotate(heads, angles, angles)
    for x in (one.new_zeros(rows, sizes.hidden_size), heads):
        kernels.rows.rms_norm(x, one.new_zeros(x.shape[-1]), 1e-5)
    wide = one.new_zeros(rows, sizes.hidden_size)
    kernels.rows.add_rms_norm(wide, wide.clone(), one.new_zeros(sizes.hidden_size), 1e-5)
    kernels.rows.silu_multiply(one.new_zeros(rows, 2 * sizes.intermediate_size))
    step = kernels.attention.plan(spans, block_tokens)
    step.attend(heads, pool, pool)
    device.synchronise()


def _library() -> Any:
    """Import FlashInfer, which takes seconds."""
    try:
        return import_module("flashinfer")
    except Exception as error:  # its import runs code of a dozen packages, which raise what they like
        raise KernelsUnavailable(
            f"flashinfer cannot be imported ({type(error).__name__}: {error}); the extra medha[gpu] brings it"
        ) from error
