"""The order of prefills: pure key functions of (state of a request, now), smallest first.

Keys change with time, so they are computed anew for each decision and never kept in a heap.
Notation of DESIGN §5: arrival a, relative deadline d, total prefill work w, remaining work r.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_SMALLEST_WORK_SECONDS = 1e-6  # a division by the work of an empty prefill must not fail


@dataclass(frozen=True, slots=True)
class PrefillState:
    """What a policy may look at (seconds)."""

    arrival: float  # on the controller's clock
    deadline_after: float  # d
    work_seconds: float  # w
    remaining_seconds: float  # r(t)

    def slack(self, now: float) -> float:
        """s(t) = a + d - t - r(t)"""
        return self.arrival + self.deadline_after - now - self.remaining_seconds

    def relative_slack(self, now: float) -> float:
        """rho = s / w (paper B §4)"""
        return self.slack(now) / max(self.work_seconds, _SMALLEST_WORK_SECONDS)


PolicyKey = Callable[[PrefillState, float], float]


def fcfs(state: PrefillState, now: float) -> float:  # noqa: ARG001 - every key has the same arguments
    """First come, first served: a."""
    return state.arrival


def edf(state: PrefillState, now: float) -> float:  # noqa: ARG001 - every key has the same arguments
    """Earliest deadline first: a + d."""
    return state.arrival + state.deadline_after


def lrs(state: PrefillState, now: float) -> float:
    """Least remaining slack: s."""
    return state.slack(now)


def srpt(state: PrefillState, now: float) -> float:  # noqa: ARG001 - every key has the same arguments
    """Shortest remaining processing time: r."""
    return state.remaining_seconds


def lars(state: PrefillState, now: float) -> float:
    """Length-aware relative slack: s / w (paper B §4)."""
    return state.relative_slack(now)


def lars_by_deadline(state: PrefillState, now: float) -> float:
    """Relative slack over the deadline: s / d (paper A eq. 7, with the current time added)."""
    return state.slack(now) / max(state.deadline_after, _SMALLEST_WORK_SECONDS)


def policy_key(policy: str, lars_denominator: str = "work") -> PolicyKey:
    """The key function that the manifest's `scheduling.policy` names."""
    if policy == "lars" and lars_denominator == "deadline":
        return lars_by_deadline
    return {"fcfs": fcfs, "edf": edf, "lrs": lrs, "srpt": srpt, "lars": lars}[policy]
