"""Output lengths: how many tokens a request is expected to generate, learned from those that ended.

KV is reserved for the expected output, not for `max_tokens`: clients often name a `max_tokens` far beyond what
they get. The estimate is a quantile of the output lengths of a service class, and of an owner once it has
ended enough requests. It depends on nothing but the calls made here, so a replay reproduces it.

* Lengths are counted in bins whose bounds grow by a constant factor. For each bin, the requests that reached it
  and those that ended in it are counted. The share that goes on is estimated bin by bin (Kaplan and Meier,
  Journal of the American Statistical Association 53, 1958). So a request that ended at its own `max_tokens`
  shows that outputs may be longer, and not that they end there.
* A running request that has outgrown its expectation counts in the same way: it has reached all bins up to
  its length. Without it, estimates would be too short, because short outputs end first.
* For a request that has already generated some tokens, only requests that got as far count. So its expected
  length is always larger than its present one.
* Each end makes earlier ones count less.
* Before requests have ended, the class's `defaultOutputTokens` is expected. Beyond what was observed, an
  output is as likely to end as to double.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

BINS_PER_DOUBLING = 4
"""Bins for each doubling of the length: an estimate is at most 19 % above the quantile."""
DOUBLINGS = 31
QUANTILE = 0.8
"""Share of requests whose output is expected to be no longer than the estimate."""
MEMORY = 256
"""Ends after which an earlier one counts 1/e."""
PRIOR_ENDS = 4.0
"""Weight, in ended requests, of the initial assumption in a class's estimate, and of that estimate in an owner's."""
TAIL_WEIGHT = 0.5
"""Weight of the assumption beyond `defaultOutputTokens`, in requests."""
MOST_OWNERS = 256
"""Most owners whose requests are counted; the one whose last end is oldest is forgotten first."""

_Floats = npt.NDArray[np.float64]
_BINS = BINS_PER_DOUBLING * DOUBLINGS + 1


def _bounds() -> npt.NDArray[np.int64]:
    """Return the largest length of each bin; as lengths are whole numbers, some of the first bins are empty."""
    return np.floor(2.0 ** (np.arange(_BINS) / BINS_PER_DOUBLING) + 1e-9).astype(np.int64)


@dataclass(slots=True)
class _Counts:
    """Requests of one class, or of one owner in it, by the bin of their output length; earlier ones count less."""

    ends: _Floats = field(default_factory=lambda: np.zeros(_BINS))  # ended in the bin
    reached: _Floats = field(default_factory=lambda: np.zeros(_BINS))  # ended in the bin or after it
    running: _Floats = field(default_factory=lambda: np.zeros(_BINS))  # outgrew an expectation, and run there
    observed: int = 0  # ends, and requests that outgrew an expectation
    expected_tokens: int = 0  # the estimate for a request without output; 0: to be computed


@dataclass(frozen=True, slots=True)
class _Running:
    bin: int
    counted_in: tuple[_Counts, ...]  # kept, because its owner's counts may have been made or dropped since


class OutputLengths:
    """Estimates of output lengths by service class and owner."""

    def __init__(self, default_tokens: dict[str, int]) -> None:
        """`default_tokens` is the output that is expected of each service class before any request ends."""
        self._default_tokens = default_tokens
        self._bounds = _bounds()
        self._prior = {name: _prior(self._bin(tokens)) for name, tokens in default_tokens.items()}
        self._classes = {name: _Counts() for name in default_tokens}
        self._owners: OrderedDict[tuple[str, str], _Counts] = OrderedDict()
        self._running: dict[str, _Running] = {}  # requests that have outgrown an expectation, by id

    @property
    def owners(self) -> int:
        """Number of owners that are remembered, in all classes together."""
        return len(self._owners)

    def expected_tokens(self, service_class: str, owner: str = "", produced_tokens: int = 0) -> int:
        """Return the expected whole output of a request, in tokens: more than it has already produced."""
        counts = self._owners.get((service_class, owner))
        if counts is None:
            counts = self._classes[service_class]
        if produced_tokens:
            return self._quantile(service_class, counts, produced_tokens)
        if counts.expected_tokens == 0:
            counts.expected_tokens = self._quantile(service_class, counts, 0)
        return counts.expected_tokens

    def outgrew(self, request_id: str, service_class: str, owner: str, produced_tokens: int) -> None:
        """Count a running request that has produced more than was expected of it."""
        now = self._bin(produced_tokens)
        before = self._running.get(request_id)
        if before is not None and before.bin == now:
            return
        self._runs_no_longer(request_id)
        counted_in = self._counts(service_class, owner)
        for counts in counted_in:
            counts.running[now] += 1
            counts.observed += before is None
            counts.expected_tokens = 0
        self._running[request_id] = _Running(now, tuple(counted_in))

    def ended(
        self, request_id: str, service_class: str, owner: str, produced_tokens: int, *, cut_off: bool
    ) -> None:
        """Count a request that gives its KV back; `cut_off`: it would have produced more without its limit."""
        last = self._bin(produced_tokens)
        self._runs_no_longer(request_id)
        if cut_off and last == 0:
            return  # every output reaches the first bin, so this one shows nothing
        if owner and (service_class, owner) not in self._owners:
            self._owners[service_class, owner] = _Counts()
            if len(self._owners) > MOST_OWNERS:
                self._owners.popitem(last=False)
        for counts in self._counts(service_class, owner):
            keep = 1 - 1 / MEMORY
            counts.ends *= keep
            counts.reached *= keep
            counts.reached[: last + (not cut_off)] += 1
            counts.ends[last] += not cut_off
            counts.observed += 1
            counts.expected_tokens = 0
        if owner:
            self._owners.move_to_end((service_class, owner))

    def _runs_no_longer(self, request_id: str) -> None:
        before = self._running.pop(request_id, None)
        if before is not None:
            for counts in before.counted_in:
                counts.running[before.bin] -= 1
                counts.expected_tokens = 0

    def _counts(self, service_class: str, owner: str) -> list[_Counts]:
        of_owner = self._owners.get((service_class, owner))
        of_class = self._classes[service_class]
        return [of_class] if of_owner is None else [of_class, of_owner]

    def _bin(self, tokens: int) -> int:
        """Return the bin of an output length; lengths of 0 and 1 share the first."""
        return min(int(self._bounds.searchsorted(tokens)), _BINS - 1)

    def _quantile(self, service_class: str, counts: _Counts, produced_tokens: int) -> int:
        """Return the length up to which `QUANTILE` of the requests that go on after `produced_tokens` end."""
        default = self._default_tokens[service_class]
        of_class = self._classes[service_class]
        if of_class.observed == 0 and produced_tokens < default:
            return default
        ends, reached = self._prior[service_class]
        hazard = _hazard(of_class, ends, reached)
        if counts is not of_class:
            hazard = _hazard(counts, PRIOR_ENDS * hazard, np.full(_BINS, PRIOR_ENDS))
        first = int(self._bounds.searchsorted(produced_tokens, side="right")) if produced_tokens else 0
        first = min(first, _BINS - 1)
        going_on = np.cumprod(1 - hazard[first:])
        found = int((going_on <= 1 - QUANTILE).argmax()) if going_on[-1] <= 1 - QUANTILE else _BINS - 1
        return max(int(self._bounds[min(first + found, _BINS - 1)]), produced_tokens + 1)


def _prior(default_bin: int) -> tuple[_Floats, _Floats]:
    """Return what is assumed before any request ends: ends in each bin, and requests that reach it."""
    ends, reached = np.zeros(_BINS), np.zeros(_BINS)
    reached[: default_bin + 1] = PRIOR_ENDS
    ends[default_bin] = PRIOR_ENDS
    reached += TAIL_WEIGHT
    ends[default_bin + 1 :] += TAIL_WEIGHT * (1 - 0.5 ** (1 / BINS_PER_DOUBLING))
    return ends, reached


def _hazard(counts: _Counts, prior_ends: _Floats, prior_reached: _Floats) -> _Floats:
    """Return the share of the requests that reach a bin which end in it, for each bin."""
    behind = np.cumsum(counts.running[::-1])[::-1] - counts.running  # running ones that have left the bin
    hazard: _Floats = (counts.ends + prior_ends) / (counts.reached + behind + prior_reached)
    return np.minimum(hazard, 1.0)
