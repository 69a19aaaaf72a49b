"""The bytes that each token of a vocabulary stands for inside a text.

Routers turn tokens into text with them, and ranks need them to know which tokens a grammar allows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

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


def spelled_bytes(tokens: Mapping[int, str], decoder: Mapping[str, Any] | None) -> dict[int, bytes]:
    """Return the UTF-8 bytes of each token, by id.

    `decoder` is that of `tokenizer.json`.

    Raises:
        CheckpointInvalid: the decoder is unknown.
    """
    try:
        spelling = spelling_of(decoder)
    except CheckpointInvalid as error:
        raise CheckpointInvalid(f"tokenizer.json: {error}") from error
    bytes_of = _byte_level_bytes if spelling.byte_level else _spaced_bytes
    return {number: bytes_of(token, spelling) for number, token in tokens.items()}


def _byte_level_bytes(token: str, _: Spelling) -> bytes:
    try:
        return bytes([_BYTE_LEVEL_ALPHABET[character] for character in token])
    except KeyError:  # an added token is literal text
        return token.encode("utf-8")


def _spaced_bytes(token: str, spelling: Spelling) -> bytes:
    if spelling.byte_tokens and _BYTE_TOKEN.fullmatch(token):
        return bytes([int(token[3:5], 16)])
    return token.replace(spelling.space, " ").encode("utf-8")
