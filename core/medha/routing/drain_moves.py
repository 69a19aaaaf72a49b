"""Decides which sequences of a replica that drains move to another one, which can still read their KV.

A replica that drains has a limit, at which it returns what has not ended. Then another replica computes the KV of each
such sequence again. So a sequence that is predicted to miss the limit moves before it, if its KV can be read in less time
than it can be computed. It moves at once: it computes the same tokens elsewhere, and an early move leaves more time to
read. A sequence that is predicted to end in time stays. The prediction is made again and again, and the sequence stays
only as long as its KV could still be read if the prediction turned out wrong.

A sequence is predicted to get the output that the replica expects of it. Once it has had that, it is predicted to get
as much again as it has had.
"""

from __future__ import annotations

from collections.abc import Sequence

from medha.routing.known_replicas import KnownReplica
from medha.routing.open_sequences import OpenSequence
from medha.routing.replica_choice import (
    able_replicas,
    choose,
    output_tokens,
    reservation_tokens,
    with_room_to_read,
)
from medha.slo import class_terms


def is_better_moved(
    stay_seconds: float, limit_seconds: float, read_seconds: float, compute_seconds: float
) -> bool:
    """Return whether a sequence is better moved from a replica that drains than left there.

    Args:
        stay_seconds: predicted time until its end there.
        limit_seconds: time until the replica returns what has not ended.
        read_seconds: predicted time until another replica has read its KV.
        compute_seconds: predicted time until another replica has computed its KV.
    """
    if read_seconds >= min(compute_seconds, limit_seconds):
        return False
    return stay_seconds + read_seconds > limit_seconds


def remaining_output_tokens(sequence: OpenSequence, replica: KnownReplica) -> int:
    """Return how many output tokens a sequence is predicted to have left at its replica."""
    had, most = len(sequence.emitted), sequence.new.sampling.max_tokens
    expected = output_tokens(sequence, replica.card)
    left = expected - had if had < expected else had
    return left if most is None else min(left, most - had)


def stay_seconds(sequence: OpenSequence, replica: KnownReplica, now: float) -> float:
    """Return the predicted time until a sequence ends at its replica: its prefill there, if it has no token, and its output."""
    token_seconds = sequence.token_seconds(now)
    if token_seconds is None:
        terms = class_terms(replica.card.service_classes, sequence.request.service_class)
        token_seconds = sequence.request.tpot_target_seconds or terms.tpot_target_seconds
    before = 0.0 if sequence.has_progress else replica.seconds_ahead
    return before + remaining_output_tokens(sequence, replica) * token_seconds


def replica_to_move_to(
    sequence: OpenSequence, replica: KnownReplica, serving: Sequence[KnownReplica]
) -> KnownReplica | None:
    """Return the replica to which a sequence of `replica` would move, which has KV for it and a place. None: there is none."""
    if sequence.new.sampling.prompt_logprobs is not None and not sequence.emitted:
        return None  # its prompt must be computed
    return choose(sequence, with_room_to_read(sequence, replica, able_replicas(sequence, serving)), serving)


def may_take_over(replica: KnownReplica, serving: Sequence[KnownReplica]) -> bool:
    """Return whether one of `serving` may have room for a sequence of a replica that drains."""
    return any(one.reads_from(replica) and one.has_place for one in serving)


def leaves_for(
    sequence: OpenSequence,
    replica: KnownReplica,
    serving: Sequence[KnownReplica],
    reading_tokens: int,
    now: float,
) -> KnownReplica | None:
    """Return the one of `serving` for which a sequence leaves a replica that drains now; None if it stays.

    `reading_tokens`: tokens of others whose KV is read from the replica first.
    """
    limit = replica.card.drain_seconds
    target = None if limit is None else replica_to_move_to(sequence, replica, serving)
    if limit is None or target is None:
        return None
    cached = target.prefixes.known_tokens(sequence.new.prefix)
    reserved_tokens = reservation_tokens(sequence, target.card)
    ahead_seconds = target.berth(sequence.tokens, reserved_tokens).seconds_ahead
    read_tokens = reading_tokens + sequence.tokens - cached
    read_seconds = target.card.read_seconds + read_tokens * target.card.read_seconds_per_token
    is_better = is_better_moved(
        stay_seconds(sequence, replica, now),
        limit - (now - replica.announced_at),
        ahead_seconds + read_seconds,
        ahead_seconds + target.own_seconds(sequence.tokens, cached),
    )
    return target if is_better else None
