"""Exact conversion of token ids to text, one token at a time: no broken characters, no text past a stop string.

Tokens are mapped to bytes, and an incremental UTF-8 decoder holds back a character until its last byte. That
is O(1) per token, unlike decoding a growing window of ids, and it need not guess whether a U+FFFD is text.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence

from tokenizers import Tokenizer

from medha.errors import CheckpointInvalid
from medha.wire.bundle_digest import Spelling, spelling_of

_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


def _byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's byte alphabet: printable bytes keep their character, the others are mapped to U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet.update({chr(0x100 + rank): byte for rank, byte in enumerate(others)})
    return alphabet


_BYTE_LEVEL_ALPHABET = _byte_level_alphabet()


def token_bytes(tokenizer: Tokenizer) -> dict[int, bytes]:
    """Return the UTF-8 bytes that each token stands for inside a text.

    Raises:
        CheckpointInvalid: the tokenizer has an unknown decoder.
    """
    try:
        spelling = spelling_of(json.loads(tokenizer.to_str())["decoder"])
    except CheckpointInvalid as error:
        raise CheckpointInvalid(f"tokenizer.json: {error}") from error
    bytes_of = _byte_level_bytes if spelling.byte_level else _spaced_bytes
    # By id: the library decodes an added token to its normalized form, which the vocabulary does not contain.
    table = {}
    for token, number in tokenizer.get_vocab(with_added_tokens=True).items():
        table[number] = bytes_of(tokenizer.id_to_token(number) or token, spelling)
    return table


def _byte_level_bytes(token: str, _: Spelling) -> bytes:
    try:
        return bytes([_BYTE_LEVEL_ALPHABET[character] for character in token])
    except KeyError:  # an added token is literal text
        return token.encode("utf-8")


def _spaced_bytes(token: str, spelling: Spelling) -> bytes:
    if spelling.byte_tokens and _BYTE_TOKEN.fullmatch(token):
        return bytes([int(token[3:5], 16)])
    return token.replace(spelling.space, " ").encode("utf-8")


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
