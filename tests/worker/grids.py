"""All grids of at most eight ranks over which a model of eight heads and eight layers can be divided evenly."""

from __future__ import annotations

import pytest

from medha.topology import Topology

MOST_RANKS = 8
MODEL_OF_EIGHT = {
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 16,
    "initializer_range": 0.1,
}
"""Sizes of a model that divides by as many tensor ranks, and by as many stages, as a grid of `MOST_RANKS` may have."""
DIVISORS = (1, 2, 4, 8)
"""Numbers of tensor ranks, and of stages, that divide that model. Any number of lanes does."""

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
