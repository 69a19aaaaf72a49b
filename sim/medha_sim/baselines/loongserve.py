"""LoongServe: elastic sequence parallelism over instances, without preemption (paper B §2.4, §6.1, §6.5).

Modelled, from its published scheduler:

* a *macro-iteration*: waiting requests, in order of arrival, are grouped into batches, and idle instances are
  assigned to the batches, by a dynamic program over (requests sorted long-first, instances) that minimises
  the sum of batch time / prompt length; all batches start together and run whole prompts;
* until the longest batch ends, an idle instance may only take requests that are predicted to end inside the
  macro-iteration: this is the convoy;
* proactive scale-down: after its prefill, the KV of a request stays on the fewest instances of its group that
  can hold it, and the request decodes there; instances that decode take no prefill;
* before a macro-iteration, decodes are consolidated on as few instances as can hold them, but a request of
  more than `max_migrated_tokens` is never moved; moving costs nothing here, which favours LoongServe;
* if every instance decodes, the one with the fewest decodes pauses them for one macro-iteration;
* at most `max_running` requests of a scheduler hold KV (its compute-bound decode batch).

With a *reserved pool*, `reserved_instances` take only prompts below `reserved_below_tokens`, and the other
instances take the rest; each pool has its own scheduler (paper B §6.5).

Left out: chunked prefill and migration in the middle of a decode batch, scale-up of decodes, memory
fragmentation inside an instance; its time model is taken to be exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, islice
from math import inf

from medha.scheduler.controller import Load
from medha.wire.messages import (
    Cancel,
    ControllerCommand,
    ControllerEvent,
    Done,
    Drain,
    StageFree,
    Step,
    Submit,
)
from medha_sim.baselines.baseline_costs import ElasticCost
from medha_sim.baselines.request_book import Book, Request, Steps

DISPATCHED_AT_ONCE = 32  # most requests in one dynamic program
MOST_EXAMINED = 256  # most waiting requests that a dispatch considers


@dataclass(frozen=True, slots=True)
class LoongServeSettings:
    """Settings; the defaults are eight instances of TP2 on 16 GPUs, as in paper B."""

    instances: int = 8
    kv_tokens_per_instance: int = 900_000
    max_running: int = 128
    max_migrated_tokens: int = 10_000
    reserved_instances: int = 0
    reserved_below_tokens: int = 8192


class LoongServe:
    """The controller of a replica: a pool of all instances, or a reserved pool and one of the others."""

    def __init__(self, settings: LoongServeSettings, cost: ElasticCost) -> None:
        lanes = tuple(range(settings.instances))
        steps = Steps()
        self._steps = steps
        self._short_below = settings.reserved_below_tokens if settings.reserved_instances else 0
        reserved = lanes[: settings.reserved_instances]
        self._pools = [
            ElasticPool(part, settings, cost, steps) for part in (lanes[len(reserved) :], reserved) if part
        ]

    def load(self) -> Load:
        loads = [pool.load() for pool in self._pools]
        return Load(
            running=sum(load.running for load in loads),
            waiting=sum(load.waiting for load in loads),
            kv_tokens_free=sum(load.kv_tokens_free for load in loads),
            pending_prefill_seconds=0.0,
        )

    def handle(self, event: ControllerEvent, now: float) -> list[ControllerCommand]:
        match event:
            case Submit():
                pool = self._pools[-1 if event.tokens < self._short_below else 0]
                return [*pool.submit(event, now), *pool.launch(now)]
            case Cancel():
                for pool in self._pools:
                    pool.cancel(event)
            case Done():
                step = self._steps.done(event)
                pool = next(pool for pool in self._pools if step.lanes[0] in pool.lanes)
                return [*pool.done(step, event), *pool.launch(now)]
            case StageFree() | Drain():
                pass
        return []


class ElasticPool:
    """The scheduler of a pool of instances."""

    def __init__(
        self, lanes: tuple[int, ...], settings: LoongServeSettings, cost: ElasticCost, steps: Steps
    ) -> None:
        self.lanes = lanes
        self._cost = cost
        self._steps = steps
        self._max_running = settings.max_running
        self._max_migrated_tokens = settings.max_migrated_tokens
        self._book = Book(settings.kv_tokens_per_instance * len(lanes))
        self._kv_free = dict.fromkeys(lanes, settings.kv_tokens_per_instance)
        self._busy: set[int] = set()
        self._prefilling: dict[int, int] = {}  # lane -> the step that prefills on it
        self._homes: dict[str, tuple[int, ...]] = {}  # admitted request -> instances that reserve its KV
        self._macro_ends = -inf  # predicted

    def load(self) -> Load:
        return self._book.load()

    def submit(self, submit: Submit, now: float) -> list[ControllerCommand]:
        return self._book.submit(submit, now)

    def cancel(self, cancel: Cancel) -> None:
        request = self._book.cancel(cancel)
        if request is not None and not request.in_flight:
            self._leave(request)

    def done(self, step: Step, event: Done) -> list[ControllerCommand]:
        self._busy.difference_update(step.lanes)
        for lane in step.lanes:
            if self._prefilling.get(lane) == step.step_id:
                del self._prefilling[lane]
        commands, ended = self._book.finish(step, event)
        for request in ended:
            self._leave(request)
        return commands

    def launch(self, now: float) -> list[ControllerCommand]:
        """Start the prefills that may start, then a decode step on every free instance that has decodes."""
        commands: list[ControllerCommand] = []
        if self._book.waiting:
            if not self._prefilling:
                self._consolidate()
                idle = self._idle() or self._paused()
                commands += self._dispatch(idle, now, inf)
            elif now < self._macro_ends:
                commands += self._dispatch(self._idle(), now, self._macro_ends - now)
        return commands + self._decode()

    # --- prefill ------------------------------------------------------------------------------------

    def _dispatch(self, idle: list[int], now: float, within_seconds: float) -> list[ControllerCommand]:
        """Start prefills of waiting requests that fit the memory of `idle` instances, in order of arrival.

        `within_seconds` is the time left of the macro-iteration; `inf` starts a new one.
        """
        macro_starts = within_seconds == inf
        taken: list[Request] = []
        room = sum(self._kv_free[lane] for lane in idle)
        for request in islice(self._book.waiting.values(), MOST_EXAMINED):
            if not idle or len(taken) == DISPATCHED_AT_ONCE:
                break
            if len(self._book.running) + len(taken) >= self._max_running:
                break
            fits = request.reserve_tokens <= room
            if fits and (macro_starts or self._alone_seconds(request, len(idle)) <= within_seconds):
                taken.append(request)
                room -= request.reserve_tokens
            elif macro_starts:
                break
        commands: list[ControllerCommand] = []
        for batch, lanes in self._split(taken, idle):
            seconds = self._batch_seconds(batch, len(lanes))
            if seconds > within_seconds or not self._place(batch, lanes):
                continue
            if macro_starts:
                self._macro_ends = max(self._macro_ends, now + seconds)
            step = self._steps.launch([(request, request.missing_tokens) for request in batch], lanes, "ring")
            self._busy.update(lanes)
            self._prefilling.update(dict.fromkeys(lanes, step.step_id))
            commands.append(step)
        return commands

    def _split(self, requests: list[Request], idle: list[int]) -> list[tuple[list[Request], tuple[int, ...]]]:
        """Return batches and their instances, minimising the sum over requests of batch time / length.

        `best[i][k]` is that sum for the first i requests, longest first, on k instances. Takes
        O(requests^2 instances^2).
        """
        if not requests or not idle:
            return []
        ordered = sorted(requests, key=lambda request: (-request.length, request.arrival))
        tokens = [0, *accumulate(request.length for request in ordered)]
        pairs = [0.0, *accumulate(request.length * (request.length + 1) / 2 for request in ordered)]
        weights = [0.0, *accumulate(1 / request.length for request in ordered)]
        count, lanes = len(ordered), len(idle)
        best = [[inf] * (lanes + 1) for _ in range(count + 1)]
        choice = [[(0, 0)] * (lanes + 1) for _ in range(count + 1)]
        best[0] = [0.0] * (lanes + 1)
        for stop in range(1, count + 1):
            for start in range(stop):
                for degree in range(1, lanes + 1):
                    seconds = self._cost.prefill_seconds(
                        tokens[stop] - tokens[start], pairs[stop] - pairs[start], stop - start, degree
                    )
                    cost = seconds * (weights[stop] - weights[start])
                    for total in range(degree, lanes + 1):
                        candidate = best[start][total - degree] + cost
                        if candidate < best[stop][total]:
                            best[stop][total] = candidate
                            choice[stop][total] = (start, degree)
        batches: list[tuple[list[Request], tuple[int, ...]]] = []
        stop, total = count, lanes
        while stop:
            start, degree = choice[stop][total]
            batches.append((ordered[start:stop], tuple(idle[total - degree : total])))
            stop, total = start, total - degree
        return batches[::-1]

    def _batch_seconds(self, batch: list[Request], degree: int) -> float:
        tokens = sum(request.length for request in batch)
        pairs = sum(request.length * (request.length + 1) / 2 for request in batch)
        return self._cost.prefill_seconds(tokens, pairs, len(batch), degree)

    def _alone_seconds(self, request: Request, degree: int) -> float:
        return self._batch_seconds([request], degree)

    def _place(self, batch: list[Request], lanes: tuple[int, ...]) -> bool:
        """Reserve KV for the whole batch or nothing; each request on the fewest instances that have room."""
        homes: dict[str, tuple[int, ...]] = {}
        free = {lane: self._kv_free[lane] for lane in lanes}
        for request in batch:
            for size in range(1, len(lanes) + 1):
                home = tuple(sorted(lanes, key=lambda lane: (-free[lane], lane))[:size])
                share = -(-request.reserve_tokens // size)
                if all(free[lane] >= share for lane in home):
                    homes[request.id] = home
                    for lane in home:
                        free[lane] -= share
                    break
            else:
                return False
        self._kv_free.update(free)
        for request in batch:
            admitted = self._book.admit(request)
            assert admitted, "the pool has less room than its instances"
        self._homes.update(homes)
        return True

    def _leave(self, request: Request) -> None:
        home = self._homes.pop(request.id)
        self._hold(request, home, -1)

    def _hold(self, request: Request, home: tuple[int, ...], sign: int) -> None:
        for lane in home:
            self._kv_free[lane] -= sign * -(-request.reserve_tokens // len(home))

    # --- decode -------------------------------------------------------------------------------------

    def _decoding(self) -> dict[tuple[int, ...], list[Request]]:
        """Return the decoding requests, by the instances that hold their KV."""
        groups: dict[tuple[int, ...], list[Request]] = {}
        for request in self._book.running.values():
            if request.is_decoding:
                groups.setdefault(self._homes[request.id], []).append(request)
        return groups

    def _idle(self) -> list[int]:
        """Return the instances that neither prefill nor decode."""
        decoding = {lane for home in self._decoding() for lane in home}
        return [lane for lane in self.lanes if lane not in self._prefilling and lane not in decoding]

    def _paused(self) -> list[int]:
        """Return the instance with the fewest decodes, which pauses them for one macro-iteration."""
        counts = dict.fromkeys(self.lanes, 0)
        for home, requests in self._decoding().items():
            for lane in home:
                counts[lane] += len(requests)
        return [min(counts, key=lambda lane: (counts[lane], lane))]

    def _consolidate(self) -> None:
        """Move short decodes together, so that as many instances as possible become idle.

        A prefill on an instance whose decodes were moved away starts when the step that still runs there
        ends.
        """
        groups = self._decoding()
        fixed = {
            lane
            for home, requests in groups.items()
            if len(home) > 1 or any(request.length > self._max_migrated_tokens for request in requests)
            for lane in home
        }
        movable = sorted(
            (home for home in groups if not fixed.intersection(home)),
            key=lambda home: (-len(groups[home]), home),
        )
        if not fixed and movable:
            fixed = set(movable[0])
        for home in reversed(movable):  # fewest decodes first
            if home[0] in fixed:
                continue
            for request in groups[home]:
                target = max(fixed, key=lambda lane: (self._kv_free[lane], -lane))
                if self._kv_free[target] < request.reserve_tokens:
                    break
                self._hold(request, home, -1)
                self._homes[request.id] = (target,)
                self._hold(request, (target,), 1)

    def _decode(self) -> list[ControllerCommand]:
        commands: list[ControllerCommand] = []
        for home, requests in self._decoding().items():
            if not (self._busy.intersection(home) or self._prefilling.keys() & set(home)):
                batch = [(request, 1) for request in requests if not request.in_flight]
                if batch:
                    self._busy.update(home)
                    commands.append(self._steps.launch(batch, home, "ring" if len(home) > 1 else "local"))
        return commands
