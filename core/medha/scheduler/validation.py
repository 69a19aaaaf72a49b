"""Limits of a submitted request, and the reasons to refuse it. Pure functions of settings and message."""

from __future__ import annotations

from math import isfinite

from medha.scheduler.replica_config import ReplicaConfig
from medha.wire.messages import RefusalReason, Submit

Refusal = tuple[RefusalReason, str]
"""The reason, and a text that names the value and its bound."""


def class_name(config: ReplicaConfig, submit: Submit) -> str:
    """Return the service class of a request; `default` is the replica's first."""
    return config.default_class if submit.service_class == "default" else submit.service_class


def limit_tokens(config: ReplicaConfig, submit: Submit) -> int:
    """Return the upper bound of prompt plus output."""
    requested = submit.sampling.max_tokens
    limit = config.max_model_len
    return limit if requested is None else min(limit, submit.prompt_length + requested)


def most_tokens(config: ReplicaConfig, submit: Submit) -> int:
    """Return the most KV tokens that a request can need: prompt and output up to its limit.

    The last sampled token needs none, because its KV is never computed. Without `max_tokens`, the size of the pools is a
    limit, too. If they cannot hold the prompt and an output of its class's default length, the limit is instead the
    longest request that can be streamed.
    """
    most = max(limit_tokens(config, submit) - 1, submit.tokens)
    if submit.sampling.max_tokens is None:
        service_class = config.service_classes.get(class_name(config, submit))
        output_tokens = 0 if service_class is None else service_class.default_output_tokens
        fits = config.streaming is None or submit.tokens + output_tokens <= config.pool_tokens
        most = min(most, max(config.pool_tokens if fits else config.longest_tokens, submit.tokens))
    return most


def streams(config: ReplicaConfig, submit: Submit) -> bool:
    """Return whether a part of a request's KV is streamed from host memory: it may need more than all pools hold."""
    return config.streaming is not None and most_tokens(config, submit) > config.pool_tokens


def reservation_tokens(config: ReplicaConfig, submit: Submit, expected_output_tokens: int) -> int:
    """Return the KV tokens to reserve for prompt and output, of which `expected_output_tokens` are expected.

    A request whose KV is streamed reserves all that it can need.
    """
    if streams(config, submit):
        return most_tokens(config, submit)
    expected = submit.prompt_length + expected_output_tokens - 1
    return max(min(expected, most_tokens(config, submit)), submit.tokens)


def may_spread(config: ReplicaConfig, submit: Submit, reservation_tokens: int) -> bool:
    """Return whether a request's KV may be split over several lanes.

    It may if the prompt exceeds a lane's share, or the whole reservation exceeds a lane.
    """
    if config.topology.kv == 1:
        return False
    share = max(config.tokens_per_lane, -(-submit.tokens // config.topology.kv))
    return submit.tokens > share or reservation_tokens > config.kv_tokens


def malformed(submit: Submit, known_tokens: int | None) -> str | None:
    """Return why a request is malformed, or None.

    `known_tokens` is the token count of its prompt if that is known here.
    """
    if not 1 <= submit.prompt_length <= submit.tokens:
        return f"prompt_length {submit.prompt_length} of {submit.tokens} tokens"
    seconds = (
        submit.age_seconds, submit.deadline_after_seconds or 0, submit.tpot_target_seconds or 0, submit.contested_seconds
    )  # fmt: skip
    if not all(map(isfinite, seconds)):
        return f"age, deadline, TPOT target and contested time must be finite: {seconds} seconds"
    logprobs = submit.sampling.logprobs
    if logprobs is not None and logprobs < 0:
        return (
            f"sampling.logprobs is {logprobs}; it must be null or a number of most probable tokens, 0 or more"
        )
    asked = submit.sampling.prompt_logprobs
    if asked is not None and asked < 0:
        return f"sampling.prompt_logprobs is {asked}; it must be null or a number of most probable tokens, 0 or more"
    if asked is not None and known_tokens is not None and submit.tokens == submit.prompt_length:
        return f"prompt {submit.prompt} belongs to another request; with prompt_logprobs, a request needs its own"
    if known_tokens not in (None, submit.tokens):
        return f"prompt {submit.prompt} has {known_tokens} tokens, not {submit.tokens}"
    return None


def unservable(config: ReplicaConfig, submit: Submit) -> Refusal | None:
    """Return why this replica, as configured, can never serve a request, or None."""
    if class_name(config, submit) not in config.service_classes:
        return "unknown_class", f"service class {submit.service_class!r} is not one of the replica's"
    if submit.prompt_length >= config.max_model_len:
        tokens, limit = submit.prompt_length, config.max_model_len
        return "too_long", f"the prompt has {tokens} tokens, and maxModelLen is {limit}; shorten the prompt"
    needed = most_tokens(config, submit)
    if needed > config.longest_tokens:
        most = ""
        if config.streaming is not None:
            most = f", and {config.longest_tokens} of one request if a part is streamed from host memory"
        text = f"{needed} tokens of prompt and output; the KV pool holds {config.pool_tokens}{most}"
        return "too_long", f"{text}; shorten the prompt or lower max_tokens"
    return None
