"""Prompts for the `needle` preset: filler of a given length, with passkeys at even depths."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import Tokenizer

from medha.errors import ConfigInvalid
from medha_worker.checkpoints.needle_model import NAMES, SENTENCES

_DIGITS = "0123456789"


@dataclass(frozen=True)
class Haystack:
    """A text and the passkeys in it.

    Attributes:
        text: The context of the questions; a `question` is appended to it unchanged.
        tokens: Length of the text in tokens, the beginning-of-text marker included.
        passkeys: Five different digits by name, in the order of the text.
        positions: Position of each name, in tokens.
    """

    text: str
    tokens: int
    passkeys: Mapping[str, str]
    positions: Mapping[str, int]


def question(name: str) -> str:
    """Return the prompt that the model answers with `name`'s passkey (a space, its digits) and an end."""
    return f" The passkey of {name} ->"


def make_haystack(tokenizer: Tokenizer, tokens: int, *, seed: int, needles: int = 11) -> Haystack:
    """Make a text of `tokens` tokens (at most 10 fewer), the first needle at its start, the last at its end.

    Raises:
        ConfigInvalid: there are not so many names, or `tokens` has no room for so many needles.
    """
    if not 2 <= needles <= len(NAMES):
        raise ConfigInvalid(
            f"needles is {needles}; it must be 2 to {len(NAMES)}, which is how many names there are"
        )
    stream = random.Random(seed)  # noqa: S311 - reproducible, not secret
    passkeys = {name: "".join(stream.sample(_DIGITS, 5)) for name in stream.sample(NAMES, needles)}
    hidden = {name: f"{question(name)} {passkey}." for name, passkey in passkeys.items()}

    def length(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    # Sentences begin with a space and end with a full stop, so that lengths add up.
    filler = [f" {sentence}" for sentence in SENTENCES]
    filler_tokens = [length(sentence) for sentence in filler]
    needle_tokens = max(map(length, hidden.values()))
    before_name = length(" The passkey of")
    # At least one sentence follows every needle, so that its name is out of reach where the next one occurs.
    last = tokens - needle_tokens - 2 * max(filler_tokens)
    if last < (needles - 1) * (needle_tokens + 2 * max(filler_tokens)):
        raise ConfigInvalid(f"tokens is {tokens}, which is too short for {needles} needles; ask for fewer")

    sentences, positions, written = [], {}, 1  # the beginning-of-text marker
    for index, (name, sentence) in enumerate(hidden.items()):
        goal = last * index // (needles - 1)
        while written < goal:
            chosen = stream.randrange(len(filler))
            sentences.append(filler[chosen])
            written += filler_tokens[chosen]
        positions[name] = written + before_name
        sentences.append(sentence)
        written += length(sentence)
    while True:
        chosen = stream.randrange(len(filler))
        if written + filler_tokens[chosen] > tokens:
            break
        sentences.append(filler[chosen])
        written += filler_tokens[chosen]
    return Haystack("".join(sentences), written, passkeys, positions)
