"""Times and memory of a draft model or prediction head in simulations, by the data sheet of the device.

Both run on the rank that samples, whole, so their steps are those of a grid of one device. A draft model computes the
tokens before its guesses after the step; a head computes every position in the step itself, which takes longer by its layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from medha.cost.cost_profile import Attention, Profile
from medha.cost.hardware import Hardware, ModelShape, profile_for
from medha.cost.predictor import Predictor, Work
from medha.topology import Topology
from medha.wire.messages import DraftCosts
from medha_sim.head_shape import HeadShape

_TIMED_CONTEXT_TOKENS = 256
_TIMED_ROWS = 8
_TIMED_TOKENS = 256
"""The steps by which a rank measures a draft model when it starts (`medha_worker.rank.draft_warmup`)."""

DraftShape = ModelShape | HeadShape
"""The draft model or the prediction head of a replica."""


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens of a sequence that the draft model computes together: `count` after the first `context`."""

    context: int
    count: int


class DraftTimes:
    """True times of a draft model or head on one device."""

    def __init__(self, shape: DraftShape, hardware: Hardware) -> None:
        self.is_head = isinstance(shape, HeadShape)
        self._predictor = Predictor(alone(shape, hardware))

    def seconds(self, runs: Sequence[Run], places: Sequence[tuple[int, int]]) -> float:
        """Return the seconds of the work after a step.

        Args:
            runs: the tokens that the draft model computes first; the step has computed those of a head.
            places: for each sequence for which guesses are proposed, its known tokens, and the number of guesses.
        """
        total = 0.0
        if self.is_head:
            total += float(self._predictor.profile.head.seconds(np.array([len(places)]))[0])
        elif runs:
            tally = self._predictor.tally()
            for run in runs:
                tally.add(Work(run.context, run.count))
            total += tally.seconds()
        for behind in range(1, max((count for _, count in places), default=0)):
            # Each guess but the last is computed, so that the next one can be proposed.
            contexts = [known + behind - 1 for known, count in places if count > behind]
            total += self._decodes(sum(contexts), len(contexts))
        return total

    def costs(self) -> DraftCosts:
        """Return what a rank measures when it starts. Controllers predict with it; contexts are longer in fact."""
        one = self._decodes(_TIMED_CONTEXT_TOKENS, 1)
        together = self._decodes(_TIMED_CONTEXT_TOKENS * _TIMED_ROWS, _TIMED_ROWS)
        row = max(0.0, (together - one) / (_TIMED_ROWS - 1))
        token = 0.0
        if not self.is_head:
            tally = self._predictor.tally()
            tally.add(Work(0, _TIMED_TOKENS))
            token = max(0.0, (tally.seconds() - one) / (_TIMED_TOKENS - 1))
        return DraftCosts(round_seconds=max(0.0, one - row), row_seconds=row, token_seconds=token)

    def _decodes(self, contexts_sum: int, count: int) -> float:
        tally = self._predictor.tally()
        tally.add_decodes(contexts_sum, count)
        return tally.seconds()


def alone(shape: DraftShape, hardware: Hardware) -> Profile:
    """Return the costs of a draft model or head on one device."""
    return profile_for(shape.layer if isinstance(shape, HeadShape) else shape, hardware, Topology())


def with_head(profile: Profile, head: Profile) -> Profile:
    """Return the costs of steps in which a head computes every position, too.

    The layers are divided so that all stages take equally long, the last one including the head. To model this, an equal
    share of the head's cost is added to the cost of each layer.
    """
    share, own, added = 1 / profile.layers, profile.attention, head.attention
    attention = replace(
        own,
        launch_seconds=own.launch_seconds + share * added.launch_seconds,
        seconds_per_pair=own.seconds_per_pair + share * added.seconds_per_pair,
        kv_seconds_per_token=own.kv_seconds_per_token + share * added.kv_seconds_per_token,
        points=_points(own, added, share),
    )
    linear = tuple(operation.slowed(share, share, share, share) for operation in head.linear)
    return replace(
        profile, name=f"{profile.name}, with a head", linear=profile.linear + linear, attention=attention
    )


def _points(own: Attention, added: Attention, share: float) -> tuple[tuple[int, float], ...]:
    """Return seconds per key at the counts of queries at which either attention has a point; none if neither has."""
    counts = sorted({count for count, _ in (*own.points, *added.points)})
    if not counts:
        return ()
    both = _seconds_per_key(own, counts) + share * _seconds_per_key(added, counts)
    return tuple(zip(counts, both.tolist(), strict=True))


def _seconds_per_key(attention: Attention, counts: Sequence[int]) -> npt.NDArray[np.float64]:
    if attention.points:
        known, seconds = zip(*attention.points, strict=True)
        return np.asarray(np.interp(counts, known, seconds), np.float64)
    slopes = [max(count * attention.seconds_per_pair, attention.kv_seconds_per_token) for count in counts]
    return np.array(slopes, dtype=np.float64)
