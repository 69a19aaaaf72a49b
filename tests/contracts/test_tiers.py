"""The decisions of `benchmarks/tiers.py` and `benchmarks/handoff.py`: their figures, and at which length a claim is judged."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from benchmark import benchmark

RATES = {
    "long_copy_bytes_per_second": 1000, "sequential_bytes_per_second": 100, "disk_bytes_per_second": 90,
    "store_bytes_per_second": 70, "disk_ratio": 0.9, "store_ratio": 0.7,
}  # fmt: skip


@pytest.fixture(scope="module")
def tiers() -> ModuleType:
    return benchmark("tiers")


@pytest.fixture(scope="module")
def handoff() -> ModuleType:
    return benchmark("handoff")


def measured(tiers: ModuleType, seconds: float, computed: int, **fields: Any) -> Any:
    """A round with two documents that return in `seconds`, and later both at once in twice and four times that."""
    found = tiers.Measured(
        ttft=[seconds, seconds], again_ttft=[0.1, 0.1], at_once_ttft=[2 * seconds, 4 * seconds],
        computed_tokens=computed, prompt_tokens=100, texts=["a", "b", "c", "d"], deadline=4.0,
    )  # fmt: skip
    return replace(found, **fields)


def found(tiers: ModuleType) -> dict[str, list[Any]]:
    return {
        "none": [measured(tiers, 2.0, 100)],
        "host": [measured(tiers, 1.0, 10, fetched_bytes=400.0)],
        "disk": [measured(tiers, 1.5, 20, fetched_bytes=400.0, loaded_bytes=200.0, skipped_bytes=7.0)],
        "store": [measured(tiers, 1.5, 20, texts=["a", "b", "c", "x"])],
        "vLLM": [measured(tiers, 4.0, 100, deadline=0.0)],
    }


def by_tier(tiers: ModuleType, case: Any) -> dict[str, Any]:
    return {row["tier"]: row for row in tiers.rows_of(case, found(tiers), RATES)}


def test_the_bound_is_the_time_of_the_bytes_and_of_a_turn_whose_kv_is_on_the_device(
    tiers: ModuleType,
) -> None:
    rows = by_tier(tiers, tiers.CASES[0])
    assert rows["host"]["bound_seconds"] == pytest.approx(200 / 1000 + 0.1)
    assert rows["disk"]["bound_seconds"] == pytest.approx(200 / 1000 + 100 / 100 + 0.1)
    assert rows["none"]["bound_seconds"] is rows["vLLM"]["bound_seconds"] is None


def test_turns_are_on_time_within_the_deadline_of_the_router_and_those_of_vllm_within_that_of_no_tier(
    tiers: ModuleType,
) -> None:
    rows = by_tier(tiers, tiers.CASES[0])
    assert {tier: row["on_time_percent"] for tier, row in rows.items()} == {
        "none": 50, "host": 100, "disk": 50, "store": 50, "vLLM": 0,
    }  # fmt: skip
    assert rows["vLLM"]["deadline_seconds"] == 4.0


def test_a_claim_is_judged_at_its_worst_length(tiers: ModuleType) -> None:
    short, long = tiers.CASES[0], tiers.CASES[-1]
    rows = tiers.rows_of(short, found(tiers), RATES)
    slow = found(tiers) | {"host": [measured(tiers, 1.8, 90)]}
    del slow["vLLM"]
    rows = tiers.kept(rows, tiers.rows_of(long, slow, RATES))
    claims = {
        one["name"]: one
        for one in tiers.claims_of(
            {"rows": rows, "rates": {"small": RATES}, "fetches": {}, "vllm_faults": {}}
        )
    }
    length = f"documents of {short.document_tokens} to {long.document_tokens} tokens"
    ttft = claims[f"host: median TTFT against no tier, the largest of {length}"]
    assert (ttft["value"], ttft["peer"]) == (0.9, f"{long.document_tokens} tokens, no tier: 2000 ms")
    assert claims[f"host: prompt tokens computed against no tier, the most of {length}"]["value"] == 0.9
    on_time = claims[
        f"disk: more turns on time than without a tier, if all ask at once, the fewest of {length}"
    ]
    assert on_time["value"] == 0
    assert claims["store: texts that are the same"]["value"] == 75
    name = f"host: median TTFT against vLLM, the largest of documents of {short.document_tokens} tokens"
    assert claims[name]["value"] == 0.25
    assert (
        claims["small: rate of reads from a store in files, against one long read of the disk"]["value"]
        == 0.7
    )


def test_rows_of_a_length_take_the_place_of_earlier_ones(tiers: ModuleType) -> None:
    short, long = tiers.CASES[0], tiers.CASES[1]
    rows = tiers.kept(tiers.rows_of(long, found(tiers), RATES), tiers.rows_of(short, found(tiers), RATES))
    again = found(tiers)
    del again["vLLM"]
    rows = tiers.kept(rows, tiers.rows_of(short, again, RATES))
    lengths = [row["document_tokens"] for row in rows]
    assert lengths == [short.document_tokens] * 4 + [long.document_tokens] * 5


def test_each_case_has_a_working_set_of_four_pools_and_a_pool_for_one_document(tiers: ModuleType) -> None:
    for case in (*tiers.CASES, *tiers.QUICK):
        assert case.documents * case.prompt_tokens >= 4 * case.pool_tokens
        assert 0.95 * case.pool_tokens > case.prompt_tokens + tiers.TURN_TOKENS
        assert 2 <= case.returning <= case.documents


def test_a_peer_that_does_not_start_is_noted_with_its_first_error(tiers: ModuleType) -> None:
    error = RuntimeError("/usr/bin/vllm serve x did not become ready")
    assert tiers.fault_of(error) == "RuntimeError('vllm serve x did not become ready')"
    error.add_note('  File "x.py"\nRuntimeError: no GPU\nmore\nValueError: another one')
    assert tiers.fault_of(error) == "RuntimeError: no GPU"


def test_requests_that_move_are_compared_with_those_that_do_not(handoff: ModuleType) -> None:
    answer = handoff.Answer(1.0, 0.02, 0.1, "text", "")
    slow = replace(answer, tpot_seconds=0.03)
    late = replace(answer, ttft_seconds=1.2, text="other")
    mixed = handoff.Round([answer, answer], [answer, answer], 0)
    split = handoff.Round([answer, slow], [slow, slow], 3)
    moved = [[handoff.Pause(0.5, one, 0.02, 2000) for one in (answer, late)]]
    rounds, lengths = {"mixed": [mixed], "split": [split]}, (1000, 2000)
    rows = handoff.served_rows(lengths, 4096, rounds, moved)
    assert [(row["way"], row["requests_beside_each_other"], row["prompt_tokens"]) for row in rows] == [
        ("mixed", 1, 1000), ("split", 1, 1000), ("moved", 1, 1000), ("mixed", 1, 2000), ("split", 1, 2000),
        ("moved", 1, 2000), ("mixed", 4, 4096), ("split", 4, 4096),
    ]  # fmt: skip
    claims = {one["name"]: one for one in handoff.served_claims(lengths, rows, rounds, moved)}
    assert claims["split: TTFT against mixed, the largest of all lengths"]["value"] == 1
    assert claims["split: TPOT against mixed, the largest of all lengths"]["value"] == 1.5
    assert (
        claims["moved: TTFT against mixed, the largest of all lengths"]["peer"]
        == "2000 tokens, mixed: 1000.0 ms"
    )
    assert claims["split: TPOT against mixed, 4 requests beside each other"]["value"] == 1.5
    assert claims["split: requests that moved to the replica that decodes"]["value"] == 75
    assert claims["texts that are the same mixed, split and moved"]["value"] == pytest.approx(
        100 * 5 / 6, abs=1e-3
    )
