"""`medha up` with keys and values in FP8: pools have room for as many tokens as they say."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from medha.errors import ConfigInvalid
from medha_cli.manifest import read_manifest
from medha_worker.model.model_config import ModelConfig

from .conftest import MODEL, free_port, start, stop, write_manifest

BLOCK_TOKENS, POOL_BYTES = 16, 2**20
PROMPT = [5 + position * position % 91 for position in range(400)]


@pytest.mark.long
@pytest.mark.parametrize("lanes", [1, 2], ids=["one rank", "two lanes"])
def test_pools_have_room_for_a_byte_for_each_number(lanes: int, checkpoint: Path, tmp_path: Path) -> None:
    config = ModelConfig.from_directory(checkpoint)
    numbers = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    port = free_port()
    manifest = write_manifest(
        tmp_path / "fp8.yaml",
        checkpoint,
        port,
        model={"name": MODEL, "source": {"path": str(checkpoint)}, "maxModelLen": 512},
        parallelism={"kv": lanes},
        kvCache={"dtype": "fp8", "size": str(POOL_BYTES), "tokensPerLane": 256},
    )
    served = start(manifest, port, checkpoint)
    try:
        body = {
            "model": MODEL, "prompt": PROMPT, "max_tokens": 32, "ignore_eos": True, "seed": 1,
        }  # fmt: skip
        answer = httpx.post(served.url + "/v1/completions", json=body, timeout=60).raise_for_status()
        assert answer.json()["choices"][0]["text"]
        blocks = re.findall(r"^medha_kv_blocks\{.*\} (\S+)$", served.controller_page(), re.MULTILINE)
        assert sum(map(float, blocks)) == lanes * (POOL_BYTES // (BLOCK_TOKENS * numbers))
    finally:
        stop(served)


def test_an_unknown_data_type_is_refused_by_name(checkpoint: Path, tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path / "m.yaml", checkpoint, free_port(), kvCache={"dtype": "int8"})
    with pytest.raises(ConfigInvalid, match=r"spec\.kvCache\.dtype.*'auto' or 'fp8'.*int8"):
        read_manifest(manifest)
