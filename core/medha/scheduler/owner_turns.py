"""Turns of owners, for when not all can be on time: owners that attained clearly less go first, whatever the policy.

An owner stands for an API key, or without keys for a client request. If the rows cannot all be on time in any
order, those up to the last deadline that would be missed are *contested*. Each owner's turns
(`medha.scheduler.attained_service`) go to its contested rows, smallest turn first, in the order of the policy. So an owner with
many rows makes its own rows late before those of others, and an owner's own rows keep the order of the policy.

Owners are in *classes* by their largest turns. The largest of all, and those with at least a quarter of its service,
are one class; the largest of the others begins the next class, and so on. A row belongs to the lowest class whose
largest turn is at least its own. So the rows of an owner are in its class, or in a lower one if their turns are small.

The contested rows exchange the places that the policy gave them: they are ordered by class, and by the policy within a class.
So the policy decides between owners of about the same load. With strict turns, rows that can no longer be on time would go
before rows of other owners that can. If all can be on time, or if there is one owner, the order is that of the policy.

A router applies this to the sequences that wait in it, and a replica to its prefills.
"""

from __future__ import annotations

from math import inf

import numpy as np

from medha.scheduler.attained_service import tokens_of
from medha.scheduler.policy import Bools, Floats, Ints

LITTLE_TOKENS = 128
"""Service that is added to every owner's before it is compared, so that small differences do not count."""
CLASS_RATIO = 4
"""Largest ratio, within a class, between the services that the largest turns of its owners stand for."""
_ROUNDING_SECONDS = 1e-6


def contested_until(
    deadline: Floats, remaining_seconds: Floats, lanes: int, grace_seconds: float, now: float
) -> float:
    """Return the last deadline that would be missed if the rows went by deadline; -inf if all can be met.

    `remaining_seconds` is the work of each row, and `grace_seconds` the lateness that steps cause.
    """
    allowed = grace_seconds + _ROUNDING_SECONDS - now
    if not len(deadline) or float(remaining_seconds.sum()) / lanes <= float(deadline.min()) + allowed:
        return -inf
    by_deadline = np.argsort(deadline, kind="stable")
    ends = remaining_seconds[by_deadline].cumsum() / lanes
    missed = (ends > deadline[by_deadline] + allowed).nonzero()[0]
    return float(deadline[by_deadline[missed[-1]]]) if len(missed) else -inf


def take_turns(
    order: Ints, is_contested: Bools, owner: Ints, turn: Floats, now: float, begun: Ints | None = None
) -> None:
    """Let owners take turns in the places of contested rows; each owner's rows keep their order.

    Args:
        order: all rows, in the order of the policy; changed in place.
        is_contested: flags of the rows that take turns.
        owner: the number of each row's owner.
        turn: the turn of each row; changed in place where rows of an owner exchange their turns.
        now: the time at which the service that turns stand for is compared.
        begun: tokens of each row that are served already. Those of an owner, except in its largest row, count as service
            before all of its rows: a policy that serves many rows a little must not hide what they got.
    """
    places = is_contested[order].nonzero()[0]
    rows = order[places]
    if not len(rows):
        return
    owners, turns = owner[rows], turn[rows]
    by_policy, by_turn = np.argsort(owners, kind="stable"), np.lexsort((turns, owners))
    turn[rows[by_policy]] = turns[by_turn]
    service = tokens_of(turn[rows], now) + LITTLE_TOKENS
    names, number = np.unique(owners, return_inverse=True)
    if begun is not None:
        most = np.zeros(len(names), dtype=np.int64)
        np.maximum.at(most, number, begun[rows])
        service += (np.bincount(number, begun[rows]) - most)[number]
    largest = np.zeros(len(names))
    np.maximum.at(largest, number, service)
    order[places] = rows[np.argsort(_classes(largest).searchsorted(service), kind="stable")]


def _classes(largest: Floats) -> Floats:
    """Return the largest service of each class of owners, ascending; `largest` is that of each owner's turns."""
    ascending, found = np.sort(largest), []
    left = len(ascending)
    while left:
        found.append(ascending[left - 1])
        left = int(ascending.searchsorted(found[-1] / CLASS_RATIO))
    return np.array(found[::-1])
