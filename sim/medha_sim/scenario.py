"""Simulated replicas from a description: topology, ground truth, scheduling.

The same `ReplicaConfig` that `medha up` derives from a manifest and its ranks is built here from the model and the
hardware that the user names.
"""

from __future__ import annotations

from collections.abc import Mapping

from medha.config import ReplicaConfig
from medha.engine import ReplicaController
from medha.messages import Announce, StepProfile
from medha.predictor import Predictor
from medha_sim.driver import SimulatedReplica
from medha_sim.executor import Executor, PredictorCost, StepCost

MODEL = "simulated"
DIGEST = "simulated"


def card(name: str, config: ReplicaConfig) -> Announce:
    """How a replica of `config` announces itself; the load in it is the driver's to fill in."""
    return Announce(
        replica=name,
        model=MODEL,
        digest=DIGEST,
        epoch=0,
        ready=True,
        draining=False,
        max_model_len=config.max_model_len,
        vocab_size=1,
        kv_tokens_total=config.kv_tokens,
        kv_tokens_free=config.kv_tokens,
        running=0,
        waiting=0,
        pending_prefill_seconds=0.0,
        longest_request_tokens=min(config.max_model_len, config.kv_tokens),
        waiting_limit=config.scheduling.max_waiting,
    )


def medha_replica(
    name: str,
    config: ReplicaConfig,
    profile: StepProfile,
    ends_at: Mapping[str, int],
    *,
    cost: StepCost | None = None,
    message_seconds: float = 0.0,
) -> SimulatedReplica:
    """A replica with Medha's own controller. `cost` is the ground truth; by default what the profile predicts."""
    executor = Executor(
        cost or PredictorCost(Predictor(profile, config.topology)),
        stages=config.topology.stream,
        lanes=config.topology.kv,
        ends_at=ends_at,
        message_seconds=message_seconds,
    )
    return SimulatedReplica(ReplicaController(config, profile), executor, card(name, config))
