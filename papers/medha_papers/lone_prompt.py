"""Simulations of a long prompt beside one decoding stream per lane: the runs behind T11, T12, T18 and T19.

There are no other requests. Medha's own controller and packer cut the prompt, on the simulator's virtual
clock. With chunks of one size, no target and no limit of a step ever binds; adaptive chunks have the streams'
TPOT as target.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np

from medha.api.replica import SchedulingSpec, ServiceClass
from medha.cost.hardware import H100
from medha.scheduler.controller import ReplicaController
from medha.topology import Topology
from medha_sim.executor import PredictorCost
from medha_sim.run_log import RequestRecord, RunLog
from medha_sim.scenario import Deployment, Disturbance, disturbed, medha_replica
from medha_sim.simulation import Arrival, Progress, Simulation, Workload

TOPOLOGIES = {
    "8B-TP8": Topology(8),
    "8B-TP4-SPP4": Topology(4, 4),
    "8B-TP4-SPP4-KVP4": Topology(4, 4, 4),
    "8B-TP8-SPP4": Topology(8, 4),
    "8B-TP8-SPP4-KVP4": Topology(8, 4, 4),
}
"""Topologies of Llama-3 8B on H100 in the experiments of papers A and B with a lone prompt."""
SMALLEST_CHUNK_TOKENS, LARGEST_CHUNK_TOKENS = 32, 8192
LIMIT_SECONDS = 3600.0
"""Time limit of a simulation; no prompt here takes longer."""
_NEVER_SECONDS = 60.0
"""Time longer than any step here."""
_PROMPT = "prompt"
_STREAM_TOKENS = 64
_ARRIVES_AT_SECONDS = 1.0  # the streams decode by then
_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Alone:
    """Result for a prompt and the streams beside it."""

    prefill_seconds: float
    """Time from the prompt's arrival to its first token."""
    p95_gap_seconds: float
    """P95 of the time between two tokens during the prefill, for the stream where it is longest."""
    lanes: tuple[int, int]
    """Number of lanes that computed the first chunk, and the last one."""
    busy_seconds: tuple[float, float]
    """Busy time of a stage in the last whole chunk within one lane's share of KV, and in the last of all."""


def static(
    topology: Topology,
    tokens: int,
    chunk_tokens: int,
    capacity: float = 1.0,
    progress: Progress | None = None,
) -> Alone | None:
    """Simulate a prompt of `tokens` in chunks of one size, with Llama-3 8B on H100.

    The ranks have `capacity` times the speed that the controller assumes. Return None if `progress` stopped
    the run.
    """
    scheduling = SchedulingSpec(
        max_chunk_tokens=chunk_tokens, min_chunk_tokens=chunk_tokens, max_step_seconds=_NEVER_SECONDS
    )
    return _run(topology, tokens, scheduling, _NEVER_SECONDS, capacity, progress)


def adaptive(
    topology: Topology,
    tokens: int,
    tpot_seconds: float,
    capacity: float = 1.0,
    progress: Progress | None = None,
) -> Alone | None:
    """Simulate the same in the largest chunks with which the streams meet their TPOT."""
    scheduling = SchedulingSpec(
        max_chunk_tokens=LARGEST_CHUNK_TOKENS,
        min_chunk_tokens=SMALLEST_CHUNK_TOKENS,
        max_step_seconds=_NEVER_SECONDS,
    )
    return _run(topology, tokens, scheduling, tpot_seconds, capacity, progress)


def _run(
    topology: Topology,
    tokens: int,
    scheduling: SchedulingSpec,
    tpot_seconds: float,
    capacity: float,
    progress: Progress | None,
) -> Alone | None:
    floor_seconds = min(tpot_seconds, ServiceClass.model_fields["tpot_floor_seconds"].default)
    service_class = ServiceClass(
        name="default", tpot_target_seconds=tpot_seconds, tpot_floor_seconds=floor_seconds
    )
    deployment = Deployment(
        hardware=H100,
        topology=topology,
        scheduling=scheduling,
        service_classes=(service_class,),
        max_model_len=2 * tokens,
    )
    streams = [
        Arrival(f"stream-{lane}", 0.0, _STREAM_TOKENS, tokens, _NEVER_SECONDS, tpot_seconds)
        for lane in range(topology.kv)
    ]
    prompt = Arrival(_PROMPT, _ARRIVES_AT_SECONDS, tokens, 1, _NEVER_SECONDS, tpot_seconds, kind="long")
    workload = Workload((*streams, prompt))
    disturbance = Disturbance(bias=1 / capacity)
    replica = medha_replica(
        "replica-0",
        deployment.config(),
        deployment.profile(),
        workload.ends_at(),
        cost=disturbed(PredictorCost(deployment.predictor()), disturbance, np.random.default_rng(0)),
        message_seconds=deployment.message_seconds,
    )
    controller = replica.controller
    assert isinstance(controller, ReplicaController)
    simulation = Simulation([replica], workload, latencies=deployment.latencies, sample_seconds=_POLL_SECONDS)
    log = simulation.log
    log.gaps.update({stream.id: array("d") for stream in streams})
    lanes: list[int] = []

    def poll(now: float) -> bool:
        request = controller.find(_PROMPT)
        if request is not None and request.shard_map is not None:
            lanes.append(len(request.lanes))
        record = log.requests.get(_PROMPT)
        return (record is not None and record.first_token_at is not None) or (
            progress is not None and progress(now)
        )

    simulation.run(LIMIT_SECONDS, poll)
    done = log.requests.get(_PROMPT)
    if done is None or done.first_token_at is None:
        assert log.interrupted, f"{tokens} tokens on {topology} took longer than {LIMIT_SECONDS:g} s"
        return None
    return _alone(log, done, done.first_token_at, lanes, deployment.tokens_per_lane)


def _alone(
    log: RunLog, prompt: RequestRecord, first_token_at: float, lanes: list[int], tokens_per_lane: int
) -> Alone:
    busy = dict(zip(log.steps.at, log.steps.busy_seconds, strict=True))
    chunks = zip(log.chunks.at, log.chunks.context, log.chunks.tokens, strict=True)
    largest = max(log.chunks.tokens)
    whole = [(busy[at], context + tokens) for at, context, tokens in chunks if tokens == largest]
    return Alone(
        prefill_seconds=first_token_at - prompt.arrived_at,
        p95_gap_seconds=max(
            _p95_gap_seconds(log, stream, prompt.arrived_at, first_token_at) for stream in log.gaps
        ),
        lanes=(lanes[0], lanes[-1]),
        busy_seconds=([seconds for seconds, end in whole if end <= tokens_per_lane][-1], whole[-1][0]),
    )


def _p95_gap_seconds(log: RunLog, stream: str, since: float, until: float) -> float:
    """Return the P95 of the gaps between tokens of `stream` that lie between `since` and `until`."""
    gaps, first = np.frombuffer(log.gaps[stream]), log.requests[stream].first_token_at
    assert first is not None
    ends = first + gaps.cumsum()
    meanwhile = (ends - gaps >= since) & (ends <= until)
    return float(np.quantile(gaps[meanwhile], 0.95))
