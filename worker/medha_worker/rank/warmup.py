"""Steps that warm up the kernels, size the activations, and measure the predictor's first profile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from medha.cost.predictor import Work
from medha.errors import OutOfMemory
from medha.wire.messages import Sampling, StepProfile
from medha_worker.model import out_of_memory
from medha_worker.model.decode_graphs import captured_sizes, copies_of_each
from medha_worker.model.kv_cache import KVCache
from medha_worker.model.transformer import Transformer
from medha_worker.profiling.profile_fit import MeasuredStep, fit_profile
from medha_worker.profiling.step_timer import BLOCK_TOKENS, GREEDY, Shape, StepTimer, blocks_of, median

REPEATS = 3
CONTEXT_TOKENS = 2048

Progress = Callable[[str, int, int], None]
"""Callback that is given a text of what is done now, the number of steps done, and their total."""

_COSTLY = Sampling(temperature=1.0, top_p=0.9)  # the sampling that takes the most memory


@dataclass(frozen=True, slots=True)
class WarmUp:
    profile: StepProfile
    activation_bytes: int
    """Memory that a step takes, and that steps which are captured keep."""
    steps: tuple[MeasuredStep, ...] = ()
    """Steps that the profile was fitted to."""


def warm_up(
    model: Transformer,
    *,
    max_chunk_tokens: int,
    max_running: int,
    max_model_len: int,
    stages: int = 1,
    clock: Callable[[], float],
    ran_out: Callable[[], bool] = lambda: False,
    progress: Progress = lambda _text, _done, _total: None,
) -> WarmUp:
    """Run steps of several shapes, up to the largest chunk and batch that the scheduler will form.

    The activations' size is the growth of the process's memory on the device at its peak, the kernels' own buffers
    included; the warm-up's scratch KV was taken before. `stages` are those of the pipeline. `ran_out` returns whether rows have become NaN so
    far, here or on another tensor rank: in a grid, nothing else reports that memory does not suffice.
    `progress` is called with the next step, and with the number of steps done and their total.

    Raises:
        OutOfMemory: the largest chunk or batch does not fit.
    """
    shapes = _shapes(max_chunk_tokens, max_running, max_model_len)
    total = 2 + len(shapes) * (1 + REPEATS)
    done = 0

    def measured(works: Shape, sampling: Sampling = GREEDY) -> MeasuredStep:
        nonlocal done
        progress(f"warms up: step {done + 1} of {total}, {shape_name(works)}", done, total)
        step = timer.measure(works, sampling)
        done += 1
        return step

    timer = StepTimer(model, max(map(blocks_of, shapes)) * BLOCK_TOKENS, clock)
    memory = model.device.memory
    memory.forget_peak()
    before = memory.used_bytes()
    chunk = min(max_chunk_tokens, max_model_len)
    too_large = f"a step of {chunk} tokens, or of {max_running} sequences, does not fit beside the weights"
    mend = "lower scheduling.maxChunkTokens or scheduling.maxRunning"
    try:
        measured((Work(0, chunk),))
        measured((Work(0, 1),) * max_running, _COSTLY)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory.ran_out(error):
            raise
        raise OutOfMemory(f"{too_large} ({error}); {mend}") from error
    if ran_out():
        raise OutOfMemory(f"{too_large} of a rank of this pod, whose log says more; {mend}")
    activation_bytes = max(memory.peak_bytes() - before, 0)
    activation_bytes += _captured_bytes(model, timer.pool, max_running, stages)
    for works in shapes:
        measured(works)
    steps = [median([measured(works) for _ in range(REPEATS)]) for works in shapes]
    return WarmUp(step_profile(steps), activation_bytes, tuple(steps))


def _captured_bytes(model: Transformer, pool: KVCache, most_rows: int, stages: int) -> int:
    """Return the memory that captured decodes take; they are captured again once the pool has its size."""
    memory = model.device.memory
    before = memory.used_bytes()
    model.capture_decodes(pool, captured_sizes(most_rows), copies_of_each(stages))
    taken = max(memory.used_bytes() - before, 0) if model.captures else 0
    model.forget_captured()
    return taken


def shape_name(works: Shape) -> str:
    """Describe in words what a step computes."""
    first = works[0]
    behind = f" behind {first.context:,}" if first.context else ""
    if len(works) > 1:
        return f"{len(works)} sequences of {first.count:,} token{'s' if first.count > 1 else ''}{behind}"
    return f"{first.count:,} token{'s' if first.count > 1 else ''}{behind}"


def typical(steps: Sequence[MeasuredStep]) -> list[MeasuredStep]:
    """Select representative steps: one token, the largest chunk, and the most sequences at a time."""
    alone = [step for step in steps if len(step.works) == 1]
    chosen = (
        steps[0],
        max(alone, key=lambda step: step.tokens),
        max(steps, key=lambda step: len(step.works)),
    )
    return list(dict.fromkeys(chosen))


def times(steps: Sequence[MeasuredStep]) -> str:
    """Format the times of steps, in milliseconds, for people."""
    return "; ".join(f"{shape_name(step.works)}: {1e3 * step.seconds:.3g} ms" for step in steps)


def _shapes(max_chunk_tokens: int, max_running: int, max_model_len: int) -> list[Shape]:
    """Return chunks where the linear layers' curve bends, three also behind a context, and sets of decodes.

    The shapes are the same on every rank of a replica: tensor ranks compute each step together.
    """
    chunk = min(max_chunk_tokens, max_model_len)
    context = min(CONTEXT_TOKENS, max_model_len - 1)
    room = max_model_len - context
    shapes: dict[Shape, None] = {
        (Work(0, count),): None for count in (1, 16, 64, 256, chunk) if count <= chunk
    }
    shapes |= {(Work(context, min(count, chunk, room)),): None for count in (1, 16, 256)}
    shapes |= {(Work(0, 1),) * min(max_running, count): None for count in (16, 64)}
    shapes[(Work(context // 8, 1),) * min(max_running, 8)] = None
    return list(shapes)


def step_profile(steps: Sequence[MeasuredStep]) -> StepProfile:
    """Return the curves that fit the measured steps best, and the constants that extrapolate them."""
    fitted = fit_profile(steps, layers=1, name="warm-up", source="warm-up")
    queries, seconds_per_key = fitted.attention.points[-1]
    return StepProfile(
        step_seconds=fitted.head.launch_seconds,
        linear_seconds_per_token=fitted.linear[0].compute_seconds_per_row,
        attention_seconds_per_pair=seconds_per_key / queries,
        sequence_seconds=fitted.attention.sequence_seconds + fitted.head.compute_seconds_per_row,
        token_points=fitted.linear_points,
        query_points=fitted.attention.points,
    )
