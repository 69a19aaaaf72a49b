"""Create any system of the comparison by name, on the same deployment and workload.

`medha-<policy>` is Medha's own controller with multi-prefill batching; `single-<policy>` is the variant
without it. LoongServe runs on the same number of GPUs, as instances of TP2. A system that cannot use exactly
the GPUs of a grid is refused, since a comparison on fewer or more GPUs would be meaningless. The only
calibrated constant is `LOONGSERVE_ITERATION_SECONDS`; it was calibrated once, to T4, and is used for every
row.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from medha.cost.hardware import profile_for
from medha.cost.predictor import Predictor
from medha.errors import ConfigInvalid
from medha.topology import Topology
from medha_sim.baselines.baseline_costs import DisaggregatedCost, ElasticCost, RingLink
from medha_sim.baselines.distserve import DistServe, longest_prompt_tokens
from medha_sim.baselines.hrrn import Hrrn
from medha_sim.baselines.loongserve import LoongServe, LoongServeSettings
from medha_sim.baselines.sarathi import Sarathi
from medha_sim.baselines.single_prefill import SinglePrefill
from medha_sim.executor import Executor, Perturbed, PredictorCost, StepCost
from medha_sim.scenario import Deployment, Disturbance, card
from medha_sim.simulation import Controller, SimulatedReplica, Simulation, Workload

LOONGSERVE_ITERATION_SECONDS = 0.150
"""Engine overhead per iteration of LoongServe, so that its short-only curve bends at 1.75 requests/s (T4).

128 decoding requests of 440 output tokens on average leave at 1.75/s if a token takes 128 / (1.75 x 440) =
166 ms; the step itself takes about 16 ms of that.
"""
_INSTANCE_TENSOR = 2
_INSTANCES_FOR_A_RESERVE = 4  # one in so many is reserved
MEDHA = tuple(f"medha-{policy}" for policy in ("fcfs", "edf", "lrs", "srpt", "lars", "guarded"))
SINGLE = tuple(f"single-{policy}" for policy in ("fcfs", "edf", "lrs", "lars"))
OTHERS = (
    "sarathi-512",
    "sarathi-2048",
    "vllm-2048",
    "hrrn",
    "loongserve",
    "loongserve-reserved",
    "distserve",
)
SYSTEMS = (*MEDHA, *SINGLE, *OTHERS)


def simulation(
    system: str,
    deployment: Deployment,
    workload: Workload,
    *,
    capacity: float = 1.0,
    loongserve_speed: float = 1.0,
) -> Simulation:
    """Return a simulation of `system` on `deployment`'s hardware, ready to run `workload`.

    `capacity` is the speed of the ranks as a multiple of what every controller assumes; `loongserve_speed`
    makes LoongServe's steps that many times faster, engine overhead included.

    Raises:
        ConfigInvalid: no system has that name, it cannot use exactly the GPUs of `deployment`, or its weights
            do not fit there, or the deployment speculates, which only Medha's own controllers do here.
    """
    if system not in SYSTEMS:
        raise ConfigInvalid(f"system is {system!r}; choose one of {', '.join(SYSTEMS)}")
    family, _, rest = system.partition("-")
    _require_equal_ranks(system, family, deployment.topology)
    if family == "medha":
        return deployment.with_policy(rest).simulation(workload, disturbance=Disturbance(bias=1 / capacity))
    if deployment.guesses:
        raise ConfigInvalid(
            f"scheduling.speculation.method is {deployment.scheduling.speculation.method}, and {system} is simulated without "
            f"guesses; set method to none, or leave {system} out"
        )
    if family == "loongserve":
        controller, cost, lanes, stages = _loongserve(deployment, rest == "reserved", loongserve_speed)
    elif family == "distserve":
        controller, cost, lanes, stages = _distserve(deployment)
    else:
        controller, cost, lanes, stages = _on_the_pipeline(family, rest, deployment)
    if capacity != 1:
        cost = Perturbed(cost, bias=1 / capacity, noise=0.0, generator=np.random.default_rng(0))
    executor = Executor(
        cost,
        stages=stages,
        lanes=lanes,
        ends_at=workload.ends_at(),
        message_seconds=deployment.message_seconds,
    )
    kv_tokens = controller.load().kv_tokens_free  # all KV, since the replica is empty
    announced = replace(card("replica-0", deployment.config()), kv_tokens_total=kv_tokens)
    replica = SimulatedReplica(controller, executor, announced)
    return Simulation([replica], workload, latencies=deployment.latencies)


def _require_equal_ranks(system: str, family: str, grid: Topology) -> None:
    """Refuse a grid if `system` cannot use exactly its GPUs."""
    tensor, pods = grid.tensor, grid.stream * grid.kv
    match family:
        case "medha":
            return
        case "loongserve":
            least = _INSTANCES_FOR_A_RESERVE if system == "loongserve-reserved" else 1
            wrong = grid.ranks % _INSTANCE_TENSOR != 0 or grid.ranks < least * _INSTANCE_TENSOR
            runs_on = f"{least} or more instances of TP{_INSTANCE_TENSOR}"
            fix = f"an even number of GPUs, {least * _INSTANCE_TENSOR} or more"
        case "distserve":
            wrong = pods != 2
            runs_on = f"a prefill and a decode pool of TP{tensor}, {2 * tensor} GPUs"
            fix = f"twice as many GPUs as tensor ranks, e.g. {tensor}x2x1"
        case _:
            wrong = grid.kv != 1
            runs_on = f"one lane, {tensor * grid.stream} GPUs"
            fix = f"one lane, e.g. {tensor}x{pods}x1"
    if wrong:
        raise ConfigInvalid(
            f"{system} runs on {runs_on}, but {grid} has {grid.ranks}, and systems are compared on equal ranks; "
            f"simulate {fix}, or leave {system} out"
        )


def _kv_tokens(system: str, part: Deployment) -> int:
    """Return the KV tokens that a part of `system`, an instance or a pool with its own grid, holds."""
    try:
        return part.kv_tokens()
    except ConfigInvalid as error:
        ranks, hardware = part.topology.ranks, part.hardware.name
        raise ConfigInvalid(
            f"{system} runs on parts of {ranks} GPUs, and the weights of {part.model.name} do not fit {ranks} {hardware}; "
            f"simulate hardware with more memory, or leave {system} out"
        ) from error


def _on_the_pipeline(family: str, rest: str, deployment: Deployment) -> tuple[Controller, StepCost, int, int]:
    """Return controller, cost, lanes and stages of a system that runs on Medha's own grid of ranks."""
    stages = deployment.topology.stream
    kv_tokens = deployment.kv_tokens()
    predictor = deployment.predictor()
    controller: Controller
    if family == "single":
        controller = SinglePrefill(kv_tokens, predictor, rest)
    elif family == "hrrn":
        controller = Hrrn(kv_tokens, lambda tokens: predictor.prefill_seconds(0, tokens), stages=stages)
    elif family == "vllm":
        chunk = int(rest)
        controller = Sarathi(
            kv_tokens, chunk_tokens=chunk, stages=stages, long_prefill_threshold_tokens=chunk // 4
        )
    else:
        controller = Sarathi(kv_tokens, chunk_tokens=int(rest), stages=stages)
    return controller, PredictorCost(deployment.predictor()), 1, stages


def _loongserve(
    deployment: Deployment, reserved: bool, speed: float
) -> tuple[Controller, StepCost, int, int]:
    instances = deployment.topology.ranks // _INSTANCE_TENSOR
    instance = replace(deployment, topology=Topology(tensor=_INSTANCE_TENSOR))
    model, hardware = deployment.model, deployment.hardware
    link = RingLink(
        kv_bytes_per_token_layer=model.kv_bytes_per_token / model.layers / _INSTANCE_TENSOR,
        node_bytes_per_second=hardware.node_link_bytes_per_second,
        fabric_bytes_per_second=hardware.fabric_link_bytes_per_second,
        instances_per_node=hardware.devices_per_node // _INSTANCE_TENSOR,
    )
    cost = ElasticCost(
        profile_for(model, hardware, instance.topology),
        link,
        iteration_seconds=LOONGSERVE_ITERATION_SECONDS,
        speed=speed,
    )
    settings = LoongServeSettings(
        instances=instances,
        kv_tokens_per_instance=_kv_tokens("loongserve", instance),
        reserved_instances=instances // _INSTANCES_FOR_A_RESERVE if reserved else 0,
    )
    return LoongServe(settings, cost), cost, instances, 1


def _distserve(deployment: Deployment) -> tuple[Controller, StepCost, int, int]:
    tensor = deployment.topology.tensor
    pool = replace(deployment, topology=Topology(tensor=tensor))
    model, hardware = deployment.model, deployment.hardware
    cost = DisaggregatedCost(
        Predictor(pool.profile(), pool.topology),
        model.kv_bytes_per_token,
        tensor * hardware.fabric_link_bytes_per_second,
    )
    longest = longest_prompt_tokens(model, hardware, tensor, memory_fraction=deployment.memory_fraction)
    return DistServe(_kv_tokens("distserve", pool), longest_prompt=longest), cost, 3, 1
