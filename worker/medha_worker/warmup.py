"""Warm-up steps: they bring the kernels up, size the activations, and measure the predictor's constants."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from medha.errors import OutOfMemory
from medha.messages import Sampling, StepProfile
from medha.predictor import Work
from medha_worker.executor import failure_reason
from medha_worker.model.batch import SequenceSpan
from medha_worker.model.sampler import SequenceSampler, draw
from medha_worker.model.transformer import Transformer

REPEATS = 3
CONTEXT_TOKENS = 2048

_GREEDY = Sampling(temperature=0.0)
_COSTLY = Sampling(temperature=1.0, top_p=0.9)  # takes the most memory to draw with

_log = logging.getLogger("medha.warmup")


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

    The activations' size is how much the process's resident memory grew at its peak, the kernels' own buffers
    included; the scratch KV of the warm-up was resident before.
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
    for pool in (*scratch.keys, *scratch.values):
        pool.fill_(0)  # its pages become resident now, not while the activations are measured
    _forget_peak()
    before = _resident_bytes()

    def run(works: Sequence[Work], sampling: Sampling = _GREEDY) -> float:
        started = clock()
        rows = sum(work.count for work in works)
        blocks = np.arange(scratch.num_blocks)  # sequences may overlap here: only the time matters
        spans, row = [], 0
        for work in works:
            spans.append(SequenceSpan(row, work.count, work.context, blocks))
            row += work.count
        positions = torch.cat([torch.arange(work.context, work.context + work.count) for work in works])
        hidden = model.forward(
            torch.zeros(rows, dtype=torch.int64, device=model.device)
            if model.shard.is_first_stage
            else torch.zeros(rows, model.config.hidden_size, dtype=model.dtype, device=model.device),
            positions.to(model.device),
            spans,
            scratch,
        )
        if model.shard.is_last_stage:
            last_rows = torch.tensor([span.row_start + span.row_count - 1 for span in spans])
            logits = model.logits(hidden[last_rows])
            if logits is not None:
                draw(logits, [_sampler(sampling, model.config.vocab_size)] * len(works))
        return clock() - started

    try:
        run([Work(0, chunk)])
        run([Work(0, 1)] * max_running, _COSTLY)
    except (RuntimeError, MemoryError) as error:
        if failure_reason(error) != "out_of_memory":
            raise
        raise OutOfMemory(
            f"a step of {chunk} tokens, or of {max_running} sequences, does not fit beside the weights "
            f"({error}); lower scheduling.maxChunkTokens or scheduling.maxRunning"
        ) from error
    activation_bytes = max(_peak_bytes() - before, 0)
    for works in shapes:
        run(works)
    seconds = [statistics.median(run(works) for _ in range(REPEATS)) for works in shapes]
    return WarmUp(fit_profile(shapes, seconds), activation_bytes)


def _sampler(sampling: Sampling, vocab_size: int) -> SequenceSampler:
    return SequenceSampler(
        sampling,
        seed=0,
        sample_index=0,
        tokens=np.zeros(1, dtype=np.int32),
        prompt_length=1,
        vocab_size=vocab_size,
    )


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


def _resident_bytes() -> int:
    return _status_bytes("VmRSS")


def _peak_bytes() -> int:
    return _status_bytes("VmHWM")


def _forget_peak() -> None:
    """Let the peak start again from what is resident, or loading the weights would hide the activations (proc(5))."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        _log.warning("activations may be overestimated, the peak before them cannot be reset: %s", error)


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
