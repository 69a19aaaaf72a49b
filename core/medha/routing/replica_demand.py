"""The number of replicas of a model that the clients of one router need; it adds up over routers.

Each router knows its own clients alone, so it states what they need of a replica, as a fraction. The sum over routers
is what all clients need, and an autoscaler rounds it up. It has six parts, and they add up too:

- `arrivals`: the prefill work that arrives, as a rate. The work of each sequence is spread over the time until its first
  token is due, so that a long prompt, which has long, is no peak. A rate does not change with the number of replicas,
  and does not fall to nothing whenever the queue is empty for a moment. It falls to 0 once no request has been open for
  `spread_seconds`: replicas that had nothing to do have kept up, also with work that is due much later.
- `waiting`: for each sequence that waits in the router, the share of one lane that it needs from now on to be in time:
  its work over the time that is left. One that cannot be in time any more needs a whole lane, unless its work is tiny.
- `kv`: what the KV of all open sequences takes of a replica's pool, as far as it needs more than both of those.
- `spare`: a reserve for the growth of urgent work, whose first token is due long before a further replica would serve. By
  then the load may be a multiple of what it is, however soon the growth is noticed. Head-room in proportion to the load
  does not help where the load is small: 0.4 replicas and any usual share of that are still one replica. So the reserve
  is the geometric mean of one replica and the urgent load, but at most one replica. It is large beside a small load,
  small beside a large one, and 0 for work that can wait for a further replica.
- `growth`: what urgent work will need beyond what it needs now, by the time at which a further replica would serve, if it
  goes on growing as it has in the last minute. A difference that chance explains does not count as growth.
- `open`: a small share while a request is open or waits for the first replica, so that there is at least one.

A minute after the last request has ended, the sum is exactly 0. Smallest and largest numbers and
stabilisation are the autoscaler's.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, sqrt
from typing import Literal

DemandReason = Literal["arrivals", "waiting", "kv", "spare", "growth", "open"]
"""Part of the demand."""
OPEN_SHARE = 0.01
"""Least demand of a router that has an open request; those of many routers together are still below 1."""
_BUCKET_SECONDS = 5.0
"""Accuracy of the time until which an arrival counts."""
_LONGEST_SECONDS = 3600.0
"""Longest time over which the work of an arrival is spread."""


@dataclass(frozen=True, slots=True)
class DemandTerms:
    """The terms by which work becomes replicas."""

    start_seconds: float = 120.0
    """Time that a replica takes from its creation until it serves: until then, what waits for the first one is late."""
    spread_seconds: float = 60.0
    """Shortest time over which the work of an arrival is spread. After as much time without requests, no work counts."""
    busy_share: float = 0.85
    """Share of its time that a replica should spend on prefill that arrives. The rest is for decodes and for chance."""
    urgent_seconds: float = 2.0
    """Shortest time within which waiting work need be done."""
    kv_share: float = 0.9
    """Share of a replica's KV pool that should be reserved at most."""
    spare_due_share: float = 0.25
    """Share of the start time within which work is due that a spare is kept for. Work that is due later can wait a while,
    and the more of it there is, the sooner a further replica is asked for."""

    growth_seconds: float = 30.0
    """Time whose urgent arrivals are compared with those of as much time before, to see whether they grow."""
    growth_errors: float = 1.0
    """Number of standard errors up to which that difference is taken for chance."""
    most_growth: float = 3.0
    """Largest growth that is predicted, as a multiple of the urgent rate: a step looks like the beginning of a slope."""

    @property
    def spare_due_seconds(self) -> float:
        """Time within which work is due that a spare is kept for."""
        return self.spare_due_share * self.start_seconds


@dataclass(frozen=True, slots=True)
class ReplicaSize:
    """The size of a replica of a model, the mean if they differ, and how many routers it serves."""

    lanes: float
    """Lanes, each of which prefills beside the others."""
    kv_tokens: float
    """Tokens that the KV pools of all lanes hold; 0 if it announces none."""
    routers: int = 1
    """Number of routers that it serves. Clients are taken to be divided evenly among them, so each router asks for its part
    of one spare. If replicas differ, the largest number counts: a replica that has just started does not know all routers
    yet."""


@dataclass(frozen=True, slots=True)
class ModelWork:
    """The demand of one router's clients for a model, at one time. Seconds of prefill are those of a lone prompt."""

    arrival_rate: float = 0.0
    """Prefill seconds that arrive each second, without cached prefixes."""
    urgent_rate: float = 0.0
    """Part of `arrival_rate` that is due long before a further replica would serve."""
    urgent_growth: float = 0.0
    """Prefill seconds each second by which the urgent rate of all clients is predicted to grow until a further replica
    serves; this router's part of it."""
    pending_seconds: float = 0.0
    """Prefill of sequences that have no token yet, whether they wait in the router or were sent to a replica."""
    waiting_lanes: float = 0.0
    """Lanes that the sequences that wait in the router need from now on to be in time."""
    missed_seconds: float = 0.0
    """Seconds by which waiting sequences are predicted to miss their deadlines, summed over the sequences."""
    kv_tokens: int = 0
    """KV that open sequences reserve, or will."""
    open_requests: int = 0
    """Sequences that have not ended, and requests in the waiting room."""


def replica_demand(
    work: ModelWork, size: ReplicaSize | None, terms: DemandTerms
) -> dict[DemandReason, float]:
    """Return the replicas that this work needs, by reason; the sum counts.

    Without a size, because no replica has ever been announced, it is known only whether one is needed at all.
    """
    arrivals = waiting = kv = spare = growth = 0.0
    if size is not None:
        arrivals = work.arrival_rate / (terms.busy_share * size.lanes)
        waiting = work.waiting_lanes / size.lanes
        if size.kv_tokens:  # without a pool, no number of replicas is enough
            kv = max(0.0, work.kv_tokens / (terms.kv_share * size.kv_tokens) - arrivals - waiting)
        # The clients of all routers together have `routers` times the load, and share the spare of that load.
        spare = min(1.0, sqrt(size.routers * work.urgent_rate / size.lanes)) / size.routers
        growth = work.urgent_growth / (terms.busy_share * size.lanes)
    least = OPEN_SHARE if work.open_requests else 0.0
    return {
        "arrivals": arrivals,
        "waiting": waiting,
        "kv": kv,
        "spare": spare,
        "growth": growth,
        "open": max(0.0, least - arrivals - waiting - kv - spare - growth),
    }


class GrowingWork:
    """The growth of urgent work: its arrivals of two equal times, one after the other. Times are in seconds, on the clock of
    `now`.
    """

    def __init__(self, terms: DemandTerms) -> None:
        self._terms = terms
        # Second of its arrival -> prefill seconds, and the sum of their squares. If arrivals are independent, that is the
        # variance of their sum.
        self._arrived: dict[int, tuple[float, float]] = {}

    def add(self, work_seconds: float, now: float) -> None:
        """Count work that has arrived."""
        total, squares = self._arrived.get(int(now), (0.0, 0.0))
        self._arrived[int(now)] = (total + work_seconds, squares + work_seconds**2)
        self._forget(now)

    def clear(self) -> None:
        """Forget all work."""
        self._arrived.clear()

    def growth(self, urgent_rate: float, routers: int, now: float) -> float:
        """Return the prefill seconds each second by which urgent work is predicted to grow until a further replica serves.

        The clients of all `routers` together are taken to grow as those of this one, which returns its part.
        """
        self._forget(now)
        window_seconds = self._terms.growth_seconds
        since = int(now) - window_seconds
        more = variance = 0.0
        for second, (total, squares) in self._arrived.items():
            more += total if second > since else -total
            variance += squares
        # The arrivals of n routers have n times the variance, and each has the n-th part of their standard error.
        more -= self._terms.growth_errors * sqrt(variance / routers)
        # The later window is half of its length ago.
        ahead_seconds = self._terms.start_seconds + window_seconds / 2
        predicted = more / window_seconds**2 * ahead_seconds
        return min(max(0.0, predicted), self._terms.most_growth * urgent_rate)

    def _forget(self, now: float) -> None:
        oldest = int(now) - 2 * self._terms.growth_seconds
        for second in [second for second in self._arrived if second <= oldest]:
            del self._arrived[second]


class ArrivedWork:
    """The rates at which work of one model arrives, while it has requests. Times are in seconds, on the clock of `now`."""

    def __init__(self, terms: DemandTerms) -> None:
        self._spread_seconds = terms.spread_seconds
        self._urgent_due_seconds = terms.spare_due_seconds
        self._growing = GrowingWork(terms)
        # Number of the bucket in which it ends -> prefill seconds per second.
        self._rates: dict[int, float] = {}
        self._urgent_rates: dict[int, float] = {}
        self._last_end = -inf

    def add(self, work_seconds: float, due_seconds: float, now: float) -> None:
        """Spread work over the time until it is due, `due_seconds` from now."""
        spread_seconds = min(max(due_seconds, self._spread_seconds), _LONGEST_SECONDS)
        bucket = int((now + spread_seconds) // _BUCKET_SECONDS)
        rate = work_seconds / spread_seconds
        self._rates[bucket] = self._rates.get(bucket, 0.0) + rate
        if due_seconds <= self._urgent_due_seconds:
            self._urgent_rates[bucket] = self._urgent_rates.get(bucket, 0.0) + rate
            self._growing.add(work_seconds, now)
        self._forget(now)

    def end(self, now: float) -> None:
        """Note that a sequence has ended."""
        self._last_end = now

    def rates(self, now: float, *, idle: bool) -> tuple[float, float]:
        """Return the prefill seconds that arrive each second, and those of them that are urgent.

        The model is idle if no request of it is open.
        """
        if idle and now - self._last_end >= self._spread_seconds:
            self._rates.clear()
            self._urgent_rates.clear()
            self._growing.clear()
        self._forget(now)
        return sum(self._rates.values()), sum(self._urgent_rates.values())

    def growth(self, routers: int, now: float) -> float:
        """Return the growth of urgent work that is predicted, after `rates` of the same time; see `GrowingWork.growth`."""
        return self._growing.growth(sum(self._urgent_rates.values()), routers, now)

    def _forget(self, now: float) -> None:
        present = int(now // _BUCKET_SECONDS)
        for rates in (self._rates, self._urgent_rates):
            for bucket in [bucket for bucket in rates if bucket < present]:
                del rates[bucket]
