"""How steps follow each other in fact, learned slowly from when they are launched: pure state, fed by events.

Two things that no prediction of one step knows:

* **Pace.** A prefill is reckoned by what it takes alone. In company it is slower: decodes are in each step, and beside
  them chunks are smaller than the hardware likes. Whoever asks whether several prefills can be done by some time has to
  count what they really take.
* **Time between steps.** From the end of a step in a stage to the next one's begin pass messages, sampling, hops and
  the controller's decision. A token needs as many steps as there are stages, so that this time is part of its TPOT.

Both are measured from one launch to the next on the same lanes while a prefill goes on: then the second one comes as
soon as it can, and no idle time is mistaken for work. Where it does not come - its prefill was cancelled, or other lanes
have joined and the step behind it is one of them together - nothing is learned.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

_MEMORY_SECONDS = 60.0
"""Of busy time: a long prefill is reckoned by the company of the last minute."""
_SLOWEST_PACE = 0.1  # below it something is wrong that no factor mends
_WEIGHT = 0.02  # of one time between steps: about 50 steps to follow a change


@dataclass(frozen=True, slots=True)
class _Launch:
    at: float
    alone_seconds: float  # what its chunks would keep a stage busy alone
    predicted_seconds: float
    with_decodes: bool


class Pace:
    """The pace of prefills, and the time between steps, of one replica."""

    def __init__(self, between_seconds: float = 0.0) -> None:
        """`between_seconds`: the time between steps until some are measured."""
        self._between_seconds = between_seconds
        self._alone = self._took = _MEMORY_SECONDS  # at first: as if alone
        self._last: dict[tuple[int, ...], _Launch] = {}

    @property
    def of_prefills(self) -> float:
        """Seconds of lone prefill that are done in one second, at most 1."""
        return min(1.0, max(_SLOWEST_PACE, self._alone / self._took))

    @property
    def between_seconds(self) -> float:
        """From the end of a step in a stage to the next one's begin, beyond what steps are predicted to take."""
        return max(self._between_seconds, 0.0)

    def launched(
        self,
        lanes: tuple[int, ...],
        now: float,
        predicted_seconds: float,
        alone_seconds: float,
        *,
        with_decodes: bool,
        goes_on: bool,
    ) -> None:
        """A step is launched on `lanes`, whose chunks would take `alone_seconds` alone.

        `goes_on`: one of its prefills has more to compute, so that the next step comes as soon as it can.
        """
        last = self._last.pop(lanes, None)
        if last is not None:
            self._observe(last, now - last.at)
        if self._last:  # of other lanes, or of some of these before they moved together or apart
            for other in [key for key in self._last if not set(key).isdisjoint(lanes)]:
                del self._last[other]
        if goes_on:
            self._last[lanes] = _Launch(now, alone_seconds, predicted_seconds, with_decodes)

    def rested(self, lanes: tuple[int, ...]) -> None:
        """`lanes` could have launched a step, and had nothing to compute: what follows is no longer the next step."""
        self._last.pop(lanes, None)

    def _observe(self, step: _Launch, took_seconds: float) -> None:
        kept = exp(-took_seconds / _MEMORY_SECONDS)
        self._alone = self._alone * kept + step.alone_seconds
        self._took = self._took * kept + took_seconds
        if step.with_decodes:
            between = min(took_seconds - step.predicted_seconds, step.predicted_seconds)
            self._between_seconds += _WEIGHT * (between - self._between_seconds)
