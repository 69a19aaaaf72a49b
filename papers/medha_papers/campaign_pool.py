"""Execution of a campaign's runs on a pool of processes, and estimates of the time that they take."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from multiprocessing.synchronize import Event

from medha_papers.campaign_run import Outcome, Run, capacity, simulate

_POLL_SECONDS = 0.5

Capacities = dict[str, dict[str, float]]
"""Results of `campaign_run.capacity`, by share of long requests."""


class Stopwatch:
    """Estimates the core-seconds of runs from those of completed runs, of this or an earlier campaign."""

    def __init__(self, outcomes: Iterable[tuple[str, Outcome]] = ()) -> None:
        self._seen: dict[
            tuple[str, ...], tuple[float, float]
        ] = {}  # likeness -> core-seconds, simulated seconds
        for key, outcome in outcomes:
            self.learn(key, outcome)

    def learn(self, key: str, outcome: Outcome) -> None:
        if "core_seconds" in outcome:
            for likeness in self._likenesses(key):
                core, simulated = self._seen.get(likeness, (0.0, 0.0))
                seconds = float(key.rpartition(", ")[2].removesuffix(" s"))
                self._seen[likeness] = core + outcome["core_seconds"], simulated + seconds

    def seconds(self, run: Run) -> float | None:
        """Return the estimate for a run from the most similar completed ones; None if there are none."""
        for likeness in self._likenesses(run.key):
            if likeness in self._seen:
                core, simulated = self._seen[likeness]
                return run.window_seconds * core / simulated
        return None

    def left_seconds(self, runs: Iterable[Run], jobs: int) -> float | None:
        """Return the time until `jobs` processes, with a core each, have done all of `runs`.

        It is None if the time of any run is unknown.
        """
        known = [self.seconds(run) for run in runs]
        total = sum(seconds for seconds in known if seconds is not None)
        return None if None in known else total / jobs

    @staticmethod
    def _likenesses(key: str) -> list[tuple[str, ...]]:
        """Return the groups of similar runs, closest first.

        The first shares deployment, system, rate and share of long requests; each next group shares fewer of
        these.
        """
        deployment, system, at, share = key.split(", ")[:4]
        return [
            (deployment, system, at, share),
            (deployment, system, share),
            (deployment, system),
            (deployment,),
            (),
        ]


def run_all(
    planned: Sequence[Run],
    done: dict[str, Outcome],
    capacities: Capacities,
    *,
    jobs: int,
    deadline_seconds: float,
    keep: Callable[[Run, Outcome], None],
    tick: Callable[[], None] = lambda: None,
) -> None:
    """Simulate the planned runs that are not in `done`, in order, on `jobs` processes.

    No run starts after the deadline. Missing `capacities` are measured first. `keep` is called for each run
    when it ends, `tick` about twice a second. A run that fails is kept with its `error`, so that a broken
    system does not cost the figures of others. KeyboardInterrupt (or any error of `keep`) is raised again
    after it has stopped the runs under way, whose results are lost.
    """
    ends = time.monotonic() + deadline_seconds
    context = multiprocessing.get_context("spawn")  # a fork would inherit the progress bar's thread
    stop = context.Event()
    with ProcessPoolExecutor(jobs, context, _start_worker, (stop,)) as pool:
        try:
            shares = sorted({run.long_share for run in planned if run.load is not None})
            asked = {
                share: pool.submit(capacity, share) for share in shares if f"{share:g}" not in capacities
            }
            _wait_for_all(asked.values(), tick)
            capacities.update({f"{share:g}": future.result() for share, future in asked.items()})
            queue = iter([run for run in planned if run.key not in done])
            under_way: dict[Future[Outcome | None], Run] = {}
            while True:
                while len(under_way) < jobs and time.monotonic() < ends:
                    run = next(queue, None)
                    if run is None:
                        break
                    under_way[pool.submit(_simulate_in_worker, _at_its_rate(run, capacities))] = run
                if not under_way:
                    return
                ended, _ = wait(under_way, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED)
                for future in ended:
                    keep(under_way.pop(future), _outcome(future))
                tick()
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _at_its_rate(run: Run, capacities: Capacities) -> Run:
    if run.load is None:
        return run
    return replace(run, rate=run.load * capacities[f"{run.long_share:g}"]["rate"])


def _wait_for_all(futures: Iterable[Future[dict[str, float]]], tick: Callable[[], None]) -> None:
    waiting = set(futures)
    while waiting:
        _, waiting = wait(waiting, timeout=_POLL_SECONDS)
        tick()


def _outcome(future: Future[Outcome | None]) -> Outcome:
    error = future.exception()
    if error is not None:
        return {"error": f"{type(error).__name__}: {error}"}
    outcome = future.result()
    assert outcome is not None, "only a stopped campaign stops a run"
    return outcome


# --- in a worker process -----------------------------------------------------------------------------

_stop: Event | None = None  # global, because an Event cannot be passed as the argument of a task


def _start_worker(stop: Event) -> None:
    global _stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    _stop = stop


def _simulate_in_worker(run: Run) -> Outcome | None:
    stop = _stop
    assert stop is not None
    return simulate(run, lambda _: stop.is_set())
