"""What clients see when a part of `medha up` fails."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import httpx
import pytest

from .conftest import MODEL, free_port, start, stop, write_manifest


@pytest.mark.parametrize("module", ["medha_worker.rank", "medha_worker.controller"])
def test_a_killed_part_ends_open_streams_with_an_error_and_the_whole_with_status_1(
    module: str, checkpoint: Path, tmp_path: Path
) -> None:
    port = free_port()
    model = {"name": MODEL, "source": {"path": str(checkpoint)}, "maxModelLen": 4096}
    manifest = write_manifest(tmp_path / "tiny.yaml", checkpoint, port, model=model, kvCache={"size": "16Mi"})
    served = start(manifest, port, checkpoint)
    try:
        parts = served.parts()
        (victim,) = [part for part in parts if module in part.cmdline()]
        body = {"model": MODEL, "prompt": "go on", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", served.url + "/v1/completions", json=body, timeout=60) as response:
            lines = (line for line in response.iter_lines() if line)
            next(lines)
            os.kill(victim.pid, signal.SIGKILL)
            rest = list(lines)
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["type"] == "service_unavailable"
        assert rest[-1] == "data: [DONE]"
        assert served.process.wait(timeout=30) == 1
        assert not [part for part in parts if part.is_running()]
    finally:
        stop(served)
