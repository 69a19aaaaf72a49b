"""Predicted times of copies between the KV pool and the host tier, next to the times of computing the same tokens.

The warm-up measures both directions (`HostTierFigures`). One factor corrects them by the copies of the steps, as
`medha.cost.correction` corrects the rest of a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from medha.cost.correction import Correction, PartedSeconds
from medha.cost.predictor import Predictor
from medha.wire.messages import Admit, Eviction, Grow, HostTierFigures, Step


class TierSeconds:
    """The times that decide about the host tier of a replica's lanes (`medha.kv.host_tier.Prices`)."""

    def __init__(self, figures: HostTierFigures, predictor: Predictor) -> None:
        self.figures = figures
        self._predictor = predictor
        self._correction = Correction()

    @property
    def factor(self) -> float:
        """Measured times of copies over those of the warm-up."""
        return self._correction.prefill

    def fetch_seconds(self, blocks: int) -> float:
        """Return the predicted time to fetch so many blocks."""
        return blocks * self.figures.fetch_seconds_per_block * self.factor

    def compute_seconds(self, context: int, tokens: int) -> float:
        """Return the predicted time to bring a prompt from `context` to `tokens` tokens of KV, alone."""
        return self._predictor.prefill_seconds(context, tokens)

    def by_lane(self, admits: Iterable[Admit], grows: Iterable[Grow] = ()) -> Mapping[int, float]:
        """Return how long the copies of a step's admits and grows keep each lane busy; by lane."""
        seconds = copy_seconds(self.figures, admits, grows)
        return {lane: self.factor * one for lane, one in seconds.items()}

    def observe(self, step: Step, observed_seconds: float) -> None:
        """Update the correction by the measured time of a step's copies, on the lane where they take longest."""
        predicted = copy_seconds(self.figures, step.admits, step.grows)
        longest_seconds = max((predicted.get(lane, 0.0) for lane in step.lanes), default=0.0)
        self._correction = self._correction.after(PartedSeconds(longest_seconds), observed_seconds)


def copy_seconds(
    figures: HostTierFigures, admits: Iterable[Admit], grows: Iterable[Grow]
) -> Mapping[int, float]:
    """Return how long the copies of a step's admits and grows keep each lane busy, before correction; by lane."""
    by_lane: dict[int, float] = {}

    def add(evictions: Iterable[Eviction]) -> None:
        for one in evictions:
            blocks = sum(demotion.count for demotion in one.demotions)
            if blocks:
                seconds = blocks * figures.demote_seconds_per_block
                by_lane[one.lane] = by_lane.get(one.lane, 0.0) + seconds

    for grow in grows:
        add(grow.evictions)
    for admit in admits:
        add(admit.evictions)
        for fetch in admit.fetches:
            seconds = fetch.count * figures.fetch_seconds_per_block
            by_lane[fetch.lane] = by_lane.get(fetch.lane, 0.0) + seconds
    return by_lane
