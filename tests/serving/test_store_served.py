"""Replicas that share a store of files: the second reads what the first has computed, one of another grid finds nothing, and all texts are the same."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmark import benchmark
from medha_worker.model.model_config import ModelConfig

from .conftest import MODEL, Served, free_port, start, stop, write_manifest
from .test_host_tier_served import total
from .tier_leaks import controller_of, remains_in_store, status_of, wait_for, wait_released

pytest.importorskip("obstore")
pytestmark = pytest.mark.timeout(600)  # it starts everything two times

DOCUMENT_TOKENS = 8000
"""So many that reading them is predicted to be faster than computing them on any machine, whatever a first read may take."""
BLOCK_TOKENS, OUTPUT_TOKENS = 32, 1200
PROMPT_BLOCKS = DOCUMENT_TOKENS // BLOCK_TOKENS
DOCUMENTS = [
    [5 + (position * position * (3 + number) + position) % 91 for position in range(DOCUMENT_TOKENS)]
    for number in range(6)
]


def answer(served: Served, number: int) -> tuple[str, int]:
    """Return the text that follows a document, and how many of its tokens were cached."""
    body = {
        "model": MODEL, "prompt": DOCUMENTS[number], "max_tokens": 12, "ignore_eos": True, "seed": 1, "temperature": 0.9,
    }  # fmt: skip
    found = httpx.post(served.url + "/v1/completions", json=body, timeout=120).raise_for_status().json()
    details = found["usage"].get("prompt_tokens_details") or {}
    return found["choices"][0]["text"], details.get("cached_tokens", 0)


def spoil(objects: list[Path]) -> None:
    """Truncate, flip or exchange each object of a store as it lies there."""
    contents = [path.read_bytes() for path in objects]
    for number, (path, content) in enumerate(zip(objects, contents, strict=True)):
        flipped = content[:-1] + bytes([content[-1] ^ 1])
        path.write_bytes([content[: len(content) // 2], flipped, contents[number - 1]][number % 3])


def wait_written(served: Served, timeout_seconds: float = 30) -> None:
    """Wait until a replica has written to its store."""
    end = time.monotonic() + timeout_seconds
    while total(served.controller_page(), "medha_store_tier_written_bytes_total") == 0:
        assert time.monotonic() < end, "nothing was written"
        time.sleep(0.1)


@pytest.mark.long
def test_a_second_replica_reads_what_the_first_has_computed_and_one_of_another_grid_does_not(
    checkpoint: Path, tmp_path: Path
) -> None:
    config = ModelConfig.from_directory(checkpoint)
    token_bytes = 4 * 2 * config.num_layers * config.num_kv_heads * config.head_dim
    replicas: list[Served] = []
    try:
        for name, tensor in (("first", 1), ("second", 1), ("of another grid", 2)):
            port = free_port()
            manifest = write_manifest(
                tmp_path / f"{name}.yaml",
                checkpoint,
                port,
                model={"name": MODEL, "source": {"path": str(checkpoint)}, "maxModelLen": 16384},
                parallelism={"tensor": tensor, "stream": 1, "kv": 1},
                kvCache={
                    "size": str(4 * DOCUMENT_TOKENS * token_bytes),
                    "blockSizeTokens": BLOCK_TOKENS,
                    "tiers": {
                        "host": {"size": str(16 * DOCUMENT_TOKENS * token_bytes)},
                        "store": {"url": f"file://{tmp_path}/shared", "bandwidth": "4Gi"},
                    },
                },
            )
            replicas.append(start(manifest, port, checkpoint))
        texts = []
        for served in replicas:
            texts.append([answer(served, number) for number in range(4)])
            served.wait_idle()
            if served is replicas[0]:
                wait_written(served)
        first, second, third = texts
        assert [text for text, _ in second] == [text for text, _ in third] == [text for text, _ in first]
        assert [cached for _, cached in (*first, *third)] == [0] * 8, "slices of another grid are never read"
        pages = [served.controller_page() for served in replicas]
        assert total(pages[1], "medha_store_tier_lookups_total") > 0
        # On a slow machine, a request may not wait until its load ends.
        assert total(pages[1], "medha_store_tier_loaded_bytes_total") > 0
        assert total(pages[2], "medha_store_tier_lookups_total") > 0
        assert total(pages[2], "medha_store_tier_loaded_bytes_total") == 0
        assert [total(page, "medha_store_tier_failures_total") for page in pages] == [0, 0, 0]
        assert [total(page, "medha_store_tier_rests") for page in pages] == [0, 0, 0]
        assert len((tmp_path / "shared" / "hash-key").read_text()) == 64
        there = set((tmp_path / "shared").rglob("*.kv"))
        asked = [answer(replicas[0], number)[0] for number in (4, 5)]
        wait_for("objects", lambda: len(set((tmp_path / "shared").rglob("*.kv")) - there) > 2)
        wait_released(replicas[0].address("scheduling"))
        spoil(sorted(set((tmp_path / "shared").rglob("*.kv")) - there))
        assert [answer(replicas[1], number)[0] for number in (4, 5)] == asked, "what is damaged is computed"
        for served in replicas:
            served.wait_idle()
            wait_released(served.address("scheduling"))
        assert not remains_in_store(tmp_path / "shared")
    finally:
        for served in replicas:
            stop(served)


@pytest.mark.long
@pytest.mark.parametrize("grid", [(1, 1, 1), (2, 1, 1)], ids=["one rank", "TP2"])
def test_a_replica_that_takes_over_reads_prompt_and_output_from_the_store(
    grid: tuple[int, int, int], tmp_path: Path
) -> None:
    """The first replica is killed in the midst of an output, once some of it is in the store."""
    tiers = {"host": {"size": "128Mi"}, "store": {"url": f"file://{tmp_path}/shared", "bandwidth": "4Gi"}}
    spec = {
        "model": {"name": "m", "source": {"path": str(tmp_path / "checkpoint")}, "maxModelLen": 14_000},
        "kvCache": {"size": "128Mi", "blockSizeTokens": BLOCK_TOKENS, "tiers": tiers},
    }
    fleet = benchmark("fleet").Fleet(tmp_path, (grid, grid), spec=spec, silence_seconds=6)
    try:
        fleet.start()
        text, old = "", None
        for pieces, piece in enumerate(streamed(fleet.router.url, "killed")):
            text += piece
            if old is None and pieces % 50 == 49:
                running = max(fleet.replicas, key=fleet.running)
                written = status_of(controller_of(running.folder))["store"]["written"]
                if written > PROMPT_BLOCKS:
                    old = running
                    old.signal(signal.SIGKILL)
        assert old is not None, "no output was written"
        (new,) = (one for one in fleet.replicas if one is not old)
        fleet.wait_idle()
        store = status_of(controller_of(new.folder))["store"]
        assert store["loaded"] > PROMPT_BLOCKS, "output was read, too"
        assert store["failures"] == 0
        assert text == "".join(streamed(fleet.router.url, "alone"))
        fleet.wait_idle()
        wait_released(controller_of(new.folder))
    finally:
        fleet.close()


def streamed(url: str, salt: str) -> Iterator[str]:
    """Yield the pieces of a sampled text."""
    body: dict[str, Any] = {
        "model": "m", "prompt": DOCUMENTS[0], "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "seed": 1,
        "temperature": 0.9, "stream": True, "cache_salt": salt,
    }  # fmt: skip
    with httpx.stream("POST", url + "/v1/completions", json=body, timeout=300) as response:
        response.raise_for_status()
        for event in benchmark("served").events_of(response.iter_lines()):
            yield "".join(str(choice["text"]) for choice in event["choices"])
