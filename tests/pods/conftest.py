"""One checkpoint, and one replica of four pods behind a router, for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from medha_worker.checkpoints.presets import init_checkpoint

from .grid import Replica


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint") / "tiny"
    init_checkpoint(directory, preset="tiny", seed=0)
    return directory


@pytest.fixture(scope="module")
def replica(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    """Two stages of two lanes; tests are in an order in which each finds it serving."""
    found = Replica(tmp_path_factory.mktemp("replica"), checkpoint, stages=2, lanes=2)
    try:
        found.start()
        found.wait_ready()
        yield found
    finally:
        found.stop()
