"""The form of attention to latents that takes fewer FLOPs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medha.model.latent_shape import LEAST_PLAIN_ROWS, LatentShape

V3 = LatentShape(query_rank=1536, kv_rank=512, plain_dim=128, rope_dim=64, value_dim=128)
LONG = 1_000_000


@pytest.mark.parametrize(
    ("rows", "is_made"), [(1, False), (8, False), (170, False), (171, True), (8192, True)]
)
def test_a_chunk_behind_a_long_context_is_in_plain_form_from_171_rows_on(rows: int, is_made: bool) -> None:
    assert V3.makes_heads(rows, LONG, rows * LONG) == is_made


@pytest.mark.parametrize(
    ("rows", "is_made"), [(1, False), (LEAST_PLAIN_ROWS - 1, False), (LEAST_PLAIN_ROWS, True)]
)
def test_a_prompt_without_context_is_in_plain_form_as_each_row_makes_its_own_key(
    rows: int, is_made: bool
) -> None:
    assert V3.makes_heads(rows, rows, rows * (rows + 1) // 2) == is_made


@given(st.integers(1, 10_000), st.integers(0, 10**6))
def test_a_longer_chunk_never_goes_back_to_the_absorbed_form(rows: int, context: int) -> None:
    def is_made(rows: int) -> bool:
        return V3.makes_heads(rows, context + rows, rows * context + rows * (rows + 1) // 2)

    assert is_made(rows + 1) or not is_made(rows)


def test_latents_no_wider_than_keys_stay_in_absorbed_form() -> None:
    narrow = LatentShape(query_rank=0, kv_rank=16, plain_dim=32, rope_dim=16, value_dim=32)
    assert narrow.row_dim < narrow.made_dim
    assert not narrow.makes_heads(100, 5000, 100 * 4950)
