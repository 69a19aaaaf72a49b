"""`medha up` with a host tier: documents that the device's pool cannot hold together are fetched, with the same texts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from medha_worker.model.model_config import ModelConfig

from .conftest import MODEL, Served, free_port, start, stop, write_manifest

POOL_TOKENS, HOST_TOKENS, DOCUMENT_TOKENS = 640, 4096, 400
DOCUMENTS = [
    [5 + (position * position * (3 + number) + position) % 91 for position in range(DOCUMENT_TOKENS)]
    for number in range(4)
]


def ask(served: Served, number: int, **fields: object) -> tuple[str, int]:
    """Return the text that follows a document, and how many of its tokens were cached."""
    body: dict[str, Any] = {
        "model": MODEL, "prompt": DOCUMENTS[number], "max_tokens": 12, "ignore_eos": True, "seed": 1,
    }  # fmt: skip
    answer = (
        httpx.post(served.url + "/v1/completions", json=body | fields, timeout=120).raise_for_status().json()
    )
    details = answer["usage"].get("prompt_tokens_details") or {}
    return answer["choices"][0]["text"], details.get("cached_tokens", 0)


def total(page: str, name: str) -> float:
    return sum(float(value) for value in re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", page, re.MULTILINE))


@pytest.mark.long
@pytest.mark.parametrize("grid", [{}, {"stream": 2}], ids=["one rank", "two stages"])
def test_documents_that_return_are_fetched(grid: dict[str, int], checkpoint: Path, tmp_path: Path) -> None:
    config = ModelConfig.from_directory(checkpoint)
    stages = grid.get("stream", 1)
    token_bytes = 4 * 2 * config.num_layers * config.num_kv_heads * config.head_dim // stages
    port = free_port()
    manifest = write_manifest(
        tmp_path / "tier.yaml",
        checkpoint,
        port,
        model={"name": MODEL, "source": {"path": str(checkpoint)}, "maxModelLen": 512},
        parallelism=grid,
        kvCache={
            "size": str(POOL_TOKENS * token_bytes),
            "tiers": {"host": {"size": str(HOST_TOKENS * token_bytes)}},
        },
    )
    served = start(manifest, port, checkpoint)
    try:
        for sampling in ({"temperature": 0.0}, {"temperature": 0.9}):
            computed = [ask(served, number, cache_salt=str(sampling), **sampling) for number in range(4)]
            fetched = [ask(served, number, cache_salt=str(sampling), **sampling) for number in range(4)]
            assert [text for text, _ in fetched] == [text for text, _ in computed]
            assert [cached for _, cached in computed] == [0] * 4
            assert min(cached for _, cached in fetched) >= DOCUMENT_TOKENS - 16
        assert ask(served, 0, cache_salt="another key")[1] == 0, "a salt keeps others out of the tier, too"
        served.wait_idle()
        page = served.controller_page()
        assert total(page, "medha_host_tier_hits_total") >= 6
        assert total(page, "medha_host_tier_fetched_tokens_total") >= 6 * (DOCUMENT_TOKENS - 16)
        for name in ("fetched_bytes_total", "offloaded_bytes_total", "bytes"):
            assert total(page, f"medha_host_tier_{name}") > 0
        assert total(page, "medha_host_tier_bytes") <= HOST_TOKENS * token_bytes
    finally:
        stop(served)
