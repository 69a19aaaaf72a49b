"""Profiles: rooflines, measured points, and their JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from medha.cost.cost_profile import Attention, Kernel, Link, Operation, Profile
from medha.cost.hardware import A100, H100, LLAMA3_8B, LLAMA3_70B, profile_for
from medha.cost.predictor import Predictor, Work
from medha.errors import ConfigInvalid
from medha.topology import Topology
from medha.wire.messages import StepProfile

TOPOLOGY = Topology(tensor=4, stream=2)
ROOFLINE = profile_for(LLAMA3_8B, A100, TOPOLOGY)
MEASURED = Profile(
    name="m",
    source="test",
    layers=2,
    linear=(Operation("linear", compute_seconds_per_row=2.0),),
    linear_points=((1, 5.0), (11, 15.0), (100, 15.0)),
    attention=Attention(sequence_seconds=1.0, points=((1, 0.5), (5, 2.5), (10, 2.5))),
    all_reduce=Link(((1.0, 2.0), (5.0, 1.0))),
)


def test_an_operation_is_bound_by_compute_or_by_memory() -> None:
    operation = Operation(
        "gemm", launch_seconds=1, compute_seconds_per_row=2, fixed_seconds=100, memory_seconds_per_row=0.5
    )
    assert operation.seconds(np.array([0, 10, 66, 67, 1000])).tolist() == [0, 106, 134, 135, 2001]


def test_matrix_products_take_whole_waves_of_the_best_kernels_tiles() -> None:
    large = Kernel(tile_rows=128, tiles_across=28, units=132, wave_seconds=4.0)
    small = Kernel(tile_rows=64, tiles_across=28, units=132, wave_seconds=3.0)
    operation = Operation("gemm", launch_seconds=1.0, kernels=(large, small), times=2)
    # 256 rows are one wave of 112 small tiles, 512 one of 112 large ones; 513 fit neither: two waves of the small
    assert operation.seconds(np.array([0, 1, 256, 512, 513, 1024])).tolist() == [0, 8, 8, 10, 14, 18]
    assert Operation("gemm", kernels=(large,), fixed_seconds=5.0).seconds(np.array([1])).tolist() == [5.0]


def test_a_step_reads_the_experts_that_its_rows_pass_and_fills_tiles_for_each() -> None:
    """A row passes one of two experts: three rows pass 2 x (1 - 1/8) of them in the mean."""
    reading = Operation("down", fixed_seconds=100.0, experts=2)
    assert reading.seconds(np.array([0, 1, 3])).tolist() == [0.0, 50.0, 87.5]
    tiled = Operation("down", compute_seconds_per_row=1.0, tile_rows=4, experts=2)
    assert tiled.seconds(np.array([1, 3, 1000])) == pytest.approx([4.0, 7.0, 1000.0])
    kernel = Kernel(tile_rows=4, tiles_across=1, units=10, wave_seconds=3.0)
    waves = Operation("down", kernels=(kernel,), experts=2, experts_per_row=2)
    assert waves.seconds(np.array([1, 20, 21])).tolist() == [3.0, 3.0, 6.0]


def test_a_slower_machine_is_slower_in_whole_waves_too() -> None:
    profile = profile_for(LLAMA3_70B, H100, Topology(8))
    counts = np.array([1, 100, 512, 520, 4096])
    assert profile.scaled(2.0).linear_seconds(counts) == pytest.approx(2 * profile.linear_seconds(counts))
    assert Profile.from_json(profile.to_json()) == profile


def test_rows_are_computed_in_whole_tiles() -> None:
    operation = Operation("gemm", compute_seconds_per_row=1, tile_rows=64, times=2)
    assert operation.seconds(np.array([1, 64, 65, 128])).tolist() == [128, 128, 256, 256]


def test_a_link_takes_the_better_of_its_protocols() -> None:
    link = MEASURED.all_reduce
    assert link.seconds(np.array([0, 1, 4, 10])).tolist() == [0, 3, 9, 15]
    assert [link.seconds_one(rows) for rows in (0, 1, 4, 10)] == [0, 3, 9, 15]
    assert link.of_rows(3.0, times=2).lines == ((2.0, 12.0), (10.0, 6.0))
    assert Link().seconds(np.array([0, 5])).tolist() == [0, 0]
    assert Link().seconds_one(5) == 0


def test_attention_reads_its_keys_or_computes_its_pairs() -> None:
    attention = Attention(
        sequence_seconds=1, seconds_per_pair=2, kv_seconds_per_token=30, rows_per_token=4, tiles=(16, 64)
    )
    assert attention.seconds(100, 1) == 1 + 101 * 30  # 4 rows padded to 16 are 4 queries: 4 x 101 x 2 is less
    assert attention.seconds(100, 16) == 1 + 116 * 30  # 64 rows are one tile: 16 x 108.5 x 2 = 3472 is less
    assert attention.seconds(100, 17) == 1 + 32 * 109 * 2  # 68 rows are two tiles
    assert attention.seconds(100, 17, foreign=True) == 1 + 32 * 100 * 2


@given(contexts=st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 9000)), min_size=1, max_size=9))
def test_many_sequences_cost_what_each_costs(contexts: list[tuple[int, int]]) -> None:
    for attention in (ROOFLINE.attention, MEASURED.attention, Attention(seconds_per_pair=1e-9)):
        columns = np.array(contexts, dtype=np.int64).T
        together = attention.seconds_many(columns[0], columns[1])
        assert together == pytest.approx([attention.seconds(*row) for row in contexts])


def test_measured_points_hold_inside_their_range_and_the_roofline_beyond() -> None:
    seconds = MEASURED.linear_seconds(np.arange(111))
    assert seconds[[0, 1, 6, 11, 50, 100]].tolist() == [0, 5, 10, 15, 15, 15]
    assert seconds[110] == 15 + 10 * 2.0
    attention = MEASURED.attention
    assert attention.seconds(99, 1) == 1 + 100 * 0.5
    assert attention.seconds(98, 3) == 1 + 100 * 1.5
    assert attention.seconds(0, 7) == 1 + 4 * 2.5
    assert attention.seconds(90, 20) == 1 + 100.5 * 2.5 * 2  # twice the last count


def test_a_warm_up_profile_is_additive() -> None:
    measured = StepProfile(1.0, 0.5, 0.25, 3.0)
    works = [Work(10, 1), Work(0, 3)]
    expected = 1 + 4 * 0.5 + (11 + 6) * 0.25 + 2 * 3
    for stages in (1, 4):
        predictor = Predictor(measured, Topology(stream=stages))
        assert predictor.stage_seconds(works) == pytest.approx(expected)
        assert predictor.latency_seconds(works) == pytest.approx(stages * expected)


@given(factor=st.floats(0.5, 2), attention=st.floats(0.5, 2))
def test_a_scaled_profile_scales_every_time(factor: float, attention: float) -> None:
    for profile, topology in ((ROOFLINE, TOPOLOGY), (MEASURED, Topology(stream=2))):
        scaled = Predictor(profile.scaled(factor, attention), topology)
        before = Predictor(profile, topology).explain([Work(1000, 64)], whole=True)
        after = scaled.explain([Work(1000, 64)], whole=True)
        assert after.attention == pytest.approx(before.attention * factor * attention)
        for term in ("linear", "collectives", "head", "hops"):
            assert getattr(after, term) == pytest.approx(getattr(before, term) * factor)


@pytest.mark.parametrize("profile", [ROOFLINE, MEASURED, Profile.of_warm_up(StepProfile(1, 2, 3, 4))])
def test_a_profile_survives_json(profile: Profile) -> None:
    assert Profile.from_json(profile.to_json()) == profile


def change(path: str, value: object) -> str:
    """The JSON of MEASURED with one value changed, or removed where it is None."""
    document = json.loads(MEASURED.to_json())
    *parents, name = path.split(".")
    part = document
    for parent in parents:
        part = part[parent]
    if value is None:
        del part[name]
    else:
        part[name] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"p\.json: the file: Invalid JSON"),
        ("[]", r"p\.json: the file: Input should be"),
        (change("layers", 0), r"p\.json: layers: .*greater than or equal to 1 \(found 0\)"),
        (change("layers", None), r"p\.json: layers: Field required"),
        (change("attention.sequence_seconds", -1), r"attention\.sequence_seconds: .*\(found -1\)"),
        (change("attention.lunch", 1), r"attention\.lunch: Unexpected"),
        (change("attention.tiles", [64, 16]), r"tiles must be ascending"),
        (change("attention.points", [[1, 2.0], [4, 1.0]]), r"points must ascend in queries, and never fall"),
        (change("attention.points", [[2, 2.0]]), r"points must begin with one query, not with 2"),
        (change("linear_points", [[1, 2.0], [4, 1.0]]), r"linear_points must ascend in tokens, and never"),
        (
            change("linear", [{"name": "down", "experts": 2, "experts_per_row": 3}]),
            r"linear\.0: .*experts_per_row is 3; it must be at most experts, which is 2",
        ),
        (change("format", 2), r"format: Input should be 1 \(found 2\)"),
        (change("launch_seconds", "NaN"), r"launch_seconds: .*\(found 'NaN'\)"),
    ],
)
def test_a_bad_profile_names_its_field_its_value_and_the_fix(text: str, message: str) -> None:
    with pytest.raises(ConfigInvalid, match=message) as caught:
        Profile.from_json(text, "p.json")
    assert "measure it again with `medha profile`" in str(caught.value)


@given(tokens=st.integers(1, 5000), more=st.integers(0, 500))
def test_linear_layers_never_take_less_for_more(tokens: int, more: int) -> None:
    for profile in (ROOFLINE, MEASURED, replace(MEASURED, linear=())):
        seconds = profile.linear_seconds(np.array([tokens, tokens + more]))
        assert seconds[0] <= seconds[1]
