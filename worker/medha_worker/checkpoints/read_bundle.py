"""Reads the bundle of a checkpoint directory: the files that a router needs to serve the model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from medha.errors import CheckpointInvalid
from medha.wire.bundle_digest import BUNDLE_FILES, bundle_digest
from medha_worker.checkpoints.end_of_text import eos_token_ids
from medha_worker.checkpoints.tokenizer_files import whole_tokenizer
from medha_worker.readable import require_readable

_OTHER_TOKENIZERS = ("tiktoken.model", "tokenizer.model", "tekken.json", "vocab.json")
"""Files with tokenizers in other forms, as published checkpoints have them."""


@dataclass(frozen=True, slots=True)
class Bundle:
    digest: str
    files: dict[str, bytes]
    eos_token_ids: tuple[int, ...]
    """Ids of the tokens that end a text; routers need to know only whether there is one."""


def read_bundle(directory: Path) -> Bundle:
    """Read the bundle of a checkpoint directory, with its tokenizer completed.

    Raises:
        CheckpointInvalid: there is no tokenizer.json, which every router needs; the tokenizer cannot be
            served exactly; a file may not be read; or `eos_token_id` is no id.
    """
    for name in BUNDLE_FILES:
        require_readable(directory / name)
    files = {name: (directory / name).read_bytes() for name in BUNDLE_FILES if (directory / name).is_file()}
    if "tokenizer.json" not in files:
        for other in _OTHER_TOKENIZERS:
            if (directory / other).is_file():
                raise CheckpointInvalid(
                    f"{directory / 'tokenizer.json'} is missing, and {other} is not read; fetch a checkpoint that has the first, or "
                    "make it from the other (for most models, save_pretrained of the fast tokenizer of transformers writes it)"
                )
        raise CheckpointInvalid(
            f"{directory / 'tokenizer.json'} is missing; fetch the checkpoint with its tokenizer"
        )
    files |= whole_tokenizer(directory)
    return Bundle(bundle_digest(files), files, eos_token_ids(directory))
