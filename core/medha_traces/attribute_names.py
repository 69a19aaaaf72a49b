"""The names of spans, events and attributes: OpenTelemetry's semantic conventions, and our own.

The conventions for generative AI are still in development, so their names may change; they are here and nowhere else. A
test compares them with the package `opentelemetry-semantic-conventions`.
"""

from __future__ import annotations

# --- OpenTelemetry's conventions for generative AI ------------------------------------------------------

OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE = "gen_ai.request.temperature"
REQUEST_TOP_P = "gen_ai.request.top_p"
FINISH_REASONS = "gen_ai.response.finish_reasons"
FIRST_CHUNK_SECONDS = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
}
"""Values of `OPERATION` by path."""
OUR_PROVIDER = "medha"

# --- OpenTelemetry's other conventions ------------------------------------------------------------------

METHOD = "http.request.method"
STATUS = "http.response.status_code"
ROUTE = "http.route"
PATH = "url.path"
SCHEME = "url.scheme"
ERROR_TYPE = "error.type"
SERVICE_NAME = "service.name"
SERVICE_VERSION = "service.version"
SERVICE_INSTANCE = "service.instance.id"

# --- our own attributes ---------------------------------------------------------------------------------

REQUEST_ID = "medha.request.id"
KEY_NAME = "medha.key.name"
SEQUENCE_ID = "medha.sequence.id"
SERVICE_CLASS = "medha.service_class"
TTFT_TARGET = "medha.ttft.target_seconds"
TPOT_TARGET = "medha.tpot.target_seconds"
OUTCOME = "medha.outcome"
REPLICA = "medha.replica"
POLICY = "medha.policy"
SLACK = "medha.slack_seconds"
AHEAD = "medha.ahead_seconds"
ATTEMPT = "medha.attempt.number"
RESUMED_TOKENS = "medha.attempt.resumed_tokens"
LEFT_BECAUSE = "medha.attempt.left_because"
LANE = "medha.lane"
TOKENS = "medha.tokens"
CHUNKS = "medha.chunks"
PREEMPTIONS = "medha.preemptions"
PREEMPTED_SECONDS = "medha.preempted_seconds"
PREEMPTING_STEPS = "medha.preempting_steps"

# --- our own spans and events ---------------------------------------------------------------------------

RECEIVE = "receive body"
ROOM = "wait for a first replica"
TOKENISE = "tokenise"
SEQUENCE = "sequence"
QUEUE = "queue"
ATTEMPT_SPAN = "attempt"
STREAM = "stream"
AT_REPLICA = "sequence at replica"
WAIT = "wait for KV"
CHUNK = "prefill chunk"
DECODE = "decode"
ASIDE = "step aside"

FIRST_SAMPLED = "first token"
FIRST_CHUNK = "first chunk"
PREEMPTED = "preempted"
