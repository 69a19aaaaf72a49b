"""The status of a running replica as data: lanes, steps in flight, queues, and the most urgent requests.

`status` reads a controller and its history, and changes nothing. The result is bounded, however many requests
wait: at most `most_requests` requests, and as many steps as fit into the pipelines.

It identifies requests by their ids, and contains neither token ids nor text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from heapq import nsmallest
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from medha.api.replica_role import ReplicaRole
from medha.scheduler.controller import ReplicaController
from medha.scheduler.history import History, Launched, OpenPhase
from medha.scheduler.request import Request
from medha.scheduler.tier_report import Tier, avoided_seconds, block_bytes, copied_bytes, read_times, tiers_of
from medha.scheduler.validation import class_name

MOST_REQUESTS = 1000
"""Most requests that one status may list."""

Phase = OpenPhase | Literal["ending"]
"""Phase of a request: waiting for KV, computing its prompt, decoding, or ended with a step in flight."""

Order = Literal["urgency", "age", "prompt", "kv", "output"]
"""Sort order of requests: least slack first (decoding ones last), oldest first, or largest first."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class KvStatus(_Model):
    """Blocks of one lane's pool; the four states add up to `blocks`."""

    blocks: int
    used: int
    """Blocks that hold KV of running requests."""
    reserved: int
    """Blocks that belong to running requests and are not written yet."""
    cached: int
    """Blocks that only the prefix cache keeps, until they are needed."""
    free: int


class HostTierStatus(_Model):
    """The host tier of one lane (docs/kv-tiers.md); counts are of this epoch."""

    blocks: int
    held: int
    """Blocks that hold KV."""
    hits: int
    """Requests that fetched KV."""
    fetched: int
    """Blocks copied to the device."""
    offloaded: int
    """Evicted blocks that were copied from the device."""
    swapped: int = 0
    """Blocks that are kept for requests that have stepped aside."""
    swapped_out: int = 0
    """Blocks that were copied from the device for such requests."""
    swapped_in: int = 0
    """Blocks that such requests fetched when they came back."""
    loading: int = 0
    """Blocks that are being read from files, another replica or the store."""
    fetching: int = 0
    """Blocks that are kept because they are being copied to the device."""
    offered: int = 0
    """Blocks that are kept because another replica may read them."""


class DiskTierStatus(_Model):
    """The disk tier of one lane (docs/kv-tiers.md); counts are of this epoch."""

    blocks: int
    """Most blocks that it holds: fewer than at first once a rank's disk has had no space for more."""
    held: int
    """Blocks that are in files."""
    hits: int
    """Requests that waited for KV from files."""
    loaded: int
    """Blocks read into the host tier."""
    written: int
    """Blocks written to files."""
    failures: int
    """Files that could not be read or written."""
    fault: str
    """Reason why the tier is off; empty: it is not."""
    writing: int = 0
    """Blocks that are being written to files."""
    waiting: int = 0
    """Blocks of the host tier that wait to be written."""
    skipped: int = 0
    """Blocks that were not written: the host tier had dropped them before, or the disk tier had no room."""


class StoreStatus(_Model):
    """The store that this replica shares with others (docs/kv-tiers.md); counts are of this epoch, and of all lanes."""

    hits: int
    """Requests that waited for KV from the store."""
    loaded: int
    """Blocks read into the host tiers."""
    written: int
    """Blocks written to the store."""
    found: int = 0
    """Blocks that were to be written, and that the store had already."""
    failures: int
    """Objects that could not be read or written."""
    rests: bool
    """True while the store is not used because it has failed."""
    fault: str
    """The last error since something succeeded; empty: none."""
    busy: int = 0
    """Blocks that are being read or written."""
    waiting: int = 0
    """Blocks that wait to be written."""


class PeersStatus(_Model):
    """Reads of KV from other replicas of the model, and by them (docs/kv-tiers.md); counts are of this epoch, and of all
    lanes."""

    hits: int
    """Prompts for which requests waited for KV of another replica."""
    loaded: int
    """Blocks read from other replicas into the host tiers."""
    offered: int
    """Blocks that other replicas were let read."""
    failures: int
    """Reads that have failed."""


class StreamingStatus(_Model):
    """Host memory of one lane for KV of requests that are larger than the pools (docs/kv-tiers.md)."""

    blocks: int
    held: int
    """Blocks that belong to running requests, and that their steps read."""


class TierStatus(_Model):
    """A tier of KV, or the host memory of streamed KV (docs/kv-tiers.md). Counts are of this epoch and of all lanes; bytes are
    those of one rank of each lane."""

    tier: Tier
    size_bytes: int | None
    """Most bytes that it holds; None: nothing here limits it, or others hold it."""
    held_bytes: int | None
    """Bytes of KV in it; None: it is not this replica's alone."""
    hits: int
    """Requests that got KV from it; for `store` and `peers` prompts, and for `streaming` requests that were streamed."""
    read_bytes: int
    """Bytes copied from it: of `host` and `streaming` to the device, of all others to the host tier."""
    written_bytes: int
    """Bytes copied to it; for `peers`, those that other replicas were let read."""
    avoided_prefill_seconds: float
    """Predicted time of computing what came from it."""
    failures: int
    """Reads and writes that have failed."""
    fault: str
    """Reason why it is not used, on one lane at least; empty: it is."""
    read_latency_seconds: float | None = None
    """Predicted time of a read, however small, as measured reads have corrected it; None: nothing is predicted."""
    read_seconds_per_gib: float | None = None
    """Predicted time that each GiB of one rank adds to a read."""


class SwapsStatus(_Model):
    """Requests that have stepped aside and whose KV host tiers keep; counts are of this epoch."""

    waiting: int
    """Requests that have not come back."""
    out: int
    """Times that a request stepped aside so."""
    back: int
    """Times that one came back and fetched KV."""


class LaneStatus(_Model):
    lane: int
    coupled_with: tuple[int, ...]
    """Lanes that run steps together with this one because they share a request, itself included."""
    first_stage_free: bool
    steps_in_flight: int
    """Number of steps in flight; at most the number of stages."""
    decoding: int
    """Number of requests that this lane computes and whose prefill is over."""
    prefilling: int
    kv: KvStatus
    host_tier: HostTierStatus | None = None
    """None: there is no host tier, so evicted KV is lost."""
    disk_tier: DiskTierStatus | None = None
    """None: there is no disk tier, so KV of the host tier ends with the epoch."""
    streaming: StreamingStatus | None = None
    """None: requests larger than the pools are refused."""


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
    """True if the step is in the first stage or on its way there; otherwise it is in a later one."""
    since_seconds: float
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
    """Prompt tokens of the waiting requests."""
    demoted: int
    """Demoted requests without a first token, which `guarded` lets be late so that others are on time."""
    late: int
    """Requests without a first token past their deadline."""


class RequestStatus(_Model):
    id: str
    service_class: str
    phase: Phase
    lane: int | None
    """The lane that computes it; none while it waits."""
    lanes: tuple[int, ...]
    """Lanes that hold its KV, or will."""
    is_long: bool
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV was cached at admission; an estimate while it waits."""
    dispatched_tokens: int
    """Known positions that are computed or in the pipeline."""
    computed_tokens: int
    reserved_tokens: int
    """Positions that its KV can hold without growing."""
    output_tokens: int
    """Tokens sampled in this epoch."""
    age_seconds: float
    """Seconds since it reached the router."""
    ttft_target_seconds: float
    deadline_in_seconds: float
    """Seconds until its first token is due, by its class or its own target; negative once it is late."""
    demoted: bool
    """True while it is demoted."""
    revised_deadline_in_seconds: float | None
    """Seconds until its first token is due by its revised deadline; none unless it is demoted."""
    prefill_left_seconds: float
    """Predicted time of the remaining prefill if it runs alone."""
    slack_seconds: float
    """Slack: `deadline_in_seconds` less `prefill_left_seconds`."""
    ttft_seconds: float | None
    """Seconds from its arrival to its first token; none before that."""
    tpot_target_seconds: float
    tpot_seconds: float | None
    """Mean time per output token after the first; none before the second."""
    streamed_tokens: int = 0
    """Computed positions whose KV lies in host memory, from which each of its steps reads it."""


class CoreStatus(_Model):
    """The state of a controller at one moment."""

    epoch: int
    draining: bool
    tensor: int
    stream: int
    kv: int
    policy: str
    block_size_tokens: int
    decode_correction: float
    """Observed divided by predicted time of decodes, as learned by the predictor."""
    prefill_correction: float
    """Observed divided by predicted time of prefills, as learned by the predictor."""
    running: int
    waiting: int
    pending_prefill_seconds: float
    lanes: tuple[LaneStatus, ...]
    steps: tuple[StepStatus, ...]
    classes: tuple[ClassStatus, ...]
    requests: tuple[RequestStatus, ...]
    """The first requests in the requested order; `running` and `waiting` count them all."""
    store: StoreStatus | None = None
    """None: this replica shares no store with others."""
    peers: PeersStatus | None = None
    """None: this replica neither reads KV of others nor gives any."""
    tiers: tuple[TierStatus, ...] = ()
    """The tiers that this replica has."""
    swaps: SwapsStatus | None = None
    """None: there is no host tier."""


def status(
    core: ReplicaController,
    history: History,
    now: float,
    *,
    order: Order = "urgency",
    most_requests: int = 50,
) -> CoreStatus:
    """Return the state of `core` at `now`, on the clock of its `handle` (seconds).

    `history` has taken all of its events.
    """
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
        decode_correction=core.predictor.correction.decode,
        prefill_correction=core.predictor.correction.prefill,
        running=load.running,
        waiting=load.waiting,
        pending_prefill_seconds=load.pending_prefill_seconds,
        lanes=_lanes(core, requests),
        store=_store(core),
        peers=_peers(core),
        tiers=_tiers(core),
        swaps=_swaps(core),
        steps=tuple(_step(core, one, now) for one in history.launched.values() if one.step.entries),
        classes=_classes(core, requests, now),
        requests=tuple(_request(core, request, history, now) for request in first),
    )


def phase(request: Request) -> Phase:
    """Return the phase of a request: that of its last move in `medha.scheduler.history.Facts`, until it ends."""
    if request.ended:
        return "ending"
    if request.waits:
        return "waiting"
    return "decode" if request.has_sampled else "prefill"


def kv_by_lane(core: ReplicaController, requests: Sequence[Request]) -> list[KvStatus]:
    """Return the blocks of each lane's pool, by state; `requests` are all of `core`."""
    written = Counter[int]()  # by lane; a shared block counts once per request
    for request in requests:
        if request.shard_map is not None:
            for lane, tokens in request.shard_map.local_lengths(request.computed).items():
                ledger = core.pools.ledger(lane)
                written[lane] += max(0, ledger.blocks_for(tokens) - ledger.streamed_blocks_of(request.id))
    found = []
    for lane in range(core.pools.lanes):
        ledger = core.pools.ledger(lane)
        used = min(ledger.held_blocks, written[lane])
        found.append(
            KvStatus(
                blocks=ledger.blocks,
                used=used,
                reserved=ledger.held_blocks - used,
                cached=ledger.remembered_blocks,
                free=ledger.free_blocks,
            )
        )
    return found


def _host_tier(core: ReplicaController, lane: int) -> HostTierStatus | None:
    if not core.pools.tiers:
        return None
    tier = core.pools.tiers[lane]
    return HostTierStatus(
        blocks=tier.ledger.blocks,
        held=tier.ledger.held_blocks,
        hits=tier.counts.hits,
        fetched=tier.counts.fetched_blocks,
        offloaded=tier.counts.offloaded_blocks,
        swapped=tier.swapped_blocks,
        swapped_out=tier.counts.swapped_out_blocks,
        swapped_in=tier.counts.swapped_in_blocks,
        loading=tier.loading_blocks,
        fetching=tier.fetching_blocks,
        offered=tier.served_blocks,
    )


def _disk_tier(core: ReplicaController, lane: int) -> DiskTierStatus | None:
    if not core.pools.disks:
        return None
    disk, unwritten = core.pools.disks[lane], core.pools.tiers[lane].unwritten
    return DiskTierStatus(
        blocks=disk.blocks,
        held=disk.held_blocks,
        hits=disk.counts.hits,
        loaded=disk.counts.loaded_blocks,
        written=disk.counts.written_blocks,
        failures=disk.counts.failed_loads + disk.counts.failed_writes,
        fault=disk.fault,
        writing=disk.writing_blocks,
        waiting=0 if unwritten is None else unwritten.blocks,
        skipped=core.pools.skipped_blocks(lane),
    )


def _streaming(core: ReplicaController, lane: int) -> StreamingStatus | None:
    ledger = core.pools.ledger(lane)
    if core.config.streaming is None:
        return None
    blocks = ledger.streamed_blocks
    return StreamingStatus(blocks=blocks, held=blocks - ledger.free_streamed_blocks)


def _streamed_tokens(core: ReplicaController, request: Request) -> int:
    """Return the computed positions whose KV is streamed: on each lane, the first ones of its part."""
    if request.shard_map is None or not request.streams:
        return 0
    return sum(
        min(tokens, core.pools.ledger(lane).streamed_blocks_of(request.id) * core.config.block_size_tokens)
        for lane, tokens in request.shard_map.local_lengths(request.computed).items()
    )


def _store(core: ReplicaController) -> StoreStatus | None:
    store = core.pools.store
    if store is None:
        return None
    return StoreStatus(
        hits=store.counts.hits,
        loaded=store.counts.loaded_blocks,
        written=store.counts.written_blocks,
        found=store.counts.found_blocks,
        failures=store.counts.failed_loads + store.counts.failed_writes,
        rests=store.rests,
        fault=core.store_kv.fault,
        busy=store.busy_blocks,
        waiting=core.pools.offered_blocks,
    )


def _peers(core: ReplicaController) -> PeersStatus | None:
    if not core.pools.has_peers:
        return None
    counts = core.pools.peer_counts
    return PeersStatus(
        hits=counts.hits,
        loaded=counts.loaded_blocks,
        offered=counts.served_blocks,
        failures=counts.failed_loads,
    )


def _tiers(core: ReplicaController) -> tuple[TierStatus, ...]:
    copied, times = copied_bytes(core), read_times(core)
    found = []
    for tier in tiers_of(core):
        use, time, size = _tier_use(core, tier), times.get(tier), block_bytes(core, tier)
        found.append(
            TierStatus(
                tier=tier,
                size_bytes=None if use.blocks is None else use.blocks * size,
                held_bytes=None if use.held is None else use.held * size,
                hits=use.hits,
                read_bytes=copied[tier, "read"],
                written_bytes=copied[tier, "written"],
                avoided_prefill_seconds=avoided_seconds(core, tier),
                failures=use.failures,
                fault=use.fault,
                read_latency_seconds=None if time is None else time.latency_seconds,
                read_seconds_per_gib=None if time is None else time.seconds_per_gib,
            )
        )
    return tuple(found)


class _TierUse(NamedTuple):
    blocks: int | None
    held: int | None
    hits: int
    failures: int = 0
    fault: str = ""


def _tier_use(core: ReplicaController, tier: Tier) -> _TierUse:
    """Return what a tier that the replica has holds and gave, over all lanes."""
    lanes = range(core.pools.lanes)
    match tier:
        case "host":
            hosts = [host for lane in lanes if (host := _host_tier(core, lane)) is not None]
            return _TierUse(
                sum(one.blocks for one in hosts),
                sum(one.held for one in hosts),
                sum(one.hits for one in hosts),
            )
        case "disk":
            disks = [disk for lane in lanes if (disk := _disk_tier(core, lane)) is not None]
            return _TierUse(
                sum(one.blocks for one in disks),
                sum(one.held for one in disks),
                sum(one.hits for one in disks),
                sum(one.failures for one in disks),
                next((one.fault for one in disks if one.fault), ""),
            )
        case "store":
            store = _store(core)
            assert store is not None
            return _TierUse(None, None, store.hits, store.failures, store.fault if store.rests else "")
        case "peers":
            peers = _peers(core)
            assert peers is not None
            return _TierUse(None, None, peers.hits, peers.failures)
        case "streaming":
            parts = [part for lane in lanes if (part := _streaming(core, lane)) is not None]
            return _TierUse(
                sum(one.blocks for one in parts),
                sum(one.held for one in parts),
                core.pools.streamed_sequences,
            )


def _swaps(core: ReplicaController) -> SwapsStatus | None:
    pools = core.pools
    return (
        SwapsStatus(waiting=pools.swapped, out=pools.swaps_out, back=pools.swaps_in) if pools.tiers else None
    )


def _lanes(core: ReplicaController, requests: Sequence[Request]) -> tuple[LaneStatus, ...]:
    phases = Counter((request.lane, phase(request)) for request in requests)
    coupled_with = {lane: lanes for lanes in core.lanes.coupled for lane in lanes}
    return tuple(
        LaneStatus(
            lane=lane.index,
            coupled_with=coupled_with[lane.index],
            first_stage_free=lane.stage_free,
            steps_in_flight=len(lane.in_flight_seconds),
            decoding=phases[lane.index, "decode"],
            prefilling=phases[lane.index, "prefill"],
            kv=kv,
            host_tier=_host_tier(core, lane.index),
            disk_tier=_disk_tier(core, lane.index),
            streaming=_streaming(core, lane.index),
        )
        for lane, kv in zip(core.lanes, kv_by_lane(core, requests), strict=True)
    )


def _step(core: ReplicaController, launched: Launched, now: float) -> StepStatus:
    step = launched.step
    lane = core.lanes[step.lanes[0]]
    return StepStatus(
        step=step.step_id,
        lanes=step.lanes,
        in_first_stage=lane.stages == 1 or (lane.newest_step == step.step_id and not lane.stage_free),
        since_seconds=now - launched.at,
        predicted_seconds=step.predicted_seconds,
        chunks=tuple(ChunkStatus(**chunk._asdict()) for chunk in launched.chunks),
        decodes=len(launched.decodes),
    )


def _classes(core: ReplicaController, requests: Sequence[Request], now: float) -> tuple[ClassStatus, ...]:
    counts = Counter[tuple[str, str]]()
    for request in requests:
        name, where = class_name(core.config, request.submit), phase(request)
        counts[name, where] += 1
        if where == "waiting":
            counts[name, "waiting_tokens"] += request.submit.tokens
        if where in ("waiting", "prefill"):
            counts[name, "demoted"] += core.is_demoted(request)
            counts[name, "late"] += now > request.deadline
    return tuple(
        ClassStatus(
            service_class=name,
            waiting=counts[name, "waiting"],
            prefilling=counts[name, "prefill"],
            decoding=counts[name, "decode"],
            waiting_tokens=counts[name, "waiting_tokens"],
            demoted=counts[name, "demoted"],
            late=counts[name, "late"],
        )
        for name in core.config.service_classes
    )


def _key(core: ReplicaController, request: Request, order: Order, now: float) -> tuple[float, ...]:
    """Return a sort key, smallest first; ties go by arrival."""
    match order:
        case "urgency":
            return (request.has_sampled, core.slack_seconds(request, now), request.tie)
        case "age":
            return (request.arrival, request.tie)
        case "prompt":
            return (-request.submit.tokens, request.tie)
        case "kv":
            return (-request.computed, request.tie)
        case "output":
            return (-request.emitted, request.tie)


def _request(core: ReplicaController, request: Request, history: History, now: float) -> RequestStatus:
    deadline_in, demoted = request.deadline - now, core.is_demoted(request)
    left = deadline_in - core.slack_seconds(request, now)
    seen = history.open.get(request.id)
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
        demoted=demoted,
        revised_deadline_in_seconds=core.due(request) - now if demoted else None,
        prefill_left_seconds=left,
        slack_seconds=deadline_in - left,
        ttft_seconds=seen.first_token_at - request.arrival if seen is not None and seen.emitted else None,
        tpot_target_seconds=request.targets.tpot_seconds,
        tpot_seconds=None if seen is None else seen.tpot_seconds,
        streamed_tokens=_streamed_tokens(core, request),
    )


class AttainmentStatus(_Model):
    """Requests of one service class that met or missed their targets since the process began."""

    service_class: str
    ttft_met: int
    ttft_missed: int
    tpot_met: int
    """Requests that met their TPOT target, of those that ended with two output tokens or more."""
    tpot_missed: int


class TierRates(_Model):
    """Bytes of a tier (`TierStatus`) that were copied in a second, as a mean over `ReplicaStatus.window_seconds`."""

    tier: Tier
    read_bytes_per_second: float
    written_bytes_per_second: float


class ReplicaStatus(_Model):
    """The answer of a controller's process to `GET /status`. Fields are only ever added."""

    replica: str
    model: str
    state: Literal["serving", "draining", "gathering"]
    """State of the replica; `gathering`: no epoch runs, because ranks are missing or still in rendezvous."""
    missing_ranks: tuple[int, ...]
    """Ranks that are not present or not ready while `state` is `gathering`."""
    up_seconds: float
    """Seconds since the first epoch began."""
    window_seconds: float
    """Length of the time window over which rates are averaged."""
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    steps_per_second: float
    attainment: tuple[AttainmentStatus, ...]
    core: CoreStatus | None
    """Status of the controller; none while `state` is `gathering`."""
    role: ReplicaRole = "both"
    """Phases of requests that it serves (`spec.role`)."""
    tier_rates: tuple[TierRates, ...] = ()
    """Rates of the tiers that the replica has; none while `state` is `gathering`."""
