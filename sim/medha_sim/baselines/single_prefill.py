"""Medha without multi-prefill batching: one policy, adaptive chunks, stream pipelining, one prefill a step.

These are the variants of paper B §6.1 and §6.4 (Medha-FCFS, -EDF, -LRS, and LARS alone): "standard scheduling while
retaining all other proposed mechanisms". A step has all runnable decodes and the largest chunk of the most
urgent prefill that keeps the whole step inside the tightest TPOT target over the stages; a partial prefill re-enters as
soon as stage 0 is free. With no decode running, `max_step_seconds` bounds a step. Orders are `medha.policy`'s.

Left out: space sharing (it needs a second prefill), the cap on admitted longs, corrections of the predictor.
"""

from __future__ import annotations

import numpy as np

from medha.engine import Load
from medha.messages import Cancel, ControllerCommand, ControllerEvent, Done, Drain, StageFree, Submit
from medha.policy import Columns, keys, urgent_first
from medha.predictor import Predictor
from medha_sim.baselines.book import Book, Pipeline, Request, Steps


class SinglePrefill:
    """One replica of one lane."""

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
        self._work_seconds: dict[str, float] = {}  # of requests whose prefill is not over
        self._arrivals = 0
        self._tie: dict[str, int] = {}

    def load(self) -> Load:
        return self._book.load()

    def handle(self, event: ControllerEvent, now: float) -> list[ControllerCommand]:
        commands: list[ControllerCommand] = []
        match event:
            case Submit():
                commands += self._book.submit(event, now)
                if not commands:
                    self._work_seconds[event.id] = self._predictor.prefill_seconds(0, event.tokens)
                    self._arrivals += 1
                    self._tie[event.id] = self._arrivals
            case Cancel():
                self._book.cancel(event)
                self._forget(event.id)
            case StageFree():
                self._pipeline.stage_free(event)
            case Done():
                self._pipeline.done(event)
                output, ended = self._book.finish(self._steps.done(event), event)
                commands += output
                for request in ended:
                    self._forget(request.id)
            case Drain():
                pass
        if self._pipeline.ready:
            batch = self._batch(now)
            if batch:
                step = self._steps.launch(batch)
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
        """The first prefill in the order of the policy that holds KV, or gets it now."""
        rows = [
            request
            for request in (*self._book.running.values(), *self._book.waiting.values())
            if not request.is_decoding and request.missing_tokens > 0 and not request.ended
        ]
        if not rows:
            return None
        works = np.array([self._work_seconds[request.id] for request in rows])
        done = self._predictor.prefill_seconds_many(
            np.zeros(len(rows), np.int64), np.array([request.dispatched for request in rows])
        )
        arrival = np.array([request.arrival for request in rows])
        columns = Columns(
            arrival=arrival,
            deadline=arrival + np.array([request.submit.deadline_after_seconds or 0.0 for request in rows]),
            work_seconds=works,
            remaining_seconds=np.maximum(works - done, 0.0),
            tie=np.array([self._tie[request.id] for request in rows]),
        )
        for row in urgent_first(keys(self._policy, columns, now), columns.tie):
            request = rows[row]
            if request.id in self._book.running:
                return request
            if len(self._book.running) < self._max_running and self._book.admit(request):
                return request
        return None

    def _forget(self, request_id: str) -> None:
        self._work_seconds.pop(request_id, None)
        self._tie.pop(request_id, None)

    @staticmethod
    def _tpot_seconds(request: Request) -> float:
        target = request.submit.tpot_target_seconds
        return 0.05 if target is None else target
