"""The number of (query, key) pairs that causal attention computes. It needs no other module, so that a GPU machine can load it alone."""

from __future__ import annotations


def attention_pairs(rows: int, context_tokens: int, stride: int = 1) -> int:
    """Return the (query, key) pairs of `rows` causal rows behind a context: row i sees `context_tokens + 1 + i * stride`."""
    return rows * (context_tokens + 1) + stride * (rows * (rows - 1) // 2)
