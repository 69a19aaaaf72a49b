"""A study: interruptible runs of systems x loads x seeds x capacities, in parallel processes.

A *system* is one of Medha's policies or a baseline. All systems see the same workloads (paired seeds) and the
same deadlines. `load` is the arrival rate over the simulator's own capacity, which is measured first, with a
backlog. The capacity band repeats each run on ranks that are slightly slower and slightly faster than the
profile predicts.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.sharedctypes import SynchronizedArray
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, get_args

import numpy as np

from medha.api.replica import SchedulingSpec
from medha.errors import ConfigInvalid, MedhaError, PartFailed
from medha_sim.baselines.systems import OTHERS, SINGLE
from medha_sim.baselines.systems import simulation as baseline
from medha_sim.lengths import MEDHA_SWE, Stretched
from medha_sim.run_summary import Summary, summarise
from medha_sim.scenario import MAX_MODEL_LEN_TOKENS, Deployment, Disturbance
from medha_sim.simulation import Progress, Workload
from medha_sim.workloads import (
    Mix,
    Targets,
    TraceColumns,
    conversations,
    generate,
    read_trace,
    sharegpt_with_long,
)

POLICIES: tuple[str, ...] = get_args(SchedulingSpec.model_fields["policy"].annotation)
SYSTEMS = (*POLICIES, *SINGLE, *OTHERS)
"""All systems: Medha's policies, its variants without multi-prefill batching, and other systems."""

_CAPACITY_SECONDS = 900.0  # simulated with a backlog to measure the capacity
_CAPACITY_WARM_UP_SECONDS = 100.0  # of these, left out while the pipeline fills
_CAPACITY_OVERLOAD = 1.5  # arrival rate over that at which isolated prefills alone would fill the time
_CAPACITY_SEED = 1
_POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """Settings of a workload. A mix or conversations need a `rate`, which a study with loads sets itself."""

    shape: str = "mix"  # mix, conversations or trace
    long_share: float = 0.05
    long_scale: float = 1.0  # length of long prompts, as a multiple of Medha-SWE's
    burstiness: float = 1.0  # coefficient of variation of arrival gaps
    rate: float | None = None  # requests (or conversations) a second
    trace: Path | None = None
    columns: TraceColumns = field(default_factory=TraceColumns)
    names_max_tokens: bool = True

    def mix(self) -> Mix:
        long = MEDHA_SWE if self.long_scale == 1 else Stretched(MEDHA_SWE, self.long_scale)
        return sharegpt_with_long(self.long_share, long)

    @property
    def is_sampled(self) -> bool:
        """True if the workload depends on the seed; a trace with its own arrival times does not."""
        return self.shape != "trace" or self.columns.arrived_at is None

    def make(
        self, targets: Targets, duration_seconds: float, seed: int, max_model_len: int = MAX_MODEL_LEN_TOKENS
    ) -> Workload:
        """Return the workload of one seed. `max_model_len` bounds the requests of a trace.

        Raises:
            ConfigInvalid: a setting or the trace is wrong.
        """
        if self.shape == "trace":
            assert self.trace is not None
            return read_trace(
                self.trace,
                targets,
                columns=self.columns,
                rate=self.rate,
                duration_seconds=duration_seconds,
                seed=seed,
                max_model_len=max_model_len,
                coefficient_of_variation=self.burstiness,
                names_max_tokens=self.names_max_tokens,
            )
        assert self.rate is not None
        if self.shape == "conversations":
            return conversations(targets, rate=self.rate, duration_seconds=duration_seconds, seed=seed)
        return generate(
            self.mix(),
            targets,
            rate=self.rate,
            duration_seconds=duration_seconds,
            seed=seed,
            coefficient_of_variation=self.burstiness,
            names_max_tokens=self.names_max_tokens,
        )


@dataclass(frozen=True, slots=True)
class StudySpec:
    """The settings of a study."""

    deployment: Deployment
    workload: WorkloadSpec
    systems: tuple[str, ...]
    seeds: tuple[int, ...]
    duration_seconds: float
    loads: tuple[float, ...] = ()  # if empty, the workload's own rate is used
    band: float = 0.1  # share by which the capacity is varied up and down; 0 for no band
    disturbance: Disturbance = field(default_factory=Disturbance)

    @property
    def depends_on_seed(self) -> bool:
        """True if runs with different seeds differ."""
        guesses_by_chance = self.deployment.guesses and 0 < self.deployment.acceptance < 1
        return self.workload.is_sampled or self.disturbance.noise > 0 or guesses_by_chance

    def check(self) -> None:
        """Validate the settings before anything runs.

        Raises:
            ConfigInvalid: the weights do not fit, the model has fewer layers than stages, a setting or the
                trace makes no workload, a baseline is asked for what only Medha's own controllers support or
                cannot use exactly the GPUs of the deployment, or all seeds would give the same run.
        """
        if len(self.seeds) > 1 and not self.depends_on_seed:
            raise ConfigInvalid(
                f"seeds are {', '.join(map(str, self.seeds))}, but a trace that has its own times gives the same run "
                "for each of them, and an interval over them would say nothing; leave one, or add noise"
            )
        baselines = [system for system in self.systems if system not in POLICIES]
        if baselines and self.deployment.replicas > 1:
            raise ConfigInvalid(
                f"{baselines[0]} is simulated as one replica, not {self.deployment.replicas}; set replicas to 1, "
                f"or compare {', '.join(POLICIES)} only"
            )
        if baselines and self.disturbance.noise:
            raise ConfigInvalid(
                f"noise is {self.disturbance.noise:g}, which {baselines[0]} is not simulated with; leave it out, "
                f"or compare {', '.join(POLICIES)} only"
            )
        stages, model = self.deployment.topology.stream, self.deployment.model
        if stages > model.layers:
            raise ConfigInvalid(
                f"parallelism.stream is {stages}, but {model.name} has {model.layers} layers to share out; use at most "
                "that many stages"
            )
        self.deployment.kv_tokens()
        for system in baselines:
            baseline(system, self.deployment, Workload([]))
        workload = replace(self.workload, rate=1.0) if self.loads else self.workload
        deployment = self.deployment
        workload.make(deployment.targets(), self.duration_seconds, self.seeds[0], deployment.max_model_len)


@dataclass(frozen=True, slots=True)
class RunKey:
    """Identity of a run within a study."""

    system: str
    load: float | None
    seed: int
    capacity: float  # speed of the ranks, as a multiple of the profile's

    def __str__(self) -> str:
        load = "" if self.load is None else f", load {self.load:g}"
        band = "" if self.capacity == 1 else f", capacity {self.capacity:g}"
        return f"{self.system}{load}, seed {self.seed}{band}"


@dataclass(frozen=True, slots=True)
class StudyResult:
    """The results of a study; `runs` holds only those that completed or were interrupted midway."""

    spec: StudySpec
    capacity_rate: float | None  # requests a second; None if not measured
    runs: tuple[tuple[RunKey, Summary], ...]
    planned: int
    interrupted: bool
    failure: str | None = None  # error of the run that ended the study early

    def as_json(self) -> Summary:
        """Return everything as plain data."""
        deployment = self.spec.deployment
        speculation: Summary = {}
        if deployment.guesses:
            speculation = {
                "acceptance": deployment.acceptance,
                "draft": None if deployment.draft is None else deployment.draft.name,
            }
        return {
            "model": deployment.model.name,
            "hardware": asdict(deployment.hardware),
            "topology": str(deployment.topology),
            "replicas": deployment.replicas,
            "kv_tokens_per_lane": deployment.kv_tokens(),
            "scheduling": deployment.scheduling.model_dump(mode="json", by_alias=True),
            "service_classes": [
                entry.model_dump(mode="json", by_alias=True) for entry in deployment.service_classes
            ],
            "workload": {
                key: str(value) if isinstance(value, Path) else value
                for key, value in asdict(self.spec.workload).items()
            },
            "disturbance": asdict(self.spec.disturbance),
            **speculation,
            "band": self.spec.band,
            "duration_seconds": self.spec.duration_seconds,
            "capacity_requests_per_second": self.capacity_rate,
            "planned_runs": self.planned,
            "interrupted": self.interrupted,
            "failure": self.failure,
            "runs": [asdict(key) | {"result": summary} for key, summary in self.runs],
        }


def keys(spec: StudySpec) -> list[RunKey]:
    """Return all runs of a study, seed by seed, so that an interrupted study still compares systems."""
    capacities = (1.0,) if spec.band == 0 else (1.0, 1 - spec.band, 1 + spec.band)
    return [
        RunKey(system, load, seed, capacity)
        for seed in spec.seeds
        for capacity in capacities
        for load in (spec.loads or (None,))
        for system in spec.systems
    ]


def simulate_one(
    spec: StudySpec, key: RunKey, capacity_rate: float | None, progress: Progress | None = None
) -> Summary:
    """Simulate a single run and summarise it."""
    deployment = spec.deployment
    workload_spec = spec.workload
    if key.load is not None:
        assert capacity_rate is not None
        workload_spec = replace(workload_spec, rate=key.load * capacity_rate)
    workload = workload_spec.make(
        deployment.targets(), spec.duration_seconds, key.seed, deployment.max_model_len
    )
    bias = spec.disturbance.bias / key.capacity
    if key.system in POLICIES:
        disturbance = replace(spec.disturbance, bias=bias)
        simulation = deployment.with_policy(key.system).simulation(
            workload, seed=key.seed, disturbance=disturbance
        )
    else:
        simulation = baseline(key.system, deployment, workload, capacity=1 / bias)
    summary = summarise(simulation.run(spec.duration_seconds, progress))
    return summary | {"rate": workload_spec.rate}


def measured_capacity(deployment: Deployment, workload: WorkloadSpec) -> float:
    """Measure the requests a second of this mix that the deployment completes while it has a backlog.

    The measure is isolated prefill work: each chunk counts as the time that it would take in a lone prefill.
    So the result does not depend on which requests happen to finish inside the window.
    """
    if workload.shape != "mix":
        raise ConfigInvalid(f"a load is measured for a mix, not for {workload.shape}; give a rate instead")
    deployment = deployment.with_policy("fcfs")
    targets = deployment.targets()
    mean_work = workload.mix().mean_work_seconds(targets.prefill_seconds)
    rate = _CAPACITY_OVERLOAD * deployment.replicas / mean_work
    backlog = replace(workload, rate=rate).make(targets, _CAPACITY_SECONDS, _CAPACITY_SEED)
    log = deployment.simulation(backlog).run(_CAPACITY_SECONDS)
    begun = np.frombuffer(log.chunks.at) >= _CAPACITY_WARM_UP_SECONDS
    contexts = np.frombuffer(log.chunks.context, np.int64)[begun]
    ends = contexts + np.frombuffer(log.chunks.tokens, np.int64)[begun]
    prefill_seconds = targets.prefill_seconds
    work = float(np.sum(prefill_seconds(ends) - prefill_seconds(contexts)))
    return work / (_CAPACITY_SECONDS - _CAPACITY_WARM_UP_SECONDS) / mean_work


Observer = Callable[[Sequence[RunKey], Sequence[float]], None]
"""Callback that gets all runs and the fraction of each that is done (0 to 1), several times a second."""


def run_study(
    spec: StudySpec, capacity_rate: float | None = None, *, jobs: int, observe: Observer | None = None
) -> StudyResult:
    """Run a study on `jobs` processes. Ctrl-C or a failed run ends it early; results so far are kept.

    `capacity_rate` is the deployment's `measured_capacity`; studies without loads need none.

    Runs that are stopped midway are kept up to that point and marked `interrupted`.

    Raises:
        ConfigInvalid: a wrong setting failed a run before any run had a result.
        PartFailed: a run failed, or its process was killed, before any run had a result.
    """
    planned = keys(spec)
    assert capacity_rate is not None or not spec.loads, "a load is a share of a measured capacity"
    done: dict[int, Summary] = {}
    interrupted = False
    failure: MedhaError | None = None
    context = multiprocessing.get_context("spawn")  # a fork would inherit the progress bar's thread
    fractions = context.Array("d", len(planned))
    stop = context.Event()
    with ProcessPoolExecutor(jobs, context, _start_worker, (fractions, stop)) as pool:
        waiting = {
            pool.submit(_run_in_worker, spec, key, capacity_rate, index): index
            for index, key in enumerate(planned)
        }
        try:
            for future in _as_they_end(waiting, lambda: observe and observe(planned, fractions[:])):
                done[waiting[future]] = _result(future, planned[waiting[future]])
        except KeyboardInterrupt:
            interrupted = True
        except MedhaError as error:
            failure = error
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        if interrupted or failure is not None:
            stop.set()
            for future in waiting:
                future.cancel()
            started = [future for future in waiting if not future.cancelled()]
            try:
                wait(started)
            except KeyboardInterrupt:  # a second Ctrl-C drops the runs that are still under way
                started = [future for future in started if future.done()]
            for future in started:
                try:
                    done[waiting[future]] = _result(future, planned[waiting[future]])
                except MedhaError as error:
                    failure = failure or error
    runs = tuple((planned[index], done[index]) for index in sorted(done))
    runs = tuple((key, summary) for key, summary in runs if summary["window_seconds"] > 0)
    if failure is not None and not runs:
        raise failure
    return StudyResult(
        spec, capacity_rate, runs, len(planned), interrupted, None if failure is None else str(failure)
    )


def _as_they_end(
    futures: dict[Future[Summary], int], between: Callable[[], object]
) -> Iterator[Future[Summary]]:
    waiting = set(futures)
    while waiting:
        ended, waiting = wait(waiting, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED)
        between()
        yield from ended


def _result(future: Future[Summary], key: RunKey) -> Summary:
    try:
        return future.result()
    except MedhaError:
        raise
    except Exception as error:
        raise PartFailed(f"run {key}: {type(error).__name__}: {error}") from error


# --- in a worker process -----------------------------------------------------------------------------


@dataclass(slots=True)
class _Worker:
    """State that a worker process shares with its parent."""

    fractions: SynchronizedArray[float]
    stop: Event


_worker: _Worker | None = None  # global, because a pool passes its tasks only their arguments


def _start_worker(fractions: SynchronizedArray[float], stop: Event) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    _worker = _Worker(fractions, stop)


def _run_in_worker(spec: StudySpec, key: RunKey, capacity_rate: float | None, index: int) -> Summary:
    worker = _worker
    assert worker is not None

    def progress(now: float) -> bool:
        worker.fractions[index] = now / spec.duration_seconds
        return worker.stop.is_set()

    started = time.process_time()
    summary = simulate_one(spec, key, capacity_rate, progress)
    worker.fractions[index] = 1.0
    return summary | {"core_seconds": time.process_time() - started}


def read_study(text: dict[str, Any]) -> list[tuple[RunKey, Summary]]:
    """Return the runs of a JSON document written by `StudyResult.as_json`."""
    return [
        (RunKey(run["system"], run["load"], run["seed"], run["capacity"]), run["result"])
        for run in text["runs"]
    ]
