"""Text from token ids: whole characters only, and nothing of a stop string."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

from medha.errors import CheckpointInvalid
from medha_router.detokenize import StopStrings, TextStream, token_bytes
from medha_router.tokenizer_bundle import Bundle


def streamed(table: dict[int, bytes], ids: list[int]) -> list[str]:
    stream = TextStream()
    return [*(stream.feed(table[number]) for number in ids), stream.end()]


@given(text=st.text(max_size=40))
def test_the_pieces_of_any_text_make_it_again_and_none_is_broken(bundle: Bundle, text: str) -> None:
    ids = bundle.encode(text, add_special_tokens=False).tolist()
    pieces = streamed(bundle.token_bytes, ids)
    assert "".join(pieces) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@given(data=st.data())
def test_any_token_sequence_decodes_as_the_tokenizers_library_decodes_it(
    bundle: Bundle, bundle_files: dict[str, bytes], data: st.DataObject
) -> None:
    tokenizer = Tokenizer.from_buffer(bundle_files["tokenizer.json"])
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=12))
    assert "".join(streamed(bundle.token_bytes, ids)) == tokenizer.decode(ids, skip_special_tokens=False)


def sentencepiece_like() -> Tokenizer:
    """Llama 2's shape: `▁` for spaces, byte tokens for what has no piece of its own."""
    vocabulary = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    for piece in ("▁", "▁Hi", "▁you", "é", "a"):
        vocabulary[piece] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def test_byte_fallback_pieces_are_held_back_until_the_character_is_whole() -> None:
    tokenizer = sentencepiece_like()
    vocabulary = tokenizer.get_vocab()
    names = ["▁Hi", "▁you", *(f"<0x{byte:02X}>" for byte in "🙂".encode()), "é"]
    ids = [vocabulary[name] for name in names]
    assert streamed(token_bytes(tokenizer), ids) == [" Hi", " you", "", "", "", "🙂", "é", ""]
    assert " " + tokenizer.decode(ids) == " Hi you🙂é"


def test_a_sequence_that_ends_inside_a_character_ends_with_the_replacement_character() -> None:
    assert streamed({0: b"ab\xf0", 1: b"\x9f"}, [0, 1]) == ["ab", "", "\ufffd"]


def test_a_tokenizer_that_decodes_in_another_way_is_refused_with_its_name() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(CheckpointInvalid, match="WordPiece"):
        token_bytes(tokenizer)


def cut(
    text: str, stops: list[str], pieces: list[int], include: bool = False, ordinary: int = 0
) -> tuple[str, bool]:
    """What is shown of `text` fed in pieces of these lengths, of which the first `ordinary` may not end it."""
    matcher = StopStrings(stops, include=include)
    shown = ""
    position = 0
    for number, length in enumerate([*pieces, len(text)]):
        piece, position = text[position : position + length], position + length
        new, stopped = matcher.feed(piece, may_end=number >= ordinary)
        shown += new
        if stopped:
            return shown, True
    return shown + matcher.end(), False


@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    pieces=st.lists(st.integers(1, 4), max_size=20),
    ordinary=st.integers(0, 20),
    include=st.booleans(),
)
def test_text_ends_at_the_stop_string_that_is_complete_first_however_it_is_cut(
    text: str, stops: list[str], pieces: list[int], ordinary: int, include: bool
) -> None:
    ordinary = min(ordinary, len(pieces))
    behind = sum(pieces[:ordinary])  # characters that no stop string may end within
    found = [
        (end, order, end - len(stop))
        for order, stop in enumerate(stops)
        for end in range(behind + 1, len(text) + 1)
        if text[:end].endswith(stop)
    ]
    end, _, start = min(found, default=(len(text), 0, len(text)))
    expected = text[: end if include else start], bool(found)
    assert cut(text, stops, pieces, include, ordinary) == expected
    one_by_one = [1] * len(text)
    assert cut(text, stops, one_by_one, include, min(behind, len(text))) == expected


def test_of_two_stop_strings_that_end_together_the_one_listed_first_counts() -> None:
    assert cut("one two", ["two", "e two"], [1] * 7) == ("one ", True)
    assert cut("one two", ["e two", "two"], [1] * 7) == ("on", True)


def test_only_what_could_begin_a_stop_string_is_held_back() -> None:
    matcher = StopStrings(["\n\nUser:"])
    assert matcher.feed("Hello\n") == ("Hello", False)
    assert matcher.feed("World\n\nUs") == ("\nWorld", False)
    assert matcher.feed("e") == ("", False)
    assert matcher.end() == "\n\nUse"


def test_a_stop_string_can_be_kept_in_the_output() -> None:
    assert cut("one two three", ["two"], [2, 2, 2], include=True) == ("one two", True)


def test_a_bundle_without_a_tokenizer_says_what_is_missing() -> None:
    with pytest.raises(CheckpointInvalid, match=r"tokenizer\.json"):
        Bundle({"tokenizer_config.json": json.dumps({}).encode()})
