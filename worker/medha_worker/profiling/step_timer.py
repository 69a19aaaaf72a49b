"""Measures what steps of a checkpoint take on this machine, for `medha profile`.

Only time matters here, so the K and V of contexts are random numbers that were never computed. Each sequence
has its own: if they were shared, the caches would make many decodes look cheap. Steps are measured in rounds
over the whole grid, each in a different order, because a machine's clock speed and its other load change from minute to
minute, and each step leaves caches in a state that makes the next one faster or slower.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from medha.api.determinism import Determinism
from medha.cost.predictor import Work
from medha.errors import ConfigInvalid, OutOfMemory
from medha.model.kv_dtype import KvDtype
from medha.wire.messages import Sampling
from medha_worker.device import host_device
from medha_worker.kernels.name_table import choose_kernels
from medha_worker.kernels.sequence_span import SequenceSpan
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.out_of_memory import ran_out
from medha_worker.model.sampler import SequenceSampler
from medha_worker.model.token_sampler import TokenSampler
from medha_worker.model.transformer import Transformer
from medha_worker.model.weights import DTYPES, Shard
from medha_worker.profiling.profile_fit import MeasuredStep

BLOCK_TOKENS = 16

GREEDY = Sampling(temperature=0.0)

Shape = tuple[Work, ...]


@dataclass(frozen=True, slots=True)
class Grid:
    """The steps to measure: chunks alone after contexts, decodes alone, and decodes beside a chunk."""

    contexts: tuple[int, ...]  # tokens, ascending from 0
    chunks: tuple[int, ...]
    decodes: tuple[int, ...]

    @property
    def pool_tokens(self) -> int:
        """Tokens of KV that the steps need: for the longest sequence, and for a few to decode together."""
        longest = -(-(self.contexts[-1] + self.chunks[-1]) // BLOCK_TOKENS) * BLOCK_TOKENS
        return max(longest, 4 * (self.contexts[-1] + BLOCK_TOKENS))

    def shapes(self) -> list[Shape]:
        """Return the steps that the pool has room for, the smallest first."""
        alone = [(Work(context, chunk),) for context in self.contexts for chunk in self.chunks]
        decodes = [(Work(context, 1),) * count for context in self.contexts for count in self.decodes]
        beside = self.decodes[-1:] and (
            (Work(self.contexts[min(1, len(self.contexts) - 1)], 1),) * self.decodes[-1]
        )
        mixed = [(*beside, Work(context, chunk)) for context in self.contexts for chunk in self.chunks[1::2]]
        shapes = [
            works
            for works in {*alone, *decodes, *mixed}
            if blocks_of(works) * BLOCK_TOKENS <= self.pool_tokens
        ]
        return sorted(shapes, key=lambda works: (sum(work.pairs + work.count for work in works), len(works)))


def blocks_of(works: Shape) -> int:
    """Return the number of KV blocks of a step's sequences, none of them shared."""
    return sum(-(-(work.context + work.count) // BLOCK_TOKENS) for work in works)


def grid(*, max_context: int, max_chunk: int, max_decodes: int, quick: bool) -> Grid:
    """Return a grid up to the largest context, chunk and number of decodes.

    Chunks and decodes are powers of four. Contexts are 0, and 512 times powers of two, or of four if `quick`. Each list
    ends with the largest value.
    """
    factor = 4 if quick else 2

    def steps(start: int, stop: int, by: int = factor) -> tuple[int, ...]:
        values = []
        value = start
        while value < stop:
            values.append(value)
            value *= by
        return (*values, stop)

    return Grid(
        contexts=(0, *steps(min(512, max_context), max_context)) if max_context else (0,),
        chunks=steps(1, max_chunk, 4),
        decodes=tuple(count for count in steps(1, max_decodes, 4) if count > 1),
    )


class StepTimer:
    """Runs steps of one model and measures their time."""

    def __init__(self, model: Transformer, pool_tokens: int, clock: Callable[[], float]) -> None:
        """Allocate a scratch pool of `pool_tokens`.

        Raises:
            OutOfMemory: the pool does not fit.
        """
        self._model = model
        self._sampler = TokenSampler(model.kernels.race, model.device)
        self._clock = clock
        self._random = torch.Generator().manual_seed(0)
        blocks = -(-pool_tokens // BLOCK_TOKENS)
        try:
            self.pool = model.new_kv_cache(blocks, BLOCK_TOKENS)
            for part in (*self.pool.keys, *self.pool.values):
                _fill(part)  # makes the pool resident
        except (RuntimeError, MemoryError) as error:
            if not ran_out(error):
                raise
            raise OutOfMemory(
                f"KV of {pool_tokens} tokens does not fit beside the weights; lower --max-context"
            ) from error

    def measure(self, works: Shape, sampling: Sampling = GREEDY) -> MeasuredStep:
        """Run one step of `works` once; sequences overlap if the pool is too small for all of them."""
        model = self._model
        spans, row, block = [], 0, 0
        for work in works:
            end = block + blocks_of((work,))
            spans.append(
                SequenceSpan(row, work.count, work.context, np.arange(block, end) % self.pool.num_blocks)
            )
            row, block = row + work.count, end
        positions = torch.cat([torch.arange(work.context, work.context + work.count) for work in works])
        entering = (
            torch.arange(row)
            % model.config.vocab_size  # so that rows go to different experts, as in a real step
            if model.takes_ids
            else torch.randn(row, model.entering_size, generator=self._random).to(model.dtype)
        )
        last_rows = [span.row_start + span.row_count - 1 for span in spans]
        samplers = [_sampler(sampling, model.config.vocab_size) for _ in works]
        started = self._clock()
        hidden = model.forward(entering, model.prepare(positions, spans, self.pool))
        model.device.synchronise()
        forwarded = self._clock()
        if model.shard.is_last_stage:
            logits = model.logits(hidden[last_rows])
            if logits is not None:  # only on the rank that samples
                self._sampler.sample(logits, samplers)
        model.device.synchronise()
        return MeasuredStep(works, forwarded - started, self._clock() - forwarded)


def measure(
    timer: StepTimer,
    shapes: Sequence[Shape],
    *,
    rounds: int,
    max_step_seconds: float,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> list[MeasuredStep]:
    """Return medians of `rounds` runs of each shape; `progress` is called with the runs done and their total.

    One round before them is not counted. A shape whose first run takes longer than `max_step_seconds` is
    dropped, and so are all larger ones of its kind, unmeasured: the roofline extrapolates their time.

    Raises:
        ConfigInvalid: no step is short enough.
    """
    kept: dict[Shape, list[MeasuredStep]] = {}
    too_long: list[Shape] = []
    done, total = 0, len(shapes) * (rounds + 1)
    for works in shapes:
        if any(_covers(works, slow) for slow in too_long):
            total -= rounds + 1
            continue
        done += 1
        if timer.measure(works).seconds > max_step_seconds:
            too_long.append(works)
            total -= rounds
        else:
            kept[works] = []
        progress(done, total)
    if not kept:
        raise ConfigInvalid(
            f"no step ends within --max-step-seconds {max_step_seconds:g}; raise it, or profile a smaller model"
        )
    order = np.random.default_rng(0)  # any order will do, as long as it is the same each time
    names = list(kept)
    for _ in range(rounds):
        for index in order.permutation(len(names)):
            kept[names[index]].append(timer.measure(names[index]))
            done += 1
            progress(done, total)
    return [median(steps) for steps in kept.values()]


def load(
    directory: Path,
    *,
    max_model_len: int | None,
    dtype: str,
    threads: int | None,
    determinism: Determinism = "bestEffort",
    kv_dtype: KvDtype = "auto",
) -> Transformer:
    """Load the checkpoint as a rank would run it, on `threads` threads of this process.

    Raises:
        MedhaError: the checkpoint is incomplete, or needs what is not implemented.
    """
    torch.set_num_threads(threads or os.cpu_count() or 1)
    config = ModelConfig.from_directory(directory, max_model_len, kv_dtype=kv_dtype)
    device = host_device(DTYPES[config.dtype if dtype == "auto" else dtype])
    shard = Shard.whole(config)
    kernels = choose_kernels(shard.kernel_sizes(config), device, determinism)
    return Transformer.load(directory, config, shard, device=device, kernels=kernels)


def _fill(pool: torch.Tensor) -> None:
    """Fill a pool with random numbers near 1, none of which is subnormal or NaN."""
    if pool.dtype == torch.float8_e4m3fn:
        pool.view(torch.uint8).random_(0x30, 0x40)  # from 0.5 to 2
    else:
        pool.normal_()


def _covers(works: Shape, other: Shape) -> bool:
    """True if a step is at least as large as another of its kind."""
    return len(works) >= len(other) and all(
        mine.context >= theirs.context and mine.count >= theirs.count
        for mine, theirs in zip(reversed(works), reversed(other), strict=False)
    )


def median(steps: Sequence[MeasuredStep]) -> MeasuredStep:
    """Return the median of several runs of one step."""
    return MeasuredStep(
        steps[0].works,
        statistics.median(step.forward_seconds for step in steps),
        statistics.median(step.sampling_seconds for step in steps),
    )


def _sampler(sampling: Sampling, vocab_size: int) -> SequenceSampler:
    return SequenceSampler(
        sampling,
        seed=0,
        sample_index=0,
        tokens=np.zeros(1, dtype=np.int32),
        prompt_length=1,
        vocab_size=vocab_size,
    )
