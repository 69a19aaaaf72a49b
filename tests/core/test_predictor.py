"""Predicted times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medha.messages import StepProfile
from medha.predictor import Chunking, Predictor, Work

PROFILE = StepProfile(
    step_seconds=1.0, linear_seconds_per_token=0.1, attention_seconds_per_pair=0.001, sequence_seconds=0.01
)


@given(context=st.integers(0, 300), count=st.integers(0, 100))
def test_pairs_are_what_a_causal_mask_leaves(context: int, count: int) -> None:
    assert Work(context, count).pairs == sum(context + 1 + index for index in range(count))


def test_a_step_is_the_sum_of_its_terms() -> None:
    terms = Predictor(PROFILE).explain([Work(10, 1), Work(0, 4)])
    assert terms.launch == 1.0
    assert terms.linear == pytest.approx(0.5)
    assert terms.attention == pytest.approx((11 + 10) * 0.001 + 0.02)
    assert Predictor(PROFILE).step_seconds([Work(10, 1), Work(0, 4)]) == pytest.approx(terms.total)


@given(chunks=st.integers(0, 5), rest=st.integers(1, 50), correction=st.floats(0.25, 4))
def test_a_prefill_takes_as_long_as_its_chunks_one_by_one(chunks: int, rest: int, correction: float) -> None:
    predictor = Predictor(PROFILE, chunking=Chunking(max_tokens=50))
    predictor.correction = correction
    total, position = 0.0, 0
    for size in [50] * chunks + [rest]:
        total += predictor.step_seconds([Work(position, size)])
        position += size
    assert predictor.prefill_seconds(0, position) == pytest.approx(total)


@pytest.mark.parametrize("context", [10, 11])
def test_a_prefill_with_nothing_left_takes_no_time(context: int) -> None:
    assert Predictor(PROFILE).prefill_seconds(context, 10) == 0


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.7])
def test_the_correction_follows_what_steps_really_take(factor: float) -> None:
    predictor = Predictor(PROFILE)
    works = [Work(0, 10)]
    true_seconds = predictor.step_seconds(works) * factor
    for _ in range(200):
        predictor.observe(predictor.step_seconds(works), true_seconds)
    assert predictor.step_seconds(works) == pytest.approx(true_seconds, rel=0.01)


@pytest.mark.parametrize(("observed", "bound"), [(1e6, 4.0), (1e-6, 0.25)])
def test_the_correction_stays_within_its_bounds(observed: float, bound: float) -> None:
    predictor = Predictor(PROFILE)
    for _ in range(500):
        predictor.observe(1.0, observed)
    assert predictor.correction == pytest.approx(bound)


def test_one_step_that_took_very_long_hardly_moves_the_correction() -> None:
    predictor = Predictor(PROFILE)
    predictor.observe(0.01, 100.0)  # a machine that slept, not a model that got slower
    assert 1.0 < predictor.correction < 1.2


@pytest.mark.parametrize(("predicted", "observed"), [(0.0, 1.0), (1.0, 0.0), (1.0, -1.0)])
def test_a_step_without_a_time_is_no_observation(predicted: float, observed: float) -> None:
    predictor = Predictor(PROFILE)
    predictor.observe(predicted, observed)
    assert predictor.correction == 1.0
