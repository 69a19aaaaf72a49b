"""The metric catalogue as data: the metrics of router, replica controller and operator, and their meaning.

Each process makes its `prometheus_client` collectors from its part of this catalogue, so that code, reference
(`docs/metrics.md`, rendered by `reference_page`), dashboards and alerts use the same names. Our own names
start with `medha_` and include their unit; `vllm:` names are aliases for gateways, autoscalers and dashboards
that read those. Counters are written without `_total`, which the exposition format adds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from medha.errors import DROP_REASONS

Kind = Literal["counter", "gauge", "histogram"]
Unit = Literal[
    "seconds",
    "seconds/GiB",
    "tokens",
    "bytes",
    "ratio",
    "requests",
    "steps",
    "sequences",
    "messages",
    "spans",
    "connections",
    "replicas",
    "FLOP",
    "FLOP/s",
    "bytes/s",
    "Hz",
    "W",
    "degrees C",
    "",
]


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric; `buckets` are the upper bounds of a histogram, in `unit`, without infinity."""

    name: str
    kind: Kind
    unit: Unit
    meaning: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        assert (self.kind == "histogram") == bool(self.buckets), f"{self.name}: buckets belong to histograms"
        assert list(self.buckets) == sorted(set(self.buckets)), f"{self.name}: buckets must rise"


PROMPT_LENGTH_BOUNDS = (128, 1024, 8192, 65_536, 524_288, 4_194_304)
"""Upper bounds of the label `prompt_tokens`, tokens: a few series that separate chats, pages, books and libraries."""


SHORT_PROMPT_TOKENS = 1024
"""Longest prompt that counts as short where short requests beside long ones are measured, tokens."""
LONG_PROMPT_TOKENS = 8192
"""Shortest prefill that counts as long there, tokens."""


LOST_SPANS = {
    "queue_full": "they made room for later ones",
    "not_taken": "the collector did not take them",
}
"""Reasons why spans of traces are lost, and their meaning."""
_LOST_SPANS = (
    "Spans of traces that were lost, by reason: "
    + ", ".join(f"`{one}` ({meaning})" for one, meaning in LOST_SPANS.items())
    + "."
)

NOT_TOKENISED = "unknown"
"""Value of the label `prompt_tokens` for a request that was refused before its prompt was tokenised."""
UNKNOWN_MODEL = "(unknown)"
"""Value of the label `model` for all requests that name no known model, or ended before it was read."""


def prompt_length_label(tokens: int) -> str:
    """Return the value of the label `prompt_tokens` for a prompt: `le_128`, `le_1024`, ..., `more`."""
    for bound in PROMPT_LENGTH_BOUNDS:
        if tokens <= bound:
            return f"le_{bound}"
    return "more"


# vLLM's bounds (its v1/metrics/buckets.py), kept so that its dashboards read ours.
_TTFT_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_PER_TOKEN_SECONDS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_REQUEST_SECONDS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
)  # fmt: skip
_TIGHT_PER_TOKEN_SECONDS = (0.001, 0.0025, 0.005, *_PER_TOKEN_SECONDS)
_WORK_SECONDS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0,
)  # fmt: skip
_SHARE_OF_TARGET = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0)
_RATIO_TO_PREDICTION = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0)
_PAUSE_SECONDS = (0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.5, 10.0, 15.0, 20.0, 40.0, 80.0, 160.0)
_STEP_SECONDS = (
    0.0005, 0.001, 0.002, 0.004, 0.008, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0,
)  # fmt: skip
_SLACK_SECONDS = (-600.0, -60.0, -10.0, -2.0, -0.5, 0.0, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0, 600.0)
_POWERS_OF_TWO = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)

_REASONS = ", ".join(f"`{reason}` ({meaning})" for reason, meaning in DROP_REASONS.items())
_BY_CLASS = ("model", "service_class")
_BY_CLASS_AND_LENGTH = ("model", "service_class", "prompt_tokens")

ROUTER_METRICS = (
    Metric("medha_requests", "counter", "requests", "HTTP generation requests that ended, by outcome: `stop`, `length`, `cancelled` (the client disconnected, or was cut off because it did not read), or the code of the error. `model` is `(unknown)` if the request named a model that no manifest names and no replica has announced, or if it ended before its body was read.", ("model", "endpoint", "outcome")),
    Metric("medha_request_ttft_seconds", "histogram", "seconds", "Time to first token: from the last byte of the request's headers to its first output token.", _BY_CLASS, _TTFT_SECONDS),
    Metric("medha_request_ttft_target_ratio", "histogram", "ratio", "TTFT divided by the request's target; 1 is just in time. The target is the client's `x-slo-ttft-ms`, or else that of its service class for the longest prompt of the request: the TTFT floor, or the factor times the announced prefill time, whichever is larger.", _BY_CLASS_AND_LENGTH, _SHARE_OF_TARGET),
    Metric("medha_request_tpot_seconds", "histogram", "seconds", "Mean time per output token of a sequence that ended in two or more tokens: (time of its last token - time of its first) / (its tokens - 1).", _BY_CLASS, _TIGHT_PER_TOKEN_SECONDS),
    Metric("medha_inter_token_seconds", "histogram", "seconds", "Time between two messages with output tokens of one sequence.", _BY_CLASS, _TIGHT_PER_TOKEN_SECONDS),
    Metric("medha_request_seconds", "histogram", "seconds", "Whole duration of a request that ended in tokens.", _BY_CLASS, _REQUEST_SECONDS),
    Metric("medha_request_ttft_attainment", "counter", "requests", "Requests by whether their first token met its target (`met`: `true` or `false`). Requests that got status 429 or 5xx before their first token count as `false`, even if they were refused before their prompt was tokenised (`prompt_tokens` is then `unknown`). Cancelled and invalid requests do not count.", (*_BY_CLASS_AND_LENGTH, "met")),
    Metric("medha_request_tpot_attainment", "counter", "requests", "Requests that have a sequence of two or more output tokens, by whether the TPOT of every such sequence met the target. Requests that failed after their first token count as `false`.", (*_BY_CLASS_AND_LENGTH, "met")),
    Metric("medha_prompt_tokens", "counter", "tokens", "Prompt tokens of accepted requests; a prompt with several samples (`n`) counts once.", ("model",)),
    Metric("medha_cached_prompt_tokens", "counter", "tokens", "Prompt tokens whose KV was in a replica's prefix cache, for requests that got a first token.", ("model",)),
    Metric("medha_output_tokens", "counter", "tokens", "Output tokens of sequences, without those after a stop string.", ("model",)),
    Metric("medha_reasoning_tokens", "counter", "tokens", "Those among them in which models thought before they answered.", ("model",)),
    Metric("medha_router_requests_open", "gauge", "requests", "HTTP generation requests in progress."),
    Metric("medha_router_sequences_open", "gauge", "sequences", "Sequences that have not ended: those that wait in the router and those that were sent to replicas."),
    Metric("medha_router_sequences_waiting", "gauge", "sequences", "Sequences that wait in the router for a replica with room.", _BY_CLASS),
    Metric("medha_router_replicas", "gauge", "replicas", "Replicas that announce themselves now, by state: `ready`, `draining`, `starting`. The value is 0 for a model without such a replica that a manifest names or a replica announced before.", ("model", "state")),
    Metric("medha_router_replicas_by_role", "gauge", "replicas", "Replicas that are ready, by role: `both`, `prefill`, `decode` ([roles](roles.md)).", ("model", "role")),
    Metric("medha_router_replicas_desired", "gauge", "replicas", "Replicas that should serve a model by now according to manifests. Suspended replicas do not count, nor new ones within `lifecycle.readySeconds`. Only models that a manifest names have this series.", ("model",)),
    Metric("medha_deployment_pending_prefill_seconds", "gauge", "seconds", "Prefill work of this router's clients that is yet to give a first token: of sequences that wait in the router, and of those that it has sent to replicas. Add up the routers.", ("model",)),
    Metric("medha_deployment_missed_deadline_seconds_predicted", "gauge", "seconds", "Seconds by which the sequences that wait in this router are predicted to miss their TTFT targets, summed over the sequences. Add up the routers.", ("model",)),
    Metric("medha_deployment_desired_replicas", "gauge", "replicas", "Replicas that this router's clients need, as a fraction, by reason: `arrivals` (the prefill work that arrives), `waiting` (what waiting sequences need to be in time), `kv` (KV of open sequences beyond both), `spare` (a reserve for growth of urgent work that nothing announces, at most one replica), `growth` (what urgent work will need more once a further replica serves, if it goes on growing), `open` (0.01 while a request is open or waits for the first replica). Add up reasons and routers, then round up ([autoscaling](autoscaling.md)).", ("model", "reason")),
    Metric("medha_router_resubmissions", "counter", "sequences", "Sequences that were submitted again, by the reason why they left their replica: `refused` (its queue was full, it drained or was not ready), `rank_lost` (it lost a rank and began a new epoch), `replica_lost` (it or its connection was lost), `moved` (it drains, and gives its KV to another one), `prefilled` (it computed the prompt, and another replica decodes: [roles](roles.md)).", ("model", "reason")),
    Metric("medha_router_moved_tokens", "counter", "tokens", "Tokens of sequences that moved from a replica that computed their prompt to one that decodes, by where their KV came from: `read` (of another replica, or it was cached there) or `computed` (once more).", ("model", "source")),
    Metric("medha_stream_pause_seconds", "histogram", "seconds", "Time from the last token of a stream before it left its replica to its next token, by the reason as in `medha_router_resubmissions`, and by where the next token came from (`resumed`): `same` or `elsewhere`, another replica. `_count` counts the streams that continued.", ("model", "reason", "resumed"), _PAUSE_SECONDS),
    Metric("medha_short_prompt_ttft_seconds", "histogram", "seconds", f"TTFT of requests whose prompts have at most {SHORT_PROMPT_TOKENS:,} tokens, by whether a long prefill ({LONG_PROMPT_TOKENS:,} tokens or more) was in flight on the same replica between their arrival and their first token (`beside_long`: `true` or `false`). If `true` is much slower, short requests wait behind long ones.", ("model", "beside_long"), _TTFT_SECONDS),
    Metric("medha_forwarded_ttft_predicted_seconds", "histogram", "seconds", "Time to the first token from when a sequence was sent to its replica, as predicted from the replica's announced load: the prefills that go before it by the policy, per lane, and its own without the part that proved cached. Decodes, later arrivals and a wait for KV are not counted.", ("model",), _TTFT_SECONDS),
    Metric("medha_forwarded_ttft_observed_seconds", "histogram", "seconds", "The same time, as it was. Further samples of a prompt (`n`) do not count.", ("model",), _TTFT_SECONDS),
    Metric("medha_forwarded_ttft_prediction_error_ratio", "histogram", "ratio", "Observed divided by predicted time of the two metrics above.", ("model", "prompt_tokens"), _RATIO_TO_PREDICTION),
    Metric("medha_router_tokenize_seconds", "histogram", "seconds", "Time to parse a request, apply the chat template and tokenise it, by place: `thread` or `process` (large bodies).", ("place",), _WORK_SECONDS),
    Metric("medha_router_dropped_messages", "counter", "messages", f"Messages from replicas that were dropped, by link (`control`, `tokens`) and reason: {_REASONS}.", ("link", "reason")),
    Metric("medha_router_lost_spans", "counter", "spans", _LOST_SPANS, ("reason",)),
    Metric("medha_router_waiting_room_requests", "gauge", "requests", "Requests that wait, untokenised, for the first replica of a model that a manifest declares.", ("model",)),
    Metric("medha_router_waiting_room_bytes", "gauge", "bytes", "Bodies of those requests; a part of `medha_router_body_bytes`."),
    Metric("medha_router_waiting_room_refusals", "counter", "requests", "Requests for which there was no room to wait for the first replica of their model (`full`; `share`: their key or address has all that one may take), or for which none came in time (`late`).", ("reason",)),
    Metric("medha_router_refused_connections", "counter", "connections", "Connections that failed the handshake: plaintext, a wrong key, or no enrolment token of this router.", ("link",)),
    Metric("medha_router_http_connections", "gauge", "connections", "HTTP connections that are open."),
    Metric("medha_router_http_refusals", "counter", "connections", "HTTP connections that the router closed, by reason: `too_many` (the limit is reached), `slow` (the request's head did not arrive in time), `malformed` (not HTTP/1, or the head is too large), `pipelined` (a request arrived before the previous one was answered), `unread` (the client did not take its answer).", ("reason",)),
    Metric("medha_router_body_bytes", "gauge", "bytes", "Total size of request bodies that are being received or tokenised, and of answers of `/tokenize` and `/detokenize` that are being sent."),
    Metric("medha_router_large_bodies_waiting", "gauge", "requests", "Bodies over 256 KiB that wait for a tokenising process."),
    Metric("medha_router_unauthenticated_requests", "counter", "requests", "Requests that got status 401, by reason: `missing` (no API key), `unknown` (a key that the router does not accept).", ("reason",)),
    Metric("medha_router_file_valid", "gauge", "", "1 while the present content of a file that the router reads again is in force; 0 while it cannot be used, so that the former content stays in force. Files: `API keys`, `TLS certificate`.", ("file",)),
    Metric("medha_replica_sequences_running", "gauge", "sequences", "Sequences that hold KV in a replica, as it announced.", ("model", "replica")),
    Metric("medha_replica_sequences_waiting", "gauge", "sequences", "Sequences that wait for KV in a replica, as it announced.", ("model", "replica")),
    Metric("medha_replica_kv_used_ratio", "gauge", "ratio", "Reserved share of a replica's KV pool, 0 to 1, as it announced.", ("model", "replica")),
    Metric("medha_replica_pending_prefill_seconds", "gauge", "seconds", "Prefill work ahead of a new request in a replica, as it announced.", ("model", "replica")),
)  # fmt: skip
"""Metrics that a router exports."""

KEY_METRICS = (
    Metric("medha_key_requests", "counter", "requests", "Requests for tokens or tokenisation that an API key was allowed to send.", ("key",)),
    Metric("medha_key_requests_open", "gauge", "requests", "Requests of an API key that are open now.", ("key",)),
    Metric("medha_key_refusals", "counter", "requests", "Requests that an API key was not allowed, by the limit that they exceed: `requestsPerMinute`, `tokensPerMinute`, `concurrency` (429), `serviceClasses` (403).", ("key", "limit")),
    Metric("medha_key_prompt_tokens", "counter", "tokens", "Prompt tokens that an API key was charged.", ("key",)),
    Metric("medha_key_sequences_waiting", "gauge", "sequences", "Sequences of an API key that wait in the router for a replica with room, by service class.", ("key", "service_class")),
    Metric("medha_key_ttft_attainment", "counter", "requests", "Requests of an API key by whether their first token met its target (`met`: `true` or `false`), as in `medha_request_ttft_attainment`, but without those that were refused before they were tokenised.", ("key", "met")),
    Metric("medha_key_output_tokens", "counter", "tokens", "Output tokens that an API key was charged.", ("key",)),
)  # fmt: skip
"""Metrics that a router exports of each API key, by the key's name. Series of a key that was removed from the
file disappear when its last request has ended."""

_VLLM = ("model_name", "engine")

VLLM_ALIASES = (
    Metric("vllm:num_requests_running", "gauge", "requests", "As `medha_replica_sequences_running`; `engine` is the replica's name.", _VLLM),
    Metric("vllm:num_requests_waiting", "gauge", "requests", "As `medha_replica_sequences_waiting`, and on `engine=\"router\"` those that wait in the router.", _VLLM),
    Metric("vllm:kv_cache_usage_perc", "gauge", "ratio", "As `medha_replica_kv_used_ratio`: 0 to 1 despite the name.", _VLLM),
    Metric("vllm:time_to_first_token_seconds", "histogram", "seconds", "As `medha_request_ttft_seconds`.", _VLLM, _TTFT_SECONDS),
    Metric("vllm:inter_token_latency_seconds", "histogram", "seconds", "As `medha_inter_token_seconds`.", _VLLM, _PER_TOKEN_SECONDS),
    Metric("vllm:request_time_per_output_token_seconds", "histogram", "seconds", "As `medha_request_tpot_seconds`.", _VLLM, _PER_TOKEN_SECONDS),
    Metric("vllm:e2e_request_latency_seconds", "histogram", "seconds", "As `medha_request_seconds`.", _VLLM, _REQUEST_SECONDS),
    Metric("vllm:prompt_tokens", "counter", "tokens", "As `medha_prompt_tokens`.", _VLLM),
    Metric("vllm:generation_tokens", "counter", "tokens", "As `medha_output_tokens`.", _VLLM),
    Metric("vllm:prefix_cache_queries", "counter", "tokens", "Prompt tokens of requests that got a first token: tokens whose KV could have been cached.", _VLLM),
    Metric("vllm:prefix_cache_hits", "counter", "tokens", "As `medha_cached_prompt_tokens`.", _VLLM),
    Metric("vllm:request_success", "counter", "requests", "Sequences that ended in tokens, by `stop` or `length`.", (*_VLLM, "finished_reason")),
)  # fmt: skip
"""vLLM's metric names (its v1/metrics/loggers.py) that a router exports too. Histograms and counters of the
router carry `engine="router"`."""

CONTROLLER_METRICS = (
    Metric("medha_kv_blocks", "gauge", "", "Blocks of a lane's KV pool by state: `free`, `cached` (kept for their content until they are needed), `reserved` (not yet written), `used`.", ("lane", "state")),
    Metric("medha_kv_window_blocks", "gauge", "", "Blocks of a lane's pool of layers that free KV before their windows, by state: `free`, `cached` (windows of cached prefixes, kept until their blocks are needed), `held` (by running sequences). It does not exist where all layers keep their KV.", ("lane", "state")),
    Metric("medha_kv_used_ratio", "gauge", "ratio", "Reserved share of all KV pools, 0 to 1."),
    Metric("medha_kv_growth_blocks", "gauge", "", "Free blocks of all lanes that are held for running sequences that outgrow the output expected of them. Waiting sequences get none of these."),
    Metric("medha_sequences_stepped_aside", "counter", "sequences", "Times that a running sequence gave its KV back, because KV was short for another one. It waits, fetches or computes its KV again and goes on with the same text.", ("service_class",)),
    Metric("medha_output_expected_ratio", "histogram", "ratio", "Output tokens of a sequence that ended, divided by those that were expected when it arrived. KV is reserved for the expected ones, or for `max_tokens` if that is less.", ("service_class",), (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.5, 2.0, 4.0, 16.0)),
    Metric("medha_sequence_queue_seconds", "histogram", "seconds", "Time from a request's arrival at its router until its sequence got KV, and its prefill began (vLLM: `request_queue_time_seconds`). Sequences that got a first token count, unless they were resumed here with output of another replica or epoch.", ("service_class",), _REQUEST_SECONDS),
    Metric("medha_sequence_prefill_seconds", "histogram", "seconds", "Time from then until its first token, of the same sequences (vLLM: `request_prefill_time_seconds`).", ("service_class",), _REQUEST_SECONDS),
    Metric("medha_sequence_decode_seconds", "histogram", "seconds", "Time from its first to its last token, of the same sequences when they end, however they do (vLLM: `request_decode_time_seconds`).", ("service_class",), _REQUEST_SECONDS),
    Metric("medha_sequence_prompt_tokens", "histogram", "tokens", "Length of the prompt of the same sequences (vLLM: `request_prompt_tokens`).", ("service_class",), _POWERS_OF_TWO),
    Metric("medha_sequence_output_tokens", "histogram", "tokens", "Output tokens of the same sequences (vLLM: `request_generation_tokens`). Tokens after a stop string count if they were sampled before it was found.", ("service_class",), _POWERS_OF_TWO),
    Metric("medha_prefix_cache_queried_tokens", "counter", "tokens", "Prompt tokens of admitted sequences that were looked up in the prefix cache. Samples that share a running prompt do not count."),
    Metric("medha_prefix_cache_hit_tokens", "counter", "tokens", "Prompt tokens of admitted sequences whose KV was in the prefix cache, so that they were not computed."),
    Metric("medha_host_tier_bytes", "gauge", "bytes", "KV that each rank of a lane holds in its host tier ([KV tiers](kv-tiers.md)); 0 without a tier.", ("lane",)),
    Metric("medha_host_tier_hits", "counter", "sequences", "Sequences whose prompt went on in the host tier of a lane, so that KV was fetched; counted for each lane."),
    Metric("medha_host_tier_fetched_bytes", "counter", "bytes", "KV copied from the host tier to the device, on one rank of each lane."),
    Metric("medha_host_tier_offloaded_bytes", "counter", "bytes", "Evicted KV copied from the device to the host tier, on one rank of each lane."),
    Metric("medha_host_tier_fetched_tokens", "counter", "tokens", "Prompt tokens whose KV was fetched, so that they were not computed. They are part of `medha_prefix_cache_hit_tokens`."),
    Metric("medha_avoided_prefill_seconds", "counter", "seconds", "Prefill that was not computed because its KV was fetched, by the tier from which the KV came: `host`, `disk`, `store`, `peers` ([KV tiers](kv-tiers.md)). It is predicted when a sequence gets its KV, as if it ran alone; the time of the fetch is not subtracted. KV of one sequence from several tiers is divided by its blocks. KV that was read into host memory counts for the tier that it was read from when a sequence first fetches it, and for `host` later.", ("tier",)),
    Metric("medha_tier_read_latency_seconds", "gauge", "seconds", "Predicted time of a read of a tier, however small, as measured reads have corrected it, by tier: `host` (copies to the device: 0), `disk` (a file), `store` (an object), `peers` (another replica). It exists for the tiers of the replica only.", ("tier",)),
    Metric("medha_tier_read_seconds_per_gib", "gauge", "seconds/GiB", "Predicted time that each GiB of one rank adds to a read of a tier, by tier as above: for `host` until the device has it, for all others until the host tier has it. Of `store`, while a rank reads four objects at a time.", ("tier",)),
    Metric("medha_streaming_bytes", "gauge", "bytes", "Host memory of each rank of a lane that holds streamed KV ([KV tiers](kv-tiers.md#contexts-larger-than-the-device)); 0 without `kvCache.streaming`.", ("lane",)),
    Metric("medha_streamed_sequences", "counter", "sequences", "Sequences that began to hold KV and were larger than the KV pools, so that a part of it is streamed from host memory."),
    Metric("medha_streamed_bytes", "counter", "bytes", "KV that steps read from host memory for attention, on one rank of the lane that reads most. It is predicted from the steps' sequences."),
    Metric("medha_sequences_swapped", "gauge", "sequences", "Sequences that have stepped aside and wait, whose KV host tiers keep until they come back ([KV tiers](kv-tiers.md#requests-that-step-aside))."),
    Metric("medha_long_swaps", "counter", "sequences", "Times that a long sequence stepped aside so that one that waited for KV was on time (`scheduling.maxSwaps`)."),
    Metric("medha_swaps", "counter", "sequences", "Times that a sequence stepped aside whose KV host tiers keep (`out`), and that one fetched KV when it came back (`in`).", ("direction",)),
    Metric("medha_swap_bytes", "counter", "bytes", "KV that was copied for such sequences, on one rank of each lane. It is part of `medha_host_tier_offloaded_bytes` and `_fetched_bytes`. What is still on the device when a sequence comes back is not copied.", ("direction",)),
    Metric("medha_swap_seconds", "counter", "seconds", "Predicted time of these copies, by what ranks measured when they started.", ("direction",)),
    Metric("medha_disk_tier_bytes", "gauge", "bytes", "KV that each rank of a lane keeps in files ([KV tiers](kv-tiers.md#the-disk-tier)); 0 without a disk tier.", ("lane",)),
    Metric("medha_disk_tier_off", "gauge", "", "1 if the disk tier of a lane is off, because a rank cannot use its disk; the log of the rank has the reason.", ("lane",)),
    Metric("medha_disk_tier_hits", "counter", "sequences", "Sequences that waited for KV to be read from files; counted for each lane."),
    Metric("medha_disk_tier_loaded_bytes", "counter", "bytes", "KV read from files into the host tier, on one rank of each lane."),
    Metric("medha_disk_tier_written_bytes", "counter", "bytes", "KV written to files, on one rank of each lane."),
    Metric("medha_disk_tier_waiting_bytes", "gauge", "bytes", "KV in the host tier of each rank of a lane that waits to be written to files.", ("lane",)),
    Metric("medha_disk_tier_skipped_bytes", "counter", "bytes", "KV that was not written, because the host tier had dropped it before the disk came to it, or had no place for it, or the disk tier has room for the beginning of its prompt only, on one rank of each lane."),
    Metric("medha_disk_tier_failures", "counter", "", "Files that a rank could not write or read, or that were damaged. Their KV is computed."),
    Metric("medha_peer_kv_hits", "counter", "sequences", "Prompts whose KV another replica has offered, so that sequences waited for it ([KV tiers](kv-tiers.md#kv-of-other-replicas))."),
    Metric("medha_peer_kv_loaded_bytes", "counter", "bytes", "KV read from other replicas into the host tier, on one rank of each lane."),
    Metric("medha_peer_kv_offered_bytes", "counter", "bytes", "KV that other replicas were let read, on one rank of each lane."),
    Metric("medha_peer_kv_failures", "counter", "", "Reads of other replicas' KV that have failed; counted for each lane. The KV is computed."),
    Metric("medha_store_tier_rests", "gauge", "", "1 while the store is left alone, because it has failed ([KV tiers](kv-tiers.md#a-store-that-replicas-share)); `/status` has the error."),
    Metric("medha_store_tier_lookups", "counter", "sequences", "Prompts that ranks have looked up in the store."),
    Metric("medha_store_tier_hits", "counter", "sequences", "Prompts for which KV was read from the store."),
    Metric("medha_store_tier_loaded_bytes", "counter", "bytes", "KV read from the store into the host tier, on one rank of each lane."),
    Metric("medha_store_tier_written_bytes", "counter", "bytes", "KV that this replica has sent to the store, on one rank of each lane."),
    Metric("medha_store_tier_found_bytes", "counter", "bytes", "KV that was to be written to the store, and was there already, so that nothing was sent; on one rank of each lane."),
    Metric("medha_store_tier_skipped_bytes", "counter", "bytes", "KV that was not written, because it was gone before the store had finished earlier writes, the store rests, or the host tier had no place, on one rank of each lane."),
    Metric("medha_store_tier_failures", "counter", "", "Objects that could not be read or written, or had gone or were damaged. Their KV is computed."),
    Metric("medha_peer_kv_resumed_tokens", "counter", "tokens", "KV of streams that had begun at another replica, which was not computed here because it was read from there, or was here already ([moves](kv-tiers.md#when-a-replica-drains))."),
    Metric("medha_sequences_running", "gauge", "sequences", "Sequences that hold KV."),
    Metric("medha_sequences_waiting", "gauge", "sequences", "Sequences that wait for KV."),
    Metric("medha_pending_prefill_seconds", "gauge", "seconds", "Predicted remaining prefill time of all admitted and waiting sequences, each as if it ran alone."),
    Metric("medha_steps", "counter", "steps", "Steps that left the last stage."),
    Metric("medha_step_observed_seconds", "histogram", "seconds", "Duration of a step, from its launch until its results arrived. With a single stage, it counts from the end of the previous step if the step was launched before that.", (), _STEP_SECONDS),
    Metric("medha_step_predicted_seconds", "histogram", "seconds", "Duration of a step that the predictor expected when the step was packed.", (), _STEP_SECONDS),
    Metric("medha_step_prediction_error_ratio", "histogram", "ratio", "Observed divided by predicted duration of a step.", (), (0.25, 0.5, 0.75, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0)),
    Metric("medha_step_tokens", "histogram", "tokens", "Tokens that a step computes, by phase: `prefill` or `decode`. Tokens after a stop token count if they were computed before the stop was known.", ("phase",), _POWERS_OF_TWO),
    Metric("medha_step_sequences", "histogram", "sequences", "Sequences of a step, by phase.", ("phase",), _POWERS_OF_TWO[:13]),
    Metric("medha_chunk_tokens", "histogram", "tokens", "Prefill tokens of one sequence in one step.", (), _POWERS_OF_TWO),
    Metric("medha_prefill_slack_seconds", "histogram", "seconds", "Slack of a prefill when a chunk of it was packed: deadline - now - remaining work. If it is below 0, the first token will be late.", ("service_class",), _SLACK_SECONDS),
    Metric("medha_drafted_tokens", "counter", "tokens", "Guessed tokens that steps have verified ([speculation](speculation.md))."),
    Metric("medha_accepted_draft_tokens", "counter", "tokens", "Those of them that were right, so that each saved its sequence a step."),
    Metric("medha_decode_tpot_misses", "counter", "steps", "Steps that are predicted to take longer than the tightest TPOT target of their decodes allows. Either decodes alone take longer, or prefills keep their guaranteed share (`minPrefillShare`, or the rate at the class's own target)."),
    Metric("medha_sequences_finished", "counter", "sequences", "Sequences that ended, by reason: `stop`, `length`, `cancelled`, `moved` (to another replica, which reads its KV), or the reason of a failure.", ("reason",)),
    Metric("medha_sequences_refused", "counter", "sequences", "Submissions that were refused, by reason.", ("reason",)),
    Metric("medha_controller_handle_seconds", "histogram", "seconds", "Time that the controller took to decide on one event.", (), (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.1)),
    Metric("medha_epoch", "gauge", "", "Epoch of the replica. It increases with each new rendezvous of the ranks."),
    Metric("medha_dropped_messages", "counter", "messages", "Messages that were dropped, by link and reason, as in `medha_router_dropped_messages`. Links at the controller's end: `router_control`, `router_tokens`, `rank_control`, `rank_tokens`. At the ranks' end, all ranks together: `at_rank_control`, `at_rank_tokens`; a rank reports every second, between its steps, the number that it has dropped since it began. So a restarted controller includes what its ranks dropped before, and messages that a rank drops right before it ends are only in its log.", ("link", "reason")),
    Metric("medha_lost_spans", "counter", "spans", _LOST_SPANS, ("reason",)),
    Metric("medha_refused_connections", "counter", "connections", "Connections to the links for ranks that failed the handshake: plaintext, or a key that does not belong to a rank of this replica.", ("link",)),
)  # fmt: skip
"""Metrics that a replica's controller exports of itself."""

STEP_PARTS = {
    "prepare": "what of the plan was not made ahead",
    "receive": "waiting for the hidden states or tokens of another stage",
    "forward": "the layers, without the other parts",
    "all_reduce": "sums over the tensor ranks",
    "gather": "logits of the tensor ranks",
    "exchange": "waiting for the partial attention or the keys of other lanes",
    "send": "handing hidden states or tokens to another stage",
    "sample": "sampling, and all else that follows the layers",
}
"""Parts of a rank's step, and their meaning; they add up to the step."""
THROTTLE_MEANINGS = {
    "power_cap": "the power limit, usual under full load",
    "hardware_slowdown": "heat or power, as the hardware decides",
    "software_thermal": "heat, as the driver decides",
    "hardware_thermal": "heat, as the hardware decides",
    "power_brake": "a signal of the power supply",
}
"""Reasons why a GPU's clocks are lower than they could be."""

_RANK = ("rank",)
_GPU_ONLY = "Only where NVML reports it."


def _listed(meanings: dict[str, str]) -> str:
    return ", ".join(f"`{name}` ({meaning})" for name, meaning in meanings.items())


RANK_METRICS = (
    Metric("medha_rank_info", "gauge", "", "1 for each rank that reports: its place in the grid, its pod (or host), the model of its device, and the device's `UUID`, which is also a label of DCGM's exporter.", ("rank", "lane", "stage", "tensor", "rank_pod", "device", "UUID")),
    Metric("medha_rank_steps", "counter", "steps", "Steps that a rank has run.", _RANK),
    Metric("medha_rank_step_seconds", "counter", "seconds", f"Time of a rank's steps by part: {_listed(STEP_PARTS)}. The parts of a rank add up to the time in steps; the rest of the time it was idle. On a GPU, what NCCL does on the device belongs to `forward`.", (*_RANK, "part")),
    Metric("medha_rank_ahead_seconds", "counter", "seconds", "Time in which a rank has prepared steps while it ran others; it is in no part of `medha_rank_step_seconds`.", _RANK),
    Metric("medha_rank_estimated_flops", "counter", "FLOP", "Estimated FLOPs of a rank's steps: 2 x its layers' weights x rows + 2 x its output head's weights x sampled rows + 4 x its layers x query heads x head dimension x (query, key) pairs. Padding and repeated work do not count. MFU is the rate of it divided by `medha_rank_peak_flops_per_second`.", _RANK),
    Metric("medha_rank_estimated_read_bytes", "counter", "bytes", "Estimated bytes that a rank's steps read: its layers' weights once for each step with rows, its output head's once for each step that samples, and the keys and values of each sequence once for each step. Large chunks really read those several times. MBU is the rate of it divided by `medha_rank_peak_bytes_per_second`.", _RANK),
    Metric("medha_rank_peak_flops_per_second", "gauge", "FLOP/s", "Peak of the rank's device for dense 16-bit types, according to its data sheet; absent for other types and unknown devices.", _RANK),
    Metric("medha_rank_peak_bytes_per_second", "gauge", "bytes/s", "Peak rate of the memory of the rank's device, according to its data sheet; absent as `medha_rank_peak_flops_per_second` is.", _RANK),
    Metric("medha_rank_memory_bytes", "gauge", "bytes", "Memory of the rank's device by state: `total`; `used` by this rank's tensors (on a CPU: by its process); `free`, which nobody uses. Total and free are those of the cgroup if that has less.", (*_RANK, "state")),
    Metric("medha_rank_clock_hertz", "gauge", "Hz", f"Clock of the rank's GPU: `sm` or `memory`. {_GPU_ONLY}", (*_RANK, "clock")),
    Metric("medha_rank_throttled", "gauge", "", f"1 while the clocks of the rank's GPU are lowered, else 0, by reason: {_listed(THROTTLE_MEANINGS)}. {_GPU_ONLY}", (*_RANK, "reason")),
    Metric("medha_rank_temperature_celsius", "gauge", "degrees C", f"Temperature of the rank's GPU. {_GPU_ONLY}", _RANK),
    Metric("medha_rank_power_watts", "gauge", "W", f"Power that the rank's GPU draws. {_GPU_ONLY}", _RANK),
    Metric("medha_rank_power_limit_watts", "gauge", "W", f"Power that the rank's GPU may draw. {_GPU_ONLY}", _RANK),
    Metric("medha_rank_utilisation_ratio", "gauge", "ratio", f"Share of the time in which the rank's GPU ran any kernel (`compute`) or moved any memory (`memory`), 0 to 1. It does not say how busy the device was then. {_GPU_ONLY}", (*_RANK, "unit")),
    Metric("medha_rank_xid_errors", "counter", "", "Errors (Xid) that the rank's GPU has reported, by cause: `program` for those that as a rule a kernel or a process brings about, `notice` for those that ask for no action, and `device` for all others. Only where NVML reports them.", (*_RANK, "cause")),
    Metric("medha_rank_last_xid", "gauge", "", "Number of the latest error (Xid) of each cause that the rank's GPU has reported: one of the device is often followed by some of the others.", (*_RANK, "cause")),
)  # fmt: skip
"""Metrics that a replica's controller exports of its ranks and their devices."""

OPERATOR_METRICS = (
    Metric("medha_operator_reconcile_seconds", "histogram", "seconds", "Duration of one reconcile of a resource (observing, planning, and every call to the API server), by kind and outcome: `unchanged` (nothing to do), `changed`, `failed`.", ("kind", "outcome"), _WORK_SECONDS),
    Metric("medha_operator_reconcile_errors", "counter", "", "Reconciles that failed, by the API server's reason (`Conflict`, `Invalid`, ...), `NoAnswer`, `Fenced` (the write could have lasted longer than the Lease), or `Bug` (see the log).", ("kind", "reason")),
    Metric("medha_operator_queue_keys", "gauge", "", "Resources that wait to be reconciled."),
    Metric("medha_operator_queue_seconds", "histogram", "seconds", "Time that a resource waited to be reconciled.", (), _WORK_SECONDS),
    Metric("medha_operator_writes", "counter", "requests", "Writes to the API server, except renewals of the Lease, by verb.", ("verb",)),
    Metric("medha_operator_condition", "gauge", "", "1 while the condition of a resource is `True`, else 0: `Ready` (0 also before it has a status), `Reconciling`, `Stalled`, `Degraded` of a replica, `Available` of a deployment. The namespace is the resource's own.", ("kind", "resource_namespace", "resource", "condition")),
    Metric("medha_operator_reason", "gauge", "", "1 for the current reason of a condition: of `Ready` while that is not `True`, of `Reconciling` while that is. A reason may change from one scrape to the next, for example while pods crash repeatedly, so alerts must not use it as a label.", ("kind", "resource_namespace", "resource", "condition", "reason")),
    Metric("medha_operator_ready_seconds", "histogram", "seconds", "Time until a resource was ready: from its creation, or from the reconcile that first noticed a change (condition `Reconciling`), until its condition `Ready`.", ("kind",), (1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 3600.0)),
    Metric("medha_operator_leading", "gauge", "", "1 while this process holds the Lease and writes to the cluster, else 0."),
)  # fmt: skip
"""Metrics that the operator exports."""

CATALOGUE = (
    *ROUTER_METRICS,
    *KEY_METRICS,
    *VLLM_ALIASES,
    *CONTROLLER_METRICS,
    *RANK_METRICS,
    *OPERATOR_METRICS,
)


def reference_page() -> str:
    """Return `docs/metrics.md`, made from the catalogue."""
    parts = [
        "# Metrics",
        "",
        "Generated from `core/medha/observing/metric_catalogue.py` (`reference_page`); a test compares the two. Counters are exposed",
        "with `_total`, histograms with `_bucket`, `_sum` and `_count`. The label `prompt_tokens` names the",
        f"length class of the prompt: {', '.join(f'`le_{bound}`' for bound in PROMPT_LENGTH_BOUNDS)} or `more`;",
        f"`{NOT_TOKENISED}` if a request was refused before its length was known.",
    ]
    sections = (
        ("Router", ROUTER_METRICS),
        ("Router: API keys", KEY_METRICS),
        ("Router: names of vLLM", VLLM_ALIASES),
        ("Replica controller", CONTROLLER_METRICS),
        ("Replica controller: ranks and their devices", RANK_METRICS),
        ("Operator", OPERATOR_METRICS),
    )
    for title, metrics in sections:
        parts += ["", f"## {title}", "", "| Name | Kind | Unit | Labels | Meaning |", "|---|---|---|---|---|"]
        for metric in metrics:
            labels = ", ".join(f"`{label}`" for label in metric.labels)
            parts.append(f"| `{metric.name}` | {metric.kind} | {metric.unit} | {labels} | {metric.meaning} |")
    return "\n".join(parts) + "\n"
