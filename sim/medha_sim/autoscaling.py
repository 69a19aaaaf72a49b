"""Simulated autoscaling: Kubernetes' HorizontalPodAutoscaler sets the number of replicas by a signal.

A signal is a total over the deployment and a target for each replica. The autoscaler divides, rounds up, ignores small
differences, and takes the largest of its recent recommendations before it removes replicas (autoscaling/v2, a metric of
type `AverageValue`). A replica that is added serves after its start time. One that is removed finishes what it has.
Both count as cost from their creation to their end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil
from typing import Literal

from medha_sim.simulation import SimulatedReplica, Simulation

SignalName = Literal["demand", "queue", "kv", "busy", "fixed"]
SIGNALS: tuple[SignalName, ...] = ("demand", "queue", "kv", "busy", "fixed")


@dataclass(frozen=True, slots=True)
class Signal:
    """A signal, and its target for each replica."""

    name: SignalName
    """`demand`: the router's desired replicas; `queue`: requests that wait anywhere; `kv`: reserved shares of KV pools;
    `busy`: shares of time in which replicas computed since the last decision; `fixed`: the largest number always."""
    target: float = 1.0


@dataclass(frozen=True, slots=True)
class AutoscalerTerms:
    """The settings of the autoscaler; the defaults are those of Kubernetes."""

    min_replicas: int = 1
    max_replicas: int = 8
    sync_seconds: float = 15.0
    tolerance: float = 0.1
    """Relative distance from the target within which nothing changes."""
    stabilisation_seconds: float = 300.0
    """Time whose largest recommendation holds before replicas are removed."""


class HorizontalAutoscaler:
    """The autoscaler's decisions. Times are in seconds, on the clock of `now`."""

    def __init__(self, terms: AutoscalerTerms) -> None:
        self._terms = terms
        self._recommended: deque[tuple[float, int]] = deque()

    def decide(self, current: int, total: float, target: float, now: float) -> int:
        """Return the number of replicas that `current` should become, as the signal's total is `total`."""
        terms = self._terms
        wanted = current
        if current == 0 or abs(total / (target * current) - 1) > terms.tolerance:
            wanted = ceil(total / target - 1e-9)
        # In one step the number at most doubles, or grows by four.
        wanted = min(wanted, max(2 * current, current + 4))
        while self._recommended and now - self._recommended[0][0] >= terms.stabilisation_seconds:
            self._recommended.popleft()
        self._recommended.append((now, wanted))
        if wanted < current:
            wanted = min(current, max(number for _, number in self._recommended))
        return min(max(wanted, terms.min_replicas), terms.max_replicas)


@dataclass(slots=True)
class ScalingLog:
    """The record of an autoscaler's decisions."""

    at: list[float] = field(default_factory=list)
    replicas: list[int] = field(default_factory=list)  # number that exist or start, without those that drain
    replica_seconds: float = 0.0  # from creation to end, starts and drains included
    changes: int = 0


@dataclass(slots=True)
class _Life:
    created_at: float
    serves: bool = False
    drains: bool = False
    busy_seconds: float = 0.0  # when last examined


class AutoscaledFleet:
    """The replicas of a simulation, which an autoscaler adds and removes."""

    def __init__(
        self,
        simulation: Simulation,
        make: Callable[[int], SimulatedReplica],
        signal: Signal,
        terms: AutoscalerTerms,
        *,
        start_seconds: float,
    ) -> None:
        """`make` returns the replica of a number. The simulation has the first `min_replicas` ones, one at least."""
        self._simulation = simulation
        self._make = make
        self._signal = signal
        self._terms = terms
        self._start_seconds = start_seconds
        self._autoscaler = HorizontalAutoscaler(terms)
        self._lives = {
            make(number).card.replica: _Life(0.0, serves=True) for number in range(max(1, terms.min_replicas))
        }
        self._made = len(self._lives)
        self.log = ScalingLog()
        simulation.at(0.0, self._sync, None)

    def finish(self, now: float) -> ScalingLog:
        """Return the log of a simulation that has ended at `now`."""
        self.log.replica_seconds += sum(now - life.created_at for life in self._lives.values())
        self._lives.clear()
        return self.log

    def _sync(self, _: None, now: float) -> None:
        simulation = self._simulation
        for name in [one for one, life in self._lives.items() if life.drains and simulation.is_drained(one)]:
            simulation.remove_replica(name, now)
            self.log.replica_seconds += now - self._lives.pop(name).created_at
        wanted_now = [name for name, life in self._lives.items() if not life.drains]
        current = len(wanted_now)
        wanted = self._terms.max_replicas
        if self._signal.name != "fixed":
            wanted = self._autoscaler.decide(current, self._total(now), self._signal.target, now)
        self.log.changes += wanted != current
        for _added in range(wanted - current):
            self._create(now)
        for name in reversed(wanted_now[wanted:] if wanted < current else []):
            self._end(name, now)
        self.log.at.append(now)
        self.log.replicas.append(wanted)
        simulation.at(now + self._terms.sync_seconds, self._sync, None)

    def _create(self, now: float) -> None:
        replica = self._make(self._made)
        self._made += 1
        self._lives[replica.card.replica] = _Life(now)
        self._simulation.at(now + self._start_seconds, self._started, replica)

    def _started(self, replica: SimulatedReplica, now: float) -> None:
        life = self._lives.get(replica.card.replica)
        if life is not None:  # else it was removed before
            life.serves = True
            self._simulation.add_replica(replica, now)

    def _end(self, name: str, now: float) -> None:
        life = self._lives[name]
        if life.serves:
            life.drains = True
            self._simulation.drain_replica(name, now)
        else:
            self.log.replica_seconds += now - life.created_at
            del self._lives[name]

    def _total(self, now: float) -> float:
        simulation = self._simulation
        router = simulation.router
        assert router is not None
        serving = [name for name, life in self._lives.items() if life.serves]
        match self._signal.name:
            case "demand":
                works = router.works(simulation.guests, now)
                return sum(sum(router.demand(model, work).values()) for model, work in works.items())
            case "queue":
                waiting = sum(simulation.load(name).waiting for name in serving)
                return router.waiting + waiting + sum(simulation.guests.values())
            case "kv":
                return sum(simulation.kv_share(name) for name in serving if not self._lives[name].drains)
            case "busy":
                total = 0.0
                for name in serving:
                    life, busy = self._lives[name], simulation.busy_seconds(name)
                    total += min(1.0, (busy - life.busy_seconds) / self._terms.sync_seconds)
                    life.busy_seconds = busy
                return total
            case _:
                raise AssertionError(self._signal)
