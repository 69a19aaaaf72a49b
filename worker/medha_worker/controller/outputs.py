"""Hashes of the blocks that outputs fill, so that the next turn of a chat finds the answer before it cached, too."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from medha.kv.prefix_cache import PromptHash


@dataclass(slots=True)
class _Output:
    hash: PromptHash  # of prompt and output, up to the last whole block
    missing: int  # tokens until the next block is whole
    tokens: list[int] = field(default_factory=list)  # since then


class OutputHasher:
    """Follows the outputs of running requests. Cost: one hash for each block, nothing but a list for other tokens."""

    def __init__(self) -> None:
        self._outputs: dict[str, _Output] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._outputs

    def __len__(self) -> int:
        return len(self._outputs)

    def begin(self, request_id: str, prompt: PromptHash) -> None:
        """The first output token of a request with this prompt comes next."""
        self._outputs[request_id] = _Output(prompt.fork(), prompt.missing_tokens)

    def add(self, request_id: str, token: int) -> str:
        """Take an output token of a request that has begun; returns the hash of the block that it fills, or nothing."""
        output = self._outputs[request_id]
        output.tokens.append(token)
        if len(output.tokens) < output.missing:
            return ""
        output.hash.update(np.array(output.tokens, dtype=np.int32))
        output.tokens.clear()
        output.missing = output.hash.missing_tokens
        return output.hash.take()

    def end(self, request_id: str) -> None:
        """No more of it counts; nothing happens to a request that has not begun."""
        self._outputs.pop(request_id, None)
