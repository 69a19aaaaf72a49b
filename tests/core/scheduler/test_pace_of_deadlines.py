"""`guarded` decides by the measured pace, so by what prefills really take beside other work, which requests it demotes."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from medha.scheduler.controller import ReplicaController
from medha.wire.messages import Cancel, ControllerEvent, Done, Sample, StageFree, Step, StepProfile

SECONDS_PER_TOKEN = 1e-3


class Ranks:
    """Take each step `slowness` times as long as a lone prefill of its tokens would."""

    def __init__(self, core: ReplicaController, slowness: float) -> None:
        self.core, self.now = core, 0.0
        self._slowness = slowness
        self._steps: deque[Step] = deque()

    def tell(self, event: ControllerEvent) -> None:
        self._steps.extend(one for one in self.core.handle(event, self.now) if isinstance(one, Step))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            step = self._steps.popleft()
            self.now += self._slowness * SECONDS_PER_TOKEN * sum(entry.token_count for entry in step.entries)
            self.tell(StageFree(step.step_id, 0))
            samples = tuple(Sample(entry.id, 1) for entry in step.entries if entry.samples)
            self.tell(Done(step.step_id, samples, compute_seconds=step.predicted_seconds))


@pytest.mark.parametrize(("slowness", "demoted"), [(1.0, 0), (2.0, 1)])
def test_of_two_that_fit_alone_and_not_at_the_measured_pace_one_is_demoted(
    config_of: Any, submit_of: Any, slowness: float, demoted: int
) -> None:
    """40 s of lone prefill are due in 60 s, on ranks that have needed two seconds for one for some minutes."""
    config = config_of(kv_blocks=200_000, policy="guarded", max_chunk_tokens=100, min_chunk_tokens=100)
    ranks = Ranks(ReplicaController(config, StepProfile(0.0, SECONDS_PER_TOKEN, 0.0, 0.0)), slowness)
    ranks.tell(submit_of("before", 600_000, 1))
    ranks.run(300.0)
    ranks.tell(Cancel("before"))
    for name in ("one", "other"):
        ranks.tell(submit_of(name, 20_000, 1, deadline_after_seconds=60.0))
    ranks.run(1.0)
    late = [one.id for one in ranks.core.requests() if ranks.core.is_demoted(one)]
    assert len(late) == demoted
