"""Assertions on what FlashInfer is given: it accepts each of these mistakes in silence, and computes something else.

It reads integers of 64 bits as pairs of 32, takes a tensor's shape as another layout's, trusts the page size of
its plan, and applies the strides of K to V. None of that can be seen in its result.
"""

from __future__ import annotations

import numpy as np
import torch

from medha_worker.device import HOST
from medha_worker.kernels.flashinfer.page_tables import PagedBatch

# Strides of the pool are kept in unsigned integers of 32 bits.
_MOST_STRIDE = 2**32 - 1


def check_batch(batch: PagedBatch, block_tokens: int) -> None:
    """Assert that the integers of a batch are what FlashInfer takes them for."""
    for name in ("row_starts", "page_starts", "pages", "last_page_tokens"):
        assert getattr(batch, name).dtype == np.int32, f"{name} would be read as int32"
    for name in ("row_starts", "page_starts"):
        starts = getattr(batch, name)
        assert starts[0] == 0, f"{name} begins with {starts[0]}"
        assert (np.diff(starts) > 0).all(), f"a sequence has no rows or no pages: {name} is {starts}"
    assert batch.row_starts[-1] == len(batch.rows), "row_starts covers other rows"
    assert batch.page_starts[-1] == len(batch.pages), "page_starts covers other pages"
    last = batch.last_page_tokens
    assert len(last) == len(batch.row_starts) - 1 == len(batch.page_starts) - 1, (
        "the sequences are not the same"
    )
    assert last.min() >= 1, f"a last page of {last.min()} tokens"
    assert last.max() <= block_tokens, f"a last page of {last.max()} tokens, and a page has {block_tokens}"
    assert batch.pages.min() >= 0, f"page {batch.pages.min()}"


def check_planned(batch_integers: torch.Tensor, indices: torch.Tensor, device: torch.device) -> None:
    """Assert that a plan waits for nothing: it reads starts in host memory, and indices stay on the device."""
    assert batch_integers.device.type == HOST.type, (
        "starts on the device would be copied back, which waits for it"
    )
    assert indices.device.type == device.type, (
        f"page indices on {indices.device}, and the pool is on {device}"
    )


def check_tensors(
    q: torch.Tensor,
    pool_keys: torch.Tensor,
    pool_values: torch.Tensor,
    *,
    query_heads: int,
    dtype: torch.dtype,
    pool_dtype: torch.dtype,
    block_tokens: int,
    last_page: int,
) -> None:
    """Assert that tensors are what was planned.

    Args:
        q: [rows, query_heads, head_dim].
        pool_keys: [kv_heads, slots, head_dim].
        pool_values: Likewise.
        query_heads: Heads that were planned.
        dtype: Their element type.
        pool_dtype: The element type of the pool.
        block_tokens: Tokens of a page.
        last_page: Highest page that was planned.
    """
    kv_heads, slots, head_dim = pool_keys.shape
    for name, tensor, planned in (
        ("q", q, dtype),
        ("K", pool_keys, pool_dtype),
        ("V", pool_values, pool_dtype),
    ):
        assert tensor.dtype == planned, f"{name} is {tensor.dtype}, and {planned} was planned"
        assert tensor.stride(-1) == 1, f"{name} has gaps within a head"
        assert tensor.device == q.device, f"{name} is on {tensor.device}, and q on {q.device}"
    assert q.shape[1:] == (query_heads, head_dim), f"q is {tuple(q.shape)}: {query_heads} heads were planned"
    assert query_heads % kv_heads == 0, f"{query_heads} query heads do not share {kv_heads} KV heads evenly"
    assert pool_keys.shape == pool_values.shape, "K and V have different shapes"
    assert pool_keys.stride() == pool_values.stride(), "V would be read with the strides of K"
    assert pool_keys.stride(1) == head_dim, "tokens of a page do not lie side by side"
    assert pool_keys.stride(0) <= _MOST_STRIDE, f"{slots} slots are more than its 32-bit strides reach"
    assert slots % block_tokens == 0, f"{slots} slots are no whole number of pages of {block_tokens} tokens"
    assert last_page < slots // block_tokens, (
        f"page {last_page} lies outside a pool of {slots // block_tokens} pages of {block_tokens} tokens"
    )
