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
from medha_worker.model.latent_forms import HeadMatrices, LatentForms, LatentStep
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

    `ran_out` is called when rows become NaN because memory does not suffice. `forms` replace `backend` if the pool holds
    latents.
    """

    backend: AttentionBackend
    block_tokens: int
    device: Device
    ran_out: Callable[[], None] = lambda: None
    forms: LatentForms | None = None

    def plan(self, spans: Sequence[SequenceSpan]) -> StepAttention | LatentStep:
        """Return the attention of spans to one part of the keys."""
        if self.forms is not None:
            return self.forms.plan(spans, self.block_tokens)
        return self.backend.plan(spans, self.block_tokens)

    def result_dim(self, q: torch.Tensor) -> int:
        """Return the width of the results of these queries."""
        return q.shape[-1] if self.forms is None else self.forms.latent.value_dim


class Partial:
    """Attention of some rows to one part of their context.

    Rows that see nothing there get an empty result.
    """

    def __init__(self, rows: Rows, attending: Attending) -> None:
        self._rows, self._attending = rows.count, attending
        self._spans = rows.spans
        self._planned = max((span.rows.stop for span in rows.spans), default=0)
        self._attention = attending.plan(rows.spans) if rows.spans else None
        blind = np.ones(rows.count, dtype=np.bool_)
        for span in rows.spans:
            blind[span.rows] = False
        self._blind = attending.device.place(torch.from_numpy(np.flatnonzero(blind)))

    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        matrices: HeadMatrices | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return output [rows, heads, head_dim] and log-sum-exp, float32 [rows, heads].

        Rows that see nothing get zeros and -inf. With `matrices`, keys are latents, and results as wide as values of heads.
        """
        if self._attention is None:
            output = q.new_zeros(*q.shape[:2], self._attending.result_dim(q))
            return output, q.new_full(q.shape[:-1], float("-inf"), dtype=torch.float32)
        try:
            output, sums = _attend(self._attention, q[: self._planned], keys, values, matrices)
        except (MemoryError, RuntimeError) as error:
            if not ran_out(error):
                raise
            _log.warning("memory ran out for the attention of %d rows; each sequence runs alone", self._rows)
            attended = None
        else:
            attended = output, sums
        # Outside the handler: inside it, the traceback would keep the failed attempt's tensors alive.
        output, sums = attended or self._one_by_one(q, keys, values, matrices)
        if self._planned < self._rows:
            output = torch.cat([output, output.new_empty(self._rows - self._planned, *output.shape[1:])])
            sums = torch.cat([sums, sums.new_empty(self._rows - self._planned, *sums.shape[1:])])
        if len(self._blind):
            output[self._blind], sums[self._blind] = 0.0, float("-inf")
        return output, sums.float()

    def _one_by_one(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        matrices: HeadMatrices | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend as `StepAttention.attend` does, with less memory at a time; NaN if that does not suffice."""
        output = q.new_empty(self._planned, q.shape[1], self._attending.result_dim(q))
        sums = q.new_empty(self._planned, q.shape[1], dtype=torch.float32)
        for span in self._spans:
            rows = span.rows
            try:
                alone = self._attending.plan([replace(span, row_start=0)])
                output[rows], sums[rows] = _attend(alone, q[rows], keys, values, matrices)
            except (MemoryError, RuntimeError) as error:
                if not ran_out(error):
                    raise
                _log.warning("memory ran out for the attention of %d rows alone: %s", span.row_count, error)
                output[rows], sums[rows] = torch.nan, torch.nan
                self._attending.ran_out()
        return output, sums


def _attend(
    attention: StepAttention | LatentStep,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    matrices: HeadMatrices | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(attention, LatentStep):
        assert matrices is not None
        return attention.attend(q, keys, matrices)
    return attention.attend(q, keys, values)
