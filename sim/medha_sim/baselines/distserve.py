"""DistServe and Splitwise: a prefill pool, a decode pool, and KV transfers between them.

Modelled: whole prompts in order of arrival, batched up to `batch_tokens`; the KV of a finished prefill is
sent over the link, one request after the other, and the request decodes from then on; decodes run
continuously, undisturbed by prefills. A prompt whose activations do not fit beside weights and KV in the
prefill pool fails with `out_of_memory`, as paper B §6.1 reports for both systems; `longest_prompt_tokens` is
that bound.

Left out: several replicas of a pool, pulling KV layer by layer while the prefill runs, batching by SLO.
"""

from __future__ import annotations

from collections import deque

from medha.cost.hardware import Hardware, ModelShape
from medha.scheduler.controller import Load
from medha.wire.messages import (
    Cancel,
    ControllerCommand,
    ControllerEvent,
    Done,
    Drain,
    Extent,
    Failed,
    StageFree,
    StepEntry,
    Submit,
)
from medha_sim.baselines.request_book import Book, Request, Steps

PREFILL, DECODE, LINK = (0,), (1,), (2,)
"""Lanes of the executor that stand for the two pools and the link."""


def longest_prompt_tokens(
    model: ModelShape, hardware: Hardware, tensor: int, *, memory_fraction: float = 0.9
) -> int:
    """Return the longest prompt whose activations and KV fit a rank when it is prefilled in one piece.

    Activations, per token and rank, are five rows of the hidden size (residual, its norm, attention's input
    and output, MLP's output), which tensor parallelism does not split, and the rank's share of Q, K, V and of
    the two wide MLP rows.
    """
    rows = 5 * model.hidden
    split = (model.query_heads + 2 * model.kv_heads) * model.head_dim + 2 * model.intermediate
    activations = (rows + split / tensor) * model.dtype_bytes
    free = memory_fraction * hardware.memory_bytes - model.weights_bytes / tensor
    return int(free / (activations + model.kv_bytes_per_token / tensor))


class DistServe:
    """The controller of one prefill and one decode instance of equal size."""

    def __init__(
        self, kv_tokens: int, *, longest_prompt: int, batch_tokens: int = 8192, max_running: int = 256
    ) -> None:
        """`kv_tokens` is the KV capacity of the decode pool."""
        self._book = Book(kv_tokens)
        self._steps = Steps()
        self._longest_prompt = longest_prompt
        self._batch_tokens = batch_tokens
        self._max_running = max_running
        self._busy: set[tuple[int, ...]] = set()
        self._to_send: deque[Request] = deque()
        self._decoding: dict[str, Request] = {}

    def load(self) -> Load:
        return self._book.load()

    def handle(self, event: ControllerEvent, now: float) -> list[ControllerCommand]:
        commands: list[ControllerCommand] = []
        match event:
            case Submit():
                if event.tokens > self._longest_prompt:
                    detail = f"activations of {event.tokens} tokens; at most {self._longest_prompt} fit"
                    return [Failed(event.id, "out_of_memory", detail)]
                commands += self._book.submit(event, now)
            case Cancel():
                self._book.cancel(event)
                self._decoding.pop(event.id, None)
            case Done():
                commands += self._done(event)
            case StageFree() | Drain():
                pass
        return commands + self._launch()

    def _done(self, event: Done) -> list[ControllerCommand]:
        step = self._steps.done(event)
        self._busy.discard(step.lanes)
        if step.lanes == LINK:
            request = self._book.running.get(step.entries[0].id)
            if request is not None and not request.ended:
                self._decoding[request.id] = request
            return []
        commands, ended = self._book.finish(step, event)
        if step.lanes == PREFILL:
            sent = (self._book.running.get(entry.id) for entry in step.entries)
            self._to_send.extend(request for request in sent if request is not None)
        for request in ended:
            self._decoding.pop(request.id, None)
        return commands

    def _launch(self) -> list[ControllerCommand]:
        commands: list[ControllerCommand] = []
        if PREFILL not in self._busy:
            batch = self._prefills()
            if batch:
                commands.append(self._steps.launch(batch, PREFILL))
                self._busy.add(PREFILL)
        while LINK not in self._busy and self._to_send:
            request = self._to_send.popleft()
            if request.ended:
                continue
            entry = StepEntry(request.id, LINK[0], (Extent(0, request.dispatched),), False, "transfer")
            commands.append(self._steps.issue((entry,), LINK))
            self._busy.add(LINK)
        if DECODE not in self._busy and self._decoding:
            batch = [(request, 1) for request in self._decoding.values() if not request.in_flight]
            commands.append(self._steps.launch(batch, DECODE))
            self._busy.add(DECODE)
        return commands

    def _prefills(self) -> list[tuple[Request, int]]:
        batch: list[tuple[Request, int]] = []
        tokens = 0
        for request in list(self._book.waiting.values()):
            if batch and tokens + request.length > self._batch_tokens:
                break
            if len(self._book.running) >= self._max_running or not self._book.admit(request):
                break
            batch.append((request, request.missing_tokens))
            tokens += request.length
        return batch
