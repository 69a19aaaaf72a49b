"""The kernels of `spec.determinism: batchInvariant`: a row's numbers do not depend on the rows that are computed with it.

That holds for the rows of other sequences, and for those of its own: a token gets the same K, V and logits to the bit
in a chunk of any size and as a decode. So a sequence that is resumed, or that finds its prefix in the cache, goes on
as if nothing had happened. Every product and every sum over keys has tiles of fixed sizes at fixed places for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch

from medha_worker.device import Device
from medha_worker.kernels.protocol import Kernels, KernelSizes, KernelsUnavailable
from medha_worker.kernels.sequence_span import SequenceSpan

_ROWS = 70
_PARTS = (slice(0, 1), slice(5, 6), slice(69, 70), slice(1, 4), slice(3, 36), slice(2, 66))
"""Rows that are also computed without the others: one, a few, half a tile of Triton's kernels, and a whole one."""
_BLOCK_TOKENS = 16
_MOST_COLUMNS = 2048  # of the weights that are tried: enough for every thread, little memory


def batch_invariant_kernels(sizes: KernelSizes, device: Device, others: Kernels) -> Kernels:
    """Return kernels that are batch-invariant, checked on this device.

    `others` write K and V, and sample. Elementwise operators come from `others`, too, because they contain no sums.

    Raises:
        KernelsUnavailable: there are none for this model here.
    """
    make = _on_host if device.is_host else _on_gpu
    # By the number of rows, libraries choose how they multiply with quantised weights. So quantised weights are
    # dequantised here and multiplied by our own kernels.
    kernels = replace(make(sizes, device, others), name="batch-invariant", pack_rows=None)
    differing = differences(kernels, sizes, device)
    if differing:
        raise KernelsUnavailable(
            f"rows differ with those beside them in {', '.join(differing)} on this machine"
        )
    return kernels


def _on_host(sizes: KernelSizes, device: Device, others: Kernels) -> Kernels:
    if device.dtype != torch.float32:
        raise KernelsUnavailable(
            f"on a CPU it needs float32, and spec.model.dtype makes the model run in {device.dtype}"
        )
    try:
        from medha_worker.kernels.cpu.compiled_kernels import compiled_kernels
    except ImportError as error:
        raise KernelsUnavailable(f"llvmlite cannot be imported ({error})") from error
    try:
        return compiled_kernels(sizes, device, others, invariant=True)
    except KernelsUnavailable as error:
        raise KernelsUnavailable(f"it needs the compiled kernels, and {error}") from error


def _on_gpu(sizes: KernelSizes, device: Device, others: Kernels) -> Kernels:
    try:
        from medha_worker.kernels.triton.triton_kernels import triton_kernels

        return triton_kernels(sizes, device, others)
    except ImportError as error:
        raise KernelsUnavailable(f"triton cannot be imported ({error})") from error


@torch.inference_mode()
def differences(kernels: Kernels, sizes: KernelSizes, device: Device) -> list[str]:
    """Return which operators give a row other bits alone, or among fewer rows, than among all; none if they are invariant.

    Raises:
        KernelsUnavailable: an operator fails.
    """
    random = torch.Generator().manual_seed(0)

    def values(*shape: int) -> torch.Tensor:
        return device.place(torch.randn(*shape, generator=random).to(device.dtype))

    queries = sizes.query_heads * sizes.head_dim
    weights = (
        (sizes.hidden_size, queries + 2 * sizes.kv_heads * sizes.head_dim),
        (queries, sizes.hidden_size),
        (sizes.hidden_size, 2 * sizes.intermediate_size),
        (sizes.intermediate_size, sizes.hidden_size),
        *_products_of_experts(sizes),
    )

    def product(inner: int, columns: int) -> bool:
        x, weight = values(_ROWS, inner), values(inner, min(columns, _MOST_COLUMNS))
        forms = (weight,) if kernels.pack is None else (weight, kernels.pack(weight))
        return all(
            _is_invariant(partial(lambda form, rows: kernels.products.product(x[rows], form), form))
            for form in forms
        )

    def norm(*shape: int) -> bool:
        x, weight = values(_ROWS, *shape), values(shape[-1])
        return _is_invariant(lambda rows: kernels.rows.rms_norm(x[rows], weight, 1e-5))

    tries: dict[str, Callable[[], bool]] = {
        "products": lambda: all(product(*shape) for shape in weights),
        "products of experts": lambda: _experts_are_invariant(kernels, sizes, device, values),
        "norms": lambda: norm(sizes.hidden_size) and norm(sizes.query_heads, sizes.head_dim),
        "attention": lambda: _attention_is_invariant(kernels, sizes, values),
    }
    try:
        found = [name for name, holds in tries.items() if not holds()]
        device.synchronise()
    except Exception as error:  # a compiler's or a driver's
        raise KernelsUnavailable(
            f"kernels failed when they were tried out ({type(error).__name__}: {error})"
        ) from error
    return found


def _products_of_experts(sizes: KernelSizes) -> tuple[tuple[int, int], ...]:
    """Return inner size and columns of an expert's products, if there are experts of another width than dense MLPs."""
    wide = sizes.expert_intermediate_size
    if wide in (0, sizes.intermediate_size):
        return ()
    return (sizes.hidden_size, 2 * wide), (wide, sizes.hidden_size)


def _experts_are_invariant(
    kernels: Kernels, sizes: KernelSizes, device: Device, values: Callable[..., torch.Tensor]
) -> bool:
    """Return True if rows keep their bits when other rows of their expert, or all rows of another one, are missing."""
    if not sizes.expert_intermediate_size:
        return True
    columns, last = min(2 * sizes.expert_intermediate_size, _MOST_COLUMNS), _ROWS - 6
    x, weights = values(_ROWS, sizes.hidden_size), values(3, sizes.hidden_size, columns)

    def compute(rows: slice) -> torch.Tensor:
        count, first = rows.stop - rows.start, min(max(last - rows.start, 0), rows.stop - rows.start)
        ends = device.place(torch.tensor([first, first, count], dtype=torch.int32))
        return kernels.experts.product(x[rows], weights, ends)

    return _is_invariant(compute)


def _is_invariant(compute: Callable[[slice], torch.Tensor]) -> bool:
    """Return True if rows get the same bits in parts as among all rows."""
    everything = compute(slice(0, _ROWS))
    return all(torch.equal(compute(part), everything[part]) for part in _PARTS)


def _attention_is_invariant(
    kernels: Kernels, sizes: KernelSizes, values: Callable[..., torch.Tensor]
) -> bool:
    """True if a chunk gets the bits that its rows get in other chunks, as decodes, and beside other sequences."""
    context = 9_000  # more than a decode's keys are computed at once
    blocks = -(-(context + _ROWS) // _BLOCK_TOKENS)
    table = torch.randperm(blocks, generator=torch.Generator().manual_seed(1)).tolist()
    pools = [values(sizes.kv_heads, blocks * _BLOCK_TOKENS, sizes.head_dim) for _ in range(2)]
    if sizes.has_fp8_kv:
        pools = [pool.to(torch.float8_e4m3fn) for pool in pools]
    q = values(_ROWS, sizes.query_heads, sizes.head_dim)

    def attended(spans: Iterable[SequenceSpan], rows: torch.Tensor) -> torch.Tensor:
        return kernels.attention.plan(list(spans), _BLOCK_TOKENS).attend(rows, *pools)[0]

    whole = attended([SequenceSpan(0, _ROWS, context, table)], q)
    for part in _PARTS:
        alone = SequenceSpan(0, part.stop - part.start, context + part.start, table)
        if not torch.equal(attended([alone], q[part]), whole[part]):
            return False
    decodes = [SequenceSpan(row, 1, context + row, table) for row in range(_ROWS)]
    return torch.equal(attended(decodes, q), whole)
