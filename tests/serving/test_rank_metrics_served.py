"""What a running replica exports of its ranks: where their time went, and what they computed."""

from __future__ import annotations

import time

import httpx

from medha.cost.attention_pairs import attention_pairs
from medha.cost.hardware import ModelShape
from medha.cost.step_estimates import StepCosts, StepWork
from medha_worker.model.model_config import ModelConfig

from .conftest import MODEL, Served

PROMPT, OUTPUT = 700, 300


def shape_of(served: Served) -> ModelShape:
    config = ModelConfig.from_directory(served.checkpoint)
    return ModelShape(
        "tiny", config.num_layers, config.hidden_size, config.num_query_heads, config.num_kv_heads, config.head_dim,
        config.intermediate_size, config.vocab_size, dtype_bytes=4, kv_dtype_bytes=4,
    )  # fmt: skip


def test_a_rank_reports_what_a_request_takes(served: Served) -> None:
    served.wait_idle()
    before, began = served.rank_samples(is_idle=True), time.monotonic()
    ids = [5 + position * position % 91 for position in range(PROMPT)]  # no other test has cached it
    body = {"model": MODEL, "prompt": ids, "max_tokens": OUTPUT, "ignore_eos": True, "temperature": 0}
    usage = (
        httpx.post(served.url + "/v1/completions", json=body, timeout=60).raise_for_status().json()["usage"]
    )
    assert usage.get("prompt_tokens_details", {}).get("cached_tokens", 0) == 0
    served.wait_idle()
    after = served.rank_samples(is_idle=True)
    seconds = time.monotonic() - began

    def growth(name: str, label: str = "") -> float:
        return after[f"medha_rank_{name}", "0", label] - before.get((f"medha_rank_{name}", "0", label), 0.0)

    costs = StepCosts.of(shape_of(served))
    # One chunk, then decodes: each reads all weights. A few may have run ahead of the last token.
    chunk = StepWork(PROMPT, 1, attention_pairs(PROMPT, 0), PROMPT)
    works = [chunk, *(StepWork(1, 1, length, length) for length in range(PROMPT + 1, PROMPT + OUTPUT))]
    for name, expected in (
        ("estimated_flops", sum(map(costs.flops, works))),
        ("estimated_read_bytes", sum(map(costs.read_bytes, works))),
    ):
        assert expected <= growth(name) <= 1.05 * expected, name
    assert OUTPUT <= growth("steps") <= OUTPUT + 4
    parts = {part: growth("step_seconds", part) for part in ("prepare", "forward", "sample")}
    assert min(parts.values()) > 0
    assert sum(parts.values()) <= seconds
    assert not any(
        ("medha_rank_step_seconds", "0", part) in after for part in ("receive", "all_reduce", "exchange")
    )
    total, used, free = (after["medha_rank_memory_bytes", "0", state] for state in ("total", "used", "free"))
    assert 0 < used < total
    assert 0 < free < total
    of_devices = ("clock", "throttled", "temperature", "power", "utilisation", "xid", "peak", "last")
    assert not any(name.startswith(f"medha_rank_{one}") for name, _, _ in after for one in of_devices)
