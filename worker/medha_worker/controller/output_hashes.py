"""Hashes of the blocks that outputs fill, so that the next turn of a chat finds the last answer cached."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from medha.kv.prefix_cache import PromptHash


@dataclass(slots=True)
class _Output:
    hash: PromptHash  # of the prompt and the output without `tokens`
    missing: int  # length of `tokens` that completes a block
    tokens: list[int] = field(default_factory=list)  # output tokens that are not hashed yet


class OutputHasher:
    """Hashes the outputs of running requests.

    It computes one hash per block; any other token costs an append to a list.
    """

    def __init__(self) -> None:
        self._outputs: dict[str, _Output] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._outputs

    def __len__(self) -> int:
        return len(self._outputs)

    def begin(self, request_id: str, prompt: PromptHash) -> None:
        """Follow a request with this prompt, whose first output token comes next."""
        self._outputs[request_id] = _Output(prompt.fork(), prompt.missing_tokens)

    def add(self, request_id: str, token: int) -> str:
        """Add an output token of a request that has begun.

        Return the hash of the block that it fills, or "".
        """
        output = self._outputs[request_id]
        output.tokens.append(token)
        if len(output.tokens) < output.missing:
            return ""
        output.hash.update(np.array(output.tokens, dtype=np.int32))
        output.tokens.clear()
        output.missing = output.hash.missing_tokens
        return output.hash.take()

    def end(self, request_id: str) -> None:
        """Stop following a request; does nothing if it has not begun."""
        self._outputs.pop(request_id, None)
