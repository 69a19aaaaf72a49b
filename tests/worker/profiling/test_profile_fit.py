"""Measuring steps, and fitting a profile to them."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medha.cost.cost_profile import Attention, Operation, Profile
from medha.cost.predictor import Predictor, Work
from medha.errors import ConfigInvalid
from medha_worker.checkpoints.presets import init_checkpoint
from medha_worker.profiling.profile_fit import MeasuredStep, errors, fit_profile, held_out
from medha_worker.profiling.step_timer import BLOCK_TOKENS, Grid, StepTimer, blocks_of, grid, load, measure

TRUTH = Profile(
    name="truth",
    source="test",
    layers=4,
    linear=(Operation("linear", compute_seconds_per_row=1.5e-3 / 768),),
    linear_points=((1, 4e-4), (4, 4.1e-4), (16, 5e-4), (64, 6e-4), (256, 9e-4), (1024, 2.4e-3)),
    attention=Attention(
        sequence_seconds=2e-6,
        points=((1, 1e-8), (4, 2e-8), (16, 4e-8), (64, 1e-7), (256, 4e-7), (1024, 2e-6)),
    ),
    head=Operation("head", launch_seconds=1e-4, compute_seconds_per_row=2e-5),
)
GRID = Grid(contexts=(0, 1024, 4096, 16384), chunks=(1, 4, 16, 64, 256, 1024), decodes=(4, 16))


def measured(profile: Profile, works: tuple[Work, ...], noise: float = 1.0) -> MeasuredStep:
    """Return the time of a machine that is exactly `profile`, times `noise`."""
    terms = Predictor(profile).explain(works)
    return MeasuredStep(works, (terms.total - terms.head) * noise, terms.head * noise)


@pytest.mark.parametrize("window_share", [0.0, 0.75])
def test_a_machine_that_is_a_profile_is_found_again(window_share: float) -> None:
    window = {"window_tokens": 1000, "window_share": window_share}
    truth = replace(TRUTH, attention=replace(TRUTH.attention, **window))
    steps = [measured(truth, works) for works in GRID.shapes()]
    fitted = fit_profile(steps, layers=TRUTH.layers, name="fitted", source="test", **window)
    assert errors(fitted, steps).max() < 1e-3
    assert fitted.layers == 4
    unseen = [
        measured(truth, works) for works in ((Work(200_000, 1),), (Work(3, 1),) * 3, (Work(70_000, 700),))
    ]
    assert errors(fitted, unseen).max() < 0.01
    beyond = (Work(0, 5000),)  # the roofline continues with the slope of the last segment
    assert errors(fitted, [measured(truth, beyond)]).max() < 0.01


@given(noise=st.lists(st.floats(0.8, 1.25), min_size=60, max_size=60))
@settings(max_examples=20)
def test_whatever_was_measured_more_work_never_takes_less(noise: list[float]) -> None:
    steps = [measured(TRUTH, works, factor) for works, factor in zip(GRID.shapes(), noise, strict=False)]
    predictor = Predictor(fit_profile(steps, layers=4, name="noisy", source="test"))
    for context in (0, 5000):
        seconds = [
            predictor.stage_seconds([Work(context, size)]) for size in (1, 3, 9, 27, 81, 243, 729, 2187)
        ]
        assert seconds == sorted(seconds)


def test_a_range_of_contexts_is_predicted_from_the_others() -> None:
    tests = held_out([measured(TRUTH, works) for works in GRID.shapes()], layers=4)
    assert [(test.low, test.high) for test in tests] == [
        (1, 1024),
        (1025, 4096),
        (4097, 16384),
        (4097, 16384),
    ]
    assert all(test.worst_error < 0.01 and test.steps > 3 for test in tests)


def test_a_held_out_range_that_behaves_otherwise_shows() -> None:
    steps = [measured(TRUTH, works) for works in GRID.shapes()]
    slow = [measured(TRUTH, step.works, 2.0) if step.longest_context == 16384 else step for step in steps]
    (*_, last) = held_out(slow, layers=4)
    assert last.mean_error == pytest.approx(0.5, abs=0.01)


# --- measuring --------------------------------------------------------------------------------------


@given(
    max_context=st.integers(0, 50_000),
    max_chunk=st.integers(1, 5000),
    max_decodes=st.integers(2, 300),
    quick=st.booleans(),
)
def test_a_grid_reaches_its_bounds_and_fits_its_pool(
    max_context: int, max_chunk: int, max_decodes: int, quick: bool
) -> None:
    made = grid(max_context=max_context, max_chunk=max_chunk, max_decodes=max_decodes, quick=quick)
    assert made.contexts[0] == 0
    assert made.contexts[-1] == max_context
    assert made.chunks[-1] == max_chunk
    shapes = made.shapes()
    assert len(set(shapes)) == len(shapes)
    assert all(blocks_of(works) * BLOCK_TOKENS <= made.pool_tokens for works in shapes)
    assert (Work(max_context, max_chunk),) in shapes


class Played:
    """A timer whose steps take the times of TRUTH, and that records them."""

    def __init__(self) -> None:
        self.seen: list[tuple[Work, ...]] = []

    def measure(self, works: tuple[Work, ...]) -> MeasuredStep:
        self.seen.append(works)
        return measured(TRUTH, works)


def test_each_step_is_measured_in_each_round_after_one_that_does_not_count() -> None:
    timer, reported = Played(), list[tuple[int, int]]()
    shapes = GRID.shapes()
    steps = measure(
        timer,
        shapes,
        rounds=3,
        max_step_seconds=60,
        progress=lambda done, total: reported.append((done, total)),
    )
    assert {step.works for step in steps} == set(shapes)
    assert all(timer.seen.count(works) == 4 for works in shapes)
    rounds = [timer.seen[i : i + len(shapes)] for i in range(0, len(timer.seen), len(shapes))]
    assert rounds[1] != rounds[2]  # another order, so that no step always follows the same one
    assert reported == [(i + 1, 4 * len(shapes)) for i in range(4 * len(shapes))]


def test_steps_that_take_too_long_are_left_out_with_all_larger_ones() -> None:
    timer, reported = Played(), list[tuple[int, int]]()
    limit = measured(TRUTH, (Work(4096, 256),)).seconds
    steps = measure(
        timer, GRID.shapes(), rounds=2, max_step_seconds=limit, progress=lambda *pair: reported.append(pair)
    )
    assert max(step.seconds for step in steps) == pytest.approx(limit)
    assert (Work(16384, 1024),) not in timer.seen
    assert reported[-1][0] == reported[-1][1] == len(timer.seen)


def test_a_machine_on_which_no_step_is_short_enough_is_an_error_that_says_so() -> None:
    with pytest.raises(ConfigInvalid, match="no step ends within --max-step-seconds 1e-09; raise it"):
        measure(Played(), GRID.shapes(), rounds=1, max_step_seconds=1e-9)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("profile") / "tiny"
    init_checkpoint(directory, preset="tiny", seed=0)
    return directory


def test_a_real_models_steps_become_a_profile(checkpoint: Path) -> None:
    model = load(checkpoint, max_model_len=None, dtype="auto", threads=1)
    assert torch.get_num_threads() == 1
    made = grid(max_context=64, max_chunk=32, max_decodes=4, quick=True)
    ticks = count()
    timer = StepTimer(model, made.pool_tokens, lambda: float(next(ticks)))
    steps = measure(timer, made.shapes(), rounds=1, max_step_seconds=60)
    assert {(step.forward_seconds, step.sampling_seconds) for step in steps} == {(1.0, 1.0)}  # one tick each
    fitted = fit_profile(steps, layers=model.config.num_layers, name="tiny", source="test")
    assert errors(fitted, steps).max() < 0.01
    assert Profile.from_json(fitted.to_json()) == fitted
