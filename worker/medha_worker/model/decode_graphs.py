"""Steps of decodes alone, captured for a few numbers of rows, so that launching their kernels costs no time.

A captured step reads and writes the same memory each time it is replayed. A step of fewer rows than were captured is
padded: the rows after its own decode token 0 in the pool's scratch block, which belongs to no sequence. Each size is
captured several times, so that the tables of later steps are filled while a step is running or has yet to run.

All captures share one memory pool for intermediate results, so a replay may overwrite those of another capture. Whatever
outlives a replay (inputs, tables, and the result) is therefore allocated outside of the capture.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from threading import Lock
from weakref import ReferenceType, ref

import torch

from medha_worker.device import Mark
from medha_worker.kernels.protocol import GraphAttention, GraphWrite, Kernels
from medha_worker.kernels.sequence_span import SequenceSpan
from medha_worker.model.kv_cache import KVCache
from medha_worker.model.latent_tensors import LatentWeights
from medha_worker.model.prepared_step import LayerStep, Rotations, new_slots

RunLayers = Callable[[torch.Tensor, Rotations, LayerStep], torch.Tensor]
"""Function that runs a rank's layers: entering rows, their rotations and their attention -> hidden states."""


def copies_of_each(stages: int) -> int:
    """Return how often each size is captured: a pipeline has as many steps in flight as stages, and a single stage two.

    A late stage may have prepared all of them before it runs the first.
    """
    return max(2, stages)


def captured_sizes(most_rows: int) -> list[int]:
    """Return the numbers of rows that are captured: powers of two up to 8, then multiples of 8, 16 and 32.

    Up to 64 rows, padding then costs at most 7 rows. Above, up to 4064 rows, it is less than a fifth of the captured
    rows.
    """
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 4096, 32)]
    sizes = [size for size in steps if size < most_rows]
    return [*sizes, most_rows]


def most_blocks(rows: int, kv_cache: KVCache) -> int:
    """Return the blocks that captured decodes have room for: each of the pool once, and scratch for every row.

    Sequences that share blocks can have more. Then the step runs as it is.
    """
    return kv_cache.num_blocks + rows


class DecodeGraphs:
    """The captured steps of one rank's layers over one KV pool."""

    def __init__(
        self,
        run_layers: RunLayers,
        rotations: Callable[[torch.Tensor], Rotations],
        entering: torch.Tensor,
        kv_cache: KVCache,
        kernels: Kernels,
        hidden_size: int,
        sizes: Sequence[int],
        copies: int,
    ) -> None:
        """Capture the layers for each of `sizes`, ascending, `copies` times.

        Args:
            run_layers: Runs the layers; called while work is captured.
            rotations: Returns the rotations of positions, int64 [rows] on the device.
            entering: One entering row, token ids int64 [1] or hidden states [1, hidden_size] on the device.
            kv_cache: The pool that all steps read and write.
            kernels: Their attention and writer can be captured.
            hidden_size: Values of a row of the result.
            sizes: Numbers of rows.
            copies: Most steps that are prepared before the first of them runs, and at least 2: the result of a step
                is still sent while the next one runs.
        """
        assert copies >= 2, "a step would overwrite what the one before it sends"
        self._sizes = list(sizes)
        self._kv_cache = kv_cache
        self._taking = Lock()

        def captured(rows: int) -> _CapturedStep:
            return _CapturedStep(rows, run_layers, rotations, entering, kv_cache, kernels, hidden_size)

        # The largest first: smaller ones then fit into the memory that it took. Of each size, the one that was
        # taken longest ago comes first.
        self._copies = {rows: deque(captured(rows) for _ in range(copies)) for rows in reversed(self._sizes)}

    def take(
        self, positions: torch.Tensor, spans: Sequence[SequenceSpan], kv_cache: KVCache
    ) -> CapturedRows | None:
        """Return a captured step whose tables are filled for `spans`, or None if they are not decodes that fit.

        The choice follows from the step alone: tensor ranks run the same rows, padding included.

        Raises:
            RuntimeError: all copies wait to be replayed; one is free again once the oldest was.
        """
        rows = len(spans)
        is_decode = all(span.row_count == 1 and span.is_causal for span in spans)
        if kv_cache is not self._kv_cache or not is_decode or not 0 < rows <= self._sizes[-1]:
            return None
        if sum(-(-span.total_length // kv_cache.block_tokens) for span in spans) > most_blocks(0, kv_cache):
            return None
        size = self._sizes[bisect_left(self._sizes, rows)]
        taken = self._take(size, rows)
        taken.fill(positions, spans)
        return taken

    def _take(self, size: int, rows: int) -> CapturedRows:
        with self._taking:
            copies = self._copies[size]
            step = next((step for step in copies if step.is_free), None)
            if step is None:
                raise RuntimeError(f"all {len(copies)} captured steps of {size} rows wait to be replayed")
            copies.remove(step)
            copies.append(step)
            return step.taken_for(rows)

    def release(self) -> None:
        """Let go of all captured work; steps that were taken can no longer be replayed."""
        for copies in self._copies.values():
            for step in copies:
                step.release()


class CapturedRows:
    """A captured step that is filled for some rows: `Captured` of a `PreparedStep`."""

    def __init__(self, step: _CapturedStep, rows: int) -> None:
        self._step, self._rows = step, rows
        self.was_replayed = False

    def fill(self, positions: torch.Tensor, spans: Sequence[SequenceSpan]) -> None:
        self._step.fill(positions, spans)

    def replay(self, entering: torch.Tensor) -> torch.Tensor:
        hidden = self._step.replay(entering)[: self._rows]
        self.was_replayed = True
        return hidden


class _CapturedStep:
    """Holds one capture, its fixed inputs and tables, and its result, which the next replay overwrites."""

    def __init__(
        self,
        rows: int,
        run_layers: RunLayers,
        rotations: Callable[[torch.Tensor], Rotations],
        entering: torch.Tensor,
        kv_cache: KVCache,
        kernels: Kernels,
        hidden_size: int,
    ) -> None:
        device = kv_cache.device
        attention = kernels.attention.for_graph(rows, most_blocks(rows, kv_cache))
        write = kernels.writer.for_graph(rows)
        assert attention is not None, f"{kernels.name} attention cannot be captured"
        assert write is not None, f"writes of {kernels.name} cannot be captured"
        self._device, self._cache = device, kv_cache
        self._scratch = SequenceSpan(0, 1, 0, [kv_cache.scratch_block])
        self._step = _GraphStep(attention, write, kv_cache, rows)
        self._rows = rows
        self._entering = entering.new_zeros(rows, *entering.shape[1:])
        self._positions = device.place(torch.zeros(rows, dtype=torch.int64))
        self._hidden = device.place(torch.zeros(rows, hidden_size, dtype=device.dtype))
        self._taken: ReferenceType[CapturedRows] | None = None  # dead once its step is dropped
        self._used: Mark = device.runtime.mark()
        self.fill(torch.zeros(0, dtype=torch.int64), [])

        def run() -> None:
            self._hidden.copy_(run_layers(self._entering, rotations(self._positions), self._step))

        self._replay = device.runtime.capture(run)

    @property
    def is_free(self) -> bool:
        """True if no step has taken this one that may still be replayed."""
        taken = None if self._taken is None else self._taken()
        return taken is None or taken.was_replayed

    def taken_for(self, rows: int) -> CapturedRows:
        """Return this step as one of so many rows, whose tables are yet to be filled."""
        taken = CapturedRows(self, rows)
        self._taken = ref(taken)
        return taken

    def fill(self, positions: torch.Tensor, spans: Sequence[SequenceSpan]) -> None:
        """Fill the tables for the next replay, after the last one; positions are in host memory."""
        self._used.wait()
        padding = self._rows - len(spans)
        padded = [*spans, *(self._at_row(row) for row in range(len(spans), self._rows))]
        self._positions.copy_(self._device.place(torch.cat([positions, positions.new_zeros(padding)])))
        self._step.fill(padded)

    def _at_row(self, row: int) -> SequenceSpan:
        scratch = self._scratch
        return SequenceSpan(row, scratch.row_count, scratch.context_length, scratch.blocks)

    def replay(self, entering: torch.Tensor) -> torch.Tensor:
        """Run the layers on `entering`, and on older rows after it; return hidden states [captured rows, hidden_size]."""
        self._entering[: len(entering)] = entering
        self._replay()
        self._used = self._device.runtime.mark()
        return self._hidden

    def release(self) -> None:
        """Let go of the captured work, whoever still holds this step."""
        self._replay = _released


def _released() -> None:
    raise RuntimeError("a captured step was replayed after its release")


class _GraphStep:
    """`LayerStep` with fixed tables."""

    def __init__(self, attention: GraphAttention, write: GraphWrite, kv_cache: KVCache, rows: int) -> None:
        self.sequences = [slice(row, row + 1) for row in range(rows)]
        self._attention, self._write, self._cache = attention, write, kv_cache

    def fill(self, spans: Sequence[SequenceSpan]) -> None:
        block_tokens = self._cache.block_tokens
        self._attention.replan(spans, block_tokens)
        self._write.replan(new_slots(spans, block_tokens))

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None = None,
        latent: LatentWeights | None = None,
    ) -> torch.Tensor:
        assert latent is None, "no attention over latents can be captured"
        pools = self._cache.keys[layer], self._cache.values[layer]
        self._write.write(*pools, *self._cache.rounded(layer, k, v))
        q = self._cache.queries(layer, q)
        return self._cache.results(layer, self._attention.attend(q, *pools, sinks, needs_sums=False)[0])
