"""A server that runs one prefill at a time, in quanta: the model in which policies are compared and proved.

It has no batches, no pipeline and no overhead, so that results depend on the policy alone. A quantum that has
begun is not interrupted: a request that arrives during it is considered at its end, as in a step of the
engine.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from medha.scheduler.guarded import Guarded, GuardedSettings, Plan
from medha.scheduler.policy import Columns, Floats, Ints, keys, urgent_first

_KEEP_THEIR_ORDER = ("fcfs", "edf", "srpt")  # their order changes only when a job arrives or ends
_DONE_SECONDS = 1e-9


@dataclass(frozen=True, slots=True)
class Jobs:
    """Requests in the order of arrival; arrivals and deadlines are seconds of one clock."""

    arrival: Floats
    deadline: Floats
    work_seconds: Floats


@dataclass(frozen=True, slots=True)
class Schedule:
    """Result of serving the jobs."""

    finish: Floats
    demoted: Ints
    """Jobs that `guarded` demoted at least once."""
    revised_deadline: Floats
    """Earliest revised deadline of each job; infinite for jobs that were never demoted."""
    quanta: list[tuple[float, int, float]] = field(default_factory=list)
    """Quanta as (start, job, seconds), if they are recorded."""


class _Waiting:
    """The jobs that have arrived and not ended, as columns."""

    def __init__(self, jobs: Jobs) -> None:
        self.jobs = jobs
        self.job = np.empty(0, dtype=np.int64)
        self.remaining = np.empty(0)
        self.plan = Plan(np.empty(0), np.empty(0), np.empty(0, dtype=np.int64))
        self._refresh_columns()

    def add(self, job: int) -> None:
        plan, due = self.plan, self.jobs.deadline[job]
        place = int(np.searchsorted(plan.due[plan.by_due], due, side="right"))
        self.plan = Plan(
            due=np.append(plan.due, due),
            revised_deadline=np.append(plan.revised_deadline, np.inf),
            by_due=np.insert(plan.by_due, place, len(self.job)),
        )
        self.job = np.append(self.job, job)
        self.remaining = np.append(self.remaining, self.jobs.work_seconds[job])
        self._refresh_columns()

    def remove(self, row: int) -> None:
        by_due = self.plan.by_due[self.plan.by_due != row]
        self.plan = Plan(
            due=np.delete(self.plan.due, row),
            revised_deadline=np.delete(self.plan.revised_deadline, row),
            by_due=by_due - (by_due > row),
        )
        self.job = np.delete(self.job, row)
        self.remaining = np.delete(self.remaining, row)
        self._refresh_columns()

    def _refresh_columns(self) -> None:
        jobs, job = self.jobs, self.job
        self.columns = Columns(
            jobs.arrival[job], jobs.deadline[job], jobs.work_seconds[job], self.remaining, tie=job
        )


def serve(
    jobs: Jobs,
    policy: str,
    *,
    quantum_seconds: float,
    lars_denominator: str = "work",
    demoted_share: float = 0.1,
    slowness: Floats | None = None,
    record: bool = False,
) -> Schedule:
    """Serve `jobs` under `policy` until all have ended.

    `slowness` is the actual time of each job over its predicted time (1 where the prediction is right).
    """
    guarded = Guarded(GuardedSettings(demoted_share, grace_seconds=quantum_seconds))
    waiting = _Waiting(jobs)
    total = len(jobs.arrival)
    finish = np.full(total, np.inf)
    revised_deadline = np.full(total, np.inf)
    quanta: list[tuple[float, int, float]] = []
    now, arrived = 0.0, 0
    while arrived < total or len(waiting.job):
        if not len(waiting.job):
            now = max(now, float(jobs.arrival[arrived]))
        while arrived < total and jobs.arrival[arrived] <= now:
            waiting.add(arrived)
            arrived += 1
        if policy == "guarded":
            row = next(guarded.order(waiting.columns, waiting.plan, now))
            revised_deadline[waiting.job] = np.minimum(
                revised_deadline[waiting.job], waiting.plan.revised_deadline
            )
        else:
            columns = waiting.columns
            row = next(urgent_first(keys(policy, columns, now, lars_denominator), columns.tie))
        job, left = int(waiting.job[row]), float(waiting.remaining[row])
        seconds = min(quantum_seconds, left)
        if policy in _KEEP_THEIR_ORDER and slowness is None:
            until = float(jobs.arrival[arrived]) if arrived < total else np.inf
            if now + left <= until:
                seconds = left
            else:
                seconds = min(left, quantum_seconds * max(1, np.ceil((until - now) / quantum_seconds)))
        if record:
            quanta.append((now, job, seconds))
        now += seconds if slowness is None else seconds * float(slowness[job])
        waiting.remaining[row] = left - seconds
        if left - seconds <= _DONE_SECONDS:
            finish[job] = now
            waiting.remove(row)
    return Schedule(finish, np.flatnonzero(np.isfinite(revised_deadline)), revised_deadline, quanta)


def edf_meets_all(jobs: Jobs, chosen: Sequence[int]) -> bool:
    """Return whether preemptive EDF without quanta serves the `chosen` jobs in time.

    It does whenever any schedule can.
    """
    now, following = 0.0, sorted(chosen, key=lambda job: jobs.arrival[job])
    queue: list[tuple[float, int]] = []
    left = dict(zip(chosen, jobs.work_seconds[list(chosen)].tolist(), strict=True))
    while following or queue:
        if not queue:
            now = max(now, float(jobs.arrival[following[0]]))
        while following and jobs.arrival[following[0]] <= now:
            job = following.pop(0)
            heapq.heappush(queue, (float(jobs.deadline[job]), job))
        deadline, job = queue[0]
        until = float(jobs.arrival[following[0]]) if following else np.inf
        seconds = min(left[job], until - now)
        now, left[job] = now + seconds, left[job] - seconds
        if left[job] <= 1e-12:
            heapq.heappop(queue)
            if now > deadline + 1e-9:
                return False
    return True


def most_on_time(jobs: Jobs) -> int:
    """Return the largest number of jobs that a schedule with knowledge of the future can serve in time.

    It tries every subset, so it is only for a few jobs.
    """
    everyone = range(len(jobs.arrival))
    for count in reversed(everyone):
        if any(edf_meets_all(jobs, chosen) for chosen in itertools.combinations(everyone, count + 1)):
            return count + 1
    return 0
