"""The context from which a token's attention outweighs its linear layers."""

from __future__ import annotations

from math import inf

NEVER_TOKENS = 2**31 - 1
"""A context that no sequence has: if all layers have windows, attention may never outweigh the rest."""


def crossover_tokens(
    linear_flops: float, flops_per_pair: float, window_tokens: int = 1, window_share: float = 0.0
) -> int:
    """Return the context at which a token's attention takes as many FLOPs as its linear layers, at most `NEVER_TOKENS`.

    Args:
        linear_flops: FLOPs of the linear layers of one token.
        flops_per_pair: FLOPs of one (query, key) pair in all layers.
        window_tokens: Most keys that a token sees in a layer with a window.
        window_share: Share of the layers that have one.
    """
    keys = linear_flops / max(flops_per_pair, 1e-9)
    if window_share and keys > window_tokens:
        whole = 1.0 - window_share
        keys = window_tokens + (keys - window_tokens) / whole if whole > 0 else inf
    return int(min(keys, NEVER_TOKENS))
