"""Captured decodes compute what eager ones do, whatever the padding, and write to no sequence's KV but their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from medha_worker.checkpoints.presets import init_checkpoint
from medha_worker.device import HOST, Device, InOrder
from medha_worker.host_memory import HostMemory
from medha_worker.kernels.expert_products import BlockedProducts, GroupedProducts
from medha_worker.kernels.name_table import torch_kernels
from medha_worker.kernels.protocol import AttentionBackend, StepAttention
from medha_worker.kernels.sequence_span import SequenceSpan
from medha_worker.model import quantised_experts
from medha_worker.model.decode_graphs import captured_sizes, copies_of_each
from medha_worker.model.kv_cache import KVCache
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.transformer import Transformer
from medha_worker.model.weights import Shard

from ..models import run_step

BLOCK_TOKENS, BLOCKS, SIZES = 16, 40, (1, 2, 4, 8)
CLOSE = {"rtol": 1e-3, "atol": 2e-5}  # products of padded batches round differently


class Repeating(InOrder):
    """A runtime in which captured work is run again, and counted."""

    captures = True

    def __init__(self) -> None:
        super().__init__(HOST)
        self.replays = 0

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        run()

        def replay() -> None:
            self.replays += 1
            run()

        return replay


class Made(TorchDispatchMode):
    """Notes the tensors whose memory is allocated in this context."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {memory_of(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.tensors += [tensor for tensor in made if memory_of(tensor) not in given]
        return result


def memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class OnePool(Repeating):
    """A runtime whose captures share their memory: a replay overwrites what all others have allocated."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, list[torch.Tensor]] = {}

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        number = len(self._made)
        self._made[number] = []

        def replay() -> None:
            with Made() as made:
                run()
            self._made[number] = made.tensors
            for other, tensors in self._made.items():
                for tensor in tensors:
                    if other != number and tensor.is_floating_point():
                        tensor.fill_(torch.nan)

        return super().capture(replay)


class Replanned:
    """Attention that is planned again for each replay."""

    def __init__(self, backend: AttentionBackend) -> None:
        self._backend = backend
        self._planned: StepAttention | None = None

    def replan(self, spans: Sequence[SequenceSpan], block_tokens: int) -> None:
        self._planned = self._backend.plan(spans, block_tokens)

    def attend(
        self,
        q: torch.Tensor,
        pool_keys: torch.Tensor,
        pool_values: torch.Tensor,
        sinks: torch.Tensor | None = None,
        *,
        needs_sums: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._planned is not None
        return self._planned.attend(q, pool_keys, pool_values, sinks, needs_sums=needs_sums)


class Replanning:
    """A backend whose attention can be captured where captured work is run again."""

    def __init__(self, backend: AttentionBackend) -> None:
        self._backend = backend
        self.plan = backend.plan

    def for_graph(self, rows: int, most_blocks: int) -> Replanned:
        return Replanned(self._backend)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint") / "tiny"
    init_checkpoint(directory, preset="tiny", seed=1)
    return directory


@pytest.fixture
def runtime() -> Repeating:
    return Repeating()


@pytest.fixture
def model(checkpoint: Path, runtime: Repeating) -> Transformer:
    device = Device(HOST, torch.float32, HostMemory(), runtime)
    config = ModelConfig.from_directory(checkpoint)
    kernels = torch_kernels(device)
    kernels = replace(kernels, attention=Replanning(kernels.attention))
    return Transformer.load(checkpoint, config, Shard.whole(config), device=device, kernels=kernels)


def decodes(lengths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, list[SequenceSpan]]:
    """Return the tokens, positions and spans of one decode step of sequences with so many tokens in the pool."""
    order = np.random.default_rng(3).permutation(BLOCKS)
    spans, used = [], 0
    for row, length in enumerate(lengths):
        blocks = -(-(length + 1) // BLOCK_TOKENS)
        spans.append(SequenceSpan(row, 1, length, order[used : used + blocks]))
        used += blocks
    return torch.arange(10, 10 + len(lengths)), torch.tensor(lengths), spans


def filled(model: Transformer) -> KVCache:
    cache = model.new_kv_cache(BLOCKS, BLOCK_TOKENS)
    noise = torch.Generator().manual_seed(7)
    for pool in (*cache.keys, *cache.values):
        pool[:, : BLOCKS * BLOCK_TOKENS].normal_(generator=noise)
    return cache


def of_sequences(cache: KVCache) -> torch.Tensor:
    """Return K and V of all blocks that a sequence can hold."""
    return torch.stack([pool[:, : BLOCKS * BLOCK_TOKENS] for pool in (*cache.keys, *cache.values)])


@pytest.mark.parametrize("rows", range(1, 9))
def test_a_captured_step_equals_an_eager_one(model: Transformer, runtime: Repeating, rows: int) -> None:
    eager, captured = filled(model), filled(model)
    model.capture_decodes(captured, SIZES)
    lengths = [33, 0, 16, 47, 5, 15, 31, 64]
    for step in range(3):  # both copies of a size, and the first one again
        batch = decodes([length + step for length in lengths[:rows]])
        wanted = run_step(model, *batch, eager)
        found = run_step(model, *batch, captured)
        assert runtime.replays == step + 1
        torch.testing.assert_close(found, wanted, **CLOSE)
        torch.testing.assert_close(of_sequences(captured), of_sequences(eager), **CLOSE)


def test_a_captured_step_collects_hidden_states_as_an_eager_one(
    model: Transformer, runtime: Repeating
) -> None:
    size, layers = model.config.hidden_size, model.config.num_layers
    collecting = Transformer(
        model.config, model.shard, model._weights, kernels=model.kernels, collected=(0, 1, layers)
    )
    eager, captured = filled(model), filled(model)
    collecting.capture_decodes(captured, SIZES)
    batch = decodes([33, 20, 8])
    plain, found = run_step(model, *batch, eager), run_step(collecting, *batch, captured)
    assert runtime.replays == 1
    assert found.shape == (3, 4 * size)
    torch.testing.assert_close(found[:, :size], plain, **CLOSE)
    torch.testing.assert_close(found[:, 3 * size :], plain, **CLOSE)  # behind the last layer
    torch.testing.assert_close(found, run_step(collecting, *batch, filled(model)), **CLOSE)


def test_the_next_step_may_be_prepared_before_this_one_runs(model: Transformer) -> None:
    eager, captured = filled(model), filled(model)
    model.capture_decodes(captured, SIZES)
    first, second = decodes([33, 20, 8]), decodes([34, 21, 9])
    prepared = [model.prepare(*batch[1:], captured) for batch in (first, second)]
    for batch, step in zip((first, second), prepared, strict=True):
        torch.testing.assert_close(model.forward(batch[0], step), run_step(model, *batch, eager), **CLOSE)


@pytest.mark.parametrize("runtime", [OnePool()])
def test_hidden_states_outlive_the_next_replay_though_captures_share_their_memory(model: Transformer) -> None:
    """They are still being sent to the next stage then."""
    eager, captured = filled(model), filled(model)
    model.capture_decodes(captured, SIZES)
    batches = [decodes([33, 20, 8]), decodes([34, 21, 9]), decodes([35]), decodes([36])]
    found = run_step(model, *batches[0], captured)
    for batch, following in pairwise(batches):
        of_following = run_step(model, *following, captured)
        torch.testing.assert_close(found, run_step(model, *batch, eager), **CLOSE)
        found = of_following


def test_as_many_steps_as_a_pipeline_has_may_be_prepared_before_the_first_runs(
    model: Transformer, runtime: Repeating
) -> None:
    stages = 4
    eager, captured = filled(model), filled(model)
    model.capture_decodes(captured, SIZES, copies_of_each(stages))
    batches = [decodes([33 + step, 20 + step, 8 + step]) for step in range(stages)]
    prepared = [model.prepare(*batch[1:], captured) for batch in batches]
    for batch, step in zip(batches, prepared, strict=True):
        torch.testing.assert_close(model.forward(batch[0], step), run_step(model, *batch, eager), **CLOSE)
    assert runtime.replays == stages


def test_a_step_for_which_no_copy_is_free_is_prepared_once_the_oldest_ran(model: Transformer) -> None:
    eager, captured = filled(model), filled(model)
    model.capture_decodes(captured, SIZES, 2)
    first, second, third = (decodes([33 + step, 20 + step, 8 + step]) for step in range(3))
    prepared = [model.prepare(*batch[1:], captured) for batch in (first, second)]
    with pytest.raises(RuntimeError, match="all 2 captured steps of 4 rows wait to be replayed"):
        model.prepare(*third[1:], captured)
    found = [model.forward(first[0], prepared.pop(0)).clone()]
    prepared.append(model.prepare(*third[1:], captured))
    found += [model.forward(batch[0], step) for batch, step in zip((second, third), prepared, strict=True)]
    for batch, hidden in zip((first, second, third), found, strict=True):
        torch.testing.assert_close(hidden, run_step(model, *batch, eager), **CLOSE)


def test_a_step_that_is_dropped_frees_its_copy(model: Transformer, runtime: Repeating) -> None:
    cache = filled(model)
    model.capture_decodes(cache, SIZES, 2)
    for _ in range(5):
        model.prepare(*decodes([33, 20, 8])[1:], cache)
    run_step(model, *decodes([33, 20, 8]), cache)
    assert runtime.replays == 1


def test_steps_that_were_not_captured_run_eagerly(model: Transformer, runtime: Repeating) -> None:
    cache = filled(model)
    model.capture_decodes(cache, SIZES)
    chunk = torch.arange(10, 15), torch.arange(5), [SequenceSpan(0, 5, 0, [0])]
    for tokens, positions, spans in (chunk, decodes([3] * 9)):
        run_step(model, tokens, positions, spans, cache)
    run_step(model, *decodes([3]), filled(model))  # another pool
    shared = [
        SequenceSpan(row, 1, 199, np.arange(13)) for row in range(4)
    ]  # 52 entries of tables, of 40 blocks
    run_step(model, torch.arange(4), torch.full((4,), 199), shared, cache)
    assert runtime.replays == 0


def test_nothing_is_captured_where_that_gains_nothing(checkpoint: Path) -> None:
    device = Device(HOST, torch.float32, HostMemory(), InOrder(HOST))
    config = ModelConfig.from_directory(checkpoint)
    kernels = torch_kernels(device)
    model = Transformer.load(checkpoint, config, Shard.whole(config), device=device, kernels=kernels)
    model.capture_decodes(model.new_kv_cache(BLOCKS, BLOCK_TOKENS), SIZES)
    assert model.prepare(torch.tensor([0]), [SequenceSpan(0, 1, 0, [0])], filled(model)).captured is None


@pytest.mark.parametrize(("architecture", "quantisation"), [("qwen3_moe", "w4a16"), ("mixtral", "none")])
def test_steps_are_captured_that_pass_experts_whose_rows_the_host_does_not_know(
    tmp_path: Path, runtime: Repeating, architecture: str, quantisation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts are multiplied as on a GPU: each step passes others, and none asks which."""
    monkeypatch.setattr(quantised_experts, "is_in_host_memory", lambda _: False)
    directory = tmp_path / "model"
    init_checkpoint(directory, preset="tiny", seed=1, architecture=architecture, quantisation=quantisation)
    device = Device(HOST, torch.float32, HostMemory(), runtime)
    config = ModelConfig.from_directory(directory)
    kernels = torch_kernels(device)
    kernels = replace(
        kernels,
        attention=Replanning(kernels.attention),
        experts=GroupedProducts(BlockedProducts()) if quantisation == "none" else BlockedProducts(),
    )
    model = Transformer.load(directory, config, Shard.whole(config), device=device, kernels=kernels)
    eager, captured = filled(model), filled(model)
    model.capture_decodes(captured, SIZES)
    for step, lengths in enumerate(([33, 0, 16], [5, 31, 64], [7, 8, 9, 10, 11])):
        batch = decodes(lengths)
        wanted = run_step(model, *batch, eager)
        with monkeypatch.context() as asked:
            asked.setattr(torch.Tensor, "tolist", None)
            found = run_step(model, *batch, captured)
        assert runtime.replays == step + 1
        torch.testing.assert_close(found, wanted, **CLOSE)


def test_padding_costs_at_most_seven_rows_or_an_eighth() -> None:
    for most in (1, 3, 8, 100, 256, 1000):
        sizes = captured_sizes(most)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == most
        for rows in range(1, most + 1):
            padded = min(size for size in sizes if size >= rows)
            assert padded - rows <= max(7, rows / 4), (rows, padded)


def test_captured_work_is_gone_once_it_is_let_go_of_though_a_prepared_step_refers_to_it(
    model: Transformer, runtime: Repeating
) -> None:
    cache = filled(model)
    model.capture_decodes(cache, SIZES)
    tokens, positions, spans = decodes([33, 5])
    prepared = model.prepare(positions, spans, cache)
    model.forget_captured()
    with pytest.raises(RuntimeError, match="a captured step was replayed after its release"):
        model.forward(tokens, prepared)
    assert (runtime.replays, model.captures) == (0, False)
