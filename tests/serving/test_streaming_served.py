"""`medha up` with streaming: prompts that are larger than the KV pool have the texts of a pool that holds them."""

from __future__ import annotations

from pathlib import Path

import pytest

from medha_worker.model.model_config import ModelConfig

from .conftest import MODEL, free_port, start, stop, write_manifest
from .test_host_tier_served import ask, total

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]  # it starts everything twice

AMPLE_TOKENS, POOL_TOKENS = 2048, 128  # a prompt of `ask` is larger than the second


@pytest.mark.parametrize("grid", [{}, {"stream": 2}], ids=["one rank", "two stages"])
def test_prompts_larger_than_the_pool_have_the_same_texts(
    grid: dict[str, int], checkpoint: Path, tmp_path: Path
) -> None:
    config = ModelConfig.from_directory(checkpoint)
    token_bytes = 4 * 2 * config.num_layers * config.num_kv_heads * config.head_dim // grid.get("stream", 1)
    texts: list[list[str]] = []
    streaming = {"streaming": {"size": str(512 * token_bytes)}}
    for cache in (
        {"size": str(AMPLE_TOKENS * token_bytes)},
        {"size": str(POOL_TOKENS * token_bytes)} | streaming,
    ):
        port = free_port()
        manifest = write_manifest(
            tmp_path / "replica.yaml",
            checkpoint,
            port,
            model={"name": MODEL, "source": {"path": str(checkpoint)}, "maxModelLen": 512},
            parallelism=grid,
            kvCache=cache,
        )
        served = start(manifest, port, checkpoint)
        try:
            greedy = [ask(served, number, temperature=0.0)[0] for number in range(3)]
            sampled = [ask(served, number, temperature=0.9, seed=number)[0] for number in range(3)]
            texts.append(greedy + sampled)
            served.wait_idle()
            page = served.controller_page()
            streamed = total(page, "medha_streamed_sequences_total")
            assert streamed == (6 if "streaming" in cache else 0)
            assert (total(page, "medha_streamed_bytes_total") > 0) == ("streaming" in cache)
            assert total(page, "medha_streaming_bytes") == 0, "all host memory is free again"
        finally:
            stop(served)
    assert texts[0] == texts[1]
