"""Attention of some rows to a part of their keys, which is merged with the other parts by its log-sum-exp.

If memory does not suffice for all rows at once, each sequence is computed alone, and becomes NaN if it does not fit alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from medha_worker.device import Device
from medha_worker.kernels.protocol import AttentionBackend, StepAttention
from medha_worker.kernels.sequence_span import SequenceSpan
from medha_worker.model.out_of_memory import ran_out

_log = logging.getLogger("medha.model")


@dataclass(frozen=True)
class Rows:
    """Rows, and their attention to one part of the keys; rows without a span see nothing there."""

    count: int
    spans: Sequence[SequenceSpan]  # rows counted from 0


@dataclass(frozen=True)
class Attending:
    """Context of all attention of a step.

    `ran_out` is called when rows become NaN because memory does not suffice.
    """

    backend: AttentionBackend
    block_tokens: int
    device: Device
    ran_out: Callable[[], None] = lambda: None


class Partial:
    """Attention of some rows to one part of their context.

    Rows that see nothing there get an empty result.
    """

    def __init__(self, rows: Rows, attending: Attending) -> None:
        self._rows, self._attending = rows.count, attending
        self._spans = rows.spans
        self._planned = max((span.rows.stop for span in rows.spans), default=0)
        self._attention: StepAttention | None = None
        if rows.spans:
            self._attention = attending.backend.plan(rows.spans, attending.block_tokens)
        blind = np.ones(rows.count, dtype=np.bool_)
        for span in rows.spans:
            blind[span.rows] = False
        self._blind = attending.device.place(torch.from_numpy(np.flatnonzero(blind)))

    def attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return output [rows, heads, head_dim] and log-sum-exp, float32 [rows, heads].

        Rows that see nothing get zeros and -inf.
        """
        if self._attention is None:
            return q.new_zeros(q.shape), q.new_full(q.shape[:-1], float("-inf"), dtype=torch.float32)
        try:
            output, sums = self._attention.attend(q[: self._planned], keys, values)
        except (MemoryError, RuntimeError) as error:
            if not ran_out(error):
                raise
            _log.warning("memory ran out for the attention of %d rows; each sequence runs alone", self._rows)
            attended = None
        else:
            attended = output, sums
        # Outside the handler: inside it, the traceback would keep the failed attempt's tensors alive.
        output, sums = attended or self._one_by_one(q, keys, values)
        if self._planned < self._rows:
            output = torch.cat([output, output.new_empty(self._rows - self._planned, *output.shape[1:])])
            sums = torch.cat([sums, sums.new_empty(self._rows - self._planned, *sums.shape[1:])])
        if len(self._blind):
            output[self._blind], sums[self._blind] = 0.0, float("-inf")
        return output, sums.float()

    def _one_by_one(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend as `StepAttention.attend` does, with less memory at a time; NaN if that does not suffice."""
        output = q.new_empty(self._planned, *q.shape[1:])
        sums = q.new_empty(self._planned, q.shape[1], dtype=torch.float32)
        for span in self._spans:
            rows = span.rows
            try:
                alone = self._attending.backend.plan(
                    [replace(span, row_start=0)], self._attending.block_tokens
                )
                output[rows], sums[rows] = alone.attend(q[rows], keys, values)
            except (MemoryError, RuntimeError) as error:
                if not ran_out(error):
                    raise
                _log.warning("memory ran out for the attention of %d rows alone: %s", span.row_count, error)
                output[rows], sums[rows] = torch.nan, torch.nan
                self._attending.ran_out()
        return output, sums
