"""Warm-up steps: they bring the kernels up, size the activations, and measure the predictor's constants."""

from __future__ import annotations

import resource
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from medha.messages import StepProfile
from medha.predictor import Work
from medha_worker.model.batch import SequenceSpan
from medha_worker.model.transformer import Transformer

REPEATS = 3
CONTEXT_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class WarmUp:
    profile: StepProfile
    activation_bytes: int


def warm_up(
    model: Transformer,
    *,
    max_chunk_tokens: int,
    max_running: int,
    max_model_len: int,
    clock: Callable[[], float],
) -> WarmUp:
    """Run steps of several shapes, up to the largest chunk and batch that the scheduler will form.

    The activations' size is how much the process's peak memory grew, without the scratch KV of the warm-up.
    """
    chunk = min(max_chunk_tokens, max_model_len)
    context = min(CONTEXT_TOKENS, max_model_len - 1)
    batch = min(max_running, 32)
    shapes: list[list[Work]] = [
        [Work(0, 1)],
        [Work(0, min(64, chunk))],
        [Work(0, chunk)],
        [Work(context, 1)],
        [Work(context, 1)] * 8,
        [Work(0, 1)] * batch,
        [Work(context, min(256, chunk, max_model_len - context))],
    ]
    block_tokens = 16
    longest = max(work.context + work.count for works in shapes for work in works)
    scratch = model.new_kv_cache(-(-longest // block_tokens), block_tokens)
    scratch_bytes = sum(pool.numel() * pool.element_size() for pool in (*scratch.keys, *scratch.values))
    before = _peak_bytes()

    def run(works: Sequence[Work]) -> float:
        started = clock()
        rows = sum(work.count for work in works)
        blocks = np.arange(scratch.num_blocks)  # sequences may overlap here: only the time matters
        spans, row = [], 0
        for work in works:
            spans.append(SequenceSpan(row, work.count, work.context, blocks))
            row += work.count
        positions = torch.cat([torch.arange(work.context, work.context + work.count) for work in works])
        hidden = model.forward(
            torch.zeros(rows, dtype=torch.int64, device=model.device),
            positions.to(model.device),
            spans,
            scratch,
        )
        model.logits(hidden[torch.tensor([span.row_start + span.row_count - 1 for span in spans])]).max(
            dim=-1
        )
        return clock() - started

    for works in shapes:
        run(works)
    seconds = [statistics.median(run(works) for _ in range(REPEATS)) for works in shapes]
    return WarmUp(fit_profile(shapes, seconds), max(_peak_bytes() - before - scratch_bytes, 0))


def fit_profile(shapes: Sequence[Sequence[Work]], seconds: Sequence[float]) -> StepProfile:
    """Non-negative constants whose predictions have the least relative error over the measured steps."""
    rows = [
        [1.0, sum(work.count for work in works), sum(work.pairs for work in works), len(works)]
        for works in shapes
    ]
    measured = np.asarray(seconds, dtype=np.float64)
    terms = np.asarray(rows, dtype=np.float64) / measured[:, None]
    step, linear, attention, sequence = _non_negative_least_squares(terms, np.ones(len(measured)))
    return StepProfile(
        step_seconds=step,
        linear_seconds_per_token=linear,
        attention_seconds_per_pair=attention,
        sequence_seconds=sequence,
    )


def _non_negative_least_squares(
    terms: npt.NDArray[np.float64], wanted: npt.NDArray[np.float64]
) -> list[float]:
    """Least squares with no negative coefficient: of all subsets of the few terms, the best valid one."""
    count = terms.shape[1]
    best, best_error = [0.0] * count, float("inf")
    for mask in range(1, 2**count):
        chosen = [index for index in range(count) if mask >> index & 1]
        solved = np.linalg.lstsq(terms[:, chosen], wanted, rcond=None)[0]
        error = float(((terms[:, chosen] @ solved - wanted) ** 2).sum())
        if (solved >= 0).all() and error < best_error:
            best_error = error
            best = [0.0] * count
            for index, value in zip(chosen, solved.tolist(), strict=True):
                best[index] = value
    return best


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
