"""Attention to keys that are streamed from host memory equals attention to the same keys in a pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medha.model.latent_shape import LatentShape
from medha_worker.device import Mark, host_device
from medha_worker.kernels.name_table import torch_kernels
from medha_worker.kernels.sequence_span import SequenceSpan
from medha_worker.model.kv_cache import KVCache
from medha_worker.model.latent_forms import LatentForms
from medha_worker.model.latent_tensors import LatentWeights
from medha_worker.model.pool_attention import part_of
from medha_worker.model.prepared_step import OwnStep, StreamedStep, streams
from medha_worker.model.streamed_blocks import StreamedBlocks

HEADS, WIDTH, SIZE, LAYERS = 2, 8, 4, 3
POOL, STREAMED = 12, 20


def cache_of(blocks: int, tensors: int = 2) -> KVCache:
    return KVCache(
        num_layers=LAYERS, kv_heads=HEADS, head_dim=WIDTH, num_blocks=blocks, block_tokens=SIZE, tensors=tensors,
        device=host_device(torch.float32),
    )  # fmt: skip


def streamed_table(
    tokens: int, device_blocks: int, rng: np.random.Generator
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the table of a sequence whose last `device_blocks` blocks are in the pool, and whose first ones are not."""
    blocks = -(-tokens // SIZE)
    far = POOL + rng.permutation(STREAMED)[: max(blocks - device_blocks, 0)]
    near = rng.permutation(POOL)[: min(blocks, device_blocks)]
    return np.concatenate([far, near]).astype(np.int64)


def chunks_of(tokens: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    """Cut a prompt into chunks of random sizes, and then single tokens."""
    found, at = [], 0
    while at < tokens:
        count = min(int(rng.choice([1, 1, 3, 9, 30])), tokens - at)
        found.append((at, count))
        at += count
    return found


@pytest.mark.parametrize("windows", [(None, None, None), (None, 7, 25)], ids=["whole", "windows"])
@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "copied"])
@pytest.mark.parametrize("tensors", [2, 1])
def test_each_row_attends_as_if_all_keys_were_in_the_pool(
    windows: Sequence[int | None], in_place: bool, tensors: int
) -> None:
    device, rng = host_device(torch.float32), np.random.default_rng(4)
    kernels = torch_kernels(device)
    torch.manual_seed(1)
    for device_blocks in (1, 3, 8):
        tokens = 70
        usual, cache = cache_of(40, tensors), cache_of(POOL, tensors)
        cache.streamed = StreamedBlocks(cache, STREAMED, in_place=in_place, segment_tokens=3 * SIZE)
        table = streamed_table(tokens, device_blocks, rng)
        whole_table = rng.permutation(40)[: len(table)].astype(np.int64)
        other_cached = torch.randn(LAYERS, 2, 6, HEADS, WIDTH)
        for start, count in chunks_of(tokens, rng):
            # A second sequence, all in the pool, takes part in each step: its KV is written again each time.
            free = [block for block in range(POOL) if block not in table][:2]
            own = [SequenceSpan(0, count, start, table), SequenceSpan(count, 6, 0, np.array(free))]
            theirs = [
                SequenceSpan(0, count, start, whole_table),
                SequenceSpan(
                    count, 6, 0, np.array([block for block in range(40) if block not in whole_table][:2])
                ),
            ]
            if len(free) < 2:
                own, theirs = own[:1], theirs[:1]
            rows = own[-1].rows.stop
            assert streams(own, cache)
            assert not streams(own[1:], cache)
            step, reference = (
                StreamedStep(own, cache, kernels, windows),
                OwnStep(theirs, usual, kernels, windows),
            )
            for layer in range(LAYERS):
                q = torch.randn(rows, 2 * HEADS, WIDTH)
                k, v = torch.randn(2, rows, HEADS, WIDTH)
                if len(own) > 1:
                    k[count:], v[count:] = other_cached[layer]
                v = k if tensors == 1 else v
                sinks = torch.randn(2 * HEADS) if layer == 1 else None
                found, wanted = (
                    step.attend(layer, q.clone(), k, v, sinks),
                    reference.attend(layer, q.clone(), k, v, sinks),
                )
                assert torch.allclose(found, wanted, atol=2e-6), (start, count, layer)


@pytest.mark.parametrize("is_made", [False, True], ids=["absorbed", "plain"])
@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "copied"])
def test_rows_attend_to_streamed_latents_in_either_form(
    in_place: bool, is_made: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, tokens, random = LatentShape(0, 24, 8, 4, 6), 70, np.random.default_rng(7)
    device = host_device(torch.float32)
    kernels = torch_kernels(device)
    forms = LatentForms(shape, HEADS, 0.3, kernels, device)
    torch.manual_seed(2)
    latent = LatentWeights(
        None, None, torch.ones(24), torch.randn(HEADS, 8, 24) / 4, torch.randn(HEADS, 24, 6) / 4
    )
    usual, cache = (
        KVCache(
            num_layers=1, kv_heads=1, head_dim=shape.row_dim, num_blocks=blocks, block_tokens=SIZE, tensors=1,
            device=device,
        )
        for blocks in (STREAMED, POOL)
    )  # fmt: skip
    cache.streamed = StreamedBlocks(cache, STREAMED, in_place=in_place, segment_tokens=3 * SIZE)
    table, whole = streamed_table(tokens, 3, random), np.arange(STREAMED)
    for start, count in chunks_of(tokens, random):
        step = [SequenceSpan(0, count, start, table)]
        q, row = torch.randn(count, HEADS, shape.query_dim), torch.randn(count, 1, shape.row_dim)
        monkeypatch.setattr(LatentShape, "makes_heads", lambda *_: False)
        reference = OwnStep([replace(step[0], blocks=whole)], usual, kernels, forms=forms)
        wanted = reference.attend(0, q.clone(), row, row, latent=latent)
        monkeypatch.setattr(LatentShape, "makes_heads", lambda *_: is_made)
        found = StreamedStep(step, cache, kernels, forms=forms).attend(0, q.clone(), row, row, latent=latent)
        assert torch.allclose(found, wanted, atol=5e-6), (start, count)


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "in the pool"])
def test_each_layer_waits_for_what_is_copied_into_its_pool(streamed: bool) -> None:
    """The second sequence of the step reads KV that comes from a host tier only once the layer waits for it."""
    device, cache = host_device(torch.float32), cache_of(POOL)
    cache.streamed = StreamedBlocks(cache, STREAMED)
    torch.manual_seed(1)
    arriving = torch.randn(LAYERS, 2, HEADS, SIZE, WIDTH)
    first = np.array([POOL, 0]) if streamed else np.array([1, 0])
    spans = [SequenceSpan(0, 1, 5, first), SequenceSpan(1, 1, SIZE, np.array([3, 4]))]
    assert streams(spans, cache) == streamed
    step = (StreamedStep if streamed else OwnStep)(spans, cache, torch_kernels(device))

    class Arrives(Mark):
        def __init__(self, layer: int) -> None:
            self._layer = layer

        def wait(self) -> None:
            for pool, rows in zip(
                (cache.keys[self._layer], cache.values[self._layer]), arriving[self._layer], strict=True
            ):
                pool[:, 3 * SIZE : 4 * SIZE] = rows

        def is_done(self) -> bool:
            return False

    q, (k, v) = torch.randn(2, 2 * HEADS, WIDTH), torch.randn(2, 2, HEADS, WIDTH)
    cache.expect({layer: Arrives(layer) for layer in range(LAYERS)})
    found, wanted = ([step.attend(layer, q.clone(), k, v) for layer in range(LAYERS)] for _ in range(2))
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)
    assert not any(torch.equal(one, found[0]) for one in found[1:])


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 9),
    context=st.integers(0, 30),
    is_causal=st.booleans(),
    window=st.none() | st.integers(1, 20),
    first=st.integers(0, 8),
    blocks=st.integers(1, 4),
)
def test_parts_of_a_span_have_each_key_that_a_row_sees_once(
    rows: int, context: int, is_causal: bool, window: int | None, first: int, blocks: int
) -> None:
    if not is_causal:
        window, context = None, context + 1
    span = SequenceSpan(5, rows, context, np.arange(20), is_causal).within(window)
    start, stop = first * SIZE, (first + blocks) * SIZE

    def seen(one: SequenceSpan, row: int) -> set[int]:
        begin = max(0, one.first_key + row * one.first_stride)
        end = one.context_length + 1 + row * one.stride if one.is_causal else one.context_length
        return set(range(begin, end))

    found: dict[int, set[int]] = {}
    for part in part_of(span, start, stop, np.arange(first, first + blocks)):
        for row in range(part.row_count):
            keys = seen(part, row)
            assert keys, "a row of a span sees a key"
            assert max(keys) < blocks * SIZE
            at = part.row_start + row
            assert at not in found
            found[at] = {start + key for key in keys}
    for row in range(rows):
        wanted = {key for key in seen(span, row) if start <= key < stop}
        assert found.get(span.row_start + row, set()) == wanted
