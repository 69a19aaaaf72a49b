"""Expected output lengths: learned from ends, not from limits, and always beyond what is there."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from medha.scheduler.output_lengths import MOST_OWNERS, QUANTILE, OutputLengths

DEFAULT = 4096


def lengths_of(ends: list[int], *, cut_off: bool = False, owner: str = "") -> OutputLengths:
    lengths = OutputLengths({"chat": DEFAULT, "batch": 100})
    for index, tokens in enumerate(ends):
        lengths.ended(str(index), "chat", owner, tokens, cut_off=cut_off)
    return lengths


def drawn(count: int, median: float, seed: int = 0) -> list[int]:
    return [int(one) + 1 for one in np.random.default_rng(seed).lognormal(np.log(median), 1.0, count)]


def test_before_any_request_has_ended_the_default_of_its_class_is_expected() -> None:
    lengths = lengths_of([])
    assert (lengths.expected_tokens("chat"), lengths.expected_tokens("batch")) == (DEFAULT, 100)


@pytest.mark.parametrize("median", [3, 40, 600, 20_000])
def test_the_expectation_is_a_quantile_of_what_ended_and_little_more(median: int) -> None:
    ends = drawn(1500, median)
    quantile = float(np.quantile(ends[-250:], QUANTILE))
    assert 0.85 * quantile <= lengths_of(ends).expected_tokens("chat") <= 1.45 * quantile


def test_few_ends_outweigh_the_default() -> None:
    assert lengths_of([200] * 20).expected_tokens("chat") <= 240


def test_an_output_that_ends_at_its_own_limit_does_not_show_that_outputs_are_short() -> None:
    assert lengths_of([300] * 500, cut_off=True).expected_tokens("chat") >= DEFAULT
    lengths = lengths_of([300] * 500, cut_off=True)
    for index in range(500, 1000):
        lengths.ended(str(index), "chat", "", 1000, cut_off=False)
    assert 1000 <= lengths.expected_tokens("chat") <= 1190


def test_the_newest_ends_count_most() -> None:
    lengths = lengths_of([2000] * 1000)
    for index in range(600):
        lengths.ended(f"new {index}", "chat", "", 50, cut_off=False)
    assert lengths.expected_tokens("chat") <= 60


def test_running_ones_that_have_outgrown_their_expectation_count() -> None:
    """Ten end early while ten others go on: half of all are longer, whoever ends first."""
    lengths = lengths_of([100] * 40)
    before = lengths.expected_tokens("chat")
    for index in range(40):
        lengths.outgrew(f"long {index}", "chat", "", 2500)
    assert before <= 120
    assert lengths.expected_tokens("chat") >= 2500
    for index in range(40):
        lengths.outgrew(f"long {index}", "chat", "", 5000)
        lengths.ended(f"long {index}", "chat", "", 5100, cut_off=False)
    assert 5100 <= lengths.expected_tokens("chat") <= 6100


def test_running_ones_of_an_owner_that_is_remembered_later_or_forgotten_count_once() -> None:
    lengths = OutputLengths({"chat": DEFAULT})
    for index in range(20):
        lengths.outgrew(f"long {index}", "chat", "new", 300)
    lengths.ended("first", "chat", "new", 300, cut_off=False)  # only now it is remembered
    for index in range(10):
        lengths.outgrew(f"long {index}", "chat", "new", 900)
    for index in range(MOST_OWNERS):
        lengths.ended("other", "chat", f"owner {index}", 10, cut_off=False)
    lengths.ended("again", "chat", "new", 300, cut_off=False)  # remembered again
    for index in range(20):
        lengths.outgrew(f"long {index}", "chat", "new", 2000)
        lengths.ended(f"long {index}", "chat", "new", 2000, cut_off=False)
    assert not lengths._running
    for counts in (lengths._classes["chat"], *lengths._owners.values()):
        assert not counts.running.any()


def test_another_class_learns_nothing() -> None:
    assert lengths_of([7] * 100).expected_tokens("batch") == 100


def test_an_owner_is_expected_to_go_on_as_before_and_a_new_one_like_its_class() -> None:
    lengths = lengths_of([400] * 100)
    for index in range(30):
        lengths.ended(f"short {index}", "chat", "short", 20, cut_off=False)
    assert lengths.expected_tokens("chat", "short") <= 24
    assert 400 <= lengths.expected_tokens("chat", "new") <= 480
    lengths.ended("first", "chat", "new", 20, cut_off=False)
    assert lengths.expected_tokens("chat", "new") >= 400, "one end outweighs nothing"


def test_the_number_of_owners_is_bounded_and_the_newest_stay() -> None:
    lengths = OutputLengths({"chat": DEFAULT})
    for index in range(3 * MOST_OWNERS):
        for _ in range(20):
            lengths.ended("a", "chat", f"owner {index}", 10 if index % 2 else 1000, cut_off=False)
    assert lengths.owners == MOST_OWNERS
    assert lengths.expected_tokens("chat", f"owner {3 * MOST_OWNERS - 1}") <= 12
    assert lengths.expected_tokens("chat", f"owner {3 * MOST_OWNERS - 2}") >= 1000


CALLS = st.lists(
    st.tuples(
        st.sampled_from(["ended", "cut off", "outgrew"]),
        st.integers(0, 5),
        st.sampled_from(["", "a", "b"]),
        st.integers(1, 2**33),
    ),
    max_size=40,
)


@given(calls=CALLS, produced=st.integers(0, 2**31))
def test_more_than_is_there_is_expected_whatever_happened(
    calls: list[tuple[str, int, str, int]], produced: int
) -> None:
    found = []
    for _ in range(2):
        lengths = OutputLengths({"chat": DEFAULT})
        for what, request, owner, tokens in calls:
            if what == "outgrew":
                lengths.outgrew(f"{request}{owner}", "chat", owner, tokens)
            else:
                lengths.ended(f"{request}{owner}", "chat", owner, tokens, cut_off=what == "cut off")
        found.append([lengths.expected_tokens("chat", owner, produced) for owner in ("", "a", "c")])
        assert min(found[-1]) > produced
    assert found[0] == found[1]


def test_an_output_that_goes_on_elsewhere_behind_its_first_token_changes_nothing() -> None:
    lengths = lengths_of([200] * 20)
    before = lengths.expected_tokens("chat")
    for index in range(1000):
        lengths.ended(f"moved {index}", "chat", "", 1, cut_off=True)
    assert lengths.expected_tokens("chat") == before
