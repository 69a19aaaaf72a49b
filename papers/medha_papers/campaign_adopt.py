"""Adoption of results of earlier code, if a sample of them is the same when simulated with the present code.

Results are kept by the digest of the sources. A change that must not change any decision, such as an
optimization, changes the digest. Simulating all runs again would take hours and show no more than a sample
does: the runs of a campaign share all their code, so that a difference anywhere changes the last digits of
many of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest
from random import Random

from medha_papers.campaign_pool import Capacities, run_all
from medha_papers.campaign_run import Outcome, Run

NOT_COMPARED = ("core_seconds",)
"""Fields of an outcome that are not compared: the time that the machine took."""

Kind = tuple[str, str, bool, bool, bool]


class Differs(Exception):
    """A run gives other figures with the present code."""


def sample(runs: Sequence[Run], count: int, seed: str) -> list[Run]:
    """Return a random sample of `count` runs, with `seed`.

    It has one of each `kind` before a second of any.
    """
    random = Random(seed)  # noqa: S311 - a sample that anybody can draw again
    kinds: dict[Kind, list[Run]] = {}
    for run in random.sample(runs, len(runs)):
        kinds.setdefault(kind(run), []).append(run)
    turns = chain.from_iterable(zip_longest(*kinds.values()))
    return [run for run in turns if run is not None][:count]


def kind(run: Run) -> Kind:
    """Return the kind of a run.

    It is the deployment, the system, and whether the run is given by its load, has long requests, and has the
    capacity that the controller assumes.
    """
    return run.deployment, run.system, run.load is not None, run.long_share > 0, run.capacity == 1


def check_again(
    chosen: Sequence[Run], known: Mapping[str, Outcome], known_capacities: Capacities, *, jobs: int
) -> None:
    """Simulate `chosen` with the present code, measure the capacities again, and compare the results.

    Raises:
        Differs: a run or a capacity differs from the known one; raised at the first difference.
    """
    capacities: Capacities = {}

    def compare(run: Run, outcome: Outcome) -> None:
        if run.load is not None:
            share = f"{run.long_share:g}"
            _compare(f"capacity, long {share}", capacities[share], known_capacities[share])
        _compare(run.key, outcome, known[run.key])
        print(f"the same: {run.key}", flush=True)

    run_all(chosen, {}, capacities, jobs=jobs, deadline_seconds=float("inf"), keep=compare)


def _compare(name: str, now: Mapping[str, object], before: Mapping[str, object]) -> None:
    now = json.loads(json.dumps(now))  # as `before` was written and read
    for field in sorted((now.keys() | before.keys()) - set(NOT_COMPARED)):
        if now.get(field) != before.get(field):
            raise Differs(f"{name}: {field} was {before.get(field)}, and is {now.get(field)} now")
