"""The number of (query, key) pairs that causal attention computes.

The module imports nothing, so that `benchmarks/gpu.py` runs on a machine without pydantic.
"""

from __future__ import annotations


def attention_pairs(rows: int, context_tokens: int, stride: int = 1) -> int:
    """Return the (query, key) pairs of `rows` causal rows after a context: row i sees `context_tokens + 1 + i * stride`."""
    return rows * (context_tokens + 1) + stride * (rows * (rows - 1) // 2)
