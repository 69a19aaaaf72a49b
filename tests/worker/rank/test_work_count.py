"""The work of a step that a rank counts is what its kernels would do: by spans, and by the model's own operators."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from benchmark import benchmark
from medha.cost.attention_pairs import attention_pairs
from medha.cost.hardware import LLAMA3_8B, LLAMA3_70B, ModelShape
from medha.cost.step_estimates import StepCosts, StepWork
from medha_worker.kernels.sequence_span import SequenceSpan
from medha_worker.model.partial_attention import Rows
from medha_worker.model.spread import Landing, RingKeys, RingQueries, SpreadPlan
from medha_worker.model.stage_split import split_layers
from medha_worker.model.weights import Shard
from medha_worker.rank.lane_plan import Batch, count_work
from medha_worker.rank.rank_reports import shape_of

arithmetic, random_llama = benchmark("gpu_arithmetic"), benchmark("random_llama")
NOTHING = torch.arange(0)
LANDING = Landing((NOTHING, np.arange(0)), {}, {})


@dataclass
class Entry:
    samples: bool
    drafts: tuple[int, ...] = ()


@dataclass
class Planned:
    """What is asked of a planned entry."""

    entry: Entry
    stop: int = 0
    scored_rows: int = 0


def planned(*samples: bool) -> Any:
    return [Planned(Entry(one)) for one in samples]


def test_a_mixed_batch_counts_rows_samples_pairs_and_keys() -> None:
    spans = [SequenceSpan(0, 1, 99, [0]), SequenceSpan(1, 4, 10, [1]), SequenceSpan(5, 3, 6, [2])]
    positions = torch.tensor([99, 10, 11, 12, 13, 6, 7, 8])
    entries: Any = [
        Planned(Entry(True), 100),
        Planned(Entry(False), 14, scored_rows=3),
        Planned(Entry(True, (7, 8)), 9),
    ]
    batch = Batch(positions, spans, None)
    pairs, keys = sum(attention_pairs(span.row_count, span.context_length) for span in spans), 100 + 14 + 9
    sampled = 1 + (1 + 2) + 3  # a row for each draft and each scored position
    assert count_work(entries, batch) == StepWork(8, sampled, pairs, keys)
    windowed, read = 12 + (11 + 12 + 12 + 12) + (7 + 8 + 9), 12 + 14 + 9
    mean = StepWork(8, sampled, round((pairs + 3 * windowed) / 4), round((keys + 3 * read) / 4))
    assert count_work(entries, batch, (12, None, 12, 12)) == mean


def test_a_lane_counts_what_it_attends_to_for_others_and_keys_of_one_sequence_once() -> None:
    own, other, passing = np.arange(4), np.arange(4), np.arange(2)
    local = Rows(6, [SequenceSpan(0, 2, 20, own, stride=3), SequenceSpan(2, 4, 22, own, is_causal=False)])
    asked = Rows(1, [SequenceSpan(0, 1, 40, other, is_causal=False)])
    ring = Rows(6, [SequenceSpan(0, 6, 8, passing, is_causal=False)])
    plan = SpreadPlan(
        local, LANDING, (), [(1, asked)], RingQueries([], NOTHING, {1: asked}, ()), RingKeys([], NOTHING, NOTHING, {}, {1: ring})
    )  # fmt: skip
    batch = Batch(torch.arange(6), [], plan)
    assert count_work(planned(True), batch) == StepWork(
        6, 1, (21 + 24) + 4 * 22 + 40 + 40 + 6 * 8, 24 + 40 + 8
    )
    narrow = [SequenceSpan(0, 2, 20, own, True, 3, 10, 3), SequenceSpan(2, 4, 22, own, False, 1, -2, 2)]
    windowed = {12: replace(plan, local=Rows(6, narrow), foreign=(), queries=None, keys=None)}
    batch = Batch(torch.arange(6), [], replace(plan, windowed=windowed))
    assert count_work(planned(True), batch, (12,)) == StepWork(6, 1, 2 * 11 + (22 + 22 + 20 + 18), 22)


def test_a_lane_without_a_part_in_a_step_counts_nothing() -> None:
    assert count_work((), None) == StepWork()


@pytest.mark.parametrize(("shape", "tensor"), [(LLAMA3_8B, 1), (LLAMA3_70B, 8)], ids=str)
@pytest.mark.parametrize(("decodes", "context", "rows"), [(64, 8192, 1), (1, 0, 8192), (1, 120_000, 2048)])
def test_estimates_are_near_the_counts_of_the_models_own_operators(
    shape: ModelShape, tensor: int, decodes: int, context: int, rows: int
) -> None:
    """The benchmark counts them on fake tensors, with a row of logits for each sequence."""
    row = arithmetic.predicted(arithmetic.Case(shape, tensor, decodes, context, rows))
    config = random_llama.model_config(shape, shape.layers)
    ours = StepCosts.of(shape_of(Shard(0, tensor, 0, shape.layers, shape.layers), config, 2))
    pairs, keys = decodes * attention_pairs(rows, context), decodes * (context + rows)
    work = StepWork(decodes * rows, decodes, pairs, keys)
    assert ours.flops(work) == pytest.approx(1e12 * row["teraflops"], rel=0.01)
    if rows == 1:  # a chunk moves activations too
        assert ours.read_bytes(work) == pytest.approx(1e9 * row["gigabytes"], rel=0.05)


def test_the_parts_of_all_ranks_make_the_model() -> None:
    config = random_llama.model_config(LLAMA3_70B, LLAMA3_70B.layers)
    stages = split_layers(config, 2, 512)
    ranks = [
        StepCosts.of(shape_of(Shard(tensor, 4, layers.start, layers.stop, config.num_layers), config, 2))
        for layers in stages
        for tensor in range(4)
    ]
    work = StepWork(16, 4, 5000, 900)
    whole = StepCosts.of(LLAMA3_70B)
    assert sum(one.flops(work) for one in ranks) == whole.flops(work)
    assert sum(one.read_bytes(work) for one in ranks) == whole.read_bytes(work)


def test_decodes_see_every_token_of_their_sequence() -> None:
    entries: Any = [Planned(Entry(True), 100), Planned(Entry(True), 7)]
    spans = [SequenceSpan(0, 1, 99, [0]), SequenceSpan(1, 1, 6, [1])]
    assert count_work(entries, Batch(torch.tensor([99, 6]), spans, None)) == StepWork(2, 2, 107, 107)
