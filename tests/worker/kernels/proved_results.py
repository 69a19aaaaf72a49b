"""Files that long tests write about what they have compared: the figures of docs/gpu.md that no GPU is needed for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmark import FOLDER, benchmark

ROOT = FOLDER.parent


def write_proved(name: str, test: str, **facts: Any) -> None:
    """Write `benchmarks/results/<name>.json`: what the file `test` has compared, with the commit and the command.

    A test calls this at its end, so that what is written has passed.
    """
    harness = benchmark("harness")
    command = f"pytest -m long {Path(test).relative_to(ROOT)}"
    document = {"revision": harness.revision(), "command": command, **facts}
    harness.write(FOLDER / "results" / f"{name}.json", document)
