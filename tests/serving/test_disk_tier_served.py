"""`medha up` with a disk tier: documents are found after everything was stopped, with the same texts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from medha_worker.model.model_config import ModelConfig

from .conftest import MODEL, Served, free_port, start, stop, write_manifest
from .test_host_tier_served import POOL_TOKENS, ask, total
from .tier_leaks import status_of, wait_for, wait_released

pytestmark = pytest.mark.timeout(600)  # it starts everything two or three times


@pytest.mark.parametrize(
    ("grid", "runs"),
    [
        pytest.param({}, ("first", "second"), id="one rank", marks=pytest.mark.long),
        pytest.param({}, ("first", "damaged"), id="one rank, damaged files", marks=pytest.mark.long),
        pytest.param({"stream": 2}, ("first", "second", "damaged"), id="two stages", marks=pytest.mark.long),
    ],
)
def test_documents_survive_a_restart(
    grid: dict[str, int],
    runs: tuple[str, ...],
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = tmp_path / "slow"
    monkeypatch.setenv("TEST_SLOW_DISK", str(slow))
    faults = str(Path(__file__).parent / "disk_faults")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([faults, *filter(None, [os.environ.get("PYTHONPATH")])]))
    config = ModelConfig.from_directory(checkpoint)
    token_bytes = 4 * 2 * config.num_layers * config.num_kv_heads * config.head_dim // grid.get("stream", 1)
    kept = tmp_path / "kept"
    port = free_port()
    manifest = write_manifest(
        tmp_path / "tier.yaml",
        checkpoint,
        port,
        model={"name": MODEL, "source": {"path": str(checkpoint)}, "maxModelLen": 512},
        parallelism=grid,
        kvCache={
            "size": str(POOL_TOKENS * token_bytes),
            "tiers": {
                "host": {"size": str(2 * POOL_TOKENS * token_bytes)},
                "disk": {"size": "64Mi", "hostPath": str(kept)},
            },
        },
    )
    texts: list[list[str]] = []
    for run in runs:
        if run == "damaged":
            for path in kept.rglob("*.kv"):
                data = bytearray(path.read_bytes())
                data[-1] ^= 1
                path.write_bytes(data)
        served = start(manifest, port, checkpoint)
        try:
            if run == "first":
                texts.append(write_slowly(served, slow))
            answers = [ask(served, number, temperature=0.0) for number in range(4)]
            again = [ask(served, number, temperature=0.0) for number in range(4)]
            assert [text for text, _ in again] == [text for text, _ in answers]
            assert ask(served, 0, cache_salt="another key")[1] == 0, "a salt keeps others out of files, too"
            served.wait_idle()
            wait_released(served.address("scheduling"))
            page = served.controller_page()
            assert total(page, "medha_disk_tier_off") == 0
            wait_same_bytes(served)
            if run == "second":
                # On a slow machine, a request may not wait until its load ends.
                assert total(page, "medha_disk_tier_hits_total") > 0
                assert total(page, "medha_disk_tier_loaded_bytes_total") > 0
            if run == "damaged":
                assert total(page, "medha_disk_tier_failures_total") > 0
            texts.append([text for text, _ in answers])
        finally:
            stop(served)
        assert not list(kept.rglob("*.partial"))
    assert all(text == texts[0] for text in texts)


def wait_same_bytes(served: Served) -> None:
    """Wait until the metrics, which follow within a second, show the bytes that `/status` shows."""
    tiers = {one["tier"]: one for one in status_of(served.address("scheduling"))["tiers"]}
    assert tiers["host"]["read_bytes"] > 0
    assert tiers["host"]["read_seconds_per_gib"] > 0
    shown = {
        "medha_host_tier_fetched_bytes_total": tiers["host"]["read_bytes"],
        "medha_host_tier_offloaded_bytes_total": tiers["host"]["written_bytes"],
        "medha_disk_tier_loaded_bytes_total": tiers["disk"]["read_bytes"],
        "medha_disk_tier_written_bytes_total": tiers["disk"]["written_bytes"],
    }

    def are_the_same() -> bool:
        page = served.controller_page()
        return {name: total(page, name) for name in shown} == shown

    wait_for("metrics with the bytes of the status", are_the_same)


def write_slowly(served: Served, slow: Path) -> list[str]:
    """Ask about three documents while the disk hangs, and then about another one; return the texts.

    All that was evicted gets into files.
    """
    controller = served.address("scheduling")

    def disk_tier() -> dict[str, Any]:
        found: dict[str, Any] = status_of(controller)["lanes"][0]["disk_tier"]
        return found

    slow.write_text("25")
    answers = [ask(served, number, temperature=0.0) for number in range(3)]
    wait_for("blocks that wait for the disk", lambda: disk_tier()["waiting"] > 0)
    slow.unlink()
    answers.append(ask(served, 3, temperature=0.0))
    wait_released(controller)
    assert [cached for _, cached in answers] == [0] * 4
    assert disk_tier()["skipped"] == 0
    assert disk_tier()["written"] >= 40, "the first documents, of 25 blocks each"
    return [text for text, _ in answers]
