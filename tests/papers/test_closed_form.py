"""The papers' claims in closed form: counts against hand-computed ones, and the fixed rule of the verdict."""

from __future__ import annotations

from math import inf, log

import pytest

from medha.cost.hardware import H100, LLAMA3_8B, LLAMA3_70B
from medha_papers import closed_form_rows, context_parallel_rows
from medha_papers.claims import (
    CORNERS,
    NOMINAL,
    Capacity,
    Figure,
    above,
    modelled,
    more_than,
    untestable,
    weakest,
)

EXPECTED_VERDICTS = {
    "T10": "reproduced",
    "T15": "refuted",  # striped ring attention would be as fast
    "T16": "direction only",
    "T17": "direction only",
    "T21": "direction only",
    "T22": "direction only",
    "T23": "refuted",  # paper A's 2.4 EFLOP is no count of ours
    "T27": "direction only",
    "T28": "direction only",
    "T29": "direction only",
    "T30": "direction only",
    "T31": "reproduced",
    "T32": "refuted",  # appendix D's formula as printed
}


# --- the rule ------------------------------------------------------------------------------------------


def test_a_figure_inside_the_band_is_reproduced() -> None:
    assert Figure("f", "s", (1.0, 1.0), 1.05, (0.95, 1.15)).verdict == "reproduced"


def test_a_figure_outside_the_band_keeps_its_direction_or_is_refuted() -> None:
    for direction, verdict in ((True, "direction only"), (False, "refuted"), (None, "refuted")):
        assert Figure("f", "s", (2.0, 2.0), 1.0, (0.9, 1.1), direction).verdict == verdict


def test_the_order_of_a_formula_has_to_hold_at_every_corner_of_the_band() -> None:
    def verdict(limit: float) -> str:
        return modelled("f", "x", 3.0, lambda c: 2.0 * c.compute, order=more_than(limit)).verdict

    assert verdict(1.7) == "direction only"
    assert verdict(1.9) == "refuted", "it holds at nominal capacity, and not 10 % below"


def test_a_range_of_the_paper_is_reproduced_where_it_meets_the_band() -> None:
    assert Figure("f", "x", (1.6, 1.8), 1.5, (1.4, 1.6)).verdict == "reproduced"
    assert Figure("f", "x", (70.0, inf), 80.0, (75.0, 85.0)).verdict == "reproduced"
    assert Figure("f", "x", (70.0, inf), 50.0, (45.0, 55.0)).verdict == "refuted"


def test_a_figure_without_its_input_is_not_testable() -> None:
    assert untestable("f", "s", 3.0, "the trace").verdict == "not testable"


def test_a_row_is_as_good_as_its_weakest_figure_that_could_be_tested() -> None:
    assert weakest(["reproduced", "not testable"]) == "reproduced"
    assert weakest(["reproduced", "direction only"]) == "direction only"
    assert weakest(["refuted", "direction only"]) == "refuted"
    assert weakest(["not testable"]) == "not testable"


def test_the_band_is_the_hull_over_every_corner_of_the_capacities() -> None:
    figure = modelled("f", "s", 1.0, lambda c: c.bandwidth / c.compute)
    assert figure.band == pytest.approx((0.9 / 1.1, 1.1 / 0.9))
    assert len(CORNERS) == 16


def test_an_open_end_is_null_in_json() -> None:
    row = closed_form_rows.t15().to_json()
    assert row["figures"][0]["paper"] == [70.0, None]
    assert above(3.0) == (3.0, inf)


# --- papers A and B ------------------------------------------------------------------------------------


def test_a_prefill_is_counted_causally_or_in_full() -> None:
    # 70B at 1M: 2 x 68.5e9 weights x 1e6 tokens, and 4 x 80 x 8192 x 1e12 (or half of it).
    linear = 2 * 80 * LLAMA3_70B.layer_parameters * 1e6
    assert closed_form_rows.square_flops(LLAMA3_70B, 1e6) == pytest.approx(linear + 2.62144e18)
    assert closed_form_rows.causal_flops(LLAMA3_70B, 1e6) == pytest.approx(linear + 1.31072e18)


def test_the_saturating_chunk_is_the_ridge_over_the_sharing_of_kv_heads() -> None:
    assert closed_form_rows.saturating_chunk_tokens(LLAMA3_70B, H100, NOMINAL) == pytest.approx(
        989e12 / 3.35e12 / 8
    )
    assert closed_form_rows.saturating_chunk_tokens(LLAMA3_8B, H100, NOMINAL) == pytest.approx(
        989e12 / 3.35e12 / 4
    )


def test_a_pipeline_of_equal_chunks_ends_after_chunks_plus_stages_less_one() -> None:
    # 512 tokens, so attention matters little: 8 chunks over 4 stages take 11 slots of 32.
    one, four = (
        closed_form_rows.spp_prefill_seconds(LLAMA3_8B, H100, 8 * 64, stages, chunk_tokens=64)
        for stages in (1, 4)
    )
    hops = 3 * (19e-6 + 64 * 4096 * 2 / 8 / 36e9)
    assert (four - hops) / one == pytest.approx(11 / 32, rel=2e-3)


def test_an_unbalanced_ring_takes_nearly_twice_as_long_as_a_striped_one() -> None:
    striped, plain = (
        closed_form_rows.ring_prefill_seconds(LLAMA3_8B, H100, 4_000_000, 16, balanced=balanced)
        for balanced in (True, False)
    )
    assert plain / striped == pytest.approx((0.5 + 15) / 8, rel=0.02)


def test_the_longest_prompt_by_compute_takes_exactly_the_ttft() -> None:
    tokens = closed_form_rows.longest_by_compute(LLAMA3_8B, H100, 8, 30.0, NOMINAL)
    assert closed_form_rows.causal_flops(LLAMA3_8B, tokens) == pytest.approx(8 * 30 * 989e12)


def test_the_fitted_floor_gives_the_cell_that_it_was_fitted_to() -> None:
    saved = 1 - closed_form_rows.kvp_decode_seconds(10e6, 2, NOMINAL) / closed_form_rows.kvp_decode_seconds(
        10e6, 1, NOMINAL
    )
    assert saved == pytest.approx(0.40, abs=0.002)


# --- paper C ---------------------------------------------------------------------------------------------


def test_the_model_of_table_4_errs_by_four_percent_on_average_and_fourteen_at_most() -> None:
    errors = [
        abs(figure.ours / figure.paper[0] - 1)
        for figure in context_parallel_rows.t28().figures[:-1]
        if figure.ours is not None
    ]
    assert len(errors) == 28
    assert sum(errors) / 28 == pytest.approx(0.039, abs=0.004)
    assert max(errors) == pytest.approx(0.141, abs=0.005)


def test_flops_of_405b_at_one_million_tokens_are_those_of_appendix_a() -> None:
    assert context_parallel_rows.total_flops(1e6) == pytest.approx(8.1e17 + 4.13e18, rel=0.01)


def test_a_message_that_hides_behind_attention_costs_nothing() -> None:
    full = context_parallel_rows.ttft_seconds(128_000, 0, 4, pass_q=False, capacity=NOMINAL)
    faster_link = context_parallel_rows.ttft_seconds(128_000, 0, 4, pass_q=False, capacity=Capacity(link=1.1))
    assert full == faster_link
    exposed = context_parallel_rows.ttft_seconds(1280, 126_720, 4, pass_q=False, capacity=NOMINAL)
    assert exposed > context_parallel_rows.ttft_seconds(
        1280, 126_720, 4, pass_q=False, capacity=Capacity(link=1.1)
    )


def test_one_host_rings_with_nobody() -> None:
    seconds = context_parallel_rows.ttft_seconds(128_000, 0, 1, pass_q=False, capacity=NOMINAL)
    attention = 2 * 128_000**2 * 16384 * 126 / (8 * 515e12)
    linear = 2 * 405e9 * 128_000 / (8 * 560e12)
    assert seconds == pytest.approx(0.70 + attention + linear)


def test_the_printed_rule_of_appendix_d_never_chooses_pass_kv() -> None:
    assert context_parallel_rows.empirical_preference(128_000, 128_000) == pytest.approx(
        12.112 - 1.059 * log(128_000)
    )
    assert all(
        context_parallel_rows.empirical_preference(t, 128_000) < 0 for t, *_ in context_parallel_rows.TABLE_4
    )


# --- all rows --------------------------------------------------------------------------------------------


def test_every_row_has_the_verdict_that_the_report_states() -> None:
    assert {row.id: row.verdict for row in closed_form_rows.rows()} == EXPECTED_VERDICTS


def test_every_figure_lies_inside_its_own_band_and_every_row_names_its_inputs() -> None:
    for row in closed_form_rows.rows():
        assert row.inputs, row.id
        for figure in row.figures:
            if figure.ours is not None and figure.band is not None:
                assert figure.band[0] <= figure.ours <= figure.band[1], (row.id, figure.name)
