"""Steps that warm up the kernels, size the activations, and measure the predictor's first profile."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from medha.cost.predictor import Work
from medha.errors import OutOfMemory
from medha.wire.messages import Sampling, StepProfile
from medha_worker.model import out_of_memory
from medha_worker.model.decode_graphs import captured_sizes, copies_of_each
from medha_worker.model.kv_cache import KVCache
from medha_worker.model.sampling_plan import WORD_BITS
from medha_worker.model.token_sampler import bits_of_bytes, forbidden
from medha_worker.model.transformer import Transformer
from medha_worker.profiling.profile_fit import MeasuredStep, fit_profile
from medha_worker.profiling.step_timer import BLOCK_TOKENS, GREEDY, Shape, StepTimer, blocks_of, median
from medha_worker.rank.prompt_scores import columns_of, rows_of_a_block

REPEATS = 3
MASKED_ROWS = 8
"""Sequences with masks in the step that measures what masks cost."""
CONTEXT_TOKENS = 2048
FAR_CONTEXT_TOKENS = 8192
"""Longer context after which chunks are measured, too. Attention takes more time per key after a short context than after
a long one, so a profile from short ones alone would make the chunks of long prompts too small."""

Progress = Callable[[str, int, int], None]
"""Callback that is given a text of what is done now, the number of steps done, and their total."""

COSTLY = Sampling(temperature=1.0, top_p=0.9)  # the sampling that takes the most memory


@dataclass(frozen=True, slots=True)
class WarmUp:
    profile: StepProfile
    activation_bytes: int
    """Memory that a step takes, and that captured steps keep."""
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

    The activations' size is the peak growth of the process's memory on the device, with the kernels' own buffers and
    without the warm-up's scratch KV. `stages` are those of the pipeline. `ran_out` returns whether rows have become NaN
    so far, here or on another tensor rank: in a grid, nothing else reports that memory does not suffice.
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

    # The KV of a far context may use the same blocks repeatedly: that does not change the time of a chunk, and saves memory.
    near = filter(is_near, shapes)
    timer = StepTimer(model, max(map(blocks_of, near)) * BLOCK_TOKENS, clock)
    memory = model.device.memory
    memory.forget_peak()
    before = memory.used_bytes()
    chunk = min(max_chunk_tokens, max_model_len)
    too_large = f"a step of {chunk} tokens, or of {max_running} sequences, does not fit beside the weights"
    remedy = "lower scheduling.maxChunkTokens or scheduling.maxRunning"
    try:
        measured((Work(0, chunk),))
        measured((Work(0, 1),) * max_running, COSTLY)
        head_seconds_per_row = _head_seconds_per_row(model, chunk, clock)
        mask_seconds_per_row = _mask_seconds_per_row(model, max_running, clock)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory.ran_out(error):
            raise
        raise OutOfMemory(f"{too_large} ({error}); {remedy}") from error
    if ran_out():
        raise OutOfMemory(f"{too_large} of a rank of this pod, whose log says more; {remedy}")
    activation_bytes = max(memory.peak_bytes() - before, 0)
    activation_bytes += _captured_bytes(model, timer.pool, max_running, stages)
    for works in shapes:
        measured(works)
    steps = [median([measured(works) for _ in range(REPEATS)]) for works in shapes]
    profile = replace(
        step_profile(steps, model.window_tokens, model.window_share),
        head_seconds_per_row=head_seconds_per_row,
        mask_seconds_per_row=mask_seconds_per_row,
    )
    return WarmUp(profile, activation_bytes, tuple(steps))


def _head_seconds_per_row(model: Transformer, chunk_tokens: int, clock: Callable[[], float]) -> float:
    """Return the seconds for a row whose log-probabilities are asked for; 0 on a stage without the output head."""
    if not model.shard.is_last_stage:
        return 0.0
    rows = min(rows_of_a_block(model.config.vocab_size), chunk_tokens)
    hidden = torch.zeros(rows, model.config.hidden_size, dtype=model.dtype, device=model.device.torch_device)
    ids = torch.zeros(rows, dtype=torch.int64, device=model.device.torch_device)
    seconds = []
    for _ in range(1 + REPEATS):  # the first one warms up
        started = clock()
        logits = model.logits(hidden)
        if logits is not None:
            columns_of(logits, ids, 1)
        model.device.synchronise()
        seconds.append(clock() - started)
    return statistics.median(seconds[1:]) / rows


def _mask_seconds_per_row(model: Transformer, max_running: int, clock: Callable[[], float]) -> float:
    """Return the seconds that the mask of a sequence adds to the step that samples it; 0 on a stage that samples none.

    The mask itself is computed while other work runs, so that time does not count.
    """
    if not model.shard.is_last_stage:
        return 0.0
    rows, vocab, device = min(MASKED_ROWS, max_running), model.config.vocab_size, model.device
    logits = torch.zeros(rows, vocab, device=device.torch_device)
    masks = [torch.full((-(-vocab // WORD_BITS),), -1, dtype=torch.int32) for _ in range(rows)]
    bits = bits_of_bytes(device)
    seconds = []
    for _ in range(1 + REPEATS):  # the first one warms up
        started = clock()
        logits.masked_fill(forbidden(device.place(torch.stack(masks)), bits, vocab), float("-inf"))
        device.synchronise()
        seconds.append(clock() - started)
    return statistics.median(seconds[1:]) / rows


def _captured_bytes(model: Transformer, pool: KVCache, most_rows: int, stages: int) -> int:
    """Return the memory that captured decodes take; they are captured again once the pool has its size."""
    memory = model.device.memory
    before = memory.used_bytes()
    model.capture_decodes(pool, captured_sizes(most_rows), copies_of_each(stages))
    taken = max(memory.used_bytes() - before, 0) if model.captures else 0
    model.forget_captured()
    return taken


def is_near(works: Shape) -> bool:
    """Return whether each sequence of a step has KV of its own when it is timed, because its context is not far."""
    return works[0].context <= CONTEXT_TOKENS


def shape_name(works: Shape) -> str:
    """Describe in words what a step computes."""
    first = works[0]
    context = f" after {first.context:,}" if first.context else ""
    tokens = f"{first.count:,} token{'s' if first.count > 1 else ''}{context}"
    return f"{len(works)} sequences of {tokens}" if len(works) > 1 else tokens


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
    """Return chunks where the linear layers' curve bends, some also after a near and a far context, and sets of decodes.

    The shapes are the same on every rank of a replica: tensor ranks compute each step together.
    """
    chunk = min(max_chunk_tokens, max_model_len)
    context = min(CONTEXT_TOKENS, max_model_len - 1)
    room = max_model_len - context
    shapes: dict[Shape, None] = {
        (Work(0, count),): None for count in (1, 16, 64, 256, chunk) if count <= chunk
    }
    shapes |= {(Work(context, min(count, chunk, room)),): None for count in (1, 16, 256)}
    if max_model_len >= FAR_CONTEXT_TOKENS + chunk:
        shapes |= {(Work(FAR_CONTEXT_TOKENS, min(count, chunk)),): None for count in (64, 256)}
    shapes |= {(Work(0, 1),) * min(max_running, count): None for count in (16, 64)}
    shapes[(Work(context // 8, 1),) * min(max_running, 8)] = None
    return list(shapes)


def step_profile(
    steps: Sequence[MeasuredStep], window_tokens: int = 1, window_share: float = 0.0
) -> StepProfile:
    """Return the curves that fit the measured steps best, and the constants that extrapolate them.

    A share of the model's layers has a window of so many tokens.
    """
    fitted = fit_profile(
        steps,
        layers=1,
        name="warm-up",
        source="warm-up",
        window_tokens=window_tokens,
        window_share=window_share,
    )
    queries, seconds_per_key = fitted.attention.points[-1]
    return StepProfile(
        step_seconds=fitted.head.launch_seconds,
        linear_seconds_per_token=fitted.linear[0].compute_seconds_per_row,
        attention_seconds_per_pair=seconds_per_key / queries,
        sequence_seconds=fitted.attention.sequence_seconds + fitted.head.compute_seconds_per_row,
        token_points=fitted.linear_points,
        query_points=fitted.attention.points,
        window_tokens=window_tokens,
        window_share=window_share,
    )
