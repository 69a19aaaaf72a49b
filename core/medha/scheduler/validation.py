"""What a submitted request is entitled to, and why one is not taken. Pure functions of settings and message."""

from __future__ import annotations

from math import isfinite

from medha.scheduler.config import ReplicaConfig
from medha.wire.messages import RefusalReason, Submit

Refusal = tuple[RefusalReason, str]
"""The reason, and a text that names the value and its bound."""


def class_name(config: ReplicaConfig, submit: Submit) -> str:
    """The service class of a request; `default` is the replica's first."""
    return config.default_class if submit.service_class == "default" else submit.service_class


def limit_tokens(config: ReplicaConfig, submit: Submit) -> int:
    """Prompt plus output may not pass it."""
    asked = submit.sampling.max_tokens
    limit = config.max_model_len
    return limit if asked is None else min(limit, submit.prompt_length + asked)


def reservation_tokens(config: ReplicaConfig, submit: Submit) -> int:
    """Tokens of KV that a request is promised (DESIGN §5): its whole output, or its class's usual output.

    Nothing is reserved for the last token drawn: its KV is never computed.
    """
    limit = limit_tokens(config, submit)
    if submit.sampling.max_tokens is None:
        usual = config.service_classes[class_name(config, submit)].default_output_tokens
        limit = min(limit, submit.tokens + usual, max(config.pool_tokens, submit.tokens + 1))
    return max(limit - 1, submit.tokens)


def may_spread(config: ReplicaConfig, submit: Submit) -> bool:
    """Whether its KV is cut over several lanes: the prompt passes a lane's share, or all of it passes a lane."""
    if config.topology.kv == 1:
        return False
    share = max(config.tokens_per_lane, -(-submit.tokens // config.topology.kv))
    return submit.tokens > share or reservation_tokens(config, submit) > config.kv_tokens


def malformed(submit: Submit, known_tokens: int | None) -> str | None:
    """What contradicts itself in a request; `known_tokens` are those of its prompt, if that is here."""
    if not 1 <= submit.prompt_length <= submit.tokens:
        return f"prompt_length {submit.prompt_length} of {submit.tokens} tokens"
    seconds = (submit.age_seconds, submit.deadline_after_seconds or 0, submit.tpot_target_seconds or 0)
    if not all(map(isfinite, seconds)):
        return f"age, deadline and TPOT target must be finite: {seconds} seconds"
    logprobs = submit.sampling.logprobs
    if logprobs is not None and logprobs < 0:
        return f"sampling.logprobs is {logprobs}; it is null, or how many of the most probable tokens are told: 0 or more"
    if known_tokens not in (None, submit.tokens):
        return f"prompt {submit.prompt} has {known_tokens} tokens, not {submit.tokens}"
    return None


def unservable(config: ReplicaConfig, submit: Submit) -> Refusal | None:
    """Why this replica, as it is set up, can never serve a request."""
    if class_name(config, submit) not in config.service_classes:
        return "unknown_class", f"service class {submit.service_class!r} is not one of the replica's"
    if submit.prompt_length >= config.max_model_len:
        return "too_long", f"{submit.tokens} tokens; maxModelLen is {config.max_model_len}"
    if reservation_tokens(config, submit) > config.pool_tokens:
        return "too_long", f"{submit.tokens} tokens; the KV pool holds {config.pool_tokens}"
    return None
