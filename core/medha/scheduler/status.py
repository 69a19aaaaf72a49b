"""What a running replica is doing, as data: lanes, steps in flight, queues, and the most urgent requests.

`status` reads a controller and changes nothing. What a controller does not keep, because no decision needs it (when a
step was launched, when a request drew its first token), comes from who stands beside it, as `Seen`. The result is
bounded, whatever waits: at most `most_requests` requests, and as many steps as fit into the pipelines.

It names requests by their ids, and holds neither token ids nor text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import Literal

from pydantic import BaseModel, ConfigDict

from medha.scheduler.controller import ReplicaController
from medha.scheduler.request import Request
from medha.scheduler.validation import class_name
from medha.wire.messages import Step, StepEntry

MOST_REQUESTS = 1000
"""The most requests that one status may name."""

Phase = Literal["waiting", "prefill", "decode", "ending"]
"""Where a request stands: waits for KV, computes its prompt, draws tokens, or has ended with a step in flight."""

Order = Literal["urgency", "age", "prompt", "kv", "output"]
"""Which requests come first: the least slack (those that decode behind), the oldest, or the largest."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen of a controller from outside, on the clock of `now` (seconds)."""

    launched_at: Mapping[int, float] = field(default_factory=dict)  # by step
    first_token_at: Mapping[str, float] = field(default_factory=dict)  # by request
    last_token_at: Mapping[str, float] = field(default_factory=dict)


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class KvStatus(_Model):
    """Blocks of one lane's pool; the four states add up to `blocks`."""

    blocks: int
    used: int
    """Hold KV of running requests."""
    reserved: int
    """Belong to running requests, and are not written yet."""
    cached: int
    """Kept for their content, until they are needed."""
    free: int


class LaneStatus(_Model):
    lane: int
    moves_with: tuple[int, ...]
    """The lanes that take steps together with this one, because they share a request; itself included."""
    first_stage_free: bool
    steps_in_flight: int
    """At most as many as there are stages."""
    decoding: int
    """Requests that this lane computes, and whose prefill is over."""
    prefilling: int
    kv: KvStatus


class ChunkStatus(_Model):
    """Prompt positions `start .. start + tokens` of one request, in a step."""

    request: str
    lane: int
    start: int
    tokens: int
    prompt_tokens: int


class StepStatus(_Model):
    """A step between its launch and the end of its last stage."""

    step: int
    lanes: tuple[int, ...]
    in_first_stage: bool
    """Or on its way there; else it is in one of the later ones."""
    since_seconds: float | None
    predicted_seconds: float
    chunks: tuple[ChunkStatus, ...]
    decodes: int


class ClassStatus(_Model):
    """Requests of one service class."""

    service_class: str
    waiting: int
    prefilling: int
    decoding: int
    waiting_tokens: int
    """Prompt tokens of those that wait."""
    given_up: int
    """Of those without a first token: they were promised a later one, so that others can be on time (`guarded`)."""
    late: int
    """Without a first token past their deadline."""


class RequestStatus(_Model):
    id: str
    service_class: str
    phase: Phase
    lane: int | None
    """That computes it; none while it waits."""
    lanes: tuple[int, ...]
    """That hold its KV, or will."""
    is_long: bool
    prompt_tokens: int
    cached_tokens: int
    """Of the prompt, whose KV was there before it came."""
    dispatched_tokens: int
    """Known positions that are computed or in the pipeline."""
    computed_tokens: int
    reserved_tokens: int
    """Positions that its KV can hold without growing."""
    output_tokens: int
    """Drawn in this epoch."""
    age_seconds: float
    """Since it reached the router."""
    ttft_target_seconds: float
    deadline_in_seconds: float
    """Until its first token is due by its class or its own wish; negative once it is late."""
    given_up: bool
    promised_in_seconds: float | None
    """What it was promised instead, if it was given up."""
    prefill_left_seconds: float
    """Predicted, alone."""
    slack_seconds: float
    """`deadline_in_seconds` - `prefill_left_seconds`."""
    ttft_seconds: float | None
    """What it waited for its first token; none before."""
    tpot_target_seconds: float
    tpot_seconds: float | None
    """Mean time of an output token behind the first; none before the second."""


class CoreStatus(_Model):
    """One controller at one moment."""

    epoch: int
    draining: bool
    tensor: int
    stream: int
    kv: int
    policy: str
    block_size_tokens: int
    correction: float
    """Observed over predicted step time, as the predictor has learned it."""
    running: int
    waiting: int
    pending_prefill_seconds: float
    lanes: tuple[LaneStatus, ...]
    steps: tuple[StepStatus, ...]
    classes: tuple[ClassStatus, ...]
    requests: tuple[RequestStatus, ...]
    """The first ones in the order that was asked for; `running` and `waiting` say how many there are."""


def status(
    core: ReplicaController,
    now: float,
    seen: Seen = Seen(),
    *,
    order: Order = "urgency",
    most_requests: int = 50,
) -> CoreStatus:
    """The state of `core` at `now`, which is on the clock of its `handle` (seconds)."""
    config, load = core.config, core.load()
    requests = list(core.requests())
    most = max(0, min(most_requests, MOST_REQUESTS))
    first = nsmallest(most, requests, key=lambda request: _key(core, request, order, now))
    return CoreStatus(
        epoch=core.epoch,
        draining=core.draining,
        tensor=config.topology.tensor,
        stream=config.topology.stream,
        kv=config.topology.kv,
        policy=config.scheduling.policy,
        block_size_tokens=config.block_size_tokens,
        correction=core.predictor.correction,
        running=load.running,
        waiting=load.waiting,
        pending_prefill_seconds=load.pending_prefill_seconds,
        lanes=_lanes(core, requests),
        steps=tuple(_step(core, step, seen, now) for step in core.steps_in_flight if step.entries),
        classes=_classes(core, requests, now),
        requests=tuple(_request(core, request, seen, now) for request in first),
    )


def phase(request: Request) -> Phase:
    """Where a request stands."""
    if request.ended:
        return "ending"
    if request.waits:
        return "waiting"
    return "decode" if request.is_decoding else "prefill"


def written_blocks(core: ReplicaController, requests: Iterable[Request]) -> Counter[int]:
    """Blocks with KV of these requests, by lane; what several share counts once for each."""
    written = Counter[int]()
    for request in requests:
        if request.shard_map is not None:
            for lane, tokens in request.shard_map.local_lengths(request.computed).items():
                written[lane] += core.pools.ledger(lane).blocks_for(tokens)
    return written


def _lanes(core: ReplicaController, requests: Sequence[Request]) -> tuple[LaneStatus, ...]:
    phases = Counter((request.lane, phase(request)) for request in requests)
    written = written_blocks(core, requests)
    found = []
    for lanes in core.lanes.coupled:
        for index in lanes:
            lane, ledger = core.lanes[index], core.pools.ledger(index)
            used = min(ledger.held_blocks, written[index])
            found.append(
                LaneStatus(
                    lane=index,
                    moves_with=lanes,
                    first_stage_free=lane.stage_free,
                    steps_in_flight=len(lane.in_flight_seconds),
                    decoding=phases[index, "decode"],
                    prefilling=phases[index, "prefill"],
                    kv=KvStatus(
                        blocks=ledger.blocks,
                        used=used,
                        reserved=ledger.held_blocks - used,
                        cached=ledger.remembered_blocks,
                        free=ledger.free_blocks,
                    ),
                )
            )
    return tuple(sorted(found, key=lambda lane: lane.lane))


def _step(core: ReplicaController, step: Step, seen: Seen, now: float) -> StepStatus:
    chunks = []
    decodes = 0
    for entry in step.entries:
        request = core.find(entry.id)
        if request is None or is_decode(entry, request.submit.tokens):
            decodes += 1
            continue
        extent = entry.extents[0]
        chunks.append(
            ChunkStatus(
                request=entry.id,
                lane=entry.lane,
                start=extent.start,
                tokens=entry.token_count,
                prompt_tokens=request.submit.tokens,
            )
        )
    lane = core.lanes[step.lanes[0]]
    launched_at = seen.launched_at.get(step.step_id)
    return StepStatus(
        step=step.step_id,
        lanes=step.lanes,
        in_first_stage=lane.stages == 1 or (lane.newest_step == step.step_id and not lane.stage_free),
        since_seconds=None if launched_at is None else now - launched_at,
        predicted_seconds=step.predicted_seconds,
        chunks=tuple(chunks),
        decodes=decodes,
    )


def is_decode(entry: StepEntry, prompt_tokens: int) -> bool:
    """Whether an entry computes a token that was drawn, and not one of the prompt's `prompt_tokens`."""
    return entry.extents[0].start >= prompt_tokens


def _classes(core: ReplicaController, requests: Sequence[Request], now: float) -> tuple[ClassStatus, ...]:
    counts = Counter[tuple[str, str]]()
    for request in requests:
        name, where = class_name(core.config, request.submit), phase(request)
        counts[name, where] += 1
        if where == "waiting":
            counts[name, "waiting_tokens"] += request.submit.tokens
        if where in ("waiting", "prefill"):
            counts[name, "given_up"] += core.due(request) > request.deadline
            counts[name, "late"] += now > request.deadline
    return tuple(
        ClassStatus(
            service_class=name,
            waiting=counts[name, "waiting"],
            prefilling=counts[name, "prefill"],
            decoding=counts[name, "decode"],
            waiting_tokens=counts[name, "waiting_tokens"],
            given_up=counts[name, "given_up"],
            late=counts[name, "late"],
        )
        for name in core.config.service_classes
    )


def _key(core: ReplicaController, request: Request, order: Order, now: float) -> tuple[float, ...]:
    """Smallest first; ties by arrival."""
    match order:
        case "urgency":
            return (request.is_decoding, core.slack_seconds(request, now), request.tie)
        case "age":
            return (request.arrival, request.tie)
        case "prompt":
            return (-request.submit.tokens, request.tie)
        case "kv":
            return (-request.computed, request.tie)
        case "output":
            return (-request.emitted, request.tie)


def _request(core: ReplicaController, request: Request, seen: Seen, now: float) -> RequestStatus:
    due, deadline_in = core.due(request), request.deadline - now
    left = deadline_in - core.slack_seconds(request, now)
    first, last = seen.first_token_at.get(request.id), seen.last_token_at.get(request.id)
    spent = None if first is None or last is None or request.emitted < 2 else last - first
    return RequestStatus(
        id=request.id,
        service_class=class_name(core.config, request.submit),
        phase=phase(request),
        lane=None if request.waits else request.lane,
        lanes=request.held_lanes,
        is_long=request.is_long,
        prompt_tokens=request.submit.tokens,
        cached_tokens=request.cached_tokens,
        dispatched_tokens=request.dispatched,
        computed_tokens=request.computed,
        reserved_tokens=request.reserved_tokens,
        output_tokens=request.emitted,
        age_seconds=now - request.arrival,
        ttft_target_seconds=request.targets.ttft_seconds,
        deadline_in_seconds=deadline_in,
        given_up=due > request.deadline,
        promised_in_seconds=due - now if due > request.deadline else None,
        prefill_left_seconds=left,
        slack_seconds=deadline_in - left,
        ttft_seconds=None if first is None else first - request.arrival,
        tpot_target_seconds=request.targets.tpot_seconds,
        tpot_seconds=None if spent is None else spent / (request.emitted - 1),
    )


class AttainmentStatus(_Model):
    """First tokens and whole outputs of one service class inside their targets, since the process began."""

    service_class: str
    ttft_met: int
    ttft_missed: int
    tpot_met: int
    """Of requests that ended with two output tokens or more."""
    tpot_missed: int


class ReplicaStatus(_Model):
    """What a controller's process answers to `GET /status`. Fields are only ever added."""

    replica: str
    model: str
    state: Literal["serving", "draining", "gathering"]
    """`gathering`: no epoch runs, because ranks are missing or still meet."""
    missing_ranks: tuple[int, ...]
    """That have not come, or are not ready, while the ranks gather."""
    up_seconds: float
    """Since the first epoch began."""
    window_seconds: float
    """The time that the three rates are a mean over."""
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    steps_per_second: float
    attainment: tuple[AttainmentStatus, ...]
    core: CoreStatus | None
    """None while the ranks gather."""
