"""What one stream that asks for a TPOT of 1 ms costs the prefills of others, through the whole controller."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from medha.api.replica import ServiceClass
from medha.topology import Topology
from medha_sim.scenario import Deployment
from medha_sim.simulation import Arrival, Workload

BEGIN, END = 6.0, 26.0  # steady: prefills wait all the time


def prefilled_seconds(topology: Topology, prompt_tokens: int, tpot_seconds: float) -> float:
    """Work that is prefilled while twenty streams decode, one of which asks for this TPOT."""
    classes = (ServiceClass(name="default", tpot_floor_seconds=0.0005),)
    deployment = replace(Deployment(), topology=topology, service_classes=classes)
    streams = [
        Arrival(f"d{index}", 0.0, 500, 20_000, 2.0, 0.05 if index else tpot_seconds, "d", max_tokens=20_000)
        for index in range(20)
    ]
    count = 1500 if prompt_tokens < 10_000 else 40
    prompts = [
        Arrival(f"p{index}", 1.0, prompt_tokens, 1, 1000.0, 0.05, "p", max_tokens=1) for index in range(count)
    ]
    log = deployment.simulation(Workload(streams + prompts)).run(END + 1)
    assert any(request.ttft_seconds is None for request in log.requests.values() if request.kind == "p")
    at = np.frombuffer(log.chunks.at)
    steady = (at > BEGIN) & (at <= END)
    contexts = np.frombuffer(log.chunks.context, np.int64)[steady]
    tokens = np.frombuffer(log.chunks.tokens, np.int64)[steady]
    seconds = deployment.targets().prefill_seconds
    return float(np.sum(seconds(contexts + tokens) - seconds(contexts)))


@pytest.mark.parametrize(
    ("stages", "prompt_tokens"),
    [
        (1, 4_000),
        *(
            pytest.param(stages, tokens, marks=pytest.mark.long)
            for stages, tokens in ((1, 300_000), (2, 4_000), (2, 300_000), (4, 4_000), (4, 300_000))
        ),
    ],
)
def test_a_stream_that_asks_for_1_ms_costs_the_prefills_of_others_less_than_5_percent(
    stages: int, prompt_tokens: int
) -> None:
    usual, tight = (
        prefilled_seconds(Topology(tensor=8, stream=stages), prompt_tokens, tpot) for tpot in (0.05, 0.001)
    )
    assert tight > 0.95 * usual
