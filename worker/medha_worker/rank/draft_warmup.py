"""Steps of a draft model that measure what its guesses cost, and the memory that it takes while it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from medha.cost.predictor import Work
from medha.errors import OutOfMemory
from medha.wire.messages import DraftCosts
from medha_worker.model import out_of_memory
from medha_worker.model.transformer import Transformer
from medha_worker.profiling.step_timer import BLOCK_TOKENS, Shape, StepTimer, blocks_of, median
from medha_worker.rank.warmup import COSTLY, REPEATS

CONTEXT_TOKENS = 256
"""Context of the sequences whose guesses are timed."""
TIMED_ROWS = 8
"""Sequences of the step that measures what each further one costs."""


@dataclass(frozen=True, slots=True)
class DraftWarmUp:
    """The measured times of guesses, and the memory that the draft model takes while it runs."""

    costs: DraftCosts
    activation_bytes: int


def warm_up_draft(
    model: Transformer,
    *,
    max_chunk_tokens: int,
    max_running: int,
    max_model_len: int,
    clock: Callable[[], float],
) -> DraftWarmUp:
    """Run the largest step of a draft model, and time guesses for one sequence and for several.

    Raises:
        OutOfMemory: the largest step does not fit.
    """
    context = min(CONTEXT_TOKENS, max_model_len - 1)
    one: Shape = (Work(context, 1),)
    several = one * min(TIMED_ROWS, max_running)
    largest: Shape = (Work(0, min(max_chunk_tokens, max_model_len)), *(Work(0, 1),) * max_running)
    timer = StepTimer(model, max(map(blocks_of, (several, largest))) * BLOCK_TOKENS, clock)
    memory = model.device.memory
    memory.forget_peak()
    before = memory.used_bytes()
    try:
        timer.measure(largest, COSTLY)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory.ran_out(error):
            raise
        raise OutOfMemory(
            f"a step of {largest[0].count} tokens and {max_running} sequences of the draft model does not fit beside the "
            f"weights ({error}); lower scheduling.maxChunkTokens or scheduling.maxRunning"
        ) from error
    activation_bytes = max(memory.peak_bytes() - before, 0)
    for works in (one, several):
        timer.measure(works)
    alone, together = (median([timer.measure(works) for _ in range(REPEATS)]) for works in (one, several))
    further = max(len(several) - 1, 1)
    row_seconds = max(0.0, (together.seconds - alone.seconds) / further)
    costs = DraftCosts(
        first_seconds=max(0.0, alone.sampling_seconds - row_seconds),
        round_seconds=max(0.0, alone.seconds - row_seconds),
        row_seconds=row_seconds,
    )
    return DraftWarmUp(costs, activation_bytes)
