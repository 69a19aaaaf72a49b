"""`medha up` with a model whose layers have sliding windows: a long prompt holds no more than windows there, and is found cached.

The replica may run as many sequences as by default, and the memory holds windows of a few alone.
"""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from medha_worker.checkpoints.presets import init_checkpoint
from medha_worker.model.model_config import ModelConfig

from .conftest import MODEL, Served, free_port, start, stop, write_manifest

pytestmark = pytest.mark.long

BLOCK_TOKENS, WINDOW_TOKENS, CHUNK_TOKENS = 16, 64, 256
WHOLE_BLOCKS = 200  # that the memory would hold if all layers kept their KV: fewer than the prompt takes
PROMPT = [5 + position * position % 91 for position in range(3250)]
PROMPT_BLOCKS = -(-len(PROMPT) // BLOCK_TOKENS)


def window_blocks(served: Served) -> dict[str, int]:
    """Return the blocks of the pool of windows, by state."""
    found = re.findall(
        r'^medha_kv_window_blocks\{lane="0",state="(\w+)"\} (\S+)$', served.controller_page(), re.MULTILINE
    )
    return {state: int(float(blocks)) for state, blocks in found}


def test_a_prompt_is_served_in_memory_that_does_not_hold_it_in_all_layers(tmp_path: Path) -> None:
    directory = tmp_path / "gemma"
    init_checkpoint(directory, preset="tiny", seed=0, architecture="gemma3_text", window_tokens=WINDOW_TOKENS)
    config = ModelConfig.from_directory(directory)
    layer_bytes = 2 * config.num_kv_heads * config.head_dim * BLOCK_TOKENS * 4
    size = WHOLE_BLOCKS * config.num_layers * layer_bytes
    port = free_port()
    manifest = write_manifest(
        tmp_path / "windows.yaml",
        directory,
        port,
        model={"name": MODEL, "source": {"path": str(directory)}, "maxModelLen": 3400},
        kvCache={"size": str(size)},
        scheduling={"maxChunkTokens": CHUNK_TOKENS},
    )
    served = start(manifest, port, directory)
    try:
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 20, "ignore_eos": True, "seed": 1}
        cached: list[int] = []
        for more in ([], [7] * 100):
            body["prompt"] = PROMPT + more
            answer = httpx.post(served.url + "/v1/completions", json=body, timeout=120).raise_for_status()
            cached.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
            served.wait_idle()
        assert cached == [0, len(PROMPT) // BLOCK_TOKENS * BLOCK_TOKENS]
        blocks = window_blocks(served)
        assert blocks["held"] == 0
        assert blocks["cached"] >= WINDOW_TOKENS // BLOCK_TOKENS
        assert sum(blocks.values()) < PROMPT_BLOCKS
    finally:
        stop(served)
