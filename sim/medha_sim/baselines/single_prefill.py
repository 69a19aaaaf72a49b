"""Medha without multi-prefill batching: one policy, adaptive chunks, stream pipelining, one prefill a step.

These are the variants of paper B §6.1 and §6.4 (Medha-FCFS, -EDF, -LRS, and LARS alone): "standard scheduling
while retaining all other proposed mechanisms". A step has all runnable decodes and a chunk of the most urgent
prefill, the largest that keeps the whole step inside the tightest TPOT target over the stages. A partial
prefill re-enters as soon as stage 0 is free. With no runnable decode, `max_step_seconds` bounds a step. The
orders come from `medha.scheduler.policy`.

Left out: space sharing (it needs a second prefill), the cap on admitted longs, corrections of the predictor.
"""

from __future__ import annotations

import numpy as np

from medha.cost.predictor import Predictor
from medha.scheduler.controller import Load
from medha.scheduler.policy import Columns, keys, urgent_first
from medha.wire.messages import Cancel, ControllerCommand, ControllerEvent, Done, Drain, StageFree, Submit
from medha_sim.baselines.request_book import Book, Pipeline, Request, Steps

_GRANULARITY_TOKENS = 1024


class _Prefills:
    """Requests with an unfinished prefill, and the policies' columns; the last row replaces a removed one."""

    def __init__(self) -> None:
        self.rows: list[Request] = []
        self._row_of: dict[str, int] = {}
        self._values = np.zeros((4, 64))  # arrival, deadline, work, remaining
        self._ties = np.zeros(64, np.int64)
        self._arrivals = 0

    def columns(self) -> Columns:
        count = len(self.rows)
        arrival, deadline, work, remaining = self._values[:, :count]
        return Columns(arrival, deadline, work, remaining, self._ties[:count])

    def add(self, request: Request, work_seconds: float) -> None:
        row = len(self.rows)
        if row == len(self._ties):
            self._values = np.concatenate([self._values, np.zeros_like(self._values)], axis=1)
            self._ties = np.concatenate([self._ties, np.zeros_like(self._ties)])
        deadline = request.arrival + (request.submit.deadline_after_seconds or 0.0)
        self._values[:, row] = (request.arrival, deadline, work_seconds, work_seconds)
        self._ties[row] = self._arrivals
        self._arrivals += 1
        self._row_of[request.id] = row
        self.rows.append(request)

    def remaining(self, request_id: str, seconds: float) -> None:
        self._values[3, self._row_of[request_id]] = seconds

    def remove(self, request_id: str) -> None:
        row = self._row_of.pop(request_id, None)
        if row is None:
            return
        last = self.rows.pop()
        if row < len(self.rows):
            self.rows[row] = last
            self._row_of[last.id] = row
            self._values[:, row] = self._values[:, len(self.rows)]
            self._ties[row] = self._ties[len(self.rows)]


class _Alone:
    """Lone prefill times, interpolated linearly (paper B's algorithm 3, granularity of about 1K tokens)."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self._seconds = [0.0]

    def seconds(self, tokens: int) -> float:
        """Return the time to prefill the first `tokens` tokens."""
        point, beyond = divmod(tokens, _GRANULARITY_TOKENS)
        if point + 2 > len(self._seconds):
            ends = np.arange(2 * (point + 2)) * _GRANULARITY_TOKENS
            self._seconds = self._predictor.prefill_seconds_many(np.zeros_like(ends), ends).tolist()
        low, high = self._seconds[point], self._seconds[point + 1]
        return low + (high - low) * beyond / _GRANULARITY_TOKENS


class SinglePrefill:
    """The controller of a replica with one lane."""

    def __init__(
        self,
        kv_tokens: int,
        predictor: Predictor,
        policy: str,
        *,
        max_chunk_tokens: int = 8192,
        min_chunk_tokens: int = 32,
        max_step_seconds: float = 0.5,
        min_prefill_share: float = 0.1,
        max_running: int = 256,
    ) -> None:
        self._book = Book(kv_tokens)
        self._steps = Steps()
        self._stages = predictor.topology.stream
        self._pipeline = Pipeline(self._stages)
        self._predictor = predictor
        self._policy = policy
        self._max_chunk_tokens = max_chunk_tokens
        self._min_chunk_tokens = min_chunk_tokens
        self._max_step_seconds = max_step_seconds
        self._min_prefill_share = min_prefill_share
        self._max_running = max_running
        self._prefills = _Prefills()
        self._alone = _Alone(predictor)

    def load(self) -> Load:
        return self._book.load()

    def handle(self, event: ControllerEvent, now: float) -> list[ControllerCommand]:
        commands: list[ControllerCommand] = []
        match event:
            case Submit():
                commands += self._book.submit(event, now)
                if not commands:
                    work_seconds = self._alone.seconds(event.tokens)
                    self._prefills.add(self._book.waiting[event.id], work_seconds)
            case Cancel():
                self._book.cancel(event)
                self._prefills.remove(event.id)
            case StageFree():
                self._pipeline.stage_free(event)
            case Done():
                self._pipeline.done(event)
                commands += self._book.finish(self._steps.done(event), event)[0]
            case Drain():
                pass
        if self._pipeline.ready:
            batch = self._batch(now)
            if batch:
                step = self._steps.launch(batch)
                if not batch[-1][0].is_decoding:
                    self._dispatched(batch[-1][0])
                self._pipeline.launched(step)
                commands.append(step)
        return commands

    def _batch(self, now: float) -> list[tuple[Request, int]]:
        running = self._book.running.values()
        decodes = [request for request in running if request.is_decoding and request.missing_tokens > 0]
        tally = self._predictor.tally()
        budget = self._max_step_seconds / self._stages
        if decodes:
            tally.add_decodes(sum(request.dispatched for request in decodes), len(decodes))
            target = min(self._tpot_seconds(request) for request in decodes) / self._stages
            budget = max(target, tally.seconds() / (1 - self._min_prefill_share))
        batch = [(request, 1) for request in decodes]
        prefill = self._most_urgent(now)
        if prefill is not None:
            most = min(prefill.missing_tokens, self._max_chunk_tokens)
            count = tally.largest(prefill.dispatched, most, budget)
            batch.append((prefill, max(count, min(self._min_chunk_tokens, most))))
        return batch

    def _most_urgent(self, now: float) -> Request | None:
        """Return the first prefill, in the policy's order, that holds KV or can be admitted now."""
        columns = self._prefills.columns()
        for row in urgent_first(keys(self._policy, columns, now), columns.tie):
            request = self._prefills.rows[row]
            if request.id in self._book.running:
                return request
            if len(self._book.running) < self._max_running and self._book.admit(request):
                return request
        return None

    def _dispatched(self, request: Request) -> None:
        """Update the remaining work of a prefill after a chunk's launch; remove it after the last chunk."""
        if request.missing_tokens == 0:
            self._prefills.remove(request.id)
        else:
            remaining = self._alone.seconds(request.submit.tokens) - self._alone.seconds(request.dispatched)
            self._prefills.remaining(request.id, remaining)

    @staticmethod
    def _tpot_seconds(request: Request) -> float:
        target = request.submit.tpot_target_seconds
        return 0.05 if target is None else target
