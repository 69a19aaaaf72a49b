"""Encoding of plain text by a table of the words that are one token each; the ids are those of the library.

Byte-level BPE first splits a text into words by a regular expression, and then encodes each word on its own. Most
words are one token, and finding them in a table takes a fifth of the library's time. The words that are not, and
everything unusual, go to the library.

Three facts make the ids equal:

* An entry is in the table only if the library encodes it to that one id.
* The expressions (`_EXPRESSIONS`) are known, and are translated for plain characters only: ASCII, the letters of
  Latin-1 and typographic marks. What they mean by a letter, a digit and a space does not depend on a version of Unicode.
* A text is cut only between an ASCII letter or digit and a space. No match of these expressions goes over such a
  cut or looks beyond it, no added token contains one, and Unicode's composition (NFC) changes nothing across it. So
  whatever lies around a character that is not plain, or around an added token, goes to the library as a whole.

The table is fixed when it is made: how long a text takes does not depend on the texts of others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from itertools import chain, groupby, repeat
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from medha.wire.frames import TokenIds

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_EXPRESSIONS = frozenset(
    [
        _GPT_2,
        *(  # cl100k and Llama 3, with up to three digits, and Qwen 2 and 3, with one
            rf"{_SHORT}|{_BEFORE}\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
            for digits in (r"\p{N}{1,3}", r"\p{N}")
        ),
        *(  # o200k and Llama 4, and Mistral's Tekken, which knows no short forms
            rf"{_BEFORE}{_UPPER}*{_LOWER}+{short}|{_BEFORE}{_UPPER}+{_LOWER}*{short}|{digits}"
            rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
            for short, digits in ((f"{_SHORT}?", r"\p{N}{1,3}"), ("", r"\p{N}"))
        ),
    ]
)
_CAPITALS, _SMALL = "A-ZÀ-ÖØ-Þ", "a-zß-öø-ÿ"
_PLAIN_CLASSES = {"L": _CAPITALS + _SMALL, "Lu": _CAPITALS, "Ll": _SMALL, "Lt": "", "Lm": "", "Lo": "", "M": "", "N": "0-9"}  # fmt: skip
"""The plain characters of each class of Unicode, as they stand between brackets."""
_NOT_PLAIN = re.compile(r"[^\x00-\x7fÀ-ÖØ-öø-ÿ\u2010-\u2027€]")
_CUT = re.compile(r"(?<=[A-Za-z0-9]) ")
_LETTERS_AND_DIGITS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789")
PART_CHARACTERS = 16_384
"""About as many characters are split while the interpreter lock is held: for less than a millisecond."""
_CHECKED_AT_ONCE = 8192


class WholeTokens:
    """Encodes texts with the ids of one tokenizer. Immutable, so threads may share it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        expression: str,
        token_bytes: Mapping[int, bytes],
        added: frozenset[str],
        part_characters: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._part_characters = part_characters
        self._words = re.compile(_for_plain_characters(expression), re.ASCII)
        self._added = re.compile(_any_of(sorted(added))) if added else None
        self._table = dict(self._whole(token_bytes, added))

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, token_bytes: Mapping[int, bytes], part_characters: int = PART_CHARACTERS
    ) -> WholeTokens | None:
        """Return the table of a tokenizer, None if it is of a kind that must be left to the library.

        `token_bytes` has the bytes that each token stands for.
        """
        description = json.loads(tokenizer.to_str())
        expression = _expression(description)
        added = description["added_tokens"]
        if expression is None or not all(map(_keeps_cuts, added)):
            return None
        contents = frozenset(token["content"] for token in added)
        return cls(tokenizer, expression, token_bytes, contents, part_characters)

    def encode(self, text: str) -> TokenIds:
        """Return the token ids of `text` without special tokens around it, int32 [n]."""
        words: list[str] = []
        unusual: set[str] = set()
        found: list[TokenIds] = []
        for start, end, is_plain in self._parts(text):
            new = self._words.findall(text, start, end) if is_plain else [text[start:end]]
            words += new
            if not is_plain:
                unusual.update(new)
            found.append(np.fromiter(map(self._table.get, new, repeat(-1)), dtype=np.int32, count=len(new)))
        ids = np.concatenate(found) if found else np.empty(0, dtype=np.int32)
        missing = np.flatnonzero(ids < 0)
        if not len(missing):
            return ids
        missing_words = [words[index] for index in missing]
        spelled = self._encode_words(list(dict.fromkeys(missing_words)), unusual)
        parts = [spelled[word] for word in missing_words]
        counts = np.ones(len(ids), dtype=np.int64)
        counts[missing] = list(map(len, parts))
        ids = np.repeat(ids, counts)
        ids[ids < 0] = list(chain.from_iterable(parts))
        return ids

    def _encode_words(self, words: list[str], unusual: set[str]) -> dict[str, list[int]]:
        """Return the ids of each text; those in `unusual` are longer than a word."""
        plain = [word for word in words if word not in unusual]
        return _encode_each(self._tokenizer, plain) | {
            text: encode_text(self._tokenizer, text).tolist() for text in words if text in unusual
        }

    def _parts(self, text: str) -> Iterator[tuple[int, int, bool]]:
        """Yield start, end and whether it is plain, for parts that cover `text` and begin and end at cuts."""
        done = 0
        for first, last in self._unusual(text):
            yield from self._plain_parts(text, done, first)
            yield first, last, False
            done = last
        yield from self._plain_parts(text, done, len(text))

    def _plain_parts(self, text: str, start: int, end: int) -> Iterator[tuple[int, int, bool]]:
        while end - start > self._part_characters:
            cut = _CUT.search(text, start + self._part_characters, end)
            if cut is None:
                break
            yield start, cut.start(), True
            start = cut.start()
        if start < end:
            yield start, end, True

    def _unusual(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield start and end of what the library must see as a whole: from cut to cut."""
        searches = [] if text.isascii() else [_NOT_PLAIN]
        if self._added is not None:
            searches.append(self._added)
        next_ones = [one.search(text) for one in searches]
        done = 0
        while any(next_ones):
            match = min((one for one in next_ones if one is not None), key=lambda one: one.start())
            start = _last_cut(text, done, match.start())
            cut = _CUT.search(text, match.end())
            end = len(text) if cut is None else cut.start()
            yield start, end
            done = end
            for index, one in enumerate(next_ones):
                if one is not None and one.start() < end:
                    next_ones[index] = searches[index].search(text, end)

    def _whole(self, token_bytes: Mapping[int, bytes], added: frozenset[str]) -> Iterator[tuple[str, int]]:
        texts = []
        for content in token_bytes.values():
            try:
                text = content.decode("utf-8")
            except UnicodeDecodeError:  # a part of a character, which is no word
                continue
            if text and text not in added:
                texts.append(text)
        for start in range(0, len(texts), _CHECKED_AT_ONCE):
            checked = texts[start : start + _CHECKED_AT_ONCE]
            encodings = self._tokenizer.encode_batch_fast(checked, add_special_tokens=False)
            for text, encoding in zip(checked, encodings, strict=True):
                if len(encoding) == 1:
                    yield text, encoding.ids[0]


def encode_text(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False) -> TokenIds:
    """Return the ids that the library gives, int32 [n]."""
    # This call of the library lets other threads run meanwhile; `encode` does not.
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return np.asarray(encoding.ids, dtype=np.int32)


def _encode_each(tokenizer: Tokenizer, words: list[str]) -> dict[str, list[int]]:
    # As one text of given words: a batch would occupy every core, however short its texts are.
    (encoding,) = tokenizer.encode_batch([words], is_pretokenized=True, add_special_tokens=False)
    found: dict[str, list[int]] = {word: [] for word in words}
    for word, number in zip(encoding.word_ids, encoding.ids, strict=True):
        assert word is not None  # each id is of a given word
        found[words[word]].append(number)
    return found


def _last_cut(text: str, start: int, end: int) -> int:
    """Return the last cut after `start` and before `end`, or else `start`."""
    space = text.rfind(" ", start, end)
    while space > start:
        if text[space - 1] in _LETTERS_AND_DIGITS:
            return space
        space = text.rfind(" ", start, space)
    return start


def _expression(description: Mapping[str, Any]) -> str | None:
    """Return the expression that splits texts into words, None if there is none or more happens than that."""
    model, before = description["model"], description["pre_tokenizer"] or {}
    others = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    is_byte_level_bpe = model["type"] == "BPE" and not any(map(model.get, others))
    normalizer = description["normalizer"]
    if not is_byte_level_bpe or not (normalizer is None or normalizer == {"type": "NFC"}):
        return None
    match before:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return _GPT_2
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        } if expression in _EXPRESSIONS:
            return str(expression)
    return None


def _keeps_cuts(token: Mapping[str, Any]) -> bool:
    """Return True if an added token neither contains a cut nor takes the space of one that follows it."""
    content = token["content"]
    is_taker = token["rstrip"] and content[-1:] in _LETTERS_AND_DIGITS
    return bool(content) and not any(map(str.isspace, content)) and not is_taker


def _for_plain_characters(expression: str) -> str:
    """Return an expression for Python that splits plain characters as `expression` does."""
    parts = re.split(r"\\p\{(\w+)\}", expression)
    translated = ""
    for index, part in enumerate(parts):
        if index % 2 == 0:
            translated += part
        elif translated.rfind("[") > translated.rfind("]"):
            translated += _PLAIN_CLASSES[part]
        else:
            translated += f"[{_PLAIN_CLASSES[part]}]"
    return translated


def _any_of(words: list[str]) -> str:
    """Return an expression that finds where any of some sorted words begins; thousands cost little more than one."""
    first, last = words[0], words[-1]
    alike = next(
        (at for at, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), len(first)
    )
    prefix = first[:alike]
    if prefix == first:
        return re.escape(prefix)
    rests = [word[alike:] for word in words]
    branches = [_any_of(list(group)) for _, group in groupby(rests, key=lambda rest: rest[0])]
    return f"{re.escape(prefix)}(?:{'|'.join(branches)})"
