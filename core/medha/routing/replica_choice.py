"""Choice of the replica for a sequence: where its first token is expected soonest, if possible where it finds KV.

The expected time is the prefill work ahead of the sequence on the lane that would take it, as announced plus what
was forwarded since, and its own prefill without the prefix that the replica is thought to have cached, or would
read from another one. So a sequence follows its cached prefix as long as the replicas' loads differ by less than
the seconds that the hit saves, or that reading takes. A long prefix saves minutes; meanwhile every request with a
popular prefix would queue at that replica. So a replica attracts by its cache only while its load is at most
`LOAD_FACTOR` times the mean, plus `LOAD_SECONDS`.

If another replica is thought to have more of a prompt, `Submit` names it to the chosen one, which may read the KV there.

Where KV is short, replicas are preferred in which the sequence's owner holds at most an equal share of it.

If replicas have roles, only those are considered whose role suits what the sequence needs next (`medha.routing.roles`).
"""

from __future__ import annotations

from collections.abc import Sequence

from medha.routing.known_replicas import KnownReplica
from medha.routing.open_sequences import OpenSequence
from medha.routing.roles import PREFILL, in_phase
from medha.slo import class_terms
from medha.wire.messages import Announce

LOAD_FACTOR = 2.0
LOAD_SECONDS = 1.0
"""Load below which a replica attracts by its cache whatever the mean is, seconds of prefill per lane."""


def able_replicas(sequence: OpenSequence, serving: Sequence[KnownReplica]) -> list[KnownReplica]:
    """Return the replicas that follow a sequence's grammar and can hold it: with all of its output, if any can.

    A sequence with output prefers replicas with the same KV data type, because another rounding may change its text.
    """
    tokens = sequence.tokens
    whole = sequence.whole_tokens
    following = [replica for replica in serving if replica.follows(sequence.request)]
    able = [replica for replica in following if replica.card.longest_request_tokens >= whole]
    # The others would cut the output short.
    able = able or [replica for replica in following if replica.card.longest_request_tokens > tokens]
    alike = [replica for replica in able if sequence.emitted and replica.card.kv_dtype == sequence.kv_dtype]
    return in_phase(sequence, alike or able)


def move_targets(
    sequence: OpenSequence, source: KnownReplica, serving: Sequence[KnownReplica]
) -> list[KnownReplica]:
    """Return the replicas to which a sequence may move that has just got a token from `source`; none if it stays.

    It goes where its KV can be read, and where it has to wait neither for a place nor for KV. Until there is such a replica,
    it decodes where it is.
    """
    if source.card.role != PREFILL:
        return []
    able = able_replicas(sequence, serving)
    if source in able:
        return []
    return with_room_to_read(sequence, source, able)


def with_room_to_read(
    sequence: OpenSequence, source: KnownReplica, able: Sequence[KnownReplica]
) -> list[KnownReplica]:
    """Return those of some replicas that can read a sequence's KV from `source`, and have a place and KV for it."""
    return [
        one
        for one in able
        if one.reads_from(source)
        and one.has_place
        and one.berth(sequence.tokens, reservation_tokens(sequence, one.card)).has_kv
    ]


def ignored_grammar(model: str) -> str:
    """Return the text of the error for a grammar that no serving replica of the model supports."""
    return (
        f"the ready replicas of the model `{model}` are of an earlier version of Medha, which ignores grammars: upgrade "
        "them, or leave out what asks for a grammar, such as a `response_format` or functions that are `strict` or required"
    )


def choose(
    sequence: OpenSequence,
    replicas: Sequence[KnownReplica],
    serving: Sequence[KnownReplica],
) -> KnownReplica | None:
    """Return the replica of `replicas` for a sequence, None if there is none.

    Args:
        serving: all replicas that serve the model, for the mean load.
    """
    if len(replicas) < 2:
        return replicas[0] if replicas else None
    tokens, prefix = sequence.tokens, sequence.new.prefix
    most_seconds = _most_seconds(serving)
    known = ((one, one.prefixes.known_tokens(prefix)) for one in serving if one.card.hands_kv_over)
    holders = [(one, there_tokens) for one, there_tokens in known if there_tokens]

    def preference(replica: KnownReplica) -> tuple[bool, bool, float, int, int, int, str]:
        card = replica.card
        reserved_tokens = reservation_tokens(sequence, card)
        berth = replica.berth(tokens, reserved_tokens)
        cached = replica.prefixes.known_tokens(prefix) if replica.seconds_ahead <= most_seconds else 0
        return (
            (replica.lacks_kv(reserved_tokens) or not berth.has_kv)
            and replica.exceeds_share(sequence.owner, reserved_tokens),
            not berth.has_kv,
            berth.seconds_ahead + _own_seconds(tokens, replica, cached, holders),
            -cached,
            replica.forwarded_tokens,  # tells idle replicas apart between announcements
            card.running + card.waiting,
            card.replica,
        )

    return min(replicas, key=preference)


def _own_seconds(
    tokens: int, replica: KnownReplica, cached_tokens: int, holders: Sequence[tuple[KnownReplica, int]]
) -> float:
    """Return the seconds of prefill of a sequence in a replica, which may read what a holder is thought to have of it.

    Args:
        holders: replicas from which others may read, each with the tokens that it is thought to have.
    """
    seconds = replica.own_seconds(tokens, cached_tokens)
    there_tokens = max((found for one, found in holders if replica.reads_from(one)), default=0)
    if there_tokens <= cached_tokens:
        return seconds
    card = replica.card
    read_seconds = card.read_seconds + card.read_seconds_per_token * (there_tokens - cached_tokens)
    return min(seconds, read_seconds + replica.own_seconds(tokens, there_tokens))


def peer_with_kv(
    sequence: OpenSequence, chosen: KnownReplica, others: Sequence[KnownReplica], now: float
) -> tuple[str, int]:
    """Return the replica that is thought to have most of a sequence's prompt, and how many tokens; empty and 0 if none has.

    It must be thought to have more than the chosen one, and both must hand KV over. If it drains, it must be predicted to
    stay until all of that KV is read.
    """
    prefix, most, name = sequence.new.prefix, chosen.prefixes.known_tokens(sequence.new.prefix), ""
    here_tokens, card = most, chosen.card
    for replica in others:
        if not (chosen.reads_from(replica) and replica.gives_kv(now)):
            continue
        tokens = replica.prefixes.known_tokens(prefix)
        read_seconds = card.read_seconds + card.read_seconds_per_token * (tokens - here_tokens)
        if tokens > most and (replica.serves or read_seconds < replica.drain_seconds_left(now)):
            most, name = tokens, replica.card.replica
    return (name, most) if name else ("", 0)


def resumption_seconds(sequence: OpenSequence, replica: KnownReplica) -> float:
    """Return the predicted time in which a replica gets the KV of a sequence that moves to it: reads it, or computes it."""
    card, cached = replica.card, replica.prefixes.known_tokens(sequence.new.prefix)
    read_seconds = card.read_seconds + card.read_seconds_per_token * (sequence.tokens - cached)
    return min(read_seconds, replica.own_seconds(sequence.tokens, cached))


def _most_seconds(serving: Sequence[KnownReplica]) -> float:
    """Return the load up to which a cached prefix attracts."""
    mean = sum(replica.seconds_ahead for replica in serving) / max(1, len(serving))
    return LOAD_FACTOR * mean + LOAD_SECONDS


def reservation_tokens(sequence: OpenSequence, card: Announce) -> int:
    """Return the KV tokens that a sequence will reserve in a replica for its prompt and the output that it expects.

    A replica that expects none reserves `max_tokens`, or else the default of the service class.
    """
    whole = max(sequence.new.prompt_length + output_tokens(sequence, card), sequence.tokens + 1)
    return min(whole, max(card.longest_request_tokens, sequence.tokens + 1))


def output_tokens(sequence: OpenSequence, card: Announce) -> int:
    """Return the output tokens that a replica expects of a sequence, from its beginning."""
    terms = class_terms(card.service_classes, sequence.request.service_class)
    most, expected = sequence.new.sampling.max_tokens, terms.expected_output_tokens
    output = terms.default_output_tokens if most is None else most
    if expected:
        output = expected if most is None else min(most, expected)
    return output
