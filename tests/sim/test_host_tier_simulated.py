"""The simulator's replicas have the host tier of their manifest, with the controller's own code."""

from __future__ import annotations

import numpy as np
import pytest

from medha.api.kv_cache_spec import KvCacheSpec
from medha.api.model_spec import ModelSource, ModelSpec
from medha.api.replica import MedhaReplicaSpec, ParallelismSpec
from medha.cost.hardware import H100, LLAMA3_8B
from medha.errors import ConfigInvalid
from medha_sim.scenario import Deployment, deployment_of
from medha_sim.workloads import conversations

TENSOR = 8
TOKEN_BYTES = LLAMA3_8B.kv_bytes_per_token // TENSOR
POOL_TOKENS, HOST_TOKENS = 10_240, 200_000


def deployment(host_bytes: int) -> Deployment:
    tiers = {"tiers": {"host": {"size": str(host_bytes)}}} if host_bytes else {}
    spec = MedhaReplicaSpec(
        model=ModelSpec(name="m", source=ModelSource(path="unused"), max_model_len=8192),
        parallelism=ParallelismSpec(tensor=TENSOR),
        kv_cache=KvCacheSpec.model_validate({"size": str(POOL_TOKENS * TOKEN_BYTES)} | tiers),
    )
    return deployment_of(spec, H100, LLAMA3_8B)


@pytest.mark.long
def test_chats_whose_kv_exceeds_the_pool_compute_less_with_a_tier() -> None:
    computed = {}
    for host_tokens in (0, HOST_TOKENS):
        here = deployment(host_tokens * TOKEN_BYTES)
        made = conversations(
            here.targets(), rate=1.0, duration_seconds=30.0, seed=1, mean_think_seconds=20.0, most_tokens=7000
        )
        simulation = here.simulation(made)
        log = simulation.run(2000)
        assert {record.ending for record in log.requests.values()} == {"finished"}
        computed[host_tokens] = sum(log.chunks.tokens)
        busy, predicted = np.array(log.steps.busy_seconds), np.array(log.steps.predicted_seconds)
        # Prediction and truth have the same profile and the same copies.
        assert busy[busy > 0] == pytest.approx(predicted[busy > 0], rel=0.03)
    assert computed[HOST_TOKENS] < 0.9 * computed[0]


def test_a_tier_that_holds_no_block_is_refused() -> None:
    with pytest.raises(ConfigInvalid, match=r"kvCache\.tiers\.host\.size is 1024 bytes.*raise it"):
        deployment(1024).config()
