"""Measures the pace of prefills and the time between steps, from launch times: pure state, fed by events.

Both are quantities that no prediction of a single step contains:

* **Pace.** The predicted time of a prefill assumes that it runs alone. With other work it is slower: decodes
  are in each step, and beside them chunks are smaller than is efficient. To decide whether several prefills
  can be done by some time, their real duration must be known.
* **Time between steps.** Between the end of a step in a stage and the start of the next one lie messages,
  sampling, hops and the controller's decision. A token needs as many steps as there are stages, so this time
  is part of its TPOT.

Both are measured from one launch to the next on the same lanes while a prefill continues: then the second
step comes as soon as it can, and no idle time is mistaken for work. Nothing is learned if the second step
does not come, because the prefill was cancelled, or because other lanes have joined and the next step runs on
all of them together.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

_MEMORY_SECONDS = 60.0
"""Time constant of the pace average, in busy time: prefills are estimated from the last minute."""
_SLOWEST_PACE = 0.1  # below it something is wrong that no factor can correct
_WEIGHT = 0.02  # of one measured time between steps: about 50 steps to follow a change


@dataclass(frozen=True, slots=True)
class _Launch:
    at: float
    alone_seconds: float  # what its chunks would keep a stage busy alone
    predicted_seconds: float
    with_decodes: bool


class Pace:
    """The pace of prefills and the time between steps of one replica."""

    def __init__(self, between_seconds: float = 0.0) -> None:
        """`between_seconds`: initial estimate of the time between steps."""
        self._between_seconds = between_seconds
        self._alone = self._took = _MEMORY_SECONDS  # at first: as if alone
        self._last: dict[tuple[int, ...], _Launch] = {}

    @property
    def of_prefills(self) -> float:
        """Seconds of lone prefill work done per second, at most 1."""
        return min(1.0, max(_SLOWEST_PACE, self._alone / self._took))

    @property
    def between_seconds(self) -> float:
        """Seconds from the end of a step in a stage to the start of the next, beyond predicted step times."""
        return max(self._between_seconds, 0.0)

    def launched(
        self,
        lanes: tuple[int, ...],
        now: float,
        predicted_seconds: float,
        alone_seconds: float,
        *,
        with_decodes: bool,
        continues: bool,
    ) -> None:
        """Record that a step is launched on `lanes`; its chunks would take `alone_seconds` alone.

        `continues`: one of its prefills has more to compute, so that the next step comes as soon as it can.
        """
        last = self._last.pop(lanes, None)
        if last is not None:
            self._observe(last, now - last.at)
        if self._last:  # of other lanes, or of some of these before they moved together or apart
            for other in [key for key in self._last if not set(key).isdisjoint(lanes)]:
                del self._last[other]
        if continues:
            self._last[lanes] = _Launch(now, alone_seconds, predicted_seconds, with_decodes)

    def rested(self, lanes: tuple[int, ...]) -> None:
        """Record that `lanes` could have launched a step but had nothing to compute.

        The next launch then does not measure the time between two steps.
        """
        self._last.pop(lanes, None)

    def _observe(self, step: _Launch, took_seconds: float) -> None:
        kept = exp(-took_seconds / _MEMORY_SECONDS)
        self._alone = self._alone * kept + step.alone_seconds
        self._took = self._took * kept + took_seconds
        if step.with_decodes:
            between = min(took_seconds - step.predicted_seconds, step.predicted_seconds)
            self._between_seconds += _WEIGHT * (between - self._between_seconds)
