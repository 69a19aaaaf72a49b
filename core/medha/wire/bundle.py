"""What a router must know of a model to turn text into token ids and back, named by its content.

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
"""Files of a Hugging Face directory that belong to a bundle; only `tokenizer.json` must exist."""

MAX_BUNDLE_BYTES = 256 * 2**20
"""A router refuses larger bundles: the largest published tokenizers stay under 50 MB."""


def bundle_digest(files: Mapping[str, bytes]) -> str:
    """SHA-256 over the names and contents of `files`, whatever their order; hexadecimal."""
    digest = hashlib.sha256()
    for name in sorted(files):
        encoded = name.encode("utf-8")
        digest.update(b"%d:%b%d:" % (len(encoded), encoded, len(files[name])))
        digest.update(files[name])
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Spelling:
    """How the tokens of a vocabulary spell bytes."""

    byte_level: bool  # each character stands for a byte, in GPT-2's alphabet
    space: str = " "  # else: what stands for a space
    byte_tokens: bool = False  # and `<0xE2>` is the byte E2


def spelling_of(decoder: Mapping[str, Any] | None) -> Spelling:
    """How the tokens of a `tokenizer.json` with this `decoder` spell bytes, each for itself.

    A decoder may strip a space in front of a whole text; what is generated goes on from a prompt, and keeps it.

    Raises:
        CheckpointInvalid: the decoder works in another way.
    """
    steps = [] if decoder is None else decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return Spelling(byte_level=True)
    # In this order, and nothing else: some of these, the first one at least.
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
