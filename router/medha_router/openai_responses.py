"""OpenAI's response objects, as dictionaries: chat and text completions, whole and in chunks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from medha_router.detokenize import TextStream
from medha_router.generation import OutputPart, Piece, ScoredPrompt, ShownToken
from medha_router.prepare import Plan
from medha_router.thought_text import Thought
from medha_router.tokenizer_bundle import Bundle
from medha_router.tool_call_text import CallPart
from medha_router.tool_formats import FORMATS, call_id

_LEAST_LOGPROB = -9999.0
"""Stand-in for the logarithm of 0, which JSON cannot express; OpenAI's and vLLM's value."""


class Answers:
    """Builds the response objects of one request."""

    def __init__(
        self,
        request_id: str,
        created: int,
        plan: Plan,
        bundle: Bundle,
        scored_prompts: Mapping[int, ScoredPrompt],
    ) -> None:
        """`scored_prompts` are filled before the first output of their prompts, if log-probabilities of them are asked for."""
        self._scored_prompts = scored_prompts
        self._chat = plan.endpoint == "chat"
        self._plan = plan
        self._bundle = bundle
        kind = ("chat.completion", "chat.completion.chunk") if self._chat else ("text_completion",) * 2
        head = {"id": request_id, "created": created, "model": plan.model}
        self._id = request_id
        self._whole_head = {**head, "object": kind[0]}
        self._chunk_head = {**head, "object": kind[1]}

    def whole(self, pieces: list[Piece], usage: dict[str, Any]) -> dict[str, Any]:
        """Return the object of a request that is not streamed; `pieces` has one whole piece per choice."""
        choices = []
        for piece in pieces:
            choice: dict[str, Any] = {"index": piece.index, "finish_reason": _finish_reason(piece)}
            if self._chat:
                choice["message"] = self._message(piece)
            else:
                choice["text"] = self._echo(piece.index) + piece.text
            choice["logprobs"] = self._logprobs(piece.tokens, len(self._echo(piece.index)))
            if self._plan.echo_logprobs:
                echoed = self._echoed_logprobs(piece.index)
                choice["logprobs"] = {
                    name: echoed[name] + found for name, found in choice["logprobs"].items()
                }
            if self._plan.prompt_logprobs is not None and not self._chat:
                choice["prompt_logprobs"] = self._prompt_logprobs(piece.index // self._plan.samples)
            choices.append(choice)
        whole = {**self._whole_head, "choices": choices, "usage": usage}
        if self._plan.prompt_logprobs is not None and self._chat:
            whole["prompt_logprobs"] = self._prompt_logprobs(0)
        return whole

    def _message(self, piece: Piece) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": piece.text, "refusal": None}
        thoughts, calls = piece.thoughts, whole_calls(piece)
        if piece.has_thoughts or calls:
            message["content"] = piece.text or None
        if thoughts:
            message |= _named_thoughts(thoughts)
        if calls:
            message["tool_calls"] = [
                {
                    "id": self._call_id(piece.index, call.call),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in calls
            ]
        return message

    def _call_id(self, index: int, call: int) -> str:
        assert self._plan.tools is not None
        short = FORMATS[self._plan.tools.format].short_ids
        return call_id(self._id, index, call, short=short)

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return the first chunk of a choice: a chat's names the role, a text completion's has the echo, if there is one."""
        if not self._chat:
            if self._plan.echo is None:
                return None
            logprobs = self._echoed_logprobs(index) if self._plan.echo_logprobs else None
            echo = {"index": index, "text": self._echo(index), "logprobs": logprobs, "finish_reason": None}
            return self._chunk(echo)
        delta = {"role": "assistant", "content": "" if self._plan.tools is None else None}
        return self._chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """Return the chunks for new output. A chat's finish reason comes alone, after its text."""
        logprobs = self._logprobs(piece.tokens, len(self._echo(piece.index)))
        head: dict[str, Any] = {"index": piece.index}
        if not self._chat:
            text = {"text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish_reason}
            return [self._chunk({**head, **text})]
        deltas = [self._delta(piece.index, part) for part in piece.parts]
        if not deltas and piece.tokens:
            deltas = [{"content": ""}]
        chunks = []
        for delta in deltas:  # the first one has the log-probabilities of all
            chunks.append(self._chunk({**head, "delta": delta, "logprobs": logprobs, "finish_reason": None}))
            logprobs = None
        if piece.finish_reason is not None:
            end: dict[str, Any] = {"delta": {}, "logprobs": None, "finish_reason": _finish_reason(piece)}
            chunks.append(self._chunk({**head, **end}))
        return chunks

    def _delta(self, index: int, part: OutputPart) -> dict[str, Any]:
        """Return the delta of a chunk for text, thoughts or a call; the first part of a call has its id and name."""
        if isinstance(part, str):
            return {"content": part}
        if isinstance(part, Thought):
            return _named_thoughts(part.text)
        call: dict[str, Any] = {"index": part.call, "function": {"arguments": part.arguments}}
        if part.name is not None:
            call |= {"id": self._call_id(index, part.call), "type": "function"}
            call["function"] = {"name": part.name, "arguments": part.arguments}
        return {"tool_calls": [call]}

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Return the last chunk of a stream whose client asked for `include_usage`."""
        return {**self._chunk_head, "choices": [], "usage": usage}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._chunk_head, "choices": [choice]}
        if self._plan.include_usage:
            chunk["usage"] = None
        return chunk

    def _echo(self, index: int) -> str:
        """Return the text of a choice's prompt, with which its output begins; empty without `echo`."""
        return "" if self._plan.echo is None else self._plan.echo[index // self._plan.samples]

    def _echoed_logprobs(self, index: int) -> dict[str, list[Any]]:
        """Return the log-probabilities of a choice's prompt in the form of a text completion's; the first token has none."""
        scored, text = self._scored_prompts[index // self._plan.samples], self._echo(index)
        stream, offset = TextStream(), 0
        offsets = []
        for token in scored.ids.tolist():
            offsets.append(offset)
            hidden = self._plan.skip_special_tokens and token in self._bundle.special_ids
            offset += 0 if hidden else len(stream.feed(self._bundle.token_bytes.get(token, b"")))
        # Characters of the first token, such as a leading space, that the text does not have.
        omitted = max(offset - len(text), 0)
        shown = [ShownToken(token, logprob, 0) for token, logprob, _ in scored.tokens()]
        return {
            "tokens": [self._text(token) for token in scored.ids.tolist()],
            "token_logprobs": [None, *(max(one.logprob.logprob, _LEAST_LOGPROB) for one in shown)],
            "top_logprobs": [None, *map(self._completion_top, shown)],
            "text_offset": [max(offset - omitted, 0) for offset in offsets],
        }

    def _prompt_logprobs(self, prompt_index: int) -> list[dict[str, dict[str, Any]] | None]:
        """Return vLLM's `prompt_logprobs`: by token id, for each token of the prompt but the first."""
        wanted = self._plan.prompt_logprobs or 0
        found: list[dict[str, dict[str, Any]] | None] = [None]
        for token, logprob, rank in self._scored_prompts[prompt_index].tokens():
            ranked = {token: (logprob.logprob, rank)}
            for place, (other, value) in enumerate(logprob.top[:wanted], start=1):
                ranked.setdefault(other, (value, place))
            found.append(
                {
                    str(one): {
                        "logprob": max(value, _LEAST_LOGPROB),
                        "rank": place,
                        "decoded_token": self._text(one),
                    }
                    for one, (value, place) in ranked.items()
                }
            )
        return found

    def _logprobs(self, tokens: list[ShownToken], offset: int = 0) -> dict[str, Any] | None:
        """Return the log-probabilities of output tokens; `offset` characters go before the output."""
        if self._plan.sampling.logprobs is None:
            return None
        if self._chat:
            return {"content": [self._chat_logprob(shown) for shown in tokens], "refusal": None}
        return {
            "tokens": [self._text(shown.token) for shown in tokens],
            "token_logprobs": [max(shown.logprob.logprob, _LEAST_LOGPROB) for shown in tokens],
            "top_logprobs": [self._completion_top(shown) for shown in tokens],
            "text_offset": [offset + shown.offset for shown in tokens],
        }

    def _chat_logprob(self, shown: ShownToken) -> dict[str, Any]:
        wanted = self._plan.sampling.logprobs or 0
        top = [self._entry(token, logprob) for token, logprob in shown.logprob.top[:wanted]]
        return {**self._entry(shown.token, shown.logprob.logprob), "top_logprobs": top}

    def _completion_top(self, shown: ShownToken) -> dict[str, float]:
        """Return the alternatives and, as in OpenAI's API, the sampled token even if it is not one of them.

        Of tokens with one text, such as parts of characters, the sampled one counts, or else the most probable.
        """
        wanted = self._plan.sampling.logprobs or 0
        top: dict[str, float] = {}
        for token, value in shown.logprob.top[:wanted]:
            top.setdefault(self._text(token), max(value, _LEAST_LOGPROB))
        top[self._text(shown.token)] = max(shown.logprob.logprob, _LEAST_LOGPROB)
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


def _named_thoughts(text: str) -> dict[str, str]:
    """Return the fields of thoughts: DeepSeek's and SGLang's name, and vLLM's."""
    return {"reasoning_content": text, "reasoning": text}


def whole_calls(piece: Piece) -> list[CallPart]:
    """Return the calls of a whole piece, each as one part."""
    found: dict[int, CallPart] = {}
    for part in piece.parts:
        if isinstance(part, CallPart):
            before = found.get(part.call)
            found[part.call] = (
                part if before is None else replace(before, arguments=before.arguments + part.arguments)
            )
    return list(found.values())


def _finish_reason(piece: Piece) -> str | None:
    return "tool_calls" if piece.ends_with_calls else piece.finish_reason


def usage(prompt_tokens: int, output_tokens: int, cached_tokens: int, thought_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": thought_tokens},
    }
