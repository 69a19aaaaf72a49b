"""Runs steps of a draft model that measure the time of its guesses, and the memory that it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from medha.cost.predictor import Work
from medha.errors import OutOfMemory
from medha.wire.messages import DraftCosts, StepProfile
from medha_worker.model import out_of_memory
from medha_worker.model.transformer import Transformer
from medha_worker.profiling.profile_fit import MeasuredStep
from medha_worker.profiling.step_timer import BLOCK_TOKENS, Shape, StepTimer, blocks_of, median
from medha_worker.rank.warmup import COSTLY, REPEATS, WarmUp, is_near, step_profile

CONTEXT_TOKENS = 256
"""Context of the sequences whose guesses are timed."""
TIMED_ROWS = 8
"""Sequences of the step that measures the time of each additional sequence."""
TIMED_TOKENS = 256
"""Tokens of the chunk that measures the time of following a sequence."""


@dataclass(frozen=True, slots=True)
class DraftWarmUp:
    """The measured times of guesses, and the memory that the draft model takes while it runs."""

    costs: DraftCosts
    activation_bytes: int
    steps: tuple[MeasuredStep, ...] = ()
    """Steps of the served model, as the draft model computes them."""


def warm_up_draft(
    model: Transformer,
    *,
    max_chunk_tokens: int,
    max_running: int,
    max_model_len: int,
    clock: Callable[[], float],
    followed_steps: Sequence[Shape] = (),
) -> DraftWarmUp:
    """Run the largest step of a draft model, and time guesses for one sequence and for several, and a prompt's tokens.

    `followed_steps` are further steps to time: those of the served model, which a prediction head computes along with
    it.

    Raises:
        OutOfMemory: the largest step does not fit.
    """
    context = min(CONTEXT_TOKENS, max_model_len - 1)
    one: Shape = (Work(context, 1),)
    several = one * min(TIMED_ROWS, max_running)
    chunk: Shape = (Work(0, min(TIMED_TOKENS, max_chunk_tokens, max_model_len)),)
    largest: Shape = (Work(0, min(max_chunk_tokens, max_model_len)), *(Work(0, 1),) * max_running)
    near = filter(is_near, followed_steps)
    timer = StepTimer(model, max(map(blocks_of, (several, chunk, largest, *near))) * BLOCK_TOKENS, clock)
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
    shapes = (one, several, chunk, *followed_steps)
    for works in shapes:
        timer.measure(works)
    alone, together, followed, *steps = [
        median([timer.measure(works) for _ in range(REPEATS)]) for works in shapes
    ]
    row_seconds = max(0.0, (together.seconds - alone.seconds) / max(len(several) - 1, 1))
    costs = DraftCosts(
        round_seconds=max(0.0, alone.seconds - row_seconds),
        row_seconds=row_seconds,
        token_seconds=max(
            0.0, (followed.forward_seconds - alone.forward_seconds) / max(chunk[0].count - 1, 1)
        ),
    )
    return DraftWarmUp(costs, activation_bytes, tuple(steps))


def with_head(warm: WarmUp, head: DraftWarmUp) -> StepProfile:
    """Return the profile of steps, each followed by a prediction head that computes the same tokens.

    `head` has been timed on the steps of `warm`.
    """
    profile = warm.profile
    both = [
        replace(one, forward_seconds=one.forward_seconds + behind.forward_seconds)
        for one, behind in zip(warm.steps, head.steps, strict=True)
    ]
    return replace(
        step_profile(both, profile.window_tokens, profile.window_share),
        head_seconds_per_row=profile.head_seconds_per_row,
        mask_seconds_per_row=profile.mask_seconds_per_row,
    )
