"""Bundles: the files of a model that a router needs to turn text into token ids and back, named by their content.

A replica announces the digest of its bundle; a router that does not know it fetches the files over the
replica link (`FetchBundle`, `BundlePart`). The router needs no model volume.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from medha.errors import CheckpointInvalid

BUNDLE_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
"""Names of the files of a Hugging Face directory that belong to a bundle; only `tokenizer.json` must exist."""

MAX_BUNDLE_BYTES = 256 * 2**20
"""Largest bundle that a router accepts; the largest published tokenizers stay under 50 MB."""


def bundle_digest(files: Mapping[str, bytes]) -> str:
    """Return the SHA-256 of the names and contents of `files`, whatever their order; hexadecimal."""
    digest = hashlib.sha256()
    for name in sorted(files):
        encoded = name.encode("utf-8")
        digest.update(b"%d:%b%d:" % (len(encoded), encoded, len(files[name])))
        digest.update(files[name])
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Spelling:
    """The way in which the tokens of a vocabulary spell bytes."""

    byte_level: bool  # each character stands for a byte, in GPT-2's alphabet
    space: str = " "  # else: the character that stands for a space
    byte_tokens: bool = False  # whether `<0xE2>` is the byte E2


def spelling_of(decoder: Mapping[str, Any] | None) -> Spelling:
    """Return how each token of a `tokenizer.json` with this `decoder` spells bytes on its own.

    A decoder may strip a leading space of a whole text; generated text continues a prompt, and keeps the
    space.

    Raises:
        CheckpointInvalid: the decoder works in another way.
    """
    steps = [] if decoder is None else decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return Spelling(byte_level=True)
    # Known decoders consist of some of these, in this order, and nothing else.
    order = ("Replace", "Metaspace", "ByteFallback", "Fuse", "Strip")
    space = " "
    known = bool(kinds) and kinds == [kind for kind in order if kind in kinds]
    for step in steps:
        match step["type"]:
            case "Replace":
                space = step["pattern"].get("String")
                known &= step["content"] == " " and bool(space)
            case "Metaspace":
                known &= space == " "
                space = step["replacement"]
            case "Strip":
                known &= step["content"] == " " and step["stop"] == 0
    if not known:
        raise CheckpointInvalid(
            f"decoder is {kinds or None}; known are ByteLevel, Metaspace, and Replace (a text by a space), ByteFallback, Fuse "
            "and Strip (spaces in front) in this order"
        )
    return Spelling(byte_level=False, space=space, byte_tokens="ByteFallback" in kinds)
