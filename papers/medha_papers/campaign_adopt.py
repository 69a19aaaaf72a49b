"""Results of earlier code for the present one: taken over where a sample of them, simulated again, is the same.

A change that must not change any decision, to speed for example, gives the sources another digest, and results are kept
by that. To simulate everything again would only show, at the price of hours, what a sample shows: the runs of a
campaign share all their code, so that a difference anywhere moves the last digits of many of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest
from random import Random

from medha_papers.campaign_pool import Capacities, run_all
from medha_papers.campaign_run import Outcome, Run

NOT_COMPARED = ("core_seconds",)
"""Of an outcome: how long the machine took for it."""

Kind = tuple[str, str, bool, bool, bool]


class Differs(Exception):
    """A run gives other figures with the present code."""


def sample(runs: Sequence[Run], count: int, seed: str) -> list[Run]:
    """`count` of `runs`, drawn with `seed`: one of each `kind` before a second of any."""
    random = Random(seed)  # noqa: S311 - a sample that anybody can draw again
    kinds: dict[Kind, list[Run]] = {}
    for run in random.sample(runs, len(runs)):
        kinds.setdefault(kind(run), []).append(run)
    turns = chain.from_iterable(zip_longest(*kinds.values()))
    return [run for run in turns if run is not None][:count]


def kind(run: Run) -> Kind:
    """Deployment and system; whether it is given by its load, has long requests, and capacities as believed."""
    return run.deployment, run.system, run.load is not None, run.long_share > 0, run.capacity == 1


def check_again(
    chosen: Sequence[Run], known: Mapping[str, Outcome], known_capacities: Capacities, *, jobs: int
) -> None:
    """Simulate `chosen` with the present code, from the capacities on.

    Raises:
        Differs: at the first run, or capacity, that is not what is `known`.
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
