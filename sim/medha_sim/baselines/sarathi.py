"""Sarathi-Serve and vLLM: first come, first served, with a fixed number of tokens a step.

Modelled: all runnable decodes first, then prefill chunks in order of arrival until the step has
`chunk_tokens` tokens; a request whose prefill has begun is never overtaken by a later one; with a pipeline, a
sequence that is in flight (a decode or a partial prefill) re-enters only when its step has left the *last*
stage, so consecutive chunks of one prompt do not overlap (no SPP). `long_prefill_threshold_tokens` is vLLM's
`--long-prefill-token-threshold`: the most tokens that one prefill gets of a step, so that later requests get
a share. Systems named `vllm-N` set it to a quarter of N; vLLM's default is
no threshold.

Left out: preemption by recomputation (KV is reserved at admission), CPU time of the scheduler, prefix
caching.
"""

from __future__ import annotations

from medha.scheduler.controller import Load
from medha.wire.messages import Cancel, ControllerCommand, ControllerEvent, Done, Drain, StageFree, Submit
from medha_sim.baselines.request_book import Book, Pipeline, Request, Steps


class Sarathi:
    """The controller of a replica. The paper's chunk sizes are 512 and 2,048 (B §6.1)."""

    def __init__(
        self,
        kv_tokens: int,
        *,
        chunk_tokens: int = 512,
        stages: int = 1,
        max_running: int = 256,
        long_prefill_threshold_tokens: int | None = None,
    ) -> None:
        self._book = Book(kv_tokens)
        self._steps = Steps()
        self._pipeline = Pipeline(stages)
        self._chunk_tokens = chunk_tokens
        self._max_running = max_running
        self._most_each = long_prefill_threshold_tokens or chunk_tokens

    def load(self) -> Load:
        return self._book.load()

    def handle(self, event: ControllerEvent, now: float) -> list[ControllerCommand]:
        commands: list[ControllerCommand] = []
        match event:
            case Submit():
                commands += self._book.submit(event, now)
            case Cancel():
                self._book.cancel(event)
            case StageFree():
                self._pipeline.stage_free(event)
            case Done():
                self._pipeline.done(event)
                commands += self._book.finish(self._steps.done(event), event)[0]
            case Drain():
                pass
        if self._pipeline.ready:
            batch = self._batch()
            if batch:
                step = self._steps.launch(batch)
                self._pipeline.launched(step)
                commands.append(step)
        return commands

    def _batch(self) -> list[tuple[Request, int]]:
        batch: list[tuple[Request, int]] = []
        left = self._chunk_tokens
        runnable = [request for request in self._book.running.values() if not request.in_flight]
        for request in runnable:
            if request.is_decoding and left > 0:
                batch.append((request, 1))
                left -= 1
        for request in runnable:
            if not request.is_decoding and left > 0:
                left -= self._add(batch, request, left)
        while left > 0 and self._book.waiting and len(self._book.running) < self._max_running:
            request = next(iter(self._book.waiting.values()))
            if not self._book.admit(request):
                break
            left -= self._add(batch, request, left)
        return batch

    def _add(self, batch: list[tuple[Request, int]], request: Request, left: int) -> int:
        count = min(request.missing_tokens, left, self._most_each)
        batch.append((request, count))
        return count
