"""Streams that outgrow the KV pool pause, and no text changes: neither theirs nor that of the chats beside them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from .conftest import MODEL, Served, free_port, start, stop, write_manifest

POOL_TOKENS = 1024
STREAMS, STREAM_TOKENS = 3, 460  # the pool holds two of them


def answer(served: Served, name: str, max_tokens: int, *, ignore_eos: bool) -> tuple[str, Any]:
    body = {
        "model": MODEL, "prompt": name, "max_tokens": max_tokens, "temperature": 1, "seed": 3, "ignore_eos": ignore_eos,
    }  # fmt: skip
    choice = (
        httpx.post(served.url + "/v1/completions", json=body, timeout=120)
        .raise_for_status()
        .json()["choices"][0]
    )
    return choice["text"], choice["finish_reason"]


@pytest.mark.long
def test_streams_larger_than_the_pool_go_on_with_the_text_that_each_has_alone(
    checkpoint: Path, tmp_path: Path
) -> None:
    port = free_port()
    manifest = write_manifest(
        tmp_path / "small.yaml", checkpoint, port,
        model={"name": MODEL, "source": {"path": str(checkpoint)}, "maxModelLen": 512},
        kvCache={"size": f"{POOL_TOKENS // 1024}Mi"},
        serviceClasses=[{"name": "default", "defaultOutputTokens": 64}],
    )  # fmt: skip
    asked = [(f"stream {index}", STREAM_TOKENS, True) for index in range(STREAMS)]
    asked += [(f"chat {index}", 150, False) for index in range(4)]
    served = start(manifest, port, checkpoint)
    try:
        with ThreadPoolExecutor(len(asked)) as threads:  # first, while 64 tokens are expected of each
            running = [
                threads.submit(answer, served, name, tokens, ignore_eos=endless)
                for name, tokens, endless in asked
            ]
            together = [one.result() for one in running]
        found = stepped_aside(served)
        alone = [answer(served, name, tokens, ignore_eos=endless) for name, tokens, endless in asked]
        served.wait_idle()
        assert (found > 0, stepped_aside(served) - found) == (True, 0)
    finally:
        stop(served)
    assert together == alone
    assert [reason for _, reason in together[:STREAMS]] == ["length"] * STREAMS


def stepped_aside(served: Served) -> float:
    """Return how often a sequence stepped aside, by the controller's own metrics."""
    lines = served.controller_page().splitlines()
    name = "medha_sequences_stepped_aside_total{"
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))
