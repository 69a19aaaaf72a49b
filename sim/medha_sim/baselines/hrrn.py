"""An SGLang-like baseline: prefill before decode, and the queue ordered by highest response ratio.

Modelled: a step has either prefills or decodes, and prefills go first (SGLang's default without mixed
chunks); one prompt at a time is chunked, and its next chunk precedes every new prompt; the remaining tokens
of a step go to waiting requests by highest response ratio next, (waited + service) / service, where service
is the predicted time of a lone prefill (`service_seconds`). A prefill that has begun is not preempted.

Left out: radix cache and its longest-prefix order, overlap of scheduling and execution, retraction (KV is
reserved at admission).
"""

from __future__ import annotations

from collections.abc import Callable

from medha.scheduler.controller import Load
from medha.wire.messages import Cancel, ControllerCommand, ControllerEvent, Done, Drain, StageFree, Submit
from medha_sim.baselines.request_book import Book, Pipeline, Request, Steps


class Hrrn:
    """The controller of a replica without stream pipelining. SGLang's chunk is 8,192 tokens."""

    def __init__(
        self,
        kv_tokens: int,
        service_seconds: Callable[[int], float],
        *,
        chunk_tokens: int = 8192,
        stages: int = 1,
        max_running: int = 256,
    ) -> None:
        """`service_seconds(tokens)` predicts the time of a lone prefill."""
        self._book = Book(kv_tokens)
        self._steps = Steps()
        self._pipeline = Pipeline(stages)
        self._service_seconds = service_seconds
        self._service: dict[str, float] = {}
        self._chunk_tokens = chunk_tokens
        self._max_running = max_running

    def load(self) -> Load:
        return self._book.load()

    def handle(self, event: ControllerEvent, now: float) -> list[ControllerCommand]:
        commands: list[ControllerCommand] = []
        match event:
            case Submit():
                commands += self._book.submit(event, now)
                self._service[event.id] = max(self._service_seconds(event.tokens), 1e-6)
            case Cancel():
                self._book.cancel(event)
                self._service.pop(event.id, None)
            case StageFree():
                self._pipeline.stage_free(event)
            case Done():
                self._pipeline.done(event)
                output, ended = self._book.finish(self._steps.done(event), event)
                commands += output
                for request in ended:
                    self._service.pop(request.id, None)
            case Drain():
                pass
        if self._pipeline.ready:
            batch = self._prefills(now) or self._decodes()
            if batch:
                step = self._steps.launch(batch)
                self._pipeline.launched(step)
                commands.append(step)
        return commands

    def response_ratio(self, request: Request, now: float) -> float:
        service = self._service[request.id]  # kept until the request ends
        return (now - request.arrival + service) / service

    def _prefills(self, now: float) -> list[tuple[Request, int]]:
        batch: list[tuple[Request, int]] = []
        left = self._chunk_tokens
        for request in self._book.running.values():
            if not request.is_decoding:
                if request.in_flight:
                    return []  # a later chunk of the same prompt waits for its step to be done
                count = min(request.missing_tokens, left)
                batch.append((request, count))
                left -= count
        queue = sorted(
            self._book.waiting.values(), key=lambda request: (-self.response_ratio(request, now), request.id)
        )
        for request in queue:
            if left == 0 or len(self._book.running) >= self._max_running or not self._book.admit(request):
                break
            count = min(request.missing_tokens, left)
            batch.append((request, count))
            left -= count
        return batch

    def _decodes(self) -> list[tuple[Request, int]]:
        running = self._book.running.values()
        return [(request, 1) for request in running if request.is_decoding and not request.in_flight]
