"""The decisions of `benchmarks/router.py`: its prompts, and its claims."""

from __future__ import annotations

import sys

import pytest

from benchmark import benchmark
from medha_router.tokenizer_bundle import Bundle

MEASURED = benchmark("router")
HARNESS = sys.modules["harness"]


@pytest.mark.parametrize("tokens", [100, 20_000])
def test_prompts_have_the_length_and_never_begin_alike(bundle: Bundle, tokens: int) -> None:
    prompts = MEASURED.Prompts("The quick brown fox jumps over the lazy dog. " * 50, bundle)
    made = [prompts.of(tokens) for _ in range(5)]
    for text in made:
        assert len(bundle.encode(text, add_special_tokens=False)) == pytest.approx(tokens, rel=0.1)
    assert len({text[:20] for text in made}) == 5


@pytest.mark.parametrize(
    ("cpu_ms", "library_ms", "kib", "p99_ms", "holding"),
    [(1.0, 1.1, 10.0, 0.1, 4), (1e6, 1.1e6, 10.0, 0.1, 3), (1.0, 0.1, 100.0, 1e6, 1)],
)
def test_claims_fail_beyond_their_goals(
    cpu_ms: float, library_ms: float, kib: float, p99_ms: float, holding: int
) -> None:
    loop = HARNESS.Loop()
    loop.sample(3)
    rows = {"medha": {"100K": {"cpu_ms": cpu_ms, "library_ms": library_ms}}}
    found = MEASURED.claims(rows, {"kib_per_stream": kib}, {"p99_ms": p99_ms}, loop)
    assert sum(map(HARNESS.holds, found)) == holding
