"""Exact conversion of token ids to text, one token at a time: no broken characters, no text past a stop string.

Tokens are mapped to bytes, and an incremental UTF-8 decoder holds back a character until its last byte. That
is O(1) per token, unlike decoding a growing window of ids, and it need not guess whether a U+FFFD is text.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence

from tokenizers import Tokenizer

from medha.wire.token_bytes import spelled_bytes


def token_bytes(tokenizer: Tokenizer) -> dict[int, bytes]:
    """Return the UTF-8 bytes that each token stands for inside a text.

    Raises:
        CheckpointInvalid: the tokenizer has an unknown decoder.
    """
    # By id: the library decodes an added token to its normalized form, which the vocabulary does not contain.
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    tokens = {number: tokenizer.id_to_token(number) or token for token, number in vocabulary.items()}
    return spelled_bytes(tokens, json.loads(tokenizer.to_str())["decoder"])


class TextStream:
    """The text of one sequence as its tokens arrive."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: bytes) -> str:
        """Return the characters that `token` completes; may be empty."""
        return self._decoder.decode(token)

    def end(self) -> str:
        """Return U+FFFD if the sequence ended inside a character, else nothing."""
        return self._decoder.decode(b"", True)


class StopStrings:
    """Finds the stop string that is completed first, and holds back text that could begin one.

    If several end at the same character, the one listed first counts. The result does not depend on how the
    text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = [stop for stop in stops if stop]
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self._include = include
        self._held = ""

    def feed(self, text: str, *, may_end: bool = True) -> tuple[str, bool]:
        """Return the text that may be shown now, and whether a stop string ended the sequence.

        Without `may_end`, a stop string that ends inside `text` is ordinary text; one that begins there may
        still end later.
        """
        if not self._stops:
            return text, False
        seen = len(self._held)
        text = self._held + text
        if may_end:
            found = []
            for order, stop in enumerate(self._stops):
                # A match inside the held text was complete before it could count.
                start = text.find(stop, max(0, seen - len(stop) + 1))
                if start >= 0:
                    found.append((start + len(stop), order, start))
            if found:
                end, _, start = min(found)
                self._held = ""
                return text[: end if self._include else start], True
        keep = self._possible_start(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def end(self) -> str:
        """Return the text that was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """Return the length of the longest suffix of `text` that is a proper prefix of a stop string."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
