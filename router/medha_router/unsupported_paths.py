"""Paths of OpenAI, vLLM, SGLang and others that this server does not serve, and what it says to a client that asks."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_TEXT_ONLY = "this server generates text, with /v1/chat/completions, /v1/completions and /v1/responses"
_EMBEDDINGS = f"embeddings are not served: {_TEXT_ONLY}; use a server of an embedding model"
_SCORES = f"reranking, scoring and classification are not served: {_TEXT_ONLY}; `prompt_logprobs` gives likelihoods of texts"
_METRICS = "metrics are on a port of their own: 9403 in a pod, and `medha up` prints its address"
_SERVER = "reports of the server are not served here: use GET /v1/models and /version, and the metrics on their own port"
_FILES = "this server stores nothing: send each request by itself"

UNSUPPORTED_PATHS: Mapping[str, str] = MappingProxyType(
    {
        "/v1/embeddings": _EMBEDDINGS,
        "/v2/embed": _EMBEDDINGS,
        "/pooling": _EMBEDDINGS,
        "/encode": _EMBEDDINGS,
        "/rerank": _SCORES,
        "/v1/rerank": _SCORES,
        "/v2/rerank": _SCORES,
        "/score": _SCORES,
        "/v1/score": _SCORES,
        "/classify": _SCORES,
        "/v1/moderations": f"moderation is not served: {_TEXT_ONLY}",
        "/v1/images": f"images are not served: {_TEXT_ONLY}",
        "/v1/videos": f"videos are not served: {_TEXT_ONLY}",
        "/v1/audio": f"speech and transcription are not served: {_TEXT_ONLY}",
        "/v1/realtime": f"the realtime API is not served: {_TEXT_ONLY}",
        "/v1/responses": "responses are not stored, so there is none to read, cancel or delete; send the whole conversation "
        "in `input` of POST /v1/responses",
        "/v1/chat/completions": "completions are not stored, so there is none to read, change or delete",
        "/v1/conversations": "conversations are not stored; send the whole conversation with each request",
        "/v1/files": _FILES,
        "/v1/uploads": _FILES,
        "/v1/batches": _FILES,
        "/v1/vector_stores": _FILES,
        "/v1/assistants": "assistants are not served; send the whole conversation to /v1/chat/completions",
        "/v1/threads": "threads are not served; send the whole conversation to /v1/chat/completions",
        "/v1/fine_tuning": "training is not served",
        "/v1/messages": "Anthropic's API is not served; send the conversation to /v1/chat/completions",
        "/generate": "SGLang's own API is not served; send the prompt to /v1/completions",
        "/metrics": _METRICS,
        "/server_info": _SERVER,
        "/get_server_info": _SERVER,
        "/get_model_info": _SERVER,
        "/tokenizer_info": "the tokenizer's settings are not served: give the client the checkpoint's folder (`lm-eval`: "
        "`tokenizer=DIR`), or use /tokenize",
        "/flush_cache": "the prefix cache is not flushed by requests; a `cache_salt` of its own keeps a request out of it",
        "/reset_prefix_cache": "the prefix cache is not flushed by requests; a `cache_salt` of its own keeps a request out of it",
        "/start_profile": "profiles are not taken by requests; use `medha up --trace`",
        "/stop_profile": "profiles are not taken by requests; use `medha up --trace`",
        "/v1/load_lora_adapter": "adapters are not served; serve a checkpoint into which the adapter is merged",
        "/v1/unload_lora_adapter": "adapters are not served",
    }
)
"""The refusal of each path, which holds for all paths below it, too."""


def explanation(path: str) -> str | None:
    """Return why a known path of other servers is not served, or None for any other path."""
    while path:
        if path in UNSUPPORTED_PATHS:
            return UNSUPPORTED_PATHS[path]
        path = path.rpartition("/")[0]
    return None
