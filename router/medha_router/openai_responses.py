"""OpenAI's response objects, as dictionaries: chat and text completions, whole and in chunks."""

from __future__ import annotations

from typing import Any

from medha_router.generation import Piece, ShownToken
from medha_router.prepare import Plan
from medha_router.tokenizer_bundle import Bundle

_LEAST_LOGPROB = -9999.0
"""Stand-in for the logarithm of 0, which JSON cannot express; OpenAI's and vLLM's value."""


class Answers:
    """Builds the response objects of one request."""

    def __init__(self, request_id: str, created: int, plan: Plan, bundle: Bundle) -> None:
        self._chat = plan.endpoint == "chat"
        self._plan = plan
        self._bundle = bundle
        kind = ("chat.completion", "chat.completion.chunk") if self._chat else ("text_completion",) * 2
        head = {"id": request_id, "created": created, "model": plan.model}
        self._whole_head = {**head, "object": kind[0]}
        self._chunk_head = {**head, "object": kind[1]}

    def whole(self, pieces: list[Piece], usage: dict[str, Any]) -> dict[str, Any]:
        """Return the object of a request that is not streamed; `pieces` has one whole piece per choice."""
        choices = []
        for piece in pieces:
            choice: dict[str, Any] = {"index": piece.index, "finish_reason": piece.finish_reason}
            if self._chat:
                choice["message"] = {"role": "assistant", "content": piece.text, "refusal": None}
            else:
                choice["text"] = piece.text
            choice["logprobs"] = self._logprobs(piece.tokens)
            choices.append(choice)
        return {**self._whole_head, "choices": choices, "usage": usage}

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return the first chunk of a chat choice, which names the role; None for text completions."""
        if not self._chat:
            return None
        delta = {"role": "assistant", "content": ""}
        return self._chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """Return the chunks for new output. A chat's finish reason comes alone, after its text."""
        logprobs = self._logprobs(piece.tokens)
        head: dict[str, Any] = {"index": piece.index}
        if not self._chat:
            text = {"text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish_reason}
            return [self._chunk({**head, **text})]
        chunks = []
        if piece.text or piece.tokens:
            delta = {"content": piece.text}
            chunks.append(self._chunk({**head, "delta": delta, "logprobs": logprobs, "finish_reason": None}))
        if piece.finish_reason is not None:
            end: dict[str, Any] = {"delta": {}, "logprobs": None, "finish_reason": piece.finish_reason}
            chunks.append(self._chunk({**head, **end}))
        return chunks

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Return the last chunk of a stream whose client asked for `include_usage`."""
        return {**self._chunk_head, "choices": [], "usage": usage}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._chunk_head, "choices": [choice]}
        if self._plan.include_usage:
            chunk["usage"] = None
        return chunk

    def _logprobs(self, tokens: list[ShownToken]) -> dict[str, Any] | None:
        if self._plan.sampling.logprobs is None:
            return None
        if self._chat:
            return {"content": [self._chat_logprob(shown) for shown in tokens], "refusal": None}
        return {
            "tokens": [self._text(shown.token) for shown in tokens],
            "token_logprobs": [max(shown.logprob.logprob, _LEAST_LOGPROB) for shown in tokens],
            "top_logprobs": [self._completion_top(shown) for shown in tokens],
            "text_offset": [shown.offset for shown in tokens],
        }

    def _chat_logprob(self, shown: ShownToken) -> dict[str, Any]:
        wanted = self._plan.sampling.logprobs or 0
        top = [self._entry(token, logprob) for token, logprob in shown.logprob.top[:wanted]]
        return {**self._entry(shown.token, shown.logprob.logprob), "top_logprobs": top}

    def _completion_top(self, shown: ShownToken) -> dict[str, float]:
        """Return the alternatives and, as in OpenAI's API, the sampled token even if it is not one of them."""
        wanted = self._plan.sampling.logprobs or 0
        top = {self._text(token): max(value, _LEAST_LOGPROB) for token, value in shown.logprob.top[:wanted]}
        top.setdefault(self._text(shown.token), max(shown.logprob.logprob, _LEAST_LOGPROB))
        return top

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._bundle.token_bytes.get(token, b"")
        return {
            "token": self._text(token),
            "logprob": max(logprob, _LEAST_LOGPROB),
            "bytes": list(raw),
        }

    def _text(self, token: int) -> str:
        return self._bundle.token_bytes.get(token, b"").decode("utf-8", "replace")


def usage(prompt_tokens: int, output_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
