"""What a router must know of a model to turn text into token ids and back, named by its content.

A replica announces the digest of its bundle; a router that does not know it fetches the files over the
replica link (`FetchBundle`, `BundlePart`). The router needs no model volume.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

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
