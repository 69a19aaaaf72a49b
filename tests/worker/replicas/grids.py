"""All grids of at most eight ranks over which a model with eight heads can be divided evenly."""

from __future__ import annotations

from typing import Any

import pytest

from medha.topology import Topology

MOST_RANKS = 8
DIVISORS = (1, 2, 4, 8)
"""Numbers of tensor ranks that divide the heads, and of stages. Any number of lanes will do."""

GRIDS = [
    Topology(tensor, stream, kv)
    for tensor in DIVISORS
    for stream in DIVISORS
    for kv in range(1, MOST_RANKS + 1)
    if 1 < tensor * stream * kv <= MOST_RANKS
]
"""These grids, without the one of a single rank."""

GRID_ROWS = [pytest.param(grid, id=f"{grid} long", marks=pytest.mark.long) for grid in GRIDS]
"""Long rows with each of `GRIDS`."""

STRIPED_GRID_ROWS = [
    pytest.param(grid, striped, id=f"{grid}{', striped' * striped} long", marks=pytest.mark.long)
    for grid in GRIDS
    for striped in ((False, True) if grid.kv > 1 else (False,))
]
"""Long rows with each of `GRIDS`, and whether long prompts are striped over its lanes: both, if it has several."""


def model_of(grid: Topology) -> dict[str, Any]:
    """Return the sizes of a model for a grid, with as few layers as its stages need, and at least two."""
    return {
        "num_hidden_layers": max(grid.stream, 2),
        "num_attention_heads": MOST_RANKS,
        "num_key_value_heads": MOST_RANKS,
        "head_dim": 16,
        "initializer_range": 0.1,
    }
