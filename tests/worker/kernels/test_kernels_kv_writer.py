"""Writes of K and V to a paged pool."""

from __future__ import annotations

import random
from itertools import chain, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from medha_worker.device import host_device
from medha_worker.kernels.torch_kv_writer import TorchKVWriter

SLOTS, KV_HEADS, HEAD_DIM = 256, 2, 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_row_is_written_to_its_slot_and_nothing_else_changes(dtype: torch.dtype) -> None:
    @given(cuts=st.sets(st.integers(1, SLOTS - 1), max_size=40), chosen=st.randoms(use_true_random=False))
    def run(cuts: set[int], chosen: random.Random) -> None:
        """Write few long runs, or many short ones, in any order, with gaps between some of them."""
        edges = [0, *sorted(cuts), SLOTS]
        runs = [range(*ends) for ends in pairwise(edges)]
        chosen.shuffle(runs)
        slots = np.array(list(chain.from_iterable(runs[: len(runs) // 2 + 1])))
        keys, values = (torch.randn(2, len(slots), KV_HEADS, HEAD_DIM).to(dtype)).unbind()
        pools = torch.zeros(2, KV_HEADS, SLOTS, HEAD_DIM, dtype=dtype)
        wanted = pools.clone()
        for row, slot in enumerate(slots):
            wanted[0, :, slot], wanted[1, :, slot] = keys[row], values[row]
        write = TorchKVWriter(host_device(torch.float32)).plan(slots)
        write.write(pools[0], pools[1], keys, values)
        torch.testing.assert_close(pools, wanted, rtol=0, atol=0)

    run()
