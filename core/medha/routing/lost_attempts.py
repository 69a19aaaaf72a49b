"""Attempts that were lost with their replicas: which sequence may be the cause, and when none is tried again.

`RoutingLimits` states the rule; docs/failures.md explains it.
"""

from __future__ import annotations

from medha.routing.known_replicas import KnownReplica
from medha.routing.open_sequences import OpenSequence
from medha.routing.routing_limits import RoutingLimits


def count_loss(sequence: OpenSequence, limits: RoutingLimits, now: float, *, computed: bool) -> None:
    """Count the loss of a replica against a sequence, unless it has sampled a token there.

    `computed`: the interrupted step contained it. Else a whole replica was lost that had it.
    """
    if sequence.has_progress:
        return
    if now - sequence.sent_at >= limits.trial_seconds:
        sequence.losses, sequence.was_aboard = 0, False
    if computed or sequence.was_aboard or sequence.losses:
        sequence.losses += 1
    sequence.was_aboard = True


def count_attempt(sequence: OpenSequence, limits: RoutingLimits, now: float) -> None:
    """Count an attempt that ended with its replica."""
    lasted = sequence.has_progress and now - sequence.sent_at >= limits.trial_seconds
    sequence.lost_attempts = 1 if lasted else sequence.lost_attempts + 1


def is_suspect(sequence: OpenSequence, limits: RoutingLimits) -> bool:
    """Return whether a sequence may be the cause of the losses of its replicas."""
    return sequence.losses > 0 or 2 * sequence.lost_attempts >= limits.max_attempts


def is_on_trial(sequence: OpenSequence, limits: RoutingLimits, now: float) -> bool:
    """Return whether an open sequence is a suspect that may still kill its replica soon after being sent."""
    return is_suspect(sequence, limits) and now - sequence.sent_at < limits.trial_seconds


def without_trial(replicas: list[KnownReplica], limits: RoutingLimits, now: float) -> list[KnownReplica]:
    """Return the replicas that have no suspect on trial; with two there, a loss could not be attributed."""
    return [
        replica
        for replica in replicas
        if not any(is_on_trial(one, limits, now) for one in replica.open.values())
    ]


def conviction(sequence: OpenSequence, limits: RoutingLimits) -> str:
    """Return the error message of a sequence that is assumed to be the cause."""
    return (
        f"{sequence.lost_attempts} times in a row, a replica was lost that had request {sequence.new.id}, and lately "
        f"within {limits.trial_seconds:g} s of being sent it; the request is assumed to be the cause, and is not "
        "tried again"
    )
