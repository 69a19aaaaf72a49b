"""A draft is what followed the last tokens where they occurred before, in the prompt or in the output."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from medha.scheduler import prompt_lookup
from medha.scheduler.prompt_lookup import GRAM_TOKENS, PromptLookup


def ids_of(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def followed(prompt: list[int], outputs: list[int], draft_tokens: int = 4) -> PromptLookup:
    """Return a lookup that has followed a sequence; the whole prompt is indexed."""
    lookup = PromptLookup(draft_tokens)
    lookup.begin("a", "prompt", ids_of(prompt))
    lookup.draft("a")
    for token in outputs:
        lookup.add("a", token)
    return lookup


def test_a_quotation_of_the_prompt_is_drafted_to_its_end() -> None:
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    lookup = followed(prompt, [20, 2, 3])
    assert lookup.draft("a") == (), "two tokens may occur again by chance"
    lookup.add("a", 4)
    assert lookup.draft("a") == (5, 6, 7, 8)
    lookup.add("a", 5)
    assert lookup.draft("a") == (6, 7, 8, 9)
    lookup.add("a", 30)
    assert lookup.draft("a") == (), "it quotes no longer"


def test_the_last_occurrence_counts_and_the_output_comes_after_the_prompt() -> None:
    prompt = [1, 2, 3, 10, 1, 2, 3, 11, 50]
    assert followed(prompt, [1, 2, 3]).draft("a")[0] == 11
    assert followed(prompt, [1, 2, 3, 12, 60, 1, 2, 3]).draft("a")[0] == 12


def test_a_text_that_repeats_itself_is_drafted_beyond_its_end() -> None:
    assert followed([9], [5, 6, 5, 6, 5], draft_tokens=5).draft("a") == (6, 5, 6, 5, 6)


def test_a_run_of_large_ids_is_found_where_it_was_indexed() -> None:
    """Each run is looked up with integers and indexed with numpy: both must come to one place."""
    index = prompt_lookup.PromptIndex(np.random.default_rng(1).integers(0, 2**31, 500, dtype=np.int32))
    runs = np.lib.stride_tricks.sliding_window_view(index.ids, GRAM_TOKENS)
    places = index._hashes([runs[:, column] for column in range(GRAM_TOKENS)])
    assert [index._hash(tuple(run)) for run in runs.tolist()] == places.tolist()


def test_the_last_tokens_of_a_prompt_count_for_the_first_output() -> None:
    assert followed([7, 8, 9, 10, 1, 7, 8], [9]).draft("a")[:2] == (10, 1)


def test_sequences_of_one_prompt_share_its_index_and_forget_it_with_the_last() -> None:
    lookup = PromptLookup(2)
    for name in ("a", "b"):
        lookup.begin(name, "prompt", ids_of([1, 2, 3, 4]))
    assert len(lookup) == 2
    assert len(lookup._prompts) == 1
    lookup.end("a")
    lookup.end("a")
    assert "a" not in lookup
    assert len(lookup._prompts) == 1
    lookup.end("b")
    assert len(lookup._prompts) == 0


def test_a_long_prompt_is_indexed_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_lookup, "PIECE_TOKENS", 8)
    lookup = PromptLookup(1)
    lookup.begin("a", "prompt", ids_of(list(range(40))))
    found = []
    for start in (30, 30, 30, 30, 30, 30):
        for token in range(start, start + GRAM_TOKENS):
            lookup.add("a", token)
        lookup._sequences["a"].grams.clear()
        found.append(lookup.draft("a"))
    assert found[0] == ()
    assert found[-1] == (33,)


def expected(tokens: list[int], border: int, draft_tokens: int) -> tuple[int, ...]:
    """Draft by the definition: follow an occurrence for as long as it holds, else search anew, outputs first."""
    source = None
    for length in range(border + 1, len(tokens) + 1):
        known, token = tokens[:length], tokens[length - 1]
        if source is not None:
            source = source + 1 if known[source] == token else None
        if source is None and length >= GRAM_TOKENS:
            gram = known[-GRAM_TOKENS:]
            ends = [end for end in range(GRAM_TOKENS, length) if known[end - GRAM_TOKENS : end] == gram]
            in_output = [end for end in ends if end > border]
            in_prompt = [end for end in ends if end < border]
            source = (in_output or in_prompt or [None])[-1]
    if source is None:
        return ()
    draft = list(tokens)
    for index in range(draft_tokens):
        draft.append(draft[source + index])
    return tuple(draft[len(tokens) :])


@given(
    prompt=st.lists(st.integers(0, 3), min_size=1, max_size=30),
    outputs=st.lists(st.integers(0, 3), min_size=1, max_size=30),
    draft_tokens=st.integers(1, 7),
)
def test_drafts_are_those_of_the_definition(prompt: list[int], outputs: list[int], draft_tokens: int) -> None:
    lookup = followed(prompt, outputs, draft_tokens)
    assert lookup.draft("a") == expected([*prompt, *outputs], len(prompt), draft_tokens)
