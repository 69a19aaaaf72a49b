"""The table of whole tokens gives the library's ids for every text, and is not used for tokenizers that it does not know."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from medha_router.detokenize import token_bytes
from medha_router.tokenizer_bundle import Bundle
from medha_router.whole_tokens import WholeTokens

GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA_3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
O200K = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
EXPRESSIONS = {"Llama 3": LLAMA_3, "Qwen": QWEN, "o200k": O200K, "Tekken": TEKKEN}
ADDED = [
    AddedToken("<s>", special=True, normalized=False),
    AddedToken("<|im_start|>", special=True, normalized=False),
    AddedToken("<|im_end|>", special=True, normalized=False),
    AddedToken("<|im_end|>s", special=True, normalized=False),
    AddedToken("<left>", lstrip=True),
    AddedToken("<right>", rstrip=True),
    AddedToken("tool", single_word=True),
    AddedToken("né", normalized=True),
]
CORPUS = [
    "Hello world, hello you: 12 345 times. Don't! DON'T he'll I'LL; a_b Café naïve “quoted” — x…",
    "the quick brown fox jumps over the lazy dog; CamelCase HTTPServer x = y // 2\n\n    return x\r\n",
]
PIECES = [
    *("Hello", "world", "the", "The", "THE", "quick", "brownFox", "x1", "1234", "5", "don't", "DON'T", "'s", "'S", "'", "l'ÉTÉ"),
    *(" ", " ", " ", "  ", "\n", "\r\n", "\n\n", "\t", "\v", "\x1c", "\x85", "\u00a0", "\u2028", "\u3000", "\ufeff", "\x00"),
    *(".", ",", "...", "/", "//", "—", "“", "”", "€", "_", "é", "É", "ß", "e\u0301", "\u0301", "\u017f", "\u212a", "ª", "µ", "²", "½", "٣"),
    *("日本", "🙂", "ǅ", "ʰ", "<s>", "<|im_start|>", "<|im_end|>", "<|im_end|>s", "<left>", "<right>", "tool", "tools", "né", "ne\u0301", "<|"),
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=25).map("".join)


def byte_level(
    expression: str | None, *, nfc: bool = False, ignore_merges: bool = False, added: bool = True
) -> Tokenizer:
    """A trained tokenizer that splits by `expression`, or as GPT-2 does."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=expression is None)
    if expression is None:
        tokenizer.pre_tokenizer = level
    else:
        split = pre_tokenizers.Split(Regex(expression), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*CORPUS * 3, *PIECES], trainer)
    if added:
        tokenizer.add_tokens(ADDED)
        first = tokenizer.token_to_id("<s>")
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A <s>", special_tokens=[("<s>", first)]
        )
    return tokenizer


def with_unreachable_tokens() -> Tokenizer:
    """A tokenizer with tokens that its merges cannot make, though their text may be a word."""
    description = json.loads(byte_level(LLAMA_3, added=False).to_str())
    description["model"]["merges"] = description["model"]["merges"][::2]
    return Tokenizer.from_str(json.dumps(description))


TOKENIZERS = {
    "GPT-2": byte_level(None),
    **{name: byte_level(expression) for name, expression in EXPRESSIONS.items()},
    "composed": byte_level(QWEN, nfc=True),
    "without merges": byte_level(LLAMA_3, ignore_merges=True),
    "unreachable tokens": with_unreachable_tokens(),
    "nothing added": byte_level(LLAMA_3, added=False),
}


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60)
@given(text=TEXTS, part_characters=st.sampled_from([1, 7, 10**6]))
@example(text="tool <left> a  <right> the tool", part_characters=1)
@example(text="the \n\n the  \u0301e", part_characters=1)
@example(text="é the ne\u0301 <|im_end|>s the 日本 12345 the", part_characters=1)
def test_ids_are_those_of_the_library(name: str, text: str, part_characters: int) -> None:
    tokenizer = TOKENIZERS[name]
    table = TABLES[name, part_characters]
    assert table.encode(text).tolist() == tokenizer.encode(text, add_special_tokens=False).ids


def table_of(tokenizer: Tokenizer, part_characters: int) -> WholeTokens:
    found = WholeTokens.of(tokenizer, token_bytes(tokenizer), part_characters)
    assert found is not None
    return found


TABLES = {(name, size): table_of(one, size) for name, one in TOKENIZERS.items() for size in (1, 7, 10**6)}


def test_a_long_text_has_the_ids_of_the_library_with_and_without_special_tokens() -> None:
    tokenizer = TOKENIZERS["o200k"]
    bundle = Bundle({"tokenizer.json": tokenizer.to_str().encode()})
    text = " and ".join(PIECES * 120)
    for special in (False, True):
        expected = tokenizer.encode(text, add_special_tokens=special).ids
        ids = bundle.encode(text, add_special_tokens=special)
        assert ids.dtype == np.int32
        assert ids.tolist() == expected


def test_the_library_sees_only_what_is_not_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    table = TABLES["Llama 3", 10**6]

    def nothing(words: list[str], _: set[str]) -> dict[str, list[int]]:
        seen.extend(words)
        return {word: [] for word in words}

    monkeypatch.setattr(table, "_encode_words", nothing)
    table.encode("the quick world unheardof the 日本 the quick unheardof <s> the")
    assert seen == [" unheardof", " 日本 the", " <s> the"]


def changed(**fields: Any) -> Tokenizer:
    description = json.loads(TOKENIZERS["nothing added"].to_str())
    for name, value in fields.items():
        if isinstance(value, dict) and isinstance(description[name], dict):
            description[name] |= value
        else:
            description[name] = value
    return Tokenizer.from_str(json.dumps(description))


def with_added(content: str, **options: bool) -> Tokenizer:
    tokenizer = byte_level(LLAMA_3, added=False)
    tokenizer.add_tokens([AddedToken(content, **options)])
    return tokenizer


@pytest.mark.parametrize(
    "tokenizer",
    [
        changed(normalizer={"type": "NFKC"}),
        changed(normalizer={"type": "Lowercase"}),
        changed(model={"dropout": 0.1}),
        changed(model={"byte_fallback": True}),
        changed(model={"end_of_word_suffix": "</w>"}),
        changed(pre_tokenizer={"type": "ByteLevel", "add_prefix_space": True, "use_regex": True, "trim_offsets": True}),
        byte_level(r"\p{L}+ \p{L}+|."),
        with_added("two words"),
        with_added("end", rstrip=True),
    ],
)  # fmt: skip
def test_other_tokenizers_are_left_to_the_library(tokenizer: Tokenizer) -> None:
    assert WholeTokens.of(tokenizer, token_bytes(tokenizer)) is None
