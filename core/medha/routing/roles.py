"""Roles of replicas: where a sequence's prompt is computed, and where its output, if that is another replica.

A replica with the role `prefill` computes prompts, and one with `decode` computes outputs; one with `both` does either.
A prompt goes to a `prefill` replica if another replica can read its KV in less time than it can compute it. From the first
token on, the sequence *moves*: the router cancels it there and submits it, with what it has emitted, to a `decode`
replica, naming the first one as the peer that has the KV (`medha.scheduler.peer_kv`). Other prompts are computed where they
decode, since a move would compute them twice.

Roles are preferences: if no replica of a role can serve a sequence, the others serve it. If no replica can read the KV of those
for prompts, roles say nothing: each replica decodes what it has computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from medha.routing.known_replicas import KnownReplica
from medha.routing.open_sequences import OpenSequence

BOTH, PREFILL, DECODE = "both", "prefill", "decode"

MOST_READ_SHARE = 0.8
"""Largest share of the time of computing a prompt for which reading its KV is worth a move: both times are predictions, and the
replica that would read decides again."""


def in_phase(sequence: OpenSequence, able: Sequence[KnownReplica]) -> list[KnownReplica]:
    """Return those of the replicas that can serve a sequence whose role is what it needs next; all, if none has that role."""
    if all(one.card.role == BOTH for one in able) or not _can_hand_over(able):
        return list(able)
    role = PREFILL if needs_prefill(sequence, able) else DECODE
    return [one for one in able if one.card.role in (BOTH, role)] or list(able)


def _can_hand_over(able: Sequence[KnownReplica]) -> bool:
    """Return whether replicas for prompts have others that read their KV, if there are both kinds.

    In a rollout there may be none, because replicas of two versions exchange no KV.
    """
    computing = [one for one in able if one.card.role == PREFILL]
    others = [one for one in able if one.card.role != PREFILL]
    return not (computing and others) or any(one.reads_from(source) for one in others for source in computing)


def needs_prefill(sequence: OpenSequence, able: Sequence[KnownReplica]) -> bool:
    """Return whether to compute a sequence's KV apart from its output is predicted to be better.

    It is not if too little of its prompt is missing where it would decode; once the prompt is computed, replicas
    that would be asked for its KV count as having it.
    """
    new = sequence.new
    # No KV could be found, or none may be used.
    if not new.prefix or new.sampling.prompt_logprobs is not None:
        return False
    decoding = [one for one in able if one.card.role != PREFILL and one.card.hands_kv_over]
    if not decoding:
        return True
    tokens, knowing = sequence.tokens, able if sequence.emitted else decoding
    known = max(one.prefixes.known_tokens(new.prefix) for one in knowing)
    if known == new.prefix[-1][0]:  # marks end with a whole block, and so does what is cached
        known = new.prompt_length
    known = max(known, sequence.kv_tokens)
    return any(read_pays(one, tokens, known) for one in decoding)


def read_pays(replica: KnownReplica, tokens: int, cached_tokens: int) -> bool:
    """Return whether a replica reads the KV of a prompt after `cached_tokens` in clearly less time than it computes it."""
    card = replica.card
    read_seconds = card.read_seconds + card.read_seconds_per_token * (tokens - cached_tokens)
    return read_seconds < MOST_READ_SHARE * replica.own_seconds(tokens, cached_tokens)


def lone_role(serving: Iterable[KnownReplica]) -> str:
    """Return the role that serves a model alone although it should not, `prefill` or `decode`; empty if none does."""
    roles = {one.card.role for one in serving}
    return roles.pop() if len(roles) == 1 and BOTH not in roles else ""
