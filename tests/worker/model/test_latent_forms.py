"""Plain form and absorbed form give the same attention to latents, whatever rows, tokens and blocks there are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medha.model.latent_shape import LatentShape
from medha_worker.device import host_device
from medha_worker.kernels.name_table import choose_kernels, torch_kernels
from medha_worker.kernels.protocol import KernelSizes
from medha_worker.kernels.sequence_span import SequenceSpan
from medha_worker.model import latent_forms
from medha_worker.model.kv_scales import FP8, LayerScales, ScaledHeads
from medha_worker.model.latent_forms import HeadMatrices, LatentForms

DEVICE = host_device(torch.float32)
HEADS, BLOCK_TOKENS, BLOCKS = 3, 4, 60
WIDE = LatentShape(query_rank=0, kv_rank=24, plain_dim=20, rope_dim=12, value_dim=16)
SHAPES = [WIDE, LatentShape(0, 16, 4, 8, 20)]  # keys are wider than values, and the reverse


@st.composite
def spans_of_a_step(draw: st.DrawFn) -> list[SequenceSpan]:
    spans, row = [], 0
    for _ in range(draw(st.integers(1, 4))):
        is_causal = draw(st.booleans())
        rows, stride = draw(st.integers(1, 40)), draw(st.sampled_from([1, 1, 2, 3])) if is_causal else 1
        context = draw(st.integers(0 if is_causal else 1, 60))
        order = np.random.default_rng(draw(st.integers(0, 99))).permutation(BLOCKS)
        blocks = np.arange(BLOCKS) if draw(st.booleans()) else order
        spans.append(SequenceSpan(row, rows, context, blocks, is_causal, stride))
        row += rows
    return spans


@pytest.mark.parametrize("kernels", ["torch", "chosen"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_fp8", [False, True])
def test_both_forms_give_the_same_results_and_sums(shape: LatentShape, kernels: str, has_fp8: bool) -> None:
    random = torch.Generator().manual_seed(3)
    pool = torch.randn(1, BLOCKS * BLOCK_TOKENS, shape.row_dim, generator=random)
    scaled = None
    if has_fp8:
        scales = torch.linspace(0.5, 2.0, shape.row_dim)[None]
        scaled, pool = ScaledHeads(LayerScales(scales, scales)), pool.to(FP8)
    matrices = HeadMatrices(
        torch.randn(HEADS, shape.plain_dim, shape.kv_rank, generator=random) / 4,
        torch.randn(HEADS, shape.kv_rank, shape.value_dim, generator=random) / 4,
        scaled,
    )
    sizes = KernelSizes(HEADS, 1, shape.row_dim, 64, 64, made_head_dim=shape.made_dim, has_fp8_kv=has_fp8)
    found = torch_kernels(DEVICE) if kernels == "torch" else choose_kernels(sizes, DEVICE)
    forms = LatentForms(shape, HEADS, 0.3, found, DEVICE)

    @given(spans=spans_of_a_step(), is_made=st.lists(st.booleans(), min_size=4, max_size=4))
    @settings(max_examples=15)
    def run(spans: list[SequenceSpan], is_made: list[bool]) -> None:
        def makes_heads(_shape: LatentShape, rows: int, keys: int, _pairs: int) -> bool:
            return is_made[(rows + keys) % 4]

        q = torch.randn(spans[-1].rows.stop, HEADS, shape.query_dim, generator=random)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(latent_forms, "MADE_BYTES", 1)
            patch.setattr(latent_forms, "_LEAST_TILE_TOKENS", 13)
            results: list[Any] = []
            for choose in (makes_heads, lambda *_: False, lambda *_: True):
                patch.setattr(LatentShape, "makes_heads", choose)
                results.append(forms.plan(spans, BLOCK_TOKENS).attend(q, pool, matrices))
        for output, sums in results[1:]:
            torch.testing.assert_close(output, results[0][0], atol=2e-5, rtol=1e-4)
            torch.testing.assert_close(sums, results[0][1], atol=2e-5, rtol=1e-5)

    run()


def test_a_long_context_is_made_keys_and_values_a_few_tokens_at_a_time() -> None:
    forms = LatentForms(WIDE, HEADS, 0.3, torch_kernels(DEVICE), DEVICE)
    most = 2 * HEADS * WIDE.made_dim * 4 * forms.tile_tokens
    assert latent_forms.MADE_BYTES // 2 < most <= latent_forms.MADE_BYTES


def test_kernels_that_promise_equal_bits_make_no_keys_of_latents() -> None:
    sizes = KernelSizes(8, 1, 64, 64, 64, made_head_dim=48)
    assert choose_kernels(sizes, DEVICE).made_heads is not None
    assert choose_kernels(sizes, DEVICE, "batchInvariant").made_heads is None
