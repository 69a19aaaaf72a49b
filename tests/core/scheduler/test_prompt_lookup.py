"""A draft is what followed the longest run of the last tokens, in the output, the prompt, or finished outputs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from medha.scheduler import prompt_lookup, text_index
from medha.scheduler.prompt_lookup import MOST_SALTS, PromptLookup
from medha.scheduler.text_index import RUN_TOKENS, RunHashes, TextIndex

SHORTEST = RUN_TOKENS[0]


def ids_of(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def followed(prompt: list[int], outputs: list[int], draft_tokens: int = 4) -> PromptLookup:
    """Return a lookup that has followed a sequence; the whole prompt is indexed."""
    lookup = PromptLookup(draft_tokens)
    lookup.begin("a", "prompt", ids_of(prompt))
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


def test_the_last_occurrence_counts_and_the_output_comes_before_the_prompt() -> None:
    prompt = [1, 2, 3, 10, 1, 2, 3, 11, 50]
    assert followed(prompt, [1, 2, 3]).draft("a")[0] == 11
    assert followed(prompt, [1, 2, 3, 12, 60, 1, 2, 3]).draft("a")[0] == 12


def test_a_longer_run_counts_more_than_a_later_one() -> None:
    prompt = [1, 2, 3, 4, 5, 6, 70, 1, 2, 3, 4, 5, 71, 4, 5, 6, 80, 9]
    assert followed(prompt, [1, 2, 3, 4, 5, 6]).draft("a")[0] == 70
    assert followed(prompt, [4, 5, 6]).draft("a")[0] == 80


def test_a_text_that_is_followed_is_left_for_a_longer_run() -> None:
    """Three tokens occur last in another place than six tokens that end one token later."""
    longer, begins_so, later = [2, 3, 4, 5, 6, 7, 70], [2, 3, 4, 99], [8, 3, 4, 5, 6, 7, 80]
    lookup = followed([*longer, *begins_so, *later, 9], [2, 3, 4, 5, 6])
    assert lookup.draft("a")[:2] == (7, 80)
    lookup.add("a", 7)
    assert lookup.draft("a")[0] == 70


def test_a_text_that_repeats_itself_is_drafted_beyond_its_end() -> None:
    assert followed([9], [5, 6, 5, 6, 5], draft_tokens=5).draft("a") == (6, 5, 6, 5, 6)


def test_a_quotation_goes_on_behind_the_end_of_the_prompt() -> None:
    lookup = followed([7, 8, 9, 10], [5, 7, 8, 9])
    assert lookup.draft("a") == (10, 5, 7, 8)
    lookup.add("a", 10)
    assert lookup.draft("a") == (5, 7, 8, 9)


def test_runs_that_are_hashed_one_by_one_are_found_where_many_were_indexed_at_once() -> None:
    """Output is hashed with integers and a prompt with numpy: both must come to one place."""
    ids = np.random.default_rng(1).integers(0, 2**31, 500, dtype=np.int32)
    whole = TextIndex(ids, len(ids))
    for stop in (1, 2, 30, 31, 200, 500):
        whole.index_until(stop)
    grown, hashes = TextIndex(np.empty(8, dtype=np.int32), 0), RunHashes()
    for token in ids.tolist():
        grown.append(token)
        hashes.append(token)
        for row, length in enumerate(RUN_TOKENS):
            if length <= grown.length:
                grown.put(row, hashes.hashes[row])
    assert len(grown.ids) == 512
    assert np.array_equal(grown._tables[0], whole._tables[0])
    assert np.array_equal(grown.ids[:500], ids)


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
    found = []
    lookup = PromptLookup(1)
    lookup.begin("first", "prompt", ids_of(list(range(40))))
    for number in range(6):
        lookup.begin(f"{number}", "prompt", ids_of(list(range(40))))
        for token in range(30, 30 + SHORTEST):
            lookup.add(f"{number}", token)
        lookup.index_piece()
        found.append(lookup.draft(f"{number}"))
    assert found[0] == ()
    assert found[-1] == (33,)


def test_many_long_prompts_take_turns_so_that_a_step_indexes_one_piece(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prompt_lookup, "PIECE_TOKENS", 8)
    lookup = PromptLookup(1)
    for name in ("a", "b", "c"):
        lookup.begin(name, f"prompt {name}", ids_of(list(range(20))))
    lookup.begin("short", "prompt short", ids_of([1, 2]))

    def indexed() -> list[int]:
        return [lookup._prompts[f"prompt {name}"].index.indexed for name in ("a", "b")]

    lookup.end("c")
    found = [indexed()]
    while lookup.index_piece():
        found.append(indexed())
    assert found == [[8, 8], [16, 8], [16, 16], [19, 16], [19, 19]]
    assert not lookup._unindexed


@pytest.mark.parametrize("tokens", [10_000, 65_536, 65_537])
def test_an_index_takes_at_most_32_bytes_for_each_token(tokens: int) -> None:
    index = TextIndex(np.zeros(tokens, dtype=np.int32), tokens)
    index.index_until(tokens)
    assert 16 <= index.table_bytes / tokens <= 32


@pytest.mark.parametrize("prompt_tokens", [0, 5, 100])
def test_an_output_takes_at_most_40_bytes_for_each_token(prompt_tokens: int) -> None:
    """Its ids and tables double when they are full, and may then be half empty."""
    lookup = followed(list(range(prompt_tokens)), [])
    own = lookup._sequences["a"]._own
    for token in range(1_000):
        lookup.add("a", token)
        if own.length > 64:
            assert 20 <= (own.table_bytes + own.ids.nbytes) / own.length <= 40


def test_a_text_of_several_segments_is_indexed_across_their_borders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_index, "SEGMENT_TOKENS", 64)
    tokens = [int(token) for token in np.random.default_rng(2).permutation(1000)[:300]]
    lookup = PromptLookup(2)
    lookup.begin("a", "prompt", ids_of(tokens))
    assert len(lookup._prompts["prompt"].index._tables) == 5
    found = 0
    for behind in range(SHORTEST, 298):
        lookup.begin(f"{behind}", "prompt", ids_of([]))
        for token in tokens[behind - SHORTEST : behind]:
            lookup.add(f"{behind}", token)
        found += lookup.draft(f"{behind}") == tuple(tokens[behind : behind + 2])
        lookup.end(f"{behind}")
    assert found > 150, "but for runs that share a place with a later one, a third of those of a full table"
    for token in (1001, *tokens[60:80]):
        lookup.add("a", token)
    assert lookup.draft("a") == tuple(tokens[80:82])


# --- outputs of finished requests -----------------------------------------------------------------------


def quoted(lookup: PromptLookup, outputs: list[int], salt: str | None) -> tuple[int, ...]:
    lookup.begin("next", "another prompt", ids_of([0]), salt)
    for token in outputs:
        lookup.add("next", token)
    draft = lookup.draft("next")
    lookup.end("next", is_finished=False)
    return draft


def ended(lookup: PromptLookup, outputs: list[int], salt: str | None, *, is_finished: bool = True) -> None:
    lookup.begin("a", "prompt", ids_of([0]), salt)
    for token in outputs:
        lookup.add("a", token)
    lookup.end("a", is_finished=is_finished)


def test_an_output_is_quoted_by_later_requests_of_its_salt_alone() -> None:
    lookup = PromptLookup(3)
    ended(lookup, [1, 2, 3, 4, 5, 6], "tenant")
    assert quoted(lookup, [2, 3, 4], "tenant") == (5, 6)
    for other in ("", "another", None):
        assert quoted(lookup, [2, 3, 4], other) == ()
    ended(lookup, [21, 22, 23, 24], None)
    assert quoted(lookup, [21, 22, 23], None) == (), "it shares nothing"


def test_a_request_that_stepped_aside_is_not_finished() -> None:
    lookup = PromptLookup(3)
    ended(lookup, [1, 2, 3, 4, 5, 6], "", is_finished=False)
    assert quoted(lookup, [2, 3, 4], "") == ()


def test_texts_that_end_while_a_sequence_runs_are_quoted_by_it_and_its_own_output_comes_first() -> None:
    lookup = PromptLookup(1)
    lookup.begin("runs", "another prompt", ids_of([0]), "")
    ended(lookup, [1, 2, 3, 4], "")
    for token in (1, 2, 3):
        lookup.add("runs", token)
    assert lookup.draft("runs") == (4,)
    for token in (5, 1, 2, 3):
        lookup.add("runs", token)
    assert lookup.draft("runs") == (5,)


def test_runs_of_two_finished_outputs_are_no_run() -> None:
    lookup = PromptLookup(1)
    for outputs in ([1, 2, 3, 4, 5], [6, 7, 8, 9, 10]):
        ended(lookup, outputs, "")
    assert quoted(lookup, [4, 5, 6], "") == ()
    assert quoted(lookup, [7, 8, 9], "") == (10,)


def test_the_oldest_outputs_and_salts_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_lookup, "FINISHED_TOKENS", 20)
    lookup = PromptLookup(1)
    for number in range(5):
        ended(lookup, list(range(10 * number, 10 * number + 9)), "")
    assert [quoted(lookup, [10 * n + 2, 10 * n + 3, 10 * n + 4], "") for n in range(5)] == [
        (), (), (25,), (35,), (45,),
    ]  # fmt: skip
    ended(lookup, list(range(100, 150)), "")
    assert quoted(lookup, [145, 146, 147], "") == (148,), "the end of a long one is kept"
    for number in range(MOST_SALTS):
        ended(lookup, [1, 2, 3, 4], f"salt {number}")
    assert quoted(lookup, [145, 146, 147], "") == ()
    assert len(lookup._finished) == MOST_SALTS


# --- the definition -------------------------------------------------------------------------------------


def expected(tokens: list[int], border: int, draft_tokens: int) -> tuple[int, ...]:
    """Draft by the definition: follow a text for as long as it holds and no longer run is found; outputs come first."""
    source, matched = None, 0
    first = max(border - RUN_TOKENS[-1], 0)
    for length in range(border + 1, len(tokens) + 1):
        known, token = tokens[:length], tokens[length - 1]
        if source is not None:
            source, matched = (source + 1, matched + 1) if known[source] == token else (None, 0)
        for run_tokens in reversed(RUN_TOKENS):
            if run_tokens <= matched or run_tokens > length - first:
                continue
            run = known[-run_tokens:]
            ends = [end for end in range(run_tokens, length) if known[end - run_tokens : end] == run]
            in_output = [end for end in ends if end >= border and end - run_tokens >= first]
            in_prompt = [end for end in ends if end < border]
            if in_output or in_prompt:
                source, matched = (in_output or in_prompt)[-1], run_tokens
                break
    if source is None:
        return ()
    draft = list(tokens)
    for index in range(draft_tokens):
        draft.append(draft[source + index])
    return tuple(draft[len(tokens) :])


@given(
    prompt=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    outputs=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    repeats=st.integers(1, 4),
    draft_tokens=st.integers(1, 7),
)
def test_drafts_are_those_of_the_definition(
    prompt: list[int], outputs: list[int], repeats: int, draft_tokens: int
) -> None:
    outputs = outputs * repeats
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_index, "_LEAST_BITS", 18)  # so large that hardly any runs have one place
        lookup = followed(prompt, outputs, draft_tokens)
    assert lookup.draft("a") == expected([*prompt, *outputs], len(prompt), draft_tokens)


@given(
    prompt=st.lists(st.integers(0, 5), min_size=1, max_size=300),
    outputs=st.lists(st.integers(0, 5), min_size=1, max_size=300),
)
def test_whatever_shares_a_place_drafts_follow_an_occurrence_of_the_last_tokens(
    prompt: list[int], outputs: list[int]
) -> None:
    lookup = followed(prompt, outputs, 1)
    tokens = [*prompt, *outputs]
    runs = {tuple(tokens[at : at + SHORTEST + 1]) for at in range(len(tokens) - SHORTEST)}
    for token in lookup.draft("a"):
        assert (*tokens[-SHORTEST:], token) in runs
