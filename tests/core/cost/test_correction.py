"""The correction of predicted step times: a factor for each kind of step, robust to steps that took very long."""

from __future__ import annotations

from dataclasses import astuple
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medha.cost.correction import Correction, PartedSeconds

DECODES = PartedSeconds(whole=0.02, decodes=0.02)
PREFILLS = PartedSeconds(whole=0.3)
BOTH = PartedSeconds(whole=0.1, decodes=0.03)
FACTORS = st.floats(0.25, 4)


def after(correction: Correction, steps: list[tuple[PartedSeconds, float]]) -> Correction:
    """The correction after steps, given as their prediction and observed / predicted."""
    for predicted, ratio in steps:
        correction = correction.after(predicted, ratio * predicted.whole)
    return correction


@pytest.mark.parametrize("factor", [0.3, 0.5, 1.0, 1.7, 3.9])
@pytest.mark.parametrize("predicted", [DECODES, PREFILLS, BOTH])
def test_it_follows_what_steps_really_take(predicted: PartedSeconds, factor: float) -> None:
    found = after(Correction(), [(predicted, factor)] * 400)
    assert found.seconds(predicted) == pytest.approx(factor * predicted.whole, rel=0.01)


def test_each_kind_of_step_moves_its_own_factor_only() -> None:
    assert after(Correction(), [(DECODES, 2.0)] * 100).prefill == 1.0
    assert after(Correction(), [(PREFILLS, 2.0)] * 100).decode == 1.0


@given(decode=st.floats(0.5, 2), prefill=st.floats(0.5, 2))
def test_steps_with_both_kinds_agree_with_steps_of_one(decode: float, prefill: float) -> None:
    truth = Correction(decode, prefill)
    found = Correction()
    for _ in range(200):
        for predicted in (DECODES, BOTH, PREFILLS):
            found = found.after(predicted, truth.seconds(predicted))
    assert (found.decode, found.prefill) == pytest.approx((decode, prefill), rel=0.02)


def test_most_steps_decide_however_long_the_others_take() -> None:
    random = Random(0)
    ratios = [random.choice([1.0, 1.0, 1.0, 50.0]) * random.uniform(0.95, 1.05) for _ in range(2000)]
    found = Correction()
    factors = []
    for ratio in ratios:
        found = found.after(PREFILLS, ratio * PREFILLS.whole)
        factors.append(found.prefill)
    assert 0.95 < sorted(factors)[len(factors) // 2] < 1.4  # the mean of the ratios is 13


@pytest.mark.parametrize("ratio", [1e-6, 1e6])
def test_one_step_hardly_moves_a_factor_that_many_have_found(ratio: float) -> None:
    settled = after(Correction(), [(DECODES, 1.0)] * 20)
    assert after(settled, [(DECODES, ratio)]).decode == pytest.approx(1.0, rel=0.09)


def test_the_first_steps_move_it_fast() -> None:
    assert after(Correction(), [(PREFILLS, 1.6)] * 2).prefill == pytest.approx(1.6, rel=0.02)


@given(
    steps=st.lists(st.tuples(st.sampled_from([DECODES, PREFILLS, BOTH]), st.floats(1e-6, 1e6)), max_size=60)
)
def test_factors_stay_within_their_bounds(steps: list[tuple[PartedSeconds, float]]) -> None:
    found = after(Correction(), steps)
    assert 0.25 <= found.decode <= 4
    assert 0.25 <= found.prefill <= 4


@pytest.mark.parametrize(
    ("predicted", "observed_seconds"),
    [(PartedSeconds(), 1.0), (PREFILLS, 0.0), (PREFILLS, -1.0), (BOTH, 0.0)],
)
def test_a_step_without_a_time_changes_nothing(predicted: PartedSeconds, observed_seconds: float) -> None:
    assert Correction().after(predicted, observed_seconds) == Correction()


@given(whole=st.floats(1e-6, 10), share=st.floats(0, 1))
def test_a_step_that_takes_what_was_predicted_leaves_predictions_exactly_as_they_are(
    whole: float, share: float
) -> None:
    predicted = PartedSeconds(whole, whole * share)
    assert Correction().seconds(predicted) == whole
    for rounding in (1.0, 1 + 1e-15):
        found = Correction().after(predicted, whole * rounding)
        assert (found.decode, found.prefill) == (1.0, 1.0)


@given(decode=FACTORS, prefill=FACTORS, chunk=st.floats(0, 10), more=st.floats(0, 10))
def test_more_prefill_never_takes_less_time(decode: float, prefill: float, chunk: float, more: float) -> None:
    correction = Correction(decode, prefill)
    less = correction.seconds(PartedSeconds(0.03 + chunk, 0.03))
    assert correction.seconds(PartedSeconds(0.03 + chunk + more, 0.03)) >= less * (1 - 1e-9)


def test_equal_steps_give_equal_corrections() -> None:
    steps = [(one, ratio) for one in (DECODES, BOTH, PREFILLS) for ratio in (0.5, 1.3, 40.0)]
    assert astuple(after(Correction(), steps)) == astuple(after(Correction(), steps))


VERIFYING = PartedSeconds(whole=0.03, decodes=0.02, verified=0.01)


def test_rows_of_guesses_have_a_factor_that_leaves_other_decodes_alone() -> None:
    found = Correction()
    for _ in range(200):
        found = found.after(VERIFYING, 0.02 + 2.5 * 0.01)
    assert found.seconds(VERIFYING) == pytest.approx(0.045, rel=0.01)
    assert found.verified == pytest.approx(2.5, rel=0.03)
    assert (found.decode, found.prefill) == (1.0, 1.0)


def test_the_factor_of_guesses_is_forgotten_while_nothing_is_verified() -> None:
    found = after(Correction(verified=3.0), [(DECODES, 1.0)] * 512)
    assert 1.4 < found.verified < 1.6
    assert after(Correction(verified=3.0), [(PREFILLS, 1.0)] * 512).verified == 3.0
